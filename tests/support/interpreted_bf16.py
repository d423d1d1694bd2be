"""Bfloat16 in Triton's interpreter, which by itself rounds towards zero."""

from typing import Any

import numpy as np
import torch


def correct_bf16() -> None:
    """Makes the interpreter round to bfloat16 as a GPU does; NaNs stay NaNs."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_otherwise = InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast_otherwise(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast
