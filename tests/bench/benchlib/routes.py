"""The routes of a model on a text: a pack of it runs, and every layer keeps what it saw.

Popularity and paths are learned from the first tokens; the others are played in windows of 512, each begun from an
empty context with a prompt of 64, then token by token, as in a chat.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from benchlib import BOOK
from moe_pack.calib.statistics import learn_paths
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import CheckpointWeights, Decoder, NativeOperations, PartialState, activations, linear
from moe_pack.runtime.model.compute.router import expert_scores
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import CacheFacts, Passes, PathStatistics

WINDOW_TOKENS, PROMPT_TOKENS = 512, 64
_PATHS_BYTES = 1 << 20

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ModelRoutes:
    """Routes that were played, and what was known before.

    `learned` u16 [M, L, k]: the routes of the tokens that statistics are learned from.   `scores`, `ahead` float32
    [N, L, E]: each token's own scores of its experts, and the scores that the next layer's router gives the hidden
    state of the layer before (layer 0: zeros).   `inputs` float32 [N, L, d]: of the MoE layers, after the norm.
    """

    passes: Passes
    learned: NDArray[np.uint16]
    scores: NDArray[np.float32]
    ahead: NDArray[np.float32]
    inputs: NDArray[np.float32]
    paths: PathStatistics

    def facts(self, num_experts: int) -> CacheFacts:
        """Returns a cache for so many experts, a page each."""
        popularity = self.passes.popularity
        pages, num_active = np.ones(popularity.shape, np.int64), self.passes.routes.shape[2]
        return CacheFacts(pages, num_experts, num_active, popularity)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What one layer saw of one forward pass; `ahead`: the next router's logits, None for the last layer."""

    routes: Tensor
    logits: Tensor
    ahead: Tensor | None
    x: Tensor


class _Watched(MappedPackWeights):
    """Weights that keep what each layer's routers chose, and would have chosen a layer before."""

    def __init__(self, pack: Pack, kernels: Kernels) -> None:
        super().__init__(pack, NativeOperations(kernels))
        self.seen: list[_Seen] = []

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
        self.seen.append(_Seen(experts.clone(), own, following[0] if following else None, x.clone()))
        return super().run_experts(layer_idx, x, experts, router_weights, partial_state)

    def taken(self) -> list[list[_Seen]]:
        """Returns what was seen, by forward pass and layer, and forgets it."""
        seen, self.seen = self.seen, []
        L = len(self.spec.moe_layers)
        return [seen[start : start + L] for start in range(0, len(seen), L)]


class RoutedModel:
    """A checkpoint with a pack of it; `ids`: a text that neither the demo model nor the sample has seen."""

    def __init__(self, checkpoint: Checkpoint, pack: Pack, kernels: Kernels, ids: list[int]) -> None:
        self.checkpoint, self.pack, self.kernels, self.ids = checkpoint, pack, kernels, ids

    def routes(self, num_learned: int, num_played: int, is_chat: bool = True) -> ModelRoutes:
        """Runs the pack over its text.

        Args:    is_chat: whether tokens come one by one after a prompt; otherwise whole windows run at once.
        """
        num_tokens = num_learned + num_played
        assert len(self.ids) >= num_tokens, f"the text has {len(self.ids)} tokens, fewer than {num_tokens}"
        weights = _Watched(self.pack, self.kernels)
        decoder, num_experts = Decoder(weights, WINDOW_TOKENS), weights.spec.router.num_experts
        for window in _windows(self.ids[:num_learned]):
            decoder.reset()
            decoder.logits(window)  # of every token, so that the last layer routes all of them
        learned = _routes_of(weights.taken())
        popularity = popularity_of(learned, num_experts)
        chunks = run_chat(decoder, self.ids[num_learned:num_tokens], is_chat)
        passes = weights.taken()
        scored = [[expert_scores(seen.logits, weights.spec.router) for seen in layers] for layers in passes]
        means = np.stack([torch.stack([one.mean(dim=0) for one in layers]).numpy() for layers in scored])
        nothing = [torch.zeros_like(layers[0].logits) for layers in passes]
        aheads = [[none, *_not_none(layers)] for none, layers in zip(nothing, passes, strict=True)]
        return ModelRoutes(
            Passes(_routes_of(passes), np.array(chunks, "<u4"), means.astype("<f2"), popularity),
            learned,
            _joined(scored),
            _joined(aheads),
            _joined([[seen.x for seen in layers] for layers in passes]),
            learn_paths(learned, num_experts, _PATHS_BYTES),
        )


def run_chat(decoder: Decoder, ids: list[int], is_chat: bool = True) -> list[int]:
    """Runs a text in windows, each a prompt and single tokens; returns the tokens of each forward pass."""
    chunks = []
    for window in tqdm(list(_windows(ids)), desc="windows", disable=None):
        decoder.reset()
        prompt = window[:PROMPT_TOKENS] if is_chat else window
        for piece in (prompt, *([token] for token in window[len(prompt) :])):
            decoder.logits(piece)
            chunks.append(len(piece))
    return chunks


