"""Tokens that a decoder chooses itself, pass after pass, from logits that stay where they are.

`runtime.sampling.Sampler` describes how its tokens are chosen (`Choice`), and goes on by the tokens that it gets.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from moe_pack.runtime.model.kv_cache import CachedSequence

NOT_FINITE, NONE_LEFT = -1, -2  # in place of a token: logits are NaN or infinite; every token is forbidden


class Choice(NamedTuple):
    """How the tokens of a sequence are chosen, with the meanings of `SamplingOptions`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias: tuple[Tensor, Tensor] | None  # tokens int64 [n], a token perhaps twice, and float32 [n]; None: no bias
    # Tokens that penalties change, int64 [n], and how often each is in the answer, float32 [n]; None: no penalties.
    occurrences: tuple[Tensor, Tensor] | None
    uniform: Callable[[], float]  # returns the random number, from 0 up and below 1, that decides the next draw


class ChosenRow(NamedTuple):
    """A sequence, a token that is to be appended to it, and how the tokens after that are chosen."""

    sequence: CachedSequence
    token: int
    choice: Choice | None  # None: the caller chooses


class Chooser(Protocol):
    """A decoder that chooses tokens."""

    def can_choose(self, rows: Sequence[ChosenRow]) -> bool:
        """Whether `steps` can take these rows."""

    def steps(
        self, rows: Sequence[ChosenRow], goes_on: Callable[[], bool]
    ) -> Generator[list[int | Tensor], None, None]:
        """Appends tokens to sequences, and yields the next token of each: of the first pass, the second, and so on.

        If the caller chooses for a row, the first pass is the only one, and the row's logits float32 [V] are yielded
        in place of a token; they are valid until the next pass. Else a pass begins before the tokens of the one before
        are yielded. So a sequence whose answer ends with a yielded token may have that token too. When the iterator
        ends, or is closed, no pass runs.
        Args:    rows: of different sequences; each token is appended in the first pass.   goes_on: returns
                 whether a token is needed after the one that the running pass brings; then another pass begins.
        Raises:  RunError as `Decoder.extend`.
        """


def chosen_rows(
    chooser: Chooser | None, sequences: Sequence[CachedSequence], ids: Sequence[int], choices: Sequence[Choice | None]
) -> list[ChosenRow] | None:
    """Returns the rows of sequences, if a chooser takes them; None if it does not, or the host has to choose for all.

    Args:    ids: the token to append to each.   choices: None for a sequence whose tokens the host has to choose.
    """
    if chooser is None or not any(choices):
        return None
    rows = [ChosenRow(*each) for each in zip(sequences, ids, choices, strict=True)]
    return rows if chooser.can_choose(rows) else None
