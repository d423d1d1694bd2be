"""Steps that several kinds of attention share: temperatures, output gates, and the choice of an indexer."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, parts
from moe_pack.runtime.model.caches import layer_cache
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.compute.weights import RoleWeights, Weights


class LayerAttention(RoleWeights):
    """The attention of a layer."""

    def __init__(self, weights: Weights, layer: int) -> None:
        super().__init__(weights, f"layers.{layer}.attention")
        self.layer, self.interleaved = layer, is_interleaved(weights.spec, layer)

    def gated(self, mixed: Tensor, x: Tensor, spec: parts.OutputGateSpec | None, head_dim: int) -> Tensor:
        """Returns the heads' outputs `mixed`, float32 [T, heads * head_dim], times gates computed from the input x."""
        if spec is None:
            return mixed
        gates = self.linear(x, "gate")
        if spec.bias:
            bias = self.vector("gate_bias")
            gates = gates + (bias if spec.each == "head" else bias.repeat_interleave(head_dim))
        gates = gates.sigmoid() if spec.function == "sigmoid" else torch.nn.functional.softplus(gates)
        return mixed * (gates.repeat_interleave(head_dim, dim=1) if spec.each == "head" else gates)


def is_interleaved(spec: ModelSpec, layer: int) -> bool:
    """Returns whether a layer rotates neighbours, and not halves."""
    rope = spec.rope_of(layer)
    return rope is not None and rope.interleaved


def positions_of(sequences: layer_cache.Batch[layer_cache.LayerCache], device: torch.device) -> Tensor:
    """Returns the position of each token of a pass, int64 [T]."""
    ranges = ((own.cache.num_tokens, own.rows.stop - own.rows.start) for own in sequences)
    return softmax.joined([torch.arange(start, start + number, device=device) for start, number in ranges])


def temperatures(spec: parts.TemperatureSpec, positions: Tensor) -> Tensor:
    """Returns the factor of the queries of tokens at positions int64 [T], float32 [T, 1]."""
    positions = positions[:, None]
    if spec.is_power:
        return torch.exp(spec.slope * torch.log1p((positions + int(spec.is_from_one)).float() / spec.length))
    return 1 + spec.slope * torch.log1p(torch.floor((positions + int(spec.is_from_one)) / spec.length))


def largest(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
    """Returns which allowed scores [..., n] are the `number` largest of their row; among equal ones, the first."""
    scores = scores.masked_fill(~allowed, -torch.inf)
    least = scores.topk(min(number, scores.shape[-1]), dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    missing = number - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= missing))) & allowed


def largest_scores(
    q: Tensor, keys: Callable[[], Iterator[Tensor]], head_weights: Tensor, top_k: int, seen: Tensor | None
) -> Tensor:
    """Returns the `top_k` keys with the largest weighted sums of products, not below 0, for each query, bool [T, n].

    Args:    q: float32 [heads, T, head_dim].   keys: yields float32 [n, head_dim] in blocks.   head_weights: float32
             [T, heads].   seen: bool [T, n], the keys to choose from; None: all.
    """
    chosen, first, num_keys = list[Tensor](), 0, sum(map(len, keys()))
    step = max(1, softmax.MAX_DECODED_BYTES // (4 * len(q) * num_keys))
    while first < q.shape[1]:
        rows = slice(first, first + step)
        blocks = [torch.einsum("hts,th->ts", torch.relu(q[:, rows] @ each.T), head_weights[rows]) for each in keys()]
        scores = torch.cat(blocks, dim=1)
        allowed = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen[rows]
        chosen.append(largest(scores, top_k, allowed))
        first += step
    return torch.cat(chosen)
