"""Budgets for tests of streaming: room for so many experts, and not for one more."""

from moe_pack.formats import Pack
from moe_pack.runtime.offload import expert_pages
from moe_pack.runtime.offload.budgets import LEAST_PREFILL_TOKENS, cache_bytes, page_sizes, workspace_bytes


def budget_for(pack: Pack, num_experts: int, context_tokens: int) -> int:
    """The bytes that running a pack takes with room for so many of its largest experts, in short forward passes."""
    page_bytes, head_bytes = page_sizes(pack.layout)
    largest = int(expert_pages(pack.layout, page_bytes).max()) * (page_bytes + head_bytes)
    held = pack.layout.dense_file.num_bytes + pack.layout.rotation_bytes
    held += cache_bytes(pack.spec, context_tokens, LEAST_PREFILL_TOKENS)
    return held + workspace_bytes(pack.spec, LEAST_PREFILL_TOKENS) + num_experts * largest
