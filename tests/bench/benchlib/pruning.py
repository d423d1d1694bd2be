"""Which neurons of an expert run: rules of papers and of their comparators, and a pass of sequences that applies them.

The product has one threshold for an expert. Some rules here have another one for each neuron (CHESS), or one for all
experts of a layer (CATS); they are what papers compare with, and only benchmarks use them. A rule learns its thresholds
layer by layer, from tokens whose earlier layers already run by the rule, as `moe-pack thresholds` does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.evaluate import TaskTokens
from moe_pack.calib.forward import LayerwiseWeights
from moe_pack.calib.sensitivity import log_probabilities
from moe_pack.formats import Pack, Selector
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.model import (
    Activations,
    Expert,
    NeuronBlock,
    activations,
    embed,
    mlp_input,
    route_tokens,
    running,
)
from moe_pack.runtime.model.caches import Angles
from moe_pack.runtime.model.caches.ropes import Rope
from moe_pack.runtime.model.compute.matrices import linear
from moe_pack.runtime.model.compute.weights import from_experts, norm, to_experts

_CPU = torch.device("cpu")
_HEAD_TOKENS = 512  # predicted at once
_CHUNK_TOKENS = 512  # of an expert, so that its activations stay in L2


class Rule(Protocol):
    """Decides which neurons run."""

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        """Learns a layer's thresholds from each expert's activations on its tokens of the calibration text."""
        ...

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        """Returns which neurons run, bool [T, f]."""
        ...


def quantile(magnitudes: Tensor, sparsity: float) -> float:
    """Returns the least value that at least this share of the values does not exceed; 0 without values.

    Source: FloE Eq. 6.
    """
    if not magnitudes.numel() or not sparsity:
        return 0.0
    rank = max(math.ceil(sparsity * magnitudes.numel() - 1e-9), 1)
    return float(torch.kthvalue(magnitudes.flatten(), rank).values)


class AllRun:
    """Every neuron runs."""

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        """Learns nothing."""

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return torch.ones_like(values.h, dtype=torch.bool)


class ByExpert:
    """A quantile of the activation of `up`, `gate` or down's input (`both`) for each expert: FloE Eq. 5 and 6.

    An expert without tokens gets the quantile of its layer.
    """

    def __init__(self, selector: Selector, sparsity: float) -> None:
        self._selector, self._sparsity = selector, sparsity
        self.thresholds: dict[tuple[int, int], float] = {}

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        magnitudes = [values.of(self._selector).abs() for values in experts]
        pooled = quantile(torch.cat([each.flatten() for each in magnitudes]), self._sparsity)
        for expert, each in enumerate(magnitudes):
            self.thresholds[layer_idx, expert] = quantile(each, self._sparsity) if each.numel() else pooled

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return running(values.of(self._selector), self.thresholds[layer_idx, expert])


class Cats:
    """CATS: one threshold for a layer's whole MLP, a quantile of abs(silu(gate x)) over all its experts.

    Source: Lee et al. 2024, arXiv 2404.08763, §3.2, for a dense MLP; that all experts of a layer share it is our
    reading. With a threshold for each expert it is `ByExpert("gate")`.
    """

    def __init__(self, sparsity: float) -> None:
        self._sparsity = sparsity
        self.thresholds: dict[int, float] = {}

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        magnitudes = torch.cat([values.gate.abs().flatten() for values in experts])
        self.thresholds[layer_idx] = quantile(magnitudes, self._sparsity)

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return running(values.gate, self.thresholds[layer_idx])


class Chess:
    """CHESS without sparse attention: a threshold on abs(silu(gate x)) for each neuron.

    The importance of neuron i is abs(silu(gate_i x)) times the mean of abs(up_i x) over the calibration text. One
    quantile t of the importance of all of an expert's neurons gives the thresholds t / mean abs(up_i x). A column of
    down has no part in them. In an expert without tokens all neurons have the threshold of `ByExpert("gate")`.
    Source: He et al. 2024, arXiv 2409.01366, §3.1, and its code, junhuihe-hjh/CHESS, notebooks/thresholds.py, which
    takes means of quantiles by document where we take the quantile of all tokens.
    """

    def __init__(self, sparsity: float) -> None:
        self._sparsity = sparsity
        self.thresholds: dict[tuple[int, int], Tensor] = {}

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        pooled = quantile(torch.cat([values.gate.abs().flatten() for values in experts]), self._sparsity)
        for expert, values in enumerate(experts):
            if len(values.up):
                influence = values.up.abs().mean(dim=0)  # [f]
                thresholds = quantile(values.gate.abs() * influence, self._sparsity) / influence
            else:
                thresholds = torch.full((values.gate.shape[1],), pooled)
            self.thresholds[layer_idx, expert] = thresholds

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return running(values.gate, self.thresholds[layer_idx, expert])


class Theta:
    """CORM: one threshold on the gate's activation for all experts of the model, §3."""

    def __init__(self, theta: float) -> None:
        self._theta = theta

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        """Learns nothing."""

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return running(values.gate, self._theta)


