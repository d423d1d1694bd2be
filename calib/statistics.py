"""The statistics stage: one pass over the model, one file a MoE layer. What was routed where, and which neurons run.

The arrays of a layer's file are described at `LayerStatistics`. Path statistics, coverage and co-activation follow from
the routes it holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.arrays import Array, check_arrays
from moe_pack.calib.coverage import coactivation
from moe_pack.calib.expert_pass import CHUNK_TOKENS, HOT_SPARSITIES, KINDS, ExpertActivity, measure_expert
from moe_pack.calib.held import HeldWeights
from moe_pack.calib.histogram import NUM_BINS, Histogram
from moe_pack.calib.layer_pass import LayerStates, LayerTokens
from moe_pack.calib.workers import in_order, num_workers
from moe_pack.formats import CheckpointError, ModelSpec, PackError

# Levels of the stored quantiles: hundredths, and a finer end.
QUANTILE_LEVELS = (*(number / 100 for number in range(100)), 0.995, 0.999, 1.0)
_HOT_UNIT = 65535  # shares of tokens are stored as whole numbers of this


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """What calibration saw of a MoE layer: E experts of f neurons, T tokens; 3 selector kinds: up, gate, both.

    `tokens` u32 [E]: tokens that chose the expert; `held_out_tokens` u32 [E]: those of them in the held-out part.
    `mass` f32 [E]: the sum of its router weights.   `routes` u16 [T, k]: the experts of every token, best first.
    `coactivation` u32 [E, E]: tokens that chose both experts; `tokens` in its diagonal.   Where an expert has a
    capacity, all but `routes` are of the tokens that it runs for.
    `quantiles` f32 [E, 3, 103]: of abs(a) at `QUANTILE_LEVELS`; an expert without tokens has its layer's.
    `hot_thresholds` f32 [E, 3, 4]: on abs(a), for `HOT_SPARSITIES`, from a sample of the expert's tokens.
    `hot` u16 [E, 3, 4, f]: share of the expert's tokens on which the neuron reached them, in 65,535ths.
    `cosine` f32 [2]: mean and deviation, over tokens, of the cosine of this MoE layer's input and the one before's;
    NaN in the first of a stack.
    """

    tokens: Array
    held_out_tokens: Array
    mass: Array
    routes: Array
    coactivation: Array
    quantiles: Array
    hot_thresholds: Array
    hot: Array
    cosine: Array

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array], place: str, spec: ModelSpec, num_tokens: int) -> "LayerStatistics":
        """The statistics in a layer's file.

        Raises:  PackError if an array is missing, unknown, of another dtype or shape, or routes are none.
        """
        E, f, k = spec.router.num_experts, spec.expert.intermediate_size, spec.router.num_experts_per_tok
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "tokens": ("U32", (E,)),
            "held_out_tokens": ("U32", (E,)),
            "mass": ("F32", (E,)),
            "routes": ("U16", (num_tokens, k)),
            "coactivation": ("U32", (E, E)),
            "quantiles": ("F32", (E, len(KINDS), len(QUANTILE_LEVELS))),
            "hot_thresholds": ("F32", (E, len(KINDS), len(HOT_SPARSITIES))),
            "hot": ("U16", (E, len(KINDS), len(HOT_SPARSITIES), f)),
            "cosine": ("F32", (2,)),
        }
        check_arrays(arrays, shapes, place)
        ordered = np.sort(arrays["routes"], axis=1)
        if ordered.max() >= E or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise PackError(f"{place}: tensor 'routes' names no {k} experts a token; profile the model anew")
        return cls(**arrays)

    def chosen(self) -> Array:
        """Tokens that chose each expert, beyond its capacity or not: u32 [E]."""
        return np.bincount(self.routes.ravel(), minlength=len(self.tokens)).astype(np.uint32)

    def at_sparsities(self, sparsities: Sequence[float]) -> Array:
        """The stored quantiles at these levels: float32 [E, 3, levels]; each must be one of `QUANTILE_LEVELS`."""
        return np.ascontiguousarray(self.quantiles[:, :, [QUANTILE_LEVELS.index(level) for level in sparsities]])

    def hot_share(self, kind_idx: int, sparsity: float) -> Array:
        """The share of its tokens on which each neuron runs at `sparsity`, f32 [E, f]; between levels, interpolated.

        Beyond the last level the shares are scaled to the sparsity asked for; what an expert without tokens would do
        is not known: its shares are all alike.
        """
        levels = np.asarray(HOT_SPARSITIES)
        held = self.hot[:, kind_idx].astype(np.float64) / _HOT_UNIT  # [E, levels, f]; exact where levels are met
        above = int(np.searchsorted(levels, sparsity))
        if above == len(levels):
            return np.asarray(held[:, -1] * (1 - sparsity) / (1 - levels[-1]), np.float32)
        low, shares = (0.0, np.ones_like(held[:, 0])) if above == 0 else (levels[above - 1], held[:, above - 1])
        part = (sparsity - low) / (levels[above] - low)
        return np.asarray(shares + (held[:, above] - shares) * part, np.float32)


@torch.inference_mode()
def measure_layer(
    states: LayerStates,
    tokens: LayerTokens,
    weights: HeldWeights,
    layer_idx: int,
    cosine: tuple[float, float],
    num_held_out_tokens: int,
    on_expert: Callable[[int, int], None] = lambda expert, num_tokens: None,
    chunk_tokens: int = CHUNK_TOKENS,
    device: torch.device | None = None,
) -> LayerStatistics:
    """Runs the routed experts of a layer, adding their outputs to `tokens`, and counts.

    Args:    num_held_out_tokens: how many at the end are the held-out part.   cosine: mean and deviation.
             on_expert: called after each expert, with its number of tokens.
    Raises:  CheckpointError if activations are no numbers.
    """
    spec = weights.spec
    E, f = spec.router.num_experts, spec.expert.intermediate_size
    found = _Found([], [], [], [torch.zeros(NUM_BINS, dtype=torch.int64) for _ in KINDS])

    def measure(expert: int) -> tuple[int, Tensor, Tensor, list[tuple[Tensor, Tensor]], ExpertActivity]:
        token_idx, router_weights = tokens.of_expert(expert)
        held, outputs = weights.expert(layer_idx, expert), list[tuple[Tensor, Tensor]]()

        def keep(places: Tensor, output: Tensor) -> None:
            outputs.append((places, output))

        def add(places: Tensor, output: Tensor) -> None:
            states.add(tokens, token_idx[places], router_weights[places], output)

        # Side by side, outputs wait for their turn, so that sums are made in one order.
        found = measure_expert(
            held, spec.expert.function, tokens.inputs, token_idx, f, keep if workers > 1 else add, chunk_tokens, device
        )
        return expert, token_idx, router_weights, outputs, found

    workers = num_workers(spec)
    for expert, token_idx, router_weights, outputs, measured in in_order(measure, range(E), workers):
        for places, output in outputs:
            states.add(tokens, token_idx[places], router_weights[places], output)
        found.take(measured, len(token_idx), f"layer {spec.moe_layers[layer_idx]} expert {expert}")
        on_expert(expert, len(token_idx))
    routes = tokens.experts.numpy()
    running = (tokens.weights != 0).any(dim=1).numpy()
    held_out = routes[running & (np.arange(len(routes)) >= len(routes) - num_held_out_tokens)]
    mass = np.bincount(routes.ravel(), tokens.weights.numpy().ravel().astype(np.float64), minlength=E)
    reached = np.bincount(routes[running].ravel(), minlength=E)
    pooled = np.stack([Histogram(counts).quantiles(QUANTILE_LEVELS) for counts in found.pooled])
    return LayerStatistics(
        tokens=reached.astype(np.uint32),
        held_out_tokens=np.bincount(held_out.ravel(), minlength=E).astype(np.uint32),
        mass=mass.astype(np.float32),
        routes=routes.astype(np.uint16),
        coactivation=coactivation(routes[running][:, None], E)[0],
        quantiles=np.where(reached[:, None, None] > 0, np.stack(found.quantiles), pooled),
        hot_thresholds=np.stack(found.hot_thresholds),
        hot=np.stack(found.hot),
        cosine=np.asarray(cosine, np.float32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What is kept of each expert, and the layer's histograms: an expert's own take megabytes."""

    quantiles: list[Array]
    hot_thresholds: list[Array]
    hot: list[Array]
    pooled: list[Tensor]

    def take(self, measured: ExpertActivity, num_tokens: int, place: str) -> None:
        for counts, histogram in zip(self.pooled, measured.histograms, strict=True):
            if not histogram.all_finite():
                raise CheckpointError(f"{place}: activations are not finite; is the checkpoint whole?")
            counts += histogram.counts
        self.quantiles.append(np.stack([histogram.quantiles(QUANTILE_LEVELS) for histogram in measured.histograms]))
        self.hot_thresholds.append(measured.hot_thresholds)
        shares = measured.hot.numpy() / max(num_tokens, 1)
        self.hot.append((shares * _HOT_UNIT).round().astype(np.uint16))
