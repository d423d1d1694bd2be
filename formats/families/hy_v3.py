"""Hy3: sigmoid routing with a bias, q and k norms a head, dense first layer, shared expert.

Source: transformers, models/hy_v3; Tencent (2026).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True, qk_norm=True, route_norm=True, mlp_bias=False
    )
    expert_size = config.whole("moe_intermediate_size")
    config.only(expert_hidden_dim=expert_size)
    if not config.has("mlp_layer_types"):
        config.only(first_k_dense_replace=1)
    config.ignore("first_k_dense_replace")
    config.require("head_dim", "num_key_value_heads")  # missing, transformers takes 128 and 8
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either("num_experts", "num_local_experts")),
        config.whole("num_experts_per_tok", 8),
        normalize=True,
        bias=True,
        scaling_factor=config.number("router_scaling_factor", 2.826),
    )
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=11_158_840.0),
        router,
        expert_size,
        moe_layers=readers.layers_by_kind(config, num_dense=1),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("num_shared_experts", 1), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


HY_V3 = family.Family(
    model_type="hy_v3",
    model_class="HYV3ForCausalLM",
    short_names={"hy3-preview": "tencent/Hy3-preview", "hy3-preview-base": "tencent/Hy3-preview-Base"},
    published=(family.Published("hy3-preview-base", "295", "21"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".router": ("mlp.router.gate.weight", "mlp.gate.weight"),
        ".router_bias": ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        ".shared.{gate,up,down}": ("mlp.shared_mlp.{}_proj.weight", "mlp.shared_experts.{}_proj.weight"),
    },
    unused=(readers.PREDICTION_LAYER,),
    prediction=(readers.PREDICTION_NAMES,),
    # Precisions of sums, which are float32 here whatever they say; a kernel; a layer that is not run.
    ignored_keys=family.keys(
        "enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine num_nextn_predict_layers "
        "use_grouped_mm"
    ),
)
