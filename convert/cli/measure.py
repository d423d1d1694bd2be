"""Measurements of a pack that several commands make and print: its loss, its thresholds, its routing data."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TextIO

import click
import torch

from moe_pack import formats
from moe_pack.calib import evaluate, forward
from moe_pack.calib.evaluate import evaluation, thresholds
from moe_pack.convert import same_tensors
from moe_pack.convert.cli.options import EVAL_TOKENS, EvalOptions, checkpoint_at
from moe_pack.convert.making import text_lines
from moe_pack.convert.options import SEQUENCE_LENGTH, chosen_device
from moe_pack.formats.base.cli import TerminalProgress
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.sidecar import write_sidecar
from moe_pack.runtime import Text, offload
from moe_pack.runtime.engine.numerics import NUMERICS_FILE, NumericsLoss, chosen_mode
from moe_pack.runtime.model import operations_for
from moe_pack.runtime.quality import QUALITY_FILE, Estimate, Prices, Quality

_WORK_FOLDER = "eval.work"
_MOST_NAMES = 8  # of experts in a line


def say_text(spec: formats.ModelSpec, tokens: forward.Tokens) -> None:
    """Announces the model and the text that will be measured, on standard error."""
    for line in text_lines(spec, tokens):
        click.echo(line, err=True)


def expert_names(experts: Sequence[tuple[int, int]]) -> str:
    """Returns the names of experts, given as layer and number, in a few words: 3.17, 4.0, ..."""
    names = ", ".join(f"{layer}.{expert}" for layer, expert in experts[:_MOST_NAMES])
    return names + (", ..." if len(experts) > _MOST_NAMES else "")


def nats(estimate: Estimate) -> str:
    """Returns a KL divergence with its half-width and unit."""
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.2g}"
    return f"{estimate.value:.3g}{half} nats"


def percent(estimate: Estimate) -> str:
    """Returns a share with its half-width: 1.234% ± 0.056%."""
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.3%}"
    return f"{estimate.value:.3%}{half}"


def measure_loss(pack: formats.Pack, options: EvalOptions) -> Quality:
    """Measures a pack on text and shows progress; a result against a source is written to `quality.json`.

    Raises:  PackError or PlanError if the pack was not made from what it is compared with.
    """
    device = chosen_device(options.device)
    with ExitStack() as stack:
        progress = stack.enter_context(TerminalProgress())
        operations = stack.enter_context(operations_for(device))
        against, tokens = _compared(pack, options, progress, device, stack)
        quality = evaluation.evaluate(pack, tokens, progress, against, device, operations)
        if quality.against is not None:
            write_sidecar(pack.folder, QUALITY_FILE, quality, pack.manifest.root)
            numerics = evaluate.measure_numerics(pack, tokens, progress)
            if numerics is not None:
                write_sidecar(pack.folder, NUMERICS_FILE, numerics, pack.manifest.root)
        if options.prices:
            length = tokens.sequences.shape[1]
            calibration = forward.read_tokens(None, None, Text(pack), evaluate.NUM_CALIBRATION_TOKENS, length)
            prices = evaluate.measure_prices(pack, tokens, calibration, progress, device, operations)
            quality = replace(quality, prices=prices)
            write_sidecar(pack.folder, QUALITY_FILE, quality, pack.manifest.root)
    shutil.rmtree(pack.folder / _WORK_FOLDER, ignore_errors=True)  # a reference that is not kept
    return quality


def _compared(
    pack: formats.Pack, options: EvalOptions, progress: formats.Progress, device: torch.device, stack: ExitStack
) -> tuple[evaluate.Reference | Checkpoint | None, forward.Tokens]:
    if options.reference_file is not None:
        reference = evaluate.read_reference(options.reference_file)
        tokens = reference.tokens()
        say_text(pack.spec, tokens)
        return reference, tokens
    checkpoint = None
    if options.against is not None:
        checkpoint = checkpoint_at(options.against)
        stack.callback(checkpoint.close)
        same_tensors(pack, checkpoint)
        evaluation.check_source(pack, checkpoint)
    text, num_tokens = Text(pack), options.num_tokens or EVAL_TOKENS
    length = min(SEQUENCE_LENGTH, pack.spec.max_position_embeddings)
    if options.data is None and options.field_name is None:
        tokens = forward.unseen_tokens(text, num_tokens, length)
    else:
        tokens = forward.read_tokens(options.data, options.field_name, text, num_tokens, length)
    say_text(pack.spec, tokens)
    if checkpoint is None or options.exact:
        return checkpoint, tokens
    folder = options.keep_reference or pack.folder / _WORK_FOLDER
    is_temporary = options.keep_reference is None
    return evaluate.make_reference(checkpoint, tokens, folder, progress, device, replaces=is_temporary), tokens


def quality_summary(quality: Quality) -> str:
    """Returns a pack's loss in a few words."""
    words = f"perplexity {quality.perplexity.value:.1f}"
    if quality.against is not None:
        increase = quality.against.perplexity_increase
        words += f" ({increase.value:+.2%} ± {increase.half_width or 0:.2%}), KL {nats(quality.against.kl)}"
    return f"{words}, on {quality.num_tokens:,} tokens of {quality.text}"


