"""Tokens chosen on the GPU at the end of a pass: the next pass begins before the host has read them.

A row of the next pass takes its token from the GPU's memory. So the host launches a pass while the one before runs, and
reads tokens a step behind. `TokenChoice` has the memory and the launches, `ChoosingSteps` the passes. Importing this
needs Triton.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.kernels import sampling
from moe_pack.runtime.gpu.placements import NUM_TURNS
from moe_pack.runtime.gpu.token.stages import RowEntry
from moe_pack.runtime.model.choosing import Choice, ChosenRow
from moe_pack.runtime.model.kv_cache import CachedSequence

_CHOSEN = -1  # in place of a row's token: the one that the pass before has chosen
_LARGEST_DISTANCE = sampling.RowOptions(0.0).farthest


def row_options(choice: Choice) -> sampling.RowOptions:
    """Returns the options of a row, with the next random number."""
    farthest = _LARGEST_DISTANCE
    if choice.min_p:
        farthest = min(farthest, float(round(-math.log(choice.min_p) * sampling.DISTANCES)))
    return sampling.RowOptions(
        scale=min(sampling.DISTANCES / choice.temperature, sampling.MOST_SCALE) if choice.temperature else 0.0,
        top_k=float(choice.top_k),
        top_p=choice.top_p,
        farthest=farthest,
        repetition=choice.repetition_penalty,
        frequency=choice.frequency_penalty,
        presence=choice.presence_penalty,
        has_bias=float(choice.bias is not None),
        uniform=choice.uniform(),
    )


class TokenChoice:
    """The choice at the end of passes of up to R rows.

    Args:    logits, control: of `LayerBuffers`.   num_slots: of sequences.
    """

    def __init__(self, logits: Tensor, control: Tensor, num_slots: int) -> None:
        self.memory = sampling.ChoiceMemory.allocate(logits, control[2], num_slots)
        is_locked, num_rows = logits.is_cuda, len(logits)
        shape = (NUM_TURNS, *self.memory.options.shape)
        self._options = torch.zeros(shape, dtype=torch.float64, pin_memory=is_locked)
        self._tokens = torch.zeros((NUM_TURNS, num_rows), dtype=torch.int32, pin_memory=is_locked)
        # Counts and biases of a sequence, on their way to the device.
        self._host_counts = torch.zeros(logits.shape[1], dtype=torch.int32, pin_memory=is_locked)
        self._host_bias = torch.zeros(logits.shape[1], pin_memory=is_locked)
        self._there = control
        for turn in range(NUM_TURNS):
            self.set_choices(turn, None)

    @property
    def host_logits(self) -> Tensor:
        """The logits of rows whose tokens the host chooses, float32 [R, V] in host memory."""
        return self.memory.host_logits

    def set_choices(self, turn: int, choices: Sequence[Choice | None] | None) -> None:
        """Sets how the tokens of a turn's rows are chosen; None: the host chooses, for all rows or one."""
        choices = [None] * len(self._tokens[turn]) if choices is None else choices
        rows = [sampling.BY_HOST if choice is None else row_options(choice) for choice in choices]
        self._options[turn, : len(rows)] = torch.tensor(rows, dtype=torch.float64)

    def enter(self, turn: int, control: Tensor) -> None:
        """Launches the copy of a turn's rows and options to the device."""
        sampling.enter_rows(control, self._options[turn], self.memory, self._there)

    def launch(self, turn: int, num_rows: int) -> None:
        """Launches the choice."""
        sampling.choose(self.memory, self._tokens[turn], num_rows)

    def tokens(self, turn: int, num_rows: int) -> list[int]:
        """Returns the tokens that a pass has chosen, after it has ended."""
        return self._tokens[turn, :num_rows].tolist()

    def begin(self, slot: int, choice: Choice) -> None:
        """Writes how often each token occurred in a sequence, and its biases, to the device, if the choice needs them.

        Waits for the device, and allocates nothing there.
        """
        if choice.occurrences is not None:
            tokens, numbers = choice.occurrences
            counts = self._host_counts.zero_().index_copy_(0, tokens, numbers.int() + sampling.OCCURRED)
            self.memory.counts[slot].copy_(counts)
        if choice.bias is not None:
            self.memory.bias[slot].copy_(self._host_bias.zero_().index_add_(0, *choice.bias))


