"""Fits an engine on a GPU into a budget: measures everything else, and gives experts the rest.

The memory of driver, kernels and forward passes is not assumed. A first engine gets the least memory for experts, runs
every kernel and its longest passes, and is measured. The engine that stays gets the rest of the budget for its experts.
Only the tokens of a forward pass, and plans of packs, go by an estimate (`gpu_needs`, `divide_gpu`).
"""

import gc
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from moe_pack import formats
from moe_pack.runtime import model
from moe_pack.runtime.gpu import placements
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets
from moe_pack.runtime.offload.budgets import cache_bytes

_ROUNDING_BYTES = 4 << 20  # the driver allocates in pieces of 2 MiB
# Left free if no budget is given: the GPU may drive a display, whose next allocation must not fail.
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 0.03, 256 << 20
_LENGTH_STEP = 16  # tokens: lengths in between use the same kernels (`gemm`)
LOGITS_AT_ONCE = 16  # tokens: those of a whole pass would take more memory than all else in it
_HEADS = ("head", "embed")  # the roles that can give logits
# An allocation of torch with so many bytes or more has a piece of the driver's memory of its own. Smaller ones share
# pieces of 20 MiB, and there may be one piece more than was measured.
_OWN_PIECE_BYTES, _SHARED_PIECE_BYTES = 10 << 20, 20 << 20
_OVERHEAD_BYTES = 500_000_000  # of the driver's context and the libraries' kernels, if it is not measured


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """The costs of a GPU that do not depend on the pack."""

    kv_dtype: KvDtype = "bf16"  # of the key-value cache
    # The driver charges it to a process that has allocated nothing yet; measured if there is a GPU.
    overhead_bytes: int = _OVERHEAD_BYTES


PLANNED_COSTS = GpuCosts()


def gpu_needs(layout: formats.PackLayout, context_tokens: int, costs: GpuCosts = PLANNED_COSTS) -> budgets.MemoryNeeds:
    """Returns an estimate of the memory that an engine of a GPU needs."""
    dense, spec = layout.dense_file.num_bytes + layout.rotation_bytes, layout.spec
    least, whole = placements.least_placement(layout, "split"), placements.place_experts(layout, sys.maxsize, "split")

    def fixed(chunk_tokens: int) -> budgets.FixedParts:
        cache = cache_bytes(spec, context_tokens, chunk_tokens, costs.kv_dtype)
        workspace = budgets.workspace_bytes(spec, chunk_tokens)
        if costs.kv_dtype in ("q8", "q4"):  # which torch dequantizes for prompts
            workspace += budgets.decoded_cache_bytes(
                spec, context_tokens, chunk_tokens, costs.kv_dtype, has_kernels=False
            )
        return budgets.FixedParts(dense, cache, workspace, overhead=costs.overhead_bytes)

    longest = budgets.most_chunk_tokens(context_tokens)
    return budgets.MemoryNeeds(
        fixed, longest, budgets.LEAST_PREFILL_TOKENS, least.num_bytes, whole.num_bytes, usual_share=8
    )


def divide_gpu(needs: budgets.MemoryNeeds, budget_bytes: int, context_tokens: int) -> budgets.Division:
    """Divides a GPU's memory into fixed parts and the experts'; raises BudgetTooSmall if the largest does not fit."""
    return budgets.divide_or_refuse(budget_bytes, needs, context_tokens, "raise it, give dense weights fewer bits")


def least_gpu_budget(layout: formats.PackLayout, context_tokens: int) -> int:
    """Returns the smallest budget that `divide_gpu` divides."""
    return gpu_needs(layout, context_tokens).least_budget


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The caller's sizes."""

    budget_bytes: int | None  # of the GPU for everything; None: all free memory
    context_tokens: int
    chunk_tokens: int | None  # of a forward pass of a prompt, at most; None: as many as the budget allows
    cache_dtype: KvDtype  # of keys and values


