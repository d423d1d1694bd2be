"""The command `moe-pack check`: whether a finished pack is intact, comes from its source, and keeps within limits."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from moe_pack.calib.evaluate import QUALITY_FILE, Quality
from moe_pack.convert import (
    CheckLimits,
    CheckResult,
    check_budget,
    check_bytes,
    check_digests,
    check_losses,
    check_schema,
    check_tensors,
    find_checkpoint,
    junit_xml,
)
from moe_pack.convert.cli.measure import measure_loss
from moe_pack.convert.cli.options import EVAL_TOKENS, EvalOptions, write_output
from moe_pack.formats import Pack, UsageError, dump, option
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.hub.cli import pack_folder
from moe_pack.formats.sidecar import read_sidecar


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of `check`."""

    against: str | None = field(
        default=None,
        metadata=option(
            "--against",
            metavar="PATH",
            help="The checkpoint that the pack was made from, or a reference of it (moe-pack eval --keep-reference).",
        ),
    )
    limits: CheckLimits = field(default_factory=CheckLimits)
    sample: int | None = field(
        default=None,
        metadata=option(
            "--sample",
            least=256,
            metavar="N",
            help=f"Number of tokens on which the loss is measured.  [default: {EVAL_TOKENS}]",
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print the checks as JSON."))
    junit: Path | None = field(
        default=None,
        metadata=option("--junit", path="file", metavar="FILE", help="Also write the checks as JUnit XML to FILE."),
    )

    @property
    def evaluation(self) -> EvalOptions:
        """The options with which loss is measured."""
        return EvalOptions(against=self.against, num_tokens=self.sample)

    def check(self) -> None:
        """Refuses a sample if no loss is measured on it.

        Raises:  UsageError.
        """
        if self.sample is None:
            return
        if self.against is None or not self.limits.of_loss:
            raise UsageError("--sample needs a loss to measure; give --against, and --max-kl or --max-ppl-increase")
        if self.evaluation.reference_file is not None:
            raise UsageError(
                "--sample: a reference has its own text; remove --sample, or give the checkpoint with --against"
            )


@click.command("check", short_help="Check PACK for a pipeline; exit code 1 if a check fails.")
@click.argument("pack", type=click.Path(path_type=Path))
@options_from(CheckOptions)
@command_errors(interrupted="interrupted; finished measurements are kept; run the same command again to continue")
def check_command(pack: Path, options: CheckOptions) -> None:
    """Check PACK for a pipeline. The exit code is 1 if a check fails.

    Without options, check that the pack is intact: its schema, every digest, and the account of the source's tensors.
    With limits, also check the loss, the size and the memory.

    The loss is measured against --against, as moe-pack eval does. Without --against it is taken from the pack's
    quality.json. A loss is within its limit if the upper end of its 95% confidence interval is.
    """
    with ExitStack() as stack:
        checks, quality, root = _checked(pack_folder(pack), options, stack)
    has_failed = any(check.status == "failed" for check in checks)
    if options.junit is not None:
        write_output(options.junit, junit_xml(checks, f"moe-pack check {pack}"), "--junit")
    if options.as_json:
        facts = {"pack": str(pack), "root": root, "passed": not has_failed, "checks": [dump(check) for check in checks]}
        click.echo(json.dumps({**facts, "quality": None if quality is None else dump(quality)}, indent=2))
    else:
        for line in _check_lines(checks):
            click.echo(line)
    if has_failed:
        click.get_current_context().exit(1)


def _checked(
    folder: Path, options: CheckOptions, stack: ExitStack
) -> tuple[list[CheckResult], Quality | None, str | None]:
    """Returns all checks, the pack's loss, and the pack's root."""
    pack, schema = check_schema(folder)
    if pack is None:
        names = ("digests", "tensors", "kl", "perplexity", "bytes", "budget")
        return [schema, *(CheckResult(name, "skipped", "not a valid pack") for name in names)], None, None
    stack.callback(pack.close)
    stored = _stored_quality(pack, options)
    checkpoint = None
    if options.against is not None and options.evaluation.reference_file is None:
        checkpoint = Checkpoint(find_checkpoint(options.against))
        stack.callback(checkpoint.close)
    with TerminalProgress() as progress:
        checks = [schema, check_digests(pack, progress), check_tensors(pack, checkpoint)]
    is_intact = all(check.status != "failed" for check in checks)
    quality, origin = _quality(pack, stored, options, is_intact)
    checks += check_losses(quality, options.limits, origin)
    return [*checks, check_bytes(pack, options.limits), check_budget(pack, options.limits)], quality, pack.manifest.root


def _stored_quality(pack: Pack, options: CheckOptions) -> Quality | None:
    """Returns the content of the pack's `quality.json`, if it was measured on the pack as it is now.

    Raises:  UsageError if there is a limit of loss and no loss to compare: before all bytes are read.
    """
    stored = read_sidecar(pack.folder, QUALITY_FILE, Quality, pack.manifest.root)
    if stored is None and options.limits.of_loss and options.against is None:
        raise UsageError(
            f"--max-kl/--max-ppl-increase: {pack.folder} has no {QUALITY_FILE} of its present content; "
            "give the checkpoint or a reference with --against"
        )
    return stored


def _quality(pack: Pack, stored: Quality | None, options: CheckOptions, is_intact: bool) -> tuple[Quality | None, str]:
    """Returns the pack's loss and its origin in words; without a loss, why there is none."""
    if options.limits.of_loss and options.against is not None:
        if not is_intact:
            return None, "not measured, because an earlier check failed"
        quality = measure_loss(pack, options.evaluation)
        return quality, f"{quality.num_tokens:,} tokens"
    return stored, "not measured" if stored is None else f"{stored.num_tokens:,} tokens, {QUALITY_FILE}"


def _check_lines(checks: list[CheckResult]) -> list[str]:
    """Returns the checks as a table for people."""
    width = max(len(check.allowed) for check in checks)
    lines = [f"{'check':10} {'':7} {'allowed':{width}} found"]
    return lines + [f"{c.name:10} {c.status:7} {c.allowed:{width}} {c.found}".rstrip() for c in checks]
