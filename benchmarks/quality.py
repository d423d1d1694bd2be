"""Measures what packing costs in quality: perplexity, KL divergence and top-1 agreement of packs against their source.

The text is cut into windows, each begun afresh with what the tokenizer puts before a text; every token of the text is
predicted once, from its window alone. KL is the mean over tokens of KL(source || pack) in nats. Before that the
source's logits are compared with those of transformers' MixtralForCausalLM on the first window.
"""

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from math import exp
from pathlib import Path
from typing import get_args

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import MixtralForCausalLM
from transformers.utils.logging import disable_progress_bar

from moe_pack.convert import convert
from moe_pack.formats import Checkpoint, Pack, Plan, Quantizer, Selector, part_format, uniform_plan
from moe_pack.runtime import CheckpointWeights, Decoder, PackWeights

_TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids that are run together; those from `first` on are text and are predicted."""

    ids: list[int]
    first: int


@dataclass(slots=True)
class Tally:
    """Sums over the predicted tokens of one model."""

    num_tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    num_agreeing: int = 0

    def add(self, source: Tensor, logprobs: Tensor, targets: Tensor) -> None:
        """Counts a window in: log-probabilities float64 [T, vocabulary], the tokens that came [T]."""
        self.num_tokens += len(targets)
        self.loss -= float(logprobs.gather(1, targets[:, None]).sum())
        self.divergence += float((source.exp() * (source - logprobs)).sum())
        self.num_agreeing += int((source.argmax(1) == logprobs.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return exp(self.loss / self.num_tokens)


@dataclass(slots=True)
class Candidate:
    """A pack under test."""

    width: int
    pack: Pack
    decoder: Decoder
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Quality:
    """One line of the result; bits a weight count the experts' scales, checksums and padding too."""

    width: int
    perplexity: float
    kl_nats: float
    top1_agreement: float
    expert_bytes: int
    bits_per_weight: float
    pack_bytes: int


def text_windows(tokenizer: Tokenizer, text: str, window_tokens: int, limit: int | None) -> list[Window]:
    """The text's tokens, at most `limit`, in windows of `window_tokens` with what the tokenizer puts before a text."""
    prefix: list[int] = tokenizer.encode("").ids
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[:limit]
    step = window_tokens - len(prefix)
    windows = [Window(prefix + ids[start : start + step], max(len(prefix), 1)) for start in range(0, len(ids), step)]
    return [window for window in windows if len(window.ids) > window.first]


def logprobs(decoder: Decoder, window: Window) -> Tensor:
    """Log-probabilities of the window's text, float64 [T, vocabulary]."""
    decoder.reset()
    logits = decoder.logits(window.ids)[window.first - 1 : -1]
    return torch.log_softmax(logits.double(), dim=1)


@torch.inference_mode()
def oracle_difference(folder: Path, decoder: Decoder, window: Window) -> float:
    """The largest difference between the decoder's logits and those of transformers in float32."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it bare
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    expected = model(torch.tensor([window.ids])).logits[0]
    decoder.reset()
    return float((decoder.logits(window.ids) - expected).abs().max())


def open_candidate(checkpoint: Checkpoint, plan: Plan, width: int, folder: Path, tokens: int) -> Candidate:
    """Makes a pack and opens it."""
    num_cores = len(os.sched_getaffinity(0))
    convert(checkpoint, plan, folder, num_cores)
    torch.set_num_threads(num_cores)  # converting leaves torch with one thread
    pack = Pack(folder)
    return Candidate(width, pack, Decoder(PackWeights(pack, torch.device("cpu")), tokens))


def judge(source: Decoder, candidates: list[Candidate], windows: list[Window]) -> Tally:
    """Runs all windows through the source and every candidate; returns the source's own sums."""
    own = Tally()
    for window in tqdm(windows, desc="windows", disable=None):
        expected = logprobs(source, window)
        targets = torch.tensor(window.ids[window.first :])
        own.add(expected, expected, targets)
        for candidate in candidates:
            candidate.tally.add(expected, logprobs(candidate.decoder, window), targets)
    return own


