"""A pack on a card inside a budget: what else takes memory is measured, and the rest is the experts'.

Nothing is assumed of what driver, kernels and forward passes take. An engine is first put together with as little room
for experts as it runs in. It runs every kernel that it will ever launch, and its longest passes, and is measured; what
the budget leaves is the room of the engine that stays.
"""

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from moe_pack.formats import ExpertLayout, Pack, RunError, size_text
from moe_pack.runtime.model import Decoder, PackWeights, linear, run_experts
from moe_pack.runtime.offload.budget import AS_BUDGET, GpuCosts, divide_gpu, gpu_needs

_ROUNDING_BYTES = 4 << 20  # the driver gives memory in pieces of 2 MiB
# Left free where no budget was asked for: a card may drive a display, and its next allocation is not to fail.
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 0.03, 256 << 20
_LENGTH_STEP = 16  # tokens: fewer make no other kernel (kernels.gemm, kernels.expert_many)
# What torch allocates has a piece of the driver's memory of its own from so many bytes on; what is smaller shares
# pieces of 20 MiB with others, of which there may be one more than was measured.
_OWN_PIECE_BYTES, _SHARED_PIECE_BYTES = 10 << 20, 20 << 20


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What was asked for: `budget_bytes` of the card for everything, None for all that is free.

    `chunk_tokens`: of a forward pass of a prompt, at most; None: as the budget allows.   `cache_dtype`: of keys and
    values.
    """

    budget_bytes: int | None
    context_tokens: int
    chunk_tokens: int | None
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GpuMemoryUse:
    """What a card's memory is spent on, in bytes. `overhead`: measured, all that is none of the others.

    `pages`: of `experts`, what comes and goes; the rest of it is always there.
    """

    budget: int
    dense: int
    cache: int
    experts: int
    pages: int
    overhead: int

    @property
    def spent(self) -> int:
        """All together."""
        return self.dense + self.cache + self.experts + self.overhead


@dataclass(frozen=True, slots=True)
class GpuCacheCounts:
    """What the cache of experts was asked since the start: `needed` experts of which `hits` had their pages.

    `rows`, `num_bytes`: that were pulled from host memory.
    """

    needed: int
    hits: int
    rows: int
    num_bytes: int


@runtime_checkable
class CountsCache(Protocol):
    """A decoder that counts what it needed and pulled."""

    def counts(self) -> GpuCacheCounts:
        """What was needed and pulled until now; waits for the card."""
        ...


class DriverMemory(Protocol):
    """A card's memory as its driver counts it; see `CardMemory`."""

    def used_bytes(self) -> int:
        """Bytes that this process uses."""
        ...

    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        ...


class BuiltEngine(Protocol):
    """An engine put together: `expert_bytes` of the card are experts', `pages_bytes` of these come and go."""

    expert_bytes: int
    pages_bytes: int

    @property
    def decoder(self) -> Decoder:
        """What runs it."""
        ...

    @property
    def weights(self) -> PackWeights:
        """What it runs on."""
        ...

    def prepare(self) -> None:
        """Captures what is launched for a token. Tokens can be run before that too, slower."""
        ...

    def close(self) -> None:
        """Lets go of everything."""
        ...


def fit_to_gpu(
    pack: Pack,
    device: torch.device,
    memory: DriverMemory,
    asked: GpuRequest,
    least_bytes: int,
    build: Callable[[int, int], BuiltEngine],
    compile_ahead: Callable[[Callable[[], None]], object] = lambda run: None,
) -> tuple[BuiltEngine, GpuMemoryUse]:
    """An engine whose experts have what the budget leaves them.

    Args:    least_bytes: that experts can run in.   build: an engine with so many bytes for experts, whose forward
             passes have so many tokens at most.   compile_ahead: compiles all kernels that a function would launch.
    Raises:  RunError if the budget is too small; it says what is needed, and for what.
    """
    _let_go()  # an earlier engine's memory that torch keeps for later is not this one's
    torch.zeros(1, device=device)  # makes the driver's context
    context_bytes = memory.used_bytes()
    budget = asked.budget_bytes or usual_budget(context_bytes + memory.free_bytes())
    chunk = _chunk_tokens(pack, asked, budget, context_bytes)
    with closing(build(least_bytes, chunk)) as first:
        compile_ahead(lambda: run_everything(pack, first, chunk))
        first.prepare()
        run_everything(pack, first, chunk)
        overhead, cache_bytes = memory.used_bytes() - first.expert_bytes, first.decoder.cache.num_bytes
    _let_go()
    overhead_kept = overhead + _ROUNDING_BYTES + (_SHARED_PIECE_BYTES if least_bytes < _OWN_PIECE_BYTES else 0)
    room = budget - overhead_kept
    if room < least_bytes:
        raise RunError(
            f"--budget: {size_text(budget)}, needed are at least "
            f"{size_text(overhead_kept + least_bytes)}: {size_text(overhead)} for all but experts, as "
            f"measured, and {size_text(least_bytes)} for experts; give more, or a shorter context with --max-tokens"
        )
    built = build(room, chunk)
    built.prepare()
    dense = pack.manifest.totals.dense
    rest = overhead - dense - cache_bytes
    return built, GpuMemoryUse(budget, dense, cache_bytes, built.expert_bytes, built.pages_bytes, rest)


