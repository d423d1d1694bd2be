"""The operations of a forward pass: `Operations` in plain torch, the reference, and `NativeOperations` by C++ kernels.

`layers`, `attention` and the weights say what is computed; operations say how.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.pack.layouts import Part
from moe_pack.runtime import cpu
from moe_pack.runtime.model.caches import ropes, states
from moe_pack.runtime.model.compute import router, softmax
from moe_pack.runtime.model.compute.expert import neuron_of
from moe_pack.runtime.model.compute.rotation import Rotation, hartley, odd_factor, transform

if TYPE_CHECKING:
    from moe_pack.runtime.model.compute import recurrence

MAX_DECODED_BYTES = softmax.MAX_DECODED_BYTES  # the most that an operation dequantizes at once

Product = Callable[[Tensor], Tensor]  # from x float32 [T, columns] to x @ rows.T, float32 [T, rows]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms of each head's queries and keys."""

    q: Tensor  # weights float32 [head_dim]
    k: Tensor
    eps: float
    is_last: bool = False  # heads are normed after they are rotated, not before


class Operations:
    """The operations in plain torch, on any device.

    `attends_in_half`: whether a GPU's attention rounds queries, keys and values of many tokens to float16.
    """

    attends_in_half = False

    def tokens_alone(self) -> AbstractContextManager[None]:
        """Returns a context in which a token's bits do not depend on the tokens next to it; torch has no such thing."""
        return nullcontext()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `x / rms(x) * weight` over the last dimension of x float32 [..., n], for weight float32 [n]."""
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def route(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token, int64 [T, k], best first, and their weights, zero beyond capacity.

        Args:    logits: float32 [T, E], or [T, E + Z] with experts that return their input.   bias: float32 of the same
                 width, added for the choice only.
        """
        experts, weights = self._choose(logits, spec, bias)
        return experts, router.limit_to_capacity(experts, weights, spec)

    def _choose(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return router.choose(logits, spec, bias)

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: ropes.Angles,
        interleaved: bool,
        view: softmax.View,
    ) -> Tensor:
        """Returns each query head's output, float32 [T, num_heads * value_dim]; new keys and values enter the cache.

        Args:    projected: q, k, v, float32 [T, heads * dim], neither normed by head nor rotated.
        """
        dims = (view.spec.head_dim, view.spec.head_dim, view.spec.value_dim)
        # Each [heads, T, dim].
        q, k, v = (each.view(len(each), -1, dim).transpose(0, 1) for each, dim in zip(projected, dims, strict=True))
        if norms is not None and not norms.is_last:
            q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        q, k = ropes.rotate(q, angles, interleaved), ropes.rotate(k, angles, interleaved)
        if norms is not None and norms.is_last:
            q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        return softmax.attend_new(q, k, v, view, self.attends_in_half)

    def activate(self, gate: Tensor | None, up: Tensor, function: formats.NeuronFunction) -> Tensor:
        """Returns h of neurons from `gate_i . x` (None without a gate) and `up_i . x`, all in one shape."""
        return neuron_of(function).h(gate, up)

    def scale_by_sigmoid(self, y: Tensor, logits: Tensor) -> Tensor:
        """Returns `y * sigmoid(logits)` for y float32 [T, d] and logits float32 [T, 1]."""
        return y * torch.sigmoid(logits)

    def convolve(
        self,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        state: states.LayerState,
        *,
        dilation: int = 1,
        activates: bool = False,
    ) -> Tensor:
        """Returns `recurrence.convolve` of x float32 [T, channels]; silu of it, if `activates`."""
        from moe_pack.runtime.model.compute import recurrence

        y = recurrence.convolve(x, kernel, bias, state, dilation)
        return torch.nn.functional.silu(y) if activates else y

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: states.LayerState
    ) -> Tensor:
        """Returns `recurrence.recur`, float32 [T, heads, values]."""
        from moe_pack.runtime.model.compute import recurrence

        return recurrence.recur(q, k, v, log_decay, rate, state)

    def recur_gated(
        self, q: Tensor, k: Tensor, v: Tensor, gates: "recurrence.Gates", state: states.LayerState
    ) -> Tensor:
        """Returns `recur` with decays and rates that follow from gates, float32 [T, heads, values]."""
        from moe_pack.runtime.model.compute import recurrence

        y = self.recur(*recurrence.gated(q, k, v, gates), state)
        return y if gates.skip is None else y + v * gates.skip[:, None]

    def gated_delta(
        self,
        qkv: Tensor,
        z: Tensor,
        gates: "recurrence.Gates",
        delta: "recurrence.DeltaNet",
        state: states.LayerState,
    ) -> Tensor:
        """Returns what a Gated DeltaNet multiplies with `o`, float32 [T, heads * values].

        Args:    qkv: float32 [T, channels], queries, keys and values before their convolution.   z: float32 [T, heads *
                 values], the gates of outputs.
        """
        spec, num_tokens = delta.spec, len(qkv)
        qkv = self.convolve(qkv, delta.kernel, None, state, activates=True)
        q, k, v = torch.split(qkv, [spec.key_width, spec.key_width, spec.value_width], dim=1)
        q, k = (each.view(num_tokens, spec.num_key_heads, spec.key_head_dim) for each in (q, k))
        v = v.view(num_tokens, spec.num_value_heads, spec.value_head_dim)
        y = self.rms_norm(self.recur_gated(q, k, v, gates, state), delta.out_norm, delta.eps)
        return y.flatten(1) * (torch.nn.functional.silu if spec.gate == "silu" else torch.sigmoid)(z)

    def stored_product(self, weight: Tensor) -> Product:
        """Returns the product with a matrix of 16- or 32-bit values, [rows, columns]."""
        num_rows, num_cols = weight.shape

        def rows(start: int, stop: int) -> Tensor:
            return weight[start:stop].to(torch.float32)

        return lambda x: product_by_blocks(x, num_rows, num_cols, rows)

    def row_product(self, layout: formats.RowLayout, rows: Tensor) -> Product:
        """Returns the product with rows in a row layout of one part, u8 [rows, row bytes]."""
        (part,) = layout.parts

        def decoded(start: int, stop: int) -> Tensor:
            return self.decode(layout, part, rows[start:stop])

        return lambda x: product_by_blocks(x, len(rows), layout.num_cols, decoded)

    def decode(self, layout: formats.RowLayout, part: Part, rows: Tensor) -> Tensor:
        """Decodes a part of rows u8 [rows, row bytes] to float32 [rows, columns]; all operations give the same bits."""
        from moe_pack.formats.pack.codecs import decode_part  # kernels decode without it

        codes = rows[:, part.offset : part.offset + part.code_bytes]
        scales = rows[:, part.scales_offset : part.bias_offset]
        return decode_part(part.format, layout.num_cols, torch.cat((codes, scales), dim=1))

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Returns `R (a * x)`, the input of a rotated layer's experts, float32 [T, d]."""
        return transform(x * rotation.input)

    def rotate_back(self, y: Tensor, rotation: Rotation) -> Tensor:
        """Returns `b * R y`, float32 [T, d], for the sum y of a rotated layer's experts."""
        return transform(y) * rotation.output

    def fastest_stored(self, weight: Tensor) -> Tensor:
        """Returns a stored weight in the dtype that multiplies one token fastest; torch converts 16 bits every time."""
        return weight.float()


