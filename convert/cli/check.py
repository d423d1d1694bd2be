"""The command `moe-pack check`: everything that a pipeline wants to know of a finished pack, in one go."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from moe_pack.calib.evaluate import QUALITY_FILE, Quality
from moe_pack.convert import (
    CheckLimits,
    CheckResult,
    budget,
    digests,
    find_checkpoint,
    junit_xml,
    losses,
    num_bytes,
    opened,
    tensors,
)
from moe_pack.convert.cli.eval import NUM_TOKENS, EvalOptions, measure
from moe_pack.formats import ConversionError, Pack, UsageError, dump, option
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.sidecar import read_sidecar


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What `check` was asked for."""

    against: str | None = field(
        default=None,
        metadata=option(
            "--against",
            metavar="PATH",
            help="The checkpoint it was made from, or a reference kept of it (eval).",
        ),
    )
    limits: CheckLimits = field(default_factory=CheckLimits)
    sample: int | None = field(
        default=None,
        metadata=option(
            "--sample", least=256, metavar="N", help=f"Tokens that loss is measured on.  [default: {NUM_TOKENS}]"
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print the checks as JSON."))
    junit: Path | None = field(
        default=None, metadata=option("--junit", path="file", metavar="FILE", help="Write JUnit XML, too.")
    )

    @property
    def evaluation(self) -> EvalOptions:
        """How loss is measured."""
        return EvalOptions(against=self.against, num_tokens=self.sample)

    def check(self) -> None:
        """Refuses a sample that nothing is measured on.

        Raises:  UsageError.
        """
        if self.sample is None:
            return
        if self.against is None or not self.limits.of_loss:
            raise UsageError("--sample: says on how many tokens loss is measured; give --against and a limit of loss")
        if self.evaluation.reference_file is not None:
            raise UsageError("--sample: a reference has its own text; leave it out, or give the checkpoint")


@click.command("check", short_help="Check PACK for a pipeline: whole, of its source, within limits.")
@click.argument("pack", type=click.Path(path_type=Path))
@options_from(CheckOptions)
@command_errors(interrupted="interrupted; what was measured stays, run the same command again to go on")
def check_command(pack: Path, options: CheckOptions) -> None:
    """Check PACK: its schema, every digest, the account of tensors; with limits, loss, bytes and memory too.

    A limit of loss is kept if the estimate plus the half-width of its 95% interval is within it. It is measured against
    --against (as moe-pack eval does), or taken from the quality.json beside the pack. Exit code 1 if a check fails.
    """
    with ExitStack() as stack:
        checks, quality, root = _checked(pack, options, stack)
    failed = any(check.status == "failed" for check in checks)
    if options.junit is not None:
        _write(options.junit, junit_xml(checks, f"moe-pack check {pack}"))
    if options.as_json:
        facts = {"pack": str(pack), "root": root, "passed": not failed, "checks": [dump(check) for check in checks]}
        click.echo(json.dumps({**facts, "quality": None if quality is None else dump(quality)}, indent=2))
    else:
        for line in check_lines(checks):
            click.echo(line)
    if failed:
        click.get_current_context().exit(1)


def check_lines(checks: list[CheckResult]) -> list[str]:
    """The checks as a table for people."""
    width = max(len(check.allowed) for check in checks)
    lines = [f"{'check':10} {'':7} {'allowed':{width}} found"]
    return lines + [f"{c.name:10} {c.status:7} {c.allowed:{width}} {c.found}".rstrip() for c in checks]


def _checked(
    folder: Path, options: CheckOptions, stack: ExitStack
) -> tuple[list[CheckResult], Quality | None, str | None]:
    """All checks, what was measured, and the pack's root."""
    pack, schema = opened(folder)
    if pack is None:
        names = ("digests", "tensors", "kl", "perplexity", "bytes", "budget")
        return [schema, *(CheckResult(name, "skipped", "no sound pack") for name in names)], None, None
    stack.callback(pack.close)
    kept = _kept(pack, options)
    checkpoint = None
    if options.against is not None and options.evaluation.reference_file is None:
        checkpoint = Checkpoint(find_checkpoint(options.against))
        stack.callback(checkpoint.close)
    with TerminalProgress() as progress:
        checks = [schema, digests(pack, progress), tensors(pack, checkpoint)]
    quality, where = _quality(pack, kept, options, all(check.status != "failed" for check in checks))
    checks += losses(quality, options.limits, where)
    return [*checks, num_bytes(pack, options.limits), budget(pack, options.limits)], quality, pack.manifest.root


def _kept(pack: Pack, options: CheckOptions) -> Quality | None:
    """What was measured of the pack before.

    Raises:  UsageError if a limit of loss has nothing to be judged by: before all bytes are read.
    """
    kept = read_sidecar(pack.folder, QUALITY_FILE, Quality, pack.manifest.root)
    if kept is None and options.limits.of_loss and options.against is None:
        raise UsageError(
            f"--max-kl/--max-ppl-increase: {pack.folder} has no {QUALITY_FILE} for what it holds now; give --against"
        )
    return kept


def _quality(pack: Pack, kept: Quality | None, options: CheckOptions, is_sound: bool) -> tuple[Quality | None, str]:
    """What is known of the pack's loss, and where from."""
    if options.limits.of_loss and options.against is not None:
        if not is_sound:
            return None, "not measured: a check before this one failed"
        found = measure(pack, options.evaluation)
        return found, f"{found.num_tokens:,} tokens"
    return kept, "not measured" if kept is None else f"{kept.num_tokens:,} tokens, {QUALITY_FILE}"


def _write(path: Path, raw: bytes) -> None:
    try:
        path.write_bytes(raw)
    except OSError as fault:
        raise ConversionError(f"--junit {path}: cannot be written ({fault.strerror})") from fault
