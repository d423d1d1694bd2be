"""GGUF architectures whose layers all have attention. Source: llama.cpp, conversion/ and src/models/."""

from collections.abc import Mapping

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf import architecture
from moe_pack.formats.gguf.architecture import experts
from moe_pack.formats.gguf.factors import with_bands
from moe_pack.formats.gguf.header import Metadata


def _mixtral(m: Metadata) -> architecture.Values:
    return architecture.decoder(
        m,
        "mixtral",
        head_dim=architecture.head_dim(m),
        **architecture.local_experts(m, size="feed_forward_length"),
        sliding_window=m.get("attention.sliding_window"),
        **with_bands(m, architecture.head_dim(m)),
    )


def _qwen2_moe(m: Metadata) -> architecture.Values:
    shared = m.tensors.get("blk.0.ffn_up_shexp.weight")  # old files lack the key
    size = m.whole("expert_shared_feed_forward_length", shared.shape[0] if shared else None)
    has_bias = m.has_tensor("blk.0.attn_q.bias") or m.has_tensor("blk.0.attn_qkv.bias")
    return architecture.decoder(
        m,
        "qwen2_moe",
        **experts(m, norm_topk_prob=False, intermediate_size=m.whole("feed_forward_length")),
        shared_expert_intermediate_size=size,
        qkv_bias=has_bias,
        use_sliding_window=False,
    )


def _qwen3_moe(m: Metadata) -> architecture.Values:
    sizes = experts(m, norm_topk_prob=True, intermediate_size=m.whole("feed_forward_length"))
    return architecture.decoder(m, "qwen3_moe", **sizes, head_dim=architecture.head_dim(m), attention_bias=False)


def _qwen3_vl_moe(m: Metadata) -> architecture.Values:
    values = _qwen3_moe(m) | {"model_type": "qwen3_vl_moe_text"}
    text = {key: value for key, value in values.items() if key not in ("norm_topk_prob", "tie_word_embeddings")}
    return {"model_type": "qwen3_vl_moe", "tie_word_embeddings": values["tie_word_embeddings"], "text_config": text}


def _olmoe(m: Metadata) -> architecture.Values:
    sizes = experts(m, norm_topk_prob=False, intermediate_size=m.whole("feed_forward_length"))
    return architecture.decoder(m, "olmoe", **(sizes | {"moe_intermediate_size": None}))


def _deepseek2(m: Metadata) -> architecture.Values:
    # DeepSeek-V2 has a softmax, V3 sigmoids; Kimi K2 and GLM-4.7-Flash have V3's arithmetic.
    if (gating := m.whole("expert_gating_func", 0)) not in (0, 1, 2):
        raise CheckpointError(f"{m.place}: expert_gating_func is {gating}, expected 1 (softmax) or 2 (sigmoid)")
    # Files without the key are those of V2, or of models of V3's kind, which have a bias of the router.
    if gating == 2 or (gating == 0 and any(".exp_probs_b" in name for name in m.tensors)):
        return architecture.latent(m, "deepseek_v3", **architecture.PUBLISHED_SIGMOID)
    method = "group_limited_greedy" if m.whole("expert_group_count", 1) > 1 else "greedy"
    return architecture.latent(m, "deepseek_v2", topk_method=method, scoring_func="softmax")


def _gpt_oss(m: Metadata) -> architecture.Values:
    values = architecture.decoder(
        m,
        "gpt_oss",
        head_dim=architecture.head_dim(m),
        **architecture.local_experts(m),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=[("sliding_attention", "full_attention")[i % 2] for i in range(architecture.num_layers(m))],
        attention_bias=True,
    )
    values.setdefault("rope_scaling", {"rope_type": "default"})
    if values["rope_scaling"]["rope_type"] == "yarn":
        values["rope_scaling"]["truncate"] = False
    return values


