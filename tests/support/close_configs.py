"""Configs close to those of the families in `families` that must be refused, each with the line that refuses it."""

import json
from pathlib import Path

from moe_pack.formats import CheckpointError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.rotary import ATTENTION_KINDS
from support.built_configs import NEMOTRON
from support.close_rows import _ATTN, _FFN, GEMMA, GROUPS, ONE_ROPE, ONLY, OUTSIDE, PROPORTIONAL, ROWS, Close, scalings
from support.families import (
    BASE,
    LONGROPE,
    PARTLY_ROTATED,
    ROPE_BY_KIND,
    ROTARY,
    YARN,
    Tiny,
    Values,
    text_values,
    with_text,
    write_config,
)
from support.layered_attention import LAYERED_CLOSE
from support.references import REFERENCES
from support.residual_families import RESIDUAL_CLOSE

CLOSE: tuple[Close, ...] = (
    *(Close(family, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; " + ONLY("'silu'")) for family in ROTARY),
    *(
        Close(
            family,
            {"rope_parameters": {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'ntk' is not supported; supported: " + scalings(family),
        )
        for family in ONE_ROPE
    ),
    *(
        Close(family, {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}, message)
        for family in ROPE_BY_KIND
        for rope, message in (
            (
                {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e4},
                "rope_type 'ntk' is not supported; supported: " + scalings(family),
            ),
            ({"rope_type": "default"}, "key 'rope_theta' is missing, expected a number"),
            (
                (PROPORTIONAL if family in GEMMA else YARN) | {"rope_theta": 1e4, "short_factor": [1.0]},
                "key 'short_factor' ([1.0]) is unknown for this family and may change the arithmetic",
            ),
            (YARN | {"rope_theta": 1e4, "truncate": False}, "truncate is False; " + ONLY("True")),
            *(() if family == "beam" else ((None, "key 'full_attention' is missing, expected an object"),)),
        )
    ),
    *(
        Close(
            family,
            {"rope_theta": 1e4},
            "key 'rope_theta' (10000.0) is unknown for this family and may change the arithmetic",
        )
        for family in ROPE_BY_KIND
        if family != "mimo_v2_flash"  # whose published config has it
    ),
    *(
        Close(family, {"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}; " + ONLY("None"))
        for family in ROPE_BY_KIND
    ),
    *(
        Close(
            family,
            {"rope_parameters": LONGROPE | {"rope_theta": 1e4}},
            "key 'short_mscale' (1.1) is unknown for this family and may change the arithmetic",
        )
        for family in ONE_ROPE
        if family not in ("phimoe", "ernie4_5_vl_moe")
    ),
    *(
        Close(
            family,
            {"rope_parameters": YARN | {"rope_theta": 1e4}},
            "rope_type 'yarn' is not supported; supported: " + scalings(family),
        )
        for family in ("phimoe", "ernie4_5_vl_moe")
    ),
    *(
        Close(
            family,
            {"rope_scaling": {"type": kind, "factor": 2.0}},
            f"rope_type '{kind}' is not supported; supported: default",
        )
        for family in REFERENCES
        for kind in ("linear", "dynamic", "yarn")
    ),
    *(
        Close(
            family,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            "rope_parameters is {'rope_type': 'default', 'rope_theta': 100000.0}; " + ONLY("None"),
        )
        for family in REFERENCES
    ),
    *(Close(family, {"head_dim": 32}, "head_dim is 32; " + ONLY("16")) for family in REFERENCES),
    *(
        Close(family, {key: None}, f"'{family}' is a dense model without experts; there is nothing to pack")
        for family, key in (("deepseek", "n_routed_experts"), ("minicpm", "num_experts"), ("xverse", "num_experts"))
    ),
    *(
        Close(family, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; " + ONLY("1.0"))
        for family in ONE_ROPE
        if family not in (*PARTLY_ROTATED, "mistral3", "mistral4")
    ),
    *(
        Close(
            family,
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: quant_method is 'awq', supported: fp8, mxfp4, compressed-tensors; use the 16-bit "
            "original",
        )
        for family in BASE
    ),
    *(
        Close(
            family,
            {"attn_logit_softcapping": 50.0},
            "key 'attn_logit_softcapping' (50.0) is unknown for this family and may change the arithmetic",
        )
        for family in BASE
    ),
    Close("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window is True; " + ONLY("False")),
    Close(
        "qwen2_moe",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types has ['full_attention', 'sliding_attention']; " + ONLY("'full_attention'"),
    ),
    Close(
        "qwen2_moe",
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size is 0, expected 1 to 2^31 - 1",
    ),
    *(
        Close(
            family,
            {"layer_types": ["linear_attention", "full_attention", "full_attention", "odd"]},
            "layer_types has ['odd']; supported: full_attention, linear_attention",
        )
        for family in ("qwen3_next", "qwen3_5_moe_text")
    ),
    *(
        Close(family, {"head_dim": None}, "key 'head_dim' is missing, expected a value or null")
        for family in ("qwen3_next", "qwen3_5_moe_text")
    ),
    *(
        Close(family, {"linear_num_value_heads": 3}, "3 value heads cannot share 2 keys")
        for family in ("qwen3_next", "qwen3_5_moe_text")
    ),
    Close("qwen3_next", {"use_sliding_window": True}, "use_sliding_window is True; " + ONLY("False")),
    Close("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types lists 1 layers, but the model has 4"),
    Close("qwen4_exp_text", {"attn_output_gate": False}, "attn_output_gate is False; " + ONLY("True")),
    Close("qwen4_exp_text", {"indexer_kv_heads": 2}, "indexer_kv_heads is 2; " + ONLY("1")),
    Close("qwen4_exp_text", {"output_gate_type": "tanh"}, "output_gate_type is 'tanh', supported: silu, sigmoid"),
    Close(
        "qwen4_exp_text",
        {"indexer_budget": 50},
        "indexer_budget is 50, expected a multiple of indexer_compress_ratio, 4",
    ),
    Close("qwen4_exp_text", {"ple_layer_ids": [0]}, "ple_layer_ids has layer 0, expected layers counted from 1"),
    Close("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate is False; " + ONLY("True")),
    Close("qwen3_5_moe_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; " + ONLY("'float32'")),
    Close("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False; " + ONLY("True")),
    Close(
        "kimi_linear",
        {"moe_router_activation_func": "softmax"},
        "moe_router_activation_func is 'softmax'; " + ONLY("'sigmoid'"),
    ),
    Close("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk is False; " + ONLY("True")),
    Close("kimi_linear", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; " + ONLY("'silu'")),
    Close("kimi_linear", {"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}; " + ONLY("None")),
    Close(
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
        "linear_attn_config: kda_layers and full_attn_layers must list each of the layers 1 to 3 once",
    ),
    Close(
        "kimi_linear",
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        "linear_attn_config: key 'gate_lower_bound' (-5.0) is unknown for this family and may change the arithmetic",
    ),
    Close(
        "kimi_linear",
        {"mlp_layer_types": ["dense", "sparse"]},
        "mlp_layer_types must list 3 layers, each dense or sparse",
    ),
    Close("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora is False; " + ONLY("True")),
    Close("bailing_hybrid", {"use_mla_nope": True}, "use_mla_nope is True; " + ONLY("False")),
    Close("bailing_hybrid", {"q_lora_rank": 40}, "q_lora_rank is 40; " + ONLY("None")),
    Close("bailing_hybrid", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings is True; " + ONLY("False")),
    Close("bailing_hybrid", {"group_norm_size": 4}, "group_norm_size is 4; " + ONLY("1")),
    Close("bailing_hybrid", {"topk_group": None}, "key 'topk_group' is missing, expected a value or null"),
    Close("bailing_hybrid", {"kda_lower_bound": 0.5}, "mixer lower_bound is 0.5, expected above -1e6 and below 0"),
    Close(
        "bailing_hybrid",
        {"num_experts_per_tok": 2},
        "num_experts_per_token is 3, num_experts_per_tok is 2; these keys must be equal",
    ),
    Close(
        "bailing_hybrid",
        {"moe_shared_expert_intermediate_size": 40},
        "moe_shared_expert_intermediate_size is 40; " + ONLY("48"),
    ),
    Close(
        "bailing_hybrid",
        {"partial_rotary_factor": 0.25},
        "partial_rotary_factor rotates 4 of 16 values, but qk_rope_head_dim is 8",
    ),
    Close("bailing_hybrid", {"rotary_dim": 4}, "rotary_dim is 4; " + ONLY("8")),
    Close(
        "bailing_hybrid",
        {"expert_swiglu_limit_list": [0, 4]},
        "expert_swiglu_limit_list lists 2 layers, but the model has 3",
    ),
    Close(
        "bailing_hybrid",
        {"share_expert_swiglu_limit_list": [5, 5, 0]},
        "share_expert_swiglu_limit_list limits layer 0, which has no experts",
    ),
    Close(
        "bailing_hybrid",
        {"expert_swiglu_limit_list": [0, -4, 0]},
        "expert limits are -4.0 and None, expected one at least, between 0 and 1e6",
    ),
    Close(
        "bailing_hybrid",
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types has ['sliding_attention']; supported: full_attention, linear_attention",
    ),
    Close("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; " + ONLY("'silu'")),
    Close(
        "granitemoehybrid",
        {"time_step_limit": [0.001, 0.1]},
        "time_step_limit is [0.001, 0.1]; only [0.0, Infinity] is supported",
    ),
    Close(
        "granitemoehybrid",
        {"position_embedding_type": "alibi"},
        "position_embedding_type is 'alibi', supported: nope, rope",
    ),
    Close(
        "granitemoehybrid",
        {"num_local_experts": 0},
        "'granitemoehybrid' is a dense model without experts; there is nothing to pack",
    ),
    Close(
        "granitemoehybrid",
        {"mamba_d_head": 8},
        "8 heads of 8 values are not mamba_expand times hidden_size, 128",
    ),
    Close("granitemoehybrid", {"mamba_n_groups": 3}, "8 heads cannot share 3 groups"),
    Close("granitemoehybrid", {"layer_types": None}, "layer_types lists 0 layers, but the model has 3"),
    Close("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; " + ONLY("'relu2'")),
    Close("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size is 32; " + ONLY("None")),
    Close("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts is 2; " + ONLY("1")),
    Close("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings is True; " + ONLY("False")),
    Close("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True; " + ONLY("False")),
    Close("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; " + ONLY("'silu'")),
    Close("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers is 5; " + ONLY("6")),
    Close(
        "nemotron_h",
        {"layers_block_type": None, "hybrid_override_pattern": "MEX"},
        "layers are ['X']; supported: *, -, E, M",
    ),
    *(
        Close(family, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; " + ONLY("'relu2'"))
        for family in NEMOTRON[1:]
    ),
    *(
        Close(family, {"tie_word_embeddings": True}, "tie_word_embeddings is True; " + ONLY("False"))
        for family in NEMOTRON[1:]
    ),
    Close("jamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; " + ONLY("'silu'")),
    Close("jamba", {"attn_layer_offset": 2}, "attn_layer_offset is 2, expected less than the period, 2"),
    Close("jamba", {"sliding_window": 64}, "sliding_window is 64; " + ONLY("None")),
    Close("jamba", {"num_experts": 1}, "'jamba' is a dense model without experts; there is nothing to pack"),
    Close(
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention", "sliding_attention"]},
        "layer_types has ['sliding_attention']; supported: conv, full_attention",
    ),
    Close("lfm2_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; " + ONLY("'silu'")),
    Close("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; " + ONLY("False")),
    Close("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; " + ONLY("'softmax'")),
    Close(
        "deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', supported: greedy, group_limited_greedy"
    ),
    Close("deepseek_v2", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
    Close("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close("deepseek_v3", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; " + ONLY("4")),
    Close("deepseek_v3", {"n_group": 3, "topk_group": 1}, GROUPS),
    Close("deepseek_v3", {"n_group": None}, "key 'n_group' is missing, expected a value or null"),
    Close("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok is 4; " + ONLY("2")),
    Close(
        "gemma4_text",
        {"enable_moe_block": False},
        "'gemma4_text' is a dense model without experts; there is nothing to pack",
    ),
    Close("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; " + ONLY("'gelu_pytorch_tanh'")),
    Close("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8; " + ONLY("0")),
    Close("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1; " + ONLY("0")),
    Close(
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all'; " + ONLY("'vision'"),
    ),
    Close(
        "gemma4_text",
        {
            "rope_parameters": {
                kind: PROPORTIONAL | {"rope_type": "default", "rope_theta": 1e4} for kind in ATTENTION_KINDS
            }
        },
        "partial_rotary_factor needs rope_type 'proportional'",
    ),
    Close("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("afmoe", {"route_norm": False}, "route_norm is False; " + ONLY("True")),
    *(
        Close("afmoe", {key: 2}, f"{key} is 2; " + ONLY("1"))
        for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")
    ),
    Close("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type is 'copy'; " + ONLY("'identity'")),
    Close("longcat_flash", {"attention_method": "MHA"}, "attention_method is 'MHA'; " + ONLY("'MLA'")),
    Close("longcat_flash", {"mla_scale_q_lora": False}, "mla_scale_q_lora is False; " + ONLY("True")),
    Close("longcat_flash", {"mla_scale_kv_lora": False}, "mla_scale_kv_lora is False; " + ONLY("True")),
    Close("longcat_flash", {"num_hidden_layers": 2}, "num_hidden_layers is 2; " + ONLY("4")),
    Close("olmoe", {"clip_qkv": 0.0}, "attention clip is 0.0, expected between 0 and 1e6"),
    *(
        Close("dbrx", changes, message)
        for changes, message in (
            ({"attn_config": None}, "key 'attn_config' is missing, expected an object"),
            ({"ffn_config": None}, "key 'ffn_config' is missing, expected an object"),
            (
                {"attn_config": _ATTN | {"rope_theta": 5e5}},
                "attn_config: rope_theta is 500000.0, config.json has 10000.0; these keys must be equal",
            ),
            (
                {"attn_config": _ATTN | {"rope_theta": None}},
                "attn_config: key 'rope_theta' is missing, expected a number",
            ),
            ({"attn_config": _ATTN | {"clip_qkv": None}}, "attn_config: key 'clip_qkv' is missing, expected a number"),
            (
                {"attn_config": _ATTN | {"qk_ln": True}},
                "attn_config: key 'qk_ln' (True) is unknown for this family and may change the arithmetic",
            ),
            ({"attn_config": _ATTN | {"clip_qkv": -1}}, "attention clip is -1.0, expected between 0 and 1e6"),
            (
                {"ffn_config": _FFN | {"ffn_act_fn": {"name": "gelu"}}},
                "ffn_config: ffn_act_fn: name is 'gelu', supported: silu",
            ),
            (
                {"ffn_config": _FFN | {"moe_normalize_expert_weights": 2}},
                "ffn_config: moe_normalize_expert_weights is 2; " + ONLY("1"),
            ),
            (
                {"ffn_config": {key: value for key, value in _FFN.items() if key != "moe_normalize_expert_weights"}},
                "ffn_config: key 'moe_normalize_expert_weights' is missing, expected a value or null",
            ),
            (
                {"ffn_config": _FFN | {"uniform_expert_assignment": True}},
                "ffn_config: uniform_expert_assignment is True; " + ONLY("False"),
            ),
            (
                {"n_layers": 4, "num_hidden_layers": 3},
                "num_hidden_layers is 3, n_layers is 4; these keys must be equal",
            ),
            ({"tie_word_embeddings": True}, "tie_word_embeddings is True; " + ONLY("False")),
        )
    ),
    Close(
        "granitemoe",
        {"shared_intermediate_size": 64},
        "key 'shared_intermediate_size' (64) is unknown for this family and may change the arithmetic",
    ),
    Close("glm4_moe", {"n_group": 3, "topk_group": 1}, GROUPS),
    Close("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit is 10.0; " + ONLY("7.0")),
    Close("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; " + ONLY("1.702")),
    Close("gpt_oss", {"experts_per_token": 4}, "experts_per_token is 4; " + ONLY("2")),
    Close("gpt_oss", {"initial_context_length": 4096}, "initial_context_length is 4096; " + ONLY("32")),
    Close("gpt_oss", {"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
    Close("gpt_oss", {"sliding_window": None}, "key 'sliding_window' is missing, expected a value or null"),
    Close("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types lists 1 layers, but the model has 3"),
    Close(
        "gpt_oss",
        {"layer_types": ["full_attention", "odd_attention", "full_attention"]},
        "layer_types has ['full_attention', 'odd_attention']; only 'full_attention' and 'sliding_attention' are "
        "supported",
    ),
    Close(
        "gpt_oss",
        {"rope_parameters": None},
        "rope_parameters and rope_scaling are missing, expected one of them",
    ),
    Close("dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("dots1", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close("dots1", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close("dots1", {"n_shared_experts": 0}, "n_shared_experts is 0, expected 1 to 2^31 - 1"),
    Close("dots1", {"use_sliding_window": True}, "use_sliding_window is True; " + ONLY("False")),
    Close(
        "dots1",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types has ['full_attention', 'sliding_attention']; " + ONLY("'full_attention'"),
    ),
    Close("dots1", {"layer_types": None, "max_window_layers": 1}, "sliding_window is 4096; " + ONLY("None")),
    Close("deepseek", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; " + ONLY("'softmax'")),
    Close("deepseek", {"n_shared_experts": 0}, "n_shared_experts is 0, expected 1 to 2^31 - 1"),
    Close("deepseek", {"moe_layer_freq": 0}, "moe_layer_freq is 0, expected 1 to 2^31 - 1"),
    Close("deepseek", {"num_key_value_heads": None}, "key 'num_key_value_heads' is missing, expected a value or null"),
    Close("minicpm", {"pretraining_tp": 2}, "pretraining_tp is 2; " + ONLY("1")),
    Close(
        "minicpm",
        {"sparse_config": {"topk": 64}},
        "key 'sparse_config' ({'topk': 64}) is unknown for this family and may change the arithmetic",
    ),
    Close("xverse", {"num_shared_experts": None}, "key 'num_shared_experts' is missing, expected a value or null"),
    Close("xverse", {"num_shared_experts": 0}, "num_shared_experts is 0, expected 1 to 2^31 - 1"),
    Close("aria", {"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
    Close("aria", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; " + ONLY("3")),
    Close(
        "flint",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types has ['chunked_attention', 'full_attention']; "
        "only 'full_attention' and 'sliding_attention' are supported",
    ),
    *(
        Close("flint", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("head_dim", "sliding_window", "shared_expert_intermediate_size")
    ),
    Close("cohere2_moe", {"use_parallel_block": False}, "use_parallel_block is False; " + ONLY("True")),
    Close("cohere2_moe", {"use_gated_activation": False}, "use_gated_activation is False; " + ONLY("True")),
    Close("cohere2_moe", {"use_qk_norm": True}, "use_qk_norm is True; " + ONLY("False")),
    Close("cohere2_moe", {"rotary_pct": 0.5}, "rotary_pct is 0.5; " + ONLY("1.0")),
    Close(
        "cohere2_moe",
        {"position_embedding_type": "rope_neox"},
        "position_embedding_type is 'rope_neox'; " + ONLY("'rope_gptj'"),
    ),
    Close("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu', supported: softmax, sigmoid"),
    *ROWS,
    *(Close(*row) for row in LAYERED_CLOSE),
    *(Close(*row) for row in RESIDUAL_CLOSE),
)


def _changed(whole: Values, changes: Values) -> Values:
    """A config with changes; in a multimodal one the text model's, but for keys that the whole has."""
    outside = {key: value for key, value in changes.items() if key in OUTSIDE}
    values = with_text(whole, _with(text_values(whole), {k: v for k, v in changes.items() if k not in outside}))
    return _with(values, outside)


def _with(values: Values, changes: Values) -> Values:
    kept = {key: value for key, value in values.items() if key not in changes}
    return kept | {key: value for key, value in changes.items() if value is not None}


def refusal(close: Close, folder: Path) -> str | None:
    """The line that refuses a config near one we know, or None if only tensors are missing."""
    written = write_config(Tiny(close.family, "close"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(_changed(written, close.changes)))
    try:
        Checkpoint(folder).close()
    except CheckpointError as fault:
        return None if "found neither model.safetensors" in str(fault) else str(fault)
    return None
