"""One expert over the tokens of a layer that go to it: its outputs added, and the neurons counted that did not run."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_pack.calib.expert_pass import CHUNK_TOKENS
from moe_pack.calib.layer_pass import LayerStates, LayerTokens
from moe_pack.runtime import Weights, activations, resting_output, running


def input_chunks(tokens: LayerTokens, token_idx: Tensor, device: torch.device) -> Iterator[tuple[Tensor, slice]]:
    """Inputs of these tokens [n, d] on the device, some at a time, and which of them they are."""
    for start in range(0, len(token_idx), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        yield tokens.inputs[token_idx[rows]].to(device), rows


def run_counted(
    states: LayerStates,
    tokens: LayerTokens,
    weights: Weights,
    number: tuple[int, int],
    threshold: float,
    on_tokens: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Adds an expert's outputs, weighted, to the hidden states of its tokens, by the reference semantics.

    Args:    number: MoE layer index and expert.   threshold: on `abs(a)`.   on_tokens: told of tokens done.
    Returns: its tokens, rising int64 [n], and how many of its neurons did not run for each, int64 [n].
    """
    spec = weights.spec
    token_idx, router_weights = tokens.of_expert(number[1])
    dropped = torch.empty(len(token_idx), dtype=torch.int64)
    for x, rows in input_chunks(tokens, token_idx, states.device):
        expert = weights.expert(*number)
        y, runs_of = resting_output(x, expert), torch.zeros(len(x), device=x.device)
        for block in expert.blocks():
            values = activations(x, block, spec.expert.function)
            a = values.of(weights.selector)
            runs = running(a, threshold)
            y.addmm_(torch.where(runs, values.h, 0.0), block.down)
            runs_of += runs.to(torch.float32).sum(dim=1)
        states.add(tokens, token_idx[rows], router_weights[rows], y)
        dropped[rows] = spec.expert.intermediate_size - runs_of.to("cpu", torch.int64)
        on_tokens(len(x))
    return token_idx, dropped
