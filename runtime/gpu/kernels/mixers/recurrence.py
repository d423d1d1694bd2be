"""Short convolutions and recurrences, of few rows of several sequences and of a prompt's many tokens.

Rows are one new token each of several sequences, or several of one. States are stacked: each sequence has a slot of its
own. Rows of one slot stand next to each other, in the order of their tokens. The program of a slot's first row takes
all of them, one after the other; those of its other rows do nothing. So a state is read and written once a launch, and
a row's result does not depend on rows of other slots.

A program of a recurrence keeps `[keys, columns]` of a state in registers: some values of one head, or, where a head has
one value (Mamba), many heads. The tokens of a prompt all belong to one state. A program takes them in chunks, whose
tokens see each other by products of matrices, if a head has one decay, and else one after the other.
Twin: `runtime.model.compute.recurrence`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.grids import dot_precision, launch_options, wait_for_earlier
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.gpu.kernels.rows import loop_range
from moe_pack.runtime.model.caches import states
from moe_pack.runtime.model.compute import recurrence

_CHANNELS = 256  # of a convolution that a program takes
_MOST_KEPT = 4096  # values of a convolution's state that a program shifts at once
_COLUMNS = 32  # values of a head that a program takes: 128 bytes, a cache line
_HEADS = 64  # that a program takes where each has one value
_WARP_VALUES = 1024  # of a recurrent state; with more, a thread has too few registers
_MOST_WARPS = 8
_CHUNK_TOKENS = tl.constexpr(16)  # the least rows and columns that tensor cores multiply
_KEYS_AT_ONCE = 32  # of a chunk's products: more take more registers than there are
_CONVOLVED_TOKENS = 16  # of a prompt that a program takes


@dataclass(frozen=True, slots=True)
class TokenStates(states.LayerState):
    """A layer's states of many sequences: `conv` and `recurrent` are stacked, a slot each; and the slots of rows."""

    slots: Tensor  # int32 [T]; rows of one slot stand next to each other, in the order of their tokens


class _Convolution(NamedTuple):
    rows: int
    channels: int
    taps: int
    dilation: int
    tile: int  # channels of a program
    stride: int  # of the inputs' rows
    activates: bool


