"""GLM-4.7-Flash: the attention of `deepseek_v3`, the experts of `glm4_moe`.

Source: transformers, models/glm4_moe_lite.
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers
from moe_pack.formats.families.deepseek_v3 import read_latent_decoder


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    if not config.has("mlp_layer_types"):
        config.only(first_k_dense_replace=1)
    config.ignore("first_k_dense_replace")
    # Missing, transformers takes those of GLM-4.7-Flash.
    config.require("num_key_value_heads", "routed_scaling_factor")
    return read_latent_decoder(
        config,
        readers.read_latent(config),
        readers.layers_by_kind(config, num_dense=1),
        num_experts_per_tok=4,
        default_eps=1e-5,
    )


GLM4_MOE_LITE = family.Family(
    model_type="glm4_moe_lite",
    short_names={"glm-4.7-flash": "zai-org/GLM-4.7-Flash"},
    published=(family.Published("glm-4.7-flash", "30", "3"),),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, **readers.LATENT_NAMES},
    unused=(readers.PREDICTION_LAYER,),
    prediction=(readers.PREDICTION_NAMES,),
    ignored_keys=frozenset({"num_nextn_predict_layers", "pretraining_tp"}),
)
