"""What the papers found about routing and caching, measured again on models that fit on this machine.

python tests/bench/paper_routing.py paths
python tests/bench/paper_routing.py evictions
python tests/bench/paper_routing.py popularity
python tests/bench/paper_routing.py activations
python tests/bench/paper_routing.py correlation
python tests/bench/paper_routing.py all

Each table says what the paper reports, and whether that holds here. Routes are those of the original's 16 bits, on a
text that the model has not seen. A model whose tokens run all experts, as SmolLM2's made by smollm2_moe.py, has no
routes to speak of: only `activations` and `correlation` say something about it.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import comb
from pathlib import Path

import click
import numpy as np
import torch
from benchlib import (
    BOOK,
    DEMO_MODEL,
    SEQUENCE_LENGTH,
    F,
    finish,
    json_option,
    model_options,
    sample_and_unseen,
    table,
)
from benchlib.playing import Play, play
from benchlib.routes import ModelRoutes, RoutedModel, magnitudes, popularity_of, routed_model
from numpy.typing import NDArray
from support.evictions import FIFO, LFU, Random

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.calib.statistics import accumulated_frequency, learn_paths
from moe_pack.formats import NO_PROGRESS
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights
from moe_pack.runtime.offload import PREDICTORS, CacheFacts, ExpertCache
from moe_pack.runtime.offload.cache import Eviction
from moe_pack.runtime.offload.eviction import LRU, EdgeMoE
from moe_pack.runtime.offload.replay import optimum

Routes = NDArray[np.uint16]
_SIXTEEN = 16
# Tokens that are counted, and tokens after them to judge on.
_MANY, _CHAT, _FEW = (65536, 32768), (4096, 4096), (512, 4096)
_PROFILED = 16384


@dataclass(frozen=True, slots=True)
class Finding:
    """A table, with the paper's figures and what becomes of its claim here."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    paper: str
    here: str

    def text(self) -> str:
        """Returns the finding as text."""
        return f"{self.title}\n\n{table(self.header, self.rows)}\n\nPaper: {self.paper}\nHere: {self.here}\n"


def verdict(holds: bool, figures: str) -> str:
    """Returns the words for a claim that holds, or does not."""
    return f"the claim {'holds' if holds else 'does not hold'}: {figures}"


def percent(share: float) -> str:
    """Returns a share in percent."""
    return f"{share:.1%}"


def counted(number: int) -> str:
    """Returns a count, of more than nine digits the power of ten."""
    return f"{number:,}" if number < 10**9 else f"{float(number):.0e}"


def has_routing(model: RoutedModel) -> bool:
    """Returns whether tokens choose experts; false if every token runs all."""
    router = model.checkpoint.spec.router
    return router.num_experts_per_tok < router.num_experts


def needs_routing(model: RoutedModel) -> None:
    """Refuses a model whose tokens run all experts."""
    if not has_routing(model):
        raise click.UsageError("--model: every token runs all experts, so that there is no routing to measure")


# --- EdgeMoE, Fig. 4 and 8


def best_only(routes: Routes) -> Routes:
    """Returns the routes [T, L, 1] of a router that chooses one expert, as those of EdgeMoE's models do."""
    return routes[:, :, :1]


def shuffled(routes: Routes) -> Routes:
    """Returns routes whose layers know nothing of each other: each layer's are dealt to other tokens."""
    generator = np.random.default_rng(0)
    return np.stack([layer[generator.permutation(len(layer))] for layer in routes.swapaxes(0, 1)], axis=1)


def path_counts(routes: Routes) -> NDArray[np.int64]:
    """Returns how many tokens took each distinct path, most first; the order of a token's experts does not matter."""
    ordered = np.sort(routes, axis=2).reshape(len(routes), -1)
    counts = np.unique(ordered, axis=0, return_counts=True)[1]
    return np.sort(counts)[::-1]


def covered(counts: NDArray[np.int64], num_paths: float) -> float:
    """Returns the share of all tokens that the most frequent `num_paths` paths cover, rounded up to whole paths."""
    return float(counts[: int(np.ceil(num_paths))].sum() / counts.sum())


_PERCENTS = (1, 5, 10, 20, 50)
_LAYERS_A_PATH = 3


