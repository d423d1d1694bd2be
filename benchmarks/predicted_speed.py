"""What the cost model predicts, beside what the runtime does on this machine's CPU.

The demo model's pack with a profile of its own, on text that the profile has not seen, with room for a quarter, a half,
three quarters and all of its experts; and two synthetic packs at 4 bit, few large experts (Mixtral's dimensions) and
many small ones (Qwen3-30B-A3B's), with room for all and for half. The machine is measured first, as `moe-pack doctor`
does. Tokens are given to the decoder one by one; the first fill the cache and are not counted, the others are decoded
in several rounds, whose median time is taken.

Ends with exit code 1 where bytes a token of the demo pack are off by more than --bytes-off, or the time of a token of
any by more than --time-off. Needs 3.5 GB in the folder. Other work on the machine shows in what is measured.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from bench_packs import SyntheticPack, budget_with
from tokenizers import Tokenizer

from moe_pack.calib import Profile
from moe_pack.convert.cost_model import Prediction, predict
from moe_pack.convert.fixed_costs import measure_fixed_costs
from moe_pack.convert.machines import machine_of_cpu
from moe_pack.convert.random_routers import skewed_popularity
from moe_pack.convert.traffic import held_out_passes
from moe_pack.formats import Pack
from moe_pack.runtime import (
    Engine,
    EngineOptions,
    MachineFacts,
    Passes,
    StreamingWeights,
    divide_budget,
    measure_machine,
    routing_bytes,
    whole_bytes,
)

DEMO = "demo"
_TESTS = Path(__file__).parents[1] / "tests"
_DEMO_MODEL, _BOOK = _TESTS / "models" / "tiny-mixtral", _TESTS / "data" / "books-valid.txt"
_SKEW = 0.5
SYNTHETIC = {
    "mixtral-2-layers": SyntheticPack("mixtral-8x7b", 2, 8192),
    "qwen3-3-layers": SyntheticPack("qwen3-30b-a3b", 3, 8192),
}
_SHARES = {DEMO: (0.25, 0.5, 0.75, 1.0), **dict.fromkeys(SYNTHETIC, (0.5, 1.0))}
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Task:
    """How many rounds of how many tokens are decoded, and which quantile of the rounds' times is taken."""

    num_tokens: int
    rounds: int
    quantile: float


@dataclass(frozen=True, slots=True)
class Case:
    """A pack inside a budget: what was predicted, and what the runtime did, for a token."""

    pack: str
    share: float
    budget_bytes: int
    predicted: Prediction
    measured_bytes: float
    measured_hit_rate: float
    measured_s: float

    @property
    def bytes_off(self) -> float:
        """Predicted by measured, less 1; 0 where both are next to nothing."""
        if max(self.predicted.fetched_bytes, self.measured_bytes) < 4096:
            return 0.0
        return self.predicted.fetched_bytes / max(self.measured_bytes, 1.0) - 1

    @property
    def time_off(self) -> float:
        """Predicted tokens a second by measured, less 1."""
        return self.measured_s / self.predicted.seconds.total - 1


def make_demo(folder: Path) -> Path:
    """The demo model's pack at 4 bit, with a profile's routing beside it."""
    pack, profile = folder / "demo-profiled", folder / "demo-profile"
    if not (profile / "profile.json").exists():
        _moe_pack("profile", _DEMO_MODEL, "--tokens", 8192, "--sensitivity", "none", "-o", profile)
    if not (pack / "manifest.json").exists():
        bits = ("--selector-bits", 4, "--record-bits", 4, "--sparsity", 0)
        _moe_pack("convert", _DEMO_MODEL, *bits, "--profile", profile, "-o", pack)
    return pack


def make_synthetic(name: str, folder: Path) -> Path:
    """The synthetic pack of this name, made unless it is there; no path through it is likelier than another."""
    pack = folder / name
    if not (pack / "manifest.json").exists():
        asked = SYNTHETIC[name].arguments()
        _moe_pack("synth", *asked[: asked.index("--skew")], "--skew", _SKEW, "-o", pack)
    return pack


