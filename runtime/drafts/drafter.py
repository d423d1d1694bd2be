"""What proposes drafts: the face that every kind of draft has."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Drafter(Protocol):
    """Proposes the tokens that may come next in a sequence.

    A proposal never changes an answer: a token of it stays only if the sampler chooses that token anyway.
    """

    @property
    def needs_hidden(self) -> bool:
        """Whether `propose` needs the hidden state of the last token."""
        ...

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Returns the tokens that may follow, in order, at most `most`; none where it has no proposal.

        Args:    ids: the whole sequence, the token that was chosen last at its end.   hidden: float32 [d], after the
                 last layer and before the final norm, of the last token that the model has run: the one before the
                 end of `ids`, since the model has not run the token chosen last. None unless `needs_hidden`.
        """
        ...

    def accepted(self, number: int) -> None:
        """Tells how many tokens of the last proposal were accepted; `propose` follows with a longer `ids`."""
        ...

    def reset(self) -> None:
        """Forgets the sequence: the next `ids` are of another text."""
        ...
