"""Drafts: tokens that are proposed cheaply and verified together in one forward pass."""

from moe_pack.runtime.drafts.drafter import Drafts
from moe_pack.runtime.drafts.gate import MOST_DRAFTED, Gate
from moe_pack.runtime.drafts.ngrams import NgramDrafter

__all__ = ["MOST_DRAFTED", "Drafts", "Gate", "NgramDrafter"]
