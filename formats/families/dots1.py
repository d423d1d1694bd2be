"""dots.llm1 base, inst: sigmoid routing with a bias, q and k norms a head, keys for every head, dense first layer,
shared experts.

Source: transformers, models/dots1; dots.llm1 technical report (2506.05767).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    _refuse_windows(config)
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    expert_size = config.whole("moe_intermediate_size")
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        readers.read_sigmoid_router(config, num_experts_per_tok=None, normalize=False),
        expert_size,
        moe_layers=readers.layers_after_dense(config, default=0),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts"), gated=False),
    )


def _refuse_windows(config: family.Config) -> None:
    """Refuses a sliding window: in layers `layer_types` names; without it, in those from `max_window_layers` on."""
    config.only(use_sliding_window=False)
    readers.refuse_mixed_layers(config)
    if not config.has("layer_types") and config.count("max_window_layers", 62) < config.num_layers():
        config.require("sliding_window")  # null says that no layer has one; missing, transformers takes 4096
        config.only(sliding_window=None)
    config.ignore("sliding_window", "max_window_layers")


DOTS1 = family.Family(
    model_type="dots1",
    short_names={"dots.llm1.base": "rednote-hilab/dots.llm1.base", "dots.llm1.inst": "rednote-hilab/dots.llm1.inst"},
    published=(family.Published("dots.llm1.base", "142", "14"),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    ignored_keys=frozenset({"pretraining_tp"}),
)
