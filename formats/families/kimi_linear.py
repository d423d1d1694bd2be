"""Kimi-Linear-48B-A3B: Kimi delta attention (a decay for each key), latent attention without positions, sigmoid routing
with a bias.

Source: transformers, models/kimi_linear; Kimi Linear (2510.26692).
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers
from moe_pack.formats.parts import KimiDeltaSpec


def _linear_layers(config: family.Config, group: family.Config | None) -> tuple[int, ...]:
    """Reads the layers with Kimi delta attention: of the published config's group, of `layer_types`, or the usual."""
    num_layers = config.num_layers()
    if config.has("layer_types"):
        return readers.layers_without_attention(config, {"linear_attention": True, "full_attention": False})
    if group is None or not (group.has("kda_layers") and group.has("full_attn_layers")):
        return tuple(i for i in range(num_layers) if not i or i % 4)
    # Layers beyond the last are left out, so that the first layers alone can be read.
    linear, full = ([i for i in group.counts(key) if i <= num_layers] for key in ("kda_layers", "full_attn_layers"))
    if sorted((*linear, *full)) != list(range(1, num_layers + 1)):
        raise formats.CheckpointError(
            f"{group.place}: kda_layers and full_attn_layers must list each of the layers 1 to {num_layers} once"
        )
    return tuple(sorted(i - 1 for i in linear))


def _read_mixer(config: family.Config) -> KimiDeltaSpec:
    group = config.group("linear_attn_config")

    def size(inside: str, key: str, default: int) -> int:
        outside = config.whole(key, default)
        return outside if group is None else group.whole(inside, outside)

    mixer = KimiDeltaSpec(
        kind="kimi_delta_attention",
        layers=_linear_layers(config, group),
        num_heads=size("num_heads", "linear_num_heads", 32),
        head_dim=size("head_dim", "linear_head_dim", 128),
        conv_kernel=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )
    if group is not None:
        group.ignore("kda_layers", "full_attn_layers")
        group.refuse_unread()
    return mixer


def _moe_layers(config: family.Config) -> tuple[int, ...]:
    kinds, num_layers = config.texts("mlp_layer_types"), config.num_layers()
    if not kinds:
        return readers.layers_after_dense(config, default=1)
    config.ignore("first_k_dense_replace")
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise formats.CheckpointError(
            f"{config.place}: mlp_layer_types must list {num_layers} layers, each dense or sparse"
        )
    return readers.layers_of(kinds, "sparse")


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.derive("max_position_embeddings", config.whole(config.either("model_max_length", "max_position_embeddings")))
    # Written in the published config, read by no code of transformers.
    config.only(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1, use_grouped_topk=True)
    config.only(rope_scaling=None)
    config.require("num_key_value_heads")  # missing, transformers takes 32
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either("num_experts", "num_local_experts")),
        config.whole(config.either("num_experts_per_token", "num_experts_per_tok"), 8),
        config.flag(config.either("moe_renormalize", "norm_topk_prob"), True),
        bias=True,
        n_group=config.whole(config.either("num_expert_group", "n_group"), 1),
        topk_group=config.whole("topk_group", 1),
        scaling_factor=config.number("routed_scaling_factor", 2.446),
    )
    expert_size = config.whole("moe_intermediate_size")
    num_shared = config.whole(config.either("num_shared_experts", "n_shared_experts"), 1)
    config.only(tie_word_embeddings=False)  # the class ties nothing, whatever the key says
    spec = readers.read_decoder(
        config,
        readers.read_latent(config, reads_head_dim=False),  # transformers replaces it
        None,
        router,
        expert_size,
        moe_layers=_moe_layers(config),
        shared_expert=formats.SharedExpertSpec(expert_size * num_shared, gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    return replace(spec, mixer=_read_mixer(config))


KIMI_LINEAR = family.Family(
    model_type="kimi_linear",
    short_names={
        "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "kimi-linear-48b-a3b-base": "moonshotai/Kimi-Linear-48B-A3B-Base",
        "kimi-linear-48b-a3b-instruct": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    },
    published=(family.Published("kimi-linear-48b-a3b-instruct", "48", "3", total_leaves_out=("embed", "head")),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        **readers.LATENT_NAMES,
        ".mixer.{q,k,v}": "self_attn.{}_proj.weight",
        ".mixer.{q,k,v}_conv": "self_attn.{}_conv1d.weight",
        ".mixer.b": "self_attn.b_proj.weight",
        ".mixer.decay_a": "self_attn.f_a_proj.weight",
        ".mixer.decay_b": "self_attn.f_b_proj.weight",
        ".mixer.a_log": "self_attn.A_log",
        ".mixer.dt_bias": "self_attn.dt_bias",
        ".mixer.gate_a": "self_attn.g_a_proj.weight",
        ".mixer.gate_b": "self_attn.g_b_proj.weight",
        ".mixer.out_norm": "self_attn.o_norm.weight",
        ".mixer.o": "self_attn.o_proj.weight",
        ".mlp.{gate,up,down}": ("mlp.{}_proj.weight", "block_sparse_moe.{}_proj.weight"),
        ".router": "block_sparse_moe.gate.weight",
        ".router_bias": "block_sparse_moe.gate.e_score_correction_bias",
        ".shared.{gate,up,down}": "block_sparse_moe.shared_experts.{}_proj.weight",
    },
    expert_names=(
        family.ExpertNames(family.matrices("model.layers.{i}.block_sparse_moe.experts.{e}.*.weight", "w1", "w3", "w2")),
    ),
    ignored_keys=frozenset({"pretraining_tp", "num_nextn_predict_layers", "rope_theta"}),
)
