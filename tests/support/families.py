"""Tiny random checkpoints of every family, made and run by transformers; and configs close to theirs that we refuse.

Families that transformers has no class for are made and run by a plain reference instead (`references`). A row here
is a family's test: tests/endtoend/test_families.py and `make families` run every one of them.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_pack.formats import Pack
from moe_pack.formats.families.registry import all_families
from moe_pack.runtime import Sampler, SamplingOptions
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, EncoderDecoder, PackWeights
from support.all_attention import SHAPES, SWITCHED
from support.answers import is_greedy, start_token, their_answer, their_logits_one_by_one
from support.built_configs import BUILT_AS, FLAT, NEMOTRON, config_for_class, flat
from support.corrected import correct_minimax, limit_neurons, published_longrope
from support.hybrid_families import HYBRID_SHAPES, HYBRID_SWITCHED
from support.layered_attention import LAYERED_SHAPES, LAYERED_SWITCHED
from support.models import pack
from support.multimodal_parts import MULTIMODAL
from support.references import REFERENCES, SIZES, SMALLEST, SWITCHES
from support.residual_families import RESIDUAL_SHAPES, RESIDUAL_SWITCHED, experts_of_tokens, published_v4
from support.text_alone import TEXT_OF, leave_text, whole_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Values = dict[str, Any]
Oracle = Callable[[list[int]], torch.Tensor]
NUM_TOKENS, NUM_GREEDY, NUM_POSITIONS = 96, 32, 128
SMALL: Values = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": NUM_POSITIONS,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}


def quiet_transformers() -> None:
    """Turns off what transformers prints; it is imported where it is used, for it takes seconds."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped in transformers
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers


@dataclass(frozen=True)
class Tiny:
    """One shape of a family: `config` is what transformers is given beyond SMALL and the family's BASE.

    `fused`: experts are stored as transformers 5 holds them in memory. `four`: the config is rewritten as
    transformers 4 wrote it. Families with a reference have neither: one spelling is all that is published.
    """

    family: str
    name: str
    config: Values = field(default_factory=dict)
    fused: bool = False
    four: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 40,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 80}
BASE: dict[str, Values] = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 48},
    "qwen2_moe": EXPERTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | {"num_key_value_heads": 2, "head_dim": 32, "norm_topk_prob": True},
    "qwen3_next": EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "qwen3_5_moe_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "linear_head_dim": 16,
        "linear_num_heads": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "granitemoehybrid": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.05,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "nemotron_h": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 40,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "use_bias": True,
        "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    },
    "jamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "intermediate_size": 48,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "mamba_proj_bias": True,
    },
    "lfm2_moe": {
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "conv_bias": True,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "deepseek_v2": {
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": None,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": 40,
    },
    "phimoe": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "intermediate_size": 48,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_scaling": LONGROPE,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 7,
        "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
    },
    "dots1": {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "switch_transformers": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 48,
        "num_heads": 4,
        "num_layers": 4,
        "num_decoder_layers": 3,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "num_experts": 6,
        "vocab_size": 96,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "relative_attention_max_distance": 40,
    },
    **SHAPES,
    **RESIDUAL_SHAPES,
    **LAYERED_SHAPES,
    **HYBRID_SHAPES,
    **SMALLEST,
}
BASE["qwen3_5_moe"] = BASE["qwen3_5_moe_text"]
BASE |= dict.fromkeys(NEMOTRON[1:], BASE["nemotron_h"])
BASE["kimi_k2"] = BASE["deepseek_v3"] | {"n_group": 1, "topk_group": 1}
# Whose published checkpoints have all experts of a layer in one tensor.
FUSED_ALWAYS = (
    "aria",
    "dbrx",
    "gemma4",
    "gemma4_text",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "gpt_oss",
    "hy_v4",
    "llama4",
    "llama4_text",
    "mistral3",
    "mistral4",
    "qwen3_vl_moe",
)
# Which have an object with rotary positions for each kind of layer.
ROPE_BY_KIND = ("beam", "gemma4", "gemma4_text", "laguna", "mellum", "mimo_v2_flash", "step3p5", "step3p7")
# Whose published checkpoints have a matrix of all experts of a layer in one tensor.
STACKED = ("step3p5", "step3p7")
# Which read a share of each head that is rotated.
PARTLY_ROTATED = (
    "bailing_hybrid",
    "glm4_moe",
    "glm4v_moe",
    "minimax_m2",
    "minimax_m3_vl",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "qwen4_exp_text",
)
# Families whose layers need not have rotary positions, or which have no key for a neuron's function.
NOT_ROTARY = ("kimi_linear", "granitemoehybrid", "jamba", "lfm2_moe", *NEMOTRON)
WITH_ENCODER = ("switch_transformers",)
IN_TRANSFORMERS = tuple(family for family in BASE if family not in (*REFERENCES, *FLAT))
ROTARY = tuple(family for family in IN_TRANSFORMERS if family not in (*WITH_ENCODER, *NOT_ROTARY))
TEXT_KEYS = {family.model_type: family.text_keys for family in all_families()}
FULL_V2 = {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}

