"""GGUF architectures whose layers with a window, `_swa`, have own heads or rotary positions. Source: llama.cpp."""

from collections.abc import Mapping

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf import architecture
from moe_pack.formats.gguf.decoders import granite
from moe_pack.formats.gguf.factors import STILL
from moe_pack.formats.gguf.header import Metadata


def _ropes(m: Metadata) -> architecture.Values:
    """Returns the rotary positions of each kind of layer. Layers with a window are never scaled."""
    found = architecture.rope(m)
    full = {"rope_type": "default", "rope_theta": found["rope_theta"], **(found["rope_scaling"] or {})}
    sliding = {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", found["rope_theta"])}
    return {"full_attention": full, "sliding_attention": sliding}


def _gemma4(m: Metadata) -> architecture.Values:
    kinds = architecture.windows(m, 6)
    full = kinds.index("full_attention")
    kv_heads = dict(zip(kinds, m.each("attention.head_count_kv", architecture.num_layers(m)), strict=True))
    factors = m.factors
    if not factors:
        raise CheckpointError(f"{m.place}: tensor 'rope_freqs.weight' is missing")
    rotated = sum(factor < STILL for factor in factors)
    ropes = _ropes(m)
    ropes["full_attention"] |= {
        "rope_type": "proportional",
        "partial_rotary_factor": rotated / len(factors),
        "factor": factors[0],
    }
    return architecture.decoder(
        m,
        "gemma4_text",
        num_key_value_heads=kv_heads.get("sliding_attention", kv_heads["full_attention"]),
        num_global_key_value_heads=kv_heads["full_attention"],
        head_dim=m.whole("attention.key_length_swa"),
        global_head_dim=m.whole("attention.key_length"),
        attention_k_eq_v=not m.has_tensor(f"blk.{full}.attn_v.weight"),
        enable_moe_block=True,
        hidden_size_per_layer_input=m.whole("embedding_length_per_layer_input", 0),
        num_kv_shared_layers=m.whole("attention.shared_kv_layers", 0),
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        **architecture.experts(m, num_experts_per_tok=None, top_k_experts=m.whole("expert_used_count")),
        intermediate_size=m.whole("feed_forward_length"),
        final_logit_softcapping=m.number("final_logit_softcapping", 0.0) or None,
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=kinds,
        **architecture.NO_ROPE,
        rope_parameters=ropes,
    )


def _mellum(m: Metadata) -> architecture.Values:
    kinds = (
        architecture.windows(m, 4)
        if m.whole("attention.sliding_window", 0)
        else ["full_attention"] * architecture.num_layers(m)
    )
    return architecture.decoder(
        m,
        "mellum",
        head_dim=architecture.head_dim(m),
        **architecture.experts(m, norm_topk_prob=True),
        sliding_window=m.get("attention.sliding_window"),
        layer_types=kinds,
        **architecture.NO_ROPE,
        rope_parameters=_ropes(m),
    )


def _laguna(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    layers, size = architecture.num_layers(m), architecture.head_dim(m)
    heads = m.each("attention.head_count", layers)
    has_windows = m.whole("attention.sliding_window", 0) > 0
    ropes, sizes = _ropes(m), {"full_attention": m.whole("rope.dimension_count", size)}
    sizes["sliding_attention"] = m.whole("rope.dimension_count_swa", sizes["full_attention"])
    for kind, rotated in sizes.items():
        ropes[kind] |= {"partial_rotary_factor": rotated / size}
    gate = m.tensors.get("blk.0.attn_gate.weight")
    dense = m.whole("leading_dense_block_count")
    return architecture.decoder(
        m,
        "laguna",
        head_dim=size,
        num_attention_heads_per_layer=heads,
        **architecture.experts(m, intermediate_size=m.whole("feed_forward_length")),
        shared_expert_intermediate_size=m.whole("expert_shared_feed_forward_length"),
        moe_routed_scaling_factor=m.number("expert_weights_scale", 1.0),
        norm_topk_prob=m.flag("expert_weights_norm", True),
        mlp_layer_types=["dense"] * dense + ["sparse"] * (layers - dense),
        gating="per-head" if gate is not None and gate.shape[0] == heads[0] else "per-element",
        sliding_window=m.get("attention.sliding_window"),
        layer_types=architecture.windows(m, 4, full_first=True) if has_windows else ["full_attention"] * layers,
        **architecture.NO_ROPE,
        rope_parameters=ropes,
    )


def _granite_swa(m: Metadata) -> architecture.Values:
    layers = architecture.num_layers(m)
    rotates = m.each("attention.rope_pattern", layers) if m.has("attention.rope_pattern") else [True] * layers
    values = granite(m, "granitemoe_swa")
    return values | {
        "shared_intermediate_size": values.get("shared_intermediate_size", 0),
        "sliding_window": m.whole("attention.sliding_window"),
        "layer_types": architecture.windows(m, 4, full_first=True),
        "layer_rope_theta": [values["rope_theta"] if flag else 0 for flag in rotates],
    }


_GEMMA4_NAMES = {
    f"layers.{{i}}.{role}": f"blk.{{i}}.{name}"
    for role, name in {
        "shared_norm": "ffn_norm.weight",
        "shared_post_norm": "post_ffw_norm_1.weight",
        "experts_norm": "pre_ffw_norm_2.weight",
        "experts_post_norm": "post_ffw_norm_2.weight",
        "shared.gate": "ffn_gate.weight",
        "shared.up": "ffn_up.weight",
        "shared.down": "ffn_down.weight",
        "router_scale": "ffn_gate_inp.scale",
        "router_expert_scale": "ffn_down_exps.scale",
        "scale": "layer_output_scale.weight",
    }.items()
}

WINDOWED: Mapping[str, architecture.Architecture] = {
    "mellum": architecture.Architecture(_mellum, own_head=True),
    "laguna": architecture.Architecture(_laguna),
    "granite_swa": architecture.Architecture(
        _granite_swa, changes=architecture.PAIRS, fuses_gate_up=True, fuses_shared=True
    ),
    "gemma4": architecture.Architecture(_gemma4, names=_GEMMA4_NAMES, fuses_gate_up=True),
}
