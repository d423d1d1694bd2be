"""Part `llama`: llama.cpp on the same GPU, and torch's own product as a ceiling of ours.

llama.cpp comes as the archive of `llama_cuda.py`, or the one that LLAMA_CUDA names. Models have the dimensions of
Mixtral-8x7B and Qwen3-30B-A3B and random weights in Q4_0. All their neurons run: llama.cpp leaves none out. Each model
runs with everything on the GPU, and in 11 GiB with the experts of the first layers on the CPU. A prompt is one pass.
The ceiling is a token's experts as one matrix of 4 bits. In a rehearsal models are tiny.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from llama_cuda import ARCHIVE, FOLDER, PROGRAM
from support.synthetic import shrunk
from torch import Tensor

from gpu.engines import MEMORY, driver_bytes, remove_packs
from gpu.kernels import MIXTRAL, QWEN3, Model
from gpu.measuring import ByteClock, Clock, Results, Timed, copies_beyond
from moe_pack.formats import ModelSpec
from moe_pack.formats.families import model_spec
from moe_pack.formats.parts import GroupedQuerySpec

_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
_BUDGET_BYTES = 11 << 30
_PROMPTS, _DECODED = (512, 2048), 128  # tokens
_REHEARSED = (8, 16), 2
_PASS_TOKENS = 2048
_Q4_0_BYTES = 18 / 32  # a weight
_FILE_BYTES = 64 << 20  # that a model's file has beyond its quantized matrices, at most
# The driver's context, cuBLAS, and a pass of 2,048 tokens; the experts of one layer are added, which a prompt brings
# from the host.
_WORKSPACE_BYTES = 7 << 28
_SPARE_BYTES = 2 << 30  # that stay free in a file system
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Skipped:
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class LlamaFile:
    """A synthetic model, written in so many seconds."""

    model: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LlamaRun:
    """A start of llama-bench. `cpu_layers`: the first layers, with experts on the CPU.   `budget_bytes`: None: none."""

    budget_bytes: int | None
    cpu_layers: int
    threads: tuple[int, ...]
    repetitions: int
    prompts: tuple[int, ...] = _PROMPTS
    decoded: int = _DECODED

    def command(self, program: Path, gguf: Path) -> list[str]:
        """Returns the command line. Weights are read, not mapped: the CPU's are then page-locked."""
        options = {
            "-m": gguf,
            "-o": "jsonl",
            "-r": self.repetitions,
            "-p": ",".join(map(str, self.prompts)),
            "-n": self.decoded,
            "-b": _PASS_TOKENS,
            "-ub": _PASS_TOKENS,
            "-t": ",".join(map(str, self.threads)),
            "-ngl": 99,
            "-ncmoe": self.cpu_layers,
            "-fa": "on",
            "-lm": "none",
        }
        return [str(program), *(str(word) for option in options.items() for word in option)]


@dataclass(frozen=True, slots=True)
class LlamaSpeed:
    """A test of llama-bench: `pp512` reads 512 tokens, `tg128` decodes 128.

    `per_s`: tokens a second, with their standard deviation.   `gpu_bytes`: the most that the process took of the GPU.
    """

    model: str
    budget_bytes: int | None
    cpu_layers: int
    threads: int
    test: str
    per_s: float
    deviation: float
    gpu_bytes: int
    neurons: str
    version: str


def run(results: Results, clock: Clock) -> None:
    archive = Path(os.environ.get("LLAMA_CUDA") or ARCHIVE)
    if archive.exists():
        folder = unpacked(archive)
        for model in _MODELS:
            results.section(model, partial(_measure, results, clock, folder, model))
    else:
        why = f"found no {archive.name}; python tests/bench/llama_cuda.py makes it"
        results.add(Skipped("llama.cpp", why))
    timer, tiny = ByteClock(clock, clock.copy_rate()), Model("tiny", 128, 96, 2)
    for dimensions in (tiny,) if clock.is_rehearsal else (MIXTRAL, QWEN3):
        results.section(f"int4, {dimensions.name}", partial(_packed, results, timer, dimensions))


def unpacked(archive: Path) -> Path:
    """Returns the folder of the archive's files, which it writes unless they are newer."""
    folder = FOLDER / "run"
    if not folder.exists() or folder.stat().st_mtime < archive.stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        folder.touch()
    return folder


