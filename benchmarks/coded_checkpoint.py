"""Writes a random checkpoint in the codes of published ones, streamed: DeepSeek-V3's FP8 or gpt-oss-120b's MXFP4.

By default two layers of the real dimensions, the first of DeepSeek-V3 without experts. Not a model: its weights mean
nothing; they are normally distributed (FP8), or all codes are as likely (MXFP4).
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats.families import published_config

_POOL_BYTES = (1 << 25) + 2  # no power of two, so that no row of a matrix meets itself again
_PIECE_BYTES = 1 << 23
_SHARD_BYTES = 4 << 30
_DEVIATION = 0.02
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}


class Tensor(NamedTuple):
    """A tensor to write; `values` says what is in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str  # matrix, norm, codes, blocks, scales, exponents

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return _ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


class Coded(ABC):
    """A checkpoint's config and tensors."""

    __slots__ = ()

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the shards."""


@dataclass(frozen=True, slots=True)
class Fp8Shape(Coded):
    """What of the model is chosen; all else is as in DeepSeek-V3. The first of `layers` has no experts."""

    layers: int = 2
    experts: int = 256
    hidden: int = 7168
    intermediate: int = 2048
    dense_intermediate: int = 18432
    vocab: int = 129280
    heads: int = 128

    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""
        return published_config("deepseek-v3") | {
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": min(8, self.experts),
            **({} if self.experts % 16 == 0 else {"n_group": 1, "topk_group": 1}),
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "intermediate_size": self.dense_intermediate,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
        }

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the shards."""
        d, f = self.hidden, self.intermediate
        yield Tensor("model.embed_tokens.weight", "BF16", (self.vocab, d), "matrix")
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Tensor(f"{layer}{name}.weight", "BF16", (d,), "norm")
            yield from self._attention(f"{layer}self_attn.")
            if i == 0:
                yield from _mlp(f"{layer}mlp.", d, self.dense_intermediate)
                continue
            yield Tensor(f"{layer}mlp.gate.weight", "BF16", (self.experts, d), "matrix")
            yield Tensor(f"{layer}mlp.gate.e_score_correction_bias", "F32", (self.experts,), "scales")
            yield from _mlp(f"{layer}mlp.shared_experts.", d, f)
            for e in range(self.experts):
                yield from _mlp(f"{layer}mlp.experts.{e}.", d, f)
        yield Tensor("model.norm.weight", "BF16", (d,), "norm")
        yield Tensor("lm_head.weight", "BF16", (self.vocab, d), "matrix")

    def _attention(self, layer: str) -> Iterator[Tensor]:
        d, q_rank, kv_rank, rope, head = self.hidden, 1536, 512, 64, 128
        yield Tensor(f"{layer}q_a_layernorm.weight", "BF16", (q_rank,), "norm")
        yield Tensor(f"{layer}kv_a_layernorm.weight", "BF16", (kv_rank,), "norm")
        shapes = {
            "q_a_proj": (q_rank, d),
            "q_b_proj": (self.heads * (head + rope), q_rank),
            "kv_a_proj_with_mqa": (kv_rank + rope, d),
            "kv_b_proj": (self.heads * 2 * head, kv_rank),
            "o_proj": (d, self.heads * head),
        }
        for name, shape in shapes.items():
            yield from _fp8(f"{layer}{name}.weight", *shape)


def _mlp(place: str, d: int, f: int) -> Iterator[Tensor]:
    for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
        yield from _fp8(f"{place}{name}_proj.weight", *shape)


