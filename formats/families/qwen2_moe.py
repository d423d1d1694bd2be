"""Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: shared expert behind a sigmoid, weights not normalized, q, k and v biases, layers
without experts.

Source: transformers, models/qwen2_moe; Qwen2 technical report (2407.10671).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(use_sliding_window=False)
    config.ignore("sliding_window", "max_window_layers")
    readers.refuse_mixed_layers(config)
    attention = readers.read_grouped_query(config, bias=("q", "k", "v") if config.flag("qkv_bias", True) else ())
    experts, chosen = config.whole("num_experts"), config.whole("num_experts_per_tok")
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", False)),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_step(config),
        shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=True),
    )


QWEN2_MOE = family.Family(
    model_type="qwen2_moe",
    short_names={
        "qwen1.5-moe": "Qwen/Qwen1.5-MoE-A2.7B",
        "qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B",
        "qwen1.5-moe-a2.7b-chat": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        "qwen2-57b-a14b": "Qwen/Qwen2-57B-A14B",
        "qwen2-57b-a14b-instruct": "Qwen/Qwen2-57B-A14B-Instruct",
    },
    published=(family.Published("qwen1.5-moe-a2.7b", "14.3", "2.7"), family.Published("qwen2-57b-a14b", "57", "14")),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".shared.{gate,up,down}": "mlp.shared_expert.{}_proj.weight",
        ".shared_router": "mlp.shared_expert_gate.weight",
    },
)
