"""How fast the native CPU kernels are: experts against the memory's rate, whole decode and prefill against llama.cpp.

python tests/bench/kernels.py experts
python tests/bench/kernels.py rows --libggml-cpu LIBRARY
python tests/bench/kernels.py decode --llama-python PYTHON
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, get_args

import click
import numpy as np
import torch
from benchlib import figure, finish, folder_option, json_option, moe_pack, table
from benchlib.ggml import Ggml
from benchlib.gguf_files import DEFAULT_TYPE, EXPERT_TYPES, make_gguf
from benchlib.llama import Llama, llama_option
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.calib.evaluate import ThresholdRule
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import Tokens
from moe_pack.convert.synthetic import WeightDistribution, random_rows, random_stream
from moe_pack.formats import (
    NO_PROGRESS,
    ROW_GROUP,
    ExpertFormat,
    ExpertSpec,
    Pack,
    PartFormat,
    Selector,
    part_format,
    trellis_format,
)
from moe_pack.formats.base.limits import num_cores
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.formats.pack.plans import KEPT, format_text
from moe_pack.runtime.cpu import (
    ExpertRows,
    ExpertWork,
    Kernels,
    SelectedNeurons,
    expert_numbers,
    panel_expert,
    panel_numbers,
    row_numbers,
)
from moe_pack.runtime.model import Decoder, NativeOperations
from moe_pack.runtime.model.pack_weights import MappedPackWeights

_CPU = torch.device("cpu")
InstructionSet = Literal["avx512vbmi", "avx512", "avx2", "neon", "portable"]
_INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
_GROUP = 64
_PANEL_BYTES = 1 << 40  # all experts that can be in panels are
_KIND: Selector = "up"
_SOURCES: dict[str, PartFormat] = {part.codec: part for part in KEPT}
_SPARSITIES = (0.0, 0.5, 0.8, 0.9)
_READ_BYTES = 1 << 29
_COPIES_BYTES = 1 << 29  # of an expert: more than any cache holds


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of an expert, and how many a token takes."""

    name: str
    d: int
    f: int
    experts: int


_MODELS = (Model("Mixtral-8x7B", 4096, 14336, 2), Model("Qwen3-30B-A3B", 2048, 768, 8))


@dataclass(frozen=True, slots=True)
class Figure:
    """Median milliseconds of a token's experts, the bytes they must read, and the share of the memory's rate."""

    model: str
    stored_as: str
    threads: int
    sparsity: float
    num_bytes: int
    ms: float
    gb_per_s: float
    share: float


