"""Thresholds measured on a pack itself, layer by layer; earlier layers run as stored, with their new thresholds.

A threshold is a quantile of abs(a) over an expert's tokens. The last fifth of the text is held out: it shows the
sparsity on other text.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward, sensitivity
from moe_pack.calib.evaluate import model_pass
from moe_pack.calib.forward import num_held_out
from moe_pack.formats.base import json_files
from moe_pack.formats.pack import sidecar
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import model

SIDECAR = "thresholds.json"
_WORK_FOLDER = "thresholds.work"


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """The rule by which thresholds are found; exactly one of the three is given."""

    sparsity: float | None = None  # each expert's quantile of abs(a) at this share (FloE Eq. 6)
    theta: float | None = None  # one threshold for all experts (CORM)
    planned: tuple[tuple[float, ...], ...] | None = None  # a sparsity for each expert, by MoE layer

    def fault(self) -> str | None:
        """Returns what is wrong with the rule, or None."""
        if (self.sparsity, self.theta, self.planned).count(None) != 2:
            return "--sparsity, --theta: give exactly one of the two"
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            return f"--sparsity: found {self.sparsity}, expected a share of at least 0 and less than 1"
        if self.theta is not None and not 0 <= self.theta < 1e30:
            return f"--theta: found {self.theta}, expected at least 0 and less than 1e30"
        wrong = next((s for layer in self.planned or () for s in layer if not 0 <= s < 1), None)
        return None if wrong is None else f"planned sparsity: found {wrong}, expected at least 0 and less than 1"

    def sparsities(self, layer_idx: int, num_experts: int) -> tuple[float, ...]:
        """Returns the sparsity of each of a layer's experts; only without `theta`."""
        assert self.theta is None, "with one threshold for all, no sparsity is given"
        return (self.sparsity or 0.0,) * num_experts if self.planned is None else self.planned[layer_idx]


@dataclass(frozen=True, slots=True)
class MeasuredThresholds:
    """The sidecar `thresholds.json`: the rule, the text, and the sparsity that the thresholds give."""

    rule: ThresholdRule
    text: str
    text_sha256: str
    num_sequences: json_files.Positive
    sequence_length: json_files.Positive
    num_held_out: json_files.Count
    learned: model_pass.RealizedSparsity  # on the tokens from which thresholds were taken
    held_out: model_pass.RealizedSparsity  # on the others


def measure_thresholds(
    pack: formats.Pack,
    tokens: forward.Tokens,
    rule: ThresholdRule,
    progress: formats.Progress = formats.NO_PROGRESS,
    device: torch.device | None = None,
    operations: model.Operations = model.TORCH,
) -> MeasuredThresholds:
    """Measures the thresholds of a pack and rewrites them in place; experts do not change.

    A killed call continues after the last complete layer. If the pack has thresholds by the same rule and text, nothing
    is measured. The open pack keeps its old thresholds.
    Args:    operations: decode rows and multiply large dense matrices.
    Raises:  PlanError for an impossible rule; ConversionError if the folder is in use or cannot be written.
    """
    if fault := rule.fault():
        raise formats.PlanError(fault)
    assert rule.planned is None or list(map(len, rule.planned)) == list(map(len, pack.index.experts)), "of this model"
    forward.check_length(pack.spec, tokens.sequences.shape[1])
    known = sidecar.read_sidecar(pack.folder, SIDECAR, MeasuredThresholds, pack.manifest.root)
    if known is not None and (known.rule, known.text_sha256) == (rule, tokens.sha256):
        return known
    folder, where = pack.folder / _WORK_FOLDER, device or torch.device("cpu")
    thresholds, measured = find_thresholds(pack, tokens, rule, progress, folder, where, operations)
    root = rewrite_thresholds(pack.folder, thresholds)
    sidecar.write_sidecar(pack.folder, SIDECAR, measured, root)
    shutil.rmtree(folder)
    return measured


def find_thresholds(
    pack: formats.Pack,
    tokens: forward.Tokens,
    rule: ThresholdRule,
    progress: formats.Progress,
    folder: Path,
    device: torch.device,
    operations: model.Operations,
) -> tuple[NDArray[np.float32], MeasuredThresholds]:
    """Returns the thresholds [L, E] of a pack and the sparsity that they give; the caller removes `folder`."""
    facts = {"conversion": pack.manifest.conversion, "rule": formats.dump(rule), "text": tokens.sha256}
    with forward.work_store(folder, facts, removes=False) as store:
        run = _Run(pack, tokens, rule, store, progress, device, operations)
        run.run("thresholds", progress)
        return np.stack([layer["thresholds"] for layer in run.counts()]), run.summary()


