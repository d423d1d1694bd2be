"""Compares a finished pack with its checkpoint, describes it, and checks it against limits.

Three parts, for the commands `verify`, `inspect` and `check`:

- comparison: every weight of a pack with the checkpoint's, and the logits of both on some text;
- description: the model, bytes by part, formats by layer and expert, as facts for a table or for JSON;
- checks: whether a pack is intact, comes from its source, and keeps within limits. A failed check says what was found
  and what is allowed; a check that cannot be made is skipped, with the reason.
"""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.evaluate import QUALITY_FILE, Estimate, Quality, check_source
from moe_pack.calib.quantize import LayerRotation
from moe_pack.convert.account import totals
from moe_pack.convert.rounding import heavy_losses, read_rounding
from moe_pack.formats import (
    MATRICES,
    NO_PROGRESS,
    ExpertFormat,
    Matrix,
    Pack,
    PackError,
    PartFormat,
    PlanError,
    Progress,
    RunError,
    dump,
    option,
    size_text,
)
from moe_pack.formats.commands import Stage, read_size
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.layout import UNUSED_FILE, DenseLayout, ngrams_file
from moe_pack.formats.manifest import MANIFEST_FILE, SOURCE_FILE, RotationVectors, read_account
from moe_pack.formats.pack import audit
from moe_pack.formats.plan import format_text
from moe_pack.formats.safetensors import DTYPE_BYTES
from moe_pack.formats.sidecar import read_sidecar
from moe_pack.formats.spec import cached_values, num_active_parameters, num_parameters, state_values
from moe_pack.runtime.model import (
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
from moe_pack.runtime.offload import PREDICTORS, ROUTING_FILE, Routing, divide_budget, expert_pages, routing_bytes

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
    """The difference of the pack's predictions from the source's over `num_tokens` tokens.

    `largest`: difference of a logit.   `kl`: mean KL divergence of the pack's distribution from the source's, in nats.
    `agreement`: share of tokens with the same likeliest next token.
    """

    num_tokens: int
    largest: float
    kl: float
    agreement: float


def same_tensors(pack: Pack, checkpoint: Checkpoint) -> None:
    """Checks that the checkpoint has the tensors that the pack's `source.json` names.

    Raises:  PackError with the name of the first tensor that differs.
    """
    _, tensors = checkpoint.account()
    account = read_account(pack.read_file(SOURCE_FILE).tobytes())
    packed = {tensor.name: (tensor.dtype, tensor.shape) for tensor in account.tensors}
    given = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    for name in sorted(packed.keys() | given.keys()):
        if packed.get(name) != given.get(name):
            raise PackError(
                f"--against {checkpoint.folder}: tensor {name!r} is {_tensor_text(given.get(name))} there and "
                f"{_tensor_text(packed.get(name))} in the pack's source; give the checkpoint that the pack was "
                f"made from"
            )


def _tensor_text(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


class _Sums:
    """Sums of errors over all matrices of one kind."""

    def __init__(self) -> None:
        self.num_weights = 0
        self.error = 0.0
        self.weight = 0.0
        self.largest = 0.0

    def add(self, source: Tensor, stored: Tensor, part: PartFormat | None) -> bool:
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
        if error == 0 or part is None or part.codec not in ("affine", "trellis"):
            return error == 0
        chance = _UNRELATED_DEVIATIONS / math.sqrt(source.numel())
        return _cosine(source, stored) > (min(_RELATED, chance) if part.bits == 1 else _RELATED)

    def result(self, matrix: str, stored_as: str) -> MatrixError:
        """Returns the errors over all weights that were added."""
        relative = self.error / self.weight if self.weight else 0.0
        return MatrixError(matrix, stored_as, self.num_weights, self.error / self.num_weights, relative, self.largest)


def _cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0))


def _compare_dense(
    weights: PackWeights, checkpoint: Checkpoint, dense: DenseLayout, sums: dict[tuple[str, str], _Sums]
) -> None:
    role, source = dense.role.name, checkpoint.dense_source(dense.role.name)
    place = f"dense.safetensors: {role}"
    if len(dense.role.shape) == 1:
        if not torch.equal(read_vector(checkpoint, source) + dense.role.offset, weights.vector(role)):
            raise PackError(f"{place}: does not match the checkpoint's {source.tensor!r}")
        return
    part = None if dense.rows is None else dense.rows.parts[0].format
    stored_as = dense.dtype.lower() if part is None else format_text(part)
    kind = sums.setdefault(("dense", stored_as), _Sums())
    for start in range(0, dense.role.shape[0], _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, dense.role.shape[0])
        expected = read_rows(checkpoint, source, start, stop).to(torch.float32)
        if not kind.add(expected, weights.matrix(role).rows(start, stop), part):
            raise PackError(f"{place}: rows {start} to {stop} do not match the checkpoint's {source.tensor!r}")


