"""What `moe-run --substitute` costs a finished pack: a text decoded token by token, with room for some of the experts.

Against the same pack without. Nothing is read ahead: what is foretold in time hangs on the drive, and with it what is
in memory when a token comes; so figures are the same each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.arrays import Array
from moe_pack.calib.costs import Cost, expert_multiplications, half_multiplications
from moe_pack.calib.estimate import Estimate
from moe_pack.calib.outcomes import whole_divergence
from moe_pack.calib.price_of_sparsity import estimates
from moe_pack.calib.reference import next_log_probs
from moe_pack.calib.sequences import Sequences
from moe_pack.calib.text import Tokens
from moe_pack.formats import Pack, Progress, RunError
from moe_pack.runtime import (
    EncoderDecoder,
    Engine,
    EngineOptions,
    PolicyName,
    StreamingWeights,
    Trust,
    available_bytes,
    divide_budget,
    expert_pages,
    page_sizes,
    routing_bytes,
)

ALPHAS = (0.1, 0.3, 0.5)
ROOM = 0.5  # of the experts
POLICY: PolicyName = "importance"  # of the paper that substitution is from
_SHARE_OF_MEMORY = 0.75  # of what is available, at most
_COMPARED_TOKENS = 128  # at once: bounds what predictions take


@dataclass(frozen=True, slots=True)
class SubstitutionPrice:
    """What a pack loses with `--substitute alpha` against itself without: KL in nats, perplexity relative.

    `replaced`: of the experts that routers chose.   `fetched`: of those run, that were not in memory.
    """

    alpha: float
    replaced: float
    fetched: float
    kl: Estimate
    perplexity_increase: Estimate


@dataclass(frozen=True, slots=True)
class Substitution:
    """The prices, at one room and policy. `room`: share of all experts' memory.   `fetched`: without substitution."""

    policy: str
    room: float
    fetched: float
    prices: tuple[SubstitutionPrice, ...]


def substitution(pack: Pack, tokens: Tokens, progress: Progress, folder: Path) -> Substitution:
    """The price of each of `ALPHAS`, with room for half of the experts, or what the machine has. On the CPU.

    Args:    folder: for the predictions without, as long as it takes: 4 bytes a token and word of the vocabulary.
    Raises:  RunError if the machine has no memory for this; PackError if the pack is damaged.
    """
    given = _given(pack, tokens)
    N, S = given.ids.shape  # sequences, their length
    free = available_bytes()
    budget = budget_with_room(pack, ROOM, S)
    if free is not None:
        budget = min(budget, int(_SHARE_OF_MEMORY * free))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "predictions.f32"
    with _same_threads():
        expected = np.memmap(path, np.float32, "w+", shape=(N, S - 1, pack.spec.vocab_size))
        with _engine(pack, budget, None, S) as engine:
            for number, found in _decoded(engine, given, progress, "decoding"):
                expected[number] = found.numpy()
            assert engine.plan is not None, "it has a budget"
            room = engine.plan.num_pages / int(expert_pages(pack.layout, engine.plan.page_bytes).sum())
            fetched, _ = _shares(engine)
        prices = tuple(_price(pack, given, expected, alpha, budget, progress) for alpha in ALPHAS)
    path.unlink()
    return Substitution(POLICY, room, fetched, prices)


def _given(pack: Pack, tokens: Tokens) -> Sequences:
    return Sequences.of(pack.spec, torch.from_numpy(tokens.sequences.astype(np.int64)))


def _price(
    pack: Pack, given: Sequences, expected: NDArray[np.float32], alpha: float, budget: int, progress: Progress
) -> SubstitutionPrice:
    losses = []
    with _engine(pack, budget, alpha, given.length) as engine:
        for number, found in _decoded(engine, given, progress, f"decoding with --substitute {alpha:g}"):
            losses.append(_losses(torch.from_numpy(expected[number]), found, given.ids[number].numpy()))
        fetched, replaced = _shares(engine)
    return SubstitutionPrice(alpha, replaced, fetched, *estimates(torch.cat(losses, dim=1)))


