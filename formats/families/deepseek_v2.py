"""DeepSeek-V2 and V2-Lite. Source: transformers, models/deepseek_v2; DeepSeek-V2 (2405.04434)."""

from moe_pack.formats import ModelSpec, RouterSpec, SharedExpertSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family
from moe_pack.formats.families.readers import (
    DENSE_NAMES,
    EXPERT_NAMES,
    FUSED_EXPERT_NAMES,
    LATENT_NAMES,
    layers_after_dense,
    read_decoder,
    read_latent,
    read_rope,
)


def _read_config(config: Config) -> ModelSpec:
    config.only("mlp_bias", False)
    config.only("moe_layer_freq", 1)
    config.only("norm_topk_prob", False)  # DeepSeek's code and transformers' differ where it is true
    config.only("scoring_func", "softmax")
    config.require("n_shared_experts")  # null says none; missing, transformers takes 2
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.count("n_shared_experts", 0)
    return read_decoder(
        config,
        "deepseek_v2",
        read_latent(config),
        read_rope(config, config.whole("qk_rope_head_dim"), interleaved=True),
        read_router(config),
        expert_size,
        moe_layers=layers_after_dense(config, default=0),
        shared_expert=SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
    )


def read_router(config: Config) -> RouterSpec:
    """Reads a softmax over all experts whose weights are not normalized, with groups where the config has them."""
    grouped = config.choice("topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    config.ignore("n_group", "topk_group")
    return RouterSpec(
        "softmax_topk",
        config.whole("n_routed_experts"),
        config.whole("num_experts_per_tok"),
        normalize=False,
        n_group=config.whole("n_group") if grouped else 1,
        topk_group=config.whole("topk_group") if grouped else 1,
        scaling_factor=config.number("routed_scaling_factor", 1),
    )


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    short_names={
        "deepseek-v2": "deepseek-ai/DeepSeek-V2",
        "deepseek-v2-chat": "deepseek-ai/DeepSeek-V2-Chat",
        "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-v2-lite-chat": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    },
    read_config=_read_config,
    dense_names={**DENSE_NAMES, **LATENT_NAMES},
    expert_names=(EXPERT_NAMES, FUSED_EXPERT_NAMES),
    ignored_keys=frozenset({"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}),
)
