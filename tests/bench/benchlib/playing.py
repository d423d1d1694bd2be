"""Runs of bookkeeping alone: a cache gets a model's routes, and every byte that it would read is counted.

Nothing is computed, so no time passes: what is predicted arrives. Which rows of an expert are read follows from the
neurons that run (`NeuronRows`). `play_partial` runs the model too, because importance's prediction (§5.2) depends on
which experts are resident.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchlib.routes import ModelRoutes, NeuronRows, RoutedModel, run_chat
from moe_pack.formats import Pack
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import Decoder, NativeOperations, PartialState, mlp_input, router_scores
from moe_pack.runtime.model.compute.router import expert_scores
from moe_pack.runtime.model.compute.router import router_weights as weights_of
from moe_pack.runtime.model.layers import router_logits
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import ExpertCache, PathStatistics, Predictor, Recorder
from moe_pack.runtime.offload.cache import ComputeEvent, ExpertKey, FetchEvent
from moe_pack.runtime.offload.prefetch import ranked
from moe_pack.runtime.offload.split import substitute

Floats = NDArray[np.float64]
Predict = Callable[[int, int], Sequence[int]]  # token, layer_idx: its experts, likeliest first


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSizes:
    """The sizes of every expert's selector and records, [L, E] both, in units of an expert in 16 bit."""

    selector: Floats
    records: Floats


@dataclass(slots=True, eq=False)
class Counted:
    """The counts of passes of one token."""

    selectors: Floats  # [2, L, E]: how often each expert's selector was read; first everything, then what was late
    records: Floats  # [2, L, E]: which share of its records was read, in the same way
    num_tokens: int = 0
    needed: int = 0  # experts
    hits: int = 0  # of these, the ones that were resident or on their way
    replaced: int = 0  # choices that others took
    read: int = 0  # experts that were fetched
    late: int = 0  # of these, the ones that were fetched after their router had chosen
    predicted: int = 0  # experts
    predicted_chosen: int = 0  # of these, the ones that the router chose

    @property
    def hit_rate(self) -> float:
        """The share of needed experts that were resident, or on their way."""
        return self.hits / self.needed

    def read_sizes(self, sizes: ExpertSizes) -> tuple[float, float]:
        """Returns the bytes that a token reads, in experts of 16 bit: all, and the late ones."""
        whole = self.selectors * sizes.selector + self.records * sizes.records
        total, late = whole.sum(axis=(1, 2)) / self.num_tokens
        return float(total), float(late)


def no_counts(shape: tuple[int, ...]) -> Counted:
    """Returns counts of zero for experts [L, E]."""
    return Counted(np.zeros((2, *shape)), np.zeros((2, *shape)))


