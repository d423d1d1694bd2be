"""The choice of tokens from logits on a GPU, in three launches for all rows of a pass.

1. `_prepare_kernel`, programs over the vocabulary: the largest logit of each block after bias and penalties. Rows whose
   tokens the host chooses have their logits copied to it instead.
2. `_weigh_kernel`, likewise: each token's *distance* and *weight*, and their sums by distance in `_BINS` bins.
3. `_draw_kernel`, a program a row: top-k, top-p and min-p end at a distance, and the draw adds up the weights below it
   in the vocabulary's order. It ends at once for a row that takes the likeliest token.

The twin is `runtime.sampling.Sampler`: the same steps, the same order of equals, and the same token for the same random
number, except where rounding decides. Nothing is sorted, and all sums are of integers, so that no order of programs
changes them. The distance of a logit from the largest one, divided by the temperature, is in units of 2^-26: 31 bits,
of which one launch finds the upper 11, and two rounds over the row find 10 each. Tokens of one distance are equals. The
weight is the exponential of minus the distance, in units of 2^-43. From a distance of 30.5 on it is 0, and the token is
never drawn.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.grids import INTERPRETED
from moe_pack.runtime.gpu.kernels.router import index_of, keys_of
from moe_pack.runtime.gpu.kernels.rows import loop_range
from moe_pack.runtime.model.choosing import NONE_LEFT, NOT_FINITE

_BLOCK = tl.constexpr(1024)  # tokens of a program
# Tokens that a row's only program takes at once, as many as its registers hold: where it looks for one, and where it
# adds up. Numpy takes as long for many as for few.
_STEP, _SUM_STEP = (tl.constexpr(1 << 15 if INTERPRETED else number) for number in (8192, 2048))
_BINS, _FINE, _FINE_BITS = tl.constexpr(2048), tl.constexpr(1024), tl.constexpr(10)
_FARTHEST = tl.constexpr(2**31 - 1)  # of tokens that no draw takes
DISTANCES = 2.0**26  # for a difference of one between logits, at a temperature of one
MOST_SCALE = 1e200  # of distances, so that products are finite
_UNIT, _WHOLE = tl.constexpr(1 / DISTANCES), tl.constexpr(2.0**43)  # of distances; the likeliest token's weight
_NO_NUMBER = tl.constexpr(2**63 - 1)  # the key of a block in which a logit is NaN or infinite
MOST_TOKENS = 1 << 19  # of a vocabulary: sums of weights have 63 bits
_NOT_FINITE, _NONE_LEFT = tl.constexpr(NOT_FINITE), tl.constexpr(NONE_LEFT)


class RowOptions(NamedTuple):
    """How a row's token is chosen; a row of `ChoiceMemory.options` has them in this order."""

    scale: float  # `DISTANCES` by the temperature; 0: the likeliest token; -1: the host chooses
    top_k: float = 0.0
    top_p: float = 1.0
    farthest: float = float(_FARTHEST.value)  # the largest distance that `min_p` leaves
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    has_bias: float = 0.0
    uniform: float = 0.0  # a random number from 0 to 1, which decides the draw


BY_HOST = RowOptions(-1.0)
_SCALE, _TOP_K, _TOP_P, _MOST, _REPETITION, _FREQUENCY, _PRESENCE, _HAS_BIAS, _UNIFORM, _OPTIONS = (
    tl.constexpr(number) for number in range(10)
)


class ChoiceMemory(NamedTuple):
    """The memory of passes of up to R rows, over a vocabulary of V, for S sequences; on the device unless said."""

    logits: Tensor  # float32 [R, V], of the model
    slots: Tensor  # int32 [R], the sequence of each row
    options: Tensor  # float64 [R, 9], `RowOptions`
    # int32 [S, V], by sequence: how often a token occurred in the answer, and `OCCURRED` more if in the prompt.
    counts: Tensor
    bias: Tensor  # float32 [S, V], by sequence
    best: Tensor  # int64 [R, blocks], the key of a block's largest logit
    distances: Tensor  # int32 [R, V]
    weights: Tensor  # int64 [R, V]
    sums: Tensor  # int64 [R, 2, bins], tokens and weights by distance
    fine: Tensor  # int64 [R, 2, fine bins], likewise of those in one bin
    chosen: Tensor  # int32 [S], each sequence's next token
    host_logits: Tensor  # float32 [R, V], page-locked: of the rows whose tokens the host chooses

    @classmethod
    def allocate(cls, logits: Tensor, slots: Tensor, num_sequences: int) -> "ChoiceMemory":
        """Allocates for logits [R, V] and the sequences of their rows, int32 [R]."""
        (num_rows, V), device = logits.shape, logits.device
        assert V <= MOST_TOKENS, "larger vocabularies are the host's"

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            logits,
            slots,
            options=zeros(num_rows, _OPTIONS.value, dtype=torch.float64),
            counts=zeros(num_sequences, V, dtype=torch.int32),
            bias=zeros(num_sequences, V, dtype=torch.float32),
            best=zeros(num_rows, triton.cdiv(V, _BLOCK.value)),
            distances=zeros(num_rows, V, dtype=torch.int32),
            weights=zeros(num_rows, V),
            sums=zeros(num_rows, 2, _BINS.value),
            fine=zeros(num_rows, 2, _FINE.value),
            chosen=zeros(num_sequences, dtype=torch.int32),
            host_logits=torch.zeros(logits.shape, pin_memory=device.type == "cuda"),
        )


