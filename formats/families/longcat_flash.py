"""LongCat-Flash: two attentions and two dense experts a layer, which are two layers here; the routed experts join the
hidden state one layer later; experts that return their input; scaled latents.

The routed experts of a layer belong to its first half, with the first dense expert. They join the hidden state at the
end of its second half.
Source: transformers, models/longcat_flash; LongCat-Flash (2509.01322).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.parts import ShortcutResidualSpec


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(attention_method="MLA", zero_expert_type="identity", mla_scale_q_lora=True, mla_scale_kv_lora=True)
    config.only(router_bias=False)  # transformers makes such a bias, and computes without it
    num_layers = 2 * config.whole("num_layers")
    config.derive("num_hidden_layers", num_layers)
    attention, d = readers.read_latent(config), config.whole("hidden_size")
    if attention.qk_rope_head_dim != 64:
        config.require("head_dim")  # missing, transformers rotates 64 values
    if attention.q_lora_rank is None:
        config.whole("q_lora_rank")  # refuses null: queries have a latent
    attention = replace(
        attention,
        q_latent_scale=(d / (attention.q_lora_rank or d)) ** 0.5,
        kv_latent_scale=(d / attention.kv_lora_rank) ** 0.5,
    )
    router = formats.RouterSpec(
        "softmax_topk",
        config.whole(config.either("n_routed_experts", "num_local_experts"), 512),
        config.whole(config.either("moe_topk", "num_experts_per_tok"), 12),
        normalize=False,
        bias=True,
        scaling_factor=config.number("routed_scaling_factor", 6.0),
        num_identity=config.count("zero_expert_num", 256),
    )
    dense_key = config.either("ffn_hidden_size", "intermediate_size")
    spec = readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.qk_rope_head_dim, default_theta=1e7, interleaved=True),
        router,
        config.whole(config.either("expert_ffn_hidden_size", "moe_intermediate_size"), 2048),
        moe_layers=tuple(range(0, num_layers, 2)),
        dense_size_key=dense_key,
        shared_expert=formats.SharedExpertSpec(config.whole(dense_key), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(spec, residual=ShortcutResidualSpec("shortcut", spec.moe_layers))


_EXPERTS = "model.layers.{pair}.mlp.experts."
_IDENTITY = "of an expert that returns its input"


def _by_halves(name: str) -> str:
    """Returns a name of `readers` with the number of the layer's half after the module's."""
    module, dot, rest = name.partition(".")
    return f"{module}{dot}{{side}}.{rest}" if dot else name


LONGCAT_FLASH = family.Family(
    model_type="longcat_flash",
    short_names={
        "longcat-flash": "meituan-longcat/LongCat-Flash-Chat",
        "longcat-flash-chat": "meituan-longcat/LongCat-Flash-Chat",
        "longcat-flash-thinking": "meituan-longcat/LongCat-Flash-Thinking",
    },
    unpublished="no public copy of the file of meituan-longcat/LongCat-Flash-Chat was found",
    read_config=_read_config,
    layer=("model.layers.{pair}.",),
    dense_names={
        **readers.DENSE_NAMES,
        **{
            role: _by_halves(name)
            for role, name in {**readers.DENSE_NAMES, **readers.LATENT_NAMES}.items()
            if role.startswith(".")
        },
        ".shared.{gate,up,down}": "mlps.0.{}_proj.weight",
        ".mlp.{gate,up,down}": "mlps.1.{}_proj.weight",
        ".router": "mlp.router.classifier.weight",
        ".router_bias": "mlp.router.e_score_correction_bias",
    },
    expert_names=(
        family.ExpertNames({matrix: f"{_EXPERTS}{{e}}.{matrix}_proj.weight" for matrix in formats.MATRICES}),
        family.ExpertNames(family.matrices(_EXPERTS + "*", "gate_up_proj", "gate_up_proj", "down_proj")),
    ),
    dropped=(
        family.LeftOut("model.layers.*.mlp.experts.*.gate_proj.weight", _IDENTITY),
        family.LeftOut("model.layers.*.mlp.experts.*.up_proj.weight", _IDENTITY),
    ),
    unused=(family.LeftOut("model.mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
)
