"""Rows of `close_configs`: configs that must be refused, with what all rows need."""

from dataclasses import dataclass

from support.families import (
    ROPE_BY_KIND,
    ROTARY,
    YARN,
    Values,
)


@dataclass(frozen=True)
class Close:
    """A config near one we know, with `changes` (None removes a key), and the end of the line that refuses it."""

    family: str
    changes: Values
    message: str

    def __str__(self) -> str:
        return f"{self.family}: {', '.join(self.changes)}"


# The scalings of positions, and those of families that have others.
ALL_SCALINGS = "linear, dynamic, yarn, longrope, llama3, proportional"
SCALINGS = {
    "phimoe": "longrope",
    "hunyuan_v1_moe": f"{ALL_SCALINGS}, dynamic with an alpha",
    "ernie4_5_vl_moe": "",
}
GEMMA = ("gemma4", "gemma4_text")
PROPORTIONAL: Values = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
# Which have an object with rotary positions for each of two labels, with names of their own.
ROPE_BY_LABEL = ("deepseek_v4",)
ONE_ROPE = tuple(family for family in ROTARY if family not in (*ROPE_BY_KIND, *ROPE_BY_LABEL))


def scalings(family: str) -> str:
    return ", ".join(filter(None, ("default", SCALINGS.get(family, ALL_SCALINGS))))


OUTSIDE = ("quantization_config",)  # keys of a multimodal config that are not the text model's
ONLY = "only {} is supported".format
GROUPS = (
    "n_group is 3 and topk_group is 1; "
    "8 experts must divide into n_group groups, and topk_group must not exceed n_group"
)
_ATTN = {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 1e4}
_FFN = {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 1.0}

