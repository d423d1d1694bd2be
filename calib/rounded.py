"""Weights with some of their dense matrices rounded as conversion would store them; everything else as it is."""

from collections.abc import Collection

from torch import Tensor

from moe_pack.calib.expert_error import Rounding
from moe_pack.formats import ModelSpec, Selector, dense_roles
from moe_pack.runtime import Expert, Matrix, Weights


class RoundedDense:
    """The weights of `source` with these dense matrices at `width`, rounded whenever their rows are asked for."""

    def __init__(self, source: Weights, roles: Collection[str], width: int, rounding: Rounding) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self._source = source
        self._roles = frozenset(roles)
        self._width = width
        self._rounding = rounding

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> Matrix:
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
    def __init__(self, matrix: Matrix, width: int, rounding: Rounding) -> None:
        self._matrix = matrix
        self._width = width
        self._rounding = rounding
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rounding(self._matrix.rows(start, stop), self._width)


def roundable_roles(spec: ModelSpec, layer: int | None) -> tuple[str, ...]:
    """The dense matrices of a decoder layer (None: of none) that a plan may quantize and rows of 64 can hold."""
    prefix = "" if layer is None else f"layers.{layer}."
    return tuple(
        role.name
        for role in dense_roles(spec)
        if role.quantizable and role.shape[1] % 64 == 0
        if (role.name.startswith(prefix) if layer is not None else not role.name.startswith("layers."))
    )
