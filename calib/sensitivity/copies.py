"""Divergences at the model's end: of copies of sequences with experts rounded, and by rounded embedding and head."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.forward import Array, experts, layers, shared
from moe_pack.calib.sensitivity import effects, errors
from moe_pack.calib.sensitivity.run import Run, add_outputs, advance_expert
from moe_pack.formats.base import commands
from moe_pack.runtime.model import embed

_HEAD_TOKENS = 256  # to judge a rounded head on


def begin_together(run: Run) -> bool:
    """Returns whether all copies begin with the text: each has its own encoder output or chosen positions."""
    return run.spec.encoder is not None or bool(layers.shared_choosers(run.spec, run.states.sequence_length))


class CopiesPass:
    """Takes copies of the first `num_copied` sequences through all layers. Goes on in `folder`."""

    def __init__(self, run: Run, copies: tuple[effects.Copy, ...], num_copied: int, folder: Path) -> None:
        self._run = run
        self._copies = copies
        self._num_copied = num_copied
        begun = num_copied * (len(copies) if begin_together(run) else 1)
        beginning, S = run.given.first(num_copied).embedded(run.weights), run.states.sequence_length
        self.states = layers.LayerStates(run.weights, beginning, begun, S, folder, run.device, results=run.results)

    def run(self, progress: commands.Progress) -> None:
        """Takes the copies through all layers that are left."""
        run, states = self._run, self.states
        while states.next_layer < run.spec.num_hidden_layers:
            layer = states.next_layer
            with run.results.step(f"copies-{layer:03d}"):
                tokens = states.enter(layer)
                progress.advance(run.half_multiplications(layer) * len(tokens.x), f"layer {layer}", "copies")
                if layer in run.spec.moe_layers:
                    self._run_experts(tokens, layer, progress)
                states.leave(layer, tokens, self._begun(layer + 1))

    def diverged(self, progress: commands.Progress) -> Array:
        """Returns the sums over tokens of KL divergence and of log-likelihood lost, float64 [2, copies]."""
        run, number_copies = self._run, len(self._copies)
        last, S = run.spec.num_hidden_layers, run.states.sequence_length
        sums = np.zeros((2, number_copies))

        def work(number: int) -> shared.Arrays:
            base, next_ids = run.states.at(last, number), run.given.ids[number, 1:]
            changed = [self.states.at(last, copy * self._num_copied + number) for copy in range(number_copies)]
            pieces = []
            for rows in effects.head_pieces(0, S, run.spec.vocab_size):
                expected = effects.log_probabilities(base[rows], run.weights, run.device)
                measured = np.zeros((2, number_copies))
                for copy, hidden in enumerate(changed):
                    found = effects.log_probabilities(hidden[rows], run.weights, run.device)
                    measured[0, copy] = effects.divergence(expected, found)
                    measured[1, copy] = effects.likelihood_lost(expected, found, next_ids[rows])
                pieces.append(torch.from_numpy(measured))
            return tuple(pieces)

        for pieces in run.results.in_order("predictions", work, range(self._num_copied), 1):
            for piece in pieces:
                sums += piece.numpy()
            products = S * (1 + number_copies) * run.spec.hidden_size * run.spec.vocab_size
            progress.advance(products, "predictions", "copies")
        return sums

    def _begun(self, layer: int) -> Iterator[Tensor]:
        """Yields the hidden states of the copies that begin before this layer."""
        if not begin_together(self._run):
            for copy in self._copies[1:]:
                if self._run.spec.moe_layers[copy.layers[0]] == layer:
                    yield torch.cat([self._run.states.at(layer, number) for number in range(self._num_copied)])

    def _run_experts(self, tokens: layers.LayerTokens, layer: int, progress: commands.Progress) -> None:
        run, layer_idx = self._run, self._run.spec.moe_layers.index(layer)
        copy_tokens = self._num_copied * run.states.sequence_length
        (rounded_idx,) = (idx for idx, copy in enumerate(self._copies) if layer_idx in copy.layers)
        rounded = errors.RoundedExperts(run.stored_experts, self._copies[rounded_idx].width, errors.plainly_rounded)

        def work(expert: int) -> shared.Arrays:
            token_idx, _ = tokens.of_expert(expert)
            changes = token_idx // copy_tokens == rounded_idx
            changed = run.outputs(tokens, token_idx[changes], rounded, layer_idx, expert)
            return *changed, *run.outputs(tokens, token_idx[~changes], run.weights, layer_idx, expert)

        E = run.spec.router.num_experts
        for expert, outputs in enumerate(run.results.in_order("experts", work, range(E), 1)):
            token_idx, weights = tokens.of_expert(expert)
            changes = token_idx // copy_tokens == rounded_idx
            num_changed = -(-int(changes.sum()) // experts.CHUNK_TOKENS)
            for chosen, of_these in ((changes, outputs[:num_changed]), (~changes, outputs[num_changed:])):
                add_outputs(self.states, tokens, token_idx[chosen], weights[chosen], of_these)
            advance_expert(progress, run.spec, layer, expert, len(token_idx), "copies")


def embedding_divergences(run: Run, gradients: tuple[Tensor, ...]) -> Array:
    """Returns the KL divergences of the embedding at `DENSE_WIDTHS`, to second order, by gradients float32 [T, d]."""
    kls = np.zeros(len(effects.DENSE_WIDTHS), np.float32)
    if "embed" not in errors.roundable_roles(run.spec, None):
        return kls
    S = run.states.sequence_length
    for idx, width in enumerate(effects.DENSE_WIDTHS):
        rounded = errors.RoundedDense(run.weights, ("embed",), width, errors.plainly_rounded)
        for ids, gradient in zip(run.given.stacks, gradients, strict=True):
            for number in range(run.num_sequences):
                change = embed(ids[number], rounded) - embed(ids[number], run.weights)
                moved = (change.cpu() * gradient[number * S : (number + 1) * S]).sum(dim=1)
                kls[idx] += float(moved.square().sum()) / 2 / run.num_tokens
    return kls


def head_divergences(run: Run) -> Array:
    """Returns the KL divergences with the head at `DENSE_WIDTHS`; 0 if it cannot be rounded. A tied embedding stays."""
    kls = np.zeros(len(effects.DENSE_WIDTHS), np.float32)
    role = "embed" if run.spec.tied_head else "head"
    if role not in errors.roundable_roles(run.spec, None):
        return kls
    hidden = run.states.at(run.spec.num_hidden_layers, 0)[:_HEAD_TOKENS]
    for rows in effects.head_pieces(0, len(hidden), run.spec.vocab_size):
        original = effects.log_probabilities(hidden[rows], run.weights, run.device)
        for idx, width in enumerate(effects.DENSE_WIDTHS):
            rounded = errors.RoundedDense(run.weights, (role,), width, errors.plainly_rounded)
            changed = effects.log_probabilities(hidden[rows], rounded, run.device)
            kls[idx] += effects.divergence(original, changed) / len(hidden)
    return kls