class OfPack:
    """The thresholds that a pack has."""

    def __init__(self, pack: Pack) -> None:
        self._selector, self._thresholds = pack.manifest.selector, pack.thresholds.copy()

    def learn(self, layer_idx: int, experts: Sequence[Activations]) -> None:
        """Learns nothing."""

    def runs(self, layer_idx: int, expert: int, values: Activations) -> Tensor:
        return running(values.of(self._selector), float(self._thresholds[layer_idx, expert]))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences of one length that go through the layers together.

    `ids`, `positions`: int64 [N, S]; a token of padding has the position -1.   `seen`: bool [N, S, S], which tokens
    each token sees; None: all before it and itself.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor | None = None

    @classmethod
    def of_text(cls, sequences: NDArray[np.int32]) -> "Batch":
        """Returns sequences int32 [N, S] without padding."""
        ids = torch.from_numpy(sequences.astype(np.int64))
        return cls(ids, torch.arange(ids.shape[1]).expand_as(ids))


class ChoiceTrees:
    """The choices of tasks, of which each task is one sequence: its prompt once, then what each choice adds.

    A choice's tokens see the prompt and their own choice. So a prompt is computed once, not with each of its choices.
    `batch`: one sequence a task.
    """

    def __init__(self, tasks: TaskTokens) -> None:
        paths, rows = [], list[list[tuple[int, int]]]()  # (token, position) of each task's sequence
        by_task: list[list[int]] = [[] for _ in tasks.answers]
        for number, choice in enumerate(tasks.choices):
            by_task[choice.task_idx].append(number)
        for task_idx, numbers in enumerate(by_task):
            ids = [tasks.tokens.sequences[n, : tasks.choices[n].stop].tolist() for n in numbers]
            shared = next(
                (i for i, each in enumerate(zip(*ids, strict=False)) if len(set(each)) > 1), min(map(len, ids))
            )
            row = [(token, place) for place, token in enumerate(ids[0][:shared])]
            for n, own in zip(numbers, ids, strict=True):
                added = range(len(row), len(row) + len(own) - shared)
                row += [(token, shared + place) for place, token in enumerate(own[shared:])]
                paths.append((n, task_idx, [*range(shared), *added]))
            rows.append(row)
        N, S = len(rows), max(map(len, rows))
        tokens, positions = torch.zeros((N, S), dtype=torch.int64), torch.full((N, S), -1)
        for number, row in enumerate(rows):
            tokens[number, : len(row)], positions[number, : len(row)] = torch.tensor(row).T
        seen = torch.eye(S, dtype=torch.bool).expand(N, S, S).clone()
        for _, task_idx, path in paths:
            place = torch.tensor(path)
            seen[task_idx, place[:, None], place] |= torch.ones((len(path), len(path)), dtype=torch.bool).tril()
        self.batch = Batch(tokens, positions, seen)
        self._tasks, self._paths = tasks, {n: (task_idx, path) for n, task_idx, path in paths}

    def log_likelihoods(self, hidden: Tensor, weights: LayerwiseWeights) -> list[float]:
        """Returns the log-likelihood of every choice from the batch's hidden states after the last layer.

        The head runs on many choices' tokens at once: for a few tokens, a large matrix takes most of the time to read.
        """
        seen, following, lengths = [], [], []
        for number, choice in enumerate(self._tasks.choices):
            task_idx, path = self._paths[number]
            seen.append(hidden[task_idx, path[choice.start - 1 : choice.stop - 1]])
            following += self._tasks.tokens.sequences[number, choice.start : choice.stop].tolist()
            lengths.append(choice.stop - choice.start)
        before, next_ids = torch.cat(seen), torch.tensor(following)[:, None]
        found = [
            log_probabilities(before[start : start + _HEAD_TOKENS], weights, _CPU).gather(
                1, next_ids[start : start + _HEAD_TOKENS]
            )
            for start in range(0, len(before), _HEAD_TOKENS)
        ]
        return [float(piece.double().sum()) for piece in torch.split(torch.cat(found), lengths)]


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """A pass of batches through all layers of a model.

    `hidden`: of each batch float32 [N, S, d], after the last layer.   `running`: by MoE layer, the share of neurons
    that ran on the second batch's tokens.
    """

    hidden: list[Tensor]
    running: NDArray[np.float64]


