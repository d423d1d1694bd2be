"""Mixtral 8x7B and 8x22B. Source: transformers, models/mixtral; Jiang et al., "Mixtral of Experts" (2401.04088)."""

from moe_pack.formats.families.config import Config
from moe_pack.formats.families.family import Family
from moe_pack.formats.spec import MATRICES, AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, RouterSpec


def _read_config(config: Config) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("rope_scaling", None)
    hidden_size, num_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    layers = config.layers("num_hidden_layers")
    return ModelSpec(
        family="mixtral",
        hidden_size=hidden_size,
        vocab_size=config.whole("vocab_size"),
        num_hidden_layers=len(layers),
        moe_layers=layers,
        max_position_embeddings=config.whole("max_position_embeddings"),
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        tied_head=config.flag("tie_word_embeddings", False),
        attention=AttentionSpec(
            kind="grouped_query",
            num_heads=num_heads,
            num_kv_heads=config.whole("num_key_value_heads", num_heads),
            head_dim=config.whole("head_dim", max(hidden_size // num_heads, 1)),
            sliding_window=config.whole("sliding_window") if config.has("sliding_window") else None,
        ),
        rope=RopeSpec(kind="default", theta=_rope_theta(config)),
        router=RouterSpec(
            kind="softmax_topk",
            num_experts=config.whole("num_local_experts"),
            num_experts_per_tok=config.whole("num_experts_per_tok", 2),
            normalize=True,
        ),
        expert=ExpertSpec(
            function="silu",
            intermediate_size=config.whole("intermediate_size"),
            matrices=MATRICES,
            bias=(),
            extra_floats=0,
        ),
    )


def _rope_theta(config: Config) -> float:
    rope = config.group("rope_parameters")  # transformers 5; version 4 wrote rope_theta beside the other keys
    if rope is None:
        return config.number("rope_theta", 1e6)
    rope.only("rope_type", "default")
    theta = rope.number("rope_theta")
    rope.refuse_unread()
    config.only("rope_theta", theta)
    return theta


MIXTRAL = Family(
    model_type="mixtral",
    short_names={
        "mixtral": "mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
        "mixtral-8x22b-instruct": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    },
    read_config=_read_config,
    dense_names={
        "embed": "model.embed_tokens.weight",
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.attention.o": "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.experts_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.router": "model.layers.{i}.block_sparse_moe.gate.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    expert_names={
        "gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
        "up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        "down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    },
    dropped={".rotary_emb.inv_freq": "a constant the runtime computes"},
)
