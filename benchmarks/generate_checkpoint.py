"""Writes a random Mixtral or Qwen3-MoE checkpoint of any size, streamed: by default some layers of the dimensions of
Mixtral-8x7B (2) or Qwen3-30B-A3B (4).

Not a model: its weights mean nothing. They are normally distributed, so quantizers do their usual work on them.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

_STANDARD_DEVIATION = 0.02
_POOL_WEIGHTS = (1 << 24) + 1  # 32 MiB of bfloat16; odd, so that no row of a matrix meets itself again
_PIECE_WEIGHTS = 1 << 22


class AnyShape(ABC):
    """The dimensions of a checkpoint."""

    __slots__ = ()

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the shards."""

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * int(np.prod(shape)) for _, shape in self.tensors())


@dataclass(frozen=True, slots=True)
class Shape(AnyShape):
    """What of the model is chosen; all else is as in Mixtral-8x7B."""

    layers: int = 2
    hidden: int = 4096
    intermediate: int = 14336
    experts: int = 8
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32000

    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "num_experts_per_tok": min(2, self.experts),
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the shards."""
        d, f, kv = self.hidden, self.intermediate, self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, d)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (d,)
            for name, rows in (("q", d), ("k", kv), ("v", kv), ("o", d)):
                yield f"{layer}.self_attn.{name}_proj.weight", (rows, d)
            yield f"{layer}.post_attention_layernorm.weight", (d,)
            yield f"{layer}.block_sparse_moe.gate.weight", (self.experts, d)
            for e in range(self.experts):
                expert = f"{layer}.block_sparse_moe.experts.{e}"
                yield f"{expert}.w1.weight", (f, d)
                yield f"{expert}.w2.weight", (d, f)
                yield f"{expert}.w3.weight", (f, d)
        yield "model.norm.weight", (d,)
        yield "lm_head.weight", (self.vocab, d)


@dataclass(frozen=True, slots=True)
class Qwen3Shape(AnyShape):
    """What of the model is chosen; all else is as in Qwen3-30B-A3B. `intermediate` is an expert's."""

    layers: int = 4
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 151936

    def config(self) -> dict[str, object]:
        """The checkpoint's config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.intermediate,  # of layers without experts: there are none
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": min(8, self.experts),
            "norm_topk_prob": True,
            "vocab_size": self.vocab,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the shards."""
        d, f, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, d)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (d,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{layer}.self_attn.{name}_proj.weight", (rows, d)
            yield f"{layer}.self_attn.o_proj.weight", (d, q)
            for name in ("q", "k"):
                yield f"{layer}.self_attn.{name}_norm.weight", (self.head_dim,)
            yield f"{layer}.post_attention_layernorm.weight", (d,)
            yield f"{layer}.mlp.gate.weight", (self.experts, d)
            for e in range(self.experts):
                expert = f"{layer}.mlp.experts.{e}"
                yield f"{expert}.gate_proj.weight", (f, d)
                yield f"{expert}.up_proj.weight", (f, d)
                yield f"{expert}.down_proj.weight", (d, f)
        yield "model.norm.weight", (d,)
        yield "lm_head.weight", (self.vocab, d)


SHAPES: dict[str, type[Shape] | type[Qwen3Shape]] = {"mixtral": Shape, "qwen3": Qwen3Shape}


def generate(
    folder: Path, shape: AnyShape, seed: int = 0, shard_bytes: int = 2 << 30, embedding_doublings: int = 0
) -> int:
    """Writes the checkpoint, holding some 100 MB, and brings it to the drive; returns the bytes of its tensors.

    Args:    embedding_doublings: how often the embedding is doubled. As it is, it is so small beside what layers add
             that after some layers all tokens of a context look alike, and go to the same experts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pool = _pool(seed)
    shards = _shards(shape, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, tensors, pool, np.random.default_rng([seed, number + 1]), embedding_doublings)
        weight_map |= {tensor: name for tensor, _ in tensors}
    index = {"metadata": {"total_size": shape.num_bytes()}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return shape.num_bytes()


def _shards(shape: AnyShape, shard_bytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Tensors shard by shard, none larger than `shard_bytes` unless one tensor is."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, dims in shape.tensors():
        num_bytes = 2 * int(np.prod(dims))
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, dims))
        filled += num_bytes
    return shards


def _pool(seed: int) -> NDArray[np.uint16]:
    """Normally distributed bfloat16 bits, u16 [_POOL_WEIGHTS + _PIECE_WEIGHTS], the end repeating the start."""
    generator = np.random.default_rng(seed)
    pool = np.empty(_POOL_WEIGHTS + _PIECE_WEIGHTS, np.uint16)
    for start in range(0, _POOL_WEIGHTS, _PIECE_WEIGHTS):
        stop = min(start + _PIECE_WEIGHTS, _POOL_WEIGHTS)
        values = generator.standard_normal(stop - start, np.float32) * np.float32(_STANDARD_DEVIATION)
        pool[start:stop] = _bf16_bits(values)
    pool[_POOL_WEIGHTS:] = pool[:_PIECE_WEIGHTS]
    return pool


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 values as the bits of bfloat16, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_shard(
    path: Path,
    tensors: list[tuple[str, tuple[int, ...]]],
    pool: NDArray[np.uint16],
    generator: np.random.Generator,
    embedding_doublings: int,
) -> None:
    """A safetensors file, piece by piece."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in tensors:
        start, end = end, end + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims in tensors:
            raised = np.uint16(embedding_doublings << 7 if "embed_tokens" in name else 0)  # added to exponents
            for piece in _norm(dims[0], generator) if len(dims) == 1 else _pieces(int(np.prod(dims)), pool, generator):
                file.write((piece + raised).data)
        file.flush()
        os.fsync(file.fileno())  # a benchmark that follows shall not pay for these writes


def _norm(num_weights: int, generator: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """A norm's weights, near one."""
    yield _bf16_bits(1 + np.float32(_STANDARD_DEVIATION) * generator.standard_normal(num_weights, np.float32))


def _pieces(num_weights: int, pool: NDArray[np.uint16], generator: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """A matrix: pieces of the pool from random places on, each with or without its signs turned."""
    while num_weights:
        size = min(num_weights, _PIECE_WEIGHTS)
        start = int(generator.integers(_POOL_WEIGHTS))
        yield pool[start : start + size] ^ np.uint16(0x8000 * int(generator.integers(2)))
        num_weights -= size


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--model", type=click.Choice(list(SHAPES)), default="mixtral", show_default=True, help="Whose dimensions."
)
@click.option("--layers", type=click.IntRange(1), help="Decoder layers.  [default: mixtral 2, qwen3 4]")
@click.option("--hidden", type=click.IntRange(64), help="Hidden size.  [default: the model's]")
@click.option("--intermediate", type=click.IntRange(1), help="Neurons.  [default: the model's]")
@click.option("--vocab", type=click.IntRange(2), help="Tokens known.  [default: the model's]")
@click.option("--shard-gib", default=2.0, show_default=True, help="Largest shard, GiB.")
@click.option("--seed", default=0, show_default=True, help="Another seed, other weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(folder: Path, model: str, shard_gib: float, seed: int, as_json: bool, **chosen: int | None) -> None:
    """Writes the checkpoint into FOLDER."""
    shape = SHAPES[model](**{name: size for name, size in chosen.items() if size is not None})
    if isinstance(shape, Shape) and shape.hidden % shape.heads:
        raise click.BadParameter(f"{shape.hidden} is no multiple of {shape.heads} heads", param_hint="--hidden")
    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} is not empty", param_hint="FOLDER")
    num_bytes = generate(folder, shape, seed, int(shard_gib * (1 << 30)))
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "bytes": num_bytes} | asdict(shape)))
    else:
        click.echo(f"{folder}: {num_bytes:,} bytes of weights")


if __name__ == "__main__":
    main()
