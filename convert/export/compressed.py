"""Experts in the format of compressed-tensors, as vLLM's fused layers of experts and transformers read it.

A matrix `[out, in]` is three tensors: `weight_packed` has its codes in words of 32 bits, the first column in the lowest
bits; `weight_scale` has a scale for each group of columns; `weight_shape` its rows and columns. Codes are symmetric:
`w = (code - middle) * scale`, with 4 or 8 bits. All matrices of a layer's experts have the same width and group.

A pack's own codes are kept where they have this meaning: gate and up of affine formats with whole zeros. Other matrices
are quantized again: down always, because its groups run along the hidden size in a pack and along the neurons here.

Source: compressed-tensors 0.20, compressors/pack_quantized; vLLM 0.33, compressed_tensors_moe_wna16.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moe_pack.convert.export import weights
from moe_pack.convert.export.source import SourceModel
from moe_pack.convert.plan.search import FUSED_GROUPS
from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import claiming, encodings
from moe_pack.formats.pack.safetensors import StoredTensor
from moe_pack.formats.parts import specs
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES

Width = Literal[4, 8]
_BLOCK_WEIGHTS = 1 << 20  # quantized at once
# Shares of a group's largest magnitude that the search of a scale tries: with 4 bits, the least squared error is mostly
# with a range that cuts the largest weights. Twice as many shares take twice the time and gain 0.1% of the weights.
_SHARES = {4: (1.0, 0.93, 0.86, 0.79, 0.72), 8: (1.0, 0.985, 0.97)}


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How the matrices of a layer's experts are coded: `width` bits, and a scale for `group` columns."""

    width: Width
    group: int


def usual_formats(pack: Pack, model: SourceModel, width: Width | None, group: int | None) -> dict[int, CodeFormat]:
    """Returns the format of the experts of each decoder layer with experts.

    Meaning: without a width, 4 bits for a layer whose stored codes have at most 4, else 8. Without a group, the layer's
             own if vLLM has it and it fits all matrices, else the largest that fits.
    Raises:  RunError if no group fits, or the given one does not.
    """
    sizes = (model.spec.hidden_size, model.spec.expert.source_size)
    fitting = [size for size in FUSED_GROUPS if all(cols % size == 0 for cols in sizes)]
    if not fitting or group not in (None, *fitting):
        wanted = (
            f"--group-size {group}" if group is not None else f"a group size of {', '.join(map(str, FUSED_GROUPS))}"
        )
        advice = f"use {' or '.join(map(str, fitting))}" if fitting else "use --to safetensors"
        raise RunError(
            f"{wanted} does not divide the rows of this model's experts, which have {sizes[0]} and {sizes[1]} "
            f"values; {advice}"
        )
    formats = {}
    for layer, experts in zip(model.spec.moe_layers, pack.index.experts, strict=True):
        parts = [part for expert in experts for m in specs.MATRICES if (part := expert.of(m))]
        own = {part.group for part in parts}
        usual = own.pop() if len(own) == 1 and own <= set(fitting) else fitting[0]
        formats[layer] = CodeFormat(width or (4 if max(part.bits for part in parts) <= 4 else 8), group or usual)
    return formats


