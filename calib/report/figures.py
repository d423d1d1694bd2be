"""The figures of a report: what a profile holds, put together as the page draws it.

Frozen dataclasses of plain values, so that JSON of them is the page's input; large arrays are `Packed`. What the
figures say in words is `report_readings`; how they look is `report.html`.
"""

import base64
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_pack.calib.forward import KINDS, Array
from moe_pack.calib.profile import Profile
from moe_pack.calib.sensitivity import DENSE_WIDTHS, SPARSITIES, WIDTHS, roundable_roles
from moe_pack.calib.statistics import (
    COVERED_PERCENTS,
    MIN_TOKENS,
    QUANTILE_LEVELS,
    LayerRecall,
    PathCoverage,
    PopularityTest,
    Shares,
    accumulated_frequency,
    compare_popularity,
    evaluate,
    measure_coverage,
    path_coverage,
)
from moe_pack.formats import MATRICES
from moe_pack.formats.spec import first_moe_layers, num_active_parameters, num_parameters
from moe_pack.runtime.offload import PREDICTORS

MOST_FULL_EXPERTS = 2048  # of all layers: beyond them 103 quantiles an expert and kind make a page of more than 4 MB
THINNED_LEVELS = (*(number / 100 for number in range(0, 100, 5)), 0.97, 0.99, 0.995, 0.999, 1.0)
CURVE_PERCENTS = (0, 1, 2, 5, *range(10, 101, 5))
MOST_LISTED = 24  # least covered experts that are drawn with their intervals


@dataclass(frozen=True, slots=True)
class Packed:
    """An array as the page unpacks it: little-endian bytes in base64, exact and shorter than digits."""

    dtype: Literal["f32", "u32"]
    shape: tuple[int, ...]
    base64: str

    @classmethod
    def of(cls, values: Array, dtype: Literal["f32", "u32"] = "f32") -> "Packed":
        """An array of any dtype, as float32 or uint32."""
        raw = values.astype({"f32": "<f4", "u32": "<u4"}[dtype]).tobytes()
        return cls(dtype, values.shape, base64.b64encode(raw).decode("ascii"))

    def array(self) -> Array:
        """The array again."""
        return np.frombuffer(base64.b64decode(self.base64), {"f32": "<f4", "u32": "<u4"}[self.dtype]).reshape(
            self.shape
        )


