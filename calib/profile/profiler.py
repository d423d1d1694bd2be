"""Makes a profile: the stages one after the other, each layer's result in a file of its own, resumable after any.

    statistics      one pass over all tokens, a file a MoE layer, and one of what its experts were given of some;
                    then path statistics from the routes
    sensitivity     one pass over fewer tokens and their perturbed copies, a file a layer; then what errors cost
                    with `exact` besides, a pass with each expert at 2 bits alone, one file
    predictors      a file a MoE layer but the first, from the layers' inputs that the first stage kept

The same checkpoint, tokens and options give the same profile, up to float rounding, whatever the chunks; killed and
begun again, it ends in the same bytes as without.

What a profile knows of routes, put beside a pack of the same model, where the runtime looks for it.
"""

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from moe_pack.calib.forward import (
    CHUNK_TOKENS,
    HOT_SPARSITIES,
    PROFILE_FILE,
    Array,
    ExpertInputs,
    KeptInputs,
    LayerStates,
    LayerTokens,
    LayerwiseWeights,
    ProfileStore,
    Sequences,
    Tokens,
    check_length,
    input_bytes,
    input_pieces,
    made_with,
    num_held_out,
    num_kept_sequences,
    packed_source_digest,
    read_all_arrays,
    sample_places,
    source_digest,
    stack_tokens,
    tidy,
)
from moe_pack.calib.profile.profile import (
    EFFECTS_FILE,
    EXACT_FILE,
    FORMAT,
    PATHS_FILE,
    TOKENS_FILE,
    VERSION,
    Profile,
    ProfileFacts,
    Sensitivity,
    TextFacts,
    facts_bytes,
    layer_file,
)
from moe_pack.calib.sensitivity import (
    Cost,
    ExactPass,
    LayerErrors,
    Level,
    SensitivityPass,
    Trial,
    expert_multiplications,
    factors,
    half_multiplications,
    kind_of,
    kinds_of_layers,
    prediction_cost,
)
from moe_pack.calib.statistics import (
    InputFiles,
    LayerInputs,
    LayerStatistics,
    Shares,
    learn_paths,
    measure_layer,
    predict_layer,
    shapes_for,
)
from moe_pack.formats import (
    NO_PROGRESS,
    ConversionError,
    ModelSpec,
    Pack,
    PlanError,
    Progress,
    RangeReader,
    canonical,
    dump,
    option,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.manifest import ContentFile
from moe_pack.formats.sidecar import tensor_sidecar_bytes
from moe_pack.formats.spec import first_moe_layers
from moe_pack.runtime import give_back_freed
from moe_pack.runtime.model import CheckpointWeights, embed
from moe_pack.runtime.offload import MAX_PREVIOUS, PREDICTORS, PathStatistics, Predictor, Routing
from moe_pack.runtime.offload.routing_file import MAX_ROUTED_TOKENS, NO_PREDICTOR, write_routing

PATH_BYTES = 8 << 20  # of path statistics at most, where their tables allow


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure. `chunk_tokens`: tokens of an expert at once; bounds memory, changes nothing but rounding.

    `keeps_inputs`: of what experts are given, for calibrated rounding (`expert_inputs`).
    """

    sensitivity: Sensitivity = field(
        default="fast",
        metadata=option(
            "--sensitivity",
            help="What each width and sparsity costs: none; fast, on few tokens with plain rounding scaled to hqq; "
            "full, on more with hqq itself, each matrix on its own; exact, besides each expert at 2 bits alone, as "
            "EdgeMoE does.",
        ),
    )
    chunk_tokens: int = CHUNK_TOKENS
    keeps_inputs: bool = field(
        default=True,
        metadata=option(
            "--inputs/--no-inputs",
            help="Keep what experts were given of some of the text (of 2,048 tokens an expert on average, none held "
            "out): calibrated rounding needs it, nothing else does. 2 bytes a token, hidden value and layer.",
        ),
    )


def make_profile(
    checkpoint: Checkpoint,
    tokens: Tokens,
    folder: Path,
    options: ProfileOptions,
    progress: Progress = NO_PROGRESS,
    device: torch.device | None = None,
) -> Profile:
    """Profiles a checkpoint on some tokens into `folder`, going on where a killed run stopped.

    Raises:  ConversionError if the folder holds something else; CheckpointError for weights that are no numbers;
             RunError for sequences longer than the model's positions.
    """
    check_length(checkpoint.spec, tokens.sequences.shape[1])
    facts = _facts(checkpoint, tokens, options)
    if (folder / PROFILE_FILE).exists():
        found = Profile(folder)
        if _identity(found.facts) != _identity(facts):
            raise ConversionError(f"{folder}: holds another profile; give another output folder, or remove this one")
        tidy(folder)  # a run killed in its last moment left it so
        return found
    store = ProfileStore(folder, _identity(facts))
    try:
        run = _Run(checkpoint, tokens, store, options, facts.text.num_kept, progress, device or torch.device("cpu"))
        run.keep_tokens()
        run.statistics()
        run.paths()
        if options.sensitivity != "none":
            run.sensitivity("fast" if options.sensitivity == "fast" else "full")
        if options.sensitivity == "exact":
            run.exact()
        run.predictors()
        files = tuple(_listed(path) for path in sorted(folder.glob("*.safetensors")))
        store.seal(facts_bytes(dataclasses.replace(facts, files=files)))
    finally:
        store.close()
    return Profile(folder)


class _Run:
    """One profile in the making."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokens: Tokens,
        store: ProfileStore,
        options: ProfileOptions,
        num_kept: int,
        progress: Progress,
        device: torch.device,
    ) -> None:
        self._spec = checkpoint.spec
        self._weights = LayerwiseWeights(CheckpointWeights(checkpoint, device))
        self._ids = torch.from_numpy(tokens.sequences.astype(np.int64))
        self._store = store
        self._options = options
        self._progress = progress
        self._device = device
        self._given = Sequences.of(self._spec, self._ids)
        self._shares = Shares.of(len(self._ids), self._given.length, num_held_out(len(self._ids)))
        self._num_held_out_tokens = num_held_out(len(self._ids)) * self._given.length
        self._kept = sample_places(len(self._ids) - num_held_out(len(self._ids)), num_kept)
        self._first_layers = first_moe_layers(self._spec)
        self._inputs = InputFiles(store.work, self._spec.hidden_size, self._shares, self._first_layers)

    def keep_tokens(self) -> None:
        """The tokens themselves, for whoever measures something else on the same text."""
        if not self._store.has(TOKENS_FILE):
            self._store.write(TOKENS_FILE, {"tokens": self._ids.numpy().astype(np.uint32)})

    def statistics(self) -> None:
        """The first stage: a file a MoE layer."""
        if all(self._store.has(layer_file("statistics", layer)) for layer in self._spec.moe_layers):
            return
        num_sequences, S = self._given.ids.shape
        first, answer = self._given.begun(lambda ids, number: embed(ids[number], self._weights))
        folder = self._store.work / "statistics"
        states = LayerStates(self._weights, first, num_sequences, S, folder, self._device, answer=answer)
        layers = range(states.next_layer, self._spec.num_hidden_layers)
        self._progress.begin((self._statistics_cost(Trial(self._weights, states), layers)).stage("statistics"))
        for layer in layers:
            tokens = states.enter(layer)
            half = half_multiplications(self._spec, layer, S) * len(tokens.x)
            self._progress.advance(half, f"layer {layer}")
            if layer in self._spec.moe_layers:
                self._count_layer(states, tokens, layer)
            states.leave(layer, tokens)
            del tokens  # or there would be two layers' while the next is entered
        states.close()
        self._progress.end()

    def _count_layer(self, states: LayerStates, tokens: LayerTokens, layer: int) -> None:
        layer_idx = self._spec.moe_layers.index(layer)
        one = expert_multiplications(self._spec)
        if len(self._kept):  # before the statistics: where these are, a layer is done
            pieces = input_pieces(self._spec, tokens, self._given.length, self._kept)
            self._store.replace(layer_file("inputs", layer), pieces)

        def on_expert(expert: int, num_tokens: int) -> None:
            self._progress.advance(one * num_tokens, f"layer {layer} expert {expert}")

        found = measure_layer(
            states,
            tokens,
            self._weights,
            layer_idx,
            self._inputs.keep(layer_idx, tokens.inputs),
            self._num_held_out_tokens,
            on_expert,
            self._options.chunk_tokens,
            self._device,
        )
        self._store.write(layer_file("statistics", layer), found.arrays())

    def paths(self) -> None:
        """Path statistics, from the routes of the tokens that are not held out."""
        if self._store.has(PATHS_FILE):
            return
        routes = np.stack([self._counted(l).routes for l in range(len(self._spec.moe_layers))], axis=1)  # [T, L, k]
        learned = len(routes) - self._num_held_out_tokens
        found = learn_paths(routes[:learned], self._num_experts, PATH_BYTES, self._first_layers)
        self._store.write(PATHS_FILE, found.arrays())

    def sensitivity(self, level: Level) -> None:
        """The second stage: a file a decoder layer, then what errors cost."""
        if self._store.has(EFFECTS_FILE):
            return
        stage = SensitivityPass(
            self._weights,
            self._ids,
            level,
            self._hot_thresholds,
            self._store.work / "sensitivity",
            self._device,
            KeptInputs(self._kept, self._given.length, self._open_inputs) if len(self._kept) else None,
        )
        layers = range(stage.states.next_layer, self._spec.num_hidden_layers)
        self._progress.begin((stage.cost(layers)).stage("sensitivity"))
        give_back_freed()
        for layer in layers:
            found = stage.layer(layer, self._progress)
            self._store.write(layer_file("sensitivity", layer), found.arrays())
            stage.leave(layer)
            give_back_freed()
        errors = [
            LayerErrors(**self._read(layer_file("sensitivity", layer))) for layer in range(self._spec.num_hidden_layers)
        ]
        measured = stage.divergences(self._progress)
        self._store.write(EFFECTS_FILE, factors(errors, measured, self._spec, level).arrays())
        stage.states.close()
        self._progress.end()

    def exact(self) -> None:
        """EdgeMoE's own measure, after the second stage: one file."""
        if self._store.has(EXACT_FILE):
            return
        stage = ExactPass(self._weights, self._ids, self._store.work / "exact", self._device)
        layers = range(stage.states.next_layer, self._spec.num_hidden_layers)
        self._progress.begin((stage.cost(layers)).stage("each expert at 2 bits"))
        for layer in layers:
            stage.layer(layer, self._progress)
        self._store.write(EXACT_FILE, stage.losses(self._progress))
        stage.states.close()
        self._progress.end()

    def predictors(self) -> None:
        """The last stage: a file a MoE layer, from each stack's second on; none without tokens held out."""
        if not self._shares.num_judged or not self._shares.num_learned:
            return
        paths = PathStatistics.from_arrays(
            self._read(PATHS_FILE),
            PATHS_FILE,
            len(self._spec.moe_layers),
            self._num_experts,
            self._spec.router.num_experts_per_tok,
        )
        left = [
            layer_idx
            for layer_idx, layer in enumerate(self._spec.moe_layers)
            if layer_idx not in self._first_layers and not self._store.has(layer_file("predictors", layer))
        ]
        if not left:
            return
        one = prediction_cost(self._spec, self._shares.num_learned * self._given.length)
        self._progress.begin((one * len(left)).stage("predictors"))
        for layer_idx in left:
            begin = max(first for first in self._first_layers if first <= layer_idx)  # of its stack
            history = [self._layer_inputs(l) for l in range(max(layer_idx - 2, begin), layer_idx + 1)]
            thresholds = self._hot_thresholds(layer_idx)
            found = predict_layer(self._weights, layer_idx, history, paths, thresholds, self._device)
            layer = self._spec.moe_layers[layer_idx]
            self._store.write(layer_file("predictors", layer), found.arrays())
            self._progress.advance(one.multiplications, f"layer {layer}")
        self._progress.end()

    @property
    def _num_experts(self) -> int:
        return self._spec.router.num_experts

    def _statistics_cost(self, trial: Trial, layers: range) -> Cost:
        """Of the layers left; layers of a kind are tried once."""
        router = self._spec.router
        tokens_an_expert = self._given.ids.numel() * router.num_experts_per_tok / router.num_experts
        counted = trial.counted(tokens_an_expert) * router.num_experts
        if len(self._kept):
            counted += Cost(kept_bytes=input_bytes(self._spec, len(self._kept) * self._given.length))
        halves = {kind: trial.half(kind) * len(self._ids) for kind in kinds_of_layers(self._spec)}
        return sum(
            (halves[kind_of(self._spec, l)] + (counted if l in self._spec.moe_layers else Cost()) for l in layers),
            start=Cost(),
        )

    def _read(self, name: str) -> dict[str, Array]:
        return read_all_arrays(self._store.folder / name)

    def _counted(self, layer_idx: int) -> LayerStatistics:
        name = layer_file("statistics", self._spec.moe_layers[layer_idx])
        return LayerStatistics.from_arrays(self._read(name), name, self._spec, self._given.ids.numel())

    def _open_inputs(self, layer_idx: int) -> ExpertInputs:
        path = self._store.folder / layer_file("inputs", self._spec.moe_layers[layer_idx])
        return ExpertInputs(path, self._spec, len(self._kept) * self._given.length)

    def _hot_thresholds(self, layer_idx: int) -> Array:
        return self._counted(layer_idx).at_sparsities(HOT_SPARSITIES)

    def _layer_inputs(self, layer_idx: int) -> LayerInputs:
        routes = torch.from_numpy(self._counted(layer_idx).routes.astype(np.int64))
        return self._inputs.read(layer_idx, routes)


