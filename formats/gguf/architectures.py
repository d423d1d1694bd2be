"""The architectures of GGUF files that are ours: what llama.cpp calls them, and what its converter changed.

An `Architecture` is to GGUF what a family's file is to Hugging Face's checkpoints: it gives the keys of `config.json`
by the metadata, the GGUF name of each role where it is not the usual one, and the change of a tensor's values. Roles
are the words in between: a family's file says what a role is called in its checkpoints. Metadata lacks what llama.cpp's
code has as a constant; those values stand here. Source: llama.cpp, conversion/ and src/models/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf.header import Metadata

Values = dict[str, Any]
# What was done to a tensor: rotated heads in pairs of neighbours (`pairs`), one added (`plus_one`), -exp (`decay`).
Change = Literal["pairs", "plus_one", "decay"]

# The usual names; roles are those of `dense_roles`.
TENSOR_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "norm_bias": "output_norm.bias",
    "head": "output.weight",
    "head_bias": "output.bias",
    "layers.{i}.attention_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.attention_norm_bias": "blk.{i}.attn_norm.bias",
    "layers.{i}.attention_post_norm": "blk.{i}.post_attention_norm.weight",
    **{
        f"layers.{{i}}.attention.{ours}{suffix}": f"blk.{{i}}.{theirs}.{ending}"
        for ours, theirs in {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}.items()
        for suffix, ending in {"": "weight", "_bias": "bias"}.items()
    },
    "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.attention.sinks": "blk.{i}.attn_sinks.weight",
    "layers.{i}.attention.gate": "blk.{i}.attn_gate.weight",
    "layers.{i}.attention.q_a": "blk.{i}.attn_q_a.weight",
    "layers.{i}.attention.q_a_norm": "blk.{i}.attn_q_a_norm.weight",
    "layers.{i}.attention.q_b": "blk.{i}.attn_q_b.weight",
    "layers.{i}.attention.kv_a": "blk.{i}.attn_kv_a_mqa.weight",
    "layers.{i}.attention.kv_a_norm": "blk.{i}.attn_kv_a_norm.weight",
    "layers.{i}.attention.kv_b": "blk.{i}.attn_kv_b.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.mlp_norm_bias": "blk.{i}.ffn_norm.bias",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm.weight",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.mlp.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.mlp.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.router": "blk.{i}.ffn_gate_inp.weight",
    "layers.{i}.router_bias": "blk.{i}.exp_probs_b.bias",
    "layers.{i}.router_logit_bias": "blk.{i}.ffn_gate_inp.bias",
    "layers.{i}.shared.gate": "blk.{i}.ffn_gate_shexp.weight",
    "layers.{i}.shared.up": "blk.{i}.ffn_up_shexp.weight",
    "layers.{i}.shared.down": "blk.{i}.ffn_down_shexp.weight",
    "layers.{i}.shared_router": "blk.{i}.ffn_gate_inp_shexp.weight",
}
EXPERT_TENSORS = {"gate": "blk.{i}.ffn_gate_exps", "up": "blk.{i}.ffn_up_exps", "down": "blk.{i}.ffn_down_exps"}
GATE_UP_EXPERTS = "blk.{i}.ffn_gate_up_exps"  # both in one tensor, which newer converters write if they are asked to


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    `config` makes the values of `config.json`. `names`: roles whose GGUF names are not those of `TENSOR_NAMES`.
    `changes`: what was done to the values of roles.   `keeps_mxfp4`: whether the family has names for MXFP4 blocks.
    """

    config: Callable[[Metadata], Values]
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    keeps_mxfp4: bool = False


# Rotary positions by neighbours: rows of queries and keys were reordered.
PAIRS: Mapping[str, Change] = {"layers.{i}.attention.q": "pairs", "layers.{i}.attention.k": "pairs"}


def architecture_of(metadata: Metadata) -> Architecture:
    """Returns the architecture of a GGUF file.

    Raises:  CheckpointError for one that is unknown, or of a model without experts.
    """
    name = metadata.architecture
    if not metadata.has("expert_count") or not metadata.whole("expert_count"):
        raise CheckpointError(
            f"{metadata.place}: architecture {name!r} has no experts; moe-pack is for mixture-of-experts models"
        )
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{metadata.place}: GGUF architecture {name!r} is not supported; supported: {known}. The model's "
            "safetensors checkpoint may be: see docs/families.md"
        )
    return ARCHITECTURES[name]


