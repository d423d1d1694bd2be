"""What several machines gain: parts on one machine measured, and DeepSeek-V3 on many machines computed.

    python tests/bench/many_machines.py scaling
    python tests/bench/many_machines.py hours

`scaling` times convert (calibrated, 2-bit trellis) and profile of a synthetic checkpoint: one process on one CPU, two
parts on a CPU each, and two parts by Ray. Interleaved rounds, medians.

`hours` measures on one thread how long an expert of DeepSeek-V3's dimensions takes, how long a byte of its dense part,
and how many multiplications a second a profile makes. From these it computes the hours of DeepSeek-V3 (58 MoE layers of
256 experts) on 1 to 16 machines, and plays stragglers: machines with drawn speeds, one that is four times slower, one
that dies at half time. `static` machines make their own items only, and the fastest machine makes those of a dead one
afterwards; `parts` follow the rule of convert: own items, then missing ones, last first, from another place for each.
"""

import heapq
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import click
import torch
from benchlib import finish, json_option, table
from benchlib.checkpoints import Shape, generate
from support.profiles import random_tokens
from support.published import PUBLISHED, spec_of

from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import Profile, ProfileOptions, make_profile
from moe_pack.calib.sensitivity.costs import expert_multiplications, half_multiplications
from moe_pack.convert import convert
from moe_pack.formats import ModelSpec, Quantizer, part_format, trellis_format, uniform_plan
from moe_pack.formats.base.commands import Part, Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import ROW_GROUP
from moe_pack.formats.parts.specs import num_parameters

_MODEL = "deepseek-v3"
_TWO_BITS = trellis_format(4, ROW_GROUP)
_FOUR_BITS = part_format(4, 64)
_CODECS: dict[str, tuple[Quantizer, object]] = {
    "calibrated, trellis 2 bits": ("calibrated", _TWO_BITS),
    "hqq, 4 bits": ("hqq", _FOUR_BITS),
    "nearest, 4 bits": ("nearest", _FOUR_BITS),
}
_MACHINES = (1, 2, 4, 8, 16)
_ENTERED, _WAITED = -1, -2  # events of a machine that is no item


