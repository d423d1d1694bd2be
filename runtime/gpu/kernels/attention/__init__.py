"""Attention of a layer on a GPU: one token each of several sequences, or several drafted tokens of one."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.runtime.gpu.kernels.attention.cached_rows import RowPositions
    from moe_pack.runtime.gpu.kernels.attention.entering import Entering, QkNorms, enter
    from moe_pack.runtime.gpu.kernels.attention.latent import enter_latent, leave_latent
    from moe_pack.runtime.gpu.kernels.attention.splits import AttentionWorkspace, View, attend
else:
    __getattr__ = face(__name__)
