"""A pack beside the checkpoint it was made from: every weight, and the logits of some text."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import (
    NO_PROGRESS,
    UNUSED_FILE,
    Checkpoint,
    DenseLayout,
    ExpertFormat,
    Matrix,
    Pack,
    PackError,
    PartFormat,
    Progress,
    Stage,
    format_text,
    read_account,
)
from moe_pack.runtime import (
    TORCH,
    CheckpointWeights,
    Decoder,
    EncoderDecoder,
    Operations,
    PackWeights,
    Weights,
    read_neurons,
    read_rows,
    read_vector,
)

# Least cosine between stored weights and the source's. From 2 bit up it is 0.8 and more. One-bit hqq over long rows
# keeps little (0.07 at 4,096 weights a row); an unrelated matrix of n weights stays within 6 / sqrt(n) all the same.
_RELATED = 0.4
_UNRELATED_DEVIATIONS = 6
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class MatrixError:
    """How far stored weights of one kind are from the source's: `mean`, `largest`; `relative` is mean over mean |w|."""

    matrix: str
    stored_as: str
    num_weights: int
    mean: float
    relative: float
    largest: float


@dataclass(frozen=True, slots=True)
class LogitsError:
    """How far the pack's predictions are from the source's over `num_tokens` tokens.

    `kl`: mean KL divergence of the pack's distribution from the source's, in nats. `agreement`: share of tokens with
    the same likeliest next token.
    """

    num_tokens: int
    largest: float
    kl: float
    agreement: float


def same_tensors(pack: Pack, checkpoint: Checkpoint) -> None:
    """Checks that the checkpoint has the tensors the pack's account names.

    Raises:  PackError naming the first that differs.
    """
    _, tensors = checkpoint.account()
    account = read_account(pack.read_file("source.json").tobytes())
    theirs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in account.tensors}
    ours = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise PackError(
                f"--against {checkpoint.folder}: tensor {name!r} is {_described(ours.get(name))} there, "
                f"the pack was made from {_described(theirs.get(name))}; it is another checkpoint"
            )


def compare_weights(
    pack: Pack,
    checkpoint: Checkpoint,
    progress: Progress = NO_PROGRESS,
    operations: Operations = TORCH,
) -> list[MatrixError]:
    """The errors of every kind of matrix, by name and format.

    Raises:  PackError if what was stored without loss differs, or a matrix is unrelated to the source's.
    """
    weights = PackWeights(pack, torch.device("cpu"), operations)
    sums: dict[tuple[str, str], _Sums] = {}
    progress.begin(Stage("comparing", pack.manifest.totals.content, "B"))
    for dense in pack.layout.dense:
        _compare_dense(weights, checkpoint, dense, sums)
        progress.advance(dense.entry.num_bytes)
    order = pack.read_order()
    for layer_idx, layer in enumerate(pack.layout.experts):
        for expert, layout in enumerate(layer):
            formats = pack.index.experts[layer_idx][expert]
            rows = torch.from_numpy(order[layer_idx, expert].astype(np.int64))
            _compare_expert(weights, checkpoint, (layer_idx, expert), formats, rows, sums)
            progress.advance(layout.num_bytes)
    _compare_unused(pack, checkpoint)
    progress.end()
    return [held.result(matrix, stored_as) for (matrix, stored_as), held in sorted(sums.items())]


def compare_logits(pack: Pack, checkpoint: Checkpoint, ids: list[int], operations: Operations = TORCH) -> LogitsError:
    """The distance between both models' predictions of each next token of `ids`.

    With an encoder it reads `ids`, and the predictions are those of the same tokens as answer.
    """
    source = _logits(CheckpointWeights(checkpoint), ids)
    return logits_error(source, _logits(PackWeights(pack, torch.device("cpu"), operations), ids))


def _logits(weights: Weights, ids: list[int]) -> Tensor:
    encoder = weights.spec.encoder
    if encoder is None:
        return Decoder(weights, len(ids)).logits(ids)
    answering = EncoderDecoder(weights, len(ids))
    answering.encode(ids)
    return answering.logits([encoder.start_token, *ids[:-1]])


def logits_error(source: Tensor, packed: Tensor) -> LogitsError:
    """The distance between two sets of logits, float32 [T, vocabulary] each."""
    expected, found = source.to(torch.float64).log_softmax(1), packed.to(torch.float64).log_softmax(1)
    return LogitsError(
        num_tokens=len(source),
        largest=float((source - packed).abs().max()),
        kl=float((expected.exp() * (expected - found)).sum(1).mean()),
        agreement=float((source.argmax(1) == packed.argmax(1)).to(torch.float64).mean()),
    )


