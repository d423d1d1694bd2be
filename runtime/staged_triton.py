"""The Triton kernels as the staged engine asks for them."""

from torch import Tensor

from moe_pack.formats import DenseLayout
from moe_pack.runtime.device_matrix import DeviceMatrix
from moe_pack.runtime.kernels.expert_many import expert_many, workspace_floats
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.reduce import reduce
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import ExpertKind, LayerTables, Selection
from moe_pack.runtime.matrix import Matrix


class TritonOps:
    """`ExpertOps` by the kernels: on a GPU, or under Triton's interpreter on plain memory."""

    def matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        """See `ExpertOps`."""
        return DeviceMatrix(dense, raw)

    def select(self, x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
        """See `ExpertOps`."""
        select(x, experts, tables, out)

    def neurons(self, x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
        """See `ExpertOps`."""
        neurons(x, experts, tables, selection, partials)

    def reduce(self, partials: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `ExpertOps`."""
        reduce(partials, weights, out)

    def workspace_floats(self, num_tokens: int, num_rows: int) -> int:
        """See `ExpertOps`."""
        return int(workspace_floats(num_tokens, num_rows))

    def many(
        self,
        x: Tensor,
        tokens: Tensor,
        weights: Tensor,
        tables: LayerTables,
        expert: int,
        kind: ExpertKind,
        y: Tensor,
        workspace: Tensor,
    ) -> None:
        """See `ExpertOps`."""
        expert_many(x, tokens, weights, tables, expert, kind, y, workspace)
