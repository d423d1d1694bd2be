"""The ways one expert may be stored: combinations of its matrices' formats worth weighing, with their bytes and losses.

Of all combinations those are kept that, for a mean expert, lose little more than the best of at most their bytes: a
planner then weighs hundreds, not tens of thousands. Bytes are exact: rows end in a CRC and padding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import Losses
from moe_pack.formats import MATRICES, ExpertFormat, ModelSpec, PartFormat, Selector, expert_layout

MAX_CHOICES = 320
_FEWEST = 1e-12  # nats: what a lossless choice is counted as, where losses are compared by their ratio

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """C ways to store an expert under a selector kind, by rising bytes.

    `parts`: int64 [C, 3], gate's, up's and down's format as a number in the losses' formats.   `selector_bytes`,
    `record_bytes`, `extent_bytes`: int64 [C], of a whole expert.
    """

    selector: Selector
    formats: tuple[ExpertFormat, ...]
    parts: Ints
    selector_bytes: Ints
    record_bytes: Ints
    extent_bytes: Ints

    def losses(self, losses: Losses) -> Floats:
        """What each expert loses by each choice, nats: float64 [L * E, C]."""
        found = losses.quantized[:, :, 0, self.parts[:, 0]]  # [L, E, C]
        for matrix in (1, 2):
            found = found + losses.quantized[:, :, matrix, self.parts[:, matrix]]
        return found.reshape(-1, len(self.formats))


def expert_choices(
    spec: ModelSpec, selector: Selector, losses: Losses, allowed: tuple[PartFormat, ...] | None = None
) -> Choices:
    """The combinations worth weighing for a selector kind.

    Args:    allowed: the formats to choose from; all that losses are known of by default.
    """
    usable = [n for n, part in enumerate(losses.formats) if allowed is None or part in allowed]
    mean = losses.quantized.mean(axis=(0, 1))  # [3, F]
    sizes = np.array([part.part_bytes(spec.hidden_size) for part in losses.formats])
    by_matrix = [
        _undominated(sizes[usable], mean[m, usable]) if matrix in spec.expert.matrices else np.zeros(1, np.int64)
        for m, matrix in enumerate(MATRICES)
    ]
    parts = np.stack(np.meshgrid(*(np.array(usable)[kept] for kept in by_matrix), indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    formats = [_format(row, spec, losses) for row in parts.tolist()]
    layouts = [expert_layout(held, selector, spec.expert, spec.hidden_size) for held in formats]
    extent = np.array([layout.num_bytes for layout in layouts])
    lost = mean[np.arange(3), parts].sum(axis=1)
    kept = _near_the_best(extent, lost)
    return Choices(
        selector,
        tuple(formats[n] for n in kept.tolist()),
        parts[kept],
        np.array([layouts[n].selector_bytes for n in kept.tolist()]),
        np.array([layouts[n].records_bytes for n in kept.tolist()]),
        extent[kept],
    )


def _format(parts: list[int], spec: ModelSpec, losses: Losses) -> ExpertFormat:
    gate, up, down = (losses.formats[number] for number in parts)
    return ExpertFormat(gate if "gate" in spec.expert.matrices else None, up, down)


def _undominated(sizes: Ints, lost: Floats) -> Ints:
    """Those that lose less than all that are no larger: int64 [n], by rising size."""
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(np.concatenate(([np.inf], lost[order][:-1])))
    kept: Ints = order[lost[order] < best]
    return kept


def _near_the_best(sizes: Ints, lost: Floats) -> Ints:
    """At most MAX_CHOICES, those that lose least beside the best of at most their size: int64 [n], by rising size."""
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(lost[order])
    worse = (lost[order] + _FEWEST) / (best + _FEWEST)
    nearest: Ints = np.sort(np.argsort(worse, kind="stable")[:MAX_CHOICES])
    kept: Ints = order[nearest]
    return kept
