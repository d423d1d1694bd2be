"""Models with an encoder: the encoder reads a whole text, and the decoder answers it token by token.

    x = embed(text);    each encoder layer: x += attention(norm(x)),  x += mlp(norm(x));    read = norm(x)
    x = embed(answer);  each decoder layer: x += attention(norm(x)),  x += cross(norm(x), read),  x += mlp(norm(x))

All tokens of a pass go through a layer together, because the capacity of an expert counts the tokens of a pass, and
because each expert is then brought once. Attention and everything that runs for each token alone are computed in
pieces, which bounds their memory.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model import caches, kv_cache, layers
from moe_pack.runtime.model.attention import relative
from moe_pack.runtime.model.compute.operations import row_blocks
from moe_pack.runtime.model.compute.softmax import joined
from moe_pack.runtime.model.compute.weights import Weights, norm
from moe_pack.runtime.model.residuals import scaled


def add_own_attention(
    x: Tensor,
    weights: Weights,
    layer: int,
    cache: caches.LayerCache,
    bias: relative.PositionBias,
    chunk_tokens: int = layers.PREFILL_TOKENS,
) -> Tensor:
    """Adds a layer's attention to its own stack, to hidden states float32 [T, d], a chunk of queries at a time."""
    spec, role, start = relative.spec_of(weights), f"layers.{layer}.attention", cache.num_tokens
    normed = torch.split(norm(x, weights, f"layers.{layer}.attention_norm"), chunk_tokens)
    firsts = range(start, start + len(x), chunk_tokens)
    for piece, first in zip(normed, firsts, strict=True):
        relative.enter_keys(piece, weights, spec, role, cache, first)
    seen = replace(cache, num_tokens=start + len(x))
    pieces = [
        relative.attend_keys(p, weights, spec, role, seen, bias, first) for p, first in zip(normed, firsts, strict=True)
    ]
    return x + scaled(joined(pieces), weights.spec.residual_multiplier)


def add_cross_attention(
    x: Tensor, weights: Weights, layer: int, read: caches.LayerCache, chunk_tokens: int = layers.PREFILL_TOKENS
) -> Tensor:
    """Adds a decoder layer's attention to the text to hidden states float32 [T, d]; `read` has the text's keys."""
    spec, role = relative.spec_of(weights), f"layers.{layer}.cross"
    normed = torch.split(norm(x, weights, f"layers.{layer}.cross_norm"), chunk_tokens)
    pieces = [relative.attend_keys(piece, weights, spec, role, read, None) for piece in normed]
    return x + scaled(joined(pieces), weights.spec.residual_multiplier)


def enter_text(encoded: Tensor, weights: Weights, layer: int, read: caches.LayerCache, chunk_tokens: int) -> None:
    """Writes a decoder layer's keys and values of the text into `read`; `encoded` is float32 [S, d]."""
    for first in range(0, len(encoded), chunk_tokens):
        piece = encoded[first : first + chunk_tokens]
        relative.enter_keys(piece, weights, relative.spec_of(weights), f"layers.{layer}.cross", read, first)


