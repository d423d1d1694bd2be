"""Calls of the kernels for one token's products, to be compiled for GPUs that are not here (`compiled_kernels`)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from moe_pack.formats import ExpertLayout, ExpertSpec, NeuronFunction, Selector
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.matmul import Product, StoredRows, gated, gather_row, gemv, normed_gemv
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import Landing, LayerTables, LeftToCpu, RunningNeurons, kind_of
from support.named_formats import Name, gpt_oss_layout, label, named_expert, named_format

SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")


def dense_calls(widths: tuple[Name, ...], dims: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Dense matrices: codes in groups of 64, and plain values."""
    for d in dims:
        for width in widths:
            layout = row_layout([("weight", named_format(width), False)], d)
            rows = torch.empty(64, layout.row_bytes, dtype=torch.uint8)
            yield f"dense {label(width)} d{d}", partial(_dense, d, rows, part_of(layout, "weight"))
        if 16 in widths:
            for name, dtype in (("F16", torch.float16), ("F32", torch.float32)):
                plain = torch.empty(64, d, dtype=dtype)
                yield f"dense {name} d{d}", partial(_dense, d, plain, stored_part(name, d))


def _dense(d: int, rows: torch.Tensor, part: RowPart) -> None:
    """A product with few rows, and with so many that a program multiplies several blocks; norms, and a dense expert."""
    x, many = torch.empty(d), 16 * 1024
    few, matrix = StoredRows(rows, part), StoredRows(rows[:1].expand(many, -1).contiguous(), part)
    rms, layer = Norm(x, None, 1e-6), Norm(x, x, 1e-6)
    gemv(x, few, torch.empty(64))
    gemv(x, matrix, torch.empty(many), residual=torch.empty(many))
    gather_row(few, torch.zeros(1, dtype=torch.int32), x)
    product, biased = Product(matrix, torch.empty(many)), Product(few, torch.empty(64), torch.empty(64))
    normed_gemv(x, rms, [product] * 3)
    normed_gemv(x, layer, [biased] * 2)
    gated(x, few, few, "silu", torch.empty(64))
    gated(x, matrix, matrix, "silu", torch.empty(many), norm=rms)
    gated(x, None, matrix, "silu", torch.empty(many), norm=layer, weight=torch.empty(1))


def running_calls(
    widths: tuple[Name, ...], dims: tuple[int, ...], selectors: Sequence[Selector] = SELECTORS
) -> Iterator[tuple[str, Callable[[], None]]]:
    """A token's running neurons: all selector kinds, few neurons and many, and layers of several kinds."""
    for d in dims:
        for width in widths:
            for selector in selectors:
                yield f"running {selector} {label(width)} d{d}", partial(_running, (width,), selector, d)
        if 4 in widths:
            layouts = _layouts((4,), "up", d)
            yield f"running far up {label(4)} d{d}", partial(_run, layouts, "up", "silu", offsets=torch.int64)
        if 16 in widths:
            for selector in selectors:
                yield f"running mixed {selector} d{d}", partial(_running, MIXED, selector, d)
    if "mxfp4" in widths and 4096 in dims:
        for selector in selectors:
            yield f"gpt_oss running {selector}", partial(_run, [gpt_oss_layout(selector)], selector, "clamped_swiglu")


MIXED: tuple[Name, ...] = (1, 3, 4, 16, "t5")  # whose rows take from one warp to eight


def _layouts(widths: tuple[Name, ...], selector: Selector, d: int) -> list[ExpertLayout]:
    spec = ExpertSpec("silu", 768, ("gate", "up", "down"), (), 0)
    return [expert_layout(named_expert(width), selector, spec, d) for width in widths]


def _running(widths: tuple[Name, ...], selector: Selector, d: int) -> None:
    _run(_layouts(widths, selector, d), selector, "silu")


def _run(
    layouts: list[ExpertLayout],
    selector: Selector,
    function: NeuronFunction,
    k: int = 8,
    offsets: torch.dtype = torch.int32,
) -> None:
    f, d, device = layouts[0].num_rows, layouts[0].records.num_cols, torch.device("cpu")
    at, numbers = torch.zeros(16, f, dtype=offsets), torch.zeros(16, dtype=torch.int32)
    arena, down_bias = torch.empty(128, dtype=torch.uint8), torch.empty(16, d) if layouts[0].extra else None
    kinds = tuple(kind_of(layout, selector, function) for layout in layouts)
    selector_at = None if selector == "none" else at
    tables = LayerTables(arena, selector_at, at, numbers, torch.zeros(16), kinds, down_bias)
    experts, x, partials = numbers[:k], torch.empty(d), torch.empty(k, 16, d)
    running = RunningNeurons.allocate(k, f, device, offsets)
    left = LeftToCpu(numbers[:k], running.neurons, running.a, numbers[:k], running.neurons)
    for selector_units in (None, running.units):
        select(x, experts, tables, running, selector_units)
    for is_split, by_expert in ((False, False), (True, False), (True, True)):
        compact(experts, tables, running, Landing(at[:k], 8, f, 4), torch.zeros(1), left, is_split, 0.0, by_expert)
    neurons(x, experts, tables, running, partials, "here")
    neurons(x, experts, tables, running, partials, "pulled")
