"""The papers' parts and every cache policy, by replay on a model's routes.

    python tests/bench/policies.py parts
    python tests/bench/policies.py hits

A model, the demo model by default, is profiled on the shipped sample, which gives the learned networks, the plan of
EdgeMoE and how well neurons are predicted. Then it runs over a text that it has not seen; popularity and paths are
learned from the first tokens, and the others are played.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from benchlib import DEMO_MODEL, SEQUENCE_LENGTH, F, finish, json_option, sample_and_unseen, table
from benchlib.playing import (
    Counted,
    ExpertSizes,
    Play,
    Predict,
    by_networks,
    by_paths,
    by_router,
    play,
    play_partial,
)
from benchlib.routes import ModelRoutes, NeuronRows, RoutedModel, neuron_rows, routed_model
from support.evictions import FIFO, LFU, Random

from moe_pack.calib.profile import Losses, Profile, ProfileOptions, losses_of, make_profile
from moe_pack.convert.plan import PlanningModel, preset_decision
from moe_pack.convert.plan.options import PAPERS_LIMITS, PresetName
from moe_pack.convert.plan.papers import FLOE_SPARSITY
from moe_pack.formats import BF16, NO_PROGRESS, ExpertFormat, Selector, dense_roles, part_format
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.runtime.offload import (
    PRESETS,
    CacheFacts,
    ExpertCache,
    Predictor,
    Preset,
    expert_cache_for,
)
from moe_pack.runtime.offload.eviction import LRU, Importance, LayerLRU, NoEviction, placed_by_popularity
from moe_pack.runtime.offload.replay import optimum, replay

# --- the model, what a profile of it knows, and the sizes of its experts


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """What the papers' parts are measured on. `networks`: of a profile, by the MoE layer that each predicts.

    `experts`: how many fit into the cache.   `dimensions`: the published model whose experts' sizes count.
    """

    model: RoutedModel
    routes: ModelRoutes
    losses: Losses
    networks: dict[int, Predictor]
    experts: int
    dimensions: str
    num_learned: int
    num_played: int

    @property
    def facts(self) -> CacheFacts:
        """The cache."""
        return self.routes.facts(self.experts)

    def preset_sizes(self, name: PresetName) -> tuple[ExpertSizes, str]:
        """Returns the sizes of a paper's experts, and how many have which bits of `down`."""
        checkpoint = self.model.checkpoint
        dtypes = ("BF16",) * len(dense_roles(checkpoint.spec))
        plan = preset_decision(name, PlanningModel(checkpoint.spec, dtypes, self.losses)).plan
        widths = Counter(expert.down.width for layer in plan.experts for expert in layer)
        named = ", ".join(f"{number} in {width} bit" for width, number in sorted(widths.items()))
        return self.sizes(plan.experts, plan.selector), named

    def sizes(self, experts: Sequence[Sequence[ExpertFormat]], selector: Selector) -> ExpertSizes:
        """Returns the sizes of experts [L, E] in these formats, at the published model's dimensions."""
        spec = model_spec(self.dimensions)
        source = 2 * len(spec.expert.matrices) * spec.hidden_size * spec.expert.intermediate_size
        layouts = [[expert_layout(one, selector, spec.expert, spec.hidden_size) for one in layer] for layer in experts]
        selectors = np.array([[layout.selector_bytes for layout in layer] for layer in layouts]) / source
        records = np.array([[layout.records_bytes + layout.extra_bytes for layout in layer] for layer in layouts])
        return ExpertSizes(selectors, records / source)

    def uniform_sizes(self, form: ExpertFormat, selector: Selector) -> ExpertSizes:
        """Returns the sizes of experts that all have one format."""
        L, E = self.routes.passes.popularity.shape
        return self.sizes([[form] * E] * L, selector)


_BF16 = ExpertFormat(BF16, BF16, BF16)
_INT4 = ExpertFormat(*[part_format(4, 64, 8)] * 3)


def profiled(checkpoint: Checkpoint, num_tokens: int) -> tuple[Losses, dict[int, Predictor]]:
    """Profiles a model on the shipped sample: its losses, and its networks by the layer that each predicts."""
    sample, _ = sample_and_unseen(checkpoint.folder, num_tokens, SEQUENCE_LENGTH)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        options = ProfileOptions("fast", keeps_inputs=False)
        profile = make_profile(checkpoint, sample, Path(folder) / "profile", options, NO_PROGRESS)
        return losses_of(profile), networks_of(profile)


