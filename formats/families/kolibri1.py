"""Kolibri 1: norms before and after both halves of a layer, experts chosen by logits with a bias and weighted by
sigmoids, a window on four of five layers, which alone rotate, shared expert.

Source: transformers, models/kolibri1.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(attention_bias=False, use_sliding_window=True)
    # Missing, transformers takes those of Kolibri 1.
    config.require("head_dim", "num_key_value_heads")
    attention = _read_attention(config)
    rope = rotary.read_rope(config, attention.head_dim)
    spec = readers.read_decoder(
        config,
        attention,
        None if attention.sliding_window is None else rope,
        formats.RouterSpec(
            "topk_sigmoid",
            config.whole(config.either("num_experts", "num_local_experts")),
            config.whole("num_experts_per_tok", 6),
            config.flag("norm_topk_prob", False),
            bias=True,
        ),
        config.whole("moe_intermediate_size"),
        shared_expert=formats.SharedExpertSpec(config.whole("shared_expert_intermediate_size"), gated=False),
    )
    return replace(
        spec, residual=parts.NormedResidualSpec("normed", True, ("attention", "mlp"), apart=False, scaled=False)
    )


def _read_attention(config: family.Config) -> parts.GroupedQuerySpec:
    """Reads attention in which the layers with a window rotate."""
    attention, kinds = readers.read_grouped_query(config, qk_norm="head"), readers.attention_kinds(config)
    windowed = tuple(
        i for i in range(config.num_layers()) if (kinds[i] == "sliding_attention" if kinds else (i + 1) % 5)
    )
    # Missing, transformers takes 513; with null it fails.
    return readers.with_window(config, attention, config.whole("sliding_window"), windowed)


KOLIBRI1 = family.Family(
    model_type="kolibri1",
    short_names={"kolibri-1": "Aleph-Alpha/Kolibri-1", "kolibri-1-bf16": "Aleph-Alpha/Kolibri-1-BF16"},
    unpublished="no public copy of the file of Aleph-Alpha/Kolibri-1 was found; transformers' defaults are its sizes",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention_post_norm": ("post_attn_norm.weight", "post_self_attn_layernorm.weight"),
        ".mlp_post_norm": ("post_ffn_norm.weight", "post_mlp_layernorm.weight"),
        ".router_bias": ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    },
    ignored_keys=frozenset({"head_dtype"}),  # the head is float32 here, whatever it says
)
