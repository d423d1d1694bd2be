"""Calls of all kernels, to be compiled for GPUs that are not here (`compiled_kernels`): names, and what calls them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from triton.runtime.driver import driver

from moe_pack.formats import ExpertFormat, ExpertLayout, ExpertSpec, NeuronFunction, RouterSpec, Selector, part_format
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels import attention, grouped, halves, predict, pull, sampling, tables
from moe_pack.runtime.gpu.kernels.attention import entering
from moe_pack.runtime.gpu.kernels.elementwise import Norm, ask, norm, reduce
from moe_pack.runtime.gpu.kernels.matmul import Product, StoredRows, gated, gather_row, gemm, gemv, normed_gemv
from moe_pack.runtime.gpu.kernels.mixers.recurrence import convolve_prompt, convolve_step, gated_step, recur_step
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select, select_programs, sums_at_once
from moe_pack.runtime.gpu.kernels.rotation import device_matrix, rotate, rotate_back
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.kernels.rows import RowPart, num_partials, part_of, stored_part
from moe_pack.runtime.model.caches import KvDtype, RowStorage
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES
from moe_pack.runtime.model.compute.recurrence import Gates
from moe_pack.runtime.model.compute.rotation import Rotation
from support.named_formats import Name, gpt_oss_layout, label, named_expert, named_format

Call = tuple[str, Callable[[], None]]
CPU = torch.device("cpu")
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")


def dense_calls(widths: tuple[Name, ...], dims: tuple[int, ...]) -> Iterator[Call]:
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
    _dense_several(torch.empty(5, d), few, matrix, (rms, layer))


def _dense_several(x: torch.Tensor, few: StoredRows, matrix: StoredRows, norms: tuple[Norm, Norm]) -> None:
    """The same for several vectors."""
    rms, layer = norms
    out, narrow = torch.empty(len(x), len(matrix.rows)), torch.empty(len(x), len(few.rows))
    gemv(x, matrix, out, residual=out)
    gather_row(few, torch.zeros(len(x), dtype=torch.int32), x)
    normed_gemv(x, rms, [Product(matrix, out)] * 3)
    normed_gemv(x, layer, [Product(few, narrow, narrow[0])] * 2)
    gated(x, matrix, matrix, "silu", out, norm=rms)
    gated(x, None, matrix, "silu", out, norm=layer, weight=torch.empty(len(x)))


def running_calls(
    widths: tuple[Name, ...], dims: tuple[int, ...], selectors: Sequence[Selector] = SELECTORS
) -> Iterator[Call]:
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
    layouts: list[ExpertLayout], selector: Selector, function: NeuronFunction, offsets: torch.dtype = torch.int32
) -> None:
    f, d = layouts[0].num_rows, layouts[0].records.num_cols
    k, at, numbers = 8, torch.zeros(16, f, dtype=offsets), torch.zeros(16, dtype=torch.int32)
    arena, down_bias = torch.empty(128, dtype=torch.uint8), torch.empty(16, d) if layouts[0].extra else None
    kinds = tuple(tables.kind_of(layout, selector, function) for layout in layouts)
    selector_at = None if selector == "none" else at
    layer = tables.LayerTables(arena, selector_at, at, numbers, torch.zeros(16), kinds, down_bias)
    experts, x, partials = numbers[:k], torch.empty(d), torch.empty(k, 16, d)
    running = tables.RunningNeurons.allocate(k, f, CPU, offsets)
    left = tables.LeftToCpu(numbers[:k], running.neurons, running.a)
    for selector_units in (None, running.units):
        select(x, experts, layer, running, selector_units)
    landing = tables.Landing(8, f, 4)
    for is_split, by_expert in ((False, False), (True, False), (True, True)):
        compact(experts, layer, running, landing, torch.zeros(1), left, is_split, 0.0, by_expert)
    keeping, kept = landing._replace(num_kept=f), tables.KeptNeurons(running.neurons, numbers[:k])
    for is_split in (False, True):
        compact(experts, layer, running, keeping, torch.zeros(1), left, is_split, kept=kept)
    neurons(x, experts, layer, running, partials, "here")
    neurons(x, experts, layer, running, partials, "pulled")


HALVES = {"fast": 1, "exact": 2}  # float16 numbers of a value in products of many tokens


def many_calls(
    widths: tuple[Name, ...], dims: tuple[int, ...], selectors: Sequence[Selector] = ("up", "none")
) -> Iterator[Call]:
    """Names and calls: decoding of every format; products of a handful of tokens and of many, with each arithmetic."""
    for d in dims:
        for mode, num_halves in HALVES.items():
            for dtype in ("BF16", "F16", "F32") if 16 in widths else ():
                stored = StoredRows(torch.empty(64, d, dtype=TORCH_DTYPES[dtype]), stored_part(dtype, d))
                yield f"gemm {mode} {dtype} d{d}", partial(_gemm, stored, num_halves)
            for width in widths:
                layout = row_layout([("weight", named_format(width), False)], d)
                stored = StoredRows(torch.empty(64, layout.row_bytes, dtype=torch.uint8), part_of(layout, "weight"))
                yield f"gemm {mode} {label(width)} d{d}", partial(_gemm, stored, num_halves)
                for selector in selectors:
                    name = f"grouped {mode} {selector} {label(width)} d{d}"
                    yield name, partial(_coded_group, d, width, 64, selector, num_halves)
            if 4 in widths:
                yield f"grouped {mode} up w4 g16 d{d}", partial(_coded_group, d, 4, 16, "up", num_halves)
    for mode, num_halves in HALVES.items() if "mxfp4" in widths and 4096 in dims else ():
        yield f"gpt_oss grouped {mode}", partial(_group, gpt_oss_layout("both"), "both", "clamped_swiglu", num_halves)
    if 16 in widths and 4096 in dims:
        yield "combine", partial(grouped.combine, torch.empty(24, 4096), torch.empty(3, 8), torch.empty(3, 4096))


def _gemm(matrix: StoredRows, num_halves: int) -> None:
    d, num_rows = matrix.part.num_cols, len(matrix.rows)
    for num_tokens in TILE_TOKENS:
        x, scratch = torch.empty(num_tokens, d), torch.empty(2 * num_rows * d, dtype=torch.float16)
        gemm(x, matrix, torch.empty(num_tokens, num_rows), scratch, num_halves)


TILE_TOKENS = (8, 32, 64, 512)  # with which products have tiles of every size


def _coded_group(d: int, width: Name, group: int, selector: Selector, num_halves: int) -> None:
    spec = ExpertSpec("silu", 768, ("gate", "up", "down"), (), 0)
    _group(expert_layout(named_expert(width, group), selector, spec, d), selector, "silu", num_halves)


def _group(layout: ExpertLayout, selector: Selector, function: NeuronFunction, num_halves: int) -> None:
    """Calls for two experts, with as many tokens as tiles of every size have."""
    f, d, kind = layout.num_rows, layout.records.num_cols, tables.kind_of(layout, selector, function)
    at, down_bias = torch.zeros(2, f, dtype=torch.int32), torch.empty(2, d) if layout.extra else None
    selector_at = None if layout.selector is None else at
    arena, numbers = torch.empty(128, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    layer = tables.LayerTables(arena, selector_at, at, numbers, torch.zeros(2), (kind,), down_bias)
    for num_tokens in TILE_TOKENS:
        x = halves.Halves.allocate(num_halves, num_tokens, d, CPU)
        memory = grouped.PassMemory.allocate(2, halves.padded(f), d, 2 * num_tokens, num_halves, CPU)
        pairs = grouped.sort_pairs(torch.arange(2).expand(num_tokens, 2), numbers, 2)
        grouped.run_group(x, grouped.Group(pairs, layer, 0, 2), memory)


def _rows_at(num_rows: int) -> attention.RowPositions:
    return attention.RowPositions(*torch.zeros((2, num_rows), dtype=torch.int32))


CONTEXT = 4096
F32, BF16 = torch.float32, torch.bfloat16

ROUTERS = (
    RouterSpec("softmax_topk", 128, 8, True),
    RouterSpec("softmax_topk", 512, 10, True),
    RouterSpec("softmax_topk", 160, 6, False, False, 8, 3, 16.0),
    RouterSpec("sigmoid_topk", 256, 8, True, True, 8, 4, 2.5),
    RouterSpec("topk_softmax", 40, 8, False),
    RouterSpec("sparsemixer", 16, 2, False, jitter=0.01),
)


def token_calls() -> Iterator[Call]:
    """Attention of grouped queries, norms, routers, sums of experts: shapes of published models."""
    yield "ask", partial(ask, torch.zeros(1, dtype=torch.int32), 1)
    for case in (
        (32, 4, 128, F32, "head"),
        (32, 8, 128, BF16, "none", 4096, CONTEXT),
        (16, 2, 256, F32, "head"),
        (8, 8, 80, BF16, "none"),
        (16, 16, 128, BF16, "projection"),
        (16, 16, 64, F32, "none", None, 16),
        (64, 8, 64, BF16, "none", 128, 639, True),  # a ring of gpt_oss
        (64, 8, 64, BF16, "none", None, CONTEXT, True),
    ):
        yield f"attend {case}", partial(_attend, *case)
    for dtype in ("q8", "q4"):
        for coded in (
            (32, 8, 128, dtype, "none", 4096),
            (32, 4, 128, dtype, "head"),
            (16, 16, 128, dtype, "projection"),
            (8, 8, 80, dtype, "none"),
            (16, 2, 256, dtype, "head"),
            (64, 8, 64, dtype, "none", 128, 639, True),
        ):
            yield f"attend {coded}", partial(_attend, *coded)
    yield "attend 8 rows", partial(_attend, 32, 8, 128, BF16, "none", num_rows=8)
    yield "attend 8 rows q8", partial(_attend, 32, 8, 128, "q8", "head", num_rows=8)
    for prepared in (
        (64, 4, (192, 128), "bf16", 8, 0),
        (64, 4, (192, 128), "q8", 8, 0),
        (32, 4, (128, 128), "bf16", 8, 4),
        (32, 4, (128, 128), "q8", 1, 1),
    ):
        yield f"attend prepared {prepared}", partial(_attend_prepared, *prepared)
    for d in (2048, 7168):
        yield f"norm rms d{d}", partial(norm, torch.empty(d), Norm(torch.empty(d), None, 1e-6), torch.empty(d))
    for d in (2880, 4096, 7168, 8192):
        x, out = torch.empty(d), torch.empty(d)
        matrix, vectors = device_matrix(d, CPU), Rotation(x, x)
        yield f"rotate d{d}", partial(rotate, x, vectors, matrix, out)
        back = partial(rotate_back, x, vectors, matrix, out, residual=out, shared=torch.empty(d), scale=0.5)
        yield f"rotate back d{d}", back
    x = torch.empty(4096)
    yield "norm layer", partial(norm, x, Norm(x, x, 1e-6), x)
    for k, num_sums, d in ((2, 132, 4096), (8, 33, 2048), (4, 66, 2880)):
        yield f"reduce d{d}", partial(_reduce, k, num_sums, d)
    for spec in ROUTERS:
        yield f"route {spec.kind} {spec.num_experts}", partial(_route, spec, 2048, "BF16")
    for dtype in ("F16", "F32"):
        yield f"route {dtype} d7168", partial(_route, ROUTERS[3], 7168, dtype)
    for num_experts, k in ((128, 8), (256, 8)):
        yield f"predict {num_experts}", partial(_predict, num_experts, k)
    yield "choose", _choose


def _attend(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype | Literal["q8", "q4"],
    qk_norm: Literal["none", "head", "projection"],
    window: int | None = None,
    num_places: int = CONTEXT,
    has_sinks: bool = False,
    num_rows: int = 1,
) -> None:
    if isinstance(dtype, torch.dtype):
        rows, keys = None, torch.empty((num_rows, kv_heads, num_places, width), dtype=dtype)
    else:
        rows = RowStorage(dtype, (width,))
        keys = rows.empty(num_rows * kv_heads, num_places, CPU).view(num_rows, kv_heads, num_places, -1)
    q, k, v = (torch.empty(num_rows, n * width) for n in (heads, kv_heads, kv_heads))
    norms = None if qk_norm == "none" else attention.QkNorms(q, k, 1e-6)
    angles = torch.empty(CONTEXT, width // 2), torch.empty(CONTEXT, width // 2)
    attention.attend(
        torch.empty(num_rows, heads, width),
        (keys, torch.empty_like(keys)),
        _rows_at(num_rows),
        attention.View(0.1, window, sinks=torch.empty(heads) if has_sinks else None),
        attention.AttentionWorkspace.allocate(heads, kv_heads, width, num_places, CPU, num_rows),
        torch.empty(num_rows, heads, width),
        attention.Entering(q, k, v, norms, qk_norm == "projection", angles, interleaved=width == 80),
        None if rows is None else (rows, rows),
    )


def _attend_prepared(
    heads: int, kv_heads: int, widths: tuple[int, int], dtype: KvDtype, num_rows: int, shares: int
) -> None:
    """Prepared rows with values of another width than keys, or with a mask, or in chunks."""
    stored = tuple(RowStorage(dtype, (width,)) for width in widths)
    keys, values = (
        each.empty(num_rows * kv_heads, CONTEXT, CPU).view(num_rows, kv_heads, CONTEXT, -1) for each in stored
    )
    q, k = torch.empty(num_rows, heads, widths[0]), torch.empty(num_rows, kv_heads, widths[0])
    v, out = torch.empty(num_rows, kv_heads, widths[1]), torch.empty(num_rows, heads, widths[1])
    at, rows = _rows_at(num_rows), (stored[0], stored[1])
    entering.enter(k, v, (keys, values), at, rows, q)
    workspace = attention.AttentionWorkspace.allocate(heads, kv_heads, widths[1], CONTEXT, CPU, num_rows)
    seen = torch.empty((num_rows, shares, CONTEXT), dtype=torch.uint8) if shares else None
    view = attention.View(0.1, None if shares else 1024, not shares, None, seen)
    attention.attend(q, (keys, values), at, view, workspace, out, rows=rows)


def _reduce(k: int, num_sums: int, d: int) -> None:
    """Sums of experts alone, and with everything that may be added; of a token, and of several."""
    for num_tokens in (1, 5):
        partials, weights = torch.empty(num_tokens * k, num_sums, d), torch.empty(num_tokens, k)
        x = torch.empty(num_tokens, d)
        reduce(partials, weights, x, residual=x)
        reduce(partials, weights, x, pulled=partials, host=x, residual=x, shared=x)


def _choose() -> None:
    """Tokens of two rows from a vocabulary of 151,936."""
    control = torch.zeros((3, 2), dtype=torch.int32)
    memory = sampling.ChoiceMemory.allocate(torch.empty(2, 151_936), control[2], 2)
    sampling.enter_rows(control, torch.zeros(memory.options.shape, dtype=torch.float64), memory, control)
    sampling.choose(memory, control[0], 2)


def _predict(num_experts: int, k: int) -> None:
    """Rankings, path statistics, a network's routes, and records pulled ahead of 1,024 neurons."""
    numbers = torch.empty((k, 1024), dtype=torch.int32)
    scores, experts, routes = torch.empty(num_experts), numbers[0, :k], numbers[:2, :k].contiguous()
    predict.rank(scores, experts)
    predict.rank(scores, experts, bias=scores, is_sigmoid=True)
    predict.add_routes(torch.empty(128), torch.empty((2, num_experts, 128), dtype=BF16), routes, is_rectified=True)
    table, hashes = torch.empty((2, num_experts, num_experts)), torch.empty((2, num_experts), dtype=torch.int64)
    paths = predict.LayerPaths(table, routes, scores, hashes, hashes[0], experts, experts, scores)
    predict.score_paths(routes, paths, scores)
    pulled = predict.PulledAhead(experts, numbers, experts)
    for selector_at in (None, torch.empty((num_experts, 1024), dtype=torch.int32)):
        record_at = torch.empty((num_experts, 1024), dtype=torch.int32)
        layer = tables.LayerTables(torch.empty(0), selector_at, record_at, experts, scores, ())
        predict.enter_pulled(pulled, record_at, 8, 4)
        predict.forget_pulled(
            pulled, experts, layer, tables.RunningNeurons.allocate(k, 1024, CPU), numbers[:, :3].contiguous()
        )


