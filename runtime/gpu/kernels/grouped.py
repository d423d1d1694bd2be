"""Experts for many tokens: decoded once a pass into scratch memory, then multiplied with all their tokens at once.

A *pair* is a token and one of its experts. `sort_pairs` lists a pass's pairs in the order in which experts run, on the
device. A group of experts then takes these steps for each slice of its neurons:

1. `decode_experts` writes the slice's rows as halves (`halves`), if the expert has tokens;
2. `run_hidden` writes each neuron's output, 0 if it does not run, and rounds these to halves;
3. `run_down` adds the down product to a row of `outputs` that belongs to the pair alone.

`combine` adds a token's rows, times the router's weights, in the router's order. So the sum depends neither on which
experts run together nor on their order. No launch waits for the host: it knows how many experts a group has, and
programs find out how many pairs each has. The twin is `run_expert` in `runtime.model.compute.expert`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels import halves
from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, act, factor
from moe_pack.runtime.gpu.kernels.halves import DecodeBlock, HalvesAt, decode, sum_products
from moe_pack.runtime.gpu.kernels.products import runs, tile_cols
from moe_pack.runtime.gpu.kernels.rows import RowPart, load_bias, lookup_for
from moe_pack.runtime.gpu.kernels.tables import ExpertKind, LayerTables

_BY_UP, _BY_GATE, _BY_OUTPUT = (tl.constexpr(number) for number in range(3))  # the value that the threshold cuts
_DOWN = tl.constexpr(2)  # the place of down among an expert's matrices, after gate and up


class Pairs(NamedTuple):
    """The pairs of T tokens with k experts each, all on the device, by the place of their expert in an order."""

    order: Tensor  # int32 [P], the experts in the order in which they run
    pairs: Tensor  # int32 [T k], `token * k + choice` of each pair; those of experts that do not run come last
    starts: Tensor  # int32 [P + 1], where each expert's pairs begin, and the end of the last one's
    k: int


def sort_pairs(experts: Tensor, order: Tensor, num_experts: int) -> Pairs:
    """Returns the pairs of T tokens.

    Args:    experts: integers [T, k], different in each row.   order: int32 [P], each expert at most once; pairs of
             others do not run.
    """
    places = torch.full((num_experts,), len(order), dtype=torch.int32, device=order.device)
    numbers = torch.arange(len(order) + 1, dtype=torch.int32, device=order.device)
    places[order.long()] = numbers[:-1]
    keys, pairs = places[experts.flatten().long()].sort(stable=True)
    return Pairs(order, pairs.to(torch.int32), torch.searchsorted(keys, numbers, out_int32=True), experts.shape[1])


class PassMemory(NamedTuple):
    """Memory of passes, allocated once; each step overwrites it.

    `decoded`: float16 [halves, 3, G, N, d], a group's slice: gate rows, up rows, and down as [G, d, N].
    `factors`: float32 [3, G, N].   `biases`: float32 [2, G, N], of gate and up.   `hidden`: float32 [T k, N].
    `rounded`: the same as halves.   `outputs`: float32 [T k, d].
    """

    decoded: Tensor
    factors: Tensor
    biases: Tensor
    hidden: Tensor
    rounded: halves.Halves
    outputs: Tensor

    @classmethod
    def allocate(
        cls, number: int, n: int, num_cols: int, num_pairs: int, num_halves: int, device: torch.device
    ) -> "PassMemory":
        """Allocates for slices of `n` neurons of `number` experts, and passes of so many pairs at most."""
        return cls(
            decoded=torch.empty((num_halves, 3, number, n, num_cols), dtype=torch.float16, device=device),
            factors=torch.empty((3, number, n), device=device),
            biases=torch.zeros((2, number, n), device=device),
            hidden=torch.empty((num_pairs, n), device=device),
            rounded=halves.Halves.allocate(num_halves, num_pairs, n, device),
            outputs=torch.empty((num_pairs, num_cols), device=device),
        )


class _Decoded(NamedTuple):
    """The rows of a group's slice as kernels take them."""

    numbers: Tensor
    factors: Tensor
    biases: Tensor
    stride: int  # values between the two halves of a number


