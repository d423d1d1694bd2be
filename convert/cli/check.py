"""The command `moe-pack check`: whether a finished pack is intact, comes from its source, and keeps within limits."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_pack import formats
from moe_pack.convert.cli.options import EVAL_TOKENS, EvalOptions, checkpoint_at, write_output
from moe_pack.convert.options import CheckLimits
from moe_pack.formats.base import cli, commands, errors
from moe_pack.formats.hub.cli import PACK_TO_CHECK, pack_folder

if TYPE_CHECKING:
    from moe_pack.convert.checks import CheckResult
    from moe_pack.runtime.quality import Quality


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of `check`."""

    against: str | None = commands.option_field(
        None,
        "--against PATH",
        help="The checkpoint that the pack was made from, or a reference of it (moe-pack eval --keep-reference).",
    )
    limits: CheckLimits = field(default_factory=CheckLimits)
    sample: int | None = commands.option_field(
        None,
        "--sample N",
        least=256,
        help=f"Number of tokens on which the loss is measured.  [default: {EVAL_TOKENS}]",
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the checks as JSON, with numbers.")
    summary: Path | None = commands.option_field(
        None,
        "--summary FILE",
        path="file",
        help="Also append the checks as a Markdown table to FILE, such as $GITHUB_STEP_SUMMARY.",
    )
    junit: Path | None = commands.option_field(
        None, "--junit", path="file", metavar="FILE", help="Also write the checks as JUnit XML to FILE."
    )

    @property
    def evaluation(self) -> EvalOptions:
        """The options with which loss is measured."""
        return EvalOptions(against=self.against, num_tokens=self.sample)

    def check(self) -> None:
        """Refuses a sample if no loss is measured on it; raises UsageError."""
        if self.sample is None:
            return
        if self.against is None or not self.limits.of_loss:
            raise formats.UsageError(
                "--sample needs a loss to measure; give --against, and --max-kl or --max-ppl-increase"
            )
        if self.evaluation.reference_file is not None:
            raise formats.UsageError(
                "--sample: a reference has its own text; remove --sample, or give the checkpoint with --against"
            )


@click.command("check")
@click.argument("pack", type=PACK_TO_CHECK)
@cli.options_from(CheckOptions)
@cli.command_errors(
    interrupted="interrupted; finished measurements are kept; run the same command again to continue", exit_code=3
)
def check_command(pack: Path, options: CheckOptions) -> None:
    """Check PACK for a pipeline.

    Without options, check that the pack is intact: its schema, every digest, and the account of the source's tensors.
    With limits, also check the loss, the size and the memory.

    The loss is measured against --against, as moe-pack eval does. Without --against it is taken from the pack's
    quality.json. A loss is within its limit if the upper end of its 95% confidence interval is.

    \b
    Exit codes:
      0  all checks passed
      1  a check failed
      2  the command is wrong
      3  something could not be checked: the pack or its source cannot be had, or a loss is unknown
    """
    from moe_pack.convert import checks

    with ExitStack() as stack:
        found, quality, root = _checked(pack_folder(pack), options, stack)
    exit_code = checks.exit_code_of(found)
    title = f"moe-pack check {pack}"
    if options.junit is not None:
        write_output(options.junit, checks.junit_xml(found, title), "--junit")
    if options.summary is not None:
        write_output(options.summary, checks.markdown_table(found, title).encode(), "--summary", appends=True)
    if options.as_json:
        facts = {
            "pack": str(pack),
            "root": root,
            "passed": exit_code == 0,
            "checks": [formats.dump(check) for check in found],
        }
        click.echo(json.dumps({**facts, "quality": None if quality is None else formats.dump(quality)}, indent=2))
    else:
        width = max(len(check.allowed) for check in found)
        click.echo(f"{'check':10} {'':7} {'allowed':{width}} found")
        for check in found:
            click.echo(f"{check.name:10} {check.status:7} {check.allowed:{width}} {check.found}".rstrip())
    click.get_current_context().exit(exit_code)


def _checked(
    folder: Path, options: CheckOptions, stack: ExitStack
) -> tuple[list[CheckResult], Quality | None, str | None]:
    """Returns all checks, the pack's loss, and the pack's root."""
    from moe_pack.convert import checks

    if not folder.exists():
        raise formats.PackError(f"{folder}: no such folder; give a pack")
    checkpoint = None
    if options.against is not None and options.evaluation.reference_file is None:
        checkpoint = checkpoint_at(options.against)
        stack.callback(checkpoint.close)
    pack, schema = checks.check_schema(folder)
    if pack is None:
        names = ("digests", "tensors", "kl", "perplexity", "bytes", "budget")
        return [schema, *(checks.CheckResult(name, "unchecked", "not a valid pack") for name in names)], None, None
    stack.callback(pack.close)
    with cli.TerminalProgress() as progress:
        found = [
            schema,
            checks.timed(lambda: checks.check_digests(pack, progress)),
            checks.timed(lambda: checks.check_tensors(pack, checkpoint)),
        ]
    is_intact = all(check.status != "failed" for check in found)
    start = time.monotonic()
    quality, origin = _quality(pack, options, is_intact)
    seconds = time.monotonic() - start
    kl, perplexity = checks.check_losses(quality, options.limits, origin)
    found += [replace(kl, seconds=seconds), perplexity]  # one measurement gives both
    found += [checks.check_bytes(pack, options.limits), checks.check_budget(pack, options.limits)]
    return found, quality, pack.manifest.root


def _quality(pack: formats.Pack, options: CheckOptions, is_intact: bool) -> tuple[Quality | None, str]:
    """Returns the pack's loss and its origin in words; without a loss, why there is none."""
    from moe_pack.convert.cli.measure import measure_loss
    from moe_pack.runtime.quality import QUALITY_FILE, read_quality

    if options.limits.of_loss and options.against is not None:
        if not is_intact:
            return None, "not measured, because an earlier check failed"
        try:
            quality = measure_loss(pack, options.evaluation)
        except errors.MoePackError as fault:
            return None, str(fault)
        return quality, f"{quality.num_tokens:,} tokens"
    stored = read_quality(pack)
    if stored is not None:
        return stored, f"{stored.num_tokens:,} tokens, {QUALITY_FILE}"
    if not options.limits.of_loss:
        return None, "not measured"
    return None, f"{QUALITY_FILE} does not have the loss of this content; give the checkpoint or a reference: --against"
