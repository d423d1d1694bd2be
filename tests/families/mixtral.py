from support.cards import YARN, Card

CARDS = {
    "mixtral": Card(
        {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 48},
        shapes={
            "window of 7": {"sliding_window": 7},
            "yarn": {"head_dim": 16, "rope_parameters": YARN},
        },
        ),
}  # fmt: skip
