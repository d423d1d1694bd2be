"""The router of a few tokens, in one launch: the norm that experts get, the router's logits, and the choice of experts.

Each token has its programs, which compute the logits of some experts each; another one writes the normed hidden state,
and another the weight of the shared expert, if it has one. The last program of a token to end chooses: a counter in the
GPU's memory says which one that is.
The twins are torch's norms, `linear`, and `runtime.model.compute.router`.

Experts are chosen by keys of 64 bits: the score's order in the upper half, the negated index in the lower half, so that
the largest key has the largest score and, of equal scores, the first index. NaN counts as the largest, as in torch's
sort.

Two options change the choice, and with it the answer: other experts may run in place of missing ones with low scores
(`runtime.offload.split.substitute`, Importance-Driven Expert Scheduling, Algorithm 1), or the predicted ones in any
case (CORM §4.2). Weights are then those of the experts that run. A second launch replaces experts of several tokens,
because each of them counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.gpu.kernels.elementwise import NORM_WARPS, Norm, count_tokens, normalize, token_of
from moe_pack.runtime.gpu.kernels.grids import INTERPRETED, launch_options, wait_for_earlier
from moe_pack.runtime.gpu.kernels.matmul import RowBytes, StoredRows
from moe_pack.runtime.gpu.kernels.products import dot_part, load_normed_part, load_part
from moe_pack.runtime.gpu.kernels.rows import RowPart, lookup_for, loop_range
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER
from moe_pack.runtime.model.compute.router import least_sum

_SOFTMAX_TOPK, _TOPK_SOFTMAX, _SIGMOID_TOPK, _SPARSEMIXER = (tl.constexpr(kind) for kind in range(4))
KINDS = {
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
    """A layer's router, and the norm before it."""

    spec: RouterSpec
    norm: Norm  # of the hidden state that the router and the experts get
    rows: StoredRows  # [E, d]
    logit_bias: Tensor | None  # float32 [E], if the spec has it
    bias: Tensor | None  # likewise; it changes the choice and not the weights
    shared: StoredRows | None  # [1, d], the row of the shared expert's weight, if that has one


class Routed(NamedTuple):
    """The outputs of a router for T tokens; allocated once, on the device."""

    normed: Tensor  # float32 [T, d], the experts' input
    weights: Tensor  # float32 [T, k]
    shared_weight: Tensor  # float32 [T], the sigmoid of the shared expert's logit, if it has one
    logits: Tensor  # float32 [T, E]
    num_done: Tensor  # int32 [T], the programs of a token that have ended; 0 between launches
    chosen: Tensor  # int32 [T, k], the router's own choice where others may replace it for several tokens

    @classmethod
    def allocate(cls, hidden_size: int, spec: RouterSpec, device: torch.device, num_tokens: int = 1) -> "Routed":
        """Allocates for tokens of one layer after another."""
        hidden, weights, logits = (
            torch.zeros((num_tokens, size), device=device)
            for size in (hidden_size, spec.num_experts_per_tok, spec.num_experts)
        )
        num_done = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        chosen = torch.zeros(weights.shape, dtype=torch.int32, device=device)
        return cls(hidden, weights, torch.zeros(num_tokens, device=device), logits, num_done, chosen)


class ChangedChoice(NamedTuple):
    """The reason why other experts run than a router chooses, which changes the answer."""

    predicted: Tensor | None  # int32 [T, k or more], of which the first k run; None: the router chooses
    is_resident: Tensor | None  # int32 [E], 0 for experts that others may replace; None: no expert is replaced
    alpha: float  # from 0 to 1, as in `substitute`
    num_changed: Tensor  # int32 [T], overwritten: experts that run and are not the router's


class _Matrices(NamedTuple):
    rows: RowBytes
    shared: Tensor | None
    logit_bias: Tensor | None
    bias: Tensor | None


class _Logits(NamedTuple):
    part: RowPart
    shared: RowPart | None
    rows: int  # experts of a program


class _Choice(NamedTuple):
    kind: int
    k: int
    num_groups: int
    top_groups: int
    size: int  # experts of a group
    normalizes: bool
    scaling: float
    least_sum: float
    far: float  # of SparseMixer's jitter: logits farther from the chosen one, relative to it, do not count
    num_predicted: int | None  # of a token; None where the router chooses
    is_changed: bool


