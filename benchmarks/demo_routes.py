"""Routes of the demo model on its text, and runs that are only bookkeeping: what the replay benchmarks share.

The first tokens are learned from (popularity, paths), the others played: windows of WINDOW_TOKENS, each begun from an
empty context with a prompt of PROMPT_TOKENS, then token by token, as in a chat with itself.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib.paths import learn_paths
from moe_pack.convert import convert
from moe_pack.formats import Checkpoint, Pack, part_format, uniform_plan
from moe_pack.runtime import (
    CacheFacts,
    Decoder,
    Kernels,
    MappedPackWeights,
    NativeOperations,
    Passes,
    PathShares,
    linear,
)
from moe_pack.runtime.experts import PartialState
from moe_pack.runtime.policies import Preset, substitute
from moe_pack.runtime.record import Record
from moe_pack.runtime.recording import Recorder, recorded_residency_for
from moe_pack.runtime.residency import Compute, Fetch, Residency
from moe_pack.runtime.router import expert_scores

_TESTS = Path(__file__).parents[1] / "tests"
DEMO_MODEL, BOOK = _TESTS / "models" / "tiny-mixtral", _TESTS / "data" / "books-valid.txt"
WINDOW_TOKENS, PROMPT_TOKENS = 512, 64
_PATHS_BYTES = 1 << 20

Foretell = Callable[[int, int], Sequence[int]]  # pass_idx, layer_idx: its experts, likeliest first


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
        """Room for so many experts, a page each."""
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
    held = [torch.stack([expert_scores(own, router) for _, own, _ in layers], dim=1) for layers in passes]
    before = [
        torch.stack([torch.zeros_like(layers[0][1]), *(n for _, _, n in layers if n is not None)], dim=1)
        for layers in passes
    ]
    means = np.stack([scores.mean(dim=0).numpy() for scores in held]).astype("<f2")
    return routes.astype("<u2"), torch.cat(held).numpy(), torch.cat(before).numpy(), means


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
    residency: Residency,
    foretell: Foretell | None = None,
    alpha: float | None = None,
    recorder: Recorder | None = None,
) -> Counted:
    """A run of bookkeeping alone: what is foretold is asked for once a layer's reads are, in passes of one token.

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
            may_ask = foretell is not None and is_decoding and layer_idx < last
            for event in residency.walk(layer_idx, experts, told):
                if may_ask and isinstance(event, Compute) and not residency.num_waiting:
                    may_ask = False
                    assert foretell is not None, "asked only where there is one"
                    brought = residency.ahead(layer_idx + 1, foretell(pass_idx, layer_idx + 1), during=layer_idx)
                    tally.read += sum(isinstance(event, Fetch) for event in brought)
                tally.needed += isinstance(event, Compute)
                tally.hits += isinstance(event, Compute) and event.is_hit
                tally.read += isinstance(event, Fetch)
                tally.late += isinstance(event, Fetch)
    return counted


def run_recorded(demo: DemoRoutes, facts: CacheFacts, preset: Preset, foretell: Foretell | None) -> Record:
    """The same, written down."""
    recorder = Recorder(facts, "", preset.name, 0, 0, keeps_scores=demo.passes.scores is not None)
    count_run(demo, recorded_residency_for(preset, facts, recorder), foretell, recorder=recorder)
    return recorder.record()


def by_router(demo: DemoRoutes, num_ahead: int) -> Foretell:
    """The next layer's router on this layer's hidden state (CORM §4.2)."""
    starts = np.cumsum(demo.passes.chunks, dtype=np.int64) - demo.passes.chunks

    def foretell(pass_idx: int, layer_idx: int) -> Sequence[int]:
        best: list[int] = np.argsort(-demo.ahead[starts[pass_idx], layer_idx], kind="stable")[:num_ahead].tolist()
        return best

    return foretell


def by_paths(demo: DemoRoutes, num_ahead: int) -> Foretell:
    """The path statistics of the two layers before (EdgeMoE §III-C1)."""
    starts = np.cumsum(demo.passes.chunks, dtype=np.int64) - demo.passes.chunks

    def foretell(pass_idx: int, layer_idx: int) -> Sequence[int]:
        token = starts[pass_idx]
        shares, _ = demo.paths.predict(
            layer_idx, demo.passes.routes[token : token + 1, max(layer_idx - 2, 0) : layer_idx]
        )
        best: list[int] = np.argsort(-shares[0], kind="stable")[:num_ahead].tolist()
        return best

    return foretell
