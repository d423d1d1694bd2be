"""The sensitivity stage: the cost of each matrix at each width, as the KL divergence of the model's predictions.

    forward     some sequences go through the model; the hidden states before each layer stay on disk
    back        from the last layer to the first, gradients of predictions meet the errors of weights (`WayBack`)
    copies      some sequences go through the model with experts rounded (`CopiesPass`), to scale the estimates

Estimated KLs add: errors of different matrices, experts and layers are nearly independent.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.forward import Array, LayerwiseWeights, experts, layers, shared
from moe_pack.calib.sensitivity import comparison, copies, costs, effects, errors, way_back
from moe_pack.calib.sensitivity.rotated import RotatedExperts
from moe_pack.calib.sensitivity.run import Run
from moe_pack.formats.base import commands
from moe_pack.formats.pack.manifests import RotationVectors

_MOST_TOKENS, _LEAST_TOKENS = {"fast": 2048, "full": 4096}, 512
_TRIED_TOKENS = 512


def _nothing_stored(layer: int) -> effects.LayerLosses:
    raise AssertionError("with formats compared in one layer, the caller gives the losses it has stored")


class SensitivityPass:
    """Runs the stage layer by layer. A killed pass goes on in `folder`.

    Args:    ids: int64 [N, S]; the pass uses as many of the first as it needs.   thresholds: returns, for a MoE layer
             index, quantiles of abs(a), float32 [E, kinds, sparsities].   kept: the inputs of experts, if they are
             kept.   folder: for hidden states and gradients.   stored: returns the losses of a layer that `back`
             returned.   rotation: of rotated layers, if there are any.   results: of experts and sequences; shared, if
             several parts run the pass in `folder`.
    """

    def __init__(
        self,
        weights: LayerwiseWeights,
        ids: Tensor,
        level: effects.Level,
        thresholds: Callable[[int], Array],
        folder: Path,
        device: torch.device,
        kept: experts.KeptInputs | None = None,
        stored: Callable[[int], effects.LayerLosses] = _nothing_stored,
        rotation: RotationVectors | None = None,
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        given = layers.Sequences.of(weights.spec, ids)
        wanted = min(max(given.ids.numel() // 4, _LEAST_TOKENS), _MOST_TOKENS[level])
        self.num_sequences = min(len(ids), -(-wanted // given.length))
        self.num_copied = -(-self.num_sequences // 2)
        self.states = layers.LayerStates(
            weights,
            given.embedded(weights),
            self.num_sequences,
            given.length,
            folder / "forward",
            device,
            keeps_all=True,
            results=results,
        )
        stored_experts = RotatedExperts(weights, rotation, device)
        self._run = run = Run(weights, stored_experts, given, self.states, self.num_sequences, device, results)
        self._comparison = comparison.FormatComparison(run, level, stored)
        if kept is not None:
            self._comparison = comparison.CalibratedComparison(run, level, stored, kept, rotation)
        self.way_back = way_back.WayBack(run, folder, thresholds, self._comparison)

    def cost(self) -> dict[str, costs.Cost]:
        """Returns the estimated cost of what is left of the pass, by phase."""
        spec, run = self._run.spec, self._run
        trial, S = costs.Trial(run.weights, self.states), self.states.sequence_length
        router, choices = spec.router, run.num_tokens * spec.router.num_experts_per_tok
        kinds = costs.kinds_of_layers(spec)
        halves = {kind: trial.half(kind) for kind in kinds}
        halves_back = {kind: trial.half_back(kind) for kind in kinds}
        plain = trial.plain(_TRIED_TOKENS) * (1 / _TRIED_TOKENS)
        stored = costs.Trial(run.stored_experts, self.states)
        back = stored.back(choices / router.num_experts) * router.num_experts
        compared, few_compared = self._comparison.costs(trial, choices // router.num_experts)
        copied, num_copies = self.num_copied * S, min(effects.MOST_COPIES, len(spec.moe_layers))
        rounded = errors.RoundedExperts(run.stored_experts, errors.WIDTHS[0], errors.plainly_rounded)
        rounding = trial.rounded(rounded) * router.num_experts
        forward, on_way_back, of_copies = costs.Cost(), costs.Cost(), trial.predicted(copied) * (1 + num_copies)
        if not self.way_back.is_begun:
            on_way_back += trial.predicted_back(run.num_tokens)
        for layer in range(spec.num_hidden_layers):
            kind, is_moe = costs.kind_of(spec, layer), layer in spec.moe_layers
            if layer >= self.states.next_layer:
                forward += halves[kind] * self.num_sequences + plain * (choices * is_moe)
            if layer <= self.way_back.next_layer:
                tried = way_back.num_dense_sequences(run, layer) * (len(errors.roundable_roles(spec, layer)) + 1)
                on_way_back += halves[kind] * (self.num_sequences + tried)
                on_way_back += halves_back[kind] * self.num_sequences
                if spec.residual is not None:
                    on_way_back += plain * (choices * is_moe)  # experts run again
                if is_moe:
                    compares_all = self._comparison.reference(spec.moe_layers.index(layer)) is None
                    on_way_back += back + (compared if compares_all else few_compared)
            begun = self._num_begun(layer, num_copies)
            of_copies += halves[kind] * (self.num_copied * begun)
            if is_moe:
                of_copies += plain * (copied * begun * router.num_experts_per_tok) + rounding
        return {"forward": forward, "back": on_way_back, "copies": of_copies}

    def _num_begun(self, layer: int, num_copies: int) -> int:
        """Returns how many of the copies run through a layer."""
        moe_layers = self._run.spec.moe_layers
        firsts = [0, *(moe_layers[len(moe_layers) * place // num_copies] for place in range(1, num_copies))]
        return num_copies if copies.begin_together(self._run) else sum(first <= layer for first in firsts)

    @torch.inference_mode()
    def forward(self, progress: commands.Progress = commands.NO_PROGRESS) -> None:
        """Takes all sequences through the next layer."""
        states, layer = self.states, self.states.next_layer
        tokens = states.enter(layer)
        progress.advance(self._run.half_multiplications(layer) * len(tokens.x), f"layer {layer}", "forward")
        if layer in self._run.spec.moe_layers:
            self._run.run_experts(tokens, layer, progress, "forward")
        states.leave(layer, tokens)

    @torch.inference_mode()
    def divergences(
        self, losses: list[effects.LayerLosses], progress: commands.Progress = commands.NO_PROGRESS
    ) -> effects.Divergences:
        """Returns what copies diverge by; `losses` are those of the MoE layers. The way back is done."""
        run, S = self._run, self.states.sequence_length
        rounded = effects.copies_of(losses, run.spec.hidden_size)
        copied = copies.CopiesPass(run, rounded, self.num_copied, self._folder / "copies")
        copied.run(progress)

        def change_dense(number: int) -> shared.Arrays:
            kls = copies.head_divergences(run) if number else copies.embedding_divergences(run, self.way_back.gradients)
            return (torch.from_numpy(kls),)

        with run.results.step("divergences"):
            sums = copied.diverged(progress)
            (embedding,), (head,) = run.results.in_order("dense", change_dense, range(2), 1)
        copied.states.close()
        num_judged = self.num_copied * (S - 1)  # the last tokens have none after them
        kls, nlls = sums[0] / (self.num_copied * S), sums[1] / max(num_judged, 1)
        return effects.Divergences(
            kls.astype(np.float32), nlls.astype(np.float32), num_judged, embedding.numpy(), head.numpy()
        )

    def close(self) -> None:
        """Removes the folder, unless other parts may still read in it; the pass is done."""
        self.states.close()
        if not self._run.results.is_shared:
            shutil.rmtree(self._folder)
