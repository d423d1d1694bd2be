"""llama.cpp's side of `quality_curve.py`: quantizes matrices with its own code, and gives them back as gguf reads them.

A process of its own, for a Python that has gguf and numpy, and llama_cpp unless --libggml names the library; the
project needs none of them. In the folder it finds for each matrix `NAME.npy`, float32 [experts, rows, columns], and
`NAME-importance.npy`, float32 [experts, columns]; it writes `NAME-stored.npy` beside them, and prints the bytes.
"""

import argparse
import ctypes
import json
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = ("gate", "up", "down")


def find_library() -> Path:
    """The library that llama_cpp brings along; found without loading llama_cpp."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("llama_cpp is not installed; give --libggml")
    return Path(found.origin).parent / "lib" / "libggml-base.so"


def quantize(
    library: ctypes.CDLL, kind: gguf.GGMLQuantizationType, rows: NDArray[np.float32], importance: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """The bytes of rows [n, columns], u8 [n, row bytes], with an importance for every column."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.empty((len(rows), rows.shape[1] // block * block_bytes), np.uint8)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (rows, stored, importance)]
    # (type, source, destination, first, rows, columns, importance)
    written = library.ggml_quantize_chunk(
        int(kind), pointers[0], pointers[1], ctypes.c_int64(0), *map(ctypes.c_int64, rows.shape), pointers[2]
    )
    if written != stored.nbytes:
        raise SystemExit(f"{kind.name}: llama.cpp wrote {written:,} bytes, expected {stored.nbytes:,}")
    return stored


def main() -> None:
    """Quantizes to one type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=[kind.name for kind in gguf.GGMLQuantizationType])
    parser.add_argument("--libggml", type=Path)
    options = parser.parse_args()
    library, kind = ctypes.CDLL(str(options.libggml or find_library())), gguf.GGMLQuantizationType[options.kind]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    num_bytes = 0
    for name in _NAMES:
        weights: NDArray[np.float32] = np.load(options.folder / f"{name}.npy")
        importance: NDArray[np.float32] = np.load(options.folder / f"{name}-importance.npy")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            stored = list(pool.map(lambda held: quantize(library, kind, *held), zip(weights, importance, strict=True)))
        num_bytes += sum(held.nbytes for held in stored)
        read = np.stack([gguf.quants.dequantize(held, kind) for held in stored])
        np.save(options.folder / f"{name}-stored.npy", read.astype(np.float32))
    print(json.dumps({"bytes": num_bytes}))


if __name__ == "__main__":
    main()