@dataclass
class Watch:
    """Progress that times what is done: stages, and the items of a conversion."""

    stages: dict[str, tuple[Stage, float]] = field(default_factory=dict)
    items: dict[str, tuple[int, float]] = field(default_factory=dict)
    _stage: Stage | None = None
    _begun: float = 0.0
    _last: float = 0.0

    def begin(self, stage: Stage) -> None:
        self._stage, self._begun = stage, time.perf_counter()
        self._last = self._begun

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        now = time.perf_counter()
        before = self.items.get(what, (0, 0.0))
        self.items[what] = before[0] + amount, before[1] + now - self._last
        self._last = now

    def end(self) -> None:
        assert self._stage is not None, "a stage has begun"
        self.stages[self._stage.name] = self._stage, time.perf_counter() - self._begun

    def say(self, line: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread does. `expert_s`: by quantizer.   `multiplications_s`: of a profile's statistics."""

    expert_s: dict[str, float]
    dense_bytes_s: float
    multiplications_s: float
    tokens_per_expert: int


def measured_rates(num_experts: int, num_tokens: int, hidden: int | None, intermediate: int | None) -> Rates:
    """Measures a dense and an MoE layer of DeepSeek-V3's dimensions, or of these, with a few experts."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as work:
        source = Path(work) / "source"
        generate(source, Shape(_MODEL, 2, num_experts, hidden, intermediate, 4096))
        checkpoint = Checkpoint(source)
        spec = checkpoint.spec
        tokens: Tokens = random_tokens(max(num_tokens // 128, 2), 128, 4096)
        watch = Watch()
        profile = make_profile(checkpoint, tokens, Path(work) / "profile", ProfileOptions("none"), watch)
        statistics, statistics_s = watch.stages["statistics"]
        seconds, dense = {}, list[tuple[int, float]]()
        for name, (quantizer, part) in _CODECS.items():
            plan = uniform_plan(spec, "up", part, part, quantizer=quantizer)  # type: ignore[arg-type]
            items = _item_times(checkpoint, plan, Path(work) / "pack", profile)
            experts = [each for what, (_, each) in items.items() if " expert " in what]
            seconds[name] = median(experts)
            dense += [each for what, each in items.items() if " expert " not in what]
        checkpoint.close()
        k = spec.router.num_experts_per_tok
        return Rates(
            seconds,
            sum(num_bytes for num_bytes, _ in dense) / sum(each for _, each in dense),
            statistics.total / statistics_s,
            tokens.sequences.size * k // num_experts,
        )


def _item_times(checkpoint: Checkpoint, plan: object, out: Path, profile: Profile) -> dict[str, tuple[int, float]]:
    watch, folder = Watch(), out.with_name(f"{out.name}-{time.monotonic_ns()}")
    convert(checkpoint, plan, folder, 1, watch, calibration=profile)  # type: ignore[arg-type]
    return watch.items


def simulated(
    num_items: int,
    group: int,
    seconds: float,
    speeds: Sequence[float],
    cores: int,
    dies: tuple[int, float] | None = None,
) -> float:
    """Returns when the last item is written if machines follow the rule of convert.

    Args:    group: items that may be made at once; the next group begins after them.   seconds: of an item at speed 1.
             dies: a machine, and when.
    """
    machines = range(len(speeds))
    parts = [Part(machine + 1, len(speeds)) for machine in machines]
    item_s = [seconds / speed for speed in speeds]
    free, end = [0.0 for _ in machines], 0.0
    for first in range(0, num_items, group):
        items = range(first, min(first + group, num_items))
        written = set[int]()
        own = [[item for item in items if part.owns(item)][::-1] for part in parts]
        busy, has_waited = [0 for _ in machines], [False for _ in machines]
        order = itertools.count()
        events = [(start, next(order), machine, _ENTERED) for machine, start in enumerate(free)]
        heapq.heapify(events)
        while events:
            now, _, machine, item = heapq.heappop(events)
            if dies is not None and machine == dies[0] and now >= dies[1]:
                free[machine] = float("inf")
                continue
            if item >= 0:
                busy[machine] -= 1
                if item not in written:
                    written.add(item)
                    end = now
            if item != _WAITED:
                free[machine] = now
            todo = list[int]()
            while own[machine] and busy[machine] + len(todo) < cores:
                if (each := own[machine].pop()) not in written:
                    todo.append(each)
            if not todo and not busy[machine] and not own[machine]:
                missing = [each for each in items if each not in written]
                if missing and not has_waited[machine]:
                    has_waited[machine] = True
                    heapq.heappush(events, (now + item_s[machine], next(order), machine, _WAITED))
                    continue
                todo = parts[machine].apart(missing)[:cores]
            busy[machine] += len(todo)
            for each in todo:
                heapq.heappush(events, (now + item_s[machine], next(order), machine, each))
        # A machine that waited for the last item of the group goes on when it is there.
        free = [max(start, end) if start < float("inf") else start for start in free]
        if len(written) < len(items):
            return float("inf")
    return end


def static(
    num_items: int, group: int, seconds: float, speeds: Sequence[float], cores: int, dies: tuple[int, float] | None
) -> float:
    """Returns when the last item is written if machines make their own items only.

    Every machine waits at the end of a group for all others, as calibration behind stored layers needs it. What a dead
    machine has not made, the fastest other one makes after its own items.
    """
    now, groups = 0.0, -(-num_items // group)
    for number in range(groups):
        size = min(group, num_items - number * group)
        shares = [len(range(machine, size, len(speeds))) for machine in range(len(speeds))]
        spans = [-(-share // cores) * seconds / speed for share, speed in zip(shares, speeds, strict=True)]
        if dies is not None and now + spans[dies[0]] > dies[1]:
            lost = dies[0]
            made = int(max(dies[1] - now, 0) / (seconds / speeds[lost])) * cores
            left = max(shares[lost] - made, 0)
            fastest = max((m for m in range(len(speeds)) if m != lost), key=lambda m: speeds[m])
            spans[lost] = 0.0
            spans[fastest] += -(-left // cores) * seconds / speeds[fastest]
        now += max(spans)
    return now


def _profile_seconds(spec: ModelSpec, rates: Rates, num_tokens: int, length: int) -> float:
    """Returns the seconds of a profile's statistics on one thread; sensitivity and predictors come on top."""
    halves = sum(half_multiplications(spec, layer, length) for layer in range(spec.num_hidden_layers))
    experts = len(spec.moe_layers) * spec.router.num_experts_per_tok * expert_multiplications(spec)
    return num_tokens * (halves + experts) / rates.multiplications_s


@click.group(help=__doc__)
def main() -> None:
    """Chooses the question."""


@main.command()
@click.option("--cores", default=16, show_default=True, help="Of a machine; each works on an expert of its own.")
@click.option("--experts", default=3, show_default=True, type=click.IntRange(2), help="Measured for each quantizer.")
@click.option("--tokens", default=512, show_default=True, help="Measured; all go through each expert.")
@click.option("--hidden", type=int, help="Hidden size that is measured.  [default: DeepSeek-V3's]")
@click.option("--intermediate", type=int, help="Neurons of a measured expert.  [default: DeepSeek-V3's]")
@click.option("--seed", default=0, show_default=True, help="Of the machines' speeds.")
@click.option("--rates", type=click.Path(exists=True, dir_okay=False), help="Rates that an earlier run kept (--keep).")
@click.option("--keep", type=click.Path(dir_okay=False), help="Where to write the rates.")
@json_option
def hours(
    cores: int, experts: int, tokens: int, hidden: int | None, intermediate: int | None, seed: int, rates: str | None,
    keep: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measures rates and computes the hours of DeepSeek-V3."""
    known = (
        Rates(**json.loads(Path(rates).read_text())) if rates else measured_rates(experts, tokens, hidden, intermediate)
    )
    if keep:
        Path(keep).write_text(json.dumps(asdict(known)))
    spec = spec_of(next(each for each in PUBLISHED if each.name == _MODEL))
    L, E = len(spec.moe_layers), spec.router.num_experts
    rows = list[tuple[object, ...]]()
    for name, seconds in known.expert_s.items():
        group = E if name.startswith("calibrated") else L * E
        spans = [simulated(L * E, group, seconds, [1.0] * count, cores) for count in _MACHINES]
        rows.append((f"convert: {name}", f"{seconds:.1f}", *(f"{span / 3600:.2f}" for span in spans)))
    profile_s = _profile_seconds(spec, known, 16384, 512)
    dense_s = (num_parameters(spec) - L * E * expert_multiplications(spec)) / known.dense_bytes_s
    rows.append(("convert: dense part", "", *(f"{dense_s / cores / count / 3600:.2f}" for count in _MACHINES)))
    rows.append(
        (
            "profile: statistics of 16,384 tokens",
            "",
            *(f"{profile_s / cores / count / 3600:.2f}" for count in _MACHINES),
        )
    )
    text = table(("hours", "s an expert", *(f"{count} machines" for count in _MACHINES)), rows)

    name = next(iter(known.expert_s))
    played, count = list[tuple[object, ...]](), 8
    chance = random.Random(seed)
    drawn = [chance.lognormvariate(0, 0.15) for _ in range(count)]
    ideal = simulated(L * E, E, known.expert_s[name], [1.0] * count, cores)
    for what, speeds, dies in (
        ("equal speeds", [1.0] * count, None),
        ("drawn speeds (deviation 0.15)", drawn, None),
        ("one four times slower", [0.25] + [1.0] * (count - 1), None),
        ("one dies at half time", [1.0] * count, (0, ideal / 2)),
    ):
        spans = [play(L * E, E, known.expert_s[name], speeds, cores, dies) for play in (static, simulated)]
        best = ideal * count / sum(speeds)
        played.append((what, *(f"{span / 3600:.2f}" for span in spans), f"{best / 3600:.2f}"))
    header = (f"{count} machines, {name}", "static, h", "parts, h", "work / speed, h")
    facts = {"rates": asdict(known), "cores": cores, "hours": rows, "stragglers": played, "seed": seed}
    finish(facts, f"{text}\n\n{table(header, played)}\n\n{known}", as_json)


@main.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--layers", default=3, show_default=True)
@click.option("--experts", default=8, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--intermediate", default=2048, show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Of the profile.")
@click.option("--ray/--no-ray", default=True, show_default=True)
@json_option
def scaling(
    rounds: int,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    tokens: int,
    ray: bool,
    as_json: bool,
) -> None:
    """Times one process, two parts, and two parts by Ray."""
    shape = Shape("mixtral-8x7b", layers, experts, hidden, intermediate, 4096)
    taken = dict[tuple[str, str], list[float]]()
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        work = Path(folder)
        generate(work / "source", shape)
        made = work / "profile"
        text = ("--tokens", str(tokens))
        _timed([_command("profile", work / "source", made, *text)])
        commands = {
            "profile": text,
            "convert": ("--profile", str(made), "--record-bits", "2", "--selector-bits", "2", "--workers", "1"),
        }
        for number, (command, options) in itertools.product(range(rounds), commands.items()):
            ways: dict[str, list[tuple[str, ...]]] = {
                "one process": [()],
                "two parts": [("--part", "1/2"), ("--part", "2/2")],
                "two parts by Ray": [("--ray", "local", "--parts", "2")] if ray else [],
            }
            for way, each in ways.items():
                out = work / f"{command}-{way.replace(' ', '-')}-{number}"
                lines = [_command(command, work / "source", out, *options, *extra) for extra in each]
                if lines:
                    taken.setdefault((command, way), []).append(_timed(lines, is_pinned="Ray" not in way))
    rows = [
        (command, way, f"{median(seconds):.1f}", f"{median(taken[command, 'one process']) / median(seconds):.2f}")
        for (command, way), seconds in taken.items()
    ]
    facts = {"shape": asdict(shape), "rounds": rounds, "tokens": tokens, "load": os.getloadavg()}
    facts["seconds"] = {f"{command}, {way}": seconds for (command, way), seconds in taken.items()}
    finish(facts, table(("command", "way", "median s", "one process / this"), rows), as_json)


def _command(command: str, source: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "moe_pack.convert.cli", command, str(source), "-o", str(out), *options]


def _timed(lines: Sequence[Sequence[str]], is_pinned: bool = True) -> float:
    """Runs commands at once, each on a CPU of its own; returns the seconds until the last has ended."""
    cpus, start = sorted(os.sched_getaffinity(0)), time.perf_counter()
    running = []
    for line, cpu in zip(lines, itertools.cycle(cpus), strict=False):
        process = subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        if is_pinned:
            os.sched_setaffinity(process.pid, {cpu})
        running.append(process)
    for process in running:
        if process.wait():
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
