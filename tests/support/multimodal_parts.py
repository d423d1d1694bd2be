"""The other parts of tiny multimodal checkpoints, as small as their classes allow, around a text model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class Multimodal:
    """The config around a text model: other parts, and the keys that lead to the text model's object."""

    parts: Values
    text_keys: tuple[str, ...] = ("text_config",)
    around: Values = field(default_factory=dict)  # what is next to the text model's object, if that is deeper
    outer: tuple[str, ...] = field(default=("tie_word_embeddings",))  # keys that are read outside

    def config(self, text: Values) -> Values:
        """The whole config, by the text model's values."""
        outside = self.around | {key: value for key, value in text.items() if key in self.outer}
        values = {key: value for key, value in text.items() if key not in self.outer}
        for key in reversed(self.text_keys):
            values = outside | {key: values}
            outside = {}
        return self.parts | values


_QWEN_VISION: Values = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_GLM_VISION: Values = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "image_size": 28,
}
_ERNIE_VISION: Values = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
_RADIO: Values = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "max_img_size": 32,
        "video_temporal_patch_size": 2,
    },
    "vision_hidden_size": 16,
    "projector_hidden_size": 16,
}
MULTIMODAL: dict[str, Multimodal] = {
    "gemma4": Multimodal(
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "global_head_dim": 8,
                "position_embedding_size": 16,
            },
            "audio_config": None,
        }
    ),
    "aria": Multimodal(
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            }
        }
    ),
    "deepseek_ocr2": Multimodal(
        {
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 64,
                    "mlp_dim": 16,
                    "output_channels": 8,
                    "global_attn_indexes": [0],
                    "downsample_channels": [8, 16],
                },
                "encoder_config": {
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                },
            }
        }
    ),
    "ernie4_5_vl_moe": Multimodal({"vision_config": _ERNIE_VISION}),
    "ernie4_5_moe_vl": Multimodal({"vision_config": _ERNIE_VISION}),
    "glm4v_moe": Multimodal({"vision_config": _GLM_VISION}),
    "kimi_k25": Multimodal(
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 16,
        }
    ),
    "llama4": Multimodal(
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "cohere2_vision": Multimodal(
        {
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "alignment_intermediate_size": 32,
        },
    ),
    "mistral3": Multimodal(
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "nemotron_h_omni": Multimodal(_RADIO),
    "NemotronH_Nano_Omni_Reasoning_V3": Multimodal(_RADIO),
    **{
        family: Multimodal(
            {"vision_config": {key: _QWEN_VISION[key] for key in _QWEN_VISION if key != "deepstack_visual_indexes"}}
        )
        for family in ("qwen3_5_moe", "qwen4_exp")
    },
    "qwen3_omni_moe": Multimodal(
        {"enable_audio_output": False},
        ("thinker_config", "text_config"),
        {
            "vision_config": _QWEN_VISION | {"image_size": 64},
            "audio_config": {
                "d_model": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "output_dim": 64,
                "num_mel_bins": 16,
                "downsample_hidden_size": 8,
            },
        },
    ),
    "minimax_m3_vl": Multimodal(
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 16,
            },
            "projector_hidden_size": 32,
            "image_token_index": 90,
            "video_token_index": 91,
        }
    ),
    "qwen3_vl_moe": Multimodal({"vision_config": _QWEN_VISION}),
    "step3p7": Multimodal(
        {
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "mlp_ratio": 1.0,
                "max_position_embeddings": 16,
            }
        }
    ),
}
# The beginnings of the names of other parts' tensors in transformers' multimodal models.
OTHER_PARTS = (
    "model.embed_vision",
    "model.visual",
    "model.vision_tower",
    "model.resampler_model",
    "model.multi_modal_projector",
    "model.mm_projector",
    "model.vision_model",
    "vit_large_projector",
    "vision_model",
    "multi_modal_projector",
    "vision_final_layernorm",
    "audio_tower",
    "embed_audio",
    "model.view_separator",
    "thinker.model.visual",
    "thinker.model.audio_tower",
    "talker",
    "code2wav",
)
