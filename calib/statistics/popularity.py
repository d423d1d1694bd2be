"""The statistics of a MoE layer on calibration text: the experts that its router chooses, and the neurons that run.

T counts tokens, L MoE layers, E experts a layer, k experts a token. A *choice* is one expert of one token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.forward import shared, store

Routes = NDArray[np.integer[Any]]

MIN_TOKENS = 64  # a count of n varies by sqrt(n): below 64 by an eighth of it or more
WILSON_Z = 1.959963984540054  # 97.5% quantile of the normal distribution: a 95% interval
MAX_EXPERTS = 2**16 - 1  # expert indices and their number are kept in 16 bits


def as_sets(routes: Routes, num_experts: int) -> NDArray[np.uint16]:
    """Returns routes [T, L, k] with every token's experts in ascending order, so that equal sets are equal arrays."""
    assert routes.ndim == 3 and routes.size > 0, f"routes are [T, L, k] and not empty, not {routes.shape}"
    assert num_experts <= MAX_EXPERTS, f"{num_experts} experts, at most {MAX_EXPERTS} have an index of 16 bits"
    assert routes.min() >= 0 and routes.max() < num_experts, f"routes name an expert that is none of {num_experts}"
    ordered = np.sort(routes.astype(np.uint16), axis=2)
    assert (ordered[..., 1:] > ordered[..., :-1]).all(), "a token's experts are distinct"
    return ordered


def count_tokens(routes: Routes, num_experts: int) -> NDArray[np.uint32]:
    """Returns how many tokens chose each expert: `[T, L, k]` gives `[L, E]`."""
    layers = [np.bincount(routes[:, l].ravel(), minlength=num_experts) for l in range(routes.shape[1])]
    return np.stack(layers).astype(np.uint32)


