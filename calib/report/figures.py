"""The figures of a report as frozen dataclasses, whose JSON is the page's input; large arrays are `Packed`."""

import base64
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_pack.calib import forward, statistics
from moe_pack.calib.profile import Profile
from moe_pack.calib.sensitivity import DENSE_WIDTHS, errors
from moe_pack.formats.parts import specs
from moe_pack.runtime.offload import PREDICTORS

MOST_FULL_EXPERTS = 2048  # of all layers: beyond them 103 quantiles an expert and kind make a page of more than 4 MB
THINNED_LEVELS = (*(number / 100 for number in range(0, 100, 5)), 0.97, 0.99, 0.995, 0.999, 1.0)
CURVE_PERCENTS = (0, 1, 2, 5, *range(10, 101, 5))
MOST_LISTED = 24  # least covered experts that are drawn with their intervals
_NUMPY = {"f32": "<f4", "u32": "<u4"}


@dataclass(frozen=True, slots=True)
class Packed:
    """An array as the page unpacks it: little-endian bytes in base64, exact and shorter than digits."""

    dtype: Literal["f32", "u32"]
    shape: tuple[int, ...]
    base64: str

    @classmethod
    def of(cls, values: forward.Array, dtype: Literal["f32", "u32"] = "f32") -> "Packed":
        """Packs an array of any dtype as float32 or uint32."""
        raw = values.astype(_NUMPY[dtype]).tobytes()
        return cls(dtype, values.shape, base64.b64encode(raw).decode("ascii"))

    def array(self) -> forward.Array:
        """Returns the array."""
        return np.frombuffer(base64.b64decode(self.base64), _NUMPY[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Head:
    """The model, its text and its measurements."""

    family: str
    num_hidden_layers: int
    layers: tuple[int, ...]  # those that have experts; the page names layers by these numbers
    predicted_layers: tuple[int, ...]  # those of them that follow another one in their stack
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    num_parameters: int
    num_active_parameters: int
    text: str
    num_tokens: int  # the tokens of text that each layer saw
    num_held_out_tokens: int
    num_sequences: int
    sequence_length: int
    sensitivity: str
    made_with: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Popularity:
    """How often experts were chosen, [L, E] for L layers and E experts."""

    tokens: Packed  # that chose the expert
    low: Packed  # the 95% interval of its share of all tokens, to `high`
    high: Packed
    mass: Packed  # its share of the layer's router weights
    tests: tuple[statistics.PopularityTest, ...]  # for each layer, on held-out text; empty if no text was held out


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Quantiles of abs(a)."""

    kinds: tuple[str, ...]
    levels: tuple[float, ...]  # a part of the `num_measured` in the profile
    num_measured: int
    quantiles: Packed  # [L, E, kinds, levels]


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """The predicted KL divergence in nats of one dense matrix, at each of `Sensitivity.dense_widths`."""

    layer: int
    role: str
    kl: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Predicted KL divergences in nats, error times effect."""

    matrices: tuple[str, ...]
    widths: tuple[int, ...]
    kinds: tuple[str, ...]
    sparsities: tuple[float, ...]
    dense_widths: tuple[int, ...]
    quantized: Packed  # [L, E, 3, 4] by matrix and width
    sparse: Packed  # [L, E, 3, 4] by kind and sparsity
    dense: tuple[DenseMatrix, ...]
    embedding: tuple[float | None, ...]  # at each of `dense_widths`; `head` too
    head: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """How well a layer's experts and neurons are predicted."""

    # For each predictor the recall of k experts, then recall and precision of 2k
    experts: tuple[tuple[float | None, ...], ...]
    best: int  # the index of the best predictor
    # Recall and precision by kind and sparsity; None if no held-out token came
    neurons: tuple[tuple[tuple[float | None, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well experts and neurons are predicted in each of `Head.predicted_layers`; empty without held-out text."""

    predictors: tuple[str, ...]
    kinds: tuple[str, ...]
    sparsities: tuple[float, ...]
    layers: tuple[LayerPrediction, ...]
    # Mean and deviation of the cosine between a layer's input and that of the layer before
    cosine: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The paths through some successive layers."""

    layers: tuple[int, ...]
    num_paths: int  # distinct paths
    num_single: int  # paths that one token took
    # Of all tokens on the most frequent paths, at each of `Paths.covered_percents` of the paths
    covered: tuple[float, ...]
    curve: tuple[float, ...]  # the same at `Paths.curve_percents`


@dataclass(frozen=True, slots=True)
class Paths:
    """EdgeMoE's figures on paths: Fig. 4 on all tokens, its path statistics and Fig. 8 (right) on held-out tokens."""

    curve_percents: tuple[int, ...]
    covered_percents: tuple[int, ...]
    windows: tuple[Window, ...]
    num_judged: int  # how many held-out tokens
    recalls: tuple[statistics.LayerRecall, ...]  # of each layer; empty without held-out text, as `accumulated`
    # [3, L, n]: the share of choices on the n likeliest experts, with no, one and two earlier layers known.
    accumulated: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """How many tokens reached an expert, with the 95% interval of its share of all tokens."""

    layer: int
    expert: int
    num_tokens: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """Experts that few tokens reached."""

    min_tokens: int
    unreached: tuple[tuple[int, tuple[int, ...]], ...]  # for each layer that has such experts, those without tokens
    scarce: tuple[tuple[int, tuple[int, ...]], ...]  # the same for those with fewer than `min_tokens`
    least: tuple[Reached, ...]  # the experts with the fewest tokens of all layers


@dataclass(frozen=True, slots=True, eq=False)
class LayerCounts:
    """The part of all layers' statistics that figures need."""

    routes: forward.Array  # uint16 [T, L, k]
    mass: forward.Array  # float32 [L, E]
    quantiles: forward.Array  # float32 [L, E, kinds, levels]
    cosine: forward.Array  # float32 [L, 2]


def read_counts(profile: Profile, levels: tuple[float, ...]) -> LayerCounts:
    """Reads the statistics of all layers, with the quantiles at these levels only; one file is open at a time."""
    layers = []
    for l in range(len(profile.spec.moe_layers)):
        layer = profile.statistics(l)
        layers.append((layer.routes, layer.mass, layer.at_sparsities(levels), layer.cosine))
    routes, mass, quantiles, cosine = zip(*layers, strict=True)
    return LayerCounts(np.stack(routes, axis=1), np.stack(mass), np.stack(quantiles), np.stack(cosine))


def levels_for(profile: Profile) -> tuple[float, ...]:
    """Returns the levels of quantiles that fit on a page with the profile's number of experts."""
    num_experts = len(profile.spec.moe_layers) * profile.spec.router.num_experts
    return statistics.QUANTILE_LEVELS if num_experts <= MOST_FULL_EXPERTS else THINNED_LEVELS


def head(profile: Profile) -> Head:
    """Returns the model, its text and what was measured."""
    spec, text = profile.spec, profile.facts.text
    return Head(
        family=spec.family,
        num_hidden_layers=spec.num_hidden_layers,
        layers=spec.moe_layers,
        predicted_layers=tuple(spec.moe_layers[l] for l in _later(profile)),
        num_experts=spec.router.num_experts,
        num_experts_per_tok=spec.router.num_experts_per_tok,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.expert.intermediate_size,
        num_parameters=specs.num_parameters(spec),
        num_active_parameters=specs.num_active_parameters(spec),
        text=text.name,
        num_tokens=profile.num_tokens,
        num_held_out_tokens=profile.num_held_out_tokens,
        num_sequences=text.num_sequences,
        sequence_length=text.sequence_length,
        sensitivity=profile.facts.sensitivity,
        made_with=tuple(f"{package.name} {package.version}" for package in profile.facts.made_with),
    )


def _later(profile: Profile) -> tuple[int, ...]:
    """Returns the indices of the MoE layers that follow another one in their stack."""
    first = specs.first_moe_layers(profile.spec)
    return tuple(l for l in range(len(profile.spec.moe_layers)) if l not in first)


def popularity(profile: Profile, counts: LayerCounts) -> Popularity:
    """Returns how often experts were chosen, and whether held-out text chooses the same ones."""
    E, learned = profile.spec.router.num_experts, profile.num_tokens - profile.num_held_out_tokens
    covered = statistics.measure_coverage(counts.routes, E)
    mass = counts.mass.astype(np.float64)
    tested = profile.num_held_out_tokens > 0
    return Popularity(
        tokens=Packed.of(covered.tokens, "u32"),
        low=Packed.of(covered.low),
        high=Packed.of(covered.high),
        mass=Packed.of(mass / np.maximum(mass.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)),
        tests=statistics.compare_popularity(counts.routes[:learned], counts.routes[learned:], E) if tested else (),
    )


def sparsity(counts: LayerCounts, levels: tuple[float, ...]) -> Sparsity:
    """Returns the distributions from which thresholds are taken."""
    return Sparsity(forward.KINDS, levels, len(statistics.QUANTILE_LEVELS), Packed.of(counts.quantiles))


def predicted_kl(profile: Profile) -> tuple[forward.Array, forward.Array]:
    """Returns losses in nats, float32 [L, E, 3, 4] each: by matrix and width, by kind and sparsity."""
    losses = [profile.layer_losses(layer) for layer in profile.spec.moe_layers]
    return np.stack([layer.quantized for layer in losses]), np.stack([layer.sparse for layer in losses])


def sensitivity(profile: Profile, quantized: forward.Array, sparse: forward.Array) -> Sensitivity:
    """Returns what widths and sparsities cost, from `predicted_kl`."""
    effects = profile.effects()
    dense = []
    for layer in range(profile.spec.num_hidden_layers):
        kls = profile.layer_losses(layer).dense  # [M, 2]
        names = [role.removeprefix(f"layers.{layer}.") for role in errors.roundable_roles(profile.spec, layer)]
        dense += [DenseMatrix(layer, name, _known(kl)) for name, kl in zip(names, kls, strict=True)]
    return Sensitivity(
        matrices=specs.MATRICES,
        widths=errors.WIDTHS,
        kinds=forward.KINDS,
        sparsities=errors.SPARSITIES,
        dense_widths=DENSE_WIDTHS,
        quantized=Packed.of(quantized),
        sparse=Packed.of(sparse),
        dense=tuple(dense),
        embedding=_known(effects.embedding),
        head=_known(effects.head),
    )


def prediction(profile: Profile, counts: LayerCounts) -> Prediction:
    """Returns how well experts and neurons are predicted, layer by layer."""
    later = _later(profile)
    measured = bool(later) and profile.has_predictors(later[0])
    return Prediction(
        predictors=PREDICTORS,
        kinds=forward.KINDS,
        sparsities=errors.SPARSITIES,
        layers=tuple(
            LayerPrediction(
                experts=tuple(map(_known, judged.experts)),
                best=int(judged.best[0]),
                neurons=tuple(tuple(map(_known, kind)) for kind in judged.neurons),
            )
            for judged in map(profile.predictors, later if measured else ())
        ),
        cosine=tuple(_known(counts.cosine[l]) for l in later),
    )


def _known(values: forward.Array) -> tuple[float | None, ...]:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    return tuple(value if np.isfinite(value) else None for value in values.tolist())


def paths(profile: Profile, counts: LayerCounts) -> Paths:
    """Returns the paths of tokens, and their predictions on the tokens that judge predictors: all take minutes."""
    E, k = profile.spec.router.num_experts, profile.spec.router.num_experts_per_tok
    text = profile.facts.text
    first = specs.first_moe_layers(profile.spec)
    shares = statistics.Shares.of(text.num_sequences, profile.layer_tokens, text.num_held_out)
    judged = counts.routes[shares.tokens()[1]]
    known_paths = profile.paths() if len(judged) else None
    accumulated = [] if known_paths is None else statistics.accumulated_frequency(known_paths, judged, first).tolist()
    return Paths(
        curve_percents=CURVE_PERCENTS,
        covered_percents=statistics.COVERED_PERCENTS,
        windows=tuple(_window(window, profile) for window in statistics.path_coverage(counts.routes, E, first)),
        num_judged=len(judged),
        recalls=() if known_paths is None else statistics.evaluate(known_paths, judged, k, first),
        accumulated=tuple(tuple(tuple(layer) for layer in known) for known in accumulated),
    )


def _window(window: statistics.PathCoverage, profile: Profile) -> Window:
    taken = np.concatenate([[0], np.cumsum(window.frequencies, dtype=np.int64)])
    num_paths = len(window.frequencies)
    nums = [-(-percent * num_paths // 100) for percent in CURVE_PERCENTS]  # rounded up to whole paths
    return Window(
        layers=profile.spec.moe_layers[window.first_layer : window.first_layer + window.num_layers],
        num_paths=num_paths,
        num_single=int((window.frequencies == 1).sum()),
        covered=window.covered,
        curve=tuple((taken[nums] / taken[-1]).tolist()),
    )


def coverage(profile: Profile, counts: LayerCounts) -> Coverage:
    """Returns the experts that the text reached too seldom."""
    covered = statistics.measure_coverage(counts.routes, profile.spec.router.num_experts)
    layers = profile.spec.moe_layers
    fewest = np.argsort(covered.tokens, axis=None, kind="stable")[:MOST_LISTED]
    return Coverage(
        min_tokens=statistics.MIN_TOKENS,
        unreached=_by_layer(covered.unreached, layers),
        scarce=_by_layer(covered.scarce, layers),
        least=tuple(
            Reached(layers[l], e, int(covered.tokens[l, e]), float(covered.low[l, e]), float(covered.high[l, e]))
            for l, e in (divmod(int(place), covered.tokens.shape[1]) for place in fewest)
        ),
    )


def _by_layer(places: tuple[tuple[int, int], ...], layers: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    by_layer = {l: tuple(e for other, e in places if other == l) for l in sorted({l for l, _ in places})}
    return tuple((layers[l], experts) for l, experts in by_layer.items())
