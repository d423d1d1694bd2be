"""Many tokens times a dense matrix in its stored bytes: the twin of `matrix.linear`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.kernels.codes import F32, TRELLIS, Part, lookup_for
from moe_pack.runtime.kernels.dot_tiles import add_product, load_tokens, tile_cols

MAX_TOKENS = 64  # of a program
MAX_TOKENS_IN_TWO = (
    32  # where its weights, or its sums, are two, of 1 bit, and of a trellis of 8: with more, registers spill (sm_80)
)
_MANY_PROGRAMS = 256  # with fewer, smaller blocks of rows keep more of a card's processors busy


def gemm(x: Tensor, rows: Tensor, part: Part, row_units: int, out: Tensor, *, bias: Tensor | None = None) -> None:
    """Writes `x @ W.T + bias` to `out`, in float32 products and sums; W is decoded in registers only.

    Args:    x: float32 [T, d], contiguous.   rows: u8 [n, row bytes], or bf16, f16 or float32 [n, d]; contiguous, from
             a multiple of 16 bytes on.   part: `part_of` or `stored_part`.   row_units: bytes of a row by 16.
             out: float32 [T, n], contiguous.   bias: float32 [n].
    """
    num_tokens, num_rows = out.shape
    in_two = part.kind == F32.value or part.bits == 1 or (part.kind == TRELLIS.value and part.bits == 8)
    block_tokens, block_rows = blocks(num_tokens, num_rows, MAX_TOKENS_IN_TWO if in_two else MAX_TOKENS)
    _gemm[triton.cdiv(num_rows, block_rows), triton.cdiv(num_tokens, block_tokens)](
        x,
        rows.view(torch.uint8),
        bias,
        out,
        lookup_for(x.device, part),
        num_tokens,
        num_rows,
        row_units,
        PART=part,
        COLS=tile_cols(part),
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps(block_tokens, block_rows),
        enable_fp_fusion=True,
    )


def blocks(num_tokens: int, num_rows: int, max_tokens: int = MAX_TOKENS) -> tuple[int, int]:
    """How many tokens and rows a program takes, for so many in all."""
    tokens = min(max_tokens, max(16, triton.next_power_of_2(num_tokens)))
    programs = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_rows, 64)
    return tokens, 64 if programs >= _MANY_PROGRAMS else 32


def num_warps(block_tokens: int, block_rows: int) -> int:
    """Warps of a program with so many sums: as many as keep them in registers."""
    return 8 if block_tokens * block_rows >= 1024 else 4


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _gemm(
    x_ptr,
    rows_ptr,
    bias_ptr,
    out_ptr,
    lookup_ptr,
    num_tokens,
    num_rows,
    row_units,
    PART: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    D: tl.constexpr = PART[5]
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live, is_token = r < num_rows, t < num_tokens
    units = r.to(tl.int64) * row_units
    # Rows stand where a tensor core has most places, so that a handful of tokens fills it too.
    sums = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for tile in range(tl.cdiv(D, COLS)):
        x = load_tokens(x_ptr, t, is_token, tile, D, COLS)
        sums = add_product(sums, rows_ptr, units, live, tile, x, lookup_ptr, PART, COLS)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + r, mask=live, other=0.0)[:, None]
    places = t.to(tl.int64)[None, :] * num_rows + r[:, None]
    tl.store(out_ptr + places, sums, mask=live[:, None] & is_token[None, :])