def path_findings(model: RoutedModel, num_learned: int, num_played: int) -> Iterator[Finding]:
    """EdgeMoE Fig. 4 and Fig. 8."""
    needs_routing(model)
    routes = model.routes(num_learned, num_played, is_chat=False)
    num_experts, k = routes.passes.num_experts, routes.learned.shape[2]
    yield coverage_finding(routes.learned, num_experts, k)
    yield conditional_finding(routes, num_experts)
    yield accumulated_finding(routes, num_experts)


def coverage_finding(learned: Routes, num_experts: int, k: int) -> Finding:
    """Fig. 4: how unevenly tokens spread over paths, with and without what layers know of each other."""
    L, length = learned.shape[1], min(_LAYERS_A_PATH, learned.shape[1])
    kinds = {
        f"best expert of each of {L} layers": (best_only(learned), num_experts**L),
        f"sets of {k} experts, layers 1 to {length}": (learned[:, :length], comb(num_experts, k) ** length),
    }
    rows, top = [], {}
    for name, (routes, num_possible) in kinds.items():
        for suffix, taken in (("", routes), (", layers shuffled", shuffled(routes))):
            counts = path_counts(taken)
            shares = [covered(counts, len(counts) * percent_ / 100) for percent_ in _PERCENTS]
            of_possible = covered(counts, num_possible / 5)
            rows.append(
                (name + suffix, f"{len(counts):,}", counted(num_possible), *map(percent, shares), percent(of_possible))
            )
            top[name + suffix] = shares[_PERCENTS.index(20)], of_possible
    header = ("path", "distinct", "possible", *(f"top {p}%" for p in _PERCENTS), "top 20% of possible")
    first = next(iter(kinds))
    seen, possible = top[first]
    apart, _ = top[f"{first}, layers shuffled"]
    return Finding(
        f"Tokens on the most frequent paths, {len(learned):,} tokens (EdgeMoE Fig. 4)", header, rows,
        "the 20% most frequent paths have more than 99% of all tokens (Switch Transformers, SAMsum and GLUE)",
        verdict(min(seen, possible) > 0.99, f"{percent(seen)} on the first 20% of the distinct paths (layers shuffled: "
                f"{percent(apart)}), {percent(possible)} on the first 20% of the possible ones"),
    )  # fmt: skip


_LEAST_TOKENS = 50  # of a key, so that its shares mean something
_SHOWN_LAYER = 2  # the third MoE layer, as in Fig. 8


def conditional_finding(routes: ModelRoutes, num_experts: int) -> Finding:
    """Fig. 8 (left): how often each expert of the third layer is best, knowing the best of the two layers before."""
    learned, judged = best_only(routes.learned)[..., 0], best_only(routes.passes.routes)[..., 0]
    before = learned[:, _SHOWN_LAYER - 2 : _SHOWN_LAYER]
    keys, counts = np.unique(before, axis=0, return_counts=True)
    shares = {
        tuple(key): shares_of(learned, key, num_experts)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True)
        if count >= _LEAST_TOKENS
    }
    surest = max(shares, key=lambda key: float(shares[key].max()))
    usual = tuple(keys[counts.argmax()].tolist())
    rows = [("not known", f"{len(learned):,}", *map(percent, shares_of(learned, None, num_experts)))]
    for name, key in (("the most frequent", usual), ("the surest", surest)):
        for text, taken in ((name, learned), (f"{name}, held out", judged)):
            number = int(following(taken, key).sum())
            named = f"{text}: experts {key[0]}, {key[1]}"
            rows.append((named, f"{number:,}", *map(percent, shares_of(taken, key, num_experts))))
    expert = int(shares[surest].argmax())
    held_out = shares_of(judged, surest, num_experts)[expert]
    unknown = shares_of(learned, None, num_experts)[expert]
    figures = (
        f"at most {percent(float(shares[surest].max()))} on the text that was counted and {percent(held_out)} on other "
        f"text, from {percent(unknown)}; over all keys the likeliest expert has {percent(mean_of_best(judged, shares))}"
    )
    return Finding(
        "Frequency of layer 3's experts by the best experts of layers 1 and 2 (EdgeMoE Fig. 8, left)",
        ("layers before", "tokens", *map(str, range(num_experts))), rows,
        "with two layers known, an expert has 87.1%; without, all have about the same",
        verdict(held_out > 0.8, figures),
    )  # fmt: skip


def following(best: NDArray[np.uint16], key: Sequence[int] | None) -> NDArray[np.bool_]:
    """Returns which tokens came to the shown layer by these experts."""
    if key is None:
        return np.ones(len(best), bool)
    follows: NDArray[np.bool_] = (best[:, _SHOWN_LAYER - 2 : _SHOWN_LAYER] == key).all(axis=1)
    return follows


