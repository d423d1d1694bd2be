"""What the header of a GGUF file says: its metadata, and name, type, shape and place of each tensor.

The `gguf` package of llama.cpp reads the header. Of the tensors, only factors of rotary positions are read here, which
`config.json` has. Source: the format's specification, ggml/docs/gguf.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_pack.formats import CheckpointError, RangeReader

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
FACTORS = "rope_freqs.weight"  # a number for each pair of rotary positions, by which its frequency is divided
_FAULTS = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError)


def gguf_package() -> Any:
    """Returns the `gguf` package.

    Raises:  CheckpointError if it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ModuleNotFoundError as fault:
        raise CheckpointError("GGUF files need the package gguf; pip install 'moe-pack[convert]'") from fault
    return gguf


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file. `type`: the name of its GGML type. `shape`: with the contiguous dimension last.

    `file`: the number of its file among those of the model.   `offset`: of its first byte there.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: int
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """The number of rows, each of `shape[-1]` values."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.num_bytes // self.num_rows


class Metadata:
    """The metadata of a model by key, the shapes of its tensors and its `FACTORS`, which say what no key says.

    A key without a prefix is one of the architecture: `block_count` is `llama.block_count`.
    """

    def __init__(
        self,
        place: str,
        values: Mapping[str, Any],
        tensors: Mapping[str, GgufTensor],
        factors: Sequence[float] = (),
    ) -> None:
        self.place = place
        self._values = values
        self.tensors = tensors
        self.factors = factors

    @cached_property
    def architecture(self) -> str:
        """The name of the model's architecture."""
        return self.text("general.architecture")

    def get(self, key: str) -> Any:
        """Returns a key's value, or None."""
        known = key.startswith(("general.", "tokenizer.", "split."))
        return self._values.get(key if known else f"{self.architecture}.{key}")

    def has(self, key: str) -> bool:
        """Returns whether there is a key."""
        return self.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a text.

        Raises:  CheckpointError if it is missing and has no default, or is no text. The other methods likewise.
        """
        return self._typed(key, default, (str,), "text")  # type: ignore[no-any-return]  # checked there

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns a whole number."""
        return self._typed(key, default, (int,), "a whole number")  # type: ignore[no-any-return]  # checked there

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number: of a float32, the shortest decimal number that rounds to it."""
        value = self._typed(key, default, (int, float), "a number")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns a truth value."""
        return self._typed(key, default, (bool,), "true or false")  # type: ignore[no-any-return]  # checked there

    def values(self, key: str) -> list[Any]:
        """Returns a list."""
        return self._typed(key, None, (list,), "a list")  # type: ignore[no-any-return]  # checked there

    def most(self, key: str) -> int:
        """Returns a whole number, or the largest of a list of them."""
        value = self.get(key)
        return max(value) if isinstance(value, list) and value else self.whole(key)

    def each(self, key: str, count: int) -> list[Any]:
        """Returns a value for each of `count` layers: a list, of which later values are left out, or one for all."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.place}: metadata has no key {self._full(key)!r}")
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise CheckpointError(f"{self.place}: {self._full(key)} has {len(values)} values, expected {count}")
        return values[:count]

    def has_tensor(self, name: str) -> bool:
        """Returns whether the model has a tensor of this name."""
        return name in self.tensors

    def _full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.", "split.")) else f"{self.architecture}.{key}"

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self.place}: metadata has no key {self._full(key)!r}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CheckpointError(f"{self.place}: {self._full(key)} is {value!r}, expected {expected}")
        return value


def part_paths(path: Path) -> list[Path]:
    """Returns the files of the model of which `path` is one: `-00001-of-00003.gguf` and so on, or `path` alone.

    Raises:  CheckpointError if a part is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [
        path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf") for number in range(1, max(1, int(found[3])) + 1)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.name}: the model's part {missing[0]} is missing in {path.parent}")
    return paths


def read_headers(paths: list[Path]) -> tuple[Metadata, dict[str, GgufTensor]]:
    """Reads the metadata, which the first part has, and the tensors of all parts.

    Raises:  CheckpointError if a file is no GGUF file, or is cut short, or a tensor is in two parts.
    """
    tensors: dict[str, GgufTensor] = {}
    factors: tuple[float, ...] = ()
    values: dict[str, Any] = {}
    for number, path in enumerate(paths):
        with RangeReader(path, CheckpointError) as content:
            content.check_content()
        reader = _open(path)
        if number == 0:
            values = {name: _content(field) for name, field in reader.fields.items()}
        for tensor in reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
            if tensor.name in tensors:
                raise CheckpointError(f"{path.name}: tensor {tensor.name!r} is also in another part")
            if not shape or min(shape) < 1:
                raise CheckpointError(f"{path.name}: tensor {tensor.name!r} has shape {list(shape)}")
            offset, num_bytes = int(tensor.data_offset), int(tensor.n_bytes)
            tensors[tensor.name] = GgufTensor(tensor.name, tensor.tensor_type.name, shape, number, offset, num_bytes)
            if tensor.name == FACTORS:
                factors = _factors(path, tensor)
    if not paths or not isinstance(values.get("general.architecture"), str):
        raise CheckpointError(f"{paths[0].name}: metadata has no key 'general.architecture'")
    count = values.get("split.count")
    if isinstance(count, int) and count not in (0, len(paths)):
        raise CheckpointError(f"{paths[0].name}: is one of {count} parts; keep their names as llama.cpp made them")
    return Metadata(paths[0].name, values, tensors, factors), tensors


def _factors(path: Path, tensor: Any) -> tuple[float, ...]:
    if tensor.tensor_type.name != "F32":
        raise CheckpointError(f"{path.name}: tensor {tensor.name!r} is {tensor.tensor_type.name}, expected F32")
    return tuple(float(str(value)) for value in np.asarray(tensor.data).reshape(-1))


def _content(field: Any) -> Any:
    try:
        return field.contents()
    except UnicodeDecodeError:  # some published vocabularies have tokens that are no text
        return None


def _open(path: Path) -> Any:
    package = gguf_package()

    class Reader(package.GGUFReader):  # type: ignore[misc, name-defined]  # the package has no types
        """The package's reader, which refuses to read behind the end of the file."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("the file is cut short")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
    except _FAULTS as fault:
        raise CheckpointError(f"{path.name}: the gguf package cannot read it ({fault})") from fault
    if reader.byte_order != "I":
        raise CheckpointError(
            f"{path.name}: is a GGUF file of a big-endian machine; convert it with gguf-convert-endian"
        )
    return reader
