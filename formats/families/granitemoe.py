"""Granite 3 MoE 1B, 3B: multipliers of embedding, residual, attention and logits; experts fused in the source; a shared
expert in `granitemoeshared`.

Source: transformers, models/granitemoe and models/granitemoeshared; Granite 3.0 (IBM, 2024).
"""

from collections.abc import Mapping
from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import GroupedQuerySpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    attention = read_granite_attention(config)
    return read_granite(config, readers.LayerAttention(attention, rotary.read_rope(config, attention.head_dim)), None)


def _read_shared(config: family.Config) -> formats.ModelSpec:
    return replace(_read_config(config), shared_expert=read_shared_expert(config))


def read_granite_attention(config: family.Config) -> GroupedQuerySpec:
    """Reads a Granite model's attention, whose scale is a key."""
    scale = config.number("attention_multiplier", 1)
    return readers.read_grouped_query(config, bias=readers.attention_bias(config), own_keys=True, scale=scale)


def read_shared_expert(config: family.Config) -> formats.SharedExpertSpec | None:
    """Reads the shared expert; None if its size is 0."""
    size = config.count("shared_intermediate_size", 0)
    return formats.SharedExpertSpec(size, gated=False) if size else None


def read_granite(
    config: family.Config, attention: readers.LayerAttention, shared_expert: formats.SharedExpertSpec | None
) -> formats.ModelSpec:
    """Reads a Granite model of experts, with this attention and shared expert."""
    experts, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    return replace(
        readers.read_decoder(
            config,
            attention.attention,
            attention.rope,
            formats.RouterSpec("topk_softmax", experts, chosen, normalize=False),
            config.whole("intermediate_size"),
            shared_expert=shared_expert,
            others=attention.others,
        ),
        embedding_multiplier=config.number("embedding_multiplier", 1),
        residual_multiplier=config.number("residual_multiplier", 1),
        logits_scaling=config.number("logits_scaling", 1),
    )


GRANITEMOE = family.Family(
    model_type="granitemoe",
    model_class="GraniteMoeForCausalLM",
    short_names={
        "granite-1b-a400m": "ibm-granite/granite-3.0-1b-a400m-base",
        "granite-3.0-1b-a400m": "ibm-granite/granite-3.0-1b-a400m-base",
        "granite-3b-a800m": "ibm-granite/granite-3.0-3b-a800m-base",
        "granite-3.0-3b-a800m": "ibm-granite/granite-3.0-3b-a800m-base",
    },
    published=(
        family.Published("granite-3.0-1b-a400m", "1.3", "0.4"),
        family.Published("granite-3.0-3b-a800m", "3.3", "0.8"),
    ),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".router": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    },
    expert_names=(
        family.ExpertNames(
            family.matrices(
                "model.layers.{i}.block_sparse_moe.*.weight", "input_linear", "input_linear", "output_linear"
            )
        ),
        family.ExpertNames(
            family.matrices("model.layers.{i}.block_sparse_moe.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")
        ),
    ),
)
_SHARED = (".shared.gate", ".shared.up")
SHARED_NAMES: Mapping[str, family.DenseName] = {
    **{role: family.Stored("shared_mlp.input_linear.weight", roles=_SHARED) for role in _SHARED},
    ".shared.down": "shared_mlp.output_linear.weight",
}
GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    model_class="GraniteMoeSharedForCausalLM",
    unpublished="the class is in transformers; IBM published its weights in granitemoehybrid",
    published=(),
    read_config=_read_shared,
    dense_names={**GRANITEMOE.dense_names, **SHARED_NAMES},
)
