"""Tiny configs of families whose layers do not simply add to the hidden state, in the form of `all_attention`."""

from __future__ import annotations

from typing import Any

import torch

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
_COHERE: Values = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "prefix_dense_intermediate_size": 80,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "sliding_window": 7,
}
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
_KINDS = {
    "window": "sliding_attention",
    "sparse": "compressed_sparse_attention",
    "heavy": "heavily_compressed_attention",
}
_DEEPSEEK_V4: Values = {
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "head_dim": 16,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "layer_types": [_KINDS[name] for name in ("window", "sparse", "heavy", "sparse", "heavy")],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
    "sliding_window": 7,
    "swiglu_limit": 0.5,
    "o_groups": 3,
    "o_lora_rank": 20,
    "index_n_heads": 12,
    "index_head_dim": 12,
    "index_topk": 5,
}
RESIDUAL_SHAPES: dict[str, Values] = {
    "beam": _EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 7,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "final_logit_softcapping": 3.0,
    },
    "hy_v4": _EXPERTS
    | _LATENT
    | {
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "index_topk": 9,
        "index_head_dim": 20,
        "index_n_heads": 24,
        "indexer_types": ["full", "shared", "full", "shared"],
        "hc_mult": 3,
        "hc_magnitude": 1.5,
        "swiglu_limit": 0.25,
    },
    "deepseek_v4": _DEEPSEEK_V4,
    "minimax": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "block_size": 8,
        "full_attn_alpha_factor": 1.5,
        "linear_attn_alpha_factor": 0.75,
        "linear_attn_beta_factor": 1.25,
        "mlp_alpha_factor": 2,
        "mlp_beta_factor": 0.5,
    },
    "axk1": _EXPERTS | _LATENT | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "axk2": _EXPERTS
    | _LATENT
    | {
        "n_routed_experts": 8,
        "index_topk": 9,
        "index_head_dim": 16,
        "index_n_heads": 24,
        "gated_norm_rank": 10,
    },
    "cohere2_moe": _COHERE | {"logit_scale": 0.25},
    "cohere2_vision": _COHERE | {"model_type": "cohere2_moe", "logit_scale": 1.0},
    "kolibri1": _EXPERTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "num_hidden_layers": 5,
        "shared_expert_intermediate_size": 24,
        "sliding_window": 7,
    },
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
    "beam": {
        "bias, one group, not normalized, no softcap, tied head": {
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
        "all layers rotate, in ways of their own": {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
                "full_attention": _YARN,
            },
        },
        "no layer rotates, three dense layers": {
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {"full_attention": None},
            "mlp_layer_types": None,
        },
        "windows everywhere": {"layer_types": ["sliding_attention"] * 4},
    },
    "hy_v4": {
        "every layer chooses, heads of the rotated size, yarn, groups, tied head": {
            "indexer_types": ["full"] * 4,
            "index_head_dim": 8,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "n_group": 4,
            "topk_group": 2,
            "tie_word_embeddings": True,
        },
        "choices by default, more than the text, two streams, not normalized, dense last layer": {
            "indexer_types": None,
            "index_topk": 200,
            "hc_mult": 2,
            "hc_eps": 1e-3,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "mlp_layer_types": ["sparse", "sparse", "sparse", "dense"],
        },
    },
    "deepseek_v4": {
        "yarn, tied head": {
            "rope_parameters": _YARN,
            "tie_word_embeddings": True,
        },
        "yarn with a factor of its own": {
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "compress": _YARN | {"rope_theta": 1.6e5, "partial_rotary_factor": 0.5, "attention_factor": 1.2},
            },
        },
        "a window alone": {"layer_types": [_KINDS["window"]] * 5},
        "as published: tables first, windows first": {
            "layer_types": [_KINDS[name] for name in ("window", "window", "sparse", "heavy", "sparse")],
            "mlp_layer_types": None,
        },
        "no table, entries of one position and of nearly all": {
            "mlp_layer_types": ["moe"] * 5,
            "compress_rates": {"compressed_sparse_attention": 1, "heavily_compressed_attention": 90},
            "index_topk": 40,
        },
    },
    "minimax": {
        "the published shares of states, part of each head rotated": {
            "head_dim": 32,
            "rotary_dim": 8,
            "full_attn_alpha_factor": 3.5565588200778455,
            "linear_attn_alpha_factor": 3.5565588200778455,
            "linear_attn_beta_factor": 1.0,
            "mlp_alpha_factor": 3.5565588200778455,
            "mlp_beta_factor": 1.0,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
        "no lightning, window of 7, yarn, tied head": {
            "layer_types": ["full_attention"] * 4,
            "head_dim": 16,
            "sliding_window": 7,
            "rope_parameters": _YARN,
            "tie_word_embeddings": True,
        },
        "lightning alone": {"layer_types": ["linear_attention"] * 4},
    },
    "axk1": {
        "yarn with an mscale, one group": {
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "rotated in halves, not normalized": {"rope_interleave": False, "norm_topk_prob": False},
        "dense layers by kind, two shared experts": {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_shared_experts": 2,
        },
    },
    "axk2": {
        "groups, yarn, two shared experts": {
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "dense layers by kind, more than the text, not normalized, tied head": {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_topk": 200,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    },
    "cohere2_moe": {
        "rms norms, sigmoids, shared experts added, bias, yarn": {
            "rms_norm_eps": 1e-6,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "attention_bias": True,
            "rope_parameters": _YARN,
        },
        "sigmoids as they are, no shared expert, own head": {
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
        "layers by steps, a dense layer that does not rotate": {
            "first_k_dense_replace": 2,
            "mlp_layer_types": None,
            "layer_types": None,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 2,
            "prefix_dense_intermediate_size": None,
        },
        "layers by steps, dense layers without a window rotate": {
            "first_k_dense_replace": 2,
            "mlp_layer_types": None,
            "layer_types": None,
            "sliding_window_pattern": 3,
        },
        "windows everywhere": {"layer_types": ["sliding_attention"] * 5},
        "no layer rotates": {"mlp_layer_types": ["sparse"] * 5, "layer_types": ["full_attention"] * 5},
    },
    "cohere2_vision": {"own head": {"tie_word_embeddings": False}},
    "kolibri1": {
        "two layers without a window, yarn": {
            "rope_parameters": _YARN,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        },
        "windows everywhere, normalized": {"layer_types": ["sliding_attention"] * 5, "norm_topk_prob": True},
        "no layer rotates": {"layer_types": ["full_attention"] * 5},
        "tied head": {"tie_word_embeddings": True},
    },
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


def experts_of_tokens(shape: torch.Size, num_experts: int) -> torch.Tensor:
    """A random table from tokens to experts, different ones for each: int64 [tokens, k]."""
    return torch.rand(shape[0], num_experts).argsort(dim=1)[:, : shape[1]]


def published_v4(values: Values) -> Values:
    """A config of DeepSeek-V4 as its authors write it, from that of transformers 5."""
    new = ("dtype", "rope_parameters", "layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    return {key: value for key, value in values.items() if key not in new} | {
        "torch_dtype": values.get("dtype"),
        "compress_ratios": [*(ratios[kind] for kind in values["layer_types"]), 0],  # the last: of a prediction layer
        "compress_rate_csa": values["compress_rates"]["compressed_sparse_attention"],
        "compress_rate_hca": values["compress_rates"]["heavily_compressed_attention"],
        "num_hash_layers": values["mlp_layer_types"].count("hash_moe"),
        "rope_scaling": None,
    }


_ONLY = "only {} is supported".format
_RATIOS = "compress_ratios is {}, expected 0, 4 or 128 for each of 5 layers".format
RESIDUAL_CLOSE: tuple[tuple[str, Values, str], ...] = tuple(
    ("deepseek_v4", changes, message)
    for changes, message in (
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; " + _ONLY("'sqrtsoftplus'")),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; " + _ONLY("'noaux_tc'")),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; " + _ONLY("True")),
        ({"attention_bias": True}, "attention_bias is True; " + _ONLY("False")),
        ({"mlp_bias": True}, "mlp_bias is True; " + _ONLY("False")),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; " + _ONLY("1")),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; " + _ONLY("1")),
        (
            {"intermediate_size": 80},
            "moe_intermediate_size is 48, intermediate_size is 80; these keys must be equal",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types lists 4 layers, but the model has 5",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
            "layer_types has ['full_attention', 'sliding_attention']; only 'sliding_attention' and "
            "'compressed_sparse_attention' and 'heavily_compressed_attention' are supported",
        ),
        (
            {"mlp_layer_types": ["dense"] + ["moe"] * 4},
            "mlp_layer_types has ['dense', 'moe']; only 'hash_moe' and 'moe' are supported",
        ),
        ({"layer_types": None, "compress_ratios": [0, 4, 8, 4, 128]}, _RATIOS("[0, 4, 8, 4, 128]")),
        ({"layer_types": None, "compress_ratios": [0, 4, 128, 4]}, _RATIOS("[0, 4, 128, 4]")),
        (
            {"compress_rates": {"compressed_sparse_attention": 3}},
            "compress_rates: key 'heavily_compressed_attention' is missing, expected a whole number",
        ),
        (
            {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8, "other": 1}},
            "compress_rates: key 'other' (1) is unknown for this family and may change the arithmetic",
        ),
        ({"compress_rate_csa": 0}, "compress_rate_csa is 0, expected 1 to 2^31 - 1"),
        ({"sliding_window": None}, "key 'sliding_window' is missing, expected a whole number"),
        ({"swiglu_limit": None}, "key 'swiglu_limit' is missing, expected a number"),
        ({"swiglu_limit": 0.0}, "expert limits are 0.0 and 0.0, expected one at least, between 0 and 1e6"),
        ({"hc_mult": 1}, "residual streams is 1, expected 2 to 64"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0, expected 1 to 2^31 - 1"),
        ({"o_groups": 4}, "6 heads do not divide into num_groups, 4"),
        ({"index_head_dim": 6}, "an indexer of entries has heads of 6, expected at least rotary_dim, 8"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "compressed attention needs rotary positions, and neither longrope nor dynamic scaling",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.5; only 0.25 is supported",
        ),
        ({"rope_parameters": None, "qk_rope_head_dim": 4}, "qk_rope_head_dim is 4; " + _ONLY("8")),
        (
            {"rope_parameters": {"main": {"rope_type": "default", "rope_theta": 1e4}, "compress": {}}},
            "compress: key 'rope_theta' is missing, expected a number",
        ),
    )
)
