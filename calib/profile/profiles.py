"""Reads a profile: a folder of JSON and safetensors files, one of each stage for each layer.

`profile.json` lists every other file with its size and SHA-256. docs/profile.md specifies the folder.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.calib import forward, quantize
from moe_pack.calib.forward import store
from moe_pack.calib.forward.experts import OTHERS_COUNT
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.calib.sensitivity import DENSE_WIDTHS, MOST_COPIES, MOST_GROWTH, Effects, LayerLosses, errors
from moe_pack.calib.statistics import LayerPredictors, LayerStatistics
from moe_pack.formats.base import commands, json_files
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import manifests
from moe_pack.formats.pack.safetensors import read_small
from moe_pack.formats.parts import specs
from moe_pack.runtime.offload import PathStatistics

VERSION = 9
FORMAT: Literal["moe-pack profile"] = "moe-pack profile"
TOKENS_FILE = "tokens.safetensors"
PATHS_FILE = "paths.safetensors"
EFFECTS_FILE = "effects.safetensors"
EXACT_FILE = "exact.safetensors"
_MAX_JSON_BYTES = 16_000_000
_LEAST_KL = -1e-3  # a KL divergence of nearly 0 that was measured, of which rounding makes a negative one
_MOST_LOSS, _MOST_SCALE = 1e30, 1e9  # of rotated coordinates

_TextCount = Annotated[int, json_files.Within(1, 2**31 - 1)]


def layer_file(stage: Literal["statistics", "inputs", "sensitivity", "predictors", "moments"], layer: int) -> str:
    """Returns the name of the file with a stage's result for decoder layer `layer`."""
    return f"{stage}-{layer:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text of a profile."""

    name: str
    sha256: str  # of the tokens as little-endian int32
    num_sequences: _TextCount
    sequence_length: _TextCount  # tokens of each
    num_held_out: json_files.Count  # sequences, the last ones
    num_kept: json_files.Count  # sequences whose expert inputs are kept, evenly spread over those not held out


@dataclass(frozen=True, slots=True)
class ImatrixFacts:
    """The importance file that a profile was made from."""

    sha256: str
    has_counts: bool  # whether it counts the tokens of each expert; otherwise all of a layer have the same number


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """The content of `profile.json`."""

    format: Literal["moe-pack profile"]
    version: int
    model: formats.ModelSpec
    source: str  # the digest of the checkpoint's files and tensors
    text: TextFacts
    # Those of the profiles that were merged, with their own `num_kept`; none in one that was not
    texts: tuple[TextFacts, ...]
    rotate: quantize.RotateChoice
    sensitivity: Sensitivity
    made_with: tuple[manifests.PackageVersion, ...]
    files: tuple[manifests.ContentFile, ...]
    sha256: str
    imatrix: ImatrixFacts | None = None  # None if the profile was measured on text


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoments(forward.NamedArrays):
    """Sums of squares over the tokens of each expert of a layer, as in `LayerStatistics`."""

    tokens: forward.Array  # u32 [E]
    input_squares: forward.Array  # f32 [E, d]
    hidden_squares: forward.Array  # f32 [E, f]

    def of_expert(self, expert: int) -> quantize.ExpertMoments:
        """Returns the mean squares of an expert, drawn to those of its layer as by `OTHERS_COUNT` more tokens."""
        own, total = float(self.tokens[expert]), max(float(self.tokens.sum(dtype=np.float64)), 1.0)

        def mean(squares: forward.Array) -> torch.Tensor:
            of_layer = squares.sum(axis=0, dtype=np.float64) / total
            drawn = (squares[expert] + OTHERS_COUNT * of_layer) / (own + OTHERS_COUNT)
            return torch.from_numpy(drawn.astype(np.float32))

        return quantize.ExpertMoments(mean(self.input_squares), mean(self.hidden_squares), own + OTHERS_COUNT)


def facts_of(
    checkpoint: Checkpoint,
    text: TextFacts,
    rotate: quantize.RotateChoice,
    sensitivity: Sensitivity,
    imatrix: ImatrixFacts | None = None,
) -> ProfileFacts:
    """Returns the facts of a profile before it is made."""
    source, made_with = forward.source_digest(checkpoint), forward.made_with()
    return ProfileFacts(
        FORMAT, VERSION, checkpoint.spec, source, text, (), rotate, sensitivity, made_with, (), "", imatrix
    )


def facts_bytes(facts: ProfileFacts) -> bytes:
    """Returns the bytes of `profile.json`, with the digest of all its other values."""
    return formats.canonical(formats.dump(dataclasses.replace(facts, sha256=digest_of(facts))))


