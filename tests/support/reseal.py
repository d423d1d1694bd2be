"""Hand-made faults in packs, sealed again without the product's code, so that only the fault can be refused."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import Pack, PackError
from support.cases import assert_each, line_of

JsonObject = dict[str, Any]
Change = Callable[[JsonObject], object]

ELEMENT_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "U16": 2, "F32": 4, "U32": 4, "I32": 4, "F64": 8, "U64": 8}
_NUMPY = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F32": "<f4", "F64": "<f8", "I32": "<i4", "F16": "<f2"}
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")


def unchanged(values: JsonObject) -> None:
    """Changes nothing."""


def manifest_of(folder: Path) -> JsonObject:
    values: JsonObject = json.loads((folder / "manifest.json").read_text())
    return values


def reseal(folder: Path, before: Change = unchanged, after: Change = unchanged) -> None:
    """Writes the manifest again, changed `before` and `after` sizes, digests, totals and root are computed."""
    values = manifest_of(folder)
    before(values)
    _recount(folder, values)
    after(values)
    (folder / "manifest.json").write_bytes(sealed(values))


def sealed(values: JsonObject, leading: bytes = b"") -> bytes:
    """Returns the manifest's bytes behind `leading` white space, with its own digest as the last key."""
    body = json.dumps({key: value for key, value in values.items() if key != "sha256"}, indent=1, sort_keys=True)
    opened = leading + body.removesuffix("\n}").encode() + b',\n "sha256": "'
    digest = hashlib.sha256(opened + b"0" * 64 + b'"\n}\n').hexdigest()
    return opened + digest.encode() + b'"\n}\n'


def root_of(values: JsonObject) -> str:
    lines = [(file["name"], f"{file['sha256']} {file['bytes']} {file['name']}\n") for file in values["files"]]
    for file in values["expert_files"]:
        lines.append((file["name"], f"{file['header_sha256']} {file['bytes']} {file['name']}\n"))
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode()).hexdigest()


def _recount(folder: Path, values: JsonObject) -> None:
    for file in values["files"]:
        raw = (folder / file["name"]).read_bytes()
        file |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    for file in values["expert_files"]:
        raw = (folder / file["name"]).read_bytes()
        header = raw[: 8 + int.from_bytes(raw[:8], "little")]
        digest = hashlib.sha256(header).hexdigest()
        file |= {"bytes": len(raw), "header_bytes": len(header), "header_sha256": digest}
    totals, listed = values["totals"], values["files"]
    totals["copied"] = sum(file["bytes"] for file in listed if file["name"] in _COPIED)
    totals["dense"] = sum(file["bytes"] for file in listed if file["name"] == "dense.safetensors")
    totals["tables"] = sum(file["bytes"] for file in listed) - totals["copied"] - totals["dense"]
    totals["headers"] = sum(file["header_bytes"] for file in values["expert_files"])
    in_extents = totals["selectors"] + totals["records"] + totals["extra"]
    experts = sum(file["bytes"] for file in values["expert_files"])
    totals["padding"] = experts - totals["headers"] - in_extents
    totals["content"] = experts + sum(file["bytes"] for file in listed)
    values["root"] = root_of(values)


@dataclass(frozen=True)
class HeldTensor:
    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def safetensors_bytes(header: object, body: bytes = b"") -> bytes:
    """Returns a safetensors file with this header, JSON or bytes as they are, and these bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def read_tensors(path: Path) -> dict[str, HeldTensor]:
    """Returns all tensors of a file, with padding, in the order of offsets."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = sorted(json.loads(raw[8:start]).items(), key=lambda entry: entry[1]["data_offsets"])
    held = {}
    for name, entry in entries:
        first, end = entry["data_offsets"]
        held[name] = HeldTensor(entry["dtype"], tuple(entry["shape"]), raw[start + first : start + end])
    return held


def write_tensors(path: Path, tensors: dict[str, HeldTensor]) -> None:
    """Writes tensors in their order, without alignment."""
    header: JsonObject = {}
    end = 0
    for name, tensor in tensors.items():
        assert len(tensor.raw) == ELEMENT_BYTES[tensor.dtype] * math.prod(tensor.shape), name
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + len(tensor.raw)]}
        end += len(tensor.raw)
    path.write_bytes(safetensors_bytes(header, b"".join(tensor.raw for tensor in tensors.values())))


def array_tensor(dtype: str, values: object) -> HeldTensor:
    array = np.asarray(values, dtype=_NUMPY[dtype])
    return HeldTensor(dtype, array.shape, array.tobytes())


def edit_array(path: Path, name: str, change: Callable[[NDArray[Any]], object]) -> None:
    """Changes the values of one tensor of a file, and nothing else."""
    tensors = read_tensors(path)
    held = tensors[name]
    array = np.frombuffer(bytearray(held.raw), _NUMPY[held.dtype]).reshape(held.shape)
    change(array)
    tensors[name] = HeldTensor(held.dtype, held.shape, array.tobytes())
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:start] + b"".join(tensor.raw for tensor in tensors.values()))


def edit_byte(path: Path, offset: int) -> None:
    """Flips the lowest bit of one byte of a file; a negative offset counts from its end."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def refusal(folder: Path) -> str:
    """Returns the line with which opening the pack, or reading all of it, is refused."""
    return line_of(PackError, lambda: read_whole(folder))


def refuse_each(
    new_pack: Callable[[], Path], cases: Iterable[tuple[Any, ...]], damage: Callable[..., object], before: str = ""
) -> None:
    """Damages a pack for each case, whose last value is the message that refuses it, without what is `before` it."""

    def found(*values: Any) -> str:
        folder = new_pack()
        damage(folder, *values)
        return refusal(folder)

    assert_each(cases, found, before)


def read_whole(folder: Path) -> None:
    """Opens a pack and reads everything that a run would."""
    with Pack(folder) as pack:
        pack.read_order()
        for file in pack.manifest.files:
            pack.read_file(file.name)
        for layer_idx, experts in enumerate(pack.layout.experts):
            for expert in range(len(experts)):
                pack.read_extent(layer_idx, expert)
