"""The papers' parts and every cache policy, by replay on the demo model's routes.

    python tests/bench/policies.py parts
    python tests/bench/policies.py hits

The demo model runs over its text; popularity and paths are learned from the first tokens, the others are played:
windows of 512, each begun from an empty context with a prompt of 64, then token by token, as in a chat with itself.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from benchlib import BOOK, DEMO_MODEL, F, finish, json_option, table
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib.statistics import learn_paths
from moe_pack.convert import convert
from moe_pack.formats import Pack, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import Decoder, NativeOperations, PartialState, linear
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.model.router import expert_scores
from moe_pack.runtime.offload import (
    PRESETS,
    CacheFacts,
    ExpertCache,
    Passes,
    Preset,
    Recorder,
    Recording,
    recorded_expert_cache_for,
    replay,
)
from moe_pack.runtime.offload.cache import ComputeEvent, FetchEvent
from moe_pack.runtime.offload.eviction import LRU, EdgeMoE, Importance, LayerLRU, placed_by_popularity
from moe_pack.runtime.offload.replay import PathShares, ReplayCounts, optimum
from moe_pack.runtime.offload.split import substitute

WINDOW_TOKENS, PROMPT_TOKENS = 512, 64
_PATHS_BYTES = 1 << 20

Predict = Callable[[int, int], Sequence[int]]  # pass_idx, layer_idx: its experts, likeliest first


@dataclass(frozen=True, slots=True, eq=False)
class DemoRoutes:
    """Routes and what was known before; `scores`, `ahead` float32 [N, L, E]: each token's own scores of its experts,
    and what the next layer's router says of its hidden state a layer before (layer 0: zeros).   `packed_share`: an
    expert's bytes in the 4-bit pack, of those in 16 bit.
    """

    passes: Passes
    scores: NDArray[np.float32]
    ahead: NDArray[np.float32]
    paths: PathShares
    packed_share: float

    def facts(self, num_experts: int) -> CacheFacts:
        """Returns a cache for so many experts, a page each."""
        popularity = self.passes.popularity
        pages, num_active = np.ones(popularity.shape, np.int64), self.passes.routes.shape[2]
        return CacheFacts(pages, num_experts, num_active, popularity)


class _Watched(MappedPackWeights):
    """Weights that keep what each layer's routers chose, and would have chosen a layer before."""

    def __init__(self, pack: Pack, kernels: Kernels) -> None:
        super().__init__(pack, NativeOperations(kernels))
        self.seen: list[tuple[Tensor, Tensor, Tensor | None]] = []  # routes, logits, the next router's logits

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        layers = self.spec.moe_layers
        own, *following = (
            linear(x, self.matrix(f"layers.{layer}.router")) for layer in layers[layer_idx : layer_idx + 2]
        )
        self.seen.append((experts.clone(), own, following[0] if following else None))
        return super().run_experts(layer_idx, x, experts, router_weights, partial_state)


def demo_routes(num_learned: int, num_played: int) -> DemoRoutes:
    """Converts the demo model to 4 bit and runs it over its text."""
    with tempfile.TemporaryDirectory() as folder, closing(Kernels()) as kernels:
        checkpoint = Checkpoint(DEMO_MODEL)
        part = part_format(4, 64, 16)
        convert(
            checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, "nearest"), Path(folder) / "packed", 1
        )
        checkpoint.close()
        with Pack(Path(folder) / "packed") as pack:
            weights = _Watched(pack, kernels)
            spec, packed = pack.spec, pack.layout.experts[0][0].num_bytes
            share = packed / (2 * 3 * spec.hidden_size * spec.expert.intermediate_size)
            return _run(weights, _ids(num_learned + num_played), num_learned, share)


def _ids(num_tokens: int) -> list[int]:
    tokenizer: Tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(BOOK.read_text("utf-8"), add_special_tokens=False).ids[:num_tokens]
    assert len(ids) == num_tokens, "the text is long enough"
    return ids


