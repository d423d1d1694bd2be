"""Weights with some of their matrices rounded as conversion would store them; everything else as it is."""

from collections.abc import Collection, Iterator

from torch import Tensor

from moe_pack.calib.expert_error import Rounding
from moe_pack.formats import ModelSpec, Selector, dense_roles
from moe_pack.runtime import Expert, NeuronBlock, Operations, Weights
from moe_pack.runtime import Matrix as DenseMatrix


class RoundedDense:
    """The weights of `source` with these dense matrices at `width`, rounded whenever their rows are asked for."""

    def __init__(self, source: Weights, roles: Collection[str], width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._roles = frozenset(roles)
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """A dense matrix by its role."""
        matrix = self._source.matrix(role)
        return _RoundedMatrix(matrix, self._width, self._rounding) if role in self._roles else matrix

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, as it is."""
        return self._source.expert(layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)


class _RoundedMatrix:
    def __init__(self, matrix: DenseMatrix, width: int, rounding: Rounding) -> None:
        self._matrix = matrix
        self._width = width
        self._rounding = rounding
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rounding(self._matrix.rows(start, stop), self._width)


class RoundedExperts:
    """The weights of `source` with all routed experts at `width`, rounded whenever their blocks are asked for."""

    def __init__(self, source: Weights, width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> DenseMatrix:
        """A dense matrix, as it is."""
        return self._source.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, its three matrices rounded."""
        return _RoundedExpert(self._source.expert(layer_idx, expert), self._width, self._rounding)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)


class _RoundedExpert:
    def __init__(self, expert: Expert, width: int, rounding: Rounding) -> None:
        self._expert = expert
        self._width = width
        self._rounding = rounding

    def blocks(self) -> Iterator[NeuronBlock]:
        for block in self._expert.blocks():
            gate, up, down = (
                None if weights is None else self._rounding(weights, self._width)
                for weights in (block.gate, block.up, block.down)
            )
            assert up is not None and down is not None, "every expert has up and down"
            yield NeuronBlock(gate, up, down, block.gate_bias, block.up_bias)

    def down_bias(self) -> Tensor | None:
        return self._expert.down_bias()


def roundable_roles(spec: ModelSpec, layer: int | None) -> tuple[str, ...]:
    """The dense matrices of a decoder layer (None: of none) that a plan may quantize and rows of 64 can hold."""
    prefix = "" if layer is None else f"layers.{layer}."
    return tuple(
        role.name
        for role in dense_roles(spec)
        if role.quantizable and role.shape[1] % 64 == 0
        if (role.name.startswith(prefix) if layer is not None else not role.name.startswith("layers."))
    )
