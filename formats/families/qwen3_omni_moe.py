"""Qwen3-Omni-30B-A3B (text of the thinker): as `qwen3_moe`, two objects deep in the config.

Audio, images and the talker, which speaks, are left out. A position has three numbers, which differ only in images,
videos and sounds: a text is rotated as in Qwen3-MoE. Whether the head is tied is read in `thinker_config`.
Source: transformers, models/qwen3_omni_moe; 2509.17765.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.multimodal import within
from moe_pack.formats.families.qwen3_moe import QWEN3_MOE


def _read_config(config: family.Config) -> formats.ModelSpec:
    # The class reads none of these: all layers see everything, q and k have norms, no layer has a shared expert.
    config.only(sliding_window=None, use_sliding_window=False, use_qk_norm=True, shared_expert_intermediate_size=0)
    attention = readers.read_grouped_query(config, bias=readers.attention_bias(config), qk_norm="head")
    experts, chosen = config.whole("num_experts"), config.whole("num_experts_per_tok")
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, default_theta=1e6, ignored=rotary.MROPE_KEYS | {"interleaved"}),
        formats.RouterSpec("softmax_topk", experts, chosen, config.flag("norm_topk_prob", True)),
        config.whole("moe_intermediate_size"),
        moe_layers=readers.layers_by_step(config),
    )


_TEXT = replace(QWEN3_MOE, model_type="qwen3_omni_moe_text", read_config=_read_config)
QWEN3_OMNI_MOE = replace(
    within(
        _TEXT,
        "qwen3_omni_moe",
        text_keys=("thinker_config", "text_config"),
        # family.Published checkpoints, and what save_pretrained(..., save_original_format=False) writes.
        moves=(
            {"model.": "thinker.model.", "lm_head.": "thinker.lm_head."},
            {"model.": "thinker.model.language_model.", "lm_head.": "thinker.lm_head."},
        ),
        parts={
            **dict.fromkeys(("thinker.visual.*", "thinker.model.visual.*"), "the vision part"),
            **dict.fromkeys(("thinker.audio_tower.*", "thinker.model.audio_tower.*"), "the audio part"),
            "talker.*": "the talker, which chooses codes of speech",
            "code2wav.*": "what makes sound of codes of speech",
        },
        ignored_keys=family.keys(
            """
            assistant_token_id code2wav_config enable_audio_output im_end_token_id im_start_token_id
            position_id_per_seconds seconds_per_chunk system_token_id talker_config tts_bos_token_id tts_eos_token_id
            tts_pad_token_id user_token_id
            """
        ),
    ),
    short_names={
        "qwen3-omni-30b-a3b": "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "qwen3-omni-30b-a3b-instruct": "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "qwen3-omni-30b-a3b-thinking": "Qwen/Qwen3-Omni-30B-A3B-Thinking",
        "qwen3-omni-30b-a3b-captioner": "Qwen/Qwen3-Omni-30B-A3B-Captioner",
    },
    published=(family.Published("qwen3-omni-30b-a3b-instruct", "30.5", "3.3"),),
)
