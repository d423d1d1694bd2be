"""Products with a matrix of the dense part in its stored bytes: for many tokens, for one token, and one row of it.

The twin of `gemm` and `gemv` is `linear` in `compute.matrices`. For one token a program multiplies some blocks of rows,
and loads the codes of a block while it multiplies the one before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.gpu.kernels import halves
from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, Norm, act, count_tokens, factor, token_of
from moe_pack.runtime.gpu.kernels.grids import INTERPRETED, Registers, launch_options, wait_for_earlier, wave
from moe_pack.runtime.gpu.kernels.products import (
    add_part,
    dot_loaded,
    has_two_planes,
    load_normed_part,
    load_part,
    load_part_scales,
    load_rows,
    load_x_part,
    store_part,
    zero_part,
)
from moe_pack.runtime.gpu.kernels.rows import (
    TRELLIS,
    RowPart,
    Tile,
    ahead_tile,
    dot_tile,
    lookup_for,
    loop_range,
    places,
    sum_tile,
)


def gemm(
    x: Tensor, matrix: "StoredRows", out: Tensor, scratch: Tensor, num_halves: int, *, bias: Tensor | None = None
) -> None:
    """Writes `x @ matrix.T + bias` to `out`; the matrix is decoded first, as many rows at a time as scratch memory has.

    Args:    x: float32 [T, d], contiguous.   matrix: [n, d].   out: float32 [T, n], contiguous.
             scratch: float16, contiguous, overwritten.   num_halves: float16 numbers for a value: 2 are as exact as
             float32.   bias: float32 [n].
    """
    (num_tokens, num_rows), num_cols = out.shape, halves.padded(matrix.part.num_cols)
    inputs = halves.Halves.allocate(num_halves, num_tokens, num_cols, x.device)
    halves.round_rows(x, inputs)
    step = scratch.numel() // (num_halves * num_cols)
    assert step > 0, "scratch memory has a row"
    for first in range(0, num_rows, step):
        number = min(step, num_rows - first)
        values = scratch.view(-1)[: num_halves * number * num_cols].view(num_halves, number, num_cols)
        rows = halves.Halves(values, torch.empty(number, device=x.device))
        halves.decode_rows(matrix.raw, matrix.row_units, matrix.part, first, rows)
        some = slice(first, first + number)
        halves.multiply(inputs, rows, out[:, some], None if bias is None else bias[some])


class RowBytes(NamedTuple):
    """Rows in memory as kernels take them."""

    bytes: Tensor  # u8 [n, row bytes]
    units: int  # the bytes of a row, divided by 16


MOST_TOKENS = 8  # that `gemv` multiplies faster than `gemm`
MOST_BLOCKS = 8  # of rows that a program multiplies one after the other, so that it reads x once for all


class StoredRows(NamedTuple):
    """A matrix's rows as they are stored, with their part."""

    # u8 [n, row bytes], or bf16, f16 or float32 [n, d]; contiguous, from a multiple of 16 bytes on, a row a multiple of
    # 16 bytes.
    rows: Tensor
    part: RowPart  # `part_of` or `stored_part`

    @property
    def raw(self) -> Tensor:
        """The rows' bytes: u8 [n, row bytes]."""
        return self.rows.view(torch.uint8)

    @property
    def in_memory(self) -> RowBytes:
        """The rows as kernels take them."""
        return RowBytes(self.raw, self.row_units)

    @property
    def row_units(self) -> int:
        """The bytes of a row, divided by 16."""
        row_bytes = self.rows.shape[1] * self.rows.element_size()
        assert self.rows.is_contiguous() and row_bytes % 16 == 0, f"rows of {row_bytes} bytes, not a multiple of 16"
        return row_bytes // 16


class Product(NamedTuple):
    """A matrix that multiplies a few vectors: `out = matrix @ x + bias`."""

    matrix: StoredRows  # [n, d]
    out: Tensor  # float32 [n] or [T, n], overwritten
    bias: Tensor | None = None  # float32 [n]


