"""DBRX base, instruct: layer norms without bias, a bound of queries, keys and values, experts in one matrix in the
source.

The base of rotary positions is in `attn_config`, where the published code reads it. transformers 5.23 takes 10,000
unless `rope_parameters` has one; a config with two different bases is refused.
Source: transformers, models/dbrx; Databricks (2024).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary

# Each of the two objects is a config of its own, with the keys that all of them have.
_NOT_READ = frozenset({"tie_word_embeddings"})


def _object(config: family.Config, key: str) -> family.Config:
    group = config.group(key)
    if group is None:
        raise formats.CheckpointError(f"{config.place}: key {key!r} is missing, expected an object")
    return group


def _read_router(ffn: family.Config) -> formats.RouterSpec:
    ffn.require("moe_normalize_expert_weights")  # null says that weights are not normalized; missing, it is 1
    ffn.only(moe_normalize_expert_weights=1)
    return formats.RouterSpec(
        "softmax_topk",
        ffn.whole("moe_num_experts"),
        ffn.whole("moe_top_k"),
        normalize=ffn.has("moe_normalize_expert_weights"),
    )


def _read_config(config: family.Config) -> formats.ModelSpec:
    attn, ffn = _object(config, "attn_config"), _object(config, "ffn_config")
    num_kv_heads, theta = attn.whole("kv_n_heads"), attn.number("rope_theta")
    config.only(
        num_key_value_heads=num_kv_heads, head_dim=config.whole("hidden_size") // config.whole("num_attention_heads")
    )
    attention = replace(
        readers.read_grouped_query(config, own_keys=True),
        num_kv_heads=num_kv_heads,
        clip=attn.number("clip_qkv"),  # without it, no code runs
    )
    rope = rotary.read_rope(config, attention.head_dim, default_theta=theta)
    if rope.theta != theta:
        raise formats.CheckpointError(
            f"{attn.place}: rope_theta is {theta}, {config.place} has {rope.theta}; these keys must be equal"
        )
    activation = ffn.group("ffn_act_fn")
    if activation is not None:
        activation.choice("name", ("silu",))
        activation.refuse_unread()
    ffn.only(hidden_size=config.whole("hidden_size"), uniform_expert_assignment=False)
    ffn.ignore("moe_jitter_eps", "moe_loss_weight")
    attn.ignore("attn_pdrop")
    spec = readers.read_decoder(
        config,
        attention,
        rope,
        _read_router(ffn),
        ffn.whole("ffn_hidden_size"),
        dense_size_key=None,
        norm=formats.NormSpec("layer", 1e-5, unbiased=True),
    )
    config.only(tie_word_embeddings=False)
    for group in (attn, ffn):
        group.refuse_unread(_NOT_READ)
    return spec


_QKV = family.Stored("norm_attn_norm.attn.Wqkv.weight", roles=tuple(f".attention.{name}" for name in "qkv"))
DBRX = family.Family(
    model_type="dbrx",
    short_names={"dbrx": "databricks/dbrx-base", "dbrx-instruct": "databricks/dbrx-instruct"},
    published=(family.Published("dbrx-instruct", "132", "36"),),
    read_config=_read_config,
    layer=("transformer.blocks.{i}.",),
    dense_names={
        "embed": "transformer.wte.weight",
        ".attention_norm": "norm_attn_norm.norm_1.weight",
        **dict.fromkeys(_QKV.roles, _QKV),
        ".attention.o": "norm_attn_norm.attn.out_proj.weight",
        ".mlp_norm": "norm_attn_norm.norm_2.weight",
        ".router": "ffn.router.layer.weight",
        "norm": "transformer.norm_f.weight",
        "head": "lm_head.weight",
    },
    expert_names=(
        family.ExpertNames(
            family.matrices("transformer.blocks.{i}.ffn.experts.mlp.*", "w1", "v1", "w2"),
            transposed="down",
            one_matrix=True,
        ),
        replace(family.EXPERT_NAMES, of_gguf=True),
    ),
    ignored_keys=frozenset({"emb_pdrop", "resid_pdrop"}),
    old_keys={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
)
