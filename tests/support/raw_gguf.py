"""GGUF files made byte by byte, also those that the `gguf` package would never write."""

import struct
from collections.abc import Sequence
from typing import Any

U32, TEXT, LIST, F32 = 4, 8, 9, 6  # types of values
KIND_F32, KIND_Q8_0 = 0, 8  # types of tensors
Value = tuple[str, int, bytes]
Tensor = tuple[str, Sequence[int], int, int]  # name, dimensions with the contiguous one first, type, offset


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def list_of(inner: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", inner, count) + raw


def gguf_file(
    metadata: Sequence[Value], tensors: Sequence[Tensor] = (), data: bytes = b"", align: int = 32, **changed: Any
) -> bytes:
    """Returns a file: header, zeros up to a multiple of `align`, then `data`.

    Args:    changed: `magic`, `version`, `num_tensors`, `num_values` in place of the right ones.
    """
    head: bytes = changed.get("magic", b"GGUF") + struct.pack(
        "<IQQ",
        changed.get("version", 3),
        changed.get("num_tensors", len(tensors)),
        changed.get("num_values", len(metadata)),
    )
    for key, kind, raw in metadata:
        head += text(key) + struct.pack("<I", kind) + raw
    for name, dimensions, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % align) + data
