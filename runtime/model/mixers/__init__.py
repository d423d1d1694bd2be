"""The arithmetic of mixers: short convolutions, recurrences over tokens, and the states in which they live on.

Rows of n-gram tables are here too, because their layers convolve them and keep a state likewise.
"""

from moe_pack.runtime.model.mixers.ngrams import LaterRows, NgramRows, RowTable
from moe_pack.runtime.model.mixers.recurrence import convolve, recur
from moe_pack.runtime.model.mixers.states import LayerState, States

__all__ = ["LaterRows", "LayerState", "NgramRows", "RowTable", "States", "convolve", "recur"]
