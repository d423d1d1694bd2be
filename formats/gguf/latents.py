"""GGUF architectures whose attention differs by layer, reads latents, or has an indexer.

Source: llama.cpp, conversion/ and src/models/.
"""

from collections.abc import Mapping

from moe_pack.formats.gguf.architecture import (
    Architecture,
    Values,
    decoder,
    experts,
    num_layers,
    windows,
)
from moe_pack.formats.gguf.header import Metadata


def _sparse_layers(m: Metadata) -> list[str]:
    """Returns whether each layer's experts are `sparse` or `dense`, by its tensors."""
    has_router = [m.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(num_layers(m))]
    return ["sparse" if flag else "dense" for flag in has_router]


def _mimo2(m: Metadata) -> Values:
    kinds, size = windows(m, 6), m.whole("attention.key_length")
    heads = dict(zip(kinds, m.each("attention.head_count_kv", num_layers(m)), strict=True))
    share = m.whole("rope.dimension_count") / size
    bases = {"full_attention": m.number("rope.freq_base"), "sliding_attention": m.number("rope.freq_base_swa", 1e4)}
    return decoder(
        m,
        "mimo_v2_flash",
        num_key_value_heads=heads.get("full_attention") or heads["sliding_attention"] // 2,
        head_dim=size,
        v_head_dim=m.whole("attention.value_length"),
        attention_value_scale=m.number("attention.value_scale", 1.0),
        sliding_window=m.whole("attention.sliding_window"),
        layer_types=kinds,
        mlp_layer_types=_sparse_layers(m),
        **experts(m, "n_routed_experts", intermediate_size=m.whole("feed_forward_length")),
        n_group=m.whole("expert_group_count", 1),
        topk_group=m.whole("expert_group_used_count", 1),
        norm_topk_prob=True,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
            for kind, base in bases.items()
            if kind in kinds
        },
    )


LATENTS: Mapping[str, Architecture] = {
    "mimo2": Architecture(_mimo2),
}
