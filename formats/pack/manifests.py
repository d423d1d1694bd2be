"""The tables of a pack: `index.safetensors`, thresholds, order, rotation, `manifest.json` and `source.json`.

The index has the facts of every expert as arrays `[L, E]`: L MoE layers of E experts. Formats stand in the order gate,
up, down. The manifest says what the pack is, which files it has, and their digests. It has no time, host, number of
workers or measurement: the same conversion makes the same bytes. `source.json` has the fate of every tensor of the
checkpoint. docs/pack.md specifies all of them.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.base import json_files
from moe_pack.formats.base.errors import PackError
from moe_pack.formats.pack import layouts, plans, safetensors
from moe_pack.formats.parts import specs

INDEX_FILE = "index.safetensors"
THRESHOLDS_FILE = "thresholds.safetensors"
NEW_THRESHOLDS_FILE = f"{THRESHOLDS_FILE}.new"  # during a rewrite (`writer`)
ORDER_FILE = "order.safetensors"
ROTATION_FILE = "rotation.safetensors"

NO_PART = 0  # codec of a matrix that the expert does not have
_CODEC_NAMES = {facts.number: name for name, facts in plans.CODECS.items()}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of an extent's bytes: CRC-32 for running, SHA-256 for `verify`."""

    crc32: int
    sha256: bytes


# Name and dtype of each array of the index, and its dimensions after [L, E].
_INDEX_ARRAYS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("offset", "U64", ()),
    ("size", "U64", ()),
    ("selector_row_bytes", "U32", ()),
    ("record_row_bytes", "U32", ()),
    ("crc32", "U32", ()),
    ("group", "U16", (3,)),
    ("codec", "U8", (3,)),
    ("width", "U8", (3,)),
    ("scale_bits", "U8", (3,)),
    ("sha256", "U8", (32,)),
)


def index_bytes(layout: layouts.PackLayout, plan: plans.Plan, digests: Mapping[tuple[int, int], Digests]) -> bytes:
    """Returns the bytes of `index.safetensors`. `digests`: by MoE layer index and expert."""
    L, E = len(layout.experts), layout.spec.router.num_experts
    arrays = {name: np.zeros((L, E, *tail), safetensors.NUMPY_DTYPES[dtype]) for name, dtype, tail in _INDEX_ARRAYS}
    for l in range(L):
        for e in range(E):
            expert = layout.experts[l][e]
            arrays["offset"][l, e] = layout.offsets[l][e]
            arrays["size"][l, e] = expert.num_bytes
            arrays["selector_row_bytes"][l, e] = expert.selector.row_bytes if expert.selector else 0
            arrays["record_row_bytes"][l, e] = expert.records.row_bytes
            arrays["crc32"][l, e] = digests[l, e].crc32
            arrays["sha256"][l, e] = np.frombuffer(digests[l, e].sha256, np.uint8)
            for m, matrix in enumerate(specs.MATRICES):
                part = plan.experts[l][e].of(matrix)
                if part is not None:
                    arrays["codec"][l, e, m] = part.facts.number
                    arrays["width"][l, e, m] = part.width
                    arrays["group"][l, e, m] = part.group
                    arrays["scale_bits"][l, e, m] = part.scale_bits
    return safetensors.assemble((name, dtype, arrays[name]) for name, dtype, _ in _INDEX_ARRAYS)


def thresholds_bytes(thresholds: NDArray[np.float32]) -> bytes:
    """Returns the bytes of `thresholds.safetensors` for thresholds `[L, E]`."""
    return safetensors.assemble([("threshold", "F32", thresholds)])


def order_bytes(order: NDArray[np.uint32]) -> bytes:
    """Returns the bytes of `order.safetensors`: in `[L, E, f]`, `order[l, e, j]` is the source's neuron in row `j`."""
    return safetensors.assemble([("order", "U32", order)])


