"""Where a checkpoint's bytes come from: its config, its tensors, and small files such as those of the tokenizer.

`Checkpoint` gives tensors their roles; a `CheckpointFiles` only knows their names, dtypes, shapes and bytes.
`SafetensorsFiles` is a Hugging Face folder with one or many safetensors shards, of which ranges are read. Other sources
offer the same under the names that our families know.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import CheckpointError, RangeReader, json_files
from moe_pack.formats.manifest import SourceFile
from moe_pack.formats.safetensors import TensorEntry, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CONFIG = "config.json"
_SHARD = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}\.safetensors", re.ASCII)
MAX_FILE_BYTES = 64 << 20  # the largest published tokenizer.json has 33 MB


class FolderFiles:
    """The small files of a folder. It keeps nothing open and reads a file each time.

    Raises:  CheckpointError if there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        self.folder = folder

    def has(self, name: str) -> bool:
        """Returns whether the folder has this file."""
        return (self.folder / name).exists()

    def read_file(self, name: str, most_bytes: int = MAX_FILE_BYTES) -> NDArray[np.uint8]:
        """Reads a whole file: u8 [bytes].

        Raises:  CheckpointError if it is larger than `most_bytes`, or cannot be read.
        """
        with RangeReader(self.folder / name, CheckpointError) as reader:
            if reader.num_bytes > most_bytes:
                raise CheckpointError(f"{name}: {reader.num_bytes} bytes, at most {most_bytes}")
            return reader.read(0, reader.num_bytes)


class CheckpointFiles(ABC):
    """The files of one checkpoint, open for reading: `close` them.

    `folder`: where they are, for messages.
    """

    folder: Path

    @abstractmethod
    def has(self, name: str) -> bool:
        """Returns whether there is a small file of this name, such as `tokenizer.json`."""

    @abstractmethod
    def read_file(self, name: str, most_bytes: int = MAX_FILE_BYTES) -> NDArray[np.uint8]:
        """Reads a whole small file: u8 [bytes].

        Raises:  CheckpointError if it is larger than `most_bytes`, or cannot be read.
        """

    def config(self) -> object:
        """Returns the values of `config.json`.

        Raises:  CheckpointError if it is missing, too long or not JSON.
        """
        return read_json(self, _CONFIG)

    @abstractmethod
    def entries(self) -> Mapping[str, TensorEntry]:
        """Returns what is known of each tensor, by name; an entry's offset has a meaning in its file alone."""

    @abstractmethod
    def file_of(self, tensor: str) -> str:
        """Returns the name of the file with a tensor, for messages."""

    @abstractmethod
    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads `num_bytes` of a tensor, from its byte `start` on: u8, own memory.

        Raises:  CheckpointError if the file is cut short or cannot be read.
        """

    def read_each(self, tensor: str, starts: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of `num_bytes` from each of a tensor's bytes `starts`: u8 [starts, num_bytes].

        Raises:  as `read`.
        """
        pieces = [self.read(tensor, start, num_bytes) for start in starts]
        return np.stack(pieces) if pieces else np.empty((0, num_bytes), np.uint8)

    @abstractmethod
    def account(self) -> list[SourceFile]:
        """Returns every file with tensors, sorted by name."""

    def decoded_from(self, tensor: str) -> str | None:
        """Returns the type from which a tensor's values are decoded when they are read, or None."""
        return None

    def notes(self) -> Sequence[str]:
        """Returns lines for users on how the tensors are read, if that is not as they are."""
        return ()

    @abstractmethod
    def stamp(self) -> str:
        """Returns a digest that changes when the files change, such as of sizes and modification times."""

    @abstractmethod
    def close(self) -> None:
        """Closes all files."""


