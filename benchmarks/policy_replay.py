"""What each reading of a paper changes: variants of policies replayed on the demo model's routes.

Where a paper misprints, leaves a number open or means hardware that is not there, docs/papers.md says how it is read;
here stand the other readings beside ours.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import click
import numpy as np
from demo_routes import count_run, demo_routes

from moe_pack.runtime import CacheFacts
from moe_pack.runtime.policies import (
    LFU,
    LRU,
    EdgeMoE,
    Importance,
    LayerLRU,
    Static,
    placed_by_popularity,
)
from moe_pack.runtime.residency import Array, Eviction, Key, Residency

_ROOMS = (8, 12, 16, 20, 24)
_NUM_PASSES = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_ALPHAS = (0.1, 0.2, 0.3, 0.5)

Maker = Callable[[CacheFacts], Residency]


class PrintedEdgeMoE(EdgeMoE):
    """The denominator as printed: (S - i + I) mod S. Where it is 0, in the current layer, nothing goes."""

    def __init__(self, facts: CacheFacts) -> None:
        super().__init__(facts)
        layers = np.arange(len(facts.pages))
        self._distance = (layers[:, None] - layers) % len(layers)

    def worth(self, layer_idx: int) -> Array:
        """f / D, infinite where D is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(super().worth(layer_idx), nan=np.inf, posinf=np.inf)


class OwnLayerNext(EdgeMoE):
    """D = 0 of the current layer read as nearest, 1, as if it came again at once."""

    def __init__(self, facts: CacheFacts) -> None:
        super().__init__(facts)
        np.fill_diagonal(self._distance, 1)


class OfflineEdgeMoE(EdgeMoE):
    """f measured before the run alone."""

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Nothing is counted."""


class LiveEdgeMoE(EdgeMoE):
    """f measured during the run alone."""

    def __init__(self, facts: CacheFacts) -> None:
        super().__init__(replace(facts, popularity=np.zeros_like(facts.popularity)))


class ChosenImportance(Importance):
    """Scores of the chosen experts alone."""

    def routed(self, layer_idx: int, experts: Sequence[int], scores: Array | None) -> None:
        """Those of others count as 0."""
        assert scores is not None, "the demo's scores are known"
        kept = np.zeros_like(scores)
        kept[list(experts)] = scores[list(experts)]
        super().routed(layer_idx, experts, kept)


def keeping(policy: Callable[[CacheFacts], Eviction], share: float = 0.0) -> Maker:
    """A residency with this eviction, and some of the pages for what is popular."""
    return lambda facts: Residency(facts, policy(facts), placed_by_popularity(facts, int(share * facts.num_pages)))


def whole_layers(facts: CacheFacts) -> Residency:
    """Whole layers placed, the first ones, and nothing kept beside: FloE's "cache more MoE layers" to the letter."""
    num_experts, room = facts.pages.shape[1], facts.num_pages - int(facts.pages.max())
    if facts.num_pages == facts.pages.size:
        room = facts.num_pages
    placed = [Key(*divmod(place, num_experts)) for place in range(room // num_experts * num_experts)]
    return Residency(facts, Static(facts), placed, keeps=False)


def used_once(facts: CacheFacts) -> Residency:
    """Fiddler: placed by popularity, nothing kept beside."""
    return Residency(facts, Static(facts), placed_by_popularity(facts, facts.num_pages), keeps=False)


def remembering(num_passes: int) -> Maker:
    """Importance over so many passes."""
    return keeping(lambda facts: Importance(facts, num_passes))


VARIANTS: dict[str, Maker] = {
    "EdgeMoE, D = (i - I) mod S, S at I (ours)": keeping(EdgeMoE),
    "EdgeMoE, D as printed": keeping(PrintedEdgeMoE),
    "EdgeMoE, D = 1 at I": keeping(OwnLayerNext),
    "EdgeMoE, f from the profile alone": keeping(OfflineEdgeMoE),
    "EdgeMoE, f from the run alone": keeping(LiveEdgeMoE),
    "EdgeMoE, f alone (LFU)": keeping(LFU),
    "CORM, each layer its share (ours)": keeping(LayerLRU),
    "CORM, all layers together (LRU)": keeping(LRU),
    "FloE, last used of all layers (ours)": keeping(LRU),
    "FloE, whole layers": whole_layers,
    "Fiddler, used once and not kept (ours)": used_once,
    "Fiddler, half the room placed, half kept by last use": keeping(LRU, 0.5),
    **{f"importance, n = {n}": keeping(lambda facts, n=n: Importance(facts, n)) for n in _NUM_PASSES},  # type: ignore[misc]
    "importance, chosen experts alone": keeping(ChosenImportance),
}


def _row(name: str, values: Iterable[str]) -> str:
    return f"| {name} |" + "".join(f" {value} |" for value in values)


@click.command()
@click.option("--learned", default=4096, show_default=True, help="Tokens that popularity is learned from.")
@click.option("--tokens", default=2048, show_default=True, help="Tokens that are played.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(learned: int, tokens: int, as_json: bool) -> None:
    """Replays every variant; substitution as if the rest of the model stayed as it was."""
    demo = demo_routes(learned, tokens)
    rates = {
        name: [count_run(demo, make(demo.facts(room))).hit_rate for room in _ROOMS] for name, make in VARIANTS.items()
    }
    substituted = {
        alpha: [count_run(demo, keeping(Importance)(demo.facts(room)), alpha=alpha) for room in _ROOMS]
        for alpha in _ALPHAS
    }
    shares = {alpha: [(run.hit_rate, run.replaced / run.needed) for run in runs] for alpha, runs in substituted.items()}
    if as_json:
        click.echo(json.dumps({"rooms": _ROOMS, "hit_rates": rates, "substituted": shares}, indent=2))
        return
    click.echo(_row("hit rate in decoding; room for", map(str, _ROOMS)))
    click.echo(_row("---", ["---:"] * len(_ROOMS)))
    for name, values in rates.items():
        click.echo(_row(name, (f"{value:.1%}" for value in values)))
    for alpha, pairs in shares.items():
        click.echo(_row(f"importance, alpha {alpha} (replaced)", (f"{hit:.1%} ({gone:.1%})" for hit, gone in pairs)))


if __name__ == "__main__":
    main()