def gemv(
    x: Tensor,
    matrix: StoredRows,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes a matrix times a few vectors: `out = residual + scale * (matrix @ x + bias)`.

    A program reads its rows once for all vectors; the bits of a product do not depend on the other vectors.
    Args:    x: float32 [d] or [T, d], contiguous.   matrix: [n, d].   out: float32 [n] or [T, n]; may be `residual`.
             bias: float32 [n].   residual: as out.
    """
    _launch_gemv(x, None, [Product(matrix, out, bias)], residual, scale)


_AT_ONCE = 3  # matrices of one launch: queries, keys and values


def normed_gemv(x: Tensor, norm: Norm, products: Sequence[Product]) -> None:
    """Writes matrices times vectors that are normalized first; one launch for up to three matrices of one format.

    Each program normalizes x for itself: x is read from the cache, and a launch is saved.
    Args:    x: float32 [d] or [T, d], which no `out` may be.   products: of matrices [n, d], each with its own n.
    """
    alike: dict[object, list[Product]] = {}
    for product in products:
        alike.setdefault((product.matrix.part, product.bias is None), []).append(product)
    for group in alike.values():
        for first in range(0, len(group), _AT_ONCE):
            _launch_gemv(x, norm, group[first : first + _AT_ONCE], None, 1.0)


def _launch_gemv(
    x: Tensor, norm: Norm | None, products: Sequence[Product], residual: Tensor | None, scale: float
) -> None:
    part, num_tokens = products[0].matrix.part, count_tokens(x)
    tile, way = dot_tile((part,)), _way_of(num_tokens, [part])
    if way == _IN_LOOP.value:
        tile = _loop_tile(tile, [part])
    assert norm is None or part.bias < 0, "a norm's factor multiplies the products, and no bias"
    targets = tuple(_Target(matrix.raw, out, bias) for matrix, out, bias in products)
    nums = [out.shape[-1] for _, out, _ in products]
    registers = Registers.ROWS if part.group else Registers.PLAIN_ROWS
    blocks = _Blocks(tile.rows, num_blocks(sum(nums), tile, registers), norm is not None, way)
    n, n_1, n_2 = (*nums, 0, 0)[:_AT_ONCE]
    programs = sum(triton.cdiv(n, blocks.rows * blocks.number) for n in nums)
    _gemv[(programs * (num_tokens if way == _IN_GRID.value else 1),)](
        x, norm, targets, n, n_1, n_2, _Ending(residual, scale, num_tokens), lookup_for(x.device, part),
        products[0].matrix.row_units, _Gemv(part, blocks, len(nums), targets[0].bias is not None),
        num_warps=tile.num_warps, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


class _Ending(NamedTuple):
    residual: Tensor | None
    scale: float
    num_tokens: int


class _Target(NamedTuple):
    rows: Tensor
    out: Tensor
    bias: Tensor | None


class _Blocks(NamedTuple):
    """The rows of a program."""

    rows: int  # of a block
    number: int  # of blocks
    has_norm: bool  # whether it norms x first
    way: int  # how it takes vectors


# How a launch takes vectors: a single one; several in a loop of each program, which decodes a block once for all; or
# several programs for a block, next to one another, which read it from the cache.
_SINGLE, _IN_LOOP, _IN_GRID = (tl.constexpr(number) for number in range(3))
_MOST_DECODED = 64  # values of a thread that stay in registers with a vector


def _way_of(num_tokens: int, parts: Sequence[RowPart]) -> int:
    """Returns how a launch takes vectors; where a thread has 64 values of a row, with those of x, registers spill."""
    if num_tokens == 1:
        return int(_SINGLE.value)
    is_wide = any(part.bits in (1, 3) or part.kind == TRELLIS.value for part in parts)
    return int(_IN_GRID.value if is_wide else _IN_LOOP.value)


def _loop_tile(tile: Tile, parts: Sequence[RowPart]) -> Tile:
    """Returns the tile for several vectors in a loop: with so few rows that their values stay in registers.

    A thread has the same columns of a row, so that sums have the same order.
    """
    values = sum(part.num_words * places(part, 0) for part in parts)  # of a row
    while not INTERPRETED and tile.rows * values > _MOST_DECODED * 32 * tile.num_warps:
        smaller = ahead_tile(tile, tuple(parts))
        if smaller.rows == tile.rows:
            break
        tile = smaller
    return tile


def num_blocks(num_rows: int, tile: Tile, registers: int) -> int:
    """Returns how many blocks of rows a program multiplies: several if two waves of programs do so."""
    return max(1, min(MOST_BLOCKS, num_rows // (tile.rows * 2 * wave(registers, tile.num_warps))))


def gated(
    x: Tensor,
    gate: StoredRows | None,
    up: StoredRows,
    function: NeuronFunction,
    out: Tensor,
    *,
    norm: Norm | None = None,
    weight: Tensor | None = None,
) -> None:
    """Writes the neurons of a dense expert: `weight * act(gate @ x) * factor(up @ x)`, or act(up @ x) without a gate.

    Args:    x: float32 [d] or [T, d], which is normalized first if there is a norm.   gate, up: [f, d].
             out: float32 [f] or [T, f].   weight: float32 [T], 1 if it is None.
    """
    parts = (up.part,) if gate is None else (gate.part, up.part)
    tile, f, lookup = dot_tile(parts), out.shape[-1], lookup_for(x.device, *parts)
    assert norm is None or max(part.bias for part in parts) < 0, "a norm's factor multiplies the products, and no bias"
    # Both matrices' codes are loaded at once: with as many rows of a trellis or of two planes, registers spill.
    has_much = lookup is not None or any(map(has_two_planes, parts))
    tile = Tile(max(1, tile.rows // len(parts)) if has_much else tile.rows, tile.num_warps)
    num_tokens = count_tokens(x)
    way = _way_of(num_tokens, parts)
    if way == _IN_LOOP.value:
        tile = _loop_tile(tile, parts)
    registers = Registers.ROWS if any(part.group for part in parts) else Registers.PLAIN_ROWS
    blocks = _Blocks(tile.rows, num_blocks(f, tile, registers), norm is not None, way)
    how = _Gated(None if gate is None else gate.part, up.part, FUNCTIONS[function], blocks)
    programs = triton.cdiv(f, blocks.rows * blocks.number) * (num_tokens if way == _IN_GRID.value else 1)
    _gated[(programs,)](
        x, norm, None if gate is None else gate.in_memory, up.in_memory, weight, out, lookup, f, num_tokens, how,
        num_warps=tile.num_warps, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


class _Gemv(NamedTuple):
    part: RowPart
    blocks: _Blocks
    num_matrices: int
    has_bias: bool


class _Gated(NamedTuple):
    gate: RowPart | None
    up: RowPart
    function: int
    blocks: _Blocks


def gather_row(matrix: StoredRows, ids: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Writes the rows of numbers `ids`, int32 [T], times `scale`, to `out` float32 [T, d]: the embeddings of tokens.

    Args:    out: float32 [T, d], or [d] for one token.
    """
    part, num_tokens = matrix.part, count_tokens(out)
    _gather_row[1, num_tokens](
        matrix.in_memory, ids, out, lookup_for(out.device, part), scale, part, num_tokens > 1,
        num_warps=sum_tile((part,)).num_warps, enable_fp_fusion=True,
    )  # fmt: skip


@triton.constexpr_function
def loads_ahead(part: RowPart) -> bool:
    """Returns whether codes are loaded while those before are multiplied: a trellis takes too many registers."""
    part = RowPart(*part)
    return bool(part.kind != TRELLIS.value)


@triton.jit
def _load_input(x_ptr, norm, PART: tl.constexpr, HAS_NORM: tl.constexpr):
    """Loads x as `dot_part` takes it, normalized if there is a norm, and the factor for its products.

    The compiler drops the load before the blocks where a loop loads several vectors.
    """
    if HAS_NORM:
        x, factor = load_normed_part(x_ptr, norm, PART)
    else:
        x = load_x_part(x_ptr, PART)
        factor = 1.0
    return x, factor


@triton.jit(do_not_specialize=["n", "n_1", "n_2"])
def _gemv(x_ptr, norm, targets, n, n_1, n_2, ending, lookup_ptr, row_units, HOW: tl.constexpr):
    PART: tl.constexpr = HOW.part
    BLOCKS: tl.constexpr = HOW.blocks
    R: tl.constexpr = BLOCKS.rows
    program, token = _program_of(ending.num_tokens, BLOCKS.way)
    x_ptr += token * PART.num_cols
    rows_ptr, out_ptr, bias_ptr, n, program = _find_target(targets, n, n_1, n_2, program, HOW)
    # The first block is on its way while x is loaded.
    row = program * (BLOCKS.number * R) + tl.arange(0, R)
    live = row < n
    if loads_ahead(PART):
        codes, scales = load_rows(rows_ptr, row.to(tl.int64) * row_units, live, PART)
    wait_for_earlier()
    x, x_factor = _load_input(x_ptr, norm, PART, BLOCKS.has_norm)
    for block in range(BLOCKS.number):
        # Loads the next block's codes before this one's are multiplied.
        at, is_row, units = row, live, row.to(tl.int64) * row_units
        row += R
        live = (row < n) & (block + 1 < BLOCKS.number)
        if loads_ahead(PART):
            current, current_scales = codes, scales
            codes, scales = load_rows(rows_ptr, row.to(tl.int64) * row_units, live, PART)
        else:
            current, current_scales = load_rows(rows_ptr, units, is_row, PART)
        if BLOCKS.way == _IN_LOOP:
            for own in loop_range(0, ending.num_tokens):
                own_x, own_factor = _load_input(x_ptr + own * PART.num_cols, norm, PART, BLOCKS.has_norm)
                total = dot_loaded(current, current_scales, own_x, lookup_ptr, PART)
                _end_product(total, own_factor, bias_ptr, ending, out_ptr, at, is_row, own * n, HOW)
        else:
            total = dot_loaded(current, current_scales, x, lookup_ptr, PART)
            _end_product(total, x_factor, bias_ptr, ending, out_ptr, at, is_row, token * n, HOW)


@triton.jit
def _program_of(num_tokens, WAY: tl.constexpr):
    """Returns a program's number among those of its vector, and the vector's; 0 unless the grid counts vectors."""
    program, token = tl.program_id(0), 0
    if WAY == _IN_GRID:
        token = program % num_tokens
        program = program // num_tokens
    return program, token


@triton.jit
def _find_target(targets, n, n_1, n_2, program, HOW: tl.constexpr):
    """Returns the matrix whose rows a program multiplies, its number of rows, and the program's number.

    Without a bias the matrix takes its place, and is not used.
    """
    rows_ptr, out_ptr, bias_ptr = targets[0].rows, targets[0].out, targets[0].rows
    if HOW.has_bias:
        bias_ptr = targets[0].bias
    COUNT: tl.constexpr = HOW.num_matrices
    if COUNT > 1:
        BLOCK_ROWS: tl.constexpr = HOW.blocks.rows * HOW.blocks.number
        begin = program * 0
        end = tl.cdiv(n, BLOCK_ROWS)
        for number in tl.static_range(1, COUNT):
            other = n_1 if number == 1 else n_2
            is_it = program >= end
            rows_ptr = tl.where(is_it, targets[number].rows, rows_ptr)
            out_ptr = tl.where(is_it, targets[number].out, out_ptr)
            if HOW.has_bias:
                bias_ptr = tl.where(is_it, targets[number].bias, bias_ptr)
            n, begin = tl.where(is_it, other, n), tl.where(is_it, end, begin)
            end += tl.cdiv(other, BLOCK_ROWS)
        program -= begin
    return rows_ptr, out_ptr, bias_ptr, n, program


@triton.jit
def _end_product(total, factor, bias_ptr, ending, out_ptr, row, is_row, begin, HOW: tl.constexpr):
    """Writes a token's products of some rows with the norm's factor, the bias, and the hidden state that is added."""
    if HOW.blocks.has_norm:
        total *= factor
    if HOW.has_bias:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0)
    total *= ending.scale
    if ending.residual is not None:
        total += tl.load(ending.residual + begin + row, mask=is_row, other=0.0)
    tl.store(out_ptr + begin + row, total, mask=is_row)


