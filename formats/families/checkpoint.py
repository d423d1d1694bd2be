"""A checkpoint, read range by range; and model specs by name or by `config.json` alone, without weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.families import checkpoint_files, claiming, published, registry
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.given_names import given_names
from moe_pack.formats.families.source_reader import SourceReader
from moe_pack.formats.pack import manifests, safetensors

_COMPARED_BYTES = 4 << 20


class Checkpoint(SourceReader):
    """An open checkpoint. Owns its files: `close` it.

    The structure is checked in full; of the values, those that must be copies of each other. It reads no tensor whole.
    Args:    source: a folder with safetensors, or any other files with tensors under the names of a family.
    Raises:  CheckpointError if files are missing or damaged, the architecture is unknown, or tensors do not fit it.
    """

    def __init__(self, source: Path | checkpoint_files.CheckpointFiles) -> None:
        self.files = checkpoint_files.SafetensorsFiles(source) if isinstance(source, Path) else source
        self.folder = self.files.folder  # for messages
        self._notes: list[str] = []
        try:
            config = Config(self.files.config(), "config.json")
            self.family, self.spec, quantization = registry.read_spec(config)
            self._entries = self._named_entries()
            shapes = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
            self.spec = self._with_own_head(claiming.spec_of_tensors(self.family, self.spec, shapes))
            self.claims: claiming.Claims = claiming.claim_tensors(self.family, self.spec, shapes, quantization)
            self._check_values()
        except formats.CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Closes all files."""
        self.files.close()

    def dense_source(self, role: str) -> claiming.SourceMatrix:
        """Returns the place of the dense tensor with this role."""
        return self.claims.dense[role]

    def expert_source(self, layer_idx: int, expert: int, matrix: formats.Matrix) -> claiming.SourceMatrix:
        """Returns the place of a matrix of an expert in the `layer_idx`-th MoE layer."""
        return self.claims.experts[self.spec.moe_layers[layer_idx], expert, matrix]

    def bias_source(self, layer_idx: int, expert: int, matrix: formats.Matrix) -> claiming.SourceMatrix:
        """Returns the place of the bias, a vector, of an expert's matrix that has one by the spec."""
        return self.claims.expert_biases[self.spec.moe_layers[layer_idx], expert, matrix]

    def entry(self, tensor: str) -> safetensors.TensorEntry:
        """Returns what its file says about a tensor."""
        return self._entries[tensor]

    def table_dtype(self, layer: int) -> str:
        """Returns the safetensors dtype of the n-gram table of a decoder layer."""
        return self.dtype(self.claims.tables[layer][0])

    def table_rows(self, layer: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads rows `start` to `stop` of a layer's n-gram table: u8 [rows, bytes]. Raises as `rows`."""
        assert start < stop, f"layer {layer}: rows {start} to {stop}"
        pieces, first = list[NDArray[np.uint8]](), 0
        for source in self.claims.tables[layer]:
            low, high = max(start - first, 0), min(stop - first, source.num_rows)
            if low < high:
                pieces.append(self.rows(source, low, high).reshape(high - low, -1))
            first += source.num_rows
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def table_rows_at(self, layer: int, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Reads the rows with these numbers, rising, of a layer's n-gram table: u8 [n, bytes]. Raises as `rows`."""
        pieces, first = list[NDArray[np.uint8]](), 0
        for source in self.claims.tables[layer]:
            low, high = np.searchsorted(numbers, (first, first + source.num_rows))
            if low < high:
                row_bytes = source.row_size * self.value_bits(source) // 8
                starts = (numbers[low:high] - first) * row_bytes
                pieces.append(self.files.read_each(source.tensor, starts.tolist(), row_bytes))
            first += source.num_rows
        return np.concatenate(pieces)

    def place(self, source: claiming.SourceMatrix) -> str:
        """Returns file and tensor for messages, and the matrix's rows if the tensor has many matrices."""
        entry = self._entries[source.tensor]
        last = source.first_row + (source.num_rows - 1) * source.row_step
        is_part = len(entry.shape) > 2 or source.num_rows < entry.shape[0]
        rows = f", rows {source.first_row} to {last}" if is_part and not source.transposed else ""
        return f"{self.files.file_of(source.tensor)}: tensor {source.tensor!r}{rows}"

    def unused(self) -> list[safetensors.StoredTensor]:
        """Returns the tensors that a pack keeps although they are not run, sorted by name."""
        entries = [self._entries[name] for name in sorted(self.claims.unused)]
        return [(entry.name, entry.dtype, entry.shape) for entry in entries]

    def raw(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads `num_bytes` of a tensor, from byte `start` on: u8, own memory. Raises CheckpointError as `rows`."""
        return self.files.read(tensor, start, num_bytes)

    def account(self) -> tuple[list[manifests.SourceFile], list[manifests.SourceTensor]]:
        """Returns every file with tensors and the fate of every tensor."""
        experts = (*self.claims.experts.values(), *self.claims.expert_biases.values())
        sources = (*experts, *self.claims.dense.values())
        fates: dict[str | None, manifests.Fate] = dict.fromkeys((source.scales for source in sources), "scales")
        fates |= dict.fromkeys((source.tensor for source in experts), "packed")
        tables = (source.tensor for pieces in self.claims.tables.values() for source in pieces)
        fates |= dict.fromkeys(tables, "table")
        fates |= dict.fromkeys(self.claims.unused, "unused")
        fates |= dict.fromkeys(self.claims.dropped, "dropped")
        reasons = {**self.claims.unused, **self.claims.dropped}
        weights = Counter[str]()
        for source in sources:
            weights[source.tensor] += source.num_rows * source.num_cols
        tensors = []
        for name, entry in self._entries.items():
            fate, reason = fates.get(name, "resident"), reasons.get(name, "")
            usual = manifests.SourceTensor(
                name, entry.dtype, entry.shape, fate, reason, decoded_from=self.files.decoded_from(name)
            )
            is_usual = name not in weights or usual.num_weights == weights[name]
            tensors.append(usual if is_usual else replace(usual, weights=weights[name]))
        return self.files.account(), tensors

    def notes(self) -> list[str]:
        """Returns lines for users on how files and tensors are read, where that is not as anyone expects."""
        return [*self.files.notes(), *self._notes]

    def stamp(self) -> str:
        """Returns a digest which shows that a source has changed, without reading all of it."""
        return self.files.stamp()

    def _named_entries(self) -> Mapping[str, safetensors.TensorEntry]:
        """Returns all tensors by the names that the family knows."""
        known, notes = given_names(self.family, self.spec, self.files.entries())
        self.files.rename(known)
        self._notes += notes
        return self.files.entries()

    def _with_own_head(self, spec: formats.ModelSpec) -> formats.ModelSpec:
        """Returns the spec; with a head of its own if the config says that it is the embedding, and it is not."""
        head = claiming.second_head(self.family, spec, self._entries)
        embeds = (way.name for way in claiming.stored_ways(self.family, spec, "embed"))
        embed = next((name for name in embeds if name in self._entries), None)
        if head is None or embed is None:
            return spec
        if self._are_equal(head, embed):
            self._notes.append(f"note: tensor {head!r} is a copy of {embed!r}, and is left out")
            return spec
        self._notes.append(
            f"note: config.json says that the head is the embedding, but {head!r} differs from {embed!r}; it is the "
            "head, as in transformers"
        )
        return replace(spec, tied_head=False)

    def _are_equal(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same dtype, shape and bytes."""
        one, two = self._entries[name], self._entries[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        pieces = safetensors.split_bytes(0, two.num_bytes, _COMPARED_BYTES)
        return all(np.array_equal(self.raw(name, *piece), self.raw(other, *piece)) for piece in pieces)

    def _check_values(self) -> None:
        """Checks tensors that must be copies of others, or have certain numbers."""
        for name, original in self.claims.copies.items():
            if not self._are_equal(name, original):
                raise formats.CheckpointError(
                    f"{self.files.file_of(name)}: tensor {name!r} differs from {original!r}, but must be a copy "
                    "of it; models where the two differ are not supported"
                )
        for name, expected in self.claims.constants.items():
            numbers = self.raw(name, 0, self._entries[name].num_bytes).view("<i8").tolist()
            if numbers != list(expected):
                raise formats.CheckpointError(
                    f"{self.files.file_of(name)}: tensor {name!r} has numbers that do not follow from config.json; "
                    "models with other n-gram hashes are not supported"
                )


def model_spec(source: str, num_layers: int | None = None, vocab_size: int | None = None) -> formats.ModelSpec:
    """Returns the spec of the model that `source` names, with fewer layers or tokens if these are given.

    Args:    source: a `config.json`, a folder with one, or the name of a published model; files come first.
             num_layers: the first layers of the decoder.   vocab_size: the first tokens of embedding and head.
    Raises:  CheckpointError for an unknown name, an unsupported config, or more layers or tokens than the model has.
    """
    values, place = _config(source)
    model_type = values.get("model_type") if isinstance(values, dict) else None
    family = registry.family_of(model_type) if isinstance(model_type, str) else None
    if family is not None:
        newer = {old: new for old, new in family.old_keys.items() if new not in values}
        values = {newer.get(key, key): value for key, value in values.items()}
    text = values
    for key in () if family is None else family.text_keys:
        text = text.get(key) if isinstance(text, dict) else None
    if isinstance(text, dict):
        _cut_layers(text, num_layers)
        _cut(text, "vocab_size", vocab_size, "--vocab")
    try:
        return registry.read_spec(Config(values, place))[1]
    except formats.CheckpointError as fault:
        sizes = {"--layers": num_layers, "--vocab": vocab_size}
        given = [f"{option} {size}" for option, size in sizes.items() if size is not None]
        if not given:
            raise
        hint = "" if num_layers is None else "; the model's first layers may have no experts"
        raise formats.CheckpointError(f"{fault} (with {' and '.join(given)}{hint})") from fault


# Keys with the number of layers that predict further tokens: some lists of values for layers go on with theirs.
_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")


def _cut_layers(values: dict[str, Any], wanted: int | None) -> None:
    """Keeps the first layers, also in the lists that have a value for each layer (`layer_types`)."""
    if wanted is None:
        return
    if "num_decoder_layers" in values:
        raise formats.CheckpointError("--layers does not support models with an encoder; leave the option out")
    size = values.get("num_hidden_layers")
    _cut(values, "num_hidden_layers", wanted, "--layers")
    if type(size) is int:
        predicting = next((values[key] for key in _PREDICTING if type(values.get(key)) is int), 0)
        _cut_lists(values, {size, size + predicting}, wanted)


def _cut_lists(values: dict[str, Any], sizes: set[int], wanted: int) -> None:
    """Keeps the first values of lists, and letters of patterns, that have one for each layer."""
    for key, value in values.items():
        if isinstance(value, dict) and not key.startswith("rope"):  # whose lists are of frequencies
            _cut_lists(value, sizes, wanted)
        elif type(value) is (str if key == "hybrid_override_pattern" else list) and len(value) in sizes:
            values[key] = value[:wanted]


def _cut(values: dict[str, Any], key: str, wanted: int | None, option: str) -> None:
    if wanted is None:
        return
    size = values.get(key)
    if type(size) is int and not 0 < wanted <= size:
        raise formats.CheckpointError(
            f"{option} is {wanted}, but this model's {key} is {size}; give a number from 1 to {size}"
        )
    values[key] = wanted


def _config(source: str) -> tuple[Any, str]:
    """Returns the values of a config, and their file's name for messages."""
    path = Path(source)
    if path.is_dir():
        return checkpoint_files.read_json(checkpoint_files.FolderFiles(path), "config.json"), "config.json"
    if path.suffix == ".gguf" and path.is_file():
        raise formats.CheckpointError(
            f"{source}: is a GGUF file; give a config.json, a folder with one, or a model's name"
        )
    if path.exists():
        return checkpoint_files.read_json(checkpoint_files.FolderFiles(path.parent), path.name), path.name
    name = published.published_name(source)
    return published.published_config(name), f"{name}'s config.json"