ROWS: tuple[Close, ...] = (
    Close(
        "cohere2_moe",
        {"shared_expert_combination_strategy": "concat"},
        "shared_expert_combination_strategy is 'concat', supported: average, sum",
    ),
    Close("cohere2_moe", {"logit_scale": 0.0}, "logit_scale is 0.0, expected between 1e-6 and 1e6"),
    Close("cohere2_moe", {"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
    *(
        Close("cohere2_moe", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("head_dim", "logit_scale")
    ),
    Close("cohere2_vision", {"logit_scale": 0.25}, "logit_scale is 0.25; " + ONLY("1.0")),
    Close("kolibri1", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("kolibri1", {"use_sliding_window": False}, "use_sliding_window is False; " + ONLY("True")),
    Close("kolibri1", {"sliding_window": 0}, "sliding_window is 0, expected 1 to 2^31 - 1"),
    *(
        Close("kolibri1", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("head_dim", "num_key_value_heads")
    ),
    Close("kolibri1", {"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
    Close("deepseek_ocr2", {"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
    Close("deepseek_ocr2", {"head_dim": 32}, "head_dim is 32; " + ONLY("16")),
    Close(
        "deepseek_ocr2",
        {"topk_method": "noaux_tc"},
        "topk_method is 'noaux_tc', supported: greedy, group_limited_greedy",
    ),
    Close("deepseek_ocr2", {"mlp_layer_types": None}, "key 'mlp_layer_types' is missing, expected a value or null"),
    Close("qwen3_omni_moe", {"sliding_window": 7}, "sliding_window is 7; " + ONLY("None")),
    Close("qwen3_omni_moe", {"use_sliding_window": True}, "use_sliding_window is True; " + ONLY("False")),
    Close("qwen3_omni_moe", {"use_qk_norm": False}, "use_qk_norm is False; " + ONLY("True")),
    Close(
        "qwen3_omni_moe",
        {"shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size is 8; " + ONLY("0"),
    ),
    Close("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob is False; " + ONLY("True")),
    Close("qwen3_vl_moe", {"use_sliding_window": True}, "use_sliding_window is True; " + ONLY("False")),
    Close("qwen3_vl_moe", {"sliding_window": 7}, "sliding_window is 7; " + ONLY("None")),
    Close("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list is [1, 0, 1]; " + ONLY("[1, 1, 1]")),
    Close("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; " + ONLY("'per_layer'")),
    Close("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False; " + ONLY("True")),
    Close("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False; " + ONLY("True")),
    Close("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8; " + ONLY("0")),
    Close("minimax_m2", {"sliding_window": 7}, "sliding_window is 7; " + ONLY("None")),
    Close("minimax_m2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta is 2.0; " + ONLY("1.0")),
    Close("minimax_m2", {"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
    Close("ernie4_5_moe", {"use_bias": True}, "use_bias is True; " + ONLY("False")),
    Close("ernie4_5_moe", {"moe_gate": "top2"}, "moe_gate is 'top2'; " + ONLY("'topk'")),
    Close("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free is False; " + ONLY("True")),
    Close("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; " + ONLY("1e-12")),
    Close("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2, expected -1 or a layer"),
    Close(
        "ernie4_5_moe",
        {"moe_num_shared_experts": None},
        "key 'moe_num_shared_experts' is missing, expected a value or null",
    ),
    *(
        Close(family, changes, message)
        for family in ("ernie4_5_vl_moe", "ernie4_5_moe_vl")
        for changes, message in (
            ({"use_bias": True}, "use_bias is True; " + ONLY("False")),
            ({"moe_gate": "top2"}, "moe_gate is 'top2'; " + ONLY("'topk'")),
            ({"moe_norm_min": 0.1}, "moe_norm_min is 0.1; " + ONLY("1e-12")),
            (
                {"moe_intermediate_size": [48]},
                "moe_intermediate_size is [48], expected two whole numbers above 0",
            ),
        )
    ),
    Close(
        "ernie4_5_vl_moe",
        {"mlp_layer_types": ["dense", "odd", "sparse"]},
        "mlp_layer_types has ['dense', 'odd', 'sparse']; only 'dense' and 'sparse' are supported",
    ),
    Close("ernie4_5_moe_vl", {"rope_3d": False}, "rope_3d is False; " + ONLY("True")),
    Close("ernie4_5_moe_vl", {"use_rmsnorm": False}, "use_rmsnorm is False; " + ONLY("True")),
    Close("ernie4_5_moe_vl", {"moe_layer_interval": 2}, "moe_layer_interval is 2; " + ONLY("1")),
    *(
        Close(
            "ernie4_5_moe_vl",
            changes,
            "moe_layer_start_index and moe_layer_end_index give text and images experts in different layers, or leave "
            "out the last layer; that is not supported",
        )
        for changes in ({"moe_layer_start_index": [1, 2]}, {"moe_layer_end_index": [4, 1]})
    ),
    *(
        Close("ernie4_5_moe_vl", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("moe_k", "moe_num_shared_experts", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    ),
    Close("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("glm4_moe_lite", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close("glm4_moe_lite", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close(
        "glm4_moe_lite",
        {"mlp_layer_types": None, "first_k_dense_replace": 2},
        "first_k_dense_replace is 2; " + ONLY("1"),
    ),
    Close(
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "odd", "sparse"]},
        "mlp_layer_types has ['dense', 'odd', 'sparse']; only 'dense' and 'sparse' are supported",
    ),
    Close("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types lists 1 layers, but the model has 3"),
    Close(
        "glm4_moe_lite", {"num_key_value_heads": None}, "key 'num_key_value_heads' is missing, expected a value or null"
    ),
    Close("glm4v_moe", {"use_qk_norm": True}, "use_qk_norm is True; " + ONLY("False")),
    Close("glm4v_moe", {"attention_bias": None}, "key 'attention_bias' is missing, expected a value or null"),
    Close("glm4v_moe", {"n_group": 3, "topk_group": 1}, GROUPS),
    Close(
        "granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size is -1, expected 0 to 2^31 - 1"
    ),
    *(
        Close(family, changes, message)
        for family in ("mistral3", "mistral4")
        for changes, message in (
            ({"n_group": 2}, "n_group is 2; " + ONLY("1")),
            ({"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
            ({"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
            ({"sliding_window": 7}, "sliding_window is 7; " + ONLY("None")),
            ({"head_dim": 8}, "head_dim is 8; " + ONLY("24")),
            (
                {"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 1 / 3}},
                "key 'llama_4_scaling_beta' is missing, expected a number",
            ),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1 / 3}},
                "rope_type must be yarn, longrope or llama3",
            ),
        )
    ),
    Close("hunyuan_v1_moe", {"use_qk_norm": False}, "use_qk_norm is False; " + ONLY("True")),
    Close("hunyuan_v1_moe", {"use_cla": True}, "use_cla is True; " + ONLY("False")),
    Close("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "moe_topk is [2, 1, 2]; " + ONLY("[2, 2, 2]")),
    Close("hunyuan_v1_moe", {"num_shared_expert": [1, 2, 1]}, "num_shared_expert is [1, 2, 1]; " + ONLY("[1, 1, 1]")),
    Close("hunyuan_v1_moe", {"moe_intermediate_size": 64}, "moe_intermediate_size is 64; " + ONLY("48")),
    Close("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1; " + ONLY("0")),
    Close("hunyuan_v1_moe", {"attention_head_dim": 16}, "attention_head_dim is 16; " + ONLY("32")),
    Close("exaone_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("exaone_moe", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close(
        "exaone_moe",
        {"is_moe_layer": [True] * 3},
        "is_moe_layer is [True, True, True]; " + ONLY("[False, True, True]"),
    ),
    Close("exaone_moe", {"sliding_window": None}, "key 'sliding_window' is missing, expected a value or null"),
    Close(
        "exaone_moe",
        {"layer_types": None, "sliding_window_pattern": "LLG"},
        "sliding_window_pattern is 'LLG', expected a whole number",
    ),
    Close(
        "exaone_moe",
        {"layer_types": ["full_attention"] * 3},
        "windowed_layers must list some decoder layers, but not all, in rising order",
    ),
    Close("axk1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("axk1", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close("axk1", {"q_lora_rank": None}, "key 'q_lora_rank' is missing, expected a whole number"),
    Close("axk1", {"n_group": None}, "key 'n_group' is missing, expected a value or null"),
    Close("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("deepseek_v32", {"topk_method": "greedy"}, "topk_method is 'greedy'; " + ONLY("'noaux_tc'")),
    Close("deepseek_v32", {"moe_layer_freq": 2}, "moe_layer_freq is 2; " + ONLY("1")),
    Close("deepseek_v32", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("deepseek_v32", {"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
    Close("deepseek_v32", {"rope_interleave": False}, "rope_interleave is False; " + ONLY("True")),
    Close("deepseek_v32", {"index_topk": None}, "key 'index_topk' is missing, expected a value or null"),
    Close("deepseek_v32", {"index_topk": 0}, "index_topk is 0, expected 1 to 2^31 - 1"),
    Close(
        "deepseek_v32",
        {"index_head_dim": 4},
        "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values",
    ),
    Close("deepseek_v32", {"q_lora_rank": None}, "key 'q_lora_rank' is missing, expected a whole number"),
    Close(
        "deepseek_v32",
        {"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]},
        "layer_types has ['full_attention', 'indexed_attention']; only 'indexed_attention' and "
        "'deepseek_sparse_attention' are supported",
    ),
    *(
        Close("minimax_m3_vl", changes, message)
        for changes, message in (
            ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
            ({"use_gemma_norm": False}, "use_gemma_norm is False; " + ONLY("True")),
            ({"attention_output_gate": True}, "attention_output_gate is True; " + ONLY("False")),
            ({"n_shared_experts": 2}, "n_shared_experts is 2; " + ONLY("1")),
            ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0; " + ONLY("7.0")),
            ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; " + ONLY("1.702")),
            ({"rotary_dim": 8}, "rotary_dim is 8; " + ONLY("16")),
            ({"index_n_heads": 3}, "3 heads of an indexer cannot choose for 2 keys and values"),
            ({"index_head_dim": 8}, "an indexer of blocks has heads of 8, expected at least rotary_dim, 16"),
            ({"index_local_blocks": 4}, "indexer local_blocks is 4 with largest, expected 0 to 3"),
            ({"index_block_size": 0}, "index_block_size is 0, expected at least 1"),
            (
                {"layer_types": ["full_attention", "minimax_m3_sparse", "sliding_attention"]},
                "layer_types has ['full_attention', 'minimax_m3_sparse', 'sliding_attention']; "
                "only 'full_attention' and 'minimax_m3_sparse' are supported",
            ),
            (
                {"sparse_attention_config": {"use_sparse_attention": False}},
                "sparse_attention_config: use_sparse_attention is False; " + ONLY("True"),
            ),
            (
                {"sparse_attention_config": {"sparse_init_block": 1}},
                "sparse_attention_config: sparse_init_block is 1; " + ONLY("0"),
            ),
            (
                {"sparse_attention_config": {"sparse_attention_freq": [0, 1]}},
                "sparse_attention_config: sparse_attention_freq is [0, 1], expected 0 or 1 for each of 3 layers",
            ),
            (
                {"mlp_layer_types": None, "moe_layer_freq": [0, 1, 2]},
                "moe_layer_freq is [0, 1, 2], expected 0 or 1 for each of 3 layers",
            ),
        )
    ),
    *(
        Close("axk2", {key: value}, f"{key} is {value!r}; " + ONLY(repr(only)))
        for key, value, only in (
            ("attention_output_gate", False, True),
            ("attn_gate_fused", False, True),
            ("gated_norm", False, True),
            ("mlp_bias", True, False),
            ("rope_interleave", False, True),
            ("scoring_func", "softmax", "sigmoid"),
            ("topk_method", "greedy", "noaux_tc"),
            ("attention_bias", True, False),
            ("num_key_value_heads", 2, 4),
        )
    ),
    *(
        Close("axk2", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("routed_scaling_factor", "num_key_value_heads", "index_topk")
    ),
    Close("axk2", {"q_lora_rank": None}, "key 'q_lora_rank' is missing, expected a whole number"),
    Close("axk2", {"n_group": 2}, "n_group and topk_group must both be there, or neither"),
    Close("axk2", {"topk_group": 1}, "n_group and topk_group must both be there, or neither"),
    Close("axk2", {"n_group": 3, "topk_group": 1}, GROUPS),
    Close("axk2", {"gated_norm_rank": 0}, "gated_norm_rank is 0, expected 1 to 2^31 - 1"),
    Close(
        "axk2",
        {"index_head_dim": 4},
        "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values",
    ),
    Close(
        "axk2",
        {"layer_types": ["full_attention"] * 3},
        "layer_types has ['full_attention']; only 'indexed_attention' and 'deepseek_sparse_attention' are supported",
    ),
    *(
        Close("hy_v4", {key: value}, f"{key} is {value!r}; " + ONLY(repr(only)))
        for key, value, only in (
            ("enable_ihc", False, True),
            ("first_k_dense_replace", 3, 1),
            ("gated_mla", False, True),
            ("gating_type", "headwise", "elementwise"),
            ("learnable_sink", False, True),
            ("moe_layer_freq", 2, 1),
            ("scoring_func", "softmax", "sigmoid"),
            ("topk_method", "greedy", "noaux_tc"),
            ("attention_bias", True, False),
            ("hidden_act", "gelu", "silu"),
        )
    ),
    *(
        Close("hy_v4", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("routed_scaling_factor", "index_topk")
    ),
    *(
        Close("hy_v4", {key: None}, f"key '{key}' is missing, expected a whole number")
        for key in ("q_lora_rank", "index_n_heads", "index_head_dim")
    ),
    Close(
        "hy_v4",
        {"swiglu_limit": 0.0},
        "expert limits are 0.0 and None, expected one at least, between 0 and 1e6",
    ),
    Close("hy_v4", {"hc_mult": 1}, "residual streams is 1, expected 2 to 64"),
    Close(
        "hy_v4",
        {"hc_magnitude": 0.0},
        "residual mixing 0, magnitude 0.0 or eps 1e-06 is out of range",
    ),
    Close(
        "hy_v4",
        {"index_head_dim": 4},
        "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values",
    ),
    Close(
        "hy_v4",
        {"indexer_types": ["shared", "full", "full", "full"]},
        "layer 0 shares an indexer's choice, but there is no layer before it",
    ),
    Close(
        "hy_v4",
        {"indexer_types": ["full", "none", "full", "full"]},
        "indexer_types has ['full', 'none']; only 'full' and 'shared' are supported",
    ),
    Close(
        "hy_v4",
        {"layer_types": ["full_attention"] * 4},
        "layer_types has ['full_attention']; only 'indexed_attention' and 'deepseek_sparse_attention' are supported",
    ),
    Close("glm_moe_dsa", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; " + ONLY("'sigmoid'")),
    Close("glm_moe_dsa", {"rope_interleave": False}, "rope_interleave is False; " + ONLY("True")),
    Close("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False; " + ONLY("True")),
    Close("glm_moe_dsa", {"attention_bias": True}, "attention_bias is True; " + ONLY("False")),
    Close("glm_moe_dsa", {"index_topk": None}, "key 'index_topk' is missing, expected a value or null"),
    Close("glm_moe_dsa", {"q_lora_rank": None}, "key 'q_lora_rank' is missing, expected a whole number"),
    Close(
        "glm_moe_dsa",
        {"indexer_types": ["shared", "full", "full", "full"]},
        "layer 0 shares an indexer's choice, but there is no layer before it",
    ),
    Close(
        "glm_moe_dsa",
        {"indexer_types": ["full", "none", "full", "full"]},
        "indexer_types has ['full', 'none']; only 'full' and 'shared' are supported",
    ),
    Close(
        "glm_moe_dsa",
        {"indexer_types": None, "index_topk_pattern": "FFS"},
        "index_topk_pattern is 'FFS', expected F or S for each of 4 layers",
    ),
    *(
        Close(family, changes, message)
        for family in ("llama4", "llama4_text")
        for changes, message in (
            ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; " + ONLY("1")),
            ({"for_llm_compressor": True}, "for_llm_compressor is True; " + ONLY("False")),
            ({"attention_chunk_size": None}, "key 'attention_chunk_size' is missing, expected a value or null"),
            ({"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
            (
                {"layer_types": ["sliding_attention"] * 4},
                "layer_types has ['sliding_attention']; only 'full_attention' and 'chunked_attention' are supported",
            ),
            (
                {"no_rope_layers": [0, 0, 0, 0]},
                "rotated_layers must list some decoder layers, but not all, in rising order",
            ),
        )
    ),
    Close("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; " + ONLY("0")),
    Close("solar_open", {"use_qk_norm": True}, "use_qk_norm is True; " + ONLY("False")),
    Close("solar_open", {"head_dim": None}, "key 'head_dim' is missing, expected a value or null"),
    Close("hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False; " + ONLY("True")),
    Close("hy_v3", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False; " + ONLY("True")),
    Close("hy_v3", {"qk_norm": False}, "qk_norm is False; " + ONLY("True")),
    Close("hy_v3", {"route_norm": False}, "route_norm is False; " + ONLY("True")),
    Close("hy_v3", {"mlp_bias": True}, "mlp_bias is True; " + ONLY("False")),
    Close("hy_v3", {"expert_hidden_dim": 64}, "expert_hidden_dim is 64; " + ONLY("48")),
    Close("switch_transformers", {"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu', supported: relu"),
    Close(
        "switch_transformers",
        {"feed_forward_proj": "gated-gelu"},
        "feed_forward_proj is 'gated-gelu'; " + ONLY("'relu'"),
    ),
    Close("switch_transformers", {"is_gated_act": True}, "is_gated_act is True; " + ONLY("False")),
    Close("switch_transformers", {"router_bias": True}, "router_bias is True; " + ONLY("False")),
    Close("longcat_flash", {"router_bias": True}, "router_bias is True; " + ONLY("False")),
    Close("switch_transformers", {"router_dtype": "bfloat16"}, "router_dtype is 'bfloat16'; " + ONLY("'float32'")),
    Close("switch_transformers", {"num_selected_experts": 2}, "num_selected_experts is 2; " + ONLY("1")),
    Close("switch_transformers", {"is_encoder_decoder": False}, "is_encoder_decoder is False; " + ONLY("True")),
    Close("switch_transformers", {"is_decoder": True}, "is_decoder is True; " + ONLY("False")),
    Close("switch_transformers", {"encoder_sparse_step": 1}, "encoder_sparse_step is 1; " + ONLY("2")),
    Close(
        "switch_transformers",
        {"decoder_start_token_id": None},
        "key 'decoder_start_token_id' is missing, expected a whole number",
    ),
    Close(
        "switch_transformers",
        {
            "num_sparse_encoder_layers": 5,
            "encoder_sparse_step": 0,
            "num_sparse_decoder_layers": 4,
            "decoder_sparse_step": 0,
        },
        "moe_layers must list decoder layers, at least one, in rising order",
    ),
    Close(
        "switch_transformers",
        {"relative_attention_num_buckets": 30},
        "num_buckets is 30, expected a multiple of 4 up to 65536",
    ),
    Close(
        "beam",
        {"rope_parameters": {"sliding_attention": None}},
        "key 'full_attention' is missing, expected a value or null",
    ),
    *(
        Close("beam", {key: None}, f"key '{key}' is missing, expected a value or null")
        for key in ("head_dim", "num_key_value_heads", "n_group", "topk_group", "final_logit_softcapping")
    ),
    Close("minimax", {"postnorm": False}, "postnorm is False; " + ONLY("True")),
    Close("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; " + ONLY("0")),
    Close("minimax", {"rotary_dim": 7}, "rotary_dim is 7, expected an even number up to 16"),
    Close(
        "minimax",
        {"mlp_beta_factor": 0},
        "residual factors are [1.5, 1.0, 0.75, 1.25, 2.0, 0.0], expected between 0 and 1e6",
    ),
    Close(
        "minimax",
        {"rotary_dim": 8, "rope_parameters": YARN | {"rope_theta": 1e4}},
        "rope_type 'yarn' is not supported; supported: default",
    ),
    Close("minimax", {"num_key_value_heads": None}, "key 'num_key_value_heads' is missing, expected a value or null"),
)
