"""A model's weights in memory for benchmarks that judge many plans: dense part as in the source, experts as given.

What a plan stores is quantized once for every format, kept as the pack's bytes and decoded when a plan wants it: the
weights are bit for bit those of the plan's pack, without writing one. No thresholds: every neuron runs.

A matrix alone is quantized by the plan's quantizer (`MatrixQuantizer`); whatever needs all of an expert at once, such
as what it sees of a text, is a `JointQuantizer` that `round_to` is given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib import RowQuantizer
from moe_pack.formats import MATRICES, Checkpoint, ExpertFormat, ModelSpec, PartFormat, Plan, Quantizer, Selector
from moe_pack.formats.codecs import decode_part
from moe_pack.runtime import TORCH, CheckpointWeights, Expert, Matrix, NeuronBlock


@dataclass(frozen=True, slots=True)
class WholeExpert:
    """An expert whose neurons are one block."""

    block: NeuronBlock

    def down_bias(self) -> None:
        """It has none."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons."""
        yield self.block


Parts = tuple[Tensor, Tensor, Tensor]  # the bytes of gate, up and down: u8 [f, part_bytes] each


class JointQuantizer(Protocol):
    """Quantizes the matrices of an expert together. Hashable: equal ones give the same bytes."""

    def encode(self, layer_idx: int, expert: int, weights: NeuronBlock, formats: ExpertFormat) -> Parts:
        """The parts' bytes of an expert, of which `weights` are all neurons, in these formats."""


class MatrixQuantizer:
    """Quantizes each matrix by itself, as `RowQuantizer` does; one that was quantized to a format is kept."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer: Quantizer = quantizer
        self._held: dict[tuple[int, int, int, PartFormat], Tensor] = {}

    def encode(self, layer_idx: int, expert: int, weights: NeuronBlock, formats: ExpertFormat) -> Parts:
        """The bytes of gate, up and down."""
        assert formats.gate is not None and weights.gate is not None, "experts have three matrices"
        held = ((formats.gate, weights.gate), (formats.up, weights.up), (formats.down, weights.down))
        gate, up, down = (self._part((layer_idx, expert, idx, part), rows) for idx, (part, rows) in enumerate(held))
        return gate, up, down

    def _part(self, place: tuple[int, int, int, PartFormat], weights: Tensor) -> Tensor:
        if place not in self._held:
            self._held[place] = RowQuantizer(place[-1], weights.shape[1], self._quantizer).encode(weights)
        return self._held[place]


@dataclass(frozen=True, slots=True)
class _Stored:
    """An expert in formats, by which its bytes are kept."""

    layer_idx: int
    expert: int
    formats: ExpertFormat
    quantizer: JointQuantizer


class MemoryWeights:
    """The source's weights, and its experts as `give` or `round_to` last set them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec: ModelSpec = checkpoint.spec
        assert tuple(self.spec.expert.matrices) == MATRICES, "experts have three matrices"
        assert "down" not in self.spec.expert.bias, "their blocks are all there is of them"
        self.selector: Selector = "none"
        self.operations = TORCH
        self.places = [(l, e) for l in range(len(self.spec.moe_layers)) for e in range(self.spec.router.num_experts)]
        self._source = CheckpointWeights(checkpoint)
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, Matrix] = {}
        self._originals = {place: _whole(self._source.expert(*place)) for place in self.places}
        self._alone: dict[Quantizer, MatrixQuantizer] = {}
        self._stored: dict[_Stored, Parts] = {}
        self._experts = dict(self._originals)

    def original(self, layer_idx: int, expert: int) -> NeuronBlock:
        """An expert as the source has it."""
        return self._originals[layer_idx, expert]

    def give(self, experts: Callable[[int, int], NeuronBlock]) -> None:
        """Sets every expert to what `experts` says of its place."""
        self._experts = {place: experts(*place) for place in self.places}

    def round_to(self, plan: Plan, quantizer: JointQuantizer | None = None) -> None:
        """Sets every expert to what the plan's pack would hold.

        Args:    quantizer: of whole experts; None for the plan's, matrix by matrix.
        """
        assert not any(plan.dense), "the dense part stays as it is"
        places = tqdm(self.places, desc="quantizing", disable=None, leave=False)
        self._experts = {(l, e): self.rounded(l, e, plan, quantizer) for l, e in places}

    def rounded(self, layer_idx: int, expert: int, plan: Plan, quantizer: JointQuantizer | None = None) -> NeuronBlock:
        """An expert as the plan's pack would hold it; `quantizer` as in `round_to`."""
        chosen = quantizer or self._alone.setdefault(plan.quantizer, MatrixQuantizer(plan.quantizer))
        stored = _Stored(layer_idx, expert, plan.experts[layer_idx][expert], chosen)
        if stored not in self._stored:
            with _one_thread():
                self._stored[stored] = chosen.encode(
                    layer_idx, expert, self._originals[layer_idx, expert], stored.formats
                )
        formats = (stored.formats.gate, stored.formats.up, stored.formats.down)
        gate, up, down = (
            decode_part(part, self.spec.hidden_size, rows)
            for part, rows in zip(formats, self._stored[stored], strict=True)
            if part is not None
        )
        return NeuronBlock(gate, up, down)

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
