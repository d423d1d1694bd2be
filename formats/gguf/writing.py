"""A model as a GGUF file before it is written: its architecture, metadata, tensors, and the header's bytes."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.gguf import placing
from moe_pack.formats.gguf.architecture import Architecture, Values
from moe_pack.formats.gguf.files import ARCHITECTURES
from moe_pack.formats.gguf.header import GgufTensor, Metadata, gguf_package
from moe_pack.formats.gguf.metadata import model_metadata, not_loaded
from moe_pack.formats.gguf.placing import placements
from moe_pack.formats.pack import safetensors

# Errors of an architecture that is not the model's.
_UNFIT = (placing.NoPlaceError, formats.CheckpointError, AssertionError, ZeroDivisionError, ValueError, IndexError)
ALIGNMENT = 32  # of a tensor's first byte, the format's usual one


@dataclass(frozen=True, slots=True, eq=False)
class GgufModel:
    """A model in a GGUF file."""

    architecture: str
    metadata: Values  # by full key
    placements: tuple[placing.AnyPlacement, ...]


def gguf_model(spec: formats.ModelSpec) -> GgufModel:
    """Returns a model as a GGUF file has it.

    Each architecture is tried: it is right if metadata that is made from the spec is read back as the same spec. So no
    file is written that llama.cpp computes otherwise.
    Args:    spec: of the source, without repeated neurons.
    Raises:  RunError if llama.cpp has no architecture that computes the same, with what differs.
    """
    others, faults = list[GgufModel](), list[str]()
    for name, architecture in ARCHITECTURES.items():
        try:
            metadata = model_metadata(spec, name)
            places = tuple(placements(spec, architecture, Metadata(name, metadata, {})))
            model = GgufModel(name, metadata, places)
            found = _read_back(model, architecture)
        except _UNFIT:
            continue
        differences = _differences(replace(found, family=spec.family), spec)
        limit = not_loaded(spec, name, architecture.own_head)
        if differences and found.family == spec.family:
            faults.append(f"llama.cpp's architecture {name!r} has another {', '.join(differences)}")
        elif not differences and limit is not None:
            faults.append(f"llama.cpp's architecture {name!r} cannot have {limit}")
        elif not differences and found.family == spec.family:
            return model
        elif not differences:
            others.append(model)
    if others and not faults:
        return others[0]
    if not faults:
        faults = [f"no architecture of llama.cpp that is known here is this model ({', '.join(sorted(ARCHITECTURES))})"]
    raise formats.RunError(
        f"GGUF cannot have this model of family {spec.family!r}: {'; '.join(faults)}; use --to safetensors"
    )


def _read_back(model: GgufModel, architecture: Architecture) -> formats.ModelSpec:
    """Returns the model that a reader finds in the metadata and the tensors' shapes."""
    tensors = {place.name: GgufTensor(place.name, "F32", place.shape, 0, 0, 0) for place in model.placements}
    constants = [place.values for place in model.placements if isinstance(place, placing.ConstantPlacement)]
    factors = constants[0].tolist() if constants else ()
    values = architecture.config(Metadata(model.architecture, model.metadata, tensors, factors))
    return read_spec(Config(values, model.architecture))[1]


def _differences(found: Any, expected: Any, name: str = "") -> "Sequence[str]":
    """Returns the names of fields that differ, where numbers differ as float32."""
    if is_dataclass(found) and type(found) is type(expected):
        names = [(each.name, f"{name}.{each.name}" if name else each.name) for each in fields(found)]
        pairs = [(getattr(found, key), getattr(expected, key), full) for key, full in names]
        return [differing for pair in pairs for differing in _differences(*pair)]
    if isinstance(found, float) and isinstance(expected, float):
        return [] if isclose(found, expected, rel_tol=1e-6) else [name]
    return [] if found == expected else [name]


def tensor_bytes(kind: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor of a GGML type; its last dimension is a multiple of the type's block."""
    package = gguf_package()
    block, num_bytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    assert shape[-1] % block == 0, f"{kind}: rows of {shape[-1]} values"
    return int(prod(shape)) // int(block) * int(num_bytes)


def block_values(kind: str) -> int:
    """Returns the number of values in a block of a GGML type."""
    package = gguf_package()
    return int(package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]][0])


def encode_rows(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Returns rows [rows, values] in a GGML type, u8 [rows, bytes]."""
    package = gguf_package()
    if kind == "F32":
        return np.ascontiguousarray(values, "<f4").view(np.uint8)
    if kind == "F16":
        return values.astype("<f2").view(np.uint8)
    raw: NDArray[np.uint8] = package.quants.quantize(values, package.GGMLQuantizationType[kind])
    return raw.view(np.uint8).reshape(len(values), -1)


def lay_out_parts(
    metadata: Values, parts: Sequence[Sequence[safetensors.StoredTensor]]
) -> list[safetensors.TensorFileLayout]:
    """Returns the layouts of a model's files. The first has the metadata.

    Args:    parts: name, GGML type and shape of each tensor of a file.
    """
    layouts = []
    for number, tensors in enumerate(parts):
        values: dict[str, Any] = dict(metadata) if number == 0 else {}
        if len(parts) > 1:
            values |= {"split.no": np.uint16(number), "split.count": np.uint16(len(parts))}
            values |= {"split.tensors.count": np.int32(sum(map(len, parts)))}
        header = _header_bytes(values, tensors)
        end, entries = len(header), []
        for name, kind, shape in tensors:
            entries.append(safetensors.TensorEntry(name, kind, shape, end, tensor_bytes(kind, shape)))
            end += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        layouts.append(safetensors.TensorFileLayout(header, tuple(entries), end))
    return layouts


def _header_bytes(metadata: Mapping[str, Any], tensors: Sequence[safetensors.StoredTensor]) -> bytes:
    """Returns the header of the `gguf` package, up to the first tensor."""
    package = gguf_package()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "header.gguf")
        writer = package.GGUFWriter(path, "")
        writer.kv_data[0].clear()
        for key, value in metadata.items():
            writer.add_key_value(key, value, *_value_types(value))
        for name, kind, shape in tensors:
            raw_type = package.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), tensor_bytes(kind, shape), raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def _value_types(value: Any) -> tuple[Any, ...]:
    """Returns the type of a value of metadata, and of a list also that of its items."""
    kinds = gguf_package().GGUFValueType
    if isinstance(value, list):
        (inner,) = {_value_types(item)[0] for item in value}
        return kinds.ARRAY, kinds.INT32 if inner is kinds.UINT32 else inner
    if isinstance(value, bool):  # which is an int, too
        return (kinds.BOOL,)
    of = {np.uint16: kinds.UINT16, np.int32: kinds.INT32, int: kinds.UINT32, float: kinds.FLOAT32}
    return (next((kind for each, kind in of.items() if isinstance(value, each)), kinds.STRING),)
