"""Times decode and prefill on the CPU, side by side with llama.cpp.

Some layers of random weights in the dimensions of Mixtral-8x7B and Qwen3-30B-A3B: our pack (nearest, selector `up`,
4 bit throughout, group 64) and a GGUF of the same layers, head and embedding in Q4_0, both 4.5 bits a weight. Packs of
a sparsity share their experts; thresholds are those expert quantiles that `moe-pack thresholds` would take, measured on
random tokens. What share of the neurons really did not run on the tokens timed is counted afterwards, in plain torch.

llama.cpp runs in a process of its own (`llama_speed.py`), with the Python given; all is in memory, and one program
works while the others wait. Of each round every program decodes and prefills the same random tokens; a round before
the first is not counted. Medians over rounds, and how many times llama.cpp's speed that is.

Of a prefill only the last token's logits are asked for. llama.cpp then runs the experts of its last layer for that
token alone: 1 layer of 32 in Mixtral-8x7B, but 1 of 2 here. With `--all-logits` both do all layers for all tokens, and
the head too, which a small `--vocab` makes light.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import click
import numpy as np
import torch
from generate_checkpoint import SHAPES, AnyShape, generate
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.calib import ThresholdRule, Tokens, measure_thresholds, realized_sparsity
from moe_pack.formats import GroupedQuerySpec, ModelSpec, Pack, num_active_parameters, num_parameters
from moe_pack.runtime import Decoder, Kernels, MappedPackWeights, NativeOperations, PackWeights

Task = Literal["decode", "prefill"]
TASKS: tuple[Task, ...] = ("decode", "prefill")

_CPU = torch.device("cpu")
_KERNELS = ("native", "torch")  # what computes, as it is asked for with --ours
_SLOW = ("torch",)  # these decode --slow-tokens only
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}  # llama.cpp's, by our family
_THRESHOLD_SEQUENCES, _THRESHOLD_LENGTH = 32, 64
_EMBEDDING_DOUBLINGS = 8  # llama_speed.py's scale of 256
_REST_SECONDS = 0.2  # before each timing: threads that wait for work spin for a while before they sleep


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens of one round, the same for every program."""

    prompt: list[int]
    decoded: list[int]
    prefilled: list[int]


class Program(Protocol):
    """Something that runs one model, and forgets the sequence before each timing."""

    name: str
    num_decoded: int

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int, all_logits: bool) -> float:
        """Seconds for `tokens` after `prompt`: all at once, with the last one's logits or all, or one by one."""
        ...


@dataclass(frozen=True, slots=True)
class Contestant:
    """One of ours: what computes, and the pack's sparsity."""

    kernels: str
    sparsity: float

    @classmethod
    def parse(cls, text: str) -> "Contestant":
        """`KERNELS:SPARSITY`, such as `torch:0.8`."""
        kernels, _, sparsity = text.partition(":")
        if kernels not in _KERNELS:
            raise click.BadParameter(f"{kernels!r} is none of {', '.join(_KERNELS)}", param_hint="--ours")
        try:
            share = float(sparsity)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise click.BadParameter(f"{text!r}: expected KERNELS:SPARSITY, such as torch:0.8", param_hint="--ours")
        return cls(kernels, share)


class Ours:
    """An open pack, with a decoder for each number of threads; ended by `close`."""

    def __init__(
        self, contestant: Contestant, pack: Pack, threads: Sequence[int], num_decoded: int, context_tokens: int
    ) -> None:
        self.name = f"{contestant.kernels}, sparsity {contestant.sparsity:g}"
        self.num_decoded = num_decoded
        self.pack = pack
        self._kernels = {n: Kernels(n) for n in threads} if contestant.kernels == "native" else {}
        plain = None if self._kernels else PackWeights(pack, _CPU)  # for any number of threads
        self._decoders = {
            n: Decoder(plain or MappedPackWeights(pack, NativeOperations(self._kernels[n])), context_tokens, _CPU)
            for n in threads
        }

    def close(self) -> None:
        """Ends the kernels."""
        for kernels in self._kernels.values():
            kernels.close()

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int, all_logits: bool) -> float:
        """Seconds for `tokens` after `prompt`."""
        torch.set_num_threads(1 if self._kernels else threads)  # as moe-run does
        decoder = self._decoders[threads]
        decoder.reset()
        if prompt:
            decoder.next_logits(prompt)
        began = time.perf_counter()
        for piece in [tokens] if at_once else [[token] for token in tokens]:
            logits = decoder.logits(piece) if all_logits else decoder.next_logits(piece)
        seconds = time.perf_counter() - began
        assert bool(logits.isfinite().all()), f"{self.name}: logits are not finite"
        return seconds


