"""Text through a model, one layer at a time."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.forward.experts import (
        CHUNK_TOKENS,
        HOT_SPARSITIES,
        KINDS,
        NUM_BINS,
        ExpertActivity,
        ExpertInputs,
        Histogram,
        KeptInputs,
        input_bytes,
        input_chunks,
        input_pieces,
        measure_expert,
        num_kept_sequences,
        run_counted,
        sample_places,
    )
    from moe_pack.calib.forward.layers import (
        Context,
        LayerStates,
        LayerTokens,
        Sequences,
        check_length,
        num_workers,
        stack_of,
        stack_tokens,
    )
    from moe_pack.calib.forward.shared import in_order
    from moe_pack.calib.forward.store import (
        PROFILE_FILE,
        Array,
        NamedArrays,
        ProfileStore,
        made_with,
        packed_source_digest,
        read_all_arrays,
        source_digest,
        tidy,
        work_store,
    )
    from moe_pack.calib.forward.text import Tokens, num_held_out, read_tokens, unseen_tokens
    from moe_pack.calib.forward.weights import DerivedWeights, LayerwiseWeights
else:
    __getattr__ = face(__name__)