@torch.inference_mode()
def run_by(weights: LayerwiseWeights, rule: Rule, batches: Sequence[Batch]) -> Passed:
    """Runs batches through all layers by a rule, which learns from the first batch.

    All tokens go through a layer at once: one sequence after the other, short ones take several times as long.
    """
    spec = weights.spec
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec) and tuple(spec.moe_layers) == tuple(range(spec.num_hidden_layers))
    assert attention.qk_norm == "none" and not attention.bias and not attention.sinks and spec.shared_expert is None
    assert spec.residual_multiplier == 1.0, "as in Mixtral"
    ids = torch.cat([batch.ids.reshape(-1) for batch in batches])
    unique, places = torch.unique(ids, return_inverse=True)
    x = embed(unique, weights)[places]  # [T, d]
    stops = np.cumsum([batch.ids.numel() for batch in batches]).tolist()
    bounds = list(zip([0, *stops[:-1]], stops, strict=True))
    token_idx = torch.cat([batch.positions.reshape(-1) for batch in batches]).ge(0).nonzero()[:, 0]
    learned, judged = (token_idx < stops[0]), (token_idx >= stops[0]) & (token_idx < stops[1])
    longest = max(batch.ids.shape[1] for batch in batches)
    angles = Rope(spec.rotation, _CPU)(torch.arange(longest), longest)
    shares = []
    for layer in range(spec.num_hidden_layers):
        normed = norm(x, weights, f"layers.{layer}.attention_norm")
        for batch, (start, stop) in zip(batches, bounds, strict=True):
            x[start:stop] += _attention(normed[start:stop], weights, attention, layer, batch, angles)
        tokens = _LayerTokens.of(mlp_input(x[token_idx], weights, layer), weights, layer)
        y, num_running = _run_experts(tokens, weights, rule, layer, learned)
        x[token_idx] += y
        shares.append(float(num_running[judged].sum() / (_num_neurons(tokens, weights) * judged.sum())))
    hidden = [x[start:stop].view(*batch.ids.shape, -1) for batch, (start, stop) in zip(batches, bounds, strict=True)]
    return Passed(hidden, np.array(shares))


