"""Granite 3 MoE, 1B-A400M and 3B-A800M. Source: transformers, models/granitemoe; Granite 3.0 (IBM, 2024)."""

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import ExpertNames, Family
from moe_pack.formats.families.readers import DENSE_NAMES, attention_bias, read_decoder, read_grouped_query, read_rope


def _read_config(config: Config) -> ModelSpec:
    scale = config.number("attention_multiplier", 1)
    attention = read_grouped_query(config, bias=attention_bias(config), own_keys=True, scale=scale)
    experts, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    return read_decoder(
        config,
        "granitemoe",
        attention,
        read_rope(config, attention.head_dim),
        RouterSpec("topk_softmax", experts, chosen, normalize=False),
        config.whole("intermediate_size"),
        embedding_multiplier=config.number("embedding_multiplier", 1),
        residual_multiplier=config.number("residual_multiplier", 1),
        logits_scaling=config.number("logits_scaling", 1),
    )


GRANITEMOE = Family(
    model_type="granitemoe",
    short_names={
        "granite-1b-a400m": "ibm-granite/granite-3.0-1b-a400m-base",
        "granite-3.0-1b-a400m": "ibm-granite/granite-3.0-1b-a400m-base",
        "granite-3b-a800m": "ibm-granite/granite-3.0-3b-a800m-base",
        "granite-3.0-3b-a800m": "ibm-granite/granite-3.0-3b-a800m-base",
    },
    read_config=_read_config,
    dense_names={
        **DENSE_NAMES,
        "layers.{i}.router": (
            "model.layers.{i}.block_sparse_moe.router.layer.weight",
            "model.layers.{i}.block_sparse_moe.router.weight",
        ),
    },
    expert_names=(
        ExpertNames(
            {
                "gate": "model.layers.{i}.block_sparse_moe.input_linear.weight",
                "up": "model.layers.{i}.block_sparse_moe.input_linear.weight",
                "down": "model.layers.{i}.block_sparse_moe.output_linear.weight",
            }
        ),
        ExpertNames(
            {
                "gate": "model.layers.{i}.block_sparse_moe.experts.gate_up_proj",
                "up": "model.layers.{i}.block_sparse_moe.experts.gate_up_proj",
                "down": "model.layers.{i}.block_sparse_moe.experts.down_proj",
            }
        ),
    ),
)
