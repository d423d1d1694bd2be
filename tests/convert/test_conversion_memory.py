"""Conversions of large checkpoints take little more memory than an expert for each worker.

The checkpoints have the dimensions and codes of published models and random weights: normally distributed, so that
quantizers do their usual work on them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchlib import moe_pack_command
from benchlib.confined import Measured, MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes
from numpy.typing import NDArray
from support.models import with_tokenizer

from moe_pack.formats import Pack
from moe_pack.formats.families.published import published_config

POOL_BYTES = (1 << 25) + 4  # no power of two, so that no row of a matrix meets itself again
PIECE_BYTES = 1 << 23
DEVIATION = 0.02
EMBEDDING_SCALE = 256.0  # with less, all tokens of a context look alike after some layers, and choose the same experts
ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str  # embedding, matrix, norm, codes, scales

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


def matrices(place: str, shapes: dict[str, tuple[int, int]], is_fp8: bool) -> Iterator[Tensor]:
    for name, (rows, cols) in shapes.items():
        if is_fp8:
            yield Tensor(f"{place}{name}.weight", "F8_E4M3", (rows, cols), "codes")
            yield Tensor(f"{place}{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-cols // 128)), "scales")
        else:
            yield Tensor(f"{place}{name}.weight", "BF16", (rows, cols), "matrix")


def of_mixtral(layer: str, number: int, config: dict[str, Any]) -> Iterator[Tensor]:
    d, f, E = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = {"q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, d)}
    yield from matrices(f"{layer}self_attn.", attention, False)
    yield from matrices(f"{layer}block_sparse_moe.", {"gate": (E, d)}, False)
    for e in range(E):
        expert = {"w1": (f, d), "w2": (d, f), "w3": (f, d)}
        yield from matrices(f"{layer}block_sparse_moe.experts.{e}.", expert, False)


def of_deepseek(layer: str, number: int, config: dict[str, Any]) -> Iterator[Tensor]:
    d, f, E = (config[key] for key in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    heads, q_rank, kv_rank, rope, head = config["num_attention_heads"], 1536, 512, 64, 128
    for name, size in (("q_a", q_rank), ("kv_a", kv_rank)):
        yield Tensor(f"{layer}self_attn.{name}_layernorm.weight", "BF16", (size,), "norm")
    attention = {
        "q_a_proj": (q_rank, d),
        "q_b_proj": (heads * (head + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, d),
        "kv_b_proj": (heads * 2 * head, kv_rank),
        "o_proj": (d, heads * head),
    }
    yield from matrices(f"{layer}self_attn.", attention, True)
    places = [("mlp.", config["intermediate_size"])]
    if number:
        places = [(f"mlp.{expert}.", f) for expert in ("shared_experts", *(f"experts.{e}" for e in range(E)))]
        yield from matrices(f"{layer}mlp.", {"gate": (E, d)}, False)
        yield Tensor(f"{layer}mlp.gate.e_score_correction_bias", "F32", (E,), "scales")
    for place, rows in places:
        mlp = {"gate_proj": (rows, d), "up_proj": (rows, d), "down_proj": (d, rows)}
        yield from matrices(f"{layer}{place}", mlp, True)


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model with few layers, and some keys of its config changed."""

    model: str
    config: dict[str, int]

    def whole_config(self) -> dict[str, Any]:
        return published_config(self.model) | self.config

    def tensors(self) -> Iterator[Tensor]:
        config = self.whole_config()
        d, vocab = config["hidden_size"], config["vocab_size"]
        yield Tensor("model.embed_tokens.weight", "BF16", (vocab, d), "embedding")
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Tensor(f"{layer}{name}.weight", "BF16", (d,), "norm")
            yield from {"deepseek-v3": of_deepseek, "mixtral-8x7b": of_mixtral}[self.model](layer, number, config)
        yield Tensor("model.norm.weight", "BF16", (d,), "norm")
        yield Tensor("lm_head.weight", "BF16", (vocab, d), "matrix")