OCCURRED = 1 << 30
_OCCURRED = tl.constexpr(OCCURRED)


def enter_rows(control: Tensor, options: Tensor, memory: ChoiceMemory, there: Tensor) -> None:
    """Copies a pass's rows and their options to the device; a negative token is the one chosen last for its sequence.

    Args:    control: int32 [n, R], tokens, positions, slots and more.   options: float64 [R, 9]; both page-locked.
             there: int32 [n, R], on the device.
    """
    _enter_kernel[(1,)](
        control, options, memory.chosen, there, memory.options, control.shape[1], control.numel(),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["control_ptr", "options_ptr"])
def _enter_kernel(control_ptr, options_ptr, chosen_ptr, there_ptr, options_there_ptr, R: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, triton.next_power_of_2(N))
    number = tl.load(control_ptr + at, mask=at < N, other=0)
    is_chosen = (at < R) & (number < 0)
    slot = tl.load(control_ptr + 2 * R + at, mask=is_chosen, other=0)
    number = tl.where(is_chosen, tl.load(chosen_ptr + slot, mask=is_chosen, other=0), number)
    tl.store(there_ptr + at, number, mask=at < N)
    at = tl.arange(0, triton.next_power_of_2(R * _OPTIONS))
    is_option = at < R * _OPTIONS
    tl.store(options_there_ptr + at, tl.load(options_ptr + at, mask=is_option, other=0.0), mask=is_option)


def choose(memory: ChoiceMemory, tokens: Tensor, num_rows: int) -> None:
    """Chooses the next token of the first rows' sequences, or copies their logits to the host.

    Args:    tokens: int32 [R], page-locked, overwritten: the token of a row, `NOT_FINITE` or `NONE_LEFT`; undefined if
             the host chooses.
    """
    (_, num_blocks), V = memory.best.shape, memory.logits.shape[1]
    _prepare_kernel[num_blocks, num_rows](memory, V, num_warps=4, enable_fp_fusion=True)
    _weigh_kernel[num_blocks, num_rows](memory, V, num_warps=4, enable_fp_fusion=True)
    _draw_kernel[(num_rows,)](memory, tokens, V, num_warps=16, enable_fp_fusion=True)


@triton.jit
def _option(memory, row, NUMBER: tl.constexpr):
    return tl.load(memory.options + row * _OPTIONS + NUMBER)


@triton.jit
def _changed(memory, row, v, V: tl.constexpr):
    """Returns logits float32 of some tokens, after the sequence's bias and penalties."""
    live, of_slot = v < V, tl.load(memory.slots + row) * V + v
    x = tl.load(memory.logits + row * V + v, mask=live, other=0.0)
    if _option(memory, row, _HAS_BIAS) != 0:
        x = tl.minimum(x + tl.load(memory.bias + of_slot, mask=live, other=0.0), _LARGEST)
    penalty = _option(memory, row, _REPETITION).to(tl.float32)
    frequency = _option(memory, row, _FREQUENCY).to(tl.float32)
    presence = _option(memory, row, _PRESENCE).to(tl.float32)
    if (penalty != 1.0) | (frequency != 0.0) | (presence != 0.0):
        found = tl.load(memory.counts + of_slot, mask=live, other=0)
        count = found & (_OCCURRED - 1)
        y = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty) if penalty != 1.0 else x
        y = y - (frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32))
        x = tl.where(found != 0, tl.minimum(y, _LARGEST), x)
    return x


_LARGEST = tl.constexpr(float(torch.finfo(torch.float32).max))