def _route(spec: RouterSpec, d: int, dtype: str) -> None:
    """Without and with biases and a shared expert, with choices that are changed, and for several tokens."""
    k, x, num_experts = spec.num_experts_per_tok, torch.empty(d), spec.num_experts
    rows = StoredRows(torch.empty((num_experts, d), dtype=TORCH_DTYPES[dtype]), stored_part(dtype, d))
    shared = StoredRows(torch.empty((1, d), dtype=BF16), stored_part("BF16", d))
    bias, each = torch.empty(num_experts) if spec.bias else None, torch.empty(num_experts)
    experts, routed = torch.empty(k, dtype=torch.int32), Routed.allocate(d, spec, CPU)
    route(x, Router(spec, Norm(x, None, 1e-6), rows, None, bias, None), experts, routed)
    route(x, Router(spec, Norm(x, x, 1e-6), rows, each, bias, shared), experts, routed)
    number = torch.empty(num_experts, dtype=torch.int32)
    for changed in (ChangedChoice(number, None, 0.0, number), ChangedChoice(None, number, 0.3, number)):
        route(x, Router(spec, Norm(x, None, 1e-6), rows, None, bias, None), experts, routed, changed)
    several, replaced = Routed.allocate(d, spec, CPU, 5), ChangedChoice(None, number, 0.3, number)
    route(torch.empty(5, d), Router(spec, Norm(x, x, 1e-6), rows, each, bias, shared), experts, several)
    route(torch.empty(5, d), Router(spec, Norm(x, None, 1e-6), rows, None, bias, None), experts, several, replaced)


