"""What a layer's experts were given of some of the text: kept in a profile, for rounding that minds what it does.

Second moments of every expert's inputs would be terabytes for a large model; the tokens they are made of are a file a
layer, and an expert's own are read from it when its turn comes. Specified in docs/profile.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.arrays import Array
from moe_pack.calib.expert_pass import sample_places
from moe_pack.calib.expert_quantizer import MAX_OTHER_TOKENS, MAX_OWN_TOKENS, ExpertTokens
from moe_pack.calib.layer_pass import LayerTokens
from moe_pack.formats import ModelSpec, PackError, RangeReader, lay_out, read_header

OTHERS_COUNT = 32  # as so many of its own they count together
_PIECE_TOKENS = 256  # written at once: 15 MiB of the widest model
_ALIGN_BYTES = 64


def num_kept_sequences(spec: ModelSpec, num_learned: int, sequence_length: int) -> int:
    """Of `num_learned` sequences of as many tokens a layer, how many are kept: `MAX_OWN_TOKENS` an expert, on average.

    Args:    num_learned: sequences that are not held out.
    """
    router = spec.router
    num_tokens = -(-MAX_OWN_TOKENS * router.num_experts // router.num_experts_per_tok)
    return min(num_learned, -(-num_tokens // sequence_length))


def input_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """What a layer's file takes on the drive."""
    return lay_out([[one] for one in _tensors(spec, num_tokens)], _ALIGN_BYTES).num_bytes


def input_pieces(spec: ModelSpec, tokens: LayerTokens, sequence_length: int, kept: Tensor) -> Iterator[bytes]:
    """A layer's file in pieces, so that it is never in memory whole.

    Args:    kept: the sequences to keep, rising int64 [n].
    """
    places = (kept[:, None] * sequence_length + torch.arange(sequence_length)).flatten()  # [n S]
    layout = lay_out([[one] for one in _tensors(spec, len(places))], _ALIGN_BYTES)
    yield layout.header
    for entry in layout.entries:
        if entry.name == "inputs":
            for rows in torch.split(places, _PIECE_TOKENS):
                yield tokens.inputs[rows].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        elif entry.name == "experts":
            yield tokens.experts[places].numpy().astype("<u2").tobytes()
        elif entry.name == "weights":
            yield tokens.weights[places].numpy().astype("<f4").tobytes()
        else:
            yield bytes(entry.num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class KeptInputs:
    """What experts were given of some sequences of `sequence_length` tokens a layer.

    `sequences`: which they are, rising int64 [n].   `open`: a MoE layer's file, which the caller closes.
    """

    sequences: Tensor
    sequence_length: int
    open: Callable[[int], "ExpertInputs"]

    def split(self, num_judged: int) -> tuple[int, int]:
        """Tokens to judge on, and others to calibrate on.

        Args:    num_judged: of all tokens, how many of the first may be judged on.
        Returns: how many of the first are to be, and the first token of a file that is not among them: half of what
                 the files hold at least is left to calibrate on.
        """
        S = self.sequence_length
        middle, place = divmod(len(self.sequences) * S // 2, S)
        judged = min(num_judged, int(self.sequences[middle]) * S + place)
        return judged, int((judged - self.sequences * S).clamp(0, S).sum())


class ExpertInputs:
    """A layer's file of T tokens, open for reading. For several threads; `close` it, or use it in a `with`.

    `experts` u16 [T, k]: the experts of every token, best first.   `weights` f32 [T, k]: theirs, as the family has
    them; 0 where the expert was beyond its capacity and did not run.
    Raises:  PackError if the file is not what a profile of this model has there.
    """

    def __init__(self, path: Path, spec: ModelSpec, num_tokens: int) -> None:
        entries = {entry.name: entry for entry in read_header(path, PackError) if not entry.name.startswith("pad.")}
        wanted = {name: (dtype, shape) for name, dtype, shape in _tensors(spec, num_tokens)}
        for name in [*wanted, *entries]:
            if name not in wanted:
                raise PackError(f"{path.name}: unknown tensor {name!r}")
            if name not in entries:
                raise PackError(f"{path.name}: tensor {name!r} is missing")
            found, (dtype, shape) = entries[name], wanted[name]
            if (found.dtype, found.shape) != (dtype, shape):
                raise PackError(
                    f"{path.name}: tensor {name!r} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
                )
        self._reader = RangeReader(path, PackError)
        self._hidden_size = spec.hidden_size
        self._first_byte = entries["inputs"].offset
        routes, weights = (self._reader.read(entries[n].offset, entries[n].num_bytes) for n in ("experts", "weights"))
        self.experts: Array = routes.view("<u2").reshape(wanted["experts"][1])
        self.weights: Array = weights.view("<f4").reshape(wanted["weights"][1])
        if self.experts.max(initial=0) >= spec.router.num_experts:
            self.close()
            raise PackError(
                f"{path.name}: tensor 'experts' names expert {self.experts.max()}, expected less than "
                f"{spec.router.num_experts}; profile the model anew"
            )

    def rows(self, token_idx: Tensor) -> Tensor:
        """What experts were given of these tokens, read from the file: int64 [n] gives float32 [n, d]."""
        out = torch.empty((len(token_idx), self._hidden_size), dtype=torch.bfloat16)
        num_bytes = 2 * self._hidden_size
        for row, place in zip(out.view(torch.int16).numpy().view(np.uint8), token_idx.tolist(), strict=True):
            row[:] = self._reader.read(self._first_byte + place * num_bytes, num_bytes)
        return out.to(torch.float32)

    def of_expert(self, expert: int, first_token: int = 0) -> ExpertTokens:
        """The tokens an expert is calibrated on, of those from `first_token` on: its own, and a few of its layer's.

        Meaning: of the tokens it runs for at most `MAX_OWN_TOKENS`, evenly spread, each with the square of its router
                 weight: so an error of the expert's output enters the layer's. Of the other tokens of the layer at
                 most `MAX_OTHER_TOKENS`, evenly spread, which together count as `OTHERS_COUNT` of its own do on
                 average: an expert of few tokens is drawn towards its layer, one that no token reached has these
                 alone, and each counts 1.
        """
        runs = (self.experts == expert) & (self.weights != 0)  # [T, k]
        runs[:first_token] = False
        token_idx, place = (torch.from_numpy(found) for found in np.nonzero(runs))
        own = sample_places(len(token_idx), MAX_OWN_TOKENS)
        token_idx, place = token_idx[own], place[own]
        squares = torch.from_numpy(self.weights)[token_idx, place].square()  # [n]
        others = torch.from_numpy(first_token + np.flatnonzero(~runs[first_token:].any(axis=1)))
        others = others[sample_places(len(others), MAX_OTHER_TOKENS)]
        each = float(squares.mean()) * OTHERS_COUNT / max(len(others), 1) if len(squares) else 1.0
        weights = torch.cat((squares, torch.full((len(others),), each)))
        return ExpertTokens(self.rows(torch.cat((token_idx, others))), weights)

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "ExpertInputs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensors(spec: ModelSpec, num_tokens: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Name, dtype and shape of all that a layer's file holds of this many tokens."""
    k = spec.router.num_experts_per_tok
    return (
        ("experts", "U16", (num_tokens, k)),
        ("weights", "F32", (num_tokens, k)),
        ("inputs", "BF16", (num_tokens, spec.hidden_size)),
    )