@triton.jit
def _prepare_kernel(memory, V: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, _BLOCK)
    v = block * _BLOCK + lanes
    live = v < V
    x = tl.load(memory.logits + row * V + v, mask=live, other=0.0)
    if _option(memory, row, _SCALE) < 0:
        tl.store(memory.host_logits + row * V + v, x, mask=live)
    else:
        is_wrong = (tl.abs(x) < float("inf")) == 0
        key = tl.max(keys_of(_changed(memory, row, v, V), v, live), 0)
        key = tl.where(tl.max(is_wrong.to(tl.int32), 0) > 0, _NO_NUMBER, key)
        tl.store(memory.best + row * tl.num_programs(0) + block, key)
        first = block * _BLOCK
        while first < 2 * _BINS:
            tl.store(memory.sums + row * 2 * _BINS + first + lanes, tl.zeros([_BLOCK], tl.int64))
            first += tl.num_programs(0) * _BLOCK


@triton.jit
def _likeliest(memory, row, V: tl.constexpr):
    """Returns the key and the logit of a row's likeliest token."""
    NUM_BLOCKS: tl.constexpr = (V + _BLOCK - 1) // _BLOCK
    place = tl.arange(0, triton.next_power_of_2(NUM_BLOCKS))
    keys = tl.load(memory.best + row * NUM_BLOCKS + place, mask=place < NUM_BLOCKS, other=-(2**63))
    key = tl.max(keys, 0)
    rising = (key >> 32).to(tl.int32)
    return key, tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)


@triton.jit
def _weigh_kernel(memory, V: tl.constexpr):
    row, scale = tl.program_id(1), _option(memory, tl.program_id(1), _SCALE)
    if scale > 0:
        key, most = _likeliest(memory, row, V)
        if (key != _NO_NUMBER) & (most > -float("inf")):
            v = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
            live, x = v < V, _changed(memory, row, v, V)
            allowed = live & (x > -float("inf"))
            far = (most.to(tl.float64) - tl.where(allowed, x, most).to(tl.float64)) * scale
            distance = tl.where(allowed, tl.minimum(far + 0.5, _FARTHEST), _FARTHEST).to(tl.int32)
            weight = (tl.exp(distance.to(tl.float64) * -_UNIT) * _WHOLE + 0.5).to(tl.int64)
            tl.store(memory.distances + row * V + v, distance, mask=live)
            tl.store(memory.weights + row * V + v, weight, mask=live)
            counts = weight > 0
            sums_ptr = memory.sums + row * 2 * _BINS + (distance >> (2 * _FINE_BITS))
            tl.atomic_add(sums_ptr + _BINS, weight, mask=counts, sem="relaxed")
            if _option(memory, row, _TOP_K) > 0:
                tl.atomic_add(sums_ptr, weight * 0 + 1, mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["tokens_ptr"])
def _draw_kernel(memory, tokens_ptr, V: tl.constexpr):
    row = tl.program_id(0)
    scale = _option(memory, row, _SCALE)
    if scale >= 0:
        slot = tl.load(memory.slots + row)
        key, most = _likeliest(memory, row, V)
        token = index_of(key)
        if key == _NO_NUMBER:
            token = _NOT_FINITE
        elif most == -float("inf"):
            token = _NONE_LEFT
        elif scale > 0:
            token = _drawn(memory, row, V)
        tl.store(tokens_ptr + row, token)
        tl.store(memory.chosen + slot, tl.maximum(token, 0))
        if token >= 0:
            count_ptr = memory.counts + slot * V + token
            tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def _drawn(memory, row, V: tl.constexpr):
    """Returns the token that a row's random number takes."""
    bins, sums_ptr = tl.arange(0, _BINS), memory.sums + row * 2 * _BINS
    num_tokens = tl.sum(tl.load(sums_ptr + bins), 0)
    total = tl.sum(tl.load(sums_ptr + _BINS + bins), 0)
    # All tokens up to this distance are kept; of that distance those up to this token.
    cut, last = _FARTHEST, V
    top_k, top_p = _option(memory, row, _TOP_K), _option(memory, row, _TOP_P)
    if (top_k > 0) & (num_tokens > top_k):
        cut, last, total = _cut(memory, row, top_k.to(tl.int64), True, V)
    if top_p < 1:
        # Tokens are kept as long as those before have less than this.
        enough = tl.minimum(tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1), total)
        cut, last, total = _cut(memory, row, enough, False, V)
    farthest = _option(memory, row, _MOST).to(tl.int32)
    if farthest < cut:
        cut, last = farthest, V
        _, total = _place(memory, row, cut, last, tl.max(bins.to(tl.int64) * 0 + (2**63 - 1), 0), False, V)
    point = (_option(memory, row, _UNIFORM) * total.to(tl.float64)).to(tl.int64)
    token, _ = _place(memory, row, cut, last, tl.minimum(point, total - 1) + 1, False, V)
    return token


