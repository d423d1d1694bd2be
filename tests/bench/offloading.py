"""What a budget below the pack costs: speed, plan, and the papers' parts.

    python tests/bench/offloading.py speed --llama-python PYTHON
    python tests/bench/offloading.py parts

Both need root: they make memory cgroups and empty the page cache. Packs take 44 GB, GGUFs 14; the one of
`LARGE`, which is measured if `--pack` names it, 20 GB more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import click
from benchlib import F, figure, finish, folder_option, json_option, parts_side, table
from benchlib.confined import (
    MOE_RUN,
    SPARE_BYTES,
    ConfinedRun,
    MemoryCgroup,
    NoCgroupError,
    Task,
    run_llama,
    run_ours,
)
from benchlib.gguf_files import make_gguf
from benchlib.llama import llama_option
from benchlib.packs import CORM, EDGEMOE, FLOE, IMPORTANCE, LARGE, SYNTHETIC, budget_with, make_pack
from benchlib.parts_side import Parts
from benchlib.predicting import measured_fixed_costs, measured_machine, predicted_for

from moe_pack.formats import Pack
from moe_pack.formats.base.commands import read_size
from moe_pack.formats.base.limits import num_cores
from moe_pack.runtime import MachineFacts, measure_disk
from moe_pack.runtime.offload import PRESETS

OURS, MAPPED, LLAMA = "moe-run", "moe-run, mapped", "llama.cpp"


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def run_options(
    prompt_tokens: int, rounds: int, packs: tuple[str, ...], others: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Adds the options that all runs in a cgroup have: which packs, with `others` on request, and what they do."""

    def add(body: F) -> F:
        one = click.IntRange(1)
        for option in (
            click.option("--seed", default=0, show_default=True, help="Of the tokens."),
            click.option("--threads", default=num_cores, show_default="all", type=one),
            click.option("--decode-tokens", default=32, show_default=True, type=one),
            click.option("--prompt-tokens", default=prompt_tokens, show_default=True, type=one),
            click.option("--rounds", default=rounds, show_default=True, type=one),
            click.option(
                "--pack", "packs", multiple=True, type=click.Choice(packs + others), default=packs, show_default=True
            ),
            folder_option,
            json_option,
        ):
            body = option(body)
        return body

    return add


def needs_cgroup() -> None:
    """Checks that a memory cgroup can be made, before anything else is done.

    Raises:  click.ClickException if none can.
    """
    try:
        with MemoryCgroup(SPARE_BYTES):
            pass
    except NoCgroupError as reason:
        raise click.ClickException(f"no memory cgroup can be made: {reason}") from reason


def finished(run: ConfinedRun) -> ConfinedRun:
    """Returns a run that finished.

    Raises:  click.ClickException if it did not.
    """
    if fault := run.fault():
        raise click.ClickException(fault)
    return run


def tell(place: str, run: ConfinedRun) -> None:
    """Prints a run as it ends: all take an hour."""
    speed = f"{figure(run.tokens_per_s)} tokens/s, {run.measured.seconds:.0f} s in all"
    click.echo(f"{place}: {run.program}: {run.fault() or speed}", err=True)


def pack_bytes(pack: Path) -> int:
    """Returns the bytes of all files of a pack."""
    return sum(path.stat().st_size for path in pack.iterdir())


