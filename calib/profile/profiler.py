"""Makes a profile, stage by stage: statistics, rotation, sensitivity, predictors; each layer's result is a file.

The same checkpoint, tokens and options give the same profile up to float rounding, whatever the chunks. A run that was
killed and started again gives the same bytes, and so do several parts that share results (`forward.shared`): each runs
all stages, and one that falls behind does what a killed run does.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moe_pack import formats
from moe_pack.calib import forward, quantize, sensitivity, statistics
from moe_pack.calib.forward import shared
from moe_pack.calib.forward.store import WORK_FOLDER
from moe_pack.calib.profile import profiles
from moe_pack.calib.profile.options import ProfileOptions
from moe_pack.calib.sensitivity import costs
from moe_pack.formats.base import commands
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import manifests
from moe_pack.formats.pack.sidecar import tensor_sidecar_bytes
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import give_back_freed, model, offload
from moe_pack.runtime.offload import routing_file

_ROTATED = b"rotated"  # what the file of a judged layer contains if it is to be rotated
PATH_BYTES = 8 << 20  # the most that path statistics have, unless their tables alone have more


def make_profile(
    checkpoint: Checkpoint,
    tokens: forward.Tokens,
    folder: Path,
    options: ProfileOptions,
    progress: formats.Progress = formats.NO_PROGRESS,
    device: torch.device | None = None,
    part: commands.Part | None = None,
) -> profiles.Profile:
    """Profiles a checkpoint on some tokens into `folder`, and continues where a killed run stopped.

    Args:    part: the number of this process among several that make the profile together; None: the only one.
    Raises:  ConversionError if the folder contains something else; CheckpointError for weights that are not finite.
    """
    forward.check_length(checkpoint.spec, tokens.sequences.shape[1])
    facts = _facts(checkpoint, tokens, options)
    if (profile := finished(folder, facts)) is not None:
        return profile
    try:
        store = forward.ProfileStore(folder, identity_of(facts), part=part)
        with closing(store):
            results = shared.ONE_PROCESS if part is None else shared.SharedResults(store.work / "shared", part)
            device = device or torch.device("cpu")
            _Run(checkpoint, tokens, store, options, facts, progress, device, results).run()
    except (OSError, formats.ConversionError):
        if part is None or not (folder / forward.PROFILE_FILE).exists():
            raise
        # Another part has finished the profile and removed what this one was reading.
    return profiles.Profile(folder)


def finished(folder: Path, facts: profiles.ProfileFacts) -> profiles.Profile | None:
    """Returns the profile with these facts if it is in a folder, else None; ConversionError if another one is there."""
    if not (folder / forward.PROFILE_FILE).exists():
        return None
    profile = profiles.Profile(folder)
    if identity_of(profile.facts) != identity_of(facts):
        raise formats.ConversionError(
            f"{folder}: there is another profile in this folder; give another one, or remove it"
        )
    forward.tidy(folder)  # a run that was killed at its very end may have left work files
    return profile


class _Run:
    def __init__(
        self,
        checkpoint: Checkpoint,
        tokens: forward.Tokens,
        store: forward.ProfileStore,
        options: ProfileOptions,
        facts: profiles.ProfileFacts,
        progress: formats.Progress,
        device: torch.device,
        results: shared.Results,
    ) -> None:
        self._facts = facts
        self._results = results
        self._spec = checkpoint.spec
        self._checkpoint = checkpoint
        self._weights = forward.LayerwiseWeights(model.CheckpointWeights(checkpoint, device))
        self._ids = torch.from_numpy(tokens.sequences.astype(np.int64))
        self._store = store
        self._options = options
        self._progress = progress
        self._device = device
        self._given = forward.Sequences.of(self._spec, self._ids)
        num_held_out = forward.num_held_out(len(self._ids))
        self._shares = statistics.Shares.of(len(self._ids), self._given.length, num_held_out)
        self._num_held_out_tokens = num_held_out * self._given.length
        self._kept = forward.sample_places(len(self._ids) - num_held_out, facts.text.num_kept)
        self._first_layers = first_moe_layers(self._spec)
        self._num_experts = self._spec.router.num_experts
        work, d = store.work, self._spec.hidden_size
        self._inputs = statistics.InputFiles(work, d, self._shares, self._first_layers, results)
        self._partial = statistics.PartialStates(work, self._spec, self._shares, self._num_held_out_tokens, results)

    def run(self) -> None:
        """Runs all stages; enters one again if other parts have removed its input."""
        stages: list[Callable[[], None]] = [self.keep_tokens, self.run_statistics, self.paths, self.rotation]
        if self._options.sensitivity != "none":
            stages.append(self.run_sensitivity)
        if self._options.sensitivity == "exact":
            stages.append(self.exact)
        stages += [self.predictors, self.seal]
        while stages:
            try:
                stages[0]()
                del stages[0]
            except (OSError, shared.PassedError) as fault:
                if not self._results.missed(fault):
                    raise
                self._progress.end()

    @contextmanager
    def _stage(self, name: str, cost: Callable[[], commands.Stage]) -> Iterator[None]:
        """Measures the cost of a stage before it runs."""
        with commands.stage_of(self._progress, f"timing {name}"):
            stage = cost()
        self._progress.begin(stage)
        yield
        self._progress.end()

    def seal(self) -> None:
        paths = sorted(self._store.folder.glob("*.safetensors"))

        def work(number: int) -> shared.Arrays:
            entry = listed(paths[number])
            return torch.tensor([entry.bytes]), torch.frombuffer(bytearray.fromhex(entry.sha256), dtype=torch.uint8)

        with self._results.step("files"):
            found = list(self._results.in_order("digests", work, range(len(paths)), 1))
        files = tuple(
            manifests.ContentFile(path.name, int(num_bytes), digest.numpy().tobytes().hex())
            for path, (num_bytes, digest) in zip(paths, found, strict=True)
        )
        self._store.seal(profiles.facts_bytes(dataclasses.replace(self._facts, files=files)))

    def keep_tokens(self) -> None:
        if not self._store.has(profiles.TOKENS_FILE):
            self._store.write(profiles.TOKENS_FILE, {"tokens": self._ids.numpy().astype(np.uint32)})

    def run_statistics(self) -> None:
        if all(self._store.has(profiles.layer_file("statistics", layer)) for layer in self._spec.moe_layers):
            return
        num_sequences, S = self._given.ids.shape
        beginning, folder = self._given.embedded(self._weights), self._store.work / "statistics"
        states = forward.LayerStates(
            self._weights, beginning, num_sequences, S, folder, self._device, results=self._results
        )
        layers = range(states.next_layer, self._spec.num_hidden_layers)
        with self._stage(
            "statistics", lambda: self._statistics_cost(costs.Trial(self._weights, states), layers).stage("statistics")
        ):
            for layer in layers:
                with self._results.step(f"statistics-{layer:03d}"):
                    tokens = states.enter(layer)
                    half = costs.half_multiplications(self._spec, layer, S) * len(tokens.x)
                    self._progress.advance(half, f"layer {layer}")
                    self._partial.run(layer, states, self._weights)
                    if layer in self._spec.moe_layers:
                        tokens = self._count_layer(states, tokens, layer)
                    states.leave(layer, tokens)
                del tokens  # otherwise two layers' tokens are in memory while the next layer is entered
            states.close()

    def _count_layer(self, states: forward.LayerStates, tokens: forward.LayerTokens, layer: int) -> forward.LayerTokens:
        layer_idx = self._spec.moe_layers.index(layer)
        one = costs.expert_multiplications(self._spec)
        self._partial.begin(layer, tokens)
        measured = statistics.measure_layer(
            states,
            tokens,
            self._weights,
            layer_idx,
            self._inputs.keep(layer_idx, tokens.inputs),
            self._num_held_out_tokens,
            lambda expert, number: self._progress.advance(one * number, f"layer {layer} expert {expert}"),
            partial(self._partial.add, layer),
            self._options.chunk_tokens or forward.CHUNK_TOKENS,
            self._results,
        )
        self._partial.end(layer, states, self._weights)
        tokens = states.summed(layer, tokens)
        if len(self._kept):  # written before the statistics, whose file says that the layer is done
            pieces = forward.input_pieces(self._spec, tokens, self._given.length, self._kept)
            self._store.replace(profiles.layer_file("inputs", layer), pieces)
        self._store.write(profiles.layer_file("statistics", layer), measured.arrays())
        return tokens

    def paths(self) -> None:
        if self._store.has(profiles.PATHS_FILE):
            return
        routes = np.stack([self._counted(l).routes for l in range(len(self._spec.moe_layers))], axis=1)  # [T, L, k]
        learned = len(routes) - self._num_held_out_tokens
        paths = statistics.learn_paths(routes[:learned], self._num_experts, PATH_BYTES, self._first_layers)
        self._store.write(profiles.PATHS_FILE, paths.arrays())

    def rotation(self) -> None:
        """Decides which layers are rotated."""
        if self._store.has(manifests.ROTATION_FILE) or self._options.rotate == "off":
            return
        judges = self._options.rotate == "auto"
        if judges and not len(self._kept):
            return
        vectors = quantize.measured_rotation(self._checkpoint)
        if judges:
            layers = self._spec.moe_layers
            self._progress.begin(commands.Stage("rotation", len(layers), "layers"))

            def work(layer_idx: int) -> shared.Arrays:
                return (torch.tensor([self._is_better_rotated(layer_idx, vectors)]),)

            with self._results.step("rotation"):
                found = self._results.in_order("rotated", work, range(len(layers)), 1)
                for layer_idx, (is_better,) in enumerate(found):
                    if not is_better:
                        vectors.input[layer_idx] = vectors.output[layer_idx] = 0
                    self._progress.advance(1, f"layer {layers[layer_idx]}")
            self._progress.end()
        if vectors.input.any():
            self._store.replace(manifests.ROTATION_FILE, (manifests.rotation_bytes(vectors),))

    def _is_better_rotated(self, layer_idx: int, vectors: manifests.RotationVectors) -> bool:
        """Judges a layer by its expert with the most tokens, or reads an earlier judgement."""
        name = f"{WORK_FOLDER}/{manifests.ROTATION_FILE}.{layer_idx}"
        if self._store.has(name):
            return (self._store.folder / name).read_bytes() == _ROTATED
        matrices = itertools.product(range(self._num_experts), self._spec.expert.matrices)
        codecs = (self._checkpoint.expert_source(layer_idx, *matrix).codec for matrix in matrices)
        is_better = False
        if "mxfp4" not in codecs:  # plans keep such codes
            with self._open_inputs(layer_idx) as inputs:
                expert = int(np.bincount(inputs.experts.ravel(), minlength=self._num_experts).argmax())
                tokens = inputs.of_expert(expert)
            is_better = sensitivity.is_rotated_better(
                self._weights.expert(layer_idx, expert),
                self._spec.expert_function(layer_idx),
                tokens,
                quantize.LayerRotation.of(vectors, layer_idx),
            )
        self._store.replace(name, (_ROTATED if is_better else b"",))
        return is_better

    def _vectors(self) -> manifests.RotationVectors | None:
        name = manifests.ROTATION_FILE
        return manifests.RotationVectors(**self._read(name)) if self._store.has(name) else None

    def run_sensitivity(self) -> None:
        if self._store.has(profiles.EFFECTS_FILE):
            return
        stage = sensitivity.SensitivityPass(
            self._weights,
            self._ids,
            "fast" if self._options.sensitivity == "fast" else "full",
            self._hot_thresholds,
            self._store.work / "sensitivity",
            self._device,
            forward.KeptInputs(self._kept, self._given.length, self._open_inputs) if len(self._kept) else None,
            self._layer_losses,
            self._vectors(),
            self._results,
        )
        with self._stage("sensitivity", lambda: costs.stage_of_phases("sensitivity", stage.cost())):
            give_back_freed()
            while stage.states.next_layer < self._spec.num_hidden_layers:
                with self._results.step(f"forward-{stage.states.next_layer:03d}"):
                    stage.forward(self._progress)
                give_back_freed()
            while (layer := stage.way_back.next_layer) >= 0:
                with self._results.step(f"back-{layer:03d}"):
                    layer_losses = stage.way_back.measure(self._progress)
                    self._store.write(profiles.layer_file("sensitivity", layer), layer_losses.arrays())
                    stage.way_back.leave()
                give_back_freed()
            moe_layers = self._spec.moe_layers
            losses = [self._layer_losses(layer) for layer in moe_layers]
            measured = stage.divergences(losses, self._progress)
            copies = sensitivity.copies_of(losses, self._spec.hidden_size)
            effects = sensitivity.effects_of(copies, measured, moe_layers, self._spec.num_hidden_layers)
            self._store.write(profiles.EFFECTS_FILE, effects.arrays())
            stage.close()

    def _layer_losses(self, layer: int) -> sensitivity.LayerLosses:
        return sensitivity.LayerLosses(**self._read(profiles.layer_file("sensitivity", layer)))

    def exact(self) -> None:
        if self._store.has(profiles.EXACT_FILE):
            return
        folder = self._store.work / "exact"
        stage = sensitivity.ExactPass(self._weights, self._ids, folder, self._device, self._vectors(), self._results)
        layers = range(stage.states.next_layer, self._spec.num_hidden_layers)
        with self._stage("experts at 2 bits", lambda: stage.cost(layers).stage("each expert at 2 bits")):
            for layer in layers:
                with self._results.step(f"exact-{layer:03d}"):
                    stage.layer(layer, self._progress)
            with self._results.step("exact"):
                self._store.write(profiles.EXACT_FILE, stage.losses(self._progress))
            stage.states.close()

    def predictors(self) -> None:
        """Runs the last stage; it needs held-out tokens."""
        if not self._shares.num_judged or not self._shares.num_learned:
            return
        shape = len(self._spec.moe_layers), self._num_experts, self._spec.router.num_experts_per_tok
        arrays = self._read(profiles.PATHS_FILE)
        paths = offload.PathStatistics.from_arrays(arrays, profiles.PATHS_FILE, *shape)
        left = [
            layer_idx
            for layer_idx, layer in enumerate(self._spec.moe_layers)
            if layer_idx not in self._first_layers and not self._store.has(profiles.layer_file("predictors", layer))
        ]
        if not left:
            return
        with commands.stage_of(self._progress, "timing predictors"):
            one = costs.prediction_cost(self._spec, self._shares.num_learned * self._given.length)
        self._progress.begin((one * len(left)).stage("predictors", is_most=True))

        def work(layer_idx: int) -> shared.Arrays:
            begin = max(first for first in self._first_layers if first <= layer_idx)  # of its stack
            history = [self._layer_inputs(l) for l in range(max(layer_idx - 2, begin), layer_idx + 1)]
            thresholds, layer = self._hot_thresholds(layer_idx), self._spec.moe_layers[layer_idx]
            scores = self._partial.scores(layer)
            predictors = statistics.predict_layer(
                self._weights, layer_idx, history, paths, thresholds, self._device, scores
            )
            self._store.write(profiles.layer_file("predictors", layer), predictors.arrays())
            return ()

        with self._results.step("predictors"):
            for layer_idx, _ in zip(left, self._results.in_order("layers", work, left, 1), strict=True):
                self._progress.advance(one.multiplications, f"layer {self._spec.moe_layers[layer_idx]}")
        self._progress.end()

    def _statistics_cost(self, trial: costs.Trial, layers: range) -> costs.Cost:
        router = self._spec.router
        tokens_an_expert = self._given.ids.numel() * router.num_experts_per_tok / router.num_experts
        counted = trial.counted(tokens_an_expert) * router.num_experts
        if len(self._kept):
            counted += costs.Cost(kept_bytes=forward.input_bytes(self._spec, len(self._kept) * self._given.length))
        return costs.layers_cost(trial, layers, len(self._ids), counted)

    def _read(self, name: str) -> dict[str, forward.Array]:
        return forward.read_all_arrays(self._store.folder / name)

    def _counted(self, layer_idx: int) -> statistics.LayerStatistics:
        name = profiles.layer_file("statistics", self._spec.moe_layers[layer_idx])
        return statistics.LayerStatistics.from_arrays(self._read(name), name, self._spec, self._given.ids.numel())

    def _open_inputs(self, layer_idx: int) -> forward.ExpertInputs:
        path = self._store.folder / profiles.layer_file("inputs", self._spec.moe_layers[layer_idx])
        return forward.ExpertInputs(path, self._spec, len(self._kept) * self._given.length)

    def _hot_thresholds(self, layer_idx: int) -> forward.Array:
        return self._counted(layer_idx).at_sparsities(forward.HOT_SPARSITIES)

    def _layer_inputs(self, layer_idx: int) -> statistics.LayerInputs:
        routes = torch.from_numpy(self._counted(layer_idx).routes.astype(np.int64))
        return self._inputs.read(layer_idx, routes)


def _facts(checkpoint: Checkpoint, tokens: forward.Tokens, options: ProfileOptions) -> profiles.ProfileFacts:
    spec, (num_sequences, S) = checkpoint.spec, tokens.sequences.shape
    num_last = forward.num_held_out(num_sequences)
    num_kept = forward.num_kept_sequences(spec, num_sequences - num_last, forward.stack_tokens(spec, S))
    num_kept *= options.keeps_inputs
    text = profiles.TextFacts(tokens.name, tokens.sha256, num_sequences, S, num_last, num_kept)
    return profiles.facts_of(checkpoint, text, options.rotate, options.sensitivity)


def identity_of(facts: profiles.ProfileFacts) -> str:
    """Returns a digest of the profile's checkpoint, text and options, without its results."""
    return profiles.digest_of(dataclasses.replace(facts, files=()))


