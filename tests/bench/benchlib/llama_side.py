"""llama.cpp's side of the comparisons: a process of its own, for a Python that has gguf, numpy and llama_cpp.

The project needs no llama_cpp. `serve` loads a GGUF; it prints one line of JSON when the model is loaded, then one for
each line of JSON on standard input: a `prompt` that goes first, then `tokens`, timed, all `at_once` or one by one, with
so many `threads`; one by one they end after `limit_s` seconds. Ids are given: nothing is sampled. Only the last token
of a batch gets logits; llama.cpp then runs the experts of its last layer for that token alone.

`quantize` stores matrices with llama.cpp's own code and gives them back as gguf reads them. In the folder it finds for
each matrix `NAME.npy`, float32 [experts, rows, columns], and `NAME-importance.npy`, float32 [experts, columns]; it
writes `NAME-stored.npy` there, and prints the bytes. Of llama_cpp it needs the library alone.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

try:
    import llama_cpp
except ImportError:  # `quantize` does without
    llama_cpp = None

_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a prompt, and of so many tokens after it."""

    prompt_s: float
    seconds: float
    num_tokens: int


class Llama:
    """A loaded model and one sequence; keeps what llama.cpp said of its buffers while loading."""

    def __init__(self, path: Path, context_tokens: int, mapped: bool) -> None:
        self.log: list[str] = []
        self._on_log = llama_cpp.llama_log_callback(lambda _, text, __: self.log.append(text.decode(errors="replace")))
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        model_params.use_extra_bufts = not mapped  # repacked weights
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            sys.exit("".join(self.log))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = params.n_ubatch = _BATCH_TOKENS
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit("".join(self.log))
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.context_tokens: int = llama_cpp.llama_n_ctx(self._context)
        self.weight_bytes: int = llama_cpp.llama_model_size(self._model)
        self.buffers = [line.strip() for line in "".join(self.log).splitlines() if "buffer size" in line]

    def time(
        self,
        prompt: list[int],
        tokens: list[int],
        at_once: bool,
        threads: int,
        limit_s: float = float("inf"),
    ) -> Timing:
        """Times `tokens` after `prompt`, from an empty context; no further one begins after `limit_s` seconds."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        llama_cpp.llama_set_n_threads(self._context, threads, threads)
        asked = time.perf_counter()
        if prompt:
            self._decode(prompt, 0)
        began, num_tokens = time.perf_counter(), len(tokens)
        if at_once:
            self._decode(tokens, len(prompt))
        else:
            for position, token in enumerate(tokens, len(prompt)):
                self._decode([token], position)
                if time.perf_counter() - began > limit_s:
                    num_tokens = position + 1 - len(prompt)
                    break
        seconds = time.perf_counter() - began
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self.vocab_size,))
        if not np.isfinite(logits).all() or not logits.any():
            sys.exit("logits are not finite, or all zero")
        return Timing(began - asked, seconds, num_tokens)

    def _decode(self, ids: list[int], position: int) -> None:
        """Appends tokens; the last one's logits are there when this returns."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for idx, token in enumerate(ids):
            batch.token[idx] = token
            batch.pos[idx] = position + idx
            batch.n_seq_id[idx] = 1
            batch.seq_id[idx][0] = 0
            batch.logits[idx] = idx == len(ids) - 1
        if llama_cpp.llama_decode(self._context, batch):
            sys.exit("llama_decode failed: " + "".join(self.log[-5:]))
        llama_cpp.llama_synchronize(self._context)


def serve(options: argparse.Namespace) -> None:
    """Loads a GGUF, and times what standard input asks for."""
    began = time.perf_counter()
    llama = Llama(options.gguf, options.context, options.mapped)
    ready = {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "weight_bytes": llama.weight_bytes,
        "buffers": llama.buffers,
        "load_s": time.perf_counter() - began,
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(llama.time(**json.loads(line)))), flush=True)


def find_library() -> Path:
    """The library that llama_cpp brings along; found without loading llama_cpp."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("llama_cpp is not installed; give --libggml")
    return Path(found.origin).parent / "lib" / "libggml-base.so"


def quantized_rows(
    library: ctypes.CDLL, kind: gguf.GGMLQuantizationType, rows: NDArray[np.float32], importance: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Returns the bytes of rows [n, columns], u8 [n, row bytes], with an importance for every column."""
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


def quantize(options: argparse.Namespace) -> None:
    """Stores the matrices of a folder as one type."""
    library, kind = ctypes.CDLL(str(options.libggml or find_library())), gguf.GGMLQuantizationType[options.kind]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    num_bytes = 0
    for name in ("gate", "up", "down"):
        weights: NDArray[np.float32] = np.load(options.folder / f"{name}.npy")
        importance: NDArray[np.float32] = np.load(options.folder / f"{name}-importance.npy")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            stored = list(
                pool.map(lambda pair: quantized_rows(library, kind, *pair), zip(weights, importance, strict=True))
            )
        num_bytes += sum(rows.nbytes for rows in stored)
        read = np.stack([gguf.quants.dequantize(rows, kind) for rows in stored])
        np.save(options.folder / f"{name}-stored.npy", read.astype(np.float32))
    print(json.dumps({"bytes": num_bytes}))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("serve")
    one.set_defaults(run=serve)
    one.add_argument("gguf", type=Path)
    one.add_argument("--context", type=int, default=1024)
    one.add_argument("--mapped", action="store_true", help="leave the weights in the file, mapped, without repacking")
    one = commands.add_parser("quantize")
    one.set_defaults(run=quantize)
    one.add_argument("folder", type=Path)
    one.add_argument("kind", choices=[kind.name for kind in gguf.GGMLQuantizationType])
    one.add_argument("--libggml", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
