"""How many drafted tokens are right, and how much sooner a text is done with drafts, for prose, code, chat and noise.

    python tests/bench/drafts.py PACK
    python tests/bench/drafts.py PACK --budget 0.6 --temperature 0.8

PACK has a real model with a tokenizer, and for chat with a chat template. Every text is generated without drafts, with
n-gram look-up behind its gate, and with every proposal verified; if the pack has a prediction layer, with that in the
same two ways. In memory the ways take turns every eight tokens, within a budget from text to text. Each begins with a
new gate, as a command does. All have to give the same tokens. Noise is a prompt of random tokens.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import click
import torch
from benchlib import BOOK, ROOT, finish, json_option, table

from moe_pack.formats import Pack
from moe_pack.formats.families import PredictionLayer
from moe_pack.runtime import ChatTemplate, Engine, EngineOptions, Sampler, SamplingOptions, Text
from moe_pack.runtime.drafts import Drafts, Gate, NgramDrafter
from moe_pack.runtime.drafts.prediction_layer import PredictionDrafter, PredictionWeights
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, Weights
from moe_pack.runtime.offload import least_budget, whole_bytes

KINDS = ("prose", "code", "chat", "noise")
OFF, GATED, ALL, PREDICTED, ALL_PREDICTED = "off", "ngram", "no gate", "mtp", "mtp, no gate"
_SOURCES = ("runtime/generate.py", "formats/base/errors.py", "runtime/offload/cache.py")
_PARAGRAPH = (
    "The committee met in the old town hall. It discussed the new bridge for three hours. Some members of the "
    "committee wanted a bridge of stone, and some members of the committee wanted a bridge of steel. In the end the "
    "committee asked an engineer, and the engineer said that a bridge of steel would be cheaper and would be done a "
    "year earlier."
)
_MESSAGES = (
    f"Correct the spelling of this text and change nothing else: {_PARAGRAPH}",
    f"Summarize this text in two sentences: {_PARAGRAPH}",
    "Explain to a child why the sky is blue.",
)
_PROMPT_TOKENS, _NOISE_TOKENS, _TURN_TOKENS = 300, 128, 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The texts of a kind, generated in one way. `ratio`: tokens a second over those without drafts, the median."""

    kind: str
    way: str
    tokens_per_s: float
    ratio: float
    least_ratio: float
    drafted: int
    accepted: int
    tokens_per_pass: float


def prompts(kind: str, pack: Pack, text: Text) -> list[list[int]]:
    """Returns the prompts of a kind."""
    if kind == "noise":
        draw = torch.Generator().manual_seed(1)
        return [torch.randint(text.vocab_size, (_NOISE_TOKENS,), generator=draw).tolist() for _ in range(3)]
    if kind == "chat":
        template = ChatTemplate.of(pack)
        if template is None:
            raise click.UsageError("the pack has no chat template; leave chat out")
        written = [
            template.render([{"role": "user", "content": each}], add_generation_prompt=True) for each in _MESSAGES
        ]
        return [text.encode(each, special_tokens=False) for each in written]
    if kind == "code":
        return [text.encode((ROOT / name).read_text(encoding="utf-8"))[:_PROMPT_TOKENS] for name in _SOURCES]
    book = text.encode(BOOK.read_text(encoding="utf-8")[:200_000])
    return [book[start : start + _PROMPT_TOKENS] for start in (1_000, 9_000, 21_000)]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate. `layer`: what follows the sequence; None where no prediction layer drafts."""

    name: str
    drafts: Drafts | None
    layer: PredictionDrafter | None = None


def ways(has_ungated: bool, layers: list[PredictionDrafter]) -> Iterator[Way]:
    """Yields the ways to generate, with new gates and counts.

    Args:    layers: of the pack, one for each way that drafts with it, or none.
    """
    yield Way(OFF, None)
    yield Way(GATED, Drafts(NgramDrafter(), Gate()))
    if has_ungated:
        yield Way(ALL, Drafts(NgramDrafter(), None))
    for name, gate, layer in zip((PREDICTED, ALL_PREDICTED), (Gate(), None), layers, strict=False):
        yield Way(name, Drafts(layer, gate), layer)


def prediction_drafter(opened: Pack, weights: Weights, decoder: Decoder, context: int) -> PredictionDrafter | None:
    """Returns what drafts with the pack's prediction layer; None if it has none. A budget does not count it."""
    found = PredictionLayer.find(opened)
    if found is None:
        return None
    return PredictionDrafter(PredictionWeights(found, weights), context, decoder.chunk_tokens)


@dataclass(slots=True)
class Run:
    """A text on its way, in one way. `seconds`: from its first token on."""

    way: str
    drafts: Drafts | None
    left: Iterator[int]
    tokens: list[int]
    seconds: float = 0.0

    def go_on(self, number: int) -> None:
        """Takes so many more tokens, or all that are left."""
        began = time.perf_counter()
        self.tokens += islice(self.left, number)
        self.seconds += time.perf_counter() - began


