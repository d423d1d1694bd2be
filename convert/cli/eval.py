"""The command `moe-pack eval`, and what it shares with `check`: a pack measured on text, alone or beside its source."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import click
import torch

from moe_pack.calib.evaluate import (
    NUM_CALIBRATION_TOKENS,
    QUALITY_FILE,
    REFERENCE_FILE,
    Estimate,
    Prices,
    Quality,
    Reference,
    SourceQuality,
    TaskScore,
    TaskTokens,
    check_continues,
    check_source,
    evaluate,
    make_reference,
    measure_prices,
    read_reference,
    read_tasks,
    task_score,
)
from moe_pack.calib.forward import Tokens, read_tokens, unseen_tokens
from moe_pack.convert import find_checkpoint, same_tensors
from moe_pack.convert.cli.profile import FIELD_OPTION, SEQUENCE_LENGTH, chosen_device, say_text
from moe_pack.formats import Pack, Progress, UsageError, dump, option, size_text
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from
from moe_pack.formats.commands import given
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.sidecar import write_sidecar
from moe_pack.runtime import DEVICE_OPTION, Text
from moe_pack.runtime.model import operations_for

NUM_TOKENS = 8192  # to evaluate on, where nothing else is asked for
_MUCH_TAIL = 0.02  # of the mass outside what a reference keeps of a prediction
_WORK_FOLDER = "eval.work"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to measure a pack on, and against what; None: the default of each."""

    against: str | None = field(
        default=None,
        metadata=option(
            "--against",
            metavar="PATH",
            help="The checkpoint it was made from (as for convert), or a reference that was kept of it: measure KL "
            "divergence, agreement, and how much perplexity grew.",
        ),
    )
    data: str | None = field(
        default=None,
        metadata=option(
            "--data",
            metavar="NAME_OR_FILE",
            help="The text, as for profile.  [default: the end of our sample, which profiles do not see by default]",
        ),
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int | None = field(
        default=None,
        metadata=option("--tokens", least=256, metavar="N", help=f"How many tokens to take.  [default: {NUM_TOKENS}]"),
    )
    keep_reference: Path | None = field(
        default=None,
        metadata=option(
            "--keep-reference",
            path="folder",
            metavar="DIR",
            mark="source",
            help="Keep the source's predictions in DIR: --against DIR then needs no checkpoint.",
        ),
    )
    tasks: Path | None = field(
        default=None,
        metadata=option(
            "--tasks",
            metavar="FILE.jsonl",
            help="Multiple choice, too: a JSON object a line with prompt, choices and answer, which counts choices "
            "from 0.",
        ),
    )
    exact: bool = field(
        default=False,
        metadata=option(
            "--exact", mark="source", help="KL over the whole vocabulary: the source runs beside the pack."
        ),
    )
    prices: bool = field(
        default=False,
        metadata=option(
            "--prices", help="Measure, too, what more sparsity and moe-run --substitute would cost this pack."
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print what was measured as JSON."))
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)

    @property
    def reference_file(self) -> Path | None:
        """The kept reference that `against` names; None where it names a checkpoint."""
        if self.against is None:
            return None
        path = Path(self.against)
        if path.is_dir():
            path = path / REFERENCE_FILE
            return path if path.is_file() and not path.with_name("config.json").exists() else None
        return path if path.is_file() else None

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        of_text = (self.data, self.field_name, self.num_tokens)
        if self.reference_file is not None and of_text != (None, None, None):
            raise UsageError(
                "--data/--field/--tokens: a reference has its own text; leave them out, or give the checkpoint"
            )
        if self.against is None or self.reference_file is not None:
            for name in given(self, "source"):
                raise UsageError(f"{name}: runs the source; give the checkpoint with --against")
        if self.prices and self.against is None:
            raise UsageError("--prices: are kept beside what the pack lost; say against what with --against")
        if self.exact and self.keep_reference is not None:
            raise UsageError(
                "--exact: compares with the source itself and makes no reference; leave out --keep-reference"
            )


@click.command("eval", short_help="Measure PACK on text: perplexity, and its loss against the source.")
@click.argument("pack", type=click.Path(path_type=Path))
@options_from(EvalOptions)
@command_errors(interrupted="interrupted; what is done stays, run the same command again to go on")
def eval_command(pack: Path, options: EvalOptions) -> None:
    """Measure PACK on text: perplexity, the share of neurons that do not run, bytes.

    With --against also how far its predictions are from the source's: KL divergence, perplexity, agreement, each with
    a 95% confidence interval; kept in quality.json beside the pack. Layer by layer in bounded memory; stopped or
    killed, it goes on where it was.
    """
    with Pack(pack) as held:
        # Before all else: a line that cannot be read would be found after hours.
        tasks = None if options.tasks is None else _tasks(held, options.tasks)
        found = measure(held, options)
        scores = {} if tasks is None else _scores(held, tasks, options)
        root = held.manifest.root
    if options.as_json:
        by_model = {name: dump(score) for name, score in scores.items()}
        click.echo(json.dumps({"root": root, "quality": dump(found), "tasks": by_model or None}, indent=2))
        return
    for line in [*quality_lines(found), *score_lines(scores)]:
        click.echo(line)


def _tasks(pack: Pack, file: Path) -> TaskTokens:
    check_continues(pack.spec)
    return read_tasks(file, Text(pack), pack.spec.max_position_embeddings)


def measure(pack: Pack, options: EvalOptions) -> Quality:
    """Measures a pack and shows progress; against a source, what was found is kept in `quality.json`.

    Raises:  PackError or PlanError if what it is compared with is not its source.
    """
    where = chosen_device(options.device)
    with ExitStack() as opened:
        progress = opened.enter_context(TerminalProgress())
        operations = opened.enter_context(operations_for(where))
        against, tokens = _compared(pack, options, progress, where, opened)
        found = evaluate(pack, tokens, progress, against, where, operations)
        if found.against is not None:
            write_sidecar(pack.folder, QUALITY_FILE, found, pack.manifest.root)
        if options.prices:
            length = tokens.sequences.shape[1]
            calibration = read_tokens(None, None, Text(pack), NUM_CALIBRATION_TOKENS, length)
            found = replace(found, prices=measure_prices(pack, tokens, calibration, progress, where, operations))
            write_sidecar(pack.folder, QUALITY_FILE, found, pack.manifest.root)
    shutil.rmtree(pack.folder / _WORK_FOLDER, ignore_errors=True)  # the reference, where it is not kept
    return found


def _scores(pack: Pack, tasks: TaskTokens, options: EvalOptions) -> dict[str, TaskScore]:
    """How the pack answers tasks, and its source where that is at hand."""
    where = chosen_device(options.device)
    found = {}
    with ExitStack() as opened:
        progress = opened.enter_context(TerminalProgress())
        operations = opened.enter_context(operations_for(where))
        found["pack"] = task_score(pack, tasks, pack.folder / "tasks.work", progress, where, operations)
        if options.against is not None and options.reference_file is None:
            checkpoint = Checkpoint(find_checkpoint(options.against))
            opened.callback(checkpoint.close)
            found["source"] = task_score(checkpoint, tasks, pack.folder / "tasks-source.work", progress, where)
    return found


def _compared(
    pack: Pack, options: EvalOptions, progress: Progress, device: torch.device, opened: ExitStack
) -> tuple[Reference | Checkpoint | None, Tokens]:
    """What a pack is compared with, and the text."""
    if options.reference_file is not None:
        reference = read_reference(options.reference_file)
        tokens = reference.tokens()
        say_text(pack.spec, tokens)
        return reference, tokens
    checkpoint = None
    if options.against is not None:
        checkpoint = Checkpoint(find_checkpoint(options.against))
        opened.callback(checkpoint.close)
        same_tensors(pack, checkpoint)
        check_source(pack, checkpoint)
    tokens = _text(pack, options)
    say_text(pack.spec, tokens)
    if checkpoint is None or options.exact:
        return checkpoint, tokens
    folder = options.keep_reference
    return make_reference(
        checkpoint, tokens, folder or pack.folder / _WORK_FOLDER, progress, device, replaces=folder is None
    ), tokens


def _text(pack: Pack, options: EvalOptions) -> Tokens:
    text, number = Text(pack), options.num_tokens or NUM_TOKENS
    length = min(SEQUENCE_LENGTH, pack.spec.max_position_embeddings)
    if options.data is None and options.field_name is None:
        return unseen_tokens(text, number, length)
    return read_tokens(options.data, options.field_name, text, number, length)


def quality_lines(found: Quality) -> list[str]:
    """What was measured, as lines for people."""
    sparsity = "-" if found.sparsity is None else f"{found.sparsity:.1%} of neurons do not run"
    rows = [
        ("text", f"{found.text}; {found.num_tokens:,} tokens predicted, in sequences of {found.sequence_length}"),
        ("bytes", f"{found.content_bytes:,}, {size_text(found.content_bytes)}"),
        ("sparsity", sparsity),
        ("perplexity", _plain(found.perplexity, 3)),
    ]
    if found.against is not None:
        rows += _against_rows(found.against)
    if found.prices is not None:
        rows += _price_rows(found.prices)
    return [f"{name:12} {value}".rstrip() for name, value in rows]


def score_lines(scores: dict[str, TaskScore]) -> list[str]:
    """How tasks were answered, as lines for people."""
    return [
        f"{'tasks':12} {percent(held.accuracy)} right by the {name}, {percent(held.normalized_accuracy)} by likelihood "
        f"over bytes; {held.num_tasks:,} tasks"
        for name, held in scores.items()
    ]


def quality_summary(found: Quality) -> str:
    """What was measured, in a few words."""
    words = f"perplexity {found.perplexity.value:.3f}"
    if found.against is not None:
        words += f" ({percent(found.against.perplexity_increase)}), KL {nats(found.against.kl)}"
    return f"{words}, on {found.num_tokens:,} tokens of {found.text}"


def _against_rows(beside: SourceQuality) -> list[tuple[str, str]]:
    bound = f"at least {beside.kl_bound.value:.3g} by the {beside.num_outcomes + 1} outcomes of a reference"
    kl = "over the whole vocabulary" if beside.is_exact or not beside.source_tail else bound
    tails = f"{beside.source_tail:.2%} of the source's mass, {beside.pack_tail:.2%} of the pack's"
    rows = [
        ("", f"{_plain(beside.source_perplexity, 3)} of the source"),
        ("increase", percent(beside.perplexity_increase)),
        ("KL", f"{nats(beside.kl)}; {kl}"),
        ("", f"{beside.noise_floor:.1e} is noise: the source against itself, rounded differently"),
        ("agreement", f"{percent(beside.agreement)} with the same likeliest token"),
        ("tail", f"{tails} is outside the source's {beside.num_outcomes} likeliest tokens"),
    ]
    if not beside.is_exact and max(beside.source_tail, beside.pack_tail) > _MUCH_TAIL:
        rows.append(("", "that is much; --exact runs the source again and compares all of the vocabulary"))
    return rows


def _price_rows(found: Prices) -> list[tuple[str, str]]:
    own, fetched = found.substitution, f"{found.substitution.fetched:.1%} of experts fetched"
    return [
        ("prices", f"on {found.num_tokens:,} tokens, against the same pack: of sparsity with all neurons running"),
        *(
            (f"  {held.sparsity:.0%} sparse", f"{nats(held.kl)}, perplexity {percent(held.perplexity_increase)}")
            for held in found.sparsity
        ),
        ("substitute", f"room for {own.room:.0%} of experts, policy {own.policy}; without, {fetched}"),
        *(
            (
                f"  {held.alpha:g}",
                f"{nats(held.kl)}, perplexity {percent(held.perplexity_increase)}; {held.replaced:.1%} replaced, "
                f"{held.fetched:.1%} fetched",
            )
            for held in own.prices
        ),
    ]


def prices_summary(found: Prices) -> str:
    """What more losses would cost, in a few words."""
    sparsity = ", ".join(f"{held.sparsity:.0%} {held.kl.value:.2g}" for held in found.sparsity)
    replaced = ", ".join(f"{held.alpha:g} {held.kl.value:.2g}" for held in found.substitution.prices)
    return f"KL by sparsity {sparsity}; by --substitute {replaced} nats"


def nats(estimate: Estimate) -> str:
    """A KL divergence as a person reads it."""
    return f"{estimate.value:.3g}{_width(estimate, '.2g')} nats"


def percent(estimate: Estimate) -> str:
    """A share as a person reads it: 1.234% ± 0.056%."""
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.3%}"
    return f"{estimate.value:.3%}{half}"


def _plain(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f}{_width(estimate, f'.{digits}f')}"


def _width(estimate: Estimate, format_spec: str) -> str:
    return "" if estimate.half_width is None else f" ± {estimate.half_width:{format_spec}}"
