"""Evaluation of a pack on a text: its perplexity, and its KL divergence and agreement compared with its source.

The pack runs as it is stored, layer by layer. The source is a compact `Reference`, or the checkpoint itself, which then
runs on the same text and is compared over the whole vocabulary.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.evaluate import reference as compact
from moe_pack.calib.evaluate.model_pass import ModelPass
from moe_pack.calib.evaluate.reference import Reference
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime import model, quality

_WORK_FOLDER = "quality.work"

Sums = NDArray[np.float64]  # over blocks of consecutive predicted tokens, [B]


def evaluate(
    pack: formats.Pack,
    tokens: forward.Tokens,
    progress: formats.Progress = formats.NO_PROGRESS,
    reference: Reference | Checkpoint | None = None,
    device: torch.device | None = None,
    operations: model.Operations = model.TORCH,
    folder: Path | None = None,
) -> quality.Quality:
    """Evaluates a pack on a text, without writing `quality.json`. A killed call continues after the last whole layer.

    Args:    reference: to compare with.   operations: decode rows and multiply large dense matrices.   folder: for work
             files, removed at the end; None takes one in the pack's folder.
    Raises:  PlanError if the reference is of another model or text; ConversionError if the folder is in use or cannot
             be written; RunError for sequences longer than the model's positions.
    """
    forward.check_length(pack.spec, tokens.sequences.shape[1])
    source = _source_of(pack, tokens, reference)
    kind = "exact" if isinstance(reference, Checkpoint) else "compact"
    facts = {"root": pack.manifest.root, "text": tokens.sha256, "source": source, "kind": kind}
    where = device or torch.device("cpu")
    with forward.work_store(folder or pack.folder / _WORK_FOLDER, facts) as store:
        packed = ModelPass(
            forward.LayerwiseWeights(model.StreamedPackWeights(pack, where, operations)), tokens, store, "pack", where
        )
        packed.run("predictions of the pack", progress)
        comparison: _Comparison | None = None
        if isinstance(reference, Checkpoint):
            comparison = _Source(reference, tokens, store, progress, where)
        elif reference is not None:
            comparison = _KeptReference(reference, where)
        nll, compared = _losses(packed, tokens, comparison, progress)
        number = compact.block_sums(np.ones(packed.predicted[:, 1:].size)).astype(np.int64)  # tokens of each block
        num_sequences, S = tokens.sequences.shape
        return quality.Quality(
            tokens.name,
            tokens.sha256,
            num_sequences,
            S,
            int(number.sum()),
            pack.manifest.totals.content,
            packed.sparsity().overall,
            compact.exponential(compact.mean(nll, number)),
            None if comparison is None else _source_quality(source, comparison, nll, compared, number),
        )


def check_source(pack: formats.Pack, checkpoint: Checkpoint) -> str:
    """Returns the digest of the checkpoint; PlanError if tensors or routers differ from the pack's."""
    source = forward.packed_source_digest(pack)
    if forward.source_digest(checkpoint) != source:
        raise formats.PlanError(
            f"--against {checkpoint.folder}: {pack.folder} was made from another checkpoint; give that one"
        )
    return source


def _source_of(pack: formats.Pack, tokens: forward.Tokens, reference: Reference | Checkpoint | None) -> str:
    """Returns the digest of the source of comparison, "" without one; refuses another source than the pack's."""
    if isinstance(reference, Checkpoint):
        return check_source(pack, reference)
    if reference is None:
        return ""
    source = forward.packed_source_digest(pack)
    compact.check_reference(reference, tokens, source, "--against")
    return source


class _Comparison(Protocol):
    is_exact: bool
    num_outcomes: int

    def noise_floor(self) -> float: ...

    def compare(self, number: int, rows: slice, log_probs: Tensor, sequence: forward.Array) -> tuple[Tensor, ...]:
        """Returns the six `compared` of `_source_quality`, [n] each, for the pack's predictions float32 [n, V]."""
        ...