def listed(path: Path) -> manifests.ContentFile:
    """Returns the entry of a file in `profile.json`."""
    with formats.RangeReader(path, formats.ConversionError) as reader:
        return manifests.ContentFile(path.name, reader.num_bytes, reader.sha256())


_KEY_ARRAY_BYTES = 512  # at most, of an array's name, shape and padding in the header


def attach(pack: formats.Pack, profile: profiles.Profile) -> offload.Routing:
    """Writes `routing.safetensors` into a pack's folder, from a profile of the pack's checkpoint.

    Raises:  PlanError if the profile is of another checkpoint; ConversionError if another process writes in the folder.
    """
    profile.check_source_of(pack)
    routing = routing_of(profile)
    routing_file.write_routing(pack, routing)
    return routing


def routing_of(profile: profiles.Profile, most_tokens: int = routing_file.MAX_ROUTED_TOKENS) -> offload.Routing:
    """Returns what the runtime uses of a profile, with the routes of `most_tokens`; networks are read on demand."""
    layers = range(len(profile.spec.moe_layers))
    popularity, mass, routes = [], [], []
    length = min(profile.layer_tokens, most_tokens)
    kept = _kept_tokens(profile, length, most_tokens)
    for layer_idx in layers:
        counted = profile.statistics(layer_idx)
        popularity.append(counted.chosen(profile.spec.router))
        mass.append(counted.mass)
        routes.append(counted.routes[kept])
    recalls = np.full((len(layers), len(offload.PREDICTORS), 3), np.nan, "<f4")
    best = np.full(len(layers), routing_file.NO_PREDICTOR, "<u1")
    for layer_idx in layers:
        if profile.has_predictors(layer_idx):
            judged = profile.predictors(layer_idx)
            recalls[layer_idx], best[layer_idx] = judged.experts, judged.best[0]

    joined: forward.Array = np.stack(routes, axis=1)  # [T, k] of each layer -> [T, L, k]
    return offload.Routing(
        np.stack(popularity),
        np.stack(mass),
        profile.paths(),
        recalls,
        best,
        joined,
        length,
        lambda layer_idx: profile.predictors(layer_idx).network,
    )


