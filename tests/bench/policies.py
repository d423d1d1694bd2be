"""The papers' parts and every cache policy, by replay on a model's routes; and what trusting predictions costs.

    python tests/bench/policies.py parts
    python tests/bench/policies.py hits
    python tests/bench/policies.py trust
    python tests/bench/policies.py gpu
    python tests/bench/policies.py gpu --ahead 1

A model, the demo model by default, is profiled on the shipped sample, which gives the learned networks, the plan of
EdgeMoE and how well neurons are predicted. Then it runs over a text that it has not seen; popularity and paths are
learned from the first tokens, and the others are played.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from benchlib import BOOK, DEMO_MODEL, SEQUENCE_LENGTH, F, finish, folder_option, json_option, sample_and_unseen, table
from benchlib.packs import budget_with, make_demo, make_profiled_demo
from benchlib.playing import (
    Counted,
    ExpertSizes,
    Play,
    Predict,
    SecondProcessor,
    by_networks,
    by_paths,
    by_router,
    play,
    play_partial,
)
from benchlib.routes import ModelRoutes, NeuronRows, RoutedModel, neuron_rows, routed_model
from numpy.typing import NDArray
from support.evictions import FIFO, Random
from support.played_slots import PlayedToken, played, popularity_of, recorded_tokens
from support.printed_split import balanced
from torch import Tensor

from moe_pack.calib.profile import Losses, Profile, ProfileOptions, losses_of, make_profile
from moe_pack.convert.plan import PlanningModel, preset_decision
from moe_pack.convert.plan.options import PAPERS_LIMITS, PresetName
from moe_pack.convert.plan.papers import FLOE_SPARSITY
from moe_pack.formats import BF16, NO_PROGRESS, ExpertFormat, Pack, Selector, dense_roles, part_format
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.runtime import Engine, EngineOptions, Text
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.gpu.placements import DYNAMIC_SHARE, place_experts, usual_heat
from moe_pack.runtime.model import NativeOperations
from moe_pack.runtime.offload import (
    PRESETS,
    Approximations,
    CacheFacts,
    ExpertCache,
    OffloadedWeights,
    PhaseCounts,
    PolicyName,
    Predictor,
    Preset,
    Routing,
    expert_cache_for,
    routing_bytes,
)
from moe_pack.runtime.offload.eviction import LRU, Importance, LayerLRU, NoEviction, placed_by_popularity
from moe_pack.runtime.offload.prefetch import MethodName
from moe_pack.runtime.offload.presets import SIMPLEST_FIRST, PredictionName
from moe_pack.runtime.offload.replay import optimum, replay
from moe_pack.runtime.offload.split import LoadOrCompute, fastest

_NO_SECOND = "needs a second processor"


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
_INT2_UP = ExpertFormat(BF16, part_format(2, 64), BF16)


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

    `run`: None if replay does not measure it.   `sizes`: of the experts.   `published`: the paper's factor over its own
    first line.   `time`: in units of the first line's, with the assumed rates of a second processor; None without one.
    """

    paper: str
    parts: str
    run: Counted | None
    sizes: ExpertSizes | None
    published: str = ""
    time: str = ""

    def read(self) -> tuple[float, float] | None:
        """Returns what a token reads, in whole 16-bit experts: all, and the late part."""
        return None if self.run is None or self.sizes is None else self.run.read_sizes(self.sizes)

    def cells(self, first: "Part") -> tuple[str, ...]:
        """Returns the line's figures; `first` is the paper's first line."""
        read, base = self.read(), first.read()
        if self.run is None or read is None or base is None:
            return (self.paper, self.parts, "", "", "", "", "", self.time or _NO_SECOND, self.published)
        ratios = ("" if now == 0 else f"{before / now:.2f}" for before, now in zip(base, read, strict=True))
        figures = (f"{self.run.hit_rate:.1%}", f"{read[0]:.3f}", f"{read[1]:.3f}", *ratios)
        return (self.paper, self.parts, *figures, self.time, self.published)


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


# Fiddler §1: "over 3 tokens per second" with 56 of 256 experts in GPU memory, and §3.1: some 50 ms to copy one. A token
# misses 64 (1 - 56 / 256) = 50 experts, so that one takes at most 1 / 3 / 50 s = 6.7 ms on the CPU: 0.13 of a copy.
_FIDDLER_TOKEN_TIME = 1 / 3 / 50 / 0.050
# Importance §6.3: "in S3, CPU computation time is only one-third of load time"; 1: a slower CPU, or a faster link.
_IMPORTANCE_TOKEN_TIMES = (1 / 3, 1.0)


