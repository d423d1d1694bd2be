"""What the references share: their tables of tensors, random checkpoints, and a decoder's parts in plain float32.

Naive on purpose: attention by whole matrices a head, experts token by token. Nothing of ours is imported here.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Values = dict[str, Any]  # of a config.json
Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """A published architecture that transformers has no class for.

    `defaults` are those of its configuration class. `shapes` gives every tensor's name and shape, `logits` the
    float32 logits [T, vocab] of T tokens; both take values that `defaults` completed.
    """

    model_type: str
    architecture: str
    defaults: Values
    shapes: Callable[[Values], Shapes]
    logits: Callable[[Values, Weights, list[int]], torch.Tensor]

    def completed(self, values: Values) -> Values:
        """A config's values as the published configuration class completes them."""
        return self.defaults | values

    def write(self, values: Values, folder: Path, seed: int = 7) -> Path:
        """Writes config.json and random bfloat16 weights, the same for a seed wherever they are made."""
        folder.mkdir(parents=True, exist_ok=True)
        own = {"architectures": [self.architecture], "model_type": self.model_type, "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(own | values, indent=1))
        draw = np.random.RandomState(seed)  # numpy promises this stream for good
        shapes = sorted(self.shapes(self.completed(values)).items())
        save_file({name: random_weight(name, shape, draw) for name, shape in shapes}, folder / "model.safetensors")
        return folder

    def logits_of(self, folder: Path, ids: list[int]) -> torch.Tensor:
        """The logits of a checkpoint in a folder, float32 [T, vocab]."""
        values = self.completed(json.loads((folder / "config.json").read_text()))
        weights = {name: held.float() for name, held in load_file(folder / "model.safetensors").items()}
        return self.logits(values, weights, ids)


def random_weight(name: str, shape: tuple[int, ...], draw: np.random.RandomState) -> torch.Tensor:
    """Weights that leave no path unused and overwhelm none: norms about 1, biases and matrices small."""
    if "norm" in name:
        made = draw.uniform(0.5, 1.5, shape)
    else:
        made = draw.standard_normal(shape) * (0.2 if name.endswith("bias") else 0.15)
    return torch.from_numpy(made).to(torch.bfloat16)


def decoder_shapes(values: Values) -> Shapes:
    """Embedding, head, norms and attention of every layer, as the references' classes name them."""
    d, heads = values["hidden_size"], values["num_attention_heads"]
    kv = num_kv_heads(values) * (d // heads)
    shapes: Shapes = {"model.embed_tokens.weight": (values["vocab_size"], d), "model.norm.weight": (d,)}
    if not values["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (values["vocab_size"], d)
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        for name, rows in (("q", d), ("k", kv), ("v", kv), ("o", d)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, d)
            if values["attention_bias"]:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
    return shapes


def num_kv_heads(values: Values) -> int:
    """How many heads have keys and values; each, where the config says null."""
    return int(values["num_key_value_heads"] or values["num_attention_heads"])


def swiglu_shapes(prefix: str, size: int, d: int, names: tuple[str, str, str]) -> Shapes:
    """The three matrices of a gated feed-forward layer: gate, up, down by their names."""
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": (size, d),
        f"{prefix}.{up}.weight": (size, d),
        f"{prefix}.{down}.weight": (d, size),
    }


def head_of(values: Values, weights: Weights) -> torch.Tensor:
    """The matrix that gives logits."""
    return weights["model.embed_tokens.weight" if values["tie_word_embeddings"] else "lm_head.weight"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row divided by the root of its mean square, times the weight."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """x W^T, plus the bias where there is one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def swiglu(x: torch.Tensor, weights: Weights, prefix: str, names: tuple[str, str, str]) -> torch.Tensor:
    """down (silu(gate x) * up x)."""
    gate, up, down = (f"{prefix}.{name}" for name in names)
    g = linear(x, weights, gate)
    return linear(g / (1 + torch.exp(-g)) * linear(x, weights, up), weights, down)


def turned(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions 0, 1, ... of one head [T, n]: value j against value j + n / 2."""
    num_tokens, size = heads.shape
    half = size // 2
    angles = torch.arange(num_tokens)[:, None] / theta ** (torch.arange(half) * 2 / size)  # [T, n / 2]
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=1
    )


def attention(x: torch.Tensor, values: Values, weights: Weights, prefix: str) -> torch.Tensor:
    """Causal attention, head by head; a group of query heads shares keys and values."""
    heads, size = values["num_attention_heads"], values["hidden_size"] // values["num_attention_heads"]
    q, k, v = (linear(x, weights, f"{prefix}.{name}_proj") for name in "qkv")
    allowed = torch.ones(len(x), len(x)).tril().bool()
    made = []
    for head in range(heads):
        shared = head // (heads // num_kv_heads(values))
        query = turned(q[:, head * size : (head + 1) * size], values["rope_theta"])
        key = turned(k[:, shared * size : (shared + 1) * size], values["rope_theta"])
        scores = (query @ key.T / math.sqrt(size)).masked_fill(~allowed, -torch.inf)
        made.append(torch.softmax(scores, dim=1) @ v[:, shared * size : (shared + 1) * size])
    return linear(torch.cat(made, dim=1), weights, f"{prefix}.o_proj")


def largest(scores: list[float], count: int) -> list[int]:
    """The places of the largest, the lower one among equals."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


def experts(
    x: torch.Tensor, weights: Weights, mlp: str, chosen: dict[int, torch.Tensor], names: tuple[str, str, str]
) -> torch.Tensor:
    """The outputs of a token's experts by their weights, and of shared experts, where there are any."""
    y = torch.zeros_like(x)
    for e, weight in chosen.items():
        y = y + weight * swiglu(x, weights, f"{mlp}.experts.{e}", names)
    shared = f"{mlp}.shared_experts"
    return y + swiglu(x, weights, shared, names) if f"{shared}.{names[0]}.weight" in weights else y


def decoder_logits(
    values: Values,
    weights: Weights,
    ids: list[int],
    feed_forward: Callable[[torch.Tensor, str], torch.Tensor],
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> torch.Tensor:
    """The logits of a text.

    Args:    feed_forward: of the normed hidden states, and the beginning of a layer's names.
             multipliers: of the embedding, of each half layer's result, and of what the head sees.
    """
    embedding, depth, last = multipliers
    eps, x = values["rms_norm_eps"], weights["model.embed_tokens.weight"][ids] * embedding
    for i in range(values["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        x = x + depth * attention(normed, values, weights, f"{layer}.self_attn")
        x = x + depth * feed_forward(
            rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps), f"{layer}.mlp"
        )
    return rms_norm(x, weights["model.norm.weight"], eps) * last @ head_of(values, weights).T
