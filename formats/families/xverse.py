"""XVERSE-MoE-A4.2B: shared experts, weights normalized by their sum and a millionth.

transformers has no class for it; tests/families/xverse.py stands in for one.
Source: xverse/XVERSE-MoE-A4.2B, modeling_xverse.py.
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_experts, chosen = readers.read_expert_count(config, "num_experts"), config.whole("moe_top_k", 6)
    attention = readers.read_llama_attention(config, readers.attention_bias(config))
    expert_size = config.whole("intermediate_size")
    config.require("num_shared_experts")  # null says none; missing, there are 2
    num_shared = config.whole("num_shared_experts") if config.has("num_shared_experts") else 0
    return readers.read_decoder(
        config,
        attention,
        readers.read_llama_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", num_experts, chosen, normalize=True, least_sum=1e-6),
        expert_size,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
    )


XVERSE = family.Family(
    model_type="xverse",
    short_names={
        "xverse-moe-a4.2b": "xverse/XVERSE-MoE-A4.2B",
        "xverse-moe-a4.2b-chat": "xverse/XVERSE-MoE-A4.2B-Chat",
    },
    published=(family.Published("xverse-moe-a4.2b", "25.8", "4.2"),),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, ".router": "mlp.router.weight"},
    expert_names=(family.EXPERT_NAMES,),
    ignored_keys=frozenset({"max_tokenizer_truncation", "pretraining_tp"}),
)
