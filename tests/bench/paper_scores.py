"""What importance's paper says of the scores of experts, measured again: any model whose tokens choose experts.

python tests/bench/paper_scores.py scores --model smollm2_routed/
python tests/bench/paper_scores.py reuse --model smollm2_routed/
python tests/bench/paper_scores.py ahead --model smollm2_routed/
python tests/bench/paper_scores.py substitution --model smollm2_routed/
python tests/bench/paper_scores.py batches --model smollm2_routed/
python tests/bench/paper_scores.py all --model smollm2_routed/

Each table says what the paper (Importance-Driven Expert Scheduling) reports, and whether that holds here. Experts are
in 16 bits. A cache has the paper's eviction, and space for --share of all experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import click
import numpy as np
import torch
from benchlib import F, json_option, model_options
from benchlib.playing import Counted, Play, PlayedWeights, Scored
from benchlib.routes import PROMPT_TOKENS, WINDOW_TOKENS, ModelRoutes, RoutedModel, routed_model
from numpy.typing import NDArray
from paper_routing import Finding, needs_routing, percent, show, verdict
from torch import Tensor

from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.compute.router import expert_scores
from moe_pack.runtime.offload import CacheFacts, ExpertCache
from moe_pack.runtime.offload.cache import ComputeEvent
from moe_pack.runtime.offload.eviction import Importance
from moe_pack.runtime.offload.split import substitute

_SIXTEEN = 16
_ALPHAS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)  # Table 3
_ALPHA = 0.3  # of the paper's Qwen2-57B; 0.25 to 0.35 in §6.2
_BATCHES = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. `learned` tokens give popularity, `played` come after them; `share`: of all experts that
    fit into the cache.
    """

    learned: int
    played: int
    share: float


def ranked_scores(routes: ModelRoutes) -> NDArray[np.float32]:
    """Returns every token's scores, largest first: [N, L, E]."""
    return -np.sort(-routes.scores, axis=2)


def cache_facts(routes: ModelRoutes, share: float) -> CacheFacts:
    """Returns the cache with space for a share of all experts."""
    popularity = routes.passes.popularity
    return routes.facts(max(2 * routes.passes.routes.shape[2], round(share * popularity.size)))


# --- Fig. 4: the scores


def score_finding(routes: ModelRoutes) -> Finding:
    """Fig. 4: how scores fall with the rank."""
    k = routes.passes.routes.shape[2]
    ranked = ranked_scores(routes)
    total, beta = ranked[..., :k].sum(axis=2), ranked[..., k]
    ratios = ranked / beta[..., None]
    shown = [rank for rank in range(ranked.shape[2]) if rank <= k + 1 or (rank + 1) % 4 == 0]
    rows = [
        (
            f"{rank + 1}{' (chosen)' if rank < k else ''}",
            *(f"{value:.4f}" for value in np.quantile(ranked[..., rank], (0.1, 0.5, 0.9))),
            f"{np.median(ratios[..., rank]):.2f}",
            percent(float((ratios[..., rank] > 1 + _ALPHA).mean())),
        )
        for rank in shown
    ]
    top = ratios[..., :k] > 1 + _ALPHA
    best = percent(float((ranked[..., 0] / total).mean()))
    num_top, of_top = float(top.sum(axis=2).mean()), float((ranked[..., :k] * top).sum(axis=2).mean() / total.mean())
    figures = (
        f"of {k} chosen experts {num_top:.1f} have more than {1 + _ALPHA:g} times the score of rank {k + 1}, and they "
        f"have {percent(of_top)} of the chosen experts' scores; the best has {best}, "
        f"{percent(1 / k)} if all were alike"
    )
    return Finding(
        f"Scores by rank, all layers and {len(ranked):,} tokens (importance Fig. 4)",
        ("rank", "10% of tokens below", "median", "90% below", f"over rank {k + 1}", f"above {1 + _ALPHA:g} of it"),
        rows,
        "of the chosen experts only a few have high scores; the others' are like those of experts not chosen",
        verdict(num_top <= k / 2 and of_top > num_top / k, figures),
    )


# --- Fig. 11: reuse


