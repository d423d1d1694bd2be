"""The arithmetic of mixers: short convolutions, recurrences over tokens, and the states in which they live on."""

from moe_pack.runtime.model.mixers.recurrence import convolve, recur
from moe_pack.runtime.model.mixers.states import LayerState, States

__all__ = ["LayerState", "States", "convolve", "recur"]