def networks_of(profile: Profile) -> dict[int, Predictor]:
    """Returns the networks of a profile, by the MoE layer that each predicts."""
    layers = range(1, len(profile.spec.moe_layers))
    return {l: profile.predictors(l).network for l in layers if profile.has_predictors(l)}


# --- the papers' parts


@dataclass(frozen=True, slots=True)
class Part:
    """A line: a paper's parts so far, or one of them alone.

    `sizes`: of the experts.   `published`: the paper's factor over its own first line.
    """

    paper: str
    parts: str
    run: Counted
    sizes: ExpertSizes
    published: str = ""

    def cells(self, first: "Part") -> tuple[str, ...]:
        """Returns the line's figures; `first` is the paper's first line.

        What a token reads is in whole 16-bit experts: all, and the late part.
        """
        read, base = self.run.read_sizes(self.sizes), first.run.read_sizes(first.sizes)
        ratios = ("" if now == 0 else f"{before / now:.2f}" for before, now in zip(base, read, strict=True))
        figures = (f"{self.run.hit_rate:.1%}", f"{read[0]:.3f}", f"{read[1]:.3f}", *ratios)
        return (self.paper, self.parts, *figures, self.published)


def _in_passing(facts: CacheFacts) -> ExpertCache:
    """Returns a cache that keeps nothing once it was used: two layers fit, the one that runs and the predicted one."""
    small = CacheFacts(facts.pages, 2 * facts.num_active, facts.num_active, facts.popularity)
    return ExpertCache(small, LRU(small), keeps=False)


def _placed(facts: CacheFacts) -> ExpertCache:
    """Returns a cache of the most popular experts, which stay; a page is left that missing experts use in turn."""
    return ExpertCache(facts, NoEviction(facts), placed_by_popularity(facts, facts.num_pages), keeps=False)


def floe(subject: Subject) -> Iterator[Part]:
    """§3.2, §3.3: the paper has no ablation of speed; 9.3 times fewer bytes of an expert, and whole systems' speeds."""
    routes, facts, name = subject.routes, subject.facts, "FloE"
    k = facts.num_active
    rows = neuron_rows(subject.model.checkpoint, routes, "up", 1 - FLOE_SPARSITY, is_by_expert=True, below=1.0)
    sizes, _ = subject.preset_sizes("floe")
    network = by_networks(routes, k, subject.networks)
    whole = play(routes, Play(_in_passing(facts)))
    yield Part(name, "16 bit, read when needed", whole, subject.uniform_sizes(_BF16, "up"), "1")
    yield Part(name, "+ up in INT2", whole, sizes)
    running = play(routes, Play(_in_passing(facts), rows))
    yield Part(name, "+ 10% of gate and down", running, sizes, "9.3 in bytes")
    unpredicted = rows.with_no_prediction()
    experts = play(routes, Play(_in_passing(facts), unpredicted), network)
    yield Part(name, "+ experts predicted by networks: up is prefetched", experts, sizes)
    neurons = play(routes, Play(_in_passing(facts), rows), network)
    yield Part(name, "+ neurons predicted by the next up", neurons, sizes)
    kept = play(routes, Play(ExpertCache(facts, LRU(facts)), rows), network)
    yield Part(
        name, "+ experts kept by last use (ours: the paper leaves it open)", kept, sizes, "2.6 to 48.7 (systems)"
    )


def corm(subject: Subject) -> Iterator[Part]:
    """Fig. 8, Mixtral 8x7B and DeepSeekMoE 16B: B, +S, +P, +C. S has two parts: running rows and mixed quantization."""
    routes, facts, name = subject.routes, subject.facts, "CORM, Fig. 8"
    rows = corm_rows(subject)
    ahead = by_router(routes, PRESETS["corm"].num_predicted(facts.num_active))
    alone, int4 = play(routes, Play(_in_passing(facts), rows)), subject.uniform_sizes(_INT4, "gate")
    mixed, widths = subject.preset_sizes("corm")
    yield Part(name, "B: INT4, read whole when needed", play(routes, Play(_in_passing(facts))), int4, "1 / 1")
    yield Part(name, "+S, first half: running rows of up and down", alone, int4)
    yield Part(name, f"+S: and mixed quantization ({widths})", alone, mixed, "1.25 / 1.40")
    predicted = play(routes, Play(_in_passing(facts), rows), ahead)
    yield Part(name, "+P: experts and neurons predicted by the next router and gate", predicted, mixed, "1.59 / 1.84")
    cached = play(routes, Play(ExpertCache(facts, LayerLRU(facts)), rows), ahead)
    yield Part(name, "+C: experts and their rows kept, by last use in each layer", cached, mixed, "2.07 / 2.14")