def pools(generator: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    """Returns bytes of each kind of values, the end repeating the start: u8 [POOL_BYTES + PIECE_BYTES]."""
    normal = torch.from_numpy(generator.standard_normal(POOL_BYTES, np.float32))
    half = normal[: POOL_BYTES // 2]
    kinds = {
        "embedding": (EMBEDDING_SCALE * DEVIATION * half).to(torch.bfloat16),
        "matrix": (DEVIATION * half).to(torch.bfloat16),
        "norm": (1 + DEVIATION * half).to(torch.bfloat16),
        "codes": (100 * normal).to(torch.float8_e4m3fn),
        "scales": torch.full((POOL_BYTES // 4,), DEVIATION / 100),
    }
    found = {name: pool.view(torch.uint8).numpy() for name, pool in kinds.items()}
    return {name: np.concatenate((pool, pool[:PIECE_BYTES])) for name, pool in found.items()}


def generate(folder: Path, shape: Shape) -> None:
    """Writes the checkpoint as a stream, with the demo model's tokenizer; some 300 MB are in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.whole_config()))
    with_tokenizer(folder)
    generator, header, end = np.random.default_rng(0), dict[str, object](), 0
    kinds = pools(generator)
    for tensor in shape.tensors():
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shape.tensors():
            for done in range(0, tensor.num_bytes, PIECE_BYTES):
                start = 4 * int(generator.integers(POOL_BYTES // 4))
                piece = kinds[tensor.values][start : start + min(PIECE_BYTES, tensor.num_bytes - done)]
                file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())  # a measurement that follows must not pay for these writes


FEW = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
CODED = Shape(
    "deepseek-v3",
    FEW | {"num_hidden_layers": 2, "n_routed_experts": 2, "hidden_size": 3584, "vocab_size": 100_000}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
)  # fmt: skip
PLAIN = Shape(
    "mixtral-8x7b",
    FEW | {"num_local_experts": 3, "hidden_size": 2048, "intermediate_size": 7168, "vocab_size": 80_000},
)
CALIBRATED = Shape(
    "mixtral-8x7b",
    FEW | {"num_local_experts": 2, "hidden_size": 1024, "intermediate_size": 1792, "vocab_size": 16_000},
)
NEEDED_DISK_BYTES = 2 * 10**9  # source 0.9 GB, pack 0.4 GB, and some space


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: these files are large."""
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_DISK_BYTES:
        pytest.skip(f"{tmp_path} has {free:,} bytes free, {NEEDED_DISK_BYTES:,} are needed")
    yield tmp_path
    shutil.rmtree(tmp_path)


def converted(folder: Path, options: list[str], cgroup: MemoryCgroup | None = None) -> Measured:
    """Converts `source` in a folder, with samples of the memory that it takes."""
    command = moe_pack_command("convert", folder / "source", "-o", folder / "out", "--workers", "2", *options)
    drop_page_cache(folder / "source")
    if cgroup is None:
        found = measure(command, tree_anonymous_bytes)
    else:
        found = measure(cgroup.inside(command), lambda pid: cgroup.anonymous_bytes())
    assert found.exit_code == 0, found.errors
    Pack(folder / "out").close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["source", "4"])
def test_a_conversion_of_fp8_takes_less_than_the_embedding_alone(bits: str, folder: Path) -> None:
    """A checkpoint of 2 GB, most of it the embedding and the head: no whole one, and of an expert its codes."""
    limit_bytes = 5 << 27
    generate(folder / "source", CODED)
    options = ["--selector-bits", bits, "--record-bits", bits]
    options += ["--dense-bits", "4", "--quantizer", "nearest"] if bits == "4" else []
    found = converted(folder, options)
    embedding_bytes = next(tensor.num_bytes for tensor in CODED.tensors() if "embed" in tensor.name)
    assert found.num_samples > 10 and found.peak_bytes < limit_bytes < embedding_bytes


@pytest.mark.slow  # some minutes, 2 GB of disk
@pytest.mark.parametrize("quantizer", ["hqq", "calibrated"])
def test_a_checkpoint_converts_inside_a_limit(quantizer: str, folder: Path) -> None:
    """The limit counts the page cache too, and HQQ's is less than the checkpoint. Python and torch take 0.25 GiB."""
    try:
        with MemoryCgroup(3 << 28) as cgroup:
            generate(folder / "source", PLAIN if quantizer == "hqq" else CALIBRATED)
            bits = "4" if quantizer == "hqq" else "2"
            options = ["--quantizer", quantizer, "--selector-bits", bits, "--record-bits", bits]
            if quantizer == "calibrated":  # two experts at once
                profile = ("profile", folder / "source", "-o", folder / "profile", "--tokens", 4096)
                made = measure(moe_pack_command(*profile, "--sensitivity", "none"), tree_anonymous_bytes)
                assert made.exit_code == 0, made.errors
                options += ["--codec", "trellis", "--profile", str(folder / "profile")]
                options += ["--dense-bits", "source"]  # without hqq, whose modules take 0.12 GiB
            found = converted(folder, options, cgroup)
            assert cgroup.num_kills in (0, None)
    except NoCgroupError as reason:
        pytest.skip(str(reason))
    assert found.num_samples > 100, "sampled too rarely to tell"
    assert found.peak_bytes <= 0.6 * (1 << 30)
