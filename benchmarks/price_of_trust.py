"""Measures what changing answers costs and saves: `--substitute ALPHA` and `--trust-prediction` on the demo model.

A text's tokens are fed one by one, so that the cache lives as in decoding; KL and perplexity against the same pack
without the option. (a) a pack of which every neuron runs, by policy, room and alpha; (b) the same with thresholds, in
which rows alone are read, by policy and sparsity, with and without trust. The packs' answers without an option must be
those of the mapped pack, bit for bit, else the exit code is 1. What is foretold in time hangs on the drive: the figures
of (b) differ a little from run to run.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from quality import Tally
from thresholds_hold import make_pack
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib import ProfileOptions, ThresholdRule, attach, make_profile, measure_thresholds, read_tokens
from moe_pack.calib.price_of_substitution import budget_with_room, fed_singly
from moe_pack.formats import Checkpoint, Pack
from moe_pack.runtime import Engine, EngineOptions, FolderFiles, PolicyName, StreamingWeights, Text, Trust
from moe_pack.runtime.streaming import NO_TRUST

_TESTS = Path(__file__).parents[1] / "tests"
_WIDTH, _WINDOW_TOKENS, _SAMPLE_TOKENS = 4, 512, 8192
_ALPHAS = (0.1, 0.2, 0.3, 0.5)
_ROOMS = (0.25, 0.5, 0.75)
_SUBSTITUTING: tuple[PolicyName, ...] = ("importance", "lru")
_FORETELLING: tuple[PolicyName, ...] = ("corm", "floe")
_SPARSITIES = (0.5, 0.8)
_TRUST_ROOM, _TRUST_CUTOVER = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class Price:
    """One run: of the answer against the pack's own, and what happened in the cache.

    `sparsity`: what thresholds were measured for; 0: all neurons run.   `is_same`: the mapped pack's answer, bit for
    bit.   `replaced`: of chosen experts.   `read_bytes`: from the drive, a token.   `in_part`: of chosen experts, those
    of which not all was there; `rows_foretold`: of these, those whose rows were foretold.   `recall`: of the neurons
    that should run in those, where that did not bring all rows, the share that was foretold.
    """

    policy: str
    room: float
    sparsity: float
    alpha: float | None
    trusts: bool
    is_same: bool
    perplexity: float
    kl_nats: float
    hit_rate: float
    replaced: float
    read_bytes: float
    in_part: float
    rows_foretold: float | None
    recall: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """A run to be made."""

    policy: PolicyName
    room: float
    trust: Trust = NO_TRUST
    cutover: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A text's ids, and what the mapped pack predicts after each: log-probabilities float64 [T, vocabulary]."""

    ids: list[int]
    logprobs: Tensor


def teacher_forced(engine: Engine, ids: list[int]) -> Tensor:
    """The log-probabilities after each token, each fed alone, in windows: float64 [T, vocabulary]."""
    windows = (ids[start : start + _WINDOW_TOKENS] for start in range(0, len(ids), _WINDOW_TOKENS))
    found = [logits for window in windows for logits in fed_singly(engine, window)]
    return torch.log_softmax(torch.stack(found).double(), dim=1)


def read_reference(pack: Pack, ids: list[int]) -> Reference:
    """What the pack itself answers, where it is mapped."""
    with Engine(pack, EngineOptions(read="map"), _WINDOW_TOKENS) as engine:
        return Reference(ids, teacher_forced(engine, ids))


def price(pack: Pack, reference: Reference, case: Case, sparsity: float) -> Price:
    """Runs a pack over the text as the case has it."""
    options = EngineOptions(
        budget_bytes=budget_with_room(pack, case.room, _WINDOW_TOKENS),
        policy=case.policy,
        cutover=case.cutover,
        trust=case.trust,
    )
    with Engine(pack, options, _WINDOW_TOKENS) as engine:
        found = teacher_forced(engine, reference.ids)
        assert isinstance(engine.weights, StreamingWeights) and engine.reads is not None, "it has a budget"
        counts, stats = engine.weights.decode, engine.reads.stats()
    tally, num_tokens = Tally(), len(reference.ids)
    kept = [place for place in range(num_tokens - 1) if (place + 1) % _WINDOW_TOKENS]
    targets = torch.tensor([reference.ids[place + 1] for place in kept])
    tally.add(reference.logprobs[kept], found[kept], targets)
    return Price(
        policy=case.policy,
        room=case.room,
        sparsity=sparsity,
        alpha=case.trust.substitute,
        trusts=case.trust.is_predicted_enough,
        is_same=torch.equal(found, reference.logprobs),
        perplexity=tally.perplexity,
        kl_nats=tally.divergence / tally.num_tokens,
        hit_rate=counts.hits / counts.needed,
        replaced=counts.substituted / counts.needed,
        read_bytes=(stats.bytes_urgent + stats.bytes_ahead) / num_tokens,
        in_part=counts.in_part / counts.needed,
        rows_foretold=counts.rows_foretold / counts.in_part if counts.in_part else None,
        recall=counts.running_foretold / counts.running if counts.running else None,
    )