def _measure(results: Results, clock: Clock, folder: Path, model: str) -> None:
    spec = shrunk(model, 2) if clock.is_rehearsal else model_spec(model, None)
    place = _place(round(_quantized_bytes(spec) + _FILE_BYTES), clock.is_rehearsal)
    with tempfile.TemporaryDirectory(dir=place) as made:
        gguf, start = Path(made) / f"{model}.gguf", time.perf_counter()
        sys.path.append(str(folder))  # the archive has the gguf package
        from benchlib.gguf_files import DEFAULT_TYPE, write_gguf

        write_gguf(gguf, spec, DEFAULT_TYPE)
        results.add(LlamaFile(model, gguf.stat().st_size, time.perf_counter() - start))
        for wanted in _runs(spec, clock.is_rehearsal):
            name = f"{model}, {'all' if wanted.budget_bytes is None else f'{wanted.budget_bytes >> 30} GiB'}"
            results.section(name, partial(_bench, results, clock, folder, gguf, wanted))


def _place(num_bytes: int, is_rehearsal: bool) -> Path:
    """Returns a folder with space for a file, in memory if it is there; packs make way for it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folders = [FOLDER] if is_rehearsal or not os.access(MEMORY, os.W_OK) else [MEMORY, FOLDER]
    for attempt in range(2):
        for folder in folders:
            if shutil.disk_usage(folder).free - _SPARE_BYTES >= num_bytes:
                return folder
        if not attempt:
            remove_packs(is_rehearsal)
    raise OSError(f"a model needs {num_bytes:,} bytes; {' and '.join(map(str, folders))} have less")


def _runs(spec: ModelSpec, is_rehearsal: bool) -> list[LlamaRun]:
    cores = len(os.sched_getaffinity(0))
    if is_rehearsal:
        return [LlamaRun(None, 0, (cores,), 1, *_REHEARSED), LlamaRun(_BUDGET_BYTES, 1, (1, cores), 1, *_REHEARSED)]
    # Two threads of a core share its units, and llama.cpp may be faster with one of them.
    threads = tuple(sorted({max(1, cores // 2), cores}))
    return [LlamaRun(None, 0, (cores,), 3), LlamaRun(_BUDGET_BYTES, cpu_layers(spec, _BUDGET_BYTES), threads, 2)]


def cpu_layers(spec: ModelSpec, budget_bytes: int) -> int:
    """Returns the least number of layers whose experts have to be on the CPU within a budget of the GPU."""
    layer_bytes = _layer_expert_weights(spec) * _Q4_0_BYTES
    attention = _grouped_query(spec)
    token_bytes = spec.num_hidden_layers * 2 * 2 * attention.num_kv_heads * attention.head_dim  # of keys and values
    # The embedding stays on the CPU.
    dense_weights = spec.num_hidden_layers * _attention_weights(spec) + spec.vocab_size * spec.hidden_size
    free = budget_bytes - _WORKSPACE_BYTES - layer_bytes - token_bytes * max(_PROMPTS) - dense_weights * _Q4_0_BYTES
    return spec.num_hidden_layers - max(0, min(int(free // layer_bytes), spec.num_hidden_layers))


def _quantized_bytes(spec: ModelSpec) -> float:
    layer = _layer_expert_weights(spec) + _attention_weights(spec)
    return (spec.num_hidden_layers * layer + 2 * spec.vocab_size * spec.hidden_size) * _Q4_0_BYTES


def _layer_expert_weights(spec: ModelSpec) -> int:
    return 3 * spec.router.num_experts * spec.hidden_size * spec.expert.intermediate_size


def _attention_weights(spec: ModelSpec) -> int:
    attention = _grouped_query(spec)
    return 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_dim * spec.hidden_size


def _grouped_query(spec: ModelSpec) -> GroupedQuerySpec:
    assert isinstance(spec.attention, GroupedQuerySpec), "both models have grouped queries"
    return spec.attention


def _bench(results: Results, clock: Clock, folder: Path, gguf: Path, wanted: LlamaRun) -> None:
    """Runs llama-bench and adds a row for each of its tests, as soon as it is printed."""
    command, environment = wanted.command(folder / PROGRAM, gguf), os.environ | {"LD_LIBRARY_PATH": _libraries()}
    with tempfile.TemporaryFile("w+") as errors, _most_gpu_bytes(clock) as most:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as lines:
            for line in lines:
                test = json.loads(line)
                assert clock.is_rehearsal or "CUDA" in test["backends"], "llama.cpp found no GPU"
                results.add(read_speed(test, gguf.stem, wanted, most()))
        code = process.wait()
        errors.seek(0)
        assert code == 0, f"{PROGRAM} ended with {code}: {errors.read()[-800:]}"


def read_speed(test: dict[str, Any], model: str, wanted: LlamaRun, gpu_bytes: int) -> LlamaSpeed:
    """Returns the row of a test as llama-bench prints it in JSON."""
    prompt, decoded = test["n_prompt"], test["n_gen"]
    assert bool(prompt) != bool(decoded), f"found a test of {prompt} and {decoded} tokens, expected one of them"
    return LlamaSpeed(
        model=model,
        budget_bytes=wanted.budget_bytes,
        cpu_layers=test["n_cpu_moe"],
        threads=test["n_threads"],
        test=f"pp{prompt}" if prompt else f"tg{decoded}",
        per_s=test["avg_ts"],
        deviation=test["stddev_ts"],
        gpu_bytes=gpu_bytes,
        neurons="all run",
        version=test["build_commit"],
    )


def _libraries() -> str:
    """Returns the folders of CUDA's libraries that torch brings along, as a path."""
    folders = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib"))
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("LD_LIBRARY_PATH")]))