def shares_of(best: NDArray[np.uint16], key: Sequence[int] | None, num_experts: int) -> NDArray[np.float64]:
    """Returns the share of each expert among the tokens with this key; all tokens for None."""
    counts = np.bincount(best[following(best, key), _SHOWN_LAYER], minlength=num_experts)
    shares: NDArray[np.float64] = counts / max(1, counts.sum())
    return shares


def mean_of_best(best: NDArray[np.uint16], shares: dict[tuple[int, ...], NDArray[np.float64]]) -> float:
    """Returns how many tokens take the expert that is likeliest by their key's shares, of those with known keys."""
    hits = [
        (following(best, key).sum(), (best[following(best, key), _SHOWN_LAYER] == found.argmax()).sum())
        for key, found in shares.items()
    ]
    tokens, right = np.sum(hits, axis=0)
    return float(right / tokens)


def accumulated_finding(routes: ModelRoutes, num_experts: int) -> Finding:
    """Fig. 8 (right): the share of choices on the n likeliest experts, by the number of known layers."""
    rows, first = [], {}
    for name, pick in (("best expert", best_only), ("all chosen", lambda taken: taken)):
        learned, judged = pick(routes.learned), pick(routes.passes.routes)
        paths = learn_paths(learned, num_experts, 1 << 22)
        for text, taken in (("", learned), (", held out", judged)):
            shares = accumulated_frequency(paths, taken)[:, 2:].mean(axis=1)  # of layers with two before them
            most = min(num_experts - 1, shares.shape[1])  # a path knows only its likeliest
            for known, row in enumerate(shares):
                rows.append((f"{name}{text}", known, *map(percent, row[:most])))
            first[name + text] = [float(row[0]) for row in shares]
    zero, one, two = first["best expert, held out"]
    return Finding(
        "Choices on the n likeliest experts, mean of layers with two before them (EdgeMoE Fig. 8, right)",
        ("routes", "layers known", *(f"n = {n}" for n in range(1, most + 1))), rows,
        "the more layers are known, the fewer experts have most of the activations (the text gives no figure)",
        verdict(zero < one < two, f"{percent(zero)}, {percent(one)} and {percent(two)} for the likeliest expert, with "
                "0, 1 and 2 layers known, on held-out text"),
    )  # fmt: skip


# --- EdgeMoE, Fig. 14

_EVICTIONS: dict[str, Callable[[CacheFacts], Eviction]] = {
    "fifo": FIFO,
    "lru": LRU,
    "lfu": LFU,
    "random": Random,
    "edgemoe": EdgeMoE,
}
_BUFFERS = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of all experts


def eviction_findings(model: RoutedModel, num_learned: int, num_played: int) -> Iterator[Finding]:
    """EdgeMoE Fig. 14: hit ratios by the size of the expert buffer, without preloading."""
    needs_routing(model)
    routes = model.routes(num_learned, num_played)
    k, num_experts = routes.learned.shape[2], routes.passes.num_experts
    yield eviction_finding(f"{k} experts a token", routes)
    popularity = popularity_of(best_only(routes.learned), num_experts)
    passes = replace(routes.passes, routes=best_only(routes.passes.routes), popularity=popularity)
    yield eviction_finding("the best expert alone, as in Switch Transformers", replace(routes, passes=passes))


def eviction_finding(name: str, routes: ModelRoutes) -> Finding:
    """Returns the hit ratios with these routes."""
    k = routes.passes.routes.shape[2]
    sizes = sorted({max(2 * k, round(share * routes.passes.popularity.size)) for share in _BUFFERS})
    rates = {
        eviction: [play(routes, Play(ExpertCache(facts, make(facts)))).hit_rate for facts in map(routes.facts, sizes)]
        for eviction, make in _EVICTIONS.items()
    }
    best = [optimum(routes.passes, facts, facts.pages).decode.hit_rate for facts in map(routes.facts, sizes)]
    rows = [(eviction, *map(percent, shares)) for eviction, shares in [*rates.items(), ("Belady's optimum", best)]]
    others = [max(shares) for shares in zip(*(rates[other] for other in rates if other != "edgemoe"), strict=True)]
    gains = [100 * (own - other) for own, other in zip(rates["edgemoe"], others, strict=True)]
    wins = sum(gain > 0 for gain in gains)
    return Finding(
        f"Hit ratio in decode by the number of experts in the buffer, {name} (EdgeMoE Fig. 14)",
        ("eviction", *map(str, sizes)), rows,
        "EdgeMoE's policy has the most hits of five (the text names FIFO, LRU and LFU, and gives no figures)",
        verdict(wins == len(gains), f"most hits for {wins} of {len(gains)} sizes, by {min(gains):+.1f} to "
                f"{max(gains):+.1f} points over the best of the other four"),
    )  # fmt: skip


