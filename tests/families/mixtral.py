"""The card of `mixtral`."""

from support.cards import YARN, Card, Published

CARDS = {
    "mixtral": Card(
        {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 48},
        shapes={
            "window of 7": {"sliding_window": 7},
            "yarn": {"head_dim": 16, "rope_parameters": YARN},
        },
        published=[
            Published("mixtral-8x7b", "46.7", "12.9"),
            Published("mixtral-8x22b", "141", "39"),
        ],
    ),
}  # fmt: skip