def most_routing_bytes(spec: formats.ModelSpec) -> int:
    """Returns the most bytes that `routing.safetensors` can have for this model.

    Meaning: all kept routes, the largest tables, keys up to PATH_BYTES, and the larger network of every layer but the
             first.
    """
    L, E, k, d = len(spec.moe_layers), spec.router.num_experts, spec.router.num_experts_per_tok, spec.hidden_size
    tables = {"popularity": (L, E), "after_one": (max(L - 1, 0), E, E), "after_two": (max(L - 2, 0), E, E)}
    keys = max(0, PATH_BYTES - sum(4 * math.prod(shape) for shape in tables.values()))
    h = statistics.shapes_for(d, E)[1].hidden
    arrays = [
        ("popularity", "U32", (L, E)),
        ("mass", "F32", (L, E)),
        ("recalls", "F32", (L, len(offload.PREDICTORS), 3)),
        ("best", "U8", (L,)),
        ("routes", "U16", (routing_file.MAX_ROUTED_TOKENS, L, k)),
        ("sequence_length", "U32", (1,)),
        *((f"paths.{name}", "U32", shape) for name, shape in tables.items()),
        ("paths.key_starts", "U32", (L + 1,)),
        # Each of the six other arrays of keys is padded by itself, and has a name in the header.
        ("paths.keys", "U8", (keys + 6 * _KEY_ARRAY_BYTES,)),
    ]
    for layer_idx in range(1, L):
        network = {
            "x_weight": ("BF16", (h, d)),
            "route_weight": ("BF16", (h, offload.MAX_PREVIOUS, E)),
            "bias": ("F32", (h,)),
            "out_weight": ("BF16", (E, h)),
            "out_bias": ("F32", (E,)),
        }
        arrays += [(f"network.{layer_idx}.{name}", *array) for name, array in network.items()]
    return tensor_sidecar_bytes(arrays)


def _kept_tokens(profile: profiles.Profile, length: int, most_tokens: int) -> slice:
    """Returns the place of the first held-out tokens: whole sequences of `length`, or a part of a longer one."""
    first = profile.num_tokens - profile.num_held_out_tokens
    return slice(first, first + min(profile.facts.text.num_held_out, most_tokens // length) * length)