def _compare_unused(pack: Pack, checkpoint: Checkpoint) -> None:
    for item in pack.layout.items():
        if item.kind == "unused":
            stored = pack.read_unused(item.offset, item.num_bytes)
            if not np.array_equal(stored, checkpoint.raw(item.role, item.start, item.num_bytes)):
                raise PackError(f"{UNUSED_FILE}: {item.role!r} does not match the checkpoint's")


_TABLE_BYTES = 16 << 20  # of an n-gram table, compared at once


def _compare_tables(pack: Pack, checkpoint: Checkpoint, progress: Progress) -> None:
    for table in pack.layout.ngrams:
        step = max(_TABLE_BYTES // table.rows.row_bytes, 1)
        for start in range(0, table.num_rows, step):
            stop = min(start + step, table.num_rows)
            stored = pack.read_ngrams(table, start, stop)
            if not np.array_equal(stored[:, : table.rows.crc_offset], checkpoint.table_rows(table.layer, start, stop)):
                raise PackError(f"{ngrams_file(table.layer)}: rows {start} to {stop} do not match the checkpoint's")
            progress.advance(stored.nbytes)


def _compare_expert(
    weights: PackWeights,
    checkpoint: Checkpoint,
    number: tuple[int, int],
    formats: ExpertFormat,
    order: Tensor,
    vectors: RotationVectors | None,
    sums: dict[tuple[str, str], _Sums],
) -> None:
    """Compares an expert's matrices; with the source's rows in rotated coordinates, where the pack's are.

    Args:    number: the MoE layer and the expert.   order: int64 [f], the source's neuron in each row; the second row
             of a neuron is behind its first.
    """
    layer_idx, expert = number
    places = {matrix: checkpoint.expert_source(layer_idx, expert, matrix) for matrix in checkpoint.spec.expert.matrices}
    sources = {matrix: read_neurons(checkpoint, place) for matrix, place in places.items()}
    biased = checkpoint.spec.expert.bias
    biases = {m: read_vector(checkpoint, checkpoint.bias_source(layer_idx, expert, m)) for m in biased}
    packed = weights.expert(layer_idx, expert)
    rotation = LayerRotation.of(vectors, layer_idx)
    down_bias = biases.pop("down", None)
    _check_bias(number, "down", packed.down_bias(), None if down_bias is None else rotation.rows("down", down_bias))

    def compare(matrix: Matrix, rows: Tensor, stored: Tensor | None) -> None:
        part = formats.of(matrix)
        assert part is not None and stored is not None, f"{matrix} is one of the family's matrices"
        expected = rotation.rows(matrix, sources[matrix][rows])
        expected = (expected.to(torch.bfloat16) if part.codec == "bf16" else expected).to(torch.float32)
        if not sums.setdefault((matrix, format_text(part)), _Sums()).add(expected, stored, part):
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


def _check_bias(number: tuple[int, int], matrix: Matrix, stored: Tensor | None, source: Tensor | None) -> None:
    assert (stored is None) == (source is None), "the spec says which matrices have one"
    if stored is not None and source is not None and not torch.equal(stored, source):
        raise PackError(f"layer {number[0]} expert {number[1]}: the bias of {matrix} does not match the checkpoint's")


def compare_weights(
    pack: Pack,
    checkpoint: Checkpoint,
    progress: Progress = NO_PROGRESS,
    operations: Operations = TORCH,
) -> list[MatrixError]:
    """Returns the errors of every kind of matrix, sorted by name and format.

    Raises:  PackError if weights stored without loss differ, or a matrix is unrelated to the source's.
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
            _compare_expert(weights, checkpoint, (layer_idx, expert), formats, rows, pack.rotation, sums)
            progress.advance(layout.num_bytes)
    _compare_unused(pack, checkpoint)
    _compare_tables(pack, checkpoint, progress)
    progress.end()
    return [kind.result(matrix, stored_as) for (matrix, stored_as), kind in sorted(sums.items())]


def text_logits(weights: Weights, ids: list[int]) -> Tensor:
    """Returns the logits of each next token of `ids`, float32 [T, vocabulary]; an encoder reads `ids` first."""
    encoder = weights.spec.encoder
    if encoder is None:
        return Decoder(weights, len(ids)).logits(ids)
    answering = EncoderDecoder(weights, len(ids))
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


def compare_logits(pack: Pack, checkpoint: Checkpoint, ids: list[int], operations: Operations = TORCH) -> LogitsError:
    """Returns the difference of both models' predictions of each next token of `ids`.

    An encoder reads `ids`; the decoder then predicts the same tokens as the answer.
    """
    source = text_logits(CheckpointWeights(checkpoint), ids)
    return logits_error(source, text_logits(PackWeights(pack, torch.device("cpu"), operations), ids))


@dataclass(frozen=True, slots=True)
class FormatRun:
    """Consecutive layers and experts with the same formats; the ends count. `num_bytes`: of one expert's extent."""

    layers: tuple[int, int]
    experts: tuple[int, int]
    formats: ExpertFormat
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOutPart:
    """Tensors of the source that are not run for one reason: dropped, or `unused`, which the pack keeps."""

    fate: Literal["unused", "dropped"]
    reason: str
    num_tensors: int
    num_bytes: int


def left_out(pack: Pack) -> list[LeftOutPart]:
    """Returns what of the source's tensors is not run, by reason, in the order of `source.json`."""
    found: dict[tuple[Literal["unused", "dropped"], str], list[int]] = {}
    for tensor in read_account(pack.read_file(SOURCE_FILE).tobytes()).tensors:
        if tensor.fate == "unused" or tensor.fate == "dropped":
            num_bytes = DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
            found.setdefault((tensor.fate, tensor.reason), []).append(num_bytes)
    return [LeftOutPart(fate, reason, len(sizes), sum(sizes)) for (fate, reason), sizes in found.items()]


def describe(pack: Pack) -> dict[str, Any]:
    """Returns what `inspect --json` prints: facts of the manifest, and each expert's formats, `[layer][expert]`."""
    manifest = pack.manifest
    quality, rounding = read_sidecar(pack.folder, QUALITY_FILE, Quality, manifest.root), read_rounding(pack)
    return {
        "format": manifest.format,
        "version": manifest.version,
        "features": list(manifest.features),
        "synthetic": pack.is_synthetic,
        "model": dump(manifest.model),
        "parameters": num_parameters(pack.spec),
        "active_parameters": num_active_parameters(pack.spec),
        "kv_values_per_token": cached_values(pack.spec),
        "state_values": state_values(pack.spec),
        "selector": manifest.selector,
        "quantizer": manifest.quantizer,
        "made_with": {package.name: package.version for package in manifest.made_with},
        "root": manifest.root,
        "bytes": dump(manifest.totals),
        "left_out": [dump(each) for each in left_out(pack)],
        "experts": [
            [
                {
                    **{matrix: _part(formats, matrix) for matrix in MATRICES},
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
        row = _expert_runs(pack, layer, experts)
        before = [run for run in runs if run.layers[1] == layer - 1]
        if [(run.experts, run.formats) for run in before] == [(run.experts, run.formats) for run in row]:
            runs[len(runs) - len(before) :] = [
                FormatRun((run.layers[0], layer), run.experts, run.formats, run.num_bytes) for run in before
            ]
        else:
            runs += row
    return runs


def bits_per_weight(pack: Pack) -> float:
    """Returns the bits of selectors, records and extra values for each of the experts' weights."""
    spec, totals = pack.spec, pack.manifest.totals
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    num_weights = num_experts * spec.expert.source_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (totals.selectors + totals.records + totals.extra) / num_weights


def _expert_runs(pack: Pack, layer: int, experts: tuple[ExpertFormat, ...]) -> list[FormatRun]:
    runs: list[FormatRun] = []
    for expert, formats in enumerate(experts):
        if runs and runs[-1].formats == formats:
            runs[-1] = FormatRun((layer, layer), (runs[-1].experts[0], expert), formats, runs[-1].num_bytes)
        else:
            num_bytes = pack.layout.experts[layer][expert].num_bytes
            runs.append(FormatRun((layer, layer), (expert, expert), formats, num_bytes))
    return runs


def _routing(pack: Pack) -> dict[str, Any] | None:
    """Returns the pack's routing data: the best predictor of each MoE layer and its recall; None if it has none."""
    routing = Routing.open(pack)
    if routing is None:
        return None
    judged, layers = routing.judged_layers, range(len(pack.spec.moe_layers))
    return {
        "bytes": (pack.folder / ROUTING_FILE).stat().st_size,
        "held_out_tokens": len(routing.routes),
        "recall": routing.best_recall,
        "predictors": [PREDICTORS[routing.best[l]] if l in judged else None for l in layers],
        "recalls": [float(routing.recalls[l, routing.best[l], 0]) if l in judged else None for l in layers],
    }


def _part(formats: ExpertFormat, matrix: Matrix) -> str | None:
    part = formats.of(matrix)
    return None if part is None else format_text(part)


_DEFAULT_CONTEXT = 4096  # tokens, as moe-run has by default; fewer if the model has fewer positions
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 does not allow

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check and its result: what was found and what is allowed, as texts for people."""

    name: str
    status: Status
    found: str
    allowed: str = ""


def _percentage(text: str) -> float:
    """Returns the share that `1%` stands for.

    Raises:  ValueError if it is not a percentage of 0 or more.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share < float("inf"):
        raise ValueError(f"found {text!r}, expected a percentage such as 1% or 0.5%")
    return share


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of a pack's loss, bytes and memory; None: no limit. `max_ppl_increase` is relative, 0.01 for 1%."""

    max_kl: float | None = field(
        default=None,
        metadata=option(
            "--max-kl", least=0, metavar="X", help="Largest KL divergence from the source, in nats a token."
        ),
    )
    max_ppl_increase: float | None = field(
        default=None,
        metadata=option(
            "--max-ppl-increase",
            parse=_percentage,
            metavar="P%",
            help="Largest growth of perplexity over the source's, such as 1%.",
        ),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=option("--max-bytes", parse=read_size, metavar="B", help="Largest size of the pack, such as 26G."),
    )
    budget_bytes: int | None = field(
        default=None,
        metadata=option(
            "--budget",
            parse=read_size,
            metavar="SIZE",
            help="Memory in which moe-run must be able to run the pack, such as 11G.",
        ),
    )

    @property
    def of_loss(self) -> bool:
        """Whether one of the limits is of loss."""
        return self.max_kl is not None or self.max_ppl_increase is not None


def check_schema(folder: Path) -> tuple[Pack | None, CheckResult]:
    """Opens a pack, which the caller closes, and returns the check of its schema; the pack is None if that fails."""
    try:
        pack = Pack(folder)
    except PackError as fault:
        return None, CheckResult("schema", "failed", str(fault), "a valid pack")
    manifest = pack.manifest
    listed = f"format {manifest.version}, {len(manifest.files) + len(manifest.expert_files)} files"
    return pack, CheckResult("schema", "passed", listed, "a valid pack")


def _result_of(name: str, allowed: str, work: Callable[[], str]) -> CheckResult:
    """Returns the check that passes unless `work` finds a fault; `work` returns what it found."""
    try:
        return CheckResult(name, "passed", work(), allowed)
    except (PackError, PlanError) as fault:
        return CheckResult(name, "failed", str(fault), allowed)


def check_digests(pack: Pack, progress: Progress = NO_PROGRESS) -> CheckResult:
    """Checks that every byte is as it was written."""

    def work() -> str:
        audit(pack, progress)
        return f"{pack.manifest.totals.content:,} bytes, root {pack.manifest.root[:16]}"

    return _result_of("digests", "as written", work)


def check_tensors(pack: Pack, checkpoint: Checkpoint | None) -> CheckResult:
    """Checks that every tensor of the source and every byte of the pack is accounted for.

    Meaning: `source.json` accounts for as many weights as the model has; every tensor left out has a reason; bytes by
             part are those of the layout; a checkpoint, if given, has the same tensors and routers.
    """
    if pack.is_synthetic:
        return CheckResult("tensors", "skipped", "a synthetic pack has no checkpoint")

    def work() -> str:
        if checkpoint is not None:
            same_tensors(pack, checkpoint)
            check_source(pack, checkpoint)
        return _accounted(pack)

    return _result_of("tensors", "as in the source" if checkpoint else "all accounted for", work)


def _accounted(pack: Pack) -> str:
    """Returns what `source.json` accounts for, as a text for people."""
    tensors = read_account(pack.read_file(SOURCE_FILE).tobytes()).tensors
    num_weights, expected = sum(tensor.num_weights for tensor in tensors), num_parameters(pack.spec)
    if num_weights != expected:
        raise PackError(f"{SOURCE_FILE}: found {num_weights:,} weights in the pack, expected {expected:,}: the model's")
    for tensor in tensors:
        if (tensor.fate in ("unused", "dropped")) != bool(tensor.reason):
            raise PackError(
                f"{SOURCE_FILE}: tensor {tensor.name!r}: found fate {tensor.fate} and reason {tensor.reason!r}, "
                f"expected "
                "a reason for a tensor that is left out, and for no other"
            )
    if totals(pack.layout, pack.manifest.files) != pack.manifest.totals:
        raise PackError(f"{MANIFEST_FILE}: totals do not match the sizes of the files")
    counts = {fate: sum(tensor.fate == fate for tensor in tensors) for fate in ("unused", "dropped")}
    return f"{len(tensors)} tensors, {num_weights:,} weights" + "".join(
        f"; {number} tensors {fate}" for fate, number in counts.items() if number
    )


def check_losses(quality: Quality | None, limits: CheckLimits, origin: str) -> list[CheckResult]:
    """Checks that the upper ends of the 95% intervals of the loss are within the limits.

    Args:    origin: of `quality`, in words; if there is no quality, why.
    """
    against = None if quality is None else quality.against
    if against is None:
        return [CheckResult(name, "skipped", origin) for name in ("kl", "perplexity")]
    increase = against.perplexity_increase
    return [
        _check_loss("kl", against.kl, limits.max_kl, lambda x: f"{x:.4g} nats", origin),
        _check_loss("perplexity", increase, limits.max_ppl_increase, lambda x: f"{x:+.3%}", origin),
    ]


def _check_loss(
    name: str, loss: Estimate, limit: float | None, text: Callable[[float], str], origin: str
) -> CheckResult:
    if loss.upper is None:
        found = f"{text(loss.value)}; too few tokens for an interval ({origin})"
    else:
        found = f"{text(loss.value)}, at most {text(loss.upper)} with 95% confidence ({origin})"
    if limit is None:
        return CheckResult(name, "skipped", found, "no limit")
    is_within = loss.upper is not None and loss.upper <= limit
    return CheckResult(name, "passed" if is_within else "failed", found, text(limit))


def check_bytes(pack: Pack, limits: CheckLimits) -> CheckResult:
    """Checks the size of the pack."""
    content = pack.manifest.totals.content
    if limits.max_bytes is None:
        return CheckResult("bytes", "skipped", f"{content:,}", "no limit")
    return CheckResult(
        "bytes", "passed" if content <= limits.max_bytes else "failed", f"{content:,}", f"{limits.max_bytes:,}"
    )


def check_budget(pack: Pack, limits: CheckLimits) -> CheckResult:
    """Checks that `moe-run` accepts the budget, with a context of 4,096 tokens or the model's positions."""
    if limits.budget_bytes is None:
        return CheckResult("budget", "skipped", "", "no limit")
    allowed = size_text(limits.budget_bytes)
    context = min(_DEFAULT_CONTEXT, pack.spec.max_position_embeddings)
    try:
        plan = divide_budget(pack.layout, limits.budget_bytes, context, routing_bytes(pack.folder))
    except RunError as fault:
        return CheckResult("budget", "failed", str(fault), allowed)
    share = plan.num_pages / int(expert_pages(pack.layout, plan.page_bytes).sum())
    return CheckResult("budget", "passed", f"memory for {share:.0%} of experts, with a context of {context}", allowed)


def junit_xml(checks: list[CheckResult], suite: str) -> bytes:
    """Returns the checks as JUnit XML, one test case each."""
    counts = {status: sum(check.status == status for check in checks) for status in ("failed", "skipped")}
    facts = {"tests": str(len(checks)), "failures": str(counts["failed"]), "skipped": str(counts["skipped"])}
    root = ET.Element("testsuites", facts)
    cases = ET.SubElement(root, "testsuite", {"name": _xml_text(suite), **facts, "errors": "0"})
    for check in checks:
        case = ET.SubElement(cases, "testcase", {"classname": "moe-pack.check", "name": check.name})
        message = _xml_text(f"found {check.found}" + (f", allowed {check.allowed}" if check.allowed else ""))
        if check.status == "failed":
            ET.SubElement(case, "failure", {"message": message}).text = message
        elif check.status == "skipped":
            ET.SubElement(case, "skipped", {"message": message})
        else:
            ET.SubElement(case, "system-out").text = message
    ET.indent(root)
    return b"<?xml version='1.0' encoding='utf-8'?>\n" + ET.tostring(root, encoding="unicode").encode() + b"\n"


def _xml_text(text: str) -> str:
    return _NO_XML.sub("?", text)
