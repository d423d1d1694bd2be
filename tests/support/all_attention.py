"""Rows of families whose every layer attends; the table of all families, and what is done with rows, is `families`.

`SHAPES` is a family's smallest config, `SWITCHED` what else its config can switch. In a multimodal checkpoint both are
the text model's; `MULTIMODAL` has the other parts, as small as their classes allow.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


_EXPERTS: Values = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 80,
    "num_experts_per_tok": 3,
}
_LATENT: Values = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 40,
}
_YARN: Values = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
_MISTRAL: Values = {
    "n_routed_experts": 8,
    "rope_parameters": _YARN
    | {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3,
        "partial_rotary_factor": 1 / 3,
    },
}
_LLAMA4: Values = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 6,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "floor_scale": 9,
    "attn_scale": 0.4,
}
_ERNIE_VL: Values = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": [48, 32],
    "intermediate_size": 80,
    "moe_num_experts": 8,
    "moe_k": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    "tie_word_embeddings": False,
}
_ERNIE_VL_SWITCHED: dict[str, Values] = {
    "tied head, no shared expert": {"tie_word_embeddings": True, "moe_num_shared_experts": 0},
    "two dense layers": {"mlp_layer_types": ["dense", "dense", "sparse"]},
}
_DBRX_FFN: Values = {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3}
SHAPES: dict[str, Values] = {
    "dbrx": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 128,
        "vocab_size": 96,
        "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": _DBRX_FFN,
    },
    "llama4_text": _LLAMA4,
    "llama4": _LLAMA4 | {"model_type": "llama4_text"},
    "minimax_m2": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "minimax_m3_vl": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "dense_intermediate_size": 80,
        "shared_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 24,
        "index_block_size": 5,
        "index_topk_blocks": 3,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "ernie4_5_moe": {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "moe_num_experts": 8,
        "moe_k": 3,
    },
    "ernie4_5_vl_moe": _ERNIE_VL,
    "ernie4_5_moe_vl": _ERNIE_VL,
    "glm4_moe_lite": _EXPERTS | _LATENT | {"n_routed_experts": 8},
    "glm4v_moe": _EXPERTS
    | {
        "head_dim": 32,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
    },
    "granitemoeshared": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.05,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "hunyuan_v1_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "moe_topk": 2,
        "intermediate_size": 48,
    },
    "exaone_moe": _EXPERTS
    | {
        "head_dim": 32,
        "num_experts": 8,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
    },
    "kimi_k25": _EXPERTS
    | _LATENT
    | {
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "mistral4": _EXPERTS | _LATENT | _MISTRAL,
    "mistral3": _EXPERTS | _LATENT | _MISTRAL | {"model_type": "mistral4", "tie_word_embeddings": False},
    "deepseek_v32": _EXPERTS
    | _LATENT
    | {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "index_topk": 9,
        "index_head_dim": 16,
        "index_n_heads": 8,
    },
    "glm_moe_dsa": _EXPERTS
    | _LATENT
    | {
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "index_topk": 9,
        "index_head_dim": 16,
        "index_n_heads": 24,
        "indexer_types": ["full", "shared", "shared", "full"],
    },
    "solar_open": _EXPERTS | {"head_dim": 32, "n_routed_experts": 8},
    "hy_v3": _EXPERTS | {"head_dim": 32, "num_experts": 8},
    "aria": {"num_key_value_heads": 2, "intermediate_size": 48, "moe_num_experts": 6, "moe_topk": 3},
    "flint": _EXPERTS
    | {
        "num_hidden_layers": 5,
        "head_dim": 32,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
        "sliding_window": 7,
    },
    "deepseek_ocr2": _EXPERTS | {"n_routed_experts": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "qwen3_omni_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "mlp_only_layers": [1],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
            "interleaved": True,
        },
    },
    "qwen3_vl_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 80,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]},
    },
}
SWITCHED: dict[str, dict[str, Values]] = {
    "dbrx": {
        "hardly clamped, not normalized, yarn": {
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 77.0},
            "ffn_config": _DBRX_FFN | {"moe_normalize_expert_weights": None},
            "rope_parameters": _YARN | {"rope_theta": 77.0},
        },
        "clamped closely": {"attn_config": {"clip_qkv": 0.1, "kv_n_heads": 1, "rope_theta": 1e4}},
    },
    "minimax_m2": {
        "yarn, whole heads": {"rope_parameters": _YARN},
        "tied head": {"tie_word_embeddings": True},
    },
    "ernie4_5_moe": {
        "every second layer, no shared expert, own head": {
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
        "first layers alone": {"moe_layer_start_index": 0, "moe_layer_end_index": 1},
    },
    "ernie4_5_vl_moe": _ERNIE_VL_SWITCHED | {"dense last layer": {"mlp_layer_types": ["sparse", "sparse", "dense"]}},
    "ernie4_5_moe_vl": _ERNIE_VL_SWITCHED,
    "glm4_moe_lite": {
        "groups, rotated in halves, dense last layer": {
            "n_group": 4,
            "topk_group": 2,
            "rope_interleave": False,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
        },
        "no query latent, not normalized, yarn": {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "hunyuan_v1_moe": {
        "fixed alpha, bias, tied head": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0},
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "keys for every head": {"num_key_value_heads": 4},
    },
    "exaone_moe": {
        "window everywhere, groups": {"layer_types": ["sliding_attention"] * 3, "n_group": 4, "topk_group": 2},
        "window on one layer, yarn, not normalized": {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "norm_topk_prob": False,
            "rope_parameters": _YARN,
        },
        "dense last layer": {"mlp_layer_types": ["sparse", "sparse", "dense"]},
    },
    "mistral4": {
        "dense layer, no query latent, scaled": {
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "routed_scaling_factor": 2.5,
        },
        "rotated in halves, not normalized": {"rope_interleave": False, "norm_topk_prob": False},
    },
    "mistral3": {"tied head": {"tie_word_embeddings": True}},
    "kimi_k25": {
        "groups, yarn, tied head": {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "tie_word_embeddings": True,
        },
    },
    "deepseek_v32": {
        "yarn, heads of the rotated size": {
            "index_head_dim": 8,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "more than the text, not normalized, one group": {
            "index_topk": 200,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    },
    "glm_moe_dsa": {
        "yarn, every second layer chooses": {
            "indexer_types": None,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "every layer chooses, more than the text, dense last layer": {
            "indexer_types": None,
            "index_topk": 200,
            "mlp_layer_types": ["sparse", "sparse", "sparse", "dense"],
        },
        "a letter for each layer, groups": {
            "indexer_types": None,
            "index_topk_pattern": "FFSS",
            "n_group": 4,
            "topk_group": 2,
        },
    },
    "llama4_text": {
        "llama3's positions, experts everywhere": {
            "interleave_moe_layer_step": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "bias, no norms, no temperature, tied head": {
            "attention_bias": True,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
        "all layers rotate, in chunks": {"no_rope_layers": [1, 1, 1, 1], "moe_layers": [0, 3, 9]},
        "layers by name": {
            "no_rope_layers": [1, 0, 0, 1],
            "layer_types": ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
        },
    },
    "minimax_m3_vl": {
        "every layer chooses, one for all heads, tied head, whole heads rotated": {
            "layer_types": ["minimax_m3_sparse"] * 3,
            "mlp_layer_types": ["sparse"] * 3,
            "index_n_heads": 1,
            "index_head_dim": 32,
            "index_local_blocks": 2,
            "tie_word_embeddings": True,
            "rotary_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "as published": {
            "layer_types": None,
            "mlp_layer_types": None,
            "moe_layer_freq": [0, 1, 1],
            "hidden_act": "swigluoai",
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": 16,
                "sparse_num_index_heads": 1,
                "sparse_topk_blocks": 2,
                "sparse_block_size": 8,
                "sparse_disable_index_value": [0, 0, 1],
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 0,
                "sparse_attention_freq": [0, 0, 1],
            },
        },
        "no layer chooses, yarn": {
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": _YARN | {"partial_rotary_factor": 0.5},
        },
    },
    "glm4v_moe": {"no bias, tied head": {"attention_bias": False, "tie_word_embeddings": True}},
    "granitemoeshared": {"no shared expert, bias": {"shared_intermediate_size": 0, "attention_bias": True}},
    "solar_open": {
        "groups, bias, yarn": {"n_group": 4, "topk_group": 2, "attention_bias": True, "rope_parameters": _YARN}
    },
    "hy_v3": {
        "two shared experts, bias, dense last layer": {
            "num_shared_experts": 2,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
        },
    },
    "aria": {
        "bias, tied head, three shared experts, yarn": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_num_shared_experts": 3,
            "head_dim": 32,
            "rope_parameters": _YARN,
        },
    },
    "flint": {
        "bias, tied head, not normalized, windows everywhere, yarn": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "layer_types": ["sliding_attention"] * 5,
            "rope_parameters": _YARN,
        },
        "no windows, every second layer": {
            "layer_types": ["full_attention"] * 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
        },
        "dense layers by default, two windows": {
            "mlp_only_layers": None,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "full_attention",
            ],
        },
    },
    "deepseek_ocr2": {
        "groups, scaled, bias, tied head, yarn": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
    },
    "qwen3_omni_moe": {
        "bias, tied head, not normalized": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
        },
        "every second layer, yarn": {"decoder_sparse_step": 2, "mlp_only_layers": [], "rope_parameters": _YARN},
    },
    "qwen3_vl_moe": {
        "bias, tied head": {"attention_bias": True, "tie_word_embeddings": True},
        "every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    },
}
