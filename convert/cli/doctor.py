"""The command `moe-pack doctor`: measures this machine, for the planner and the runtime."""

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import click

from moe_pack import formats, runtime
from moe_pack.formats.base import cli, commands

# The example of an expert: records of gate and down with 4096 weights each, at 4 bit, group 64.
_ROWS, _ROW_BYTES = 14336, 4624


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of `doctor`."""

    path: Path = commands.option_field(
        Path(),
        "--path DIR",
        help="A folder on the disk to measure: a pack, whose files are read, or another folder, where a "
        "file of up to 1 GiB is written and removed.  [default: the current folder]",
    )
    seconds: float = commands.option_field(
        0.5, "--seconds S", least=0.001, most=60, help="Time for each of some 90 measurements."
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the measurements as JSON.")


@click.command("doctor")
@cli.options_from(DoctorOptions)
@cli.command_errors(interrupted="interrupted; the measurements are not kept")
def doctor_command(options: DoctorOptions) -> None:
    """Measure how fast this machine reads its disk, computes experts and copies to its GPU, and store the figures.

    moe-pack plan and moe-run use them. They are stored for each disk in the user's cache folder, so --path is a pack,
    or any folder on the disk where packs will be. Run it once for each disk, without other work on the machine.
    """
    from moe_pack.convert import measure_fixed_costs
    from moe_pack.formats.pack.manifests import MANIFEST_FILE
    from moe_pack.runtime import measure_machine

    path, seconds = options.path, options.seconds
    with cli.TerminalProgress() as progress:
        facts = measure_machine(path, progress, seconds)
        with commands.stage_of(progress, "decoding with small packs"):
            facts = replace(facts, fixed=measure_fixed_costs(facts, seconds))
    file = runtime.save_facts(facts, cli.cache_folder(), path)
    if options.as_json:
        click.echo(json.dumps(formats.dump(facts), indent=2))
        return
    from_pack = (path / MANIFEST_FILE).exists()
    for line in [*_disk_lines(facts.drive, path, from_pack), "", *_other_lines(facts), "", f"stored in {file}"]:
        click.echo(line)


def _disk_lines(disk: runtime.DiskFacts, path: Path, from_pack: bool) -> list[str]:
    files = "of this pack" if from_pack else "in a file of its own"
    rates = {(rate.mode, rate.size): f"{rate.rate / 1e6:,.0f} ({rate.threads:>2})" for rate in disk.best}
    lines = [
        f"disk {disk.name or 'without a name'}, at {path.resolve()}: {formats.size_text(disk.file_bytes)} {files}",
        "",
        "scattered reads, MB/s (threads)",
        f"{'size':>8} {'direct':>14} {'pread':>14} {'map':>14}",
    ]
    for size in sorted({rate.size for rate in disk.best}):
        cells = (rates.get((mode, size), "-") for mode in ("direct", "pread", "map"))
        lines.append(f"{_round_size(size):>8} " + " ".join(f"{cell:>14}" for cell in cells))
    share = disk.cutover(_ROW_BYTES, _ROWS, _ROWS * _ROW_BYTES)
    return [
        *lines,
        f"best over all sizes: {disk.mode}, {disk.threads} thread{'s' if disk.threads > 1 else ''}",
        f"smallest efficient read: {_round_size(disk.smallest_efficient_bytes)}",
        f"processor time: {1e6 * disk.read_cpu_s:.1f} us a read, and {1e6 * disk.byte_cpu_s * (1 << 20):.0f} us a MiB",
        f"reading only the running rows of an expert is faster than reading all of it if at most {share:.0%} run "
        f"({_ROWS:,} rows of {_ROW_BYTES:,} bytes)",
    ]


def _other_lines(facts: runtime.MachineFacts) -> list[str]:
    cpu, link = facts.cpu, facts.link
    lines = [f"CPU: {cpu.cores} cores, " + (cpu.instruction_set or "native kernels were not built")]
    if cpu.read_one is not None and cpu.read_all is not None and cpu.row_s is not None:
        lines += [
            f"memory: {cpu.read_one / 1e9:.1f} GB/s with one thread, {cpu.read_all / 1e9:.1f} GB/s with all",
            f"experts, one token, GB/s by bits: {_by_width(cpu.experts)}; in addition {cpu.row_s * 1e9:.0f} ns a row",
            f"experts as trellises, one token, GB/s by bits: {_by_width(cpu.trellises, 2)}",
            f"dense matrices, one token, GB/s by bits: {_by_width(cpu.dense)}",
        ]
    if facts.fixed is not None:
        token, layer, expert, miss, rows = (1e6 * seconds for seconds in astuple(facts.fixed))
        lines.append(
            f"in addition: {token:.0f} us a token, {layer:.0f} us a layer, {expert:.0f} us an expert, {miss:.0f} us "
            f"for an expert that is read, {rows:.0f} us for one of which rows are read"
        )
    if link is None:
        return [*lines, "link: torch finds no GPU"]
    rates = ", ".join(f"{_round_size(copy.size)} {copy.rate / 1e9:.1f}" for copy in link.copies)
    return [*lines, f"link to {link.name} with {formats.size_text(link.memory_bytes)}, GB/s by size: {rates}"]


def _by_width(rates: tuple[runtime.WidthRate, ...], num_weights: int = 1) -> str:
    return ", ".join(f"{rate.width / num_weights:g}: {rate.rate / 1e9:.1f}" for rate in rates)


def _round_size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
