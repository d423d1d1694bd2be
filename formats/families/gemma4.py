"""Gemma 4 26B-A4B (text): a dense block next to the routed experts, each with norms before and after, GELU, a window in
five of six layers, larger heads whose values are their keys in the others, rotated in part, a router with scales,
capped logits.

The dense block is a shared expert here.
Source: transformers, models/gemma4.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, multimodal, readers, rotary
from moe_pack.formats.parts.positions import ProportionalSpec

_FULL, _SLIDING = rotary.ATTENTION_KINDS


def _read_text(config: family.Config) -> formats.ModelSpec:
    if not config.flag("enable_moe_block", False):
        raise readers.dense_model(config)
    config.require("hidden_size_per_layer_input")  # missing, transformers takes 256
    config.only(hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    config.only(use_bidirectional_attention="vision")  # of images; null means none
    config.ignore("use_double_wide_mlp", "vocab_size_per_layer_input")  # of layers that share keys, and of their inputs
    attention = _read_attention(config)
    experts, chosen = config.whole("num_experts"), config.whole("top_k_experts")
    spec = readers.read_decoder(
        config,
        attention.attention,
        attention.rope,
        formats.RouterSpec("softmax_topk", experts, chosen, normalize=True, input_scale=True, expert_scale=True),
        config.whole("moe_intermediate_size"),
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(config.whole("intermediate_size"), gated=False),
        others=attention.others,
    )
    return replace(
        spec,
        tied_head=config.flag("tie_word_embeddings", True),
        embedding_multiplier=config.whole("hidden_size") ** 0.5,
        expert=formats.ExpertSpec(
            "gelu_tanh", spec.expert.intermediate_size, formats.MATRICES, bias=(), extra_floats=0
        ),
        residual=parts.NormedResidualSpec("normed", True, ("attention", "mlp"), apart=True, scaled=True),
        logits_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
    )


def _read_attention(config: family.Config) -> readers.LayerAttention:
    config.require("head_dim")  # missing, transformers takes 256
    own = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head", scale=1.0)
    own = replace(own, v_norm=True)
    num_layers, from_keys = config.num_layers(), config.flag("attention_k_eq_v", False)
    kinds = readers.attention_kinds(config)
    kinds = kinds or tuple(_SLIDING if (i + 1) % 6 else _FULL for i in range(num_layers))
    kinds = (*kinds[:-1], _FULL)  # as transformers makes of any last layer
    heads = [_heads(config, own, layer, kind, from_keys) for layer, kind in enumerate(kinds)]
    window = config.whole("sliding_window", 512)
    ropes = _read_ropes(config, dict(zip(kinds, heads, strict=True)))
    return readers.LayerAttention.of(
        (replace(each, sliding_window=window) if kind == _SLIDING else each, ropes[kind])
        for kind, each in zip(kinds, heads, strict=True)
    )


def _heads(
    config: family.Config, own: parts.GroupedQuerySpec, layer: int, kind: str, from_keys: bool
) -> parts.GroupedQuerySpec:
    """Reads the heads of a layer: as `per_layer_config` says, else those without a window have keys of their own."""
    head_dim, num_kv_heads = own.head_dim, own.num_kv_heads
    overrides = config.group("per_layer_config")
    if overrides is not None:
        config.ignore("global_head_dim", "num_global_key_value_heads")
        each = overrides.group(str(layer))
        if each is not None:
            head_dim, num_kv_heads = each.whole("head_dim", head_dim), each.whole("num_key_value_heads", num_kv_heads)
            each.refuse_unread()
    elif kind == _FULL:
        head_dim = config.whole("global_head_dim", 512)
        num_global = config.whole("num_global_key_value_heads", num_kv_heads)
        num_kv_heads = num_global if from_keys else num_kv_heads
    if kind == _FULL and from_keys:
        bias = tuple(name for name in own.bias if name != "v")
        own = replace(own, keys_as_values=True, bias=bias)
    return replace(own, head_dim=head_dim, num_kv_heads=num_kv_heads)


def _read_ropes(config: family.Config, heads: dict[str, parts.GroupedQuerySpec]) -> dict[str, parts.RopeSpec]:
    defaults = {}
    for kind, each in heads.items():
        quarter = ProportionalSpec("proportional", each.head_dim // 8, 1.0) if kind == _FULL else None
        defaults[kind] = parts.RopeSpec(1e6 if kind == _FULL else 1e4, each.head_dim, False, quarter)
    sizes = {kind: each.head_dim for kind, each in heads.items()}
    ropes = rotary.read_rope_by_kind(config, sizes, defaults, partial_rotary_factor=1.0)
    for kind, rope in ropes.items():
        if rope.rotary_dim != heads[kind].head_dim:
            raise formats.CheckpointError(
                f"{config.place}: rope_parameters: {kind}: partial_rotary_factor needs rope_type 'proportional'"
            )
    return ropes


GEMMA4_TEXT = family.Family(
    model_type="gemma4_text",
    unpublished="its models are published inside multimodal checkpoints, gemma4",
    read_config=_read_text,
    dense_names={
        **readers.DENSE_NAMES,
        ".attention_post_norm": "post_attention_layernorm.weight",
        ".shared_norm": "pre_feedforward_layernorm.weight",
        ".experts_norm": "pre_feedforward_layernorm_2.weight",
        ".shared_post_norm": "post_feedforward_layernorm_1.weight",
        ".experts_post_norm": "post_feedforward_layernorm_2.weight",
        ".mlp_post_norm": "post_feedforward_layernorm.weight",
        ".scale": "layer_scalar",
        ".router": "router.proj.weight",
        ".router_scale": "router.scale",
        ".router_expert_scale": "router.per_expert_scale",
        ".shared.{gate,up,down}": "mlp.{}_proj.weight",
    },
    expert_names=(
        family.ExpertNames(family.matrices("model.layers.{i}.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")),
    ),
)
GEMMA4 = replace(
    multimodal.within(
        GEMMA4_TEXT,
        "gemma4",
        parts={
            **multimodal.PARTS,
            "model.embed_vision.*": "what maps vision to the text model",
            "model.audio_tower.*": "the audio part",
            "model.embed_audio.*": "what maps sounds to the text model",
        },
        tied_head=True,
        ignored_keys=frozenset({"vision_soft_tokens_per_image"}),
    ),
    short_names={"gemma-4-26b-a4b": "google/gemma-4-26B-A4B", "gemma-4-26b-a4b-it": "google/gemma-4-26B-A4B-it"},
    published=(family.Published("gemma-4-26b-a4b", "25.2", "3.8", cached="112.640"),),
)
