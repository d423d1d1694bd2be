"""What is kept of earlier tokens: keys, values and states of a sequence, its rotary positions, and its checkpoints."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.caches.dtypes import KvDtype
    from moe_pack.runtime.model.caches.kv_cache import (
        Angles,
        Batch,
        Checkpoint,
        Chosen,
        EntryCache,
        KVCache,
        LayerCache,
        LayerRopes,
        Rope,
        each_sequence,
        rotate,
    )
    from moe_pack.runtime.model.caches.sequence import CachedSequence, Follower, joined_angles
    from moe_pack.runtime.model.caches.storage import (
        RowStorage,
        RunningSoftmax,
        block_sizes,
        layer_cache_bytes,
        plain_dtype,
        row_storages,
    )
else:
    __getattr__ = face(__name__)
