"""GLM-5, 5.1, 5.2, 5.3: as `deepseek_v32`; several layers share what one indexer chose.

Source: transformers, models/glm_moe_dsa; IndexCache (2603.12201) for shared choices.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import readers, rotary
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.deepseek_v32 import DEEPSEEK_V32
from moe_pack.formats.families.family import Published


def _read_config(config: Config) -> formats.ModelSpec:
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
    indexer = parts.IndexerSpec(
        config.whole("index_n_heads"), config.whole("index_head_dim"), config.whole("index_topk"), interleaved=True
    )
    expert_size, num_shared = config.whole("moe_intermediate_size"), config.whole("n_shared_experts", 1)
    config.whole("q_lora_rank")  # the indexer's queries come from the latent
    # Published configs have 192 as head_dim, which transformers replaces.
    attention = replace(readers.read_latent(config, reads_head_dim=False), indexer=indexer)
    rope = rotary.read_rope(config, config.whole("qk_rope_head_dim"), interleaved=True)
    spec = readers.read_decoder(
        config,
        attention,
        rope,
        readers.read_sigmoid_router(config, num_experts_per_tok=8, normalize=True),
        expert_size,
        moe_layers=readers.layers_by_kind(config, num_dense=config.count("first_k_dense_replace", 3)),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    shared = tuple(layer for layer, kind in enumerate(_indexer_kinds(config)) if kind == "shared")
    if 0 in shared:
        raise formats.CheckpointError(
            f"{config.place}: layer 0 shares an indexer's choice, but there is no layer before it"
        )
    sharing = replace(attention, indexer=replace(indexer, shared=True))
    return replace(spec, others=(parts.OtherAttentionSpec(shared, sharing, rope),) if shared else ())


def _indexer_kinds(config: Config) -> tuple[str, ...]:
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
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    short_names={f"glm-{name}": f"zai-org/GLM-{name}" for name in ("5", "5.1", "5.2", "5.3")},
    published=(Published("glm-5.3", "744", "40", cached="47.616", active_leaves_out=("embed",)),),
    read_config=_read_config,
    ignored_keys=DEEPSEEK_V32.ignored_keys | {"index_share_for_mtp_iteration"},
)
