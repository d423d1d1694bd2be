"""MiniCPM-MoE-8x2B: embedding, residuals and what the head sees are scaled, tied head.

transformers has no class for it; tests/families/minicpm.py stands in for one.
Source: openbmb/MiniCPM-MoE-8x2B, modeling_minicpm.py; MiniCPM (2404.06395), section 7.
"""

import math
from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_experts, chosen = readers.read_expert_count(config, "num_experts"), config.whole("num_experts_per_tok")
    config.only(pretraining_tp=1)  # in slices, the head is given what is not divided by dim_model_base
    attention = readers.read_llama_attention(config, readers.attention_bias(config))
    spec = readers.read_decoder(
        config,
        attention,
        readers.read_llama_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", num_experts, chosen, normalize=True),
        config.whole("intermediate_size"),
        dense_size_key=None,
    )
    return replace(
        spec,
        tied_head=config.flag("tie_word_embeddings", True),
        embedding_multiplier=config.number("scale_emb", 1),
        residual_multiplier=config.number("scale_depth", 1) / math.sqrt(config.num_layers()),
        logits_scaling=config.whole("hidden_size") / config.whole("dim_model_base", 1),
    )


MINICPM = family.Family(
    model_type="minicpm",
    short_names={"minicpm-moe-8x2b": "openbmb/MiniCPM-MoE-8x2B"},
    published=(family.Published("minicpm-moe-8x2b", "13.6", "4", leaves_out=("embed",)),),
    read_config=_read_config,
    dense_names=readers.DENSE_NAMES,
    expert_names=(family.ExpertNames(family.matrices("model.layers.{i}.mlp.experts.{e}.*.weight", "w1", "w3", "w2")),),
)