def _run(weights: _Watched, ids: list[int], num_learned: int, packed_share: float) -> DemoRoutes:
    decoder, num_experts = Decoder(weights, WINDOW_TOKENS), weights.spec.router.num_experts
    for start in range(0, num_learned, WINDOW_TOKENS):
        decoder.reset()
        decoder.next_logits(ids[start : min(start + WINDOW_TOKENS, num_learned)])
    learned, _, _, _ = _taken(weights)
    counts = np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in learned.swapaxes(0, 1)])
    popularity = (counts / counts.sum(axis=1, keepdims=True)).astype("<f4")
    chunks = []
    for start in tqdm(range(num_learned, len(ids), WINDOW_TOKENS), desc="windows", disable=None):
        window = ids[start : start + WINDOW_TOKENS]
        decoder.reset()
        for piece in (window[:PROMPT_TOKENS], *([token] for token in window[PROMPT_TOKENS:])):
            decoder.next_logits(piece)
            chunks.append(len(piece))
    routes, scores, ahead, means = _taken(weights)
    passes = Passes(routes, np.array(chunks, "<u4"), means, popularity)
    paths = learn_paths(learned, num_experts, _PATHS_BYTES)
    return DemoRoutes(passes, scores, ahead, paths, packed_share)


def _taken(
    weights: _Watched,
) -> tuple[NDArray[np.uint16], NDArray[np.float32], NDArray[np.float32], NDArray[np.float16]]:
    """Routes [N, L, k], scores and the router's a layer before [N, L, E], and means of scores [C, L, E], so far."""
    router, L = weights.spec.router, len(weights.spec.moe_layers)
    seen, weights.seen = weights.seen, []
    passes = [seen[start : start + L] for start in range(0, len(seen), L)]
    routes = np.concatenate([torch.stack([r for r, _, _ in layers], dim=1).numpy() for layers in passes])
    scored = [torch.stack([expert_scores(own, router) for _, own, _ in layers], dim=1) for layers in passes]
    before = [
        torch.stack([torch.zeros_like(layers[0][1]), *(n for _, _, n in layers if n is not None)], dim=1)
        for layers in passes
    ]
    means = np.stack([scores.mean(dim=0).numpy() for scores in scored]).astype("<f2")
    return routes.astype("<u2"), torch.cat(scored).numpy(), torch.cat(before).numpy(), means


@dataclass(slots=True)
class Counted:
    """What passes of one token came to: experts needed, of them hits, replaced by others, read, and read late: once
    their router had spoken.
    """

    num_tokens: int = 0
    needed: int = 0
    hits: int = 0
    replaced: int = 0
    read: int = 0
    late: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of needed experts that were there, or on their way."""
        return self.hits / self.needed


def count_run(
    demo: DemoRoutes,
    residency: ExpertCache,
    predict: Predict | None = None,
    alpha: float | None = None,
    recorder: Recorder | None = None,
) -> Counted:
    """A run of bookkeeping alone: what is predicted is asked for once a layer's reads are, in passes of one token.

    Args:    alpha: to substitute by, as if what comes of it left the rest of the model as it was.
    """
    passes, counted, last = demo.passes, Counted(), demo.passes.routes.shape[1] - 1
    starts = np.cumsum(passes.chunks, dtype=np.int64) - passes.chunks
    for pass_idx, layers in enumerate(passes.needed()):
        token = slice(starts[pass_idx], starts[pass_idx] + passes.chunks[pass_idx])
        is_decoding, tally = passes.chunks[pass_idx] == 1, counted if passes.chunks[pass_idx] == 1 else Counted()
        tally.num_tokens += int(passes.chunks[pass_idx])
        for layer_idx, experts in enumerate(layers):
            chosen = passes.routes[token, layer_idx].astype(np.int64)
            if alpha is not None and is_decoding:
                made = substitute(demo.scores[token, layer_idx], chosen, residency.is_resident[layer_idx], alpha)
                tally.replaced += int((made != chosen).sum())
                chosen, experts = made, sorted(made[0].tolist())
            if recorder is not None:
                recorder.routed(layer_idx, chosen)
            told = None if passes.scores is None else passes.scores[pass_idx, layer_idx]
            may_ask = predict is not None and is_decoding and layer_idx < last
            for event in residency.schedule(layer_idx, experts, told):
                if may_ask and isinstance(event, ComputeEvent) and not residency.num_waiting:
                    may_ask = False
                    assert predict is not None, "asked only where there is one"
                    brought = residency.prefetch(layer_idx + 1, predict(pass_idx, layer_idx + 1), during=layer_idx)
                    tally.read += sum(isinstance(event, FetchEvent) for event in brought)
                tally.needed += isinstance(event, ComputeEvent)
                tally.hits += isinstance(event, ComputeEvent) and event.is_hit
                tally.read += isinstance(event, FetchEvent)
                tally.late += isinstance(event, FetchEvent)
    return counted


def run_recorded(demo: DemoRoutes, facts: CacheFacts, preset: Preset, predict: Predict | None) -> Recording:
    """The same, written down."""
    recorder = Recorder(facts, "", preset.name, 0, 0, keeps_scores=demo.passes.scores is not None)
    count_run(demo, recorded_expert_cache_for(preset, facts, recorder), predict, recorder=recorder)
    return recorder.recording()


def by_router(demo: DemoRoutes, num_ahead: int) -> Predict:
    """The next layer's router on this layer's hidden state (CORM §4.2)."""
    starts = np.cumsum(demo.passes.chunks, dtype=np.int64) - demo.passes.chunks

    def predict(pass_idx: int, layer_idx: int) -> Sequence[int]:
        best: list[int] = np.argsort(-demo.ahead[starts[pass_idx], layer_idx], kind="stable")[:num_ahead].tolist()
        return best

    return predict


def by_paths(demo: DemoRoutes, num_ahead: int) -> Predict:
    """The path statistics of the two layers before (EdgeMoE §III-C1)."""
    starts = np.cumsum(demo.passes.chunks, dtype=np.int64) - demo.passes.chunks

    def predict(pass_idx: int, layer_idx: int) -> Sequence[int]:
        token = starts[pass_idx]
        shares, _ = demo.paths.predict(
            layer_idx, demo.passes.routes[token : token + 1, max(layer_idx - 2, 0) : layer_idx]
        )
        best: list[int] = np.argsort(-shares[0], kind="stable")[:num_ahead].tolist()
        return best

    return predict


_ALPHA = 0.3  # importance §6.2 uses 0.25 to 0.35


@dataclass(frozen=True, slots=True)
class Part:
    """A line: a paper's parts so far. `bytes_share`: of a whole 16-bit expert, what bringing one reads."""

    paper: str
    parts: str
    run: Counted
    bytes_share: float
    published: str

    @property
    def all_bytes(self) -> float:
        """What a token reads, in whole 16-bit experts."""
        return self.run.read * self.bytes_share / self.run.num_tokens

    @property
    def late_bytes(self) -> float:
        """The same of what was not predicted."""
        return self.run.late * self.bytes_share / self.run.num_tokens


