"""A random token that attends to a layer's cache, by kernels and in plain torch."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, Entering, QkNorms, RowPositions, View, attend
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.caches import LayerCache, RowStorage
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.compute.operations import HeadNorms

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A token's attention: sizes, the token's position, and the cache's places: fewer than positions are a ring."""

    heads: int
    kv_heads: int
    head_dim: int
    position: int
    places: int
    window: int | None = None
    sinks: bool = False
    qk_norm: Literal["none", "head", "projection"] = "head"
    rotated: float = 1.0  # share of the columns
    interleaved: bool = False


class AttendingToken:
    """A token that comes to a layer's cache; all on the host, caches that kernels are given on `device`."""

    def __init__(self, shape: AttentionShape, seed: int, device: torch.device) -> None:
        self.device, self.shape = device, shape
        self._draw = torch.Generator().manual_seed(seed)
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        self.spec = GroupedQuerySpec(
            "grouped_query", heads, kv_heads, dim, shape.window, 1.5 * dim**-0.5, (), shape.qk_norm
        )
        self.projected = (self._random(heads * dim), self._random(kv_heads * dim), self._random(kv_heads * dim))
        self.norms = None
        if shape.qk_norm != "none":
            widths = (dim, dim) if shape.qk_norm == "head" else (heads * dim, kv_heads * dim)
            self.norms = QkNorms(1 + self._random(widths[0]) / 4, 1 + self._random(widths[1]) / 4, 1e-5)
        turns = 9 * self._random(shape.position + 1, int(shape.rotated * dim / 2))
        self.angles = (turns.cos(), turns.sin())
        self.cache = (self._random(kv_heads, shape.places, dim), self._random(kv_heads, shape.places, dim))
        self.sinks = 2 * self._random(heads) if shape.sinks else None
        self.place = shape.position % shape.places  # in the cache, of the token's keys and values

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw)

    def _entering(self) -> Entering:
        q, k, v, cos, sin = (each.to(self.device) for each in (*self.projected, *self.angles))
        norms = self.norms and QkNorms(self.norms.q.to(self.device), self.norms.k.to(self.device), self.norms.eps)
        return Entering(q, k, v, norms, self.spec.qk_norm == "projection", (cos, sin), self.shape.interleaved)

    def attended(
        self, cache: Cache, rotated: Tensor | None = None, rows: RowStorage | None = None
    ) -> tuple[Tensor, Tensor]:
        """The kernels' output, and the rotated queries; the token enters the cache if these are not given."""
        spec, sizes = self.spec, (self.shape.heads, self.shape.kv_heads, self.shape.head_dim)
        workspace = AttentionWorkspace.allocate(*sizes, self.shape.places, self.device)
        for left in workspace:  # another token's
            left.fill_(torch.nan)
        entering = self._entering() if rotated is None else None
        q = torch.full((sizes[0], sizes[2]), torch.nan, device=self.device) if rotated is None else rotated
        out, sinks = torch.full_like(q, torch.nan), None if self.sinks is None else self.sinks.to(self.device)
        at = torch.tensor([self.shape.position], dtype=torch.int32, device=self.device)
        places, view = RowPositions(at, torch.zeros_like(at)), View(spec.scale, spec.sliding_window, False, sinks)
        storage = None if rows is None else (rows, rows)
        attend(q[None], (cache[0][None], cache[1][None]), places, view, workspace, out[None], entering, storage)
        return out, q

    def expected(self, cached: Cache | None = None, rows: RowStorage | None = None) -> tuple[Tensor, Cache]:
        """Torch's output, and the cache afterwards, if this is in it before; None: the token's own."""
        (q, k, v), norms = self.projected, None
        if self.norms is not None and self.spec.qk_norm == "head":
            norms = HeadNorms(*self.norms)
        elif self.norms is not None:
            q, k = TORCH.rms_norm(q, self.norms.q, self.norms.eps), TORCH.rms_norm(k, self.norms.k, self.norms.eps)
        keys, values = (each.clone() for each in cached or self.cache)
        cache = LayerCache(keys, values, self.shape.position, storage=None if rows is None else (rows, rows))
        angles = (self.angles[0][-1:], self.angles[1][-1:])
        view = softmax.View(cache, self.spec, self.spec.sliding_window, self.sinks)
        y = TORCH.attend((q[None], k[None], v[None]), norms, angles, self.shape.interleaved, view)
        return y.view(self.spec.num_heads, -1), (cache.keys, cache.values)
