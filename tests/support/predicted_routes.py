"""A slow decoder that proceeds with predicted experts, for comparison: the demo model's rule written out."""

from torch import Tensor, tensor

from moe_pack.runtime.model import PartialState
from moe_pack.runtime.model.pack_weights import MappedPackWeights


class PredictedRoutes(MappedPackWeights):
    """A Mixtral's weights. A layer runs the experts that its router chooses on the input of the layer before.

    Passes of several tokens, and the first layer, run the router's.   `num_wrong`: the experts that ran and were
    not the router's.
    """

    num_wrong = 0
    before: Tensor | None = None

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Runs the predicted experts, weighted by the softmax of their logits on this layer's own input."""
        before, self.before = self.before, x if len(x) == 1 else None
        if layer_idx and before is not None and len(x) == 1:
            matrix = self.matrix(f"layers.{layer_idx}.router")
            router = matrix.rows(0, matrix.num_rows)
            predicted = (before @ router.T)[0].topk(experts.shape[1]).indices.tolist()
            self.num_wrong += len(set(predicted) - set(experts[0].tolist()))
            experts, router_weights = tensor([predicted]), (x @ router.T)[:, predicted].softmax(1)
        return super().run_experts(layer_idx, x, experts, router_weights)