# --- speed


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner predicts just before moe-run's run, or after it: bytes read for a token, tokens a second."""

    token_bytes: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LlamaRuns:
    """llama.cpp's runs of a GGUF in a budget, made for `pack`: they are those of its sparse variant, too."""

    pack: str
    runs: tuple[ConfinedRun, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """All runs of one pack with one budget, and what was predicted of moe-run around each round."""

    pack: str
    share: float
    budget_bytes: int
    predicted: tuple[Predicted, ...]
    runs: tuple[ConfinedRun, ...]
    llama: LlamaRuns | None

    def by_program(self) -> dict[str, list[ConfinedRun]]:
        """Returns the runs of each program, in order; llama.cpp says of which pack its runs are, if of another."""
        by_program: dict[str, list[ConfinedRun]] = {}
        for run in self.runs:
            by_program.setdefault(run.program, []).append(run)
        if self.llama:
            whose = "" if self.llama.pack == self.pack else f", run of {self.llama.pack}"
            by_program[f"{LLAMA}{whose}"] = list(self.llama.runs)
        return by_program

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with our runs within the budget."""
        for run in self.by_program()[OURS]:
            if fault := run.fault():
                yield f"{self.pack}, {self.share:.0%}: {fault}"
            if run.measured.peak_bytes > self.budget_bytes + SPARE_BYTES:
                taken = f"{run.measured.peak_bytes:,} bytes anonymous with a budget of {self.budget_bytes:,}"
                yield f"{self.pack}, {self.share:.0%}: {taken}"

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yields a line of the table for each program."""
        theirs = middle(run.tokens_per_s for run in self.llama.runs) if self.llama else None
        for program, runs in self.by_program().items():
            rates = [run.tokens_per_s for run in runs if run.tokens_per_s]
            rate, read = middle(rates), middle(run.token_bytes for run in runs)
            planned = self.predicted if program == OURS else ()
            planned_bytes, planned_rate = (
                middle(getattr(each, name) for each in planned) for name in ("token_bytes", "tokens_per_s")
            )
            yield (
                self.pack, f"{self.share:.0%}", f"{self.budget_bytes / 1e6:,.0f}", program,
                figure(read and read / 1e6, ".1f"), figure(planned_bytes and planned_bytes / 1e6, ".1f"),
                figure(rate), figure(planned_rate), figure(min(rates, default=None)), figure(max(rates, default=None)),
                figure(rate / theirs if rate and theirs else None),
                f"{max(run.measured.peak_bytes for run in runs) / 1e6:,.0f}",
                f"{(self.budget_bytes + SPARE_BYTES) / 1e6:,.0f}",
                f"{sum(run.fault() is not None for run in runs)} of {len(runs)}",
            )  # fmt: skip


def middle(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are there; None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def predict(name: str, pack: Path, budget_bytes: int, task: Task, machine: MachineFacts) -> Predicted:
    """Returns what the planner predicts of the tokens that `moe-run --bench` decodes."""
    context, seen = task.prompt_tokens + task.decode_tokens + 1, task.prompt_tokens + task.decode_tokens // 2
    with Pack(pack) as opened:
        found = predicted_for(opened, budget_bytes, context, machine, (SYNTHETIC | LARGE)[name].sparsity, seen)
    return Predicted(found.fetched_bytes, found.tokens_per_second)


@main.command("speed")
@run_options(64, 3, tuple(SYNTHETIC), tuple(LARGE))
@llama_option
@click.option(
    "--share", "shares", multiple=True, type=click.FloatRange(0.01, 1), default=(0.25, 0.5), show_default=True
)
@click.option("--budget", "budgets", multiple=True, help="Sizes such as 8G, in place of shares.")
@click.option("--decode-limit", default=60.0, show_default=True, help="Seconds, after which llama.cpp begins no token.")
@click.option("--seconds", default=0.1, show_default=True, help="Of each measurement of the machine.")
def speed_command(
    folder: Path, llama_python: Path | None, packs: tuple[str, ...], shares: tuple[float, ...], rounds: int,
    prompt_tokens: int, decode_tokens: int, decode_limit: float, seconds: float, threads: int, seed: int, as_json: bool,
    budgets: tuple[str, ...],
) -> None:  # fmt: skip
    """Measures bytes read for a token and tokens a second, by default, against the plan, mapped files and llama.cpp.

    Budgets are a share of the pack's bytes; every run is in a memory cgroup of the budget and 400 MB, and starts from
    an empty page cache. Interleaved: moe-run with the budget and no other option, moe-run on mapped files, llama.cpp on
    mapped files. Before moe-run's run and after it the machine is measured, as `moe-pack doctor` does, and the planner
    predicts. llama.cpp runs all neurons of a sparse pack: where the budget has as many bytes, its runs of the pack with
    all neurons stand for both, and the table says so. Exits with 1 where moe-run does not finish within a budget, or
    takes more anonymous memory than the budget and 400 MB.
    """
    needs_cgroup()
    task, cases = Task(prompt_tokens, decode_tokens, threads, seed, decode_limit), list[Case]()
    fixed = measured_fixed_costs(make_pack(packs[0], folder), seconds)
    by_gguf: dict[tuple[Path, int], LlamaRuns] = {}
    for name in packs:
        pack = make_pack(name, folder)
        gguf = make_gguf(pack) if llama_python else None
        total = pack_bytes(pack)
        for budget in map(read_size, budgets) if budgets else [int(share * total) for share in shares]:
            share, place = budget / total, f"{name}, {budget / total:.0%}"
            limit, known = budget + SPARE_BYTES, by_gguf.get((gguf, budget)) if gguf else None
            predicted, runs, theirs = list[Predicted](), list[ConfinedRun](), list[ConfinedRun]()
            for _ in range(rounds):
                machine = measured_machine(pack, seconds, fixed)
                predicted.append(predict(name, pack, budget, task, machine))
                for program, options in (
                    (OURS, ["--budget", str(budget)]),
                    (MAPPED, ["--read", "map", "--policy", "lru"]),
                ):
                    runs.append(run_ours(program, pack, task, options, limit, machine))
                    tell(place, runs[-1])
                    if program == OURS:  # rates change by the second
                        after = measured_machine(pack, seconds, fixed)
                        predicted.append(predict(name, pack, budget, task, after))
                if llama_python and gguf and not known:
                    theirs.append(run_llama(LLAMA, llama_python, gguf, pack, task, limit))
                    tell(place, theirs[-1])
            if gguf and not known:
                known = by_gguf[gguf, budget] = LlamaRuns(name, tuple(theirs))
            cases.append(Case(name, share, budget, tuple(predicted), tuple(runs), known))
            click.echo("\n".join(" | ".join(map(str, row)) for row in cases[-1].rows()), err=True)
    header = ("pack", "budget", "MB", "program", "MB a token", "(plan)", "tokens/s", "(plan)", "least", "most",
              "times llama.cpp", "anonymous MB", "allowed", "failed")  # fmt: skip
    text = table(header, [row for case in cases for row in case.rows()])
    facts = {"task": asdict(task), "fixed": asdict(fixed), "cases": [asdict(case) for case in cases]}
    finish(facts, text, as_json, [fault for case in cases for fault in case.faults()])


# --- the papers' parts


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a paper's table: the parts that a run of a pack has. `published`: its speed over the first line's.

    `parts`: None is moe-run with a budget and no other option.
    """

    text: str
    pack: str
    parts: Parts | None
    published: str = ""


def floe_lines(pack: str) -> list[Line]:
    """Returns FloE's parts (§3), from what is common to all systems; the predictor of experts also without rows."""
    whole = PRESETS["lru"]
    rows = replace(whole, rows_below=1.0)
    predicted = replace(rows, prediction="router")
    return [
        Line("whole experts", pack, Parts(whole), "1"),
        Line("whole experts, predicted", pack, Parts(replace(whole, prediction="router"))),
        Line("rows", pack, Parts(rows)),
        Line("rows, selectors stay", pack, Parts(rows, selectors=True)),
        Line("rows, selectors stay, experts predicted", pack, Parts(predicted, selectors=True)),
        Line("the same, and neurons predicted", pack, Parts(replace(predicted, reuse_selector=True), selectors=True)),
        Line("moe-run by default", pack, None),
    ]


def corm_lines(model: str, published: tuple[str, str, str]) -> list[Line]:
    """Returns CORM's parts: B, S, P and C of Fig. 8, from whole experts that are used once."""
    int4, mixed, corm = f"{model}-int4", f"{model}-corm", PRESETS["corm"]
    whole = replace(corm.without_prediction(), eviction="lru", keeps=False, rows_below=0.0)
    rows = replace(whole, rows_below=corm.rows_below)
    quantized, predicted, kept = published
    return [
        Line("B: INT4, read when needed", int4, Parts(whole), "1"),
        Line("+S, first half: running rows", int4, Parts(rows)),
        Line("+S: mixed quantization", mixed, Parts(rows), quantized),
        Line("+P: experts and neurons predicted", mixed, Parts(replace(corm, eviction="lru", keeps=False)), predicted),
        Line("+C: experts and rows kept", mixed, Parts(corm), kept),
        Line("moe-run by default", mixed, None),
    ]


def edgemoe_lines(name: str) -> list[Line]:
    """Returns EdgeMoE's parts: Q, P and C of Fig. 18, from whole experts that are used once (its IO-EXP)."""
    whole, mixed, edgemoe = f"{name}-16-bit", f"{name}-edgemoe", PRESETS["edgemoe"]
    once = replace(edgemoe.without_prediction(), eviction="lru", keeps=False)
    predicted = replace(edgemoe, prediction="router", starts_filled=False)
    return [
        Line("16 bit, read when needed", whole, Parts(once), "1"),
        Line("+Q: INT2 and INT4 by importance", mixed, Parts(once), "2.01"),
        Line("+P: up to 3 experts predicted", mixed, Parts(replace(predicted, eviction="lru", keeps=False)), "2.59"),
        Line("+C: experts kept", mixed, Parts(replace(predicted, starts_filled=True)), "3.22"),
        Line("moe-run by default", mixed, None),
    ]


def importance_lines(pack: str) -> list[Line]:
    """Returns importance's parts of Fig. 16 that need no second processor; §6.2 has alphas of 0.25 to 0.35."""
    importance = PRESETS["importance"]
    kept = importance.without_prediction()
    return [
        Line("some experts placed, the others read", pack, Parts(PRESETS["fiddler"]), "1"),
        Line("+CE: kept by mean score", pack, Parts(kept), "1.09"),
        Line("+ER: substituted, alpha 0.3", pack, Parts(kept, substitute=0.3), "1.36"),
        Line("+Pre: predicted from the partial state", pack, Parts(importance, substitute=0.3), "1.58"),
        Line("moe-run by default", pack, None),
    ]


_PAPERS: dict[str, list[list[Line]]] = {
    "floe": [floe_lines(pack) for pack in FLOE],
    "corm": [
        corm_lines("mixtral-5-layers", ("1.25", "1.59", "2.07")),
        corm_lines("deepseek-11-layers", ("1.40", "1.84", "2.14")),
    ],
    "edgemoe": [edgemoe_lines("minicpm-8-layers")],
    "importance": [importance_lines(pack) for pack in IMPORTANCE],
}
_STORED = FLOE | CORM | EDGEMOE | IMPORTANCE
_PART_PACKS = tuple(lines[0].pack for tables in _PAPERS.values() for lines in tables)


def parts_figures(runs: list[ConfinedRun], base: float | None) -> tuple[str, ...]:
    """Returns the medians of the runs of one line of the table; moe-run does not say what decode alone read.

    Args:    base: tokens a second of the first line.
    """
    counts = [(run.facts["stream"]["decode"], run.decode_s) for run in runs]
    rates, read = [run.tokens_per_s for run in runs if run.tokens_per_s], middle(run.token_bytes for run in runs)
    rate, times = (
        middle(rates),
        [
            middle(1000 * (seconds or 0.0) / c["tokens"] for c, seconds in counts),
            *(middle(1000 * c[name] / c["tokens"] for c, _ in counts if name in c) for name in ("read_s", "stall_s")),
        ],
    )
    shares = (
        middle(c["hits"] / c["experts_needed"] for c, _ in counts),
        middle(c["substituted"] / c["experts_needed"] for c, _ in counts),
        *(middle(c["rows_right"] / c[of] for c, _ in counts if c.get(of)) for of in ("rows_predicted", "rows_run")),
    )
    speed = (figure(rate), figure(min(rates, default=None)), figure(max(rates, default=None)))
    ratio = figure(rate / base if rate and base else None)
    figures = (figure(read and read / 1e6, ".1f"), *(figure(time, ".1f") for time in times))
    return (*speed, ratio, *figures, *(figure(share, ".1%") for share in shares))


@main.command("parts")
@run_options(64, 3, _PART_PACKS)
@click.option(
    "--share", default=0.25, show_default=True, type=click.FloatRange(0.01, 1), help="Of experts in the budget."
)
@click.option("--paper", "papers", multiple=True, type=click.Choice(list(_PAPERS)), help="Whose.  [default: all]")
def parts_command(
    folder: Path, packs: tuple[str, ...], papers: tuple[str, ...], share: float, rounds: int, prompt_tokens: int,
    decode_tokens: int, threads: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Measures the papers' parts apart and together, in their formats: FloE's, CORM's, EdgeMoE's, importance's.

    Interleaved, in a memory cgroup of the budget and 400 MB, from an empty page cache; medians of the rounds. The
    budget has space for a share of each pack's experts. The next layer's router predicts experts: synthetic packs
    have no learned networks, and their layers change the hidden state little, so that nearly all predictions are right.
    Hits: chosen experts that have their pages; where rows are read, with some rows or none. Rows right: of the rows
    predicted for chosen experts, those that ran; rows found: of the rows that these experts ran, those predicted. Of a
    token's milliseconds: reading, in which a read is under way, and waiting, in which the computation waits for reads.
    The others are computation; reading that is not waiting overlaps with it.
    """
    for paper in papers:
        known = [lines[0].pack for lines in _PAPERS[paper]]
        if not set(known) & set(packs):
            raise click.UsageError(f"--pack names none of the packs of --paper {paper}: {', '.join(known)}")
    needs_cgroup()
    task, rows, every = Task(prompt_tokens, decode_tokens, threads, seed, float("inf")), [], []
    wanted = [lines for paper in papers or _PAPERS for lines in _PAPERS[paper] if lines[0].pack in packs]
    for lines in wanted:
        made = {line.pack: make_pack(line.pack, folder, _STORED) for line in lines}
        budgets = {name: share_budget(pack, share, prompt_tokens + decode_tokens + 1) for name, pack in made.items()}
        runs: dict[Line, list[ConfinedRun]] = {line: [] for line in lines}
        for _ in range(rounds):
            machine = measure_disk(made[lines[0].pack])
            for line, done in runs.items():
                run = part_run(line, made[line.pack], task, budgets[line.pack], machine)
                done.append(finished(run))
                tell(line.pack, run)
        base = middle(run.tokens_per_s or 0.0 for run in runs[lines[0]])
        for line, done in runs.items():
            rows.append((line.pack, line.text, *parts_figures(done, base), line.published))
            click.echo(" | ".join(rows[-1]), err=True)
        every += [asdict(run) for done in runs.values() for run in done]
    header = (
        "pack", "parts", "tokens/s", "least", "most", "times the first", "MB a token", "ms a token", "reading, ms",
        "waiting, ms", "hits", "substituted", "rows right", "rows found", "published",
    )  # fmt: skip
    finish({"task": asdict(task), "runs": every}, table(header, rows), as_json)


def share_budget(pack: Path, share: float, context_tokens: int) -> int:
    """Returns the budget with space for a share of a pack's experts."""
    with Pack(pack) as opened:
        return budget_with(opened, int(share * opened.index.size.size), context_tokens)


def part_run(line: Line, pack: Path, task: Task, budget: int, machine: MachineFacts) -> ConfinedRun:
    """Runs a line."""
    command = MOE_RUN if line.parts is None else (str(Path(parts_side.__file__)),)
    options = ["--budget", str(budget), *([] if line.parts is None else line.parts.arguments())]
    return run_ours(line.text, pack, task, options, budget + SPARE_BYTES, machine, command)


if __name__ == "__main__":
    main()
