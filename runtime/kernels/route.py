"""One token's experts and their weights from the router's logits, in one program; `runtime.router` is the twin.

Experts are chosen by keys of 64 bits: the score's order above, the index turned round below, so that the largest key
is the largest score and of equals the first. NaN counts as the largest, as in torch's sort.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.kernels.tables import PER_LAYER
from moe_pack.runtime.router import least_sum

_SOFTMAX_TOPK, _TOPK_SOFTMAX, _SIGMOID_TOPK, _SPARSEMIXER = (tl.constexpr(kind) for kind in range(4))
_KINDS = {
    "softmax_topk": _SOFTMAX_TOPK.value,
    "topk_softmax": _TOPK_SOFTMAX.value,
    "sigmoid_topk": _SIGMOID_TOPK.value,
    "sparsemixer": _SPARSEMIXER.value,
}
_LEAST = tl.constexpr(-(2**63))  # below every score's key


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None, experts: Tensor, weights: Tensor) -> None:
    """Writes the experts of one token, best first, and their weights.

    Args:    logits: float32 [E].   bias: float32 [E], added for choosing only; where the spec has one.
             experts: int32 [k].   weights: float32 [k].
    """
    k, size = spec.num_experts_per_tok, spec.num_experts // spec.n_group
    _route_kernel[(1,)](
        logits, logits if bias is None else bias, experts, weights,
        _KINDS[spec.kind], k, spec.n_group, spec.topk_group, size, bias is not None, spec.normalize,
        spec.scaling_factor, least_sum(spec), 2 * spec.jitter,
        triton.next_power_of_2(k), triton.next_power_of_2(spec.n_group), triton.next_power_of_2(size),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _keys(scores, index, mask):
    """Keys, int64, that order scores as torch's stable sort does; the least where masked."""
    scores = tl.where(scores == 0, 0.0, scores)  # -0 equals 0
    scores = tl.where(scores != scores, float("inf"), scores)
    bits = scores.to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(mask, (rising << 32) | (0x7FFFFFFF - index), _LEAST)


@triton.jit
def _index(key):
    """The index in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _in_best_groups(
    scores, index, mask, TOP: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Scores [BLOCK_G, BLOCK] with those outside the TOP best groups at -inf; a group is its BEST experts' sum."""
    keys = _keys(scores, index, mask)
    best = tl.max(keys, 1)
    strength = tl.max(tl.where(mask, scores, -float("inf")), 1)
    if BEST == 2 and SIZE > 1:
        others = mask & (index != _index(best)[:, None])
        strength += tl.max(tl.where(others, scores, -float("inf")), 1)
    g = tl.arange(0, BLOCK_G)
    group_keys = _keys(strength, g, best != _LEAST)
    stays = g < 0
    for _ in tl.static_range(TOP):
        chosen = g == _index(tl.max(group_keys, 0))
        stays = stays | chosen
        group_keys = tl.where(chosen, _LEAST, group_keys)
    return tl.where(stays[:, None], scores, -float("inf"))


@triton.jit(do_not_specialize=PER_LAYER)
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    KIND: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g, e = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK)[None, :]
    index = g * SIZE + e
    mask = (g < NUM_GROUPS) & (e < SIZE)
    logits = tl.load(logits_ptr + index, mask=mask, other=-float("inf"))
    scores = logits
    if KIND == _SOFTMAX_TOPK:
        powers = tl.exp(logits - tl.max(logits))
        scores = powers / tl.sum(powers)
    elif KIND == _SIGMOID_TOPK:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + index, mask=mask, other=0.0)
    if NUM_GROUPS > 1:
        best: tl.constexpr = 2 if KIND == _SIGMOID_TOPK else 1
        choice = _in_best_groups(choice, index, mask, TOP_GROUPS, SIZE, best, BLOCK_G)
    keys = _keys(choice, index, mask)
    places = tl.arange(0, BLOCK_K)
    experts = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.full([BLOCK_K], -float("inf"), tl.float32)
    for place in tl.static_range(K):
        expert = _index(tl.max(tl.max(keys, 1), 0))
        chosen = mask & (index == expert)
        weight = tl.sum(tl.where(chosen, scores, 0.0))
        if KIND == _SPARSEMIXER:
            running = keys != _LEAST
            distance = tl.where(running, weight - logits, 0.0)
            magnitude = tl.maximum(tl.abs(logits), weight)
            far = tl.div_rn(distance, tl.where(magnitude == 0, 1.0, magnitude)) > FAR  # the reference's own division
            weight = 1.0 / tl.sum(tl.where(running & ~far, tl.exp(-distance), 0.0))
        experts = tl.where(places == place, expert, experts)
        weights = tl.where(places == place, weight, weights)
        keys = tl.where(chosen, _LEAST, keys)
    if KIND == _TOPK_SOFTMAX:
        powers = tl.exp(weights - tl.max(weights, 0))
        weights = powers / tl.sum(powers)
    if NORMALIZE:
        total = tl.sum(tl.where(places < K, weights, 0.0))
        weights = weights / (total + LEAST_SUM)
    tl.store(experts_ptr + places, experts, mask=places < K)
    tl.store(weights_ptr + places, weights * SCALING, mask=places < K)
