"""A.X K2: as `deepseek_v32`, with gates of the normed inputs, gates of the heads' outputs from the query latent, and
groups where the config has them.

Source: transformers, models/axk2; SK Telecom (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import deepseek_v32, family, readers
from moe_pack.formats.families.deepseek_v3 import read_latent_decoder

# Written by the authors' own classes, read by no code of transformers: other values would be another model.
_ONLY = {
    "attention_output_gate": True,
    "attn_gate_fused": True,
    "gated_norm": True,
    "mlp_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(**_ONLY)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes those of A.X K2 Light.
    config.require("routed_scaling_factor", "num_key_value_heads", "index_topk")
    if config.has("n_group") != config.has("topk_group"):
        raise formats.CheckpointError(f"{config.place}: n_group and topk_group must both be there, or neither")
    indexer = deepseek_v32.read_indexer(config)
    attention = replace(readers.read_latent(config, reads_head_dim=False), indexer=indexer, gated=True)
    spec = read_latent_decoder(config, attention, readers.layers_after_dense_by_step(config), interleaved=True)
    spec = replace(spec, router=replace(spec.router, zero_outside=spec.router.n_group > 1))
    return replace(spec, residual=parts.GatedNormsSpec("gated_norms", config.whole("gated_norm_rank", 16)))


AXK2 = replace(
    deepseek_v32.DEEPSEEK_V32,
    model_type="axk2",
    short_names={"a.x-k2": "skt/A.X-K2"},
    unpublished="no public copy of the file of skt/A.X-K2 was found; transformers' defaults are sizes of A.X K2 Light",
    published=(),
    read_config=_read_config,
    dense_names={
        **deepseek_v32.DEEPSEEK_V32.dense_names,
        ".attention_norm": "input_layernorm.norm.weight",
        ".mlp_norm": ("post_attention_layernorm.norm.weight", "post_attention_layernorm.weight"),
        ".attention_gates.down": ("input_layernorm.W_down.weight", "input_layernorm.mlp.fc1.weight"),
        ".attention_gates.up": ("input_layernorm.W_up.weight", "input_layernorm.mlp.fc2.weight"),
        ".mlp_gates.down": ("post_attention_layernorm.W_down.weight", "post_attention_layernorm.mlp.fc1.weight"),
        ".mlp_gates.up": ("post_attention_layernorm.W_up.weight", "post_attention_layernorm.mlp.fc2.weight"),
        ".attention.q_b": ("self_attn.q_b_proj.weight", "self_attn.q_gate_proj.weight"),
    },
)