@dataclass(frozen=True, slots=True)
class LlamaFacts:
    """What `llama_speed.py` says when its model is loaded; `buffers` are lines of llama.cpp's log."""

    version: str
    system: str
    file_bytes: int
    weight_bytes: int
    context_tokens: int
    buffers: list[str]
    load_s: float


class Llama:
    """The process of `llama_speed.py`; ended by `close`."""

    name = "llama.cpp"

    def __init__(self, python: Path, gguf: Path, spec: ModelSpec, quantized: str, num: int, context: int) -> None:
        self.num_decoded = num
        script = Path(__file__).with_name("llama_speed.py")
        command = [str(python), str(script), str(gguf), "--quantized", quantized, "--context", str(context)]
        command += ["--dimensions", json.dumps(dimensions(spec))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = LlamaFacts(**json.loads(self._line()))

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int, all_logits: bool) -> float:
        """Seconds for `tokens` after `prompt`, by the clock of the process."""
        asked = {"prompt": prompt, "tokens": tokens, "at_once": at_once, "threads": threads, "all_logits": all_logits}
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"llama_speed.py ended with {self._process.wait()}")
        return line


def dimensions(spec: ModelSpec) -> dict[str, object]:
    """What `llama_speed.Dimensions` has."""
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec), "both families have grouped queries"
    return {
        "arch": _ARCHITECTURES[spec.family],
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.expert.intermediate_size,
        "num_experts": spec.router.num_experts,
        "num_experts_per_tok": spec.router.num_experts_per_tok,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm.eps,
        "rope_theta": spec.rotation.theta,
    }


