"""The router of one token, in one launch: the norm that experts get, the router's logits, and the choice of experts.

Programs compute the logits of some experts each; another one writes the normed hidden state, and another the weight of
the shared expert, if it has one. The last program to end chooses: a counter in the GPU's memory says which one that is.
The twins are torch's norms, `linear`, and `runtime.model.router`.

Experts are chosen by keys of 64 bits: the score's order in the upper half, the negated index in the lower half, so that
the largest key has the largest score and, of equal scores, the first index. NaN counts as the largest, as in torch's
sort.

Two options change the choice, and with it the answer: other experts may run in place of missing ones with low scores
(`runtime.offload.split.substitute`, Importance-Driven Expert Scheduling, Algorithm 1), or the predicted ones in any
case (CORM §4.2). Weights are then those of the experts that run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.gpu.kernels.elementwise import NORM_WARPS, Norm, normalize
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.products import dot_part, load_normed_part, load_part
from moe_pack.runtime.gpu.kernels.rows import INTERPRETED, lookup_for
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER
from moe_pack.runtime.model.router import least_sum

_SOFTMAX_TOPK, _TOPK_SOFTMAX, _SIGMOID_TOPK, _SPARSEMIXER = (tl.constexpr(kind) for kind in range(4))
_KINDS = {
    "softmax_topk": _SOFTMAX_TOPK.value,
    "topk_softmax": _TOPK_SOFTMAX.value,
    "sigmoid_topk": _SIGMOID_TOPK.value,
    "sparsemixer": _SPARSEMIXER.value,
}
_LEAST = tl.constexpr(-(2**63))  # less than every score's key


# Experts of a program: with more, the widest rows of float32 leave too few registers. Numpy, in which the interpreter
# computes, takes as long for many rows as for one.
_BLOCK_ROWS = 64 if INTERPRETED else 2


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A layer's router, and the norm before it.

    `norm`: of the hidden state that the router and the experts get.   `rows`: [E, d].   `logit_bias`, `bias`: float32
    [E], if the spec has them; the second changes the choice and not the weights.   `shared`: [1, d], the row of the
    shared expert's weight, if that has one.
    """

    spec: RouterSpec
    norm: Norm
    rows: StoredRows
    logit_bias: Tensor | None
    bias: Tensor | None
    shared: StoredRows | None


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """What a router writes for one token; allocated once, on the device.

    `normed`: float32 [d], the experts' input.   `weights`: float32 [k].   `shared_weight`: float32 [1], the sigmoid of
    the shared expert's logit, if it has one.   `logits`: float32 [E].   `num_done`: int32 [1], the programs that have
    ended; 0 between launches.
    """

    normed: Tensor
    weights: Tensor
    shared_weight: Tensor
    logits: Tensor
    num_done: Tensor

    @classmethod
    def allocate(cls, hidden_size: int, spec: RouterSpec, device: torch.device) -> "Routed":
        """Allocates for a token of one layer after another."""
        hidden, weights, shared, logits = (
            torch.zeros(size, device=device) for size in (hidden_size, spec.num_experts_per_tok, 1, spec.num_experts)
        )
        return cls(hidden, weights, shared, logits, torch.zeros(1, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True, eq=False)
class ChangedChoice:
    """What changes a router's choice, and so the answer.

    `predicted`: int32 [k or more], of which the first k run whatever the router chooses; None: the router chooses.
    `is_resident`: int32 [E], 0 for experts that others may replace, `alpha`: from 0 to 1, as in `substitute`; None: no
    expert is replaced.   `num_changed`: int32 [1], overwritten: experts that run and are not the router's.
    """

    predicted: Tensor | None
    is_resident: Tensor | None
    alpha: float
    num_changed: Tensor


def route(x: Tensor, router: Router, experts: Tensor, out: Routed, changed: ChangedChoice | None = None) -> None:
    """Writes one token's normed hidden state, its experts, best first, and their weights.

    Args:    x: float32 [d].   experts: int32 [k], overwritten; a substitute is in the place of what it replaces.
             out: overwritten.
    """
    spec, shared = router.spec, router.shared
    substitutes = changed is not None and changed.is_resident is not None
    if substitutes and spec.num_experts == spec.num_experts_per_tok:
        changed = None  # there are no others
    part, d = router.rows.part, len(x)
    k, size = spec.num_experts_per_tok, spec.num_experts // spec.n_group
    programs = triton.cdiv(spec.num_experts, _BLOCK_ROWS) + (1 if shared is None else 2)
    _route_kernel[(programs,)](
        x, router.norm.weight, router.norm.bias, router.norm.eps,
        router.rows.raw, router.logit_bias, router.bias, None if shared is None else shared.raw,
        experts, out.normed, out.weights, out.shared_weight, out.logits, out.num_done,
        None if changed is None else changed.predicted, None if changed is None else changed.is_resident,
        None if changed is None else changed.num_changed, 0.0 if changed is None else changed.alpha,
        lookup_for(x.device, part, None if shared is None else shared.part),
        router.rows.row_units, part, part.num_words, _BLOCK_ROWS, d, triton.next_power_of_2(d),
        None if shared is None else shared.part, 0 if shared is None else shared.part.num_words,
        _KINDS[spec.kind], k, spec.n_group, spec.topk_group, size, spec.normalize,
        spec.scaling_factor, least_sum(spec), 2 * spec.jitter,
        triton.next_power_of_2(k), triton.next_power_of_2(spec.n_group), triton.next_power_of_2(size),
        num_warps=NORM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_LAYER)
def _route_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    eps,
    rows_ptr,
    logit_bias_ptr,
    bias_ptr,
    shared_ptr,
    experts_ptr,
    normed_ptr,
    weights_ptr,
    shared_weight_ptr,
    logits_ptr,
    num_done_ptr,
    predicted_ptr,
    resident_ptr,
    changed_ptr,
    alpha,
    lookup_ptr,
    row_units,
    PART: tl.constexpr,
    NW: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_NW: tl.constexpr,
    KIND: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    NUM_EXPERTS: tl.constexpr = NUM_GROUPS * SIZE
    program = tl.program_id(0)
    if program == tl.cdiv(NUM_EXPERTS, R):
        normalize(x_ptr, norm_weight_ptr, norm_bias_ptr, normed_ptr, eps, D, BLOCK_D)
    elif program < tl.cdiv(NUM_EXPERTS, R):
        expert = program * R + tl.arange(0, R)
        live = expert < NUM_EXPERTS
        units = expert.to(tl.int64) * row_units
        logits = _products(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, rows_ptr, units, live, lookup_ptr, PART, NW)
        if logit_bias_ptr is not None:
            logits += tl.load(logit_bias_ptr + expert, mask=live, other=0.0)
        tl.store(logits_ptr + expert, logits, mask=live)
    elif SHARED is not None:
        place = tl.arange(0, 1)
        logit = _products(
            x_ptr, norm_weight_ptr, norm_bias_ptr, eps, shared_ptr, place.to(tl.int64), place == 0, lookup_ptr, SHARED,
            SHARED_NW,
        )  # fmt: skip
        tl.store(shared_weight_ptr + place, 1.0 / (1.0 + tl.exp(-logit)))
    tl.debug_barrier()  # all threads have written
    num_before = tl.atomic_add(num_done_ptr, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) - 1:
        tl.store(num_done_ptr, 0)
        _choose(
            logits_ptr, bias_ptr, experts_ptr, weights_ptr, predicted_ptr, resident_ptr, changed_ptr, alpha,
            KIND, K, NUM_GROUPS, TOP_GROUPS, SIZE, NORMALIZE, SCALING, LEAST_SUM, FAR, BLOCK_K, BLOCK_G, BLOCK,
        )  # fmt: skip


@triton.jit
def _products(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    eps,
    rows_ptr,
    units,
    live,
    lookup_ptr,
    PART: tl.constexpr,
    NW: tl.constexpr,
):
    """Returns the products of some rows with the normed hidden state: float32 [R]."""
    codes = load_part(rows_ptr, units, live, PART, NW)
    x, x_sums, x_high, factor = load_normed_part(x_ptr, norm_weight_ptr, norm_bias_ptr, eps, PART, NW)
    return factor * dot_part(rows_ptr, units, live, codes, x, x_sums, x_high, lookup_ptr, PART, NW)


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    predicted_ptr,
    resident_ptr,
    changed_ptr,
    alpha,
    KIND: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the experts that the logits choose, or what runs in place of them, and their weights."""
    g, e = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK)[None, :]
    index = g * SIZE + e
    mask = (g < NUM_GROUPS) & (e < SIZE)
    logits = tl.load(logits_ptr + index, mask=mask, other=-float("inf"))
    top, total = 0.0, 1.0
    if KIND == _SOFTMAX_TOPK or resident_ptr is not None:
        top = tl.max(logits)
        total = tl.sum(tl.exp(logits - top))
    choice = _scores(logits, top, total, KIND)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + index, mask=mask, other=0.0)
    if NUM_GROUPS > 1:
        best: tl.constexpr = 2 if KIND == _SIGMOID_TOPK else 1
        choice = _in_best_groups(choice, index, mask, TOP_GROUPS, SIZE, best, BLOCK_G)
    keys = keys_of(choice, index, mask)
    places = tl.arange(0, BLOCK_K)
    experts = largest(keys, index, K, BLOCK_K)
    if predicted_ptr is not None:
        predicted = index < 0  # none
        for place in tl.static_range(K):
            predicted = predicted | (index == tl.load(predicted_ptr + place))
        others = largest(tl.where(predicted, keys, _LEAST), index, K, BLOCK_K)
        tl.store(changed_ptr, K - _num_common(experts, others, K, BLOCK_K))
        experts = others
    elif resident_ptr is not None:
        KIND_OF_SCORE: tl.constexpr = _SIGMOID_TOPK if KIND == _SIGMOID_TOPK else _SOFTMAX_TOPK
        scores = _scores(logits, top, total, KIND_OF_SCORE)
        resident = tl.load(resident_ptr + index, mask=mask, other=0) != 0
        others = _substituted(experts, scores, resident, index, mask, alpha, NUM_GROUPS * SIZE, K, BLOCK_K)
        tl.store(changed_ptr, K - _num_common(experts, others, K, BLOCK_K))
        experts = others
    if KIND == _SPARSEMIXER:
        weights = tl.full([BLOCK_K], -float("inf"), tl.float32)
        left = mask
        for place in tl.static_range(K):
            expert = tl.sum(tl.where(places == place, experts, 0), 0)
            weight = tl.load(logits_ptr + expert)
            distance = tl.where(left, weight - logits, 0.0)
            magnitude = tl.maximum(tl.abs(logits), weight)
            far = tl.div_rn(distance, tl.where(magnitude == 0, 1.0, magnitude)) > FAR  # the division of the reference
            weight = 1.0 / tl.sum(tl.where(left & ~far, tl.exp(-distance), 0.0))
            weights = tl.where(places == place, weight, weights)
            left = left & (index != expert)
    else:
        chosen = tl.load(logits_ptr + experts, mask=places < K, other=-float("inf"))
        weights = _scores(chosen, top, total, KIND)
    if KIND == _TOPK_SOFTMAX:
        powers = tl.exp(weights - tl.max(weights, 0))
        weights = powers / tl.sum(powers)
    if NORMALIZE:
        weights = weights / (tl.sum(tl.where(places < K, weights, 0.0)) + LEAST_SUM)
    tl.store(experts_ptr + places, experts, mask=places < K)
    tl.store(weights_ptr + places, weights * SCALING, mask=places < K)


@triton.jit
def largest(keys, index, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the indices of the K largest keys, best first: int32 [BLOCK_K], 0 from K on."""
    places = tl.arange(0, BLOCK_K)
    found = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(K):
        number = index_of(tl.max(tl.max(keys, 1), 0))
        found = tl.where(places == place, number, found)
        keys = tl.where(index == number, _LEAST, keys)
    return found


@triton.jit
def _num_common(some, others, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns how many of K different numbers are among K others."""
    places = tl.arange(0, BLOCK_K)
    is_same = (some[:, None] == others[None, :]) & (places[:, None] < K) & (places[None, :] < K)
    return tl.sum(tl.sum(is_same.to(tl.int32), 1), 0)


@triton.jit
def _substituted(
    experts, scores, resident, index, mask, alpha, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Returns the experts to run in place of the chosen ones: `substitute`, for one token.

    Args:    experts: int32 [BLOCK_K].   scores, resident: of all experts, as `index` and `mask`.
    """
    places = tl.arange(0, BLOCK_K)
    keys = keys_of(scores, index, mask)
    rest = keys
    for _ in tl.static_range(K):
        rest = tl.where(rest == tl.max(tl.max(rest, 1), 0), _LEAST, rest)
    beta = _score_of(index_of(tl.max(tl.max(rest, 1), 0)), scores, index)
    chosen = index < 0  # none
    for place in tl.static_range(K):
        chosen = chosen | (index == tl.sum(tl.where(places == place, experts, 0), 0))
    low = chosen & ~(scores > (1.0 + alpha) * beta) & ~resident
    # Of chosen experts the lowest leaves first, of equal ones the later; of the others the best comes first.
    leaving = keys_of(-scores, NUM_EXPERTS - 1 - index, mask & low)
    coming = tl.where(mask & resident & ~chosen & (scores >= (1.0 - alpha) * beta), keys, _LEAST)
    for _ in tl.static_range(K):
        worst, best = tl.max(tl.max(leaving, 1), 0), tl.max(tl.max(coming, 1), 0)
        replaces = (worst != _LEAST) & (best != _LEAST)
        leaves = NUM_EXPERTS - 1 - index_of(worst)
        experts = tl.where(replaces & (experts == leaves) & (places < K), index_of(best), experts)
        leaving = tl.where(leaving == worst, _LEAST, leaving)
        coming = tl.where(coming == best, _LEAST, coming)
    return experts


@triton.jit
def _score_of(expert, scores, index):
    """Returns an expert's score."""
    return tl.sum(tl.sum(tl.where(index == expert, scores, 0.0), 1), 0)


@triton.jit
def _scores(logits, top, total, KIND: tl.constexpr):
    """Returns the scores by which experts are chosen; of a softmax `top` is the largest logit, `total` the sum."""
    scores = logits
    if KIND == _SOFTMAX_TOPK:
        scores = tl.exp(logits - top) / total
    elif KIND == _SIGMOID_TOPK:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    return scores


@triton.jit
def keys_of(scores, index, mask):
    """Returns keys, int64, that order scores as torch's stable sort does; the least key where masked."""
    scores = tl.where(scores == 0, 0.0, scores)  # -0 equals 0
    scores = tl.where(scores != scores, float("inf"), scores)
    bits = scores.to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(mask, (rising << 32) | (0x7FFFFFFF - index), _LEAST)


@triton.jit
def index_of(key):
    """Returns the index in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _in_best_groups(
    scores, index, mask, TOP: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Returns scores [BLOCK_G, BLOCK], -inf outside the TOP best groups; a group's score sums its BEST experts."""
    keys = keys_of(scores, index, mask)
    best = tl.max(keys, 1)
    strength = tl.max(tl.where(mask, scores, -float("inf")), 1)
    if BEST == 2 and SIZE > 1:
        others = mask & (index != index_of(best)[:, None])
        strength += tl.max(tl.where(others, scores, -float("inf")), 1)
    g = tl.arange(0, BLOCK_G)
    group_keys = keys_of(strength, g, best != _LEAST)
    is_best = g < 0
    for _ in tl.static_range(TOP):
        chosen = g == index_of(tl.max(group_keys, 0))
        is_best = is_best | chosen
        group_keys = tl.where(chosen, _LEAST, group_keys)
    return tl.where(is_best[:, None], scores, -float("inf"))