def read_arrays(
    raw: bytes, entries: Mapping[str, Any], place: str, wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Array]:
    """Returns the arrays of a small safetensors file. `wanted`: dtype and shape of each by name.

    Raises:  PackError for an array that is missing, unknown, or of another dtype or shape.
    """
    for name in entries:
        if name not in wanted and not name.startswith("pad."):
            raise PackError(f"{place}: unknown tensor {name!r}")
    arrays = {}
    for name, (dtype, shape) in wanted.items():
        entry = entries.get(name)
        if entry is None:
            raise PackError(f"{place}: tensor {name!r} is missing")
        if entry.dtype != dtype or entry.shape != shape:
            raise PackError(
                f"{place}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {dtype} {list(shape)}"
            )
        count = entry.num_bytes // safetensors.DTYPE_BYTES[dtype]
        arrays[name] = np.frombuffer(raw, safetensors.NUMPY_DTYPES[dtype], count, entry.offset).reshape(shape)
    return arrays


@dataclass(frozen=True, slots=True)
class Index:
    """The checked index of a pack."""

    offset: Array  # [L, E]; likewise the other arrays
    size: Array
    crc32: Array
    sha256: Array
    experts: tuple[tuple[plans.ExpertFormat, ...], ...]  # [l][e]
    _row_bytes: tuple[Array, Array]

    def of_layers(self, first: int, last: int) -> "Index":
        """Returns the index of the MoE layers `first` to `last`, without `last`."""
        own = slice(first, last)
        arrays = (self.offset[own], self.size[own], self.crc32[own], self.sha256[own])
        selectors, records = self._row_bytes
        return Index(*arrays, self.experts[own], (selectors[own], records[own]))

    def check_layout(self, layout: layouts.PackLayout) -> None:
        """Checks that offsets and sizes follow from the formats. Raises PackError with the first that does not."""
        experts = layout.experts
        wanted = {
            "offset": (self.offset, [list(layer) for layer in layout.offsets]),
            "size": (self.size, [[e.num_bytes for e in layer] for layer in experts]),
            "selector_row_bytes": (
                self._row_bytes[0],
                [[e.selector.row_bytes if e.selector else 0 for e in layer] for layer in experts],
            ),
            "record_row_bytes": (self._row_bytes[1], [[e.records.row_bytes for e in layer] for layer in experts]),
        }
        for name, (stored, expected) in wanted.items():
            wrong = np.argwhere(stored != np.array(expected, stored.dtype))
            if wrong.size:
                l, e = (int(number) for number in wrong[0])
                raise PackError(
                    f"{INDEX_FILE}: {name} of layer {l} expert {e} is {stored[l, e]}, expected {expected[l][e]}"
                )


def read_index(raw: bytes, entries: Mapping[str, Any], spec: specs.ModelSpec) -> Index:
    """Reads the bytes of `index.safetensors` and checks its formats against the model.

    Raises:  PackError for missing or wrong arrays, and for unknown codecs, widths or groups.
    """
    shape = (len(spec.moe_layers), spec.router.num_experts)
    wanted = {name: (dtype, (*shape, *tail)) for name, dtype, tail in _INDEX_ARRAYS}
    arrays = read_arrays(raw, entries, INDEX_FILE, wanted)
    facts = np.stack([arrays[name].astype(np.int64) for name in ("codec", "width", "group", "scale_bits")], axis=3)
    distinct, numbers = np.unique(facts.reshape(-1, 3, 4), axis=0, return_inverse=True)
    formats = [_expert_format(row, spec) for row in distinct.tolist()]
    experts = tuple(tuple(formats[n] for n in layer) for layer in numbers.reshape(shape).tolist())
    rows = (arrays["selector_row_bytes"], arrays["record_row_bytes"])
    return Index(arrays["offset"], arrays["size"], arrays["crc32"], arrays["sha256"], experts, rows)