def num_layers(metadata: Metadata) -> int:
    """Returns the number of decoder layers, without prediction layers."""
    return metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)


def _decoder(m: Metadata, model_type: str, **others: Any) -> Values:
    """Returns the values that nearly all decoders have, and `others`, of which None removes a value."""
    embedding = m.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{m.place}: tensor 'token_embd.weight' is missing")
    heads = m.whole("attention.head_count")
    values = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": m.whole("embedding_length"),
        "num_hidden_layers": num_layers(m),
        "num_attention_heads": heads,
        "num_key_value_heads": m.whole("attention.head_count_kv", heads),
        "max_position_embeddings": m.whole("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": not m.has_tensor("output.weight"),
        "hidden_act": "silu",
        **_rope(m),
        **_ends(m),
        **others,
    }
    return {key: value for key, value in values.items() if value is not None}


def _rope(m: Metadata) -> Values:
    """Returns rotary positions in the keys of transformers 4."""
    kind = m.text("rope.scaling.type", "none")
    if kind == "none" and m.number("rope.scale_linear", 1.0) != 1:
        kind = "linear"
    if kind == "none":
        return {"rope_theta": m.number("rope.freq_base", 10000.0), "rope_scaling": None}
    scaling: Values = {"rope_type": kind, "factor": m.number("rope.scaling.factor", 1.0)}
    if m.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = m.whole("rope.scaling.original_context_length")
    if kind == "yarn":
        scaling["beta_fast"] = m.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = m.number("rope.scaling.yarn_beta_slow", 1.0)
        if m.has("rope.scaling.yarn_attn_factor"):
            scaling["attention_factor"] = m.number("rope.scaling.yarn_attn_factor")
    return {"rope_theta": m.number("rope.freq_base", 10000.0), "rope_scaling": scaling}


def _ends(m: Metadata) -> Values:
    """Returns the tokens that begin and end a text."""
    ends = {name: m.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ends.items() if isinstance(value, int)}