def digest_of(facts: ProfileFacts) -> str:
    """Returns the SHA-256 of all values but itself."""
    return hashlib.sha256(formats.canonical(formats.dump(dataclasses.replace(facts, sha256="")))).hexdigest()


class Profile:
    """Opens a profile for reading; every file is checked against its digest when it is read.

    Raises:  PackError if the profile is missing, unfinished, damaged or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise formats.PackError(
                f"{folder}: no such folder{commands.did_you_mean(folder.name, commands.names_beside(folder))}"
            )
        path = folder / forward.PROFILE_FILE
        if not path.is_file():
            raise formats.PackError(
                f"{folder}: found no {forward.PROFILE_FILE}; this is not a profile, or it is not finished; "
                "repeat the moe-pack profile command to finish it"
            )
        raw = read_small(path, _MAX_JSON_BYTES, formats.PackError).tobytes()
        values = formats.parse(raw, forward.PROFILE_FILE, formats.PackError)
        if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
            raise formats.PackError(
                f"{forward.PROFILE_FILE}: expected format {FORMAT!r}, version {VERSION}; profile the model again"
            )
        self.facts = formats.load(ProfileFacts, values, forward.PROFILE_FILE, formats.PackError)
        if self.facts.sha256 != digest_of(self.facts):
            raise formats.PackError(
                f"{forward.PROFILE_FILE}: SHA-256 does not match its values; profile the model again"
            )
        text = self.facts.text
        if text.num_held_out >= text.num_sequences or text.num_kept > text.num_sequences - text.num_held_out:
            raise formats.PackError(f"{forward.PROFILE_FILE}: text: found impossible counts; profile the model again")
        if fault := specs.spec_fault(self.facts.model):
            raise formats.PackError(f"{forward.PROFILE_FILE}: model: {fault}; profile the model again")
        self.spec = self.facts.model
        for file in self.facts.files:
            manifests.check_size_and_digest(file.name, file.bytes, file.sha256, forward.PROFILE_FILE)
        self._files = {file.name: file for file in self.facts.files}
        self._checked: set[str] = set()

    @property
    def layer_tokens(self) -> int:
        """Returns the tokens of a sequence that each layer saw: all, or half of them if the model has an encoder."""
        return forward.stack_tokens(self.spec, self.facts.text.sequence_length)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that each layer saw, held out or not."""
        return self.facts.text.num_sequences * self.layer_tokens

    @property
    def num_held_out_tokens(self) -> int:
        """Returns the number of the last of these tokens, from which predictors did not learn."""
        return self.facts.text.num_held_out * self.layer_tokens

    def check_source_of(self, pack: formats.Pack) -> None:
        """Refuses a pack that was made from another checkpoint, whatever neurons the pack repeats.

        Raises:  PlanError if it was; PackError if the pack's account of its source is damaged.
        """
        spec = specs.with_repeats(pack.spec, 0)
        if (self.spec, self.facts.source) != (spec, forward.packed_source_digest(pack)):
            what = "another model" if self.spec != spec else "another checkpoint of this model"
            raise formats.PlanError(
                f"{pack.folder}: was made from {what} than the profile {self.folder}; "
                "give a pack and a profile of the same checkpoint"
            )

    def has(self, name: str) -> bool:
        """Returns whether the profile lists this file."""
        return name in self._files

    def tokens(self) -> forward.Tokens:
        """Reads the tokens of the profile's text."""
        text = self.facts.text
        shape, most = (text.num_sequences, text.sequence_length), self.spec.vocab_size - 1
        arrays = self._checked_arrays(TOKENS_FILE, {"tokens": store.ArrayRule("U32", shape, most=most)})
        return forward.Tokens(text.name, arrays["tokens"].astype(np.int32), text.sha256, ())

    def statistics(self, layer_idx: int) -> LayerStatistics:
        """Reads the statistics of the `layer_idx`-th MoE layer."""
        name = layer_file("statistics", self.spec.moe_layers[layer_idx])
        return LayerStatistics.from_arrays(self._read(name), name, self.spec, self.num_tokens)

    @property
    def has_inputs(self) -> bool:
        """Returns whether the profile keeps experts' inputs for a part of the text."""
        return self.facts.text.num_kept > 0

    def inputs(self, layer_idx: int) -> forward.ExpertInputs:
        """Opens the inputs of the `layer_idx`-th MoE layer's experts, to be closed; checks the digest once."""
        name = layer_file("inputs", self.spec.moe_layers[layer_idx])
        if name not in self._checked:
            self._check(name)
            self._checked.add(name)
        return forward.ExpertInputs(self.folder / name, self.spec, self.facts.text.num_kept * self.layer_tokens)

    def kept_sequences(self) -> NDArray[np.int32]:
        """Reads the tokens whose experts' inputs are kept, in the order of these: int32 [n, S]."""
        text = self.facts.text
        all_tokens = self.tokens()  # checks how many sequences there are
        kept = forward.sample_places(text.num_sequences - text.num_held_out, text.num_kept)
        sequences: NDArray[np.int32] = all_tokens.sequences[kept.numpy()]
        return sequences

    @property
    def calibrates(self) -> bool:
        """Returns whether codes can be calibrated with the profile: it has inputs, or an importance file's moments."""
        return self.has_inputs or self.facts.imatrix is not None

    def moments(self, layer_idx: int) -> LayerMoments:
        """Reads the sums of squares of the `layer_idx`-th MoE layer."""
        if self.facts.imatrix is None:
            counted = self.statistics(layer_idx)
            return LayerMoments(counted.tokens, counted.input_squares, counted.hidden_squares)
        spec, name = self.spec, layer_file("moments", self.spec.moe_layers[layer_idx])
        E = spec.router.num_experts
        wanted = {
            "tokens": store.ArrayRule("U32", (E,)),
            "input_squares": store.ArrayRule("F32", (E, spec.hidden_size), 0),
            "hidden_squares": store.ArrayRule("F32", (E, spec.expert.intermediate_size), 0),
        }
        return LayerMoments(**self._checked_arrays(name, wanted))

    def inputs_digest(self) -> str:
        """Returns the SHA-256 of the digests of all files of inputs, on which calibrated quantization depends."""
        digest = hashlib.sha256()
        for layer in self.spec.moe_layers:
            listed = self._files.get(layer_file("inputs" if self.facts.imatrix is None else "moments", layer))
            digest.update(b"" if listed is None else bytes.fromhex(listed.sha256))
        return digest.hexdigest()

    def rotation(self) -> manifests.RotationVectors | None:
        """Reads the coordinates in which layers are to be stored; None if no layer is rotated."""
        if not self.has(manifests.ROTATION_FILE):
            return None
        shape = (len(self.spec.moe_layers), self.spec.hidden_size)
        wanted = dict.fromkeys(("input", "output"), store.ArrayRule("F32", shape, -_MOST_SCALE, _MOST_SCALE))
        vectors = manifests.RotationVectors(**self._checked_arrays(manifests.ROTATION_FILE, wanted))
        if fault := manifests.rotation_fault(vectors):
            raise formats.PackError(f"{manifests.ROTATION_FILE}: {fault}")
        return vectors

    def paths(self) -> PathStatistics:
        """Reads the path statistics, which were learned from all tokens that are not held out."""
        router = self.spec.router
        shape = (len(self.spec.moe_layers), router.num_experts, router.num_experts_per_tok)
        return PathStatistics.from_arrays(self._read(PATHS_FILE), PATHS_FILE, *shape)

    def layer_losses(self, layer: int) -> LayerLosses:
        """Reads what changes in a decoder layer cost, multiplied by the layer's growth."""
        losses = self.second_order_losses(layer)
        growth = self.effects().growth[layer]
        grown = {name: getattr(losses, name) * growth for name in ("dense", "quantized", "repeated", "sparse")}
        return dataclasses.replace(losses, **grown)

    def second_order_losses(self, layer: int) -> LayerLosses:
        """Reads what changes in a decoder layer cost by the estimates to second order."""
        spec, name = self.spec, layer_file("sensitivity", layer)
        E, with_experts = spec.router.num_experts, layer in spec.moe_layers

        def losses(*shape: int) -> store.ArrayRule:
            return store.ArrayRule("F32", shape if with_experts else (0,), 0, _MOST_LOSS)

        num_roles, num_calibrated = (
            len(found) for found in (errors.roundable_roles(spec, layer), errors.calibrated_formats(spec.hidden_size))
        )
        wanted = {
            "dense": store.ArrayRule("F32", (num_roles, len(DENSE_WIDTHS)), 0, _MOST_LOSS),
            "quantized": losses(E, len(formats.MATRICES), len(errors.WIDTHS)),
            "repeated": losses(E, len(errors.WIDTHS)),
            "sparse": losses(E, len(forward.KINDS), len(errors.SPARSITIES)),
            "ratios": losses(len(formats.MATRICES), len(errors.compared_formats(spec.hidden_size))),
            "calibrated": losses(len(formats.MATRICES), num_calibrated)
            if self.has_inputs
            else store.ArrayRule("F32", (0,)),
        }
        return LayerLosses(**self._checked_arrays(name, wanted))

    def effects(self) -> Effects:
        """Reads what copies of the text measured at the model's output."""
        copies = (min(MOST_COPIES, len(self.spec.moe_layers)), 2)
        wanted = {
            "growth": store.ArrayRule("F32", (self.spec.num_hidden_layers,), 1 / MOST_GROWTH, MOST_GROWTH),
            "embedding": store.ArrayRule("F32", (len(DENSE_WIDTHS),), _LEAST_KL, _MOST_LOSS),
            "head": store.ArrayRule("F32", (len(DENSE_WIDTHS),), _LEAST_KL, _MOST_LOSS),
            "copies": store.ArrayRule("F32", copies),
            "nll_per_kl": store.ArrayRule("F32", (1,), 0, _MOST_LOSS),
        }
        return Effects(**self._checked_arrays(EFFECTS_FILE, wanted))

    def has_predictors(self, layer_idx: int) -> bool:
        """Returns whether the profile has predictors of the `layer_idx`-th MoE layer."""
        return self.has(layer_file("predictors", self.spec.moe_layers[layer_idx]))

    def predictors(self, layer_idx: int) -> LayerPredictors:
        """Reads the predictors of the `layer_idx`-th MoE layer, which is not the first of its stack."""
        name = layer_file("predictors", self.spec.moe_layers[layer_idx])
        return LayerPredictors.from_arrays(self._read(name), name)

    def exact(self) -> dict[str, forward.Array]:
        """Reads EdgeMoE's own measure: the arrays of `ExactPass.losses`."""
        shape = (len(self.spec.moe_layers), self.spec.router.num_experts)
        wanted = {"losses": store.ArrayRule("F32", shape), "base": store.ArrayRule("F32", (1,))}
        return self._checked_arrays(EXACT_FILE, wanted)

    def _checked_arrays(self, name: str, wanted: dict[str, store.ArrayRule]) -> dict[str, forward.Array]:
        arrays = self._read(name)
        store.check_arrays(arrays, wanted, name)
        return arrays

    def _read(self, name: str) -> dict[str, forward.Array]:
        self._check(name)
        return forward.read_all_arrays(self.folder / name)

    def _check(self, name: str) -> None:
        listed = self._files.get(name)
        if listed is None:
            if self.facts.imatrix is not None:
                raise formats.PackError(
                    f"{self.folder}: the profile was made from an importance file, which lacks what {name} has; "
                    "profile the model on text: moe-pack profile without --imatrix"
                )
            raise formats.PackError(
                f"{self.folder}: the profile has no {name}; profile the model with the options that measure it"
            )
        with formats.RangeReader(self.folder / name, formats.PackError) as reader:
            if reader.num_bytes != listed.bytes or reader.sha256() != listed.sha256:
                raise formats.PackError(
                    f"{name}: SHA-256 does not match {forward.PROFILE_FILE}; profile the model again"
                )