def reuse_finding(routes: ModelRoutes) -> Finding:
    """Fig. 11: how likely the expert of each rank is chosen for the next token."""
    k, num_experts = routes.passes.routes.shape[2], routes.scores.shape[2]
    order = np.argsort(-routes.scores, axis=2, kind="stable")
    is_chosen = np.zeros(routes.scores.shape, bool)
    np.put_along_axis(is_chosen, order[..., :k], True, axis=2)
    follows = np.ones(len(order) - 1, bool)
    follows[WINDOW_TOKENS - 1 :: WINDOW_TOKENS] = False  # the next token begins another text
    again = np.take_along_axis(is_chosen[1:], order[:-1], axis=2)[follows].mean(axis=(0, 1))  # [E], by rank
    rows = [(rank + 1, percent(float(share)), percent(k / num_experts)) for rank, share in enumerate(again)]
    return Finding(
        f"Experts that are chosen for the next token, by the rank of their score; {follows.sum():,} tokens (importance "
        "Fig. 11)",
        ("rank", "chosen for the next token", "by chance"), rows,
        "the higher the score, the likelier the reuse, for experts that were not chosen too (three models; the text "
        "gives no figures)",
        verdict(bool(again[0] > again[k] > again[-1]), f"{percent(float(again[0]))} for the best, "
                f"{percent(float(again[k - 1]))} for the last that is chosen; {percent(float(again[k]))} for the best "
                f"that is not, {percent(float(again[-1]))} for the last"),
    )  # fmt: skip


# --- a cache that is played while the model runs


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """A run: `log_probs` float32 [N, V] of the single tokens, what the cache did, and the scores, layer by layer."""

    log_probs: Tensor
    counted: Counted
    scored: list[Scored]


def played(model: RoutedModel, facts: CacheFacts, sizes: Sizes, alpha: float | None, num_predicted: int = 0) -> Played:
    """Runs the model over its text in windows, each a prompt and single tokens, with importance's cache."""
    run = Play(ExpertCache(facts, Importance(facts)), alpha=alpha, waits_for_hits=True)
    weights = PlayedWeights(model.pack, model.kernels, run, num_predicted)
    decoder, logits = Decoder(weights, WINDOW_TOKENS), list[Tensor]()
    for window in windows(model, sizes):
        decoder.reset()
        decoder.logits(window[:PROMPT_TOKENS])  # of every token, so that the last layer routes all of them
        logits += [decoder.next_logits([token]).clone() for token in window[PROMPT_TOKENS:]]
    return Played(torch.stack(logits).float().log_softmax(dim=1), run.counted, weights.scored)


def windows(model: RoutedModel, sizes: Sizes) -> list[list[int]]:
    """Returns the text that is played, in windows that have more than a prompt."""
    ids = model.ids[sizes.learned : sizes.learned + sizes.played]
    found = [ids[start : start + WINDOW_TOKENS] for start in range(0, len(ids), WINDOW_TOKENS)]
    return [window for window in found if len(window) > PROMPT_TOKENS]


