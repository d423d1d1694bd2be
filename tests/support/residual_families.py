"""Tiny configs of families whose layers do not simply add to the hidden state, in the form of `all_attention`."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

_GEMMA4: Values = {
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
_QWEN4: Values = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "hc_count": 3,
    "hc_lowrank": 20,
    "ple_layer_ids": [2, 3],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 48,
    "indexer_compress_ratio": 4,
    "eos_token_id": 3,
    "output_gate_type": "sigmoid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
RESIDUAL_SHAPES: dict[str, Values] = {
    "afmoe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "route_scale": 1.7,
        "sliding_window": 7,
        "mup_enabled": True,
        "global_attn_every_n_layers": 2,
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    "granitemoe": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.05,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 80,
        "expert_ffn_hidden_size": 48,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "moe_topk": 3,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": 40,
    },
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4 | {"model_type": "gemma4_text"},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": _QWEN4 | {"model_type": "qwen4_exp_text"},
}
RESIDUAL_SWITCHED: dict[str, dict[str, Values]] = {
    "gemma4_text": {
        "values of their own, no cap": {"attention_k_eq_v": False, "final_logit_softcapping": None},
        "bias, window in no layer, rotated as a whole": {
            "attention_bias": True,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
    },
    "afmoe": {
        "window everywhere, bias": {"layer_types": ["sliding_attention"] * 3, "attention_bias": True},
        "no window, plain embedding": {"layer_types": ["full_attention"] * 3, "mup_enabled": False},
    },
    "flex_olmo": {
        "own keys, bias, normalized": {"num_key_value_heads": 4, "attention_bias": True, "norm_topk_prob": True}
    },
    "longcat_flash": {"experts with weights alone": {"zero_expert_num": 0, "routed_scaling_factor": 1.5}},
    "qwen4_exp_text": {
        "no n-grams, silu, not normalized": {"ple_layer_ids": None, "output_gate_type": None, "norm_topk_prob": False},
        "two streams, n-grams of two": {
            "hc_count": 2,
            "ngram_size": 2,
            "ple_layer_ids": [1],
            "ple_conv_kernel_size": 2,
        },
    },
}
