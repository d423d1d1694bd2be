"""Granite Swash 3B-A600M: as `granitemoeshared`, with sinks, a window in three layers of four, and a rotary base for
each layer, or none.

Source: transformers, models/granitemoe_swa.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, granitemoe, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    return granitemoe.read_granite(config, _read_attention(config), granitemoe.read_shared_expert(config))


def _read_attention(config: family.Config) -> readers.LayerAttention:
    own, num_layers = replace(granitemoe.read_granite_attention(config), sinks=True), config.num_layers()
    rope = rotary.read_rope(config, own.head_dim)
    thetas = config.numbers("layer_rope_theta") or (rope.theta,) * num_layers
    readers.check_count(config, "layer_rope_theta", thetas)
    kinds = readers.attention_kinds(config) or tuple(
        "sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)
    )
    config.ignore("sliding_window")  # without layers that have it
    windowed = replace(own, sliding_window=config.whole("sliding_window")) if "sliding_attention" in kinds else own
    return readers.LayerAttention.of(
        (windowed if kind == "sliding_attention" else own, replace(rope, theta=theta) if theta else None)
        for kind, theta in zip(kinds, thetas, strict=True)
    )


GRANITEMOE_SWA = replace(
    granitemoe.GRANITEMOESHARED,
    model_type="granitemoe_swa",
    model_class="GraniteMoeSWAForCausalLM",
    short_names={"granite-swash-3b-a600m": "ibm-granite/granite-swash-3b-a600m"},
    unpublished="only the sizes of ibm-granite/granite-swash-3b-a600m were found, not its rotary bases",
    published=(),
    read_config=_read_config,
    expert_names=granitemoe.GRANITEMOESHARED.expert_names[::-1],
    dense_names={
        **granitemoe.GRANITEMOESHARED.dense_names,
        # transformers does not read the older names in this family.
        ".router": ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        ".attention.sinks": "self_attn.sinks",
    },
)