def generated(
    decoders: list[Decoder],
    prompt: list[int],
    options: SamplingOptions,
    number: int,
    taken: list[Way],
) -> list[Run]:
    """Generates a text in some ways: with a decoder for each, some tokens in turns; else one text after the other."""
    runs = []
    for place, way in enumerate(taken):
        decoder = decoders[place % len(decoders)]
        decoder.reset()
        decoder.sequences[0].follower = way.layer
        left = generate(decoder, prompt, Sampler(options, prompt), number, frozenset(), way.drafts)
        runs.append(Run(way.name, way.drafts, left, [next(left)]))
        if len(decoders) == 1:
            runs[-1].go_on(number)
    while any(len(run.tokens) < number for run in runs):
        for run in runs:
            run.go_on(_TURN_TOKENS)
        runs.reverse()
    return runs


def outcomes(
    kind: str,
    decoders: list[Decoder],
    all_prompts: list[list[int]],
    options: SamplingOptions,
    number: int,
    rounds: int,
    has_ungated: bool,
    layers: list[PredictionDrafter],
) -> list[Outcome]:
    """Generates the texts of a kind in all ways, in turns."""
    seconds: dict[str, list[list[float]]] = {way.name: [[] for _ in all_prompts] for way in ways(has_ungated, layers)}
    counts: dict[str, list[Drafts]] = {way: [] for way in seconds}
    for turn in range(rounds):
        for place, prompt in enumerate(all_prompts):
            taken = [*ways(has_ungated, layers)]
            runs = generated(decoders, prompt, options, number, taken if turn % 2 else taken[::-1])
            for run in runs:
                seconds[run.way][place].append(run.seconds)
                if run.drafts is not None:
                    counts[run.way].append(run.drafts)
            if any(run.tokens != runs[0].tokens for run in runs):
                raise click.ClickException(f"{kind}: the text depends on drafts")
    found = []
    for way, each in seconds.items():
        ratios = [median(plain) / median(own) for plain, own in zip(seconds[OFF], each, strict=True)]
        rate = len(all_prompts) * (number - 1) / sum(median(own) for own in each)
        drafted, accepted, passes = (
            sum(getattr(drafts.counts, name) for drafts in counts[way]) for name in ("drafted", "accepted", "passes")
        )
        per_pass = 1 + accepted / passes if passes else 1.0
        found.append(
            Outcome(kind, way, rate, median(ratios), min(ratios), drafted // rounds, accepted // rounds, per_pass)
        )
    return found


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("pack", type=click.Path(path_type=Path, exists=True))
@click.option("--kind", "kinds", multiple=True, default=KINDS, show_default=True, type=click.Choice(KINDS))
@click.option("--tokens", default=160, show_default=True, type=click.IntRange(2), help="New tokens of a text.")
@click.option("--texts", default=3, show_default=True, type=click.IntRange(1, 3), help="Texts of a kind.")
@click.option("--ungated/--no-ungated", default=True, show_default=True, help="Verify every proposal too.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--budget", type=click.FloatRange(0, 1), help="A share of the memory from the least budget to the whole.")
@click.option("--threads", type=click.IntRange(1))
@json_option
def main(
    pack: Path,
    kinds: tuple[str, ...],
    tokens: int,
    texts: int,
    ungated: bool,
    rounds: int,
    temperature: float,
    budget: float | None,
    threads: int | None,
    as_json: bool,
) -> None:
    context, found = _PROMPT_TOKENS + 200 + tokens, list[Outcome]()
    with Pack(pack) as opened:
        num_bytes = None
        if budget is not None:
            least, whole = (each(opened.layout, context, 0) for each in (least_budget, whole_bytes))
            num_bytes = int(least + budget * (whole - least))
        text, options = Text(opened), SamplingOptions(temperature=temperature, seed=1)
        with Engine(opened, EngineOptions("cpu", num_bytes, threads=threads), context) as engine:
            assert isinstance(engine.decoder, Decoder), "a model without an encoder"
            layers = [
                layer
                for _ in range(2 if ungated else 1)
                if (layer := prediction_drafter(opened, engine.weights, engine.decoder, context)) is not None
            ]
            all_ways, decoders = [*ways(ungated, layers)], [engine.decoder]
            if budget is None:  # else the ways would find each other's experts in memory
                decoders += [Decoder(engine.weights, context) for _ in all_ways[1:]]
            for kind in kinds:
                all_prompts = prompts(kind, opened, text)[:texts]
                generated(decoders, all_prompts[0], options, 8, [*ways(ungated, layers)])  # the first pages come
                found += outcomes(kind, decoders, all_prompts, options, tokens, rounds, ungated, layers)
    rows = [
        (
            each.kind,
            each.way,
            f"{each.tokens_per_s:.1f}",
            f"{each.ratio:.3f}",
            f"{each.least_ratio:.3f}",
            f"{each.accepted} of {each.drafted}",
            f"{each.tokens_per_pass:.2f}",
        )
        for each in found
    ]
    names = ("texts", "drafts", "tokens/s", "times off", "the least", "accepted", "tokens a pass")
    finish({"budget_bytes": num_bytes, "outcomes": [asdict(each) for each in found]}, table(names, rows), as_json, [])


if __name__ == "__main__":
    main()
