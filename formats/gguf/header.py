"""The header of a GGUF file: its metadata, and name, type, shape and place of each tensor.

All sizes and counts are checked against the file first. The reader of llama.cpp's package trusts them, so it is only
used for the types. Source: ggml/docs/gguf.md; ggml/src/gguf.cpp refuses the same files.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_pack import formats
from moe_pack.formats.base import errors

MAX_HEADER_BYTES = 256 << 20
_MAX_ENTRIES = 1 << 20  # keys, and tensors, of a file
_MAX_DIMENSIONS = 4
_MAX_FACTOR_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20  # of a header, which are read at once
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
FACTORS = "rope_freqs.weight"  # divisors of frequencies, one for each pair of rotary positions; `config.json` has them

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The types of values: numbers by their NumPy type, a truth value (one byte), a text, a list.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_TRUTH, _TEXT, _LIST = 7, 8, 9


def gguf_package() -> Any:
    """Returns the `gguf` package. Raises CheckpointError if it is not installed."""
    try:
        import gguf
        import gguf.quants
    except ModuleNotFoundError as fault:
        raise formats.CheckpointError("GGUF files need the package gguf; pip install 'moe-pack[convert]'") from fault
    return gguf


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    name: str
    type: str  # the name of its GGML type
    shape: tuple[int, ...]  # with the contiguous dimension last
    file: int  # the number of its file among those of the model
    offset: int  # of its first byte there
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
    """The metadata of a model by key, the shapes of its tensors and its `FACTORS`.

    A key without a prefix is one of the architecture: `block_count` is `llama.block_count`.
    """

    def __init__(
        self, place: str, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor], factors: Sequence[float] = ()
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
        return self._values.get(self._full(key))

    def has(self, key: str) -> bool:
        """Returns whether there is a key."""
        return self.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a text. This and the next methods raise CheckpointError for another type, or no value at all."""
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
        """Returns a value for each of `count` layers, of a list that may be longer, or one for all."""
        value = self.get(key)
        if value is None:
            raise formats.CheckpointError(f"{self.place}: metadata has no key {self._full(key)!r}")
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise formats.CheckpointError(f"{self.place}: {self._full(key)} has {len(values)} values, expected {count}")
        return values[:count]

    def has_tensor(self, name: str) -> bool:
        """Returns whether the model has a tensor."""
        return name in self.tensors

    def _full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.", "split.")) else f"{self.architecture}.{key}"

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise formats.CheckpointError(f"{self.place}: metadata has no key {self._full(key)!r}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise formats.CheckpointError(
                f"{self.place}: {self._full(key)} is {errors.shortened(value)}, expected {expected}"
            )
        return value


