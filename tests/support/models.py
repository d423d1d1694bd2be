"""Checkpoints and packs for tests: the demo model, and tiny random Mixtral checkpoints of any shape."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_pack.calib.quantize import Rotate, rotation_vectors
from moe_pack.convert import ConversionResult
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.formats import Quantizer, Selector, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint

TESTS = Path(__file__).parents[1]
DEMO_MODEL = TESTS / "models" / "tiny-mixtral"
BOOK = TESTS / "data" / "books-valid.txt"

Tensors = dict[str, torch.Tensor]
PackMaker = Callable[[Selector, int], Path]  # the fixture `demo_pack`


def with_tokenizer(folder: Path) -> Path:
    """Copies the demo model's tokenizer, which has 4,096 tokens, into a checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


@dataclass(frozen=True)
class TinyMixtral:
    """A random Mixtral checkpoint; `config` adds to or replaces keys of its config.json, None removes one."""

    hidden_size: int = 64
    intermediate_size: int = 48
    num_layers: int = 1
    num_experts: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    vocab_size: int = 96
    num_shards: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    config: dict[str, Any] = field(default_factory=dict)

    def write_with_tokenizer(self, folder: Path) -> Path:
        """The checkpoint in a folder, with the demo model's tokenizer, which takes a vocabulary of 4,096."""
        assert self.vocab_size == 4096, "the tokenizer's"
        return with_tokenizer(self.write(folder))

    def config_json(self) -> dict[str, Any]:
        values = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": min(2, self.num_experts),
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        } | self.config
        return {key: value for key, value in values.items() if value is not None}

    def tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.seed)
        d, f = self.hidden_size, self.intermediate_size
        kv = self.num_kv_heads * (d // self.num_heads)

        def matrix(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * 0.2).to(self.dtype)

        held = {"model.embed_tokens.weight": matrix(self.vocab_size, d)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            held |= {
                f"{layer}.input_layernorm.weight": torch.ones(d, dtype=self.dtype),
                f"{layer}.self_attn.q_proj.weight": matrix(d, d),
                f"{layer}.self_attn.k_proj.weight": matrix(kv, d),
                f"{layer}.self_attn.v_proj.weight": matrix(kv, d),
                f"{layer}.self_attn.o_proj.weight": matrix(d, d),
                f"{layer}.post_attention_layernorm.weight": torch.ones(d, dtype=self.dtype),
                f"{layer}.block_sparse_moe.gate.weight": matrix(self.num_experts, d),
            }
            for e in range(self.num_experts):
                expert = f"{layer}.block_sparse_moe.experts.{e}"
                held[f"{expert}.w1.weight"] = matrix(f, d)
                held[f"{expert}.w2.weight"] = matrix(d, f)
                held[f"{expert}.w3.weight"] = matrix(f, d)
        held["model.norm.weight"] = torch.ones(d, dtype=self.dtype)
        held["lm_head.weight"] = matrix(self.vocab_size, d)
        return held

    def write(self, folder: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
        """Writes the checkpoint; `change` may alter its tensors before."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config_json()))
        tensors = self.tensors()
        change(tensors)
        if self.num_shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = sorted(tensors)
        weight_map: dict[str, str] = {}
        for number in range(self.num_shards):
            shard = f"model-{number + 1:05d}-of-{self.num_shards:05d}.safetensors"
            held = {name: tensors[name] for name in names[number :: self.num_shards]}
            save_file(held, folder / shard)
            weight_map |= dict.fromkeys(held, shard)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def pack(
    source: Path,
    out: Path,
    *,
    selector: Selector = "up",
    width: int = 4,
    group: int = 16,
    scale_bits: int = 16,
    dense_width: int | None = None,
    quantizer: Quantizer = "nearest",
    workers: int = 1,
    rotate: Rotate = "off",
) -> ConversionResult:
    """Converts a checkpoint with every part alike; `nearest` by default, because it is quick."""
    checkpoint = Checkpoint(source)
    part = part_format(width, group, scale_bits)
    dense = None if dense_width is None else part_format(dense_width, group, scale_bits)
    try:
        plan = uniform_plan(checkpoint.spec, selector, part, part, dense, quantizer)
        return convert(
            checkpoint, plan, out, workers, prepared=Preparation(rotation=rotation_vectors(checkpoint.spec, rotate))
        )
    finally:
        checkpoint.close()
