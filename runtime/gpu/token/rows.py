"""The rows of a pass of few tokens on a GPU, and the caches of the sequences that they belong to.

A row is a token with its position and its *slot*, the number of its sequence. A pass has one token of each of several
sequences, or several tokens of one (drafts), or both; rows of a sequence follow each other. Launches read all of it in
the GPU's memory, so that one CUDA graph serves any rows of their number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.parts import specs
from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenStates
from moe_pack.runtime.model.attention import kinds
from moe_pack.runtime.model.caches import KvDtype, LayerState, layer_cache, states
from moe_pack.runtime.model.kv_cache import KVCache


class TokenRows(NamedTuple):
    """The rows of a pass, int32 [T] each on the device."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor


class TokenCaches:
    """The caches of all layers for several sequences, stacked: a slot is an index of their first dimension.

    Args:    context_tokens, chunk_tokens, dtype: as of `KVCache`.
    """

    def __init__(
        self,
        spec: formats.ModelSpec,
        context_tokens: int,
        device: torch.device,
        dtype: KvDtype,
        chunk_tokens: int,
        num_slots: int,
    ) -> None:
        self.spec, self.context_tokens, self.device, self.dtype = spec, context_tokens, device, dtype
        self._chunk_tokens = chunk_tokens
        self.layers: list[layer_cache.StackedCache] = []
        for layer in range(spec.num_hidden_layers):
            shape = kinds.cache_shape(spec.attention_of(layer), dtype)
            assert shape.entries is None, "compressed attention runs on the CPU"
            places = specs.cached_tokens(spec, layer, context_tokens, chunk_tokens)
            self.layers.append(shape.stacked(num_slots, places, device))
        self._states = states.stacked_states(spec, num_slots, device)

    def states_of(self, layer: int, rows: TokenRows) -> TokenStates:
        """Returns the states of a layer with a mixer, for the rows of a pass."""
        state = self._states[layer]
        return TokenStates(state.conv, state.recurrent, rows.slots)

    def sequences(self) -> list[KVCache]:
        """Returns the cache of each sequence, which shares this memory."""
        of_layers = [list(stacked.slots()) for stacked in self.layers]
        num_slots = len(of_layers[0])
        found = []
        for slot in range(num_slots):
            mixers = {
                layer: LayerState(state.conv[slot], state.recurrent[slot]) for layer, state in self._states.items()
            }
            memory = [layer[slot] for layer in of_layers], mixers
            sizes = (self.context_tokens, self.device)
            found.append(KVCache(self.spec, *sizes, dtype=self.dtype, chunk_tokens=self._chunk_tokens, memory=memory))
        return found
