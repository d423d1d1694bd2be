"""The attention of a layer for whole sequences of one length, each from an empty context: of both kinds of models."""

from dataclasses import replace

import torch
from torch import Tensor

from moe_pack.calib.sequences import stack_of
from moe_pack.runtime import (
    KVCache,
    Rope,
    Weights,
    add_attention,
    add_cross_attention,
    add_own_attention,
    enter_text,
    position_bias,
)


class SequenceAttention:
    """The first half of layers.

    Args:    sequence_length: tokens of a sequence in a stack, n.
    """

    def __init__(self, weights: Weights, sequence_length: int, device: torch.device) -> None:
        self._spec = weights.spec
        self._sequence_length = sequence_length
        self._device = device
        if weights.spec.encoder is None:
            positions = torch.arange(sequence_length, device=device)
            self._angles = Rope(weights.spec.rotation, device)(positions, sequence_length)
        else:
            self._biases = tuple(position_bias(weights, sequence_length, is_encoder) for is_encoder in (True, False))

    def added(self, x: Tensor, weights: Weights, layer: int, text: Tensor | None) -> Tensor:
        """Hidden states float32 [n, d] with a layer's attention added.

        Args:    text: what a layer of a decoder after an encoder attends to, the encoder's output float32 [n, d].
        """
        cache = self._cache().layer(0)
        if self._spec.encoder is None:
            return add_attention(x, weights, layer, cache, self._angles)
        x = add_own_attention(x, weights, layer, cache, self._biases[stack_of(self._spec, layer)])
        if text is None:
            return x
        read = self._cache().layer(0)
        enter_text(text, weights, layer, read, len(text))
        return add_cross_attention(x, weights, layer, replace(read, num_tokens=len(text)))

    def _cache(self) -> KVCache:
        return KVCache(self._spec, self._sequence_length, self._device, num_layers=1)
