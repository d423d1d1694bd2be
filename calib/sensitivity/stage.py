"""The sensitivity stage: the cost of each matrix at each width, as the KL divergence of the model's predictions.

    forward     some sequences go through the model; the hidden states before each layer stay on disk
    back        from the last layer to the first, gradients of predictions meet the errors of weights (`gradients`):
                a result for each layer
    copies      some of the sequences go through the model with experts rounded, from which the estimates' scale and
                the loss of log-likelihood follow (`effects`)

Estimated KLs add: errors of different matrices, experts and layers are nearly independent.

Formats are compared on one expert of a layer: all formats in the last layer and, with `full`, in every layer. `fast`
compares few formats in the other layers and scales the last layer's results by them.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.forward import Array, experts, layers, shared
from moe_pack.calib.sensitivity import costs, effects, errors
from moe_pack.calib.sensitivity.gradients import (
    Tracked,
    end_gradient,
    expert_gradients,
    half_gradient,
    prediction_gradient,
    router_gradient,
)
from moe_pack.calib.sensitivity.rotated import RotatedExperts
from moe_pack.formats import MATRICES
from moe_pack.formats.base import commands
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.runtime.model import Weights, embed, run_expert

_MOST_TOKENS, _LEAST_TOKENS = {"fast": 2048, "full": 4096}, 512
_TRIED_TOKENS = 512
_JUDGED_TOKENS = 512  # of an expert, to judge calibrated formats on
_DENSE_TOKENS = 512  # to measure dense matrices on
_HEAD_TOKENS = 256  # to judge a rounded head on
_SHRUNK_TOKENS = 8  # of its layer's average that an expert's own tokens are mixed with
Compared = tuple[plans.Quantizer, plans.PartFormat]
Phase = Literal["forward", "back", "copies"]  # of the stage: their multiplications take unlike times


class SensitivityPass:
    """Runs the stage layer by layer. A killed pass goes on in `folder`.

    Args:    ids: int64 [N, S], all sequences of the profile; the pass uses as many of the first as it needs.
             thresholds: returns, for a MoE layer index, quantiles of abs(a), float32 [E, kinds, sparsities].
             kept: the inputs of experts to calibrate on; None if none are kept.
             folder: for hidden states and gradients.
             stored: returns the losses of a layer that `back` returned; needed unless formats are compared in all.
             rotation: of the layers whose experts are measured in rotated coordinates; None if there are none.
             results: of experts and sequences; shared, if several parts run the pass in `folder`.
    """

    def __init__(
        self,
        weights: layers.LayerwiseWeights,
        ids: Tensor,
        level: effects.Level,
        thresholds: Callable[[int], Array],
        folder: Path,
        device: torch.device,
        kept: experts.KeptInputs | None = None,
        stored: Callable[[int], effects.LayerLosses] | None = None,
        rotation: RotationVectors | None = None,
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        spec = weights.spec
        self._results = results
        self.weights = weights
        self._vectors = rotation
        self.stored_experts = RotatedExperts(weights, rotation, device)
        self.spec = spec
        self.kept = kept
        self._stored = stored
        self.level: effects.Level = level
        self.thresholds = thresholds
        self.device = device
        self._tracked = Tracked(weights)
        given = layers.Sequences.of(spec, ids)
        self.ids, S = given.ids, given.length
        wanted = min(max(given.ids.numel() // 4, _LEAST_TOKENS), _MOST_TOKENS[level])
        self.num_sequences = min(len(ids), -(-wanted // S))
        self.num_copied = -(-self.num_sequences // 2)
        self._given = given
        self._folder = folder
        folder.mkdir(exist_ok=True)
        first, answer = given.begun(lambda ids, number: embed(ids[number], weights))
        self.states = layers.LayerStates(
            weights,
            first,
            self.num_sequences,
            S,
            folder / "forward",
            device,
            answer=answer,
            keeps_all=True,
            ids=lambda number: given.ids[number],
            results=results,
        )
        self.next_back, self._above, self._other = self._resume()

    @property
    def num_tokens(self) -> int:
        """The number of tokens that losses are measured on."""
        return self.num_sequences * self.states.sequence_length

    @property
    def first_decoder_layer(self) -> int:
        """The layer at which the decoder begins: 0 without an encoder."""
        return 0 if self.spec.encoder is None else self.spec.encoder.num_layers

    def cost(self) -> dict[str, costs.Cost]:
        """Returns the estimated cost of what is left of the pass, by phase."""
        spec, trial, S = self.spec, costs.Trial(self.weights, self.states), self.states.sequence_length
        router, every = spec.router, errors.calibrated_formats(spec.hidden_size)
        choices = self.num_tokens * router.num_experts_per_tok
        halves = {kind: trial.half(kind) for kind in costs.kinds_of_layers(spec)}
        halves_back = {kind: trial.half_back(kind) for kind in costs.kinds_of_layers(spec)}
        plain = trial.plain(_TRIED_TOKENS) * (1 / _TRIED_TOKENS)
        stored = costs.Trial(self.stored_experts, self.states)
        back = stored.back(choices / router.num_experts) * router.num_experts
        anchored = trial.compared(self._anchors)
        compared = anchored * (len(errors.compared_formats(spec.hidden_size)) / len(self._anchors))
        if self.kept is not None:
            judged = min(_JUDGED_TOKENS, choices // router.num_experts)
            one = trial.calibrated(judged, (errors.calibrated_anchor(every),))
            anchored, compared = anchored + one, compared + one * len(errors.measured_formats(every))
        copied, num_copies = self.num_copied * S, min(effects.MOST_COPIES, len(spec.moe_layers))
        rounded = (
            trial.rounded(errors.RoundedExperts(self.stored_experts, errors.WIDTHS[0], errors.plainly_rounded))
            * router.num_experts
        )
        forward, on_way_back, of_copies = costs.Cost(), costs.Cost(), trial.predicted(copied) * (1 + num_copies)
        if self._above is None:
            on_way_back += trial.predicted_back(self.num_tokens)
        for layer in range(spec.num_hidden_layers):
            half, is_moe = halves[costs.kind_of(spec, layer)], layer in spec.moe_layers
            if layer >= self.states.next_layer:
                forward += half * self.num_sequences + plain * (choices * is_moe)
            if layer <= self.next_back:
                tried = self._num_dense_sequences(layer) * (len(errors.roundable_roles(spec, layer)) + 1)
                on_way_back += half * (self.num_sequences + tried)
                on_way_back += halves_back[costs.kind_of(spec, layer)] * self.num_sequences
                if spec.residual is not None:
                    on_way_back += plain * (choices * is_moe)  # experts run again
                if is_moe:
                    own = self._reference(spec.moe_layers.index(layer)) is None
                    on_way_back += back + (compared if own else anchored)
            begun = self._num_begun(layer, num_copies)
            of_copies += half * (self.num_copied * begun)
            if is_moe:
                of_copies += plain * (copied * begun * router.num_experts_per_tok) + rounded
        return {"forward": forward, "back": on_way_back, "copies": of_copies}

    def _num_begun(self, layer: int, num_copies: int) -> int:
        """Returns how many of the copies run through a layer."""
        L = len(self.spec.moe_layers)
        firsts = [0, *(self.spec.moe_layers[L * place // num_copies] for place in range(1, num_copies))]
        return num_copies if self._all_begin_first else sum(first <= layer for first in firsts)

    @property
    def _all_begin_first(self) -> bool:
        """Whether all copies begin with the text, because each has its own of what later layers share.

        That is what the encoder read, or which positions a layer chose.
        """
        return self.spec.encoder is not None or self.states.shares_choices

    @property
    def _anchors(self) -> tuple[Compared, ...]:
        """The formats by which a layer's others are scaled, by width."""
        return tuple(("hqq", plans.part_format(width, errors.GROUP)) for width in errors.WIDTHS)

    # --- forward

    @torch.inference_mode()
    def forward(self, progress: commands.Progress = commands.NO_PROGRESS) -> None:
        """Takes all sequences through the next layer."""
        states, layer = self.states, self.states.next_layer
        tokens = states.enter(layer)
        progress.advance(self._half(layer) * len(tokens.x), f"layer {layer}", "forward")
        if layer in self.spec.moe_layers:
            self._run_experts(tokens, layer, progress, "forward")
        states.leave(layer, tokens)

    def _run_experts(self, tokens: layers.LayerTokens, layer: int, progress: commands.Progress, phase: Phase) -> None:
        """Adds the outputs of a layer's experts."""
        layer_idx, E = self.spec.moe_layers.index(layer), self.spec.router.num_experts

        def work(expert: int) -> shared.Arrays:
            token_idx, _ = tokens.of_expert(expert)
            return tuple(self._outputs(tokens, token_idx, self.weights, layer_idx, expert))

        # One worker: torch's threads run the expert's products.
        for expert, outputs in enumerate(self._results.in_order("experts", work, range(E), 1)):
            token_idx, weights = tokens.of_expert(expert)
            self._add(self.states, tokens, token_idx, weights, outputs)
            progress.advance(
                costs.expert_multiplications(self.spec) * len(token_idx), f"layer {layer} expert {expert}", phase
            )

    def _outputs(
        self,
        tokens: layers.LayerTokens,
        token_idx: Tensor,
        model: layers.LayerwiseWeights | errors.RoundedExperts,
        layer_idx: int,
        expert: int,
    ) -> Iterator[Tensor]:
        """Yields an expert's outputs for some tokens in chunks, float32 [n, d]."""
        rotation = quantize.LayerRotation(model.rotation(layer_idx))
        for start in range(0, len(token_idx), experts.CHUNK_TOKENS):
            x = rotation.inputs(tokens.expert_inputs(token_idx[start : start + experts.CHUNK_TOKENS]).to(self.device))
            output = run_expert(x, model.expert(layer_idx, expert), self.spec.expert_function(layer_idx), "none", 0.0)
            yield rotation.outputs(output)

    def _add(
        self,
        states: layers.LayerStates,
        tokens: layers.LayerTokens,
        token_idx: Tensor,
        weights: Tensor,
        outputs: shared.Arrays,
    ) -> None:
        """Adds the chunks of an expert's outputs."""
        for number, output in enumerate(outputs):
            chunk = slice(number * experts.CHUNK_TOKENS, (number + 1) * experts.CHUNK_TOKENS)
            states.add(tokens, token_idx[chunk], weights[chunk], output)

    # --- back

    @torch.inference_mode()
    def back(self, progress: commands.Progress = commands.NO_PROGRESS) -> effects.LayerLosses:
        """Takes gradients back through layer `next_back` and measures it; after it comes `leave_back`."""
        spec, states, layer = self.spec, self.states, self.next_back
        if self._above is None:
            self._above = self._prediction_gradients(progress)
        tokens, above = states.inside(layer, self.num_sequences), self._above
        num_tokens = len(tokens.x)
        progress.advance(self._half(layer) * num_tokens, f"layer {layer}", "back")
        of_x, of_inputs, of_outputs = self._end_back(layer, tokens, above, progress)
        below = torch.zeros_like(tokens.inputs)  # with respect to `inputs`, through experts
        of_experts = (torch.zeros(0),) * 5
        if layer in spec.moe_layers:
            of_experts = self._experts_back(layer, tokens, of_outputs, below, progress)
        dense = self._dense_losses(layer, above, below, tokens.outputs, progress)
        if of_inputs is not None:
            below += of_inputs
        S, gradients = states.sequence_length, torch.empty_like(above)

        def work(number: int) -> shared.Arrays:
            rows = slice(number * S, (number + 1) * S)
            gradient, of_text = half_gradient(
                states,
                layer,
                states.at(layer, number),
                states.text(layer, number),
                self._tracked,
                (of_x[rows], below[rows]),
                states.chosen(layer, number),
                states.ids(number),
            )
            return tuple(each.cpu() for each in (gradient, of_text) if each is not None)

        for number, (gradient, *of_text) in enumerate(
            self._results.in_order("half-gradients", work, range(self.num_sequences), 1)
        ):
            rows = slice(number * S, (number + 1) * S)
            gradients[rows] = gradient
            for each in of_text:
                self._other[rows] += each
        progress.advance(2 * self._half(layer) * num_tokens, f"layer {layer}", "back")
        # Below the decoder's first layer comes the encoder's last one.
        if layer == self.first_decoder_layer > 0:
            gradients, self._other = self._other, gradients
        self._above = gradients
        return effects.LayerLosses(dense, *(losses.numpy() for losses in of_experts))

    def _end_back(
        self, layer: int, tokens: layers.LayerTokens, above: Tensor, progress: commands.Progress
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the gradients with respect to `x` and `inputs` of a layer's tokens, and to its experts' outputs.

        That of `inputs` is through shared and dense experts, None where they are in `x`. Where outputs do not simply
        add to `x`, the layer's experts run again.
        """
        if tokens.outputs is None:
            return above, None, above * self.spec.residual_multiplier
        if layer in self.spec.moe_layers:
            self._run_experts(tokens, layer, progress, "back")
        S, all_outputs = self.states.sequence_length, tokens.outputs
        found = tuple(torch.empty_like(each) for each in (tokens.x, tokens.inputs, all_outputs))

        def work(number: int) -> shared.Arrays:
            rows = slice(number * S, (number + 1) * S)
            half = tokens.x[rows], tokens.inputs[rows]
            pieces = end_gradient(self.states, layer, half, all_outputs[rows], self._tracked, above[rows])
            return tuple(piece.cpu() for piece in pieces)

        numbers = range(len(tokens.x) // S)
        for number, pieces in enumerate(self._results.in_order("end-gradients", work, numbers, 1)):
            for whole, piece in zip(found, pieces, strict=True):
                whole[number * S : (number + 1) * S] = piece
        return found[0], found[1], found[2]

    def leave_back(self) -> None:
        """Ends the layer that was measured last; the caller has stored the result of `back`."""
        assert self._above is not None, "a layer was measured"
        gradients = (self._above, self._other)
        path, _ = layers.store_states(self._folder, f"gradient-{self.next_back:03d}", gradients, self._results)
        kept = {path}
        if self._results.is_shared:  # other parts may still read it
            kept |= set(self._folder.glob(f"gradient-{self.next_back + 1:03d}-*"))
        for other in self._folder.glob("gradient-*"):
            if other not in kept:
                other.unlink(missing_ok=True)
        self.next_back -= 1

    def _resume(self) -> tuple[int, Tensor | None, Tensor]:
        """Returns the next layer on the way back, the gradient above it if it is known, and the other stack's."""
        width, found = self.spec.stream_width, layers.whole_states(self._folder, "gradient")
        has_encoder = self.spec.encoder is not None
        if not found:
            return self.spec.num_hidden_layers - 1, None, torch.zeros(self.num_tokens * has_encoder, width)
        layer = min(found)
        values = torch.from_numpy(np.fromfile(found[layer], np.float32)).view(-1, width)
        return layer - 1, values[: self.num_tokens], values[self.num_tokens :]

    def _prediction_gradients(self, progress: commands.Progress) -> Tensor:
        pieces, last = list[Tensor](), self.spec.num_hidden_layers

        def work(number: int) -> shared.Arrays:
            generator, hidden = torch.Generator().manual_seed(number), self.states.at(last, number)
            return tuple(
                prediction_gradient(hidden[rows].to(self.device), self._tracked, generator).cpu()
                for rows in effects.head_pieces(0, len(hidden), self.spec.vocab_size)
            )

        S = self.states.sequence_length
        for found in self._results.in_order("predictions", work, range(self.num_sequences), 1):
            pieces.extend(found)
            progress.advance(2 * S * self.spec.hidden_size * self.spec.vocab_size, "predictions", "back")
        return torch.cat(pieces)

    def _experts_back(
        self, layer: int, tokens: layers.LayerTokens, above: Tensor, below: Tensor, progress: commands.Progress
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Adds the experts' gradients to `below`; returns `quantized`, `repeated`, `sparse`, `ratios`, `calibrated`.

        Args:    above: with respect to the weighted sum of their outputs, float32 [T, d].
        """
        spec, layer_idx = self.spec, self.spec.moe_layers.index(layer)
        E, function = spec.router.num_experts, spec.expert_function(layer_idx)
        thresholds = torch.from_numpy(self.thresholds(layer_idx)).to(self.device)
        by_weight = torch.zeros_like(tokens.weights)
        rotation = self._rotation(layer_idx)
        num_tokens = torch.tensor([len(tokens.of_expert(expert)[0]) for expert in range(E)])
        popular, moments = int(num_tokens.argmax()), tuple[Tensor | None, ...]()

        def work(expert: int) -> shared.Arrays:
            token_idx, rank = torch.where((tokens.experts == expert) & (tokens.weights != 0))
            found = expert_gradients(
                self.stored_experts.expert(layer_idx, expert),
                function,
                rotation.inputs(tokens.expert_inputs(token_idx).to(self.device)),
                tokens.weights[token_idx, rank].to(self.device),
                rotation.output_gradients(above[token_idx].to(self.device)),
                thresholds[expert],
            )
            of_inputs = rotation.input_gradients(found.inputs).cpu()
            losses = (found.weights, found.quantized, found.repeated, found.sparse)
            # Moments are of one expert. A matrix that it lacks has none, and [0] stands for it.
            of_one = (torch.zeros(0) if each is None else each for each in found.moments if expert == popular)
            return token_idx, rank, of_inputs, *(each.cpu() for each in (*losses, *of_one))

        quantized, repeated = torch.zeros(E, len(MATRICES), len(errors.WIDTHS)), torch.zeros(E, len(errors.WIDTHS))
        sparse = torch.zeros(E, *thresholds.shape[1:])
        all_found = self._results.in_order("expert-gradients", work, range(E), layers.num_workers(spec))
        for expert, (token_idx, rank, of_inputs, of_weights, *found) in enumerate(all_found):
            if tokens.scales is not None:  # the router's weight multiplies the input, not the output
                of_weights = (of_inputs * tokens.inputs[token_idx]).sum(dim=1)
                of_inputs = of_inputs * tokens.scales[token_idx, None]
            if tokens.own_norm is not None:
                of_inputs = of_inputs * tokens.own_norm
            below.index_add_(0, token_idx, of_inputs)
            by_weight[token_idx, rank] = of_weights
            quantized[expert], repeated[expert], sparse[expert] = found[:3]
            if expert == popular:
                moments = tuple(each.to(self.device) if len(each) else None for each in found[3:])
            done = 2 * costs.expert_multiplications(spec) * len(token_idx)
            progress.advance(done, f"layer {layer} expert {expert}", "back")
        below += router_gradient(tokens, by_weight.to(self.device), self._tracked, layer).cpu()
        compared = (
            lambda: self._ratios(layer_idx, popular, moments),
            lambda: self._calibrated(layer_idx, popular, tokens, above),
        )
        (ratios,), (calibrated,) = self._results.in_order("formats", lambda number: (compared[number](),), range(2), 1)
        solved = torch.from_numpy(errors.ratios_of_widths(ratios.numpy(), spec.hidden_size))
        quantized, repeated, sparse = (
            _shrunk(losses, num_tokens) / self.num_tokens for losses in (quantized, repeated, sparse)
        )
        down = MATRICES.index("down")
        return quantized * solved, repeated * solved[down], sparse, ratios, calibrated

    def _rotation(self, layer_idx: int) -> quantize.LayerRotation:
        return quantize.LayerRotation(self.stored_experts.rotation(layer_idx))

    def _reference(self, layer_idx: int) -> int | None:
        """Returns the MoE layer whose comparison of formats is scaled to this one; None: it has its own.

        Layers are measured from the last to the first.
        """
        last = len(self.spec.moe_layers) - 1
        return None if layer_idx == last or self.level == "full" else last

    def _stored_losses(self, layer_idx: int) -> effects.LayerLosses:
        assert self._stored is not None, "the caller gives the losses it has stored"
        return self._stored(self.spec.moe_layers[layer_idx])

    def _ratios(self, layer_idx: int, expert: int, moments: tuple[Tensor | None, ...]) -> Tensor:
        every, reference = errors.compared_formats(self.spec.hidden_size), self._reference(layer_idx)
        number = max(len(of_matrix) for of_matrix in moments if of_matrix is not None)
        block = errors.joined(errors.first_neurons(self.stored_experts.expert(layer_idx, expert), number))
        matrices = block.gate, block.up, block.down
        if reference is None:
            return errors.format_ratios(matrices, moments, every)
        table = torch.from_numpy(self._stored_losses(reference).ratios)
        found = errors.format_ratios(matrices, moments, self._anchors)
        of_width = torch.tensor([errors.WIDTHS.index(part.width) for _, part in every])
        base = table[:, [every.index(anchor) for anchor in self._anchors]]
        return table * (found / base)[:, of_width]

    def _calibrated(self, layer_idx: int, expert: int, tokens: layers.LayerTokens, above: Tensor) -> Tensor:
        """Returns `calibrated`, judged on other tokens than those it calibrates on; [0] without inputs.

        An error counts at a token as much as its gradient is large. So it does in the estimates that this multiplies,
        and a token with a massive hidden state counts next to nothing.
        """
        if self.kept is None:
            return torch.zeros(0)
        every, reference = errors.calibrated_formats(self.spec.hidden_size), self._reference(layer_idx)
        num_judged, first_kept = self.kept.split(self.num_tokens)
        token_idx, weights = tokens.of_expert(expert)
        judged = (token_idx < num_judged).nonzero()[:_JUDGED_TOKENS, 0]
        rotation = self._rotation(layer_idx)
        x = rotation.inputs(tokens.expert_inputs(token_idx[judged]).to(self.device))
        with self.kept.open(layer_idx) as inputs:
            calibration = inputs.of_expert(expert, first_kept)
        on_cpu = quantize.LayerRotation.of(self._vectors, layer_idx)
        calibration = replace(calibration, inputs=on_cpu.inputs(calibration.inputs))
        model_expert = self.stored_experts.expert(layer_idx, expert)
        gradients = above[token_idx[judged]].square().mean(dim=1).sqrt()
        function, weights = self.spec.expert_function(layer_idx), (weights[judged] * gradients).to(x.device)
        anchor = errors.calibrated_anchor(every)
        formats = every if reference is None else (anchor,)
        found = errors.calibrated_ratios(model_expert, function, x, weights, calibration, formats).cpu()
        if reference is None:
            return found
        table = torch.from_numpy(self._stored_losses(reference).calibrated)
        scale = found / table[:, every.index(anchor), None]
        return table * torch.where(torch.tensor([quantize.needs_inputs(part) for part in every]), scale, 1.0)

    def _dense_losses(
        self, layer: int, above: Tensor, below: Tensor, outputs: Tensor | None, progress: commands.Progress
    ) -> Array:
        """Returns `dense` of the layer, measured at the least width; errors fall as the square of the step.

        Args:    above: the gradient after the layer.   below: with respect to `inputs`, through its experts.
                 outputs: as in `LayerTokens`.
        """
        roles, states, S = errors.roundable_roles(self.spec, layer), self.states, self.states.sequence_length
        number = self._num_dense_sequences(layer)
        losses = np.zeros((len(roles), len(effects.DENSE_WIDTHS)), np.float32)
        least = min(effects.DENSE_WIDTHS)
        steps = np.asarray([errors.squared_step(width) / errors.squared_step(least) for width in effects.DENSE_WIDTHS])
        originals = dict[int, tuple[Tensor, Tensor]]()  # of the sequence before

        def work(item: int) -> shared.Arrays:
            sequence, idx = divmod(item, len(roles))
            rows = slice(sequence * S, (sequence + 1) * S)
            hidden, text = states.at(layer, sequence), states.text(layer, sequence)
            given = None if outputs is None else outputs[rows]

            def ended(
                weights: Weights,
            ) -> tuple[Tensor, Tensor]:
                chosen, ids = states.chosen(layer, sequence), states.ids(sequence)
                half = states.half_of(layer, hidden, text, weights, chosen, ids)
                return states.after(layer, half, given, weights), half[1]

            if sequence not in originals:
                originals.clear()
                originals[sequence] = ended(self.weights)
            changed = ended(errors.RoundedDense(self.weights, (roles[idx],), least, errors.plainly_rounded))
            moved = sum(
                ((now - before).cpu() * gradient[rows]).sum(dim=1)
                for now, before, gradient in zip(changed, originals[sequence], (above, below), strict=True)
            )
            assert isinstance(moved, Tensor), "a sum of two"
            return (moved.square().mean()[None],)

        found = self._results.in_order("dense", work, range(number * len(roles)), 1)
        for item, (mean,) in enumerate(found):
            idx = item % len(roles)
            losses[idx] += float(mean) / 2 / number * steps
            done = 1 + (idx == 0)  # the first with the original
            progress.advance(self._half(layer) * S * done, f"layer {layer}", "back")
        return losses

    def _num_dense_sequences(self, layer: int) -> int:
        """Returns on how many sequences a layer's dense matrices are measured."""
        wanted = -(-_DENSE_TOKENS // self.states.sequence_length) if errors.roundable_roles(self.spec, layer) else 0
        return min(self.num_sequences, wanted)

    # --- copies

    @torch.inference_mode()
    def divergences(
        self, losses: list[effects.LayerLosses], progress: commands.Progress = commands.NO_PROGRESS
    ) -> effects.Divergences:
        """Returns what copies diverge by; `losses` are those of the MoE layers. The way back is done."""
        copies, original = effects.copies_of(losses, self.spec.hidden_size), self.states
        states, S = self._copied_states(copies), self.states.sequence_length
        while states.next_layer < self.spec.num_hidden_layers:
            layer = states.next_layer
            with self._results.step(f"copies-{layer:03d}"):
                tokens = states.enter(layer)
                progress.advance(self._half(layer) * len(tokens.x), f"layer {layer}", "copies")
                if layer in self.spec.moe_layers:
                    self._run_copies(states, tokens, copies, layer, progress)
                states.leave(layer, tokens, self._begun(copies, layer + 1))
        sums = np.zeros((2, len(copies)))  # of KL, of log-likelihood lost
        last = self.spec.num_hidden_layers

        def work(number: int) -> shared.Arrays:
            base, next_ids = original.at(last, number), self.ids[number, 1:]
            changed = [states.at(last, copy * self.num_copied + number) for copy in range(len(copies))]
            pieces = []
            for rows in effects.head_pieces(0, S, self.spec.vocab_size):
                expected = effects.log_probabilities(base[rows], self.weights, self.device)
                measured = np.zeros((2, len(copies)))
                for copy, hidden in enumerate(changed):
                    found = effects.log_probabilities(hidden[rows], self.weights, self.device)
                    measured[0, copy] = effects.divergence(expected, found)
                    measured[1, copy] = effects.likelihood_lost(expected, found, next_ids[rows])
                pieces.append(torch.from_numpy(measured))
            return tuple(pieces)

        def change_dense(number: int) -> shared.Arrays:
            kls = self._head_divergences() if number else self._embedding_divergences()
            return (torch.from_numpy(kls),)

        with self._results.step("divergences"):
            for pieces in self._results.in_order("predictions", work, range(self.num_copied), 1):
                for piece in pieces:
                    sums += piece.numpy()
                products = S * (1 + len(copies)) * self.spec.hidden_size * self.spec.vocab_size
                progress.advance(products, "predictions", "copies")
            (embedding,), (head,) = self._results.in_order("dense", change_dense, range(2), 1)
        states.close()
        num_judged = self.num_copied * (S - 1)  # the last tokens have none after them
        kls, nlls = sums[0] / (self.num_copied * S), sums[1] / max(num_judged, 1)
        return effects.Divergences(
            kls.astype(np.float32), nlls.astype(np.float32), num_judged, embedding.numpy(), head.numpy()
        )

    def close(self) -> None:
        """Removes the folder, unless other parts may still read in it; the pass is done."""
        self.states.close()
        if not self._results.is_shared:
            shutil.rmtree(self._folder)

    def _copied_states(self, copies: tuple[effects.Copy, ...]) -> layers.LayerStates:
        """Returns the states of the copies that begin with the text; the others begin with their first layer."""
        number = self.num_copied

        def embedded(ids: Tensor, place: int) -> Tensor:
            return embed(ids[place % number], self.weights)

        first, answer = self._given.begun(embedded)
        begun = number * (len(copies) if self._all_begin_first else 1)
        S, folder = self.states.sequence_length, self._folder / "copies"
        ids = self._given.ids
        return layers.LayerStates(
            self.weights,
            first,
            begun,
            S,
            folder,
            self.device,
            answer=answer,
            ids=lambda place: ids[place % number],
            results=self._results,
        )

    def _begun(self, copies: tuple[effects.Copy, ...], layer: int) -> Iterator[Tensor]:
        """Yields the hidden states of the copies that begin before this layer."""
        if not self._all_begin_first:
            for copy in copies[1:]:
                if self.spec.moe_layers[copy.layers[0]] == layer:
                    yield torch.cat([self.states.at(layer, number) for number in range(self.num_copied)])

    def _run_copies(
        self,
        states: layers.LayerStates,
        tokens: layers.LayerTokens,
        copies: tuple[effects.Copy, ...],
        layer: int,
        progress: commands.Progress,
    ) -> None:
        layer_idx = self.spec.moe_layers.index(layer)
        copy_tokens = self.num_copied * states.sequence_length
        (rounded_idx,) = (idx for idx, copy in enumerate(copies) if layer_idx in copy.layers)
        rounded = errors.RoundedExperts(self.stored_experts, copies[rounded_idx].width, errors.plainly_rounded)

        def work(expert: int) -> shared.Arrays:
            token_idx, _ = tokens.of_expert(expert)
            changes = token_idx // copy_tokens == rounded_idx
            changed = self._outputs(tokens, token_idx[changes], rounded, layer_idx, expert)
            return *changed, *self._outputs(tokens, token_idx[~changes], self.weights, layer_idx, expert)

        E = self.spec.router.num_experts
        for expert, outputs in enumerate(self._results.in_order("experts", work, range(E), 1)):
            token_idx, weights = tokens.of_expert(expert)
            changes = token_idx // copy_tokens == rounded_idx
            num_changed = -(-int(changes.sum()) // experts.CHUNK_TOKENS)
            for chosen, of_these in ((changes, outputs[:num_changed]), (~changes, outputs[num_changed:])):
                self._add(states, tokens, token_idx[chosen], weights[chosen], of_these)
            progress.advance(
                costs.expert_multiplications(self.spec) * len(token_idx), f"layer {layer} expert {expert}", "copies"
            )

    def _embedding_divergences(self) -> Array:
        """Returns the KL divergences of the embedding at `DENSE_WIDTHS`, to second order; 0 if it cannot be rounded."""
        kls = np.zeros(len(effects.DENSE_WIDTHS), np.float32)
        if "embed" not in errors.roundable_roles(self.spec, None):
            return kls
        assert self._above is not None, "the way back is done"
        S, gradients = self.states.sequence_length, (self._above, self._other)
        for idx, width in enumerate(effects.DENSE_WIDTHS):
            rounded = errors.RoundedDense(self.weights, ("embed",), width, errors.plainly_rounded)
            for ids, gradient in zip(self._given.stacks, gradients[: len(self._given.stacks)], strict=True):
                for number in range(self.num_sequences):
                    change = embed(ids[number], rounded) - embed(ids[number], self.weights)
                    moved = (change.cpu() * gradient[number * S : (number + 1) * S]).sum(dim=1)
                    kls[idx] += float(moved.square().sum()) / 2 / self.num_tokens
        return kls

    def _head_divergences(self) -> Array:
        """Returns the KL divergences with the head at `DENSE_WIDTHS`; 0 if it cannot be rounded.

        A head that is also the embedding is changed as the head only.
        """
        kls = np.zeros(len(effects.DENSE_WIDTHS), np.float32)
        role = "embed" if self.spec.tied_head else "head"
        if role not in errors.roundable_roles(self.spec, None):
            return kls
        hidden = self.states.at(self.spec.num_hidden_layers, 0)[:_HEAD_TOKENS]
        for rows in effects.head_pieces(0, len(hidden), self.spec.vocab_size):
            original = effects.log_probabilities(hidden[rows], self.weights, self.device)
            for idx, width in enumerate(effects.DENSE_WIDTHS):
                rounded = errors.RoundedDense(self.weights, (role,), width, errors.plainly_rounded)
                changed = effects.log_probabilities(hidden[rows], rounded, self.device)
                kls[idx] += effects.divergence(original, changed) / len(hidden)
        return kls

    def _half(self, layer: int) -> int:
        return costs.half_multiplications(self.spec, layer, self.states.sequence_length)


def _shrunk(losses: Tensor, num_tokens: Tensor) -> Tensor:
    """Returns losses [E, ...] of experts with few tokens [E] drawn to what a token of the layer loses on average."""
    average = losses.sum(dim=0) / num_tokens.sum().clamp(min=1)
    num_tokens = num_tokens.view(-1, *(1,) * (losses.dim() - 1))
    share = num_tokens / (num_tokens + _SHRUNK_TOKENS)
    return losses * share + average * num_tokens * (1 - share)
