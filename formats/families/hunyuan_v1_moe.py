"""Hunyuan-A13B: q and k norms after the rotation, whose base a fixed alpha stretches, shared expert.

Source: transformers, models/hunyuan_v1_moe; Tencent (2025).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_layers = config.num_layers()
    config.only(
        use_qk_norm=True,
        use_mixed_mlp_moe=True,
        use_cla=False,
        mlp_bias=False,
        moe_layer_num_skipped=0,
        norm_type="rms",
        use_mla=False,
    )
    # A published config has a list with a value for each layer.
    size = config.whole("intermediate_size")
    config.only_each("moe_intermediate_size", size, num_layers)
    config.only_each("num_shared_expert", 1, num_layers)
    head_dim = config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    config.only(attention_head_dim=head_dim)
    bias = readers.attention_bias(config)
    attention = readers.read_grouped_query(config, bias=bias, qk_norm="rotated_head", own_keys=True)
    router = formats.RouterSpec(
        "softmax_topk",
        config.each_whole(config.either("num_experts", "num_local_experts"), num_layers),
        config.each_whole(config.either("moe_topk", "num_experts_per_tok"), num_layers),
        normalize=True,
    )
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, scalings=(*rotary.SCALINGS, "ntk_alpha")),
        router,
        size,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(size, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


HUNYUAN_V1_MOE = family.Family(
    model_type="hunyuan_v1_moe",
    model_class="HunYuanMoEV1ForCausalLM",
    short_names={
        "hunyuan-a13b": "tencent/Hunyuan-A13B-Instruct",
        "hunyuan-a13b-instruct": "tencent/Hunyuan-A13B-Instruct",
    },
    published=(family.Published("hunyuan-a13b-instruct", "80", "13"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention.q_norm": "self_attn.query_layernorm.weight",
        ".attention.k_norm": "self_attn.key_layernorm.weight",
        ".router": "mlp.gate.wg.weight",
        ".shared.{gate,up,down}": "mlp.shared_mlp.{}_proj.weight",
    },
    ignored_keys=frozenset(
        {"eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "org_vocab_size", "pad_id", "pretraining_tp"}
    ),
)
