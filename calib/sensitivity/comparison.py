"""Compares formats on one expert of a layer; `fast` compares all formats in the last layer alone."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.forward import experts, layers
from moe_pack.calib.sensitivity import costs, effects, errors
from moe_pack.calib.sensitivity.run import Run
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.manifests import RotationVectors

_JUDGED_TOKENS = 512  # of an expert, to judge calibrated formats on
# By width, the formats that are compared in every layer.
_ANCHORS: tuple[tuple[plans.Quantizer, plans.PartFormat], ...] = tuple(
    ("hqq", plans.part_format(width, errors.GROUP)) for width in errors.WIDTHS
)


class FormatComparison:
    """The comparison of formats without inputs of experts; `stored` returns an earlier layer's losses, for `fast`."""

    def __init__(self, run: Run, level: effects.Level, stored: Callable[[int], effects.LayerLosses]) -> None:
        self._run = run
        self._level = level
        self._stored = stored

    def costs(self, trial: costs.Trial, num_tokens: int) -> tuple[costs.Cost, costs.Cost]:
        """Returns the costs of comparing all formats of a layer, and few formats, for an expert of `num_tokens`."""
        few = trial.compared(_ANCHORS)
        return few * (len(errors.compared_formats(self._run.spec.hidden_size)) / len(_ANCHORS)), few

    def reference(self, layer_idx: int) -> int | None:
        """Returns the MoE layer whose comparison is scaled to this one; None if all formats are compared in it."""
        last = len(self._run.spec.moe_layers) - 1
        return None if layer_idx == last or self._level == "full" else last

    def ratios(self, layer_idx: int, expert: int, moments: tuple[Tensor | None, ...]) -> Tensor:
        """Returns `LayerLosses.ratios`, from the moments of an expert (`ExpertGradients`)."""
        every, reference = errors.compared_formats(self._run.spec.hidden_size), self.reference(layer_idx)
        number = max(len(of_matrix) for of_matrix in moments if of_matrix is not None)
        block = errors.joined(errors.first_neurons(self._run.stored_experts.expert(layer_idx, expert), number))
        matrices = block.gate, block.up, block.down
        if reference is None:
            return errors.format_ratios(matrices, moments, every)
        table = torch.from_numpy(self._stored(self._run.spec.moe_layers[reference]).ratios)
        found = errors.format_ratios(matrices, moments, _ANCHORS)
        of_width = torch.tensor([errors.WIDTHS.index(part.width) for _, part in every])
        base = table[:, [every.index(anchor) for anchor in _ANCHORS]]
        return table * (found / base)[:, of_width]

    def calibrated(self, layer_idx: int, expert: int, tokens: layers.LayerTokens, above: Tensor) -> Tensor:
        """Returns `LayerLosses.calibrated`: nothing, [0], without inputs."""
        return torch.zeros(0)


class CalibratedComparison(FormatComparison):
    """The comparison of all formats, with inputs of experts; `vectors` are of rotated layers."""

    def __init__(
        self,
        run: Run,
        level: effects.Level,
        stored: Callable[[int], effects.LayerLosses],
        kept: experts.KeptInputs,
        vectors: RotationVectors | None,
    ) -> None:
        super().__init__(run, level, stored)
        self._kept = kept
        self._vectors = vectors

    def costs(self, trial: costs.Trial, num_tokens: int) -> tuple[costs.Cost, costs.Cost]:
        """Returns the costs with those of calibrated formats."""
        compared, few = super().costs(trial, num_tokens)
        every = errors.calibrated_formats(self._run.spec.hidden_size)
        one = trial.calibrated(min(_JUDGED_TOKENS, num_tokens), (errors.calibrated_anchor(every),))
        return compared + one * len(errors.measured_formats(every)), few + one

    def calibrated(self, layer_idx: int, expert: int, tokens: layers.LayerTokens, above: Tensor) -> Tensor:
        """Returns `LayerLosses.calibrated`, judged on other tokens; an error counts as much as a token's gradient."""
        run, reference = self._run, self.reference(layer_idx)
        every = errors.calibrated_formats(run.spec.hidden_size)
        num_judged, first_kept = self._kept.split(run.num_tokens)
        token_idx, weights = tokens.of_expert(expert)
        judged = (token_idx < num_judged).nonzero()[:_JUDGED_TOKENS, 0]
        rotation = quantize.LayerRotation(run.stored_experts.rotation(layer_idx))
        x = rotation.inputs(tokens.expert_inputs(token_idx[judged]).to(run.device))
        with self._kept.open(layer_idx) as inputs:
            calibration = inputs.of_expert(expert, first_kept)
        on_cpu = quantize.LayerRotation.of(self._vectors, layer_idx)
        calibration = replace(calibration, inputs=on_cpu.inputs(calibration.inputs))
        model_expert = run.stored_experts.expert(layer_idx, expert)
        gradients = above[token_idx[judged]].square().mean(dim=1).sqrt()
        function, weights = run.spec.expert_function(layer_idx), (weights[judged] * gradients).to(x.device)
        anchor = errors.calibrated_anchor(every)
        formats = every if reference is None else (anchor,)
        found = errors.calibrated_ratios(model_expert, function, x, weights, calibration, formats).cpu()
        if reference is None:
            return found
        table = torch.from_numpy(self._stored(run.spec.moe_layers[reference]).calibrated)
        scale = found / table[:, every.index(anchor), None]
        return table * torch.where(torch.tensor([quantize.needs_inputs(part) for part in every]), scale, 1.0)
