"""The rotation of a layer's expert inputs, and of their sum back; the twin is `runtime.model.compute.rotation`.

A hidden state of d = m 2^k values, m odd, is a matrix [m, 2^k]. A program makes one of its rows: it adds up all rows
with the factors of the Hartley matrix, then transforms the sum by Walsh and Hadamard in registers, where each of the k
stages adds and subtracts halves. So a token has m programs, which share what they load in the cache.

Rotating back ends with what a layer does with the sum of its experts: the shared expert's output and the residual are
added in the same launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.gpu.kernels.elementwise import NORM_WARPS, Norm, activate, norm
from moe_pack.runtime.gpu.kernels.grids import INTERPRETED, launch_options, wait_for_earlier, warp_threads
from moe_pack.runtime.model import Operations
from moe_pack.runtime.model.compute.rotation import Rotation, hartley, odd_factor

_VALUES_PER_THREAD = 16  # of a row; with more, registers are spilled
_MOST_WARPS = 16
_NORM_VALUES = 256  # of a warp that normalizes


def device_matrix(d: int, device: torch.device) -> Tensor:
    """Returns the Hartley matrix of d's odd factor m on a device, float32 [m, m]."""
    return torch.tensor(hartley(odd_factor(d)), device=device)


def rotate(x: Tensor, rotation: Rotation, matrix: Tensor, out: Tensor) -> None:
    """Writes `R (a * x)`, the input of a rotated layer's experts, to `out`.

    Args:    x, out: float32 [d] or [T, d], contiguous, in different memory.   matrix: of `device_matrix`.
    """
    _launch(x, rotation.input, matrix, out, True)


def rotate_back(
    y: Tensor,
    rotation: Rotation,
    matrix: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes `residual + scale * (shared + b * R y)` to `out`, for the sum y of a rotated layer's experts.

    Args:    y, out: float32 [d] or [T, d], contiguous, in different memory.   matrix: of `device_matrix`.
             residual, shared: as `out`, which may be one of them; `shared` is the shared experts' output.
    """
    _launch(y, rotation.output, matrix, out, False, residual, shared, scale)


class GpuOperations(Operations):
    """The operations on a GPU outside of a captured token: plain torch, and kernels where that is several launches."""

    def __init__(self, attends_in_half: bool = False) -> None:
        self.attends_in_half = attends_in_half
        self._matrices: dict[tuple[int, torch.device], Tensor] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `x / rms(x) * weight`, float32 [..., n]; in one launch for x in one piece."""
        if not (_has_kernels(x) and _has_kernels(weight)):
            return super().rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        norm(x, Norm(weight, None, eps), out, min(NORM_WARPS, max(1, x.shape[-1] // _NORM_VALUES)))
        return out

    def activate(self, gate: Tensor | None, up: Tensor, function: NeuronFunction) -> Tensor:
        """Returns h of neurons, float32; in one launch for products in one piece."""
        if not (_has_kernels(up) and (gate is None or _has_kernels(gate))):
            return super().activate(gate, up, function)
        out = torch.empty_like(up)
        activate(gate, up, function, out)
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Returns `R (a * x)`, float32 [T, d]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rotate(x.contiguous(), rotation, self._matrix(x), out)
        return out

    def rotate_back(self, y: Tensor, rotation: Rotation) -> Tensor:
        """Returns `b * R y`, float32 [T, d]."""
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        rotate_back(y.contiguous(), rotation, self._matrix(y), out)
        return out

    def _matrix(self, x: Tensor) -> Tensor:
        key = (x.shape[-1], x.device)
        if key not in self._matrices:
            self._matrices[key] = device_matrix(*key)
        return self._matrices[key]


def _has_kernels(x: Tensor) -> bool:
    """Whether kernels take x: float32 in one piece, where kernels run."""
    return x.dtype == torch.float32 and x.is_contiguous() and (x.is_cuda or INTERPRETED)


def _launch(
    x: Tensor,
    vector: Tensor,
    matrix: Tensor,
    out: Tensor,
    is_scaled_first: bool,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    d = x.shape[-1]
    m = odd_factor(d)
    size = d // m
    num_warps = min(max(size // (warp_threads() * _VALUES_PER_THREAD), 1), _MOST_WARPS)
    _rotate_kernel[(x.numel() // d, m)](
        x, vector, matrix, residual, shared, out, scale, m, size, is_scaled_first,
        num_warps=num_warps, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


@triton.constexpr_function
def _num_stages(size: int) -> int:
    """Returns the stages of the Hadamard transform of so many values, a power of two."""
    return size.bit_length() - 1


@triton.jit
def hadamard_stage(y, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Returns a stage of the Hadamard transform: sums and differences of values `STRIDE` apart."""
    a, b = tl.split(tl.permute(tl.reshape(y, [SIZE // (2 * STRIDE), 2, STRIDE]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [SIZE])


@triton.jit
def _rotate_kernel(
    x_ptr,
    vector_ptr,
    matrix_ptr,
    residual_ptr,
    shared_ptr,
    out_ptr,
    scale,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    IS_SCALED_FIRST: tl.constexpr,
):
    token, row = tl.program_id(0).to(tl.int64) * (M * SIZE), tl.program_id(1)
    c = tl.arange(0, SIZE)
    wait_for_earlier()
    # Adds up the rows of the token's matrix with the Hartley matrix's factors.
    y = tl.zeros([SIZE], tl.float32)
    for j in range(M):
        values = tl.load(x_ptr + token + j * SIZE + c)
        if IS_SCALED_FIRST:
            values *= tl.load(vector_ptr + j * SIZE + c)
        if M == 1:
            y = values
        else:
            y += tl.load(matrix_ptr + row * M + j) * values
    # Transforms the sum in registers.
    STAGES: tl.constexpr = _num_stages(SIZE)
    FACTOR: tl.constexpr = SIZE**-0.5
    for stage in tl.static_range(STAGES):
        y = hadamard_stage(y, SIZE, 1 << stage)
    y *= FACTOR
    place = row * SIZE + c
    if not IS_SCALED_FIRST:
        y *= tl.load(vector_ptr + place)
    # Ends a layer where it rotates back: the shared expert and the residual join the sum.
    if shared_ptr is not None:
        y = tl.load(shared_ptr + token + place) + y
    y *= scale
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token + place)
    tl.store(out_ptr + token + place, y)
