"""DeepSeek-V3.2: as `deepseek_v3`, with sparse attention: an indexer chooses the positions that a query attends to.

The published inference code also rotates the indexer's queries and keys by a Hadamard matrix, which changes no score,
and rounds them to FP8, which we, like transformers, do not.
Source: transformers, models/deepseek_v32; DeepSeek-V3.2 (2512.02556).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers
from moe_pack.formats.families.deepseek_v3 import DEEPSEEK_V3, read_latent_decoder
from moe_pack.formats.parts import IndexerSpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, mlp_bias=False, rope_interleave=True)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes V3.2's own: 8, 4, 2.5, 128 and 2048.
    config.require("n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads", "index_topk")
    indexer = read_indexer(config)
    attention = replace(readers.read_latent(config), indexer=indexer)
    return read_latent_decoder(config, attention, layers_after_dense(config), interleaved=True)


def read_indexer(config: family.Config) -> IndexerSpec:
    """Reads an indexer, whose queries come from the latent that the config must have."""
    config.whole("q_lora_rank")
    return IndexerSpec(config.whole("index_n_heads"), config.whole("index_head_dim"), config.whole("index_topk"))


def layers_after_dense(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers: as `mlp_layer_types` says, else all after the first three or `first_k_dense_replace`."""
    return readers.layers_by_kind(config, config.count("first_k_dense_replace", 3))


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    short_names={"deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2-exp": "deepseek-ai/DeepSeek-V3.2-Exp"},
    published=(family.Published("deepseek-v3.2", "671", "37", cached="42.944", active_leaves_out=("embed",)),),
    read_config=_read_config,
    dense_names={
        **DEEPSEEK_V3.dense_names,
        ".attention.index_q": "self_attn.indexer.wq_b.weight",
        ".attention.index_k": "self_attn.indexer.wk.weight",
        ".attention.index_k_norm": "self_attn.indexer.k_norm.weight",
        ".attention.index_k_norm_bias": "self_attn.indexer.k_norm.bias",
        ".attention.index_weights": "self_attn.indexer.weights_proj.weight",
    },
)
