"""One token through the model on a device, experts too, in launches alone: what a CUDA graph is made of.

Importing this needs triton.
"""

import torch

from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.reduce import reduce
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import Selection
from moe_pack.runtime.kernels.tiles import num_partials
from moe_pack.runtime.token_layers import TokenLayers


class TokenStep:
    """The launches of one token, and room for its experts' work.

    Args:    num_sms: multiprocessors of the card, which say how work is divided.
    """

    def __init__(self, weights: CardWeights, layers: TokenLayers, num_sms: int) -> None:
        spec, device = weights.spec, layers.x.device
        self._weights, self._layers = weights, layers
        f, k = spec.expert.intermediate_size, spec.router.num_experts_per_tok
        self._selection = Selection.room(k, f, device)
        self._partials = torch.zeros((k, num_partials(k, f, num_sms), spec.hidden_size), device=device)

    def run(self) -> None:
        """Launches everything, from the token in `control` to `logits`."""
        layers, spec = self._layers, self._weights.spec
        layers.start()
        layer_idx = 0
        for layer in range(spec.num_hidden_layers):
            also = layers.run(layer)
            if layer in spec.moe_layers:
                self._experts(layer_idx)
                reduce(
                    self._partials, layers.router_weights, layers.x,
                    residual=layers.x, also=also, scale=spec.residual_multiplier,
                )  # fmt: skip
                layer_idx += 1
        layers.finish()

    def _experts(self, layer_idx: int) -> None:
        """The partial sums of the experts that the token goes to, of which what is not there is pulled."""
        layers, held = self._layers, self._weights.cache.layers[layer_idx]
        experts = layers.routes[layer_idx]
        held.admit(experts)
        held.pull_selectors(experts)
        select(layers.normed, experts, held.tables, self._selection)
        held.pull_records(experts, self._selection)
        neurons(layers.normed, experts, held.tables, self._selection, self._partials)
