"""EdgeMoE's measure of an expert's importance: the model's loss with that expert at 2 bits and all others at 4.

The loss is the KL divergence from the original's predictions; EdgeMoE's is a task's accuracy. Quantization is as in the
paper: symmetric, one scale a row.
Source:  EdgeMoE §III-B, "Profiling expert importance", Fig. 7a.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.forward import shared
from moe_pack.calib.sensitivity import costs, effects, errors
from moe_pack.calib.sensitivity.rotated import RotatedExperts
from moe_pack.calib.sensitivity.run import expert_output
from moe_pack.formats.pack.manifests import RotationVectors

_COPY_TOKENS = 512
_TRIED_TOKENS = 512


class ExactPass:
    """Carries the original, the model at 4 bits and a copy for each expert through the layers, of the first `ids`."""

    def __init__(
        self,
        weights: forward.LayerwiseWeights,
        ids: Tensor,
        folder: Path,
        device: torch.device,
        rotation: RotationVectors | None = None,
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        self._results = results
        self._weights = weights
        self._spec = weights.spec
        self._device = device
        rounding, stored = errors.Rounding("absmax", formats.ROW_GROUP), RotatedExperts(weights, rotation, device)
        self._at_4, self._at_2 = (errors.RoundedExperts(stored, width, rounding) for width in (4, 2))
        given = forward.Sequences.of(weights.spec, ids)
        self.num_copied = number = min(len(ids), -(-_COPY_TOKENS // given.length))  # sequences
        beginning = replace(given.first(number).embedded(weights), origin=lambda place: number + place % number)

        # The same sequences twice: the original, and with all experts at 4 bits, from which the copies branch off.
        self.states = forward.LayerStates(weights, beginning, 2 * number, given.length, folder, device, results=results)
        self._num_tokens = number * given.length

    @torch.inference_mode()
    def layer(self, layer: int, progress: formats.Progress = formats.NO_PROGRESS) -> None:
        """Takes all sequences through the next layer, where a copy for each of its experts begins."""
        states, spec = self.states, self._spec
        tokens = states.enter(layer)
        progress.advance(
            costs.half_multiplications(spec, layer, states.sequence_length) * len(tokens.x), f"layer {layer}"
        )
        changes: list[tuple[Tensor, Tensor]] = []
        if layer in spec.moe_layers:
            layer_idx, one = spec.moe_layers.index(layer), costs.expert_multiplications(spec)

            def work(expert: int) -> shared.Arrays:
                return self._run_expert(tokens, layer_idx, expert)

            experts = range(spec.router.num_experts)
            for expert, (places, change, *outputs) in enumerate(self._results.in_order("experts", work, experts, 1)):
                changes.append((places, change))
                self._add(tokens, expert, outputs)
                done = len(tokens.of_expert(expert)[0])
                progress.advance(one * done, f"layer {layer} expert {expert}")
        base = slice(self._num_tokens, 2 * self._num_tokens)
        if tokens.outputs is not None:  # which the end of the layer changes
            of_base = tokens.outputs[base].clone()
            tokens_of_base = replace(tokens, x=tokens.x[base].clone(), inputs=tokens.inputs[base], outputs=of_base)
        else:
            tokens_of_base = replace(tokens, x=tokens.x[base])
        states.leave(layer, tokens, self._copies(layer, tokens_of_base, changes))

    @torch.inference_mode()
    def losses(self, progress: formats.Progress = formats.NO_PROGRESS) -> dict[str, forward.Array]:
        """Returns `losses` f32 [L, E], KL in nats with this expert at 2 bits, and `base` f32 [1], all at 4 bits."""
        shape = (len(self._spec.moe_layers), self._spec.router.num_experts)
        num_copies = 1 + shape[0] * shape[1]
        sums = np.zeros(num_copies)

        def work(number: int) -> shared.Arrays:
            original, pieces = self.states.before(number), list[Tensor]()
            for rows in effects.head_pieces(0, len(original), self._spec.vocab_size):
                predictions, measured = self._log_probabilities(original[rows]), np.zeros(num_copies)
                for copy in range(num_copies):
                    hidden = self.states.before((1 + copy) * self.num_copied + number)[rows]
                    measured[copy] = effects.divergence(predictions, self._log_probabilities(hidden))
                pieces.append(torch.from_numpy(measured))
            return tuple(pieces)

        for found in self._results.in_order("predictions", work, range(self.num_copied), 1):
            for piece in found:
                sums += piece.numpy()
            done = self.states.sequence_length * (1 + num_copies) * self._spec.hidden_size * self._spec.vocab_size
            progress.advance(done, "predictions")
        kls = (sums / self._num_tokens).astype(np.float32)
        return {"losses": kls[1:].reshape(shape), "base": kls[:1]}

    def cost(self, layers: range) -> costs.Cost:
        """Returns the estimated cost of these layers, with the losses after them."""
        spec, trial = self._spec, costs.Trial(self._weights, self.states)
        E, k, S = spec.router.num_experts, spec.router.num_experts_per_tok, self.states.sequence_length
        halves = {kind: trial.half(kind) for kind in costs.kinds_of_layers(spec)}
        plain = trial.plain(_TRIED_TOKENS)
        rounded = trial.rounded(self._at_4)  # added to the products, for any number of tokens
        total, num_sequences = costs.Cost(), self.states.num_sequences
        for layer in layers:
            total += halves[costs.kind_of(spec, layer)] * num_sequences
            if layer in spec.moe_layers:
                total += plain * (num_sequences * S * k / _TRIED_TOKENS) + rounded * (2 * E)
                num_sequences += self.num_copied * E
        return total + trial.predicted(self._num_tokens) * (2 + len(spec.moe_layers) * E)

    def _run_expert(self, tokens: forward.LayerTokens, layer_idx: int, expert: int) -> shared.Arrays:
        """Returns an expert's positions in the copied tokens [n], its change by 2 bits [n, d], and its outputs."""
        number = layer_idx, expert
        token_idx, weights = tokens.of_expert(expert)
        original = token_idx < self._num_tokens
        base = ~original & (token_idx < 2 * self._num_tokens)
        outputs = [
            expert_output(tokens, chunk, model, number, self._device).cpu()
            for chosen, model in ((original, self._weights), (~original, self._at_4))
            for chunk in _chunks(token_idx[chosen])
        ]
        at_4, at_2 = (
            expert_output(tokens, token_idx[base], rounded, number, self._device)
            for rounded in (self._at_4, self._at_2)
        )
        change = (at_2 - at_4).cpu() * self.states.shares(weights[base])[:, None]
        return token_idx[base] - self._num_tokens, change, *outputs

    def _add(self, tokens: forward.LayerTokens, expert: int, outputs: Sequence[Tensor]) -> None:
        token_idx, weights = tokens.of_expert(expert)
        original = token_idx < self._num_tokens
        remaining = iter(outputs)
        for chosen in (original, ~original):
            chunks = zip(_chunks(token_idx[chosen]), _chunks(weights[chosen]), strict=True)
            for chunk, of_chunk in chunks:
                self.states.add(tokens, chunk, of_chunk, next(remaining))

    def _copies(self, layer: int, base: forward.LayerTokens, changes: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yields the hidden states of one copy after the other, float32 [n, w]."""
        for places, change in changes:
            if base.outputs is None:
                yield base.x.index_add(0, places, change)
                continue
            changed = base.outputs.index_add(0, places, change)
            yield self.states.after(layer, (base.x, base.inputs), changed, self._weights).cpu()

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        return effects.log_probabilities(hidden, self._weights, self._device)


def _chunks(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values, forward.CHUNK_TOKENS) if len(values) else ()