def _windows(ids: list[int]) -> Iterator[list[int]]:
    return (ids[start : start + WINDOW_TOKENS] for start in range(0, len(ids), WINDOW_TOKENS))


def _not_none(layers: list[_Seen]) -> list[Tensor]:
    return [seen.ahead for seen in layers if seen.ahead is not None]


def _joined(passes: list[list[Tensor]]) -> NDArray[np.float32]:
    """Returns [N, L, ...] of tensors [T, ...] of each pass and layer."""
    joined: NDArray[np.float32] = torch.cat([torch.stack(layers, dim=1) for layers in passes]).float().numpy()
    return joined


def _routes_of(passes: list[list[_Seen]]) -> NDArray[np.uint16]:
    joined = [torch.stack([seen.routes for seen in layers], dim=1).numpy() for layers in passes]
    return np.concatenate(joined).astype("<u2")


def popularity_of(routes: NDArray[np.uint16], num_experts: int) -> NDArray[np.float32]:
    """Returns each expert's share of its layer's choices, float32 [L, E], for routes [N, L, k]."""
    counts = np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in routes.swapaxes(0, 1)])
    shares: NDArray[np.float32] = (counts / counts.sum(axis=1, keepdims=True)).astype("<f4")
    return shares


@contextmanager
def routed_model(model: Path, text: Path = BOOK, bits: int = 4) -> Iterator[RoutedModel]:
    """Converts a checkpoint to so many bits, 4 or 16, into a temporary folder, and opens both."""
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder, closing(Kernels()) as kernels:
        checkpoint = Checkpoint(model)
        part = part_format(4, 64, 16) if bits == 4 else BF16
        plan = uniform_plan(checkpoint.spec, "up", part, part, None, "nearest")
        convert(checkpoint, plan, Path(folder) / "packed", 1)
        with Pack(Path(folder) / "packed") as pack, closing(checkpoint):
            yield RoutedModel(checkpoint, pack, kernels, ids_of(model, text))


def ids_of(model: Path, text: Path) -> list[int]:
    """Returns the tokens of a text."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False).ids
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class NeuronRows:
    """Which neurons of each expert run for each token, and which the layer before predicts: bool [N, L, E, f] both.

    `running` is of every expert, chosen or not.   `ahead`: by the selector of the layer on the input of the layer
    before (FloE §3.3.2, CORM §4.2); none in layer 0.   `below`: if this share of the neurons or more runs, the whole
    expert is read.
    """

    running: Bools
    ahead: Bools
    below: float

    def with_no_prediction(self) -> "NeuronRows":
        """Returns the same rows, of which none are predicted."""
        return NeuronRows(self.running, np.zeros_like(self.ahead), self.below)


def neuron_rows(
    checkpoint: Checkpoint, routes: ModelRoutes, kind: str, share: float, is_by_expert: bool, below: float
) -> NeuronRows:
    """Returns the rows of which `share` runs, by the activation `kind` (`up` or `gate`) of the original's weights.

    Args:    is_by_expert: whether each expert has a threshold of its own (FloE) or all have one (CORM). Thresholds are
             quantiles over the tokens that chose the expert.
    """
    N, L, E = routes.scores.shape
    weights, inputs = CheckpointWeights(checkpoint), torch.from_numpy(routes.inputs)
    shape = (N, L, E, checkpoint.spec.expert.intermediate_size)
    own, before = np.empty(shape, np.float32), np.zeros(shape, np.float32)
    for l, e in tqdm(list(np.ndindex(L, E)), desc="activations", disable=None):
        own[:, l, e] = magnitudes(weights, l, e, inputs[:, l], kind)
        if l:
            before[:, l, e] = magnitudes(weights, l, e, inputs[:, l - 1], kind)
    chosen = np.zeros((N, L, E), bool)
    np.put_along_axis(chosen, routes.passes.routes.astype(np.int64), True, axis=2)
    thresholds = np.full((L, E), np.quantile(own[chosen], 1 - share))
    if is_by_expert:
        for l, e in np.ndindex(L, E):
            if chosen[:, l, e].any():
                thresholds[l, e] = np.quantile(own[chosen[:, l, e], l, e], 1 - share)
    limit = thresholds[None, :, :, None]
    return NeuronRows(own >= limit, (before >= limit) & (np.arange(L) > 0)[None, :, None, None], below)


def magnitudes(weights: CheckpointWeights, l: int, e: int, x: Tensor, kind: str) -> NDArray[np.float32]:
    """Returns the absolute activations of an expert's neurons for x float32 [T, d]: [T, f]."""
    function = weights.spec.expert_function(l)
    blocks = [getattr(activations(x, block, function), kind).abs() for block in weights.expert(l, e).blocks()]
    found: NDArray[np.float32] = torch.cat(blocks, dim=1).numpy()
    return found
