"""Random checkpoints in the dimensions and codes of published models, written as a stream.

Mixtral-8x7B and Qwen3-30B-A3B in bfloat16, DeepSeek-V3 in FP8 with block scales, gpt-oss-120b in MXFP4. These are not
models: their weights mean nothing. They are normally distributed, or all codes are equally likely (MXFP4), so that
quantizers do their usual work on them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats.families.published import published_config
from support.models import DEMO_MODEL

_POOL_BYTES = (1 << 25) + 4  # no power of two, so that no row of a matrix meets itself again
_PIECE_BYTES = 1 << 23
_SHARD_BYTES = 2 << 30
_DEVIATION = 0.02
_EMBEDDING_SCALE = 256.0  # with less, all tokens of a context look alike after some layers, and choose the same experts
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
# By model: the config's names of an expert's neurons and of the number of experts.
_SIZE_KEYS = {
    "mixtral-8x7b": ("intermediate_size", "num_local_experts"),
    "qwen3-30b-a3b": ("moe_intermediate_size", "num_experts"),
    "deepseek-v3": ("moe_intermediate_size", "n_routed_experts"),
    "gpt-oss-120b": ("intermediate_size", "num_local_experts"),
}
MODELS = tuple(_SIZE_KEYS)


class Tensor(NamedTuple):
    """A tensor to write; `values` says what is in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str  # embedding, matrix, norm, codes, blocks, scales, exponents

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model with some layers; sizes that are None are the model's own."""

    model: str
    layers: int = 2
    experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None

    def config(self) -> dict[str, object]:
        neurons, experts = _SIZE_KEYS[self.model]
        config = published_config(self.model)
        changes = {
            "hidden_size": self.hidden, neurons: self.intermediate, experts: self.experts, "vocab_size": self.vocab,
        }  # fmt: skip
        config |= {key: value for key, value in changes.items() if value is not None}
        config |= {
            "num_hidden_layers": self.layers,
            "num_experts_per_tok": min(config["num_experts_per_tok"], config[experts]),
        }
        if self.model == "deepseek-v3":
            config |= {"first_k_dense_replace": 1} | ({"n_group": 1, "topk_group": 1} if config[experts] % 16 else {})
        if self.model == "gpt-oss-120b":
            config["layer_types"] = config["layer_types"][: self.layers]
        return config

    def tensors(self) -> Iterator[Tensor]:
        config = self.config()
        d, vocab = int(str(config["hidden_size"])), int(str(config["vocab_size"]))
        yield Tensor("model.embed_tokens.weight", "BF16", (vocab, d), "embedding")
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Tensor(f"{layer}{name}.weight", "BF16", (d,), "norm")
            yield from _LAYERS[self.model](layer, number, config)
        yield Tensor("model.norm.weight", "BF16", (d,), "norm")
        yield Tensor("lm_head.weight", "BF16", (vocab, d), "matrix")

    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors())


