"""Operations, matrices and weights, and the plain arithmetic of experts and routers."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.model.compute.ngrams import (
        SLOT_TOKENS,
        SLOTS_PER_TABLE,
        LaterRows,
        NgramRows,
        RowTable,
    )
else:
    __getattr__ = face(__name__)
