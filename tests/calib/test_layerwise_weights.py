"""One layer's matrices are held, each brought once; a large embedding or head, and experts, never are."""

from collections import Counter

import pytest
import torch
from support.specs import GROUPED
from torch import Tensor

from moe_pack.calib.forward import LayerwiseWeights
from moe_pack.formats import Selector
from moe_pack.runtime.model import TORCH, Expert, StoredMatrix


class Counted:
    """A source that counts what it is asked for, and gives something new every time."""

    spec = GROUPED
    selector: Selector = "gate"

    operations = TORCH

    def __init__(self, num_cols: int = 1) -> None:
        self.num_cols = num_cols
        self.asked: Counter[tuple[str, str]] = Counter()

    def _new(self, how: str, role: str) -> Tensor:
        self.asked[how, role] += 1
        return torch.full((1, 1), float(self.asked.total()))

    def vector(self, role: str) -> Tensor:
        return self._new("vector", role)[0]

    def matrix(self, role: str) -> StoredMatrix:
        return StoredMatrix(self._new("matrix", role).expand(1, self.num_cols))

    def load(self, role: str) -> StoredMatrix:
        return StoredMatrix(self._new("load", role))

    def expert(self, layer_idx: int, expert: int) -> Expert:
        self._new("expert", f"{layer_idx}.{expert}")
        return object()  # type: ignore[return-value]  # passed on, never run

    def threshold(self, layer_idx: int, expert: int) -> float:
        return layer_idx + expert / 10

    def rotation(self, layer_idx: int) -> None:
        return None


Q, K, OTHER, TENTH = (
    f"layers.{name}" for name in ("1.attention.q", "1.attention.k", "0.attention.q", "10.attention.q")
)


def test_a_layers_matrix_is_brought_once() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    first = held.matrix(Q)
    for _ in range(3):
        assert held.matrix(Q) is first
        held.matrix(K)
    assert source.asked == {("load", Q): 1, ("load", K): 1}


@pytest.mark.parametrize("other", [OTHER, TENTH])
def test_another_layers_matrix_lets_go_of_the_layer_before(other: str) -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for role in (Q, K, other, Q, Q):
        held.matrix(role)
    assert source.asked == {("load", Q): 2, ("load", K): 1, ("load", other): 1}
    held.matrix(K)
    held.matrix(other)
    assert source.asked == {("load", Q): 2, ("load", K): 2, ("load", other): 2}, "no other layer's is in memory"


def test_another_layers_vector_lets_go_too() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    held.matrix(Q)
    held.vector("layers.1.mlp_norm")
    held.vector("layers.0.mlp_norm")
    held.vector("layers.0.mlp_norm")
    assert source.asked["vector", "layers.0.mlp_norm"] == 1
    held.matrix(Q)
    held.vector("layers.1.mlp_norm")
    assert (source.asked["load", Q], source.asked["vector", "layers.1.mlp_norm"]) == (2, 2)


@pytest.mark.parametrize("role", ["embed", "head"])
def test_a_large_embedding_or_head_is_never_held_and_lets_go_of_nothing(role: str) -> None:
    source = Counted(num_cols=(16 << 20) // 4 + 1)
    held = LayerwiseWeights(source)
    first = held.matrix(Q)
    for _ in range(2):
        held.matrix(role)
    assert source.asked == {("load", Q): 1, ("matrix", role): 2}
    assert held.matrix(Q) is first


def test_a_small_embedding_is_held_in_float32() -> None:
    source = Counted(num_cols=(16 << 20) // 4)
    held = LayerwiseWeights(source)
    first = held.matrix("embed")
    assert held.matrix("embed") is first and source.asked["load", "embed"] == 1


def test_a_vector_is_brought_once() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for _ in range(3):
        held.vector("layers.1.mlp_norm")
        held.vector("norm")
    assert set(source.asked.values()) == {1}


def test_experts_and_thresholds_are_the_sources() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for _ in range(2):
        held.expert(1, 5)
    assert source.asked == {("expert", "1.5"): 2}
    assert (held.threshold(1, 5), held.spec, held.selector) == (1.5, GROUPED, "gate")
