"""Compares a finished pack with its checkpoint, for `verify`, and describes it, for `inspect`."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.quantize import LayerRotation
from moe_pack.convert.account import heavy_losses, read_rounding
from moe_pack.formats import Pack, PackError, dump
from moe_pack.formats.base import commands
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import layouts, manifests, plans
from moe_pack.formats.pack.safetensors import DTYPE_BYTES
from moe_pack.formats.parts import specs
from moe_pack.runtime import model, offload
from moe_pack.runtime.quality import read_quality

# Least cosine between stored weights and the source's. With 2 bits and more it is at least 0.8. One-bit hqq over long
# rows keeps little (0.07 at 4,096 weights a row); but an unrelated matrix of n weights stays within 6 / sqrt(n).
_RELATED = 0.4
_UNRELATED_DEVIATIONS = 6
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class MatrixError:
    """The error of stored weights of one kind: `mean` and `largest` of |w - w'|; `relative` is `mean` over mean |w|."""

    matrix: str
    stored_as: str
    num_weights: int
    mean: float
    relative: float
    largest: float


@dataclass(frozen=True, slots=True)
class LogitsError:
    """The difference of the pack's predictions from the source's over `num_tokens` tokens."""

    num_tokens: int
    largest: float  # difference of a logit
    kl: float  # mean KL divergence of the pack's distribution from the source's, in nats
    agreement: float  # share of tokens with the same likeliest next token


def same_tensors(pack: Pack, checkpoint: Checkpoint) -> None:
    """Raises PackError with the first tensor of the pack's `source.json` that the checkpoint does not have so."""
    _, tensors = checkpoint.account()
    account = manifests.read_account(pack.read_file(manifests.SOURCE_FILE).tobytes())
    packed, given = (
        {tensor.name: f"{tensor.dtype} {list(tensor.shape)}" for tensor in each} for each in (account.tensors, tensors)
    )
    for name in sorted(packed.keys() | given.keys()):
        if packed.get(name) != given.get(name):
            raise PackError(
                f"--against {checkpoint.folder}: tensor {name!r} is {given.get(name, 'missing')} there and "
                f"{packed.get(name, 'missing')} in the pack's source; give the checkpoint that the pack was "
                f"made from"
            )


class _Sums:
    """Sums of errors over all matrices of one kind."""

    def __init__(self) -> None:
        self.num_weights = 0
        self.error = 0.0
        self.weight = 0.0
        self.largest = 0.0

    def add(self, source: Tensor, stored: Tensor, part: plans.PartFormat | None) -> bool:
        """Adds rows in float32, and returns whether they match the source as well as their format can.

        Only quantized weights may differ.
        Args:    part: the format; None if the pack keeps the source's bytes.
        """
        difference = (source - stored).abs()
        error, weight = float(difference.sum(dtype=torch.float64)), float(source.abs().sum(dtype=torch.float64))
        self.num_weights += source.numel()
        self.error += error
        self.weight += weight
        self.largest = max(self.largest, float(difference.max()))
        if error == 0 or part is None or not part.is_quantized:
            return error == 0
        chance = _UNRELATED_DEVIATIONS / math.sqrt(source.numel())
        x, y = (rows.flatten().double() for rows in (source, stored))
        return float(torch.nn.functional.cosine_similarity(x, y, dim=0)) > (
            min(_RELATED, chance) if part.bits == 1 else _RELATED
        )

    def result(self, matrix: str, stored_as: str) -> MatrixError:
        relative = self.error / self.weight if self.weight else 0.0
        return MatrixError(matrix, stored_as, self.num_weights, self.error / self.num_weights, relative, self.largest)


def _compare_dense(
    weights: model.PackWeights, checkpoint: Checkpoint, dense: layouts.DenseLayout, sums: dict[tuple[str, str], _Sums]
) -> None:
    role, source = dense.role.name, checkpoint.dense_source(dense.role.name)
    place = f"dense.safetensors: {role}"
    if len(dense.role.shape) == 1:
        if not torch.equal(model.read_vector(checkpoint, source) + dense.role.offset, weights.vector(role)):
            raise PackError(f"{place}: does not match the checkpoint's {source.tensor!r}")
        return
    part = None if dense.rows is None else dense.rows.parts[0].format
    stored_as = dense.dtype.lower() if part is None else plans.format_text(part)
    kind = sums.setdefault(("dense", stored_as), _Sums())
    for start in range(0, dense.role.shape[0], _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, dense.role.shape[0])
        expected = model.read_rows(checkpoint, source, start, stop).to(torch.float32)
        if not kind.add(expected, weights.matrix(role).rows(start, stop), part):
            raise PackError(f"{place}: rows {start} to {stop} do not match the checkpoint's {source.tensor!r}")


