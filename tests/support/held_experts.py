"""Experts in memory that come in blocks, and checkpoints whose experts are rounded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from torch import Tensor

from moe_pack.calib.sensitivity.errors import Rounder
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Expert, NeuronBlock


@dataclass(frozen=True)
class HeldExpert:
    """An expert in float32, in blocks of `step` neurons."""

    whole: NeuronBlock
    bias: Tensor | None = None
    step: int = 1000

    def down_bias(self) -> Tensor | None:
        return self.bias

    def blocks(self) -> Iterator[NeuronBlock]:
        for first in range(0, len(self.whole.up), self.step):
            yield self.whole.mapped(itemgetter(slice(first, first + self.step)))


class RoundedExperts(CheckpointWeights):
    """A checkpoint whose experts' matrices have `width_of(layer_idx, expert, matrix)` bits; 16: as they are."""

    def __init__(self, checkpoint: Checkpoint, width_of: Callable[[int, int, str], int], rounding: Rounder) -> None:
        super().__init__(checkpoint)
        self._width_of, self._rounding = width_of, rounding

    def expert(self, layer_idx: int, expert: int) -> Expert:
        (block,) = super().expert(layer_idx, expert).blocks()
        rounded = dict[str, Tensor]()
        for matrix in ("gate", "up", "down"):
            weights, width = getattr(block, matrix), self._width_of(layer_idx, expert, matrix)
            if weights is not None and width < 16:
                rounded[matrix] = self._rounding(weights, width)
        return HeldExpert(replace(block, **rounded))
