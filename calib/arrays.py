"""Named arrays as safetensors files: the body of a profile. Little-endian; read back only as they were promised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import PackError, RangeReader, assemble, read_header

Array = NDArray[Any]

_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_BF16_SUFFIX = "_weight"  # numpy has no bfloat16
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def write_arrays(arrays: Mapping[str, Array]) -> bytes:
    """The whole safetensors file of some arrays; uint16 under a name that ends in `_weight` is bfloat16's bits."""
    return assemble(
        (name, _dtype_name(name, array), array.shape, np.ascontiguousarray(array).tobytes())
        for name, array in arrays.items()
    )


def _dtype_name(name: str, array: Array) -> str:
    return "BF16" if name.endswith(_BF16_SUFFIX) and array.dtype == np.uint16 else _NAMES[array.dtype]


def read_all_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, whatever they are called.

    Raises:  PackError if the file is missing, damaged, or holds an array of a kind that profiles have not.
    """
    arrays = {}
    entries = read_header(path, PackError)
    with RangeReader(path, PackError) as reader:
        for entry in entries:
            if entry.name.startswith("pad."):
                continue
            is_bf16 = entry.dtype == "BF16" and entry.name.endswith(_BF16_SUFFIX)
            if entry.dtype not in _DTYPES and not is_bf16:
                raise PackError(f"{path.name}: tensor {entry.name!r} is {entry.dtype}, which no profile has")
            raw = reader.read(entry.offset, entry.num_bytes)
            arrays[entry.name] = raw.view(_DTYPES["U16" if is_bf16 else entry.dtype]).reshape(entry.shape)
    return arrays


def check_arrays(arrays: Mapping[str, Array], wanted: Mapping[str, tuple[str, tuple[int, ...]]], place: str) -> None:
    """Checks that the arrays are exactly those wanted, by name, dtype and shape.

    Raises:  PackError naming the first that is not.
    """
    for name in [*wanted, *arrays]:
        if name not in wanted:
            raise PackError(f"{place}: unknown tensor {name!r}")
        if name not in arrays:
            raise PackError(f"{place}: tensor {name!r} is missing")
        dtype, shape = wanted[name]
        found = arrays[name]
        if found.dtype != np.dtype(_DTYPES[dtype]) or found.shape != shape:
            raise PackError(
                f"{place}: tensor {name!r} is {_NAMES[found.dtype]} {list(found.shape)}, expected {dtype} {list(shape)}"
            )
