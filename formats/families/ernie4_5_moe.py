"""ERNIE 4.5 21B-A3B, 300B-A47B: softmax routing with a bias, interleaved rotation, dense first layers, shared experts,
tied head.

Source: transformers, models/ernie4_5_moe; Baidu (2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary

_LEAST_SUM = 1e-12


def _read_config(config: family.Config) -> formats.ModelSpec:
    num_experts = config.whole(config.either("moe_num_experts", "num_experts"))
    return read_ernie(config, num_experts, config.whole("moe_intermediate_size"), _moe_layers(config))


def read_ernie(
    config: family.Config, num_experts: int, expert_size: int, moe_layers: tuple[int, ...], has_images: bool = False
) -> formats.ModelSpec:
    """Reads the keys of ERNIE 4.5 that are the same with images, where positions have three numbers and no scaling."""
    # The last two are in released configs alone; other values would be another model.
    config.only(use_bias=False, moe_gate="topk", moe_use_aux_free=True)
    # The sum of weights is at least this. We add it instead: in float32 that is the same for any sum above 1e-5.
    if config.number("moe_norm_min", _LEAST_SUM) != _LEAST_SUM:
        config.only(moe_norm_min=_LEAST_SUM)
    attention = readers.read_grouped_query(config)
    scalings, ignored = ((), rotary.MROPE_KEYS) if has_images else (rotary.SCALINGS, frozenset[str]())
    config.require("moe_num_shared_experts")  # missing, transformers takes 2
    num_shared = config.count("moe_num_shared_experts", 0)
    router = formats.RouterSpec(
        "softmax_topk",
        num_experts,
        config.whole(config.either("moe_k", "num_experts_per_tok"), 6),
        normalize=True,
        bias=True,
        least_sum=_LEAST_SUM,
    )
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, 5e5, interleaved=True, scalings=scalings, ignored=ignored),
        router,
        expert_size,
        moe_layers=moe_layers,
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False) if num_shared else None,
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(spec, tied_head=config.flag("tie_word_embeddings", True))


def _moe_layers(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers: every `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index`."""
    num_layers, step = config.num_layers(), config.whole("moe_layer_interval", 1)
    first, last = config.count("moe_layer_start_index", 1), config.integer("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else last
    if last < 0:
        raise formats.CheckpointError(f"{config.place}: moe_layer_end_index is {last}, expected -1 or a layer")
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and first <= i <= last)


ERNIE4_5_MOE = family.Family(
    model_type="ernie4_5_moe",
    model_class="Ernie4_5_MoeForCausalLM",
    short_names={
        "ernie-4.5-21b-a3b": "baidu/ERNIE-4.5-21B-A3B-PT",
        "ernie-4.5-21b-a3b-thinking": "baidu/ERNIE-4.5-21B-A3B-Thinking",
        "ernie-4.5-300b-a47b": "baidu/ERNIE-4.5-300B-A47B-PT",
    },
    published=(family.Published("ernie-4.5-21b-a3b", "21", "3"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".router_bias": ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"),
    },
    unused=(family.LeftOut("model.mtp_*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"_attn_implementation", "moe_capacity", "num_nextn_predict_layers"}),
)
