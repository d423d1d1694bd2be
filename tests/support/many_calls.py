"""Calls of the kernels for many tokens, to be compiled for GPUs that are not here (`compiled_kernels`)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from moe_pack.formats import ExpertLayout, ExpertSpec, NeuronFunction, Selector
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.runtime.gpu.kernels.grouped import ExpertGroup, combine, plan_tiles, run_group
from moe_pack.runtime.gpu.kernels.matmul import gemm
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import kind_of
from support.named_formats import Name, gpt_oss_layout, label, named_expert, named_format

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MODES = {"exact": torch.float32, "bf16": torch.bfloat16}  # the dtypes of x, which say how products are computed


def many_calls(
    widths: tuple[Name, ...], dims: tuple[int, ...], selectors: Sequence[Selector] = ("up", "none")
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and calls: a handful of tokens and a prefill's, groups of 64 and of 16, selectors or none."""
    for d in dims:
        for dtype in DTYPES if 16 in widths else ():
            for mode, x_dtype in MODES.items():
                yield f"gemm {mode} {dtype} d{d}", partial(_plain, d, dtype, x_dtype)
        for width in widths:
            for mode, x_dtype in MODES.items():
                yield f"gemm {mode} {label(width)} d{d}", partial(_coded, d, width, x_dtype)
            for selector in selectors:
                for mode, x_dtype in MODES.items():
                    name = f"grouped {mode} {selector} {label(width)} d{d}"
                    yield name, partial(_coded_group, d, width, 64, selector, x_dtype)
        if 4 in widths:
            for mode, x_dtype in MODES.items():
                yield f"grouped {mode} up w4 g16 d{d}", partial(_coded_group, d, 4, 16, "up", x_dtype)
    if "mxfp4" in widths and 4096 in dims:
        for mode, x_dtype in MODES.items():
            yield f"gpt_oss grouped {mode}", partial(_group, gpt_oss_layout("both"), "both", "clamped_swiglu", x_dtype)
    if 16 in widths and 4096 in dims:
        yield "combine", partial(combine, torch.empty(24, 4096), torch.empty(3, 4096))


def _plain(d: int, dtype: str, x_dtype: torch.dtype) -> None:
    rows = torch.empty(4096, d, dtype=DTYPES[dtype])
    _gemm(rows, stored_part(dtype, d), rows[0].nbytes // 16, x_dtype)


def _coded(d: int, width: Name, x_dtype: torch.dtype) -> None:
    layout = row_layout([("weight", named_format(width), False)], d)
    rows = torch.empty(4096, layout.row_bytes, dtype=torch.uint8)
    _gemm(rows, part_of(layout, "weight"), layout.row_bytes // 16, x_dtype)


def _gemm(rows: torch.Tensor, part: RowPart, row_units: int, x_dtype: torch.dtype) -> None:
    for num_tokens in (8, 512):
        x = torch.empty(num_tokens, part.num_cols, dtype=x_dtype)
        gemm(x, rows, part, row_units, torch.empty(num_tokens, len(rows)))


def _coded_group(d: int, width: Name, group: int, selector: Selector, x_dtype: torch.dtype) -> None:
    spec = ExpertSpec("silu", 768, ("gate", "up", "down"), (), 0)
    _group(expert_layout(named_expert(width, group), selector, spec, d), selector, "silu", x_dtype)


def _group(layout: ExpertLayout, selector: Selector, function: NeuronFunction, x_dtype: torch.dtype) -> None:
    """Calls for experts with as many tokens as tiles of every size have."""
    f, d, kind = layout.num_rows, layout.records.num_cols, kind_of(layout, selector, function)
    counts = np.array([16, 32, 64, 128])
    num_pairs, num_experts = int(counts.sum()), len(counts)
    units, numbers = torch.zeros(num_experts, f, dtype=torch.int32), torch.zeros(num_pairs, dtype=torch.int32)
    down_bias = torch.empty(num_experts, d) if layout.extra else None
    arena = torch.empty(128, dtype=torch.uint8)
    group = ExpertGroup(arena, units, units, torch.zeros(num_experts), (kind,), down_bias)
    plan = plan_tiles(counts, np.zeros(num_experts, np.int64), group.kinds, num_pairs, x_dtype == torch.bfloat16)
    x, weights = torch.empty(num_pairs, d, dtype=x_dtype), torch.empty(num_pairs)
    hidden, outputs = torch.empty(num_pairs, f), torch.empty(num_pairs, d)
    run_group(x, numbers, numbers, weights, group, plan, torch.from_numpy(plan.tiles), hidden, outputs)