def part_paths(path: Path) -> list[Path]:
    """Returns the files of the model with the part `path`: `-00001-of-00003.gguf` and so on, or `path` alone.

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
        raise formats.CheckpointError(f"{path.name}: the model's part {missing[0]} is missing in {path.parent}")
    return paths


def read_headers(paths: list[Path]) -> tuple[Metadata, dict[str, GgufTensor]]:
    """Reads the metadata of the first part and the tensors of all parts.

    Raises:  CheckpointError as `read_header`, or if a tensor is in two parts, or a part belongs to another model.
    """
    tensors: dict[str, GgufTensor] = {}
    factors: tuple[float, ...] = ()
    parts: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        values, own = read_header(path, formats.CheckpointError, number)
        parts.append(values)
        for tensor in own:
            if tensor.name in tensors:
                raise formats.CheckpointError(f"{path.name}: tensor {tensor.name!r} is also in another part")
            tensors[tensor.name] = tensor
            if tensor.name == FACTORS:
                factors = _factors(path, tensor)
    if not isinstance(parts[0].get("general.architecture"), str):
        raise formats.CheckpointError(f"{paths[0].name}: metadata has no key 'general.architecture'")
    _check_parts(paths, parts, len(tensors))
    return Metadata(paths[0].name, parts[0], tensors, factors), tensors


def _check_parts(paths: list[Path], parts: list[dict[str, Any]], num_tensors: int) -> None:
    count = parts[0].get("split.count")
    if isinstance(count, int) and count not in (0, len(paths)):
        raise formats.CheckpointError(
            f"{paths[0].name}: is one of {count} parts; keep their names as llama.cpp made them"
        )
    if len(paths) == 1:
        return
    for number, (path, values) in enumerate(zip(paths, parts, strict=True)):
        if values.get("split.no") != number:
            raise formats.CheckpointError(
                f"{path.name}: split.no is {errors.shortened(values.get('split.no'))}, expected {number} by its name; "
                "keep the names as llama.cpp made them"
            )
    total = parts[0].get("split.tensors.count")
    if isinstance(total, int) and total != num_tensors:
        raise formats.CheckpointError(
            f"{paths[0].name}: the parts have {num_tensors} tensors, expected {total}; a part is of another model, get "
            "it again"
        )


def _factors(path: Path, tensor: GgufTensor) -> tuple[float, ...]:
    if tensor.type != "F32":
        raise formats.CheckpointError(f"{path.name}: tensor {tensor.name!r} is {tensor.type}, expected F32")
    if tensor.num_bytes > _MAX_FACTOR_BYTES:
        raise formats.CheckpointError(
            f"{path.name}: tensor {tensor.name!r} has {tensor.num_bytes // 4:,} factors, too many"
        )
    with formats.RangeReader(path, formats.CheckpointError) as reader:
        values = reader.read(tensor.offset, tensor.num_bytes).view("<f4")
    return tuple(float(str(value)) for value in values)


def read_header(path: Path, error: type[errors.MoePackError], file: int = 0) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Reads the metadata by key and the tensors of one GGUF file. A text in another encoding than UTF-8 is None.

    Args:    error: the class of errors.   file: the number of the file among those of its model.
    Raises:  `error` if it is no GGUF file or cut short, has a key or a tensor twice, or a tensor that does not lie in
             the file or overlaps another one.
    """
    with formats.RangeReader(path, error) as reader:
        reader.check_content()
        header = _Header(path.name, reader, error)
        header.begin()
        num_tensors, num_values = header.count("tensors"), header.count("keys")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = header.name("key")
            if key in values:
                raise error(f"{path.name}: key {errors.shortened(key)} appears twice")
            values[key] = header.value(key, header.number("<u4"))
        listed = [header.tensor(file) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise header.fault(f"general.alignment is {errors.shortened(alignment)}, expected a power of two")
        start = -(-header.place // alignment) * alignment
        tensors = [replace(tensor, offset=start + tensor.offset) for tensor in listed]
        _check_places(tensors, start, alignment, reader.num_bytes, header.fault)
    return values, tensors


class _Header:
    """The bytes of a header, taken in order."""

    def __init__(self, name: str, reader: formats.RangeReader, error: type[errors.MoePackError]) -> None:
        self._name, self._reader, self._error = name, reader, error
        self._num_bytes = reader.num_bytes
        self._raw, self._start = b"", 0
        self.place = 0  # of the next byte

    def fault(self, what: str) -> errors.MoePackError:
        return self._error(f"{self._name}: {what}")

    def take(self, num_bytes: int) -> bytes:
        end = self.place + num_bytes
        if end > self._num_bytes:
            raise self.fault(
                f"the header needs {end:,} bytes, the file has {self._num_bytes:,}; the file is cut short or damaged, "
                "get it again"
            )
        if end > MAX_HEADER_BYTES:
            raise self.fault(f"the header has more than {MAX_HEADER_BYTES:,} bytes; the file is damaged, get it again")
        if end > self._start + len(self._raw):
            size = min(max(num_bytes, _PIECE_BYTES), self._num_bytes - self.place)
            self._raw, self._start = self._reader.read(self.place, size).tobytes(), self.place
        piece = self._raw[self.place - self._start : end - self._start]
        self.place = end
        return piece

    def begin(self) -> None:
        if self._num_bytes < 8 or self.take(4) != MAGIC:
            raise self.fault("is no GGUF file, or is cut short")
        version = self.number("<u4")
        if version and not version & 0xFFFF:
            raise self.fault("is a GGUF file of a big-endian machine; convert it with gguf-convert-endian")
        if version not in _VERSIONS:
            raise self.fault(f"is of version {version} of GGUF, expected 2 or 3; make it again with a newer llama.cpp")

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def count(self, what: str) -> int:
        count = int(self.number("<u8"))
        if count > _MAX_ENTRIES:
            raise self.fault(f"the header lists {count:,} {what}, at most {_MAX_ENTRIES:,}; the file is damaged")
        return count

    def text(self) -> str | None:
        raw = self.take(self.number("<u8"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:  # some published vocabularies have such bytes
            return None

    def name(self, what: str) -> str:
        place, name = self.place, self.text()
        if name is None:
            raise self.fault(f"the name of the {what} at byte {place} is not text; the file is damaged")
        return name

    def value(self, key: str, kind: int) -> Any:
        if kind == _LIST:
            inner, count = self.number("<u4"), self.number("<u8")
            return self._list(key, inner, count)
        if kind == _TEXT:
            return self.text()
        return self._list(key, kind, 1)[0]

    def _list(self, key: str, kind: int, count: int) -> Any:
        if kind == _TEXT:
            texts = [self.text() for _ in range(count)]  # each takes 8 bytes or more: `take` bounds the loop
            return None if None in texts else texts
        if kind == _TRUTH:
            return [byte != 0 for byte in self.take(count)]
        if kind not in _NUMBERS:
            what = "a list of lists" if kind == _LIST else f"of the unknown type {kind}"
            raise self.fault(f"{errors.shortened(key)} is {what}; the file is damaged, or of a newer version of GGUF")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def tensor(self, file: int) -> GgufTensor:  # its offset counts from the first tensor's byte
        name, num_dimensions = self.name("tensor"), self.number("<u4")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.fault(
                f"tensor {errors.shortened(name)} has {num_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self.number("<u8") for _ in range(num_dimensions))[::-1]
        kind, offset = self.number("<u4"), self.number("<u8")
        if min(shape) < 1:
            raise self.fault(f"tensor {errors.shortened(name)} has shape {list(shape)}")
        package = gguf_package()
        try:
            known = package.GGMLQuantizationType(kind)
        except ValueError as fault:
            raise self.fault(
                f"tensor {errors.shortened(name)} is of type {kind}, which the gguf package does not know; a newer one "
                "may: pip install -U gguf"
            ) from fault
        block, block_bytes = package.GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise self.fault(
                f"tensor {errors.shortened(name)} has rows of {shape[-1]:,} values, expected a multiple of {block} for "
                f"{known.name}"
            )
        return GgufTensor(name, known.name, shape, file, offset, math.prod(shape) // block * block_bytes)


def _check_places(
    tensors: Sequence[GgufTensor],
    start: int,
    alignment: int,
    file_bytes: int,
    fault: Callable[[str], errors.MoePackError],
) -> None:
    """Checks that the tensors of a file have names of their own, and lie in it without overlaps."""
    names, end, before = set[str](), start, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise fault(f"tensor {errors.shortened(tensor.name)} appears twice")
        names.add(tensor.name)
        stop = tensor.offset + tensor.num_bytes
        where = f"tensor {errors.shortened(tensor.name)} lies at bytes {tensor.offset:,} to {stop:,}"
        if stop > file_bytes:
            raise fault(f"{where}, the file has {file_bytes:,}; the file is cut short or damaged, get it again")
        if (tensor.offset - start) % alignment:
            raise fault(f"{where}, expected a multiple of {alignment} after byte {start:,}; the file is damaged")
        if tensor.offset < end:
            raise fault(
                f"{where}, in tensor {errors.shortened(before)}, which ends at byte {end:,}; the file is damaged"
            )
        end, before = stop, tensor.name
