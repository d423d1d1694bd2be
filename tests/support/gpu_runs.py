"""The GPU's engine over plain memory: Triton's interpreter runs its kernels, and CPU tensors are the GPU's memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from moe_pack.formats import Pack
from moe_pack.formats.pack.slices import PackSlice
from moe_pack.runtime.gpu.cpu_share import MEASURED_TOKENS, Rates
from moe_pack.runtime.gpu.devices import HostArena
from moe_pack.runtime.gpu.placements import DYNAMIC_SHARE, Misses, least_placement
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.gpu.token.engine import GpuEngine, GpuInputs
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.model import Decoder, ExpertRunner, NativeOperations, PackWeights
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import Sequences
from support.native import kernels_limited_to

CPU = torch.device("cpu")
# The project's bound on logits, maximum absolute; sums in another order differ by some 1e-6.
TOLERANCE = 1e-4
PROMPT, NUM_ALONE = 2, 2
IDS = [(37 * i + 5) % 96 for i in range(PROMPT + NUM_ALONE)]


@dataclass(frozen=True, slots=True)
class GpuRun:
    """How to run a pack. `share`: of all experts' bytes that fit; 1 is enough for all.

    `misses`, `pulled_share`, `by_expert`, `dynamic_share`, `is_fast`, `prediction`, `alpha`, `offset_bytes`,
    `few_tokens`, `num_rows`: as in `GpuInputs`.
    `cpu_share`: the time in which the CPU computes a missing expert for a token, where 1 is that in which the link
    brings it, in passes of many tokens; None: all are copied.
    """

    share: float
    misses: Misses = "split"
    pulled_share: float = 0.5
    by_expert: bool = False
    chunk_tokens: int = 16
    context_tokens: int = 64
    cache_dtype: KvDtype = "f32"
    dynamic_share: float = DYNAMIC_SHARE
    cpu_share: float | None = None
    is_fast: bool = False
    prediction: PredictionPlan | None = None
    alpha: float | None = None
    offset_bytes: int = 4
    few_tokens: int = 1
    num_sequences: int = 1
    num_rows: int = 1


def expert_bytes_for(pack: Pack, share: float, misses: Misses = "split") -> int:
    """Returns bytes for a share of all experts, beyond the least that an engine runs in; 1 is enough for all."""
    total = sum(expert.num_bytes for layer in pack.layout.experts for expert in layer)
    least = least_placement(pack.layout, misses)
    return least.num_bytes + round(share * (total + least.other_bytes))


def _rates(cpu_share: float) -> Rates:
    return Rates(link=1.0, cpu=1.0, prompt=tuple(cpu_share * number for number in MEASURED_TOKENS))


@contextmanager
def gpu_engine(folder: Path, run: GpuRun, device: torch.device = CPU) -> Iterator[GpuEngine]:
    with Pack(folder) as pack, engine_of(pack, run, device) as built:
        yield built


@contextmanager
def engine_of(pack: Pack, run: GpuRun, device: torch.device = CPU) -> Iterator[GpuEngine]:
    with ExitStack() as stack:
        host: HostArena | None = None
        tier: ExpertRunner | None = None
        kernels = kernels_limited_to("portable")
        if run.misses == "disk":
            tier = MappedPackWeights(pack, NativeOperations(kernels))
        else:
            host = stack.enter_context(HostArena(pack, device))
        inputs = GpuInputs(
            pack=pack, device=device, misses=run.misses, host=host, tier=tier,
            kernels=None if run.misses == "pull" else kernels,
            rates=None if run.cpu_share is None else _rates(run.cpu_share), pulled_share=run.pulled_share,
            popularity=np.ones(pack.index.size.shape),
            dynamic_share=run.dynamic_share, is_fast=run.is_fast,
            prediction=run.prediction, alpha=run.alpha, by_expert=run.by_expert, offset_bytes=run.offset_bytes,
            few_tokens=run.few_tokens, sequences=Sequences(run.num_sequences), num_rows=run.num_rows,
        )  # fmt: skip
        expert_bytes = expert_bytes_for(pack, run.share, run.misses)
        with closing(GpuEngine(inputs, expert_bytes, run.context_tokens, run.chunk_tokens, run.cache_dtype)) as built:
            built.prepare()
            yield built


@contextmanager
def gpu_decoder(folder: Path, run: GpuRun, device: torch.device = CPU) -> Iterator[GpuDecoder]:
    """Builds the engine, and gives its decoder."""
    with gpu_engine(folder, run, device) as built:
        yield built.decoder


@contextmanager
def staged_decoder(
    folder: Path,
    run: GpuRun,
    ends: Sequence[int],
    num_checkpoints: int = 0,
    on_device: Callable[[int], AbstractContextManager[object]] = lambda number: nullcontext(),
) -> Iterator[GpuDecoder]:
    """Builds an engine for the layers up to each end, and gives the decoder of the whole model.

    Args:    on_device: makes the device of a stage the current one.
    """
    with ExitStack() as stack:
        pack, decoders = stack.enter_context(Pack(folder)), list[GpuDecoder]()
        for number, (first, last) in enumerate(pairwise((0, *ends))):
            with on_device(number):
                built = stack.enter_context(engine_of(PackSlice(pack, first, last), run))
            decoders.append(built.decoder)
        decoders[-1].join(decoders[:-1], pack.spec, num_checkpoints)
        yield decoders[-1]


def reference_logits(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    with Pack(folder) as pack:
        return Decoder(PackWeights(pack, CPU), max(64, len(ids))).logits(ids)


def gpu_logits(folder: Path, run: GpuRun, ids: list[int] = IDS, num_prompt: int = PROMPT) -> torch.Tensor:
    """Returns logits of a prompt, then of one token after the other."""
    with gpu_decoder(folder, run) as decoder:
        pieces = [decoder.logits(ids[:num_prompt])] if num_prompt else []
        return torch.cat([*pieces, *(decoder.logits([token]) for token in ids[num_prompt:])])
