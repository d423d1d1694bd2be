"""DeepSeek-V4-Flash, V4-Pro, from a 16-bit copy: attention to a window with sinks and to compressed entries for all
positions, some of which an indexer chooses; hyper-connections; experts that a table names for each token in the first
layers; roots of softplus as scores with a bias, clamped neurons, shared expert.

Layers attend to their window alone, or also to entries of many positions each (heavily compressed), or to entries of a
few positions that an indexer chooses (compressed sparse).
The published inference code also rotates the indexer's queries and keys by a Hadamard matrix, which changes no score,
and rounds them and the entries to FP4 and FP8, which we, like transformers, do not.
Source: transformers, models/deepseek_v4.
"""

from collections import Counter
from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts.specs import LimitSpec

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_DEFAULT_RATES = {_SPARSE: 4, _HEAVY: 128}
_ROTATED = 64 / 512  # of a head, if the config does not say


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        attention_bias=False,
        mlp_bias=False,
        num_key_value_heads=1,
        n_shared_experts=1,  # whose size transformers takes from the routed experts, however many there are
    )
    config.ignore("num_nextn_predict_layers", "expert_dtype")  # tensors show how they are stored
    kinds, ropes = _read_layer_kinds(config), _read_ropes(config, config.whole("head_dim"))
    most, *rest = [kind for kind, _ in Counter(kinds).most_common()]
    own = {kind: _read_attention(config, kind) for kind in (most, *rest)}
    others = tuple(parts.OtherAttentionSpec(readers.layers_of(kinds, kind), own[kind], ropes[kind]) for kind in rest)
    size = config.whole(config.either("moe_intermediate_size", "intermediate_size"))
    spec = readers.read_decoder(
        config,
        own[most],
        ropes[most],
        _read_router(config),
        size,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(size, gated=False),
        others=others,
    )
    limit = config.number("swiglu_limit")
    expert = replace(spec.expert, function="clipped_silu", limits=(LimitSpec(None, limit, limit),))
    residual = parts.MixedStreamsSpec(
        "mixed_streams",
        config.whole("hc_mult"),
        mixing=config.whole("hc_sinkhorn_iters", 20),
        magnitude=2.0,
        eps=config.number("hc_eps", 1e-6),
    )
    return replace(spec, expert=expert, residual=residual)


def _read_router(config: family.Config) -> formats.RouterSpec:
    kinds = readers.read_kinds(config, "mlp_layer_types", ("hash_moe", "moe"))
    if kinds:
        config.ignore("num_hash_layers")
        table_layers = readers.layers_of(kinds, "hash_moe")
    else:
        table_layers = tuple(range(min(config.count("num_hash_layers", 3), config.num_layers())))
    return formats.RouterSpec(
        "sqrtsoftplus_topk",
        config.whole(config.either("n_routed_experts", "num_local_experts")),
        config.whole("num_experts_per_tok"),
        normalize=True,
        bias=True,
        scaling_factor=config.number("routed_scaling_factor"),
        table_layers=table_layers,
    )


def _read_layer_kinds(config: family.Config) -> tuple[str, ...]:
    """Reads the kind of attention of each layer: a list, else a number for each, else that of DeepSeek-V4-Pro."""
    num_layers = config.num_layers()
    kinds = readers.read_kinds(config, "layer_types", (_SLIDING, _SPARSE, _HEAVY))
    if kinds:
        config.ignore("compress_ratios")
        return kinds
    if config.has("compress_ratios"):  # which goes on with those of prediction layers
        ratios = config.counts("compress_ratios")[:num_layers]
        if len(ratios) < num_layers or set(ratios) - set(_KIND_OF_RATIO):
            raise formats.CheckpointError(
                f"{config.place}: compress_ratios is {list(ratios)}, expected 0, 4 or 128 for each of "
                f"{num_layers} layers"
            )
        return tuple(_KIND_OF_RATIO[ratio] for ratio in ratios)
    return tuple(_SPARSE if layer > 1 and layer % 2 else _HEAVY for layer in range(num_layers))


