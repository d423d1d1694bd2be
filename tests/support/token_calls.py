"""Calls of what lies between a token's products, to be compiled for GPUs that are not here (`compiled_kernels`)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch

from moe_pack.formats import ExpertFormat, ExpertSpec, RouterSpec, part_format
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    Entering,
    QkNorms,
    attend,
    enter_latent,
    leave_latent,
)
from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm, reduce
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.predict import (
    LayerPaths,
    PulledAhead,
    add_routes,
    enter_pulled,
    forget_pulled,
    rank,
    score_paths,
)
from moe_pack.runtime.gpu.kernels.pull import bring, enter_rows, pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.rotation import device_matrix as rotation_matrix
from moe_pack.runtime.gpu.kernels.rotation import rotate, rotate_back
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import HostRows, LayerTables, RunningNeurons, kind_of
from moe_pack.runtime.model.caches.storage import RowStorage
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES
from moe_pack.runtime.model.compute.rotation import Rotation

Call = tuple[str, Callable[[], None]]

CPU = torch.device("cpu")
POSITION = torch.tensor([5], dtype=torch.int32)
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
    for d in (2048, 7168):
        yield f"norm rms d{d}", partial(norm, torch.empty(d), Norm(torch.empty(d), None, 1e-6), torch.empty(d))
    for d in (2880, 4096, 7168, 8192):
        x, out = torch.empty(d), torch.empty(d)
        matrix, vectors = rotation_matrix(d, CPU), Rotation(x, x)
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


def _attend(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype | Literal["q8", "q4"],
    qk_norm: Literal["none", "head", "projection"],
    window: int | None = None,
    num_places: int = CONTEXT,
    has_sinks: bool = False,
) -> None:
    if isinstance(dtype, torch.dtype):
        rows, keys = None, torch.empty((kv_heads, num_places, width), dtype=dtype)
    else:
        rows = RowStorage(dtype, (width,))
        keys = rows.empty(kv_heads, num_places, CPU)
    q, k, v = (torch.empty(n * width) for n in (heads, kv_heads, kv_heads))
    norms = None if qk_norm == "none" else QkNorms(q, k, 1e-6)
    angles = torch.empty(CONTEXT, width // 2), torch.empty(CONTEXT, width // 2)
    attend(
        torch.empty(heads, width),
        (keys, torch.empty_like(keys)),
        POSITION,
        0.1,
        window,
        AttentionWorkspace.allocate(heads, kv_heads, width, num_places, CPU),
        torch.empty(heads, width),
        torch.empty(heads) if has_sinks else None,
        Entering(q, k, v, norms, qk_norm == "projection", angles, interleaved=width == 80),
        rows,
    )


def _reduce(k: int, num_sums: int, d: int) -> None:
    """Sums of experts alone, and with everything that may be added."""
    partials, weights, x = torch.empty(k, num_sums, d), torch.empty(k), torch.empty(d)
    reduce(partials, weights, x, residual=x)
    reduce(partials, weights, x, pulled=partials, host=x, residual=x, shared=x)


def _predict(num_experts: int, k: int) -> None:
    """Rankings, path statistics, a network's routes, and records pulled ahead of 1,024 neurons."""
    numbers = torch.empty((k, 1024), dtype=torch.int32)
    scores, experts, routes = torch.empty(num_experts), numbers[0, :k], numbers[:2, :k].contiguous()
    rank(scores, experts)
    rank(scores, experts, bias=scores, is_sigmoid=True)
    add_routes(torch.empty(128), torch.empty((2, num_experts, 128), dtype=BF16), routes, is_rectified=True)
    table, hashes = torch.empty((2, num_experts, num_experts)), torch.empty((2, num_experts), dtype=torch.int64)
    paths = LayerPaths(table, routes, scores, hashes, hashes[0], experts, experts, scores)
    score_paths(routes, paths, scores)
    pulled = PulledAhead(experts, numbers, numbers, experts)
    for selector_at in (None, torch.empty((num_experts, 1024), dtype=torch.int32)):
        record_at = torch.empty((num_experts, 1024), dtype=torch.int32)
        tables = LayerTables(torch.empty(0), selector_at, record_at, experts, scores, ())
        enter_pulled(pulled, record_at)
        forget_pulled(pulled, experts, tables, RunningNeurons.allocate(k, 1024, CPU), numbers[:, :3].contiguous())


def _route(spec: RouterSpec, d: int, dtype: str) -> None:
    """Without and with biases and a shared expert, and with choices that are changed."""
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


def latent_calls(widths: tuple[int, ...]) -> Iterator[Call]:
    """Latent attention as published models have it; `kv_b` in this width."""
    for width in widths:
        yield f"latent w{width}", partial(_latent, 16, width, F32)
    if 16 in widths:
        yield "latent 128 heads", partial(_latent, 128, 16, BF16)


def _latent(heads: int, width: int, dtype: torch.dtype) -> None:
    rank, nope, rope, v = 512, 128, 64, 128
    spec = LatentSpec("latent", heads, None, rank, nope, rope, v, 0.1, 1e-6)
    num_rows = heads * (nope + v)
    if width == 16:
        kv_b = StoredRows(torch.empty((num_rows, rank), dtype=BF16), stored_part("BF16", rank))
    else:
        layout = row_layout([("weight", part_format(width, 64), False)], rank)
        kv_b = StoredRows(torch.empty((num_rows, layout.row_bytes), dtype=torch.uint8), part_of(layout, "weight"))
    projected = torch.empty(heads * (nope + rope)), torch.empty(rank + rope)
    angles = torch.empty(CONTEXT, rope // 2), torch.empty(CONTEXT, rope // 2)
    keys, moved = torch.empty((1, CONTEXT, rank + rope), dtype=dtype), torch.empty(heads, rank + rope)
    enter_latent(projected, torch.empty(rank), angles, True, POSITION, spec, kv_b, moved, keys)
    mixed, room = torch.empty(heads, rank), AttentionWorkspace.allocate(heads, 1, rank, CONTEXT, CPU)
    attend(moved, (keys, keys[..., :rank]), POSITION, spec.scale, None, room, mixed)
    leave_latent(mixed, spec, kv_b, torch.empty(heads * v))


def pull_calls(widths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Call]:
    """Rows copied from host memory for a token."""
    for d in dims:
        for width in widths:
            yield f"pull w{width} d{d}", partial(_pull, d, width)


def _pull(d: int, width: int) -> None:
    part, f, k = part_format(width, 64), 768, 8
    spec = ExpertSpec("silu", f, ("gate", "up", "down"), (), 0)
    kind = kind_of(expert_layout(ExpertFormat(part, part, part), "up", spec, d), "up", "silu")
    at, each = torch.zeros(16, f, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    tables = LayerTables(torch.empty(128, dtype=torch.uint8), at, at, each, torch.zeros(16), (kind, kind))
    host = HostRows(torch.empty(128, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    experts, running = each[:k], RunningNeurons.allocate(k, f, CPU)
    for is_split in (False, True):
        pull_records(experts, tables, running, host, is_split)
    pull_selectors(experts, tables, host, 8, at[:k])
    bring(torch.zeros(16, dtype=torch.int64), each, kind.record_units, host.rows, tables.arena)
    enter_rows(torch.zeros((16, 2), dtype=torch.int32), each[:1], at.view(-1))
