"""Calibration text: the documents that `--data` names as sequences of tokens, and which of those are held out.

Specified in the design's section on calibration. What documents are and where they lie is `documents`.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.documents import Documents, Piece, open_documents
from moe_pack.formats import RunError
from moe_pack.runtime import Text

MIN_TOKENS = 256  # fewer measure nothing: of 64 experts, an average one sees a handful
HELD_OUT_SHARE = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sequences of a text's tokens.

    `name`: what was read, for people.   `sequences`: int32 [N, S].
    `sha256`: hex digest of the sequences as little-endian int32.   `notes`: what a user should be told.
    """

    name: str
    sequences: NDArray[np.int32]
    sha256: str
    notes: tuple[str, ...]


def read_tokens(source: str | None, field: str | None, text: Text, num_tokens: int, sequence_length: int) -> Tokens:
    """At least `num_tokens` tokens of a source in whole sequences, or all whole sequences if it has fewer.

    Meaning: documents one after the other, each with the tokenizer's special tokens (a beginning), cut every S tokens;
             the first ceil(num_tokens / S) sequences; what is left is dropped.
             Of the sample, sequence i is the next of its part i mod 8, so that few tokens come from all its books;
             if the parts have too few whole sequences, it is read in order.
             Documents are tokenised in pieces (`documents.PIECE_CHARS`): where two pieces of a long one meet, a token
             or two may differ from those of the whole, and tokens that end a text stand after the first piece.
    Args:    source: --data, None for the sample.   field: --field, None for the default.
    Raises:  RunError if the source cannot be read; if it has less than a sequence or `MIN_TOKENS`, and is used up; if
             the tokenizer makes tokens the model has no row for.
    """
    assert num_tokens > 0 and sequence_length > 0, f"{num_tokens} tokens in sequences of {sequence_length}"
    documents = open_documents(source, field)
    wanted = -(-num_tokens // sequence_length)
    found = _Found.take(documents.parts, text, wanted, sequence_length)
    if len(found.sequences) < wanted and len(documents.parts) > 1:
        found = _Found.take((chain(*documents.parts),), text, wanted, sequence_length)
    notes = () if len(found.sequences) == wanted else (_shortage(documents, found, num_tokens, sequence_length),)
    return _tokens(documents.name, found.sequences, notes)


def unseen_tokens(text: Text, num_tokens: int, sequence_length: int) -> Tokens:
    """At least `num_tokens` tokens of the sample from its end, in whole sequences: text that no profile of few sees.

    Meaning: all sequences of the sample in the order in which `read_tokens` takes them; the last ceil(num_tokens / S).
    Raises:  RunError as `read_tokens`.
    """
    documents = open_documents(None, None)
    wanted = -(-num_tokens // sequence_length)
    found = _Found.take(documents.parts, text, None, sequence_length)
    notes = () if len(found.sequences) >= wanted else (_shortage(documents, found, num_tokens, sequence_length),)
    return _tokens(f"the end of {documents.name}", found.sequences[-wanted:], notes)


def num_held_out(num_sequences: int) -> int:
    """How many of the sequences, the last ones, are kept for checking: a fifth, at least one if there are two."""
    return max(num_sequences // HELD_OUT_SHARE, 1) if num_sequences > 1 else 0


def _tokens(name: str, found: list[NDArray[np.int32]], notes: tuple[str, ...]) -> Tokens:
    sequences = np.stack(found)  # [N, S]
    return Tokens(name, sequences, hashlib.sha256(sequences.astype("<i4").tobytes()).hexdigest(), notes)


@dataclass(frozen=True, slots=True)
class _Found:
    """The sequences taken, int32 [S] each, and the tokens of all that was read to its end."""

    sequences: list[NDArray[np.int32]]
    num_tokens: int

    @classmethod
    def take(cls, parts: tuple[Iterable[Piece], ...], text: Text, wanted: int | None, sequence_length: int) -> "_Found":
        cutters = [_Cutter(_token_ids(part, text), sequence_length) for part in parts]
        sequences = list(islice(_in_turn(cutters), wanted))
        num_tokens = len(sequences) * sequence_length + sum(len(cutter.left) for cutter in cutters)
        return cls(sequences, num_tokens)


class _Cutter:
    """Cuts a stream of tokens into sequences; `left` are those that no sequence holds yet."""

    def __init__(self, ids: Iterator[NDArray[np.int32]], sequence_length: int) -> None:
        self.left = np.empty(0, np.int32)
        self._ids = ids
        self._sequence_length = sequence_length

    def next(self) -> NDArray[np.int32] | None:
        """The next whole sequence, or None if the stream ends before."""
        while len(self.left) < self._sequence_length:
            more = next(self._ids, None)
            if more is None:
                return None
            self.left = np.concatenate([self.left, more])
        sequence, self.left = np.split(self.left, [self._sequence_length])
        return sequence


def _in_turn(cutters: Iterable[_Cutter]) -> Iterator[NDArray[np.int32]]:
    """A sequence of each in turn; one that has no more drops out."""
    turn = deque(cutters)
    while turn:
        cutter = turn.popleft()
        sequence = cutter.next()
        if sequence is not None:
            yield sequence
            turn.append(cutter)


def _token_ids(pieces: Iterable[Piece], text: Text) -> Iterator[NDArray[np.int32]]:
    vocab_size = text.vocab_size
    for piece in pieces:
        ids = np.array(text.encode(piece.text, special_tokens=piece.begins), np.int64)
        if ids.size and ids.max() >= vocab_size:
            raise RunError(
                f"tokenizer.json: makes token {ids.max():,}, expected less than config.json's vocab_size "
                f"{vocab_size:,}; take the tokenizer that belongs to this model"
            )
        yield ids.astype(np.int32)


def _shortage(documents: Documents, found: _Found, num_tokens: int, sequence_length: int) -> str:
    """The note that a source has less than was asked for.

    Raises:  RunError if it has too little to measure anything.
    """
    place, least = documents.place, max(sequence_length, MIN_TOKENS)
    if not found.num_tokens:
        raise RunError(f"{place}: found no text; give some")
    if found.num_tokens < least:
        raise RunError(
            f"{place}: found {found.num_tokens:,} tokens, expected at least {least:,} "
            f"(sequences have {sequence_length:,}); give more text"
        )
    num_used = len(found.sequences) * sequence_length
    return (
        f"{place}: found {found.num_tokens:,} tokens, --tokens asks for {num_tokens:,}; "
        f"the {num_used:,} of its whole sequences are used"
    )
