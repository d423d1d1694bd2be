"""How much of the time that reads take is hidden behind computation, with experts read ahead and without.

Three packs, the synthetic ones of `bench_packs.py` and the demo model's, each with a budget that leaves room for a
share of its experts, in a memory cgroup of the budget and 400 MB, from an empty page cache. Interleaved: the policy
lru, which foretells nothing, then every policy asked for, with and without reading ahead. Hidden is 1 - waited / read,
both over the whole run; the prompt is one token, so that it is decoding that is measured.

Ends with exit code 1 where the median of decoding with reading ahead is more than --most-slower above that without.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from bench_packs import DEMO, SYNTHETIC, budget_with, make_pack, run_options, threads_option
from confined_run import SPARE_BYTES, ConfinedRun, Task, run_ours
from memory_cgroup import NoCgroupError

from moe_pack.formats import Pack
from moe_pack.runtime.policies import PRESETS

_WITHOUT = "no prefetch"


@dataclass(frozen=True, slots=True)
class Overlap:
    """All runs of one way to run a pack, which came to their end."""

    pack: str
    budget_bytes: int
    policy: str
    prefetches: bool
    runs: tuple[ConfinedRun, ...]

    @property
    def name(self) -> str:
        """The policy, and whether it was kept from reading ahead."""
        return self.policy if self.prefetches else f"{self.policy}, {_WITHOUT}"

    @property
    def decode_s(self) -> float:
        """The median of the seconds of decoding."""
        return median(run.decode_s for run in self.runs if run.decode_s is not None)

    @property
    def hidden(self) -> float:
        """The median of the share of read time that nobody waited in."""
        return median(1 - _waited_s(run) / float(run.facts["stream"]["read_s"]) for run in self.runs)

    def count(self, name: str) -> float:
        """The median of one of the counts of decoding."""
        return median(int(run.facts["stream"]["decode"][name]) for run in self.runs)


def _waited_s(run: ConfinedRun) -> float:
    stream = run.facts["stream"]
    return float(stream["prefill"]["stall_s"] + stream["decode"]["stall_s"])


def compare(name: str, folder: Path, share: float, policies: Sequence[str], rounds: int, task: Task) -> list[Overlap]:
    """Runs a pack in every way, interleaved."""
    pack = make_pack(name, folder)
    with Pack(pack) as opened:
        num_experts = int(share * opened.index.size.size)
        budget = budget_with(opened, num_experts, task.prompt_tokens + task.decode_tokens + 1)
    ways = [("lru", True), *((policy, ahead) for policy in policies for ahead in (True, False))]
    runs: dict[tuple[str, bool], list[ConfinedRun]] = {way: [] for way in ways}
    for number in range(rounds):
        for policy, ahead in ways:
            options = ["--budget", str(budget), "--policy", policy, *([] if ahead else ["--no-prefetch"])]
            run = run_ours(policy, pack, task, options, budget + SPARE_BYTES)
            if fault := run.fault():
                raise click.ClickException(f"{name}: {fault}")
            click.echo(f"{name}, round {number + 1}: {policy}, {ahead=}: {run.decode_s:.2f} s", err=True)
            runs[policy, ahead].append(run)
    return [Overlap(name, budget, policy, ahead, tuple(held)) for (policy, ahead), held in runs.items()]


def ratios(found: Sequence[Overlap]) -> Iterator[tuple[Overlap, float]]:
    """Each way that reads ahead, with its time of decoding by that of the same policy without."""
    without = {(one.pack, one.policy): one.decode_s for one in found if not one.prefetches}
    for one in found:
        if one.prefetches and (one.pack, one.policy) in without:
            yield one, one.decode_s / without[one.pack, one.policy]


def table(found: Sequence[Overlap]) -> str:
    """A line for each way to run each pack."""
    slower = {(one.pack, one.name): ratio for one, ratio in ratios(found)}
    lines = [
        "pack              budget MB  policy                    decode s   tokens/s   hit     hidden  foretold   right"
        "  time by that without"
    ]
    for one in found:
        ratio = slower.get((one.pack, one.name))
        hits = one.count("hits") / one.count("experts_needed")
        lines.append(
            f"{one.pack:17}{one.budget_bytes / 1e6:10,.0f}  {one.name:24}{one.decode_s:10.3f}"
            f"{one.runs[0].num_tokens / one.decode_s:11.2f}{hits:7.1%}{one.hidden:10.1%}{one.count('foretold'):10,.0f}"
            f"{one.count('foretold_right'):8,.0f}{'' if ratio is None else f'{ratio:.3f}':>22}"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@run_options("packs, 10 GB in all")
@click.option("--pack", "packs", multiple=True, type=click.Choice([*SYNTHETIC, DEMO]), help="Which.  [default: all]")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(["auto", *PRESETS]), default=("auto",), show_default=True
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    help="Of the experts that the budget has room for.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--decode-tokens", default=48, show_default=True, type=click.IntRange(1))
@threads_option
@click.option("--most-slower", default=0.02, show_default=True, help="What reading ahead may cost.")
def main(
    folder: Path,
    packs: tuple[str, ...],
    policies: tuple[str, ...],
    share: float,
    rounds: int,
    decode_tokens: int,
    threads: int,
    seed: int,
    most_slower: float,
    json_file: Path | None,
) -> None:
    """Runs, prints, judges."""
    task = Task(1, decode_tokens, threads, seed, float("inf"))
    load_before, found = os.getloadavg()[0], list[Overlap]()
    for name in packs or [*SYNTHETIC, DEMO]:
        try:
            found += compare(name, folder, share, policies, rounds, task)
        except NoCgroupError as reason:
            raise click.ClickException(f"no memory cgroup can be made: {reason}") from reason
    if json_file:
        facts = {"cores": os.cpu_count(), "load_before": load_before}
        json_file.write_text(json.dumps(facts | {"overlaps": [asdict(one) for one in found]}, indent=1))
    click.echo(table(found))
    slow = [(one, ratio) for one, ratio in ratios(found) if ratio > 1 + most_slower]
    for one, ratio in slow:
        click.echo(f"{one.pack}: {one.name} takes {ratio:.3f} times as long as without reading ahead", err=True)
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