# --- Fiddler, appendix C

_PLACED = {"56 of 256": 56 / 256, "52 of 256": 52 / 256}


def popularity_findings(model: RoutedModel, num_learned: int, num_played: int) -> Iterator[Finding]:
    """Fiddler appendix C: how unevenly tokens choose experts, and what placing the popular ones brings."""
    needs_routing(model)
    routes = model.routes(num_learned, num_played, is_chat=False)
    k, num_experts = routes.learned.shape[2], routes.passes.num_experts
    popularity = popularity_of(routes.learned, num_experts).astype(np.float64)
    heat = popularity / popularity.max()
    rows = [(f"layer {l + 1}", *(f"{share:.2f}" for share in layer)) for l, layer in enumerate(heat)]
    quarter, middle, high = np.quantile(heat, (0.25, 0.5, 0.75)).tolist()
    yield Finding(
        f"Popularity of experts, the most popular is 1; {num_learned:,} tokens, {k} experts each (Fiddler Fig. 4)",
        ("", *map(str, range(num_experts))), rows,
        "mean 0.71, standard deviation 0.08, quartiles 0.67 and 0.76, least 0.22; 15 of 256 below 0.6, 27 above 0.8 "
        "(Mixtral 8x7B, ShareGPT): rather balanced",
        "(judged by a deviation of at most 0.1) " + verdict(
                float(heat.std()) <= 0.1, f"mean {heat.mean():.2f}, standard deviation {heat.std():.2f}, quartiles "
                f"{quarter:.2f}, {middle:.2f} and {high:.2f}, least {heat.min():.2f}; {(heat < 0.6).sum()} of "
                f"{heat.size} below 0.6, {(heat > 0.8).sum()} above 0.8"),
    )  # fmt: skip
    yield placement_finding(popularity, popularity_of(routes.passes.routes, num_experts).astype(np.float64))


def placement_finding(popularity: NDArray[np.float64], judged: NDArray[np.float64]) -> Finding:
    """Appendix C: the hit rate of the most and the least popular experts, and of any."""
    order, rows, gains = np.argsort(-popularity, axis=None, kind="stable"), [], []
    num_layers = len(popularity)
    for name, share in _PLACED.items():
        number = round(share * popularity.size)
        best, worst, held_out = (
            float(shares.ravel()[chosen].sum()) / num_layers
            for shares, chosen in (
                (popularity, order[:number]),
                (popularity, order[-number:]),
                (judged, order[:number]),
            )
        )
        uniform = number / popularity.size
        gains.append(100 * (held_out - uniform))
        rows.append((name, f"{number} of {popularity.size}", *map(percent, (best, held_out, uniform, worst))))
    return Finding(
        "Hit rate of placed experts, by popularity (Fiddler appendix C)",
        ("paper's share", "placed", "most popular", "the same, held out", "at random", "least popular"), rows,
        "25.2%, 21.9% and 18.7% for the best, random and worst 56 of 256; 23.5%, 20.3% and 17.2% for 52: some 3 points",
        verdict(min(gains) > 0, f"the most popular bring {min(gains):.1f} to {max(gains):.1f} points over random on "
                "held-out text"),
    )  # fmt: skip


# --- Fiddler, appendix A, and CORM, Fig. 2

_FIDDLER_LIMITS = (0.001, 0.01, 0.1, 1.0)
_CORM_LIMITS = (0.175, 0.25)


