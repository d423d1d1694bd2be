"""Makes a profile: the stages one after the other, each layer's result in a file of its own, resumable after any.

    statistics      one pass over all tokens, a file a MoE layer, and one of what its experts were given of some;
                    then path statistics from the routes
    sensitivity     one pass over fewer tokens and their perturbed copies, a file a layer; then what errors cost
                    with `exact` besides, a pass with each expert at 2 bits alone, one file
    predictors      a file a MoE layer but the first, from the layers' inputs that the first stage kept

The same checkpoint, tokens and options give the same profile, up to float rounding, whatever the chunks; killed and
begun again, it ends in the same bytes as without.
"""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from moe_pack.calib.arrays import Array, read_all_arrays
from moe_pack.calib.costs import (
    Cost,
    Trial,
    expert_multiplications,
    half_multiplications,
    kind_of,
    kinds_of_layers,
    prediction_cost,
)
from moe_pack.calib.effects import LayerErrors, Level, factors
from moe_pack.calib.exact import ExactPass
from moe_pack.calib.expert_inputs import ExpertInputs, KeptInputs, input_bytes, input_pieces, num_kept_sequences
from moe_pack.calib.expert_pass import CHUNK_TOKENS, HOT_SPARSITIES, sample_places
from moe_pack.calib.held import HeldWeights
from moe_pack.calib.layer_inputs import InputFiles, Shares
from moe_pack.calib.layer_pass import LayerStates, LayerTokens
from moe_pack.calib.paths import learn_paths
from moe_pack.calib.prediction import LayerInputs, predict_layer
from moe_pack.calib.profile import (
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
from moe_pack.calib.provenance import made_with, source_digest
from moe_pack.calib.sensitivity import SensitivityPass
from moe_pack.calib.sequences import Sequences, check_length, stack_tokens
from moe_pack.calib.statistics import LayerStatistics, measure_layer
from moe_pack.calib.store import PROFILE_FILE, ProfileStore, tidy
from moe_pack.calib.text import Tokens, num_held_out
from moe_pack.formats import (
    NO_PROGRESS,
    Checkpoint,
    ContentFile,
    ConversionError,
    Progress,
    RangeReader,
    canonical,
    dump,
    first_moe_layers,
    option,
)
from moe_pack.runtime import CheckpointWeights, PathStatistics, embed, give_back_freed

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
        self._weights = HeldWeights(CheckpointWeights(checkpoint, device))
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
