"""Writes a random Mixtral checkpoint of any size, streamed: by default two layers of Mixtral-8x7B's dimensions.

Not a model: its weights mean nothing. They are normally distributed, so quantizers do their usual work on them.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

_STANDARD_DEVIATION = 0.02
_POOL_WEIGHTS = (1 << 24) + 1  # 32 MiB of bfloat16; odd, so that no row of a matrix meets itself again
_PIECE_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Shape:
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

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * int(np.prod(shape)) for _, shape in self.tensors())


_MIXTRAL_8X7B = Shape()


def generate(folder: Path, shape: Shape, seed: int = 0, shard_bytes: int = 2 << 30) -> int:
    """Writes the checkpoint, holding some 100 MB, and brings it to the drive; returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = _pool(seed)
    shards = _shards(shape, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, tensors, pool, np.random.default_rng([seed, number + 1]))
        weight_map |= {tensor: name for tensor, _ in tensors}
    index = {"metadata": {"total_size": shape.num_bytes()}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return shape.num_bytes()


def _shards(shape: Shape, shard_bytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
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
    path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: NDArray[np.uint16], generator: np.random.Generator
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
        for _, dims in tensors:
            for piece in _norm(dims[0], generator) if len(dims) == 1 else _pieces(int(np.prod(dims)), pool, generator):
                file.write(piece.data)
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
    "--layers", default=_MIXTRAL_8X7B.layers, show_default=True, type=click.IntRange(1), help="Decoder layers."
)
@click.option("--hidden", default=_MIXTRAL_8X7B.hidden, show_default=True, type=click.IntRange(64), help="Hidden size.")
@click.option(
    "--intermediate", default=_MIXTRAL_8X7B.intermediate, show_default=True, type=click.IntRange(1), help="Neurons."
)
@click.option("--vocab", default=_MIXTRAL_8X7B.vocab, show_default=True, type=click.IntRange(2), help="Tokens known.")
@click.option("--shard-gib", default=2.0, show_default=True, help="Largest shard, GiB.")
@click.option("--seed", default=0, show_default=True, help="Another seed, other weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    folder: Path, layers: int, hidden: int, intermediate: int, vocab: int, shard_gib: float, seed: int, as_json: bool
) -> None:
    """Writes the checkpoint into FOLDER."""
    if hidden % _MIXTRAL_8X7B.heads:
        raise click.BadParameter(f"{hidden} is no multiple of {_MIXTRAL_8X7B.heads} heads", param_hint="--hidden")
    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} is not empty", param_hint="FOLDER")
    shape = Shape(layers=layers, hidden=hidden, intermediate=intermediate, vocab=vocab)
    num_bytes = generate(folder, shape, seed, int(shard_gib * (1 << 30)))
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "bytes": num_bytes} | asdict(shape)))
    else:
        click.echo(f"{folder}: {num_bytes:,} bytes of weights")


if __name__ == "__main__":
    main()
