"""GGUF architectures whose attention differs by layer, reads latents, or has an indexer. Source: llama.cpp.

Keys of layers with a window end in `_swa`.
"""

from collections.abc import Mapping

import numpy as np

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf import architecture
from moe_pack.formats.gguf.decoders import granite
from moe_pack.formats.gguf.factors import STILL, bands
from moe_pack.formats.gguf.header import Metadata
from moe_pack.formats.gguf.hybrids import KIMI_DELTA


def _sparse_layers(m: Metadata) -> list[str]:
    """Returns whether each layer's experts are `sparse` or `dense`, by its tensors."""
    has_router = [m.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(architecture.num_layers(m))]
    return ["sparse" if flag else "dense" for flag in has_router]


def _mimo2(m: Metadata) -> architecture.Values:
    kinds, size = architecture.windows(m, 6), m.whole("attention.key_length")
    heads = dict(zip(kinds, m.each("attention.head_count_kv", architecture.num_layers(m)), strict=True))
    share = m.whole("rope.dimension_count") / size
    return architecture.decoder(
        m,
        "mimo_v2_flash",
        num_key_value_heads=heads.get("full_attention") or heads["sliding_attention"] // 2,
        head_dim=size,
        v_head_dim=m.whole("attention.value_length"),
        attention_value_scale=m.number("attention.value_scale", 1.0),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=kinds,
        mlp_layer_types=_sparse_layers(m),
        **architecture.experts(m, "n_routed_experts", intermediate_size=m.whole("feed_forward_length")),
        n_group=m.whole("expert_group_count", 1),
        topk_group=m.whole("expert_group_used_count", 1),
        norm_topk_prob=True,
        **architecture.NO_ROPE,
        rope_parameters=_ropes(m, dict.fromkeys(kinds, share)),
    )


def _ropes(m: Metadata, shares: Mapping[str, float]) -> architecture.Values:
    """Returns the rotary positions of each kind of layer, by the share of a head that rotates."""
    if (scaling := architecture.rope(m)["rope_scaling"]) is not None:
        kind = scaling["rope_type"]
        raise CheckpointError(f"{m.place}: {m.architecture}.rope.scaling.type is {kind!r}, expected 'none'")
    bases = {"full_attention": m.number("rope.freq_base"), "sliding_attention": m.number("rope.freq_base_swa", 1e4)}
    return {
        kind: {"rope_type": "default", "rope_theta": bases[kind], "partial_rotary_factor": share}
        for kind, share in shares.items()
    }


