"""The command `moe-pack doctor`: measures this machine once, for the planner and the runtime."""

import json
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import click

from moe_pack.convert import measure_fixed_costs
from moe_pack.formats import dump, option, size_text
from moe_pack.formats.cli import TerminalProgress, cache_folder, command_errors, options_from
from moe_pack.formats.manifest import MANIFEST_FILE
from moe_pack.runtime import DiskFacts, MachineFacts, ReadRate, WidthRate, measure_machine, save_facts

# What the table's example has: gate and down of 4096 weights each, at 4 bit, group 64.
_ROWS, _ROW_BYTES = 14336, 4624


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What `doctor` was asked for."""

    path: Path = field(
        default=Path(),
        metadata=option(
            "--path",
            metavar="DIR",
            help="A folder on the drive to measure: a pack, whose files are read, or another, where up to 1 GiB is "
            "written and removed.  [default: the current one]",
        ),
    )
    seconds: float = field(
        default=0.5,
        metadata=option(
            "--seconds",
            least=0.001,
            most=60,
            metavar="S",
            help="How long each of some 90 measurements takes.",
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print what was measured as JSON."))


@click.command("doctor", short_help="Measure this machine's drive, CPU and link.")
@options_from(DoctorOptions)
@command_errors(interrupted="interrupted; nothing was kept")
def doctor_command(options: DoctorOptions) -> None:
    """Measure how fast this machine reads its drive, computes experts and copies to its GPU, and keep the figures.

    They are kept by drive in the user's cache folder. Give a pack's folder, or one on the drive that packs will lie on.
    """
    path, seconds = options.path, options.seconds
    with TerminalProgress() as progress:
        facts = measure_machine(path, progress, seconds)
        progress.say("tokens of tiny packs")
    facts = replace(facts, fixed=measure_fixed_costs(seconds))
    file = save_facts(facts, cache_folder(), path)
    if options.as_json:
        click.echo(json.dumps(dump(facts), indent=2))
        return
    from_pack = (path / MANIFEST_FILE).exists()
    for line in [*_drive_lines(facts.drive, path, from_pack), "", *_other_lines(facts), "", f"kept in {file}"]:
        click.echo(line)


def _drive_lines(drive: DiskFacts, path: Path, from_pack: bool) -> list[str]:
    of = "of this pack" if from_pack else "written for it"
    lines = [f"drive {drive.name or 'without a name'}, at {path.resolve()}: {size_text(drive.file_bytes)} {of}"]
    lines += ["", "scattered reads, MB/s (threads)", f"{'size':>8} {'direct':>14} {'pread':>14} {'map':>14}"]
    held = {(one.mode, one.size): one for one in drive.best}
    for size in sorted({one.size for one in drive.best}):
        cells = (_rate_cell(held.get((mode, size))) for mode in ("direct", "pread", "map"))
        lines.append(f"{_round_size(size):>8} " + " ".join(f"{cell:>14}" for cell in cells))
    lines += [
        f"best over all sizes: {drive.mode}, {drive.threads} thread{'s' if drive.threads > 1 else ''}",
        f"smallest efficient read: {_round_size(drive.smallest_efficient_bytes)}",
        "running rows alone are read sooner than a whole expert up to "
        f"{drive.cutover(_ROW_BYTES, _ROWS, _ROWS * _ROW_BYTES):.0%} of them ({_ROWS:,} rows of {_ROW_BYTES:,} bytes)",
    ]
    return lines


def _other_lines(facts: MachineFacts) -> list[str]:
    cpu, link = facts.cpu, facts.link
    lines = [f"CPU: {cpu.cores} cores, " + (cpu.instruction_set or "native kernels were not built")]
    if cpu.read_one is not None and cpu.read_all is not None and cpu.row_s is not None:
        lines += [
            f"memory: {cpu.read_one / 1e9:.1f} GB/s by one thread, {cpu.read_all / 1e9:.1f} GB/s by all",
            f"experts, one token, GB/s by bits: {_by_width(cpu.experts)}; and {cpu.row_s * 1e9:.0f} ns a row",
            f"experts as trellises, one token, GB/s by bits: {_by_width(cpu.trellises, 2)}",
            f"dense matrices, one token, GB/s by bits: {_by_width(cpu.dense)}",
        ]
    if facts.fixed is not None:
        token, layer, expert, miss = (1e6 * seconds for seconds in astuple(facts.fixed))
        lines.append(
            f"beside that: {token:.0f} us a token, {layer:.0f} us a layer, {expert:.0f} us an expert, {miss:.0f} us "
            "more where it is read"
        )
    if link is None:
        return [*lines, "link: torch finds no GPU"]
    rates = ", ".join(f"{_round_size(copy.size)} {copy.rate / 1e9:.1f}" for copy in link.copies)
    return [*lines, f"link to {link.name} with {size_text(link.memory_bytes)}, GB/s by size: {rates}"]


def _rate_cell(one: ReadRate | None) -> str:
    return "-" if one is None else f"{one.rate / 1e6:,.0f} ({one.threads:>2})"


def _by_width(rates: tuple[WidthRate, ...], num_weights: int = 1) -> str:
    """Rates by bits of a weight, where widths are of so many."""
    return ", ".join(f"{one.width / num_weights:g}: {one.rate / 1e9:.1f}" for one in rates)


def _round_size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