def convolve_step(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    out: Tensor,
    dilation: int = 1,
    activates: bool = False,
) -> None:
    """Writes a causal convolution of each channel to `out`; the rows' slots keep the last inputs.

    Args:    x: float32 [T, channels]; rows are contiguous, and may be parts of longer ones.   kernel: float32
             [channels * taps], a channel's taps together, the newest last.   bias: float32 [channels].
             state: float32 [slots, (taps - 1) * dilation, channels], contiguous.   slots: int32 [T], see `TokenStates`.
             out: float32 [T, channels], contiguous, in different memory than x.   activates: whether silu follows.
    """
    num_rows, num_channels = x.shape
    taps = kernel.numel() // num_channels
    kept = triton.next_power_of_2(max((taps - 1) * dilation, 1))
    tile = min(triton.next_power_of_2(num_channels), _CHANNELS, max(_MOST_KEPT // kept, 1))
    how = _Convolution(num_rows, num_channels, taps, dilation, tile, x.stride(0), activates)
    _convolve_kernel[(triton.cdiv(num_channels, tile), num_rows)](
        x, kernel, bias, state, slots, out, how, num_warps=4, enable_fp_fusion=True, **launch_options()
    )


@triton.jit
def _convolve_kernel(x_ptr, kernel_ptr, bias_ptr, state_ptr, slots_ptr, out_ptr, HOW: tl.constexpr):
    CHANNELS: tl.constexpr = HOW.channels
    TILE: tl.constexpr = HOW.tile
    TAPS: tl.constexpr = HOW.taps
    KEPT: tl.constexpr = (HOW.taps - 1) * HOW.dilation
    STRIDE: tl.constexpr = HOW.stride
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_channel = c < CHANNELS
    wait_for_earlier()
    first, num_rows, slot = _rows_of_slot(slots_ptr, HOW.rows)
    if num_rows > 0:
        state_ptr += slot * (KEPT * CHANNELS)
        x_ptr += first * STRIDE
        out_ptr += first * CHANNELS
        for row in loop_range(0, num_rows):
            y = tl.zeros([TILE], tl.float32)
            for tap in tl.static_range(TAPS):
                at = row - (TAPS - 1 - tap) * HOW.dilation  # of the input among the slot's rows
                # Inputs before the rows are the state's. (ROCm's compiler fails at a choice between two pointers.)
                earlier = tl.load(state_ptr + (KEPT + at) * CHANNELS + c, mask=is_channel & (at < 0), other=0.0)
                new = tl.load(x_ptr + at * STRIDE + c, mask=is_channel & (at >= 0), other=0.0)
                weight = tl.load(kernel_ptr + c * TAPS + tap, mask=is_channel, other=0.0)
                y += weight * tl.where(at < 0, earlier, new)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + c, mask=is_channel, other=0.0)
            if HOW.activates:
                y = y / (1.0 + tl.exp(-y))
            tl.store(out_ptr + row * CHANNELS + c, y, mask=is_channel)
        if KEPT > 0:
            # The state's inputs move up. Another thread may store where this one has loaded: all load first.
            kept = tl.arange(0, triton.next_power_of_2(KEPT))[:, None]
            is_kept, source = (kept < KEPT) & is_channel[None, :], kept + num_rows
            earlier = tl.load(state_ptr + source * CHANNELS + c[None, :], mask=is_kept & (source < KEPT), other=0.0)
            new = tl.load(x_ptr + (source - KEPT) * STRIDE + c[None, :], mask=is_kept & (source >= KEPT), other=0.0)
            tl.debug_barrier()
            moved = tl.where(source < KEPT, earlier, new)
            tl.store(state_ptr + kept * CHANNELS + c[None, :], moved, mask=is_kept)


def convolve_prompt(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor,
    out: Tensor,
    dilation: int = 1,
    activates: bool = False,
) -> None:
    """Writes `convolve_step` of tokens that all belong to one state, float32 [(taps - 1) * dilation, channels]."""
    (num_tokens, num_channels), kept = x.shape, len(state)
    taps = kernel.numel() // num_channels
    tile = min(triton.next_power_of_2(num_channels), _CHANNELS)
    how = _Convolution(_CONVOLVED_TOKENS, num_channels, taps, dilation, tile, x.stride(0), activates)
    _convolve_prompt_kernel[(triton.cdiv(num_channels, tile), triton.cdiv(num_tokens, how.rows))](
        x, kernel, bias, state, out, num_tokens, how, num_warps=4, enable_fp_fusion=True, **launch_options()
    )
    if kept:
        state.copy_(x[num_tokens - kept :] if num_tokens >= kept else torch.cat((state, x))[num_tokens:])


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_prompt_kernel(x_ptr, kernel_ptr, bias_ptr, state_ptr, out_ptr, num_tokens, HOW: tl.constexpr):
    CHANNELS: tl.constexpr = HOW.channels
    TAPS: tl.constexpr = HOW.taps
    KEPT: tl.constexpr = (HOW.taps - 1) * HOW.dilation
    TILE: tl.constexpr = HOW.tile
    TOKENS: tl.constexpr = HOW.rows
    c = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[:, None]
    is_channel = c < CHANNELS
    is_there = is_channel & (token < num_tokens)
    wait_for_earlier()
    y = tl.zeros([TOKENS, TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap) * HOW.dilation
        # Inputs before the prompt are the state's. (ROCm's compiler fails at a choice between two pointers.)
        earlier = tl.load(state_ptr + (KEPT + at) * CHANNELS + c, mask=is_there & (at < 0), other=0.0)
        new = tl.load(x_ptr + at * HOW.stride + c, mask=is_there & (at >= 0), other=0.0)
        y += tl.load(kernel_ptr + c * TAPS + tap, mask=is_channel, other=0.0) * tl.where(at < 0, earlier, new)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=is_channel, other=0.0)
    if HOW.activates:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + token * CHANNELS + c, y, mask=is_there)