def _all_computed(computing: Sequence[float], loading: Sequence[float]) -> LoadOrCompute:
    """Computes every missing expert on the second processor (Fiddler §3.2, decode)."""
    return LoadOrCompute((), tuple(range(len(computing))))


def fiddler(subject: Subject) -> Iterator[Part]:
    """§3.2: the paper has no ablation; its speeds are over whole systems in 16 bit."""
    routes, facts, name = subject.routes, subject.facts, "Fiddler"
    sizes = subject.uniform_sizes(_BF16, "none")
    alone, placed = play(routes, Play(_in_passing(facts))), play(routes, Play(_placed(facts)))
    computing = SecondProcessor(_all_computed, _FIDDLER_TOKEN_TIME)
    computed = play(routes, Play(_placed(facts), second=computing))
    yield Part(name, "16 bit, read when needed", alone, sizes, "1", "1.00")
    time = f"{alone.time / placed.time:.2f}"
    yield Part(name, "+ the most popular experts placed, the others read", placed, sizes, "", time)
    factor = f"{alone.time / computed.time:.1f} assumed"
    yield Part(name, "+ the others computed where they are", None, None, "8.2 to 22.5 (systems)", factor)
    loaded, cpu, split = prompt_times(routes, _placed(facts).is_placed, _FIDDLER_TOKEN_TIME)
    prompt = "prefill of 64 tokens"
    yield Part(name, f"{prompt}: missing experts read", None, None, "", "1.00")
    yield Part(
        name, f"{prompt}: missing experts computed where they are", None, None, "", f"{loaded / cpu:.2f} assumed"
    )
    yield Part(name, f"{prompt}: split by arg min, §3.2", None, None, "", f"{loaded / split:.2f} assumed")


def prompt_times(routes: ModelRoutes, is_placed: NDArray[np.bool_], token_time: float) -> tuple[float, float, float]:
    """Returns the time of missing experts in prompts if all are loaded, all computed, or split: in loads."""
    passes, loaded, computed, split = routes.passes, 0.0, 0.0, 0.0
    ends = np.cumsum(passes.chunks, dtype=np.int64)
    for end, length in zip(ends.tolist(), passes.chunks.tolist(), strict=True):
        for layer_idx in range(passes.routes.shape[1]) if length > 1 else ():
            counts = np.bincount(passes.routes[end - length : end, layer_idx].ravel(), minlength=passes.num_experts)
            tokens = [int(n) for n, placed in zip(counts, is_placed[layer_idx], strict=True) if n and not placed]
            loaded += len(tokens)
            computed += sum(tokens) * token_time
            times = [number * token_time for number in tokens], [1.0] * len(tokens)
            split += fastest(*times).seconds(*times)
    return loaded, computed, split


_ALPHA = 0.3  # importance §6.2 uses 0.25 to 0.35


def importance(subject: Subject) -> Iterator[Part]:
    """Fig. 16's text, three models: time down by 8%, 20%, 14%, 34%, of the part before each.

    The figures of a second processor are for each of `_IMPORTANCE_TOKEN_TIMES`.
    """
    routes, facts, name = subject.routes, subject.facts, "importance, Fig. 16"
    sizes, k, times = subject.uniform_sizes(_BF16, "none"), facts.num_active, _IMPORTANCE_TOKEN_TIMES

    def kept(alpha: float | None = _ALPHA, second: SecondProcessor | None = None) -> Play:
        return Play(ExpertCache(facts, Importance(facts)), alpha=alpha, second=second)

    def predicting(run: Play) -> Counted:
        return play_partial(subject.model, run, subject.num_learned, subject.num_played)

    bases = [play(routes, Play(_placed(facts), second=SecondProcessor(_all_computed, time))).time for time in times]

    def assumed(*runs: Counted) -> str:
        return " / ".join(f"{base / run.time:.2f}" for base, run in zip(bases, runs, strict=True)) + " assumed"

    def line(text: str, run: Counted, published: str = "") -> Part:
        return Part(name, text, run, sizes, published, assumed(run, run))

    yield Part(
        name, "some experts placed for the whole run, the others read", play(routes, Play(_placed(facts))), sizes
    )
    yield Part(name, "baseline: the others computed on the CPU", None, None, "1", "1.00 / 1.00 assumed")
    yield line("+CE: kept by mean score", play(routes, kept(alpha=None)), "1.09")
    yield line(f"+ER: substituted, alpha {_ALPHA}", play(routes, kept()), "1.36")
    yield line("+Pre: predicted from the partial state, §5.2", predicting(kept()), "1.58")
    yield line("(for comparison: predicted by the next router)", play(routes, kept(), by_router(routes, k)))
    splits = {
        "+BA: missing experts split by Algorithm 2": balanced,
        "(for comparison: split by Fiddler's arg min)": fastest,
    }
    for text, split in splits.items():
        runs = [predicting(kept(second=SecondProcessor(split, time))) for time in times]
        yield Part(name, text, runs[0], sizes, "2.39" if split is balanced else "", assumed(*runs))


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
    second processor cannot be replayed; its factor follows from assumed rates: of Fiddler, by its own speed, 0.13 loads
    for an expert on the CPU; of importance one third of a load (its §6.3), and a whole one. Published factors are of
    whole systems' times on other models and machines.
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
    header = ("paper", "parts", "hits", "read a token", "late", "faster, at least", "at most", "second processor",
              "published")  # fmt: skip
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


