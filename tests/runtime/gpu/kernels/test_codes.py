"""How rows' bytes are read: every code, scales of the edge, scales that begin at any byte; the codec is the twin."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from support.cases import case
from support.random_codes import NUMBERS, edge_rows, every_code, every_window
from support.random_experts import assert_near, product_magnitudes, random_section, random_tokens, weight_magnitudes
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import row_layout, write_rows
from moe_pack.formats.pack.plans import E5M2, MXFP4, TRELLIS_WIDTHS, format_text
from moe_pack.runtime.gpu.kernels.matmul import StoredRows, gather_row, gemm, gemv
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of

# The interpreter's numpy warns of what becomes infinite or no number, as it does for the codec.
NO_NUMBERS = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
TRELLISES = [trellis_format(width, group, bits) for width in TRELLIS_WIDTHS for group, bits in ((64, 16), (0, 8))]
PARTS = [*NUMBERS, BF16, part_format(3, 64), part_format(4, 64, 8), *TRELLISES]


def gathered(rows: Tensor, part: RowPart, row: int, device: torch.device) -> Tensor:
    """A row as `gather_row` reads it, on the host."""
    out = torch.full((part.num_cols,), torch.inf, device=device)
    gather_row(StoredRows(rows.to(device), part), torch.tensor([row], dtype=torch.int32, device=device), out)
    return out.cpu()


def multiplied(x: Tensor, rows: Tensor, part: RowPart, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows times the first of tokens as `gemv` has them, times all as `gemm` does; on the host."""
    one, many = torch.full((len(rows),), torch.inf), torch.full((len(x), len(rows)), torch.inf)
    one, many, x, rows = one.to(device), many.to(device), x.to(device), rows.to(device)
    gemv(x[0], StoredRows(rows, part), one)
    gemm(x, StoredRows(rows, part), many, torch.empty(1 << 20, dtype=torch.float16, device=device), 2)
    return one.cpu(), many.cpu()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit but for the sign of zero; no number where none is expected."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@NO_NUMBERS
@pytest.mark.parametrize("stored", NUMBERS, ids=format_text)
def test_every_code_and_every_scale_of_an_edge_is_what_the_codec_says(
    stored: PartFormat, kernel_device: torch.device
) -> None:
    layout, rows = edge_rows(stored)
    expected = decode_part(stored, layout.num_cols, rows[:, : layout.parts[0].num_bytes])
    for row, values in enumerate(expected):
        assert_same(gathered(rows, part_of(layout, "weight"), row, kernel_device), values)


@NO_NUMBERS
@pytest.mark.parametrize("stored", NUMBERS, ids=format_text)
def test_products_see_every_code_as_the_codec_does(stored: PartFormat, kernel_device: torch.device) -> None:
    layout, rows = every_code(stored)  # one a row, in the first column; elsewhere zeros
    values = decode_part(stored, 64, rows[:, : layout.parts[0].num_bytes])[:, 0]
    x = torch.zeros(2, 64)
    x[:, 0] = torch.tensor([1.0, -2.0])
    one, many = multiplied(x, rows, part_of(layout, "weight"), kernel_device)
    assert_same(one, values)
    values = torch.where(values.isinf(), torch.nan, values)  # the tensor cores' second factor is zero
    assert_same(many, x[:, :1] * values)


def test_scales_and_biases_are_read_from_whatever_byte_they_begin_at(kernel_device: torch.device) -> None:
    for stored, before in product(PARTS, (E5M2, MXFP4)):
        with case((format_text(stored), format_text(before))):
            check_part_behind(stored, before, kernel_device)


def check_part_behind(stored: PartFormat, before: PartFormat, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = row_layout([("before", before, False), ("weight", stored, True)], 64)
    assert layout.parts[1].scales_offset % 4
    weight, biases = random_section(stored, 3, 64, generator), torch.randn(3, 1, generator=generator)
    rows = np.zeros((3, layout.row_bytes), np.uint8)
    sections = [random_section(before, 3, 64, generator), np.hstack([weight, biases.view(torch.uint8).numpy()])]
    write_rows(layout, dict(zip(("before", "weight"), sections, strict=True)), rows)
    x, values = random_tokens(2, 64), decode_part(stored, 64, torch.from_numpy(weight))
    one, many = multiplied(x, torch.from_numpy(rows), part_of(layout, "weight"), kernel_device)
    expected, errors = x @ values.T, product_magnitudes(x, weight_magnitudes(stored, 64, weight))
    assert_near(one[None], expected[:1] + biases.T, errors[:1] + biases.T.abs())
    tolerance = 1e-5 if kernel_device.type == "cpu" else 3e-5  # tensor cores cut sums off; see test_matmul
    assert ((many - expected).abs() <= tolerance * errors).all()


@pytest.mark.parametrize("width", TRELLIS_WIDTHS)
def test_every_window_is_what_the_codec_says(width: int, kernel_device: torch.device) -> None:
    layout, rows = every_window(width)
    held, part = layout.part("weight"), part_of(layout, "weight")
    assert held is not None and (rows[:, held.offset - 4 : held.offset] == 0xFF).all()  # what must not be read
    codes = rows[:, held.offset : held.offset + held.code_bytes]
    scales = rows[:, held.scales_offset : held.bias_offset]
    expected = decode_part(held.format, layout.num_cols, torch.cat([codes, scales], dim=1))
    for row, values in enumerate(expected):
        assert_same(gathered(rows, part, row, kernel_device), values)
    x, out = random_tokens(1, layout.num_cols), torch.full((len(rows),), torch.inf, device=kernel_device)
    gemv(x[0].to(kernel_device), StoredRows(rows.to(kernel_device), part), out)
    assert_near(out.cpu()[None], x @ expected.T, product_magnitudes(x, 64 + expected.double().abs()))


def test_the_edges_are_edges() -> None:
    for stored in NUMBERS:
        layout, rows = edge_rows(stored)
        values = decode_part(stored, layout.num_cols, rows[:, : layout.parts[0].num_bytes])
        assert layout.num_cols % 128 == 64
        assert values[-1].isnan().all() and values[0].signbit()[values[0] == 0].any()
        assert all(not torch.equal(one, other) for one, other in pairwise(values))
        numbers = values[values.isfinite() & (values != 0)].abs()
        assert numbers.min() < 2.0**-126 or stored.codec == "fp8"


def test_every_window_is_seen_by_every_step_of_a_block() -> None:
    layout, rows = every_window(8)
    part = layout.part("weight")
    assert part is not None
    plane = rows[:, part.offset : part.offset + layout.num_cols // 4]
    nibbles = torch.nn.functional.pad(torch.stack([plane & 15, plane >> 4], dim=2).flatten(1).long(), (2, 0))
    windows = nibbles[:, :-2] << 8 | nibbles[:, 1:-1] << 4 | nibbles[:, 2:]
    assert all(len(windows[:, step::32].unique()) == 16**3 for step in range(32))