def _facts(checkpoint: Checkpoint, tokens: Tokens, options: ProfileOptions) -> ProfileFacts:
    """What is known of a profile before it is made."""
    num_sequences, sequence_length = tokens.sequences.shape
    num_last = num_held_out(num_sequences)
    seen = stack_tokens(checkpoint.spec, sequence_length)
    num_kept = num_kept_sequences(checkpoint.spec, num_sequences - num_last, seen) if options.keeps_inputs else 0
    text = TextFacts(tokens.name, tokens.sha256, num_sequences, sequence_length, num_last, num_kept)
    source = source_digest(checkpoint)
    return ProfileFacts(FORMAT, VERSION, checkpoint.spec, source, text, options.sensitivity, made_with(), (), "")


def _identity(facts: ProfileFacts) -> str:
    """What tells a profile from others: all but what it found."""
    return hashlib.sha256(canonical(dump(dataclasses.replace(facts, files=(), sha256="")))).hexdigest()


def _listed(path: Path) -> ContentFile:
    with RangeReader(path, ConversionError) as reader:
        return ContentFile(path.name, reader.num_bytes, reader.sha256())


_KEY_ARRAY_BYTES = 512  # at most, of an array's name, numbers and padding


def attach(pack: Pack, profile: Profile) -> Routing:
    """Writes `routing.safetensors` beside a pack from a profile of the checkpoint that it was made from.

    Raises:  PlanError if the profile is of another checkpoint; ConversionError if somebody is writing in the folder.
    """
    _check_same(pack, profile)
    routing = routing_of(profile)
    write_routing(pack, routing)
    return routing