@dataclass(frozen=True, slots=True)
class GpuMemoryUse:
    """The use of a GPU's memory, in bytes."""

    budget: int
    dense: int
    cache: int
    experts: int
    dynamic: int  # the part of `experts` for rows that come and go; the others are resident for the whole run
    overhead: int  # measured, everything that is none of the others

    @property
    def spent(self) -> int:
        """The sum of all uses."""
        return self.dense + self.cache + self.experts + self.overhead


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """Counts since the start, of tokens that ran alone and the running neurons of their experts."""

    tokens: int = 0
    resident: int = 0  # neurons that were computed from GPU memory
    pulled: int = 0  # over the link
    left: int = 0  # by the CPU
    whole: int = 0  # experts that the CPU selected and computed whole
    promoted: int = 0  # records that were copied while tokens ran
    ahead: int = 0  # records that were pulled before their layer, because its experts were predicted
    ahead_ran: int = 0  # of these, the ones that were needed
    changed: int = 0  # experts that ran in place of the routers'
    link_bytes: int = 0  # of pulled and promoted records, those pulled ahead too
    cpu_seconds: float = 0.0  # in which the CPU computed


@runtime_checkable
class CountsNeurons(Protocol):
    """A decoder that counts the neurons that its tokens needed."""

    def counts(self) -> GpuCounts:
        """Returns the counts until now."""
        ...


class DriverMemory(Protocol):
    """A GPU's memory as its driver counts it, as `GpuMemory` does."""

    def used_bytes(self) -> int:
        """Returns the bytes that this process uses."""
        ...

    def free_bytes(self) -> int:
        """Returns the bytes that no process uses."""
        ...


class BuiltEngine(Protocol):
    """An engine that is ready to run."""

    expert_bytes: int  # of the GPU, for experts
    dynamic_bytes: int  # of these, for rows that come and go

    @property
    def decoder(self) -> model.Decoder:
        """The decoder that runs the model."""
        ...

    @property
    def weights(self) -> model.PackWeights:
        """The weights that the decoder uses."""
        ...

    def prepare(self) -> None:
        """Captures a token's launches. Tokens can run before too, but more slowly."""
        ...

    def tune(self) -> None:
        """Measures and sets what only whole tokens show, in a second or two."""
        ...

    def close(self) -> None:
        """Releases all memory."""
        ...


def fit_to_gpu(
    pack: formats.Pack,
    device: torch.device,
    memory: DriverMemory,
    request: GpuRequest,
    least_bytes: int,
    build: Callable[[int, int], BuiltEngine],
    compile_ahead: Callable[[Callable[[], None]], object] = lambda run: None,
) -> tuple[BuiltEngine, GpuMemoryUse]:
    """Returns an engine whose experts have the rest of the budget, and its use of memory.

    Args:    least_bytes: the least that experts run in.   build: builds an engine with so many bytes for experts, and
             at most so many tokens a forward pass.   compile_ahead: compiles all kernels that a function launches.
    Raises:  BudgetTooSmall.
    """
    _free_unused_memory()  # torch may keep memory of an earlier engine
    torch.zeros(1, device=device)  # makes the driver's context
    context_bytes = memory.used_bytes()
    budget = request.budget_bytes or usual_budget(context_bytes + memory.free_bytes())
    chunk = _chunk_tokens(pack, request, budget, context_bytes)
    with closing(build(least_bytes, chunk)) as first:
        compile_ahead(lambda: run_everything(pack, first, chunk))
        first.prepare()
        run_everything(pack, first, chunk)
        overhead, cache_bytes = memory.used_bytes() - first.expert_bytes, first.decoder.cache.num_bytes
    _free_unused_memory()
    overhead_kept = overhead + _ROUNDING_BYTES + (_SHARED_PIECE_BYTES if least_bytes < _OWN_PIECE_BYTES else 0)
    expert_bytes = budget - overhead_kept
    if expert_bytes < least_bytes:
        needed, experts = overhead_kept + least_bytes, formats.size_text(least_bytes)
        reason = (
            f"at least {formats.size_text(needed)} are needed: {experts} for experts, the rest for everything else, "
            "as measured"
        )
        raise budgets.BudgetTooSmall(budget, needed, reason, "give more, take --device cpu")
    built = build(expert_bytes, chunk)
    built.prepare()
    built.tune()
    dense = pack.manifest.totals.dense
    rest = overhead - dense - cache_bytes
    return built, GpuMemoryUse(budget, dense, cache_bytes, built.expert_bytes, built.dynamic_bytes, rest)


