"""A model's weights in memory for benchmarks that judge many plans: dense part as in the source, experts as given.

What a plan stores is quantized once for every format, kept as the pack's bytes and decoded when a plan wants it: the
weights are bit for bit those of the plan's pack, without writing one. No thresholds: every neuron runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib import RowQuantizer
from moe_pack.formats import MATRICES, Checkpoint, ModelSpec, PartFormat, Plan, Quantizer, Selector
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import CheckpointWeights, Expert, Kernels, Matrix, NeuronBlock


@dataclass(frozen=True, slots=True)
class WholeExpert:
    """An expert whose neurons are one block."""

    block: NeuronBlock

    def down_bias(self) -> None:
        """It has none."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons."""
        yield self.block


@dataclass(frozen=True, slots=True)
class _Stored:
    """A matrix of an expert in a format, by which its bytes are kept."""

    layer_idx: int
    expert: int
    matrix_idx: int
    part: PartFormat
    quantizer: Quantizer


class MemoryWeights:
    """The source's weights, and its experts as `give` or `round_to` last set them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec: ModelSpec = checkpoint.spec
        assert tuple(self.spec.expert.matrices) == MATRICES, "experts have three matrices"
        assert "down" not in self.spec.expert.bias, "their blocks are all there is of them"
        self.selector: Selector = "none"
        self.kernels: Kernels | None = None
        self.places = [(l, e) for l in range(len(self.spec.moe_layers)) for e in range(self.spec.router.num_experts)]
        self._source = CheckpointWeights(checkpoint)
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, Matrix] = {}
        self._originals = {place: _whole(self._source.expert(*place)) for place in self.places}
        self._stored: dict[_Stored, Tensor] = {}
        self._experts = dict(self._originals)

    def original(self, layer_idx: int, expert: int) -> NeuronBlock:
        """An expert as the source has it."""
        return self._originals[layer_idx, expert]

    def give(self, experts: Callable[[int, int], NeuronBlock]) -> None:
        """Sets every expert to what `experts` says of its place."""
        self._experts = {place: experts(*place) for place in self.places}

    def round_to(self, plan: Plan) -> None:
        """Sets every expert to what the plan's pack would hold."""
        assert not any(plan.dense), "the dense part stays as it is"
        places = tqdm(self.places, desc="quantizing", disable=None, leave=False)
        self._experts = {(l, e): self.rounded(l, e, plan) for l, e in places}

    def rounded(self, layer_idx: int, expert: int, plan: Plan) -> NeuronBlock:
        """An expert as the plan's pack would hold it."""
        formats, original = plan.experts[layer_idx][expert], self._originals[layer_idx, expert]
        assert formats.gate is not None and original.gate is not None, "experts have three matrices"
        held = ((formats.gate, original.gate), (formats.up, original.up), (formats.down, original.down))
        return NeuronBlock(
            *(
                self._decoded(_Stored(layer_idx, expert, matrix_idx, part, plan.quantizer), weights)
                for matrix_idx, (part, weights) in enumerate(held)
            )
        )

    def _decoded(self, stored: _Stored, weights: Tensor) -> Tensor:
        num_cols = weights.shape[1]
        if stored not in self._stored:
            with _one_thread():
                self._stored[stored] = RowQuantizer(stored.part, num_cols, stored.quantizer).encode(weights)
        return decode_part(stored.part, num_cols, self._stored[stored])

    def vector(self, role: str) -> Tensor:
        """A norm's weight or a bias, float32 [n]."""
        if role not in self._vectors:
            self._vectors[role] = self._source.vector(role)
        return self._vectors[role]

    def matrix(self, role: str) -> Matrix:
        """A dense matrix by its role."""
        if role not in self._matrices:
            self._matrices[role] = self._source.load(role)
        return self._matrices[role]

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """An expert as it was last set."""
        return WholeExpert(self._experts[layer_idx, expert])

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Zero: every neuron runs."""
        return 0.0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch have one thread, as conversion does: blocks of 64 rows are too small to share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _whole(expert: Expert) -> NeuronBlock:
    """All neurons of an expert in one block."""
    blocks = list(expert.blocks())
    gates = [block.gate for block in blocks if block.gate is not None]
    assert len(gates) == len(blocks) and blocks[0].up_bias is None, "experts have three matrices and no biases"
    return NeuronBlock(torch.cat(gates), torch.cat([b.up for b in blocks]), torch.cat([b.down for b in blocks]))