def _step35(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    layers, kinds = architecture.num_layers(m), architecture.windows(m, 4)
    heads = dict(zip(kinds, m.each("attention.head_count", layers), strict=True))
    shares = {"full_attention": 0.5, "sliding_attention": 1.0}  # constants of llama.cpp's code
    most, size = next(iter(heads.values())), architecture.head_dim(m)
    ropes = _ropes(m, {kind: shares[kind] for kind in kinds})
    if (full := ropes.get("full_attention")) is not None:
        full |= bands(m.factors, full["rope_theta"], int(size * shares["full_attention"]))
    return architecture.decoder(
        m,
        "step3p5",
        num_attention_heads=heads.get("full_attention", most),
        num_sliding_attention_heads=heads.get("sliding_attention", most),
        head_dim=size,
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=kinds,
        mlp_layer_types=_sparse_layers(m),
        **architecture.experts(m, "n_routed_experts", intermediate_size=m.whole("feed_forward_length")),
        share_expert_dim=m.whole("expert_shared_feed_forward_length"),
        moe_router_scaling_factor=m.number("expert_weights_scale", 1.0),
        norm_expert_weight=m.flag("expert_weights_norm", True),
        swiglu_limits=_limits(m, "swiglu_clamp_exp"),
        swiglu_limits_shared=_limits(m, "swiglu_clamp_shexp"),
        **architecture.NO_ROPE,
        rope_parameters=ropes,
    )


def _limits(m: Metadata, key: str) -> list[float | None] | None:
    if not m.has(key):
        return None
    return [float(str(np.float32(limit))) if limit else None for limit in m.each(key, architecture.num_layers(m))]


def _indexer(m: Metadata) -> architecture.Values:
    return {
        "index_n_heads": m.whole("attention.indexer.head_count"),
        "index_head_dim": m.whole("attention.indexer.key_length"),
        "index_topk": m.whole("attention.indexer.top_k"),
    }


def _deepseek32(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    return architecture.latent(m, "deepseek_v32", **_indexer(m), **architecture.PUBLISHED_SIGMOID)


def _glm_dsa(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    full = m.each("attention.indexer.types", architecture.num_layers(m)) if m.has("attention.indexer.types") else None
    if full is None:  # files of GLM-5 and 5.1, and the first of 5.2, do not say it
        full = [m.has_tensor(f"blk.{layer}.indexer.attn_k.weight") for layer in range(architecture.num_layers(m))]
    kinds = ["full" if flag else "shared" for flag in full]
    return architecture.latent(m, "glm_moe_dsa", **_indexer(m), **architecture.PUBLISHED_SIGMOID, indexer_types=kinds)


def _mistral4(m: Metadata) -> architecture.Values:
    if (gating := m.whole("expert_gating_func", 1)) != 1:
        raise CheckpointError(f"{m.place}: {m.architecture}.expert_gating_func is {gating}, expected 1 (softmax)")
    whole = m.whole("attention.key_length_mla")
    values = architecture.latent(m, "mistral4", head_dim=whole, qk_head_dim=whole)
    if (scaling := values.pop("rope_scaling")) is None:
        return values
    context = scaling.get("original_max_position_embeddings")
    if m.whole("attention.temperature_length", context) != context:
        raise CheckpointError(f"{m.place}: {m.architecture}.attention.temperature_length is not {context}")
    return values | {
        "rope_parameters": scaling
        | {
            "rope_theta": values.pop("rope_theta"),
            "partial_rotary_factor": m.whole("rope.dimension_count") / whole,
            # Files that llama.cpp made of Hugging Face's checkpoints lack the key; the published model has this value.
            "llama_4_scaling_beta": m.number("attention.temperature_scale", 0.1),
        }
    }


def _minimax_m3(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    size, expert_size = architecture.head_dim(m), m.whole("expert_feed_forward_length")
    has_indexer = [m.has_tensor(f"blk.{layer}.indexer.q_proj.weight") for layer in range(architecture.num_layers(m))]
    text = architecture.decoder(
        m,
        "minimax_m3_vl_text",
        head_dim=size,
        rotary_dim=m.whole("rope.dimension_count"),
        partial_rotary_factor=m.whole("rope.dimension_count") / size,
        **architecture.local_experts(m),
        dense_intermediate_size=m.whole("feed_forward_length"),
        shared_intermediate_size=expert_size * m.whole("expert_shared_count"),
        routed_scaling_factor=m.number("expert_weights_scale", 1.0),
        mlp_layer_types=_sparse_layers(m),
        layer_types=["minimax_m3_sparse" if flag else "full_attention" for flag in has_indexer],
        index_n_heads=m.whole("attention.indexer.head_count"),
        index_head_dim=m.whole("attention.indexer.key_length"),
        index_topk_blocks=m.whole("attention.indexer.top_k"),
        index_block_size=m.whole("attention.indexer.block_size"),
        index_local_blocks=m.whole("attention.indexer.local_blocks"),
    )
    tied = text["tie_word_embeddings"]
    return {"model_type": "minimax_m3_vl", "tie_word_embeddings": tied, **architecture.ends(m), "text_config": text}


def _minimax01(m: Metadata) -> architecture.Values:
    is_lightning = [m.has_tensor(f"blk.{layer}.attn_norm_2.weight") for layer in range(architecture.num_layers(m))]
    factor = m.number("residual_scale")
    factors = {f"{half}_{name}_factor": value for half in _HALVES for name, value in (("alpha", factor), ("beta", 1.0))}
    return architecture.decoder(
        m,
        "minimax",
        head_dim=architecture.head_dim(m),
        rotary_dim=m.whole("rope.dimension_count"),
        **architecture.local_experts(m, size="feed_forward_length"),
        layer_types=["linear_attention" if flag else "full_attention" for flag in is_lightning],
        **factors,
    )


def _bailingmoe3(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    has_latent = [m.has_tensor(f"blk.{layer}.attn_kv_a_mqa.weight") for layer in range(architecture.num_layers(m))]
    values = architecture.latent(
        m,
        "bailing_hybrid",
        num_experts=m.whole("expert_count"),
        layer_types=["full_attention" if flag else "linear_attention" for flag in has_latent],
        head_dim=m.whole("kda.head_dim"),
        short_conv_kernel_size=m.whole("ssm.conv_kernel"),
        kda_safe_gate=m.flag("kda.safe_gate", True),
        kda_lower_bound=m.number("kda.gate_lower_bound"),
        expert_swiglu_limit_list=_limits(m, "swiglu_clamp_exp"),
        share_expert_swiglu_limit_list=_limits(m, "swiglu_clamp_shexp"),
    )
    del values["n_routed_experts"]
    return values


def _scaled_ropes(m: Metadata) -> architecture.Values:
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
    ropes = _scaled_ropes(m)
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
        rope_parameters=_scaled_ropes(m),
    )


def _laguna(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    layers, size = architecture.num_layers(m), architecture.head_dim(m)
    heads = m.each("attention.head_count", layers)
    has_windows = m.whole("attention.sliding_window", 0) > 0
    ropes, sizes = _scaled_ropes(m), {"full_attention": m.whole("rope.dimension_count", size)}
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


_FULL_RANK = {"layers.{i}.mixer.decay": "blk.{i}.ssm_f_a.weight", "layers.{i}.mixer.gate": "blk.{i}.ssm_g_a.weight"}
_HALVES = ("full_attn", "linear_attn", "mlp")
_LIGHTNING = {
    f"layers.{{i}}.mixer.{ours}": f"blk.{{i}}.{theirs}.weight"
    for ours, theirs in {"qkv": "attn_qkv", "gate": "attn_gate", "out_norm": "attn_norm_2", "o": "attn_output"}.items()
}
_BLOCK_INDEXER = {
    f"layers.{{i}}.attention.index_{ours}": f"blk.{{i}}.indexer.{theirs}.weight"
    for ours, theirs in {"q": "q_proj", "k": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}.items()
}
_INDEXER = {
    f"layers.{{i}}.attention.index_{ours}": f"blk.{{i}}.indexer.{theirs}"
    for ours, theirs in {
        "q": "attn_q_b.weight",
        "k": "attn_k.weight",
        "k_norm": "k_norm.weight",
        "k_norm_bias": "k_norm.bias",
        "weights": "proj.weight",
    }.items()
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

LATENTS: Mapping[str, architecture.Architecture] = {
    "mimo2": architecture.Architecture(_mimo2, own_head=True),
    "step35": architecture.Architecture(_step35, changes=architecture.CENTERED, own_head=True),
    "deepseek32": architecture.Architecture(_deepseek32, names=_INDEXER),
    "mistral4": architecture.Architecture(_mistral4, fuses_gate_up=True),
    "bailingmoe3": architecture.Architecture(
        _bailingmoe3, names=KIMI_DELTA | _FULL_RANK, changes={"layers.{i}.mixer.a_log": "exp"}
    ),
    "minimax-01": architecture.Architecture(_minimax01, names=_LIGHTNING),
    "minimax-m3": architecture.Architecture(
        _minimax_m3,
        names=_BLOCK_INDEXER,
        changes={**architecture.CENTERED, **{role: "plus_one" for role in _BLOCK_INDEXER if role.endswith("norm")}},
        own_head=True,
    ),
    "glm-dsa": architecture.Architecture(_glm_dsa, names=_INDEXER),
    "mellum": architecture.Architecture(_mellum, own_head=True),
    "laguna": architecture.Architecture(_laguna),
    "granite_swa": architecture.Architecture(
        _granite_swa, changes=architecture.PAIRS, fuses_gate_up=True, fuses_shared=True
    ),
    "gemma4": architecture.Architecture(_gemma4, names=_GEMMA4_NAMES, fuses_gate_up=True),
}
