"""The choices of a run, which its twin makes too: rounding may tip one, and everything after it would differ.

Routes, and the positions, entries and blocks of indexers, are the largest of some scores. A twin whose scores are those
of the first run but for rounding may choose otherwise only between scores as close as that. So a test compares scores,
and gives the twin the choices of the first run: whatever differs then is no tipped choice.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.model.attention import shared
from moe_pack.runtime.model.compute import router
from moe_pack.runtime.model.compute.router import choose, router_weights

CLOSE = 1e-5  # scores in float32 that differ by less may come in another order


class Choices:
    """What a run in torch chose, in its order: a row a token.

    Both runs make their passes alike; how many tokens they score at once does not matter.
    """

    def __init__(self) -> None:
        self._routes: deque[tuple[Tensor, Tensor, Tensor]] = deque()  # logits, experts, weights
        self._seen: deque[tuple[Tensor, Tensor]] = deque()  # scores and which were chosen, [..., n]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Takes note of all choices of the block."""
        largest = shared.largest

        def noted_largest(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
            chosen = largest(scores, number, allowed)
            among = scores.masked_fill(~allowed, -torch.inf)
            self._seen.extend(zip(among.unbind(-2), chosen.unbind(-2), strict=True))
            return chosen

        def noted_choose(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            experts, weights = choose(logits, spec, bias)
            self._routes.extend(zip(logits, experts, weights, strict=True))
            return experts, weights

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "largest", noted_largest)
            patch.setattr(router, "choose", noted_choose)
            yield

    @contextmanager
    def forced(self, tolerance: float) -> Iterator[None]:
        """Makes the block choose the same.

        Raises:  AssertionError if scores differ by more than `tolerance`, or the block makes fewer choices.
        """

        def forced_largest(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
            rows = [self._seen.popleft() for _ in range(scores.shape[-2])]
            expected = torch.stack([row for row, _ in rows], dim=-2)
            _assert_close(scores.masked_fill(~allowed, -torch.inf), expected, tolerance)
            return torch.stack([chosen for _, chosen in rows], dim=-2)

        def forced_choose(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            rows = [self._routes.popleft() for _ in range(len(logits))]
            expected, experts, weights = (torch.stack(each) for each in zip(*rows, strict=True))
            _assert_close(logits, expected, tolerance)
            return experts, router_weights(logits, experts, spec).masked_fill(weights == 0, 0.0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "largest", forced_largest)
            patch.setattr(router, "choose", forced_choose)
            yield
        assert not self._seen and not self._routes, "the first run chose more often"


class Ties:
    """The tokens of a run in torch for which a choice was close: scores that rounding can bring into another order."""

    def __init__(self) -> None:
        self._close: list[Tensor] = []  # bool [tokens of a call]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Takes note of all choices of the block, which has one pass."""
        largest, noise = shared.largest, torch.Generator().manual_seed(0)

        def noted_largest(scores: Tensor, number: int, allowed: Tensor) -> Tensor:
            chosen = largest(scores, number, allowed)
            least = scores.masked_fill(~chosen, torch.inf).amin(dim=-1)
            others = scores.masked_fill(chosen | ~allowed, -torch.inf).amax(dim=-1)
            self._close.append((least - others < CLOSE).reshape(-1, scores.shape[-2]).any(dim=0))
            return chosen

        def noted_choose(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            experts, weights = choose(logits, spec, bias)
            moved = logits + CLOSE * torch.randn(logits.shape, generator=noise)
            others, _ = choose(moved, spec, bias)
            self._close.append((experts.sort(dim=1).values != others.sort(dim=1).values).any(dim=1))
            return experts, weights

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "largest", noted_largest)
            patch.setattr(router, "choose", noted_choose)
            yield

    def by_position(self, num_tokens: int) -> list[bool]:
        """Whether any choice of each token was close; a layer's choices are of all tokens, in their order.

        An encoder has choices of other tokens too: then no choice counts as close.
        """
        rows = torch.cat([torch.zeros(num_tokens, dtype=torch.bool), *self._close])
        if len(rows) % num_tokens:
            return [False] * num_tokens
        found: list[bool] = rows.view(-1, num_tokens).any(dim=0).tolist()
        return found


def _assert_close(scores: Tensor, expected: Tensor, tolerance: float) -> None:
    differences = (scores - expected).masked_fill(scores == expected, 0.0)  # both may be infinite
    assert differences.abs().max() <= tolerance, f"scores of a choice differ by {float(differences.abs().max()):.3g}"
