"""A.X K2: as `deepseek_v32`, with gates of the normed inputs, gates of the heads' outputs from the query latent, and
groups where the config has them.

Source: transformers, models/axk2; SK Telecom (2026).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.deepseek_v32 import DEEPSEEK_V32

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


def _read_config(config: Config) -> formats.ModelSpec:
    config.only(**_ONLY)
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes those of A.X K2 Light.
    config.require("routed_scaling_factor", "num_key_value_heads", "index_topk")
    if config.has("n_group") != config.has("topk_group"):
        raise formats.CheckpointError(f"{config.place}: n_group and topk_group must both be there, or neither")
    router = readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True)
    expert_size = config.whole("moe_intermediate_size")
    config.whole("q_lora_rank")  # queries, their gates and the indexer's queries come from the latent
    attention = replace(
        readers.read_latent(config, reads_head_dim=False),
        indexer=parts.IndexerSpec(
            config.whole("index_n_heads"), config.whole("index_head_dim"), config.whole("index_topk")
        ),
        gated=True,
    )
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.qk_rope_head_dim, interleaved=True),
        replace(router, zero_outside=router.n_group > 1),
        expert_size,
        moe_layers=readers.layers_after_dense_by_step(config),
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts", 1), gated=False),
    )
    return replace(spec, residual=parts.GatedNormsSpec("gated_norms", config.whole("gated_norm_rank", 16)))


_LAYER = "model.layers.{i}."

AXK2 = replace(
    DEEPSEEK_V32,
    model_type="axk2",
    short_names={"a.x-k2": "skt/A.X-K2"},
    unpublished="no public copy of the file of skt/A.X-K2 was found; transformers' defaults are sizes of A.X K2 Light",
    published=(),
    read_config=_read_config,
    dense_names={
        **DEEPSEEK_V32.dense_names,
        "layers.{i}.attention_norm": _LAYER + "input_layernorm.norm.weight",
        "layers.{i}.mlp_norm": (
            _LAYER + "post_attention_layernorm.norm.weight",
            _LAYER + "post_attention_layernorm.weight",
        ),
        **{
            f"layers.{{i}}.{half}_gates.{role}": (f"{_LAYER}{norm}.{own}.weight", f"{_LAYER}{norm}.mlp.{other}.weight")
            for half, norm in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm"))
            for role, own, other in (("down", "W_down", "fc1"), ("up", "W_up", "fc2"))
        },
        "layers.{i}.attention.q_b": (
            _LAYER + "self_attn.q_b_proj.weight",
            _LAYER + "self_attn.q_gate_proj.weight",
        ),
    },
)
