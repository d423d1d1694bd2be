from support.cards import YARN, Card, Values, missing, only


def as_a_number(values: Values) -> Values:
    """Makes a fraction of a whole number, which the class of transformers 5.23 does not take here."""
    whole = values["ffn_config"].get("moe_normalize_expert_weights")
    number = None if whole is None else float(whole)
    return values | {"ffn_config": values["ffn_config"] | {"moe_normalize_expert_weights": number}}


CARDS = {
    "dbrx": Card(
        {
            "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "vocab_size": 96,
            "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
        },
        shapes={
            "hardly clamped, not normalized, yarn": {
                "attn_config": {"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 77.0},
                "ffn_config": {
                    "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": None,
                },
                "rope_parameters": YARN | {"rope_theta": 77.0},
            },
            "clamped closely": {"attn_config": {"clip_qkv": 0.1, "kv_n_heads": 1, "rope_theta": 1e4}},
        },
        close=[
            missing("attn_config", "an object"), missing("ffn_config", "an object"),
            ({"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 5e5}},
             "attn_config: rope_theta is 500000.0, config.json has 10000.0; these keys must be equal"),
            ({"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": None}},
             "attn_config: key 'rope_theta' is missing, expected a number"),
            ({"attn_config": {"clip_qkv": None, "kv_n_heads": 2, "rope_theta": 1e4}},
             "attn_config: key 'clip_qkv' is missing, expected a number"),
            ({"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 1e4, "qk_ln": True}},
             "attn_config: key 'qk_ln' (True) is unknown for this family and may change the arithmetic"),
            ({"attn_config": {"clip_qkv": -1, "kv_n_heads": 2, "rope_theta": 1e4}},
             "attention clip is -1.0, expected between 0 and 1e6"),
            ({
                 "ffn_config": {
                     "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 1.0,
                     "ffn_act_fn": {"name": "gelu"},
                 },
             },
             "ffn_config: ffn_act_fn: name is 'gelu', supported: silu"),
            ({
                 "ffn_config": {
                     "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 2,
                 },
             },
             "ffn_config: moe_normalize_expert_weights is 2; only 1 is supported"),
            ({"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3}},
             "ffn_config: key 'moe_normalize_expert_weights' is missing, expected a value or null"),
            ({
                 "ffn_config": {
                     "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 1.0,
                     "uniform_expert_assignment": True,
                 },
             },
             "ffn_config: uniform_expert_assignment is True; only False is supported"),
            ({"n_layers": 4, "num_hidden_layers": 3},
             "num_hidden_layers is 3, n_layers is 4; these keys must be equal"),
            only("tie_word_embeddings", True, False),
        ],
        experts="fused", small=False, read=as_a_number,
    ),
}  # fmt: skip