@dataclass(slots=True, eq=False)
class Play:
    """A run of a cache. `rows`: which neurons run; None: experts are read whole.   `waits_for_hits`: whether a
    prediction needs the outputs of the resident experts.   `alpha`: of substitution.
    """

    cache: ExpertCache
    rows: NeuronRows | None = None
    alpha: float | None = None
    recorder: Recorder | None = None
    waits_for_hits: bool = False
    counted: Counted = field(init=False)
    _resident_rows: dict[ExpertKey, NDArray[np.bool_]] = field(init=False, default_factory=dict)
    _asked: dict[int, set[int]] = field(init=False, default_factory=dict)  # by layer, the experts predicted for it

    def __post_init__(self) -> None:
        self.counted = no_counts(self.cache.facts.pages.shape)

    def layer(
        self,
        token: int | None,
        layer_idx: int,
        experts: Sequence[int],
        mean_scores: NDArray[np.floating] | None,
        predict: Callable[[], Sequence[int]] | None,
    ) -> None:
        """Runs a layer of a forward pass.

        Args:    token: its number; None for a pass of several, which is not counted.   experts: ascending.
                 predict: of the next layer.
        """
        counted = no_counts(self.cache.facts.pages.shape) if token is None else self.counted
        if token is not None:
            asked = self._asked.pop(layer_idx, set())
            counted.predicted += len(asked)
            counted.predicted_chosen += len(asked.intersection(experts))
        for event in self.cache.schedule(layer_idx, experts, mean_scores):
            if isinstance(event, ComputeEvent):
                if predict and not (self.cache.num_waiting or (event.is_hit and self.waits_for_hits)):
                    self._prefetch(token, layer_idx, predict(), counted)
                    predict = None
                counted.needed += 1
                counted.hits += event.is_hit
                if event.is_hit and token is not None:
                    self._bring_rows(event.key, self._running(token, event.key), True, counted)
            elif isinstance(event, FetchEvent):
                counted.late += 1
                self._bring(event.key, self._running(token, event.key), True, counted)
        if predict:
            self._prefetch(token, layer_idx, predict(), counted)

    def _prefetch(self, token: int | None, layer_idx: int, predicted: Sequence[int], counted: Counted) -> None:
        assert token is not None, "only single tokens are predicted for"
        self._asked[layer_idx + 1] = set(predicted)
        resident = [expert for expert in predicted if self.cache.is_resident[layer_idx + 1, expert]]
        for event in self.cache.prefetch(layer_idx + 1, predicted, during=layer_idx):
            if isinstance(event, FetchEvent):
                self._bring(event.key, self._ahead(token, event.key), False, counted)
        for expert in resident:
            key = ExpertKey(layer_idx + 1, expert)
            if self.cache.is_resident[key]:
                self._bring_rows(key, self._ahead(token, key), False, counted)

    def _bring(self, key: ExpertKey, neurons: NDArray[np.bool_] | None, is_late: bool, counted: Counted) -> None:
        """Counts an expert that is fetched: its selector, and the records of these neurons."""
        counted.read += 1
        counted.selectors[: 1 + is_late, *key] += 1
        if neurons is None:
            counted.records[: 1 + is_late, *key] += 1
        else:
            self._resident_rows[key] = np.zeros_like(neurons)
            self._bring_rows(key, neurons, is_late, counted)

    def _bring_rows(self, key: ExpertKey, neurons: NDArray[np.bool_] | None, is_late: bool, counted: Counted) -> None:
        """Counts the records of neurons that are not resident."""
        resident = self._resident_rows.get(key)
        if neurons is not None and resident is not None:
            counted.records[: 1 + is_late, *key] += (neurons & ~resident).mean()
            resident |= neurons

    def _running(self, token: int | None, key: ExpertKey) -> NDArray[np.bool_] | None:
        if self.rows is None:
            return None
        if token is None:  # nearly every neuron runs for some token of a prompt
            return np.ones(self.rows.running.shape[3], bool)
        return self._whole_above(self.rows.running[token, key.layer_idx, key.expert])

    def _ahead(self, token: int, key: ExpertKey) -> NDArray[np.bool_] | None:
        return None if self.rows is None else self._whole_above(self.rows.ahead[token, key.layer_idx, key.expert])

    def _whole_above(self, neurons: NDArray[np.bool_]) -> NDArray[np.bool_]:
        assert self.rows is not None, "of experts that are read in part"
        return np.ones_like(neurons) if neurons.mean() >= self.rows.below else neurons


def play(routes: ModelRoutes, run: Play, predict: Predict | None = None) -> Counted:
    """Gives a run all routes. What is predicted is fetched once the reads of the layer before are, in passes of one
    token. With `alpha`, the rest of the model is taken to stay as it was.
    """
    passes, last = routes.passes, routes.passes.routes.shape[1] - 1
    starts = np.cumsum(passes.chunks, dtype=np.int64) - passes.chunks
    for pass_idx, layers in enumerate(passes.needed()):
        start, length = int(starts[pass_idx]), int(passes.chunks[pass_idx])
        tokens, token = slice(start, start + length), start if length == 1 else None
        run.counted.num_tokens += length == 1
        for layer_idx, experts in enumerate(layers):
            chosen = passes.routes[tokens, layer_idx].astype(np.int64)
            if run.alpha is not None and token is not None:
                resident = run.cache.is_resident[layer_idx]
                replaced = substitute(routes.scores[tokens, layer_idx], chosen, resident, run.alpha)
                run.counted.replaced += int((replaced != chosen).sum())
                chosen, experts = replaced, sorted(replaced[0].tolist())
            if run.recorder is not None:
                run.recorder.routed(layer_idx, chosen)
            scores = None if passes.scores is None else passes.scores[pass_idx, layer_idx]
            asks = predict is not None and token is not None and layer_idx < last
            run.layer(token, layer_idx, experts, scores, _bound(predict, token, layer_idx + 1) if asks else None)
    return run.counted


def _bound(predict: Predict | None, token: int | None, layer_idx: int) -> Callable[[], Sequence[int]]:
    assert predict is not None and token is not None, "asked only where there is one"
    return lambda: predict(token, layer_idx)


# --- predictions from recorded routes


def best_of(scores: NDArray[np.floating], num_predicted: int) -> Predict:
    """Predicts the experts with the largest scores [N, L, E]."""
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, :num_predicted]

    def predict(token: int, layer_idx: int) -> Sequence[int]:
        experts: list[int] = best[token, layer_idx].tolist()
        return experts

    return predict


