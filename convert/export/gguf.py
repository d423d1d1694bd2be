"""Exports of packs as GGUF files, for llama.cpp and programs built on it.

Matrices get the GGML type that is asked for, quantized row by row by the `gguf` package; vectors, routers and all other
tensors that packs do not quantize are float32, as llama.cpp's converter has them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.convert.export import checkpoints, weights
from moe_pack.convert.export.folder import Shard, ShardFormat, write_folder
from moe_pack.convert.options import GgufType
from moe_pack.formats import Pack, gguf
from moe_pack.formats.pack.manifests import COPIED_FILES
from moe_pack.formats.pack.safetensors import StoredTensor
from moe_pack.formats.parts import DenseRole
from moe_pack.runtime.model import Operations

GGUF_BYTES = 45 << 30  # the hub's limit of a file is 50 GB
_FILE_TYPES: Mapping[GgufType, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32, "mxfp4": 38,
}  # fmt: skip
_QUANTIZATION_VERSION = 2
_BLOCK_BYTES = 16 << 20  # of a tensor in float32, computed at once


def export_gguf(
    pack: Pack, folder: Path, kind: GgufType | None, work: checkpoints.ExportWork
) -> checkpoints.ExportResult:
    """Writes a pack as a GGUF file, or as several.

    Args:    kind: the type of matrices; None: as `usual_type` says.   work: its `shard_bytes` is the most in a file.
    Raises:  RunError if GGUF cannot have the model or its tokenizer; ConversionError if the folder cannot be written.
    """
    source = weights.PackSource(pack, work.operations)
    model = gguf.gguf_model(source.model.spec)
    kind = kind or usual_type(pack)
    files = {name: pack.read_file(name).tobytes() for name in COPIED_FILES if pack.has(name)}
    metadata = {
        **model.metadata,
        "general.name": _name(source.model.config, pack),
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **gguf.vocabulary_fields(files, pack.spec.vocab_size),
    }
    units = list(_units(source, model.placements, kind))
    decisions = {
        "to": "gguf", "type": kind, "root": pack.manifest.root, "shard_bytes": str(work.shard_bytes),
    }  # fmt: skip
    form = _GgufFormat(metadata, kind)
    written = write_folder(folder, units, {}, decisions, work.shard_bytes, work.progress, work.on_step, form)
    notes = gguf.vocabulary_notes(files)
    if kept := len(source.model.claims.unused):
        notes.append(f"not in the file: {kept} tensors of prediction layers, or that nothing runs; the pack keeps them")
    return checkpoints.ExportResult(*written, len(model.placements), source.model.lost(), 0, notes=tuple(notes))


def usual_type(pack: Pack) -> GgufType:
    """Returns the type of matrices that loses next to nothing: `mxfp4` if the experts' codes are those, else `q8_0`."""
    layouts = (layout for layer in pack.layout.experts for layout in layer)
    codecs = {part.format.codec for layout in layouts for rows in layout.rows() for part in rows.parts}
    return "mxfp4" if "mxfp4" in codecs and codecs <= {"mxfp4", "e5m2", "bf16"} else "q8_0"


def _name(config: Mapping[str, Any], pack: Pack) -> str:
    name = config.get("_name_or_path")
    return Path(name).name if isinstance(name, str) and Path(name).name else pack.folder.resolve().name