def numerics_summary(loss: NumericsLoss) -> str:
    """Returns the losses of the CPU's numeric modes, and which one a run takes, in a few words."""
    losses = ", ".join(
        f"{mode} {nats(Estimate(of.kl, of.half_width))}"
        for mode, of in (("fast", loss.fast), ("fastest", loss.fastest))
    )
    takes = f"--numerics auto is {chosen_mode('auto', loss)}"
    return f"KL {losses}, on {loss.num_tokens:,} tokens of {loss.text}; {takes}"


def prices_summary(prices: Prices) -> str:
    """Returns in a few words what more sparsity and substitution would cost."""
    sparsity = ", ".join(f"{price.sparsity:.0%} {price.kl.value:.2g}" for price in prices.sparsity)
    substitution = ", ".join(f"{price.alpha:g} {price.kl.value:.2g}" for price in prices.substitution.prices)
    return f"KL by sparsity {sparsity}; by --substitute {substitution} nats"


def threshold_lines(folder: Path, layers: Sequence[int], measured: thresholds.MeasuredThresholds) -> list[str]:
    """Returns measured thresholds as lines for people; `layers` are the decoder layers with experts."""
    rule = measured.rule
    target = "the plan's sparsities" if rule.planned is not None else f"sparsity {rule.sparsity}"
    if rule.theta is not None:
        target = f"theta {rule.theta}"
    lines = [f"{folder}: thresholds for {target}; {_share_text(measured.learned.overall)} of neurons do not run"]
    if measured.held_out.overall is not None:
        lines[0] += f", {_share_text(measured.held_out.overall)} on the held-out text"
    lines += ["", f"{'layer':>5} {'measured':>9} {'held out':>9}   experts, held out"]
    for layer_idx, layer in enumerate(layers):
        learned, held_out = (_layer_share(part, layer_idx) for part in (measured.learned, measured.held_out))
        experts = [share for share in measured.held_out.experts[layer_idx] if share is not None]
        span = f"{_share_text(min(experts))} to {_share_text(max(experts))}" if experts else "-"
        lines.append(f"{layer:>5} {_share_text(learned):>9} {_share_text(held_out):>9}   {span}")
    counted = zip(layers, measured.learned.tokens, strict=True)
    unreached = [(layer, e) for layer, row in counted for e, num_tokens in enumerate(row) if num_tokens == 0]
    if unreached and rule.theta is None:
        names = expert_names(unreached)
        lines.append(f"no token reached {len(unreached)} experts ({names}); they get the threshold of their layer")
    return lines


def _layer_share(realized: evaluate.RealizedSparsity, layer_idx: int) -> float | None:
    """Returns the sparsity of a layer, its experts weighted by their tokens; None without tokens."""
    pairs = zip(realized.experts[layer_idx], realized.tokens[layer_idx], strict=True)
    shares = [(share, num_tokens) for share, num_tokens in pairs if share is not None]
    total = sum(num_tokens for _, num_tokens in shares)
    return sum(share * num_tokens for share, num_tokens in shares) / total if total else None


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def routing_text(folder: Path, routing: offload.Routing) -> str:
    """Returns a pack's routing data in a few words: bytes, tokens, and the recall of the best predictors."""
    num_bytes, recall = (folder / offload.ROUTING_FILE).stat().st_size, routing.best_recall
    words = f"routing, {formats.size_text(num_bytes)}, routes of {len(routing.routes):,} held-out tokens"
    if recall is None:
        return f"{words}; no predictors, because the profile's text was too short"
    best = [offload.PREDICTORS[routing.best[layer_idx]] for layer_idx in routing.judged_layers]
    return f"{words}; experts predicted: {recall_text(recall, best)}"


def recall_text(recall: float, best: Sequence[str]) -> str:
    """Returns the mean recall of the best predictors of all layers, and the one that is best most often."""
    return f"recall {recall:.2f} with the best predictor of each layer (mostly {max(set(best), key=best.count)})"


def compared_ids(
    pack: formats.Pack, text: TextIO | None = None, num_tokens: int = 512, advice: str = "give another text with --text"
) -> list[int]:
    """Returns at most `num_tokens` tokens of a text, else of a passage of ours; RunError with `advice` without one."""
    num_tokens = min(num_tokens, pack.spec.max_position_embeddings)
    if not pack.has("tokenizer.json"):
        return [7919 * place % pack.spec.vocab_size for place in range(num_tokens)]  # without a tokenizer, any tokens
    words = files("moe_pack.convert.cli").joinpath("passage.txt").read_text("utf-8") if text is None else text.read()
    ids = Text(pack).encode(words)[:num_tokens]
    if not ids:
        raise formats.RunError(f"the tokenizer finds no token in the text on which logits are compared; {advice}")
    return ids