def _head_dim(m: Metadata) -> int:
    return m.whole("attention.key_length", m.whole("embedding_length") // m.whole("attention.head_count"))


def _experts(m: Metadata, count: str = "num_experts", **others: Any) -> Values:
    """Returns the number of experts, in the key `count`, how many a token has, and their size."""
    size = m.whole("expert_feed_forward_length", m.whole("feed_forward_length"))
    values = {count: m.whole("expert_count"), "num_experts_per_tok": m.whole("expert_used_count")}
    return values | {"moe_intermediate_size": size} | others


def _sigmoid_router(m: Metadata) -> Values:
    """Returns the values of a router of DeepSeek-V3's kind, which many families have."""
    return {
        "n_group": max(1, m.whole("expert_group_count", 1)),
        "topk_group": max(1, m.whole("expert_group_used_count", 1)),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def _leading(m: Metadata) -> Values:
    """Returns how many layers at the beginning have no experts, and their size."""
    return {
        "first_k_dense_replace": m.whole("leading_dense_block_count", 0),
        "intermediate_size": m.whole("feed_forward_length"),
    }


def _mixtral(m: Metadata) -> Values:
    return _decoder(
        m,
        "mixtral",
        head_dim=_head_dim(m),
        num_local_experts=m.whole("expert_count"),
        num_experts_per_tok=m.whole("expert_used_count"),
        intermediate_size=m.whole("feed_forward_length"),
        sliding_window=m.get("attention.sliding_window"),
    )


def _qwen2_moe(m: Metadata) -> Values:
    shared = m.tensors.get("blk.0.ffn_up_shexp.weight")  # old files lack the key
    size = m.whole("expert_shared_feed_forward_length", shared.shape[0] if shared else None)
    has_bias = m.has_tensor("blk.0.attn_q.bias") or m.has_tensor("blk.0.attn_qkv.bias")
    return _decoder(
        m,
        "qwen2_moe",
        **_experts(m, norm_topk_prob=False, intermediate_size=m.whole("feed_forward_length")),
        shared_expert_intermediate_size=size,
        qkv_bias=has_bias,
        use_sliding_window=False,
    )


def _qwen3_moe(m: Metadata) -> Values:
    sizes = _experts(m, norm_topk_prob=True, intermediate_size=m.whole("feed_forward_length"))
    return _decoder(m, "qwen3_moe", **sizes, head_dim=_head_dim(m), attention_bias=False)


def _olmoe(m: Metadata) -> Values:
    sizes = _experts(m, norm_topk_prob=False, intermediate_size=m.whole("feed_forward_length"))
    return _decoder(m, "olmoe", **(sizes | {"moe_intermediate_size": None}))


def _deepseek2(m: Metadata) -> Values:
    """DeepSeek-V2 has a softmax, V3 sigmoids; Kimi K2 and GLM-4.7-Flash have V3's arithmetic."""
    rope = m.whole("rope.dimension_count")
    key, value = m.whole("attention.key_length_mla", 0), m.whole("attention.value_length_mla", 0)
    if not key:  # files from before keys and values of latent attention had names of their own
        key, value = m.whole("attention.key_length"), m.whole("attention.value_length")
    if (gating := m.whole("expert_gating_func", 0)) not in (0, 1, 2):
        raise CheckpointError(f"{m.place}: expert_gating_func is {gating}, expected 1 (softmax) or 2 (sigmoid)")
    # Files without the key are those of V2, or of models of V3's kind, which have a bias of the router.
    has_sigmoid = gating == 2 or (gating == 0 and any(".exp_probs_b" in name for name in m.tensors))
    values = _decoder(
        m,
        "deepseek_v3" if has_sigmoid else "deepseek_v2",
        num_key_value_heads=m.whole("attention.head_count"),
        kv_lora_rank=m.whole("attention.kv_lora_rank"),
        qk_nope_head_dim=key - rope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        n_shared_experts=m.whole("expert_shared_count"),
        **_experts(m, "n_routed_experts", **_leading(m)),
        **_sigmoid_router(m),
    )
    values["q_lora_rank"] = m.get("attention.q_lora_rank") or None
    if not has_sigmoid:
        values |= {"topk_method": "group_limited_greedy" if values["n_group"] > 1 else "greedy"}
    if values.get("rope_scaling") and m.has("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * m.number("rope.scaling.yarn_log_multiplier"), 6)  # a tenth of it is stored
        values["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
        values["rope_scaling"].pop("attention_factor", None)
    return values


def _gpt_oss(m: Metadata) -> Values:
    values = _decoder(
        m,
        "gpt_oss",
        head_dim=_head_dim(m),
        num_local_experts=m.whole("expert_count"),
        num_experts_per_tok=m.whole("expert_used_count"),
        intermediate_size=m.whole("expert_feed_forward_length"),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=[("sliding_attention", "full_attention")[i % 2] for i in range(num_layers(m))],
        attention_bias=True,
    )
    values.setdefault("rope_scaling", {"rope_type": "default"})
    if values["rope_scaling"]["rope_type"] == "yarn":
        values["rope_scaling"]["truncate"] = False
    return values


def _glm4_moe(m: Metadata) -> Values:
    head_dim = _head_dim(m)
    return _decoder(
        m,
        "glm4_moe",
        head_dim=head_dim,
        partial_rotary_factor=m.whole("rope.dimension_count", head_dim // 2) / head_dim,
        attention_bias=m.has_tensor("blk.0.attn_q.bias"),
        use_qk_norm=m.has_tensor("blk.0.attn_q_norm.weight"),
        n_shared_experts=m.whole("expert_shared_count"),
        **_experts(m, "n_routed_experts", **_leading(m)),
        **_sigmoid_router(m),
    )


def _dots1(m: Metadata) -> Values:
    return _decoder(
        m,
        "dots1",
        head_dim=_head_dim(m),
        n_shared_experts=m.whole("expert_shared_count"),
        **_experts(m, "n_routed_experts", **_leading(m)),
        **_sigmoid_router(m),
        sliding_window=None,
        max_window_layers=num_layers(m),
    )


_NORM_AFTER = {"layers.{i}.mlp_norm": "blk.{i}.post_attention_norm.weight"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_mixtral, changes=PAIRS),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3moe": Architecture(_qwen3_moe),
    "olmoe": Architecture(_olmoe),
    "deepseek2": Architecture(_deepseek2),
    "gpt-oss": Architecture(_gpt_oss, names=_NORM_AFTER, keeps_mxfp4=True),
    "glm4moe": Architecture(_glm4_moe, names=_NORM_AFTER),
    "dots1": Architecture(_dots1),
}