def routing_of(profile: Profile, most_tokens: int = MAX_ROUTED_TOKENS) -> Routing:
    """What a runtime wants of a profile; networks are read from it when they are asked for.

    Args:    most_tokens: whose routes are kept.
    """
    layers = range(len(profile.spec.moe_layers))
    popularity, mass, routes = [], [], []
    length = min(profile.layer_tokens, most_tokens)
    kept = _kept_tokens(profile, length, most_tokens)
    for layer_idx in layers:
        counted = profile.statistics(layer_idx)
        popularity.append(counted.chosen())
        mass.append(counted.mass)
        routes.append(counted.routes[kept])
    recalls = np.full((len(layers), len(PREDICTORS), 3), np.nan, "<f4")
    best = np.full(len(layers), NO_PREDICTOR, "<u1")
    for layer_idx in layers:
        if profile.has_predictors(layer_idx):
            judged = profile.predictors(layer_idx)
            recalls[layer_idx], best[layer_idx] = judged.experts, judged.best[0]

    def network(layer_idx: int) -> Predictor:
        return profile.predictors(layer_idx).network

    joined: Array = np.stack(routes, axis=1)  # [T, k] of each layer -> [T, L, k]
    return Routing(np.stack(popularity), np.stack(mass), profile.paths(), recalls, best, joined, length, network)


