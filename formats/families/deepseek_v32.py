"""DeepSeek-V3.2: as `deepseek_v3`, with sparse attention: an indexer chooses the positions that a query attends to.

The published inference code also rotates the indexer's queries and keys by a Hadamard matrix, which changes no score,
and rounds them to FP8, which we, like transformers, do not.
Source: transformers, models/deepseek_v32; DeepSeek-V3.2 (2512.02556).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.deepseek_v3 import DEEPSEEK_V3
from moe_pack.formats.families.family import Published
from moe_pack.formats.parts import IndexerSpec


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, mlp_bias=False, rope_interleave=True)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    config.require(
        "n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads", "index_topk"
    )  # missing, transformers takes V3.2's own: 8, 4, 2.5, 128 and 2048
    indexer = IndexerSpec(config.whole("index_n_heads"), config.whole("index_head_dim"), config.whole("index_topk"))
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.whole("n_shared_experts", 1)
    config.whole("q_lora_rank")  # the indexer's queries come from the latent
    return readers.read_decoder(
        config,
        replace(readers.read_latent(config), indexer=indexer),
        rotary.read_rope(config, config.whole("qk_rope_head_dim"), interleaved=True),
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=readers.layers_by_kind(config, num_dense=config.count("first_k_dense_replace", 3)),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False),
    )


_INDEXER = "model.layers.{i}.self_attn.indexer."

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    short_names={
        "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
        "deepseek-v3.2-exp": "deepseek-ai/DeepSeek-V3.2-Exp",
    },
    published=(Published("deepseek-v3.2", "671", "37", cached="42.944", active_leaves_out=("embed",)),),
    read_config=_read_config,
    dense_names={
        **DEEPSEEK_V3.dense_names,
        "layers.{i}.attention.index_q": _INDEXER + "wq_b.weight",
        "layers.{i}.attention.index_k": _INDEXER + "wk.weight",
        "layers.{i}.attention.index_k_norm": _INDEXER + "k_norm.weight",
        "layers.{i}.attention.index_k_norm_bias": _INDEXER + "k_norm.bias",
        "layers.{i}.attention.index_weights": _INDEXER + "weights_proj.weight",
    },
)