def _chunk_tokens(pack: formats.Pack, request: GpuRequest, budget: int, context_bytes: int) -> int:
    """Returns the most tokens of a forward pass, by an estimate."""
    costs = GpuCosts(request.cache_dtype, context_bytes)
    needs = gpu_needs(pack.layout, request.context_tokens, costs)
    most = divide_gpu(needs, budget, request.context_tokens).chunk_tokens
    return min(request.chunk_tokens or most, most, request.context_tokens)


def usual_budget(available_bytes: int) -> int:
    """Returns the budget if none is given: the available bytes, less those for a display and other programs."""
    return available_bytes - max(_LEFT_FREE_BYTES, int(_LEFT_FREE_SHARE * available_bytes))


def run_everything(pack: formats.Pack, built: BuiltEngine, chunk_tokens: int) -> None:
    """Runs every kernel that the engine can launch, and its longest passes.

    Afterwards no prompt and no token loads another kernel or takes more memory. The kernel of a product depends on the
    number of tokens, in steps of 16 or more, and on the format of rows: an expert of each format, and a matrix of each
    format and shape, run with every such number. Torch's unused memory is given back before the passes, which show how
    much memory is needed.
    """
    decoder, weights, device = built.decoder, built.weights, built.decoder.device
    d, k = pack.spec.hidden_size, pack.spec.router.num_experts_per_tok
    lengths = {1, *range(_LENGTH_STEP, chunk_tokens, _LENGTH_STEP), chunk_tokens}
    for length in sorted(lengths, reverse=True):  # the allocator cuts shorter ones from what the longest has left
        for layer_idx, experts in _experts_of_each_format(pack):
            chosen = torch.tensor(experts, device=device).expand(length, k)
            x = torch.zeros(length, d, device=device)
            model.run_experts(x, chosen, torch.ones_like(chosen) / k, weights, layer_idx)
        for role, num_cols in _matrices_of_each_format(pack):
            if length <= LOGITS_AT_ONCE or role not in _HEADS:
                model.linear(torch.zeros(length, num_cols, device=device), weights.matrix(role))
    _free_unused_memory()
    context = decoder.cache.context_tokens
    for start, num_tokens in ((0, chunk_tokens), (context - chunk_tokens, chunk_tokens), (context - 1, 1)):
        decoder.reset()
        decoder.cache.num_tokens = start
        decoder.logits([0] * num_tokens)
    decoder.reset()


def _experts_of_each_format(pack: formats.Pack) -> list[tuple[int, list[int]]]:
    """Returns layers, each with as many experts as a token has, so that every format of experts is among them."""
    k, seen, choices = pack.spec.router.num_experts_per_tok, set[formats.ExpertLayout](), list[tuple[int, list[int]]]()
    for layer_idx, layer in enumerate(pack.layout.experts):
        for number, layout in enumerate(layer):
            if layout not in seen:
                others = [other for other in range(len(layer)) if other != number]
                chosen = sorted([number, *others[: k - 1]])
                choices.append((layer_idx, chosen))
                seen |= {layer[each] for each in chosen}
    return choices


def _matrices_of_each_format(pack: formats.Pack) -> list[tuple[str, int]]:
    """Returns the role and the columns of a dense matrix of each format and shape that multiplies tokens."""
    matrices: dict[object, tuple[str, int]] = {}
    for dense in pack.layout.dense:
        role, shape = dense.role.name, dense.role.shape
        is_product = (role != "embed" or pack.spec.tied_head) and not role.endswith(".kv_b")
        if len(shape) == 2 and is_product:
            matrices.setdefault((dense.rows, dense.dtype, shape, role in _HEADS), (role, shape[1]))
    return list(matrices.values())


def _free_unused_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
