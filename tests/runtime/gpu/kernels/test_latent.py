"""Latent attention by kernels against plain torch, of one token, and of several rows over stacked caches."""

import pytest
import torch
from gpu import cases
from gpu.cases import LatentShape
from gpu.comparing import assert_right, random_values
from support.cases import case
from torch import Tensor

from moe_pack.formats import part_format
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    RowPositions,
    View,
    attend,
    enter_latent,
    leave_latent,
)
from moe_pack.runtime.gpu.kernels.attention.entering import enter
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.caches import KvDtype, RowStorage
from moe_pack.runtime.model.caches.ropes import rotate

SHAPES = [
    LatentShape(3, 16, 8, 16, 24, "BF16"),
    LatentShape(2, 20, 6, 12, 64, "F32", interleaved=False),
    LatentShape(17, 8, 4, 8, 64, part_format(8, 64), position=0),
    LatentShape(2, 33, 8, 17, 128, part_format(4, 64), position=129, room=0),
    LatentShape(2, 20, 8, 17, 128, "t5", position=7),
    LatentShape(2, 16, 8, 18, 192, part_format(3, 64), interleaved=False),
    LatentShape(1, 12, 8, 16, 128, part_format(4, 64, 8), position=1, room=0),
    LatentShape(2, 16, 8, 16, 320, part_format(2, 16)),
]
TOLERANCE = 1e-5  # of the RMS: float32 sums in another order, one after the other: four products and a softmax


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.rank}-{shape.position}")
def test_a_token_attends_as_in_torch(shape: LatentShape, kernel_device: torch.device) -> None:
    prepared = cases.latent_case(shape, kernel_device)
    assert_right(prepared, TOLERANCE if kernel_device.type == "cpu" else None)


# --- several rows over stacked caches

SPEC = LatentSpec("latent", 3, None, 64, 20, 8, 17, 0.2, 1e-6)
INDEX = 16  # values of an indexer's key, a third part of a row
# A row's slot, and its position.
ROWS = (
    ((2, 41),),
    ((1, 63), (1, 64)),
    ((3, 30), (3, 31), (3, 32), (0, 100), (2, 0)),
    ((0, 95), (2, 63), (2, 64), (2, 65), (2, 66), (1, 7), (3, 31), (3, 32)),
)


class LatentRows:
    """Rows before they are normed and rotated, and stacked caches with earlier positions, by kernels and in torch."""

    def __init__(self, rows: tuple[tuple[int, int], ...], dtype: KvDtype, indexed: bool, device: torch.device) -> None:
        spec, rank, rope = SPEC, SPEC.kv_lora_rank, SPEC.qk_rope_head_dim
        self.rows, self.device = rows, device
        self.storage = RowStorage(dtype, (rank, rope, INDEX) if indexed else (rank, rope))
        self.kv_b = random_values(3 * 37, rank).bfloat16() / 8
        self.q = random_values(len(rows), 3 * (spec.qk_nope_head_dim + rope), seed=1)
        self.kv = random_values(len(rows), rank + rope, seed=2)
        self.norm, turns = 1 + random_values(rank) / 4, 9 * random_values(112, rope // 2)
        self.angles = (turns.cos(), turns.sin())
        self.cached = self.storage.encode(random_values(4, 1, 112, sum(self.storage.parts), seed=3))

    def attended(self, some: slice, keys: Tensor) -> Tensor:
        """The kernels' output of some rows, float32 [T, heads * v]; the rows enter `keys`."""
        device, rank, rows = self.device, SPEC.kv_lora_rank, self.storage if self.storage.is_coded else None
        q, kv, norm, cos, sin = (each.to(device) for each in (self.q[some], self.kv[some], self.norm, *self.angles))
        kv_b = StoredRows(self.kv_b.to(device), stored_part("BF16", rank))
        slots, positions = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in zip(*self.rows[some], strict=True)
        )
        at, sizes = RowPositions(positions, slots), (len(q), SPEC.num_heads)
        moved = torch.full((*sizes, rank + SPEC.qk_rope_head_dim), torch.nan, device=device)
        mixed, out = torch.full((*sizes, rank), torch.nan, device=device), torch.zeros(len(q), 3 * 17, device=device)
        workspace = AttentionWorkspace.allocate(SPEC.num_heads, 1, rank, 112, device, num_rows=8)
        enter_latent((q, kv), norm, (cos, sin), True, at, SPEC, kv_b, moved, keys, rows)
        cache = (keys, keys[..., :rank] if rows is None else keys)
        attend(moved, cache, at, View(SPEC.scale), workspace, mixed, rows=None if rows is None else (rows, rows))
        leave_latent(mixed, SPEC, kv_b, out)
        return out

    def expected(self, keys: Tensor) -> Tensor:
        """Torch's output, from the cache after all rows have entered it."""
        rank, nope, out = SPEC.kv_lora_rank, SPEC.qk_nope_head_dim, []
        weights = self.kv_b.float().view(3, nope + 17, rank)
        for t, (slot, position) in enumerate(self.rows):
            past = self.storage.decode(keys[slot, 0, : position + 1])
            q_nope, q_rope = self.q[t].view(3, -1).split((nope, SPEC.qk_rope_head_dim), dim=1)
            turned = rotate(q_rope[:, None], tuple(each[position : position + 1] for each in self.angles), True)[:, 0]
            moved = torch.cat(((q_nope[:, None] @ weights[:, :nope])[:, 0], turned), dim=1)
            mixed = (moved @ past[:, : moved.shape[1]].T * SPEC.scale).softmax(1) @ past[:, :rank]
            out.append((weights[:, nope:] @ mixed[:, :, None]).flatten())
        return torch.stack(out)

    def entered(self) -> Tensor:
        """The rows' latents and rotated keys, float32 [T, rank + rope]."""
        latent, key = self.kv.split((SPEC.kv_lora_rank, SPEC.qk_rope_head_dim), dim=1)
        at = [position for _, position in self.rows]
        turned = rotate(key[None], (self.angles[0][at], self.angles[1][at]), True)[0]
        return torch.cat((TORCH.rms_norm(latent, self.norm, SPEC.lora_norm_eps), turned), dim=1)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("indexed", [False, True])
