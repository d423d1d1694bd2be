"""llama.cpp's kernels as a comparison: products of rows of its types with tokens, in this process, by one thread.

A product is a graph of one `ggml_mul_mat`, as llama.cpp computes it, with the conversion of the tokens to 8 bits. The
rows are those of its own quantization of random weights. llama.cpp chooses its instruction set when it is compiled.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_F32 = 0
_TYPES = {  # their numbers in every GGUF
    "Q4_0": 2,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
}
_GRAPH_BYTES = 1 << 24  # of a product next to its matrices, with room for the tokens in 8 bits


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


# Functions that do not take and return plain integers, by their results and arguments.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
    "ggml_init": (ctypes.c_void_p, [_InitParams]),
    "ggml_new_tensor_2d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "ggml_get_data": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_mul_mat": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_new_graph": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_graph_compute": (ctypes.c_int, [ctypes.c_void_p] * 2),
    "ggml_build_forward_expand": (None, [ctypes.c_void_p] * 2),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    ),
}


class Ggml:
    """The libraries libggml-cpu and libggml-base of one folder.

    Args:    path: of libggml-cpu.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._base = ctypes.CDLL(str(path.with_name(path.name.replace("cpu", "base"))))
            self._cpu = ctypes.CDLL(str(path))
        except OSError as fault:
            raise click.ClickException(f"{path}: cannot be loaded: {fault}") from fault
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._base, name)
            function.restype, function.argtypes = result, arguments
        self._cpu.ggml_cpu_init()
        self._cpu.ggml_backend_cpu_init.restype = ctypes.c_void_p
        self._cpu.ggml_backend_cpu_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._backend = self._cpu.ggml_backend_cpu_init()
        self._cpu.ggml_backend_cpu_set_n_threads(self._backend, 1)

    def products(self, kind: str, weights: Floats, counts: tuple[int, ...]) -> list[Callable[[], Floats]]:
        """Returns functions that multiply rows of a type with random tokens, one function for each number of tokens.

        They compute float32 [tokens, rows] and return a view of it.

        Args:    weights: float32 [rows, columns], which are quantized.
        """
        rows, columns = weights.shape
        stored = np.empty((rows, self._base.ggml_row_size(self._number(kind), columns)), np.uint8)
        importance = np.ones(columns, np.float32)
        pointers = [array.ctypes.data for array in (weights, stored)]
        self._base.ggml_quantize_chunk(self._number(kind), *pointers, 0, rows, columns, importance.ctypes.data)
        return [self._product(kind, stored, columns, count) for count in counts]

    def _product(self, kind: str, stored: NDArray[np.uint8], columns: int, count: int) -> Callable[[], Floats]:
        base, rows = self._base, len(stored)
        x = tokens(count, columns)
        context = base.ggml_init(_InitParams(stored.nbytes + x.nbytes + 4 * count * rows + _GRAPH_BYTES, None, False))
        matrix = base.ggml_new_tensor_2d(context, self._number(kind), columns, rows)
        given = base.ggml_new_tensor_2d(context, _F32, columns, count)
        for tensor, array in ((matrix, stored), (given, x)):
            ctypes.memmove(base.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        result, graph = base.ggml_mul_mat(context, matrix, given), base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, result)
        place = ctypes.cast(base.ggml_get_data(result), ctypes.POINTER(ctypes.c_float))
        compute = partial(self._compute, graph, np.ctypeslib.as_array(place, (count, rows)))
        compute()  # the first time it also takes its workspace
        return compute

    def _compute(self, graph: int, result: Floats) -> Floats:
        status = self._base.ggml_backend_graph_compute(self._backend, graph)
        assert status == 0, f"ggml_backend_graph_compute: {status}"
        return result

    def _number(self, kind: str) -> int:
        if kind not in _TYPES:
            raise click.ClickException(f"{kind}: expected one of {', '.join(_TYPES)}")
        return _TYPES[kind]


def tokens(count: int, columns: int) -> Floats:
    """Returns random tokens, float32 [count, columns]."""
    return np.random.default_rng(count).standard_normal((count, columns), np.float32)
