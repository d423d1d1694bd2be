"""What every expert of a model sees of a text, for benchmarks: layer by layer, all tokens in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.calib import Tokens
from moe_pack.runtime import (
    KVCache,
    Rope,
    Weights,
    add_attention,
    embed,
    mlp_input,
    route_tokens,
    run_expert,
    run_unrouted,
)


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """The tokens that go to an expert: what it sees, float32 [n, d], and the weight of each, float32 [n]."""

    layer_idx: int
    expert: int
    x: Tensor
    weights: Tensor


@torch.inference_mode()
def expert_inputs(weights: Weights, tokens: Tokens) -> Iterator[ExpertInputs]:
    """Every expert once, in order, as the model runs over the text with these weights."""
    spec = weights.spec
    ids = torch.from_numpy(tokens.sequences.astype("int64"))
    sequence_length = ids.shape[1]
    angles = Rope(spec.rotation, torch.device("cpu"))(torch.arange(sequence_length), sequence_length)
    hidden = [embed(sequence, weights) for sequence in ids]
    for layer in range(spec.num_hidden_layers):
        for number, x in enumerate(hidden):
            cache = KVCache(spec, sequence_length, torch.device("cpu"), num_layers=1).layer(0)
            hidden[number] = add_attention(x, weights, layer, cache, angles)
        x = torch.cat(hidden)  # [T, d]
        inputs = mlp_input(x, weights, layer)
        if (unrouted := run_unrouted(inputs, weights, layer)) is not None:
            x = x + unrouted * spec.residual_multiplier
        if layer in spec.moe_layers:
            layer_idx = spec.moe_layers.index(layer)
            experts, router_weights = route_tokens(inputs, weights, layer)
            for expert in range(spec.router.num_experts):
                token_idx, place = torch.where(experts == expert)
                found = ExpertInputs(layer_idx, expert, inputs[token_idx], router_weights[token_idx, place])
                yield found
                output = run_expert(found.x, weights.expert(layer_idx, expert), spec.expert.function, "none", 0.0)
                x.index_add_(0, token_idx, output * (found.weights * spec.residual_multiplier)[:, None])
        hidden = list(torch.split(x, sequence_length))