def _engine(pack: Pack, budget: int, alpha: float | None, context_tokens: int) -> Engine:
    options = EngineOptions(budget_bytes=budget, policy=POLICY, foretells=False, trust=Trust(substitute=alpha))
    return Engine(pack, options, context_tokens)


def _shares(engine: Engine) -> tuple[float, float]:
    """Of the experts run, those that were fetched, and those that took another's place."""
    assert isinstance(engine.weights, StreamingWeights), "it has a budget"
    counts = engine.weights.decode
    return 1 - counts.hits / counts.needed, counts.substituted / counts.needed


def _losses(expected: Tensor, found: Tensor, sequence: Array) -> Tensor:
    """Nats float64 [2, n] of a sequence's predictions float32 [n, V]: KL, and likelihood lost."""
    pieces = []
    for start in range(0, len(found), _COMPARED_TOKENS):
        rows = slice(start, min(start + _COMPARED_TOKENS, len(found)))
        one, other = expected[rows], found[rows]
        lost = next_log_probs(one, sequence, rows) - next_log_probs(other, sequence, rows)
        pieces.append(torch.stack([whole_divergence(one, other), lost.double()]))
    return torch.cat(pieces, dim=1)


def _decoded(engine: Engine, given: Sequences, progress: Progress, stage: str) -> Iterator[tuple[int, Tensor]]:
    """Each sequence's number and the log-probabilities after all its tokens but the last, float32 [S - 1, V]."""
    spec, (N, S) = engine.decoder.spec, given.ids.shape
    layers = sum(half_multiplications(spec, layer, S) for layer in range(spec.num_hidden_layers))
    experts = len(spec.moe_layers) * spec.router.num_experts_per_tok * expert_multiplications(spec)
    one = layers + experts + spec.vocab_size * spec.hidden_size
    progress.begin(Cost(one * N * (S - 1)).stage(stage))
    for number, stacks in enumerate(zip(*given.stacks, strict=True)):
        found = torch.empty((S - 1, spec.vocab_size))
        *text, ids = (held.tolist() for held in stacks)
        for place, logits in enumerate(fed_singly(engine, ids[:-1], *text)):
            found[place] = logits.log_softmax(dim=0)
            progress.advance(one, f"sequence {number} token {place}")
        yield number, found
    progress.end()


def fed_singly(engine: Engine, ids: list[int], text: list[int] | None = None) -> Iterator[Tensor]:
    """The logits float32 [V] after each token, each fed alone, from an empty context.

    Args:    text: what an encoder reads before, where there is one.
    """
    engine.decoder.reset()
    if isinstance(engine.decoder, EncoderDecoder):
        assert text is not None, "an encoder reads something"
        engine.decoder.encode(text)
    for token in ids:
        yield engine.decoder.next_logits([token])


def budget_with_room(pack: Pack, share: float, context_tokens: int) -> int:
    """The least budget with room for this share of the pack's experts, each as large as the largest; for one at least.

    Not checked: whether the machine has so much.
    """
    page_bytes, head_bytes = page_sizes(pack.layout)
    pages, predictors = expert_pages(pack.layout, page_bytes), routing_bytes(pack.folder)
    wanted = int(pages.max()) * max(round(share * pages.size), 1)
    wanted = min(wanted, int(pages.sum()))
    least = pack.layout.dense_file.num_bytes + wanted * (page_bytes + head_bytes)
    # From there in pages: with room for more, longer forward passes take of it.
    while True:
        try:
            if divide_budget(pack.layout, least, context_tokens, predictors).num_pages >= wanted:
                return least
        except RunError:
            pass  # less than the rest of the model needs
        least += page_bytes + head_bytes


@contextmanager
def _same_threads() -> Iterator[None]:
    """Torch has as many threads afterwards as before: an engine leaves it those it wants itself."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(number)