def make_pack(shape: AnyShape, folder: Path, group_size: int, keep: bool) -> Path:
    """The pack in which all neurons run, made from a random checkpoint unless it is there."""
    pack, source, partial = folder / "pack-0", folder / "checkpoint", folder / "checkpoint.partial"
    if (pack / "manifest.json").exists():
        return pack
    if not source.exists():
        shutil.rmtree(partial, ignore_errors=True)
        click.echo(f"generating {source}: {shape.num_bytes():,} bytes", err=True)
        generate(partial, shape, embedding_doublings=_EMBEDDING_DOUBLINGS)
        partial.rename(source)
    command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(source), "-o", str(pack)]
    command += ["--quantizer", "nearest", "--group-size", str(group_size)]
    command += ["--selector-bits", "4", "--record-bits", "4", "--dense-bits", "4"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not keep:
        shutil.rmtree(source)
    return pack


def make_sparse(dense: Path, sparsity: float) -> Path:
    """A pack with other thresholds and the very same files of experts, by hard links, unless it is there.

    Thresholds and manifest are replaced by renaming, so that the files they are linked to stay as they were.
    """
    pack, partial = dense.with_name(f"pack-{sparsity:g}"), dense.with_name("pack.partial")
    if pack.exists():
        return pack
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for path in dense.iterdir():
        if path.is_file():  # not what a count of sparsity left that was killed
            (partial / path.name).hardlink_to(path)
    click.echo(f"measuring thresholds for {pack}", err=True)
    with Pack(partial) as opened:
        ids = np.random.default_rng(1).integers(
            opened.spec.vocab_size, size=(_THRESHOLD_SEQUENCES, _THRESHOLD_LENGTH), dtype=np.int32
        )
        measured = measure_thresholds(opened, _tokens(ids), ThresholdRule(sparsity))
    click.echo(f"sparsity {measured.held_out.overall:.4f} on tokens held out", err=True)
    partial.rename(pack)
    return pack


def _tokens(ids: NDArray[np.int32]) -> Tokens:
    return Tokens("random tokens", ids, sha256(ids.astype("<i4").tobytes()).hexdigest(), ())


def decoded_sparsity(pack: Pack, rounds: Sequence[Round], num_decoded: int) -> float:
    """The share of neurons that do not run for the tokens decoded, counted over all rounds.

    Counted for prompts with and without what follows: the passes count whole sequences, and no token changes those
    before it.
    """
    prompts = np.array([one.prompt for one in rounds], np.int32)
    wholes = np.array([one.prompt + one.decoded[:num_decoded] for one in rounds], np.int32)
    before, after = (realized_sparsity(pack, _tokens(ids)).overall for ids in (prompts, wholes))
    assert before is not None and after is not None, "every token goes to experts"
    num_prompt, num_whole = prompts.shape[1], wholes.shape[1]
    return float((after * num_whole - before * num_prompt) / (num_whole - num_prompt))


@dataclass(frozen=True, slots=True)
class Speed:
    """One program at one task: seconds of each round for so many tokens, and their median's tokens a second.

    `ratio`: times llama.cpp's speed at the same task and threads.   `sparsity`: realized; None where nobody skips.
    """

    program: str
    task: Task
    threads: int
    num_tokens: int
    seconds: tuple[float, ...]
    tokens_a_second: float
    ratio: float | None
    sparsity: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """All programs on one model. Bytes are the files' own, norms and routers included.

    `used_weights`: those that one token is multiplied with, which the embedding's are not.
    """

    model: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    vocab: int
    weights: int
    used_weights: int
    pack_bytes: int
    llama_bytes: int | None
    llama: LlamaFacts | None
    speeds: tuple[Speed, ...]


def make_rounds(spec: ModelSpec, number: int, sizes: tuple[int, int, int]) -> list[Round]:
    """Random tokens for prompt, decode and prefill, the same in every run."""
    generator = np.random.default_rng(2)
    return [Round(*(generator.integers(spec.vocab_size, size=n).tolist() for n in sizes)) for _ in range(number)]


def run_rounds(
    programs: Sequence[Program], rounds: Sequence[Round], threads: Sequence[int], all_logits: bool, title: str
) -> dict[tuple[str, Task, int], list[float]]:
    """Seconds by program, task and threads; interleaved, the first round thrown away."""
    seconds: dict[tuple[str, Task, int], list[float]] = {}
    timings = list(product(threads, rounds, TASKS, programs))
    for number, one, task, program in tqdm(timings, desc=title, disable=None):
        time.sleep(_REST_SECONDS)
        prompt, tokens = (one.prompt, one.decoded[: program.num_decoded]) if task == "decode" else ([], one.prefilled)
        taken = program.time(prompt, tokens, task == "prefill", number, all_logits and task == "prefill")
        if one is not rounds[0]:
            seconds.setdefault((program.name, task, number), []).append(taken)
    return seconds


def _speeds(
    programs: Sequence[Program],
    seconds: dict[tuple[str, Task, int], list[float]],
    sparsities: dict[str, float],
    num_prefilled: int,
) -> Iterator[Speed]:
    """In the order they are read in: each task and number of threads, all programs below each other."""
    tokens = {(p.name, task): p.num_decoded if task == "decode" else num_prefilled for p in programs for task in TASKS}
    rates = {key: tokens[key[:2]] / median(taken) for key, taken in seconds.items()}
    for name, task, threads in sorted(rates, key=lambda key: TASKS.index(key[1])):
        rate, theirs = rates[name, task, threads], rates.get((Llama.name, task, threads))
        yield Speed(
            name,
            task,
            threads,
            tokens[name, task],
            tuple(seconds[name, task, threads]),
            rate,
            rate / theirs if theirs else None,
            sparsities.get(name) if task == "decode" else None,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    work: Path
    llama_python: Path | None
    quantized: str
    group_size: int
    contestants: tuple[Contestant, ...]
    threads: tuple[int, ...]
    rounds: int
    prompt_tokens: int
    decode_tokens: int
    slow_tokens: int
    prefill_tokens: int
    all_logits: bool
    layers: int | None
    vocab: int | None
    keep: bool


def compare(model: str, options: Options) -> Compared:
    """Makes what is missing of one model's files, runs all rounds, and counts."""
    chosen = {"layers": options.layers, "vocab": options.vocab}
    shape = SHAPES[model](**{name: size for name, size in chosen.items() if size is not None})
    folder = options.work / f"{model}-{shape.layers}-layers-{shape.vocab}-tokens-group-{options.group_size}"
    folder.mkdir(parents=True, exist_ok=True)
    dense = make_pack(shape, folder, options.group_size, options.keep)
    context = max(options.prompt_tokens + options.decode_tokens, options.prefill_tokens)
    sizes = (options.prompt_tokens, options.decode_tokens, options.prefill_tokens)
    with ExitStack() as stack:
        ours: list[Ours] = []
        for one in options.contestants:
            pack = stack.enter_context(Pack(make_sparse(dense, one.sparsity) if one.sparsity else dense))
            number = options.slow_tokens if one.kernels in _SLOW else options.decode_tokens
            ours.append(Ours(one, pack, options.threads, min(number, options.decode_tokens), context))
            stack.callback(ours[-1].close)
        spec, totals = ours[0].pack.spec, ours[0].pack.manifest.totals
        llama = None
        if options.llama_python is not None:
            gguf = folder / f"model-{options.quantized}.gguf"
            llama = Llama(options.llama_python, gguf, spec, options.quantized, options.decode_tokens, context)
            stack.callback(llama.close)
        programs: list[Program] = [*ours, *([llama] if llama else [])]
        rounds = make_rounds(spec, options.rounds + 1, sizes)
        seconds = run_rounds(programs, rounds, options.threads, options.all_logits, model)
        sparsities = {one.name: decoded_sparsity(one.pack, rounds[1:], one.num_decoded) for one in ours}
        return Compared(
            model,
            spec.num_hidden_layers,
            spec.hidden_size,
            spec.expert.intermediate_size,
            spec.router.num_experts,
            spec.vocab_size,
            num_parameters(spec),
            num_active_parameters(spec) - spec.vocab_size * spec.hidden_size,
            pack_bytes=totals.selectors + totals.records + totals.padding + totals.dense,
            llama_bytes=llama.facts.weight_bytes if llama else None,
            llama=llama.facts if llama else None,
            speeds=tuple(_speeds(programs, seconds, sparsities, options.prefill_tokens)),
        )


def _report(compared: Compared) -> str:
    """One model's figures, for people."""
    c = compared
    lines = [
        f"{c.model}: {c.layers} layers of {c.experts} experts, {c.hidden} x {c.intermediate}, vocabulary {c.vocab:,}; "
        f"{c.weights:,} weights, {c.used_weights:,} used a token",
        f"pack       {c.pack_bytes:15,} bytes, {8 * c.pack_bytes / c.weights:.3f} bits a weight",
    ]
    if c.llama_bytes is not None:
        lines.append(f"llama.cpp  {c.llama_bytes:15,} bytes, {8 * c.llama_bytes / c.weights:.3f} bits a weight")
    lines.append("task      threads  program                  tokens   tokens/s    s least     median       most   "
                 "times llama.cpp   sparsity")  # fmt: skip
    for s in c.speeds:
        ratio = "" if s.ratio is None else f"{s.ratio:.2f}"
        sparsity = "" if s.sparsity is None else f"{s.sparsity:.4f}"
        lines.append(
            f"{s.task:9}{s.threads:8}  {s.program:24}{s.num_tokens:7,}{s.tokens_a_second:11.2f}{min(s.seconds):11.3f}"
            f"{median(s.seconds):11.3f}{max(s.seconds):11.3f}{ratio:>18}{sparsity:>11}"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), help="Which.  [default: all]")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default="build/bench", show_default=True)