def following(model: RoutedModel, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Returns which of the single tokens have a next one in their window, and the next ones."""
    singles = [window[PROMPT_TOKENS:] for window in windows(model, sizes)]
    known = [place + 1 < len(one) for one in singles for place in range(len(one))]
    return torch.tensor(known), torch.tensor([token for one in singles for token in one[1:]])


# --- Fig. 18: predictions


def is_top(scores: NDArray[np.float32], k: int, alpha: float) -> NDArray[np.bool_]:
    """Returns which experts [..., E] have more than 1 + alpha times the score of rank k + 1."""
    beta = np.sort(scores, axis=-1)[..., -k - 1]
    found: NDArray[np.bool_] = scores > (1 + alpha) * beta[..., None]
    return found


def ahead_finding(model: RoutedModel, facts: CacheFacts, routes: ModelRoutes, sizes: Sizes) -> Finding:
    """Fig. 18: how many predicted experts have top scores, and how many of the others are chosen at least."""
    k = facts.num_active
    run = played(model, facts, sizes, _ALPHA, num_predicted=k)
    pairs = [(one.guessed, one.scores) for one in run.scored if one.guessed is not None]
    singles = np.repeat(routes.passes.chunks == 1, routes.passes.chunks)
    logits = torch.from_numpy(routes.ahead[singles, 1:])
    by_residual = expert_scores(logits.flatten(0, 1), model.checkpoint.spec.router).numpy()
    own = routes.scores[singles, 1:].reshape(by_residual.shape)
    methods = {
        "partial state (§5.2)": (
            np.stack([guessed for guessed, _ in pairs]),
            np.stack([scores for _, scores in pairs]),
        ),
        "the next router, on this layer's input": (by_residual, own),
    }
    rows, found = [], {}
    for name, guesses_and_scores in methods.items():
        shares = accuracies(*guesses_and_scores, k)
        found[name] = shares
        rows.append((name, *map(percent, shares)))
    top, others, _ = found["partial state (§5.2)"]
    return Finding(
        f"Experts that are predicted for the next layer, {run.counted.num_tokens:,} tokens, {facts.num_pages} of "
        f"{facts.pages.size} experts fit, alpha {_ALPHA} (importance Fig. 18)",
        ("prediction", "predicted as top: are top", "are not, but are chosen", "all predicted: are chosen"), rows,
        "82% of the experts that are predicted as top-score are; of the others 95% are chosen at least",
        verdict(top >= 0.82 and others >= 0.95, f"{percent(top)} and {percent(others)} from the partial state"),
    )  # fmt: skip


def accuracies(guessed: NDArray[np.float32], scores: NDArray[np.float32], k: int) -> tuple[float, float, float]:
    """Returns the shares of Fig. 18 for scores [N, E]: of the experts predicted as top, the top ones; of the rest of
    these, the chosen ones; and of the best k predicted, the chosen ones.
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    predicted, top = is_top(guessed, k, _ALPHA), is_top(scores, k, _ALPHA)
    wrong = predicted & ~top
    best = np.argsort(-guessed, axis=1, kind="stable")[:, :k]
    hits = np.take_along_axis(chosen, best, axis=1)
    return (
        float((predicted & top).sum() / max(1, predicted.sum())),
        float((wrong & chosen).sum() / max(1, wrong.sum())),
        float(hits.mean()),
    )


# --- Table 3, and the cache ratio of Fig. 13 and 16


def substitution_finding(model: RoutedModel, facts: CacheFacts, sizes: Sizes, alphas: Sequence[float]) -> Finding:
    """Table 3: what substitution costs, by alpha; and what it saves (Fig. 13, +ER of Fig. 16)."""
    source = played(model, facts, sizes, None)
    known, after = following(model, sizes)
    rows, growth, hits = [], {}, {}
    for alpha in (None, *alphas):
        run = source if alpha is None else played(model, facts, sizes, alpha)
        nll = -run.log_probs[known].gather(1, after[:, None]).mean().item()
        kl = (source.log_probs.exp() * (source.log_probs - run.log_probs)).sum(dim=1).mean().item()
        right = (run.log_probs[known].argmax(dim=1) == after).float().mean().item()
        same = (run.log_probs.argmax(dim=1) == source.log_probs.argmax(dim=1)).float().mean().item()
        counted = run.counted
        missing = (counted.needed - counted.hits) / counted.num_tokens
        growth[alpha], hits[alpha] = kl, counted.hit_rate
        rows.append(
            ("off" if alpha is None else f"{alpha:g}", f"{exp(nll):.2f}", f"{kl:.4f}", percent(right), percent(same),
             percent(counted.replaced / counted.needed), percent(counted.hit_rate), f"{missing:.1f}")
        )  # fmt: skip
    usual = min(alphas, key=lambda alpha: abs(alpha - _ALPHA))
    gain = hits[usual] / hits[None] - 1
    return Finding(
        f"Substitution by alpha, {source.counted.num_tokens:,} tokens, {facts.num_pages} of {facts.pages.size} experts "
        "fit (importance Table 3, Fig. 13)",
        ("alpha", "perplexity", "KL", "next token right", "same as without", "replaced", "hits", "misses a token"),
        rows,
        "accuracy changes by at most some 2 points up to alpha 0.6, and not at all as a rule up to 0.35; the cache "
        "ratio rises by 60% (+ER, of the part before)",
        verdict(growth[usual] <= 0.02 and gain >= 0.3, f"at alpha {usual:g} a KL divergence of {growth[usual]:.4f} and "
                f"{gain:+.0%} hits ({percent(hits[None])} to {percent(hits[usual])})"),
    )  # fmt: skip


# --- §5.1 and §6.2: batches


def batch_finding(routes: ModelRoutes, facts: CacheFacts) -> Finding:
    """§6.2: what substitution saves if several sequences are decoded together, which share their top experts."""
    steps = [batched(routes, size) for size in _BATCHES]
    rows, gains, shared = [], [], []
    for size, (scores, chosen) in zip(_BATCHES, steps, strict=True):
        ways = {way: misses(facts, scores, chosen, way) for way in ("off", "alone", "together")}
        number = scores.shape[0] * size
        gains.append(1 - ways["together"] / ways["off"])
        shared.append(1 - ways["together"] / ways["alone"])
        rows.append(
            (size, *(f"{missed / number:.2f}" for missed in ways.values()), percent(gains[-1]), percent(shared[-1]))
        )
    return Finding(
        f"Missing experts a token by the sequences in a batch, alpha {_ALPHA}, {facts.num_pages} of {facts.pages.size} "
        "experts fit (importance §6.2)",
        ("sequences", "off", "each by its own top experts", "by those of the batch", "saved", "of it by the batch"),
        rows,
        "35% less time a token with 3 sequences and 24% with one, over the best other system: the shared top experts "
        "are one of two reasons",
        verdict(gains[2] > gains[0] and shared[2] > 0.01, f"{percent(gains[0])} fewer misses with one sequence, "
                f"{percent(gains[2])} with three"),
    )  # fmt: skip


def batched(routes: ModelRoutes, size: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns scores and choices [steps, size, L, ...] of sequences that are decoded together: parts of the text."""
    num_steps = len(routes.scores) // size
    scores, chosen = routes.scores[: num_steps * size], routes.passes.routes[: num_steps * size].astype(np.int64)
    return (
        scores.reshape(size, num_steps, *scores.shape[1:]).swapaxes(0, 1),
        chosen.reshape(size, num_steps, *chosen.shape[1:]).swapaxes(0, 1),
    )


def misses(facts: CacheFacts, scores: NDArray[np.float32], chosen: NDArray[np.int64], way: str) -> int:
    """Returns how many experts are missing when these steps run; `way`: whose top experts may be substitutes."""
    cache, missed = ExpertCache(facts, Importance(facts)), 0
    for step_scores, step_chosen in zip(scores, chosen, strict=True):
        for layer_idx in range(scores.shape[2]):
            own, taken, resident = step_scores[:, layer_idx], step_chosen[:, layer_idx], cache.is_resident[layer_idx]
            if way == "together":
                taken = substitute(own, taken, resident, _ALPHA)
            elif way == "alone":
                pairs = [(own[one : one + 1], taken[one : one + 1]) for one in range(len(own))]
                taken = np.concatenate([substitute(*pair, resident, _ALPHA) for pair in pairs])
            events = cache.schedule(layer_idx, np.unique(taken).tolist(), own.mean(axis=0))
            missed += sum(isinstance(event, ComputeEvent) and not event.is_hit for event in events)
    return missed


# --- commands


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def size_options(body: F) -> F:
    """Adds the options that all commands have."""
    for option in (
        click.option(
            "--learned", default=2048, show_default=True, type=click.IntRange(1), help="Tokens for popularity."
        ),
        click.option("--tokens", default=2048, show_default=True, type=click.IntRange(128), help="That are played."),
        click.option(
            "--share", default=0.5, show_default=True, type=click.FloatRange(0, 1), help="Of experts that fit."
        ),
    ):
        body = option(body)
    return model_options(json_option(body))


Find = Callable[[RoutedModel, ModelRoutes, CacheFacts, Sizes], Finding]
_FINDINGS: dict[str, Find] = {
    "scores": lambda model, routes, facts, sizes: score_finding(routes),
    "reuse": lambda model, routes, facts, sizes: reuse_finding(routes),
    "ahead": lambda model, routes, facts, sizes: ahead_finding(model, facts, routes, sizes),
    "substitution": lambda model, routes, facts, sizes: substitution_finding(model, facts, sizes, _ALPHAS),
    "batches": lambda model, routes, facts, sizes: batch_finding(routes, facts),
}


def findings(names: Sequence[str], model: Path, text: Path, sizes: Sizes) -> Iterator[Finding]:
    """Yields the named findings about a model."""
    with routed_model(model, text, _SIXTEEN) as routed:
        needs_routing(routed)
        routes = routed.routes(sizes.learned, sizes.played)
        facts = cache_facts(routes, sizes.share)
        for name in names:
            yield _FINDINGS[name](routed, routes, facts, sizes)


def _add(name: str, names: Sequence[str], text: str) -> None:
    @size_options
    def command(model: Path, text: Path, learned: int, tokens: int, share: float, as_json: bool) -> None:
        show(findings(names, model, text, Sizes(learned, tokens, share)), as_json)

    main.command(name, help=text)(command)


_add("scores", ("scores",), "Prints how scores fall with their rank (Fig. 4).")
_add("reuse", ("reuse",), "Prints which experts are chosen for the next token, by rank (Fig. 11).")
_add("ahead", ("ahead",), "Prints how many predicted experts have top scores (Fig. 18).")
_add("substitution", ("substitution",), "Prints what substitution costs and saves, by alpha (Table 3, Fig. 13).")
_add("batches", ("batches",), "Prints what substitution saves with several sequences (§6.2).")
_add("all", tuple(_FINDINGS), "Prints all of them.")


if __name__ == "__main__":
    main()