class Experts:
    """Copies of a random expert in more memory than caches hold, taken in turn."""

    def __init__(self, model: Model, stored: PartFormat) -> None:
        spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
        self.layout = expert_layout(ExpertFormat(stored, stored, stored), _KIND, spec, model.d)
        spreads, stream = dict.fromkeys(("gate", "up", "down"), WeightDistribution(0.0, 0.02)), random_stream(0)
        parts = [
            random_rows(rows, model.f, spreads, stream) for rows in (self.layout.selector, self.layout.records) if rows
        ]
        extent = np.concatenate([part.reshape(-1) for part in parts])
        self._rows = [self._as_rows(extent.copy()) for _ in range(max(2, _COPIES_BYTES // extent.nbytes))]
        self._next = 0

    def _as_rows(self, extent: NDArray[np.uint8]) -> ExpertRows:
        begin, f = self.layout.selector_bytes, self.layout.num_rows
        selector, records = extent[:begin].reshape(f, -1), extent[begin:].reshape(f, -1)
        return ExpertRows(expert_numbers(self.layout, _KIND, "silu"), selector, records, 0.0)

    def put_in_panels(self, kernels: Kernels) -> bool:
        """Gives every copy its panels; whether the kernels have them for this format."""
        num_bytes = kernels.expert_panel_bytes(self._rows[0])
        for place, rows in enumerate(self._rows if num_bytes else ()):
            panels = np.empty(num_bytes, np.uint8)
            panel_expert(rows, panels)
            self._rows[place] = replace(rows, panels=panels)
        return num_bytes > 0

    def take(self, count: int, threshold: float) -> list[tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32]]]:
        """Returns the next `count` copies, all for the one token."""
        self._next += count
        token, weight = np.zeros(1, np.int64), np.ones(1, np.float32)
        chosen = [self._rows[(self._next + number) % len(self._rows)] for number in range(count)]
        return [(replace(rows, threshold=threshold), token, weight) for rows in chosen]


def format_of(name: str) -> PartFormat:
    """Returns the format of a name as `--formats` has it."""
    if name.startswith("trellis"):
        bits, _, group = name.removeprefix("trellis").partition("g")
        return trellis_format(round(2 * float(bits)), int(group or ROW_GROUP))
    return _SOURCES.get(name) or part_format(int(name), _GROUP)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_experts(
    model: Model, stored: PartFormat, rounds: int, pools: dict[int, Kernels], spare: NDArray[np.uint8]
) -> list[Figure]:
    """Times all sparsities and numbers of threads of one format, interleaved; the first round warms up."""
    experts, x = Experts(model, stored), torch.randn(1, model.d, generator=torch.Generator().manual_seed(0))
    ((rows, _, _),) = experts.take(1, 0.0)
    (selected,) = next(iter(pools.values())).select_each(x, [(rows, np.zeros(1, np.int64))])
    a = np.sort(selected.a.abs().numpy().ravel())
    thresholds = {s: float(a[round(s * model.f)]) if s else 0.0 for s in _SPARSITIES}  # exact for this token
    times: dict[tuple[int, float], list[float]] = {case: [] for case in product(pools, _SPARSITIES)}
    reads: dict[int, list[float]] = {threads: [] for threads in pools}
    for number in range(rounds + 1):
        for threads, kernels in pools.items():
            reads[threads].append(_seconds(partial(kernels.read, spare)))
            for sparsity in _SPARSITIES if number % 2 else reversed(_SPARSITIES):
                works = experts.take(model.experts, thresholds[sparsity])
                times[threads, sparsity].append(_seconds(partial(kernels.experts, x, works)))
    figures = []
    for (threads, sparsity), seconds in times.items():
        running = model.f - round(sparsity * model.f)
        num_bytes = model.experts * (experts.layout.selector_bytes + running * experts.layout.records.row_bytes)
        taken, rate = median(seconds[1:]), spare.nbytes / median(reads[threads][1:])
        case = (model.name, format_text(stored), threads, sparsity, num_bytes)
        figures.append(Figure(*case, 1e3 * taken, num_bytes / taken / 1e9, num_bytes / taken / rate))
    return figures


def measure_panels(
    model: Model, stored: PartFormat, rounds: int, pools: dict[int, Kernels], spare: NDArray[np.uint8]
) -> list[Figure]:
    """Times experts of which nothing is skipped from panels; none where a format has no panels."""
    experts, x = Experts(model, stored), torch.randn(1, model.d, generator=torch.Generator().manual_seed(0))
    if not experts.put_in_panels(next(iter(pools.values()))):
        return []
    times: dict[int, list[float]] = {threads: [] for threads in pools}
    reads: dict[int, list[float]] = {threads: [] for threads in pools}
    for _, (threads, kernels) in product(range(rounds + 1), pools.items()):
        reads[threads].append(_seconds(partial(kernels.read, spare)))
        times[threads].append(_seconds(partial(kernels.experts, x, experts.take(model.experts, 0.0))))
    num_bytes, figures = model.experts * experts.layout.num_bytes, []
    for threads, seconds in times.items():
        taken, rate = median(seconds[1:]), spare.nbytes / median(reads[threads][1:])
        case = (model.name, f"{format_text(stored)}, panels", threads, 0.0, num_bytes)
        figures.append(Figure(*case, 1e3 * taken, num_bytes / taken / 1e9, num_bytes / taken / rate))
    return figures


@main.command("experts")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1), help="Runs of each case.")
@click.option(
    "--formats",
    default="2,trellis2,3,trellis3,4,trellis4,mxfp4,8,fp8,e5m2,16",
    show_default=True,
    help="Bits a weight, trellisBITS (2 to 4), or a codec that keeps a source.",
)
@click.option("--threads", default=f"1,{min(2, num_cores())}", show_default=True, help="Numbers of threads.")
@click.option("--limit", type=click.Choice(_INSTRUCTION_SETS), help="Best instruction set to use.")
@json_option
def experts_command(
    rounds: int,
    formats: str,
    threads: str,
    limit: InstructionSet | None,
    as_json: bool,
) -> None:
    """Times one token through experts of Mixtral's and Qwen3-30B-A3B's size.

    For every format and sparsity: the bytes that must be read (all selector rows, the records of running neurons) a
    second, as a share of the rate at which the same threads only read. Selector `up`, random weights; experts are taken
    in turn from more memory than any cache holds, as many a call as the model takes for a token.
    """
    spare, figures = np.ones(_READ_BYTES, np.uint8), list[Figure]()
    with ExitStack() as stack:
        numbers = dict.fromkeys(int(number) for number in threads.split(","))
        pools = {number: stack.enter_context(closing(Kernels(number, limit))) for number in numbers}
        name = next(iter(pools.values())).instruction_set
        for model, stored in tqdm(list(product(_MODELS, map(format_of, formats.split(",")))), disable=as_json):
            figures += measure_experts(model, stored, rounds, pools, spare)
            figures += measure_panels(model, stored, rounds, pools, spare)
    rows = [
        (x.model, x.stored_as, x.threads, f"{x.sparsity:.0%}", f"{x.num_bytes / 1e6:.1f}", f"{x.ms:.2f}",
         f"{x.gb_per_s:.1f}", f"{x.share:.0%}")
        for x in figures
    ]  # fmt: skip
    text = table(("experts of", "stored as", "threads", "sparsity", "MB", "ms", "GB/s", "share"), rows)
    finish({"instruction_set": name, "figures": [asdict(x) for x in figures]}, f"{name}\n{text}", as_json)


