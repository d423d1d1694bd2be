"""A model's weights as passes over its layers need them: one layer's dense matrices in memory, and no other's.

The embedding and the head, unless they are small, and the experts are read as they are used. Bounded by the largest
layer's attention.
"""

from threading import Lock
from typing import Protocol

from torch import Tensor

from moe_pack.formats import ModelSpec, Selector
from moe_pack.runtime import Expert, Matrix, Operations, StoredMatrix, Weights

_SMALL_BYTES = 16 << 20  # in float32: matrices of no more are held so, the embedding and the head too


class Source(Weights, Protocol):
    """Weights that can be streamed, or brought to memory whole."""

    def load(self, role: str) -> Matrix:
        """A dense matrix in memory, in the bytes it is stored in."""
        ...


class HeldWeights:
    """The weights of `source`; what belongs to the layer last asked for stays in memory. For several threads."""

    def __init__(self, source: Source) -> None:
        self.spec: ModelSpec = source.spec
        self.selector: Selector = source.selector
        self.operations: Operations = source.operations
        self._source = source
        self._layer = ""
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._lock = Lock()

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        with self._lock:
            self._turn_to(role)
            if role not in self._vectors:
                self._vectors[role] = self._source.vector(role)
            return self._vectors[role]

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        if not role.startswith("layers."):
            matrix = self._source.matrix(role)
            if 4 * matrix.num_rows * matrix.num_cols > _SMALL_BYTES:
                return matrix
        with self._lock:
            self._turn_to(role)
            if role not in self._matrices:
                matrix = self._source.load(role)
                if 4 * matrix.num_rows * matrix.num_cols <= _SMALL_BYTES:
                    matrix = StoredMatrix(matrix.rows(0, matrix.num_rows))  # in float32: converted once
                self._matrices[role] = matrix
            return self._matrices[role]

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert, read as its blocks are asked for."""
        return self._source.expert(layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """The expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)

    def _turn_to(self, role: str) -> None:
        """Lets go of the layer before, once a role is another layer's."""
        parts = role.split(".")
        if parts[0] == "layers" and parts[1] != self._layer:
            self._layer = parts[1]
            self._matrices.clear()
            self._vectors.clear()