@triton.jit
def _rows_of_slot(slots_ptr, ROWS: tl.constexpr):
    """Returns the program's row, how many rows it takes (none if the slot has an earlier one), and the slot."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if ROWS == 1:
        num_rows = 1
    else:
        others = tl.arange(0, triton.next_power_of_2(ROWS))
        is_same = tl.load(slots_ptr + others, mask=others < ROWS, other=-1) == slot
        num_earlier = tl.sum((is_same & (others < row)).to(tl.int32))
        num_rows = tl.where(num_earlier == 0, tl.sum(is_same.to(tl.int32)), 0)
    return row, num_rows, slot.to(tl.int64)


# How decays, rates and values are given: as they are, or as Gated DeltaNet's or Mamba-2's gates.
_PLAIN, _DELTA, _MAMBA2 = (tl.constexpr(number) for number in range(3))
_L2_EPS = tl.constexpr(recurrence.L2_EPS)


class _Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rate: Tensor | None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    skip: Tensor | None = None


class _Recurrence(NamedTuple):
    rows: int  # 0: those of a prompt, whose number is no constant
    key_heads: int
    heads: int
    keys: int
    block_keys: int  # a power of two
    keys_at_once: int  # of a chunk's products
    width: int  # values of a head
    tile: int  # values, or heads, of a program
    form: int
    is_keyed: bool  # each key has a decay
    strides: tuple[int, ...]  # of rows: of queries, keys, values, decays and rates
    least_step: float


def recur_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    out: Tensor,
) -> None:
    """Writes what each row reads from its slot's recurrent state to `out`, after the row has updated it.

    Args:    q, k: float32 [T, key heads, keys]; a key head serves consecutive value heads.   v: float32 [T, heads,
             values].   log_decay: float32 [T, heads], or [T, heads, keys].   rate: float32 [T, heads]; None: each row
             adds its value as it is.   state: float32 [slots, heads, keys, values].   slots: int32 [T], see
             `TokenStates`; None: all rows belong to one state, [heads, keys, values].   out: as v.
             Rows of all but state and out are contiguous, and may be parts of longer ones; heads of one value have one
             key head. state and out are contiguous.
    """
    _recur(_Given(q, k, v, log_decay, rate), _PLAIN, 0.0, state, slots, out)


def gated_step(
    q: Tensor, k: Tensor, v: Tensor, gates: recurrence.Gates, state: Tensor, slots: Tensor | None, out: Tensor
) -> None:
    """Writes `recur_step` with decays and rates that follow from gates to `out`; arguments are as there."""
    form = _MAMBA2 if gates.rates is None else _DELTA
    given = _Given(q, k, v, gates.steps, gates.rates, gates.a_log, gates.dt_bias, gates.skip)
    _recur(given, form, gates.least_step, state, slots, out)


def _recur(
    given: _Given, form: tl.constexpr, least_step: float, state: Tensor, slots: Tensor | None, out: Tensor
) -> None:
    num_rows, num_heads, width = given.v.shape
    key_heads, num_keys = given.k.shape[1:]
    assert width > 1 or key_heads == 1, "heads of one value share their key head"
    is_chunked = slots is None and width > 1 and given.decay.dim() == 2
    most, columns = (_COLUMNS, width) if width > 1 else (_HEADS, num_heads)
    least = _CHUNK_TOKENS.value if is_chunked else 1
    tile = max(min(triton.next_power_of_2(columns), most), least)
    block_keys = max(triton.next_power_of_2(num_keys), least)
    rate = given.decay if given.rate is None else given.rate
    shape = _Recurrence(
        0 if slots is None else num_rows, key_heads, num_heads, num_keys, block_keys, min(block_keys, _KEYS_AT_ONCE),
        width, tile, form.value, given.decay.dim() == 3,
        tuple(each.stride(0) for each in (given.q, given.k, given.v, given.decay, rate)), least_step,
    )  # fmt: skip
    num_programs = triton.cdiv(columns, tile) * (num_heads if width > 1 else 1)
    num_warps = min(max(block_keys * tile // _WARP_VALUES, 1), _MOST_WARPS)
    if is_chunked:
        _chunk_kernel[(num_programs,)](
            given, state, out, num_rows, shape, num_warps=num_warps, enable_fp_fusion=True, **launch_options()
        )
    else:
        _recur_kernel[(num_programs, shape.rows or 1)](
            given, state, slots, out, num_rows, shape, num_warps=num_warps, enable_fp_fusion=True, **launch_options()
        )


@triton.jit(do_not_specialize=["num_rows"])
def _recur_kernel(given, state_ptr, slots_ptr, out_ptr, num_rows, SHAPE: tl.constexpr):
    HEAD_VALUES: tl.constexpr = SHAPE.keys * SHAPE.width
    head, column, is_column = _columns(SHAPE)
    wait_for_earlier()
    first, slot = 0, 0
    if slots_ptr is not None:
        first, num_rows, slot = _rows_of_slot(slots_ptr, SHAPE.rows)
    if num_rows > 0:
        place, is_place = _places(head, tl.arange(0, SHAPE.block_keys), column, is_column, SHAPE)
        places = state_ptr + slot * (SHAPE.heads * HEAD_VALUES) + place
        state = tl.load(places, mask=is_place, other=0.0)
        for row in loop_range(first, first + num_rows):
            state, y = _add_row(state, given, row, head, column, is_column, SHAPE)
            tl.store(out_ptr + row * (SHAPE.heads * SHAPE.width) + column, y, mask=is_column)
        tl.store(places, state, mask=is_place)


@triton.jit(do_not_specialize=["num_tokens"])
def _chunk_kernel(given, state_ptr, out_ptr, num_tokens, SHAPE: tl.constexpr):
    """Takes the tokens of a prompt in chunks, between which a program's part of the state is in memory."""
    STRIDES: tl.constexpr = SHAPE.strides
    C: tl.constexpr = _CHUNK_TOKENS
    head, column, is_column = _columns(SHAPE)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    wait_for_earlier()
    for start in loop_range(0, num_tokens, C):
        token = start + tl.arange(0, C)
        is_token = token < num_tokens
        is_value = is_token[:, None] & is_column[None, :]
        given_v = tl.load(given.v + token[:, None] * STRIDES[2] + column[None, :], mask=is_value, other=0.0)
        log_decay, v = _decays_and_values(given, given_v, token, is_token, head, SHAPE)
        # Small differences of large sums count.
        total, all_decays = tl.cumsum(log_decay.to(tl.float64), 0), tl.sum(log_decay.to(tl.float64), 0)
        since = tl.where(j <= i, (total[:, None] - total[None, :]).to(tl.float32), -float("inf"))
        decay, from_start = tl.exp(since), tl.exp(total.to(tl.float32))
        qk, q_state, kk, k_state, q_squares, k_squares = _chunk_products(
            given, state_ptr, token, is_token, head, column, is_column, SHAPE
        )
        q_scale, k_scale = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
        if SHAPE.form == _DELTA:
            FACTOR: tl.constexpr = SHAPE.keys**-0.5
            q_scale, k_scale = tl.rsqrt(q_squares + _L2_EPS) * FACTOR, tl.rsqrt(k_squares + _L2_EPS)
        if given.rate is not None:
            rate = tl.load(given.rate + token * STRIDES[4] + head, mask=is_token, other=0.0)
            if SHAPE.form == _DELTA:
                rate = 1.0 / (1.0 + tl.exp(-rate))
            # Of what tokens write, each corrects those before it: a triangular system instead of one token at a time.
            system = kk * tl.trans(decay) * k_scale[:, None] * (k_scale * rate)[None, :]
            wanted = rate[:, None] * (v - k_state * (k_scale * from_start)[:, None])
            v = tl.dot(_inverse(system), wanted, input_precision=dot_precision())
        y = q_state * (q_scale * from_start)[:, None]
        y = tl.dot(qk * decay * q_scale[:, None] * k_scale[None, :], v, y, input_precision=dot_precision())
        if given.skip is not None:
            y += given_v * tl.load(given.skip + head)
        tl.store(out_ptr + token[:, None] * (SHAPE.heads * SHAPE.width) + column[None, :], y, mask=is_value)
        to_end = k_scale * tl.exp((all_decays - total).to(tl.float32))
        left = tl.exp(all_decays.to(tl.float32))
        _add_to_state(given.k, v, to_end, left, state_ptr, token, is_token, head, column, is_column, SHAPE)
        tl.debug_barrier()  # the next chunk's threads read what these have written