def _expert_format(facts: list[list[int]], spec: specs.ModelSpec) -> plans.ExpertFormat:
    parts: dict[str, plans.PartFormat | None] = {}
    for matrix, (codec, width, group, scale_bits) in zip(specs.MATRICES, facts, strict=True):
        if codec == NO_PART and matrix not in spec.expert.matrices:
            parts[matrix] = None
            continue
        name = _CODEC_NAMES.get(codec)
        if name is None or matrix not in spec.expert.matrices:
            raise PackError(f"{INDEX_FILE}: unknown codec {codec} for {matrix}")
        part = plans.PartFormat(name, width, group, scale_bits)
        if fault := plans.format_fault(part, spec.hidden_size):
            raise PackError(f"{INDEX_FILE}: format of {matrix}: {fault}")
        parts[matrix] = part
    up, down = parts["up"], parts["down"]
    assert up is not None and down is not None, "every expert has up and down"
    return plans.ExpertFormat(parts["gate"], up, down)


def read_thresholds(raw: bytes, entries: Mapping[str, Any], spec: specs.ModelSpec) -> NDArray[np.float32]:
    """Reads thresholds `[L, E]`. Raises PackError for the first that is not finite, or negative."""
    shape = (len(spec.moe_layers), spec.router.num_experts)
    thresholds = read_arrays(raw, entries, THRESHOLDS_FILE, {"threshold": ("F32", shape)})["threshold"]
    if fault := thresholds_fault(thresholds):
        raise PackError(f"{THRESHOLDS_FILE}: {fault}")
    return thresholds


def thresholds_fault(thresholds: NDArray[np.float32]) -> str:
    """Returns the fault of the first wrong threshold of `[L, E]`; empty if there is none."""
    wrong = np.argwhere(~(np.isfinite(thresholds) & (thresholds >= 0)))
    if not wrong.size:
        return ""
    l, e = wrong[0]
    return f"threshold of layer {l} expert {e} is {thresholds[l, e]}, expected a number of 0 or more"


def read_order(raw: bytes, entries: Mapping[str, Any], spec: specs.ModelSpec) -> NDArray[np.uint32]:
    """Reads the neuron order `[L, E, f]`. Raises PackError for the first expert whose order is wrong."""
    shape = (len(spec.moe_layers), spec.router.num_experts, spec.expert.intermediate_size)
    order = read_arrays(raw, entries, ORDER_FILE, {"order": ("U32", shape)})["order"]
    if fault := order_fault(order, spec.expert.source_size):
        raise PackError(f"{ORDER_FILE}: {fault}")
    return order


def order_fault(order: NDArray[np.uint32], num_neurons: int) -> str:
    """Returns the fault of the first expert of `[L, E, f]` whose order lacks a neuron or has one thrice; or empty."""
    for l, layer in enumerate(order):  # a layer at a time: sorting copies it
        rows = np.sort(layer, axis=1)
        steps = np.diff(rows.astype(np.int64), axis=1)
        wrong = (rows[:, 0] != 0) | (rows[:, -1] != num_neurons - 1) | (steps > 1).any(axis=1)
        wrong |= ((steps[:, 1:] == 0) & (steps[:, :-1] == 0)).any(axis=1)
        if wrong.any():
            twice = f", {rows.shape[1] - num_neurons} of them twice" if rows.shape[1] > num_neurons else ""
            return f"order of layer {l} expert {np.argmax(wrong)} is not a permutation of {num_neurons} neurons{twice}"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class RotationVectors:
    """The vectors of layers whose experts are stored in rotated coordinates: f32 [L, d] each.

    The experts get `R (input * x)`, and `output * R y` is added for their weighted sum y; the rotation R is fixed
    (docs/model.md). Rows of other layers are zeros.
    """

    input: NDArray[np.float32]
    output: NDArray[np.float32]

    def of_layers(self, first: int, last: int) -> "RotationVectors":
        """Returns the vectors of the MoE layers `first` to `last`, without `last`."""
        return RotationVectors(self.input[first:last], self.output[first:last])

    def is_rotated(self, layer_idx: int) -> bool:
        """Returns whether a MoE layer's experts are stored in rotated coordinates."""
        return bool(self.input[layer_idx].any())

    def layers(self, spec: specs.ModelSpec) -> tuple[int, ...]:
        """Returns the decoder layers that are rotated, rising."""
        return tuple(layer for layer_idx, layer in enumerate(spec.moe_layers) if self.is_rotated(layer_idx))


