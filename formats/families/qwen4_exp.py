"""Qwen3.8-Flash-Next, Qwen4-Exp (text): as `qwen3_5_moe`, with four residual streams behind gates in place of norms,
attention to blocks of positions that an indexer chooses, and in one layer a table of n-grams that stays on the disk.

Source: transformers, models/qwen4_exp.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, ngrams, qwen3_5_moe, qwen3_next, rotary
from moe_pack.formats.families.multimodal import within


def _read_text(config: family.Config) -> formats.ModelSpec:
    config.only(attn_output_gate=True, mamba_ssm_dtype="float32")
    router = formats.RouterSpec(
        "softmax_topk",
        config.whole("num_experts", 512),
        config.whole("num_experts_per_tok", 10),
        config.flag("norm_topk_prob", True),
    )
    spec = qwen3_next.read_gated(config, router, ignored=rotary.MROPE_KEYS, indexer=_read_indexer(config))
    group = rotary.rope_group(config)
    if group is None or not group.has("partial_rotary_factor"):
        config.require("partial_rotary_factor")  # missing, transformers refuses the config
    mixer = qwen3_next.read_gated_delta(config, interleaved=False, attending=("full_attention", "indexed_attention"))
    is_sigmoid = config.choice("output_gate_type", ("silu", "sigmoid")) == "sigmoid"
    return replace(
        spec,
        mixer=replace(mixer, gate="sigmoid" if is_sigmoid else "silu"),
        residual=parts.GatedStreamsSpec("gated_streams", config.whole("hc_count", 4), config.whole("hc_lowrank", 320)),
        ngrams=ngrams.read_ngrams(config),
    )


def _read_indexer(config: family.Config) -> parts.BlockIndexerSpec:
    """Reads which blocks of positions a query attends to; the config must have all keys."""
    config.only(indexer_kv_heads=1)
    config.require("indexer_kv_heads")
    budget, size = config.whole("indexer_budget"), config.whole("indexer_compress_ratio")
    if budget % size:
        raise formats.CheckpointError(
            f"{config.place}: indexer_budget is {budget}, expected a multiple of indexer_compress_ratio, {size}"
        )
    heads, width = config.whole("indexer_n_heads"), config.whole("indexer_head_dim")
    return parts.BlockIndexerSpec("pooled", heads, width, block_tokens=size, num_blocks=budget // size)


def _stream_names(role: str, module: str) -> dict[str, str]:
    names = {
        "norm": "hc_norm",
        "down": "input_mix_weight_down",
        "up": "input_mix_weight_up",
        "inject": "block_inject_weight",
    }
    return {f"{role}.{name}": f"{module}.{theirs}.weight" for name, theirs in names.items()}


_LAYER = "model.layers.{i}."
_INDEXER = _LAYER + "self_attn.indexer."
_INDEX_ROLES = ("layers.{i}.attention.index_q", "layers.{i}.attention.index_k")
QWEN4_EXP_TEXT = family.Family(
    model_type="qwen4_exp_text",
    unpublished="its models are published inside multimodal checkpoints, qwen4_exp",
    read_config=_read_text,
    dense_names={
        **qwen3_5_moe.NAMES,
        **_stream_names("layers.{i}.attention_streams", _LAYER + "attn_hyper_connection"),
        **_stream_names("layers.{i}.mlp_streams", _LAYER + "mlp_hyper_connection"),
        **_stream_names("streams", "model.hyper_connection_mixer"),
        **ngrams.NGRAM_NAMES,
        **{role: family.Stored(_INDEXER + "index_qk_proj.weight", roles=_INDEX_ROLES) for role in _INDEX_ROLES},
        ".attention.index_q_norm": "self_attn.indexer.q_layernorm.weight",
        ".attention.index_k_norm": "self_attn.indexer.k_layernorm.weight",
    },
    unused=(qwen3_next.MTP_LAYER,),
    table_names=ngrams.NGRAM_TABLES,
    ignored_keys=frozenset({"mtp", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "number_of_conv_states"}),
)
QWEN4_EXP = replace(
    within(QWEN4_EXP_TEXT, "qwen4_exp", ignored_keys=frozenset({"language_model_only"})),
    short_names={"qwen3.8-flash-next": "Qwen/Qwen3.8-Flash-Next", "qwen4-exp": "Qwen/Qwen4-Exp"},
    published=(
        family.Published("qwen3.8-flash-next", "176", "6", cached="13.824", active_leaves_out=("embed", "head")),
    ),
)