@triton.jit
def _decays_and_values(given, v, token, is_token, head, SHAPE: tl.constexpr):
    """Returns the logarithms of a chunk's decays [C], and the values [C, columns] that are added to the state."""
    log_decay = tl.load(given.decay + token * SHAPE.strides[3] + head, mask=is_token, other=0.0)
    if SHAPE.form != _PLAIN:
        step = _softplus(log_decay + tl.load(given.dt_bias + head))
        step = tl.where(step < SHAPE.least_step, SHAPE.least_step, step)
        log_decay = tl.where(is_token, -tl.exp(tl.load(given.a_log + head)) * step, 0.0)
        if SHAPE.form == _MAMBA2:
            v *= step[:, None]
    return log_decay, v


@triton.jit
def _chunk_products(given, state_ptr, token, is_token, head, column, is_column, SHAPE: tl.constexpr):
    """Returns the products of a chunk's queries with its keys and the state, likewise of its keys, and both's squares.

    Returns: [C, C], [C, columns], again [C, C], [C, columns], and sums of squares [C] and [C].
    """
    C: tl.constexpr = _CHUNK_TOKENS
    TILE: tl.constexpr = SHAPE.tile
    STRIDES: tl.constexpr = SHAPE.strides
    qk, kk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    q_state, k_state = tl.zeros([C, TILE], tl.float32), tl.zeros([C, TILE], tl.float32)
    q_squares, k_squares = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for begin in range(0, SHAPE.block_keys, SHAPE.keys_at_once):
        key, key_at, is_key = _keys_of(begin, token, is_token, head, SHAPE)
        q = tl.load(given.q + token[:, None] * STRIDES[0] + key_at, mask=is_key, other=0.0)
        k = tl.load(given.k + token[:, None] * STRIDES[1] + key_at, mask=is_key, other=0.0)
        place, is_place = _places(head, key, column, is_column, SHAPE)
        state = tl.load(state_ptr + place, mask=is_place, other=0.0)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=dot_precision())
        q_state = tl.dot(q, state, q_state, input_precision=dot_precision())
        if given.rate is not None:
            kk = tl.dot(k, tl.trans(k), kk, input_precision=dot_precision())
            k_state = tl.dot(k, state, k_state, input_precision=dot_precision())
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
    return qk, q_state, kk, k_state, q_squares, k_squares


