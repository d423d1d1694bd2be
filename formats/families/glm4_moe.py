"""GLM-4.5 and GLM-4.5-Air. Source: transformers, models/glm4_moe; GLM-4.5 (2508.06471)."""

from moe_pack.formats import ModelSpec, NormSpec, SharedExpertSpec
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family
from moe_pack.formats.families.readers import (
    DENSE_NAMES,
    EXPERT_NAMES,
    FUSED_EXPERT_NAMES,
    PREDICTION_LAYER,
    PREDICTION_NAMES,
    attention_bias,
    layers_after_dense,
    read_decoder,
    read_grouped_query,
    read_rope,
    read_sigmoid_router,
)


def _read_config(config: Config) -> ModelSpec:
    qk_norm = config.flag("use_qk_norm", False)
    attention = read_grouped_query(
        config, bias=attention_bias(config, ("q", "k", "v")), qk_norm="head" if qk_norm else "none"
    )
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.count("n_shared_experts", 1)
    return read_decoder(
        config,
        "glm4_moe",
        attention,
        read_rope(config, attention.head_dim, partial_rotary_factor=0.5),
        read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=layers_after_dense(config, default=1),
        shared_expert=SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    short_names={"glm-4.5-air": "zai-org/GLM-4.5-Air", "glm-4.5": "zai-org/GLM-4.5"},
    read_config=_read_config,
    dense_names=DENSE_NAMES,
    expert_names=(EXPERT_NAMES, FUSED_EXPERT_NAMES),
    unused=(PREDICTION_LAYER,),
    prediction=(PREDICTION_NAMES,),
    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
)