def test_rows_are_the_rows_alone_and_torchs(indexed: bool, dtype: KvDtype, kernel_device: torch.device) -> None:
    for rows in ROWS:
        with case(rows):
            given = LatentRows(rows, dtype, indexed, kernel_device)
            keys, alone = (given.cached.to(kernel_device, copy=True) for _ in range(2))
            y = given.attended(slice(0, len(rows)), keys)
            if kernel_device.type == "cpu":
                for t in range(len(rows)):
                    assert torch.equal(given.attended(slice(t, t + 1), alone)[0], y[t]), f"row {t}"
                assert torch.equal(alone, keys)
            expected = given.expected(keys.cpu())
            bound = 1e-5 if kernel_device.type == "cpu" else 1e-4
            assert (y.cpu() - expected).abs().max() <= bound * expected.abs().max()
            check_entered(given, keys.cpu())


def check_entered(given: LatentRows, keys: Tensor) -> None:
    """Only the rows' own places are written, of them only the first two parts, with what torch writes there."""
    parts, entered = slice(0, 2), given.entered()
    places = given.storage.places(parts)
    own = torch.zeros(keys.shape[:3], dtype=torch.bool)
    for t, (slot, position) in enumerate(given.rows):
        own[slot, 0, position] = True
        found, known = given.storage.decode(keys[slot, 0, position, places], parts), entered[t]
        known = given.storage.decode(given.storage.encode(known, parts), parts)
        step = {"f32": 1e-6, "bf16": 2**-7, "q8": 2 / 127, "q4": 2 / 15}[given.storage.dtype]
        assert ((found - known).abs() <= step * known.abs().max()).all()
    assert torch.equal(keys[~own], given.cached[~own])
    assert torch.equal(keys[..., places.stop :], given.cached[..., places.stop :])


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_prepared_rows_enter_by_their_parts(dtype: KvDtype, kernel_device: torch.device) -> None:
    """Their values are in their keys, and an indexer's key behind both is another's."""
    rank, rope = SPEC.kv_lora_rank, SPEC.qk_rope_head_dim
    for rows in ROWS[::2]:
        with case(rows):
            given = LatentRows(rows, dtype, True, kernel_device)
            keys, storage = given.cached.to(kernel_device, copy=True), given.storage
            stored_as = (storage, storage) if storage.is_coded else None
            cache = (keys, keys if storage.is_coded else keys[..., :rank])
            places = torch.tensor(rows, dtype=torch.int32, device=kernel_device).T.contiguous()
            at, plain_q = RowPositions(places[1], places[0]), random_values(len(rows), 3 * (rank + rope), seed=4)
            plain_q = plain_q.view(len(rows), 3, -1)
            q, k = plain_q.to(kernel_device, copy=True), given.entered().to(kernel_device)[:, None].contiguous()
            enter(k, None, cache, at, stored_as, q)
            check_entered(given, keys.cpu())
            mixed = torch.full((len(rows), 3, rank), torch.nan, device=kernel_device)
            workspace = AttentionWorkspace.allocate(3, 1, rank, 112, kernel_device, num_rows=len(rows))
            attend(q, cache, at, View(0.1), workspace, mixed, rows=stored_as)
            for t, (slot, position) in enumerate(rows):
                past = storage.decode(keys.cpu()[slot, 0, : position + 1])
                expected = (plain_q[t] @ past[:, : rank + rope].T * 0.1).softmax(1) @ past[:, :rank]
                assert (mixed[t].cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()
