"""Rules about single tokens: which ones an answer may have, apart from the grammar that it follows.

They are what vLLM calls `allowed_token_ids`, `min_tokens` and `bad_words`, and llama.cpp a `logit_bias` of false.
Source: vLLM's documentation of `SamplingParams`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.sampling import Grammar


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of one answer.

    `allowed`: the only tokens that may come; None: all.   `banned`: tokens that may not.   `min_tokens`: so many tokens
    come before one that ends the answer.   `bad`: sequences of tokens that may not come.
    """

    allowed: frozenset[int] | None = None
    banned: frozenset[int] = frozenset()
    min_tokens: int = 0
    bad: tuple[tuple[int, ...], ...] = ()

    @property
    def has_effect(self) -> bool:
        """Whether there is any rule."""
        return self.allowed is not None or bool(self.banned or self.min_tokens or self.bad)


class RuledGrammar:
    """A `Grammar` of one answer that follows rules about tokens, and another grammar if there is one.

    `fault`: why no token is left; None until then.

    Args:    end_ids: the tokens that end the answer.
    """

    def __init__(self, rules: TokenRules, end_ids: Iterable[int], grammar: Grammar | None = None) -> None:
        self._rules, self._grammar = rules, grammar
        self._ends = _places(end_ids)
        self._banned = _places(rules.banned)
        self._allowed = None if rules.allowed is None else _places(rules.allowed)
        self._count = 0
        self._fault: str | None = None
        self._before = deque[int](maxlen=max((len(each) for each in rules.bad), default=1) - 1 or 1)

    @property
    def fault(self) -> str | None:
        """Why the answer cannot go on; None while it can."""
        return self._fault or getattr(self._grammar, "fault", None)

    def allow(self, logits: Tensor) -> Tensor:
        """Returns new logits float32 [vocabulary] with minus infinity for every token that may not come.

        Raises:  RunError if none may.
        """
        changed = logits.clone() if self._grammar is None else self._grammar.allow(logits).clone()
        if self._allowed is not None:
            kept = torch.full_like(changed, -torch.inf)
            kept[self._allowed] = changed[self._allowed]
            changed = kept
        changed[self._banned] = -torch.inf
        if self._count < self._rules.min_tokens:
            changed[self._ends] = -torch.inf
        before = tuple(self._before)
        for *beginning, last in self._rules.bad:
            if not beginning or before[-len(beginning) :] == tuple(beginning):
                changed[last] = -torch.inf
        if changed.max() == -torch.inf:
            self._fault = "the fields that rule tokens, as min_tokens and bad_words, leave none to choose; relax one"
            raise RunError(self._fault)
        return changed

    def accept(self, token: int) -> None:
        """Goes on by a token of the answer."""
        self._count += 1
        self._before.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)


def ruled(rules: TokenRules, end_ids: Iterable[int], grammar: Grammar | None) -> Grammar | None:
    """Returns a grammar that follows rules too; the grammar itself where there are none."""
    return RuledGrammar(rules, end_ids, grammar) if rules.has_effect else grammar


def _places(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.int64)


def sequences_of(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words, each as it begins a text and as it follows a space."""
    made = {tuple(encode(before + word.lstrip())) for word in words for before in ("", " ")}
    return tuple(sorted(each for each in made if each))
