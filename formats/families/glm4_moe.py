"""GLM-4.5, GLM-4.5-Air: sigmoid routing with a bias, half of each head rotated, q and k norms, dense first layers,
shared expert.

Source: transformers, models/glm4_moe; GLM-4.5 (2508.06471).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    qk_norm, bias = config.flag("use_qk_norm", False), readers.attention_bias(config, ("q", "k", "v"))
    attention = readers.read_grouped_query(config, bias=bias, qk_norm="head" if qk_norm else "none")
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.count("n_shared_experts", 1)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, partial_rotary_factor=0.5),
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=readers.layers_after_dense(config, default=1),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


GLM4_MOE = family.Family(
    model_type="glm4_moe",
    short_names={"glm-4.5-air": "zai-org/GLM-4.5-Air", "glm-4.5": "zai-org/GLM-4.5"},
    published=(
        family.Published("glm-4.5-air", "106", "12", cached="94.208", leaves_out=("embed", "head")),
        family.Published("glm-4.5", "355", "32", "188.416", leaves_out=("embed", "head"), adds_prediction_layer=True),
    ),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    unused=(readers.PREDICTION_LAYER,),
    prediction=(readers.PREDICTION_NAMES,),
    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
)