def substitution_cases() -> list[Case]:
    """Part a: each policy and room without substitution, then with."""
    alphas = (None, *_ALPHAS)
    return [
        Case(policy, room, Trust(substitute=alpha)) for policy in _SUBSTITUTING for room in _ROOMS for alpha in alphas
    ]


def trust_cases() -> list[Case]:
    """Part b: each policy without trust, then with."""
    return [
        Case(policy, _TRUST_ROOM, Trust(is_predicted_enough=trusts), _TRUST_CUTOVER)
        for policy in _FORETELLING
        for trusts in (False, True)
    ]


def prices(model: Path, ids: list[int], folder: Path) -> Iterator[Price]:
    """Makes a pack in a folder, with routing of the shipped sample, and runs all cases on it."""
    sample = read_tokens(None, None, Text(FolderFiles(model)), _SAMPLE_TOKENS, _WINDOW_TOKENS)
    with closing(Checkpoint(model)) as checkpoint:
        make_pack(checkpoint, "up", _WIDTH, "hqq", folder / "pack", 1)
        profile = make_profile(checkpoint, sample, folder / "profile", ProfileOptions("none"))
    with Pack(folder / "pack") as pack:
        attach(pack, profile)
    for sparsity, cases in ((0.0, substitution_cases()), *((share, trust_cases()) for share in _SPARSITIES)):
        if sparsity:
            with Pack(folder / "pack") as pack:
                measure_thresholds(pack, sample, ThresholdRule(sparsity=sparsity))
        with Pack(folder / "pack") as pack:  # an open one keeps the thresholds that it was opened with
            reference = read_reference(pack, ids)
            for case in tqdm(cases, desc=f"sparsity {sparsity:g}", disable=None):
                yield price(pack, reference, case, sparsity)


def substitution_table(lines: list[Price]) -> str:
    """Part a."""
    rows = ["| policy | room | alpha | perplexity | KL (nats) | hits | replaced | KB read a token |"]
    rows.append("| --- " + "| ---: " * 7 + "|")
    for p in lines:
        alpha = "-" if p.alpha is None else f"{p.alpha:g}"
        rows.append(
            f"| {p.policy} | {p.room:.0%} | {alpha} | {p.perplexity:.3f} | {p.kl_nats:.4f} | {p.hit_rate:.1%} "
            f"| {p.replaced:.1%} | {p.read_bytes / 1e3:.0f} |"
        )
    return "\n".join(rows)


def trust_table(lines: list[Price]) -> str:
    """Part b."""
    rows = [
        "| policy | sparsity | trust | perplexity | KL (nats) | hits | in part | foretold | recall | KB read a token |"
    ]
    rows.append("| --- " + "| ---: " * 9 + "|")
    for p in lines:
        shares = " | ".join(
            "-" if share is None else f"{share:.1%}" for share in (p.in_part, p.rows_foretold, p.recall)
        )
        rows.append(
            f"| {p.policy} | {p.sparsity:.0%} | {'yes' if p.trusts else 'no'} | {p.perplexity:.3f} | {p.kl_nats:.4f} "
            f"| {p.hit_rate:.1%} | {shares} | {p.read_bytes / 1e3:.0f} |"
        )
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens", default=1000, show_default=True, type=click.IntRange(2), help="Of the text, the first.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(model: Path, text: Path, tokens: int, json_file: Path | None) -> None:
    """Makes the packs in a temporary folder, runs all cases, prints, and judges."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text("utf-8")).ids[:tokens]
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        lines = list(prices(model, ids, Path(folder)))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=2))
    click.echo(f"{len(ids):,} tokens, one by one\n\n(a) --substitute ALPHA")
    click.echo(substitution_table([line for line in lines if not line.sparsity]))
    click.echo(f"\n(b) --trust-prediction, room for {_TRUST_ROOM:.0%}, rows alone where not all neurons run")
    click.echo(trust_table([line for line in lines if line.sparsity]))
    faults = [line for line in lines if line.alpha is None and not line.trusts and not line.is_same]
    for line in faults:
        click.echo(f"{line.policy}, room {line.room:.0%}, sparsity {line.sparsity:g}: not the mapped answer", err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