# --- hit rates

_SHARES = "0.125,0.25,0.375,0.5,0.625,0.75"
_HOT = (0.25, 0.5, 0.75)


def hit_rates(routes: ModelRoutes, facts: CacheFacts) -> Iterator[tuple[str, float]]:
    """Yields each eviction policy's hit rate in decode with this cache, without prediction."""
    variants = {name: preset for name, preset in PRESETS.items() if name != "floe"}  # alone, as lru
    variants |= {f"hot set {share:.0%}, lru": Preset("lru", "lru", placed_share=share) for share in _HOT}
    variants |= {"lfu": Preset("lru", "lfu")}
    for name, preset in variants.items():
        yield name, replay(routes.passes, facts, facts.pages, preset.without_prediction()).decode.hit_rate
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


# --- experts that were predicted, in place of the router's

_TRUSTING: tuple[PolicyName, ...] = ("corm", "importance", "floe", "edgemoe")  # the policies that predict experts


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Tokens decoded one by one: `log_probs` float64 [T, V], and the counts of the run."""

    log_probs: Tensor
    counts: PhaseCounts


def decoded(pack: Pack, ids: Sequence[int], policy: PolicyName, num_experts: int, trusts: bool) -> Decoded:
    """Decodes tokens one by one in windows, with memory for some experts.

    Args:    trusts: whether predicted experts run in place of the router's.
    """
    budget = budget_with(pack, num_experts, SEQUENCE_LENGTH) + routing_bytes(pack.folder)
    options = EngineOptions("cpu", budget, policy=policy, approximations=Approximations(runs_predicted=trusts))
    logits = []
    with Engine(pack, options, SEQUENCE_LENGTH) as engine:
        for start in range(0, len(ids), SEQUENCE_LENGTH):
            engine.decoder.reset()
            logits += [engine.decoder.next_logits([token]).clone() for token in ids[start : start + SEQUENCE_LENGTH]]
        assert isinstance(engine.weights, OffloadedWeights), "a budget makes it stream"
        return Decoded(torch.stack(logits).double().log_softmax(dim=1), engine.weights.decode)


def trust_row(pack: Pack, ids: Sequence[int], policy: PolicyName, num_experts: int) -> tuple[str, ...]:
    """Returns the line of a policy: what its predictions cost and save if they are trusted."""
    plain, trusting = (decoded(pack, ids, policy, num_experts, trusts) for trusts in (False, True))
    known = [place for place in range(len(ids) - 1) if (place + 1) % SEQUENCE_LENGTH]  # the next token is in the window
    after = torch.tensor([ids[place + 1] for place in known])
    lost = (plain.log_probs - trusting.log_probs)[known, after]
    kl = (plain.log_probs.exp() * (plain.log_probs - trusting.log_probs)).sum(dim=1)
    error = float(1.96 * lost.std() / len(lost) ** 0.5)
    hits = [f"{run.counts.hits / run.counts.needed:.1%}" for run in (plain, trusting)]
    read = [f"{run.counts.asked_bytes / run.counts.tokens / 1e3:,.0f}" for run in (plain, trusting)]
    wrong = trusting.counts.mispredicted / trusting.counts.needed
    return policy, f"{wrong:.1%}", f"{lost.mean():.3f} ± {error:.3f}", f"{kl.mean():.3f}", *hits, *read


@main.command("trust")
@folder_option
@click.option("--tokens", default=1000, show_default=True, type=click.IntRange(2), help="Of a novel, one by one.")
@click.option("--experts", default=16, show_default=True, type=click.IntRange(1), help="That fit into the budget.")
@json_option
def trust_command(folder: Path, tokens: int, experts: int, as_json: bool) -> None:
    """Prints what `moe-run --trust-experts` loses and saves on the demo model's pack at 4 bit, by policy.

    The loss is of the same pack without the option, with 1.96 standard errors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Pack(make_profiled_demo(folder)) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[: 20 * tokens])[:tokens]
        rows = [trust_row(pack, ids, policy, experts) for policy in _TRUSTING]
    header = ("policy", "not the router's", "loss, nats", "KL", "hits", "(trusting)", "KB a token", "(trusting)")
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


