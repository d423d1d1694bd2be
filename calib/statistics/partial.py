"""Partial hidden states on held-out tokens, and the next routers' scores of them.

The runtime predicts the next layer from the hidden state to which only resident experts were added ("partial" in
`runtime.offload.prefetch`). A profile knows no budget: the more popular half of each layer's experts is resident.
Source:  Importance-Driven Expert Scheduling §5.2.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import forward
from moe_pack.calib.forward import shared
from moe_pack.calib.statistics.predictors import Shares
from moe_pack.formats import ModelSpec
from moe_pack.runtime import model


class PartialStates:
    """Keeps partial hidden states in files `partial-*`, layer by layer: `begin`, `add` for each output, `end`."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        shares: Shares,
        num_held_out_tokens: int,
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        self._results = results
        self._folder, self._spec, self._shares = folder, spec, shares
        self._num_held_out_tokens = num_held_out_tokens
        self._is_resident: forward.Array = np.zeros(0, bool)
        self._x = self._added = torch.empty(0)  # hidden states, and what resident experts are added to
        self._inputs = torch.empty(0)

    def is_judged(self, layer: int) -> bool:
        """Returns whether a layer is predicted from the layer just before it: both have experts, in one stack."""
        moe_layers, is_used = self._spec.moe_layers, self._shares.num_judged > 0 and self._shares.num_learned > 0
        is_same_stack = layer > 0 and forward.stack_of(self._spec, layer) == forward.stack_of(self._spec, layer - 1)
        return is_used and is_same_stack and layer in moe_layers and layer - 1 in moe_layers

    def begin(self, layer: int, tokens: forward.LayerTokens) -> None:
        """Begins with the hidden states after attention and shared experts, before the routed experts of a layer."""
        if not self.is_judged(layer + 1):
            return
        learned = tokens.experts[: len(tokens.x) - self._num_held_out_tokens]
        self._is_resident = resident_half(learned, self._spec.router.num_experts)
        _, judged = self._shares.tokens()
        values = tokens.x[judged]
        mapped = np.memmap(self._unfinished, np.float32, "w+", shape=tuple(values.shape))
        self._x = torch.from_numpy(mapped)
        self._x.copy_(values)
        self._inputs = tokens.inputs[judged]
        self._added = self._x if tokens.outputs is None else torch.zeros_like(self._inputs)

    def add(self, layer: int, expert: int, token_idx: Tensor, weights: Tensor, output: Tensor) -> None:
        """Adds the output float32 [n, d] of an expert for some tokens, weighted, if the expert is resident."""
        if not self.is_judged(layer + 1) or not self._is_resident[expert]:
            return
        _, judged = self._shares.tokens()
        places = token_idx - judged.start
        is_judged = (places >= 0) & (places < len(self._x))
        scale = weights[is_judged] * (self._spec.residual_multiplier if self._added is self._x else 1.0)
        self._added.index_add_(0, places[is_judged], output.to("cpu")[is_judged] * scale[:, None])

    @torch.inference_mode()
    def end(self, layer: int, states: forward.LayerStates, weights: forward.LayerwiseWeights) -> None:
        """Keeps the hidden states of a layer."""
        if self.is_judged(layer + 1):
            if self._added is not self._x:
                pieces = (torch.split(each, states.sequence_length) for each in (self._x, self._inputs, self._added))
                for x, inputs, outputs in zip(*pieces, strict=True):
                    x.copy_(states.after(layer, (x, inputs), outputs, weights).cpu())
            self._x = self._added = self._inputs = torch.empty(0)  # the mapping ends before its file gets its name
            self._results.publish(self._unfinished, self._folder / f"partial-states-{layer:03d}.bin")

    @torch.inference_mode()
    def run(self, layer: int, states: forward.LayerStates, weights: forward.LayerwiseWeights) -> None:
        """Runs a layer's attention, norm and router on the hidden states of the layer before; keeps the scores."""
        if not self.is_judged(layer):
            return
        S, d = self._shares.sequence_length, self._spec.stream_width
        path = self._folder / f"partial-states-{layer - 1:03d}.bin"
        mapped = torch.from_numpy(np.memmap(path, np.float32, "c")).view(-1, S, d)
        first = self._shares.num_sequences - self._shares.num_judged

        def scores_of(number: int) -> tuple[Tensor]:
            place = first + number
            x = states.attended(layer, mapped[number], weights, states.context(layer, place))
            return (model.router_scores(model.mlp_input(x, weights, layer), weights, layer).cpu(),)

        numbers = range(self._shares.num_judged)
        found = self._results.in_order("partial-scores", scores_of, numbers, forward.num_workers(self._spec))
        torch.cat([scores for (scores,) in found]).numpy().tofile(self._unfinished)
        self._results.publish(self._unfinished, self._scores(layer))

    def scores(self, layer: int) -> Tensor | None:
        """Returns the scores float32 [T, E] of the tokens to judge on; None for a layer that is not judged."""
        if not self.is_judged(layer):
            return None
        return torch.from_numpy(np.fromfile(self._scores(layer), np.float32)).view(-1, self._spec.router.num_experts)

    @property
    def _unfinished(self) -> Path:
        return self._folder / self._results.own_name("partial.tmp")

    def _scores(self, layer: int) -> Path:
        return self._folder / f"partial-scores-{layer:03d}.bin"


def resident_half(experts: Tensor, num_experts: int) -> forward.Array:
    """Returns which experts are in the more popular half, rounded up, by choices int64 [T, k]; equal ones by index."""
    counts = np.bincount(experts.numpy().ravel(), minlength=num_experts)
    is_resident: forward.Array = np.zeros(num_experts, bool)
    is_resident[np.argsort(-counts, kind="stable")[: (num_experts + 1) // 2]] = True
    return is_resident
