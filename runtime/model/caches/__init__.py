"""Caches of a layer: stored keys and values, states, and rotary positions."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.caches.dtypes import KvDtype
    from moe_pack.runtime.model.caches.layer_cache import Batch, Chosen, LayerCache
    from moe_pack.runtime.model.caches.ropes import Angles, LayerRopes
    from moe_pack.runtime.model.caches.states import LayerState
    from moe_pack.runtime.model.caches.storage import RowStorage, block_sizes, plain_dtype
else:
    __getattr__ = face(__name__)
