"""What the staged engine computes experts with, whose rows lie in an arena of the device. Importing it needs triton."""

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
    """Experts of one token, several at a time, or one expert for many tokens, by the Triton kernels.

    Nothing here waits for the device, which is a GPU, or plain memory under Triton's interpreter.
    """

    def matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        """A dense matrix of the bytes u8 of its rows, on the device."""
        return DeviceMatrix(dense, raw)

    def select(self, x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
        """Finds the neurons that run for x float32 [d], of experts int32 [k]."""
        select(x, experts, tables, out)

    def neurons(self, x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
        """Partial sums float32 [k, P, d] of the listed neurons' outputs."""
        neurons(x, experts, tables, selection, partials)

    def reduce(self, partials: Tensor, weights: Tensor, out: Tensor) -> None:
        """`out` float32 [d] = the sum over k of weights float32 [k] times partials, in order."""
        reduce(partials, weights, out)

    def workspace_floats(self, num_tokens: int, num_rows: int) -> int:
        """Float32 values that `many` needs to work in, for so many tokens of an expert of so many neurons."""
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
        """Adds a whole expert's outputs for `tokens` int32 [n] of x float32 [T, d], weighted, to their rows of y."""
        expert_many(x, tokens, weights, tables, expert, kind, y, workspace)