@click.option(
    "--llama-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A Python with llama_cpp, gguf and numpy.  [default: llama.cpp is left out]",
)
@click.option(
    "--quantized", type=click.Choice(["Q4_0", "Q4_K"]), default="Q4_0", show_default=True, help="GGUF's type."
)
@click.option("--group-size", type=click.Choice(["32", "64"]), default="64", show_default=True, help="The pack's.")
@click.option(
    "--ours",
    multiple=True,
    default=("native:0", "native:0.8", "torch:0"),
    show_default=True,
    help="KERNELS:SPARSITY, one or more.",
)
@click.option(
    "--threads", multiple=True, default=(1, 2), show_default=True, type=click.IntRange(1), help="One or more."
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=16, show_default=True, type=click.IntRange(1), help="Before decoding.")
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--slow-tokens", default=4, show_default=True, type=click.IntRange(1), help="Decoded by plain torch.")
@click.option("--prefill-tokens", default=512, show_default=True, type=click.IntRange(1, 512))
@click.option("--all-logits", is_flag=True, help="Prefill with the logits of all tokens.")
@click.option("--layers", type=click.IntRange(1), help="Decoder layers.  [default: mixtral 2, qwen3 4]")
@click.option("--vocab", type=click.IntRange(64), help="Tokens known.  [default: the model's]")
@click.option("--keep", is_flag=True, help="Keep the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(models: tuple[str, ...], ours: tuple[str, ...], group_size: str, as_json: bool, **chosen: object) -> None:
    """Times and prints."""
    contestants = tuple(dict.fromkeys(Contestant.parse(text) for text in ours))
    options = Options(contestants=contestants, group_size=int(group_size), **chosen)  # type: ignore[arg-type]  # click's own types
    facts = {"cores": os.cpu_count(), "torch": torch.__version__, "load_before": os.getloadavg()[0]}
    results = [compare(model, options) for model in models or SHAPES]
    if as_json:
        click.echo(json.dumps(facts | {"compared": [asdict(result) for result in results]}))
    else:
        click.echo(f"{facts['cores']} cores, torch {facts['torch']}, load before {facts['load_before']:.2f}")
        click.echo("\n\n".join(map(_report, results)))


if __name__ == "__main__":
    main()