def most_routing_bytes(spec: ModelSpec) -> int:
    """The most that `routing.safetensors` can take beside a pack of this model, whatever was profiled.

    Meaning: routes of as many tokens as are kept, tables of as many counts as can be and keys up to PATH_BYTES, and
             for every layer but the first the larger network; with an encoder its decoder's first has none either.
    """
    L, E, k, d = len(spec.moe_layers), spec.router.num_experts, spec.router.num_experts_per_tok, spec.hidden_size
    tables = {"popularity": (L, E), "after_one": (max(L - 1, 0), E, E), "after_two": (max(L - 2, 0), E, E)}
    keys = max(0, PATH_BYTES - sum(4 * math.prod(shape) for shape in tables.values()))
    h = shapes_for(d, E)[1].hidden
    arrays = [
        ("popularity", "U32", (L, E)),
        ("mass", "F32", (L, E)),
        ("recalls", "F32", (L, len(PREDICTORS), 3)),
        ("best", "U8", (L,)),
        ("routes", "U16", (MAX_ROUTED_TOKENS, L, k)),
        ("sequence_length", "U32", (1,)),
        *((f"paths.{name}", "U32", shape) for name, shape in tables.items()),
        ("paths.key_starts", "U32", (L + 1,)),
        # Each of the six other arrays of keys is padded by itself, and has a name in the header.
        ("paths.keys", "U8", (keys + 6 * _KEY_ARRAY_BYTES,)),
    ]
    for layer_idx in range(1, L):
        network = {
            "x_weight": ("BF16", (h, d)),
            "route_weight": ("BF16", (h, MAX_PREVIOUS, E)),
            "bias": ("F32", (h,)),
            "out_weight": ("BF16", (E, h)),
            "out_bias": ("F32", (E,)),
        }
        arrays += [(f"network.{layer_idx}.{name}", *held) for name, held in network.items()]
    return tensor_sidecar_bytes(arrays)


def _kept_tokens(profile: Profile, length: int, most_tokens: int) -> slice:
    """The first held-out tokens, in sequences of `length`: whole ones, or the first part of one that is too long."""
    first = profile.num_tokens - profile.num_held_out_tokens
    return slice(first, first + min(profile.facts.text.num_held_out, most_tokens // length) * length)


def _check_same(pack: Pack, profile: Profile) -> None:
    if (profile.spec, profile.facts.source) != (pack.spec, packed_source_digest(pack)):
        what = "of another model" if profile.spec != pack.spec else "of another checkpoint of this model"
        raise PlanError(f"--profile {profile.folder}: found a profile {what}; profile the one packed in {pack.folder}")
