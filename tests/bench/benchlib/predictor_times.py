"""The time of predictors next to the time of tokens, on synthetic packs: medians of tokens that take turns."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from support.predictors import random_predictor
from support.routings import random_routes
from torch import Tensor

from benchlib.packs import SyntheticPack, budget_with, make_pack
from moe_pack.calib.statistics import learn_paths, shapes_for
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import Decoder, NativeOperations, PartialState, mlp_input, router_scores
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload.prefetch import (
    LearnedPrediction,
    NextRouterPrediction,
    PartialPrediction,
    PathPrediction,
    PredictionInput,
    ranked,
)

# CORM's kind of pack: the gate decides, and 45% of the neurons run. A small vocabulary, so that the head counts little.
_GATE = ("--selector", "gate", "--sparsity", "0.55")
_CONTEXT, _PROMPT_TOKENS = 256, 16
_PATH_TOKENS, _PATHS_BYTES = 16384, 4 << 20


class _GatePack(SyntheticPack):
    """Some layers of a published model as CORM stores them, but all in 4 bits."""

    def arguments(self) -> list[str]:
        return [*SyntheticPack.arguments(self), *_GATE]


SYNTHETIC_MODELS: dict[str, SyntheticPack] = {
    "mixtral-3-layers-gate": _GatePack("mixtral-8x7b", 3, 2048),
    "olmoe-8-layers-gate": _GatePack("olmoe-1b-7b", 8, 2048),
}


CORM_PREDICTOR = "corm: router and gate"


@dataclass(frozen=True, slots=True)
class PredictorTimes:
    """Medians in milliseconds.

    `memory_ms`, `disk_ms`: of a token with all experts in memory, and with space for half.   `predict_ms`: of each
    predictor for one layer and token.
    """

    layers: int
    memory_ms: float
    disk_ms: float
    predict_ms: dict[str, float]


class _Timed(MappedPackWeights):
    """Weights that call every predictor of the next layer, and take its time, while `is_timing`."""

    def __init__(self, pack: Pack, kernels: Kernels) -> None:
        super().__init__(pack, NativeOperations(kernels))
        spec, L = pack.spec, len(pack.layout.experts)
        d, E, k = spec.hidden_size, spec.router.num_experts, spec.router.num_experts_per_tok
        self.is_timing = False
        self.seconds: dict[str, float] = {}
        self._k, self._L = k, L
        self._routes: list[Tensor] = []
        self._router = NextRouterPrediction(self)
        self._paths = PathPrediction(learn_paths(random_routes(_PATH_TOKENS, L, E, k, 0), E, _PATHS_BYTES))
        self._partial = PartialPrediction(self)
        self._networks = {
            f"floe: network of {shape.num_parameters(d, E):,} parameters": LearnedPrediction(
                {l: random_predictor(shape.num_layers, d, E, min(l, 2), shape.hidden) for l in range(1, L)},
                self.operations,
            )
            for shape in shapes_for(d, E)
        }

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        self._routes = [*self._routes[-1:], experts] if layer_idx else [experts]
        y = super().run_experts(layer_idx, x, experts, router_weights, partial_state)
        if self.is_timing and partial_state is not None and layer_idx + 1 < self._L:
            routes = torch.stack(self._routes, dim=1).numpy()
            self._time_all(layer_idx + 1, PredictionInput(x, routes), lambda: partial_state(y))
        return y

    def _time_all(self, l: int, observed: PredictionInput, partial: Callable[[], Tensor]) -> None:
        self._time("corm: router alone", lambda: self._router.scores(l, observed))
        self._time(CORM_PREDICTOR, lambda: self._gates(l, observed))
        self._time("edgemoe: path statistics", lambda: self._paths.scores(l, observed))
        for name, network in self._networks.items():
            self._time(name, lambda network=network: network.scores(l, observed))  # type: ignore[misc]  # bound early
        self._time("importance: attention and router on the partial state", lambda: self._on_partial(l, partial))

    def _gates(self, l: int, observed: PredictionInput) -> None:
        """Predicts experts by the next router, and their neurons by their gate (CORM §4.2)."""
        scores = self._router.scores(l, observed)
        assert scores is not None, "no table names the layer's experts"
        experts = ranked(scores, self._k)[0].tolist()
        token = np.zeros(1, np.int64)
        works = [(self._mapped_expert(l, number).rows, token) for number in experts]
        self.operations.kernels.select_each(observed.x, works)  # in one call, as the engine does

    def _on_partial(self, l: int, partial: Callable[[], Tensor]) -> None:
        layer = self.spec.moe_layers[l]
        router_scores(mlp_input(partial(), self, layer), self, layer)

    def _time(self, name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def predictor_times(name: str, folder: Path, rounds: int, tokens: int) -> PredictorTimes:
    """Measures a pack of `SYNTHETIC_MODELS`, made in `folder` unless it is there.

    In every round, `tokens` tokens run with all experts in memory, then as many with predictors after each layer, then
    as many in an engine that has space for half of the experts, with CORM's policy.
    """
    predicted: dict[str, list[float]] = {}
    memory, disk = list[float](), list[float]()
    with Pack(make_pack(name, folder, SYNTHETIC_MODELS)) as pack, closing(Kernels()) as kernels:
        weights, num_experts = _Timed(pack, kernels), len(pack.layout.experts) * pack.spec.router.num_experts
        ids = torch.randint(0, pack.spec.vocab_size, (_CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
        decoder = Decoder(weights, _CONTEXT)
        options = EngineOptions("cpu", budget_with(pack, num_experts // 2, _CONTEXT), policy="corm")
        run_tokens(decoder, ids[: 2 * _PROMPT_TOKENS])  # reads the experts' files, whose pages then stay
        with Engine(pack, options, _CONTEXT) as engine:
            for _ in range(rounds):
                memory += run_tokens(decoder, ids[: _PROMPT_TOKENS + tokens])
                for number in range(tokens):
                    weights.is_timing, weights.seconds = True, {}
                    decoder.next_logits([ids[number]])
                    weights.is_timing = False
                    for predictor, seconds in weights.seconds.items():
                        predicted.setdefault(predictor, []).append(seconds)
                assert isinstance(engine.decoder, Decoder), "a decoder alone"
                disk += run_tokens(engine.decoder, ids[: _PROMPT_TOKENS + tokens])
        num_layers = len(pack.layout.experts)  # the first is not predicted
        times = {predictor: 1000 * median(found) / (num_layers - 1) for predictor, found in predicted.items()}
        return PredictorTimes(num_layers, 1000 * median(memory), 1000 * median(disk), times)


def run_tokens(decoder: Decoder, ids: list[int]) -> list[float]:
    """Runs a prompt and then tokens one by one; returns the seconds of each of these."""
    decoder.reset()
    decoder.next_logits(ids[:_PROMPT_TOKENS])
    seconds = []
    for token in ids[_PROMPT_TOKENS:]:
        start = time.perf_counter()
        decoder.next_logits([token])
        seconds.append(time.perf_counter() - start)
    return seconds