def _attention(
    x: Tensor, weights: LayerwiseWeights, spec: GroupedQuerySpec, layer: int, batch: Batch, angles: Angles
) -> Tensor:
    """Returns a layer's attention of whole sequences, float32 [N S, d], from normed hidden states."""
    (N, S), role = batch.ids.shape, f"layers.{layer}.attention"
    assert spec.window(layer) is None, "every token sees all before it"
    q, k, v = (linear(x, weights.matrix(f"{role}.{name}")) for name in "qkv")
    q, k, v = (each.view(N, S, each.shape[1] // spec.head_dim, spec.head_dim).transpose(1, 2) for each in (q, k, v))
    places = batch.positions.clamp(min=0)
    cos, sin = (each[places][:, None] for each in angles)  # [N, 1, S, half]
    half, interleaved = cos.shape[-1], weights.spec.rotation.interleaved
    assert not interleaved and 2 * half == spec.head_dim, "as in Mixtral"
    q, k = (_turned(each, cos, sin) for each in (q, k))
    mask = None if batch.seen is None else batch.seen[:, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=True
    )
    return linear(mixed.transpose(1, 2).reshape(len(x), -1), weights.matrix(f"{role}.o"))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [N, heads, S, n] turned by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class _LayerTokens:
    """What a layer's experts get: `inputs` float32 [T, d], `experts` int64 [T, k], `router_weights` float32 [T, k]."""

    inputs: Tensor
    experts: Tensor
    router_weights: Tensor

    @classmethod
    def of(cls, inputs: Tensor, weights: LayerwiseWeights, layer: int) -> "_LayerTokens":
        return cls(to_experts(inputs, weights, layer), *route_tokens(inputs, weights, layer))

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens that an expert runs for, rising int64 [n], and its weight for each, float32 [n]."""
        token_idx, rank = torch.where(self.experts == expert)
        return token_idx, self.router_weights[token_idx, rank]


def _num_neurons(tokens: _LayerTokens, weights: LayerwiseWeights) -> int:
    """Returns how many neurons of a layer run for a token without a rule."""
    return tokens.experts.shape[1] * weights.spec.expert.intermediate_size


def _run_experts(
    tokens: _LayerTokens, weights: LayerwiseWeights, rule: Rule, layer: int, is_learned: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what a layer's experts add, float32 [T, d], and how many neurons ran for each token, float64 [T].

    Args:    is_learned: bool [T], the tokens that the rule learns from.
    """
    function = weights.spec.expert.routed_function(layer)
    blocks = [_whole(weights.expert(layer, expert)) for expert in range(weights.spec.router.num_experts)]
    if not isinstance(rule, AllRun):
        learned = []
        for expert, block in enumerate(blocks):
            token_idx, _ = tokens.of_expert(expert)
            learned.append(activations(tokens.inputs[token_idx[is_learned[token_idx]]], block, function))
        rule.learn(layer, learned)
        del learned
    y, num_running = torch.zeros_like(tokens.inputs), torch.zeros(len(tokens.inputs), dtype=torch.float64)
    for expert, block in enumerate(blocks):
        token_idx, router_weights = tokens.of_expert(expert)
        for start in range(0, len(token_idx), _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            rows = part if len(token_idx) == len(y) else token_idx[part]  # views where the expert has all tokens
            values = activations(tokens.inputs[rows], block, function)
            h = values.h
            if isinstance(rule, AllRun):
                num_running[rows] += h.shape[1]
            else:
                runs = rule.runs(layer, expert, values).float()
                num_running[rows] += runs.sum(dim=1)
                h = h.mul_(runs)
            y[rows] += h.mul_(router_weights[part, None]) @ block.down
    return from_experts(y, weights, layer), num_running


def _whole(expert: Expert) -> NeuronBlock:
    """Returns all neurons of an expert in one block."""
    assert expert.down_bias() is None, "the papers' experts have no biases"
    blocks = list(expert.blocks())
    assert all(block.up_bias is None and block.gate is not None for block in blocks), "as the papers' experts"
    gates = [block.gate for block in blocks if block.gate is not None]
    return NeuronBlock(torch.cat(gates), *(torch.cat([getattr(b, name) for b in blocks]) for name in ("up", "down")))