def check_same_source(profile: Profile, checkpoint: Checkpoint) -> None:
    """Refuses a profile that was made from another checkpoint, by PlanError."""
    if (profile.spec, profile.facts.source) != (checkpoint.spec, forward.source_digest(checkpoint)):
        raise formats.PlanError(f"--profile {profile.folder}: the profile is of another checkpoint; profile this one")


def hottest_first(
    profile: Profile, checkpoint: Checkpoint, selector: formats.Selector, sparsity: NDArray[np.float64]
) -> NDArray[np.uint32]:
    """Returns the order of every expert's neurons: `order[l, e, j]` is the source's neuron of row `j`, u32 [L, E, f].

    Meaning: by falling share of calibration tokens for which the neuron runs with this selector and sparsity; equal
             ones by number. Fast memory then holds the useful part of an expert.
    Args:    sparsity: float64 [L, E].
    Raises:  PlanError if the profile is of another checkpoint.
    """
    check_same_source(profile, checkpoint)
    kind_idx = forward.KINDS.index("both" if selector == "none" else selector)
    shape = (*sparsity.shape, profile.spec.expert.intermediate_size)
    orders = np.empty(shape, np.uint32)
    for layer_idx, layer in enumerate(sparsity):
        statistics = profile.statistics(layer_idx)
        for share in np.unique(layer).tolist():
            at_share = layer == share
            shares = statistics.hot_share(kind_idx, share)[at_share]  # [experts with this sparsity, f]
            orders[layer_idx, at_share] = np.argsort(-shares, axis=1, kind="stable")
    return orders
