"""Mixers: what some layers have in place of attention, their recurrences over tokens, and the rows of n-gram tables."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.mixers.kinds import mix, ngram_output
    from moe_pack.runtime.model.mixers.ngrams import (
        SLOT_TOKENS,
        SLOTS_PER_TABLE,
        LaterRows,
        LaterTable,
        NgramRows,
        RowTable,
    )
else:
    __getattr__ = face(__name__)