def _compare_unused(pack: Pack, checkpoint: Checkpoint) -> None:
    for item in pack.layout.items():
        if item.kind == "unused":
            stored = pack.read_unused(item.offset, item.num_bytes)
            if not np.array_equal(stored, checkpoint.raw(item.role, item.start, item.num_bytes)):
                raise PackError(f"{layouts.UNUSED_FILE}: {item.role!r} does not match the checkpoint's")


_TABLE_BYTES = 16 << 20  # of an n-gram table, compared at once


def _compare_tables(pack: Pack, checkpoint: Checkpoint, progress: commands.Progress) -> None:
    for table in pack.layout.ngrams:
        step = max(_TABLE_BYTES // table.rows.row_bytes, 1)
        for start in range(0, table.num_rows, step):
            stop = min(start + step, table.num_rows)
            stored = pack.read_ngrams(table, start, stop)
            if not np.array_equal(stored[:, : table.rows.crc_offset], checkpoint.table_rows(table.layer, start, stop)):
                raise PackError(
                    f"{layouts.ngrams_file(table.layer)}: rows {start} to {stop} do not match the checkpoint's"
                )
            progress.advance(stored.nbytes, f"n-gram table of layer {table.layer}", "dense")


def _compare_expert(
    weights: model.PackWeights,
    checkpoint: Checkpoint,
    number: tuple[int, int],
    formats: plans.ExpertFormat,
    order: Tensor,
    vectors: manifests.RotationVectors | None,
    sums: dict[tuple[str, str], _Sums],
) -> None:
    """Compares an expert's matrices; with the source's rows in rotated coordinates, where the pack's are.

    Args:    number: the MoE layer and the expert.   order: int64 [f], the source's neuron in each row; the second row
             of a neuron is behind its first.
    """
    layer_idx, expert = number
    places = {matrix: checkpoint.expert_source(layer_idx, expert, matrix) for matrix in checkpoint.spec.expert.matrices}
    sources = {matrix: model.read_neurons(checkpoint, place) for matrix, place in places.items()}
    biased = checkpoint.spec.expert.bias
    biases = {m: model.read_vector(checkpoint, checkpoint.bias_source(layer_idx, expert, m)) for m in biased}
    packed = weights.expert(layer_idx, expert)
    rotation = LayerRotation.of(vectors, layer_idx)
    down_bias = biases.pop("down", None)
    _check_bias(number, "down", packed.down_bias(), None if down_bias is None else rotation.rows("down", down_bias))

    def compare(matrix: specs.Matrix, rows: Tensor, stored: Tensor | None) -> None:
        part = formats.of(matrix)
        assert part is not None and stored is not None, f"{matrix} is one of the family's matrices"
        expected = rotation.rows(matrix, sources[matrix][rows])
        expected = (expected.to(torch.bfloat16) if part.codec == "bf16" else expected).to(torch.float32)
        if not sums.setdefault((matrix, plans.format_text(part)), _Sums()).add(expected, stored, part):
            raise PackError(
                f"layer {layer_idx} expert {expert}: {matrix} does not match the checkpoint's {places[matrix].tensor!r}"
            )

    start, is_first = 0, torch.ones(len(order), dtype=torch.bool)
    is_first[1:] = order[1:] != order[:-1]
    down = torch.zeros((int(is_first.sum()), checkpoint.spec.hidden_size)) if not is_first.all() else None
    for block in packed.blocks():
        some = slice(start, start + len(block.up))
        rows, first, start = order[some], is_first[some], some.stop
        for matrix, stored, bias in (("gate", block.gate, block.gate_bias), ("up", block.up, block.up_bias)):
            if matrix in biases:
                _check_bias(number, matrix, bias, biases[matrix][rows])
            if matrix in sources:
                compare(matrix, rows[first], None if stored is None else stored[first])
        if down is None:
            compare("down", rows, block.down)
        else:
            down.index_add_(0, rows, block.down)
    if down is not None:
        compare("down", torch.arange(len(down)), down)


def _check_bias(number: tuple[int, int], matrix: specs.Matrix, stored: Tensor | None, source: Tensor | None) -> None:
    assert (stored is None) == (source is None), "the spec says which matrices have one"
    if stored is not None and source is not None and not torch.equal(stored, source):
        raise PackError(f"layer {number[0]} expert {number[1]}: the bias of {matrix} does not match the checkpoint's")


def compare_weights(
    pack: Pack,
    checkpoint: Checkpoint,
    progress: commands.Progress = commands.NO_PROGRESS,
    operations: model.Operations = model.TORCH,
) -> list[MatrixError]:
    """Returns the errors of every kind of matrix, sorted by name and format.

    Raises:  PackError if weights stored without loss differ, or a matrix is unrelated to the source's.
    """
    weights = model.PackWeights(pack, torch.device("cpu"), operations)
    sums: dict[tuple[str, str], _Sums] = {}
    tables = sum(table.num_rows * table.rows.row_bytes for table in pack.layout.ngrams)
    dense_bytes = sum(dense.entry.num_bytes for dense in pack.layout.dense) + tables
    kinds = commands.Kind("dense", dense_bytes), commands.Kind("experts", int(pack.index.size.sum()))
    progress.begin(commands.Stage.of_kinds("comparing", kinds, commands.size_text(sum(kind.total for kind in kinds))))
    for dense in pack.layout.dense:
        _compare_dense(weights, checkpoint, dense, sums)
        progress.advance(dense.entry.num_bytes, dense.role.name, "dense")
    order = pack.read_order()
    for layer_idx, layer in enumerate(pack.layout.experts):
        for expert, layout in enumerate(layer):
            formats = pack.index.experts[layer_idx][expert]
            rows = torch.from_numpy(order[layer_idx, expert].astype(np.int64))
            _compare_expert(weights, checkpoint, (layer_idx, expert), formats, rows, pack.rotation, sums)
            progress.advance(layout.num_bytes, f"layer {layer_idx} expert {expert}", "experts")
    _compare_unused(pack, checkpoint)
    _compare_tables(pack, checkpoint, progress)
    progress.end()
    return [kind.result(matrix, stored_as) for (matrix, stored_as), kind in sorted(sums.items())]


def text_logits(weights: model.Weights, ids: list[int]) -> Tensor:
    """Returns the logits of each next token of `ids`, float32 [T, vocabulary]; an encoder reads `ids` first."""
    encoder = weights.spec.encoder
    if encoder is None:
        return model.Decoder(weights, len(ids)).logits(ids)
    answering = model.EncoderDecoder(weights, len(ids))
    answering.encode(ids)
    return answering.logits([encoder.start_token, *ids[:-1]])


def logits_error(source: Tensor, packed: Tensor) -> LogitsError:
    """Returns the difference of two sets of logits, float32 [T, vocabulary] each."""
    expected, found = source.to(torch.float64).log_softmax(1), packed.to(torch.float64).log_softmax(1)
    return LogitsError(
        num_tokens=len(source),
        largest=float((source - packed).abs().max()),
        kl=float((expected.exp() * (expected - found)).sum(1).mean()),
        agreement=float((source.argmax(1) == packed.argmax(1)).to(torch.float64).mean()),
    )


def compare_logits(
    pack: Pack, checkpoint: Checkpoint, ids: list[int], operations: model.Operations = model.TORCH
) -> LogitsError:
    """Returns the difference of both models' predictions of each next token of `ids`, as `text_logits` has them."""
    source = text_logits(model.CheckpointWeights(checkpoint), ids)
    return logits_error(source, text_logits(model.PackWeights(pack, torch.device("cpu"), operations), ids))


@dataclass(frozen=True, slots=True)
class FormatRun:
    """Consecutive layers and experts with the same formats; the ends count."""

    layers: tuple[int, int]
    experts: tuple[int, int]
    formats: plans.ExpertFormat
    num_bytes: int  # of one expert's extent


@dataclass(frozen=True, slots=True)
class LeftOutPart:
    """Tensors of the source that are not run for one reason: dropped, or `unused`, which the pack keeps."""

    fate: Literal["unused", "dropped"]
    reason: str
    num_tensors: int
    num_bytes: int


def left_out(pack: Pack) -> list[LeftOutPart]:
    """Returns the source's tensors that are not run, by reason, in the order of `source.json`."""
    found: dict[tuple[Literal["unused", "dropped"], str], list[int]] = {}
    for tensor in manifests.read_account(pack.read_file(manifests.SOURCE_FILE).tobytes()).tensors:
        if tensor.fate == "unused" or tensor.fate == "dropped":
            num_bytes = DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
            found.setdefault((tensor.fate, tensor.reason), []).append(num_bytes)
    return [LeftOutPart(fate, reason, len(sizes), sum(sizes)) for (fate, reason), sizes in found.items()]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of a pack that one token reads, if all neurons of its experts run."""

    dense: int  # of all tensors that every token reads whole
    experts: int  # of the mean expert, as many as a token has
    dense_bits: float  # of a weight of these dense tensors


def token_bytes(pack: Pack) -> TokenBytes:
    """Returns what one token reads of the pack."""
    layout, per_token = pack.layout, pack.spec.router.num_experts_per_tok
    dense = list(layout.read_dense())
    num_bytes = sum(each.entry.num_bytes for each in dense)
    experts = sum(per_token * sum(e.num_bytes for e in layer) // len(layer) for layer in layout.experts)
    return TokenBytes(num_bytes, experts, 8 * num_bytes / sum(math.prod(each.role.shape) for each in dense))


def describe(pack: Pack) -> dict[str, Any]:
    """Returns the JSON of `inspect --json`: facts of the manifest, and each expert's formats, `[layer][expert]`."""
    manifest = pack.manifest
    quality, rounding = read_quality(pack), read_rounding(pack)
    return {
        "format": manifest.format,
        "version": manifest.version,
        "features": list(manifest.features),
        "synthetic": pack.is_synthetic,
        "model": dump(manifest.model),
        "parameters": specs.num_parameters(pack.spec),
        "active_parameters": specs.num_active_parameters(pack.spec),
        "kv_values_per_token": specs.cached_values(pack.spec),
        "state_values": specs.state_values(pack.spec),
        "selector": manifest.selector,
        "quantizer": manifest.quantizer,
        "made_with": {package.name: package.version for package in manifest.made_with},
        "root": manifest.root,
        "bytes": dump(manifest.totals),
        "token_bytes": dump(token_bytes(pack)),
        "left_out": [dump(each) for each in left_out(pack)],
        "experts": [
            [
                {
                    **{m: plans.format_text(part) if (part := formats.of(m)) else None for m in specs.MATRICES},
                    "bytes": pack.layout.experts[layer][expert].num_bytes,
                    "threshold": float(pack.thresholds[layer, expert]),
                }
                for expert, formats in enumerate(experts)
            ]
            for layer, experts in enumerate(pack.index.experts)
        ],
        "rotated": [pack.rotation is not None and pack.rotation.is_rotated(l) for l in range(len(pack.index.experts))],
        "dense": {dense.name: dump(dense.format) for dense in manifest.dense},
        "rounding": None if rounding is None else dump(rounding)["experts"],
        "heavy_losses": [] if rounding is None else [dump(one) for one in heavy_losses(pack, rounding)],
        "routing": _routing(pack),
        "quality": None if quality is None else dump(quality),
    }


def format_runs(pack: Pack) -> list[FormatRun]:
    """Returns all experts in runs: consecutive experts with the same formats, then consecutive layers."""
    runs: list[FormatRun] = []
    for layer, experts in enumerate(pack.index.experts):
        row, first = list[FormatRun](), 0
        for formats, alike in itertools.groupby(experts):
            end = first + len(list(alike))
            num_bytes = pack.layout.experts[layer][first].num_bytes
            row.append(FormatRun((layer, layer), (first, end - 1), formats, num_bytes))
            first = end
        before = [run for run in runs if run.layers[1] == layer - 1]
        if [(run.experts, run.formats) for run in before] == [(run.experts, run.formats) for run in row]:
            runs[len(runs) - len(before) :] = [replace(run, layers=(run.layers[0], layer)) for run in before]
        else:
            runs += row
    return runs


def _routing(pack: Pack) -> dict[str, Any] | None:
    """Returns the pack's routing data: the best predictor of each MoE layer and its recall; None if it has none."""
    routing = offload.Routing.open(pack)
    if routing is None:
        return None
    judged, layers = routing.judged_layers, range(len(pack.spec.moe_layers))
    return {
        "bytes": (pack.folder / offload.ROUTING_FILE).stat().st_size,
        "held_out_tokens": len(routing.routes),
        "recall": routing.best_recall,
        "predictors": [offload.PREDICTORS[routing.best[l]] if l in judged else None for l in layers],
        "recalls": [float(routing.recalls[l, routing.best[l], 0]) if l in judged else None for l in layers],
    }