class _Sums:
    """Sums over all matrices of a kind."""

    def __init__(self) -> None:
        self.num_weights = 0
        self.error = 0.0
        self.weight = 0.0
        self.largest = 0.0

    def add(self, source: Tensor, stored: Tensor, part: PartFormat | None) -> bool:
        """Adds rows in float32; tells whether they are the source's, as nearly as the format has them.

        Only what was quantized may differ at all; None is what keeps the source's bytes.
        """
        difference = (source - stored).abs()
        error, weight = float(difference.sum(dtype=torch.float64)), float(source.abs().sum(dtype=torch.float64))
        self.num_weights += source.numel()
        self.error += error
        self.weight += weight
        self.largest = max(self.largest, float(difference.max()))
        if error == 0 or part is None or part.codec not in ("affine", "trellis"):
            return error == 0
        chance = _UNRELATED_DEVIATIONS / math.sqrt(source.numel())
        return _cosine(source, stored) > (min(_RELATED, chance) if part.bits == 1 else _RELATED)

    def result(self, matrix: str, stored_as: str) -> MatrixError:
        """The mean over all that was added."""
        relative = self.error / self.weight if self.weight else 0.0
        return MatrixError(matrix, stored_as, self.num_weights, self.error / self.num_weights, relative, self.largest)


def _cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0))


def _compare_dense(
    weights: PackWeights, checkpoint: Checkpoint, dense: DenseLayout, sums: dict[tuple[str, str], _Sums]
) -> None:
    role, place_in_source = dense.role.name, checkpoint.dense_source(dense.role.name)
    place = f"dense.safetensors: {role}"
    if len(dense.role.shape) == 1:
        if not torch.equal(read_vector(checkpoint, place_in_source), weights.vector(role)):
            raise PackError(f"{place}: differs from the checkpoint's {place_in_source.tensor!r}")
        return
    part = None if dense.rows is None else dense.rows.parts[0].format
    stored_as = dense.dtype.lower() if part is None else format_text(part)
    held = sums.setdefault(("dense", stored_as), _Sums())
    for start in range(0, dense.role.shape[0], _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, dense.role.shape[0])
        source = read_rows(checkpoint, place_in_source, start, stop).to(torch.float32)
        if not held.add(source, weights.matrix(role).rows(start, stop), part):
            raise PackError(
                f"{place}: rows {start} to {stop} are not those of the checkpoint's {place_in_source.tensor!r}"
            )


def _compare_unused(pack: Pack, checkpoint: Checkpoint) -> None:
    for item in pack.layout.items():
        if item.kind == "unused":
            stored = pack.read_unused(item.offset, item.num_bytes)
            if not np.array_equal(stored, checkpoint.raw(item.role, item.start, item.num_bytes)):
                raise PackError(f"{UNUSED_FILE}: {item.role!r} is not the checkpoint's")


def _compare_expert(
    weights: PackWeights,
    checkpoint: Checkpoint,
    number: tuple[int, int],
    formats: ExpertFormat,
    order: Tensor,
    sums: dict[tuple[str, str], _Sums],
) -> None:
    """Compares an expert's matrices; `order` int64 [f] tells which of the source's neurons each row is."""
    layer_idx, expert = number
    places = {matrix: checkpoint.expert_source(layer_idx, expert, matrix) for matrix in checkpoint.spec.expert.matrices}
    sources = {matrix: read_neurons(checkpoint, place) for matrix, place in places.items()}
    biased = checkpoint.spec.expert.bias
    biases = {m: read_vector(checkpoint, checkpoint.bias_source(layer_idx, expert, m)) for m in biased}
    held = weights.expert(layer_idx, expert)
    _check_bias(number, "down", held.down_bias(), biases.pop("down", None))
    start = 0
    for block in held.blocks():
        rows = order[start : start + len(block.up)]
        start += len(rows)
        for matrix, source in sources.items():
            part = formats.of(matrix)
            stored = {"gate": block.gate, "up": block.up, "down": block.down}[matrix]
            assert part is not None and stored is not None, f"{matrix} is one of the family's matrices"
            if matrix in biases:
                _check_bias(
                    number, matrix, block.gate_bias if matrix == "gate" else block.up_bias, biases[matrix][rows]
                )
            expected = (source[rows].to(torch.bfloat16) if part.codec == "bf16" else source[rows]).to(torch.float32)
            if not sums.setdefault((matrix, format_text(part)), _Sums()).add(expected, stored, part):
                raise PackError(
                    f"layer {layer_idx} expert {expert}: {matrix} is not the checkpoint's {places[matrix].tensor!r}"
                )


def _check_bias(number: tuple[int, int], matrix: Matrix, stored: Tensor | None, source: Tensor | None) -> None:
    assert (stored is None) == (source is None), "the spec says which matrices have one"
    if stored is not None and source is not None and not torch.equal(stored, source):
        raise PackError(f"layer {number[0]} expert {number[1]}: the bias of {matrix} is not the checkpoint's")


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
