"""Exports of packs as checkpoints of their family: plain, or with experts in compressed-tensors; and their comparison.

An export has the family's tensors and config, so that transformers and vLLM load it. All neurons run in it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_pack.convert import verify
from moe_pack.convert.export import compressed
from moe_pack.convert.export.compressed import usual_formats as code_formats
from moe_pack.convert.export.folder import SHARD_BYTES, write_folder
from moe_pack.convert.export.source import CONFIG_FILE, STORED_AS, exported_tensors, owners, plain_name
from moe_pack.convert.export.weights import ExportUnit, PackSource, plain_units
from moe_pack.convert.options import Dtype
from moe_pack.formats import Pack
from moe_pack.formats.base import commands
from moe_pack.formats.families import Checkpoint, claiming
from moe_pack.formats.gguf import GgufFiles, find_gguf
from moe_pack.formats.pack import writer
from moe_pack.formats.pack.manifests import COPIED_FILES
from moe_pack.runtime import model


@dataclass(frozen=True, slots=True, eq=False)
class ExportResult:
    """The result of an export."""

    num_bytes: int
    resumed_bytes: int  # that an earlier run has written
    num_tensors: int
    lost: dict[str, int]  # how many tensors of the source it lacks, by reason, because the pack does not keep them
    num_zeros: int  # the values of its tensors that are zero for the same reason
    formats: dict[int, compressed.CodeFormat] | None = None  # of coded experts, by decoder layer
    codes: compressed.Codes | None = None  # without those of experts that an earlier run has written
    # Whether the source has all experts of a layer in one tensor, and the export each in its own.
    is_renamed: bool = False
    notes: tuple[str, ...] = ()  # sentences about what the format cannot say


@dataclass(frozen=True, slots=True)
class ExportWork:
    """How an export is written."""

    operations: model.Operations = model.TORCH
    shard_bytes: int = SHARD_BYTES  # the most in a file
    progress: commands.Progress = commands.NO_PROGRESS
    on_step: Callable[[writer.Step], None] = writer.pass_step  # called before each change of the disk


def export_plain(pack: Pack, folder: Path, dtype: Dtype | None, work: ExportWork = ExportWork()) -> ExportResult:
    """Writes a pack as a checkpoint with plain weights.

    Args:    dtype: of matrices; None: 16 bits, as `exported_tensors` says.
    Raises:  RunError if the pack cannot be exported; ConversionError if the folder cannot be written.
    """
    source = PackSource(pack, work.operations)
    tensors = exported_tensors(pack, source.model, dtype)
    claims = claiming.claim_tensors(source.model.family, source.model.spec, tensors)
    units = list(plain_units(source, claims, tensors))
    written = _write(source, folder, units, source.model.plain_config(), dtype, {"to": "safetensors"}, work)
    return ExportResult(*written, len(tensors), source.model.lost(), num_zeros(tensors, claims))


def export_compressed(
    pack: Pack,
    folder: Path,
    dtype: Dtype | None,
    width: compressed.Width | None = None,
    group: int | None = None,
    work: ExportWork = ExportWork(),
) -> ExportResult:
    """Writes a pack as a checkpoint whose experts are in compressed-tensors; all other weights are plain.

    Args:    width, group: of the codes; None: as `code_formats` says.
    Raises:  as `export_plain`; RunError also if the family's experts cannot be coded so.
    """
    source, codes = PackSource(pack, work.operations), compressed.Codes()
    formats = code_formats(pack, source.model, width, group)
    tensors = exported_tensors(pack, source.model, dtype, by_expert=True)
    claims = claiming.claim_tensors(source.model.family, source.model.spec, tensors)
    units = list(compressed.coded_units(source, claims, tensors, formats, codes))
    config = {**source.model.plain_config(), "quantization_config": compressed.quantization_config(formats)}
    kinds = {str(layer): json.dumps(asdict(each)) for layer, each in formats.items()}
    written = _write(source, folder, units, config, dtype, {"to": "compressed-tensors", **kinds}, work)
    num_tensors = sum(len(unit.tensors) for unit in units)
    lost, zeros = source.model.lost(), num_zeros(tensors, claims)
    is_renamed = not all(plain_name(place) in tensors for place in source.model.claims.experts.values())
    return ExportResult(*written, num_tensors, lost, zeros, formats, codes, is_renamed)


def _write(
    source: PackSource,
    folder: Path,
    units: Sequence[ExportUnit],
    config: dict[str, Any],
    dtype: Dtype | None,
    decisions: dict[str, str],
    work: ExportWork,
) -> tuple[int, int]:
    pack = source.pack
    files = {name: pack.read_file(name).tobytes() for name in COPIED_FILES if pack.has(name)}
    if dtype is not None:
        config = _with_dtype(config, {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype])
    if config != source.model.config:
        files[CONFIG_FILE] = json.dumps(config, indent=2).encode() + b"\n"
    decisions = {
        **decisions,
        "root": pack.manifest.root,
        "dtype": "source" if dtype is None else STORED_AS[dtype],
        "shard_bytes": str(work.shard_bytes),
    }
    return write_folder(folder, units, files, decisions, work.shard_bytes, work.progress, work.on_step)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in config.items():
        is_dtype = key in ("dtype", "torch_dtype")
        changed[key] = dtype if is_dtype else _with_dtype(value, dtype) if isinstance(value, dict) else value
    return changed


def num_zeros(tensors: claiming.Tensors, claims: claiming.Claims) -> int:
    """Returns how many values of tensors that the model has a part of belong to nothing that it runs."""
    sizes = {source.tensor: math.prod(tensors[source.tensor][1]) for _, source in owners(claims)}
    return sum(sizes.values()) - sum(source.num_rows * source.num_cols for _, source in owners(claims))


class _AllNeurons(model.PackWeights):
    def threshold(self, layer_idx: int, expert: int) -> float:
        return 0.0


def compare_export(
    pack: Pack, folder: Path, ids: list[int], operations: model.Operations = model.TORCH
) -> verify.LogitsError:
    """Returns the difference of predictions of each next token of `ids`: of an export, read back, and the pack's."""
    weights = _AllNeurons(pack, torch.device("cpu"), operations)
    try:
        expected = verify.text_logits(weights, ids)
    finally:
        weights.close()
    gguf = find_gguf(folder)
    checkpoint = Checkpoint(folder if gguf is None else GgufFiles(gguf))
    try:
        return verify.logits_error(expected, verify.text_logits(model.CheckpointWeights(checkpoint), ids))
    finally:
        checkpoint.close()