TINY: tuple[Tiny, ...] = (
    *(Tiny(family, "as it comes") for family in BASE),
    *(Tiny(family, "experts fused", fused=True) for family in (*ROTARY, *NOT_ROTARY[1:])),
    *(Tiny(family, "config of transformers 4", four=True) for family in IN_TRANSFORMERS),
    *(Tiny(family, name, switch) for family, switches in SWITCHES.items() for name, switch in switches.items()),
    *(
        Tiny(family, name, switch)
        for family, switches in (SWITCHED | RESIDUAL_SWITCHED | LAYERED_SWITCHED | HYBRID_SWITCHED).items()
        for name, switch in switches.items()
    ),
    Tiny("mixtral", "window of 7", {"sliding_window": 7}),
    Tiny("mixtral", "yarn", {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e4}}),
    *(
        Tiny(family, "yarn", {"rope_parameters": YARN | {"rope_theta": 1e5}})
        for family in ("qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "dots1")
    ),
    Tiny("glm4_moe", "yarn", {"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    Tiny("qwen2_moe", "every second layer", {"decoder_sparse_step": 2}),
    Tiny("qwen2_moe", "dense-only layers", {"mlp_only_layers": [0, 2]}),
    Tiny("qwen2_moe", "no bias, normalized", {"qkv_bias": False, "norm_topk_prob": True}),
    Tiny(
        "qwen3_moe",
        "window of 7, dense layer",
        {"use_sliding_window": True, "sliding_window": 7, "mlp_only_layers": [1]},
    ),
    Tiny("qwen3_moe", "bias, not normalized", {"attention_bias": True, "norm_topk_prob": False}),
    Tiny(
        "qwen3_next",
        "three kinds of layers, yarn",
        {
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    Tiny(
        "qwen3_next",
        "a value a key, longer kernel, bias, not normalized",
        {
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 6,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    Tiny(
        "qwen3_5_moe_text",
        "sections of positions, tied head",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            },
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    Tiny(
        "kimi_linear",
        "query latent, groups, two dense layers, longer kernel",
        {
            "q_lora_rank": 40,
            "num_expert_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "linear_conv_kernel_dim": 5,
            "moe_renormalize": False,
        },
    ),
    Tiny(
        "nemotron_h",
        "attention first, two mixers in turn, no bias, groups",
        {
            "layers_block_type": ["full_attention", "linear_attention", "moe", "linear_attention", "full_attention"],
            "use_bias": False,
            "use_conv_bias": False,
            "n_groups": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "time_step_min": 0.5,
        },
    ),
    Tiny(
        "jamba",
        "no bias, three Mamba layers of four, experts in front, tied head",
        {
            "mamba_proj_bias": False,
            "mamba_conv_bias": False,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_offset": 0,
            "mamba_dt_rank": "auto",
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
        },
    ),
    Tiny(
        "granitemoehybrid",
        "rotary, one group, biases, own head",
        {
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "mamba_d_conv": 3,
        },
    ),
    Tiny(
        "lfm2_moe",
        "no bias, not normalized, own head",
        {
            "conv_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
            "use_expert_bias": False,
            "conv_L_cache": 5,
            "routed_scaling_factor": 2.5,
        },
    ),
    Tiny(
        "deepseek_v2",
        "groups, query latent, yarn",
        FULL_V2
        | {
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    Tiny(
        "deepseek_v2",
        "yarn with two mscales",
        FULL_V2 | {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    Tiny("deepseek_v2", "no dense layer", {"first_k_dense_replace": 0}),
    Tiny(
        "deepseek_v3",
        "yarn with an mscale",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    Tiny(
        "deepseek_v3",
        "yarn with one bound, one group",
        {
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": YARN
            | {"rope_theta": 5e4, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 8.0},
        },
    ),
    Tiny(
        "deepseek_v3",
        "no query latent, rotated in halves, not normalized",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    Tiny("deepseek_v3", "no dense layer, tied head", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    Tiny(
        "phimoe",
        "window of 7, no scaling, no bias",
        {"sliding_window": 7, "rope_scaling": None, "attention_bias": False, "lm_head_bias": False},
    ),
    Tiny("phimoe", "wide band", {"router_jitter_noise": 0.4}),
    Tiny(
        "olmoe",
        "shared keys, bias, normalized",
        {"num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True},
    ),
    Tiny(
        "glm4_moe",
        "no norms, no bias, not normalized",
        {"use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    Tiny("granitemoe", "own head, bias", {"tie_word_embeddings": False, "attention_bias": True}),
    Tiny(
        "glm4_moe",
        "groups, a quarter rotated",
        {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    Tiny("gpt_oss", "window on two of three", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    Tiny(
        "gpt_oss",
        "window everywhere, three chosen",
        {"layer_types": ["sliding_attention"] * 3, "num_experts_per_tok": 3},
    ),
    Tiny("gpt_oss", "no window, tied head", {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    Tiny("gpt_oss", "no bias in attention, heads of 16", {"attention_bias": False, "head_dim": 16}),
    Tiny("gpt_oss", "plain positions", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    Tiny("dots1", "groups, bias", {"n_group": 4, "topk_group": 2, "attention_bias": True}),
    Tiny("dots1", "not normalized, own head size", {"norm_topk_prob": False, "head_dim": 32}),
    Tiny("dots1", "no dense layer, tied head", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    Tiny("switch_transformers", "capacity exceeded", {"expert_capacity": 5}),
    Tiny("switch_transformers", "own head", {"tie_word_embeddings": False}),
    Tiny(
        "switch_transformers",
        "experts in all layers, fewer buckets, wider heads",
        {
            "num_sparse_encoder_layers": 4,
            "num_sparse_decoder_layers": 3,
            "num_experts": 8,
            "relative_attention_num_buckets": 16,
            "d_kv": 24,
        },
    ),
    Tiny(
        "switch_transformers",
        "experts in the encoder alone, more buckets",
        {"num_decoder_layers": 1, "num_sparse_decoder_layers": 2, "relative_attention_num_buckets": 48},
    ),
)


def config_of(tiny: Tiny) -> PreTrainedConfig:
    """transformers' config of a row."""
    from transformers import AutoConfig

    quiet_transformers()
    whole = TEXT_OF.get(tiny.family, tiny.family)
    model_type = BUILT_AS.get(whole, whole)
    small = {} if tiny.family in (*WITH_ENCODER, "dbrx") else SMALL  # which name their sizes otherwise
    values = small | BASE[tiny.family] | tiny.config
    if whole in MULTIMODAL:
        values = MULTIMODAL[whole].config(values)
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **values)
    return config


def text_values(values: Values) -> Values:
    """The part of a config that describes the text model: all of it, unless it is multimodal."""
    for key in TEXT_KEYS[values["model_type"]]:
        values = values[key]
    return values


def with_text(values: Values, text: Values) -> Values:
    """The config with another text model."""
    path, inner = TEXT_KEYS[values["model_type"]], [values]
    for key in path:
        inner.append(inner[-1][key])
    for key, outer in zip(reversed(path), reversed(inner[:-1]), strict=True):
        text = outer | {key: text}
    return text


def write_config(tiny: Tiny, folder: Path) -> Values:
    """Writes the config.json of a row, and returns its values; a reference's has its class's defaults written out."""
    if tiny.family in REFERENCES:
        reference = REFERENCES[tiny.family]
        values = reference.completed(SIZES | BASE[tiny.family] | tiny.config) | {"model_type": tiny.family}
        (folder / "config.json").write_text(json.dumps(values))
        return values
    config_of(tiny).save_pretrained(folder)
    return named(tiny.family, folder)


def named(family: str, folder: Path) -> Values:
    """Gives the config.json in a folder its family's own name, and returns its values."""
    leave_text(family, folder)
    path = folder / "config.json"
    values: Values = json.loads(path.read_text())
    values = (flat(values) if family in FLAT else values) | {"model_type": family}
    path.write_text(json.dumps(values))
    return values


def write(tiny: Tiny, folder: Path) -> Path:
    """Writes the checkpoint of a row."""
    if tiny.family in REFERENCES:
        assert not tiny.fused and not tiny.four, "one spelling is all that is published"
        return REFERENCES[tiny.family].write(SIZES | BASE[tiny.family] | tiny.config, folder)
    write_random(config_of(tiny), folder, tiny.fused)
    values = named(tiny.family, folder)
    if tiny.four:
        four = with_text(values, as_transformers_4(text_values(values)))
        (folder / "config.json").write_text(json.dumps(four))
    return folder


def write_random(config: PreTrainedConfig, folder: Path, fused: bool = False) -> None:
    """Writes a checkpoint of random bfloat16 weights, none of which leaves a path unused or overwhelms another."""
    quiet_transformers()
    torch.manual_seed(7)
    model = class_of(config.model_type).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks", ".base", ".hc_base")):
                weight.normal_(std=0.2)
            elif name.endswith("tid2eid"):
                weight.copy_(experts_of_tokens(weight.shape, config.n_routed_experts))
            elif name.endswith("A_log"):
                weight.uniform_(-4, -1)  # states remember tens of tokens: what they give is no small rest of sums
            elif weight.ndim == 1 and re.search(r"(_hc|hc_head)\.\w+$", name):
                weight.uniform_(0.5, 1.5)  # of hyper-connections, which begin nearly without an effect
            elif weight.ndim == 1 and "norm" in name:
                usual = 0.0 if not weight.any() else 1.0  # zero-centered norms begin with zeros
                weight.uniform_(usual - 0.5, usual + 0.5)
            elif weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(std=0.15)
        if config.is_encoder_decoder:  # transformers 5 takes them apart where the head is not tied
            for stack in (model.encoder, model.decoder):
                stack.embed_tokens.weight.copy_(model.shared.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # angles of llama4's vision part, which is not run
        model.to(torch.bfloat16)
    model.save_pretrained(folder, save_original_format=not fused)


def class_of(model_type: str) -> Any:
    """The class of transformers that makes models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    if model_type in MULTIMODAL or model_type == "mistral4":  # of which transformers has no other entry
        return AutoModelForMultimodalLM
    return AutoModelForSeq2SeqLM if model_type in WITH_ENCODER else AutoModelForCausalLM


def as_transformers_4(values: Values) -> Values:
    """The config as version 4 spelled it."""
    if values["model_type"] == "deepseek_v4":
        return published_v4(values)
    if values["model_type"] in ROPE_BY_KIND:  # which version 4 did not have
        return {key: value for key, value in values.items() if key != "dtype"} | {"torch_dtype": values.get("dtype")}
    four = {key: value for key, value in values.items() if key not in ("dtype", "rope_parameters", "layer_types")}
    if values["model_type"] in NOT_ROTARY and "layer_types" in values:  # which always had it
        four["layer_types"] = values["layer_types"]
    if "minimax_m3_sparse" in (kinds := values.get("layer_types", ())):
        four["sparse_attention_config"] = {"sparse_attention_freq": [int(kind != "full_attention") for kind in kinds]}
    rope = dict(values.get("rope_parameters", {}))
    four |= {"torch_dtype": values.get("dtype")}
    if "rope_parameters" not in values:
        return four
    four |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        four["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope.pop("rope_type") != "default" or rope:
        four["rope_scaling"] = {"type": values["rope_parameters"]["rope_type"], **rope}
        four.pop("original_max_position_embeddings", None)
    if values["model_type"] in ("qwen3_moe", "qwen3_vl_moe_text"):
        four["num_experts"] = four.pop("num_local_experts")
    return four


def is_with_encoder(folder: Path) -> bool:
    """Whether the checkpoint is of a model with an encoder."""
    return json.loads((folder / "config.json").read_text())["model_type"] in WITH_ENCODER


def original(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers, float32."""
    quiet_transformers()
    values = json.loads((folder / "config.json").read_text())
    config, kind = config_for_class(folder), class_of(TEXT_OF.get(values["model_type"], values["model_type"]))
    model: PreTrainedModel = kind.from_pretrained(folder, config=config or whole_config(values), dtype=torch.float32)
    model = getattr(model, "thinker", model)  # the whole of qwen3_omni_moe has no logits, only its thinker
    model.train(False)
    if model.config.model_type == "minimax":
        correct_minimax(model)
    rope: Values = getattr(model.config, "rope_parameters", {})
    if model.config.model_type == "phimoe" and rope["rope_type"] == "longrope":
        model.model.rotary_emb.forward = published_longrope(rope)
    if model.config.model_type == "bailing_hybrid":
        limit_neurons(model)
    return model


def oracle(folder: Path) -> Oracle:
    """What says the logits of a text, float32 [T, vocab], by the checkpoint in a folder."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    if family in REFERENCES:
        return partial(REFERENCES[family].logits_of, folder)
    model = original(folder)

    def by_transformers(ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    return by_transformers


@dataclass(frozen=True)
class Comparison:
    """Largest differences from the oracle's logits, and whether greedy text is the same."""

    prefill: float
    token_by_token: float
    greedy_equal: bool
    largest_logit: float


def token_ids() -> list[int]:
    """Tokens that use most of the vocabulary, in no simple order."""
    return [(11 * i * i + 5 * i + 3) % SMALL["vocab_size"] for i in range(NUM_TOKENS)]


@torch.no_grad()
def compare(tiny: Tiny, folder: Path) -> Comparison:
    """Makes the checkpoint, packs it in 16 bit, and runs both, past every window and scaling limit.

    Token by token, what counts is what the oracle says of the text so far: a row of what it says of the whole text,
    but for longrope, which looks at the length.
    """
    source = write(tiny, folder / "source")
    pack(source, folder / "packed", width=16)
    ids = token_ids()
    if is_with_encoder(source):
        return compare_answers(original(source), ids, folder / "packed")
    reference = oracle(source)
    steps = whole = reference(ids)
    is_by_length = '"longrope"' in (source / "config.json").read_text()
    if is_by_length:
        steps = torch.stack([reference(ids[: n + 1])[-1] for n in range(NUM_TOKENS)])
    with Pack(folder / "packed") as opened:
        decoder = Decoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        prefill = decoder.logits(ids)
        decoder.reset()
        one_by_one = torch.stack([decoder.next_logits([token]) for token in ids])
        decoder.reset()
        made = list(generate(decoder, ids[:24], Sampler(SamplingOptions(temperature=0)), NUM_GREEDY, frozenset()))
    text = [*ids[:24], *made]
    before = reference(text)[23:-1]
    if is_by_length:
        before = torch.stack([reference(text[:n])[-1] for n in range(24, len(text))])
    return Comparison(
        prefill=float((prefill - whole).abs().max()),
        token_by_token=float((one_by_one - steps).abs().max()),
        greedy_equal=is_greedy(made, before) and len(made) == NUM_GREEDY,
        largest_logit=float(whole.abs().max()),
    )


@torch.no_grad()
def briefly_differs(tiny: Tiny, folder: Path) -> float:
    """The largest difference of logits in a chunk of two thirds of the text and, one by one, in the tokens after it."""
    source = write(tiny, folder / "source")
    pack(source, folder / "packed", width=16)
    ids, begin = token_ids(), 2 * NUM_TOKENS // 3
    expected = oracle(source)(ids)
    assert expected.abs().max() > 0.5, "logits so small that the bound would prove nothing"
    with Pack(folder / "packed") as opened:
        decoder = Decoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        chunk = decoder.logits(ids[:begin])
        one_by_one = [decoder.next_logits([token]) for token in ids[begin:]]
    return float((torch.cat((chunk, torch.stack(one_by_one))) - expected).abs().max())


def compare_answers(model: PreTrainedModel, text: list[int], packed: Path) -> Comparison:
    """The same for a model with an encoder: a text, and an answer that is given, or made."""
    answer = [start_token(model), *text[20:80]]
    expected, steps = their_answer(model, text, answer), their_logits_one_by_one(model, text, answer)
    with Pack(packed) as opened:
        runs = EncoderDecoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        runs.encode(text)
        prefill = runs.logits(answer)
        runs.encode(text)
        one_by_one = torch.stack([runs.next_logits([token]) for token in answer])
        made = list(generate(runs, text, Sampler(SamplingOptions(temperature=0)), NUM_GREEDY, frozenset()))
    before = their_logits_one_by_one(model, text, [start_token(model), *made[:-1]])
    return Comparison(
        prefill=float((prefill - expected).abs().max()),
        token_by_token=float((one_by_one - steps).abs().max()),
        greedy_equal=is_greedy(made, before) and len(made) == NUM_GREEDY,
        largest_logit=float(expected.abs().max()),
    )


def is_bounded(comparison: Comparison, tolerance: float) -> bool:
    """Whether logits stay within `tolerance` and text is equal; a NaN is no agreement."""
    worst = max(comparison.prefill, comparison.token_by_token)
    return math.isfinite(worst) and worst < tolerance and comparison.greedy_equal
