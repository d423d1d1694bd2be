"""Attention of several rows over stacked caches: each row is bit for bit the row alone, and equals plain torch.

Rows are one token each of several sequences, drafts of one, or both.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, Entering, QkNorms, RowPositions, View, attend
from moe_pack.runtime.gpu.kernels.attention.entering import enter
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.caches import KvDtype, LayerCache, RowStorage
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.compute.operations import HeadNorms

NUM_SLOTS = 4
# A row's slot, and its position: 1, 2, 5 and 8 rows. Position 0 has nothing before it.
ROWS = (
    ((2, 41),),
    ((1, 63), (1, 64)),
    ((3, 30), (3, 31), (3, 32), (0, 100), (2, 0)),
    ((0, 95), (2, 63), (2, 64), (2, 65), (2, 66), (1, 7), (3, 31), (3, 32)),
)
TOLERANCE: dict[KvDtype, float] = {"f32": 3e-6, "bf16": 0.02, "q8": 1e-4, "q4": 1e-4}  # see test_attend
GPU_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Grouped-query attention over caches whose places are all positions, or a ring."""

    dtype: KvDtype
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    value_width: int = 16
    places: int = 112
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    qk_norm: str = "head"

    @property
    def rows(self) -> tuple[RowStorage, RowStorage]:
        return RowStorage(self.dtype, (self.width,)), RowStorage(self.dtype, (self.value_width,))


SHAPES = (
    Shape("f32"),
    Shape("f32", heads=3, kv_heads=1, window=40, places=48, sinks=True, qk_norm="none"),  # a ring
    Shape("f32", window=32, chunked=True, qk_norm="projection", value_width=24),
    Shape("f32", heads=20, kv_heads=1, width=72, value_width=32, places=104),
    Shape("bf16", value_width=8, window=50, places=57),
    Shape("q8", width=48, value_width=32, sinks=True),
    Shape("q8", heads=18, kv_heads=1, window=40, places=48),
    Shape("q4", width=32, value_width=16, window=32, chunked=True),
    Shape("q4", value_width=40, qk_norm="none"),
)