class EncoderDecoder:
    """A model with an encoder that runs: weights, one encoded text, and the caches of its answer.

    `cache` has the keys and values of the answer, `read` those of the text; both are for `context_tokens`. `encode`
    comes first.
    Args:    chunk_tokens: the most tokens that are computed at a time where tokens do not depend on each other.
    Raises:  RunError if the context is longer than the model's.
    """

    def __init__(
        self,
        weights: Weights,
        context_tokens: int,
        device: torch.device | None = None,
        chunk_tokens: int = layers.PREFILL_TOKENS,
    ) -> None:
        self.spec = spec = weights.spec
        assert spec.encoder is not None, "Decoder runs models without one"
        layers.check_context(context_tokens, spec)
        self.device = device or torch.device("cpu")
        self._num_encoder_layers = spec.encoder.num_layers
        self._start_token = spec.encoder.start_token
        num_decoder_layers = spec.num_hidden_layers - self._num_encoder_layers
        self.cache = kv_cache.KVCache(spec, context_tokens, self.device, num_decoder_layers)
        self.read = kv_cache.KVCache(spec, context_tokens, self.device, num_decoder_layers)
        self._weights = weights
        self._chunk_tokens = chunk_tokens
        self._encoder_bias = relative.position_bias(weights, context_tokens, is_encoder=True)
        self._decoder_bias = relative.position_bias(weights, context_tokens, is_encoder=False)

    def reset(self) -> None:
        """Forgets the text and its answer; the caches stay allocated."""
        self.cache.num_tokens = self.read.num_tokens = 0

    def begin(self, text_ids: list[int]) -> Tensor:
        """Encodes a text; returns the logits of the first token of its answer, float32 [vocabulary]."""
        self.encode(text_ids)
        return self.next_logits([self._start_token])

    @torch.inference_mode()
    def encode(self, text_ids: list[int]) -> None:
        """Encodes a text in one pass; it replaces the text before and its answer.

        Raises:  RunError if the text is longer than the context, empty, or has a token that is not in the vocabulary.
        """
        self.reset()
        if not 0 < len(text_ids) <= self.read.context_tokens:
            raise RunError(f"the text has {len(text_ids)} tokens; give 1 to {self.read.context_tokens}, the context")
        layers.check_vocabulary(text_ids, self.spec)
        x = layers.embed(torch.tensor(text_ids), self._weights)
        # The encoder's layers need keys for a moment only: they take the place of decoder layer 0's, which come last.
        attend = partial(self._attend_text, scratch=replace(self.read.layer(0), num_tokens=0))
        for layer in range(self._num_encoder_layers):
            x = attend(x, layer)
            x = self._add_mlp(x, layer, self._num_encoder_layers, attend)
        encoded = norm(x, self._weights, "encoder_norm")
        for idx in range(self.spec.num_hidden_layers - self._num_encoder_layers):
            layer = self._num_encoder_layers + idx
            enter_text(encoded, self._weights, layer, self.read.layer(idx), self._chunk_tokens)
        self.read.num_tokens = len(text_ids)

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens, first `start_token`, to the answer; returns the logits after each, float32 [T, vocabulary].

        Raises:  RunError if no text is encoded, the context is full, or a token is not in the vocabulary.
        """
        return self._head(self._decode(ids))

    def next_logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the answer; returns the logits after the last, float32 [vocabulary]."""
        assert ids, "at least one token"
        return self._head(self._decode(ids)[-1:])[0]

    @torch.inference_mode()
    def _decode(self, ids: list[int]) -> Tensor:
        if not self.read.num_tokens:
            raise RunError("there is no text to answer; encode one first")
        if self.cache.num_tokens + len(ids) > self.cache.context_tokens:
            raise RunError(f"the context of {self.cache.context_tokens} tokens is full")
        layers.check_vocabulary(ids, self.spec)
        x = layers.embed(torch.tensor(ids), self._weights)
        for layer in range(self._num_encoder_layers, self.spec.num_hidden_layers):
            x = self._attend_answer(x, layer)
            x = self._add_mlp(x, layer, self.spec.num_hidden_layers, self._attend_answer)
        self.cache.num_tokens += len(ids)
        return x

    def _attend_text(self, x: Tensor, layer: int, scratch: caches.LayerCache) -> Tensor:
        return add_own_attention(x, self._weights, layer, scratch, self._encoder_bias, self._chunk_tokens)

    def _attend_answer(self, x: Tensor, layer: int) -> Tensor:
        weights, chunk, idx = self._weights, self._chunk_tokens, layer - self._num_encoder_layers
        x = add_own_attention(x, weights, layer, self.cache.layer(idx), self._decoder_bias, chunk)
        return add_cross_attention(x, weights, layer, self.read.layer(idx), chunk)

    def _add_mlp(self, x: Tensor, layer: int, end: int, attend: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Adds the layer's experts, or its dense expert; `end` is the layer after the stack's last."""
        weights, most, after, partial = self._weights, self._chunk_tokens, layer + 1, None
        if after < end:
            partial = layers.partial_state(x, weights, layer, lambda y: attend(y, after), most)
        return layers.add_mlp(x, weights, layer, None, partial, most)

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        spec = self.spec
        pieces = [
            layers.head(hidden[first:last], self._weights) for first, last in row_blocks(len(hidden), spec.vocab_size)
        ]
        return joined(pieces)
