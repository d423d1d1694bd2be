"""Nemotron 3 Nano 30B-A3B, Nano Omni (text): layers of Mamba-2, attention without positions, experts, or a dense
expert, each alone; experts of two matrices with a squared ReLU, sigmoid routing with a bias.

Nemotron 3 Nano Omni has the same text model. The checkpoint's type was published as NemotronH_Nano_Omni_Reasoning_V3,
with other names of its parts in the config; transformers calls it nemotron_h_omni.
Source: transformers, models/nemotron_h, models/nemotron_h_omni; Nemotron 3 (NVIDIA, 2025).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers
from moe_pack.formats.families.granitemoehybrid import MAMBA2_NAMES
from moe_pack.formats.families.multimodal import within
from moe_pack.formats.families.qwen3_next import MTP_LAYER
from moe_pack.formats.parts.specs import MAX_LAYERS

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_KINDS = {**{kind: kind for kind in _LETTERS.values()}, "mamba": "linear_attention", "attention": "full_attention"}


def _kinds(config: family.Config) -> tuple[str, ...]:
    """Reads what each layer is: a list, or a letter for each."""
    if config.has("layers_block_type"):
        config.ignore("hybrid_override_pattern")
        found, known = config.texts("layers_block_type"), _KINDS
    else:
        found, known = tuple(config.text("hybrid_override_pattern")), _LETTERS
    if unknown := sorted(set(found) - known.keys()):
        raise formats.CheckpointError(f"{config.place}: layers are {unknown}; supported: {', '.join(sorted(known))}")
    if len(found) > MAX_LAYERS:
        raise formats.CheckpointError(f"{config.place}: {len(found)} layers, expected at most {MAX_LAYERS}")
    config.derive("num_hidden_layers", len(found))
    return tuple(known[kind] for kind in found)


def _read_mixer(config: family.Config, layers: tuple[int, ...]) -> parts.Mamba2Spec:
    config.only(mamba_hidden_act="silu", mamba_proj_bias=False)
    return parts.Mamba2Spec(
        kind="mamba2",
        layers=layers,
        num_heads=config.whole("mamba_num_heads", 128),
        head_dim=config.whole("mamba_head_dim", 64),
        state_size=config.whole("ssm_state_size", 128),
        num_groups=config.whole("n_groups", 8),
        conv_kernel=config.whole("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True),
        proj_bias=config.flag("use_bias", False),
        time_step_min=config.number("time_step_min", 0.001),
    )


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        mlp_hidden_act="relu2",
        mlp_bias=False,
        attention_bias=False,
        sliding_window=None,
        moe_latent_size=None,
        n_shared_experts=1,
        tie_word_embeddings=False,
    )
    config.require("head_dim")  # missing, transformers takes 128
    kinds = _kinds(config)
    mamba, moe, attention, dense = (
        tuple(i for i, kind in enumerate(kinds) if kind == wanted) for wanted in _LETTERS.values()
    )
    expert_size = config.whole("moe_intermediate_size")
    spec = readers.read_decoder(
        config,
        readers.read_grouped_query(config),
        None,
        readers.read_sigmoid_router(config, num_experts_per_tok=2, normalize=True),
        expert_size,
        moe_layers=moe,
        dense_size_key=None,
        shared_expert=formats.SharedExpertSpec(config.whole("moe_shared_expert_intermediate_size"), gated=False),
        norm=formats.NormSpec("rms", config.number("layer_norm_epsilon", 1e-5)),
    )
    dense_size = config.whole("intermediate_size", 21504)
    return replace(
        spec,
        mixer=_read_mixer(config, mamba) if mamba else None,
        dense_intermediate_size=dense_size if dense else None,
        expert=formats.ExpertSpec("relu2", expert_size, ("up", "down"), bias=(), extra_floats=0),
        halves=parts.HalvesSpec(first=tuple(sorted(mamba + attention)), second=tuple(sorted(moe + dense))),
    )


NEMOTRON_H = family.Family(
    model_type="nemotron_h",
    short_names={
        "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron-3-nano-30b-a3b-base": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16",
    },
    published=(family.Published("nemotron-3-nano-30b-a3b", "31.6", "3.6"),),
    read_config=_read_config,
    # The second are those that transformers 5 writes with save_original_format=False.
    layer=("backbone.layers.{i}.", "model.layers.{i}."),
    dense_names={
        "embed": ("backbone.embeddings.weight", "model.embeddings.weight"),
        ".attention_norm": "norm.weight",
        ".mlp_norm": "norm.weight",
        ".attention.{q,k,v,o}": "mixer.{}_proj.weight",
        **{f".mixer.{role}": f"mixer.{name}" for role, name in MAMBA2_NAMES.items()},
        ".mlp.{up,down}": "mixer.{}_proj.weight",
        ".shared.{up,down}": "mixer.shared_experts.{}_proj.weight",
        ".router": "mixer.gate.weight",
        ".router_bias": "mixer.gate.e_score_correction_bias",
        "norm": ("backbone.norm_f.weight", "model.norm_f.weight"),
        "head": "lm_head.weight",
    },
    expert_names=(
        family.ExpertNames(family.matrices("backbone.layers.{i}.mixer.experts.{e}.*.weight", "up_proj", "down_proj")),
        family.ExpertNames(family.matrices("model.layers.{i}.mixer.experts.*", "up_proj", "down_proj")),
    ),
    unused=(MTP_LAYER,),
    ignored_keys=family.keys(
        """
        chunk_size expand hidden_dropout mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern
        mtp_layers_block_type norm_eps num_logits_to_keep num_nextn_predict_layers rescale_prenorm_residual
        residual_in_fp32 rope_theta time_step_floor time_step_limit time_step_max use_mamba_kernels
        """
    ),
)


def _omni(model_type: str) -> family.Family:
    """Returns the family of the multimodal checkpoints under one of their two types."""
    whole = within(
        NEMOTRON_H,
        model_type,
        moves=({"": "language_model."},),
        parts={
            **dict.fromkeys(("vision_model.*", "vision_final_layernorm.*"), "the vision part"),
            **dict.fromkeys(("mlp1.*", "multi_modal_projector.*"), "what maps vision to the text model"),
            **dict.fromkeys(("sound_encoder.*", "audio_tower.*"), "the audio part"),
            **dict.fromkeys(("sound_projection.*", "embed_audio.*"), "what maps audio to the text model"),
        },
        ignored_keys=_OMNI_IGNORED,
    )

    def read_config(config: family.Config) -> formats.ModelSpec:
        config.only(tie_word_embeddings=False)  # which has no effect in transformers
        return whole.read_config(config)

    return replace(
        whole, read_config=read_config, old_keys={"llm_config": "text_config", "sound_config": "audio_config"}
    )


_OMNI_IGNORED = family.keys(
    """
    downsample_ratio force_image_size image_tag_type img_context_token img_context_token_id img_end_token
    img_start_token max_sequence_length norm_mean norm_std patch_size projector_hidden_size ps_version
    sound_context_token sound_context_token_id template use_thumbnail video_context_token video_context_token_id
    video_pruning_rate video_temporal_patch_size vision_hidden_size vit_hidden_size
    """
)
NEMOTRON_H_OMNI = replace(
    _omni("nemotron_h_omni"),
    unpublished="tests quote parts of the file, no public copy has all of it; its text model is nemotron_h's",
)
NEMOTRON_H_NANO_OMNI = replace(
    _omni("NemotronH_Nano_Omni_Reasoning_V3"),
    short_names={"nemotron-3-nano-omni-30b-a3b": "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16"},
    unpublished="as nemotron_h_omni, of which it is the older name",
)