def rotation_bytes(vectors: RotationVectors) -> bytes:
    """Returns the bytes of `rotation.safetensors`."""
    return safetensors.assemble([("input", "F32", vectors.input), ("output", "F32", vectors.output)])


def read_rotation(raw: bytes, entries: Mapping[str, Any], spec: specs.ModelSpec) -> RotationVectors:
    """Reads the vectors of rotated layers. Raises PackError for the first layer whose vectors are not allowed."""
    shape = (len(spec.moe_layers), spec.hidden_size)
    arrays = read_arrays(raw, entries, ROTATION_FILE, {"input": ("F32", shape), "output": ("F32", shape)})
    vectors = RotationVectors(arrays["input"].copy(), arrays["output"].copy())  # the file's bytes are not kept
    if fault := rotation_fault(vectors):
        raise PackError(f"{ROTATION_FILE}: {fault}")
    return vectors


def rotation_fault(vectors: RotationVectors) -> str:
    """Returns the fault of the first wrong vector; empty if there is none and at least one layer is rotated."""
    for l in range(len(vectors.input)):
        rotated = vectors.is_rotated(l)
        for name, values in (("input", vectors.input[l]), ("output", vectors.output[l])):
            wrong = ~np.isfinite(values) | (values == 0) if rotated else values != 0
            if wrong.any():
                i = int(np.argmax(wrong))
                expected = "a finite number other than 0" if rotated else "0, because input is all zeros"
                return f"{name} {i} of layer {l} is {values[i]}, expected {expected}"
    return "" if vectors.input.any() else "no layer is rotated; a pack without rotated layers has no such file"


MANIFEST_FILE = "manifest.json"
SOURCE_FILE = "source.json"
FORMAT: Literal["moe-pack"] = "moe-pack"
VERSION = 3
MAX_MANIFEST_BYTES = 1_000_000
MAX_SMALL_BYTES = 256 << 20  # of a copied file, and of the source account
_INDEX_ENTRY_BYTES = 128  # more than an expert has in the index
FEATURES = frozenset((*plans.CODECS, "byte_scales", "dense_rows", "ngrams", "repeated", "rotated", "unused"))
REQUIRED_FILES = (INDEX_FILE, layouts.DENSE_FILE, THRESHOLDS_FILE, ORDER_FILE, SOURCE_FILE)
COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ContentFile:
    """A file with one digest for all its bytes."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """The file of a layer's experts. The index has a digest for each extent."""

    name: str
    bytes: int
    header_bytes: int
    header_sha256: str  # of the header alone


@dataclass(frozen=True, slots=True)
class QuantizedDense:
    """A dense matrix `[rows, cols]` stored in the row layout, one part called `weight`."""

    name: str
    rows: int
    cols: int
    format: plans.PartFormat


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """A package that decided some of the bytes."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Totals:
    """The bytes of a pack by part. All but `content` add up to it."""

    selectors: int
    records: int
    extra: int
    padding: int  # between extents
    headers: int  # of the expert files
    dense: int
    tables: int  # index, thresholds, order, rotation, source account
    copied: int  # the source's small files
    content: int  # of all files but the manifest
    unused: int = json_files.added(0)  # tensors that are not run
    ngrams: int = json_files.added(0)  # the files of n-gram tables


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest."""

    format: Literal["moe-pack"]
    version: int
    features: tuple[str, ...]
    model: specs.ModelSpec
    selector: specs.Selector
    quantizer: plans.Quantizer
    made_with: tuple[PackageVersion, ...]
    conversion: str  # the digest of source, plan and versions
    dense: tuple[QuantizedDense, ...]
    files: tuple[ContentFile, ...]
    expert_files: tuple[ExpertFile, ...]
    totals: Totals
    root: str  # the digest of the content
    sha256: str