class _KeptReference:
    is_exact = False

    def __init__(self, reference: Reference, device: torch.device) -> None:
        self.num_outcomes = reference.facts.num_outcomes
        self._reference = reference
        self._device = device

    def noise_floor(self) -> float:
        return self._reference.facts.noise_floor

    def compare(self, number: int, rows: slice, log_probs: Tensor, sequence: forward.Array) -> tuple[Tensor, ...]:
        expected = self._reference.outcomes(number, rows, self._device)
        nll = -torch.from_numpy(self._reference.next_log_probs[number, rows]).to(self._device)
        measured = compact.distances(expected, log_probs)
        agreeing = log_probs.argmax(dim=1) == expected.ids[:, 0]
        return nll, measured.estimate, measured.bound, agreeing, expected.log_tail.double().exp(), measured.tail


class _Source:
    is_exact = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokens: forward.Tokens,
        store: forward.ProfileStore,
        progress: formats.Progress,
        device: torch.device,
    ) -> None:
        self.num_outcomes, _ = compact.num_kept(checkpoint.spec.vocab_size)
        weights = forward.LayerwiseWeights(model.CheckpointWeights(checkpoint, device))
        self._pass = ModelPass(weights, tokens, store, "source", device, with_twin=True)
        self._pass.run("predictions of the source", progress)

    def noise_floor(self) -> float:
        return compact.noise_floor(self._pass)

    def compare(self, number: int, rows: slice, log_probs: Tensor, sequence: forward.Array) -> tuple[Tensor, ...]:
        expected = self._pass.predictions(number, rows)
        outcomes = compact.kept_outcomes(expected, torch.Generator().manual_seed(number))
        measured = compact.distances(outcomes, log_probs)
        agreeing = log_probs.argmax(dim=1) == expected.argmax(dim=1)
        nll, kl = -compact.next_log_probs(expected, sequence, rows), compact.whole_divergence(expected, log_probs)
        return nll, kl, measured.bound, agreeing, outcomes.log_tail.double().exp(), measured.tail


@torch.inference_mode()
def _losses(
    packed: ModelPass, tokens: forward.Tokens, comparison: _Comparison | None, progress: formats.Progress
) -> tuple[Sums, list[Sums]]:
    cost = packed.prediction_cost() * (2 if comparison is not None and comparison.is_exact else 1)
    progress.begin(cost.stage("predictions"))
    nll, compared = [], []
    for number, sequence in enumerate(packed.predicted):
        for rows in packed.pieces():
            log_probs = packed.predictions(number, rows)
            nll.append(-compact.next_log_probs(log_probs, sequence, rows).double())
            if comparison is not None:
                found = comparison.compare(number, rows, log_probs, sequence)
                compared.append(torch.stack([each.double() for each in found]))
        progress.advance(cost.multiplications // len(tokens.sequences), f"sequence {number}")
    progress.end()
    sums = [compact.block_sums(row.cpu().numpy()) for row in torch.cat(compared, dim=1)] if compared else []
    return compact.block_sums(torch.cat(nll).cpu().numpy()), sums


def _source_quality(
    source: str, comparison: _Comparison, nll: Sums, compared: list[Sums], num_tokens: NDArray[np.int64]
) -> quality.SourceQuality:
    source_nll, kl, kl_bound, agreeing, source_tail, pack_tail = compared
    total = int(num_tokens.sum())
    return quality.SourceQuality(
        source=source,
        is_exact=comparison.is_exact,
        num_outcomes=comparison.num_outcomes,
        kl=compact.mean(kl, num_tokens),
        kl_bound=compact.mean(kl_bound, num_tokens),
        noise_floor=comparison.noise_floor(),
        source_perplexity=compact.exponential(compact.mean(source_nll, num_tokens)),
        perplexity_increase=compact.exponential(compact.mean(nll - source_nll, num_tokens), less=1.0),
        agreement=compact.mean(agreeing, num_tokens),
        source_tail=float(source_tail.sum()) / total,
        pack_tail=float(pack_tail.sum()) / total,
    )
