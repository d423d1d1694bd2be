"""A pack, open for reading, and the audit of all its bytes.

`Pack` checks manifest, sizes, headers, index and thresholds when it opens, other files when it reads them, and an
expert's extent by its CRC-32 at its first read. It never decodes weights.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.base import commands
from moe_pack.formats.base.errors import PackError
from moe_pack.formats.pack import layouts, manifests, plans, safetensors
from moe_pack.formats.parts import part, specs

_NO_SOURCE_SHA256 = hashlib.sha256(manifests.NO_SOURCE).hexdigest()


def is_listed(path: Path, listed: manifests.ContentFile) -> bool:
    """Returns whether a file exists and has the size and SHA-256 that a manifest lists."""
    if not path.is_file():
        return False
    with safetensors.RangeReader(path, PackError) as reader:
        return reader.num_bytes == listed.bytes and reader.sha256() == listed.sha256


class Pack:
    """An open pack. Owns its files' descriptors: `close` it, or use it in a `with`.

    Raises:  PackError for the first fault.
    """

    manifest: manifests.Manifest
    spec: specs.ModelSpec
    layout: layouts.PackLayout
    index: manifests.Index
    thresholds: NDArray[np.float32]  # [L, E]
    rotation: manifests.RotationVectors | None = None  # None if no layer's experts are rotated
    begins = True  # whether its first layer is the model's, which follows the embedding
    ends = True  # whether its last layer is the model's, which the head follows
    whole: "Pack"  # the pack with all layers of the model, this one or another
    moe_slice = slice(None)  # the place of its MoE layers among those of the whole pack

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder, self
        self._readers: dict[str, safetensors.RangeReader] = {}
        self._paths: dict[str, Path] = {}  # of files with another path than their name
        self._maps: dict[int, NDArray[np.uint8]] = {}  # of the experts' files, by layer_idx
        self._checked: set[tuple[int, int]] = set()
        commands.check_is_folder(folder)
        if not (folder / manifests.MANIFEST_FILE).exists():
            raise PackError(
                f"{folder}: found no {manifests.MANIFEST_FILE}; this is not a pack, or its conversion has not finished"
            )
        try:
            self._open()
        except PackError:
            self.close()
            raise

    def __enter__(self) -> "Pack":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._maps.clear()

    @property
    def is_synthetic(self) -> bool:
        """Whether it was made without a checkpoint: its weights are random."""
        return self._files[manifests.SOURCE_FILE].sha256 == _NO_SOURCE_SHA256

    def has(self, name: str) -> bool:
        """Returns whether the pack has this file."""
        return name in self._files

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """Reads all bytes of a file without experts, and checks its SHA-256: u8, own memory. Raises PackError."""
        listed = self._files[name]
        raw, digest = self._reader(name).read_hashed(listed.bytes)
        if digest != listed.sha256:
            raise PackError(f"{name}: SHA-256 does not match the manifest's; the file is damaged")
        return raw

    def check_file(self, name: str) -> None:
        """Checks the SHA-256 of a file without experts, some bytes at a time. Raises PackError if it differs."""
        if self._reader(name).sha256() != self._files[name].sha256:
            raise PackError(f"{name}: SHA-256 does not match the manifest's; the file is damaged")

    def read_extent(self, layer_idx: int, expert: int) -> NDArray[np.uint8]:
        """Reads all bytes of an expert: u8, own memory. Raises PackError if their CRC-32, checked once, is wrong."""
        reader = self._reader(self.manifest.expert_files[layer_idx].name)
        raw = reader.read(self.layout.offsets[layer_idx][expert], self.layout.experts[layer_idx][expert].num_bytes)
        self._check_extent(layer_idx, expert, raw, lambda extent: zlib.crc32(extent.data))
        return raw

    def map_extent(
        self, layer_idx: int, expert: int, checksum: Callable[[NDArray[np.uint8]], int]
    ) -> NDArray[np.uint8]:
        """Returns all bytes of an expert, u8, in the mapped file. Only `checksum` reads them, and only the first time.

        Args:    checksum: computes the CRC-32 of mapped bytes. Like later readers it must catch the SIGBUS of a file
                 that is cut (`RangeReader.map`).
        Raises:  PackError if they are damaged, or the file cannot be mapped.
        """
        name = self.manifest.expert_files[layer_idx].name
        if layer_idx not in self._maps:
            self._maps[layer_idx] = self._reader(name).map()
        offset, num_bytes = self.layout.offsets[layer_idx][expert], self.layout.experts[layer_idx][expert].num_bytes
        mapped = self._maps[layer_idx][offset : offset + num_bytes]
        if len(mapped) != num_bytes:
            raise PackError(f"{name}: ends at byte {len(self._maps[layer_idx])}, expected {offset + num_bytes}")
        self._check_extent(layer_idx, expert, mapped, checksum)
        return mapped

    def read_ahead(self, layer_idx: int, experts: Iterable[int]) -> None:
        """Has the system begin to read experts, which `map_extent` will map, unless they were checked."""
        reader = self._reader(self.manifest.expert_files[layer_idx].name)
        for expert in experts:
            if (layer_idx, expert) not in self._checked:
                num_bytes = self.layout.experts[layer_idx][expert].num_bytes
                reader.read_ahead(self.layout.offsets[layer_idx][expert], num_bytes)

    def is_cut(self, layer_idx: int) -> bool:
        """Returns whether a layer's file is now too short. Its map hides that: a cut page ends in zeros."""
        listed = self.manifest.expert_files[layer_idx]
        return self._reader(listed.name).num_bytes < listed.bytes

    def _check_extent(
        self, layer_idx: int, expert: int, extent: NDArray[np.uint8], checksum: Callable[[NDArray[np.uint8]], int]
    ) -> None:
        if (layer_idx, expert) in self._checked:
            return
        if checksum(extent) != self.index.crc32[layer_idx, expert]:
            name = self.manifest.expert_files[layer_idx].name
            raise PackError(f"{name}: expert {expert}: CRC-32 does not match its bytes; the file is damaged")
        self._checked.add((layer_idx, expert))

    def read_order(self) -> NDArray[np.uint32]:
        """Reads the neuron order [L, E, f]: `order[l, e, j]` is the source's neuron in row `j`."""
        return manifests.read_order(*self._table(manifests.ORDER_FILE), self.spec)

    def padding(self, layer_idx: int) -> list[safetensors.TensorEntry]:
        """Returns the padding between the extents of a layer."""
        return [e for e in self.layout.expert_files[layer_idx].entries if e.name.startswith("pad.")]

    def read_range(self, layer_idx: int, entry: safetensors.TensorEntry) -> NDArray[np.uint8]:
        """Reads the bytes of a tensor of a layer's file, unchecked."""
        return self._reader(self.manifest.expert_files[layer_idx].name).read(entry.offset, entry.num_bytes)

    def read_dense(self, entry: safetensors.TensorEntry, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads rows of a tensor of the dense file, unchecked (`check_file` checks the file)."""
        row_bytes = entry.num_bytes // entry.shape[0]
        return self._reader(layouts.DENSE_FILE).read(entry.offset + start * row_bytes, (stop - start) * row_bytes)

    def read_unused(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of the file of unused tensors, unchecked (`check_file` checks the file)."""
        return self._reader(layouts.UNUSED_FILE).read(offset, num_bytes)

    def read_ngrams(self, table: layouts.NgramLayout, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads rows of an n-gram table, unchecked: u8 [rows, row_bytes], own memory."""
        row_bytes, reader = table.rows.row_bytes, self._reader(layouts.ngrams_file(table.layer))
        return reader.read(table.offset + start * row_bytes, (stop - start) * row_bytes).reshape(-1, row_bytes)

    def read_ngram_rows(self, table: layouts.NgramLayout, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Reads rows of an n-gram table by their numbers, int64 [n], unchecked: u8 [n, row_bytes]."""
        offsets = (table.offset + numbers * table.rows.row_bytes).tolist()
        return self._reader(layouts.ngrams_file(table.layer)).read_each(offsets, table.rows.row_bytes)

    def _open(self) -> None:
        with safetensors.RangeReader(self.folder / manifests.MANIFEST_FILE, PackError) as reader:
            reader.check_content()
            size = min(reader.num_bytes, manifests.MAX_MANIFEST_BYTES + 1)
            self.manifest = manifests.read_manifest(reader.read(0, size).tobytes())
        self.spec = self.manifest.model
        self._files = {file.name: file for file in self.manifest.files}
        new = self.folder / manifests.NEW_THRESHOLDS_FILE
        if is_listed(new, self._files[manifests.THRESHOLDS_FILE]):  # a rewrite was killed before its last rename
            self._paths[manifests.THRESHOLDS_FILE] = new
        sizes = [(file.name, file.bytes) for file in self.manifest.files]
        for name, num_bytes in [*sizes, *((file.name, file.bytes) for file in self.manifest.expert_files)]:
            actual_bytes = self._reader(name).num_bytes
            if actual_bytes != num_bytes:
                if actual_bytes:
                    self._reader(name).check_content()
                raise PackError(f"{name}: {actual_bytes} bytes, expected {num_bytes}; the file is cut or damaged")
        self.index = manifests.read_index(*self._table(manifests.INDEX_FILE), self.spec)
        rotation_bytes = self._files[manifests.ROTATION_FILE].bytes if self.has(manifests.ROTATION_FILE) else 0
        self.layout = replace(self._layout(), rotation_bytes=rotation_bytes)
        self.index.check_layout(self.layout)
        for layer_idx in range(len(self.layout.expert_files)):
            self._check_expert_header(layer_idx)
        self.thresholds = manifests.read_thresholds(*self._table(manifests.THRESHOLDS_FILE), self.spec)
        if self.has(manifests.ROTATION_FILE):
            self.rotation = manifests.read_rotation(*self._table(manifests.ROTATION_FILE), self.spec)

    def _path(self, name: str) -> Path:
        return self._paths.get(name, self.folder / name)

    def _reader(self, name: str) -> safetensors.RangeReader:
        if name not in self._readers:
            self._readers[name] = safetensors.RangeReader(self._path(name), PackError)
        return self._readers[name]

    def _entries(self, name: str) -> dict[str, safetensors.TensorEntry]:
        return {entry.name: entry for entry in safetensors.read_header(self._path(name), PackError)}

    def _table(self, name: str) -> tuple[bytes, dict[str, safetensors.TensorEntry]]:
        return self.read_file(name).tobytes(), self._entries(name)

    def _check_header(self, name: str, header: bytes, expected: str) -> None:
        if self._reader(name).read(0, len(header)).tobytes() != header:
            raise PackError(f"{name}: header does not match {expected}; the file is damaged")

    def _layout(self) -> layouts.PackLayout:
        """Returns the layout that manifest and index describe; checks that the large files follow it."""
        entries = self._entries(layouts.DENSE_FILE)
        quantized = {dense.name: dense for dense in self.manifest.dense}
        formats: list[tuple[str, plans.PartFormat | None]] = []
        for role in specs.dense_roles(self.spec):
            entry, stored = entries.get(role.name), quantized.pop(role.name, None)
            if entry is None:
                raise PackError(f"{layouts.DENSE_FILE}: tensor {role.name!r} is missing")
            if stored is not None:
                fault = (
                    plans.format_fault(stored.format, role.shape[-1]) if role.quantizable else "must not be quantized"
                )
                if (stored.rows, stored.cols) != role.shape:
                    fault = f"shape {[stored.rows, stored.cols]}, expected {list(role.shape)}"
                if fault:
                    raise PackError(f"{manifests.MANIFEST_FILE}: dense {role.name!r}: {fault}")
            elif entry.dtype not in (known := part.INTEGER_DTYPES if role.integers else part.FLOAT_DTYPES):
                raise PackError(
                    f"{layouts.DENSE_FILE}: tensor {role.name!r} is {entry.dtype}, expected one of {', '.join(known)}"
                )
            formats.append((entry.dtype, stored.format if stored else None))
        if quantized:
            raise PackError(f"{manifests.MANIFEST_FILE}: dense {next(iter(quantized))!r} is not a tensor of this model")
        experts = tuple(
            tuple(
                layouts.expert_layout(e, self.manifest.selector, self.spec.expert, self.spec.hidden_size) for e in layer
            )
            for layer in self.index.experts
        )
        layout = layouts.layout_of(self.spec, experts, formats, self._unused(), self._table_dtypes())
        for table in layout.ngrams:
            self._check_table(table)
        if layout.unused_file is not None:
            self._check_header(layouts.UNUSED_FILE, layout.unused_file.header, "its tensors")
        self._check_header(layouts.DENSE_FILE, layout.dense_file.header, "its tensors")
        return layout

    def _unused(self) -> list[safetensors.StoredTensor]:
        """Returns the unused tensors; checks that the feature and the file are present together."""
        if self.has(layouts.UNUSED_FILE) != ("unused" in self.manifest.features):
            raise PackError(
                f"{manifests.MANIFEST_FILE}: feature 'unused' and file {layouts.UNUSED_FILE!r} must be present together"
            )
        if not self.has(layouts.UNUSED_FILE):
            return []
        entries = self._entries(layouts.UNUSED_FILE).values()
        return [(entry.name, entry.dtype, entry.shape) for entry in entries if not entry.name.startswith("pad.")]

    def _table_dtypes(self) -> list[str]:
        dtypes = []
        for layer in () if self.spec.ngrams is None else self.spec.ngrams.layers:
            name = layouts.ngrams_file(layer)
            entry = self._entries(name).get(layouts.TABLE)
            if entry is None:
                raise PackError(f"{name}: tensor {layouts.TABLE!r} is missing")
            if entry.dtype not in part.FLOAT_DTYPES:
                raise PackError(f"{name}: tensor {layouts.TABLE!r} is {entry.dtype}, expected one of BF16, F16, F32")
            dtypes.append(entry.dtype)
        return dtypes

    def _check_table(self, table: layouts.NgramLayout) -> None:
        name = layouts.ngrams_file(table.layer)
        if self._files[name].bytes != table.file.num_bytes:
            raise PackError(f"{name}: {self._files[name].bytes} bytes, expected {table.file.num_bytes} for its rows")
        self._check_header(name, table.file.header, "its rows")

    def _check_expert_header(self, layer_idx: int) -> None:
        listed, file = self.manifest.expert_files[layer_idx], self.layout.expert_files[layer_idx]
        if (listed.bytes, listed.header_bytes) != (file.num_bytes, len(file.header)):
            raise PackError(
                f"{manifests.MANIFEST_FILE}: {listed.name} has {listed.bytes} bytes, {listed.header_bytes} of them "
                f"header; the index gives {file.num_bytes} and {len(file.header)}"
            )
        if listed.header_sha256 != hashlib.sha256(file.header).hexdigest():
            raise PackError(
                f"{manifests.MANIFEST_FILE}: header digest of {listed.name} does not match the header that the "
                "index gives"
            )
        self._check_header(listed.name, file.header, "the index")


def audit(pack: Pack, progress: commands.Progress = commands.NO_PROGRESS) -> None:
    """Checks all that opening and running a pack leave unchecked. Raises PackError for the first fault.

    Checked are: whole files by SHA-256; extents by CRC-32 and SHA-256; rows of experts, of quantized dense matrices and
    of n-gram tables by CRC-32, with their padding; the padding between extents; neuron order and source account.
    """
    total = pack.manifest.totals.content
    files = sum(listed.bytes for listed in pack.manifest.files)
    kinds = commands.Kind("files", files), commands.Kind("experts", total - files)
    progress.begin(commands.Stage.of_kinds("checking", kinds, commands.size_text(total)))
    for listed in pack.manifest.files:
        pack.check_file(listed.name)
        progress.advance(listed.bytes, listed.name, "files")
    pack.read_order()
    manifests.read_account(pack.read_file(manifests.SOURCE_FILE).tobytes())
    _check_dense_rows(pack)
    for table in pack.layout.ngrams:
        _check_table_rows(pack, table)
    for layer_idx, file in enumerate(pack.layout.expert_files):
        name = pack.manifest.expert_files[layer_idx].name
        progress.advance(len(file.header), name, "experts")
        for expert, layout in enumerate(pack.layout.experts[layer_idx]):
            _check_expert(pack, layer_idx, expert)
            progress.advance(layout.num_bytes, name, "experts")
        for padding in pack.padding(layer_idx):
            if pack.read_range(layer_idx, padding).any():
                raise PackError(f"{name}: {padding.name} is not zero")
            progress.advance(padding.num_bytes, name, "experts")
    progress.end()


def _check_expert(pack: Pack, layer_idx: int, expert: int) -> None:
    place = f"{pack.manifest.expert_files[layer_idx].name}: expert {expert}"
    extent = pack.read_extent(layer_idx, expert)
    if hashlib.sha256(extent.data).digest() != pack.index.sha256[layer_idx, expert].tobytes():
        raise PackError(f"{place}: SHA-256 does not match the index; the file is damaged")
    layout = pack.layout.experts[layer_idx][expert]
    records = extent[layout.selector_bytes : layout.selector_bytes + layout.records_bytes]
    if layout.selector is not None:
        selector = extent[: layout.selector_bytes].reshape(layout.num_rows, -1)
        layouts.check_rows(layout.selector, selector, f"{place}: selector")
    layouts.check_rows(layout.records, records.reshape(layout.num_rows, -1), f"{place}: records")
    if layout.extra is not None:
        layouts.check_rows(layout.extra, extent[-layout.extra_bytes :].reshape(1, -1), f"{place}: extra")


_TABLE_BYTES = 8 << 20  # of a table's rows in memory


def _check_table_rows(pack: Pack, table: layouts.NgramLayout) -> None:
    step = max(_TABLE_BYTES // table.rows.row_bytes, 1)
    for start in range(0, table.num_rows, step):
        stop = min(start + step, table.num_rows)
        layouts.check_rows(table.rows, pack.read_ngrams(table, start, stop), layouts.ngrams_file(table.layer), start)


def _check_dense_rows(pack: Pack) -> None:
    quantized = [dense for dense in pack.layout.dense if dense.rows is not None]
    if not quantized:
        return
    content = pack.read_file(layouts.DENSE_FILE)
    for dense in quantized:
        assert dense.rows is not None, "filtered above"
        raw = content[dense.entry.offset : dense.entry.offset + dense.entry.num_bytes]
        layouts.check_rows(dense.rows, raw.reshape(dense.entry.shape), f"{layouts.DENSE_FILE}: {dense.role.name}")
