"""Experts for many tokens: all experts of a layer that are in the arena, in a few launches.

A *pair* is a token and one of its experts. `pairs_by_expert` lists a pass's pairs in the order in which experts run.
`plan_tiles` cuts each expert's pairs into tiles of at most as many as a program takes. Both run on the host.
`run_group` computes some experts in two steps: one writes each neuron's output (0 if it does not run), the other the
down product times the router's weight, into a row of `outputs` that belongs to the pair alone. `combine` adds a
token's rows in ascending order of experts. So the sum depends neither on which experts run together nor on their
order. The twin is `run_expert` in `runtime.model.compute.expert`.

If x is float32, products are as exact as float32's (`dot_exact`). If x is bfloat16, products take bfloat16 on tensor
cores and are summed in float32: neurons' outputs are rounded to bfloat16 too. Weights are exact in it, apart from
plain values of 16 or 32 bits, which are rounded; scales multiply the products.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, act, factor
from moe_pack.runtime.gpu.kernels.matmul import MAX_TOKENS, MAX_TOKENS_IN_TWO, TokenTile, num_warps
from moe_pack.runtime.gpu.kernels.products import add_product, load_tile, load_tokens, multiply, runs, tile_cols
from moe_pack.runtime.gpu.kernels.rows import (
    AFFINE,
    UNITS,
    RowPart,
    has_scales,
    has_wide_entries,
    load_bias,
    load_scales,
    lookup_for,
)
from moe_pack.runtime.gpu.kernels.tables import ExpertKind, StoredPart

Numbers = NDArray[np.int32]

MIN_BLOCK = 16  # tokens of the smallest tile: a tensor core's product has no fewer
_HIDDEN_BYTES = 64 << 20  # of the neurons' outputs that are in memory at once; more do not make a pass faster
_BY_UP, _BY_GATE, _BY_OUTPUT = (tl.constexpr(number) for number in range(3))  # the value that the threshold cuts
_BLOCK_NEURONS = 64  # of a program that computes neurons' outputs: as tensor cores of sm_90 take


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """G experts that run together, with all their rows in an arena; all tensors are contiguous, on one device."""

    arena: Tensor  # u8, its first byte at a multiple of 128
    selector_units: Tensor | None  # [G, f], a row's offset in units of 16 bytes; None if no selector is stored
    record_units: Tensor  # likewise
    thresholds: Tensor  # float32 [G]
    kinds: tuple[ExpertKind, ...]  # of these experts
    down_bias: Tensor | None = None  # float32 [G, d], if experts have one


class Pairs(NamedTuple):
    """Pairs in the order in which experts run, on the host."""

    tokens: Numbers  # int32 [N]
    places: Numbers  # int32 [N], each pair's row of `outputs`: t * k + how many of the token's experts are lower
    weights: NDArray[np.float32]  # [N], the router's
    counts: NDArray[np.int64]  # [E], pairs of each expert, in the order in which they run


def pairs_by_expert(experts: NDArray[np.integer], weights: NDArray[np.float32], order: NDArray[np.integer]) -> Pairs:
    """Returns the pairs of T tokens, by the place of their expert in `order`, then by token.

    Args:    experts: [T, k], different in each row.   weights: float32 [T, k].   order: [E], every expert once.
    """
    k = experts.shape[1]
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    keys = place_of[experts].ravel()
    pairs = np.argsort(keys, kind="stable")
    lower = experts.argsort(axis=1).argsort(axis=1).ravel()  # how many of the token's experts have a lower number
    tokens = pairs // k
    return Pairs(
        tokens.astype(np.int32),
        (tokens * k + lower[pairs]).astype(np.int32),
        weights.ravel()[pairs],
        np.bincount(keys, minlength=len(order)),
    )


class Launch(NamedTuple):
    """Tiles `first` to `stop` of a plan, of experts of one kind (its place in `ExpertGroup.kinds`)."""

    kind: int
    block_tokens: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Pairs, from `first_pair` on, whose neurons' outputs are in memory at once; and the launches for them."""

    first_pair: int
    hidden: tuple[Launch, ...]
    down: tuple[Launch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The division of a group's pairs among programs."""

    tiles: Numbers  # int32 [num_tiles, 3], on the host: the expert's place in the group, the first pair, how many pairs
    pieces: tuple[Piece, ...]


def plan_tiles(
    counts: NDArray[np.integer],
    kind_idx: NDArray[np.integer],
    kinds: tuple[ExpertKind, ...],
    hidden_rows: int,
    is_bf16: bool,
) -> TilePlan:
    """Returns the tiles of a group, whose pairs are numbered from 0 on.

    Args:    counts: [G], pairs of each expert.   kind_idx: [G], each expert's place in `kinds`.   hidden_rows: of
             the workspace, `max_pairs` or fewer.   is_bf16: whether x is bfloat16.
    """
    tiles, pieces, num_tiles = [np.zeros((0, 3), np.int32)], [], 0
    ends = counts.cumsum()
    for start in range(0, int(counts.sum()), hidden_rows):
        firsts = np.maximum(ends - counts, start)
        here = np.maximum(np.minimum(ends, start + hidden_rows) - firsts, 0)
        hidden: list[Launch] = []
        down: list[Launch] = []
        for number, kind in enumerate(kinds):
            experts = np.flatnonzero((kind_idx == number) & (here > 0))
            for launches, most in ((hidden, _most_hidden_tokens(kind, is_bf16)), (down, MAX_TOKENS)):
                for block, cut in _cut(experts, firsts[experts], here[experts], most):
                    launches.append(Launch(number, block, num_tiles, num_tiles + len(cut)))
                    tiles.append(cut)
                    num_tiles += len(cut)
        pieces.append(Piece(start, tuple(hidden), tuple(down)))
    return TilePlan(np.concatenate(tiles), tuple(pieces))


def _cut(
    experts: NDArray[np.integer], firsts: NDArray[np.integer], counts: NDArray[np.integer], most: int
) -> Iterator[tuple[int, Numbers]]:
    """Yields tiles by size, largest first: `most` pairs, and the rest of each expert in the smallest tile that fits."""
    num_whole = counts // most
    nth = np.arange(num_whole.sum()) - np.repeat(num_whole.cumsum() - num_whole, num_whole)
    begins = np.repeat(firsts, num_whole) + nth * most
    whole = np.stack([np.repeat(experts, num_whole), begins, np.full(len(nth), most)], axis=1)
    rest = counts - num_whole * most
    rests = np.stack([experts, firsts + num_whole * most, rest], axis=1)
    block = most
    while block >= MIN_BLOCK:
        less = block // 2 if block > MIN_BLOCK else 0
        fitting = rests[(rest > less) & (rest <= block)]
        tiles = np.concatenate([whole, fitting]) if block == most else fitting
        if len(tiles):
            yield block, tiles.astype(np.int32)
        block //= 2


def max_pairs(chunk_tokens: int, k: int, num_rows: int) -> int:
    """Returns the rows of `hidden` for passes of so many tokens, each with k experts of `num_rows` neurons."""
    most = max(MAX_TOKENS, _HIDDEN_BYTES // (4 * num_rows) // MAX_TOKENS * MAX_TOKENS)
    return min(chunk_tokens * k, most)


def run_group(
    x: Tensor,
    tokens: Tensor,
    places: Tensor,
    weights: Tensor,
    group: ExpertGroup,
    plan: TilePlan,
    tiles: Tensor,
    hidden: Tensor,
    outputs: Tensor,
) -> None:
    """Writes the outputs of a group's experts, times the router's weights, to their pairs' rows of `outputs`.

    Args:    x: float32 or bfloat16 [T, d], contiguous; its dtype says how products are computed.   tokens, places:
             int32 [N], weights: float32 [N], the group's part of `Pairs`.   tiles: `plan.tiles` on the device.
             hidden: float32 [hidden_rows of the plan, f], contiguous, overwritten.
             outputs: float32 [T * k, d], contiguous.
    """
    for piece in plan.pieces:
        for launch in piece.hidden:
            _launch_hidden(x, tokens, group, tiles, launch, piece.first_pair, hidden)
        for launch in piece.down:
            is_bf16 = x.dtype == torch.bfloat16
            _launch_down(hidden, places, weights, group, tiles, launch, piece.first_pair, outputs, is_bf16)


class _Rows(NamedTuple):
    arena: Tensor
    gate: Tensor | None  # [G, f], where the rows are that contain gate
    up: Tensor
    down: Tensor
    thresholds: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, group: ExpertGroup, kind: ExpertKind) -> "_Rows":
        def table(part: StoredPart) -> Tensor:
            units = group.selector_units if part.in_selector else group.record_units
            assert units is not None, "a matrix of selector rows needs their table"
            return units

        gate = None if kind.gate is None else table(kind.gate)
        return cls(group.arena, gate, table(kind.up), table(kind.down), group.thresholds, group.down_bias)


class _Neurons(NamedTuple):
    gate: RowPart | None
    up: RowPart
    selector: int
    function: int
    f: int


def combine(outputs: Tensor, y: Tensor) -> None:
    """Writes the sum of each token's rows of `outputs`, float32 [T * k, d], in order, to y float32 [T, d]."""
    num_tokens, d = y.shape
    _combine[num_tokens, triton.cdiv(d, _COMBINED)](
        outputs, y, len(outputs) // num_tokens, d, _COMBINED, num_warps=4, enable_fp_fusion=True
    )


def _most_hidden_tokens(kind: ExpertKind, is_bf16: bool) -> int:
    """Returns the most tokens of a program for neurons' outputs whose registers do not spill."""
    parts = tuple(part.part for part in (kind.gate, kind.up) if part is not None)
    # With codes of 1 bit, and with words of two registers from a trellis's table, 32 tokens spill registers (sm_120).
    is_wide = has_wide_entries(parts) or any(part.bits == 1 for part in parts)
    most = MAX_TOKENS_IN_TWO // 2 if is_wide else MAX_TOKENS_IN_TWO
    return 2 * most if is_bf16 else most


def _summed_neurons(part: RowPart, is_bf16: bool) -> int:
    """Returns how many neurons' down rows are multiplied at once: more of them take fewer instructions."""
    return 32 if not is_bf16 or has_wide_entries((part,)) else 64  # or registers spill (sm_80)


class _Down(NamedTuple):
    part: RowPart
    f: int
    is_bf16: bool
    tile: TokenTile


def _launch_hidden(
    x: Tensor, tokens: Tensor, group: ExpertGroup, tiles: Tensor, launch: Launch, first_pair: int, hidden: Tensor
) -> None:
    """Writes hidden float32 [pairs of the piece, f], 0 for a neuron that does not run."""
    kind = group.kinds[launch.kind]
    gate, f = None if kind.gate is None else kind.gate.part, kind.num_rows
    parts = [kind.up.part] if gate is None else [gate, kind.up.part]
    tile = TokenTile(tile_cols(*parts), launch.block_tokens, _BLOCK_NEURONS)
    by = {"up": _BY_UP, "gate": _BY_GATE}.get(kind.selector, _BY_OUTPUT).value
    _hidden[triton.cdiv(f, tile.rows), launch.stop - launch.first](
        x, tokens, tiles, launch.first, first_pair, _Rows.of(group, kind), hidden, lookup_for(x.device, *parts),
        _Neurons(gate, kind.up.part, by, FUNCTIONS[kind.function], f), tile,
        num_warps=num_warps(tile.tokens, tile.rows), enable_fp_fusion=True,
    )  # fmt: skip


def _launch_down(
    hidden: Tensor,
    places: Tensor,
    weights: Tensor,
    group: ExpertGroup,
    tiles: Tensor,
    launch: Launch,
    first_pair: int,
    outputs: Tensor,
    is_bf16: bool,
) -> None:
    """Writes weights * (h @ down + bias) to the pairs' rows of `outputs`."""
    kind = group.kinds[launch.kind]
    part: RowPart = kind.down.part
    tile = TokenTile(tile_cols(part), launch.block_tokens, _summed_neurons(part, is_bf16))
    _down[triton.cdiv(part.num_cols, tile.cols), launch.stop - launch.first](
        hidden, places, weights, tiles, launch.first, first_pair, _Rows.of(group, kind), outputs,
        lookup_for(hidden.device, part), _Down(part, kind.num_rows, is_bf16, tile),
        num_warps=num_warps(tile.tokens, tile.cols), enable_fp_fusion=True,
    )  # fmt: skip


# Arguments that differ between groups and launches; Triton must not compile a kernel for each of their values. A
# group's pairs may begin at any multiple of 4 bytes.
_PER_GROUP = ("tokens_ptr", "places_ptr", "weights_ptr", "tiles_ptr", "first_tile", "first_pair")


@triton.jit(do_not_specialize=_PER_GROUP)
def _hidden(
    x_ptr,
    tokens_ptr,
    tiles_ptr,
    first_tile,
    first_pair,
    rows,
    hidden_ptr,
    lookup_ptr,
    NEURONS: tl.constexpr,
    TILE: tl.constexpr,
):
    # A program multiplies a block of an expert's neurons with a tile of its pairs.
    GATE: tl.constexpr = NEURONS.gate
    UP: tl.constexpr = NEURONS.up
    F: tl.constexpr = NEURONS.f
    D: tl.constexpr = UP.num_cols
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    COLS: tl.constexpr = TILE.cols
    expert, pair, is_pair = _pairs_of_tile(tiles_ptr, first_tile, TOKENS)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < F
    t = tl.load(tokens_ptr + pair, mask=is_pair, other=0)
    # Both matrices are multiplied in one loop, so that x is loaded once.
    up_units = tl.load(rows.up + expert * F + r, mask=live, other=0).to(tl.int64)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    if GATE is None:
        for tile in range(tl.cdiv(D, COLS)):
            x = load_tokens(x_ptr, t, is_pair, tile, D, COLS)
            up = add_product(up, rows.arena, up_units, live, tile, x, lookup_ptr, UP, COLS)
        if UP.bias >= 0:
            up += load_bias(rows.arena, up_units, live, UP)[:, None]
        h = act(up, NEURONS.function)
        a = h
    else:
        gate_units = tl.load(rows.gate + expert * F + r, mask=live, other=0).to(tl.int64)
        gate = tl.zeros([ROWS, TOKENS], tl.float32)
        for tile in range(tl.cdiv(D, COLS)):
            x = load_tokens(x_ptr, t, is_pair, tile, D, COLS)
            up = add_product(up, rows.arena, up_units, live, tile, x, lookup_ptr, UP, COLS)
            gate = add_product(gate, rows.arena, gate_units, live, tile, x, lookup_ptr, GATE, COLS)
        if UP.bias >= 0:
            up += load_bias(rows.arena, up_units, live, UP)[:, None]
        if GATE.bias >= 0:
            gate += load_bias(rows.arena, gate_units, live, GATE)[:, None]
        active, up = act(gate, NEURONS.function), factor(up, NEURONS.function)
        h = active * up
        a = up if NEURONS.selector == _BY_UP else active if NEURONS.selector == _BY_GATE else h
    # Neurons below the threshold do not run: their output is 0.
    expert, pair, is_pair = _pairs_of_tile(tiles_ptr, first_tile, TOKENS)  # again, or registers spill (sm_80)
    h = tl.where(runs(a, tl.load(rows.thresholds + expert)), h, 0.0)
    places = hidden_ptr + (pair - first_pair)[None, :] * F + r[:, None]
    tl.store(places, h, mask=live[:, None] & is_pair[None, :])


@triton.jit
def _pairs_of_tile(tiles_ptr, first_tile, TOKENS: tl.constexpr):
    """Returns a program's expert, its pairs int32 [TOKENS], and which of these there are.

    The loads are volatile, so that a second call loads again instead of keeping the first one's values in registers.
    """
    tile_ptr = tiles_ptr + (first_tile + tl.program_id(1)) * 3
    m = tl.arange(0, TOKENS)
    expert, begin, count = (
        tl.load(tile_ptr, volatile=True),
        tl.load(tile_ptr + 1, volatile=True),
        tl.load(tile_ptr + 2, volatile=True),
    )
    return expert, begin + m, m < count


@triton.jit(do_not_specialize=_PER_GROUP)
def _down(
    hidden_ptr,
    places_ptr,
    weights_ptr,
    tiles_ptr,
    first_tile,
    first_pair,
    rows,
    outputs_ptr,
    lookup_ptr,
    HOW: tl.constexpr,
):
    # A program computes a tile of columns of a tile of pairs.
    PART: tl.constexpr = HOW.part
    F: tl.constexpr = HOW.f
    D: tl.constexpr = PART.num_cols
    COLS: tl.constexpr = HOW.tile.cols
    TOKENS: tl.constexpr = HOW.tile.tokens
    ROWS: tl.constexpr = HOW.tile.rows
    tile = tl.program_id(0)
    expert, pair, is_pair = _pairs_of_tile(tiles_ptr, first_tile, TOKENS)
    sums = tl.zeros([COLS, TOKENS], tl.float32)
    less = tl.zeros([TOKENS], tl.float32)  # what the zeros subtract from every column
    for block in range(tl.cdiv(F, ROWS)):
        r = block * ROWS + tl.arange(0, ROWS)
        units = tl.load(rows.down + expert * F + r, mask=r < F, other=0).to(tl.int64)
        w = load_tile(rows.arena, units, r < F, tile, lookup_ptr, PART, COLS, TRANSPOSED=True)
        # Scales belong to rows, so they multiply the neurons' outputs, and codes stay exact.
        h = load_tokens(hidden_ptr, pair - first_pair, is_pair, block, F, ROWS)
        if has_scales(PART):
            scale, zero = load_scales(rows.arena, units, (tile * COLS) // PART.group, r < F, PART)
            h *= scale[:, None]
        if HOW.is_bf16:
            h = h.to(tl.bfloat16)
        if PART.kind == AFFINE:
            less += tl.sum(h.to(tl.float32) * zero[:, None], 0)  # rounded as in the product
        sums += multiply(w, h)
    # Each pair has a row of its own, so that no sum depends on the order of programs.
    sums = sums * UNITS[PART.kind] - less[None, :]
    cols = tile * COLS + tl.arange(0, COLS)
    if rows.down_bias is not None:
        sums += tl.load(rows.down_bias + expert * D + cols, mask=cols < D, other=0.0)[:, None]
    place = tl.load(places_ptr + pair, mask=is_pair, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + pair, mask=is_pair, other=0.0)
    mask = (cols < D)[:, None] & is_pair[None, :]
    tl.store(outputs_ptr + place[None, :] * D + cols[:, None], weight[None, :] * sums, mask=mask)


_COMBINED = 1024  # columns of a program


@triton.jit
def _combine(outputs_ptr, y_ptr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(K):
        y += tl.load(outputs_ptr + (t * K + place) * D + c, mask=c < D, other=0.0)
    tl.store(y_ptr + t * D + c, y, mask=c < D)
