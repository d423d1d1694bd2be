"""The operations of a forward pass by the native kernels, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec, Part, RouterSpec, RowLayout
from moe_pack.runtime.kv_cache import LayerCache
from moe_pack.runtime.native_kernels import Kernels, open_kernels, row_numbers, stored_numbers
from moe_pack.runtime.operations import TORCH, HeadNorms, Operations, Product
from moe_pack.runtime.rope import Angles
from moe_pack.runtime.router import least_sum


class NativeOperations(Operations):
    """The operations by kernels, which stay the caller's to close. All tensors are on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `x / rms(x) * weight` over the last dimension of x float32 [..., n]."""
        return self.kernels.rms_norm(x, weight, eps)

    def _choose(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.kernels.route(logits, spec, bias, least_sum(spec))

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: Angles,
        interleaved: bool,
        cache: LayerCache,
        spec: GroupedQuerySpec,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Returns the attention of each query head, float32 [T, num_heads * head_dim]."""
        head_norms, eps = (None, 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        cached = cache.keys, cache.values
        return self.kernels.attend(
            projected, head_norms, eps, angles, interleaved, cached, cache.num_tokens, spec, window, sinks
        )

    def stored_product(self, weight: Tensor) -> Product:
        """Returns the product with rows of values, which are multiplied as they lie."""
        held = weight.contiguous().view(torch.uint8).numpy()
        return partial(self.kernels.product, layout=stored_numbers(weight.dtype, weight.shape[1]), rows=held)

    def row_product(self, layout: RowLayout, rows: Tensor) -> Product:
        """Returns the product with rows of codes, which are multiplied as they lie."""
        return partial(self.kernels.product, layout=row_numbers(layout, layout.parts[0].name), rows=rows.numpy())

    def decode(self, layout: RowLayout, part: Part, rows: Tensor) -> Tensor:
        """Returns a part of rows in float32 [rows, columns]."""
        return self.kernels.decode(row_numbers(layout, part.name), rows.numpy())

    def fastest_stored(self, weight: Tensor) -> Tensor:
        """Returns the weight itself: 16 bits are multiplied in half the time of 32."""
        return weight


@contextmanager
def operations_for(device: torch.device, threads: int | None = None) -> Iterator[Operations]:
    """Operations on a device, closed at the end: native ones on the CPU where the extension was built, else torch."""
    kernels = open_kernels(threads) if device.type == "cpu" else None
    if kernels is None:
        yield TORCH
        return
    try:
        yield NativeOperations(kernels)
    finally:
        kernels.close()