class _Stored(NamedTuple):
    """How one kind of experts is stored, as kernels take it: constants."""

    gate: RowPart | None
    up: RowPart
    down: RowPart
    in_selector: tuple[bool, bool, bool]
    units: tuple[int, int]  # of a selector row and of a record


class _Shape(NamedTuple):
    """The sizes of a layer's experts, constants of kernels."""

    f: int
    d: int
    num_experts: int
    k: int
    halves: int


class Coming(NamedTuple):
    """The places of selector row 0 and record 0 of experts in the arena, in units of 16 bytes: int64 [E] each."""

    selectors: Tensor
    records: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Experts that run together: `number` of them from place `first` of the order on."""

    pairs: Pairs
    tables: LayerTables
    first: int
    number: int
    coming: "Coming | None" = None  # places of rows that the tables lack; None if they lack none


def run_group(x: halves.Halves, group: Group, memory: PassMemory) -> None:
    """Writes the outputs of a group's experts to their pairs' rows of `memory.outputs`.

    Args:    x: [T, d].
    """
    if not len(group.pairs.pairs):
        return
    f = group.tables.kinds[0].num_rows
    for first_neuron in range(0, f, memory.decoded.shape[3]):
        decode_experts(group, first_neuron, memory)
        run_hidden(x, group, memory)
        run_down(group, first_neuron, memory)


def _shape(group: Group, memory: PassMemory) -> _Shape:
    num_halves, num_experts = len(memory.decoded), len(group.tables.kind)
    return _Shape(group.tables.kinds[0].num_rows, memory.decoded.shape[4], num_experts, group.pairs.k, num_halves)


def _decoded(memory: PassMemory) -> _Decoded:
    return _Decoded(memory.decoded, memory.factors, memory.biases, memory.decoded.stride(0))


def decode_experts(group: Group, first_neuron: int, memory: PassMemory) -> None:
    """Writes a slice of a group's neurons as halves, from `first_neuron` on; zeros for neurons past the last."""
    tables, shape = group.tables, _shape(group, memory)
    parts = [part.part for kind in tables.kinds for part in (kind.gate, kind.up, kind.down) if part is not None]
    block = DecodeBlock(halves.DECODED_ROWS, tile_cols(*parts), shape.halves)
    pointers = tables.pointers
    if tables.selector_at is None:
        pointers = pointers._replace(selector_at=tables.record_at)
    g, n = memory.decoded.shape[2:4]
    _decode_kernel[group.number, triton.cdiv(n, block.rows)](
        group.pairs.order, group.pairs.starts, group.first, pointers, group.coming, _decoded(memory), g, n,
        lookup_for(memory.decoded.device, *parts), first_neuron, tuple(map(_stored, tables.kinds)), shape, block,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _stored(kind: ExpertKind) -> _Stored:
    matrices = (kind.gate, kind.up, kind.down)
    return _Stored(
        None if kind.gate is None else kind.gate.part,
        kind.up.part,
        kind.down.part,
        tuple(part is not None and part.in_selector for part in matrices),  # type: ignore[arg-type]  # three of them
        (kind.selector_units, kind.record_units),
    )


@triton.constexpr_function
def _part(kinds: tuple[_Stored, ...], number: int, matrix: int) -> RowPart | None:
    """Returns a matrix's part of a kind; Triton passes named tuples as plain ones."""
    stored = _Stored(*kinds[number])
    part = (stored.gate, stored.up, stored.down)[matrix]
    return None if part is None else RowPart(*part)


@triton.constexpr_function
def _in_selector(kinds: tuple[_Stored, ...], number: int, matrix: int) -> bool:
    return bool(_Stored(*kinds[number]).in_selector[matrix])


@triton.constexpr_function
def _units(kinds: tuple[_Stored, ...], number: int, in_selector: bool) -> int:
    return int(_Stored(*kinds[number]).units[0 if in_selector else 1])


# Arguments that differ between groups; Triton must not compile a kernel for each of their values.
_PER_GROUP = ("first_place", "num_places", "first_neuron", "g")


@triton.jit(do_not_specialize=_PER_GROUP)
def _decode_kernel(
    order_ptr,
    starts_ptr,
    first_place,
    tables,
    coming,
    decoded,
    g,
    n,
    lookup_ptr,
    first_neuron,
    KINDS: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program decodes some neurons' rows of all matrices, unless their expert has no tokens.
    place = first_place + tl.program_id(0)
    if tl.load(starts_ptr + place) == tl.load(starts_ptr + place + 1):
        return
    expert = tl.load(order_ptr + place)
    kind = tl.load(tables.kind + expert)
    r = tl.program_id(1) * BLOCK.rows + tl.arange(0, BLOCK.rows)
    for number in tl.static_range(len(KINDS)):
        if kind == number:
            for matrix in tl.static_range(3):
                if _part(KINDS, number, matrix) is not None:
                    _decode_matrix(tables, coming, expert, first_neuron + r, r, decoded, g, n, lookup_ptr, KINDS,
                                   number, matrix, SHAPE, BLOCK)  # fmt: skip


@triton.jit
def _decode_matrix(
    tables, coming, expert, neuron, r, decoded, g, n, lookup_ptr, KINDS: tl.constexpr, NUMBER: tl.constexpr,
    MATRIX: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = _part(KINDS, NUMBER, MATRIX)
    IN_SELECTOR: tl.constexpr = _in_selector(KINDS, NUMBER, MATRIX)
    live, is_out = neuron < SHAPE.f, r < n
    at_ptr = tables.selector_at if IN_SELECTOR else tables.record_at
    units = tl.load(at_ptr + expert * SHAPE.f + neuron, mask=live, other=0).to(tl.int64)
    if coming is not None:
        begin = tl.load((coming.selectors if IN_SELECTOR else coming.records) + expert)
        units = tl.where(units < 0, begin + neuron.to(tl.int64) * _units(KINDS, NUMBER, IN_SELECTOR), units)
    slice_ = (MATRIX * g + tl.program_id(0)) * n
    values_ptr, factors_ptr = decoded.numbers + slice_.to(tl.int64) * SHAPE.d, decoded.factors + slice_
    target = HalvesAt(values_ptr, factors_ptr, decoded.stride)
    # Down rows lie transposed: their product sums over neurons.
    decode(tables.arena, units, live, r, is_out, target, lookup_ptr, PART, BLOCK, n, MATRIX == _DOWN)
    if PART.bias >= 0:
        biases = load_bias(tables.arena, units, live, PART)
        tl.store(decoded.biases + slice_ + r, tl.where(live, biases, 0.0), mask=is_out)


class _Neurons(NamedTuple):
    """How neurons' outputs are made of products: constants of kernels."""

    is_gated: bool
    has_bias: bool
    selector: int
    function: int


def run_hidden(x: halves.Halves, group: Group, memory: PassMemory) -> None:
    """Writes the outputs of a slice's neurons for all pairs of a group to `memory.rounded`, as halves.

    They are multiplied by their down rows' factors already.
    """
    kind, shape, pairs = group.tables.kinds[0], _shape(group, memory), group.pairs
    by = {"up": _BY_UP, "gate": _BY_GATE}.get(kind.selector, _BY_OUTPUT).value
    parts = [part.part for each in group.tables.kinds for part in (each.gate, each.up) if part is not None]
    neurons = _Neurons(kind.gate is not None, any(p.bias >= 0 for p in parts), by, FUNCTIONS[kind.function])
    tile = halves.product_tile(_pairs_an_expert(pairs), 2 if neurons.is_gated else 1, shape.d)
    g, n = memory.decoded.shape[2:4]
    _hidden_kernel[triton.cdiv(n, tile.rows), _most_tiles(group, tile.tokens)](
        x.at, pairs.pairs, pairs.order, pairs.starts, group.first, group.number, _decoded(memory), g, n,
        group.tables.thresholds, memory.hidden, neurons, shape, tile, num_warps=tile.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    number = len(pairs.pairs)
    rounded = halves.Halves(memory.rounded.values[:, :number], memory.rounded.factors)
    halves.round_rows(memory.hidden[:number], rounded, pairs.starts, group.first, group.number)


def _pairs_an_expert(pairs: Pairs) -> int:
    return -(-len(pairs.pairs) // max(1, len(pairs.order)))


def _most_tiles(group: Group, tokens: int) -> int:
    """Returns how many tiles of pairs a group has at most; programs of the others end at once."""
    return min(len(group.pairs.pairs), len(group.pairs.pairs) // tokens + group.number)


@triton.jit
def _find_tile(starts_ptr, first_place, num_places, tile, TOKENS: tl.constexpr, MOST: tl.constexpr):
    """Returns a tile's expert, its first pair and how many it has: no pairs if there is no such tile.

    The expert is its place in the group.
    """
    g = tl.arange(0, triton.next_power_of_2(MOST))
    is_there = g < num_places
    starts = tl.load(starts_ptr + first_place + g, mask=is_there, other=0)
    stops = tl.load(starts_ptr + first_place + g + 1, mask=is_there, other=0)
    tiles = (stops - starts + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    is_it = (ends > tile) & (ends - tiles <= tile)
    place = tl.sum(tl.where(is_it, g, 0))
    begin = tl.sum(tl.where(is_it, starts + (tile - ends + tiles) * TOKENS, 0))
    return place, begin, tl.minimum(tl.sum(tl.where(is_it, stops, 0)) - begin, TOKENS)


@triton.jit(do_not_specialize=_PER_GROUP)
def _hidden_kernel(
    x,
    pairs_ptr,
    order_ptr,
    starts_ptr,
    first_place,
    num_places,
    decoded,
    g,
    n,
    thresholds_ptr,
    hidden_ptr,
    NEURONS: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    # A program multiplies a block of an expert's neurons with a tile of its pairs.
    D: tl.constexpr = SHAPE.d
    place, begin, count = _find_tile(starts_ptr, first_place, num_places, tl.program_id(1), TILE.tokens,
                                     SHAPE.num_experts)  # fmt: skip
    if count <= 0:
        return
    t = tl.arange(0, TILE.tokens)
    # Rows and pairs past the last are those again: what is loaded of them is not stored.
    pair = begin + tl.minimum(t, count - 1)
    token = (tl.load(pairs_ptr + pair) // SHAPE.k).to(tl.int64)
    r = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    row = place * n + tl.minimum(r, n - 1)
    up_ptr = decoded.numbers + (g * n).to(tl.int64) * D
    gate_ptr = decoded.numbers if NEURONS.is_gated else None
    up, gate = sum_products(up_ptr, gate_ptr, decoded.stride, row.to(tl.int64), x.numbers, x.stride, token, D,
                            SHAPE.halves, TILE)  # fmt: skip
    x_factor = tl.load(x.factors + token)[None, :]
    up *= tl.load(decoded.factors + g * n + row)[:, None] * x_factor
    if NEURONS.has_bias:
        up += tl.load(decoded.biases + g * n + row)[:, None]
    # Makes the neurons of the products, and those below the threshold 0.
    if NEURONS.is_gated:
        gate *= tl.load(decoded.factors + row)[:, None] * x_factor
        if NEURONS.has_bias:
            gate += tl.load(decoded.biases + row)[:, None]
        active, up = act(gate, NEURONS.function), factor(up, NEURONS.function)
        h = active * up
        a = up if NEURONS.selector == _BY_UP else active if NEURONS.selector == _BY_GATE else h
    else:
        h = act(up, NEURONS.function)
        a = h
    threshold = tl.load(thresholds_ptr + tl.load(order_ptr + first_place + place))
    h = tl.where(runs(a, threshold), h, 0.0) * tl.load(decoded.factors + 2 * g * n + row)[:, None]
    # From the first pair on, places have 32 bits, which take half as many registers.
    places = hidden_ptr + begin.to(tl.int64) * n + ((pair - begin)[None, :] * n + r[:, None])
    tl.store(places, h, mask=(r < n)[:, None] & (t < count)[None, :])


def run_down(group: Group, first_neuron: int, memory: PassMemory) -> None:
    """Writes the down products of a slice, the first one's with biases, or adds them, to rows of `memory.outputs`."""
    shape, pairs, tables = _shape(group, memory), group.pairs, group.tables
    tile = halves.product_tile(_pairs_an_expert(pairs), 1, memory.decoded.shape[3])
    g, n = memory.decoded.shape[2:4]
    _down_kernel[triton.cdiv(shape.d, tile.rows), _most_tiles(group, tile.tokens)](
        memory.rounded.at, pairs.pairs, pairs.order, pairs.starts, group.first, group.number, _decoded(memory), g, n,
        tables.down_bias, memory.outputs, first_neuron, shape, tile, num_warps=tile.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_GROUP)
def _down_kernel(
    x,
    pairs_ptr,
    order_ptr,
    starts_ptr,
    first_place,
    num_places,
    decoded,
    g,
    n,
    down_bias_ptr,
    outputs_ptr,
    first_neuron,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    # A program computes some columns of a tile of pairs.
    D: tl.constexpr = SHAPE.d
    place, begin, count = _find_tile(starts_ptr, first_place, num_places, tl.program_id(1), TILE.tokens,
                                     SHAPE.num_experts)  # fmt: skip
    if count <= 0:
        return
    t = tl.arange(0, TILE.tokens)
    pair = begin + tl.minimum(t, count - 1)
    columns = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    column = tl.minimum(columns, D - 1)
    down_ptr = decoded.numbers + (2 * g + place).to(tl.int64) * n * D
    sums, _ = sum_products(down_ptr, None, decoded.stride, column.to(tl.int64), x.numbers, x.stride,
                           pair.to(tl.int64), n, SHAPE.halves, TILE)  # fmt: skip
    sums *= tl.load(x.factors + pair)[None, :]
    # Each pair has a row of its own, so that no sum depends on the order of programs.
    mask = (columns < D)[:, None] & (t < count)[None, :]
    outputs_ptr += tl.load(pairs_ptr + pair).to(tl.int64)[None, :] * D + columns[:, None]
    if first_neuron > 0:
        sums += tl.load(outputs_ptr, mask=mask, other=0.0)
    elif down_bias_ptr is not None:
        expert = tl.load(order_ptr + first_place + place).to(tl.int64)
        sums += tl.load(down_bias_ptr + expert * D + column)[:, None]
    tl.store(outputs_ptr, sums, mask=mask)


def combine(outputs: Tensor, weights: Tensor, y: Tensor) -> None:
    """Writes the sum of each token's rows of `outputs`, float32 [T k, d], times weights float32 [T, k], to y [T, d]."""
    num_tokens, d = y.shape
    _combine_kernel[num_tokens, triton.cdiv(d, _COMBINED)](
        outputs, weights, y, weights.shape[1], d, _COMBINED, num_warps=4, enable_fp_fusion=True
    )


_COMBINED = 1024  # columns of a program


@triton.jit
def _combine_kernel(outputs_ptr, weights_ptr, y_ptr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        output = tl.load(outputs_ptr + (t * K + choice) * D + c, mask=c < D, other=0.0)
        y += tl.load(weights_ptr + t * K + choice) * output
    tl.store(y_ptr + t * D + c, y, mask=c < D)