def latent_calls(widths: tuple[int, ...]) -> Iterator[Call]:
    """Latent attention as published models have it; `kv_b` in this width."""
    for width in widths:
        yield f"latent w{width}", partial(_latent, 16, width, F32)
    if 16 in widths:
        yield "latent 128 heads", partial(_latent, 128, 16, BF16)
        yield "latent 128 heads 8 rows", partial(_latent, 128, 16, BF16, 8)
        for dtype in ("q8", "q4"):
            yield f"latent {dtype}", partial(_latent, 16, 16, dtype)


def _latent(heads: int, width: int, dtype: torch.dtype | Literal["q8", "q4"], num_rows: int = 1) -> None:
    rank, nope, rope, v = 512, 128, 64, 128
    spec = LatentSpec("latent", heads, None, rank, nope, rope, v, 0.1, 1e-6)
    matrix_rows = heads * (nope + v)
    if width == 16:
        kv_b = StoredRows(torch.empty((matrix_rows, rank), dtype=BF16), stored_part("BF16", rank))
    else:
        layout = row_layout([("weight", part_format(width, 64), False)], rank)
        kv_b = StoredRows(torch.empty((matrix_rows, layout.row_bytes), dtype=torch.uint8), part_of(layout, "weight"))
    projected = torch.empty(num_rows, heads * (nope + rope)), torch.empty(num_rows, rank + rope)
    angles = torch.empty(CONTEXT, rope // 2), torch.empty(CONTEXT, rope // 2)
    moved, mixed = torch.empty(num_rows, heads, rank + rope), torch.empty(num_rows, heads, rank)
    if isinstance(dtype, torch.dtype):
        rows, keys = None, torch.empty((num_rows, 1, CONTEXT, rank + rope), dtype=dtype)
        values = keys[..., :rank]
    else:
        rows = RowStorage(dtype, (rank, rope))
        keys = values = rows.empty(num_rows, CONTEXT, CPU)[:, None]
    at = _rows_at(num_rows)
    attention.enter_latent(projected, torch.empty(rank), angles, True, at, spec, kv_b, moved, keys, rows)
    room = attention.AttentionWorkspace.allocate(heads, 1, rank, CONTEXT, CPU, num_rows)
    storage = None if rows is None else (rows, rows)
    attention.attend(moved, (keys, values), at, attention.View(spec.scale), room, mixed, rows=storage)
    attention.leave_latent(mixed, spec, kv_b, torch.empty(num_rows, heads * v))


def pull_calls(widths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Call]:
    """Rows copied from host memory for a token."""
    for d in dims:
        for width in widths:
            yield f"pull w{width} d{d}", partial(_pull, d, width)


def _pull(d: int, width: int) -> None:
    part, f, k = part_format(width, 64), 768, 8
    spec = ExpertSpec("silu", f, ("gate", "up", "down"), (), 0)
    kind = tables.kind_of(expert_layout(ExpertFormat(part, part, part), "up", spec, d), "up", "silu")
    at, each = torch.zeros(16, f, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    layer = tables.LayerTables(torch.empty(128, dtype=torch.uint8), at, at, each, torch.zeros(16), (kind, kind))
    host = tables.HostRows(torch.empty(128, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    experts, running = each[:k], tables.RunningNeurons.allocate(k, f, CPU)
    for is_split in (False, True):
        pull.pull_records(experts, layer, running, host, is_split)
    pull.pull_selectors(experts, layer, host, 8, at[:k])


# --- states of mixers


class MixerShape(NamedTuple):
    """Sizes of a model's mixer: its convolution's channels, and its recurrence."""

    channels: int
    key_heads: int
    heads: int
    keys: int
    width: int  # values of a head
    is_keyed: bool = False  # each key has a decay
    has_rate: bool = False


MIXERS = {
    "Qwen3.6": MixerShape(8192, 16, 32, 128, 128, has_rate=True),
    "Kimi-Linear": MixerShape(12288, 32, 32, 128, 128, is_keyed=True, has_rate=True),
    "Nemotron-H": MixerShape(6144, 8, 64, 128, 64),
    "Granite-4": MixerShape(8448, 1, 128, 128, 64),
    "Jamba": MixerShape(8192, 1, 8192, 16, 1, is_keyed=True),
    "MiniMax": MixerShape(0, 64, 64, 128, 128),
}


def mixer_calls() -> Iterator[Call]:
    """A layer's state, for one row, for several and for a prompt."""
    for name, shape in MIXERS.items():
        for num_rows in (1, 8):
            yield f"states {name} T{num_rows}", partial(_mixer, shape, num_rows)
        yield f"states {name} prompt", partial(_mixer, shape, 100, is_prompt=True)


def _mixer(shape: MixerShape, num_rows: int, is_prompt: bool = False) -> None:
    (heads, keys, width), slots = shape[2:5], None if is_prompt else torch.zeros(num_rows, dtype=torch.int32)
    if shape.channels:
        x, kernel = torch.empty(num_rows, shape.channels), torch.empty(4 * shape.channels)
        state, out = torch.empty(2, 3, shape.channels), torch.empty_like(x)
        if slots is None:
            convolve_prompt(x, kernel, kernel, state[0], out, activates=True)
        else:
            convolve_step(x, kernel, kernel, state, slots, out, activates=True)
    k, v = torch.empty(num_rows, shape.key_heads, keys), torch.empty(num_rows, heads, width)
    decay = torch.empty((num_rows, heads, keys) if shape.is_keyed else (num_rows, heads))
    rate = torch.empty(num_rows, heads) if shape.has_rate else None
    state, out = torch.empty(2, heads, keys, width), torch.empty_like(v)
    state = state[0] if slots is None else state
    recur_step(k, k, v, decay, rate, state, slots, out)
    if not shape.is_keyed:
        skip = None if shape.has_rate else decay[0]
        gated_step(k, k, v, Gates(decay, rate, decay[0], decay[0], 1e-3, skip), state, slots, out)


# --- a token of published models


class TokenShape(NamedTuple):
    """Sizes of a model's layers, and the bits of its experts' selectors and records; dense matrices have 4."""

    d: int
    f: int
    k: int
    attention: tuple[int, int, int]  # heads, key heads, width
    vocab: int
    selector_bits: int
    record_bits: tuple[int, ...]  # of kinds of experts
    shared: int = 0  # neurons of the shared expert


TOKENS = {
    "Mixtral-8x7B": TokenShape(4096, 14336, 2, (32, 8, 128), 32000, 2, (2, 4)),
    "Qwen3-30B-A3B": TokenShape(2048, 768, 8, (32, 4, 128), 151936, 4, (4,)),
    "Qwen3.6-35B-A3B": TokenShape(2048, 512, 8, (16, 2, 256), 248320, 4, (4,), shared=512),
}


def model_calls() -> Iterator[Call]:
    """The launches of a token that read rows or keys, with 4,096 positions, for the multiprocessors of the driver."""
    for name, shape in TOKENS.items():
        heads, kv_heads, width = shape.attention
        yield f"{name} experts", partial(_token_experts, shape)
        yield f"{name} qkv", partial(_token_products, shape.d, (heads * width, kv_heads * width, kv_heads * width))
        yield f"{name} o", partial(_token_products, heads * width, (shape.d,))
        yield f"{name} head", partial(_token_products, shape.d, (shape.vocab,))
        if name == "Mixtral-8x7B":
            yield f"{name} plain", partial(_token_plain, shape.d, shape.vocab)
        yield f"{name} attend", partial(_attend, heads, kv_heads, width, BF16, "none" if width == 128 else "head")
        if shape.shared:
            yield f"{name} shared", partial(_token_gated, shape.d, shape.shared)
            yield f"{name} shared down", partial(_token_products, shape.shared, (shape.d,))


def _token_experts(shape: TokenShape) -> None:
    num_sms = driver.active.utils.get_device_properties(driver.active.get_current_device())["multiprocessor_count"]
    spec, low = ExpertSpec("silu", shape.f, ("gate", "up", "down"), (), 0), part_format(shape.selector_bits, 64)
    records = [part_format(bits, 64) for bits in shape.record_bits]
    layouts = [expert_layout(ExpertFormat(part, low, part), "up", spec, shape.d) for part in records]
    kinds = tuple(tables.kind_of(layout, "up", "silu") for layout in layouts)
    at, each = torch.zeros(16, shape.f, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    layer = tables.LayerTables(torch.empty(128, dtype=torch.uint8), at, at, each, torch.zeros(16), kinds, None)
    running = tables.RunningNeurons.allocate(shape.k, shape.f, CPU, num_programs=select_programs(kinds))
    num_sums = num_partials(shape.k, shape.f, num_sms, sums_at_once(kinds))
    x, experts = torch.empty(shape.d), each[: shape.k]
    left = tables.LeftToCpu(experts, running.neurons, running.a)
    select(x, experts, layer, running)
    for by_expert in (False, True):
        landing = tables.Landing(8, shape.f, 4)
        compact(experts, layer, running, landing, torch.zeros(1), left, True, 0.0, by_expert)
    neurons(x, experts, layer, running, torch.empty(shape.k, num_sums, shape.d), "here")


def _token_matrix(d: int, num_rows: int) -> StoredRows:
    layout = row_layout([("weight", part_format(4, 64), False)], d)
    return StoredRows(torch.empty(num_rows, layout.row_bytes, dtype=torch.uint8), part_of(layout, "weight"))


def _token_products(d: int, nums: tuple[int, ...]) -> None:
    x, products = torch.empty(d), [Product(_token_matrix(d, num), torch.empty(num)) for num in nums]
    if len(nums) > 1:
        normed_gemv(x, Norm(x, None, 1e-6), products)
    else:
        gemv(x, products[0].matrix, products[0].out, residual=products[0].out)


def _token_plain(d: int, num_rows: int) -> None:
    rows = torch.empty(num_rows, d, dtype=torch.bfloat16)
    gemv(torch.empty(d), StoredRows(rows, stored_part("BF16", d)), torch.empty(num_rows))


def _token_gated(d: int, f: int) -> None:
    matrix = _token_matrix(d, f)
    gated(torch.empty(d), matrix, matrix, "silu", torch.empty(f), weight=torch.empty(1))
