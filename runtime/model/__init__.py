"""The forward pass of a pack over a seam of operations, plain torch by default, native where built."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.checkpoint_weights import CheckpointWeights, read_neurons, read_rows, read_vector
    from moe_pack.runtime.model.compute.expert import (
        Activations,
        Expert,
        NeuronBlock,
        activations,
        neuron_of,
        run_expert,
        running,
    )
    from moe_pack.runtime.model.compute.matrices import Matrix, RowMatrix, StoredMatrix, linear
    from moe_pack.runtime.model.compute.operations import TORCH, NativeOperations, Operations, operations_for
    from moe_pack.runtime.model.compute.weights import Weights
    from moe_pack.runtime.model.decoder import Decoder
    from moe_pack.runtime.model.encoder_decoder import EncoderDecoder
    from moe_pack.runtime.model.layers import (
        PREFILL_TOKENS,
        ExpertRunner,
        PartialState,
        add_attention,
        embed,
        head,
        mlp_input,
        route_tokens,
        router_scores,
        run_experts,
    )
    from moe_pack.runtime.model.pack_weights import (
        PackedExpert,
        PackWeights,
        StreamedPackWeights,
        open_weights,
        tokens_by_expert,
    )
else:
    __getattr__ = face(__name__)
