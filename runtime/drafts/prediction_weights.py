"""The weights of a prediction layer in memory, in the checkpoint's bytes.

All of them are loaded. By their configs, the layer of GLM-4.5-Air takes 4.8 GB, that of Qwen3-Next 3.3 GB, and that of
DeepSeek-V3, in FP8, 12.1 GB. Embedding and head are the model's own, unless the checkpoint has others for this layer.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import Matrix as MatrixName
from moe_pack.formats import families
from moe_pack.formats.pack import layouts, plans
from moe_pack.formats.pack.codecs import Fp8
from moe_pack.runtime import model
from moe_pack.runtime.model import checkpoint_weights
from moe_pack.runtime.model.compute import RowTable
from moe_pack.runtime.model.compute.operations import row_blocks
from moe_pack.runtime.model.compute.rotation import Rotation
from moe_pack.runtime.model.pack_weights import stored_matrix

_TABLES = ("embed", "head")
_COMPARED_ROWS = 256
_SAME_TABLE = 0.5  # of the norm: codes of 2 bits are nearer to their weights, and other weights are about 1.4 away


class PredictionWeights(model.ExpertRunner):
    """The weights of a prediction layer, as those of a model of one layer; the experts are whole matrices.

    `main`: the model's weights, whose embedding and head the layer shares.   `num_bytes`: of what is loaded.
    Raises:  PackError if the file that has the layer is damaged.
    """

    selector: formats.Selector = "none"

    def __init__(self, layer: families.PredictionLayer, main: model.Weights) -> None:
        layer.check()
        self.spec, self.main = layer.spec, main
        self.operations: model.Operations = main.operations
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, model.Matrix] = {}
        self._experts: dict[tuple[int, MatrixName], model.Matrix] = {}
        self.num_bytes = 0
        for name in _loaded_roles(layer):
            role, source = layer.roles[name], layer.dense[name]
            if len(role.shape) == 1:
                self._vectors[name] = model.read_vector(layer, source) + role.offset
                self.num_bytes += self._vectors[name].nbytes
            else:
                self._matrices[name] = self._load(layer, source)
        for expert in range(self.spec.router.num_experts):
            for matrix in self.spec.expert.matrices:
                self._experts[expert, matrix] = self._load(layer, layer.expert_source(expert, matrix))

    def _load(self, layer: families.PredictionLayer, source: families.SourceMatrix) -> model.Matrix:
        """Reads a matrix into memory, FP8 in rows that the operations multiply."""
        if not _is_in_rows(source):
            weight = model.read_rows(layer, source, 0, source.num_rows).contiguous()
            self.num_bytes += weight.nbytes
            return model.StoredMatrix(weight, self.operations)
        layout = layouts.row_layout([("weight", plans.FP8, False)], source.num_cols)
        stored = np.zeros((source.num_rows, layout.row_bytes), np.uint8)
        for start, stop in row_blocks(source.num_rows, source.num_cols):
            codes, scales = (
                read(layer, source, start, stop)
                for read in (checkpoint_weights.read_codes, checkpoint_weights.read_scales)
            )
            encoded = Fp8(plans.FP8, source.num_cols).encode(codes, scales)
            layouts.write_rows(layout, {"weight": encoded.numpy()}, stored[start:stop])
        self.num_bytes += stored.nbytes
        return model.RowMatrix(layout, torch.from_numpy(stored), self.operations)

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias, float32 [n]."""
        return self._vectors[role]

    def matrix(self, role: str) -> model.Matrix:
        """Returns a dense matrix by its role; embedding and head may be the model's."""
        return self._matrices[role] if role in self._matrices else self.main.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        """Returns a routed expert."""
        return _WholeExpert(*(self._experts.get((expert, matrix)) for matrix in formats.MATRICES))

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns zero: all neurons run."""
        return 0.0

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns None: the checkpoint is not rotated."""
        return None

    def ngram_table(self, layer: int) -> RowTable:
        """Fails: a prediction layer has no n-grams (`PredictionLayer.find`)."""
        raise AssertionError("a prediction layer has no n-grams")

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: model.PartialState | None = None,
    ) -> Tensor:
        """Returns the outputs of the routed experts for x float32 [T, d], weighted and added up: float32 [T, d]."""
        y, function = torch.zeros_like(x), model.neuron_of(self.spec.expert_function(layer_idx))
        for number, tokens, weights in model.tokens_by_expert(experts, router_weights):
            rows = torch.from_numpy(tokens)
            inputs = x[rows]
            gate = self._experts.get((number, "gate"))
            h = function.h(
                None if gate is None else model.linear(inputs, gate), model.linear(inputs, self._experts[number, "up"])
            )
            y[rows] += torch.from_numpy(weights)[:, None] * model.linear(h, self._experts[number, "down"])
        return y