TORCH: Operations = Operations()


def row_blocks(num_rows: int, num_cols: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of consecutive blocks of rows; a block of `parts` matrices fits `MAX_DECODED_BYTES`."""
    step = max(1, MAX_DECODED_BYTES // (4 * num_cols * parts))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def product_by_blocks(x: Tensor, num_rows: int, num_cols: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    """Returns `x @ matrix.T`, float32 [T, num_rows], from `rows(start, stop)`, float32, a block of rows at a time."""
    # The output is allocated first: allocated between two blocks, it would lie in the memory of the first block's rows,
    # and the next block would need new memory.
    y = x.new_empty((len(x), num_rows))
    for start, stop in row_blocks(num_rows, num_cols):
        y[:, start:stop] = x @ rows(start, stop).T
    return y


@dataclass(frozen=True, slots=True, eq=False)
class NativeProduct:
    """The product with rows u8 [rows, row bytes] in one piece by a kernel; `layout` is from `row_numbers`."""

    kernels: cpu.Kernels
    layout: NDArray[np.int32]
    rows: NDArray[np.uint8]

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.product(x, self.layout, self.rows)


class NativeOperations(Operations):
    """The operations by native kernels; all tensors are on the CPU. The caller closes the kernels."""

    def __init__(self, kernels: cpu.Kernels) -> None:
        self.kernels = kernels

    def tokens_alone(self) -> AbstractContextManager[None]:
        return self.kernels.tokens_alone()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.kernels.rms_norm(x, weight, eps)

    def _choose(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if spec.num_identity or spec.zero_outside:  # the kernel lacks them
            return router.choose(logits, spec, bias)
        return self.kernels.route(logits, spec, bias, router.least_sum(spec))

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: ropes.Angles,
        interleaved: bool,
        view: softmax.View,
    ) -> Tensor:
        cache, spec, window = view.cache, view.spec, view.window
        is_lacking = norms is not None and norms.is_last
        if spec.chunked and window is not None:  # unit norms may come first; one token of a chunk sees a window
            is_lacking, window = len(projected[0]) > 1, cache.num_tokens % window + 1
        if is_lacking or spec.value_dim != spec.head_dim or view.chosen is not None:
            return super().attend(projected, norms, angles, interleaved, view)
        head_norms = None if norms is None else (norms.q, norms.k, norms.eps)
        cached = cpu.CachedRows(cache.keys, cache.values, cache.rows[0].dtype, cache.num_tokens)
        return self.kernels.attend(projected, head_norms, angles, interleaved, cached, spec, window, view.sinks)

    def activate(self, gate: Tensor | None, up: Tensor, function: formats.NeuronFunction) -> Tensor:
        return self.kernels.activate(gate, up, function)

    def scale_by_sigmoid(self, y: Tensor, logits: Tensor) -> Tensor:
        return self.kernels.scale_by_sigmoid(y, logits)

    def convolve(
        self,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        state: states.LayerState,
        *,
        dilation: int = 1,
        activates: bool = False,
    ) -> Tensor:
        if dilation > 1:  # the kernel lacks it
            return super().convolve(x, kernel, bias, state, dilation=dilation, activates=activates)
        y = self.kernels.convolve(x, kernel, bias, state.conv)
        return torch.nn.functional.silu(y) if activates else y

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: states.LayerState
    ) -> Tensor:
        return self.kernels.recur(q, k, v, log_decay, rate, state.recurrent)

    def gated_delta(
        self,
        qkv: Tensor,
        z: Tensor,
        gates: "recurrence.Gates",
        delta: "recurrence.DeltaNet",
        state: states.LayerState,
    ) -> Tensor:
        assert gates.rates is not None, "the delta rule has rates"
        inputs, vectors = (qkv, z, gates.steps, gates.rates), (delta.kernel, gates.a_log, gates.dt_bias, delta.out_norm)
        return self.kernels.gated_delta(inputs, vectors, delta.spec, delta.eps, state.conv, state.recurrent)

    def stored_product(self, weight: Tensor) -> Product:
        rows = weight.contiguous().view(torch.uint8).numpy()
        return NativeProduct(self.kernels, cpu.stored_numbers(weight.dtype, weight.shape[1]), rows)

    def row_product(self, layout: formats.RowLayout, rows: Tensor) -> Product:
        return NativeProduct(self.kernels, cpu.row_numbers(layout, layout.parts[0].name), rows.numpy())

    def decode(self, layout: formats.RowLayout, part: Part, rows: Tensor) -> Tensor:
        return self.kernels.decode(cpu.row_numbers(layout, part.name), rows.numpy())

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return self._rotated(x, rotation.input, is_scaled_first=True)

    def rotate_back(self, y: Tensor, rotation: Rotation) -> Tensor:
        return self._rotated(y, rotation.output, is_scaled_first=False)

    def _rotated(self, x: Tensor, scale: Tensor, *, is_scaled_first: bool) -> Tensor:
        matrix = hartley_array(x.shape[-1])
        if matrix is None:
            return transform(x * scale) if is_scaled_first else transform(x) * scale
        return self.kernels.rotate(x, scale, is_scaled_first, matrix)

    def fastest_stored(self, weight: Tensor) -> Tensor:
        return weight


@lru_cache(maxsize=8)
def hartley_array(hidden_size: int) -> NDArray[np.float32] | None:
    """Returns the Hartley matrix of the odd factor m, float32 [m, m]; None if it exceeds `MAX_ODD_FACTOR`."""
    m = odd_factor(hidden_size)
    return None if m > cpu.MAX_ODD_FACTOR else np.array(hartley(m), np.float32)


@contextmanager
def operations_for(device: torch.device, threads: int | None = None) -> Iterator[Operations]:
    """Yields the operations for a device and closes them: on a CPU native ones if they were built, else torch."""
    kernels = cpu.open_kernels(threads) if device.type == "cpu" else None
    if kernels is None:
        yield TORCH
        return
    try:
        yield NativeOperations(kernels)
    finally:
        kernels.close()
