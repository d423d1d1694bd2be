"""GGUF architectures with mixers: gated delta rule, Mamba, convolutions. Source: llama.cpp, src/models/."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf import architecture, decoders, rows
from moe_pack.formats.gguf.architecture import experts
from moe_pack.formats.gguf.header import Metadata


def _lfm2_moe(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    layers = m.each("attention.head_count_kv", architecture.num_layers(m))
    return architecture.decoder(
        m,
        "lfm2_moe",
        **experts(m, intermediate_size=m.whole("feed_forward_length")),
        rms_norm_eps=None,
        norm_eps=m.number("attention.layer_norm_rms_epsilon"),
        num_dense_layers=m.whole("leading_dense_block_count", 0),
        conv_L_cache=m.whole("shortconv.l_cache"),
        conv_bias=any("shortconv.conv.bias" in name for name in m.tensors),
        layer_types=["full_attention" if heads else "conv" for heads in layers],
    )


def _tokens_mixed(m: Metadata) -> architecture.Values:
    """Returns the sizes of the gated delta rule."""
    heads = m.whole("ssm.time_step_rank")
    return {
        "linear_num_key_heads": m.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": m.whole("ssm.state_size"),
        "linear_value_head_dim": m.whole("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": m.whole("ssm.conv_kernel"),
        "layer_types": [
            "linear_attention" if m.has_tensor(f"blk.{layer}.ssm_out.weight") else "full_attention"
            for layer in range(architecture.num_layers(m))
        ],
    }


def _qwen_next(m: Metadata, model_type: str, **others: Any) -> architecture.Values:
    size = architecture.head_dim(m)
    return architecture.decoder(
        m,
        model_type,
        head_dim=size,
        partial_rotary_factor=m.whole("rope.dimension_count") / size,
        **experts(m),
        **_tokens_mixed(m),
        shared_expert_intermediate_size=m.whole("expert_shared_feed_forward_length"),
        **others,
    )


def _qwen3_next(m: Metadata) -> architecture.Values:
    dense = m.whole("feed_forward_length", 0) or None  # of no layer in published models
    return _qwen_next(m, "qwen3_next", norm_topk_prob=True, intermediate_size=dense)


def _qwen3_5_moe(m: Metadata) -> architecture.Values:
    return _qwen_next(m, "qwen3_5_moe_text")


def _delta_parts(take: Callable[[str], rows.Rows], m: Metadata) -> tuple[rows.Rows, rows.Rows, rows.Rows]:
    """Returns queries, keys and values of the gated delta rule, which are in one tensor."""
    both = take("attn_qkv.weight")
    size = m.whole("ssm.group_count") * m.whole("ssm.state_size")
    return rows.Part(both, 0, size), rows.Part(both, size, size), rows.Part(both, 2 * size, both.num_rows - 2 * size)


def _qkvz(take: Callable[[str], rows.Rows], m: Metadata) -> rows.Rows:
    """Returns queries, keys, values and gates head by head; llama.cpp has all queries first, and so on."""
    return rows.ByHead([*_delta_parts(take, m), take("attn_gate.weight")], m.whole("ssm.group_count"))


def _value_order(m: Metadata, size: int) -> NDArray[np.int64]:
    """Returns the places of values, `size` for a head, in files that have the values of a key's heads far apart."""
    keys, values = m.whole("ssm.group_count"), m.whole("ssm.time_step_rank")
    places = np.arange(values * size).reshape(values // keys, keys, size)
    order: NDArray[np.int64] = places.swapaxes(0, 1).reshape(-1)
    return order


def _value_dim(m: Metadata) -> int:
    return m.whole("ssm.inner_size") // m.whole("ssm.time_step_rank")


def _tiled_qkv(take: Callable[[str], rows.Rows], m: Metadata) -> rows.Rows:
    queries, keys, values = _delta_parts(take, m)
    return rows.Stacked([queries, keys, rows.Reordered(values, _value_order(m, _value_dim(m)))])


def _tiled_conv(take: Callable[[str], rows.Rows], m: Metadata) -> rows.Rows:
    kernels, size = take("ssm_conv1d.weight"), 2 * m.whole("ssm.group_count") * m.whole("ssm.state_size")
    values = rows.Part(kernels, size, kernels.num_rows - size)
    return rows.Stacked([rows.Part(kernels, 0, size), rows.Reordered(values, _value_order(m, _value_dim(m)))])


def _tiled_rows(name: str, of_head: bool) -> architecture.Maker:
    """Returns the maker of the rows of values, with `of_head` one for a head."""
    return lambda take, m: rows.Reordered(take(name), _value_order(m, 1 if of_head else _value_dim(m)))


def _tiled_columns(name: str, of_head: bool) -> architecture.Maker:
    """Returns the maker of rows whose columns are values, with `of_head` one for a head."""
    return lambda take, m: rows.ColumnsReordered(
        rows.Flat(take(name)) if of_head else take(name), _value_order(m, 1 if of_head else _value_dim(m))
    )


def _mamba(m: Metadata) -> architecture.Values:
    inner = m.whole("ssm.inner_size")
    return {
        "mamba_expand": inner // m.whole("embedding_length"),
        "mamba_d_state": m.whole("ssm.state_size"),
        "mamba_d_conv": m.whole("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in m.tensors),
    }


def _granite_hybrid(m: Metadata) -> architecture.Values:
    heads = m.whole("ssm.time_step_rank")
    is_mamba = [m.has_tensor(f"blk.{layer}.ssm_in.weight") for layer in range(architecture.num_layers(m))]
    return decoders.granite(m, "granitemoehybrid") | {
        "layer_types": ["mamba" if flag else "attention" for flag in is_mamba],
        "position_embedding_type": "rope" if m.flag("rope.scaling.finetuned", False) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": m.whole("ssm.inner_size") // heads,
        "mamba_n_groups": m.whole("ssm.group_count"),
        **_mamba(m),
    }


def _period(m: Metadata, name: str) -> tuple[int, int]:
    """Returns the distance between layers with a tensor of this name, and the first layer."""
    found = [layer for layer in range(architecture.num_layers(m)) if m.has_tensor(f"blk.{layer}.{name}.weight")]
    if not found:
        raise CheckpointError(f"{m.place}: no layer has a tensor {name!r}")
    return (found[1] - found[0] if len(found) > 1 else architecture.num_layers(m)), found[0]


def _jamba(m: Metadata) -> architecture.Values:
    (attention, attention_first), (experts, experts_first) = _period(m, "attn_q"), _period(m, "ffn_up_exps")
    return architecture.decoder(
        m,
        "jamba",
        **architecture.local_experts(m, "num_experts", "feed_forward_length"),
        attn_layer_period=attention,
        attn_layer_offset=attention_first,
        expert_layer_period=experts,
        expert_layer_offset=experts_first,
        mamba_dt_rank=m.whole("ssm.time_step_rank"),
        **_mamba(m),
        **architecture.NO_ROPE,
    )


# The letter of each kind of layer, by a tensor that it has.
_NEMOTRON_LAYERS = {"ssm_in.weight": "M", "attn_q.weight": "*", "ffn_up_exps.weight": "E", "ffn_up.weight": "-"}


def _nemotron_h(m: Metadata) -> architecture.Values:
    pattern, dense = "", None
    for layer in range(architecture.num_layers(m)):
        letters = [kind for name, kind in _NEMOTRON_LAYERS.items() if m.has_tensor(f"blk.{layer}.{name}")]
        if len(letters) != 1:
            raise CheckpointError(f"{m.place}: layer {layer} has neither attention nor experts nor another known part")
        pattern += letters[0]
        if letters[0] == "-":
            dense = m.tensors[f"blk.{layer}.ffn_up.weight"].shape[0]
    heads = m.whole("ssm.time_step_rank")
    eps = m.number("attention.layer_norm_rms_epsilon", m.number("attention.layer_norm_epsilon", 1e-5))
    return architecture.decoder(
        m,
        "nemotron_h",
        head_dim=architecture.head_dim(m),
        hybrid_override_pattern=pattern,
        layer_norm_epsilon=eps,
        n_routed_experts=m.whole("expert_count"),
        num_experts_per_tok=m.whole("expert_used_count"),
        n_shared_experts=m.whole("expert_shared_count"),
        moe_intermediate_size=m.whole("expert_feed_forward_length"),
        moe_shared_expert_intermediate_size=m.whole("expert_shared_feed_forward_length"),
        moe_latent_size=m.get("moe_latent_size"),
        intermediate_size=dense,
        **architecture.sigmoid_router(m),
        mamba_num_heads=heads,
        mamba_head_dim=m.whole("ssm.inner_size") // heads,
        ssm_state_size=m.whole("ssm.state_size"),
        n_groups=m.whole("ssm.group_count"),
        conv_kernel=m.whole("ssm.conv_kernel"),
        use_conv_bias=any(name.endswith("ssm_conv1d.bias") for name in m.tensors),
        use_bias=any(name.endswith("ssm_in.bias") for name in m.tensors),
        rms_norm_eps=None,
        hidden_act=None,
        **architecture.NO_ROPE,
    )


def _kimi_linear(m: Metadata) -> architecture.Values:
    architecture.needs_sigmoid(m)
    key, rope = m.whole("attention.key_length_mla"), m.whole("rope.dimension_count")
    layers = range(1, architecture.num_layers(m) + 1)
    full = [layer for layer in layers if m.has_tensor(f"blk.{layer - 1}.attn_kv_a_mqa.weight")]
    values = architecture.decoder(
        m,
        "kimi_linear",
        num_key_value_heads=m.whole("attention.head_count"),
        kv_lora_rank=m.whole("attention.kv_lora_rank"),
        qk_nope_head_dim=key - rope,
        qk_rope_head_dim=rope,
        v_head_dim=m.whole("attention.value_length_mla"),
        **experts(m, **architecture.leading(m)),
        num_shared_experts=m.whole("expert_shared_count"),
        **(architecture.sigmoid_router(m) | {"norm_topk_prob": True}),
        linear_attn_config={
            "full_attn_layers": full,
            "kda_layers": [layer for layer in layers if layer not in full],
            "num_heads": m.whole("attention.head_count"),
            "head_dim": m.whole("kda.head_dim"),
            "short_conv_kernel_size": m.whole("ssm.conv_kernel"),
        },
        **architecture.NO_ROPE,
    )
    return values | {"q_lora_rank": m.get("attention.q_lora_rank")}


def _mixer(names: Mapping[str, str]) -> dict[str, str]:
    return {f"layers.{{i}}.mixer.{ours}": f"blk.{{i}}.{theirs}" for ours, theirs in names.items()}


_SHORT_CONV = _mixer(
    {
        "in": "shortconv.in_proj.weight",
        "in_bias": "shortconv.in_proj.bias",
        "conv": "shortconv.conv.weight",
        "conv_bias": "shortconv.conv.bias",
        "o": "shortconv.out_proj.weight",
        "o_bias": "shortconv.out_proj.bias",
    }
)
_SSM = _mixer(
    {
        "in": "ssm_in.weight",
        "in_bias": "ssm_in.bias",
        "conv": "ssm_conv1d.weight",
        "conv_bias": "ssm_conv1d.bias",
        "a_log": "ssm_a",
        "skip": "ssm_d",
        "x": "ssm_x.weight",
        "dt": "ssm_dt.weight",
        "dt_bias": "ssm_dt.bias",
        "dt_norm": "ssm_dt_norm.weight",
        "b_norm": "ssm_b_norm.weight",
        "c_norm": "ssm_c_norm.weight",
        "out_norm": "ssm_norm.weight",
        "o": "ssm_out.weight",
        "o_bias": "ssm_out.bias",
    }
)
_DELTA = _SSM | _mixer(
    {"ba": "ssm_ba.weight", "z": "attn_gate.weight", "b": "ssm_beta.weight", "a": "ssm_alpha.weight"}
)
KIMI_DELTA = _SSM | _mixer(
    {
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "q_conv": "ssm_conv1d_q.weight",
        "k_conv": "ssm_conv1d_k.weight",
        "v_conv": "ssm_conv1d_v.weight",
        "b": "ssm_beta.weight",
        "decay_a": "ssm_f_a.weight",
        "decay_b": "ssm_f_b.weight",
        "gate_a": "ssm_g_a.weight",
        "gate_b": "ssm_g_b.weight",
        "o": "attn_output.weight",
    }
)
_DECAY: Mapping[str, architecture.Change] = {"layers.{i}.mixer.a_log": "decay"}
_TILED: Mapping[str, architecture.Maker] = {
    "layers.{i}.mixer.qkv": _tiled_qkv,
    "layers.{i}.mixer.conv": _tiled_conv,
    "layers.{i}.mixer.z": _tiled_rows("attn_gate.weight", of_head=False),
    "layers.{i}.mixer.b": _tiled_rows("ssm_beta.weight", of_head=True),
    "layers.{i}.mixer.a": _tiled_rows("ssm_alpha.weight", of_head=True),
    "layers.{i}.mixer.a_log": _tiled_columns("ssm_a", of_head=True),
    "layers.{i}.mixer.dt_bias": _tiled_columns("ssm_dt.bias", of_head=True),
    "layers.{i}.mixer.o": _tiled_columns("ssm_out.weight", of_head=False),
}

HYBRIDS: Mapping[str, architecture.Architecture] = {
    "lfm2moe": architecture.Architecture(_lfm2_moe, names={"norm": "token_embd_norm.weight", **_SHORT_CONV}),
    "qwen3next": architecture.Architecture(
        _qwen3_next,
        names=_DELTA | decoders.NORM_AFTER,
        changes={**architecture.CENTERED, **_DECAY},
        makers={"layers.{i}.mixer.qkvz": _qkvz},
    ),
    "qwen35moe": architecture.Architecture(
        _qwen3_5_moe, names=_DELTA | decoders.NORM_AFTER, changes={**architecture.CENTERED, **_DECAY}, makers=_TILED
    ),
    "granitehybrid": architecture.Architecture(_granite_hybrid, names=_SSM, changes={**architecture.PAIRS, **_DECAY}),
    "jamba": architecture.Architecture(_jamba, names=_SSM, changes=_DECAY),
    "nemotron_h_moe": architecture.Architecture(
        _nemotron_h, names=_SSM | {"layers.{i}.mlp_norm": "blk.{i}.attn_norm.weight"}, changes=_DECAY
    ),
    "kimi-linear": architecture.Architecture(_kimi_linear, names=KIMI_DELTA, changes=_DECAY, own_head=True),
}