def _matrices(place: str, shapes: dict[str, tuple[int, int]]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        yield Tensor(f"{place}{name}.weight", "BF16", shape, "matrix")


def _fp8_matrices(place: str, shapes: dict[str, tuple[int, int]]) -> Iterator[Tensor]:
    for name, (rows, cols) in shapes.items():
        yield Tensor(f"{place}{name}.weight", "F8_E4M3", (rows, cols), "codes")
        yield Tensor(f"{place}{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-cols // 128)), "scales")


def _projections(config: dict[str, object]) -> dict[str, tuple[int, int]]:
    d, heads, kv = (int(str(config[key])) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = int(str(config.get("head_dim") or d // heads))
    rows = {"q": heads * head_dim, "k": kv * head_dim, "v": kv * head_dim}
    return {f"{name}_proj": (n, d) for name, n in rows.items()} | {"o_proj": (d, heads * head_dim)}


def _sizes(config: dict[str, object], model: str) -> tuple[int, int, int]:
    neurons, experts = _SIZE_KEYS[model]
    d, f, E = (int(str(config[key])) for key in ("hidden_size", neurons, experts))
    return d, f, E


def _mixtral(layer: str, number: int, config: dict[str, object]) -> Iterator[Tensor]:
    d, f, E = _sizes(config, "mixtral-8x7b")
    yield from _matrices(f"{layer}self_attn.", _projections(config))
    yield from _matrices(f"{layer}block_sparse_moe.", {"gate": (E, d)})
    for e in range(E):
        yield from _matrices(f"{layer}block_sparse_moe.experts.{e}.", {"w1": (f, d), "w2": (d, f), "w3": (f, d)})


def _qwen3(layer: str, number: int, config: dict[str, object]) -> Iterator[Tensor]:
    d, f, E = _sizes(config, "qwen3-30b-a3b")
    yield from _matrices(f"{layer}self_attn.", _projections(config))
    for name in ("q", "k"):
        yield Tensor(f"{layer}self_attn.{name}_norm.weight", "BF16", (int(str(config["head_dim"])),), "norm")
    yield from _matrices(f"{layer}mlp.", {"gate": (E, d)})
    for e in range(E):
        yield from _matrices(f"{layer}mlp.experts.{e}.", _mlp(d, f))


def _mlp(d: int, f: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}


def _deepseek(layer: str, number: int, config: dict[str, object]) -> Iterator[Tensor]:
    d, f, E = _sizes(config, "deepseek-v3")
    heads, q_rank, kv_rank, rope, head = int(str(config["num_attention_heads"])), 1536, 512, 64, 128
    yield Tensor(f"{layer}self_attn.q_a_layernorm.weight", "BF16", (q_rank,), "norm")
    yield Tensor(f"{layer}self_attn.kv_a_layernorm.weight", "BF16", (kv_rank,), "norm")
    attention = {
        "q_a_proj": (q_rank, d), "q_b_proj": (heads * (head + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, d), "kv_b_proj": (heads * 2 * head, kv_rank),
        "o_proj": (d, heads * head),
    }  # fmt: skip
    yield from _fp8_matrices(f"{layer}self_attn.", attention)
    if number == 0:
        yield from _fp8_matrices(f"{layer}mlp.", _mlp(d, int(str(config["intermediate_size"]))))
        return
    yield from _matrices(f"{layer}mlp.", {"gate": (E, d)})
    yield Tensor(f"{layer}mlp.gate.e_score_correction_bias", "F32", (E,), "scales")
    for place in ("shared_experts", *(f"experts.{e}" for e in range(E))):
        yield from _fp8_matrices(f"{layer}mlp.{place}.", _mlp(d, f))


def _gpt_oss(layer: str, number: int, config: dict[str, object]) -> Iterator[Tensor]:
    d, f, E = _sizes(config, "gpt-oss-120b")
    yield Tensor(f"{layer}self_attn.sinks", "BF16", (int(str(config["num_attention_heads"])),), "norm")
    for name, shape in _projections(config).items():
        yield Tensor(f"{layer}self_attn.{name}.weight", "BF16", shape, "matrix")
        yield Tensor(f"{layer}self_attn.{name}.bias", "BF16", shape[:1], "norm")
    yield from _matrices(f"{layer}mlp.", {"router": (E, d)})
    yield Tensor(f"{layer}mlp.router.bias", "BF16", (E,), "norm")
    for name, rows, cols in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
        place = f"{layer}mlp.experts.{name}"
        yield Tensor(f"{place}_blocks", "U8", (E, rows, cols // 32, 16), "blocks")
        yield Tensor(f"{place}_scales", "U8", (E, rows, cols // 32), "exponents")
        yield Tensor(f"{place}_bias", "BF16", (E, rows), "norm")


_LAYERS = {"mixtral-8x7b": _mixtral, "qwen3-30b-a3b": _qwen3, "deepseek-v3": _deepseek, "gpt-oss-120b": _gpt_oss}


def generate(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Writes the checkpoint with the demo model's tokenizer, holding some 300 MB; returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    pools = _pools(generator)
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in shape.tensors():
        if shards[-1] and filled + tensor.num_bytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, tensors, pools, generator)
        weight_map |= {tensor.name: name for tensor in tensors}
    index = {"metadata": {"total_size": shape.num_bytes()}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return shape.num_bytes()


def _pools(generator: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    """Returns bytes of each kind of values, the end repeating the start: u8 [_POOL_BYTES + _PIECE_BYTES]."""
    normal = torch.from_numpy(generator.standard_normal(_POOL_BYTES, np.float32))
    half, byte = normal[: _POOL_BYTES // 2], generator.integers(0, 256, _POOL_BYTES, np.uint8)
    kinds = {
        "embedding": (_EMBEDDING_SCALE * _DEVIATION * half).to(torch.bfloat16).view(torch.uint8).numpy(),
        "matrix": (_DEVIATION * half).to(torch.bfloat16).view(torch.uint8).numpy(),
        "norm": (1 + _DEVIATION * half).to(torch.bfloat16).view(torch.uint8).numpy(),
        "codes": (100 * normal).to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
        "scales": np.full(_POOL_BYTES // 4, _DEVIATION / 100, np.float32).view(np.uint8), "blocks": byte,
        "exponents": (118 + byte % 4).astype(np.uint8),
    }  # fmt: skip
    return {name: np.concatenate((pool, pool[:_PIECE_BYTES])) for name, pool in kinds.items()}


def _write_shard(
    path: Path, tensors: list[Tensor], pools: dict[str, NDArray[np.uint8]], generator: np.random.Generator
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            left = tensor.num_bytes
            while left:
                size = min(left, _PIECE_BYTES)
                start = 4 * int(generator.integers(_POOL_BYTES // 4))
                file.write(pools[tensor.values][start : start + size].data)
                left -= size
        file.flush()
        os.fsync(file.fileno())  # a measurement that follows must not pay for these writes