class _WholeExpert:
    """An expert of whole matrices: gate and up [f, d], down [d, f]."""

    def __init__(self, gate: model.Matrix | None, up: model.Matrix | None, down: model.Matrix | None) -> None:
        assert up is not None and down is not None, "every expert has up and down"
        self._gate, self._up, self._down = gate, up, down

    def blocks(self) -> Iterator[model.NeuronBlock]:
        down = self._down.rows(0, self._down.num_rows).T
        for start, stop in row_blocks(self._up.num_rows, self._up.num_cols, 3):
            gate = None if self._gate is None else self._gate.rows(start, stop)
            yield model.NeuronBlock(gate, self._up.rows(start, stop), down[start:stop], None, None)

    def down_bias(self) -> Tensor | None:
        return None


def loaded_bytes(layer: families.PredictionLayer) -> int:
    """Returns the bytes of the weights that `PredictionWeights` loads."""
    dense = sum(
        4 * layer.roles[name].shape[0] if len(layer.roles[name].shape) == 1 else _matrix_bytes(layer, layer.dense[name])
        for name in _loaded_roles(layer)
    )
    each = [
        _matrix_bytes(layer, layer.expert_source(expert, matrix))
        for expert in range(layer.spec.router.num_experts)
        for matrix in layer.spec.expert.matrices
    ]
    return dense + sum(each)


def _loaded_roles(layer: families.PredictionLayer) -> list[str]:
    """Returns the roles that are loaded: all, but for tables that are the model's."""
    return [name for name in layer.roles if name not in _TABLES or not _is_shared(layer, name)]


def _is_shared(layer: families.PredictionLayer, role: str) -> bool:
    """Whether the layer's embedding or head is the model's, which the pack may have in other formats.

    Some rows decide, because the table has gigabytes. One that differs only in other rows changes drafts, not answers.
    """
    source, main = layer.dense[role], {dense.role.name: dense for dense in layer.pack.layout.dense}[role]
    numbers = np.unique(np.linspace(0, source.num_rows - 1, _COMPARED_ROWS, dtype=np.int64)).tolist()
    own = torch.cat([model.read_rows(layer, source, number, number + 1).to(torch.float32) for number in numbers])
    raw = [torch.from_numpy(layer.pack.read_dense(main.entry, number, number + 1)) for number in numbers]
    theirs = torch.cat([stored_matrix(main, each).rows(0, 1) for each in raw])
    return bool((own - theirs).norm() <= _SAME_TABLE * theirs.norm())


def _is_in_rows(source: families.SourceMatrix) -> bool:
    return source.codec == "fp8" and plans.format_fault(plans.FP8, source.num_cols) is None


def _matrix_bytes(layer: families.PredictionLayer, source: families.SourceMatrix) -> int:
    """Returns the bytes of a matrix in memory."""
    if _is_in_rows(source):
        return source.num_rows * layouts.row_layout([("weight", plans.FP8, False)], source.num_cols).row_bytes
    return source.num_rows * source.num_cols * checkpoint_weights.weights_dtype(layer, source).itemsize
