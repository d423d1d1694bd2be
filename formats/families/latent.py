"""Multi-head latent attention as DeepSeek's configs and checkpoints spell it. Source: DeepSeek-V2 (2405.04434)."""

from collections.abc import Mapping

from moe_pack.formats.families.config import Config
from moe_pack.formats.families.rope import yarn_scale
from moe_pack.formats.spec import LatentSpec

LATENT_NAMES: Mapping[str, str] = {
    "layers.{i}.attention.q_a": "model.layers.{i}.self_attn.q_a_proj.weight",
    "layers.{i}.attention.q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "layers.{i}.attention.q_b": "model.layers.{i}.self_attn.q_b_proj.weight",
    "layers.{i}.attention.kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{i}.attention.kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "layers.{i}.attention.kv_b": "model.layers.{i}.self_attn.kv_b_proj.weight",
}


def read_latent(config: Config) -> LatentSpec:
    """Latent attention, its scale with what yarn's `mscale_all_dim` says."""
    config.only("attention_bias", False)
    nope, rope, num_heads = (
        config.whole(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads")
    )
    config.only("num_key_value_heads", num_heads)
    config.only("qk_head_dim", nope + rope)
    config.only("head_dim", rope)
    config.require("q_lora_rank")  # null says that queries have no latent; missing, transformers takes 1536
    return LatentSpec(
        kind="latent",
        num_heads=num_heads,
        q_lora_rank=config.whole("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.whole("v_head_dim"),
        scale=(nope + rope) ** -0.5 * yarn_scale(config),
        lora_norm_eps=1e-6,  # whatever rms_norm_eps says
    )
