"""The division of a GPU's memory between an engine's parts, and its use; importing this needs no Triton.

Only plans of packs, and the tokens of a forward pass, go by this estimate: `gpu_engine.fit_to_gpu` measures. In passes
of many tokens `Slicing` divides experts: so many are decoded at once, and so many of their neurons.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_pack import formats
from moe_pack.runtime.gpu import placements
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets
from moe_pack.runtime.offload.budgets import cache_bytes

# Left free if no budget is given: the GPU may drive a display, whose next allocation must not fail.
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 0.03, 256 << 20
# Tokens of a forward pass, where memory allows: longer passes bring experts over the link less often.
MOST_CHUNK_TOKENS, _CHUNK_STEP = 2048, 16
_PASS_SHARE = 1 / 16  # of the memory, that passes longer than the shortest may take
_CHOICE_BYTES = 24  # of a sequence's row, for each token of the vocabulary: its logit, and `ChoiceMemory`
LOGITS_AT_ONCE = 64  # tokens: those of a whole pass would take more memory than all else in it
_OVERHEAD_BYTES = 500_000_000  # of the driver's context and the libraries' kernels, if it is not measured


FAST_HALVES, EXACT_HALVES = 1, 2  # float16 numbers of a value
_TOKEN_BYTES = 512 << 10  # scratch memory for each token of a pass: short ones cannot fill larger products
_MOST_BYTES = 256 << 20  # a slice of it has some hundred programs; experts have the rest
_BLOCK = 64  # neurons of a slice are a multiple of it
_LEAST_SLICE = 512  # neurons, if experts do not fit as a whole: with fewer, sums of down are short and programs few


class Slicing(NamedTuple):
    """So many experts of a layer are decoded at once, and so many of their neurons."""

    num_experts: int
    num_neurons: int  # a multiple of 64

    @classmethod
    def of(cls, num_rows: int, num_cols: int, num_experts: int, num_halves: int, scratch_bytes: int) -> "Slicing":
        """Returns the division by which a layer's experts fit scratch memory: whole ones, or slices of many."""
        most = max(_BLOCK, scratch_bytes // (2 * 3 * num_halves * num_cols))
        whole = -(-num_rows // _BLOCK) * _BLOCK
        if most >= whole:
            return cls(min(num_experts, most // whole), whole)
        together = max(1, min(num_experts, most // _LEAST_SLICE))
        num_slices = -(-whole // (most // together // _BLOCK * _BLOCK))
        return cls(together, -(-num_rows // (num_slices * _BLOCK)) * _BLOCK)

    @classmethod
    def for_passes(
        cls, layout: formats.PackLayout, chunk_tokens: int, num_halves: int, spare_bytes: int = 0
    ) -> "Slicing":
        """Returns the division for passes of at most so many tokens.

        Args:    spare_bytes: of the GPU, which nothing else needs: where there is space for more experts at once, a
                 pass has fewer launches. Their slices stay as they are, so that the memory changes no bit.
        """
        spec = layout.spec
        sizes = (spec.expert.intermediate_size, spec.hidden_size, spec.router.num_experts, num_halves)
        usual = cls.of(*sizes, min(_TOKEN_BYTES * chunk_tokens, _MOST_BYTES))
        one_more = usual._replace(num_experts=usual.num_experts + 1)
        expert_bytes = one_more.num_bytes(layout, chunk_tokens, num_halves) - usual.num_bytes(
            layout, chunk_tokens, num_halves
        )
        number = min(spec.router.num_experts, usual.num_experts + spare_bytes // expert_bytes)
        return usual._replace(num_experts=number)

    def num_bytes(self, layout: formats.PackLayout, chunk_tokens: int, num_halves: int) -> int:
        """Returns the memory of passes: decoded rows, and neurons and outputs of all pairs of tokens and experts."""
        number, n = self
        d, pairs = layout.spec.hidden_size, chunk_tokens * layout.spec.router.num_experts_per_tok
        return 2 * 3 * num_halves * number * n * d + 4 * 5 * number * n + pairs * (4 * (n + d + 1) + 2 * num_halves * n)


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """The costs of a GPU that do not depend on the pack."""

    kv_dtype: KvDtype = "bf16"  # of the key-value cache
    # The driver charges it to a process that has allocated nothing yet; measured if there is a GPU.
    overhead_bytes: int = _OVERHEAD_BYTES
    sequences: budgets.Sequences = budgets.ONE_SEQUENCE  # that run at once


PLANNED_COSTS = GpuCosts()


def gpu_needs(layout: formats.PackLayout, context_tokens: int, costs: GpuCosts = PLANNED_COSTS) -> budgets.MemoryNeeds:
    """Returns an estimate of the memory that an engine of a GPU needs."""
    dense, spec = layout.dense_file.num_bytes + layout.rotation_bytes, layout.spec
    least, whole = placements.least_placement(layout, "split"), placements.place_experts(layout, sys.maxsize, "split")

    sequences = costs.sequences

    def fixed(chunk_tokens: int) -> budgets.FixedParts:
        cache = cache_bytes(spec, context_tokens, chunk_tokens, costs.kv_dtype)
        if sequences.checkpoints:
            each = budgets.checkpoint_bytes(spec, context_tokens, chunk_tokens, costs.kv_dtype)
            cache += sequences.checkpoints * each
        cache *= sequences.number
        workspace = budgets.workspace_bytes(spec, chunk_tokens, LOGITS_AT_ONCE, has_kernels=False)
        workspace += sequences.number * spec.vocab_size * _CHOICE_BYTES
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
    """Divides a GPU's memory into fixed parts and the experts'; raises BudgetTooSmall if the largest does not fit.

    Passes are as long as a share of the memory allows, so that experts get more of more memory.
    """
    shortest, longest = needs.shortest_chunk, needs.longest_chunk
    most_bytes = needs.fixed(shortest).num_bytes + int(_PASS_SHARE * budget_bytes)
    if needs.fixed(longest).num_bytes > most_bytes:
        chunks = range(shortest, longest, _CHUNK_STEP)
        number = bisect_right(chunks, most_bytes, key=lambda chunk: needs.fixed(chunk).num_bytes)
        longest = chunks[max(number - 1, 0)]
    needs = replace(needs, longest_chunk=longest)
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
    sequences: budgets.Sequences = budgets.ONE_SEQUENCE  # that run at once


@dataclass(frozen=True, slots=True)
class GpuMemoryUse:
    """The use of a GPU's memory, in bytes."""

    budget: int
    dense: int
    cache: int
    experts: int
    dynamic: int  # the part of `experts` for rows on their way; the others are resident for the whole run
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
    ahead: int = 0  # records that were pulled before their layer, because its experts were predicted
    ahead_ran: int = 0  # of these, the ones that were needed
    changed: int = 0  # experts that ran in place of the routers'
    link_bytes: int = 0  # of pulled records, those pulled ahead too
    cpu_seconds: float = 0.0  # in which the CPU computed


def usual_budget(available_bytes: int) -> int:
    """Returns the budget if none is given: the available bytes, less those for a display and other programs."""
    return available_bytes - max(_LEFT_FREE_BYTES, int(_LEFT_FREE_SHARE * available_bytes))