class RowPasses(Protocol):
    """Passes of rows, as `GpuDecoder` runs them."""

    queues: devices.Queues

    @property
    def turn(self) -> int:
        """The turn of the oldest pass that runs."""

    def can_chain(self, num_rows: int) -> bool:
        """Whether so many rows fit into a pass, and a pass can take its tokens from the one before it."""

    def slot_of(self, sequence: CachedSequence) -> int:
        """Returns the number of one of the sequences."""

    def launch_rows(self, entries: Sequence[RowEntry], choices: Sequence[Choice | None] | None = None) -> None:
        """Launches a pass of rows."""

    def end_rows(self, num_rows: int) -> None:
        """Counts the rows of the oldest pass, which has ended."""

    def enter_new(self, new: dict[int, list[int]]) -> None:
        """Counts the new tokens of each sequence, by its number."""

    def abandon(self, sequences: Sequence[CachedSequence]) -> None:
        """Waits for passes of which one has failed, and cuts their sequences back."""


class ChoosingSteps:
    """The chooser of a decoder whose layers are all on one GPU."""

    def __init__(self, decoder: RowPasses, choice: TokenChoice) -> None:
        self._decoder, self._choice = decoder, choice
        self._ends = deque[devices.Mark]()  # of the passes that run

    def can_choose(self, rows: Sequence[ChosenRow]) -> bool:
        """Whether `steps` can take these rows: in one graph, and no host needs their hidden states."""
        vocab_size = self._choice.memory.logits.shape[1]
        return self._decoder.can_chain(len(rows)) and all(
            row.sequence.follower is None
            and self._has_room(row)
            and (row.choice is None or row.choice.bias is None or int(row.choice.bias[0].max()) < vocab_size)
            for row in rows
        )

    def steps(
        self, rows: Sequence[ChosenRow], goes_on: Callable[[], bool]
    ) -> Generator[list[int | Tensor], None, None]:
        """Yields the tokens of each pass, as `Chooser` says."""
        choosing = [(row, row.choice) for row in rows if row.choice is not None]
        with torch.inference_mode(), self._decoder.queues.current():
            for row, choice in choosing:
                self._choice.begin(self._decoder.slot_of(row.sequence), choice)
        tokens = [row.token for row in rows]
        self._launch(rows, tokens)
        try:
            while self._ends:
                if len(choosing) == len(rows) and all(map(self._has_room, rows)) and goes_on():
                    self._launch(rows, [_CHOSEN] * len(rows))
                tokens = self._end(rows, tokens)
                found = zip(rows, tokens, self._choice.host_logits[: len(rows)], strict=True)
                yield [logits if row.choice is None else token for row, token, logits in found]
        finally:
            while self._ends:  # the caller has left
                tokens = self._end(rows, tokens)

    def _has_room(self, row: ChosenRow) -> bool:
        """Whether another pass can append a token behind those of the passes that run."""
        sequence, number = row.sequence, len(self._ends) + 1
        return sequence.num_tokens + number <= sequence.cache.context_tokens and not sequence.outgrows(number)

    @torch.inference_mode()
    def _launch(self, rows: Sequence[ChosenRow], tokens: Sequence[int]) -> None:
        number, decoder = len(self._ends), self._decoder
        entries = [
            RowEntry(token, row.sequence.num_tokens + number, decoder.slot_of(row.sequence))
            for row, token in zip(rows, tokens, strict=True)
        ]
        with decoder.queues.current():
            decoder.launch_rows(entries, [row.choice for row in rows])
            self._ends.append(decoder.queues.mark())

    @torch.inference_mode()
    def _end(self, rows: Sequence[ChosenRow], tokens: Sequence[int]) -> list[int]:
        """Waits for the oldest pass, which has appended these tokens; returns those that it has chosen."""
        decoder = self._decoder
        appended = {decoder.slot_of(row.sequence): [max(token, 0)] for row, token in zip(rows, tokens, strict=True)}
        try:
            self._ends[0].wait()
            chosen = self._choice.tokens(decoder.turn, len(rows))
            decoder.end_rows(len(rows))
        except BaseException:
            self._ends.clear()
            decoder.abandon([row.sequence for row in rows])
            raise
        self._ends.popleft()
        decoder.enter_new(appended)
        return chosen