def root_digest(files: tuple[ContentFile, ...], expert_files: tuple[ExpertFile, ...]) -> str:
    """Returns the SHA-256 of one line a file, sorted by name: digest (of the header, for experts), bytes, name."""
    lines = [(file.name, f"{file.sha256} {file.bytes} {file.name}\n") for file in files]
    lines += [(file.name, f"{file.header_sha256} {file.bytes} {file.name}\n") for file in expert_files]
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode("ascii")).hexdigest()


def root_without_thresholds(manifest: Manifest) -> str:
    """Returns the root digest of all files but the thresholds, which may be rewritten."""
    files = tuple(file for file in manifest.files if file.name != THRESHOLDS_FILE)
    return root_digest(files, manifest.expert_files)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`: canonical JSON with its own digest in the last key, `sha256`."""
    values = json_files.dump(manifest)
    del values["sha256"]
    return json_files.sealed(values)


def read_manifest(raw: bytes) -> Manifest:
    """Reads `manifest.json`; checks digest, version, features, names, totals and root. Raises PackError."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise PackError(f"{MANIFEST_FILE}: {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}")
    values = json_files.parse(raw, MANIFEST_FILE, PackError)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise PackError(f"{MANIFEST_FILE}: found no format 'moe-pack'; this folder is not a pack")
    if values.get("version") != VERSION:
        raise PackError(
            f"{MANIFEST_FILE}: format version {values.get('version')!r}, this program reads {VERSION}; "
            "use the version of moe-pack that wrote it, or convert again"
        )
    features = values.get("features")
    for feature in features if isinstance(features, list) else []:
        if not isinstance(feature, str) or feature not in FEATURES:
            raise PackError(
                f"{MANIFEST_FILE}: requires feature {feature!r}, which this version does not know; use a newer moe-pack"
            )
    json_files.check_seal(raw, MANIFEST_FILE)
    manifest = json_files.load(Manifest, values, MANIFEST_FILE, PackError)
    _check_files(manifest)
    _check_meaning(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files] + [file.name for file in manifest.expert_files]
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise PackError(f"{MANIFEST_FILE}: file {twice!r} is listed twice")
    tables = table_files(manifest.model)
    for file in manifest.files:
        if file.name not in (*REQUIRED_FILES, *COPIED_FILES, layouts.UNUSED_FILE, ROTATION_FILE, *tables):
            raise PackError(f"{MANIFEST_FILE}: unknown file {file.name!r}")
        check_size_and_digest(file.name, file.bytes, file.sha256)
    if (ROTATION_FILE in names) != ("rotated" in manifest.features):
        raise PackError(f"{MANIFEST_FILE}: feature 'rotated' and file {ROTATION_FILE!r} must be present together")
    for required in (*REQUIRED_FILES, *tables):
        if required not in names:
            raise PackError(f"{MANIFEST_FILE}: file {required!r} is not listed")
    expected = [layouts.experts_file(layer) for layer in manifest.model.moe_layers]
    for expert_file, name in zip(manifest.expert_files, expected, strict=False):
        if expert_file.name != name:
            raise PackError(f"{MANIFEST_FILE}: found expert file {expert_file.name!r}, expected {name!r}")
        check_size_and_digest(expert_file.name, expert_file.bytes, expert_file.header_sha256)
    if len(manifest.expert_files) != len(expected):
        raise PackError(
            f"{MANIFEST_FILE}: {len(manifest.expert_files)} expert files, expected {len(expected)}: one for each "
            "MoE layer"
        )


def table_files(spec: specs.ModelSpec) -> tuple[str, ...]:
    """Returns the names of the files of a model's n-gram tables."""
    return () if spec.ngrams is None else tuple(map(layouts.ngrams_file, spec.ngrams.layers))


def check_size_and_digest(name: str, num_bytes: int, digest: str, place: str = MANIFEST_FILE) -> None:
    """Checks the size and the digest of a file that `place` lists. Raises PackError if no file can have them."""
    if not 0 <= num_bytes < 2**62:
        raise PackError(f"{place}: file {name!r} has {num_bytes} bytes, expected 0 to 2^62 - 1")
    if not _HEX.fullmatch(digest):
        raise PackError(f"{place}: digest of {name!r} is not 64 hexadecimal digits")


def _check_meaning(manifest: Manifest) -> None:
    if fault := specs.spec_fault(manifest.model):
        raise PackError(f"{MANIFEST_FILE}: model: {fault}")
    for file in manifest.files:
        most = _most_bytes(file.name, manifest.model)
        if most is not None and file.bytes > most:
            raise PackError(f"{MANIFEST_FILE}: file {file.name!r} has {file.bytes:,} bytes, at most {most:,}")
    if (manifest.model.expert.repeats > 0) != ("repeated" in manifest.features):
        raise PackError(f"{MANIFEST_FILE}: feature 'repeated' and repeats of experts must be present together")
    if (manifest.model.ngrams is not None) != ("ngrams" in manifest.features):
        raise PackError(f"{MANIFEST_FILE}: feature 'ngrams' and ngrams of the model must be present together")
    stored = [dense.name for dense in manifest.dense]
    if len(set(stored)) != len(stored):
        raise PackError(f"{MANIFEST_FILE}: dense: a name is listed twice")
    if manifest.root != root_digest(manifest.files, manifest.expert_files):
        raise PackError(f"{MANIFEST_FILE}: root digest does not match the files listed")
    totals = json_files.dump(manifest.totals)
    content = totals.pop("content")
    for name, num_bytes in totals.items():
        if num_bytes < 0:
            raise PackError(f"{MANIFEST_FILE}: totals: {name} is {num_bytes}, expected 0 or more")
    listed = sum(file.bytes for file in manifest.files) + sum(file.bytes for file in manifest.expert_files)
    if content != listed or content != sum(totals.values()):
        raise PackError(f"{MANIFEST_FILE}: totals give {content} bytes of content, the files listed have {listed}")


def _most_bytes(name: str, spec: specs.ModelSpec) -> int | None:
    """Returns the most bytes of a file that is read whole; None for files that are read in parts."""
    if name in (*COPIED_FILES, SOURCE_FILE):
        return MAX_SMALL_BYTES
    if name in (INDEX_FILE, THRESHOLDS_FILE, ORDER_FILE, ROTATION_FILE):
        of_experts = spec.router.num_experts * (_INDEX_ENTRY_BYTES + 4 * spec.expert.intermediate_size)
        return MAX_MANIFEST_BYTES + len(spec.moe_layers) * (of_experts + 8 * spec.hidden_size)
    return None


Fate = Literal["packed", "resident", "table", "scales", "unused", "dropped"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A shard: its size, and the SHA-256 of its safetensors header."""

    name: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and its fate."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fate: Fate
    reason: str  # why it is unused or dropped; empty for other fates
    # The number of the model's weights, if it is not the usual one: in words of packed codes, and in a tensor of which
    # the model uses a part.
    weights: int | None = json_files.added(None)
    decoded_from: str | None = json_files.added(None)  # the type in the file, if values of `dtype` were decoded from it

    @property
    def num_weights(self) -> int:
        """The number of the model's weights in it: no scales, usually one an element, two in MXFP4 codes."""
        if self.fate not in ("packed", "resident", "table"):
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "U8" else 1) if self.weights is None else self.weights


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """All shards and all tensors of a checkpoint, each sorted by name."""

    files: tuple[SourceFile, ...]
    tensors: tuple[SourceTensor, ...]


def account_bytes(files: Iterable[SourceFile], tensors: Iterable[SourceTensor]) -> bytes:
    """Returns the bytes of `source.json`."""
    account = SourceAccount(
        tuple(sorted(files, key=lambda file: file.name)), tuple(sorted(tensors, key=lambda tensor: tensor.name))
    )
    return json_files.canonical(json_files.dump(account))


# A synthetic pack has no checkpoint: its weights are random.
NO_SOURCE = account_bytes((), ())


def read_account(raw: bytes) -> SourceAccount:
    """Reads the bytes of `source.json`. Raises PackError."""
    return json_files.load(SourceAccount, json_files.parse(raw, SOURCE_FILE, PackError), SOURCE_FILE, PackError)