@triton.jit
def _cut(memory, row, target, is_count, V: tl.constexpr):
    """Returns where so many of the likeliest tokens end, or those with so much weight.

    Returns: the distance of the last of them, the last of them with that distance, and the weight of all.
    """
    fine_ptr = memory.fine + row * 2 * _FINE
    none = target * 0
    first, number, weight, _, _ = _bin_of(memory.sums + row * 2 * _BINS, target, is_count, none, none, _BINS)
    _sum_finely(memory, row, first, _FINE_BITS, V)
    upper, number, weight, _, _ = _bin_of(fine_ptr, target, is_count, number, weight, _FINE)
    prefix = (first << _FINE_BITS) | upper
    _sum_finely(memory, row, prefix, 0, V)
    lower, number, weight, equals, theirs = _bin_of(fine_ptr, target, is_count, number, weight, _FINE)
    distance = (prefix << _FINE_BITS) | lower
    each = theirs // equals
    kept = tl.where(is_count, target - number, (target - weight + each - 1) // each)
    last = tl.zeros([], tl.int32) + V
    if kept < equals:
        last, _ = _place(memory, row, distance, last, kept, True, V)
    return distance, last, weight + kept * each


@triton.jit
def _bin_of(sums_ptr, target, is_count, number, weight, SIZE: tl.constexpr):
    """Returns the bin in which tokens, or weights, reach a target; these before it, and in it: bin, 2 and 2 numbers."""
    bins = tl.arange(0, SIZE)
    numbers, weights = tl.load(sums_ptr + bins), tl.load(sums_ptr + SIZE + bins)
    sums = tl.cumsum(tl.where(is_count, numbers, weights), 0) + tl.where(is_count, number, weight)
    own_bin = tl.minimum(tl.sum((sums < target).to(tl.int32), 0), SIZE - 1)
    before, own = bins < own_bin, bins == own_bin
    return (
        own_bin,
        number + tl.sum(tl.where(before, numbers, 0), 0),
        weight + tl.sum(tl.where(before, weights, 0), 0),
        tl.sum(tl.where(own, numbers, 0), 0),
        tl.sum(tl.where(own, weights, 0), 0),
    )


@triton.jit
def _sum_finely(memory, row, prefix, SHIFT: tl.constexpr, V: tl.constexpr):
    """Adds up the tokens, and the weights, whose distance begins with a prefix, by their next bits."""
    bins, lanes, fine_ptr = tl.arange(0, _FINE), tl.arange(0, _SUM_STEP), memory.fine + row * 2 * _FINE
    tl.debug_barrier()  # all threads have read the sums before
    tl.store(fine_ptr + bins, tl.zeros([_FINE], tl.int64))
    tl.store(fine_ptr + _FINE + bins, tl.zeros([_FINE], tl.int64))
    tl.debug_barrier()
    for first in loop_range(0, V, _SUM_STEP, num_stages=4):  # the loads of the next steps are on their way
        v = first + lanes
        distance = tl.load(memory.distances + row * V + v, mask=v < V, other=-1)
        inside = (distance >> (SHIFT + _FINE_BITS)) == prefix
        weight = tl.load(memory.weights + row * V + v, mask=inside, other=0)
        place = (distance >> SHIFT) & (_FINE - 1)
        tl.atomic_add(fine_ptr + place, weight * 0 + 1, mask=weight > 0, sem="relaxed")
        tl.atomic_add(fine_ptr + _FINE + place, weight, mask=weight > 0, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _place(memory, row, cut, last, target, IS_COUNT: tl.constexpr, V: tl.constexpr):
    """Returns the first token at which the kept tokens' weights reach a target, and their sum until then.

    Args:    cut, last: the largest distance of a kept token, and the last kept token with it.   IS_COUNT: tokens with
             that distance are counted instead.
    """
    first, before = 0, target * 0
    own = tl.sum(_amounts(memory, row, first, cut, last, IS_COUNT, V), 0)
    while (first + _STEP < V) & (before + own < target):
        before += own
        first += _STEP
        own = tl.sum(_amounts(memory, row, first, cut, last, IS_COUNT, V), 0)
    sums = before + tl.cumsum(_amounts(memory, row, first, cut, last, IS_COUNT, V), 0)
    return first + tl.sum((sums < target).to(tl.int32), 0), before + own


@triton.jit
def _amounts(memory, row, first, cut, last, IS_COUNT: tl.constexpr, V: tl.constexpr):
    """Returns what `_place` adds up, for some tokens: int64."""
    v = first + tl.arange(0, _STEP)
    distance = tl.load(memory.distances + row * V + v, mask=v < V, other=-1)
    if IS_COUNT:
        amount = (distance == cut).to(tl.int64)
    else:
        is_kept = (v < V) & ((distance < cut) | ((distance == cut) & (v <= last)))
        amount = tl.load(memory.weights + row * V + v, mask=is_kept, other=0)
    return amount
