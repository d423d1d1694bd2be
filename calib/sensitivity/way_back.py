"""The way back of the sensitivity stage: gradients of predictions meet the errors of weights, layer by layer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.forward import Array, layers, shared
from moe_pack.calib.sensitivity import costs, effects, errors, gradients
from moe_pack.calib.sensitivity.comparison import FormatComparison
from moe_pack.calib.sensitivity.run import Run
from moe_pack.formats import MATRICES
from moe_pack.formats.base import commands
from moe_pack.runtime.model import Weights

_DENSE_TOKENS = 512  # to measure dense matrices on
_SHRUNK_TOKENS = 8  # of its layer's average that an expert's own tokens are mixed with


class WayBack:
    """Takes gradients back from the last layer to the first; `thresholds` are [E, kinds, sparsities] by MoE layer."""

    def __init__(
        self, run: Run, folder: Path, thresholds: Callable[[int], Array], comparison: FormatComparison
    ) -> None:
        self._run = run
        self._folder = folder
        self._thresholds = thresholds
        self._comparison = comparison
        self._tracked = gradients.Tracked(run.weights)
        spec, found = run.spec, layers.whole_states(folder, "gradient")
        # The layer at which the decoder begins: 0 without an encoder.
        self._decoder_start = 0 if spec.encoder is None else spec.encoder.num_layers
        if found:
            layer = min(found)
            values = torch.from_numpy(np.fromfile(found[layer], np.float32)).view(-1, spec.stream_width)
        else:
            layer = spec.num_hidden_layers
            values = torch.zeros(run.num_tokens * (2 if spec.encoder is not None else 1), spec.stream_width)
        self.next_layer = layer - 1
        # The gradients after the next layer (zeros until it is the last one's turn), and of the other stack.
        self.above, self._other = values[: run.num_tokens], values[run.num_tokens :]

    @property
    def is_begun(self) -> bool:
        """Whether the gradients after the next layer are known."""
        return self.next_layer < self._run.spec.num_hidden_layers - 1

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of each stack after the next layer; at the end, with respect to the embeddings."""
        return (self.above, self._other)[: len(self._run.given.stacks)]

    @torch.inference_mode()
    def measure(self, progress: commands.Progress = commands.NO_PROGRESS) -> effects.LayerLosses:
        """Takes gradients back through the next layer and measures it; after it comes `leave`."""
        run, states, layer = self._run, self._run.states, self.next_layer
        if not self.is_begun:
            self.above = self.prediction_gradients(progress)
        tokens, above = states.inside(layer, run.num_sequences), self.above
        half = run.half_multiplications(layer) * len(tokens.x)
        progress.advance(half, f"layer {layer}", "back")
        of_x, of_inputs, of_outputs = self._end_back(layer, tokens, progress)
        below = torch.zeros_like(tokens.inputs)  # with respect to `inputs`, through experts
        of_experts: tuple[Tensor, ...] = (torch.zeros(0),) * 5
        if layer in run.spec.moe_layers:
            of_experts = self._experts_back(layer, tokens, of_outputs, below, progress)
        of_dense = dense_losses(run, layer, above, below, tokens.outputs, progress)
        if of_inputs is not None:
            below += of_inputs
        self._half_back(layer, of_x, below)
        progress.advance(2 * half, f"layer {layer}", "back")
        return effects.LayerLosses(of_dense, *(losses.numpy() for losses in of_experts))

    def leave(self) -> None:
        """Ends the layer that was measured last; the caller has stored the result of `measure`."""
        found, results = (self.above, self._other), self._run.results
        path, _ = layers.store_states(self._folder, f"gradient-{self.next_layer:03d}", found, results)
        kept = {path}
        if results.is_shared:  # other parts may still read it
            kept |= set(self._folder.glob(f"gradient-{self.next_layer + 1:03d}-*"))
        for other in self._folder.glob("gradient-*"):
            if other not in kept:
                other.unlink(missing_ok=True)
        self.next_layer -= 1

    def prediction_gradients(self, progress: commands.Progress) -> Tensor:
        """Returns the gradients of predictions with respect to the last hidden states, float32 [T, w]."""
        run, pieces, last = self._run, list[Tensor](), self._run.spec.num_hidden_layers

        def work(number: int) -> shared.Arrays:
            generator, hidden = torch.Generator().manual_seed(number), run.states.at(last, number)
            return tuple(
                gradients.prediction_gradient(hidden[rows].to(run.device), self._tracked, generator).cpu()
                for rows in effects.head_pieces(0, len(hidden), run.spec.vocab_size)
            )

        S = run.states.sequence_length
        for found in run.results.in_order("predictions", work, range(run.num_sequences), 1):
            pieces.extend(found)
            progress.advance(2 * S * run.spec.hidden_size * run.spec.vocab_size, "predictions", "back")
        return torch.cat(pieces)

    def _end_back(
        self, layer: int, tokens: layers.LayerTokens, progress: commands.Progress
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the gradients by `x`, `inputs` (None if they are in `x`) and the outputs of a layer's experts."""
        run, above = self._run, self.above
        if tokens.outputs is None:
            return above, None, above * run.spec.residual_multiplier
        if layer in run.spec.moe_layers:
            run.run_experts(tokens, layer, progress, "back")
        S, all_outputs = run.states.sequence_length, tokens.outputs
        found = tuple(torch.empty_like(each) for each in (tokens.x, tokens.inputs, all_outputs))

        def work(number: int) -> shared.Arrays:
            rows = slice(number * S, (number + 1) * S)
            half = tokens.x[rows], tokens.inputs[rows]
            pieces = gradients.end_gradient(run.states, layer, half, all_outputs[rows], self._tracked, above[rows])
            return tuple(piece.cpu() for piece in pieces)

        numbers = range(len(tokens.x) // S)
        for number, pieces in enumerate(run.results.in_order("end-gradients", work, numbers, 1)):
            for whole, piece in zip(found, pieces, strict=True):
                whole[number * S : (number + 1) * S] = piece
        return found[0], found[1], found[2]

    def _half_back(self, layer: int, of_x: Tensor, of_inputs: Tensor) -> None:
        run, states, S = self._run, self._run.states, self._run.states.sequence_length
        below = torch.empty_like(self.above)

        def work(number: int) -> shared.Arrays:
            rows = slice(number * S, (number + 1) * S)
            gradient, of_text = gradients.half_gradient(
                states,
                layer,
                states.at(layer, number),
                self._tracked,
                (of_x[rows], of_inputs[rows]),
                states.context(layer, number),
            )
            return tuple(each.cpu() for each in (gradient, of_text) if each is not None)

        found = run.results.in_order("half-gradients", work, range(run.num_sequences), 1)
        for number, (gradient, *of_text) in enumerate(found):
            rows = slice(number * S, (number + 1) * S)
            below[rows] = gradient
            for each in of_text:
                self._other[rows] += each
        # Below the decoder's first layer comes the encoder's last one.
        if layer == self._decoder_start > 0:
            below, self._other = self._other, below
        self.above = below

    def _experts_back(
        self, layer: int, tokens: layers.LayerTokens, above: Tensor, below: Tensor, progress: commands.Progress
    ) -> tuple[Tensor, ...]:
        """Adds the experts' gradients to `below`; returns `quantized`, `repeated`, `sparse`, `ratios`, `calibrated`."""
        run, spec = self._run, self._run.spec
        layer_idx, E = spec.moe_layers.index(layer), spec.router.num_experts
        num_tokens = torch.tensor([len(tokens.of_expert(expert)[0]) for expert in range(E)])
        popular, moments = int(num_tokens.argmax()), tuple[Tensor | None, ...]()
        by_weight = torch.zeros_like(tokens.weights)
        quantized, repeated = torch.zeros(E, len(MATRICES), len(errors.WIDTHS)), torch.zeros(E, len(errors.WIDTHS))
        work = self._expert_work(layer_idx, tokens, above, popular)
        sparse = list[Tensor]()
        all_found = run.results.in_order("expert-gradients", work, range(E), layers.num_workers(spec))
        for expert, (token_idx, rank, of_inputs, of_weights, *found) in enumerate(all_found):
            if tokens.scales is not None:  # the router's weight multiplies the input, not the output
                of_weights = (of_inputs * tokens.inputs[token_idx]).sum(dim=1)
                of_inputs = of_inputs * tokens.scales[token_idx, None]
            if tokens.own_norm is not None:
                of_inputs = of_inputs * tokens.own_norm
            below.index_add_(0, token_idx, of_inputs)
            by_weight[token_idx, rank] = of_weights
            quantized[expert], repeated[expert] = found[:2]
            sparse.append(found[2])
            if expert == popular:
                moments = tuple(each.to(run.device) if len(each) else None for each in found[3:])
            done = 2 * costs.expert_multiplications(spec) * len(token_idx)
            progress.advance(done, f"layer {layer} expert {expert}", "back")
        below += gradients.router_gradient(tokens, by_weight.to(run.device), self._tracked, layer).cpu()
        compared = (
            lambda: self._comparison.ratios(layer_idx, popular, moments),
            lambda: self._comparison.calibrated(layer_idx, popular, tokens, above),
        )
        (ratios,), (calibrated,) = run.results.in_order("formats", lambda number: (compared[number](),), range(2), 1)
        solved = torch.from_numpy(errors.ratios_of_widths(ratios.numpy(), spec.hidden_size))
        quantized, repeated, lost = (
            _shrunk(losses, num_tokens) / run.num_tokens for losses in (quantized, repeated, torch.stack(sparse))
        )
        return quantized * solved, repeated * solved[MATRICES.index("down")], lost, ratios, calibrated

    def _expert_work(
        self, layer_idx: int, tokens: layers.LayerTokens, above: Tensor, popular: int
    ) -> Callable[[int], shared.Arrays]:
        """Returns the function that takes gradients back through an expert.

        Its result: tokens and ranks; gradients with respect to inputs and router weights; losses of all widths,
        repeated neurons and sparsities; and of the expert `popular` the moments.
        """
        run, function = self._run, self._run.spec.expert_function(layer_idx)
        thresholds = torch.from_numpy(self._thresholds(layer_idx)).to(run.device)
        rotation = quantize.LayerRotation(run.stored_experts.rotation(layer_idx))

        def work(expert: int) -> shared.Arrays:
            token_idx, rank = torch.where((tokens.experts == expert) & (tokens.weights != 0))
            found = gradients.expert_gradients(
                run.stored_experts.expert(layer_idx, expert),
                function,
                rotation.inputs(tokens.expert_inputs(token_idx).to(run.device)),
                tokens.weights[token_idx, rank].to(run.device),
                rotation.output_gradients(above[token_idx].to(run.device)),
                thresholds[expert],
            )
            of_inputs = rotation.input_gradients(found.inputs).cpu()
            losses = (found.weights, found.quantized, found.repeated, found.sparse)
            # A matrix that the expert lacks has no moments, and [0] stands for them.
            of_one = (torch.zeros(0) if each is None else each for each in found.moments if expert == popular)
            return token_idx, rank, of_inputs, *(each.cpu() for each in (*losses, *of_one))

        return work


def num_dense_sequences(run: Run, layer: int) -> int:
    """Returns on how many sequences a layer's dense matrices are measured."""
    wanted = -(-_DENSE_TOKENS // run.states.sequence_length) if errors.roundable_roles(run.spec, layer) else 0
    return min(run.num_sequences, wanted)


def dense_losses(
    run: Run, layer: int, above: Tensor, below: Tensor, outputs: Tensor | None, progress: commands.Progress
) -> Array:
    """Returns `LayerLosses.dense` by the gradients after the layer and, through its experts, of `inputs`."""
    roles, states, S = errors.roundable_roles(run.spec, layer), run.states, run.states.sequence_length
    number = num_dense_sequences(run, layer)
    losses = np.zeros((len(roles), len(effects.DENSE_WIDTHS)), np.float32)
    least = min(effects.DENSE_WIDTHS)
    steps = np.asarray([errors.squared_step(width) / errors.squared_step(least) for width in effects.DENSE_WIDTHS])
    originals = dict[int, tuple[Tensor, Tensor]]()  # of the sequence before

    def ended(sequence: int, weights: Weights) -> tuple[Tensor, Tensor]:
        """Returns a sequence's hidden states after the layer, and the inputs of its experts."""
        rows = slice(sequence * S, (sequence + 1) * S)
        half = states.half(layer, sequence, weights)
        return states.after(layer, half, None if outputs is None else outputs[rows], weights), half[1]

    def work(item: int) -> shared.Arrays:
        sequence, idx = divmod(item, len(roles))
        rows = slice(sequence * S, (sequence + 1) * S)
        if sequence not in originals:
            originals.clear()
            originals[sequence] = ended(sequence, run.weights)
        rounded = errors.RoundedDense(run.weights, (roles[idx],), least, errors.plainly_rounded)
        pairs = zip(ended(sequence, rounded), originals[sequence], (above, below), strict=True)
        moved = sum(((now - before).cpu() * gradient[rows]).sum(dim=1) for now, before, gradient in pairs)
        assert isinstance(moved, Tensor), "a sum of two"
        return (moved.square().mean()[None],)

    for item, (mean,) in enumerate(run.results.in_order("dense", work, range(number * len(roles)), 1)):
        idx = item % len(roles)
        losses[idx] += float(mean) / 2 / number * steps
        done = 1 + (idx == 0)  # the first with the original
        progress.advance(run.half_multiplications(layer) * S * done, f"layer {layer}", "back")
    return losses


def _shrunk(losses: Tensor, num_tokens: Tensor) -> Tensor:
    """Draws losses [E, ...] of experts with few tokens [E] towards the mean loss of a token of the layer."""
    average = losses.sum(dim=0) / num_tokens.sum().clamp(min=1)
    num_tokens = num_tokens.view(-1, *(1,) * (losses.dim() - 1))
    share = num_tokens / (num_tokens + _SHRUNK_TOKENS)
    return losses * share + average * num_tokens * (1 - share)