class _Run(model_pass.ModelPass):
    _runs_of_expert = 2  # for its threshold and for its outputs

    def __init__(
        self,
        pack: formats.Pack,
        tokens: forward.Tokens,
        rule: ThresholdRule,
        store: forward.ProfileStore,
        progress: formats.Progress,
        device: torch.device,
        operations: model.Operations,
    ) -> None:
        weights = forward.LayerwiseWeights(model.StreamedPackWeights(pack, device, operations))
        super().__init__(weights, tokens, store, "thresholds", device)
        self._tokens = tokens
        self._rule = rule
        self._progress = progress
        self._num_held_out = num_held_out(self.num_sequences)
        self._num_learned_tokens = (self.num_sequences - self._num_held_out) * self.sequence_length

    def summary(self) -> MeasuredThresholds:
        layers, f = self.counts(), self._spec.expert.intermediate_size
        learned, held_out = (
            model_pass.realized([(layer["dropped"][:, part], layer["tokens"][:, part]) for layer in layers], f)
            for part in (0, 1)
        )
        num_sequences, S = self._tokens.sequences.shape
        return MeasuredThresholds(
            self._rule, self._tokens.name, self._tokens.sha256, num_sequences, S, self._num_held_out, learned, held_out
        )

    def _layer(self, tokens: forward.LayerTokens, layer: int, progress: formats.Progress) -> dict[str, forward.Array]:
        layer_idx, E = self._spec.moe_layers.index(layer), self._spec.router.num_experts
        thresholds = self._thresholds(tokens, layer_idx)
        counts = [self._run_expert(tokens, layer_idx, expert, float(thresholds[expert])) for expert in range(E)]
        return {
            "thresholds": thresholds,
            "dropped": np.asarray([dropped for dropped, _ in counts], np.int64),
            "tokens": np.asarray([number for _, number in counts], np.int64),
        }

    def _thresholds(self, tokens: forward.LayerTokens, layer_idx: int) -> NDArray[np.float32]:
        """Returns a layer's thresholds, f32 [E]; an expert without tokens gets its layer's quantile."""
        E = self._spec.router.num_experts
        if self._rule.theta is not None:
            return np.full(E, self._rule.theta, np.float32)
        sparsities = self._rule.sparsities(layer_idx, E)
        thresholds, pooled, unreached = np.zeros(E, np.float32), forward.Histogram(), list[int]()
        for expert, sparsity in enumerate(sparsities if any(sparsities) else ()):
            token_idx, _ = tokens.of_expert(expert)
            histogram = self._histogram(tokens, layer_idx, expert, token_idx[token_idx < self._num_learned_tokens])
            pooled.counts += histogram.counts
            thresholds[expert] = _quantile(histogram, sparsity)
            if not histogram.total():
                unreached.append(expert)
        for expert in unreached:
            thresholds[expert] = _quantile(pooled, sparsities[expert])
        return thresholds

    def _histogram(
        self, tokens: forward.LayerTokens, layer_idx: int, expert: int, token_idx: Tensor
    ) -> forward.Histogram:
        histogram, one = forward.Histogram(), sensitivity.expert_multiplications(self._spec)
        for x, _ in forward.input_chunks(tokens, self._weights, layer_idx, token_idx, self._device):
            for block in self._weights.expert(layer_idx, expert).blocks():
                values = model.activations(x, block, self._spec.expert_function(layer_idx))
                histogram.add(values.of(self._weights.selector).abs())
            self._progress.advance(one * len(x), f"layer {self._spec.moe_layers[layer_idx]} expert {expert}")
        return histogram

    def _run_expert(
        self, tokens: forward.LayerTokens, layer_idx: int, expert: int, threshold: float
    ) -> tuple[list[int], list[int]]:
        """Adds an expert's outputs; returns dropped neurons and tokens, each for learned and held-out tokens."""
        token_idx, left = self._counted(tokens, layer_idx, expert, threshold, self._progress)
        held_out = token_idx >= self._num_learned_tokens
        parts = (~held_out, held_out)
        return [int(left[part].sum()) for part in parts], [int(part.sum()) for part in parts]


def _quantile(histogram: forward.Histogram, sparsity: float) -> float:
    """Returns the threshold that drops this share; 0 for a share of 0."""
    return float(histogram.quantiles((sparsity,))[0]) if sparsity else 0.0