@triton.jit(do_not_specialize=["f", "num_tokens"])
def _gated(x_ptr, norm, gate_rows, up_rows, weight_ptr, out_ptr, lookup_ptr, f, num_tokens, HOW: tl.constexpr):
    GATE: tl.constexpr = HOW.gate
    UP: tl.constexpr = HOW.up
    R: tl.constexpr = HOW.blocks.rows
    BLOCKS: tl.constexpr = HOW.blocks.number
    IN_LOOP: tl.constexpr = HOW.blocks.way == _IN_LOOP
    LOADS_AHEAD: tl.constexpr = loads_ahead(UP) and (GATE is None or loads_ahead(GATE))
    program, token = _program_of(num_tokens, HOW.blocks.way)
    x_ptr += token * UP.num_cols
    out_ptr += token * f
    if weight_ptr is not None:
        weight_ptr += token
    # The first block is on its way while x is loaded; two parts of different formats take x in different orders.
    row = program * (BLOCKS * R) + tl.arange(0, R)
    live = row < f
    if LOADS_AHEAD:
        up_codes = load_part(up_rows.bytes, row.to(tl.int64) * up_rows.units, live, UP)
        if GATE is not None:
            gate_codes = load_part(gate_rows.bytes, row.to(tl.int64) * gate_rows.units, live, GATE)
    wait_for_earlier()
    HAS_NORM: tl.constexpr = HOW.blocks.has_norm
    x, x_factor = _load_input(x_ptr, norm, UP, HAS_NORM)
    gate_x = x
    if GATE is not None and GATE != UP:
        gate_x, _ = _load_input(x_ptr, norm, GATE, HAS_NORM)
    for block in range(BLOCKS):
        # Loads the next block's codes before this one's are multiplied.
        at, is_row = row, live
        row += R
        live = (row < f) & (block + 1 < BLOCKS)
        units = at.to(tl.int64) * up_rows.units
        if LOADS_AHEAD:
            up_now = up_codes
            up_codes = load_part(up_rows.bytes, row.to(tl.int64) * up_rows.units, live, UP)
            if GATE is not None:
                gate_now = gate_codes
                gate_codes = load_part(gate_rows.bytes, row.to(tl.int64) * gate_rows.units, live, GATE)
        else:
            up_now = load_part(up_rows.bytes, units, is_row, UP)
        up_scales = load_part_scales(up_rows.bytes, units, is_row, UP)
        if not IN_LOOP:
            u = dot_loaded(up_now, up_scales, x, lookup_ptr, UP)
            if HAS_NORM:
                u *= x_factor
        if GATE is not None:
            units = at.to(tl.int64) * gate_rows.units
            if not LOADS_AHEAD:
                gate_now = load_part(gate_rows.bytes, units, is_row, GATE)
            gate_scales = load_part_scales(gate_rows.bytes, units, is_row, GATE)
        if IN_LOOP:
            up = up_now, up_scales
            gate = (gate_now, gate_scales) if GATE is not None else up
            _loop_neurons(x_ptr, norm, up, gate, weight_ptr, out_ptr, lookup_ptr, at, is_row, f, num_tokens, HOW)
        else:
            g = u
            if GATE is not None:
                g = dot_loaded(gate_now, gate_scales, gate_x, lookup_ptr, GATE)
                if HAS_NORM:
                    g *= x_factor
            _end_neurons(g, u, weight_ptr, 0, out_ptr + at, is_row, HOW)


