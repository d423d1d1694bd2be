"""llama.cpp's side of the comparisons: a process of its own, for a Python that has gguf, numpy and llama_cpp.

The project needs neither gguf nor llama_cpp. `serve` writes a GGUF unless it is there and loads it; it prints one line
of JSON when the model is loaded, then one for each line of JSON on standard input: a `prompt` that goes first, then
`tokens`, timed, all `at_once` or one by one, with so many `threads`; one by one they end after `limit_s` seconds. Ids
are given: nothing is sampled. Only the last token of a batch gets logits; llama.cpp then runs the experts of its last
layer for that token alone. Blocks are random codes under scales that give them the standard deviation of our random
checkpoints, or the one that is given. Tensors that lie in the folder given, as `NAME.npy`, are quantized as they are:
routers, attention and embedding, which with such experts decide where tokens go.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

try:
    import llama_cpp
except ImportError:  # `quantize` does without
    llama_cpp = None

_STANDARD_DEVIATION = 0.02
_EMBEDDING_SCALE = 256.0  # so that tokens stay different after some layers, and go to different experts
_POOL_BYTES = 1 << 25
_Q4_0 = gguf.GGMLQuantizationType.Q4_0  # 4.5 bits a weight, of experts, and of what has no other type
_SCALE = 1 / 4.18  # a block's scale `d` in `d * (code - 8)`, for weights of standard deviation one
_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The model, in the words of config.json; `arch` is llama.cpp's: `llama` (Mixtral), `qwen3moe` or `olmoe`."""

    arch: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Names and shapes, rows first, and whether they are quantized."""
        d, f, E = self.hidden_size, self.intermediate_size, self.num_experts
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab_size, d), True
        yield "output_norm.weight", (d,), False
        yield "output.weight", (self.vocab_size, d), True
        for i in range(self.num_hidden_layers):
            layer = f"blk.{i}"
            yield f"{layer}.attn_norm.weight", (d,), False
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{layer}.attn_{name}.weight", (rows, d), True
            yield f"{layer}.attn_output.weight", (d, q), True
            if self.arch != "llama":  # Qwen3 normalizes each head, OLMoE all heads together
                for name, rows in (("q", q), ("k", kv)):
                    width = self.head_dim if self.arch == "qwen3moe" else rows
                    yield f"{layer}.attn_{name}_norm.weight", (width,), False
            yield f"{layer}.ffn_norm.weight", (d,), False
            yield f"{layer}.ffn_gate_inp.weight", (E, d), False
            for name, shape in (("gate", (E, f, d)), ("up", (E, f, d)), ("down", (E, d, f))):
                yield f"{layer}.ffn_{name}_exps.weight", shape, True


@dataclass(frozen=True, slots=True)
class Given:
    """What is not left to chance: tensors, each in a file of `folder`, and deviations of others by their last name.

    `dense_type`: of those of the folder that are quantized.
    """

    folder: Path | None = None
    deviations: dict[str, float] = field(default_factory=dict)
    dense_type: gguf.GGMLQuantizationType = _Q4_0

    def has(self, name: str) -> bool:
        """Whether a tensor is given."""
        return self.folder is not None and (self.folder / f"{name}.npy").exists()

    def values(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """A tensor that is given."""
        if self.folder is None or not self.has(name):
            return None
        path = self.folder / f"{name}.npy"
        values: NDArray[np.float32] = np.load(path).astype(np.float32)
        if values.shape != shape:
            sys.exit(f"{path}: found shape {values.shape}, expected {shape}")
        return values

    def deviation(self, name: str) -> float:
        """Of the random weights of a tensor."""
        scale = _EMBEDDING_SCALE if name == "token_embd.weight" else 1.0
        return self.deviations.get(name.split(".")[-2], _STANDARD_DEVIATION * scale)


def write_gguf(path: Path, model: Dimensions, given: Given) -> None:
    """Writes a temporary file, and renames it. All cores copy random blocks into it, which is mapped."""
    temporary = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, model.arch)
    _add_facts(writer, model)
    plain = gguf.GGMLQuantizationType.F32
    sizes = []
    for name, shape, is_quantized in model.tensors():
        kind = given.dense_type if is_quantized and given.has(name) else _Q4_0
        stored = _stored_shape(shape, kind) if is_quantized else shape
        dtype = np.dtype(np.uint8 if is_quantized else np.float32)
        sizes.append(int(np.prod(stored)) * dtype.itemsize)
        writer.add_tensor_info(name, stored, dtype, sizes[-1], kind if is_quantized else plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    place = _padded(temporary.stat().st_size)
    os.truncate(temporary, place + sum(map(_padded, sizes)))
    mapped = np.memmap(temporary, np.uint8, "r+")
    generator = np.random.default_rng(0)
    pools: dict[float, NDArray[np.uint8]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        copies = []
        for (name, shape, is_quantized), num_bytes in zip(model.tensors(), sizes, strict=True):
            target = mapped[place : place + num_bytes]
            values = given.values(name, shape)
            if values is not None:
                target[:] = _bytes(gguf.quants.quantize(values, given.dense_type) if is_quantized else values)
            elif is_quantized:
                deviation = given.deviation(name)
                if deviation not in pools:
                    pools[deviation] = _pool(deviation, generator)
                pieces = _pieces(target, pools[deviation], generator)
                copies += [threads.submit(np.copyto, *piece) for piece in pieces]
            else:
                values = generator.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
                target[:] = _bytes(values + np.float32(name.endswith("norm.weight")))
            place += _padded(num_bytes)
        for copy in copies:
            copy.result()
    mapped.flush()
    temporary.rename(path)


def _padded(num_bytes: int) -> int:
    """Returns the bytes that a header or a tensor takes in the file."""
    return -(-num_bytes // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT


def _bytes(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _add_facts(writer: gguf.GGUFWriter, model: Dimensions) -> None:
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_expert_count(model.num_experts)
    writer.add_expert_used_count(model.num_experts_per_tok)
    if model.arch == "qwen3moe":
        writer.add_expert_feed_forward_length(model.intermediate_size)
    writer.add_vocab_size(model.vocab_size)
    # A token's text is its number: llama-server writes text, whatever it is asked.
    words = [f"{number} " for number in range(model.vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))


def _stored_shape(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> tuple[int, ...]:
    """The shape in bytes of a quantized matrix: whole blocks a row."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % weights:
        sys.exit(f"rows of {shape[-1]} weights: {kind.name} has blocks of {weights}")
    return (*shape[:-1], shape[-1] // weights * num_bytes)


def _pool(deviation: float, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of random codes, u8 [blocks, bytes of a block], about `_POOL_BYTES` of them."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[_Q4_0]
    blocks = generator.integers(0, 256, (_POOL_BYTES // num_bytes | 1, num_bytes), np.uint8)
    # No code 0, which has no opposite: codes whose mean is not 0 add one direction to all hidden states, and after a
    # layer all tokens go to the same experts.
    blocks = np.where(blocks & 0x0F, blocks, blocks | 0x08)
    blocks = np.where(blocks & 0xF0, blocks, blocks | 0x80)
    blocks[:, :2] = np.array([_SCALE * deviation], np.float16).view(np.uint8)
    return blocks


def _pieces(
    target: NDArray[np.uint8], pool: NDArray[np.uint8], generator: np.random.Generator
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yields parts of a matrix in bytes, each with a piece of the pool from a random place on."""
    done = 0
    while done < len(target):
        piece = pool[int(generator.integers(len(pool))) :].reshape(-1)[: len(target) - done]
        yield target[done : done + len(piece)], piece
        done += len(piece)


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
    """Writes the GGUF unless it is there, loads it, and times what standard input asks for."""
    if not options.gguf.exists():
        given = Given(options.given, options.deviations, gguf.GGMLQuantizationType[options.dense_type])
        write_gguf(options.gguf, Dimensions(**options.dimensions), given)
    if options.write_only:
        return
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
    one.add_argument("gguf", type=Path, help="the file; written if it is not there")
    one.add_argument("--dimensions", type=json.loads, required=True, help="of the model, as JSON")
    one.add_argument("--context", type=int, default=1024)
    one.add_argument("--mapped", action="store_true", help="leave the weights in the file, mapped, without repacking")
    one.add_argument("--given", type=Path, help="a folder with tensors that are not random")
    one.add_argument("--dense-type", default="Q4_0", help="of the tensors that are given")
    one.add_argument("--deviations", type=json.loads, default={}, help="of random tensors, by their name, as JSON")
    one.add_argument("--write-only", action="store_true", help="write the file and end")
    one = commands.add_parser("quantize")
    one.set_defaults(run=quantize)
    one.add_argument("folder", type=Path)
    one.add_argument("kind", choices=[kind.name for kind in gguf.GGMLQuantizationType])
    one.add_argument("--libggml", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