@triton.jit
def _add_to_state(
    k_ptr, v, to_end, left, state_ptr, token, is_token, head, column, is_column, SHAPE: tl.constexpr
):  # fmt: skip
    """Adds a chunk's values, as far as they are left at its end, to what is left of the state.

    Args:    v: [C, columns].   to_end: [C], with the keys' scale.   left: of the state.
    """
    for begin in range(0, SHAPE.block_keys, SHAPE.keys_at_once):
        key, key_at, is_key = _keys_of(begin, token, is_token, head, SHAPE)
        k = tl.load(k_ptr + token[:, None] * SHAPE.strides[1] + key_at, mask=is_key, other=0.0)
        place, is_place = _places(head, key, column, is_column, SHAPE)
        state = left * tl.load(state_ptr + place, mask=is_place, other=0.0)
        state = tl.dot(tl.trans(k * to_end[:, None]), v, state, input_precision=dot_precision())
        tl.debug_barrier()  # another thread may store where this one has loaded: all load first
        tl.store(state_ptr + place, state, mask=is_place)


@triton.jit
def _keys_of(begin, token, is_token, head, SHAPE: tl.constexpr):
    """Returns some keys of a head, their places in a token's row [1, K], and a mask [C, K]."""
    key = begin + tl.arange(0, SHAPE.keys_at_once)
    key_head = head // (SHAPE.heads // SHAPE.key_heads)
    return key, (key_head * SHAPE.keys + key)[None, :], is_token[:, None] & (key < SHAPE.keys)[None, :]


