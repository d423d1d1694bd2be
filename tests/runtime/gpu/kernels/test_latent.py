"""One token's latent attention by kernels against plain torch, which takes the absorbed way too."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.named_formats import named_format
from support.random_experts import random_rows
from torch import Tensor

from moe_pack.formats import part_format
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, attend, enter_latent, leave_latent
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.model import TORCH, Matrix, RowMatrix, StoredMatrix, Weights, linear
from moe_pack.runtime.model.attention import latent
from moe_pack.runtime.model.caches import LayerCache
from moe_pack.runtime.model.caches.layer_cache import each_sequence

TOLERANCE = 1e-5  # float32 sums in another order, one after the other: four products and a softmax
GPU_TOLERANCE = 3e-5  # and on a GPU, whose tensor cores cut sums off; see test_attend
WIDTH = 16  # of the hidden state
DTYPES: dict[object, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Sizes, and how `kv_b` is stored: width, group and scale bits, a dtype, or a trellis by its name."""

    heads: int
    nope: int
    rope: int
    v: int
    rank: int
    stored: tuple[int, int, int] | str
    position: int = 40
    room: int = 100
    interleaved: bool = True

    @property
    def spec(self) -> LatentSpec:
        scale = (self.nope + self.rope) ** -0.5
        return LatentSpec("latent", self.heads, None, self.rank, self.nope, self.rope, self.v, scale, 1e-6)

    def kv_b(self) -> tuple[Matrix, StoredRows]:
        """As torch multiplies it, and as kernels do."""
        num_rows = self.heads * (self.nope + self.v)
        if self.stored in DTYPES:
            weight = random(num_rows, self.rank).to(DTYPES[self.stored])
            return StoredMatrix(weight), StoredRows(weight, stored_part(str(self.stored), self.rank))
        form = named_format(self.stored) if isinstance(self.stored, str) else part_format(*self.stored)
        layout, held = random_rows(form, num_rows, self.rank)
        rows = torch.from_numpy(held)
        return RowMatrix(layout, rows), StoredRows(rows, part_of(layout, "weight"))


CASES = [
    Case(3, 16, 8, 16, 24, "BF16"),
    Case(2, 20, 6, 12, 64, "F32", interleaved=False),
    Case(17, 8, 4, 8, 64, (8, 64, 16), position=0),
    Case(2, 33, 8, 17, 128, (4, 64, 16), position=129, room=0),
    Case(2, 20, 8, 17, 128, "t5", position=7),
    Case(2, 16, 8, 18, 192, (3, 64, 16), interleaved=False),
    Case(1, 12, 8, 16, 128, (4, 64, 8), position=1, room=0),
    Case(2, 16, 8, 16, 320, (2, 16, 16)),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
    assert (found.cpu() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_attends_as_in_torch(case: Case, kernel_device: torch.device) -> None:
    spec, at = case.spec, case.position
    matrix, kv_b = case.kv_b()
    q_weight, kv_weight = random(spec.num_heads * (case.nope + case.rope), WIDTH), random(case.rank + case.rope, WIDTH)
    norm, x = 1 + random(case.rank) / 4, random(1, WIDTH)
    turns = 9 * random(at + 1, case.rope // 2)
    cos, sin = turns.cos(), turns.sin()
    keys = random(1, at + 1 + case.room, case.rank + case.rope, seed=1)

    matrices = {"q": StoredMatrix(q_weight), "kv_a": StoredMatrix(kv_weight), "kv_b": matrix}
    matrices["o"] = StoredMatrix(torch.eye(spec.num_heads * case.v))
    weights = SimpleNamespace(
        spec=SimpleNamespace(rope_of=lambda _: SimpleNamespace(interleaved=case.interleaved)),
        matrix=lambda role: matrices[role.rpartition(".")[2]],
        vector=lambda role: norm,
        operations=TORCH,
    )
    cache = LayerCache(keys.clone(), keys[..., : case.rank], at)
    angles = (cos[at:], sin[at:])
    expected = latent.Latent(cast(Weights, weights), spec, 0).attend(x, each_sequence(cache, 1), angles)

    there = StoredRows(kv_b.rows.to(kernel_device), kv_b.part)
    q, kv, norm, cos, sin, keys = (
        each.to(kernel_device)
        for each in (linear(x, matrices["q"])[0], linear(x, matrices["kv_a"])[0], norm, cos, sin, keys)
    )

    def nans(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=kernel_device)

    position = torch.tensor([at], dtype=torch.int32, device=kernel_device)
    moved = nans(spec.num_heads, case.rank + case.rope)
    enter_latent((q, kv), norm, (cos, sin), case.interleaved, position, spec, there, moved, keys)
    assert_near(keys, cache.keys)
    room = AttentionWorkspace.allocate(spec.num_heads, 1, case.rank, keys.shape[1], kernel_device)
    mixed, out = nans(spec.num_heads, case.rank), nans(spec.num_heads * case.v)
    attend(moved, (keys, keys[..., : case.rank]), position, spec.scale, None, room, mixed)
    leave_latent(mixed, spec, there, out)
    assert_near(out, expected[0])