class _GgufFormat(ShardFormat):
    """GGUF files. The first part has the metadata, and comes last: without it, the others are nothing."""

    def __init__(self, metadata: Mapping[str, Any], kind: GgufType) -> None:
        self._metadata, self._stem = dict(metadata), f"model-{kind.upper()}"

    def num_bytes(self, tensors: tuple[StoredTensor, ...]) -> int:
        return sum(gguf.tensor_bytes(kind, shape) for _, kind, shape in tensors)

    def shards(self, groups: Sequence[tuple[weights.ExportUnit, ...]]) -> list[Shard]:
        parts = [[tensor for unit in group for tensor in unit.tensors] for group in groups]
        layouts = gguf.lay_out_parts(self._metadata, parts)
        count = len(groups)
        names = [f"{self._stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
        named = zip(names if count > 1 else [f"{self._stem}.gguf"], groups, layouts, strict=True)
        return [Shard(*each) for each in named][::-1]

    def small_files(self, shards: Sequence[Shard]) -> dict[str, bytes]:
        return {}


def _type_of(is_matrix: bool, is_expert: bool, num_cols: int, kind: GgufType) -> str:
    """Returns the GGML type of a tensor; F16 for rows that are no whole blocks, as llama.cpp's converter does."""
    if not is_matrix:
        return "F32"
    wanted = "Q8_0" if kind == "mxfp4" and not is_expert else kind.upper()
    return wanted if num_cols % gguf.block_values(wanted) == 0 else "F16"


def _units(
    source: weights.PackSource, places: Sequence[gguf.AnyPlacement], kind: GgufType
) -> Iterator[weights.ExportUnit]:
    """Yields the units of all tensors: one tensor, or those of all experts of a layer."""
    by_layer: dict[int, list[gguf.ExpertPlacement]] = {}
    for place in places:
        if isinstance(place, gguf.ExpertPlacement):
            by_layer.setdefault(place.layer, []).append(place)
        elif isinstance(place, gguf.ConstantPlacement):
            stored = place.name, "F32", place.shape
            yield weights.ExportUnit(place.name, (stored,), partial(put_constant, place))
        else:
            stored = place.name, _type_of(place.is_matrix, False, place.shape[-1], kind), place.shape
            yield weights.ExportUnit(
                place.name, (stored,), partial(put_dense, source.pack, source.operations, place, stored)
            )
    for layer, each in by_layer.items():
        stored_ones = tuple(
            (place.name, _type_of(not place.is_bias, True, place.shape[-1], kind), place.shape) for place in each
        )
        put_all = partial(_put_experts, source, layer, each, stored_ones)
        yield weights.ExportUnit(f"layer {layer}, all experts", stored_ones, put_all)


def put_constant(place: gguf.ConstantPlacement, put: weights.Put) -> None:
    """Puts a tensor whose values follow from the model's spec."""
    put(place.name, 0, gguf.encode_rows(place.values[None], "F32").reshape(-1))


def put_dense(
    pack: Pack, operations: Operations, place: gguf.Placement, stored: StoredTensor, put: weights.Put
) -> None:
    """Puts a dense tensor, some rows after the other.

    Args:    stored: its name, GGML type and shape.
    """
    name, kind, shape = stored
    num_cols, num_rows = shape[-1], int(np.prod(shape[:-1], dtype=np.int64))
    rows = _reordered(_rows_of(pack, operations, place), place)
    step, row_bytes = max(_BLOCK_BYTES // (4 * num_cols), 1), gguf.tensor_bytes(kind, shape[-1:])
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        values = _changed(rows(start, stop).float().numpy(), place)
        put(name, start * row_bytes, gguf.encode_rows(values, kind).reshape(-1))


def _put_experts(
    source: weights.PackSource,
    layer: int,
    places: Sequence[gguf.ExpertPlacement],
    stored: tuple[StoredTensor, ...],
    put: weights.Put,
) -> None:
    for expert in range(source.model.spec.router.num_experts):
        plain = source.expert(layer, expert, torch.float32)
        for place, (name, kind, _) in zip(places, stored, strict=True):
            if place.is_bias:
                values = torch.cat([plain.biases[matrix] for matrix in place.matrices])[None]
            else:
                values = torch.cat([plain.matrices[matrix] for matrix in place.matrices])
                values = values.T if place.matrices == ("down",) else values
            raw = gguf.encode_rows(values.contiguous().numpy(), kind).reshape(-1)
            put(name, expert * len(raw), raw)


def _rows_of(pack: Pack, operations: Operations, place: gguf.Placement) -> weights.Rows:
    """Returns rows of the roles as matrices with the tensor's columns."""
    dense = {each.role.name: each for each in pack.layout.dense}
    parts = [(role, weights.dense_rows(pack, dense[role.name], operations)) for role in place.roles]
    if len(parts) == 1 and len(parts[0][0].shape) == 2:
        return parts[0][1]
    whole = torch.cat([_whole(role, rows).reshape(-1, place.shape[-1]) for role, rows in parts])
    return lambda start, stop: whole[start:stop]


def _whole(role: DenseRole, rows: weights.Rows) -> Tensor:
    return rows(0, role.shape[0]).float()


def _reordered(rows: weights.Rows, place: gguf.Placement) -> weights.Rows:
    """Returns the rows of the tensor, given those of its roles."""
    (role, *others) = place.roles
    if place.keys is not None or place.values is not None:
        return _of_heads(_whole(role, rows), place)
    if place.rows is None and place.cols is None:
        return rows
    assert not others, f"{place.name}: several roles in another order"
    whole = rows(0, int(np.prod(role.shape, dtype=np.int64)) // place.shape[-1])
    if place.rows is not None:
        whole = whole[torch.from_numpy(place.rows)]
    if place.cols is not None:
        whole = whole[:, torch.from_numpy(place.cols)]
    return lambda start, stop: whole[start:stop]


def _of_heads(whole: Tensor, place: gguf.Placement) -> weights.Rows:
    """Returns rows of the keys, transposed, or of the values of latent attention."""
    heads = whole.view(place.shape[0], -1, whole.shape[1])
    part = heads[:, : place.keys].transpose(1, 2) if place.keys is not None else heads[:, -(place.values or 0) :]
    flat = part.reshape(-1, place.shape[-1])
    return lambda start, stop: flat[start:stop]


def _changed(values: NDArray[np.float32], place: gguf.Placement) -> NDArray[np.float32]:
    if place.change == "plus_one":
        return values + np.float32(1)
    if place.change == "exp":
        return np.exp(values)
    return -np.exp(values) if place.change == "decay" else values