class SafetensorsFiles(FolderFiles, CheckpointFiles):
    """A folder with `model.safetensors`, or with shards and their index. Owns the shards' descriptors.

    The shards are opened by `entries`, so that a config that is wrong is found first.
    Raises:  CheckpointError if there is no such folder; from `entries`, if files are missing or damaged, or the index
             does not fit the shards.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._readers: dict[str, RangeReader] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._shards: dict[str, str] = {}  # of each tensor

    def entries(self) -> Mapping[str, TensorEntry]:
        """Returns what the shards' headers say of each tensor, by name."""
        if not self._readers:
            self._open()
        return self._entries

    def file_of(self, tensor: str) -> str:
        """Returns the name of the shard with a tensor."""
        return self._shards[tensor]

    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of a tensor: u8, own memory.

        Raises:  CheckpointError if the shard is cut short or cannot be read.
        """
        entry = self._entries[tensor]
        assert 0 <= start <= start + num_bytes <= entry.num_bytes, (tensor, start, num_bytes)
        return self._readers[self._shards[tensor]].read(entry.offset + start, num_bytes)

    def read_each(self, tensor: str, starts: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
        """Reads several ranges of a tensor: u8 [starts, num_bytes].

        Raises:  as `read`.
        """
        offset = self._entries[tensor].offset
        return self._readers[self._shards[tensor]].read_each([offset + start for start in starts], num_bytes)

    def account(self) -> list[SourceFile]:
        """Returns every shard, sorted by name."""
        files = []
        for shard, reader in sorted(self._readers.items()):
            length = int.from_bytes(reader.read(0, 8).tobytes(), "little")
            header = reader.read(0, 8 + length)
            files.append(SourceFile(shard, reader.num_bytes, hashlib.sha256(header.data).hexdigest()))
        return files

    def stamp(self) -> str:
        """Returns a digest of the shards' sizes and modification times."""
        paths = sorted(self.folder / shard for shard in self._readers)
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def close(self) -> None:
        """Closes all shards."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _open(self) -> None:
        weight_map = self._weight_map()
        shards = shards_of(weight_map)
        self._entries, self._shards = join_shards(
            weight_map, {shard: read_header(self.folder / shard, CheckpointError) for shard in shards}
        )
        self._readers = {shard: RangeReader(self.folder / shard, CheckpointError) for shard in shards}

    def _weight_map(self) -> dict[str, str] | None:
        return read_weight_map(self, [path.name for path in self.folder.iterdir()])


def read_weight_map(files: CheckpointFiles, names: Iterable[str]) -> dict[str, str] | None:
    """Returns each tensor's shard, or None for a checkpoint of one file.

    Args:    names: of all files in the folder.
    Raises:  CheckpointError if there are no safetensors, or the index is not one.
    """
    if files.has(_INDEX):
        return weight_map_of(read_json(files, _INDEX))
    if files.has(_SINGLE):
        return None
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise CheckpointError(
            f"{files.folder}: found .bin or .pt weights, expected safetensors; convert once with transformers: "
            "AutoModelForCausalLM.from_pretrained(IN, dtype='auto').save_pretrained(OUT)"
        )
    raise CheckpointError(f"{files.folder}: found neither {_SINGLE} nor {_INDEX}; is the download complete?")


def shards_of(weight_map: Mapping[str, str] | None) -> list[str]:
    """Returns the names of all shards, sorted."""
    return [_SINGLE] if weight_map is None else sorted(set(weight_map.values()))


def join_shards(
    weight_map: Mapping[str, str] | None, headers: Mapping[str, Iterable[TensorEntry]]
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Returns all tensors' entries, and their shards, by name.

    Args:    headers: the entries of each shard.
    Raises:  CheckpointError if a tensor is in two shards, or not in the one that the index names.
    """
    entries, shards = dict[str, TensorEntry](), dict[str, str]()
    for shard, header in headers.items():
        for entry in header:
            if entry.name in entries:
                raise CheckpointError(
                    f"{shard}: tensor {entry.name!r} is also in {shards[entry.name]}; each tensor must be in one shard"
                )
            entries[entry.name], shards[entry.name] = entry, shard
    for name, shard in (weight_map or {}).items():
        if shards.get(name) != shard:
            raise CheckpointError(f"{_INDEX}: tensor {name!r} is not in {shard}")
    return entries, shards


def weight_map_of(index: object) -> dict[str, str]:
    """Returns each tensor's shard by the values of `model.safetensors.index.json`.

    Raises:  CheckpointError if they are not those of an index, or a name is not that of a shard in the same folder.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX}: weight_map is missing")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(f"{_INDEX}: {shard!r} is not the name of a safetensors file in the same folder")
    return weight_map


def read_json(files: FolderFiles | CheckpointFiles, name: str) -> object:
    """Reads a JSON file of a checkpoint.

    Raises:  CheckpointError if it is missing, too long or not JSON.
    """
    if not files.has(name):
        raise CheckpointError(f"{files.folder}: {name} is missing; a checkpoint folder has one")
    return json_files.parse(files.read_file(name).tobytes(), name, CheckpointError, is_foreign=True)