_CORM_RUNNING = 0.45  # CORM §3, Fig. 2: theta 0.25 leaves out 55% of Mixtral's neurons


def corm_rows(subject: Subject) -> NeuronRows:
    """Returns CORM's rows, with the threshold that leaves out as many of the demo model's neurons as of Mixtral's."""
    checkpoint, below = subject.model.checkpoint, PRESETS["corm"].rows_below
    return neuron_rows(checkpoint, subject.routes, "gate", _CORM_RUNNING, is_by_expert=False, below=below)


def edgemoe(subject: Subject) -> Iterator[Part]:
    """Fig. 18 and its text, Switch base-8 on a Jetson TX2: 0.789, 0.392, 0.305, 0.245 s a token."""
    routes, facts, name = subject.routes, subject.facts, "EdgeMoE, Fig. 18"
    ahead = by_paths(routes, PRESETS["edgemoe"].num_predicted(facts.num_active))
    alone = play(routes, Play(_in_passing(facts)))
    sizes, widths = subject.preset_sizes("edgemoe")
    yield Part(name, "16 bit, read when needed", alone, subject.uniform_sizes(_BF16, "none"), "1")
    yield Part(name, f"+Q: by importance within {PAPERS_LIMITS['edgemoe'].percent} ({widths})", alone, sizes, "2.01")
    predicted = play(routes, Play(_in_passing(facts)), ahead)
    yield Part(name, "+P: up to 3 experts predicted from paths", predicted, sizes, "2.59")
    cached = play(routes, Play(expert_cache_for(PRESETS["edgemoe"], facts)), ahead)
    yield Part(name, "+C: experts kept, by frequency over distance", cached, sizes, "3.22")


def fiddler(subject: Subject) -> Iterator[Part]:
    """§3.2: the paper has no ablation; its speeds, 8.2 to 22.5 times, are over whole systems in 16 bit."""
    routes, facts, name = subject.routes, subject.facts, "Fiddler"
    sizes = subject.uniform_sizes(_BF16, "none")
    yield Part(name, "16 bit, read when needed", play(routes, Play(_in_passing(facts))), sizes, "1")
    placed = play(routes, Play(_placed(facts)))
    yield Part(name, "+ the most popular experts placed, the others read", placed, sizes)


_ALPHA = 0.3  # importance §6.2 uses 0.25 to 0.35


def importance(subject: Subject) -> Iterator[Part]:
    """Fig. 16's text, three models: time down by 8%, 20%, 14% of the part before each.

    Its baseline computes the experts that are not placed on a CPU; here they are read. Nor is +BA, Algorithm 2, played.
    """
    routes, facts, name = subject.routes, subject.facts, "importance, Fig. 16"
    sizes, k = subject.uniform_sizes(_BF16, "none"), facts.num_active

    def kept(alpha: float | None = _ALPHA) -> Play:
        return Play(ExpertCache(facts, Importance(facts)), alpha=alpha)

    placed = play(routes, Play(_placed(facts)))
    yield Part(name, "some experts placed for the whole run, the others read", placed, sizes, "1")
    yield Part(name, "+CE: kept by mean score", play(routes, kept(alpha=None)), sizes, "1.09")
    yield Part(name, f"+ER: substituted, alpha {_ALPHA}", play(routes, kept()), sizes, "1.36")
    partial = play_partial(subject.model, kept(), subject.num_learned, subject.num_played)
    yield Part(name, "+Pre: predicted from the partial state, §5.2", partial, sizes, "1.58")
    by_next = play(routes, kept(), by_router(routes, k))
    yield Part(name, "(for comparison: predicted by the next router)", by_next, sizes)


PAPERS: tuple[Callable[[Subject], Iterator[Part]], ...] = (floe, corm, fiddler, edgemoe, importance)


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def route_options(body: F) -> F:
    """Adds the options of a model's run."""
    path = click.Path(path_type=Path, exists=True)
    text = "A checkpoint.  [default: the demo model]"
    body = click.option("--model", "folder", type=path, default=DEMO_MODEL, help=text)(body)
    body = click.option("--tokens", default=2048, show_default=True, help="Tokens that are played.")(json_option(body))
    body = click.option("--sample", default=16384, show_default=True, help="Tokens of the sample that are profiled.")(
        body
    )
    return click.option("--learned", default=4096, show_default=True, help="Tokens that are learned from.")(body)


