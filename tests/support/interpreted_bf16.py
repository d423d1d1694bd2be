"""Bfloat16 in Triton's interpreter, which by itself multiplies the bits as integers and rounds towards zero."""

from typing import Any

import numpy as np
import torch


def correct_bf16() -> None:
    """Makes the interpreter round to bfloat16 as a GPU does, and multiply the values; NaNs stay NaNs."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_otherwise, dot_otherwise = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast_otherwise(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot_otherwise(self, _float32(a), _float32(b), *others)

    def _float32(values: Any) -> Any:
        if values.dtype.scalar != tl.bfloat16:
            return values
        return TensorHandle((values.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
