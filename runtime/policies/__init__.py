"""Policies: what is placed, foretold, kept, and done on a miss; each paper's on a page, named as a preset."""

from moe_pack.runtime.policies.lru import LRU

__all__ = ["LRU"]
