"""The model and the hidden states of all phases of the sensitivity stage, and its experts' outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_pack.calib import quantize
from moe_pack.calib.forward import LayerwiseWeights, experts, layers, shared
from moe_pack.calib.sensitivity import costs
from moe_pack.calib.sensitivity.rotated import RotatedExperts
from moe_pack.formats.base import commands
from moe_pack.formats.parts import specs
from moe_pack.runtime.model import Weights, run_expert

Phase = Literal["forward", "back", "copies"]  # their multiplications take unlike times


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A model, and the hidden states of some sequences between its layers."""

    weights: LayerwiseWeights
    stored_experts: RotatedExperts  # the weights with experts in the coordinates in which they are stored
    given: layers.Sequences  # all sequences of the profile
    states: layers.LayerStates  # of the first `num_sequences`
    num_sequences: int
    device: torch.device
    results: shared.Results  # of experts and sequences

    @property
    def spec(self) -> specs.ModelSpec:
        """The model's spec."""
        return self.weights.spec

    @property
    def num_tokens(self) -> int:
        """The number of tokens that losses are measured on."""
        return self.num_sequences * self.states.sequence_length

    def half_multiplications(self, layer: int) -> int:
        """Returns the multiplications a token of everything but the routed experts in a layer."""
        return costs.half_multiplications(self.spec, layer, self.states.sequence_length)

    def run_experts(self, tokens: layers.LayerTokens, layer: int, progress: commands.Progress, phase: Phase) -> None:
        """Adds the outputs of a layer's experts."""
        layer_idx, E = self.spec.moe_layers.index(layer), self.spec.router.num_experts

        def work(expert: int) -> shared.Arrays:
            return tuple(self.outputs(tokens, tokens.of_expert(expert)[0], self.weights, layer_idx, expert))

        # One worker: torch's threads run the expert's products.
        for expert, outputs in enumerate(self.results.in_order("experts", work, range(E), 1)):
            token_idx, weights = tokens.of_expert(expert)
            add_outputs(self.states, tokens, token_idx, weights, outputs)
            advance_expert(progress, self.spec, layer, expert, len(token_idx), phase)

    def outputs(
        self, tokens: layers.LayerTokens, token_idx: Tensor, model: Weights, layer_idx: int, expert: int
    ) -> Iterator[Tensor]:
        """Yields an expert's outputs for some tokens in chunks, float32 [n, d]."""
        for chunk in torch.split(token_idx, experts.CHUNK_TOKENS) if len(token_idx) else ():
            yield expert_output(tokens, chunk, model, (layer_idx, expert), self.device)


def expert_output(
    tokens: layers.LayerTokens, token_idx: Tensor, model: Weights, number: tuple[int, int], device: torch.device
) -> Tensor:
    """Returns the output, float32 [n, d], of an expert (MoE layer index and number) for some tokens."""
    rotation = quantize.LayerRotation(model.rotation(number[0]))
    x = rotation.inputs(tokens.expert_inputs(token_idx).to(device))
    return rotation.outputs(run_expert(x, model.expert(*number), model.spec.expert_function(number[0]), "none", 0.0))


def add_outputs(
    states: layers.LayerStates, tokens: layers.LayerTokens, token_idx: Tensor, weights: Tensor, outputs: shared.Arrays
) -> None:
    """Adds the chunks of an expert's outputs."""
    for number, output in enumerate(outputs):
        chunk = slice(number * experts.CHUNK_TOKENS, (number + 1) * experts.CHUNK_TOKENS)
        states.add(tokens, token_idx[chunk], weights[chunk], output)


def advance_expert(
    progress: commands.Progress, spec: specs.ModelSpec, layer: int, expert: int, num_tokens: int, phase: Phase
) -> None:
    """Shows that an expert has run for some tokens."""
    progress.advance(costs.expert_multiplications(spec) * num_tokens, f"layer {layer} expert {expert}", phase)
