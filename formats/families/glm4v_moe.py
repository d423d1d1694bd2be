"""GLM-4.5V, 4.6V (text): as `glm4_moe`, without q and k norms.

Source: transformers, models/glm4v_moe; GLM-4.5V (2507.01006).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.glm4_moe import GLM4_MOE
from moe_pack.formats.families.multimodal import within


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(use_qk_norm=False)
    config.require("attention_bias", "num_key_value_heads")  # missing, transformers takes true and 8
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config, ("q", "k", "v")))
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.whole("n_shared_experts", 1)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, partial_rotary_factor=0.5, ignored=rotary.MROPE_KEYS),
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=readers.layers_after_dense(config, default=1),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


GLM4V_MOE = replace(
    within(replace(GLM4_MOE, model_type="glm4v_moe_text", read_config=_read_config), "glm4v_moe", tied_by_text=True),
    short_names={"glm-4.5v": "zai-org/GLM-4.5V", "glm-4.6v": "zai-org/GLM-4.6V"},
    published=(family.Published("glm-4.5v", "106", "12", cached="94.208", leaves_out=("embed", "head")),),
)