@main.command("parts")
@route_options
@click.option("--share", default=0.375, show_default=True, help="Of all experts, that fit into fast memory.")
@click.option("--dimensions", default="mixtral-8x7b", show_default=True, help="Published model: sizes of experts.")
def parts_command(
    folder: Path, learned: int, sample: int, tokens: int, share: float, dimensions: str, as_json: bool
) -> None:
    """Turns each paper's parts on one after the other, and prints the published factors with them.

    A token's reads are in experts of 16 bit; experts have the bytes that the paper's format has at the dimensions of a
    published model. "Faster" is the first line's bytes over the line's: at least, where the bytes of predicted experts
    count; at most, where prefetching hides behind computation. Computation takes no time. A part that computes on a
    second processor cannot be replayed. Published factors are of whole systems' times on other models and machines.
    """
    with routed_model(folder) as model:
        losses, networks = profiled(model.checkpoint, sample)
        routes = model.routes(learned, tokens)
        experts = round(share * routes.passes.popularity.size)
        subject = Subject(model, routes, losses, networks, experts, dimensions, learned, tokens)
        rows = []
        for paper in PAPERS:
            parts = list(paper(subject))
            rows += [part.cells(parts[0]) for part in parts]
    header = ("paper", "parts", "hits", "read a token", "late", "faster, at least", "at most", "published")  # fmt: skip
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


# --- hit rates

_SHARES = "0.125,0.25,0.375,0.5,0.625,0.75"
_HOT = (0.25, 0.5, 0.75)


def hit_rates(routes: ModelRoutes, facts: CacheFacts) -> Iterator[tuple[str, float]]:
    """Yields each eviction policy's hit rate in decode with this cache, without prediction."""
    variants = {name: preset for name, preset in PRESETS.items() if name != "floe"}  # alone, as lru
    variants |= {f"hot set {share:.0%}, lru": Preset("lru", "lru", placed_share=share) for share in _HOT}
    for name, preset in variants.items():
        yield name, replay(routes.passes, facts, facts.pages, preset.without_prediction()).decode.hit_rate
    yield "lfu", play(routes, Play(ExpertCache(facts, LFU(facts)))).hit_rate
    yield "fifo", play(routes, Play(ExpertCache(facts, FIFO(facts)))).hit_rate
    yield "random", play(routes, Play(ExpertCache(facts, Random(facts)))).hit_rate
    yield "optimum", optimum(routes.passes, facts, facts.pages).decode.hit_rate


def predicted_hit_rates(
    model: RoutedModel, routes: ModelRoutes, facts: CacheFacts, networks: dict[int, Predictor], num_learned: int
) -> Iterator[tuple[str, float]]:
    """Yields each paper's policy with its own prediction, and with the next router's for comparison."""
    k = facts.num_active

    def with_prediction(name: str, predict: Predict) -> float:
        return play(routes, Play(expert_cache_for(PRESETS[name], facts)), predict).hit_rate

    yield "floe, learned network", with_prediction("floe", by_networks(routes, k, networks))
    yield "floe, next router", with_prediction("floe", by_router(routes, k))
    yield "corm, next router", with_prediction("corm", by_router(routes, k))
    num_paths = PRESETS["edgemoe"].num_predicted(k)
    yield f"edgemoe, paths, {num_paths} experts", with_prediction("edgemoe", by_paths(routes, num_paths))
    partial = Play(expert_cache_for(PRESETS["importance"], facts))
    num_played = len(routes.passes.routes)
    yield "importance, partial state", play_partial(model, partial, num_learned, num_played).hit_rate
    yield "importance, next router", with_prediction("importance", by_router(routes, k))


@main.command("hits")
@route_options
@click.option("--shares", default=_SHARES, show_default=True, help="Of all experts, that fit.")
def hits_command(folder: Path, learned: int, sample: int, tokens: int, shares: str, as_json: bool) -> None:
    """Prints the hit rate in decode of every policy by the number of experts that fit, with Belady's optimum.

    Each policy alone, then each paper's with its own prediction: a prefetched expert is a hit. FIFO and random are not
    in the product. A hot set is a share of the pages for the most popular experts, permanently; the rest goes by last
    use.
    """
    with routed_model(folder) as model:
        _, networks = profiled(model.checkpoint, sample)
        routes = model.routes(learned, tokens)
        sizes = [round(share * routes.passes.popularity.size) for share in map(float, shares.split(","))]
        tallies = [
            dict(hit_rates(routes, routes.facts(size)))
            | dict(predicted_hit_rates(model, routes, routes.facts(size), networks, learned))
            for size in sizes
        ]
    rows = [(name, *(f"{tally[name]:.1%}" for tally in tallies)) for name in tallies[0]]
    header = ("experts that fit", *map(str, sizes))
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


if __name__ == "__main__":
    main()
