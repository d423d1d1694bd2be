"""Qwen3.5 and Qwen3.6 with experts, such as Qwen3.6-35B-A3B (text): as `qwen3_next`; the text model inside a config
with `text_config`, or alone.

For text, the three sections of a position are equal, so that positions are those of any rotary embedding.
Source: transformers, models/qwen3_5_moe.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, qwen3_next, readers, rotary
from moe_pack.formats.families.multimodal import within


def _read_text(config: family.Config) -> formats.ModelSpec:
    config.only(attn_output_gate=True, mamba_ssm_dtype="float32")
    experts, chosen = config.whole("num_experts"), config.whole("num_experts_per_tok")
    router = formats.RouterSpec("softmax_topk", experts, chosen, normalize=True)
    spec = qwen3_next.read_gated(config, router, ignored=rotary.MROPE_KEYS)
    return replace(spec, mixer=qwen3_next.read_gated_delta(config, interleaved=False))


NAMES = {
    **readers.DENSE_NAMES,
    **qwen3_next.GATED_DELTA_NAMES,
    ".mixer.qkv": "linear_attn.in_proj_qkv.weight",
    ".mixer.z": "linear_attn.in_proj_z.weight",
    ".mixer.b": "linear_attn.in_proj_b.weight",
    ".mixer.a": "linear_attn.in_proj_a.weight",
}
QWEN3_5_MOE_TEXT = family.Family(
    model_type="qwen3_5_moe_text",
    model_class="Qwen3_5MoeForCausalLM",
    unpublished="its models are published inside multimodal checkpoints, qwen3_5_moe",
    read_config=_read_text,
    dense_names=NAMES,
    unused=(qwen3_next.MTP_LAYER,),
    prediction=(qwen3_next.MTP_NAMES,),
    ignored_keys=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
)
QWEN3_5_MOE = replace(
    within(QWEN3_5_MOE_TEXT, "qwen3_5_moe"),
    short_names={
        "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
        "qwen3.5-122b-a10b": "Qwen/Qwen3.5-122B-A10B",
        "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
        "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    },
    published=(family.Published("qwen3.6-35b-a3b", "35", "3"),),
)