@triton.jit
def _inverse(system):
    """Returns the inverse of the triangular matrix with ones whose part below them is transposed in `system` [C, C]."""
    C: tl.constexpr = _CHUNK_TOKENS
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for row in tl.static_range(1, C):
        weights = tl.sum(tl.where((j == row) & (i < row), system, 0.0), 1)
        inverse -= tl.where(i == row, tl.sum(weights[:, None] * inverse, 0)[None, :], 0.0)
    return inverse


@triton.jit
def _columns(SHAPE: tl.constexpr):
    """Returns the head of all or each of the program's columns, their places among all heads' values, and a mask."""
    block, place = tl.program_id(0), tl.arange(0, SHAPE.tile)
    if SHAPE.width == 1:
        column = block * SHAPE.tile + place
        is_column = column < SHAPE.heads
        head = column
    else:
        NUM_BLOCKS: tl.constexpr = (SHAPE.width + SHAPE.tile - 1) // SHAPE.tile  # of a head
        head = block // NUM_BLOCKS
        place += block % NUM_BLOCKS * SHAPE.tile
        is_column = place < SHAPE.width
        column = head * SHAPE.width + place
    return head, column, is_column


@triton.jit
def _places(head, key, column, is_column, SHAPE: tl.constexpr):
    """Returns the places of some keys' values in a state [keys, columns], and a mask."""
    place = (head * (SHAPE.keys * SHAPE.width) + column - head * SHAPE.width)[None, :] + key[:, None] * SHAPE.width
    return place, (key < SHAPE.keys)[:, None] & is_column[None, :]


@triton.jit
def _add_row(state, given, row, head, column, is_column, SHAPE: tl.constexpr):
    """Returns the state [keys, columns] after a row, and what the row reads from it [columns]."""
    STRIDES: tl.constexpr = SHAPE.strides
    key = tl.arange(0, SHAPE.block_keys)
    is_key = key < SHAPE.keys
    key_head = 0 if SHAPE.width == 1 else head // (SHAPE.heads // SHAPE.key_heads)
    q = tl.load(given.q + row * STRIDES[0] + key_head * SHAPE.keys + key, mask=is_key, other=0.0)
    k = tl.load(given.k + row * STRIDES[1] + key_head * SHAPE.keys + key, mask=is_key, other=0.0)
    given_v = tl.load(given.v + row * STRIDES[2] + column, mask=is_column, other=0.0)
    decay_ptr = given.decay + row * STRIDES[3]
    v = given_v
    # Decays, and with gates what follows from the same numbers.
    if SHAPE.is_keyed and SHAPE.width == 1:
        is_decay = is_key[:, None] & is_column[None, :]
        decay = tl.exp(tl.load(decay_ptr + (head * SHAPE.keys)[None, :] + key[:, None], mask=is_decay, other=0.0))
    elif SHAPE.is_keyed:
        decay = tl.exp(tl.load(decay_ptr + head * SHAPE.keys + key, mask=is_key, other=0.0))[:, None]
    elif SHAPE.form == _PLAIN:
        decay = tl.exp(_of_heads(decay_ptr, head, is_column, SHAPE))
    else:
        dt_bias, a_log = (
            _of_heads(given.dt_bias, head, is_column, SHAPE),
            _of_heads(given.a_log, head, is_column, SHAPE),
        )
        step = _softplus(_of_heads(decay_ptr, head, is_column, SHAPE) + dt_bias)
        step = tl.where(step < SHAPE.least_step, SHAPE.least_step, step)
        decay = tl.exp(-tl.exp(a_log) * step)
        if SHAPE.form == _DELTA:
            FACTOR: tl.constexpr = SHAPE.keys**-0.5
            q = q * tl.rsqrt(tl.sum(q * q) + _L2_EPS) * FACTOR
            k = k * tl.rsqrt(tl.sum(k * k) + _L2_EPS)
        else:
            v *= step
    state *= decay
    if given.rate is not None:
        rate = _of_heads(given.rate + row * STRIDES[4], head, is_column, SHAPE)
        if SHAPE.form == _DELTA:
            rate = 1.0 / (1.0 + tl.exp(-rate))
        v = rate * (v - tl.sum(k[:, None] * state, 0))
    state += k[:, None] * v[None, :]
    y = tl.sum(q[:, None] * state, 0)
    if given.skip is not None:
        y += given_v * _of_heads(given.skip, head, is_column, SHAPE)
    return state, y