def quantization_config(formats: Mapping[int, CodeFormat]) -> dict[str, Any]:
    """Returns the `quantization_config` of a config.json; a group of modules for each format."""
    groups: dict[CodeFormat, list[int]] = {}
    for layer, each in formats.items():
        groups.setdefault(each, []).append(layer)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": [_target(layers if len(groups) > 1 else None)],
                "weights": {
                    "num_bits": each.width,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": each.group,
                    "dynamic": False,
                    "actorder": None,
                    "block_structure": None,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
            for number, (each, layers) in enumerate(groups.items())
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _target(layers: list[int] | None) -> str:
    of_layer = "" if layers is None else rf"\.layers\.({'|'.join(map(str, layers))})\..*"
    return rf"re:.*{of_layer}\.experts\.\d+\..*"


def coded_tensors(name: str, dtype: str, shape: tuple[int, ...], code: CodeFormat) -> tuple[StoredTensor, ...]:
    """Returns the tensors that a plain matrix `[out, in]` becomes; scales have its dtype."""
    rows, cols = shape
    return (
        (f"{name}_packed", "I32", (rows, cols * code.width // encodings.WORD_BITS)),
        (f"{name}_scale", dtype, (rows, cols // code.group)),
        (f"{name}_shape", "I64", (2,)),
    )


def symmetric_scales(groups: Tensor, width: Width, dtype: torch.dtype) -> Tensor:
    """Returns a scale for each group of weights [groups, group], [groups, 1] in `dtype`, as float32.

    Meaning: of some shares of the largest magnitude, the one with the least squared error. Zeros get a scale of 1.
    """
    middle = 2 ** (width - 1)
    largest = groups.abs().amax(dim=1, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    chosen = torch.ones_like(largest)
    for share in _SHARES[width]:
        scale = (largest * (share / (middle - 1))).to(dtype).to(torch.float32)
        scale = torch.where(scale > 0, scale, 1.0)
        error = coded(groups, scale, width).mul_(scale).sub_(groups).square_().sum(dim=1, keepdim=True)
        chosen = torch.where(error < best, scale, chosen)
        best = torch.minimum(error, best)
    return chosen


def coded(groups: Tensor, scale: Tensor, width: Width) -> Tensor:
    """Returns the signed codes nearest to weights [groups, group] under their scales [groups, 1], as float32."""
    middle = 2 ** (width - 1)
    return groups.div(scale).round_().clamp_(-middle, middle - 1)


def packed_words(codes: Tensor, width: Width) -> Tensor:
    """Returns signed codes [rows, columns], any dtype, in words: int32 [rows, columns * width / 32]."""
    values = codes.to(torch.int16).add_(2 ** (width - 1)).to(torch.uint8)
    if width == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)


def carried_scales(plain: weights.PlainExpert, matrix: specs.Matrix, code: CodeFormat, num_cols: int) -> Tensor | None:
    """Returns the scales of a pack's own codes for groups of `code`, float32 [f, groups]; None if they cannot be kept.

    They are kept if zeros are whole numbers, and every value relative to its zero fits `code`'s width.
    """
    found = plain.scales(matrix)
    if found is None:
        return None
    scale, zero = found
    stored_group = num_cols // scale.shape[1]
    if stored_group % code.group or not (zero == zero.round()).all() or not (scale > 0).all():
        return None
    scale = scale.repeat_interleave(stored_group // code.group, dim=1)
    middle, step = 2 ** (code.width - 1), max(_BLOCK_WEIGHTS // num_cols, 1)
    for start in range(0, len(scale), step):
        rows, some = plain.matrices[matrix][start : start + step], scale[start : start + step]
        values = rows.view(len(some), -1, code.group).div(some.unsqueeze(2)).round()
        if values.min() < -middle or values.max() >= middle:
            return None
    return scale


@dataclass(slots=True)
class MatrixCodes:
    """The codes of gate, up or down of all experts of this run."""

    carried: int = 0  # matrices whose codes were kept
    quantized: int = 0  # matrices that were quantized again
    # error, weight: sums of |w - w'| and of |w| over the pack's weights
    error: float = 0.0
    weight: float = 0.0

    @property
    def relative(self) -> float:
        """The mean error over the mean magnitude of the pack's weights."""
        return self.error / self.weight if self.weight else 0.0


Codes = dict[specs.Matrix, MatrixCodes]


def _put_coded(
    source: weights.PackSource, group: weights.ExpertTensors, code: CodeFormat, codes: Codes, put: weights.Put
) -> None:
    dtypes = {name: TORCH_DTYPES[dtype] for name, dtype, _ in group.tensors}  # without codes
    for expert, pieces in group.pieces.items():
        plain = source.expert(group.layer, expert, torch.float32)
        for piece in pieces:
            ((owner, place),) = piece.places
            dtype = dtypes[piece.tensor]
            if owner.kind == "bias":
                for first, values in piece.blocks(plain.rows, dtype):
                    weights.put_rows(put, piece.tensor, first, values)
                continue
            matrix = next(m for m in specs.MATRICES if m == owner.name)
            rows = plain.matrices[matrix]
            carried = None
            if place.neurons == "columns":
                rows = rows.T
            else:
                carried = carried_scales(plain, matrix, code, rows.shape[1])
            found = codes.setdefault(matrix, MatrixCodes())
            _put_matrix(put, piece.tensor, rows, carried, code, dtype, found)


def _put_matrix(
    put: weights.Put,
    tensor: str,
    rows: Tensor,
    carried: Tensor | None,
    code: CodeFormat,
    dtype: torch.dtype,
    found: MatrixCodes,
) -> None:
    num_rows, num_cols = rows.shape
    found.carried += carried is not None
    found.quantized += carried is None
    step = max(_BLOCK_WEIGHTS // num_cols, 1)
    for start in range(0, num_rows, step):
        groups = rows[start : start + step].reshape(-1, code.group)
        if carried is None:
            exact = scale = symmetric_scales(groups, code.width, dtype)
        else:
            exact = carried[start : start + step].reshape(-1, 1)
            scale = exact.to(dtype).to(torch.float32)
        codes = coded(groups, exact, code.width)
        found.weight += float(groups.abs().sum(dtype=torch.float64))
        found.error += float((codes * scale).sub_(groups).abs_().sum(dtype=torch.float64))
        weights.put_rows(put, f"{tensor}_packed", start, packed_words(codes.view(-1, num_cols), code.width))
        weights.put_rows(put, f"{tensor}_scale", start, scale.view(-1, num_cols // code.group).to(dtype))
    weights.put_rows(put, f"{tensor}_shape", 0, torch.tensor([[num_rows, num_cols]]))


def coded_units(
    source: weights.PackSource,
    claims: claiming.Claims,
    tensors: claiming.Tensors,
    formats: Mapping[int, CodeFormat],
    codes: Codes,
) -> Iterator[weights.ExportUnit]:
    """Yields the units of a checkpoint whose experts are coded.

    Args:    claims, tensors: of the same checkpoint without codes, in which each matrix of an expert is a tensor.
             formats: by decoder layer.   codes: is filled while units are written.
    Raises:  RunError for names of experts that the config's patterns do not match.
    """
    yield from weights.dense_units(source, claims, tensors)
    for group in weights.expert_groups(source.model, claims, tensors):
        code, coded_ones = formats[group.layer], list[StoredTensor]()
        coded = {p.tensor for found in group.pieces.values() for p in found if p.places[0][0].kind == "matrix"}
        for name, dtype, shape in group.tensors:
            if name in coded and (".experts." not in name or ".layers." not in name):
                raise RunError(f"tensor {name!r} is not named as vLLM names experts; use --to safetensors")
            coded_ones += coded_tensors(name, dtype, shape, code) if name in coded else [(name, dtype, shape)]
        yield weights.ExportUnit(group.name, tuple(coded_ones), partial(_put_coded, source, group, code, codes))
