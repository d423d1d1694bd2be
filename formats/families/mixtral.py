"""Mixtral 8x7B, 8x22B: sliding window, where the config has one.

Source: transformers, models/mixtral; Jiang et al., "Mixtral of Experts" (2401.04088).
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    window = config.whole("sliding_window") if config.has("sliding_window") else None
    attention = readers.read_grouped_query(config, sliding_window=window)
    experts, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok", 2)
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=1e6),
        formats.RouterSpec("softmax_topk", experts, chosen, normalize=True),
        config.whole("intermediate_size"),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )


MIXTRAL = family.Family(
    model_type="mixtral",
    short_names={
        "mixtral": "mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
        "mixtral-8x22b-instruct": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    },
    published=(family.Published("mixtral-8x7b", "46.7", "12.9"), family.Published("mixtral-8x22b", "141", "39")),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, ".router": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
    expert_names=(
        family.ExpertNames(family.matrices("model.layers.{i}.block_sparse_moe.experts.{e}.*.weight", "w1", "w3", "w2")),
        family.FUSED_EXPERT_NAMES,
    ),
)
