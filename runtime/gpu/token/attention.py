"""Attention of the rows of a pass, over stacked caches; importing this needs Triton.

`RowGrouped` and `RowLatent` are the model's own attention in all but the steps that depend on where a row stands: those
read positions and slots on the device, and have shapes that do not depend on them. Kernels read and write the caches;
an indexer's choice is plain torch over all places of a cache, and a mask for the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    Entering,
    QkNorms,
    RowPositions,
    View,
    attend,
    enter,
    enter_latent,
    leave_latent,
)
from moe_pack.runtime.gpu.token.rows import TokenCaches, TokenRows
from moe_pack.runtime.gpu.weights import stored
from moe_pack.runtime.model import PackWeights, caches
from moe_pack.runtime.model.attention import grouped, latent, shared
from moe_pack.runtime.model.caches import layer_cache, ropes
from moe_pack.runtime.model.compute import operations


class HeadBuffers(NamedTuple):
    """Memory of one kind of attention for the rows of a pass, float32 on the device."""

    queries: Tensor  # [R, heads, width], rotated; in latent attention in the latent's space
    mixed: Tensor  # [R, heads, width of values]; in latent attention of latents
    values: Tensor  # in latent attention [R, heads * v], else empty
    workspace: AttentionWorkspace

    @classmethod
    def allocate(
        cls, spec: parts.AttentionSpec, context_tokens: int, num_rows: int, device: torch.device
    ) -> "HeadBuffers":
        """Allocates for so many rows."""
        values = 0
        if isinstance(spec, parts.LatentSpec):
            num_kv_heads, width, mixed = 1, spec.kv_lora_rank + spec.qk_rope_head_dim, spec.kv_lora_rank
            values = spec.num_heads * spec.v_head_dim
        else:
            assert isinstance(spec, parts.GroupedQuerySpec), "GPUs run these kinds of attention"
            num_kv_heads, width, mixed = spec.num_kv_heads, spec.head_dim, spec.value_dim
        sizes = (spec.num_heads, num_kv_heads, mixed, context_tokens, device, num_rows)
        return cls(
            torch.zeros((num_rows, spec.num_heads, width), device=device),
            torch.zeros((num_rows, spec.num_heads, mixed), device=device),
            torch.zeros((num_rows, values), device=device),
            AttentionWorkspace.allocate(*sizes),
        )


class RowsOfKind(NamedTuple):
    """The rows of a pass, with what the layers of one kind of attention have in common."""

    rows: TokenRows
    buffers: HeadBuffers  # for these rows
    angles: caches.Angles  # float32 [context, rotary_dim / 2] each, of every position

    @property
    def at(self) -> RowPositions:
        """The rows as kernels take them."""
        return RowPositions(self.rows.positions, self.rows.slots)

    def turns(self) -> caches.Angles:
        """Returns the angles of the rows, float32 [T, rotary_dim / 2] each."""
        positions = self.rows.positions.long()
        return self.angles[0][positions], self.angles[1][positions]


def seen_positions(rows: TokenRows, num_places: int) -> Tensor:
    """Returns which positions each row sees, its own and those before: bool [T, places]."""
    return torch.arange(num_places, device=rows.positions.device) <= rows.positions[:, None]


class RowGrouped(grouped.Grouped):
    """Grouped-query attention of a layer for the rows of a pass."""

    def __init__(
        self,
        weights: PackWeights,
        spec: parts.GroupedQuerySpec,
        layer: int,
        stacked: layer_cache.StackedCache,
        own: RowsOfKind,
    ) -> None:
        super().__init__(weights, spec, layer)
        self._stacked, self._own = stacked, own

    def _positions(self, sequences: object, device: torch.device) -> Tensor:
        return self._own.rows.positions

    def _mixed(
        self,
        x: Tensor,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: operations.HeadNorms | None,
        sequences: object,
        angles: caches.Angles,
    ) -> Tensor:
        spec, own, stacked = self._spec, self._own, self._stacked
        seen = None if spec.indexer is None else self._chosen(x, spec.indexer)
        if norms is None or not norms.is_last:
            by_head = None if norms is None else QkNorms(norms.q, norms.k, norms.eps)
            return self.mixed(projected, by_head, False, seen)
        (q, k, v), cache = self._prepared(projected, norms), (stacked.keys, stacked.values)
        enter(k, v, cache, own.at, stacked.storage, q)
        return self._attended(q, seen, None)

    def mixed(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: QkNorms | None,
        is_norm_whole: bool,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Returns each head's values, float32 [T, heads * value_dim]; the rows' keys and values enter the cache.

        Args:    projected, norms, is_norm_whole: as of `Entering`.   seen: as of `View`.
        """
        cos, sin = self._own.angles
        angles = (cos, sin) if self._is_rotated else (cos[:, :0], sin[:, :0])
        q, k, v = (each.contiguous() for each in projected)
        new = Entering(q, k, v, norms, is_norm_whole, angles, self.interleaved)
        return self._attended(self._own.buffers.queries, seen, new)

    def _attended(self, q: Tensor, seen: Tensor | None, new: Entering | None) -> Tensor:
        spec, own, stacked = self._spec, self._own, self._stacked
        sinks = self.vector("sinks") if spec.sinks else None
        window = spec.window(self.layer)
        view = View(spec.scale, window, spec.chunked and window is not None, sinks, seen)
        cache, mixed = (stacked.keys, stacked.values), own.buffers.mixed
        attend(q, cache, own.at, view, own.buffers.workspace, mixed, new, stacked.storage)
        return mixed.flatten(1)

    def _prepared(
        self, projected: tuple[Tensor, Tensor, Tensor], norms: operations.HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [T, heads, dim], of which the first two are rotated, then normed."""
        dims = (self._spec.head_dim, self._spec.head_dim, self._spec.value_dim)
        q, k, v = (each.reshape(len(each), -1, dim) for each, dim in zip(projected, dims, strict=True))
        if self._is_rotated:
            turns = self._own.turns()
            q, k = (ropes.rotate(each.transpose(0, 1), turns, self.interleaved).transpose(0, 1) for each in (q, k))
        norm = self.weights.operations.rms_norm
        q, k = norm(q, norms.q, norms.eps), norm(k, norms.k, norms.eps)
        return q.contiguous(), k.contiguous(), v.contiguous()

    # ---- blocks that an indexer chooses ------------------------------------------------------------------------------

    def _chosen(self, x: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
        """Returns the places in blocks that an indexer chooses, bool [T, m, places], as `choose_blocks` chooses."""
        index, rows, turns = self._stacked.index, self._own.rows, self._own.turns()
        assert index is not None, "a layer with an indexer of blocks"
        positions, slots, size = rows.positions.long(), rows.slots.long(), spec.block_tokens
        k = self.linear(x, "index_k")
        if spec.kind == "largest":
            k = ropes.rotate(self.norm(k, "index_k_norm")[None], turns, self.interleaved)[0]
        index[slots, positions] = k.to(index.dtype)
        if spec.kind == "pooled":
            self._pool(index, positions, slots, size)
        q = self.norm(self.linear(x, "index_q").view(len(x), spec.num_heads, -1), "index_q_norm").transpose(0, 1)
        q = ropes.rotate(q, turns, self.interleaved).transpose(0, 1)  # [T, heads, head_dim]
        score = self._pooled_blocks if spec.kind == "pooled" else self._largest_blocks
        blocks = score(q, index[slots].float(), positions, spec)
        chosen = blocks.repeat_interleave(size, dim=2)[..., : index.shape[1]]
        return (chosen & seen_positions(rows, index.shape[1])[:, None]).contiguous()

    def _pool(self, index: Tensor, positions: Tensor, slots: Tensor, size: int) -> None:
        """Writes the key of a block to its last position, where a row is that."""
        begins = positions - positions % size
        held = index[slots[:, None], begins[:, None] + torch.arange(size, device=index.device)]
        pooled = self.norm(held.float().mean(dim=1), "index_k_norm")
        if self._is_rotated:
            turns = self._own.angles[0][begins], self._own.angles[1][begins]
            pooled = ropes.rotate(pooled[None], turns, self.interleaved)[0]
        is_last = ((positions + 1) % size == 0)[:, None]
        index[slots, positions] = torch.where(is_last, pooled.to(index.dtype), index[slots, positions])

    @staticmethod
    def _pooled_blocks(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
        size, own = spec.block_tokens, positions[:, None]
        scores = torch.relu(q @ index[:, size - 1 :: size].transpose(1, 2)).sum(dim=1)
        complete, numbers = (own + 1) // size, torch.arange(-(-index.shape[1] // size), device=q.device)
        chosen = shared.largest(scores, spec.num_blocks, numbers[: scores.shape[1]] < complete)
        chosen = torch.nn.functional.pad(chosen, (0, len(numbers) - scores.shape[1]))
        return (chosen | ((numbers == complete) & (numbers == own // size)))[:, None]

    @staticmethod
    def _largest_blocks(q: Tensor, index: Tensor, positions: Tensor, spec: parts.BlockIndexerSpec) -> Tensor:
        size, length = spec.block_tokens, index.shape[1]
        seen = torch.arange(length, device=q.device) <= positions[:, None]
        scores = (q @ index.transpose(1, 2)).masked_fill(~seen[:, None], -torch.inf)
        scores = torch.nn.functional.pad(scores, (0, -length % size), value=-torch.inf)
        scores = scores.view(*scores.shape[:2], -1, size).amax(dim=-1)
        own, numbers = positions[:, None, None] // size, torch.arange(scores.shape[-1], device=q.device)
        is_local = (numbers <= own) & (numbers > own - spec.local_blocks)
        return shared.largest(scores.masked_fill(is_local, torch.inf), spec.num_blocks, numbers <= own)


class RowLatent(latent.Latent):
    """Latent attention of a layer for the rows of a pass, absorbed; arguments as of `RowGrouped`.

    Args:    chosen: the positions that the last indexer chose, for layers that share them.
    """

    def __init__(
        self,
        weights: PackWeights,
        spec: parts.LatentSpec,
        layer: int,
        stacked: layer_cache.StackedCache,
        own: RowsOfKind,
        chosen: layer_cache.Chosen,
    ) -> None:
        super().__init__(weights, spec, layer)
        self._stacked, self._own, self._last_chosen = stacked, own, chosen

    def attend(self, x: Tensor, sequences: object, angles: caches.Angles) -> Tensor:
        """Returns the attention of rows x float32 [T, d], normed: float32 [T, d]."""
        spec = self._spec
        q, q_latent, gates = self._queries(x)
        q = q.transpose(0, 1).flatten(1)
        if spec.temperature is not None:
            q = q * shared.temperatures(spec.temperature, self._own.rows.positions)
        seen = None
        if spec.indexer is not None:
            if spec.own_indexer is not None and q_latent is not None:
                self._last_chosen.positions = self._choose(x, q_latent, spec.own_indexer)
            seen = self._last_chosen.positions
        mixed = self.mixed((q.contiguous(), self.linear(x, "kv_a")), seen)
        mixed = mixed if gates is None else mixed * gates.transpose(0, 1).flatten(1).sigmoid()
        return self.linear(self.gated(mixed, x, spec.gate, spec.v_head_dim), "o")

    def mixed(self, projected: tuple[Tensor, Tensor], seen: Tensor | None = None) -> Tensor:
        """Returns each head's values, float32 [T, heads * v]; the rows' latents and keys enter the cache.

        Args:    projected: queries [T, heads * (nope + rope)], not rotated, and the product of `kv_a`.   seen: as of
                 `View`.
        """
        spec, own, stacked = self._spec, self._own, self._stacked
        kv_b, norm = stored(self.weights, f"{self.role}.kv_b"), self.vector("kv_a_norm")
        norm = norm if spec.kv_latent_scale == 1 else norm * spec.kv_latent_scale
        queries, mixed, values, workspace = own.buffers
        key_rows, _ = stored_as = stacked.storage
        enter_latent(projected, norm, own.angles, self.interleaved, own.at, spec, kv_b, queries, stacked.keys, key_rows)
        view = View(spec.scale, sinks=self._sinks, seen=seen)
        attend(queries, (stacked.keys, stacked.values), own.at, view, workspace, mixed, rows=stored_as)
        leave_latent(mixed, spec, kv_b, values)
        return values

    # ---- positions that an indexer chooses ---------------------------------------------------------------------------

    def _choose(self, x: Tensor, q_latent: Tensor, spec: parts.IndexerSpec) -> Tensor:
        """Returns the positions that an indexer chooses among those that are seen: bool [T, 1, places]."""
        own, stacked = self._own, self._stacked
        turns, slots, (rows, _) = own.turns(), own.rows.slots.long(), stacked.storage
        norm = self.vector("index_k_norm"), self.vector("index_k_norm_bias")
        k = torch.nn.functional.layer_norm(self.linear(x, "index_k"), (spec.head_dim,), *norm, spec.norm_eps)
        index = stacked.keys[:, 0, :, rows.places(latent.INDEX)]
        index[slots, own.rows.positions.long()] = rows.encode(latent.rotated(k[None], spec, turns)[0], latent.INDEX)
        q = self.linear(q_latent, "index_q").view(len(x), spec.num_heads, -1).transpose(0, 1)
        q = latent.rotated(q, spec, turns).transpose(0, 1)  # [T, heads, head_dim]
        head_weights = self.linear(x, "index_weights") * (spec.num_heads * spec.head_dim) ** -0.5
        products = torch.relu(q @ rows.decode(index[slots], latent.INDEX).transpose(1, 2))
        scores = (products * head_weights[:, :, None]).sum(dim=1)
        return shared.largest(scores, spec.top_k, seen_positions(own.rows, scores.shape[1]))[:, None].contiguous()


class RowAttention:
    """The attention of all layers for the rows of a pass.

    Args:    angles: of every position, for each kind of attention; buffers likewise, for as many rows or more.
    """

    def __init__(
        self,
        weights: PackWeights,
        token_caches: TokenCaches,
        rows: TokenRows,
        angles: tuple[caches.Angles, ...],
        buffers: tuple[HeadBuffers, ...],
    ) -> None:
        self._weights, self._caches, self._chosen = weights, token_caches, layer_cache.Chosen()
        self.device = token_caches.device
        number, kinds = len(rows.slots), weights.spec.attention_kinds
        self._kinds = []
        for (spec, _), own_angles, own in zip(kinds, angles, buffers, strict=True):
            workspace = AttentionWorkspace(*(each[:number] for each in own.workspace))
            of_rows = HeadBuffers(own.queries[:number], own.mixed[:number], own.values[:number], workspace)
            self._kinds.append(RowsOfKind(rows, of_rows, _with_still(spec, own_angles)))

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Returns the attention of a layer for rows x float32 [T, d], normed: float32 [T, d]."""
        return self.of(layer).attend(x, (), self._kinds[self._weights.spec.attention_kind(layer)].angles)

    def of(self, layer: int) -> RowGrouped | RowLatent:
        """Returns the attention of a layer."""
        spec, stacked = self._weights.spec, self._caches.layers[layer]
        attention, own = spec.attention_of(layer), self._kinds[spec.attention_kind(layer)]
        if isinstance(attention, parts.LatentSpec):
            return RowLatent(self._weights, attention, layer, stacked, own, self._chosen)
        assert isinstance(attention, parts.GroupedQuerySpec), "GPUs run these kinds of attention"
        return RowGrouped(self._weights, attention, layer, stacked, own)


def _with_still(spec: parts.AttentionSpec, angles: caches.Angles) -> caches.Angles:
    """Returns angles of 0 for latent attention without rotary positions, whose kernel rotates all keys."""
    cos, _ = angles
    if not isinstance(spec, parts.LatentSpec) or cos.shape[1]:
        return angles
    shape = (len(cos), spec.qk_rope_head_dim // 2)
    return torch.ones(shape, device=cos.device), torch.zeros(shape, device=cos.device)


def buffers_of(
    spec: formats.ModelSpec, context_tokens: int, num_rows: int, device: torch.device
) -> tuple[HeadBuffers, ...]:
    """Returns memory for each kind of attention in a model."""
    return tuple(HeadBuffers.allocate(kind, context_tokens, num_rows, device) for kind, _ in spec.attention_kinds)