def _chunk_tokens(pack: Pack, asked: GpuRequest, budget: int, context_bytes: int) -> int:
    """How many tokens a forward pass may have, before anything is measured."""
    costs = GpuCosts(torch.empty((), dtype=asked.cache_dtype).element_size(), context_bytes)
    needs = gpu_needs(pack.layout, asked.context_tokens, 0, costs)
    most = divide_gpu(needs, budget, asked.context_tokens, AS_BUDGET).chunk_tokens
    return min(asked.chunk_tokens or most, most, asked.context_tokens)


def usual_budget(available_bytes: int) -> int:
    """The budget where none was asked for: what is available, less what a display and others may ask for meanwhile."""
    return available_bytes - max(_LEFT_FREE_BYTES, int(_LEFT_FREE_SHARE * available_bytes))


def run_everything(pack: Pack, built: BuiltEngine, chunk_tokens: int) -> None:
    """Runs every kernel that the engine can launch, and its longest passes.

    After it, no prompt and no token loads another kernel or takes more memory. Which kernel multiplies depends on the
    number of tokens, in steps of 16 or more, and on how rows are stored. So an expert of each format and a matrix of
    each format and shape run with every such number, whatever the router would choose.
    """
    decoder, weights, device = built.decoder, built.weights, built.decoder.device
    d, k = pack.spec.hidden_size, pack.spec.router.num_experts_per_tok
    for length in sorted({1, *range(_LENGTH_STEP, chunk_tokens, _LENGTH_STEP), chunk_tokens}):
        for layer_idx, experts in _experts_of_each_format(pack):
            chosen = torch.tensor(experts, device=device).expand(length, k)
            x = torch.zeros(length, d, device=device)
            run_experts(x, chosen, torch.ones_like(chosen) / k, weights, layer_idx)
        for role, num_cols in _matrices_of_each_format(pack):
            linear(torch.zeros(length, num_cols, device=device), weights.matrix(role))
    context = decoder.cache.context_tokens
    for start, num_tokens in ((0, chunk_tokens), (context - chunk_tokens, chunk_tokens), (context - 1, 1)):
        decoder.reset()
        decoder.cache.num_tokens = start
        decoder.next_logits([0] * num_tokens)
    decoder.reset()


def _experts_of_each_format(pack: Pack) -> list[tuple[int, list[int]]]:
    """Layers, and as many experts of each as a token takes, so that every format of experts is among them."""
    k, seen, found = pack.spec.router.num_experts_per_tok, set[ExpertLayout](), list[tuple[int, list[int]]]()
    for layer_idx, layer in enumerate(pack.layout.experts):
        for number, layout in enumerate(layer):
            if layout not in seen:
                others = [other for other in range(len(layer)) if other != number]
                chosen = sorted([number, *others[: k - 1]])
                found.append((layer_idx, chosen))
                seen |= {layer[each] for each in chosen}
    return found


def _matrices_of_each_format(pack: Pack) -> list[tuple[str, int]]:
    """A dense matrix of each format and shape that tokens are multiplied by: its role, and its columns."""
    found: dict[object, tuple[str, int]] = {}
    for dense in pack.layout.dense:
        role, shape = dense.role.name, dense.role.shape
        is_product = (role != "embed" or pack.spec.tied_head) and not role.endswith(".kv_b")
        if len(shape) == 2 and is_product:
            found.setdefault((dense.rows, dense.dtype, shape), (role, shape[1]))
    return list(found.values())


def _let_go() -> None:
    """Gives memory back to the driver that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()