def _read_attention(config: family.Config, kind: str) -> parts.CompressedSpec:
    """Reads the attention of the layers of a kind."""
    head_dim = config.whole("head_dim")
    indexer = parts.EntryIndexerSpec(
        config.whole("index_n_heads"), config.whole("index_head_dim"), config.whole("index_topk")
    )
    rates = _read_rates(config)
    compression: parts.CompressionSpec | None = None
    if kind == _SPARSE:
        compression = parts.CompressionSpec(rates[_SPARSE], overlap=True, indexer=indexer)
    elif kind == _HEAVY:
        compression = parts.CompressionSpec(rates[_HEAVY], overlap=False, indexer=None)
    return parts.CompressedSpec(
        "compressed",
        num_heads=config.whole("num_attention_heads"),
        head_dim=head_dim,
        q_lora_rank=config.whole("q_lora_rank"),
        sliding_window=config.whole("sliding_window"),
        scale=head_dim**-0.5,
        num_groups=config.whole("o_groups"),
        o_lora_rank=config.whole("o_lora_rank"),
        compression=compression,
    )


def _read_rates(config: family.Config) -> dict[str, int]:
    """Reads how many positions an entry stands for, in the layers of each kind that has entries."""
    group, rates = config.group("compress_rates"), dict[str, int]()
    for kind, older in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        rates[kind] = _DEFAULT_RATES[kind] if group is None else group.whole(kind)
        rates[kind] = config.whole(older, rates[kind])
    if group is not None:
        group.refuse_unread()
    return rates


def _read_ropes(config: family.Config, head_dim: int) -> dict[str, parts.RopeSpec]:
    """Reads the rotary positions of layers of each kind: those with entries have a base and a scaling of their own."""
    theta, compress_theta = config.number("rope_theta", 1e4), config.number("compress_rope_theta", 1.6e5)
    group = rotary.rope_group(config)
    if group is not None and group.has("main") and group.has("compress"):
        labels = {label: parts.RopeSpec(theta, head_dim, True, None) for label in ("main", "compress")}
        found = rotary.read_rope_by_kind(config, head_dim, labels, partial_rotary_factor=1.0)
        main, compress = (replace(found[label], interleaved=True) for label in ("main", "compress"))
        config.ignore("partial_rotary_factor", "qk_rope_head_dim")  # rope_parameters has the shares that are rotated
    else:
        share = config.whole("qk_rope_head_dim", int(_ROTATED * head_dim)) / head_dim
        share = config.number("partial_rotary_factor", share)
        config.only(qk_rope_head_dim=int(head_dim * share))
        main = parts.RopeSpec(theta, int(head_dim * share), True, None)
        scaled = rotary.read_rope(config, head_dim, theta, interleaved=True, partial_rotary_factor=share)
        if scaled.rotary_dim != main.rotary_dim:
            raise formats.CheckpointError(
                f"{config.place}: partial_rotary_factor rotates {scaled.rotary_dim} values in one place and "
                f"{main.rotary_dim} in another; these must be equal"
            )
        scaling = scaled.scaling
        has_factor = group is not None and group.has("attention_factor")
        if scaling is not None and scaling.kind == "yarn" and not has_factor:
            scaling = replace(scaling, attention_factor=1.0)
        compress = replace(scaled, theta=compress_theta, scaling=scaling)
    return {_SLIDING: main, _SPARSE: compress, _HEAVY: compress}


def _names(published: str, newer: str) -> tuple[str, ...]:
    """Returns the names of a tensor: as transformers writes it, as published, and as transformers calls it."""
    return f"model.{published}", published, f"model.{newer}"


def _in_layer(published: str, newer: str) -> tuple[str, ...]:
    return _names(f"layers.{{i}}.{published}", f"layers.{{i}}.{newer}")


_COMPRESSOR, _INDEXER = "self_attn.compressor", "self_attn.compressor.indexer"