def _glm4_moe(m: Metadata) -> architecture.Values:
    size = architecture.head_dim(m)
    return architecture.decoder(
        m,
        "glm4_moe",
        head_dim=size,
        partial_rotary_factor=m.whole("rope.dimension_count", size // 2) / size,
        attention_bias=m.has_tensor("blk.0.attn_q.bias"),
        use_qk_norm=m.has_tensor("blk.0.attn_q_norm.weight"),
        n_shared_experts=m.whole("expert_shared_count"),
        **experts(m, "n_routed_experts", **architecture.leading(m)),
        **architecture.sigmoid_router(m),
    )


def _dots1(m: Metadata) -> architecture.Values:
    return architecture.decoder(
        m,
        "dots1",
        head_dim=architecture.head_dim(m),
        n_shared_experts=m.whole("expert_shared_count"),
        **experts(m, "n_routed_experts", **architecture.leading(m)),
        **architecture.sigmoid_router(m),
        sliding_window=None,
        max_window_layers=architecture.num_layers(m),
    )


def _afmoe(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    return architecture.decoder(
        m,
        "afmoe",
        head_dim=architecture.head_dim(m),
        score_func="sigmoid",
        n_group=1,
        topk_group=1,
        **experts(m, intermediate_size=m.whole("feed_forward_length")),
        num_dense_layers=m.whole("leading_dense_block_count", 0),
        num_shared_experts=m.whole("expert_shared_count"),
        route_norm=m.flag("expert_weights_norm", True),
        route_scale=m.number("expert_weights_scale", 1.0),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=architecture.windows(m, 4),
        mup_enabled=True,
    )


def _exaone_moe(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    return architecture.decoder(
        m,
        "exaone_moe",
        head_dim=architecture.head_dim(m),
        **experts(m, **architecture.leading(m)),
        **architecture.sigmoid_router(m),
        num_shared_experts=m.whole("expert_shared_count"),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=architecture.windows(m, 4),
        **with_bands(m, architecture.head_dim(m)),
    )


def _minimax_m2(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    return architecture.decoder(
        m,
        "minimax_m2",
        head_dim=architecture.head_dim(m),
        rotary_dim=m.whole("rope.dimension_count"),
        scoring_func="sigmoid",
        use_routing_bias=True,
        **architecture.local_experts(m),
    )


def _hy_v3(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    size = m.whole("expert_feed_forward_length")
    return architecture.decoder(
        m,
        "hy_v3",
        head_dim=architecture.head_dim(m),
        **experts(m, intermediate_size=m.whole("feed_forward_length")),
        num_shared_experts=m.whole("expert_shared_feed_forward_length", size) // size,
        route_norm=m.flag("expert_weights_norm", True),
        router_scaling_factor=m.number("expert_weights_scale", 1.0),
        first_k_dense_replace=1,
        expert_hidden_dim=size,
        qk_norm=True,
    )


def _ernie4_5_moe(m: Metadata) -> architecture.Values:
    step, first = m.whole("interleave_moe_layer_step", 1), m.whole("leading_dense_block_count", 0)
    return architecture.decoder(
        m,
        "ernie4_5_moe",
        head_dim=m.get("attention.key_length"),
        moe_num_experts=m.whole("expert_count"),
        moe_k=m.whole("expert_used_count"),
        moe_intermediate_size=m.whole("expert_feed_forward_length"),
        moe_num_shared_experts=m.whole("expert_shared_count", 0),
        moe_layer_start_index=first,
        moe_layer_interval=step,
        intermediate_size=m.whole("feed_forward_length"),
        use_bias=False,
    )


def granite(m: Metadata, model_type: str) -> architecture.Values:
    """Returns the values of all Granite models."""
    return architecture.decoder(
        m,
        model_type,
        **architecture.local_experts(m, size="feed_forward_length"),
        shared_intermediate_size=m.get("expert_shared_feed_forward_length"),
        attention_multiplier=m.number("attention.scale", architecture.head_dim(m) ** -0.5),
        embedding_multiplier=m.number("embedding_scale", 1.0),
        residual_multiplier=m.number("residual_scale", 1.0),
        logits_scaling=m.number("logit_scale"),
    )


def _granitemoe(m: Metadata) -> architecture.Values:
    is_shared = m.whole("expert_shared_feed_forward_length", 0) > 0
    return granite(m, "granitemoeshared" if is_shared else "granitemoe") | with_bands(m, architecture.head_dim(m))


def _deepseek(m: Metadata) -> architecture.Values:
    return architecture.decoder(
        m,
        "deepseek",
        **experts(m, "n_routed_experts", **architecture.leading(m)),
        n_shared_experts=m.whole("expert_shared_count"),
        norm_topk_prob=False,
    )


def _hunyuan(m: Metadata) -> architecture.Values:
    size = m.whole("expert_feed_forward_length")
    return architecture.decoder(
        m,
        "hunyuan_v1_moe",
        head_dim=m.get("attention.key_length"),
        num_experts=m.whole("expert_count"),
        moe_topk=m.whole("expert_used_count"),
        intermediate_size=size,
        num_shared_expert=m.whole("expert_shared_feed_forward_length", size) // size,
        rope_scaling=None,  # the base has it
    )


# As the published config has them; transformers does not read the usual ones of this family.
_DBRX_KEYS = {
    "hidden_size": "d_model",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


def _dbrx(m: Metadata) -> architecture.Values:
    values = architecture.decoder(m, "dbrx", rms_norm_eps=None, hidden_act=None, num_key_value_heads=None)
    values = {_DBRX_KEYS.get(key, key): value for key, value in values.items()}
    theta, clip = m.number("rope.freq_base"), m.number("attention.clamp_kqv")
    experts = {"moe_num_experts": m.whole("expert_count"), "moe_top_k": m.whole("expert_used_count")}
    return values | {
        "attn_config": {"kv_n_heads": m.whole("attention.head_count_kv"), "rope_theta": theta, "clip_qkv": clip},
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": m.whole("feed_forward_length"),
            "hidden_size": m.whole("embedding_length"),
            "moe_normalize_expert_weights": 1.0,
            **experts,
        },
    }


def _cohere2_moe(m: Metadata) -> architecture.Values:
    is_rms = m.has("attention.layer_norm_rms_epsilon")
    dense = m.whole("leading_dense_block_count")
    return architecture.decoder(
        m,
        "cohere2_moe",
        rms_norm_eps=m.number("attention.layer_norm_rms_epsilon") if is_rms else None,
        layer_norm_eps=None if is_rms else m.number("attention.layer_norm_epsilon"),
        head_dim=architecture.head_dim(m),
        **architecture.local_experts(m, "num_experts"),
        prefix_dense_intermediate_size=m.whole("feed_forward_length"),
        num_shared_experts=m.whole("expert_shared_count", 0),
        first_k_dense_replace=dense,
        expert_selection_fn={1: "softmax", 2: "sigmoid"}.get(m.whole("expert_gating_func", 2), "unknown"),
        norm_topk_prob=m.flag("expert_weights_norm", False),
        logit_scale=m.number("logit_scale"),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=architecture.windows(m, 4),
    )


def _llama4(m: Metadata) -> architecture.Values:
    no_windows = m.get("attention.sliding_window") == 0
    scaled: architecture.Values = {}
    if m.factors:  # Scout's bands are those of the published model: metadata has none
        bands = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}
        scaled = {"rope_scaling": {"rope_type": "llama3", "factor": max(m.factors), **bands}}
    return architecture.decoder(
        m,
        "llama4_text",
        head_dim=architecture.head_dim(m),
        **architecture.local_experts(m),
        intermediate_size_mlp=m.whole("feed_forward_length"),
        interleave_moe_layer_step=m.whole("interleave_moe_layer_step"),
        use_qk_norm=m.whole("expert_count") != 128,  # the rule of llama.cpp's code: Maverick has none
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        attn_scale=0.1,
        floor_scale=8192,
        no_rope_layers=[int(no_windows or (layer + 1) % 4 != 0) for layer in range(architecture.num_layers(m))],
        **scaled,
    )


NORM_AFTER = {"layers.{i}.mlp_norm": "blk.{i}.post_attention_norm.weight"}

DECODERS: Mapping[str, architecture.Architecture] = {
    "llama": architecture.Architecture(_mixtral, changes=architecture.PAIRS),
    "qwen2moe": architecture.Architecture(_qwen2_moe, own_head=True),
    "qwen3moe": architecture.Architecture(_qwen3_moe),
    "qwen3vlmoe": architecture.Architecture(_qwen3_vl_moe),
    "olmoe": architecture.Architecture(_olmoe, own_head=True),
    "deepseek2": architecture.Architecture(_deepseek2),
    "gpt-oss": architecture.Architecture(_gpt_oss, names=NORM_AFTER, keeps_mxfp4=True, own_head=True),
    "glm4moe": architecture.Architecture(_glm4_moe, names=NORM_AFTER),
    "dots1": architecture.Architecture(_dots1),
    "afmoe": architecture.Architecture(_afmoe),
    "exaone-moe": architecture.Architecture(_exaone_moe),
    "minimax-m2": architecture.Architecture(_minimax_m2, own_head=True),
    "hy_v3": architecture.Architecture(_hy_v3, names={"layers.{i}.router_bias": "blk.{i}.exp_probs_b"}),
    "ernie4_5-moe": architecture.Architecture(_ernie4_5_moe, one_row=("layers.{i}.router_bias",)),
    "granitemoe": architecture.Architecture(_granitemoe, changes=architecture.PAIRS),
    "deepseek": architecture.Architecture(_deepseek, changes=architecture.PAIRS),
    "hunyuan-moe": architecture.Architecture(_hunyuan),
    "dbrx": architecture.Architecture(
        _dbrx, names={"layers.{i}.mlp_norm": "blk.{i}.attn_output_norm.weight"}, fuses_qkv=True, own_head=True
    ),
    "cohere2moe": architecture.Architecture(_cohere2_moe),
    "llama4": architecture.Architecture(_llama4),
}
