"""DeepSeek-V2, V2-Lite: latent attention, groups of experts, scaled weights, yarn, dense first layer, shared experts.

Source: transformers, models/deepseek_v2; DeepSeek-V2 (2405.04434).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(mlp_bias=False, moe_layer_freq=1, scoring_func="softmax")
    config.only(norm_topk_prob=False)  # DeepSeek's code and transformers' differ where it is true
    config.require("n_shared_experts")  # null says none; missing, transformers takes 2
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.count("n_shared_experts", 0)
    return readers.read_decoder(
        config,
        readers.read_latent(config),
        rotary.read_rope(config, config.whole("qk_rope_head_dim"), interleaved=True),
        read_router(config),
        expert_size,
        moe_layers=readers.layers_after_dense(config, default=0),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
    )


def read_router(config: family.Config) -> formats.RouterSpec:
    """Reads a softmax over all experts whose weights are not normalized, with groups where the config has them."""
    grouped = config.choice("topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    config.ignore("n_group", "topk_group")
    return formats.RouterSpec(
        "softmax_topk",
        config.whole("n_routed_experts"),
        config.whole("num_experts_per_tok"),
        normalize=False,
        n_group=config.whole("n_group") if grouped else 1,
        topk_group=config.whole("topk_group") if grouped else 1,
        scaling_factor=config.number("routed_scaling_factor", 1),
    )


DEEPSEEK_V2 = family.Family(
    model_type="deepseek_v2",
    short_names={
        "deepseek-v2": "deepseek-ai/DeepSeek-V2",
        "deepseek-v2-chat": "deepseek-ai/DeepSeek-V2-Chat",
        "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-v2-lite-chat": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    },
    published=(
        family.Published("deepseek-v2-lite", "15.7", "2.4", cached="15.6", active_leaves_out=("embed",)),
        family.Published("deepseek-v2", "236", "21", cached="34.6"),
    ),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, **readers.LATENT_NAMES},
    ignored_keys=frozenset({"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}),
)