def _moe_pack(*arguments: object) -> None:
    click.echo(f"moe-pack {' '.join(map(str, arguments))}", err=True)
    command = [sys.executable, "-m", "moe_pack.convert.cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_case(name: str, folder: Path, share: float, facts: MachineFacts, task: Task) -> Case:
    """Predicts, then runs."""
    path = make_demo(folder) if name == DEMO else make_synthetic(name, folder)
    with Pack(path) as pack:
        predictors = routing_bytes(path)
        num_experts = int(share * pack.index.size.size)
        room = budget_with(pack, num_experts, _CONTEXT) + predictors
        budget = whole_bytes(pack.layout, _CONTEXT, predictors) if share == 1 else room
        predicted = _predicted(name, folder, pack, budget, predictors, facts, task.num_tokens)
        options = EngineOptions(budget_bytes=budget, machine=facts)
        with Engine(pack, options, _CONTEXT) as engine:
            return Case(name, share, budget, predicted, *_run(engine, _ids(name, pack, task), task))


def _predicted(
    name: str, folder: Path, pack: Pack, budget: int, predictors: int, facts: MachineFacts, num_tokens: int
) -> Prediction:
    plan = divide_budget(pack.layout, budget, _CONTEXT, predictors)
    passes: Passes | None = None
    if name == DEMO:
        passes = held_out_passes(Profile(folder / "demo-profile"))
        popularity = passes.popularity
    else:
        popularity = skewed_popularity(pack.spec, _SKEW, 0)
    # A synthetic model's layers change the hidden state little: the next router foretells nearly all.
    recall = None if name == DEMO else 0.98
    sparsity = np.zeros(pack.index.size.shape)
    machine = machine_of_cpu(facts)
    return predict(pack.layout, plan, machine, popularity, sparsity, passes, recall, seen_tokens=num_tokens // 2)


def _ids(name: str, pack: Pack, task: Task) -> list[int]:
    """All tokens of a run, of the book or at random."""
    num_ids = (2 + task.rounds) * task.num_tokens
    if name != DEMO:
        drawn: list[int] = np.random.default_rng(0).integers(0, pack.spec.vocab_size, num_ids).tolist()
        return drawn
    tokenizer: Tokenizer = Tokenizer.from_file(str(_DEMO_MODEL / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(_BOOK.read_text("utf-8")[: 20 * num_ids], add_special_tokens=False).ids
    return ids[:num_ids]


def _run(engine: Engine, ids: Sequence[int], task: Task) -> tuple[float, float, float]:
    """Bytes a token, hit rate and seconds a token of all rounds; a prompt and as many tokens go before."""
    decoder, weights, num_tokens = engine.decoder, engine.weights, task.num_tokens
    assert isinstance(weights, StreamingWeights), "a budget makes it stream"
    decoder.next_logits(list(ids[:num_tokens]))
    for token in ids[num_tokens : 2 * num_tokens]:
        decoder.next_logits([token])
    counts = weights.decode
    before = (counts.asked_bytes, counts.needed, counts.hits)
    times = []
    for start in range(2 * num_tokens, len(ids), num_tokens):
        decoder.reset()  # each round from an empty context; the experts in memory stay
        began = time.perf_counter()
        for token in ids[start : start + num_tokens]:
            decoder.next_logits([token])
        times.append((time.perf_counter() - began) / num_tokens)
    after = (counts.asked_bytes, counts.needed, counts.hits)
    asked, needed, hits = (now - then for now, then in zip(after, before, strict=True))
    return asked / (num_tokens * len(times)), hits / needed, float(np.quantile(times, task.quantile))


def table(cases: Sequence[Case]) -> str:
    """A line a case."""
    lines = [
        "pack              experts  policy      hits     (was)   MB a token     (was)      off   tokens/s     (was)"
        "      off   ms: fixed   dense  experts  waiting"
    ]
    for case in cases:
        found, parts = case.predicted, case.predicted.seconds
        lines.append(
            f"{case.pack:17}{case.share:8.0%}  {found.policy:10}{found.hit_rate:6.1%}{case.measured_hit_rate:10.1%}"
            f"{found.fetched_bytes / 1e6:13.3f}{case.measured_bytes / 1e6:10.3f}{case.bytes_off:+9.1%}"
            f"{found.tokens_per_second:11.2f}{1 / case.measured_s:10.2f}{case.time_off:+9.1%}"
            f"{1e3 * parts.fixed:12.2f}{1e3 * parts.dense:8.2f}{1e3 * parts.experts:9.2f}{1e3 * parts.waiting:9.2f}"
        )
    return "\n".join(lines)


def faults(cases: Sequence[Case], bytes_off: float, time_off: float) -> list[str]:
    """What lies outside the bounds."""
    found = []
    for case in cases:
        place = f"{case.pack}, {case.share:.0%}"
        if case.pack == DEMO and abs(case.bytes_off) > bytes_off:
            found.append(f"{place}: bytes a token off by {case.bytes_off:+.1%}, at most {bytes_off:.0%}")
        if abs(case.time_off) > time_off:
            found.append(f"{place}: tokens a second off by {case.time_off:+.1%}, at most {time_off:.0%}")
    return found


@click.command(help=__doc__)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="build/bench-packs",
    show_default=True,
    help="For packs and the profile.",
)
@click.option("--pack", "packs", multiple=True, type=click.Choice(list(_SHARES)), help="Which.  [default: all]")
@click.option(
    "--tokens",
    default=512,
    show_default=True,
    type=click.IntRange(8, _CONTEXT // 2),
    help="Of a round.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 6))
@click.option(
    "--quantile",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Of the times of rounds that is taken: 0 on a machine with other work.",
)
@click.option("--seconds", default=0.3, show_default=True, help="That each measurement of the machine takes.")
@click.option("--bytes-off", default=0.1, show_default=True, help="What bytes may be off by.")
@click.option("--time-off", default=0.2, show_default=True, help="What tokens a second may be off by.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write every figure there.")
def main(
    folder: Path,
    packs: tuple[str, ...],
    tokens: int,
    rounds: int,
    quantile: float,
    seconds: float,
    bytes_off: float,
    time_off: float,
    json_file: Path | None,
) -> None:
    """Measures, predicts, runs, prints, judges."""
    folder.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    names = packs or tuple(_SHARES)
    for name in names:  # before anything is measured
        make_demo(folder) if name == DEMO else make_synthetic(name, folder)
    facts = measure_machine(folder, seconds=seconds)
    facts = replace(facts, fixed=measure_fixed_costs(10 * seconds))
    cases = []
    for name in names:
        for share in _SHARES[name]:
            task = Task(tokens if name == DEMO else max(tokens // 16, 8), rounds, quantile)
            cases.append(run_case(name, folder, share, facts, task))
            click.echo(f"{name}, {share:.0%}: {1 / cases[-1].measured_s:.1f} tokens/s", err=True)
    if json_file:
        figures = {"cores": os.cpu_count(), "load_before": load_before, "cases": [asdict(case) for case in cases]}
        json_file.write_text(json.dumps(figures, indent=1, default=np.ndarray.tolist))
    click.echo(table(cases))
    wrong = faults(cases, bytes_off, time_off)
    for fault in wrong:
        click.echo(fault, err=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
