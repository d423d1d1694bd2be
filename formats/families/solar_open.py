"""Solar Open 100B: as `glm4_moe`, without dense layers and norms, whole heads rotated.

Source: transformers, models/solar_open; Upstage (2026).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    # All layers have experts; published configs say so, and have a size for layers that have none.
    config.only(first_k_dense_replace=0, use_qk_norm=False)
    config.ignore("intermediate_size")
    config.require("head_dim", "num_key_value_heads")  # missing, transformers takes 128 and 8
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config, ("q", "k", "v")))
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.whole("n_shared_experts", 1)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=1e6),
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


SOLAR_OPEN = family.Family(
    model_type="solar_open",
    short_names={"solar-open-100b": "upstage/Solar-Open-100B"},
    published=(family.Published("solar-open-100b", "102.6", "12"),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
)