@contextmanager
def _most_gpu_bytes(clock: Clock) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the most bytes of the GPU that other processes took meanwhile."""
    before, most, is_done = driver_bytes(clock), [0], Event()

    def poll() -> None:
        while not is_done.wait(_POLL_S):
            most[0] = max(most[0], driver_bytes(clock) - before)

    thread = Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        is_done.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class DenseTime:
    """A matrix [rows, cols] times so many vectors. `tflops`: of their multiplications."""

    operation: str
    rows: int
    cols: int
    bits: int
    tokens: int
    tflops: float
    timed: Timed


_GROUP = 64  # codes with one scale, as in our packs
_INNER_TILES = 8  # of the layout that CUDA's product reads
_FEW_TOKENS = (1, 4, 16)


def _packed(results: Results, timer: ByteClock, model: Model) -> None:
    """A token's experts of 4 bits as one matrix: gates and ups, and downs."""
    is_cpu = timer.clock.device.type == "cpu"
    names = [f"_{name}{'_for_cpu' * is_cpu}" for name in ("convert_weight_to_int4pack", "weight_int4pack_mm")]
    if missing := [name for name in names if not hasattr(torch, name)]:
        results.add(Skipped("torch._weight_int4pack_mm", f"torch {torch.__version__} has no {missing[0]}"))
        return
    convert, multiply = (getattr(torch, name) for name in names)
    device = timer.clock.device
    for rows, cols in ((2 * model.k * model.f, model.d), (model.d, model.k * model.f)):
        num_bytes = rows * cols // 2 + rows * cols // _GROUP * 4
        # The CPU's layout is made of codes, CUDA's of bytes with two codes each.
        width, most, dtype = (cols, 16, torch.int32) if is_cpu else (cols // 2, 256, torch.uint8)
        codes = torch.randint(most, (rows, width), device=device, dtype=dtype)
        packed = [convert(codes, _INNER_TILES) for _ in range(copies_beyond(timer.clock.l2_bytes, num_bytes))]
        scales = [torch.rand(cols // _GROUP, rows, 2, device=device, dtype=torch.bfloat16) for _ in packed]
        for tokens in _FEW_TOKENS:
            x = torch.randn(tokens, cols, device=device, dtype=torch.bfloat16)

            def product(
                number: int, x: Tensor = x, packed: list[Tensor] = packed, scales: list[Tensor] = scales
            ) -> None:
                multiply(x, packed[number], _GROUP, scales[number])

            timed = timer.timed(num_bytes, product, len(packed))
            tflops = 2 * rows * cols * tokens / timed.us / 1e6
            results.add(DenseTime("torch._weight_int4pack_mm", rows, cols, 4, tokens, tflops, timed))