def route(x: Tensor, router: Router, experts: Tensor, out: Routed, changed: ChangedChoice | None = None) -> None:
    """Writes each token's normed hidden state, its experts, best first, and their weights.

    Args:    x: float32 [T, d] or [d], contiguous.   experts: int32 [T, k], overwritten; a substitute is in the place of
             what it replaces.   out: overwritten.
    """
    spec, shared = router.spec, router.shared
    substitutes = changed is not None and changed.is_resident is not None
    if substitutes and spec.num_experts == spec.num_experts_per_tok:
        changed = None  # there are no others
    logits = _Logits(router.rows.part, None if shared is None else shared.part, _BLOCK_ROWS)
    matrices = _Matrices(router.rows.in_memory, None if shared is None else shared.raw, router.logit_bias, router.bias)
    choice = _Choice(
        KINDS[spec.kind], spec.num_experts_per_tok, spec.n_group, spec.topk_group, spec.num_experts // spec.n_group,
        spec.normalize, spec.scaling_factor, least_sum(spec), 2 * spec.jitter,
        None if changed is None or changed.predicted is None else changed.predicted.shape[-1], changed is not None,
    )  # fmt: skip
    programs = triton.cdiv(spec.num_experts, _BLOCK_ROWS) + (1 if shared is None else 2)
    num_tokens = count_tokens(x)
    substitutes_later = choice.is_changed and substitutes and num_tokens > 1
    first = choice._replace(is_changed=choice.is_changed and not substitutes_later)
    _route_kernel[programs, num_tokens](
        x, router.norm, matrices, out.chosen if substitutes_later else experts, out,
        changed if first.is_changed else None, lookup_for(x.device, logits.part, logits.shared), logits, first,
        num_tokens > 1, num_warps=NORM_WARPS, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip
    if substitutes_later:
        _substitute_kernel[(num_tokens,)](
            out, experts, changed, num_tokens, choice, num_warps=4, enable_fp_fusion=True, **launch_options()
        )


@triton.jit(do_not_specialize=PER_LAYER)
def _route_kernel(
    x_ptr,
    norm,
    matrices,
    experts_ptr,
    out,
    changed,
    lookup_ptr,
    LOGITS: tl.constexpr,
    CHOICE: tl.constexpr,
    HAS_SEVERAL: tl.constexpr,
):
    PART: tl.constexpr = LOGITS.part
    SHARED: tl.constexpr = LOGITS.shared
    NUM_EXPERTS: tl.constexpr = CHOICE.num_groups * CHOICE.size
    NUM_BLOCKS: tl.constexpr = tl.cdiv(NUM_EXPERTS, LOGITS.rows)
    program, token = tl.program_id(0), token_of(HAS_SEVERAL)
    x_ptr += token * PART.num_cols
    logits_ptr = out.logits + token * NUM_EXPERTS
    # One program writes the experts' input, most compute logits, and the last the shared expert's weight.
    if program == NUM_BLOCKS:
        wait_for_earlier()
        normalize(x_ptr, norm, out.normed + token * PART.num_cols, PART.num_cols)
    elif program < NUM_BLOCKS:
        expert = program * LOGITS.rows + tl.arange(0, LOGITS.rows)
        live = expert < NUM_EXPERTS
        units = expert.to(tl.int64) * matrices.rows.units
        logits = _products(x_ptr, norm, matrices.rows.bytes, units, live, lookup_ptr, PART)
        if matrices.logit_bias is not None:
            logits += tl.load(matrices.logit_bias + expert, mask=live, other=0.0)
        tl.store(logits_ptr + expert, logits, mask=live)
    elif SHARED is not None:
        place = tl.arange(0, 1)
        logit = _products(x_ptr, norm, matrices.shared, place.to(tl.int64), place == 0, lookup_ptr, SHARED)
        tl.store(out.shared_weight + token + place, 1.0 / (1.0 + tl.exp(-logit)))
    # The token's program that ends last sees all its logits, and chooses; it sets the counter back for the next launch.
    tl.debug_barrier()  # all threads have written
    num_before = tl.atomic_add(out.num_done + token, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) - 1:
        tl.store(out.num_done + token, 0)
        K: tl.constexpr = CHOICE.k
        chosen = experts_ptr + token * K, out.weights + token * K
        _choose(logits_ptr, matrices.bias, chosen, changed, token, CHOICE)


@triton.jit
def _products(x_ptr, norm, rows_ptr, units, live, lookup_ptr, PART: tl.constexpr):
    """Returns the products of some rows with the normed hidden state, float32 [R]; waits for it after their loads."""
    codes = load_part(rows_ptr, units, live, PART)
    wait_for_earlier()
    x, factor = load_normed_part(x_ptr, norm, PART)
    return factor * dot_part(rows_ptr, units, live, codes, x, lookup_ptr, PART)


@triton.jit
def _choose(logits_ptr, bias_ptr, chosen_ptrs, changed, token, CHOICE: tl.constexpr):
    """Writes the experts that the logits choose, or others in place of them, and their weights."""
    KIND: tl.constexpr = CHOICE.kind
    K: tl.constexpr = CHOICE.k
    index, mask = _indices(CHOICE)
    logits = tl.load(logits_ptr + index, mask=mask, other=-float("inf"))
    top, total = 0.0, 1.0
    if KIND == _SOFTMAX_TOPK or (CHOICE.is_changed and changed.is_resident is not None):
        top, total = _softmax_of(logits)
    # Biases and groups change which experts are chosen, and not their weights.
    choice = _scores(logits, top, total, KIND)
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + index, mask=mask, other=0.0)
    if CHOICE.num_groups > 1:
        best: tl.constexpr = 2 if KIND == _SIGMOID_TOPK else 1
        choice = _in_best_groups(choice, index, mask, CHOICE.top_groups, CHOICE.size, best)
    keys = keys_of(choice, index, mask)
    experts = largest(keys, index, K)
    if CHOICE.is_changed:
        others = _changed(experts, changed, token, keys, (logits, top, total), index, mask, CHOICE)
        tl.store(changed.num_changed + token, K - _num_common(experts, others, K))
        experts = others
    _store_chosen(logits_ptr, chosen_ptrs, experts, (logits, top, total), index, mask, CHOICE)