DEEPSEEK_V4 = family.Family(
    model_type="deepseek_v4",
    short_names={
        "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
        "deepseek-v4-pro": "deepseek-ai/DeepSeek-V4-Pro",
    },
    published=(family.Published("deepseek-v4-flash", "284", "13"), family.Published("deepseek-v4-pro", "1573", "49")),
    read_config=_read_config,
    dense_names={
        "embed": ("model.embed_tokens.weight", "embed.weight"),
        "layers.{i}.attention_norm": _in_layer("attn_norm.weight", "input_layernorm.weight"),
        "layers.{i}.attention_streams.weights": _in_layer("hc_attn_fn", "attn_hc.fn"),
        "layers.{i}.attention_streams.base": _in_layer("hc_attn_base", "attn_hc.base"),
        "layers.{i}.attention_streams.scale": _in_layer("hc_attn_scale", "attn_hc.scale"),
        "layers.{i}.attention.q_a": _in_layer("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
        "layers.{i}.attention.q_a_norm": _in_layer("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
        "layers.{i}.attention.q_b": _in_layer("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
        "layers.{i}.attention.kv": _in_layer("attn.wkv.weight", "self_attn.kv_proj.weight"),
        "layers.{i}.attention.kv_norm": (
            *_in_layer("attn.norm.weight", "self_attn.kv_norm.weight"),
            "layers.{i}.attn.kv_norm.weight",
        ),
        "layers.{i}.attention.sinks": _in_layer("attn.attn_sink", "self_attn.sinks"),
        "layers.{i}.attention.o_a": _in_layer("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
        "layers.{i}.attention.o_b": _in_layer("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
        "layers.{i}.attention.entry_kv": _in_layer("attn.compressor.wkv.weight", f"{_COMPRESSOR}.kv_proj.weight"),
        "layers.{i}.attention.entry_gate": _in_layer("attn.compressor.wgate.weight", f"{_COMPRESSOR}.gate_proj.weight"),
        "layers.{i}.attention.entry_positions": _in_layer("attn.compressor.ape", f"{_COMPRESSOR}.position_bias"),
        "layers.{i}.attention.entry_norm": _in_layer("attn.compressor.norm.weight", f"{_COMPRESSOR}.kv_norm.weight"),
        "layers.{i}.attention.index_kv": _in_layer("attn.indexer.compressor.wkv.weight", f"{_INDEXER}.kv_proj.weight"),
        "layers.{i}.attention.index_gate": _in_layer(
            "attn.indexer.compressor.wgate.weight", f"{_INDEXER}.gate_proj.weight"
        ),
        "layers.{i}.attention.index_positions": _in_layer("attn.indexer.compressor.ape", f"{_INDEXER}.position_bias"),
        "layers.{i}.attention.index_norm": _in_layer(
            "attn.indexer.compressor.norm.weight", f"{_INDEXER}.kv_norm.weight"
        ),
        "layers.{i}.attention.index_q": _in_layer("attn.indexer.wq_b.weight", f"{_INDEXER}.q_b_proj.weight"),
        "layers.{i}.attention.index_weights": _in_layer(
            "attn.indexer.weights_proj.weight", f"{_INDEXER}.scorer.weights_proj.weight"
        ),
        "layers.{i}.mlp_norm": _in_layer("ffn_norm.weight", "post_attention_layernorm.weight"),
        "layers.{i}.mlp_streams.weights": _in_layer("hc_ffn_fn", "ffn_hc.fn"),
        "layers.{i}.mlp_streams.base": _in_layer("hc_ffn_base", "ffn_hc.base"),
        "layers.{i}.mlp_streams.scale": _in_layer("hc_ffn_scale", "ffn_hc.scale"),
        "layers.{i}.router": _in_layer("ffn.gate.weight", "mlp.gate.weight"),
        "layers.{i}.router_table": _in_layer("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
        "layers.{i}.router_bias": _in_layer("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
        "layers.{i}.shared.gate": _in_layer("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
        "layers.{i}.shared.up": _in_layer("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
        "layers.{i}.shared.down": _in_layer("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
        "streams.weights": ("model.hc_head.hc_fn", "hc_head_fn"),
        "streams.base": ("model.hc_head.hc_base", "hc_head_base"),
        "streams.scale": ("model.hc_head.hc_scale", "hc_head_scale"),
        "norm": ("model.norm.weight", "norm.weight"),
        "head": ("head.weight", "lm_head.weight"),
    },
    expert_names=(
        *(
            family.ExpertNames(family.matrices(f"{prefix}layers.{{i}}.ffn.experts.{{e}}.*.weight", "w1", "w3", "w2"))
            for prefix in ("model.", "")
        ),
        family.FUSED_EXPERT_NAMES,
    ),
    unused=(family.LeftOut("mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
)
