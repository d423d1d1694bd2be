"""Drafts by the prediction layer that a model ships.

For token i + 1 and the hidden state h_i of the token before it, the layer predicts token i + 2:

    x = project([norm(embed(token i + 1)); norm(h_i)])
    x = decoder layer(x)        with keys and values of its own, at position i
    logits = head(norm(x))

For h_i it gets the model's hidden state after the final norm. For each further token of a draft it gets `norm(x)` of
its own instead. Sources: DeepSeek-V3 (2412.19437), section 2.2, and the engines that run it: vLLM gives the layer the
model's normed state (deepseek_mtp, glm4_moe_mtp, qwen3_next_mtp); for further tokens SGLang gives it its own normed
state in all families, vLLM in Qwen3-Next's, while its DeepSeek and GLM pass the state before that norm. We take the
normed one, because the layer was trained on normed states.

The layer's cache follows the model's sequence: the prompt enters it too, pass by pass. Hidden states of later tokens
wait, and run together when a draft is wanted or many wait, so that a text without drafts loses little time: together,
tokens share experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_pack.formats.families import prediction
from moe_pack.formats.parts.specs import cache_values
from moe_pack.runtime import model
from moe_pack.runtime.drafts import prediction_weights
from moe_pack.runtime.model import caches, kv_cache, layers
from moe_pack.runtime.model.compute.weights import norm

WAITING_TOKENS = 64  # whose hidden states wait at most
_LEAST_PROMPT = 16  # tokens of a pass over a prompt; passes over drafts are shorter
_FLOAT_BYTES = 4


def prediction_bytes(layer: prediction.PredictionLayer, context_tokens: int) -> int:
    """Returns the memory of a `PredictionDrafter`: weights, keys and values, and hidden states that wait."""
    cached = cache_values(layer.spec, context_tokens, WAITING_TOKENS) + WAITING_TOKENS * layer.spec.hidden_size
    return prediction_weights.loaded_bytes(layer) + _FLOAT_BYTES * cached


class PredictionDrafter:
    """Drafts of one sequence by a prediction layer. It is a `Drafter`, and the sequence's `Follower`.

    `num_bytes`: of its memory, which it takes at once.
    Args:    context_tokens: the longest sequence.   chunk_tokens: the most tokens for which the layer runs at once.
    """

    needs_hidden = False  # it gets those of all tokens by `follow`

    def __init__(self, weights: prediction_weights.PredictionWeights, context_tokens: int, chunk_tokens: int) -> None:
        self._weights, device = weights, torch.device("cpu")
        self._step = min(chunk_tokens, WAITING_TOKENS)
        spec = weights.spec
        self._cache = kv_cache.KVCache(spec, context_tokens, device, chunk_tokens=WAITING_TOKENS)
        self._sequence = kv_cache.CachedSequence(spec, self._cache, caches.LayerRopes(spec, device))
        self._waiting = torch.zeros((WAITING_TOKENS, spec.hidden_size))  # hidden states that have not run
        self._num_waiting = 0
        self._begin = 0  # the position in the text of the first key
        self.num_bytes = weights.num_bytes + self._cache.num_bytes + self._waiting.nbytes

    def follow(self, ids: Sequence[int], first: int, hidden: Tensor) -> None:
        """Takes note of tokens that the model has run, and of their hidden states.

        A position that ran before runs again: what the layer has of it and of later ones is dropped.
        Args:    ids: the whole sequence, to which the tokens belong.   first: the position of the first of them.
                 hidden: float32 [T, d], after the last layer and before the final norm.
        """
        self._cut_to(first)
        for start in range(0, len(hidden), WAITING_TOKENS):
            piece = hidden[start : start + WAITING_TOKENS]
            if self._num_waiting + len(piece) > WAITING_TOKENS:
                self._run_waiting(ids, self._num_waiting)
            self._waiting[self._num_waiting : self._num_waiting + len(piece)] = piece
            self._num_waiting += len(piece)
        if len(hidden) > _LEAST_PROMPT:  # the token after its last one is not known yet
            self._run_waiting(ids, self._num_waiting - 1)

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        """Returns the tokens that are most likely to follow by the layer, at most `most`.

        Args:    ids, most: as for `logits`.
        """
        return [int(each) for each in self.logits(ids, most).argmax(dim=1)]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], most: int) -> Tensor:
        """Returns the logits of the tokens of a draft, each after the most likely one before it.

        Args:    ids: the whole sequence that the layer follows, the token that was chosen last at its end.
        Returns: float32 [n, vocabulary], n at most `most`; 0 if the layer lacks hidden states, or places for keys.
        """
        number = len(ids) - 1 - self._first_waiting
        most = min(most, self._cache.context_tokens - (len(ids) - 1 - self._begin) + 1)
        if most < 1 or not 1 <= number <= self._num_waiting:
            return torch.empty((0, self._weights.spec.vocab_size))
        x = self._run_waiting(ids, number)
        num_kept, rows = self._cache.num_tokens, [model.head(x, self._weights)]
        while len(rows) < most:
            x = self._run([int(rows[-1].argmax())], norm(x, self._weights, "norm"))
            rows.append(model.head(x, self._weights))
        self._cache.num_tokens = num_kept
        return torch.cat(rows)

    def accepted(self, number: int) -> None:
        """Does nothing: keys of drafts are never kept, and the model's hidden states follow."""

    def reset(self) -> None:
        """Does nothing: `follow` says where a text is another, and what it has in common with the last one stays."""

    # ---- positions --------------------------------------------------------------------------------------------------

    @property
    def _first_waiting(self) -> int:
        """The position of the first hidden state that waits."""
        return self._begin + self._cache.num_tokens

    def _cut_to(self, first: int) -> None:
        """Drops what follows a position. After a gap the layer begins again there.

        The key before `first` stays, although the token after it may be another now: one key of many is no reason to
        run the model again.
        """
        if first < self._begin or first > self._first_waiting + self._num_waiting:
            self._cache.num_tokens = self._num_waiting = 0
            self._begin = first
        elif first >= self._first_waiting:
            self._num_waiting = first - self._first_waiting
        else:
            self._cache.num_tokens, self._num_waiting = first - self._begin, 0

    # ---- the layer --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run_waiting(self, ids: Sequence[int], number: int) -> Tensor:
        """Runs the first hidden states that wait; returns the layer's own of the last of them, float32 [1, d]."""
        first, main, waiting = self._first_waiting, self._weights.main, self._waiting
        x = waiting[:0]
        for start in range(0, number, self._step):
            stop = min(start + self._step, number)
            tokens = list(ids[first + start + 1 : first + stop + 1])
            x = self._run(tokens, norm(waiting[start:stop], main, "norm"))
        self._num_waiting -= number
        waiting[: self._num_waiting] = waiting[number : number + self._num_waiting].clone()
        return x[-1:]

    def _run(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Runs the layer for tokens and the normed hidden states before them; returns its own, float32 [T, d]."""
        weights, cache = self._weights, self._cache
        start, tokens = cache.num_tokens, torch.tensor(ids)
        both = (
            norm(model.embed(tokens, weights), weights, prediction.EMBED_NORM),
            norm(hidden, weights, prediction.HIDDEN_NORM),
        )
        x = model.linear(torch.cat(both, dim=1), weights.matrix(prediction.PROJECT))
        (angles,) = self._sequence.angles_at(start, start + len(ids), start + len(ids))
        x = model.add_attention(x, weights, 0, cache.of(0), angles)
        inputs = model.mlp_input(x, weights, 0)
        experts, router_weights = model.route_tokens(inputs, weights, 0, tokens)
        routed = model.run_experts(inputs, experts, router_weights, weights, 0)
        x = layers.enter_second(x, layers.run_unrouted(inputs, weights, 0), routed, weights, 0)
        cache.num_tokens = start + len(ids)
        return x
