"""The inputs of MoE layers, kept in files for what looks at two layers at once: cosines, and predictors.

All tokens' of the last layer; for predictors, those of some sequences of every layer.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.prediction import MAX_JUDGED_TOKENS, MAX_LEARNED_TOKENS, LayerInputs

_PIECE_TOKENS = 2048  # compared at once


@dataclass(frozen=True, slots=True)
class Shares:
    """Which sequences predictors learn from and are judged on: the first `num_learned`, the last `num_judged`."""

    num_sequences: int
    sequence_length: int
    num_learned: int
    num_judged: int

    @classmethod
    def of(cls, num_sequences: int, sequence_length: int, num_held_out: int) -> "Shares":
        """As many as predictors take, none of them held out that are learned from."""
        learned = min(num_sequences - num_held_out, -(-MAX_LEARNED_TOKENS // sequence_length))
        return cls(num_sequences, sequence_length, learned, min(num_held_out, -(-MAX_JUDGED_TOKENS // sequence_length)))

    def tokens(self) -> tuple[slice, slice]:
        """The tokens of both, among all."""
        S, end = self.sequence_length, self.num_sequences * self.sequence_length
        return slice(0, self.num_learned * S), slice(end - self.num_judged * S, end)


class InputFiles:
    """Files `inputs-*` in `folder`, float32 rows of `hidden_size`.

    Args:    first_layers: the MoE layers that begin a stack: tokens there are others than in the layer before.
    """

    def __init__(self, folder: Path, hidden_size: int, shares: Shares, first_layers: Collection[int] = (0,)) -> None:
        self._first_layers = first_layers
        self.shares = shares
        self._folder = folder
        self._hidden_size = hidden_size

    def keep(self, layer_idx: int, inputs: Tensor) -> tuple[float, float]:
        """Keeps a MoE layer's inputs float32 [T, d].

        Returns: mean and deviation over tokens of the cosine with the layer before's; NaN for the first of a stack.
        """
        learned, judged = self.shares.tokens()
        _write(self._sample(layer_idx), inputs[learned], inputs[judged])
        cosine = (math.nan, math.nan) if layer_idx in self._first_layers else self._cosine(layer_idx, inputs)
        _write(self._whole(layer_idx), inputs)
        if layer_idx > 1:
            self._whole(layer_idx - 2).unlink(missing_ok=True)  # the one before this is needed if this is done again
        return cosine

    def read(self, layer_idx: int, routes: Tensor) -> LayerInputs:
        """What predictors learn from and are judged on, mapped from the file; `routes` int64 [T, k] are all tokens'."""
        # Copied where it is written to, which nobody does: torch takes no array that forbids it.
        mapped = np.memmap(self._sample(layer_idx), np.float32, "c")
        rows = torch.from_numpy(mapped).view(-1, self._hidden_size)
        learned, judged = self.shares.tokens()
        number = learned.stop - learned.start
        return LayerInputs(rows[:number], rows[number:], routes[learned], routes[judged])

    def _cosine(self, layer_idx: int, inputs: Tensor) -> tuple[float, float]:
        cosines = []
        with self._whole(layer_idx - 1).open("rb") as file:
            for piece in torch.split(inputs, _PIECE_TOKENS):
                before = torch.from_numpy(np.fromfile(file, np.float32, piece.numel())).view_as(piece)
                product = (piece * before).sum(dim=1)  # [n]
                lengths = (piece.square().sum(dim=1) * before.square().sum(dim=1)).sqrt()
                cosines.append(product / lengths.clamp(min=torch.finfo(torch.float32).tiny))
        all_cosines = torch.cat(cosines).to(torch.float64)
        return float(all_cosines.mean()), float(all_cosines.std(correction=0))

    def _sample(self, layer_idx: int) -> Path:
        return self._folder / f"inputs-{layer_idx:03d}.bin"

    def _whole(self, layer_idx: int) -> Path:
        return self._folder / f"inputs-whole-{layer_idx:03d}.bin"


def _write(path: Path, *parts: Tensor) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        for part in parts:
            part.numpy().tofile(file)
    beside.rename(path)
