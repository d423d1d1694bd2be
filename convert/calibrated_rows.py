"""The rows of an expert some of whose matrices are calibrated: quantized by what a profile says they are given.

All three matrices of a block of neurons are in memory at once, for what down is rounded by follows from gate and up.
"""

from collections.abc import Iterator, Mapping
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.calib import BLOCK_NEURONS, Calibration, ExpertQuantizer, Profile, UnholdableError, calibration_bytes
from moe_pack.convert.part_bytes import KeptRows, MatrixRows, StoppedError, held_bytes, next_rows
from moe_pack.formats import BF16, Checkpoint, ExpertFormat, Matrix
from moe_pack.runtime import NeuronBlock

Bytes2D = NDArray[np.uint8]


def calibrated_rows(
    checkpoint: Checkpoint,
    profile: Profile,
    place: tuple[int, int],
    formats: ExpertFormat,
    biases: Mapping[Matrix, Bytes2D],
    stop: Event,
) -> Iterator[tuple[int, int, dict[Matrix, Bytes2D]]]:
    """(first, end) of consecutive neurons, and for each matrix its rows' bytes, u8 [end - first, part_bytes].

    Args:    place: MoE layer and expert.   biases: of gate and up, float32 as bytes, u8 [f, 4].
    Raises:  CheckpointError for a weight that is no number, or that a format cannot hold; PackError if the profile is
             damaged; StoppedError.
    """
    spec = checkpoint.spec
    with profile.inputs(place[0]) as inputs:
        calibration = Calibration(inputs.of_expert(place[1]), spec.expert.function)
    quantizer = ExpertQuantizer(formats, calibration, spec.hidden_size)
    sources = {matrix: checkpoint.expert_source(*place, matrix) for matrix in spec.expert.matrices}
    if any(matrix != "down" for matrix in quantizer.matrices):
        _ = calibration.runs  # before matrices are held: making them takes the most memory
    rows = {matrix: MatrixRows(checkpoint, source, stop) for matrix, source in sources.items()}
    kept = {
        matrix: KeptRows(checkpoint, source, part, stop)
        for matrix, source in sources.items()
        if (part := formats.of(matrix)) is not None and part.keeps_source
    }
    for first, end in next_rows(spec.expert.intermediate_size, stop, BLOCK_NEURONS):
        block = _block(rows, biases, first, end)
        made = {matrix: held.rows(first, end) for matrix, held in kept.items()}
        for matrix in quantizer.matrices:
            if stop.is_set():
                raise StoppedError
            try:
                made[matrix] = quantizer.rows(matrix, block).numpy()
            except UnholdableError as fault:
                raise rows[matrix].unholdable(first, fault) from fault
        yield first, end, made


def calibrated_bytes(checkpoint: Checkpoint, place: tuple[int, int], formats: ExpertFormat, num_bytes: int) -> int:
    """What `calibrated_rows` holds of an expert at its peak, with the `num_bytes` that are made of it."""
    spec, total = checkpoint.spec, num_bytes
    for matrix in spec.expert.matrices:
        source, part = checkpoint.expert_source(*place, matrix), formats.of(matrix)
        total += held_bytes(checkpoint, source, BF16)
        if part is not None and part.keeps_source:
            total += held_bytes(checkpoint, source, part)
    return calibration_bytes(spec.hidden_size, spec.expert.intermediate_size, total)


def _block(rows: Mapping[Matrix, MatrixRows], biases: Mapping[Matrix, Bytes2D], first: int, end: int) -> NeuronBlock:
    weights = {matrix: held.weights(first, end).to(torch.float32) for matrix, held in rows.items()}
    offsets = {matrix: torch.from_numpy(bias[first:end].view(np.float32)[:, 0]) for matrix, bias in biases.items()}
    return NeuronBlock(weights.get("gate"), weights["up"], weights["down"], offsets.get("gate"), offsets.get("up"))
