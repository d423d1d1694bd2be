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
        kept_sequences,
        measure_expert,
        num_kept_sequences,
        run_counted,
        sample_places,
    )
    from moe_pack.calib.forward.layers import (
        LayerStates,
        LayerTokens,
        LayerwiseWeights,
        Sequences,
        check_length,
        num_workers,
        stack_of,
        stack_tokens,
        store_states,
        whole_states,
    )
    from moe_pack.calib.forward.shared import (
        in_order,
    )
    from moe_pack.calib.forward.store import (
        PROFILE_FILE,
        Array,
        ProfileStore,
        made_with,
        packed_source_digest,
        read_all_arrays,
        source_digest,
        tidy,
    )
    from moe_pack.calib.forward.text import Tokens, num_held_out, read_tokens, unseen_tokens
else:
    __getattr__ = face(__name__)

__all__ = [
    "CHUNK_TOKENS",
    "HOT_SPARSITIES",
    "KINDS",
    "NUM_BINS",
    "PROFILE_FILE",
    "Array",
    "ExpertActivity",
    "ExpertInputs",
    "Histogram",
    "KeptInputs",
    "LayerStates",
    "LayerTokens",
    "LayerwiseWeights",
    "ProfileStore",
    "Sequences",
    "Tokens",
    "check_length",
    "in_order",
    "input_bytes",
    "input_chunks",
    "input_pieces",
    "kept_sequences",
    "made_with",
    "measure_expert",
    "num_held_out",
    "num_kept_sequences",
    "num_workers",
    "packed_source_digest",
    "read_all_arrays",
    "read_tokens",
    "run_counted",
    "sample_places",
    "source_digest",
    "stack_of",
    "stack_tokens",
    "store_states",
    "tidy",
    "unseen_tokens",
    "whole_states",
]