def activation_findings(model: RoutedModel, num_learned: int, num_played: int) -> Iterator[Finding]:
    """Fiddler appendix A and CORM Fig. 2: abs(silu(x W1)) of the chosen experts of each token."""
    routes = model.routes(num_learned, num_played, is_chat=False)
    weights, limits = CheckpointWeights(model.checkpoint), (*_FIDDLER_LIMITS, *_CORM_LIMITS)
    rows, shares = [], []
    for l in range(routes.scores.shape[1]):
        below, total = np.zeros(len(limits)), 0
        for e in range(routes.scores.shape[2]):
            tokens = (routes.passes.routes[:, l] == e).any(axis=1)
            values = magnitudes(weights, l, e, torch.from_numpy(routes.inputs[tokens, l]), "gate")
            below += [(values < limit).sum() for limit in limits]
            total += values.size
        shares.append(below / total)
        rows.append((l + 1, *(f"{100 * share:.2f}" for share in shares[-1])))
    found = np.array(shares)
    tiny, small, medium = (found[:, place] for place in range(3))
    yield Finding(
        f"Activations after SiLU below a limit, percent; {num_played:,} tokens (Fiddler Table 2, CORM Fig. 2)",
        ("layer", *(f"< {limit:g}" for limit in limits)), rows,
        "Fiddler: below 0.001 less than 2% in all layers, below 0.01 less than 5% in 28 of 32, below 0.1 less than 30% "
        "in 24 of 32: few neurons are near zero. CORM: some 35% below 0.175 and 55% below 0.25, more in lower layers",
        f"below 0.001 {100 * tiny.min():.1f} to {100 * tiny.max():.1f}%; below 0.01 less than 5% in "
        f"{(small < 0.05).sum()} of {len(rows)} layers; below 0.1 less than 30% in {(medium < 0.3).sum()}; mean below "
        f"0.175 {100 * found[:, 4].mean():.0f}%, below 0.25 {100 * found[:, 5].mean():.0f}%; below 0.25 "
        f"{100 * found[0, 5]:.0f}% in the first layer, {100 * found[-1, 5]:.0f}% in the last",
    )  # fmt: skip


# --- FloE, Fig. 4, and CORM, Fig. 5


def correlation_findings(path: Path, num_tokens: int) -> Iterator[Finding]:
    """FloE Fig. 4 and CORM Fig. 5: how alike successive layers' inputs are, and what they predict; from a profile."""
    sample, _ = sample_and_unseen(path, num_tokens, SEQUENCE_LENGTH)
    checkpoint = Checkpoint(path)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        options = ProfileOptions("none", keeps_inputs=False)
        profile = make_profile(checkpoint, sample, Path(folder) / "profile", options, NO_PROGRESS)
        layers = [l for l in range(1, len(profile.spec.moe_layers)) if profile.has_predictors(l)]
        cosines = [float(profile.statistics(l).cosine[0]) for l in layers]
        judged = [profile.predictors(l) for l in layers]
        has_choice = profile.spec.router.num_experts_per_tok < profile.spec.router.num_experts
    checkpoint.close()
    experts = np.array([one.experts[:, 0] for one in judged])  # [layers, predictors]
    if has_choice:
        rows = [
            (l + 1, f"{cosine:.3f}", *map(percent, row))
            for l, cosine, row in zip(layers, cosines, experts, strict=True)
        ]
        means = dict(zip(PREDICTORS, experts.mean(axis=0).tolist(), strict=True))
        network = experts[:, [place for place, name in enumerate(PREDICTORS) if name.startswith("MLP")]].max(axis=1)
        yield Finding(
            f"Cosine of a MoE layer's input and the one before, and recall of its experts; {num_tokens:,} tokens, held "
            "out (FloE Fig. 4, CORM Fig. 5)",
            ("layer", "cosine", *PREDICTORS), rows,
            "FloE: cosine above 0.95 but for the first layer, 0.88 of the experts by a network; CORM: 75% by the next "
            "router in lower layers, 90% in higher ones, some 85% in all",
            verdict(min(cosines) > 0.95 and float(network.mean()) >= 0.88, f"cosines {min(cosines):.2f} to "
                    f"{max(cosines):.2f}; the better network {percent(float(network.mean()))}, the next router "
                    f"{percent(means['next router'])}"),
        )  # fmt: skip
    yield neuron_finding(layers, cosines, np.array([one.neurons for one in judged]))


