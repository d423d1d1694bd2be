"""A pass of a text through all layers of a model as it is stored, resumable after any layer, and its predictions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import forward, sensitivity
from moe_pack.formats.base import commands, json_files
from moe_pack.runtime.model import embed


@dataclass(frozen=True, slots=True)
class RealizedSparsity:
    """The share of neurons that did not run; None without tokens."""

    overall: json_files.Share | None  # over all experts' tokens
    experts: tuple[tuple[json_files.Share | None, ...], ...]  # by MoE layer and expert
    tokens: tuple[tuple[json_files.Count, ...], ...]  # of each expert


def realized(counts: Iterable[tuple[forward.Array, forward.Array]], num_neurons: int) -> RealizedSparsity:
    """Returns the sparsity from each MoE layer's dropped neurons and tokens, int64 [E] each."""
    layers = [(dropped.tolist(), number.tolist()) for dropped, number in counts]
    total = sum(sum(number) for _, number in layers)
    return RealizedSparsity(
        overall=sum(sum(dropped) for dropped, _ in layers) / (total * num_neurons) if total else None,
        experts=tuple(
            tuple(d / (n * num_neurons) if n else None for d, n in zip(dropped, number, strict=True))
            for dropped, number in layers
        ),
        tokens=tuple(tuple(number) for _, number in layers),
    )


class ModelPass:
    """A pass of a text's sequences through a model.

    `predicted`: int64 [N, n], the sequences; every token but the first of each is predicted from those before it.
    Args:    store: for the files from which a killed pass continues.   name: of these files.   with_twin: whether the
             first sequence runs once more as the last one, with the last bit of each embedding value changed: its
             predictions differ only by rounding.
    Raises:  RunError for sequences longer than the model's positions.
    """

    _runs_of_expert = 1

    def __init__(
        self,
        weights: forward.LayerwiseWeights,
        tokens: forward.Tokens,
        store: forward.ProfileStore,
        name: str,
        device: torch.device,
        with_twin: bool = False,
    ) -> None:
        forward.check_length(weights.spec, tokens.sequences.shape[1])
        given = forward.Sequences.of(weights.spec, torch.from_numpy(tokens.sequences.astype(np.int64)))
        self.num_sequences, self.sequence_length = given.ids.shape
        self.predicted: forward.Array = given.ids.numpy()

        def embedded(ids: Tensor, number: int) -> Tensor:
            if number < len(ids):
                return embed(ids[number], weights)
            x = embed(ids[0], weights)
            return torch.nextafter(x, torch.full_like(x, torch.inf))

        self._weights = weights
        self._spec = weights.spec
        self._store = store
        self._name = name
        self._device = device
        number, folder = self.num_sequences + with_twin, store.work / name
        self._states = forward.LayerStates(weights, given.begun(embedded), number, self.sequence_length, folder, device)

    @torch.inference_mode()
    def run(self, stage: str, progress: commands.Progress) -> None:
        """Runs all sequences through the remaining layers."""
        states, spec = self._states, self._spec
        layers = range(states.next_layer, spec.num_hidden_layers)
        with commands.stage_of(progress, f"timing {stage}"):
            cost = self._cost(layers)
        progress.begin(cost.stage(stage))
        for layer in layers:
            tokens = states.enter(layer)
            progress.advance(
                sensitivity.half_multiplications(spec, layer, self.sequence_length) * len(tokens.x), f"layer {layer}"
            )
            if layer in spec.moe_layers:
                self._store.write(f"{self._name}-{layer:03d}.safetensors", self._layer(tokens, layer, progress))
            states.leave(layer, tokens)
            del tokens  # otherwise two layers' tokens are in memory while the next layer is entered
        progress.end()

    def counts(self) -> list[dict[str, forward.Array]]:
        """Reads what was counted of each MoE layer, after all layers are done."""
        names = (f"{self._name}-{layer:03d}.safetensors" for layer in self._spec.moe_layers)
        return [forward.read_all_arrays(self._store.folder / name) for name in names]

    def sparsity(self) -> RealizedSparsity:
        """Returns the share of neurons that did not run, with a twin's tokens, after all layers are done."""
        counts = ((layer["dropped"], layer["tokens"]) for layer in self.counts())
        return realized(counts, self._spec.expert.intermediate_size)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[slice]:
        """Yields slices of a sequence for one call of `predictions` each; by default all tokens but the last."""
        return sensitivity.head_pieces(start, self.sequence_length - 1 if stop is None else stop, self._spec.vocab_size)

    @torch.inference_mode()
    def predictions(self, number: int, rows: slice) -> Tensor:
        """Returns log-probabilities of the next token after some tokens, float32 [n, V], after all layers are done."""
        return sensitivity.log_probabilities(self._states.before(number)[rows], self._weights, self._device)

    def prediction_cost(self) -> sensitivity.Cost:
        """Returns the cost of the predictions of all sequences."""
        num_tokens = self._states.num_sequences * (self.sequence_length - 1)
        return sensitivity.Trial(self._weights, self._states).predicted(num_tokens)

    def _cost(self, layers: range) -> sensitivity.Cost:
        if not layers:
            return sensitivity.Cost()
        trial, number = sensitivity.Trial(self._weights, self._states), self._states.num_sequences
        router = self._spec.router
        tokens_an_expert = number * self.sequence_length * router.num_experts_per_tok / router.num_experts
        experts = trial.plain(tokens_an_expert) * (self._runs_of_expert * router.num_experts)
        return sensitivity.layers_cost(trial, layers, number, experts)

    def _layer(self, tokens: forward.LayerTokens, layer: int, progress: commands.Progress) -> dict[str, forward.Array]:
        """Runs a layer's experts; returns dropped neurons and tokens, int64 [E] each."""
        layer_idx = self._spec.moe_layers.index(layer)
        dropped, number = (np.zeros(self._spec.router.num_experts, np.int64) for _ in range(2))
        for expert in range(self._spec.router.num_experts):
            threshold = self._weights.threshold(layer_idx, expert)
            token_idx, left = self._counted(tokens, layer_idx, expert, threshold, progress)
            dropped[expert], number[expert] = int(left.sum()), len(token_idx)
        return {"dropped": dropped, "tokens": number}

    def _counted(
        self, tokens: forward.LayerTokens, layer_idx: int, expert: int, threshold: float, progress: commands.Progress
    ) -> tuple[Tensor, Tensor]:
        one = sensitivity.expert_multiplications(self._spec)
        place, number = f"layer {self._spec.moe_layers[layer_idx]} expert {expert}", (layer_idx, expert)

        def on_tokens(num_tokens: int) -> None:
            progress.advance(one * num_tokens, place)

        return forward.run_counted(self._states, tokens, self._weights, number, threshold, on_tokens)