@triton.jit
def _of_heads(numbers_ptr, head, is_column, SHAPE: tl.constexpr):
    """Loads a number of each of the program's heads: a float32, or [columns] where each column is a head."""
    if SHAPE.width == 1:
        numbers = tl.load(numbers_ptr + head, mask=is_column, other=0.0)
    else:
        numbers = tl.load(numbers_ptr + head)
    return numbers


@triton.jit
def _softplus(x):
    """Returns `log(1 + exp(x))`, precise for small results too: `log(1 + s) = 2 artanh(s / (2 + s))`, by its series."""
    small = tl.exp(-tl.abs(x))
    z = small / (2.0 + small)  # at most 1/3: eight terms give float32
    series = tl.zeros_like(z)
    for term in tl.static_range(8):
        series = series * (z * z) + 1.0 / (15 - 2 * term)
    return tl.where(x > 0, x, 0.0) + 2.0 * z * series


class TokenOperations(GpuOperations):
    """The operations of rows and of prompts: what is many launches of mixers in torch is one or two here."""

    def convolve(
        self,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        state: states.LayerState,
        *,
        dilation: int = 1,
        activates: bool = False,
    ) -> Tensor:
        """Returns the short convolution of x float32 [T, channels]."""
        x, out = _with_rows(x), x.new_empty(x.shape)
        if isinstance(state, TokenStates):
            convolve_step(x, kernel, bias, state.conv, state.slots, out, dilation, activates)
        else:
            convolve_prompt(x, kernel, bias, state.conv, out, dilation, activates)
        return out

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: states.LayerState
    ) -> Tensor:
        """Returns the tokens' reads from recurrent states, float32 [T, heads, values]."""
        q, k, v, log_decay = (_with_rows(each) for each in (q, k, v, log_decay))
        out, slots = v.new_empty(v.shape), state.slots if isinstance(state, TokenStates) else None
        recur_step(q, k, v, log_decay, None if rate is None else _with_rows(rate), state.recurrent, slots, out)
        return out

    def recur_gated(self, q: Tensor, k: Tensor, v: Tensor, gates: recurrence.Gates, state: states.LayerState) -> Tensor:
        """Returns `recur` with decays and rates that follow from gates."""
        q, k, v = (_with_rows(each) for each in (q, k, v))
        out, slots = v.new_empty(v.shape), state.slots if isinstance(state, TokenStates) else None
        gated_step(q, k, v, gates, state.recurrent, slots, out)
        return out


def _with_rows(x: Tensor) -> Tensor:
    """Returns x [T, ...] with contiguous rows."""
    return x if x[0].is_contiguous() else x.contiguous()
