"""What a model is given of sequences of S tokens: all of each; or, with an encoder, a half to each of its stacks.

    encoder   the first n = S // 2 tokens
    decoder   its start token, then the next n - 1

So every layer sees n tokens of a sequence, and the decoder predicts, from half a text, the n - 1 tokens that follow.
Specified in docs/profile.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, RunError

Beginning = Callable[[int], Tensor]  # a sequence's hidden states before a stack's first layer, by its number


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """`stacks`: what each stack is given, the encoder's first where there is one: int64 [N, n] each."""

    stacks: tuple[Tensor, ...]

    @classmethod
    def of(cls, spec: ModelSpec, tokens: Tensor) -> "Sequences":
        """What a model is given of sequences int64 [N, S]."""
        if spec.encoder is None:
            return cls((tokens,))
        n = stack_tokens(spec, tokens.shape[1])
        start = torch.full((len(tokens), 1), spec.encoder.start_token)
        return cls((tokens[:, :n], torch.cat((start, tokens[:, n : 2 * n - 1]), dim=1)))

    @property
    def ids(self) -> Tensor:
        """What the decoder is given, int64 [N, n]: each token but the first is predicted from those before."""
        return self.stacks[-1]

    @property
    def length(self) -> int:
        """Tokens of a sequence in each stack, n."""
        return self.ids.shape[1]

    def begun(self, embedded: Callable[[Tensor, int], Tensor]) -> tuple[Beginning, Beginning | None]:
        """How sequences begin in the first stack, and in the second, if there is one.

        Args:    embedded: hidden states float32 [n, d] of a sequence, from what a stack is given of all, int64 [N, n],
                 and its number.
        """
        first, *second = (lambda number, ids=ids: embedded(ids, number) for ids in self.stacks)
        return first, second[0] if second else None


def stack_tokens(spec: ModelSpec, sequence_length: int) -> int:
    """How many tokens of a sequence each layer of a model sees."""
    return sequence_length if spec.encoder is None else sequence_length // 2


def stack_of(spec: ModelSpec, layer: int) -> int:
    """Which stack a layer is of: 0 of the first, 1 of a decoder after an encoder."""
    return int(spec.encoder is not None and layer >= spec.encoder.num_layers)


def check_length(spec: ModelSpec, sequence_length: int) -> None:
    """Refuses sequences longer than the model's positions, or too short for a prediction in each half.

    Raises:  RunError.
    """
    if sequence_length > spec.max_position_embeddings:
        raise RunError(
            f"--sequence-length: found {sequence_length}, expected at most the "
            f"{spec.max_position_embeddings} positions this model has"
        )
    if spec.encoder is not None and stack_tokens(spec, sequence_length) < 2:
        raise RunError(
            f"--sequence-length: found {sequence_length}, expected at least 4: this model's encoder reads the first "
            "half, and its decoder predicts tokens of the second"
        )
