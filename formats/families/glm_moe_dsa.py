"""GLM-5, 5.1, 5.2, 5.3: as `deepseek_v32`; several layers share what one indexer chose.

Source: transformers, models/glm_moe_dsa; IndexCache (2603.12201) for shared choices.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import deepseek_v32, family, readers
from moe_pack.formats.families.deepseek_v3 import read_latent_decoder


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        mlp_bias=False,
        rope_interleave=True,
        indexer_rope_interleave=True,
        moe_router_dtype="float32",
    )
    readers.read_kinds(config, "layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    # Missing, transformers takes those of GLM-5.
    config.require("routed_scaling_factor", "num_key_value_heads", "index_topk")
    indexer = replace(deepseek_v32.read_indexer(config), interleaved=True)
    # family.Published configs have 192 as head_dim, which transformers replaces.
    attention = replace(readers.read_latent(config, reads_head_dim=False), indexer=indexer)
    moe_layers = deepseek_v32.layers_after_dense(config)
    spec = read_latent_decoder(config, attention, moe_layers, interleaved=True, default_eps=1e-5)
    return with_shared_choices(config, spec, attention, readers.layers_of(_indexer_kinds(config), "shared"))


def with_shared_choices(
    config: family.Config, spec: formats.ModelSpec, own: parts.LatentSpec, shared: tuple[int, ...]
) -> formats.ModelSpec:
    """Returns the spec, whose attention is `own`, with attention that shares an indexer's choice in these layers."""
    if 0 in shared:
        raise formats.CheckpointError(
            f"{config.place}: layer 0 shares an indexer's choice, but there is no layer before it"
        )
    assert own.indexer is not None
    sharing = replace(own, indexer=replace(own.indexer, shared=True))
    return replace(spec, others=(parts.OtherAttentionSpec(shared, sharing, spec.rope),) if shared else ())


def _indexer_kinds(config: family.Config) -> tuple[str, ...]:
    """Reads which layers have an indexer and which share a choice: a list, else a letter for each, else a period."""
    config.ignore("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    if config.has("indexer_types"):
        return readers.read_kinds(config, "indexer_types", ("full", "shared"))
    num_layers = config.num_layers()
    if config.has("index_topk_pattern"):
        letters = config.text("index_topk_pattern")
        if len(letters) != num_layers or set(letters) - set("FS"):
            raise formats.CheckpointError(
                f"{config.place}: index_topk_pattern is {letters!r}, expected F or S for each of {num_layers} layers"
            )
        return tuple("full" if letter == "F" else "shared" for letter in letters)
    period, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
    return tuple("shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(num_layers))


GLM_MOE_DSA = replace(
    deepseek_v32.DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    short_names={f"glm-{name}": f"zai-org/GLM-{name}" for name in ("5", "5.1", "5.2", "5.3")},
    published=(family.Published("glm-5.3", "744", "40", cached="47.616", active_leaves_out=("embed",)),),
    read_config=_read_config,
    ignored_keys=deepseek_v32.DEEPSEEK_V32.ignored_keys | {"index_share_for_mtp_iteration"},
)
