"""Measures how much memory a conversion needs: anonymous memory, sampled, and a memory cgroup it must fit into.

Converts with group 64, selector `up`, first without limits, then inside a memory cgroup (version 1) that counts
the page cache too. With --quantizer calibrated the checkpoint is first profiled, which is not measured here
(`profile_memory.py`), and stored as the codec says; one scale a row for trellises. Ends with exit code 1 if a
conversion fails, its pack has not the predicted size, or its anonymous memory exceeds the limit at any sample.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
from generate_checkpoint import Shape
from memory_cgroup import MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes
from profile_memory import make_source

from moe_pack.convert import layout_for
from moe_pack.formats import (
    ROW_GROUP,
    Checkpoint,
    Pack,
    PartFormat,
    Quantizer,
    format_text,
    part_format,
    trellis_format,
    uniform_plan,
)

_MIXTRAL_8X7B = Shape()


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion, measured."""

    where: str
    exit_code: int
    seconds: float
    source_mb_per_second: float
    peak_anonymous_bytes: int
    num_samples: int
    major_faults: int
    cgroup_limit_bytes: int | None
    failcnt: int | None
    max_usage_bytes: int | None
    oom_kills: int | None
    predicted_bytes: int
    found_bytes: int
    pack_bytes: int
    page_cache_dropped: bool
    errors: str

    def fault(self, anonymous_limit_bytes: int) -> str | None:
        """What is wrong with this run, or None."""
        if self.exit_code:
            return f"{self.where}: conversion ended with {self.exit_code}, {self.oom_kills} kills: {self.errors}"
        if self.found_bytes != self.predicted_bytes:
            return (
                f"{self.where}: experts and dense part have {self.found_bytes} bytes, {self.predicted_bytes} foretold"
            )
        if self.peak_anonymous_bytes > anonymous_limit_bytes:
            return f"{self.where}: {self.peak_anonymous_bytes} bytes anonymous, at most {anonymous_limit_bytes} allowed"
        return None


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert, and how.

    `part`: of all matrices of experts.   `profile`: what to calibrate with, or None.
    """

    source: Path
    quantizer: Quantizer
    part: PartFormat
    profile: Path | None
    workers: int

    def command(self, out: Path) -> list[str]:
        """The command line that converts into `out`."""
        command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(self.source), "-o", str(out)]
        command += ["--workers", str(self.workers), "--quantizer", self.quantizer]
        command += ["--selector-bits", f"{self.part.bits:g}", "--record-bits", f"{self.part.bits:g}"]
        if self.part.bits <= 4:
            command += ["--codec", self.part.codec]
        return [*command, "--profile", str(self.profile)] if self.profile else command


def _predicted(source: Path, quantizer: Quantizer, part: PartFormat) -> dict[str, int]:
    """The bytes of every large file of the pack, before it is made."""
    checkpoint = Checkpoint(source)
    try:
        layout = layout_for(checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, quantizer))
    finally:
        checkpoint.close()
    return {name: file.num_bytes for name, file in layout.files()}


def convert_measured(conversion: Conversion, out: Path, cgroup: MemoryCgroup | None) -> Run:
    """Converts into `out`, which is removed afterwards, and measures."""
    source, command = conversion.source, conversion.command(out)
    source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    predicted = _predicted(source, conversion.quantizer, conversion.part)
    dropped = drop_page_cache(source)
    try:
        if cgroup is None:
            measured = measure(command, tree_anonymous_bytes)
        else:
            measured = measure(cgroup.inside(command), lambda pid: cgroup.anonymous_bytes())
        sizes = {path.name: path.stat().st_size for path in out.iterdir()} if out.is_dir() else {}
        if measured.exit_code == 0:
            Pack(out).close()  # compares the size of every file with the manifest's
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Run(
        where="no cgroup" if cgroup is None else "cgroup",
        exit_code=measured.exit_code,
        seconds=measured.seconds,
        source_mb_per_second=source_bytes / 1e6 / measured.seconds,
        peak_anonymous_bytes=measured.peak_bytes,
        num_samples=measured.num_samples,
        major_faults=measured.major_faults,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        failcnt=cgroup.num_refused if cgroup else None,
        max_usage_bytes=cgroup.peak_bytes if cgroup else None,
        oom_kills=cgroup.num_kills if cgroup else None,
        predicted_bytes=sum(predicted.values()),
        found_bytes=sum(sizes.get(name, 0) for name in predicted),
        pack_bytes=sum(sizes.values()),
        page_cache_dropped=dropped,
        errors=measured.errors if measured.exit_code else "",
    )


def profiled(source: Path, out: Path, tokens: int) -> Path:
    """A profile of what calibration needs alone.

    Raises:  click.ClickException with what profiling printed if it fails.
    """
    command = [sys.executable, "-m", "moe_pack.convert.cli", "profile", str(source), "-o", str(out)]
    command += ["--tokens", str(tokens), "--sensitivity", "none"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"profiling ended with {done.returncode}: {done.stderr[-2000:]}")
    return out


def _table(runs: list[Run]) -> str:
    """The runs side by side, one figure a line."""
    lines = []
    for name in Run.__dataclass_fields__:
        values = [getattr(run, name) for run in runs]
        if name != "errors" and any(value is not None for value in values):
            cells = [f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" if type(v) is int else str(v) for v in values]
            lines.append(f"{name:22}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--source", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Checkpoint to convert.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="For temporary files.")
@click.option("--layers", default=_MIXTRAL_8X7B.layers, show_default=True, help="Of a generated checkpoint.")
@click.option("--experts", default=_MIXTRAL_8X7B.experts, show_default=True, help="Of a generated layer.")
@click.option("--hidden", default=_MIXTRAL_8X7B.hidden, show_default=True, help="Of a generated checkpoint.")
@click.option(
    "--intermediate", default=_MIXTRAL_8X7B.intermediate, show_default=True, help="Of a generated checkpoint."
)
@click.option("--quantizer", type=click.Choice(get_args(Quantizer)), default="hqq", show_default=True)
@click.option("--bits", default=4.0, show_default=True, help="Of a weight of selector and records.")
@click.option("--codec", type=click.Choice(["affine", "trellis"]), default="affine", show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="To profile on, for calibrated.")
@click.option("--workers", default=2, show_default=True)
@click.option("--only", type=click.Choice(["plain", "cgroup"]), help="One of the two runs.")
@click.option("--anonymous-gib", default=1.5, show_default=True, help="Most anonymous memory allowed, GiB.")
@click.option("--cgroup-gib", default=3.0, show_default=True, help="The cgroup's limit, page cache included, GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    source: Path | None,
    folder: Path | None,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    quantizer: Quantizer,
    bits: float,
    codec: str,
    tokens: int,
    workers: int,
    only: str | None,
    anonymous_gib: float,
    cgroup_gib: float,
    as_json: bool,
) -> None:
    """Measures, prints, and judges."""
    if codec == "affine" and not bits.is_integer():
        raise click.BadParameter(f"{bits:g}: affine codes have whole bits; half bits are of --codec trellis")
    part = trellis_format(round(2 * bits), ROW_GROUP) if codec == "trellis" else part_format(int(bits), 64)
    limit_bytes, anonymous_limit_bytes = int(cgroup_gib * (1 << 30)), int(anonymous_gib * (1 << 30))
    runs: list[Run] = []
    skipped = None
    with ExitStack() as stack:
        cgroup = None
        if only != "plain":
            try:
                cgroup = stack.enter_context(MemoryCgroup(limit_bytes))  # before anything large is generated
            except NoCgroupError as reason:
                skipped = f"no memory cgroup can be made: {reason}"
                click.echo(f"skipped the run inside a cgroup; {skipped}", err=True)
        wanted = [*([None] if only != "cgroup" else []), *([cgroup] if cgroup else [])]
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-", dir=folder)))
        if source is None and wanted:
            source = temporary / "checkpoint"
            click.echo(f"generating a checkpoint in {source}", err=True)
            shape = Shape(layers=layers, experts=experts, hidden=hidden, intermediate=intermediate)
            make_source(source, shape)
        profile = None
        if quantizer == "calibrated" and source is not None:
            click.echo(f"profiling {source}", err=True)
            profile = profiled(source, temporary / "profile", tokens)
        for place in wanted:
            assert source is not None, "given or generated"
            click.echo(f"converting {'inside a cgroup' if place else 'without a cgroup'}", err=True)
            conversion = Conversion(source, quantizer, part, profile, workers)
            runs.append(convert_measured(conversion, temporary / "pack", place))
    faults = [fault for run in runs if (fault := run.fault(anonymous_limit_bytes))]
    facts = {
        "quantizer": quantizer,
        "format": format_text(part),
        "workers": workers,
        "anonymous_limit_bytes": anonymous_limit_bytes,
    }
    result = facts | {"runs": [asdict(run) for run in runs], "skipped": skipped, "faults": faults}
    click.echo(json.dumps(result) if as_json else _table(runs))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
