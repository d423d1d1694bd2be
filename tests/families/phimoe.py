from collections.abc import Callable
from typing import Any

import torch
from support.cards import ALL_SCALINGS, Card, Values, only
from torch import Tensor


def take_long_factors(model: Any) -> None:
    """Gives a model with longrope the rotary angles of its authors' code."""
    rope = model.config.rope_parameters
    if rope["rope_type"] == "longrope":
        model.model.rotary_emb.forward = published_longrope(rope)


def published_longrope(rope: Values) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rotary angles as Phi-3.5-MoE's own code and transformers 4 have them, in place of transformers 5's.

    Beyond the original context transformers 5.23 takes the long mscale but goes on with the short factors: its
    `forward` asks for frequencies without saying how long the sequence is. Up to there the two are the same, which
    test_families.py checks.
    """

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        length = int(position_ids.max()) + 1
        kind = "long" if length > rope["original_max_position_embeddings"] else "short"
        factors = torch.tensor(rope[f"{kind}_factor"])
        steps = torch.arange(len(factors)) / len(factors)
        angles = position_ids[..., None] / (factors * rope["rope_theta"] ** steps)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * rope[f"{kind}_mscale"], both.sin() * rope[f"{kind}_mscale"]

    return forward


LONGROPE: Values = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0], "short_mscale": 1.1, "long_mscale": 1.3,
    "original_max_position_embeddings": 40,
}  # fmt: skip
CARDS = {
    "phimoe": Card(
        {
            "num_key_value_heads": 2, "num_local_experts": 6, "intermediate_size": 48, "attention_bias": True,
            "lm_head_bias": True, "rope_scaling": LONGROPE,
        },
        shapes={
            "window of 7, no scaling, no bias": {
                "sliding_window": 7, "rope_scaling": None, "attention_bias": False, "lm_head_bias": False,
            },
            "wide band": {"router_jitter_noise": 0.4},
        },
        close=[only("num_experts_per_tok", 4, 2)],
        scalings=("longrope",), not_run=ALL_SCALINGS, correct=take_long_factors,
    ),
}  # fmt: skip