# --- rows in the cache

_ROWS_MODEL = Model("rows", 4096, 512, 1)
_LEAST_THRESHOLD = 1e-30  # of experts that may skip neurons
_MANY_TOKENS = (4, 64)  # rows are decoded for all of them


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Nanoseconds a weight, medians: products with a token, sums of rows, products with 4 and with 64 tokens.

    `add`: None for llama.cpp, whose down has a row for each output and is multiplied like gate and up.
    """

    stored_as: str
    dot: float
    add: float | None
    tokens_4: float
    tokens_64: float


class CachedRows:
    """Rows of one format that stay in the second level of cache, and the operations on them."""

    def __init__(self, stored: PartFormat) -> None:
        model, stream = _ROWS_MODEL, random_stream(0)
        layout = row_layout([("weight", stored, False)], model.d)
        spread, generator = WeightDistribution(0.0, 0.02), torch.Generator().manual_seed(0)
        self._numbers = row_numbers(layout, "weight")
        self._rows = random_rows(layout, model.f, {"weight": spread}, stream)
        self._x, *self._tokens = (torch.randn(count, model.d, generator=generator) for count in (1, *_MANY_TOKENS))
        # With selector `both` and all neurons selected before, an expert has only its down rows to add up.
        spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
        expert = expert_layout(ExpertFormat(stored, stored, stored), "both", spec, model.d)
        assert expert.selector is not None
        selector = np.zeros((model.f, expert.selector.row_bytes), np.uint8)
        records = random_rows(expert.records, model.f, {"down": spread}, stream)
        rows = ExpertRows(expert_numbers(expert, "both", "silu"), selector, records, _LEAST_THRESHOLD)
        h, all_run = torch.randn(1, model.f, generator=generator), torch.ones(1, model.f, dtype=torch.bool)
        selected = SelectedNeurons(h, all_run, torch.arange(model.f, dtype=torch.int32))
        token = np.zeros(1, np.int64)
        self._sum = ExpertWork(rows, token, np.ones(1, np.float32), token, selected)
        self._y = np.zeros((1, model.d), np.float32)

    def panel_operations(self, kernels: Kernels) -> tuple[Callable[[], object] | None, ...] | None:
        """Returns the same of a matrix in panels, which has no sums of rows; None if the kernels have no panels."""
        panels = self._rows.copy()
        if not kernels.put_in_panels(self._numbers, panels):
            return None
        dot, *many = (
            partial(kernels.product, x, panel_numbers(self._numbers), panels) for x in (self._x, *self._tokens)
        )
        return dot, None, *many

    def operations(self, kernels: Kernels) -> tuple[Callable[[], object], ...]:
        """Returns what `RowCosts` has the times of."""
        return (
            lambda: kernels.product(self._x, self._numbers, self._rows),
            lambda: kernels.experts_apart(self._x, [self._sum], self._y),
            *(partial(kernels.product, x, self._numbers, self._rows) for x in self._tokens),
        )


@main.command("rows")
@click.option("--rounds", default=99, show_default=True, type=click.IntRange(1), help="Runs of each case.")
@click.option(
    "--formats",
    default="2,trellis2,trellis2.5,3,trellis3,trellis3.5,4,trellis4,8",
    show_default=True,
    help="As before.",
)
@click.option("--limit", type=click.Choice(_INSTRUCTION_SETS), help="Best instruction set to use.")
@click.option(
    "--libggml-cpu",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="llama.cpp's kernels, compiled for the same instruction set, next to libggml-base.  [default: left out]",
)
@click.option(
    "--llama-types", default="IQ2_XXS,Q2_K,IQ3_XXS,Q3_K,IQ4_XS,Q4_K,Q4_0", show_default=True, help="To compare with."
)
@json_option
def rows_command(
    rounds: int,
    formats: str,
    limit: InstructionSet | None,
    libggml_cpu: Path | None,
    llama_types: str,
    as_json: bool,
) -> None:
    """Times one thread on 512 rows of 4,096 columns, which stay in the cache: what the kernels themselves cost.

    Products of one token (gate and up rows), sums of rows (down), products of 4 and of 64 tokens, for which rows are
    decoded; formats are interleaved.
    """
    stored = [format_of(name) for name in formats.split(",")]
    weights = _ROWS_MODEL.d * _ROWS_MODEL.f
    with closing(Kernels(1, limit)) as kernels:
        name = kernels.instruction_set
        cases: list[tuple[str, tuple[Callable[[], object] | None, ...]]] = [
            (format_text(each), CachedRows(each).operations(kernels)) for each in stored
        ]
        for each in stored:
            if (in_panels := CachedRows(each).panel_operations(kernels)) is not None:
                cases.append((f"{format_text(each)}, panels", in_panels))
        if libggml_cpu:
            cases += [(kind, _llama_operations(Ggml(libggml_cpu), kind)) for kind in llama_types.split(",")]
        times: dict[tuple[int, int], list[float]] = {}
        for _, (place, (_, operations)) in product(range(rounds), enumerate(cases)):
            for operation, run in enumerate(operations):
                if run is not None:
                    run()  # brings its rows into the cache
                    times.setdefault((place, operation), []).append(_seconds(run))
    figures = list[RowCosts]()
    for place, (case, _) in enumerate(cases):
        dot, add, *many = (
            1e9 * median(taken) / weights if (taken := times.get((place, operation))) else None
            for operation in range(4)
        )
        assert dot is not None and many[0] is not None and many[1] is not None, "only sums may be missing"
        figures.append(RowCosts(case, dot, add, many[0], many[1]))
    rows = [
        (x.stored_as, f"{x.dot:.4f}", figure(x.add, ".4f"), f"{x.tokens_4:.3f}", f"{x.tokens_64:.3f}") for x in figures
    ]
    text = table(("stored as", "dot ns", "add ns", "4 tokens ns", "64 tokens ns"), rows)
    finish({"instruction_set": name, "figures": [asdict(x) for x in figures]}, f"{name}\n{text}", as_json)


def _llama_operations(library: Ggml, kind: str) -> tuple[Callable[[], object] | None, ...]:
    """Returns llama.cpp's operations in the order of `RowCosts`; it has no sums of rows."""
    values = np.random.default_rng(0).standard_normal((_ROWS_MODEL.f, _ROWS_MODEL.d), np.float32)
    dot, *many = library.products(kind, values * np.float32(0.02), (1, *_MANY_TOKENS))
    return dot, None, *many


