"""Measures how much memory profiling needs: anonymous memory, sampled, and a memory cgroup it must fit into.

Profiles random checkpoints of Mixtral-8x7B's dimensions, the tiny model's tokenizer beside them, on the shipped sample:
of every number of layers without limits, and of the smallest inside a memory cgroup (version 1) that counts the page
cache too. Ends with exit code 1 if a run fails, if its anonymous memory exceeds the limit at any sample, or if more
layers need over 5% more of it than the fewest.
"""

import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from generate_checkpoint import Shape, generate
from memory_cgroup import MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes

from moe_pack.calib import Profile

_TOKENIZER = Path(__file__).parents[1] / "tests" / "models" / "tiny-mixtral"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_MIXTRAL_8X7B = Shape()
_MOST_GROWTH = 1.05
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """One profile, measured."""

    where: str
    layers: int
    exit_code: int
    seconds: float
    peak_anonymous_bytes: int
    num_samples: int
    major_faults: int
    cgroup_limit_bytes: int | None
    failcnt: int | None
    max_usage_bytes: int | None
    profile_bytes: int
    page_cache_dropped: bool
    errors: str

    def fault(self, anonymous_limit_bytes: int) -> str | None:
        """What is wrong with this run, or None."""
        place = f"{self.layers} layers, {self.where}"
        if self.exit_code:
            return f"{place}: profiling ended with {self.exit_code}: {self.errors}"
        if self.peak_anonymous_bytes > anonymous_limit_bytes:
            return f"{place}: {self.peak_anonymous_bytes} bytes anonymous, at most {anonymous_limit_bytes} allowed"
        return None


def make_source(folder: Path, shape: Shape) -> None:
    """A checkpoint of random weights that can read text."""
    generate(folder, shape)
    for name in _TOKENIZER_FILES:
        shutil.copy(_TOKENIZER / name, folder)


def profile_measured(
    source: Path, out: Path, layers: int, tokens: int, sensitivity: str, cgroup: MemoryCgroup | None
) -> Run:
    """Profiles into `out`, which is removed afterwards, and measures."""
    command = [sys.executable, "-m", "moe_pack.convert.cli", "profile", str(source), "-o", str(out)]
    command += ["--tokens", str(tokens), "--sensitivity", sensitivity]
    dropped = drop_page_cache(source)
    try:
        if cgroup is None:
            measured = measure(command, tree_anonymous_bytes)
        else:
            measured = measure(cgroup.inside(command), lambda pid: cgroup.anonymous_bytes())
        profile_bytes = sum(path.stat().st_size for path in out.iterdir()) if out.is_dir() else 0
        if measured.exit_code == 0:
            Profile(out)  # is whole
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Run(
        where="no cgroup" if cgroup is None else "cgroup",
        layers=layers,
        exit_code=measured.exit_code,
        seconds=measured.seconds,
        peak_anonymous_bytes=measured.peak_bytes,
        num_samples=measured.num_samples,
        major_faults=measured.major_faults,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        failcnt=cgroup.num_refused if cgroup else None,
        max_usage_bytes=cgroup.peak_bytes if cgroup else None,
        profile_bytes=profile_bytes,
        page_cache_dropped=dropped,
        errors=measured.errors if measured.exit_code else "",
    )


def faults_in(runs: list[Run], anonymous_limit_bytes: int) -> list[str]:
    """What is wrong with the runs, and between them."""
    faults = [fault for run in runs if (fault := run.fault(anonymous_limit_bytes))]
    plain = [run for run in runs if run.cgroup_limit_bytes is None and not run.exit_code]
    for run in plain[1:]:
        share = run.peak_anonymous_bytes / plain[0].peak_anonymous_bytes
        if share > _MOST_GROWTH:
            faults.append(f"{run.layers} layers need {share:.3f} times the memory of {plain[0].layers}")
    return faults


def _table(runs: list[Run]) -> str:
    rows = ["layers  where       peak anonymous, GiB   seconds   major faults   cgroup's peak, GiB"]
    for run in runs:
        cgroup_peak = "-" if run.max_usage_bytes is None else f"{run.max_usage_bytes / _GIB:.3f}"
        rows.append(
            f"{run.layers:6}  {run.where:10}{run.peak_anonymous_bytes / _GIB:21.3f}{run.seconds:10.1f}"
            f"{run.major_faults:15,}{cgroup_peak:>21}"
        )
    return "\n".join(rows)


def _cgroup(stack: ExitStack, limit_bytes: int) -> MemoryCgroup | None:
    """A cgroup until the stack is left, or None where none can be made."""
    try:
        return stack.enter_context(MemoryCgroup(limit_bytes))
    except NoCgroupError as reason:
        click.echo(f"skipped the run inside a cgroup: {reason}", err=True)
        return None


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="For temporary files.")
@click.option("--layers", default="2,4", show_default=True, help="Of the checkpoints, the fewest first.")
@click.option("--hidden", default=_MIXTRAL_8X7B.hidden, show_default=True, help="Hidden size.")
@click.option("--intermediate", default=_MIXTRAL_8X7B.intermediate, show_default=True, help="Neurons.")
@click.option("--tokens", default=16384, show_default=True, help="To profile on.")
@click.option("--sensitivity", type=click.Choice(["none", "fast"]), default="fast", show_default=True)
@click.option("--only", type=click.Choice(["plain", "cgroup"]), help="Runs of one kind.")
@click.option("--anonymous-gib", default=1.5, show_default=True, help="Most anonymous memory allowed, GiB.")
@click.option("--cgroup-gib", default=4.0, show_default=True, help="The cgroup's limit, page cache included, GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    folder: Path | None,
    layers: str,
    hidden: int,
    intermediate: int,
    tokens: int,
    sensitivity: str,
    only: str | None,
    anonymous_gib: float,
    cgroup_gib: float,
    as_json: bool,
) -> None:
    """Generates, measures, prints, and judges."""
    numbers, runs = [int(number) for number in layers.split(",")], []
    with ExitStack() as stack:
        cgroup = None if only == "plain" else _cgroup(stack, int(cgroup_gib * _GIB))
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-", dir=folder)))
        for number in numbers:
            places = [*([None] if only != "cgroup" else []), *([cgroup] if cgroup and number == numbers[0] else [])]
            if not places:
                continue
            source = temporary / f"{number}-layers"
            click.echo(f"generating {number} layers in {source}", err=True)
            make_source(source, Shape(layers=number, hidden=hidden, intermediate=intermediate))
            for place in places:
                click.echo(f"profiling {'inside a cgroup' if place else 'without a cgroup'}", err=True)
                runs.append(profile_measured(source, temporary / "profile", number, tokens, sensitivity, place))
            shutil.rmtree(source)
    faults = faults_in(runs, int(anonymous_gib * _GIB))
    facts = {"hidden": hidden, "intermediate": intermediate, "tokens": tokens, "sensitivity": sensitivity}
    if as_json:
        click.echo(json.dumps(facts | {"runs": [asdict(run) for run in runs], "faults": faults}))
    else:
        click.echo(f"hidden size {hidden}, {intermediate} neurons, {tokens:,} tokens, sensitivity {sensitivity}")
        click.echo(_table(runs))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
