"""The arithmetic of mixers: short convolutions, recurrences over tokens, and the states in which they live on.

Rows of n-gram tables are here too, because their layers convolve them and keep a state likewise.
"""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.mixers.ngrams import SLOT_TOKENS, SLOTS_PER_TABLE, LaterRows, NgramRows, RowTable
    from moe_pack.runtime.model.mixers.recurrence import convolve, recur
    from moe_pack.runtime.model.mixers.states import LayerState, States
else:
    __getattr__ = face(__name__)

__all__ = [
    "SLOTS_PER_TABLE",
    "SLOT_TOKENS",
    "LaterRows",
    "LayerState",
    "NgramRows",
    "RowTable",
    "States",
    "convolve",
    "recur",
]