def _fp8(name: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield Tensor(name, "F8_E4M3", (rows, cols), "codes")
    yield Tensor(f"{name}_scale_inv", "F32", (-(-rows // 128), -(-cols // 128)), "scales")


@dataclass(frozen=True, slots=True)
class Mxfp4Shape(Coded):
    """What of the model is chosen; all else is as in gpt-oss-120b."""

    layers: int = 2
    experts: int = 128
    hidden: int = 2880
    intermediate: int = 2880
    vocab: int = 201088
    heads: int = 64
    kv_heads: int = 8

    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""
        config = published_config("gpt-oss-120b")
        return config | {
            "num_hidden_layers": self.layers,
            "layer_types": config["layer_types"][: self.layers],
            "num_local_experts": self.experts,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the shards."""
        d, f, E = self.hidden, self.intermediate, self.experts
        q, kv = 64 * self.heads, 64 * self.kv_heads
        yield Tensor("model.embed_tokens.weight", "BF16", (self.vocab, d), "matrix")
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Tensor(f"{layer}{name}.weight", "BF16", (d,), "norm")
            yield Tensor(f"{layer}self_attn.sinks", "BF16", (self.heads,), "norm")
            for name, shape in {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}.items():
                yield Tensor(f"{layer}self_attn.{name}_proj.weight", "BF16", shape, "matrix")
                yield Tensor(f"{layer}self_attn.{name}_proj.bias", "BF16", shape[:1], "norm")
            yield Tensor(f"{layer}mlp.router.weight", "BF16", (E, d), "matrix")
            yield Tensor(f"{layer}mlp.router.bias", "BF16", (E,), "norm")
            for name, rows, cols in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
                place = f"{layer}mlp.experts.{name}"
                yield Tensor(f"{place}_blocks", "U8", (E, rows, cols // 32, 16), "blocks")
                yield Tensor(f"{place}_scales", "U8", (E, rows, cols // 32), "exponents")
                yield Tensor(f"{place}_bias", "BF16", (E, rows), "norm")
        yield Tensor("model.norm.weight", "BF16", (d,), "norm")
        yield Tensor("lm_head.weight", "BF16", (self.vocab, d), "matrix")


SHAPES: dict[str, type[Fp8Shape] | type[Mxfp4Shape]] = {"deepseek-v3": Fp8Shape, "gpt-oss-120b": Mxfp4Shape}


def generate_coded(folder: Path, shape: Coded, seed: int = 0) -> int:
    """Writes the checkpoint, holding some 200 MB, and brings it to the drive; returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    pools = _pools(generator)
    shards: list[list[Tensor]] = [[]]
    for tensor in shape.tensors():
        if shards[-1] and sum(held.num_bytes for held in shards[-1]) + tensor.num_bytes > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, tensors, pools, generator)
        weight_map |= {tensor.name: name for tensor in tensors}
    num_bytes = sum(tensor.num_bytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return num_bytes


def _pools(generator: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    """Bytes of each kind of values, the end repeating the start: u8 [_POOL_BYTES + _PIECE_BYTES]."""
    normal = torch.from_numpy(generator.standard_normal(_POOL_BYTES, np.float32))
    byte = generator.integers(0, 256, _POOL_BYTES, np.uint8)
    held = {
        "matrix": (_DEVIATION * normal[: _POOL_BYTES // 2]).to(torch.bfloat16).view(torch.uint8).numpy(),
        "norm": (1 + _DEVIATION * normal[: _POOL_BYTES // 2]).to(torch.bfloat16).view(torch.uint8).numpy(),
        "codes": (100 * normal).to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
        "scales": np.full(_POOL_BYTES // 4 + 1, _DEVIATION / 100, np.float32).view(np.uint8)[:_POOL_BYTES],
        "blocks": byte,
        "exponents": (118 + byte % 4).astype(np.uint8),
    }
    return {name: np.concatenate((pool, pool[:_PIECE_BYTES])) for name, pool in held.items()}


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
        os.fsync(file.fileno())  # a measurement that follows shall not pay for these writes


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", type=click.Choice(list(SHAPES)), default="deepseek-v3", show_default=True)
@click.option("--layers", default=2, show_default=True)
def main(folder: Path, model: str, layers: int) -> None:
    """Writes it."""
    click.echo(f"{folder}: {generate_coded(folder, SHAPES[model](layers=layers)):,} bytes")


if __name__ == "__main__":
    main()
