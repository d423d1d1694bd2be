"""Drafts: tokens that are proposed cheaply and verified together in one forward pass."""

from moe_pack.runtime.drafts.drafter import Drafter

__all__ = ["Drafter"]
