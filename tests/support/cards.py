"""The graph engine over plain memory: its kernels run by the interpreter, what a card holds in CPU tensors."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from moe_pack.formats import Pack
from moe_pack.runtime.card_cache import CardCache
from moe_pack.runtime.card_placement import CardPlacement, least_placement, place_experts
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.graph import GraphDecoder
from moe_pack.runtime.host_arena import HostArena

CPU = torch.device("cpu")


def placement_of(pack: Pack, share: float) -> CardPlacement:
    """Room for that share of all experts' bytes, beyond the least that an engine runs in; 1: for all."""
    least = least_placement(pack.layout)
    total = sum(expert.num_bytes for layer in pack.layout.experts for expert in layer)
    most = total + least.num_bytes
    return place_experts(pack.layout, least.num_bytes + round(share * (most - least.num_bytes)))


@contextmanager
def graph_decoder(
    folder: Path,
    share: float,
    context_tokens: int = 64,
    chunk_tokens: int = 16,
    cache_dtype: torch.dtype = torch.float32,
) -> Iterator[GraphDecoder]:
    """A pack at work in so much room; see `placement_of`."""
    with Pack(folder) as pack, HostArena(pack, CPU) as host:
        with closing(CardCache(pack, placement_of(pack, share), host, CPU)) as cache:
            weights = CardWeights(pack, CPU, cache, chunk_tokens)
            yield GraphDecoder(weights, context_tokens, CPU, chunk_tokens, cache_dtype)