@triton.jit
def _indices(CHOICE: tl.constexpr):
    """Returns the experts, in rows of a group each, and which of them there are: int32 and bool [groups, experts]."""
    SIZE: tl.constexpr = CHOICE.size
    NUM_GROUPS: tl.constexpr = CHOICE.num_groups
    g = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))[:, None]
    e = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    return g * SIZE + e, (g < NUM_GROUPS) & (e < SIZE)


@triton.jit
def _softmax_of(logits):
    """Returns the largest logit, and the sum of the powers of all relative to it."""
    top = tl.max(logits)
    return top, tl.sum(tl.exp(logits - top))


@triton.jit
def _store_chosen(logits_ptr, chosen_ptrs, experts, of_softmax, index, mask, CHOICE: tl.constexpr):
    """Writes a token's experts and their weights, which are those of the experts that run."""
    KIND: tl.constexpr = CHOICE.kind
    K: tl.constexpr = CHOICE.k
    logits, top, total = of_softmax
    places = tl.arange(0, triton.next_power_of_2(K))
    if KIND == _SPARSEMIXER:
        weights = _mixer_weights(logits_ptr, experts, logits, index, mask, CHOICE)
    else:
        chosen = tl.load(logits_ptr + experts, mask=places < K, other=-float("inf"))
        weights = _scores(chosen, top, total, KIND)
    if KIND == _TOPK_SOFTMAX:
        powers = tl.exp(weights - tl.max(weights, 0))
        weights = powers / tl.sum(powers)
    if CHOICE.normalizes:
        weights = weights / (tl.sum(tl.where(places < K, weights, 0.0)) + CHOICE.least_sum)
    experts_ptr, weights_ptr = chosen_ptrs
    tl.store(experts_ptr + places, experts, mask=places < K)
    tl.store(weights_ptr + places, weights * CHOICE.scaling, mask=places < K)


