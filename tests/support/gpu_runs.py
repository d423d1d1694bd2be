"""The graph engine over plain memory: Triton's interpreter runs its kernels, and CPU tensors are the GPU's memory."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.device import HostArena
from moe_pack.runtime.gpu.graph_engine import GraphDecoder, GraphEngine
from moe_pack.runtime.gpu.placement import least_placement
from moe_pack.runtime.model import Decoder, PackWeights

CPU = torch.device("cpu")
# The project's bound on logits, maximum absolute; sums in another order differ by some 1e-6.
TOLERANCE = 1e-4
PROMPT, NUM_ALONE = 2, 2
IDS = [(37 * i + 5) % 96 for i in range(PROMPT + NUM_ALONE)]


def expert_bytes_for(pack: Pack, share: float) -> int:
    """Returns bytes for a share of all experts, beyond the least that an engine runs in; 1 is enough for all."""
    total = sum(expert.num_bytes for layer in pack.layout.experts for expert in layer)
    least = least_placement(pack.layout)
    return least.num_bytes + round(share * (total + least.other_bytes))


@contextmanager
def graph_decoder(
    folder: Path,
    share: float,
    context_tokens: int = 64,
    chunk_tokens: int = 16,
    cache_dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Iterator[GraphDecoder]:
    """Builds the graph engine with memory for a share of experts; see `expert_bytes_for`."""
    with Pack(folder) as pack, HostArena(pack, device) as host:
        expert_bytes = expert_bytes_for(pack, share)
        with closing(GraphEngine(pack, host, device, expert_bytes, context_tokens, chunk_tokens, cache_dtype)) as built:
            built.prepare()
            yield built.decoder


def reference_logits(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    """Returns a pack's logits, in plain torch."""
    with Pack(folder) as pack:
        return Decoder(PackWeights(pack, CPU), 64).logits(ids)


def graph_logits(
    folder: Path, share: float, ids: list[int] = IDS, num_prompt: int = PROMPT, chunk_tokens: int = 16
) -> torch.Tensor:
    """Returns logits of a prompt, then of one token after the other, by the graph engine."""
    with graph_decoder(folder, share, chunk_tokens=chunk_tokens) as decoder:
        pieces = [decoder.logits(ids[:num_prompt])] if num_prompt else []
        return torch.cat([*pieces, *(decoder.logits([token]) for token in ids[num_prompt:])])
