from support.cards import Card, only

CARDS = {
    "longcat_flash": Card(
        {
            "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 48,
            "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12, "q_lora_rank": 40,
        },
        shapes={"experts with weights alone": {"zero_expert_num": 0, "routed_scaling_factor": 1.5}},
        close=[
            only("zero_expert_type", "copy", "identity"), only("attention_method", "MHA", "MLA"),
            only("mla_scale_q_lora", False, True), only("mla_scale_kv_lora", False, True),
            only("num_hidden_layers", 2, 4), only("router_bias", True, False),
        ],
        ),
}  # fmt: skip