@triton.jit
def _changed(experts, changed, token, keys, of_softmax, index, mask, CHOICE: tl.constexpr):
    """Returns the experts that run in place of those that the router chose: int32 [BLOCK_K]."""
    K: tl.constexpr = CHOICE.k
    if changed.predicted is not None:
        # The first k predicted experts run, in the order of their keys.
        predicted = index < 0  # none
        predicted_ptr = changed.predicted + token * CHOICE.num_predicted
        for place in tl.static_range(K):
            predicted = predicted | (index == tl.load(predicted_ptr + place))
        others = largest(tl.where(predicted, keys, _LEAST), index, K)
    else:
        logits, top, total = of_softmax
        scores = _comparable(logits, top, total, CHOICE)
        resident = tl.load(changed.is_resident + index, mask=mask, other=0) != 0
        no_tokens = tl.zeros(index.shape, tl.int32)  # that chose what this one did not
        others = _substituted(experts, scores, resident, no_tokens, index, mask, changed.alpha, CHOICE)
    return others


@triton.jit
def _substitute_kernel(out, experts_ptr, changed, num_tokens, CHOICE: tl.constexpr):
    """Replaces the experts of a token in the light of what all tokens chose."""
    K: tl.constexpr = CHOICE.k
    NUM_EXPERTS: tl.constexpr = CHOICE.num_groups * CHOICE.size
    token, places = tl.program_id(0), tl.arange(0, triton.next_power_of_2(K))
    wait_for_earlier()
    index, mask = _indices(CHOICE)
    is_free = tl.load(changed.is_resident + index, mask=mask, other=0) != 0
    num_choosing = tl.zeros(index.shape, tl.int32)
    for other in loop_range(0, num_tokens):
        experts = tl.load(out.chosen + other * K + places, mask=places < K, other=0)
        logits = tl.load(out.logits + other * NUM_EXPERTS + index, mask=mask, other=-float("inf"))
        top, total = _softmax_of(logits)
        scores, chosen = _comparable(logits, top, total, CHOICE), _among(experts, index, K)
        is_free = is_free | (chosen & (scores > (1.0 + changed.alpha) * _best_other(scores, index, mask, K)))
        num_choosing += chosen.to(tl.int32)
    logits_ptr = out.logits + token * NUM_EXPERTS
    logits = tl.load(logits_ptr + index, mask=mask, other=-float("inf"))
    top, total = _softmax_of(logits)
    scores = _comparable(logits, top, total, CHOICE)
    experts = tl.load(out.chosen + token * K + places, mask=places < K, other=0)
    others = _substituted(experts, scores, is_free, num_choosing, index, mask, changed.alpha, CHOICE)
    tl.store(changed.num_changed + token, K - _num_common(experts, others, K))
    chosen_ptrs = experts_ptr + token * K, out.weights + token * K
    _store_chosen(logits_ptr, chosen_ptrs, others, (logits, top, total), index, mask, CHOICE)


@triton.jit
def _mixer_weights(logits_ptr, experts, logits, index, mask, CHOICE: tl.constexpr):
    """Returns SparseMixer's weights: each expert's share of the softmax over the near logits of those that are left."""
    K: tl.constexpr = CHOICE.k
    places = tl.arange(0, triton.next_power_of_2(K))
    weights = tl.full(places.shape, -float("inf"), tl.float32)
    left = mask
    for place in tl.static_range(K):
        expert = tl.sum(tl.where(places == place, experts, 0), 0)
        weight = tl.load(logits_ptr + expert)
        distance = tl.where(left, weight - logits, 0.0)
        magnitude = tl.maximum(tl.abs(logits), weight)
        ratio = tl.div_rn(distance, tl.where(magnitude == 0, 1.0, magnitude))  # the division of the reference
        is_far = ratio > CHOICE.far  # a NaN is not
        weight = 1.0 / tl.sum(tl.where(left & ~is_far, tl.exp(-distance), 0.0))
        weights = tl.where(places == place, weight, weights)
        left = left & (index != expert)
    return weights


@triton.jit
def largest(keys, index, K: tl.constexpr):
    """Returns the indices of the K largest keys, best first: int32, K rounded up to a power of two, 0 from K on."""
    places = tl.arange(0, triton.next_power_of_2(K))
    found = tl.zeros(places.shape, tl.int32)
    for place in tl.static_range(K):
        number = index_of(tl.max(tl.max(keys, 1), 0))
        found = tl.where(places == place, number, found)
        keys = tl.where(index == number, _LEAST, keys)
    return found