class Tokens:
    """Rows before they are normed and rotated, and stacked caches with earlier positions; all on the host."""

    def __init__(self, shape: Shape, rows: tuple[tuple[int, int], ...], seed: int) -> None:
        self.shape, self.rows = shape, rows
        self._draw = torch.Generator().manual_seed(seed)
        heads, kv_heads, width = shape.heads, shape.kv_heads, shape.width
        self.q, self.k = self.random(len(rows), heads * width), self.random(len(rows), kv_heads * width)
        self.v = self.random(len(rows), kv_heads * shape.value_width)
        self.norms = None
        if shape.qk_norm != "none":
            widths = (width, width) if shape.qk_norm == "head" else (heads * width, kv_heads * width)
            self.norms = QkNorms(1 + self.random(widths[0]) / 4, 1 + self.random(widths[1]) / 4, 1e-5)
        turns = 9 * self.random(120, width // 4)
        self.angles = (turns.cos(), turns.sin())
        self.sinks = 2 * self.random(heads) if shape.sinks else None
        k_rows, v_rows = shape.rows
        sizes = (NUM_SLOTS, kv_heads, shape.places)
        self.cache = (
            k_rows.encode(self.random(*sizes, width)), v_rows.encode(self.random(*sizes, shape.value_width))
        )  # fmt: skip

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw)

    def attended(self, some: slice, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The kernels' output of some rows, and their rotated queries; the rows enter `cache`."""
        shape, device = self.shape, cache[0].device
        q, k, v, cos, sin = (each.to(device) for each in (self.q[some], self.k[some], self.v[some], *self.angles))
        norms = self.norms and QkNorms(self.norms.q.to(device), self.norms.k.to(device), self.norms.eps)
        entering = Entering(q, k, v, norms, shape.qk_norm == "projection", (cos, sin), interleaved=False)
        view = View(0.3, shape.window, shape.chunked, None if self.sinks is None else self.sinks.to(device))
        rotated = torch.full((len(q), shape.heads, shape.width), torch.nan, device=device)
        rows = None if shape.dtype in ("f32", "bf16") else shape.rows
        at = positions_of(self.rows[some], device)
        out = run(shape, rotated, cache, at, view, entering, rows)
        return out, rotated

    def expected(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Torch's output, and the caches afterwards, sequence by sequence."""
        shape, (q, k), norms = self.shape, (self.q, self.k), None
        if self.norms is not None and shape.qk_norm == "head":
            norms = HeadNorms(*self.norms)
        elif self.norms is not None:
            q, k = TORCH.rms_norm(q, self.norms.q, 1e-5), TORCH.rms_norm(k, self.norms.k, 1e-5)
        spec = GroupedQuerySpec(
            "grouped_query", shape.heads, shape.kv_heads, shape.width, shape.window, 0.3, (), "none",
            chunked=shape.chunked, value_head_dim=shape.value_width,
        )  # fmt: skip
        keys, values = (each.clone() for each in self.cache)
        out = torch.zeros(len(self.rows), shape.heads * shape.value_width)
        for slot in {slot for slot, _ in self.rows}:
            some = [t for t, (other, _) in enumerate(self.rows) if other == slot]
            at = [self.rows[t][1] for t in some]
            cache = LayerCache(keys[slot], values[slot], at[0], storage=shape.rows)
            angles = (self.angles[0][at], self.angles[1][at])
            view = softmax.View(cache, spec, shape.window, self.sinks)
            out[some] = TORCH.attend((q[some], k[some], self.v[some]), norms, angles, False, view)
        return out.view(len(self.rows), shape.heads, -1), (keys, values)


def positions_of(rows: tuple[tuple[int, int], ...], device: torch.device) -> RowPositions:
    slots, positions = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    return RowPositions(positions, slots)


def run(
    shape: Shape,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    at: RowPositions,
    view: View,
    entering: Entering | None = None,
    rows: tuple[RowStorage, RowStorage] | None = None,
) -> Tensor:
    """Attends with a workspace for 8 rows, of which others' results are left."""
    sizes = (shape.heads, shape.kv_heads, shape.value_width, shape.places)
    workspace = AttentionWorkspace.allocate(*sizes, q.device, num_rows=8)
    for left in workspace:
        left.fill_(torch.nan)
    out = torch.full((len(q), shape.heads, shape.value_width), torch.nan, device=q.device)
    attend(q, cache, at, view, workspace, out, entering, rows)
    return out


def on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.to(device, copy=True) for each in tensors)


def is_near(found: Tensor, expected: Tensor, dtype: KvDtype) -> bool:
    bound = TOLERANCE[dtype] if found.device.type == "cpu" else max(TOLERANCE[dtype], GPU_TOLERANCE)
    return bool((found.cpu() - expected).abs().max() <= bound * expected.abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_enter_are_the_rows_alone_and_torchs(shape: Shape, kernel_device: torch.device) -> None:
    for number, rows in enumerate(ROWS if SHAPES.index(shape) % 3 == 0 else ROWS[:3]):
        with case(rows):
            tokens = Tokens(shape, rows, number)
            keys, values = on(kernel_device, *tokens.cache)
            y, rotated = tokens.attended(slice(0, len(rows)), (keys, values))
            if kernel_device.type == "cpu":
                alone = on(kernel_device, *tokens.cache)
                for t in range(len(rows)):
                    own, own_rotated = tokens.attended(slice(t, t + 1), (alone[0], alone[1]))
                    assert torch.equal(own[0], y[t]) and torch.equal(own_rotated[0], rotated[t]), f"row {t}"
                assert torch.equal(alone[0], keys) and torch.equal(alone[1], values)
            expected, cached = tokens.expected()
            assert is_near(y, expected, shape.dtype)
            for found, known, before in zip((keys, values), cached, tokens.cache, strict=True):
                others = (known == before).all(dim=3)
                assert torch.equal(found.cpu()[others], before[others]), "only the rows' own places are written"


# --- prepared rows, masks


def twin(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Attention of one row: q [heads, n], keys and values [kv heads, S, n], seen bool [kv heads, S], in float64."""
    group = len(q) // len(keys)
    keys, values, seen = (each.repeat_interleave(group, 0) for each in (keys.double(), values.double(), seen))
    scores = (keys @ q.double()[:, :, None])[:, :, 0] * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), 1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return (scores.softmax(1)[:, None] @ values)[:, 0].float()


PREPARED = (
    replace(SHAPES[0], value_width=24),
    replace(SHAPES[4], places=112, window=None),
    Shape("q8", heads=6, width=48, value_width=32, sinks=True),
    Shape("q4", width=32, value_width=40),
)


@pytest.mark.parametrize("shape", PREPARED, ids=str)
def test_prepared_rows_enter_and_attend(shape: Shape, kernel_device: torch.device) -> None:
    (k_rows, v_rows), is_coded = shape.rows, shape.dtype in ("q8", "q4")
    for number, rows in enumerate(ROWS[::2]):
        with case(rows):
            tokens = Tokens(shape, rows, number)
            heads = [each.view(len(rows), -1, n) for each, n in
                     ((tokens.q, shape.width), (tokens.k, shape.width), (tokens.v, shape.value_width))]  # fmt: skip
            at, storage = positions_of(rows, kernel_device), shape.rows if is_coded else None
            view = View(0.3, sinks=None if tokens.sinks is None else tokens.sinks.to(kernel_device))
            (q, k, v), cache = on(kernel_device, *heads), on(kernel_device, *tokens.cache)
            enter(k, v, (cache[0], cache[1]), at, storage, q)
            y = run(shape, q, (cache[0], cache[1]), at, view, rows=storage)
            assert is_coded or torch.equal(q.cpu(), heads[0])
            keys, values = k_rows.decode(cache[0].cpu()), v_rows.decode(cache[1].cpu())
            for t, (slot, position) in enumerate(rows):
                for read, known, own in ((keys, k_rows, heads[1]), (values, v_rows, heads[2])):
                    wanted = known.decode(known.encode(own[t]))
                    step = {"f32": 0.0, "bf16": 2**-7, "q8": 2 / 127, "q4": 2 / 15}[shape.dtype]
                    assert ((read[slot, :, position] - wanted).abs() <= step * wanted.abs().max()).all()
                seen = torch.ones(shape.kv_heads, position + 1, dtype=torch.bool)
                past = (keys[slot, :, : position + 1], values[slot, :, : position + 1])
                expected = twin(heads[0][t], *past, seen, 0.3, tokens.sinks)
                assert is_near(y[t], expected, "q8" if is_coded else "f32")
                if kernel_device.type == "cpu":
                    one = positions_of(rows[t : t + 1], kernel_device)
                    own_out = run(shape, q[t : t + 1], (cache[0], cache[1]), one, view, rows=storage)
                    assert torch.equal(own_out[0], y[t]), f"row {t}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_a_mask_hides_positions(num_shares: int, kernel_device: torch.device) -> None:
    """Its bytes are as the shares of the heads have them; whole splits see nothing."""
    for shape in (Shape("f32", 8, 4, window=60), Shape("q8", 4, 4, sinks=True)):
        for number, rows in enumerate(ROWS[::2]):
            with case((shape, rows)):
                tokens = Tokens(shape, rows, number)
                at, storage = positions_of(rows, kernel_device), shape.rows if shape.dtype == "q8" else None
                q, k, v = on(kernel_device, tokens.q, tokens.k, tokens.v)
                q, k, v = (each.view(len(rows), -1, 16) for each in (q, k, v))
                cache = on(kernel_device, *tokens.cache)
                seen = (
                    torch.rand((len(rows), num_shares, shape.places), generator=torch.Generator().manual_seed(1)) < 0.3
                )
                for t, (_, position) in enumerate(rows):
                    seen[t, 0, : max(position - 3, 0)] = False  # only the last split sees any
                    seen[t, :, position] = True
                plain_q = q.cpu().clone()
                enter(k, v, (cache[0], cache[1]), at, storage, q)
                keys, values = (known.decode(each.cpu()) for known, each in zip(shape.rows, cache, strict=True))
                sinks = None if tokens.sinks is None else tokens.sinks.to(kernel_device)
                masks = seen.to(kernel_device)
                y = run(shape, q, (cache[0], cache[1]), at, View(0.3, shape.window, False, sinks, masks), rows=storage)
                for t, (slot, position) in enumerate(rows):
                    by_head = seen[t, :, : position + 1].repeat_interleave(shape.kv_heads // num_shares, 0).clone()
                    by_head[:, : max(position + 1 - (shape.window or 999), 0)] = False
                    past = (keys[slot, :, : position + 1], values[slot, :, : position + 1])
                    assert is_near(y[t], twin(plain_q[t], *past, by_head, 0.3, tokens.sinks), shape.dtype)
                    own = View(0.3, shape.window, False, sinks, masks[t : t + 1].to(torch.uint8))
                    one = positions_of(rows[t : t + 1], kernel_device)
                    own_out = run(shape, q[t : t + 1], (cache[0], cache[1]), one, own, rows=storage)
                    assert kernel_device.type != "cpu" or torch.equal(own_out[0], y[t]), f"row {t}"
