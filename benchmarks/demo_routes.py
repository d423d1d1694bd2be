"""Routes of the demo model on its text, and runs that are only bookkeeping: what the replay benchmarks share.

The first tokens are learned from (popularity, paths), the others played: windows of WINDOW_TOKENS, each begun from an
empty context with a prompt of PROMPT_TOKENS, then token by token, as in a chat with itself.
"""

import tempfile
from collections.abc import Callable, Sequence
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
from moe_pack.runtime import CacheFacts, Decoder, Kernels, PackWeights, Passes, PathShares, kernels_for, linear
from moe_pack.runtime.policies import Preset
from moe_pack.runtime.record import Record
from moe_pack.runtime.recording import Recorder, recorded_residency_for
from moe_pack.runtime.residency import Compute
from moe_pack.runtime.router import expert_scores

_TESTS = Path(__file__).parents[1] / "tests"
DEMO_MODEL, BOOK = _TESTS / "models" / "tiny-mixtral", _TESTS / "data" / "books-valid.txt"
WINDOW_TOKENS, PROMPT_TOKENS = 512, 64
_PATHS_BYTES = 1 << 20

Foretell = Callable[[int, int], Sequence[int]]  # pass_idx, layer_idx: its experts, likeliest first


@dataclass(frozen=True, slots=True, eq=False)
class DemoRoutes:
    """Routes and what was known before; `scores`, `ahead` float32 [N, L, E]: each token's own scores of its experts,
    and what the next layer's router says of its hidden state a layer before (layer 0: zeros).
    """

    passes: Passes
    scores: NDArray[np.float32]
    ahead: NDArray[np.float32]
    paths: PathShares

    def facts(self, num_experts: int) -> CacheFacts:
        """Room for so many experts, a page each."""
        popularity = self.passes.popularity
        pages, num_active = np.ones(popularity.shape, np.int64), self.passes.routes.shape[2]
        return CacheFacts(pages, num_experts, num_active, popularity)


class _Watched(PackWeights):
    """Weights that keep what each layer's routers chose, and would have chosen a layer before."""

    def __init__(self, pack: Pack, kernels: Kernels | None) -> None:
        super().__init__(pack, torch.device("cpu"), kernels)
        self.seen: list[tuple[Tensor, Tensor, Tensor | None]] = []  # routes, logits, the next router's logits

    def run_experts(self, layer_idx: int, x: Tensor, experts: Tensor, router_weights: Tensor) -> Tensor | None:
        layers = self.spec.moe_layers
        own, *following = (
            linear(x, self.matrix(f"layers.{layer}.router")) for layer in layers[layer_idx : layer_idx + 2]
        )
        self.seen.append((experts.clone(), own, following[0] if following else None))
        return super().run_experts(layer_idx, x, experts, router_weights)


def demo_routes(num_learned: int, num_played: int) -> DemoRoutes:
    """Converts the demo model to 4 bit and runs it over its text."""
    with tempfile.TemporaryDirectory() as folder, kernels_for(torch.device("cpu")) as kernels:
        checkpoint = Checkpoint(DEMO_MODEL)
        part = part_format(4, 64, 16)
        convert(
            checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, "nearest"), Path(folder) / "packed", 1
        )
        checkpoint.close()
        with Pack(Path(folder) / "packed") as pack:
            weights = _Watched(pack, kernels)
            return _run(weights, _ids(num_learned + num_played), num_learned)


def _ids(num_tokens: int) -> list[int]:
    tokenizer: Tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(BOOK.read_text("utf-8"), add_special_tokens=False).ids[:num_tokens]
    assert len(ids) == num_tokens, "the text is long enough"
    return ids


def _run(weights: _Watched, ids: list[int], num_learned: int) -> DemoRoutes:
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
    return DemoRoutes(passes, scores, ahead, learn_paths(learned, num_experts, _PATHS_BYTES))


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


def run_recorded(passes: Passes, facts: CacheFacts, preset: Preset, foretell: Foretell | None) -> Record:
    """A run of bookkeeping alone: what is foretold is asked for once a layer's reads are, in passes of one token."""
    recorder = Recorder(facts, "", preset.name, 0, 0, keeps_scores=passes.scores is not None)
    residency, last = recorded_residency_for(preset, facts, recorder), facts.pages.shape[0] - 1
    starts = np.cumsum(passes.chunks, dtype=np.int64) - passes.chunks
    for pass_idx, layers in enumerate(passes.needed()):
        num_tokens = int(passes.chunks[pass_idx])
        for layer_idx, experts in enumerate(layers):
            recorder.routed(layer_idx, passes.routes[starts[pass_idx] : starts[pass_idx] + num_tokens, layer_idx])
            told = None if passes.scores is None else passes.scores[pass_idx, layer_idx]
            is_open = foretell is not None and num_tokens == 1 and layer_idx < last
            for event in residency.walk(layer_idx, experts, told):
                if is_open and isinstance(event, Compute) and not residency.num_waiting:
                    is_open = False
                    assert foretell is not None, "open only with one"
                    list(residency.ahead(layer_idx + 1, foretell(pass_idx, layer_idx + 1), during=layer_idx))
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
