"""How near the engine's reads come to what the drive can do, measured in the same run and the same memory cgroup.

Interleaved, from an empty page cache, in a cgroup of the budget and 400 MB: `moe-pack doctor` on the pack's own files,
then moe-run with a budget that is a share of the pack's bytes. The engine's rate is bytes by the time in which at least
one read was under way, computing meanwhile; the drive's the best that doctor found, of any mode and number of threads,
for scattered reads as long as the pack's experts: between the sizes measured, straight in both logarithms.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from bench_packs import SYNTHETIC, make_pack, run_options, threads_option
from confined_run import SPARE_BYTES, ConfinedRun, Task, run_ours
from memory_cgroup import MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes

from moe_pack.formats import Pack


@dataclass(frozen=True, slots=True)
class Round:
    """Bytes a second: the engine's, and the drive's for reads of an expert. `read_bytes`: of the engine, a read."""

    run: ConfinedRun
    engine_rate: float
    drive_rate: float
    read_bytes: float

    @property
    def share(self) -> float:
        """Of the drive's rate."""
        return self.engine_rate / self.drive_rate


@dataclass(frozen=True, slots=True)
class Limit:
    """All rounds of one pack. `expert_bytes`: the mean of its experts, as they lie in the files."""

    pack: str
    budget_bytes: int
    expert_bytes: float
    rounds: tuple[Round, ...]


def best_rate(facts: dict[str, Any], num_bytes: float) -> float:
    """The best rate of reads of this size in doctor's facts; mapped files apart."""
    best: dict[int, float] = {}
    for found in facts["drive"]["best"]:
        if found["mode"] != "map":
            best[found["size"]] = max(found["rate"], best.get(found["size"], 0.0))
    sizes = sorted(best)
    return float(np.exp(np.interp(np.log(num_bytes), np.log(sizes), np.log([best[size] for size in sizes]))))


def run_doctor(pack: Path, seconds: float, limit_bytes: int) -> dict[str, Any]:
    """What `moe-pack doctor` finds in a cgroup; it keeps nothing."""
    drop_page_cache(pack)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as cache, MemoryCgroup(limit_bytes) as cgroup:
        command = ["env", f"XDG_CACHE_HOME={cache}", sys.executable, "-m", "moe_pack.convert.cli", "doctor"]
        command += ["--path", str(pack), "--seconds", str(seconds), "--json"]
        measured = measure(cgroup.inside(command), tree_anonymous_bytes)
    if measured.exit_code:
        raise click.ClickException(f"moe-pack doctor ended with {measured.exit_code}: {measured.errors}")
    facts: dict[str, Any] = json.loads(measured.output)
    return facts


def compare(name: str, folder: Path, share: float, rounds: int, seconds: float, task: Task) -> Limit:
    """Measures drive and engine in turn."""
    pack = make_pack(name, folder)
    with Pack(pack) as opened:
        expert_bytes = float(opened.index.size.mean())
    budget = int(share * sum(path.stat().st_size for path in pack.iterdir()))
    found = []
    for number in range(rounds):
        drive = best_rate(run_doctor(pack, seconds, budget + SPARE_BYTES), expert_bytes)
        run = run_ours("moe-run", pack, task, ["--budget", str(budget)], budget + SPARE_BYTES)
        if fault := run.fault():
            raise click.ClickException(f"{name}: {fault}")
        stream = run.facts["stream"]
        num_bytes = stream["read_needed"] + stream["read_ahead"]
        found.append(Round(run, num_bytes / stream["read_s"], drive, num_bytes / stream["num_reads"]))
        click.echo(f"{name}, round {number + 1}: {found[-1].share:.1%} of {drive / 1e6:,.0f} MB/s", err=True)
    return Limit(name, budget, expert_bytes, tuple(found))


def table(limits: Sequence[Limit]) -> str:
    """A line for each pack: medians over its rounds."""
    lines = ["pack              budget MB  experts of KB  reads of KB  engine MB/s  drive MB/s   share   least    most"]
    for limit in limits:
        shares = [one.share for one in limit.rounds]
        lines.append(
            f"{limit.pack:17}{limit.budget_bytes / 1e6:10,.0f}{limit.expert_bytes / 1e3:15,.0f}"
            f"{median(one.read_bytes for one in limit.rounds) / 1e3:13,.0f}"
            f"{median(one.engine_rate for one in limit.rounds) / 1e6:13,.0f}"
            f"{median(one.drive_rate for one in limit.rounds) / 1e6:12,.0f}"
            f"{median(shares):8.1%}{min(shares):8.1%}{max(shares):8.1%}"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@run_options("packs, 10 GB in all")
@click.option("--pack", "packs", multiple=True, type=click.Choice(list(SYNTHETIC)), help="Which.  [default: all]")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.25,
    show_default=True,
    help="Of the pack's bytes that the budget is.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=1, show_default=True, type=click.IntRange(1))
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=0.25, show_default=True, help="Of each of doctor's measurements.")
@threads_option
def main(
    folder: Path,
    packs: tuple[str, ...],
    share: float,
    rounds: int,
    prompt_tokens: int,
    decode_tokens: int,
    seconds: float,
    threads: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Runs and prints."""
    task, load_before = Task(prompt_tokens, decode_tokens, threads, seed, float("inf")), os.getloadavg()[0]
    try:
        limits = [compare(name, folder, share, rounds, seconds, task) for name in packs or SYNTHETIC]
    except NoCgroupError as reason:
        raise click.ClickException(f"no memory cgroup can be made: {reason}") from reason
    if json_file:
        facts = {"cores": os.cpu_count(), "load_before": load_before}
        json_file.write_text(json.dumps(facts | {"limits": [asdict(limit) for limit in limits]}, indent=1))
    click.echo(table(limits))


if __name__ == "__main__":
    main()
