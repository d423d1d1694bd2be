"""What attention keeps of earlier tokens, allocated once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, LatentSpec, ModelSpec, cached_tokens


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's keys and values [heads, places, width], after `num_tokens` positions.

    Position `p` lies in place `p % places`: with fewer places than positions it is a ring, and the last are held.
    """

    keys: Tensor
    values: Tensor
    num_tokens: int

    def enter(self, keys: Tensor, values: Tensor) -> None:
        """Puts in the keys and values [heads, T, width] of new tokens, no more than there are places."""
        places = self._places(self.num_tokens, self.num_tokens + keys.shape[1])
        self.keys[:, places], self.values[:, places] = keys.to(self.keys.dtype), values.to(self.values.dtype)

    def held(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `start` to `stop`, float32 [heads, stop - start, width]: copies or views."""
        places = self._places(start, stop)
        return self.keys[:, places].float(), self.values[:, places].float()

    def _places(self, start: int, stop: int) -> slice | Tensor:
        num_places = self.keys.shape[1]
        assert stop - start <= num_places, f"positions {start} to {stop} in {num_places} places"
        first = start % num_places
        if first + stop - start <= num_places:
            return slice(first, first + stop - start)
        return torch.arange(start, stop, device=self.keys.device) % num_places


class KVCache:
    """Keys and values of every layer [heads, places, width], float32 or bfloat16, allocated whole.

    Each layer has `cached_tokens` places: the whole context, or what its sliding window needs. Latent attention keeps
    one vector a token and layer: the latent, then the rotated key; the latent is the value of its one head, so that
    `values` are views of `keys`. `is_ring`: some layer keeps less than the whole context.

    Args:    context_tokens: the most positions it will ever hold.   chunk_tokens: the most that enter at once; None:
             any number.   num_layers: the model's, unless given: then so many, which keep the whole context.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context_tokens: int,
        device: torch.device,
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        chunk_tokens: int | None = None,
    ) -> None:
        chunk = context_tokens if chunk_tokens is None else chunk_tokens
        if num_layers is None:
            places = [cached_tokens(spec, layer, context_tokens, chunk) for layer in range(spec.num_hidden_layers)]
        else:
            places = [context_tokens] * num_layers
        self.device, self.dtype = device, dtype
        attention = spec.attention
        if isinstance(attention, LatentSpec):
            width = attention.kv_lora_rank + attention.qk_rope_head_dim
            self.keys = tuple(torch.zeros((1, number, width), dtype=dtype, device=device) for number in places)
            self.values = tuple(held[..., : attention.kv_lora_rank] for held in self.keys)
            self.num_bytes = sum(held.nbytes for held in self.keys)
        else:
            heads = attention.num_kv_heads if isinstance(attention, GroupedQuerySpec) else attention.num_heads
            shapes = [(heads, number, attention.head_dim) for number in places]
            self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            self.num_bytes = sum(held.nbytes for held in (*self.keys, *self.values))
        self.is_ring = min(places) < context_tokens
        self.context_tokens = context_tokens
        self.num_tokens = 0

    def layer(self, idx: int) -> LayerCache:
        """A layer's share, into which its attention writes."""
        return LayerCache(self.keys[idx], self.values[idx], self.num_tokens)
