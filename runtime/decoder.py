"""The decoder: the whole forward pass, in plain torch, over any source of weights.

    x = embed(ids);  each layer: x += attention(norm(x)),  x += experts(norm(x));  logits = head(norm(x))

Hidden state, router logits and all sums are float32. Everything faster is tested against this.
"""

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.attention import KVCache, Rope, attend, visible
from moe_pack.runtime.expert import run_expert
from moe_pack.runtime.matrix import gather_rows, linear
from moe_pack.runtime.router import route
from moe_pack.runtime.weights import Weights

PREFILL_TOKENS = 512  # tokens a forward pass at most: bounds attention scores and hidden states


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, float32."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Decoder:
    """A model at work: weights, and a key-value cache for one sequence.

    Args:    context_tokens: the longest sequence, prompt and continuation together.
    Raises:  RunError if that is more than the model's positions.
    """

    def __init__(self, weights: Weights, context_tokens: int, device: torch.device | None = None) -> None:
        spec = weights.spec
        if not 0 < context_tokens <= spec.max_position_embeddings:
            raise RunError(
                f"context of {context_tokens} tokens; this model has {spec.max_position_embeddings} positions"
            )
        self.spec = spec
        self.device = device or torch.device("cpu")
        self.cache = KVCache(spec, context_tokens, self.device)
        self._weights = weights
        self._rope = Rope(spec.rope, spec.attention.head_dim, self.device)

    def reset(self) -> None:
        """Forgets the sequence; the cache stays allocated."""
        self.cache.num_tokens = 0

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns each one's prediction of the next, float32 [T, vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        return torch.cat([self._head(hidden) for hidden in self._forward(ids)])

    def next_logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the prediction after the last, float32 [vocabulary]."""
        last = None
        for hidden in self._forward(ids):
            last = hidden[-1:]
        assert last is not None, "at least one token"
        return self._head(last)[0]

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> list[Tensor]:
        if self.cache.num_tokens + len(ids) > self.cache.context_tokens:
            raise RunError(f"context is full: {self.cache.context_tokens} tokens")
        if ids and not 0 <= min(ids) <= max(ids) < self.spec.vocab_size:
            raise RunError(f"token {max(ids)} is not in the model's vocabulary of {self.spec.vocab_size}")
        chunks = [ids[start : start + PREFILL_TOKENS] for start in range(0, len(ids), PREFILL_TOKENS)]
        return [self._chunk(torch.tensor(chunk)) for chunk in chunks]

    def _chunk(self, ids: Tensor) -> Tensor:
        """The hidden state after the last layer, float32 [T, d]."""
        start, num_tokens, spec = self.cache.num_tokens, len(ids), self.spec
        x = gather_rows(self._weights.matrix("embed"), ids)
        angles = self._rope(torch.arange(start, start + num_tokens, device=self.device))
        mask = visible(start, num_tokens, spec.attention.sliding_window, self.device)
        for layer in range(spec.num_hidden_layers):
            normed = self._norm(x, f"layers.{layer}.attention_norm")
            x = x + attend(normed, self._weights, layer, self.cache, angles, mask)
            normed = self._norm(x, f"layers.{layer}.experts_norm")
            x = x + self._experts(normed, layer)
        self.cache.num_tokens += num_tokens
        return x

    def _experts(self, x: Tensor, layer: int) -> Tensor:
        """The routed experts of a layer for normed hidden states [T, d]; each expert is brought once."""
        spec, layer_idx = self.spec, self.spec.moe_layers.index(layer)
        experts, weights = route(linear(x, self._weights.matrix(f"layers.{layer}.router")), spec.router)
        y = torch.zeros_like(x)
        for expert in sorted(set(experts.flatten().tolist())):  # rising, so that sums are made in one order
            token_idx, place = torch.where(experts == expert)
            output = run_expert(
                x[token_idx],
                self._weights.expert(layer_idx, expert),
                spec.expert.function,
                self._weights.selector,
                self._weights.threshold(layer_idx, expert),
            )
            y[token_idx] += weights[token_idx, place, None] * output
        return y

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        role = "embed" if self.spec.tied_head else "head"
        return linear(self._norm(hidden, "norm"), self._weights.matrix(role))

    def _norm(self, x: Tensor, role: str) -> Tensor:
        return rms_norm(x, self._weights.vector(role), self.spec.norm_eps)
