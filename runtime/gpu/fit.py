"""The division of a GPU's memory between an engine's parts, and its use; importing this needs no Triton.

Only plans of packs, and the tokens of a forward pass, go by this estimate: `gpu_engine.fit_to_gpu` measures.
"""

import sys
from dataclasses import dataclass

from moe_pack import formats
from moe_pack.runtime.gpu import placements
from moe_pack.runtime.gpu.slicing import EXACT_HALVES, Slicing
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets
from moe_pack.runtime.offload.budgets import cache_bytes

# Left free if no budget is given: the GPU may drive a display, whose next allocation must not fail.
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 0.03, 256 << 20
# Tokens of a forward pass, where memory allows: longer passes bring experts over the link less often.
MOST_CHUNK_TOKENS = 2048
LOGITS_AT_ONCE = 64  # tokens: those of a whole pass would take more memory than all else in it
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
        workspace = budgets.workspace_bytes(spec, chunk_tokens, LOGITS_AT_ONCE, has_kernels=False)
        division = Slicing.for_passes(layout, chunk_tokens, EXACT_HALVES)
        workspace += division.num_bytes(layout, chunk_tokens, EXACT_HALVES)
        if costs.kv_dtype in ("q8", "q4"):  # which torch dequantizes for prompts
            workspace += budgets.decoded_cache_bytes(
                spec, context_tokens, chunk_tokens, costs.kv_dtype, has_kernels=False
            )
        return budgets.FixedParts(dense, cache, workspace, overhead=costs.overhead_bytes)

    longest = min(MOST_CHUNK_TOKENS, max(context_tokens, budgets.LEAST_PREFILL_TOKENS))
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


def usual_budget(available_bytes: int) -> int:
    """Returns the budget if none is given: the available bytes, less those for a display and other programs."""
    return available_bytes - max(_LEFT_FREE_BYTES, int(_LEFT_FREE_SHARE * available_bytes))