@triton.jit
def _num_common(some, others, K: tl.constexpr):
    """Returns how many of K different numbers are among K others."""
    places = tl.arange(0, some.shape[0])
    is_same = (some[:, None] == others[None, :]) & (places[:, None] < K) & (places[None, :] < K)
    return tl.sum(tl.sum(is_same.to(tl.int32), 1), 0)


@triton.jit
def _substituted(experts, scores, is_free, num_choosing, index, mask, alpha, CHOICE: tl.constexpr):
    """Returns the experts to run in place of the chosen ones: `substitute`, for one token.

    Args:    experts: as `largest` returns them.   scores, is_free: of all experts, as `index` and `mask`; what is free
             is resident, or among the top experts of a token.   num_choosing: int32, tokens that chose an expert.
    """
    K: tl.constexpr = CHOICE.k
    NUM_EXPERTS: tl.constexpr = CHOICE.num_groups * CHOICE.size
    places = tl.arange(0, experts.shape[0])
    keys, beta, chosen = keys_of(scores, index, mask), _best_other(scores, index, mask, K), _among(experts, index, K)
    low = chosen & ~(scores > (1.0 + alpha) * beta) & ~is_free
    # Of chosen experts the lowest leaves first, of equal ones the later; of the others the one that the most tokens
    # chose comes first, and of these the best.
    leaving = keys_of(-scores, NUM_EXPERTS - 1 - index, mask & low)
    fits = mask & is_free & ~chosen & (scores >= (1.0 - alpha) * beta)
    for _ in tl.static_range(K):
        most = tl.max(tl.max(tl.where(fits, num_choosing, 0), 1), 0)
        coming = tl.where(fits & (num_choosing == most), keys, _LEAST)
        worst, best = tl.max(tl.max(leaving, 1), 0), tl.max(tl.max(coming, 1), 0)
        replaces = (worst != _LEAST) & (best != _LEAST)
        leaves = NUM_EXPERTS - 1 - index_of(worst)
        experts = tl.where(replaces & (experts == leaves) & (places < K), index_of(best), experts)
        leaving = tl.where(leaving == worst, _LEAST, leaving)
        fits = fits & (keys != best)
    return experts


@triton.jit
def _best_other(scores, index, mask, K: tl.constexpr):
    """Returns the score of rank K + 1."""
    rest = keys_of(scores, index, mask)
    for _ in tl.static_range(K):
        rest = tl.where(rest == tl.max(tl.max(rest, 1), 0), _LEAST, rest)
    other = index_of(tl.max(tl.max(rest, 1), 0))
    return tl.sum(tl.sum(tl.where(index == other, scores, 0.0), 1), 0)


@triton.jit
def _among(experts, index, K: tl.constexpr):
    """Returns whether each expert of `index` is among the first K."""
    places = tl.arange(0, experts.shape[0])
    found = index < 0  # none
    for place in tl.static_range(K):
        found = found | (index == tl.sum(tl.where(places == place, experts, 0), 0))
    return found


@triton.jit
def _comparable(logits, top, total, CHOICE: tl.constexpr):
    """Returns the scores by which experts are compared, whatever their weights are."""
    KIND: tl.constexpr = _SIGMOID_TOPK if CHOICE.kind == _SIGMOID_TOPK else _SOFTMAX_TOPK
    return _scores(logits, top, total, KIND)


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
def _in_best_groups(scores, index, mask, TOP: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr):
    """Returns scores [groups, experts], -inf outside the TOP best groups; a group's score sums its BEST experts."""
    keys = keys_of(scores, index, mask)
    best = tl.max(keys, 1)
    strength = tl.max(tl.where(mask, scores, -float("inf")), 1)
    if BEST == 2 and SIZE > 1:
        others = mask & (index != index_of(best)[:, None])
        strength += tl.max(tl.where(others, scores, -float("inf")), 1)
    g = tl.arange(0, scores.shape[0])
    group_keys = keys_of(strength, g, best != _LEAST)
    is_best = g < 0
    for _ in tl.static_range(TOP):
        chosen = g == index_of(tl.max(group_keys, 0))
        is_best = is_best | chosen
        group_keys = tl.where(chosen, _LEAST, group_keys)
    return tl.where(is_best[:, None], scores, -float("inf"))