def neuron_finding(layers: list[int], cosines: list[float], neurons: NDArray[np.float32]) -> Finding:
    """Recall of the neurons that run, by the next selector on this layer's input: [layers, kinds, sparsities, 2]."""
    cells = [(KINDS.index(kind), at) for kind, at in product(("up", "gate"), range(len(HOT_SPARSITIES)))]
    rows = [
        (l + 1, f"{cosine:.3f}", *(percent(float(layer[kind, at, 0])) for kind, at in cells))
        for l, cosine, layer in zip(layers, cosines, neurons, strict=True)
    ]
    means = np.nanmean(neurons[..., 0], axis=0)
    rows.append(("mean recall", f"{np.mean(cosines):.3f}", *(percent(float(means[kind, at])) for kind, at in cells)))
    precisions = np.nanmean(neurons[..., 1], axis=0)
    rows.append(("mean precision", "", *(percent(float(precisions[kind, at])) for kind, at in cells)))
    up, gate = float(means[KINDS.index("up"), -1]), float(means[KINDS.index("gate"), 0])
    return Finding(
        "Recall of running neurons by the next layer's selector on this layer's input, by sparsity (FloE Fig. 4, CORM "
        "Fig. 5)",
        ("layer", "cosine", *(f"{KINDS[kind]} {HOT_SPARSITIES[at]:.0%}" for kind, at in cells)), rows,
        "FloE: 0.95 by up (80 or 90% sparsity); CORM: 80 to 90% by gate in most layers, some 80% in all (55% sparsity)",
        verdict(up >= 0.95 and gate >= 0.8, f"{percent(up)} by up at 90% sparsity, {percent(gate)} by gate at 50%"),
    )  # fmt: skip


# --- commands


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def show(findings: Iterator[Finding], as_json: bool) -> None:
    """Prints findings as they come, or all of them as JSON."""
    if as_json:
        finish({"findings": [asdict(finding) for finding in findings]}, "", as_json)
    for finding in findings:
        click.echo(finding.text())


def text_options(learned: int, played: int) -> Callable[[F], F]:
    """Adds `--model`, `--text`, and the tokens that are counted and judged on."""

    def add(body: F) -> F:
        body = click.option("--tokens", default=played, show_default=True, help="Tokens to judge on.")(body)
        body = click.option("--learned", default=learned, show_default=True, help="Tokens before, to count.")(body)
        return model_options(json_option(body))

    return add


def _add(
    name: str, findings: Callable[[RoutedModel, int, int], Iterator[Finding]], usual: tuple[int, int], text: str
) -> None:
    @main.command(name, help=text)
    @text_options(*usual)
    def command(model: Path, text: Path, learned: int, tokens: int, as_json: bool) -> None:
        with routed_model(model, text, _SIXTEEN) as routed:
            show(findings(routed, learned, tokens), as_json)


_add("paths", path_findings, _MANY, "How unevenly tokens spread over paths, and what a path says of the next layer.")
_add("evictions", eviction_findings, _CHAT, "Hit ratios of five evictions by the size of the buffer, no prediction.")
_add("popularity", popularity_findings, _MANY, "How popular each expert is, and what placing the popular ones brings.")
_add("activations", activation_findings, _FEW, "How many activations after SiLU are near zero, layer by layer.")


@main.command("correlation")
@model_options
@click.option("--tokens", default=_PROFILED, show_default=True, help="Of the sample, to profile.")
@json_option
def correlation_command(model: Path, text: Path, tokens: int, as_json: bool) -> None:
    """Prints cosines of successive layers' inputs, and the recall of predictors, from a profile of the sample."""
    show(correlation_findings(model, tokens), as_json)


@main.command("all")
@click.option(
    "--model", "models", type=click.Path(path_type=Path, exists=True), multiple=True, help="Others to measure."
)
@click.option("--share", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="Of the usual tokens.")
def all_command(models: tuple[Path, ...], share: float) -> None:
    """Prints everything for the demo model and each other model."""
    for model in (DEMO_MODEL, *models):
        click.echo(f"# {model.name}\n")
        show(model_findings(model, share), as_json=False)


def model_findings(model: Path, share: float) -> Iterator[Finding]:
    """Returns all findings about a model, with this share of the usual numbers of tokens."""
    many, chat, few, (profiled,) = (
        [max(least, round(share * number)) for number in usual]
        for least, usual in ((1024, _MANY), (128, _CHAT), (128, _FEW), (1024, (_PROFILED,)))
    )
    with routed_model(model, BOOK, _SIXTEEN) as routed:
        if has_routing(routed):
            yield from path_findings(routed, *many)
            yield from eviction_findings(routed, *chat)
            yield from popularity_findings(routed, *many)
        yield from activation_findings(routed, *few)
    yield from correlation_findings(model, profiled)


if __name__ == "__main__":
    main()