# --- decode and prefill

Task = Literal["decode", "prefill"]
_TASKS: tuple[Task, ...] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model with some layers and tokens."""

    model: str
    layers: int
    vocab: int = 4096


_SHAPES = {
    "mixtral": Shape("mixtral-8x7b", 2),
    "qwen3": Shape("qwen3-30b-a3b", 4),
    "olmoe": Shape("olmoe-1b-7b", 4),
    "qwen3.6": Shape("qwen3.6-35b-a3b", 4),
}
Numerics = Literal["exact", "fast", "fastest"]
_DIGITS: dict[Numerics, int] = {"exact": 0, "fast": 2, "fastest": 1}
_THRESHOLD_SEQUENCES, _THRESHOLD_LENGTH = 32, 64
_REST_SECONDS = 0.2  # before each timing: threads that wait for work spin for a while before they sleep


class Program(Protocol):
    """Something that runs one model, and forgets the sequence before each timing."""

    name: str

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int) -> float:
        """Returns the seconds for `tokens` after `prompt`: all at once with the last one's logits, or one by one."""
        ...


class Ours:
    """An open pack with a decoder for each number of threads; `close` ends its kernels."""

    def __init__(
        self,
        pack: Pack,
        name: str,
        threads: Sequence[int],
        context_tokens: int,
        limit: InstructionSet | None = None,
        numerics: Numerics = "exact",
    ) -> None:
        self.name = name
        self._kernels = {number: Kernels(number, limit) for number in threads}
        for kernels in self._kernels.values():
            kernels.take_digits(_DIGITS[numerics])
        self._decoders, self._weights = dict[int, Decoder](), list[MappedPackWeights]()
        for number, kernels in self._kernels.items():
            weights = MappedPackWeights(pack, NativeOperations(kernels), _PANEL_BYTES)
            for place in product(range(len(pack.layout.experts)), range(pack.spec.router.num_experts)):
                weights.panels.want(place, weights.expert_rows(*place))
            weights.panels.wait()
            self._weights.append(weights)
            self._decoders[number] = Decoder(weights, context_tokens, _CPU)

    def close(self) -> None:
        """Ends the kernels, and gives the memory back."""
        for weights in self._weights:
            weights.close()
        self._weights.clear()
        self._decoders.clear()
        for kernels in self._kernels.values():
            kernels.close()

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int) -> float:
        """Returns the seconds for `tokens` after `prompt`."""
        torch.set_num_threads(1)  # as moe-run does
        decoder = self._decoders[threads]
        decoder.reset()
        if prompt:
            decoder.next_logits(prompt)
        began = time.perf_counter()
        for piece in [tokens] if at_once else [[token] for token in tokens]:
            logits = decoder.next_logits(piece)
        seconds = time.perf_counter() - began
        assert bool(logits.isfinite().all()), f"{self.name}: logits are not finite"
        return seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """One program at one task: the seconds of each round, tokens a second of their median, times llama.cpp's."""

    model: str
    program: str
    task: Task
    threads: int
    seconds: tuple[float, ...]
    tokens_per_s: float
    ratio: float | None


