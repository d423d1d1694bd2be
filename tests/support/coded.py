"""Checkpoints in FP8 with a scale a block, MXFP4 blocks, and integers in packed words, with their plain meaning."""

import dataclasses
from typing import Any

import torch

from moe_pack.formats import Matrix, ModelSpec
from moe_pack.formats.families.family import Config, ExpertNames, Family
from moe_pack.formats.families.mixtral import MIXTRAL
from support.models import Tensors

FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
MXFP4_CONFIG: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
PACKED_WEIGHTS: dict[str, Any] = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def block_scales(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for each value: float32 [rows, columns] of scales [rows of blocks, columns of blocks]."""
    rows, cols = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
    return scales[rows][:, cols]


def to_fp8(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = (-(-size // 128) for size in weights.shape)
    scales = torch.empty(rows, cols)
    for r in range(rows):
        for c in range(cols):
            block = weights[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].float()
            scales[r, c] = block.abs().max().clamp(min=1e-9) / 448
    return (weights.float() / block_scales(scales, weights.shape)).to(torch.float8_e4m3fn), scales


def from_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * block_scales(scales, codes.shape)


def quantize_fp8(tensors: Tensors, endings: tuple[str, ...]) -> Tensors:
    """Puts the matrices whose names end so into FP8; returns what each then means, float32."""
    meant = {}
    for name in [name for name in tensors if name.endswith(endings)]:
        codes, scales = to_fp8(tensors[name])
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        meant[name] = from_fp8(codes, scales)
    return meant


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 [..., n] for MXFP4 blocks u8 [..., n / 32, 16] and E8M0 scales u8 [..., n / 32]."""
    values = torch.tensor(E2M1)[torch.stack((blocks & 15, blocks >> 4), dim=-1).long()].flatten(-2)  # [..., n / 32, 32]
    return (values.double() * torch.pow(2.0, scales.double() - 127).unsqueeze(-1)).float().flatten(-2)


def random_mxfp4(
    shape: tuple[int, ...], generator: torch.Generator, lowest: int = 112, highest: int = 125
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales for a tensor of this shape; scales are bytes from `lowest` to `highest`."""
    *rows, num_cols = shape
    blocks = torch.randint(0, 256, (*rows, num_cols // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, (*rows, num_cols // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def packed_config(**weights: Any) -> dict[str, Any]:
    """The `quantization_config` of published checkpoints in packed words, with other values for the weights."""
    scheme = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"weights": PACKED_WEIGHTS | weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed_words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Signed codes [rows, columns] in words, int32 [rows, words]: the first column in the lowest bits, plus an offset.

    Source: compressed-tensors, pack_to_int32, of which tests/formats/test_packed_sources.py has some words.
    """
    places = torch.arange(0, 32, num_bits)
    values = (codes.long() + 2 ** (num_bits - 1)).view(len(codes), -1, 32 // num_bits)
    words = (values << places).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def quantize_packed(
    tensors: Tensors, endings: tuple[str, ...], num_bits: int = 4, group_size: int = 32, dtype: str = "bfloat16"
) -> Tensors:
    """Puts the matrices whose names end so into packed words; returns what each then means, float32."""
    meant = {}
    for name in [name for name in tensors if name.endswith(endings)]:
        weights = tensors.pop(name).float()
        grouped = weights.view(len(weights), -1, group_size or weights.shape[1])
        scales = (grouped.abs().amax(2) / (2 ** (num_bits - 1) - 0.5)).to(getattr(torch, dtype))
        lowest = -(2 ** (num_bits - 1))
        codes = (grouped / scales.float().unsqueeze(2)).round().clamp(lowest, -lowest - 1).long()  # no -0
        tensors |= {
            f"{name}_packed": packed_words(codes.view_as(weights), num_bits),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(weights.shape),
        }
        meant[name] = (codes * scales.float().unsqueeze(2)).view_as(weights)
    return meant


EXPERTS = "model.layers.{i}.experts."
BLOCK_NAMES: dict[Matrix, str] = {
    "gate": EXPERTS + "gate_up_blocks", "up": EXPERTS + "gate_up_blocks", "down": EXPERTS + "down_blocks",
}  # fmt: skip
SCALE_NAMES: dict[Matrix, str] = {
    "gate": EXPERTS + "gate_up_scales", "up": EXPERTS + "gate_up_scales", "down": EXPERTS + "down_scales",
}  # fmt: skip
BIAS_NAMES: dict[Matrix, str] = {"gate": EXPERTS + "gate_up_bias", "up": EXPERTS + "gate_up_bias"}
IN_BLOCKS = ExpertNames(BLOCK_NAMES, BIAS_NAMES, interleaved=True, scales=SCALE_NAMES)


def held_so(names: ExpertNames, bias: tuple[Matrix, ...] = ()) -> Family:
    """Mixtral with experts held in this way, and biases: for tests of ways that no family of theirs has."""

    def read_config(config: Config) -> ModelSpec:
        spec = MIXTRAL.read_config(config)
        return dataclasses.replace(spec, expert=dataclasses.replace(spec.expert, bias=bias))

    return dataclasses.replace(MIXTRAL, expert_names=(names,), read_config=read_config)


def put_into_blocks(tensors: Tensors, f: int, d: int, highest: int = 125, lowest: int = 112) -> dict[str, torch.Tensor]:
    """Puts random MXFP4 experts in the place of a Mixtral's; returns what they mean under the names they had."""
    generator, meant = torch.Generator().manual_seed(11), {}
    layers = sorted({name.split(".")[2] for name in tensors if ".experts." in name})
    for i in layers:
        old = [name for name in tensors if name.startswith(f"model.layers.{i}.block_sparse_moe.experts.")]
        num_experts = len(old) // 3
        for name in old:
            del tensors[name]
        parts = {"gate_up": (num_experts, 2 * f, d), "down": (num_experts, d, f)}
        for part, shape in parts.items():
            blocks, scales = random_mxfp4(shape, generator, lowest, highest)
            place = EXPERTS.format(i=i) + part
            tensors |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
            weights = from_mxfp4(blocks, scales)
            for e in range(num_experts):
                expert = f"model.layers.{i}.block_sparse_moe.experts.{e}"
                if part == "down":
                    meant[f"{expert}.w2.weight"] = weights[e].clone()
                else:
                    meant |= {
                        f"{expert}.w1.weight": weights[e, 0::2].clone(),
                        f"{expert}.w3.weight": weights[e, 1::2].clone(),
                    }
    return meant


def put_gpt_oss_into_blocks(tensors: Tensors, num_layers: int, num_experts: int, f: int, d: int) -> None:
    """Puts random MXFP4 experts in the place of a gpt-oss's in 16 bit; biases stay."""
    generator = torch.Generator().manual_seed(3)
    for i in range(num_layers):
        for name, shape in (("gate_up_proj", (num_experts, 2 * f, d)), ("down_proj", (num_experts, d, f))):
            place = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[place]
            tensors[f"{place}_blocks"], tensors[f"{place}_scales"] = random_mxfp4(shape, generator, 119, 126)
