"""The table of an architecture of GGUF files, and the values that nearly all architectures share.

An `Architecture` is to GGUF what a family's file is to Hugging Face's checkpoints: it makes `config.json` of the
metadata, and has the GGUF name of each role where it is not the usual one, and changes of values. Constants of
llama.cpp's code stand here too. Source: llama.cpp, conversion/ and src/models/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf.header import Metadata
from moe_pack.formats.gguf.rows import Rows

Values = dict[str, Any]
# Changes of a tensor: rotated heads in pairs of neighbours (`pairs`), one added (`plus_one`), exp, -exp (`decay`).
Change = Literal["pairs", "plus_one", "exp", "decay"]

# Makes the rows of a role of a layer. Its arguments are a function that returns a tensor's rows, and the metadata.
Maker = Callable[[Callable[[str], Rows], Metadata], Rows]

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
    """One value of `general.architecture`."""

    config: Callable[[Metadata], Values]  # makes the values of `config.json`
    names: Mapping[str, str] = field(default_factory=dict)  # of roles whose GGUF names are not those of `TENSOR_NAMES`
    changes: Mapping[str, Change] = field(default_factory=dict)  # what was done to the values of roles
    makers: Mapping[str, Maker] = field(default_factory=dict)  # roles that several tensors make, or in another order
    keeps_mxfp4: bool = False  # whether the family has names for MXFP4 blocks
    fuses_qkv: bool = False  # whether llama.cpp needs queries, keys and values in one tensor
    fuses_gate_up: bool = False  # whether its converter has the experts' gate and up so
    fuses_shared: bool = False  # whether llama.cpp needs those of the shared expert so, under the name of up
    own_head: bool = False  # whether llama.cpp needs a head that is not the embedding
    one_row: tuple[str, ...] = ()  # roles whose vectors are one row in the family's checkpoints


# The router of DeepSeek-V3 in its published config. transformers needs no such key; vLLM makes no bias without.
PUBLISHED_SIGMOID: Mapping[str, str] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Rotary positions by neighbours: rows of queries and keys were reordered.
PAIRS: Mapping[str, Change] = {"layers.{i}.attention.q": "pairs", "layers.{i}.attention.k": "pairs"}
# Removes rotary positions from the values of `decoder`.
NO_ROPE: Mapping[str, None] = {"rope_theta": None, "rope_scaling": None}
# Norms whose weights models store less 1.
CENTERED: Mapping[str, Change] = dict.fromkeys(
    (
        "norm",
        *(f"layers.{{i}}.{name}" for name in ("attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm")),
    ),
    "plus_one",
)


def num_layers(metadata: Metadata) -> int:
    """Returns the number of decoder layers, without prediction layers."""
    return metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)


def decoder(m: Metadata, model_type: str, **others: Any) -> Values:
    """Returns the values that nearly all decoders have, and `others`, of which None removes a value."""
    embedding = m.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{m.place}: tensor 'token_embd.weight' is missing")
    heads = m.most("attention.head_count")  # a list of those of each layer, where layers differ
    kv_heads = m.get("attention.head_count_kv")  # likewise; 0 for layers that have none
    values = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": m.whole("embedding_length"),
        "num_hidden_layers": num_layers(m),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads or heads,
        "max_position_embeddings": m.whole("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": not m.has_tensor("output.weight"),
        "hidden_act": "silu",
        **rope(m),
        **ends(m),
        **others,
    }
    return {key: value for key, value in values.items() if value is not None}


def rope(m: Metadata) -> Values:
    """Returns rotary positions in the keys of transformers 4.

    Raises:  CheckpointError for longrope, which llama.cpp switches by its context, not by the text.
    """
    base = m.number("rope.freq_base", 10000.0)
    kind = m.text("rope.scaling.type", "linear")  # which llama.cpp takes too, where the file does not say it
    factor = m.number("rope.scaling.factor", m.number("rope.scale_linear", 1.0))  # the second in files of 2023
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {"rope_theta": base, "rope_scaling": None}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{m.place}: {m.architecture}.rope.scaling.type is {kind!r}; supported: none, linear, yarn"
        )
    scaling: Values = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and m.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = m.whole("rope.scaling.original_context_length")
    if kind == "yarn":
        scaling["beta_fast"] = m.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = m.number("rope.scaling.yarn_beta_slow", 1.0)
        if m.has("rope.scaling.yarn_attn_factor"):
            scaling["attention_factor"] = m.number("rope.scaling.yarn_attn_factor")
    return {"rope_theta": base, "rope_scaling": scaling}


def ends(m: Metadata) -> Values:
    """Returns the tokens that begin and end a text."""
    ends = {name: m.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ends.items() if isinstance(value, int)}


def head_dim(m: Metadata) -> int:
    """Returns the number of values of a head."""
    return m.whole("attention.key_length", m.whole("embedding_length") // m.most("attention.head_count"))


def experts(m: Metadata, count: str = "num_experts", **others: Any) -> Values:
    """Returns the number of experts, in the key `count`, how many a token has, and their size."""
    size = m.whole("expert_feed_forward_length", m.whole("feed_forward_length"))
    values = {count: m.whole("expert_count"), "num_experts_per_tok": m.whole("expert_used_count")}
    return values | {"moe_intermediate_size": size} | others


def sigmoid_router(m: Metadata) -> Values:
    """Returns the values of a router of DeepSeek-V3's kind, which many families have."""
    return {
        "n_group": max(1, m.whole("expert_group_count", 1)),
        "topk_group": max(1, m.whole("expert_group_used_count", 1)),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def local_experts(m: Metadata, count: str = "num_local_experts", size: str = "expert_feed_forward_length") -> Values:
    """Returns the number and the size of experts under Mixtral's keys; `size` is the metadata's key of their size."""
    values = {count: m.whole("expert_count"), "num_experts_per_tok": m.whole("expert_used_count")}
    return values | {"intermediate_size": m.whole(size)}


def leading(m: Metadata) -> Values:
    """Returns how many layers at the beginning have no experts, and their size."""
    return {
        "first_k_dense_replace": m.whole("leading_dense_block_count", 0),
        "intermediate_size": m.whole("feed_forward_length"),
    }


def latent(m: Metadata, model_type: str, **others: Any) -> Values:
    """Returns the values of models with DeepSeek-V2's attention, experts and leading dense layers."""
    rope = m.whole("rope.dimension_count")
    key, value = m.whole("attention.key_length_mla", 0), m.whole("attention.value_length_mla", 0)
    if not key:  # files from before keys and values of latent attention had names of their own
        key, value = m.whole("attention.key_length"), m.whole("attention.value_length")
    values = decoder(
        m,
        model_type,
        num_key_value_heads=m.whole("attention.head_count"),
        kv_lora_rank=m.whole("attention.kv_lora_rank"),
        qk_nope_head_dim=key - rope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        n_shared_experts=m.whole("expert_shared_count"),
        **experts(m, "n_routed_experts", **leading(m)),
        **sigmoid_router(m),
    )
    values["q_lora_rank"] = m.get("attention.q_lora_rank") or None
    if values.get("rope_scaling", {}).get("rope_type") == "linear":
        # llama.cpp also multiplies queries times keys then, as for yarn.
        raise CheckpointError(
            f"{m.place}: {m.architecture}.rope.scaling.type is 'linear'; supported with latent attention: none, yarn"
        )
    if values.get("rope_scaling") and m.has("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * m.number("rope.scaling.yarn_log_multiplier"), 6)  # a tenth of it is stored
        values["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
        values["rope_scaling"].pop("attention_factor", None)
    return values | others


def windows(m: Metadata, period: int, full_first: bool = False) -> list[str]:
    """Returns whether each layer's attention is `sliding_attention` or `full_attention`.

    Args:    period: the layers with one full layer, if `sliding_window_pattern` is missing.   full_first: the full
             layer comes before the others, not after them.
    """
    found = m.get("attention.sliding_window_pattern")
    if isinstance(found, list):
        sliding = [bool(flag) for flag in m.each("attention.sliding_window_pattern", num_layers(m))]
    else:
        step = found if isinstance(found, int) and found > 0 else period
        sliding = [(layer + (0 if full_first else 1)) % step != 0 for layer in range(num_layers(m))]
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


def needs_sigmoid(m: Metadata, usual: int = 2) -> None:
    """Checks that the router's scores are sigmoids. Raises CheckpointError if they are not."""
    if (gating := m.whole("expert_gating_func", usual)) != 2:
        raise CheckpointError(
            f"{m.place}: {m.architecture}.expert_gating_func is {gating}, expected 2 (sigmoid) in this architecture"
        )