def _in_passing(facts: CacheFacts) -> ExpertCache:
    """Returns a cache that keeps nothing once it was used: two layers fit, the one that runs and the predicted one."""
    small = CacheFacts(facts.pages, 2 * facts.num_active, facts.num_active, facts.popularity)
    return ExpertCache(small, LRU(small), keeps=False)


def corm(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 8, Mixtral 8x7B and DeepSeekMoE 16B: B, +S, +P, +C. S: gate whole, of up and down the running rows."""
    rows = demo.packed_share * (1 + 2 * running) / 3
    ahead, name = by_router(demo, PRESETS["corm"].num_predicted(facts.num_active)), "CORM, Fig. 8"
    alone, predicted = count_run(demo, _in_passing(facts)), count_run(demo, _in_passing(facts), ahead)
    yield Part(name, "B: 4 bit, read when needed", alone, demo.packed_share, "1 / 1")
    yield Part(name, "+S: running rows", alone, rows, "1.25 / 1.40")
    yield Part(name, "+P: predicted by the next router", predicted, rows, "1.59 / 1.84")
    cached = count_run(demo, ExpertCache(facts, LayerLRU(facts)), ahead)
    yield Part(name, "+C: experts kept, by last use in each layer", cached, rows, "2.07 / 2.14")


def edgemoe(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 18 and its text, Switch base-8 on a Jetson TX2: 0.789, 0.392, 0.305, 0.245 s a token."""
    ahead, name = by_paths(demo, PRESETS["edgemoe"].num_predicted(facts.num_active)), "EdgeMoE, Fig. 18"
    alone, predicted = count_run(demo, _in_passing(facts)), count_run(demo, _in_passing(facts), ahead)
    yield Part(name, "16 bit, read when needed", alone, 1.0, "1")
    yield Part(name, "+Q: 4 bit", alone, demo.packed_share, "2.01")
    yield Part(name, "+P: predicted from paths", predicted, demo.packed_share, "2.59")
    cached = count_run(demo, ExpertCache(facts, EdgeMoE(facts)), ahead)
    yield Part(name, "+C: experts kept, by frequency over distance", cached, demo.packed_share, "3.22")


def importance(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 16's text, three models: time down by 8%, 20%, 14%, of the part before each. +BA needs two processors."""
    ahead, name = by_router(demo, PRESETS["importance"].num_predicted(facts.num_active)), "importance, Fig. 16"

    def kept() -> ExpertCache:
        return ExpertCache(facts, Importance(facts))

    fixed = ExpertCache(facts, LRU(facts), placed_by_popularity(facts, facts.num_pages), keeps=False)
    yield Part(name, "some experts placed", count_run(demo, fixed), demo.packed_share, "1")
    yield Part(name, "+CE: kept by mean score", count_run(demo, kept()), demo.packed_share, "1.09")
    replaced = count_run(demo, kept(), alpha=_ALPHA)
    yield Part(name, f"+ER: substituted, alpha {_ALPHA}", replaced, demo.packed_share, "1.36")
    predicted = count_run(demo, kept(), ahead, alpha=_ALPHA)
    yield Part(name, "+Pre: predicted", predicted, demo.packed_share, "1.58")


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def route_options(body: F) -> F:
    """Adds the options of the demo model's run."""
    body = click.option("--tokens", default=2048, show_default=True, help="Tokens that are played.")(json_option(body))
    return click.option("--learned", default=4096, show_default=True, help="Tokens that are learned from.")(body)


@main.command("parts")
@route_options
@click.option("--experts", default=12, show_default=True, help="That fit into fast memory.")
@click.option("--running", default=0.45, show_default=True, help="Share of neurons that run: CORM, Fig. 2, theta 0.25.")
def parts_command(learned: int, tokens: int, experts: int, running: float, as_json: bool) -> None:
    """Turns each paper's parts on one after the other, and prints the published figures with them.

    Time is bytes over the link and nothing else. "Faster" is the first line's bytes over the line's: at least, where
    the bytes of predicted experts count; at most, where prefetching hides behind computation. Published figures are
    whole systems' times on other models and machines.
    """
    demo, rows = demo_routes(learned, tokens), []
    for paper in (corm, edgemoe, importance):
        parts = list(paper(demo, demo.facts(experts), running))
        rows += [
            (
                part.paper, part.parts, f"{part.run.hit_rate:.1%}", f"{part.run.read / part.run.num_tokens:.2f}",
                f"{part.run.late / part.run.num_tokens:.2f}", f"{parts[0].all_bytes / part.all_bytes:.2f}",
                f"{parts[0].late_bytes / part.late_bytes:.2f}", part.published,
            )
            for part in parts
        ]  # fmt: skip
    header = ("paper", "parts", "hits", "experts read a token", "late", "faster, at least", "at most", "published")
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


# --- hit rates

_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
_HOT = (0.25, 0.5, 0.75)


def rows_of(demo: DemoRoutes, facts: CacheFacts) -> Iterator[tuple[str, ReplayCounts]]:
    """Yields each policy with this cache, in decoding."""
    extents = facts.pages
    variants = {name: preset for name, preset in PRESETS.items() if name != "floe"}  # alone, as lru
    variants |= {f"hot set {share:.0%}, lru": Preset("lru", "lru", placed_share=share) for share in _HOT}
    variants |= {"lfu": Preset("lru", "lfu")}
    for name, preset in variants.items():
        silent = Preset(preset.name, preset.eviction, preset.placed_share, preset.keeps)
        yield name, replay(demo.passes, facts, extents, silent).decode
    yield "optimum", optimum(demo.passes, facts, extents).decode
    for name in ("floe", "corm", "edgemoe", "importance"):
        preset = PRESETS[name]
        predict = (by_paths if preset.prediction == "paths" else by_router)(
            demo, preset.num_predicted(facts.num_active)
        )
        record = run_recorded(demo, facts, preset, predict)
        yield f"{name}, with prediction", replay(demo.passes, facts, extents, preset, record).decode


@main.command("hits")
@route_options
def hits_command(learned: int, tokens: int, as_json: bool) -> None:
    """Prints the hit rate in decoding of every policy by the number of experts that fit, with Belady's optimum.

    Each policy alone, then with prediction: the next layer's router stands for FloE's network and for importance's
    partial hidden state, which a replay has not. A hot set is a share of the pages for the most popular experts,
    permanently; the rest goes by last use.
    """
    demo = demo_routes(learned, tokens)
    sizes = [round(share * demo.passes.popularity.size) for share in _SHARES]
    tallies = {size: dict(rows_of(demo, demo.facts(size))) for size in sizes}
    rows = [(name, *(f"{tallies[size][name].hit_rate:.1%}" for size in sizes)) for name in tallies[sizes[0]]]
    header = ("experts that fit", *map(str, sizes))
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


if __name__ == "__main__":
    main()
