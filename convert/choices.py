"""The ways one expert may be stored: combinations of its matrices' formats worth weighing, with their bytes and losses.

Of all combinations those are kept that, for a mean expert, lose little more than the best of at most their bytes: a
planner then weighs hundreds, not tens of thousands. Bytes are exact: rows end in a CRC and padding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import Losses
from moe_pack.formats import (
    CRC_BYTES,
    MATRICES,
    ROW_ALIGN,
    ExpertFormat,
    Matrix,
    ModelSpec,
    PartFormat,
    Quantizer,
    Selector,
    extra_layout,
    record_matrices,
    selector_matrices,
)

MAX_CHOICES, LEAST_CHOICES = 320, 64
_MOST_CELLS = 600_000  # of all experts' choices: more experts need fewer each, they mix finely enough
_FEWEST = 1e-12  # nats: what a lossless choice is counted as, where losses are compared by their ratio

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """C ways to store an expert under a selector kind, rounded by `quantizer`, by rising bytes.

    `parts`: int64 [C, 3], gate's, up's and down's format as a number in the losses' formats of this quantizer.
    `selector_bytes`, `record_bytes`, `extent_bytes`: int64 [C], of a whole expert.
    """

    selector: Selector
    quantizer: Quantizer
    formats: tuple[ExpertFormat, ...]
    parts: Ints
    selector_bytes: Ints
    record_bytes: Ints
    extent_bytes: Ints

    def losses(self, losses: Losses) -> Floats:
        """What each expert loses by each choice, nats: float64 [L * E, C]."""
        _, lost = losses.of(self.quantizer)
        found = lost[:, :, 0, self.parts[:, 0]]  # [L, E, C]
        for matrix in (1, 2):
            found = found + lost[:, :, matrix, self.parts[:, matrix]]
        return found.reshape(-1, len(self.formats))


def expert_choices(
    spec: ModelSpec, selector: Selector, losses: Losses, allowed: tuple[PartFormat, ...] | None = None
) -> Choices:
    """The combinations worth weighing for a selector kind, of the quantizer that the losses name.

    Args:    allowed: the formats to choose from; all that losses are known of by default.
    """
    known, quantized = losses.of(losses.quantizer)
    usable = [n for n, part in enumerate(known) if allowed is None or part in allowed]
    mean = quantized.mean(axis=(0, 1))  # [3, F]
    sizes = np.array([part.part_bytes(spec.hidden_size) for part in known])
    by_matrix = [
        _undominated(sizes[usable], mean[m, usable]) if matrix in spec.expert.matrices else np.zeros(1, np.int64)
        for m, matrix in enumerate(MATRICES)
    ]
    parts = np.stack(np.meshgrid(*(np.array(usable)[kept] for kept in by_matrix), indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    selector_bytes, record_bytes, extent = _sizes(parts, spec, selector, known)
    lost = mean[np.arange(3), parts].sum(axis=1)
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    kept = _near_the_best(extent, lost, max(LEAST_CHOICES, min(_MOST_CELLS // num_experts, MAX_CHOICES)))
    formats = tuple(_format(row, spec, known) for row in parts[kept].tolist())
    return Choices(
        selector, losses.quantizer, formats, parts[kept], selector_bytes[kept], record_bytes[kept], extent[kept]
    )


def _sizes(parts: Ints, spec: ModelSpec, selector: Selector, known: tuple[PartFormat, ...]) -> tuple[Ints, Ints, Ints]:
    """What `expert_layout` makes of combinations [C, 3], without making thousands: selectors, records, extents."""
    expert, extra = spec.expert, extra_layout(spec.expert.extra_floats)
    by_format = np.array([part.part_bytes(spec.hidden_size) for part in known])
    sizes = by_format[parts] + 4 * np.array([matrix in expert.row_bias for matrix in MATRICES])  # [C, 3]

    def all_rows(matrices: tuple[Matrix, ...]) -> Ints:
        held = [MATRICES.index(matrix) for matrix in matrices]
        row_bytes = -(-(sizes[:, held].sum(axis=1) + CRC_BYTES) // ROW_ALIGN) * ROW_ALIGN
        found: Ints = expert.intermediate_size * row_bytes * bool(held)
        return found

    selectors = all_rows(selector_matrices(selector, expert.matrices))
    records = all_rows(record_matrices(selector, expert.matrices))
    return selectors, records, selectors + records + (extra.row_bytes if extra else 0)


def _format(parts: list[int], spec: ModelSpec, known: tuple[PartFormat, ...]) -> ExpertFormat:
    gate, up, down = (known[number] for number in parts)
    return ExpertFormat(gate if "gate" in spec.expert.matrices else None, up, down)


def _undominated(sizes: Ints, lost: Floats) -> Ints:
    """Those that lose less than all that are no larger: int64 [n], by rising size."""
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(np.concatenate(([np.inf], lost[order][:-1])))
    kept: Ints = order[lost[order] < best]
    return kept


def _near_the_best(sizes: Ints, lost: Floats, most: int) -> Ints:
    """At most so many, those that lose least beside the best of at most their size: int64 [n], by rising size.

    Where even the best of each size are more, evenly many of these, the first and the last among them.
    """
    order = np.lexsort((lost, sizes))
    best = np.minimum.accumulate(lost[order])
    worse = (lost[order] + _FEWEST) / (best + _FEWEST)
    leading = np.flatnonzero(np.diff(best, prepend=np.inf) < 0)
    if len(leading) > most:
        return order[leading[np.linspace(0, len(leading) - 1, most).round().astype(np.int64)]]
    nearest: Ints = np.sort(np.argsort(worse, kind="stable")[:most])
    kept: Ints = order[nearest]
    return kept
