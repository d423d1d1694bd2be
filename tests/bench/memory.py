"""How much memory a conversion and a profile need, whatever the size of the checkpoint.

    python tests/bench/memory.py convert
    python tests/bench/memory.py convert --model deepseek-v3 --bits source
    python tests/bench/memory.py profile --layers 2,4

A random checkpoint of a published model's dimensions is written to a temporary folder (some layers: 3 to 16 GB); a
command of the project runs on it without limits, then inside a memory cgroup that counts the page cache too.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
from benchlib import F, figure, finish, json_option, moe_pack, moe_pack_command, table
from benchlib.checkpoints import MODELS, Shape, generate
from benchlib.confined import MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes

from moe_pack.calib.profile import Profile
from moe_pack.calib.quantize import usual_repeats
from moe_pack.convert import layout_for
from moe_pack.formats import ROW_GROUP, Pack, Quantizer, part_format, trellis_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts.specs import with_repeats

_GIB = 1 << 30
_MOST_GROWTH = 1.05  # of a profile's memory with more layers


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


@dataclass(frozen=True, slots=True)
class Run:
    """A command, measured. `cgroup_limit_bytes`, `refused`: None outside of a cgroup."""

    layers: int
    exit_code: int
    seconds: float
    mb_per_s: float
    peak_anonymous_bytes: int
    num_samples: int
    major_faults: int
    cgroup_limit_bytes: int | None
    refused: int | None
    kills: int | None
    found_bytes: int
    predicted_bytes: int | None
    errors: str

    @property
    def where(self) -> str:
        """In words."""
        limit = "no limit" if self.cgroup_limit_bytes is None else f"cgroup of {self.cgroup_limit_bytes / _GIB:g} GiB"
        return f"{self.layers} layers, {limit}"

    def fault(self, limit_bytes: int) -> str | None:
        """Returns what is wrong with this run, or None."""
        if self.exit_code:
            return f"{self.where}: ended with {self.exit_code}, {self.kills} kills: {self.errors}"
        if self.predicted_bytes not in (None, self.found_bytes):
            return f"{self.where}: the pack has {self.found_bytes} bytes, {self.predicted_bytes} were predicted"
        if self.peak_anonymous_bytes > limit_bytes:
            return f"{self.where}: {self.peak_anonymous_bytes} bytes anonymous, at most {limit_bytes} allowed"
        return None


def run_measured(
    source: Path, out: Path, layers: int, arguments: list[str], cgroup: MemoryCgroup | None, predicted: dict[str, int]
) -> Run:
    """Runs `moe-pack`, which writes `out`, removes that, and measures.

    Args:    predicted: bytes of files of the pack, as its layout has them; empty where nothing is predicted.
    """
    source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    verb, *options = arguments
    command = moe_pack_command(verb, source, "-o", out, *options)
    drop_page_cache(source)
    try:
        if cgroup is None:
            measured = measure(command, tree_anonymous_bytes)
        else:
            measured = measure(cgroup.inside(command), lambda pid: cgroup.anonymous_bytes())
        sizes = {path.name: path.stat().st_size for path in out.iterdir()} if out.is_dir() else {}
        if measured.exit_code == 0:
            Pack(out).close() if verb == "convert" else Profile(out)  # checks that it is whole
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Run(
        layers=layers,
        exit_code=measured.exit_code,
        seconds=measured.seconds,
        mb_per_s=source_bytes / 1e6 / measured.seconds,
        peak_anonymous_bytes=measured.peak_bytes,
        num_samples=measured.num_samples,
        major_faults=measured.major_faults,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        refused=cgroup.num_refused if cgroup else None,
        kills=cgroup.num_kills if cgroup else None,
        found_bytes=sum(size for name, size in sizes.items() if name in predicted or not predicted),
        predicted_bytes=sum(predicted.values()) if predicted else None,
        errors=measured.errors if measured.exit_code else "",
    )


def common_options(cgroup_gib: float) -> Callable[[F], F]:
    """Adds the options of both commands: the checkpoint's sizes, and the limits."""

    def add(body: F) -> F:
        folder = click.Path(path_type=Path, exists=True, file_okay=False)
        for option in (
            json_option,
            click.option("--cgroup-gib", default=cgroup_gib, show_default=True, help="The cgroup's limit, GiB."),
            click.option("--anonymous-gib", default=1.5, show_default=True, help="Most anonymous memory allowed, GiB."),
            click.option("--only", type=click.Choice(["plain", "cgroup"]), help="Runs of one kind."),
            click.option("--vocab", type=int, help="Tokens known.  [default: the model's]"),
            click.option("--intermediate", type=int, help="Neurons of an expert.  [default: the model's]"),
            click.option("--hidden", type=int, help="Hidden size.  [default: the model's]"),
            click.option("--experts", type=int, help="Of a layer.  [default: the model's]"),
            click.option("--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True),
            click.option("--folder", type=folder, help="For temporary files."),
        ):
            body = option(body)
        return body

    return add


@dataclass(frozen=True, slots=True)
class Places:
    """Where commands run: a temporary folder, and a cgroup if one is wanted and can be made."""

    folder: Path
    cgroups: tuple[MemoryCgroup | None, ...]
    skipped: str | None

    @classmethod
    def enter(cls, stack: ExitStack, folder: Path | None, only: str | None, cgroup_gib: float) -> "Places":
        """Makes both; the stack removes them."""
        cgroup, skipped = None, None
        if only != "plain":
            try:
                cgroup = stack.enter_context(MemoryCgroup(int(cgroup_gib * _GIB)))
            except NoCgroupError as reason:
                skipped = f"no memory cgroup can be made: {reason}"
                click.echo(f"skipped the run inside a cgroup; {skipped}", err=True)
        cgroups = [*([None] if only != "cgroup" else []), *([cgroup] if cgroup else [])]
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-", dir=folder))
        return cls(Path(temporary), tuple(cgroups), skipped)


def report(runs: list[Run], faults: list[str], skipped: str | None, as_json: bool) -> None:
    """Prints the runs."""
    header = ("run", "anonymous GiB", "samples", "seconds", "MB/s of source", "cgroup refused", "major faults", "bytes")
    rows = [
        (r.where, f"{r.peak_anonymous_bytes / _GIB:.3f}", f"{r.num_samples:,}", f"{r.seconds:.1f}", f"{r.mb_per_s:.1f}",
         figure(r.refused, ","), f"{r.major_faults:,}", f"{r.found_bytes:,}")
        for r in runs
    ]  # fmt: skip
    finish({"runs": [asdict(r) for r in runs], "skipped": skipped}, table(header, rows), as_json, faults)


@main.command("convert")
@click.option("--layers", default=2, show_default=True, help="Decoder layers.")
@click.option("--quantizer", type=click.Choice(get_args(Quantizer)), default="hqq", show_default=True)
@click.option("--bits", default="4", show_default=True, help="Of experts; `source` keeps the checkpoint's codes.")
@click.option("--codec", type=click.Choice(["affine", "trellis"]), default="affine", show_default=True)
@click.option("--dense-bits", type=int, help="Of dense matrices.  [default: as in the source]")
@click.option("--tokens", default=4096, show_default=True, help="To profile on, for --quantizer calibrated.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@common_options(3.0)
def convert_command(
    folder: Path | None,
    model: str,
    layers: int,
    experts: int | None,
    hidden: int | None,
    intermediate: int | None,
    vocab: int | None,
    quantizer: Quantizer,
    bits: str,
    codec: str,
    dense_bits: int | None,
    tokens: int,
    workers: int,
    only: str | None,
    anonymous_gib: float,
    cgroup_gib: float,
    as_json: bool,
) -> None:
    """Measures the memory of a conversion (group 64, or one scale a row for trellises; selector `up`).

    Exits with 1 if a conversion fails, its pack has not the predicted size, or its anonymous memory exceeds the limit
    at any sample. The profile of a calibrated conversion is made first, and not measured.
    """
    with ExitStack() as stack:
        places = Places.enter(stack, folder, only, cgroup_gib)
        if not places.cgroups:
            report([], [], places.skipped, as_json)
        source = places.folder / "checkpoint"
        click.echo(f"generating {layers} layers of {model} in {source}", err=True)
        generate(source, Shape(model, layers, experts, hidden, intermediate, vocab))
        arguments = ["convert", "--workers", str(workers), "--selector-bits", bits, "--record-bits", bits]
        arguments += ["--quantizer", quantizer] if bits != "source" else []
        arguments += ["--dense-bits", str(dense_bits)] if dense_bits else []
        arguments += ["--codec", codec] if bits != "source" and float(bits) <= 4 else []
        if quantizer == "calibrated":
            moe_pack("profile", source, "-o", places.folder / "profile", "--tokens", tokens, "--sensitivity", "none")
            arguments += ["--profile", str(places.folder / "profile")]
        predicted = {} if bits == "source" or dense_bits else predicted_bytes(source, quantizer, bits, codec)
        runs = []
        for cgroup in places.cgroups:
            click.echo(f"converting {'inside a cgroup' if cgroup else 'without a cgroup'}", err=True)
            runs.append(run_measured(source, places.folder / "pack", layers, arguments, cgroup, predicted))
    faults = [fault for run in runs if (fault := run.fault(int(anonymous_gib * _GIB)))]
    report(runs, faults, places.skipped, as_json)


def predicted_bytes(source: Path, quantizer: Quantizer, bits: str, codec: str) -> dict[str, int]:
    """Returns the bytes of every large file of the pack, before it is made."""
    part = trellis_format(round(2 * float(bits)), ROW_GROUP) if codec == "trellis" else part_format(int(bits), 64)
    checkpoint = Checkpoint(source)
    try:
        spec = with_repeats(checkpoint.spec, usual_repeats(checkpoint.spec.expert.source_size))
        layout = layout_for(checkpoint, uniform_plan(spec, "up", part, part, None, quantizer))
    finally:
        checkpoint.close()
    return {name: file.num_bytes for name, file in layout.files()}


@main.command("profile")
@click.option("--layers", default="2,4", show_default=True, help="Of the checkpoints, the fewest first.")
@click.option("--tokens", default=16384, show_default=True, help="To profile on.")
@click.option("--sensitivity", type=click.Choice(["none", "fast"]), default="fast", show_default=True)
@common_options(4.0)
def profile_command(
    folder: Path | None,
    model: str,
    layers: str,
    experts: int | None,
    hidden: int | None,
    intermediate: int | None,
    vocab: int | None,
    tokens: int,
    sensitivity: str,
    only: str | None,
    anonymous_gib: float,
    cgroup_gib: float,
    as_json: bool,
) -> None:
    """Measures the memory of a profile, for several numbers of layers; in a cgroup for the fewest.

    Exits with 1 if a run fails, if its anonymous memory exceeds the limit at any sample, or if more layers need over 5%
    more of it than the fewest.
    """
    numbers, runs = [int(number) for number in layers.split(",")], list[Run]()
    arguments = ["profile", "--tokens", str(tokens), "--sensitivity", sensitivity]
    with ExitStack() as stack:
        places = Places.enter(stack, folder, only, cgroup_gib)
        for number in numbers:
            source = places.folder / f"{number}-layers"
            click.echo(f"profiling {number} layers of {model}", err=True)
            generate(source, Shape(model, number, experts, hidden, intermediate, vocab))
            for cgroup in places.cgroups:
                if cgroup is None or number == numbers[0]:
                    runs.append(run_measured(source, places.folder / "profile", number, arguments, cgroup, {}))
            shutil.rmtree(source)
    limit_bytes = int(anonymous_gib * _GIB)
    faults = [*(fault for run in runs if (fault := run.fault(limit_bytes))), *growth_faults(runs)]
    report(runs, faults, places.skipped, as_json)


def growth_faults(runs: list[Run]) -> Iterator[str]:
    """Yields the numbers of layers that need much more memory than the fewest."""
    plain = [run for run in runs if run.cgroup_limit_bytes is None and not run.exit_code]
    for run in plain[1:]:
        share = run.peak_anonymous_bytes / plain[0].peak_anonymous_bytes
        if share > _MOST_GROWTH:
            yield f"{run.layers} layers need {share:.3f} times the memory of {plain[0].layers}"


if __name__ == "__main__":
    main()
