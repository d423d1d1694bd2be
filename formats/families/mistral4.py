"""Mistral Small 4 (text): latent attention, sharpened by position, yarn, shared expert.

The router is DeepSeek-V3's with a softmax in place of sigmoids.
Source: transformers, models/mistral4; Mistral AI (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within
from moe_pack.formats.parts import TemperatureSpec

_KEY = "llama_4_scaling_beta"


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.require("num_key_value_heads")  # null says that each head has its own; missing, transformers takes 32
    # A group's score is the sum of its two best, as with sigmoids; our softmax routers take the best.
    config.only(mlp_bias=False, sliding_window=None, n_group=1, topk_group=1)
    whole = config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")
    latent, group = readers.read_latent(config, head_dim=whole), rotary.rope_group(config)
    share = config.whole("qk_rope_head_dim") / whole
    rope = rotary.read_rope(
        config,
        whole,
        interleaved=config.flag("rope_interleave", True),
        partial_rotary_factor=share,
        ignored=frozenset({_KEY, "max_position_embeddings"}),
    )
    scaling = rope.scaling
    if (
        group is None
        or scaling is None
        or (scaling.kind != "yarn" and scaling.kind != "longrope" and scaling.kind != "llama3")
    ):
        # Without one, transformers takes a yarn of its own; with plain positions its rotation does not fit its heads;
        # the temperature needs an original context.
        raise formats.CheckpointError(f"{config.place}: rope_type must be yarn, longrope or llama3")
    temperature = TemperatureSpec(
        group.number(_KEY), scaling.original_max_position_embeddings, is_from_one=False, is_unrotated=False
    )
    expert_size = config.whole("moe_intermediate_size")
    router = formats.RouterSpec(
        "softmax_topk",
        config.whole(config.either("n_routed_experts", "num_local_experts")),
        config.whole("num_experts_per_tok", 4),
        config.flag("norm_topk_prob", True),
        scaling_factor=config.number("routed_scaling_factor", 1),
    )
    return readers.read_decoder(
        config,
        replace(latent, temperature=temperature),
        rope,
        router,
        expert_size,
        moe_layers=readers.layers_after_dense(config, default=0),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts", 1), gated=False),
    )


MISTRAL4 = family.Family(
    model_type="mistral4",
    unpublished="its models are published inside multimodal checkpoints, mistral3",
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, **readers.LATENT_NAMES},
    expert_names=(family.FUSED_EXPERT_NAMES, family.EXPERT_NAMES),
    ignored_keys=frozenset({"pretraining_tp"}),
)
MISTRAL3 = replace(
    within(
        MISTRAL4,
        "mistral3",
        tied_head=True,
        ignored_keys=frozenset(
            {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"}
        ),
    ),
    short_names={"mistral-small-4": "mistralai/Mistral-Small-4-119B-2603"},
    published=(family.Published("mistral-small-4", "119", "6"),),
)
