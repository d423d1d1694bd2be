"""Weights that derive from others: most as they are, some changed or kept in memory."""

from threading import Lock
from typing import Protocol

from torch import Tensor

from moe_pack import formats
from moe_pack.runtime import model
from moe_pack.runtime.model.compute import RowTable
from moe_pack.runtime.model.compute.rotation import Rotation


class DerivedWeights:
    """The weights of `source`; a subclass changes some of them."""

    def __init__(self, source: model.Weights) -> None:
        self.spec: formats.ModelSpec = source.spec
        self.selector: formats.Selector = source.selector
        self.operations: model.Operations = source.operations
        self._source = source

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias, float32 [n]."""
        return self._source.vector(role)

    def matrix(self, role: str) -> model.Matrix:
        """Returns a dense matrix by its role."""
        return self._source.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        """Returns an expert of a MoE layer."""
        return self._source.expert(layer_idx, expert)

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns the expert's threshold on `abs(a)`."""
        return self._source.threshold(layer_idx, expert)

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns the rotated coordinates of a MoE layer's experts; None if it is not rotated."""
        return self._source.rotation(layer_idx)

    def ngram_table(self, layer: int) -> RowTable:
        """Returns the n-gram table of a decoder layer."""
        return self._source.ngram_table(layer)


_SMALL_BYTES = 16 << 20  # matrices of at most this size stay in memory in float32, the embedding and the head too


class Source(model.Weights, Protocol):
    """Weights whose dense matrices can be read row by row or loaded whole."""

    def load(self, role: str) -> model.Matrix:
        """Loads a dense matrix, in the bytes in which it is stored."""
        ...


class LayerwiseWeights(DerivedWeights):
    """The weights of `source`, with the dense matrices of one layer in memory: the last one used. Thread-safe."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._load = source.load
        self._layer = ""
        self._matrices: dict[str, model.Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._lock = Lock()

    def vector(self, role: str) -> Tensor:
        """Returns a vector, read once for as long as the layer is the last one used."""
        with self._lock:
            self._enter_layer(role)
            if role not in self._vectors:
                self._vectors[role] = super().vector(role)
            return self._vectors[role]

    def matrix(self, role: str) -> model.Matrix:
        """Returns a matrix of the layer from memory; large ones of no layer are read row by row."""
        if not role.startswith("layers."):
            matrix = super().matrix(role)
            if 4 * matrix.num_rows * matrix.num_cols > _SMALL_BYTES:
                return matrix
        with self._lock:
            self._enter_layer(role)
            if role not in self._matrices:
                matrix = self._load(role)
                if 4 * matrix.num_rows * matrix.num_cols <= _SMALL_BYTES:
                    matrix = model.StoredMatrix(matrix.rows(0, matrix.num_rows))  # in float32: converted once
                self._matrices[role] = matrix
            return self._matrices[role]

    def _enter_layer(self, role: str) -> None:
        parts = role.split(".")
        if parts[0] == "layers" and parts[1] != self._layer:
            self._layer = parts[1]
            self._matrices.clear()
            self._vectors.clear()