_GPU_SHARES = (0.25, 0.5, 0.75)
# Of each preset's prediction the method that is played. That of importance depends on what is resident; without that it
# is the next router.
_PLAYED: dict[PredictionName, MethodName] = {"mlp": "mlp", "router": "router", "paths": "paths", "partial": "router"}


def gpu_row(
    pack: Pack, policy: PolicyName, learned: Sequence[PlayedToken], tokens: Sequence[PlayedToken], ahead_share: float
) -> tuple[str, ...]:
    """Returns the line of a policy, by memory: the share of neurons that a GPU had, and what the CPU read.

    Args:    ahead_share: of an expert's records, how many can be pulled ahead.
    """
    preset, layout = PRESETS[policy], pack.layout
    popularity, heat = popularity_of(learned, pack.spec.router.num_experts), usual_heat(layout, pack.thresholds)
    whole, cells = place_experts(layout, 1 << 40, "split").num_bytes, list[str]()
    expert, method = layout.experts[0][0], _PLAYED.get(preset.prediction) if ahead_share else None
    ahead = int(ahead_share * expert.num_rows)
    for share in _GPU_SHARES:
        dynamic_share = DYNAMIC_SHARE if preset.keeps else 0.0
        placement = place_experts(
            layout, int(share * whole), "split", popularity, heat, dynamic_share, is_pulled=ahead_share > 0
        )
        found = played(placement, preset, popularity, tokens, method=method, most_ahead=ahead)
        read = found.left * expert.records.row_bytes + found.whole_experts * expert.selector_bytes
        cells += [f"{found.resident / (found.resident + found.left):.1%}", f"{read / len(tokens) / 1000:.0f}"]
        if ahead_share:
            pulled = found.ahead * expert.records.row_bytes / len(tokens) / 1000
            cells += [f"{pulled:.0f}", f"{found.ahead_ran / found.ahead:.0%}" if found.ahead else "-"]
    return policy, *cells


@main.command("gpu")
@folder_option
@click.option("--learned", default=1024, show_default=True, type=click.IntRange(1), help="Tokens for popularity.")
@click.option("--tokens", default=1024, show_default=True, type=click.IntRange(2), help="That are played.")
@click.option("--sparsity", default=0.8, show_default=True, type=float, help="Share of neurons that do not run.")
@click.option(
    "--ahead",
    "ahead_share",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Of the records of each expert that the policy predicts, pulled before its layer.",
)
@json_option
def gpu_command(folder: Path, learned: int, tokens: int, sparsity: float, ahead_share: float, as_json: bool) -> None:
    """Prints, for each policy, which share of a token's neurons a GPU of some memory has, and what the CPU reads.

    The slots of `moe-run --device cuda --misses cpu` are played on the demo model's tokens, at 4 bit; nothing runs on a
    GPU. Memory is that of all experts times a share. With --ahead: what is pulled before its layer too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    methods = sorted(set(_PLAYED.values())) if ahead_share else []
    with ExitStack() as opened:
        pack = opened.enter_context(Pack(make_demo(folder, sparsity)))
        kernels = opened.enter_context(closing(Kernels()))
        routing = None
        if ahead_share:
            routing = Routing.open(opened.enter_context(Pack(make_profiled_demo(folder))))
        ids = Text(pack).encode(BOOK.read_text("utf-8")[: 20 * (learned + tokens)])[: learned + tokens]
        found = recorded_tokens(pack, NativeOperations(kernels), ids, SEQUENCE_LENGTH, routing, methods)
        policies = [name for name in SIMPLEST_FIRST if not ahead_share or PRESETS[name].keeps]
        rows = [gpu_row(pack, policy, found[:learned], found[learned:], ahead_share) for policy in policies]
    names = "resident, KB by the CPU" + ", KB ahead, needed" * bool(ahead_share)
    shares = [f"{share:.0%} of the memory: {names}" for share in _GPU_SHARES]
    header = ("policy", *(cell for share in shares for cell in share.split(", ")))
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


if __name__ == "__main__":
    main()