def synthetic_pack(shape: Shape, stored: str, dense_bits: int, folder: Path) -> Path:
    """Returns a pack of random weights whose experts are in the format of this name, made unless it is there."""
    pack, part = folder / f"{stored}-dense-{dense_bits}", format_of(stored)
    if not (pack / "manifest.json").exists():
        bits, group = f"{part.bits:g}", "row" if part.group == ROW_GROUP else part.group
        moe_pack(
            *("synth", shape.model, "-o", pack, "--layers", shape.layers, "--vocab", shape.vocab),
            *("--selector-bits", bits, "--record-bits", bits, "--dense-bits", dense_bits, "--group-size", group),
            *(() if part.codec == "bf16" else ("--codec", part.codec)),
            *("--rotate", "off"),
        )
    return pack


def make_sparse(dense: Path, sparsity: float) -> Path:
    """Returns a pack with thresholds for a sparsity and, by hard links, the same experts, unless it is there.

    Thresholds and manifest are replaced by renaming, so that the files they are linked to stay as they were.
    """
    pack, partial_pack = dense.with_name(f"{dense.name}-{sparsity:g}"), dense.with_name("pack.partial")
    if pack.exists():
        return pack
    shutil.rmtree(partial_pack, ignore_errors=True)
    partial_pack.mkdir()
    for path in dense.iterdir():
        if path.is_file():
            (partial_pack / path.name).hardlink_to(path)
    with Pack(partial_pack) as opened:
        shape = (_THRESHOLD_SEQUENCES, _THRESHOLD_LENGTH)
        ids = np.random.default_rng(1).integers(opened.spec.vocab_size, size=shape, dtype=np.int32)
        tokens = Tokens("random tokens", ids, sha256(ids.astype("<i4").tobytes()).hexdigest(), ())
        measured = measure_thresholds(opened, tokens, ThresholdRule(sparsity), NO_PROGRESS)
    click.echo(f"{pack}: sparsity {measured.held_out.overall:.4f} on random tokens held out", err=True)
    partial_pack.rename(pack)
    return pack


