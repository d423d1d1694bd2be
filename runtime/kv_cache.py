"""What attention keeps of earlier tokens, allocated once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, LatentSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values [heads, context, width], of which the first `num_tokens` are held."""

    keys: Tensor
    values: Tensor
    num_tokens: int


class KVCache:
    """Keys and values of every layer [layers, heads, context, width], float32 or bfloat16, allocated whole.

    Latent attention keeps one vector a token and layer: the latent, then the rotated key; the latent is the value of
    its one head, so that `values` is a view of `keys`.

    Args:    context_tokens: the most positions it will ever hold.   num_layers: the model's, unless given.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context_tokens: int,
        device: torch.device,
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        attention = spec.attention
        num_layers = spec.num_hidden_layers if num_layers is None else num_layers
        if isinstance(attention, LatentSpec):
            width = attention.kv_lora_rank + attention.qk_rope_head_dim
            self.keys = torch.zeros((num_layers, 1, context_tokens, width), dtype=dtype, device=device)
            self.values = self.keys[..., : attention.kv_lora_rank]
            self.num_bytes = self.keys.nbytes
        else:
            heads = attention.num_kv_heads if isinstance(attention, GroupedQuerySpec) else attention.num_heads
            shape = (num_layers, heads, context_tokens, attention.head_dim)
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
            self.num_bytes = 2 * self.keys.nbytes
        self._layers = tuple(zip(self.keys, self.values, strict=True))  # views, made once
        self.context_tokens = context_tokens
        self.num_tokens = 0

    def layer(self, idx: int) -> LayerCache:
        """A layer's share, into which its attention writes."""
        return LayerCache(*self._layers[idx], self.num_tokens)
