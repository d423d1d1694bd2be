"""DeepSeekMoE-16B: softmax over all and weights not normalized, shared experts, dense first layer.

transformers has no class for it; tests/families/deepseek.py stands in for one.
Source: deepseek-ai/deepseek-moe-16b-base, modeling_deepseek.py; DeepSeekMoE (2401.06066).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_experts, chosen = readers.read_expert_count(config, "n_routed_experts"), config.whole("num_experts_per_tok")
    config.only(scoring_func="softmax")
    config.require("num_key_value_heads")  # null says that each head has keys of its own; missing, 32 do
    attention = readers.read_llama_attention(config, readers.attention_bias(config))
    expert_size, freq = config.whole("moe_intermediate_size"), config.whole("moe_layer_freq", 1)
    num_shared = config.whole("n_shared_experts") if config.has("n_shared_experts") else 0
    normalize = config.flag("norm_topk_prob", False) and chosen > 1  # the weight of one alone stays as it is
    return readers.read_decoder(
        config,
        attention,
        readers.read_llama_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", num_experts, chosen, normalize),
        expert_size,
        moe_layers=tuple(layer for layer in readers.layers_after_dense(config, default=0) if layer % freq == 0),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
    )


DEEPSEEK = family.Family(
    model_type="deepseek",
    short_names={
        "deepseek-moe-16b": "deepseek-ai/deepseek-moe-16b-base",
        "deepseek-moe-16b-base": "deepseek-ai/deepseek-moe-16b-base",
        "deepseek-moe-16b-chat": "deepseek-ai/deepseek-moe-16b-chat",
    },
    published=(family.Published("deepseek-moe-16b", "16.4", "2.8"),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    expert_names=(family.EXPERT_NAMES,),
    ignored_keys=frozenset({"aux_loss_alpha", "pretraining_tp", "seq_aux"}),
)