@dataclass(frozen=True, slots=True)
class Head:
    """What was measured, on what. `layers`: the layers that have experts, by which the page names them.

    `foretold`: those with another before them in their stack.   `num_tokens`: of the text that each layer saw.
    """

    family: str
    num_hidden_layers: int
    layers: tuple[int, ...]
    foretold: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    num_parameters: int
    num_active_parameters: int
    text: str
    num_tokens: int
    num_held_out_tokens: int
    num_sequences: int
    sequence_length: int
    sensitivity: str
    made_with: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Popularity:
    """Of L layers and E experts, [L, E]: tokens, the 95% interval of their share of all tokens, share of router weight.

    `tests`: by layer, none where no text was held out.
    """

    tokens: Packed
    low: Packed
    high: Packed
    mass: Packed
    tests: tuple[PopularityTest, ...]


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Quantiles of abs(a) [L, E, kinds, levels] at `levels`, thinned from `num_measured` of them."""

    kinds: tuple[str, ...]
    levels: tuple[float, ...]
    num_measured: int
    quantiles: Packed


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """The predicted KL divergence in nats of one dense matrix, at each of `Sensitivity.dense_widths`."""

    layer: int
    role: str
    kl: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Predicted KL divergences in nats, error times effect.

    `quantized` [L, E, 3, 4] by matrix and width; `sparse` [L, E, 3, 4] by kind and sparsity; `embedding` and `head` at
    each of `dense_widths`.
    """

    matrices: tuple[str, ...]
    widths: tuple[int, ...]
    kinds: tuple[str, ...]
    sparsities: tuple[float, ...]
    dense_widths: tuple[int, ...]
    quantized: Packed
    sparse: Packed
    dense: tuple[DenseMatrix, ...]
    embedding: tuple[float | None, ...]
    head: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """A layer's figures: `experts` by predictor (recall of k, recall and precision of 2k), the best one's place.

    `neurons`: recall and precision by kind and sparsity, None where no held-out token came.
    """

    experts: tuple[tuple[float | None, ...], ...]
    best: int
    neurons: tuple[tuple[tuple[float | None, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """By layer of `Head.foretold`: how experts and neurons are foretold; empty where nothing was held out.

    `cosine`: mean and deviation, of that layer's input and the one before's.
    """

    predictors: tuple[str, ...]
    kinds: tuple[str, ...]
    sparsities: tuple[float, ...]
    layers: tuple[LayerPrediction, ...]
    cosine: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The paths through some successive layers: how many, how many tokens took one that is theirs alone.

    `curve`: share of all tokens on the most frequent paths, at each of `Paths.curve_percents` of them.
    """

    layers: tuple[int, ...]
    num_paths: int
    num_single: int
    covered: tuple[float, ...]
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """EdgeMoE's Fig. 4 on all tokens; its path statistics and Fig. 8 (right) on `num_judged` held-out tokens.

    `recalls` by layer and `accumulated` [3, L, n] are empty where nothing was held out.
    """

    curve_percents: tuple[int, ...]
    covered_percents: tuple[int, ...]
    windows: tuple[Window, ...]
    num_judged: int
    recalls: tuple[LayerRecall, ...]
    accumulated: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """An expert by layer and index: its tokens, and the 95% interval of its share of all tokens."""

    layer: int
    expert: int
    num_tokens: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """Experts by layer: those that no token reached, those with fewer than `min_tokens`; and the least covered."""

    min_tokens: int
    unreached: tuple[tuple[int, tuple[int, ...]], ...]
    scarce: tuple[tuple[int, tuple[int, ...]], ...]
    least: tuple[Reached, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What figures take from all layers' statistics: routes u16 [T, L, k], the others by layer."""

    routes: Array
    mass: Array
    quantiles: Array
    cosine: Array


def read_counted(profile: Profile, levels: tuple[float, ...]) -> Counted:
    """The statistics of all layers, quantiles at these levels only: a layer's file is held one at a time.

    Raises:  PackError if a file is damaged, or routes are none.
    """
    held = []
    for l in range(len(profile.spec.moe_layers)):
        layer = profile.statistics(l)
        held.append((layer.routes, layer.mass, layer.at_sparsities(levels), layer.cosine))
    routes, mass, quantiles, cosine = zip(*held, strict=True)
    return Counted(np.stack(routes, axis=1), np.stack(mass), np.stack(quantiles), np.stack(cosine))


def levels_for(profile: Profile) -> tuple[float, ...]:
    """The levels of quantiles that a page of this many experts has room for."""
    num_experts = len(profile.spec.moe_layers) * profile.spec.router.num_experts
    return QUANTILE_LEVELS if num_experts <= MOST_FULL_EXPERTS else THINNED_LEVELS


def head(profile: Profile) -> Head:
    """What was measured, on what."""
    spec, text = profile.spec, profile.facts.text
    return Head(
        family=spec.family,
        num_hidden_layers=spec.num_hidden_layers,
        layers=spec.moe_layers,
        foretold=tuple(spec.moe_layers[l] for l in _later(profile)),
        num_experts=spec.router.num_experts,
        num_experts_per_tok=spec.router.num_experts_per_tok,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.expert.intermediate_size,
        num_parameters=num_parameters(spec),
        num_active_parameters=num_active_parameters(spec),
        text=text.name,
        num_tokens=profile.num_tokens,
        num_held_out_tokens=profile.num_held_out_tokens,
        num_sequences=text.num_sequences,
        sequence_length=text.sequence_length,
        sensitivity=profile.facts.sensitivity,
        made_with=tuple(f"{package.name} {package.version}" for package in profile.facts.made_with),
    )


def _later(profile: Profile) -> tuple[int, ...]:
    """The MoE layers that have one before them in their stack."""
    first = first_moe_layers(profile.spec)
    return tuple(l for l in range(len(profile.spec.moe_layers)) if l not in first)


def popularity(profile: Profile, counted: Counted) -> Popularity:
    """Where tokens went, and whether held-out text goes there too."""
    E, learned = profile.spec.router.num_experts, profile.num_tokens - profile.num_held_out_tokens
    covered = measure_coverage(counted.routes, E)
    mass = counted.mass.astype(np.float64)
    tested = profile.num_held_out_tokens > 0
    return Popularity(
        tokens=Packed.of(covered.tokens, "u32"),
        low=Packed.of(covered.low),
        high=Packed.of(covered.high),
        mass=Packed.of(mass / np.maximum(mass.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)),
        tests=compare_popularity(counted.routes[:learned], counted.routes[learned:], E) if tested else (),
    )


def sparsity(counted: Counted, levels: tuple[float, ...]) -> Sparsity:
    """The distribution of what thresholds are set on."""
    return Sparsity(KINDS, levels, len(QUANTILE_LEVELS), Packed.of(counted.quantiles))


def predicted_kl(profile: Profile) -> tuple[Array, Array]:
    """Error times effect, float32 nats: [L, E, 3, 4] of quantized matrices, [L, E, 3, 4] of dropped neurons."""
    effects = profile.effects()
    errors = [profile.errors(layer) for layer in profile.spec.moe_layers]
    quantized = np.stack([layer.quantized for layer in errors]) * effects.quantized[:, None]
    return quantized, np.stack([layer.sparse for layer in errors]) * effects.sparse[:, None]


def sensitivity(profile: Profile, quantized: Array, sparse: Array) -> Sensitivity:
    """What widths and sparsities cost, from `predicted_kl`."""
    effects = profile.effects()
    dense = []
    for layer in range(profile.spec.num_hidden_layers):
        kls = profile.errors(layer).dense * effects.dense[layer]  # [M, 2]
        names = [role.removeprefix(f"layers.{layer}.") for role in roundable_roles(profile.spec, layer)]
        dense += [DenseMatrix(layer, name, _known(kl)) for name, kl in zip(names, kls, strict=True)]
    return Sensitivity(
        matrices=MATRICES,
        widths=WIDTHS,
        kinds=KINDS,
        sparsities=SPARSITIES,
        dense_widths=DENSE_WIDTHS,
        quantized=Packed.of(quantized),
        sparse=Packed.of(sparse),
        dense=tuple(dense),
        embedding=_known(effects.embedding),
        head=_known(effects.head),
    )


def prediction(profile: Profile, counted: Counted) -> Prediction:
    """How experts and neurons are foretold, layer by layer."""
    later = _later(profile)
    measured = bool(later) and profile.has_predictors(later[0])
    return Prediction(
        predictors=PREDICTORS,
        kinds=KINDS,
        sparsities=SPARSITIES,
        layers=tuple(_layer_prediction(profile, l) for l in later) if measured else (),
        cosine=tuple(_known(counted.cosine[l]) for l in later),
    )


def _layer_prediction(profile: Profile, layer_idx: int) -> LayerPrediction:
    held = profile.predictors(layer_idx)
    return LayerPrediction(
        experts=tuple(_known(row) for row in held.experts),
        best=int(held.best[0]),
        neurons=tuple(tuple(_known(level) for level in kind) for kind in held.neurons),
    )


def _known(values: Array) -> tuple[float | None, ...]:
    """The values, None for those that are no numbers: JSON has none."""
    return tuple(value if np.isfinite(value) else None for value in values.tolist())


def paths(profile: Profile, counted: Counted) -> Paths:
    """The paths tokens take, and how far they foretell the next expert.

    Judged on those held-out tokens that the predictors are judged on: more would take minutes in large models.
    """
    E, k = profile.spec.router.num_experts, profile.spec.router.num_experts_per_tok
    text = profile.facts.text
    first = first_moe_layers(profile.spec)
    shares = Shares.of(text.num_sequences, profile.layer_tokens, text.num_held_out)
    judged = counted.routes[shares.tokens()[1]]
    statistics = profile.paths() if len(judged) else None
    accumulated = [] if statistics is None else accumulated_frequency(statistics, judged, first).tolist()
    return Paths(
        curve_percents=CURVE_PERCENTS,
        covered_percents=COVERED_PERCENTS,
        windows=tuple(_window(found, profile) for found in path_coverage(counted.routes, E, first)),
        num_judged=len(judged),
        recalls=() if statistics is None else evaluate(statistics, judged, k, first),
        accumulated=tuple(tuple(tuple(layer) for layer in known) for known in accumulated),
    )


def _window(found: PathCoverage, profile: Profile) -> Window:
    taken = np.concatenate([[0], np.cumsum(found.frequencies, dtype=np.int64)])
    nums = [-(-percent * found.num_paths // 100) for percent in CURVE_PERCENTS]  # rounded up to whole paths
    return Window(
        layers=profile.spec.moe_layers[found.first_layer : found.first_layer + found.num_layers],
        num_paths=found.num_paths,
        num_single=int((found.frequencies == 1).sum()),
        covered=found.covered,
        curve=tuple((taken[nums] / taken[-1]).tolist()),
    )


def coverage(profile: Profile, counted: Counted) -> Coverage:
    """Which experts the text reached too seldom."""
    found = measure_coverage(counted.routes, profile.spec.router.num_experts)
    layers = profile.spec.moe_layers
    fewest = np.argsort(found.tokens, axis=None, kind="stable")[:MOST_LISTED]

    return Coverage(
        min_tokens=MIN_TOKENS,
        unreached=_by_layer(found.unreached, layers),
        scarce=_by_layer(found.scarce, layers),
        least=tuple(
            Reached(layers[l], e, int(found.tokens[l, e]), float(found.low[l, e]), float(found.high[l, e]))
            for l, e in (divmod(int(place), found.tokens.shape[1]) for place in fewest)
        ),
    )


def _by_layer(places: tuple[tuple[int, int], ...], layers: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    held = {l: tuple(e for other, e in places if other == l) for l in sorted({l for l, _ in places})}
    return tuple((layers[l], experts) for l, experts in held.items())
