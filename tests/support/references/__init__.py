"""Plain references of published architectures that transformers has no class for, and the shapes they are tried in."""

from support.references.deepseek import DEEPSEEK
from support.references.minicpm import MINICPM
from support.references.plain import Reference, Values
from support.references.xverse import XVERSE

REFERENCES: dict[str, Reference] = {reference.model_type: reference for reference in (DEEPSEEK, MINICPM, XVERSE)}
SIZES: Values = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
# Beyond SIZES, the smallest config that uses everything.
SMALLEST: dict[str, Values] = {
    "deepseek": {
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
    },
    "minicpm": {
        "intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "scale_emb": 12,
        "dim_model_base": 16,
        "scale_depth": 1.4,
    },
    "xverse": {
        "intermediate_size": 48,
        "num_experts": 8,
        "moe_top_k": 3,
        "num_shared_experts": 2,
        "rope_theta": 500000,
    },
}
# Beyond those, each switch of the config that changes the arithmetic.
SWITCHES: dict[str, dict[str, Values]] = {
    "deepseek": {
        "normalized": {"norm_topk_prob": True},
        "every second layer": {"moe_layer_freq": 2, "first_k_dense_replace": 0},
        "no shared experts, no dense layer": {"n_shared_experts": None, "first_k_dense_replace": 0},
        "one expert, not normalized for it": {"num_experts_per_tok": 1, "norm_topk_prob": True},
        "bias, tied head, keys of each head": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
            "rope_theta": 77.0,
        },
    },
    "minicpm": {
        "own head, bias": {"tie_word_embeddings": False, "attention_bias": True},
        "multipliers of 1": {"scale_emb": 1, "dim_model_base": 64, "scale_depth": 3**0.5, "num_experts_per_tok": 1},
        "keys of each head": {"num_key_value_heads": None, "rope_theta": 77.0},
    },
    "xverse": {
        "no shared experts": {"num_shared_experts": None},
        "bias, tied head, keys of each head": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
        },
        "one expert": {"moe_top_k": 1, "num_shared_experts": 1},
    },
}

__all__ = ["REFERENCES", "SIZES", "SMALLEST", "SWITCHES", "Reference", "Values"]