def by_router(routes: ModelRoutes, num_predicted: int) -> Predict:
    """Predicts by the next layer's router on this layer's hidden state (CORM §4.2)."""
    return best_of(routes.ahead, num_predicted)


def by_paths(routes: ModelRoutes, num_predicted: int, paths: PathStatistics | None = None) -> Predict:
    """Predicts by the path statistics of the two layers before (EdgeMoE §III-C1)."""
    known, played = paths or routes.paths, routes.passes.routes
    shares = np.zeros(routes.scores.shape)
    for l in range(1, played.shape[1]):
        shares[:, l] = known.predict(l, played[:, max(l - 2, 0) : l])[0]
    return best_of(shares, num_predicted)


def by_networks(routes: ModelRoutes, num_predicted: int, networks: dict[int, Predictor]) -> Predict:
    """Predicts by learned networks, by the layer that each predicts (FloE §3.3.1)."""
    logits = np.zeros(routes.scores.shape, np.float32)
    played = torch.from_numpy(routes.passes.routes.astype(np.int64))
    for l, network in networks.items():
        x = torch.from_numpy(routes.inputs[:, l - 1])
        logits[:, l] = network.scores(x, played[:, l - network.num_previous : l]).numpy()
    return best_of(logits, num_predicted)


# --- importance's prediction, which needs the model


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The scores [E] of a layer for one token: its own, and those of the prediction before (None: not predicted)."""

    scores: NDArray[np.float32]
    guessed: NDArray[np.float32] | None


class PlayedWeights(MappedPackWeights):
    """Weights whose experts are all at hand, while a cache is played as if they were not.

    `scored`: for single tokens, layer by layer.
    Args:    num_predicted: experts of the next layer; 0: nothing is predicted.
    """

    def __init__(self, pack: Pack, kernels: Kernels, run: Play, num_predicted: int) -> None:
        super().__init__(pack, NativeOperations(kernels))
        self.scored: list[Scored] = []
        self._run, self._num_predicted, self._token = run, num_predicted, 0
        self._guessed: NDArray[np.float32] | None = None

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Plays the layer, then runs what it chose: substitutes are not undone."""
        run, layers = self._run, self.spec.moe_layers
        logits = router_logits(x, self, layers[layer_idx])
        scores = expert_scores(logits, self.spec.router).numpy()
        is_single = len(x) == 1
        run.counted.num_tokens += is_single and layer_idx == 0
        if is_single:
            self.scored.append(Scored(scores[0], self._guessed))
        self._guessed = None
        resident = run.cache.is_resident[layer_idx]
        if is_single and run.alpha is not None:
            replaced = substitute(scores, experts.numpy(), resident, run.alpha)
            run.counted.replaced += int((replaced != experts.numpy()).sum())
            if (replaced != experts.numpy()).any():
                experts = torch.from_numpy(replaced)
                router_weights = weights_of(logits, experts, self.spec.router)
        here = torch.from_numpy(resident[experts[0].numpy()])

        def predict() -> Sequence[int]:
            assert partial_state is not None, "the next layer has experts"
            y = super_run(layer_idx, x, experts[:, here], router_weights[:, here]) if here.any() else x * 0
            state, following = partial_state(y), layers[layer_idx + 1]
            state = mlp_input(state, self, following)
            self._guessed = expert_scores(router_logits(state, self, following), self.spec.router).numpy()[0]
            guessed = router_scores(state, self, following).numpy()
            likeliest: list[int] = ranked(guessed, self._num_predicted)[0].tolist()
            return likeliest

        super_run = super().run_experts
        asks = is_single and self._num_predicted > 0 and layer_idx + 1 < len(layers)
        run.layer(
            self._token if is_single else None,
            layer_idx,
            np.unique(experts.numpy()).tolist(),
            scores.mean(axis=0),
            predict if asks else None,
        )
        return super_run(layer_idx, x, experts, router_weights, partial_state)


def play_partial(
    model: RoutedModel, run: Play, num_learned: int, num_played: int, num_predicted: int | None = None
) -> Counted:
    """Plays a cache while the model runs, with the prediction from the partial hidden state (importance §5.2).

    The tokens are those of `RoutedModel.routes`. With `alpha`, substitutes run, and later layers get their output.
    """
    run.waits_for_hits = True
    k = model.pack.spec.router.num_experts_per_tok
    weights = PlayedWeights(model.pack, model.kernels, run, k if num_predicted is None else num_predicted)
    decoder = Decoder(weights, 512)
    run_chat(decoder, model.ids[num_learned : num_learned + num_played])
    return run.counted