@triton.jit
def _loop_neurons(
    x_ptr, norm, up, gate, weight_ptr, out_ptr, lookup_ptr, row, is_row, f, num_tokens, HOW: tl.constexpr
):
    """Writes some neurons for several vectors, from codes and scales of their rows of up and gate."""
    GATE: tl.constexpr = HOW.gate
    UP: tl.constexpr = HOW.up
    HAS_NORM: tl.constexpr = HOW.blocks.has_norm
    for token in loop_range(0, num_tokens):
        token_ptr = x_ptr + token * UP.num_cols
        x, x_factor = _load_input(token_ptr, norm, UP, HAS_NORM)
        u = dot_loaded(up[0], up[1], x, lookup_ptr, UP)
        if HAS_NORM:
            u *= x_factor
        g = u
        if GATE is not None:
            if GATE != UP:
                x, _ = _load_input(token_ptr, norm, GATE, HAS_NORM)
            g = dot_loaded(gate[0], gate[1], x, lookup_ptr, GATE)
            if HAS_NORM:
                g *= x_factor
        _end_neurons(g, u, weight_ptr, token, out_ptr + token * f + row, is_row, HOW)


@triton.jit
def _end_neurons(g, u, weight_ptr, token, out_ptr, is_row, HOW: tl.constexpr):
    """Writes neurons, times the vector's weight: up's activation, or the gate's times up's factor."""
    h = act(u, HOW.function) if HOW.gate is None else act(g, HOW.function) * factor(u, HOW.function)
    if weight_ptr is not None:
        h *= tl.load(weight_ptr + token)
    tl.store(out_ptr, h, mask=is_row)


@triton.jit
def _gather_row(rows, ids_ptr, out_ptr, lookup_ptr, scale, PART: tl.constexpr, HAS_SEVERAL: tl.constexpr):
    token = token_of(HAS_SEVERAL)
    # A row is added to zeros, which decodes it, and puts each value into its column.
    units = (tl.load(ids_ptr + token) + tl.zeros([1], tl.int64)) * rows.units
    live = units >= 0
    codes = load_part(rows.bytes, units, live, PART)
    factor = tl.zeros([1], tl.float32) + scale
    sums = add_part(zero_part(PART), rows.bytes, units, live, codes, factor, lookup_ptr, PART)
    store_part(out_ptr + token * PART.num_cols, sums, PART)