def count_pairs(
    earlier: Routes, later: Routes, num_experts: int, runs: NDArray[np.bool_] | None = None
) -> NDArray[np.uint32]:
    """Returns `count[e', e]`: tokens that chose e' of `earlier` [T, k] and e of `later`; only where `runs` is true."""
    cells = earlier[:, :, None].astype(np.int64) * num_experts + later[:, None, :]  # [T, k, k]
    counted = cells.ravel() if runs is None else cells[runs[:, :, None] & runs[:, None, :]]
    counts = np.bincount(counted, minlength=num_experts**2)
    return counts.reshape(num_experts, num_experts).astype(np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """How many calibration tokens each expert had, [L, E], and the experts (l, e) with too few."""

    num_tokens: int
    tokens: NDArray[np.uint32]
    share: NDArray[np.float64]  # of the tokens chose the expert
    low: NDArray[np.float64]  # of its 95% interval, to `high`
    high: NDArray[np.float64]
    unreached: tuple[tuple[int, int], ...]  # without a token
    # With some tokens, but fewer than MIN_TOKENS, which is too few to trust their quantiles
    scarce: tuple[tuple[int, int], ...]


def measure_coverage(routes: Routes, num_experts: int) -> Coverage:
    """Returns the coverage of every expert by routes [T, L, k], with Wilson's interval (JASA 22, 1927)."""
    ordered = as_sets(routes, num_experts)
    T = len(ordered)
    tokens = count_tokens(ordered, num_experts)
    low, high = wilson_interval(tokens, T)
    masks = tokens == 0, (tokens > 0) & (tokens < MIN_TOKENS)
    unreached, scarce = (tuple((int(l), int(e)) for l, e in np.argwhere(mask)) for mask in masks)
    return Coverage(T, tokens, tokens / T, low, high, unreached, scarce)


def wilson_interval(tokens: NDArray[np.uint32], num_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns (p + z²/2T ± z sqrt(p(1-p)/T + z²/4T²)) / (1 + z²/T), with p = tokens / T: 95% intervals of shares."""
    share, z2 = tokens / num_tokens, WILSON_Z**2 / num_tokens
    half = np.sqrt(share * (1 - share) * z2 + z2**2 / 4)
    # Summed in this order the ends of counts 0 and T are 0 and 1 exactly: sqrt undoes the square.
    return (share + (z2 / 2 - half)) / (1 + z2), (share + (z2 / 2 + half)) / (1 + z2)


@dataclass(frozen=True, slots=True)
class PopularityTest:
    """How much a layer's popularity on calibration text says about held-out text, compared with chance."""

    chi_square: float  # of held-out counts against uniform ones, E - 1 degrees of freedom
    p_value: float
    calibrated_nats: float  # log-likelihood of a held-out choice under calibration popularity
    uniform_nats: float  # the same under uniform popularity
    quarter_share: float  # of the held-out choices on the quarter of experts most popular in calibration
    quarter_uniform: float  # their share under uniform popularity
    spearman: float | None  # rank correlation of the two popularities, None if one is constant


def compare_popularity(calibration: Routes, held_out: Routes, num_experts: int) -> tuple[PopularityTest, ...]:
    """Compares the popularity of experts on calibration text [T, L, k] with held-out text [T', L, k], layer by layer.

    Meaning: chi-square: (E-1)/(E-k) * sum_e (n_e - Tk/E)²/(Tk/E). A token's k experts are distinct, so counts vary by
             that much less than with k free draws. nats: mean over held-out choices of log q_e, q_e = (m_e + 1) / (sum
             m + E), m the calibration counts. The quarter is ceil(E/4) experts; of equal ones the lowest index comes
             first.
    Source:  Pearson's test; Laplace's rule. Tokens are taken as independent, so p-values are a little too small.
    """
    assert calibration.shape[1:] == held_out.shape[1:], "both texts ran through the same model"
    k = calibration.shape[2]
    learned = count_tokens(as_sets(calibration, num_experts), num_experts)
    counts = count_tokens(as_sets(held_out, num_experts), num_experts)
    return tuple(_compare_layer(*layer, k) for layer in zip(learned, counts, strict=True))


def _compare_layer(learned: NDArray[np.uint32], held_out: NDArray[np.uint32], k: int) -> PopularityTest:
    E, num_choices = len(held_out), int(held_out.sum())
    expected = num_choices / E
    # With k = E every token chooses every expert: nothing can differ.
    chi_square = 0.0 if k == E else float(((held_out - expected) ** 2 / expected).sum() * (E - 1) / (E - k))
    q = (learned + 1.0) / (learned.sum() + E)
    quarter = np.argsort(-learned.astype(np.int64), kind="stable")[: -(-E // 4)]
    return PopularityTest(
        chi_square=chi_square,
        p_value=chi_square_tail(chi_square, E - 1),
        calibrated_nats=float((held_out * np.log(q)).sum() / num_choices),
        uniform_nats=-math.log(E),
        quarter_share=float(held_out[quarter].sum() / num_choices),
        quarter_uniform=len(quarter) / E,
        spearman=spearman(learned, held_out),
    )


def chi_square_tail(value: float, freedom: int) -> float:
    """Returns the probability that a chi-square variable is at least `value`; 1 for no degrees of freedom.

    Meaning: `freedom` even: exp(-h) sum_{i < freedom/2} h^i / i!, h = value / 2; odd: erfc(sqrt(h)) and the same sum
             over the halves i = 1/2, 3/2, ... < freedom/2.
    Source:  Abramowitz and Stegun, 26.4.4 and 26.4.5; exact, because no term is negative.
    """
    if value <= 0 or freedom == 0:
        return 1.0
    h, odd = value / 2, freedom % 2
    powers = (i + odd / 2 for i in range(freedom // 2))
    terms = [math.exp(i * math.log(h) - h - math.lgamma(i + 1)) for i in powers]
    return min(1.0, math.fsum([*terms, math.erfc(math.sqrt(h)) if odd else 0.0]))


def spearman(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """Returns the rank correlation of two lists, equals sharing their mean rank; None if one list is constant."""

    def centered_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
        _, value_idx, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks: NDArray[np.float64] = (np.cumsum(counts) - 1 - (counts - 1) / 2)[value_idx]
        ranks -= (len(values) - 1) / 2
        return ranks

    a, b = centered_ranks(first), centered_ranks(second)
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


# Levels of the stored quantiles: hundredths, and finer ones at the end.
QUANTILE_LEVELS = (*(number / 100 for number in range(100)), 0.995, 0.999, 1.0)
_HOT_UNIT = 65535  # shares of tokens are stored as whole numbers of this


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics(forward.NamedArrays):
    """The statistics of a MoE layer: E experts of f neurons, T tokens, 3 selector kinds (up, gate, both).

    With capacities, or experts that return their input, all but `routes` count only tokens that an expert runs for.
    """

    tokens: forward.Array  # u32 [E]: tokens that chose the expert
    held_out_tokens: forward.Array  # u32 [E]: those of them in the held-out part
    mass: forward.Array  # f32 [E]: the sum of its router weights
    routes: forward.Array  # u16 [T, k]: the experts of every token, best first
    coactivation: forward.Array  # u32 [E, E]: tokens that chose both experts, with `tokens` on the diagonal
    # f32 [E, 3, 103]: of abs(a) at `QUANTILE_LEVELS`; an expert without tokens has those of its layer
    quantiles: forward.Array
    # f32 [E, 3, 4]: on abs(a), for `HOT_SPARSITIES`, from a sample of the expert's tokens
    hot_thresholds: forward.Array
    hot: forward.Array  # u16 [E, 3, 4, f]: share of the expert's tokens on which the neuron reached them, in 65,535ths
    # f32 [2]: mean and deviation, over tokens, of the cosine between the inputs of this MoE layer and of the one
    # before; NaN in the first of a stack.
    cosine: forward.Array
    input_squares: forward.Array  # f32 [E, d]: sums over the expert's tokens of the squares of its inputs
    hidden_squares: forward.Array  # f32 [E, f]: the same of `h`, the inputs of down

    @classmethod
    def from_arrays(
        cls, arrays: dict[str, forward.Array], place: str, spec: formats.ModelSpec, num_tokens: int
    ) -> "LayerStatistics":
        """Checks the arrays of a layer's file; PackError for the first fault."""
        E, f, k = spec.router.num_experts, spec.expert.intermediate_size, spec.router.num_experts_per_tok
        rules = {
            "tokens": store.ArrayRule("U32", (E,), most=num_tokens),
            "held_out_tokens": store.ArrayRule("U32", (E,), most=num_tokens),
            "mass": store.ArrayRule("F32", (E,)),
            "routes": store.ArrayRule("U16", (num_tokens, k), most=E - 1),
            "coactivation": store.ArrayRule("U32", (E, E), most=num_tokens),
            "quantiles": store.ArrayRule("F32", (E, len(forward.KINDS), len(QUANTILE_LEVELS)), 0),
            "hot_thresholds": store.ArrayRule("F32", (E, len(forward.KINDS), len(forward.HOT_SPARSITIES)), 0),
            "hot": store.ArrayRule("U16", (E, len(forward.KINDS), len(forward.HOT_SPARSITIES), f)),
            "cosine": store.ArrayRule("F32", (2,), -1.01, 1.01, has_nan=True),
            "input_squares": store.ArrayRule("F32", (E, spec.hidden_size), 0),
            "hidden_squares": store.ArrayRule("F32", (E, f), 0),
        }
        store.check_arrays(arrays, rules, place)
        ordered = np.sort(arrays["routes"], axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise formats.PackError(
                f"{place}: tensor 'routes' does not name {k} different experts for each token; profile the model again"
            )
        return cls(**arrays)

    def chosen(self, router: formats.RouterSpec) -> forward.Array:
        """Returns how many tokens chose each expert of the router, within its capacity or not: u32 [E]."""
        if router.num_identity:
            return self.tokens
        return np.bincount(self.routes.ravel(), minlength=len(self.tokens)).astype(np.uint32)

    def at_sparsities(self, sparsities: Sequence[float]) -> forward.Array:
        """Returns the quantiles at these levels, float32 [E, 3, levels]; each must be one of `QUANTILE_LEVELS`."""
        return np.ascontiguousarray(self.quantiles[:, :, [QUANTILE_LEVELS.index(level) for level in sparsities]])

    def hot_share(self, kind_idx: int, sparsity: float) -> forward.Array:
        """Returns the share f32 [E, f] of an expert's tokens for which a neuron runs, interpolated between levels."""
        levels = np.asarray(forward.HOT_SPARSITIES)
        shares = self.hot[:, kind_idx].astype(np.float64) / _HOT_UNIT  # [E, levels, f], exact at the levels
        above = int(np.searchsorted(levels, sparsity))
        if above == len(levels):
            return np.asarray(shares[:, -1] * (1 - sparsity) / (1 - levels[-1]), np.float32)
        low, lower = (0.0, np.ones_like(shares[:, 0])) if above == 0 else (levels[above - 1], shares[:, above - 1])
        part = (sparsity - low) / (levels[above] - low)
        return np.asarray(lower + (shares[:, above] - lower) * part, np.float32)


OnOutput = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.inference_mode()
def measure_layer(
    states: forward.LayerStates,
    tokens: forward.LayerTokens,
    weights: forward.LayerwiseWeights,
    layer_idx: int,
    cosine: tuple[float, float],
    num_held_out_tokens: int,
    on_expert: Callable[[int, int], None] = lambda expert, num_tokens: None,
    on_output: OnOutput = lambda expert, token_idx, weights, output: None,
    chunk_tokens: int = forward.CHUNK_TOKENS,
    results: shared.Results = shared.ONE_PROCESS,
) -> LayerStatistics:
    """Runs the routed experts of a layer, adds their outputs to `tokens`, and counts.

    Args:    num_held_out_tokens: from the end.   cosine: mean and deviation, for the result.   on_expert: takes each
             expert's number and its count of tokens.   on_output: takes, in the order of experts, the number, token
             positions int64 [n], router weights float32 [n] and outputs float32 [n, d].
    Raises:  CheckpointError if activations are not finite.
    """
    spec = weights.spec
    E, f, inputs = spec.router.num_experts, spec.expert.intermediate_size, tokens.expert_inputs(slice(None))
    activity = _LayerActivity(
        [], [], [], [], [], [torch.zeros(forward.NUM_BINS, dtype=torch.int64) for _ in forward.KINDS]
    )

    def add_output(expert: int, token_idx: Tensor, router_weights: Tensor, output: Tensor) -> None:
        states.add(tokens, token_idx, router_weights, output)
        on_output(expert, token_idx, router_weights, output)

    def measure(expert: int) -> tuple[Tensor, ...]:
        token_idx, router_weights = tokens.of_expert(expert)
        model_expert, outputs = weights.expert(layer_idx, expert), list[Tensor]()

        def keep(places: Tensor, output: Tensor) -> None:
            outputs.extend((places, output))

        def add(places: Tensor, output: Tensor) -> None:
            add_output(expert, token_idx[places], router_weights[places], output)

        # Outputs of parallel experts wait for their turn, so that sums are taken in one order.
        waits, function = workers > 1 or results.is_shared, spec.expert_function(layer_idx)
        on_output = keep if waits else add
        measured = forward.measure_expert(
            model_expert, function, inputs, token_idx, f, on_output, chunk_tokens, states.device
        )
        return token_idx, router_weights, *measured.tensors(), *outputs

    workers = forward.num_workers(spec)
    for expert, found in enumerate(results.in_order("experts", measure, range(E), workers)):
        token_idx, router_weights, *others = found
        measured, outputs = forward.ExpertActivity.of(others)
        for places, output in zip(outputs[::2], outputs[1::2], strict=True):
            add_output(expert, token_idx[places], router_weights[places], output)
        activity.add(measured, len(token_idx), f"layer {spec.moe_layers[layer_idx]} expert {expert}")
        on_expert(expert, len(token_idx))
        del found, others, outputs  # otherwise two experts' outputs are in memory
    return _statistics(tokens, activity, E, num_held_out_tokens, cosine)


def _statistics(
    tokens: forward.LayerTokens,
    activity: "_LayerActivity",
    num_experts: int,
    num_held_out_tokens: int,
    cosine: tuple[float, float],
) -> LayerStatistics:
    E = num_experts
    routes, runs = tokens.experts.numpy(), (tokens.weights != 0).numpy()  # [T, k]
    held_out = slice(len(routes) - num_held_out_tokens, None)
    mass = np.bincount(routes.ravel(), tokens.weights.numpy().ravel().astype(np.float64), minlength=E)
    reached = np.bincount(routes[runs], minlength=E)
    pooled = np.stack([forward.Histogram(counts).quantiles(QUANTILE_LEVELS) for counts in activity.pooled])
    return LayerStatistics(
        tokens=reached.astype(np.uint32),
        held_out_tokens=np.bincount(routes[held_out][runs[held_out]], minlength=E).astype(np.uint32),
        mass=mass.astype(np.float32),
        routes=routes.astype(np.uint16),
        coactivation=count_pairs(routes, routes, E, runs),
        quantiles=np.where(reached[:, None, None] > 0, np.stack(activity.quantiles), pooled),
        hot_thresholds=np.stack(activity.hot_thresholds),
        hot=np.stack(activity.hot),
        cosine=np.asarray(cosine, np.float32),
        input_squares=np.stack(activity.input_squares),
        hidden_squares=np.stack(activity.hidden_squares),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _LayerActivity:
    """The figures of each expert, and histograms of the whole layer."""

    quantiles: list[forward.Array]
    hot_thresholds: list[forward.Array]
    hot: list[forward.Array]
    input_squares: list[forward.Array]
    hidden_squares: list[forward.Array]
    pooled: list[Tensor]  # counts by selector kind: an expert's own would take megabytes each

    def add(self, measured: forward.ExpertActivity, num_tokens: int, place: str) -> None:
        for counts, histogram in zip(self.pooled, measured.histograms, strict=True):
            if not histogram.all_finite():
                raise formats.CheckpointError(
                    f"{place}: activations are not finite; check that the checkpoint is complete"
                )
            counts += histogram.counts
        self.quantiles.append(np.stack([histogram.quantiles(QUANTILE_LEVELS) for histogram in measured.histograms]))
        self.hot_thresholds.append(measured.hot_thresholds)
        shares = measured.hot.numpy() / max(num_tokens, 1)
        self.hot.append((shares * _HOT_UNIT).round().astype(np.uint16))
        self.input_squares.append(measured.input_squares.numpy().astype(np.float32))
        self.hidden_squares.append(measured.hidden_squares.numpy().astype(np.float32))
