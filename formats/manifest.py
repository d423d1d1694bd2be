"""`manifest.json`: what the pack is, which files it has, and the digests that prove them. Specified in docs/format.md.

Deterministic: no time, host, worker count or measurement.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats import strict_json
from moe_pack.formats.errors import PackError
from moe_pack.formats.index import INDEX_FILE, ORDER_FILE, THRESHOLDS_FILE
from moe_pack.formats.layout import DENSE_FILE, UNUSED_FILE, experts_file
from moe_pack.formats.plan import PartFormat, Quantizer
from moe_pack.formats.seal import check_seal, sealed
from moe_pack.formats.spec import ModelSpec, Selector
from moe_pack.formats.spec_check import spec_fault

MANIFEST_FILE = "manifest.json"
SOURCE_FILE = "source.json"
FORMAT: Literal["moe-pack"] = "moe-pack"
VERSION = 2
MAX_MANIFEST_BYTES = 1_000_000
FEATURES = frozenset({"bf16", "affine", "fp8", "e5m2", "mxfp4", "trellis", "byte_scales", "dense_rows", "unused"})
REQUIRED_FILES = (INDEX_FILE, DENSE_FILE, THRESHOLDS_FILE, ORDER_FILE, SOURCE_FILE)
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
    """A file checked as a whole: its size and SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """A layer's experts. The digest is that of the header alone; the index has one for each extent."""

    name: str
    bytes: int
    header_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class QuantizedDense:
    """A dense matrix `[rows, cols]` stored in the row layout, one part called `weight`."""

    name: str
    rows: int
    cols: int
    format: PartFormat


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """A package that took part in making the bytes."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes by part. `content` counts every file but the manifest; the parts named before it add up to it.

    `headers` are those of expert files, `padding` what keeps extents on their boundaries, `tables` index, thresholds,
    order and source account, `copied` the source's own small files, `unused` what nothing runs.
    """

    selectors: int
    records: int
    extra: int
    padding: int
    headers: int
    dense: int
    tables: int
    copied: int
    content: int
    unused: int = strict_json.added(0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole manifest; `conversion` is the digest of source, plan and versions, `root` that of the content."""

    format: Literal["moe-pack"]
    version: int
    features: tuple[str, ...]
    model: ModelSpec
    selector: Selector
    quantizer: Quantizer
    made_with: tuple[PackageVersion, ...]
    conversion: str
    dense: tuple[QuantizedDense, ...]
    files: tuple[ContentFile, ...]
    expert_files: tuple[ExpertFile, ...]
    totals: Totals
    root: str
    sha256: str


def root_digest(files: tuple[ContentFile, ...], expert_files: tuple[ExpertFile, ...]) -> str:
    """SHA-256 of one line a file, sorted by name: digest (of the header, for experts), bytes, name."""
    lines = [(file.name, f"{file.sha256} {file.bytes} {file.name}\n") for file in files]
    lines += [(file.name, f"{file.header_sha256} {file.bytes} {file.name}\n") for file in expert_files]
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode("ascii")).hexdigest()


def root_without_thresholds(manifest: Manifest) -> str:
    """The root digest as it would be if there were no thresholds: it stays when they are rewritten."""
    files = tuple(file for file in manifest.files if file.name != THRESHOLDS_FILE)
    return root_digest(files, manifest.expert_files)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest's file, with the digest of itself filled in: canonical JSON, `sha256` as its last key."""
    values = strict_json.dump(manifest)
    del values["sha256"]
    return sealed(values)


def read_manifest(raw: bytes) -> Manifest:
    """The manifest in the bytes of its file, checked: digest, version, features, names, totals, root.

    Raises:  PackError with the first fault.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise PackError(f"{MANIFEST_FILE}: {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}")
    values = strict_json.parse(raw, MANIFEST_FILE, PackError)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise PackError(f"{MANIFEST_FILE}: found no format 'moe-pack'; this folder is no pack")
    if values.get("version") != VERSION:
        raise PackError(
            f"{MANIFEST_FILE}: format version {values.get('version')!r}, this program reads {VERSION}; "
            "use the version of moe-pack that wrote it, or convert again"
        )
    features = values.get("features")
    for feature in features if isinstance(features, list) else []:
        if not isinstance(feature, str) or feature not in FEATURES:
            raise PackError(f"{MANIFEST_FILE}: requires feature {feature!r}, unknown here; use a newer moe-pack")
    check_seal(raw, MANIFEST_FILE)
    manifest = strict_json.load(Manifest, values, MANIFEST_FILE, PackError)
    _check_files(manifest)
    _check_meaning(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files] + [file.name for file in manifest.expert_files]
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise PackError(f"{MANIFEST_FILE}: file {twice!r} is listed twice")
    for file in manifest.files:
        if file.name not in (*REQUIRED_FILES, *COPIED_FILES, UNUSED_FILE):
            raise PackError(f"{MANIFEST_FILE}: unknown file {file.name!r}")
        _check_size_and_digest(file.name, file.bytes, file.sha256)
    for required in REQUIRED_FILES:
        if required not in names:
            raise PackError(f"{MANIFEST_FILE}: file {required!r} is not listed")
    expected = [experts_file(layer) for layer in manifest.model.moe_layers]
    for expert_file, name in zip(manifest.expert_files, expected, strict=False):
        if expert_file.name != name:
            raise PackError(f"{MANIFEST_FILE}: found expert file {expert_file.name!r}, expected {name!r}")
        _check_size_and_digest(expert_file.name, expert_file.bytes, expert_file.header_sha256)
    if len(manifest.expert_files) != len(expected):
        raise PackError(f"{MANIFEST_FILE}: {len(manifest.expert_files)} expert files for {len(expected)} layers")


def _check_size_and_digest(name: str, num_bytes: int, digest: str) -> None:
    if not 0 <= num_bytes < 2**62:
        raise PackError(f"{MANIFEST_FILE}: file {name!r} has {num_bytes} bytes")
    if not _HEX.fullmatch(digest):
        raise PackError(f"{MANIFEST_FILE}: digest of {name!r} is not 64 hexadecimal digits")


def _check_meaning(manifest: Manifest) -> None:
    fault = spec_fault(manifest.model)
    if fault:
        raise PackError(f"{MANIFEST_FILE}: model: {fault}")
    stored = [dense.name for dense in manifest.dense]
    if len(set(stored)) != len(stored):
        raise PackError(f"{MANIFEST_FILE}: dense: a name is listed twice")
    if manifest.root != root_digest(manifest.files, manifest.expert_files):
        raise PackError(f"{MANIFEST_FILE}: root digest does not match the files listed")
    totals = strict_json.dump(manifest.totals)
    content = totals.pop("content")
    for name, num_bytes in totals.items():
        if num_bytes < 0:
            raise PackError(f"{MANIFEST_FILE}: totals: {name} is {num_bytes}")
    listed = sum(file.bytes for file in manifest.files) + sum(file.bytes for file in manifest.expert_files)
    if content != listed or content != sum(totals.values()):
        raise PackError(f"{MANIFEST_FILE}: totals give {content} bytes of content, the files listed have {listed}")
