"""DeepSeek-V3, V3.1, R1, Moonlight, Kimi K2 and K2 Thinking, Kimi K2.5 and K2.6 (text): latent attention, sigmoid
routing with a bias and groups, yarn, dense first layers, shared expert, FP8; Kimi K2 Thinking, K2.5 and K2.6 have
experts of four bits.

Source: transformers, models/deepseek_v3, models/kimi_k25; DeepSeek-V3 (2412.19437); Kimi K2 (2507.20534).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, multimodal, readers, rotary


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    # Missing, transformers takes V3's own: 8, 4, 2.5 and 128.
    config.require("n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads")
    return read_latent_decoder(config, readers.read_latent(config), readers.layers_after_dense(config, default=3))


def read_latent_decoder(
    config: family.Config,
    attention: parts.LatentSpec,
    moe_layers: tuple[int, ...],
    *,
    interleaved: bool | None = None,
    num_experts_per_tok: int = 8,
    default_eps: float = 1e-6,
) -> formats.ModelSpec:
    """Reads a decoder of DeepSeek-V3's kind, with this attention: its routers, experts and rotary positions.

    Args:    interleaved: whether neighbours rotate together; None if `rope_interleave` says it.
             num_experts_per_tok, default_eps: the family's defaults, the second of the norms' eps.
    """
    interleaved = config.flag("rope_interleave", True) if interleaved is None else interleaved
    expert_size = config.whole("moe_intermediate_size")
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.qk_rope_head_dim, interleaved=interleaved),
        readers.read_sigmoid_router(config, num_experts_per_tok, normalize=True),
        expert_size,
        moe_layers=moe_layers,
        shared_expert=formats.SharedExpertSpec(expert_size * config.whole("n_shared_experts", 1), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", default_eps)),
    )


DEEPSEEK_V3 = family.Family(
    model_type="deepseek_v3",
    short_names={
        "deepseek-v3": "deepseek-ai/DeepSeek-V3",
        "deepseek-v3-base": "deepseek-ai/DeepSeek-V3-Base",
        "deepseek-v3-0324": "deepseek-ai/DeepSeek-V3-0324",
        "deepseek-v3.1": "deepseek-ai/DeepSeek-V3.1",
        "deepseek-r1": "deepseek-ai/DeepSeek-R1",
        "deepseek-r1-0528": "deepseek-ai/DeepSeek-R1-0528",
        "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B",
        "moonlight-16b-a3b-instruct": "moonshotai/Moonlight-16B-A3B-Instruct",
    },
    published=(
        family.Published("deepseek-v3", "671", "37", cached="35.136"),
        family.Published("moonlight-16b-a3b-instruct", "15.29", "2.24", cached="15.552", leaves_out=("embed", "head")),
    ),
    read_config=_read_config,
    dense_names={**readers.DENSE_NAMES, **readers.LATENT_NAMES},
    unused=(readers.PREDICTION_LAYER,),
    prediction=(readers.PREDICTION_NAMES,),
    ignored_keys=frozenset(
        {"aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "pretraining_tp", "seq_aux"}
    ),
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    short_names={
        "kimi-k2-base": "moonshotai/Kimi-K2-Base",
        "kimi-k2": "moonshotai/Kimi-K2-Instruct",
        "kimi-k2-instruct": "moonshotai/Kimi-K2-Instruct",
        "kimi-k2-instruct-0905": "moonshotai/Kimi-K2-Instruct-0905",
        "kimi-k2-thinking": "moonshotai/Kimi-K2-Thinking",
    },
    published=(family.Published("kimi-k2-instruct", "1026", "32", cached="35.136"),),
)
KIMI_K25 = replace(
    multimodal.within(
        DEEPSEEK_V3,
        "kimi_k25",
        text_types=("kimi_k2",),
        # Published checkpoints have the names of LANGUAGE_MODEL; save_pretrained of transformers 5.23 has blocks.
        moves=(
            *multimodal.LANGUAGE_MODEL,
            {
                "model.layers.": "language_model.model.blocks.",
                "model.": "language_model.model.",
                "lm_head.": "language_model.lm_head.",
            },
        ),
        parts=multimodal.PARTS
        | dict.fromkeys(("mm_projector.*", "model.mm_projector.*"), "what maps vision to the text model"),
        tied_head=True,
        ignored_keys=family.keys(
            """
            ignore_index media_placeholder_token_id projection_hidden_size projection_layer_norm_eps
            use_unified_vision_chunk video_placeholder
            """
        ),
    ),
    short_names={"kimi-k2.5": "moonshotai/Kimi-K2.5", "kimi-k2.6": "moonshotai/Kimi-K2.6"},
    published=(family.Published("kimi-k2.5", "1026", "32", cached="35.136"),),
)