def run_rounds(
    programs: Sequence[Program],
    sizes: tuple[int, int, int],
    vocab: int,
    threads: Sequence[int],
    rounds: int,
    tasks: Sequence[Task] = _TASKS,
) -> dict[tuple[str, Task, int], list[float]]:
    """Returns seconds by program, task and threads, interleaved; a first round is not counted.

    Args:    sizes: random tokens of a prompt, to decode after it, and to prefill.
    """
    generator, seconds = np.random.default_rng(2), dict[tuple[str, Task, int], list[float]]()
    drawn = [[generator.integers(vocab, size=size).tolist() for size in sizes] for _ in range(rounds + 1)]
    timings = list(product(threads, enumerate(drawn), tasks, programs))
    for number, (round_idx, (prompt, decoded, prefilled)), task, program in tqdm(timings, disable=None):
        time.sleep(_REST_SECONDS)
        asked = (prompt, decoded, False) if task == "decode" else ([], prefilled, True)
        taken = program.time(*asked, number)
        if round_idx:
            seconds.setdefault((program.name, task, number), []).append(taken)
    return seconds


@main.command("decode")
@folder_option
@llama_option
@click.option("--model", "models", multiple=True, type=click.Choice(list(_SHAPES)), help="Which.  [default: all]")
@click.option(
    "--sparsity", "sparsities", multiple=True, type=click.FloatRange(0, 0.99), default=(0.0, 0.8), show_default=True
)
@click.option("--formats", default="4", show_default=True, help="Of experts, as for experts.")
@click.option(
    "--dense-bits",
    default=8,
    show_default=True,
    type=click.Choice((4, 8)),
    help="Of dense matrices; 8 as convert does.",
)
@click.option("--threads", multiple=True, default=(1, 2), show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=16, show_default=True, type=click.IntRange(1), help="Before decoding.")
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--prefill-tokens", default=128, show_default=True, type=click.IntRange(1, 512))
@click.option("--layers", type=click.IntRange(1), help="Decoder layers.  [default: mixtral 2, the others 4]")
@click.option("--vocab", default=4096, show_default=True, type=click.IntRange(64), help="Tokens known.")
@click.option("--numerics", multiple=True, type=click.Choice(list(_DIGITS)), default=("exact",), show_default=True)
@click.option(
    "--llama-type", default=DEFAULT_TYPE, show_default=True, type=click.Choice(EXPERT_TYPES), help="Of its experts."
)
@click.option("--limit", type=click.Choice(_INSTRUCTION_SETS), help="Best instruction set of ours.")
@click.option("--task", "tasks", multiple=True, type=click.Choice(_TASKS), default=_TASKS, show_default=True)
@json_option
def decode_command(
    folder: Path,
    llama_python: Path | None,
    models: tuple[str, ...],
    sparsities: tuple[float, ...],
    formats: str,
    dense_bits: int,
    threads: tuple[int, ...],
    rounds: int,
    prompt_tokens: int,
    decode_tokens: int,
    prefill_tokens: int,
    layers: int | None,
    vocab: int,
    numerics: tuple[Numerics, ...],
    llama_type: str,
    limit: InstructionSet | None,
    tasks: tuple[Task, ...],
    as_json: bool,
) -> None:
    """Times decode and prefill of some layers of random weights, all in memory, against llama.cpp.

    Our packs (selector `up`, group 64) and a GGUF of the same layers, head and embedding: experts in Q4_0, 4.5 bits a
    weight as ours, or in another type, the rest in Q8_0, 8.5 bits, or with --dense-bits 4 in Q4_0. Packs of a sparsity
    share their experts. One program works while the others wait; of each round every program decodes and prefills the
    same random tokens. Of a prefill only the last token's logits are asked for. Medians over rounds.
    """
    speeds, facts = list[Speed](), dict[str, object]()
    for name in models or _SHAPES:
        shape = replace(_SHAPES[name], layers=layers or _SHAPES[name].layers, vocab=vocab)
        place = folder / f"decode-{name}-{shape.layers}-layers-{vocab}-tokens"
        place.mkdir(parents=True, exist_ok=True)
        dense = {stored: synthetic_pack(shape, stored, dense_bits, place) for stored in formats.split(",")}
        context = max(prompt_tokens + decode_tokens, prefill_tokens)
        with ExitStack() as stack:
            packs = {
                f"{format_text(format_of(stored))}, sparsity {s:g}": stack.enter_context(
                    Pack(make_sparse(pack, s) if s else pack)
                )
                for (stored, pack), s in product(dense.items(), sparsities)
            }
            programs: list[Program] = [
                stack.enter_context(closing(Ours(pack, f"moe-pack {mode}, {text}", threads, context, limit, mode)))
                for (text, pack), mode in product(packs.items(), numerics)
            ]
            spec = next(iter(packs.values())).spec
            if llama_python:
                gguf = make_gguf(synthetic_pack(shape, "4", dense_bits, place), llama_type)
                llama = Llama(llama_python, gguf, context)
                stack.callback(llama.close)
                programs.append(llama)
                facts[name] = llama.facts
            sizes = (prompt_tokens, decode_tokens, prefill_tokens)
            seconds = run_rounds(programs, sizes, spec.vocab_size, threads, rounds, tasks)
        tokens = {"decode": decode_tokens, "prefill": prefill_tokens}
        rates = {key: tokens[key[1]] / median(taken) for key, taken in seconds.items()}
        for (program, task, number), rate in sorted(rates.items(), key=lambda item: (item[0][1], item[0][2])):
            theirs = rates.get((Llama.name, task, number))
            taken = tuple(seconds[program, task, number])
            speeds.append(Speed(name, program, task, number, taken, rate, rate / theirs if theirs else None))
    rows = [(s.model, s.task, s.threads, s.program, f"{s.tokens_per_s:.2f}", figure(s.ratio)) for s in speeds]
    text = table(("model", "task", "threads", "program", "tokens/s", "times llama.cpp"), rows)
    load = f"load before {os.getloadavg()[0]:.2f}"
    finish({"llama": facts, "speeds": [asdict(s) for s in speeds]}, f"{load}\n{text}", as_json)


if __name__ == "__main__":
    main()