def quality(candidate: Candidate) -> Quality:
    """A candidate's line."""
    tally, totals, spec = candidate.tally, candidate.pack.manifest.totals, candidate.pack.spec
    expert_bytes = totals.selectors + totals.records + totals.extra
    matrices, per_matrix = len(spec.expert.matrices), spec.hidden_size * spec.expert.intermediate_size
    num_weights = len(spec.moe_layers) * spec.router.num_experts * matrices * per_matrix
    return Quality(
        width=candidate.width,
        perplexity=tally.perplexity,
        kl_nats=tally.divergence / tally.num_tokens,
        top1_agreement=tally.num_agreeing / tally.num_tokens,
        expert_bytes=expert_bytes,
        bits_per_weight=8 * expert_bytes / num_weights,
        pack_bytes=sum(path.stat().st_size for path in candidate.pack.folder.iterdir()),
    )


def _table(lines: list[Quality]) -> str:
    """The lines under their names."""
    rows = ["width  perplexity   KL (nats)   top-1   expert bytes   bits/weight     pack bytes"]
    rows += [
        f"{q.width:5}{q.perplexity:12.4f}{q.kl_nats:12.6f}{q.top1_agreement:8.2%}"
        f"{q.expert_bytes:15,}{q.bits_per_weight:14.3f}{q.pack_bytes:15,}"
        for q in lines
    ]
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens", type=click.IntRange(1), help="Tokens of the text to take.  [default: all]")
@click.option("--window", default=512, show_default=True, type=click.IntRange(2), help="Tokens run together.")
@click.option("--widths", default="16,8,4,3,2", show_default=True, help="Bits of every expert's weights, one a pack.")
@click.option("--selector", type=click.Choice(get_args(Selector)), default="up", show_default=True)
@click.option("--group", default=64, show_default=True, help="Weights a scale; 0 for the whole row.")
@click.option("--scale-bits", type=click.Choice([8, 16]), default=16, show_default=True)
@click.option("--quantizer", type=click.Choice(get_args(Quantizer)), default="hqq", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path,
    text: Path,
    tokens: int | None,
    window: int,
    widths: str,
    selector: Selector,
    group: int,
    scale_bits: int,
    quantizer: Quantizer,
    as_json: bool,
) -> None:
    """Makes the packs in a temporary folder, judges them, prints."""
    windows = text_windows(Tokenizer.from_file(str(model / "tokenizer.json")), text.read_text(), window, tokens)
    if not windows:
        raise click.ClickException("no token to predict")
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-")))
        checkpoint = Checkpoint(model)
        stack.callback(checkpoint.close)
        source = Decoder(CheckpointWeights(checkpoint), window)
        candidates = []
        for width in tqdm([int(width) for width in widths.split(",")], desc="packs", disable=None):
            part = part_format(width, group, scale_bits)
            plan = uniform_plan(checkpoint.spec, selector, part, part, None, quantizer)
            candidates.append(open_candidate(checkpoint, plan, width, temporary / f"{width}", window))
            stack.callback(candidates[-1].pack.close)
        difference = oracle_difference(model, source, windows[0])
        own = judge(source, candidates, windows)
        lines = [quality(candidate) for candidate in candidates]
    facts = {"num_tokens": own.num_tokens, "num_windows": len(windows), "oracle_difference": difference}
    facts["source_perplexity"] = own.perplexity
    if as_json:
        options = {"selector": selector, "group": group, "scale_bits": scale_bits, "quantizer": quantizer}
        click.echo(json.dumps(facts | options | {"packs": [asdict(line) for line in lines]}))
        return
    click.echo(f"{own.num_tokens} tokens in {len(windows)} windows; source perplexity {own.perplexity:.4f}")
    click.echo(f"source's logits against transformers' on the first window: at most {difference:.1e} apart")
    click.echo(_table(lines))


if __name__ == "__main__":
    main()
