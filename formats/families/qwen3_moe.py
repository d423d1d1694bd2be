"""Qwen3-30B-A3B, 235B-A22B, Coder: q and k norms a head, head size of its own.

Source: transformers, models/qwen3_moe; Qwen3 technical report (2505.09388).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    bias, window = readers.attention_bias(config), readers.window_if_used(config)
    attention = readers.read_grouped_query(config, bias=bias, qk_norm="head", sliding_window=window)
    experts = config.whole(config.either("num_experts", "num_local_experts"))
    chosen, normalize = config.whole("num_experts_per_tok"), config.flag("norm_topk_prob", False)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", experts, chosen, normalize),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_step(config),
    )


QWEN3_MOE = family.Family(
    model_type="qwen3_moe",
    short_names={
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "qwen3-30b-a3b-instruct-2507": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "qwen3-coder-30b-a3b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    },
    published=(
        family.Published("qwen3-30b-a3b", "30.5", "3.3", cached="49.152"),
        family.Published("qwen3-235b-a22b", "235", "22", cached="96.256"),
    ),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
)
