"""The papers' packs of a model: what each is foretold to lose and to leave out, and what it does on text unseen.

    python benchmarks/preset_packs.py

The model is profiled (`fast`) on the shipped sample, thresholds are measured on the same tokens.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from moe_pack.calib import (
    ProfileOptions,
    Quality,
    ThresholdRule,
    Tokens,
    evaluate,
    losses_of,
    make_profile,
    measure_thresholds,
    read_tokens,
)
from moe_pack.convert import convert
from moe_pack.convert.plan_file import Decision
from moe_pack.convert.planned import Model
from moe_pack.convert.presets import PRESET_NAMES, preset_decision
from moe_pack.formats import NO_PROGRESS, Checkpoint, Pack, dense_roles
from moe_pack.runtime import FolderFiles, Text

_TESTS = Path(__file__).parents[1] / "tests"
_SEQUENCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Judged:
    """A preset's pack: the whole of experts in bits a weight, and what it loses in nats and in perplexity."""

    name: str
    bits: float
    foretold_sparsity: float
    sparsity: float
    foretold_kl: float
    kl: float
    kl_half_width: float
    perplexity_increase: float


def rule_of(decision: Decision) -> ThresholdRule:
    """How thresholds are measured for a decision."""
    if decision.theta is not None:
        return ThresholdRule(theta=decision.theta)
    return ThresholdRule(planned=tuple(map(tuple, decision.sparsity.tolist())))


def quality_of_pack(checkpoint: Checkpoint, decision: Decision, sample: Tokens, unseen: Tokens) -> Quality:
    """Makes a decision's pack in a temporary folder, and evaluates it."""
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        num_threads, path = torch.get_num_threads(), Path(folder) / "packed"
        convert(checkpoint, decision.plan, path, workers=2)
        torch.set_num_threads(num_threads)  # converting leaves torch with one thread
        with Pack(path) as pack:
            measure_thresholds(pack, sample, rule_of(decision))
        with Pack(path) as pack:
            return evaluate(pack, unseen, NO_PROGRESS, checkpoint)


def judge(name: str, model: Model, decision: Decision, quality: Quality) -> Judged:
    """A line of the table."""
    spec, against, layout = model.spec, quality.against, model.layout(decision.plan)
    assert against is not None and against.kl.half_width is not None, "evaluated beside its source, on long text"
    weights = len(spec.expert.matrices) * spec.expert.intermediate_size * spec.hidden_size
    num_bytes = [expert.num_bytes for layer in layout.experts for expert in layer]
    popularity = model.losses.popularity
    return Judged(
        name,
        8 * sum(num_bytes) / (weights * len(num_bytes)),
        float(np.average(decision.sparsity, weights=popularity)),
        quality.sparsity or 0.0,
        model.loss(decision),
        against.kl.value,
        against.kl.half_width,
        against.perplexity_increase.value,
    )


def _table(lines: list[Judged]) -> str:
    rows = ["preset     bits  sparsity: foretold  measured   KL: foretold  measured            perplexity"]
    for j in lines:
        rows.append(
            f"{j.name:8}{j.bits:7.2f}{j.foretold_sparsity:20.1%}{j.sparsity:10.1%}{j.foretold_kl:15.4f}"
            f"{j.kl:10.4f} ± {j.kl_half_width:.4f}{j.perplexity_increase:+12.2%}"
        )
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens", default=8192, show_default=True, help="Of the sample, to profile and measure thresholds on.")
@click.option("--tokens-unseen", default=8192, show_default=True, help="Of the text, to evaluate on.")
def main(model: Path, text: Path, tokens: int, tokens_unseen: int) -> None:
    """Makes the packs one after the other, and prints."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens, _SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens_unseen, _SEQUENCE_LENGTH)
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            profile = make_profile(checkpoint, sample, Path(folder) / "p", ProfileOptions("fast"))
            dtypes = tuple(checkpoint.dtype(checkpoint.dense_source(r.name)) for r in dense_roles(checkpoint.spec))
            known = Model(checkpoint.spec, dtypes, losses_of(profile))
        lines = []
        for name in PRESET_NAMES:
            decision = preset_decision(name, known)
            lines.append(judge(name, known, decision, quality_of_pack(checkpoint, decision, sample, unseen)))
    finally:
        checkpoint.close()
    click.echo(f"{tokens:,} tokens of the sample, {tokens_unseen:,} of {text.name}, of {model.name}")
    click.echo(_table(lines))


if __name__ == "__main__":
    main()
