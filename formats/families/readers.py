"""Readers for the keys of `config.json` that many families share; a family's file reads the keys of its own.

They read the `ModelSpec` of nearly all decoder-only families, grouped-query attention, routers, layers with experts,
attention that differs by layer, and multi-head latent attention in DeepSeek's configs (DeepSeek-V2, 2405.04434).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, rotary
from moe_pack.formats.parts.specs import LimitSpec

# The names of tensors that most families share; roles are those of `dense_roles`.
DENSE_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    ".attention_norm": "input_layernorm.weight",
    ".attention.{q,k,v,o}": "self_attn.{}_proj.weight",
    ".attention.{q,k,v,o}_bias": "self_attn.{}_proj.bias",
    ".attention.q_norm": "self_attn.q_norm.weight",
    ".attention.k_norm": "self_attn.k_norm.weight",
    ".mlp_norm": "post_attention_layernorm.weight",
    ".mlp.{gate,up,down}": "mlp.{}_proj.weight",
    ".router": "mlp.gate.weight",
    ".router_bias": "mlp.gate.e_score_correction_bias",
    ".shared.{gate,up,down}": "mlp.shared_experts.{}_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention and rotary positions of most layers, and those of the others, as in `ModelSpec`."""

    attention: parts.GroupedQuerySpec
    rope: parts.RopeSpec | None
    others: tuple[parts.OtherAttentionSpec, ...] = ()

    @classmethod
    def of(cls, layers: Iterable[tuple[parts.GroupedQuerySpec, parts.RopeSpec | None]]) -> "LayerAttention":
        """Returns the attention of a model by that of each of its layers; the windows of layers are their own.

        If layers differ only in whether they have a window, there are no others.
        """
        each = list(layers)
        windows = {attention.sliding_window for attention, _ in each} - {None}
        alike = {(replace(attention, sliding_window=None), rope) for attention, rope in each}
        if len(alike) == 1 and len(windows) == 1:
            ((attention, rope),), (window,) = alike, windows
            windowed = tuple(i for i, (own, _) in enumerate(each) if own.sliding_window is not None)
            among = None if len(windowed) == len(each) else windowed
            return cls(replace(attention, sliding_window=window, windowed_layers=among), rope, ())
        (most, *rest) = [kind for kind, _ in Counter(each).most_common()]
        others = (
            parts.OtherAttentionSpec(tuple(i for i, own in enumerate(each) if own == kind), *kind) for kind in rest
        )
        return cls(*most, tuple(others))


# A layer after the last layer of the decoder, recognized by a tensor that no decoder layer has.
PREDICTION_LAYER = family.LeftOut(
    "model.layers.{n}.*",
    "a multi-token-prediction layer, which plain decoding does not run",
    sign="model.layers.{n}.eh_proj.weight",
)
# Its names: those of DeepSeek-V3, which GLM-4.5 has too. Source: DeepSeek-V3's README_WEIGHTS.md, which says that
# embedding and head are the model's own.
PREDICTION_NAMES = family.PredictionNames(
    stack="model.layers.{i}.",
    layer="model.layers.{n}.",
    project="model.layers.{n}.eh_proj.weight",
    embed_norm="model.layers.{n}.enorm.weight",
    hidden_norm="model.layers.{n}.hnorm.weight",
    norm="model.layers.{n}.shared_head.norm.weight",
    embed="model.layers.{n}.embed_tokens.weight",
    head="model.layers.{n}.shared_head.head.weight",
)


def read_decoder(
    config: family.Config,
    attention: parts.AttentionSpec,
    rope: parts.RopeSpec | None,
    router: formats.RouterSpec,
    intermediate_size: int,
    *,
    moe_layers: tuple[int, ...] | None = None,
    dense_size_key: str | None = "intermediate_size",
    shared_expert: formats.SharedExpertSpec | None = None,
    norm: formats.NormSpec | None = None,
    others: tuple[parts.OtherAttentionSpec, ...] = (),
) -> formats.ModelSpec:
    """Reads a decoder of silu-gated experts; values that are not given are read from their usual keys.

    Args:    intermediate_size: of an expert.   moe_layers: None for all.
             dense_size_key: the key of the size of layers without experts; ignored if there are none.
             norm: None for rms with `rms_norm_eps` (1e-6 if the config has none).
             others: layers whose attention is not `attention`.
    """
    config.only(hidden_act="silu")
    num_layers = config.num_layers()
    moe_layers = tuple(range(num_layers)) if moe_layers is None else moe_layers
    has_dense = len(moe_layers) < num_layers
    if dense_size_key is not None and not has_dense:
        config.ignore(dense_size_key)
    return formats.ModelSpec(
        family="",  # `read_spec` names it
        hidden_size=config.whole("hidden_size"),
        vocab_size=config.whole("vocab_size"),
        num_hidden_layers=num_layers,
        moe_layers=moe_layers,
        dense_intermediate_size=config.whole(dense_size_key) if has_dense and dense_size_key is not None else None,
        max_position_embeddings=_num_positions(config, (rope, *(each.rope for each in others))),
        norm=norm or formats.NormSpec("rms", config.number("rms_norm_eps", 1e-6)),
        tied_head=config.flag("tie_word_embeddings", False),
        head_bias=False,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention=attention,
        rope=rope,
        router=router,
        expert=formats.ExpertSpec("silu", intermediate_size, formats.MATRICES, bias=(), extra_floats=0),
        shared_expert=shared_expert,
        others=others,
    )


def _num_positions(config: family.Config, ropes: Iterable[parts.RopeSpec | None]) -> int:
    """Reads the number of positions; `max_position_embeddings` are those that dynamic scaling leaves as they are."""
    scalings = (rope.scaling for rope in ropes if rope is not None and rope.scaling is not None)
    factor = max((each.factor for each in scalings if each.kind == "dynamic"), default=1.0)
    return min(int(config.whole("max_position_embeddings") * max(factor, 1.0)), 2**31 - 1)


def read_grouped_query(
    config: family.Config,
    *,
    bias: tuple[parts.Projection, ...] = (),
    qk_norm: Literal["none", "head", "projection", "rotated_head", "unit"] = "none",
    scale: float | None = None,
    sliding_window: int | None = None,
    own_keys: bool = False,
    gated: bool = False,
) -> parts.GroupedQuerySpec:
    """Reads grouped-query attention with heads and their size under the usual keys.

    Args:    scale: None for 1 / sqrt(head_dim).
             own_keys: a missing `num_key_value_heads` means that each head has its own keys; else it is required.
    """
    num_heads = config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", max(config.whole("hidden_size") // num_heads, 1))
    return parts.GroupedQuerySpec(
        kind="grouped_query",
        num_heads=num_heads,
        num_kv_heads=config.whole("num_key_value_heads", num_heads if own_keys else None),
        head_dim=head_dim,
        sliding_window=sliding_window,
        scale=head_dim**-0.5 if scale is None else scale,
        bias=bias,
        qk_norm=qk_norm,
        gated=gated,
    )


def read_llama_attention(config: family.Config, bias: tuple[parts.Projection, ...]) -> parts.GroupedQuerySpec:
    """Reads the attention of published modeling files that derive from Llama's of transformers 4.3x.

    Heads divide the hidden size; these files never read `head_dim`.
    """
    config.only(head_dim=config.whole("hidden_size") // config.whole("num_attention_heads"))
    return read_grouped_query(config, bias=bias, own_keys=True)


def read_llama_rope(config: family.Config, head_dim: int) -> parts.RopeSpec:
    """Reads the rotary positions of such a modeling file: `rope_theta` and `rope_scaling`, not `rope_parameters`.

    No published model of these uses the scalings that the files know (linear, dynamic), which are refused.
    """
    config.only(rope_parameters=None)
    return rotary.read_rope(config, head_dim, scalings=())


def read_expert_count(config: family.Config, key: str) -> int:
    """Reads the number of experts in a family that shares its `model_type` with dense models, which lack the key."""
    if not config.has(key):
        raise dense_model(config)
    return config.whole(key)


def dense_model(config: family.Config) -> formats.CheckpointError:
    """Returns the error for a model without experts."""
    model_type = config.text("model_type")
    return formats.CheckpointError(
        f"{config.place}: {model_type!r} is a dense model without experts; there is nothing to pack"
    )


def read_sigmoid_router(
    config: family.Config,
    num_experts_per_tok: int | None,
    normalize: bool,
    experts: tuple[str, ...] = ("n_routed_experts", "num_local_experts"),
    scaling_factor: float = 1,
) -> formats.RouterSpec:
    """Reads a router of DeepSeek-V3's kind: sigmoids, a bias that corrects the choice, groups.

    Args:    experts: the keys of the number of experts.   num_experts_per_tok, normalize, scaling_factor: the family's
             defaults; None if the config must have the key.
    """
    return formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either(*experts)),
        config.whole("num_experts_per_tok", num_experts_per_tok),
        config.flag("norm_topk_prob", normalize),
        bias=True,
        n_group=config.whole("n_group", 1),
        topk_group=config.whole("topk_group", 1),
        scaling_factor=config.number("routed_scaling_factor", scaling_factor),
    )


def attention_bias(
    config: family.Config, names: tuple[parts.Projection, ...] = parts.PROJECTIONS
) -> tuple[parts.Projection, ...]:
    """Reads which projections have a bias: `names` if `attention_bias` is true, else none."""
    return names if config.flag("attention_bias", False) else ()


def layers_without_attention(config: family.Config, kinds: dict[str, bool]) -> tuple[int, ...]:
    """Reads the layers that `layer_types` gives a mixer in place of attention; the config must have the key.

    Args:    kinds: whether a layer of each known kind has a mixer.
    Raises:  CheckpointError for another number of layers, or another kind.
    """
    found = config.texts("layer_types")
    check_count(config, "layer_types", found)
    if unknown := set(found) - kinds.keys():
        known = ", ".join(sorted(kinds))
        raise formats.CheckpointError(f"{config.place}: layer_types has {sorted(unknown)}; supported: {known}")
    return tuple(i for i, kind in enumerate(found) if kinds[kind])


def check_count(config: family.Config, key: str, values: Sequence[object], more: int = 0) -> None:
    """Refuses a list with another number of values than there are layers, and `more` behind them."""
    num_layers = config.num_layers()
    if len(values) not in (num_layers, num_layers + more):
        raise formats.CheckpointError(
            f"{config.place}: {key} lists {len(values)} layers, but the model has {num_layers}"
        )


def layers_after_dense(config: family.Config, default: int) -> tuple[int, ...]:
    """Reads the MoE layers of a model whose first `first_k_dense_replace` layers have no experts."""
    return tuple(range(config.num_layers()))[config.count("first_k_dense_replace", default) :]


def read_kinds(config: family.Config, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Reads a list with the kind of each layer (`layer_types`); empty if the key is missing or null.

    Raises:  CheckpointError for another number of layers, or a kind that is not known.
    """
    kinds = config.texts(key)
    if set(kinds) - set(known):
        supported = " and ".join(map(repr, known))
        raise formats.CheckpointError(f"{config.place}: {key} has {sorted(set(kinds))}; only {supported} are supported")
    if kinds:
        check_count(config, key, kinds)
    return kinds


def attention_kinds(config: family.Config) -> tuple[str, ...]:
    """Reads for each layer whether it has a window, as `read_kinds`: `sliding_attention`, or `full_attention`."""
    return read_kinds(config, "layer_types", rotary.ATTENTION_KINDS)


def layers_of(kinds: Iterable[str], kind: str) -> tuple[int, ...]:
    """Returns the layers of a kind, by the kind of each layer."""
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def with_window(
    config: family.Config, attention: parts.GroupedQuerySpec, window: int, layers: tuple[int, ...]
) -> parts.GroupedQuerySpec:
    """Returns attention that has a window in these layers, which alone rotate; without any, attention as it is."""
    among = None if len(layers) == config.num_layers() else layers
    return (
        replace(attention, sliding_window=window, windowed_layers=among, rotated_layers=among) if layers else attention
    )


def layers_by_kind(config: family.Config, num_dense: int) -> tuple[int, ...]:
    """Reads the MoE layers of a model: those that are `sparse` by `mlp_layer_types`, else all after `num_dense`."""
    kinds = read_kinds(config, "mlp_layer_types", ("dense", "sparse"))
    return layers_of(kinds, "sparse") if kinds else tuple(range(num_dense, config.num_layers()))


def layers_after_dense_by_step(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers of a model by `mlp_layer_types`, or the older keys: every n-th after dense ones."""
    kinds = read_kinds(config, "mlp_layer_types", ("dense", "sparse"))
    if kinds:
        config.ignore("first_k_dense_replace", "moe_layer_freq")
        return layers_of(kinds, "sparse")
    first, step = config.count("first_k_dense_replace", 1), config.whole("moe_layer_freq", 1)
    return tuple(layer for layer in range(config.num_layers()) if layer >= first and layer % step == 0)


def layers_by_step(config: family.Config) -> tuple[int, ...]:
    """Reads the MoE layers of a model: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, without = config.whole("decoder_sparse_step", 1), config.counts("mlp_only_layers")
    return tuple(i for i in range(config.num_layers()) if (i + 1) % step == 0 and i not in without)


def window_if_used(config: family.Config) -> int | None:
    """Reads `sliding_window` if `use_sliding_window` is true; else ignores it. Always ignores `max_window_layers`."""
    config.ignore("sliding_window", "max_window_layers")
    return config.whole("sliding_window") if config.flag("use_sliding_window", False) else None


def limits_of(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[LimitSpec, ...]:
    """Returns the limits of neurons by those of each layer: of its routed experts, and of its shared or dense one."""
    return tuple(
        LimitSpec(tuple(i for i, own in enumerate(pairs) if own == pair), *pair)
        for pair in dict.fromkeys(pairs)
        if pair != (None, None)
    )


def refuse_mixed_layers(config: family.Config) -> None:
    """Refuses `layer_types` other than full attention everywhere."""
    kinds = set(config.texts("layer_types"))
    if kinds - {"full_attention"}:
        raise formats.CheckpointError(
            f"{config.place}: layer_types has {sorted(kinds)}; only 'full_attention' is supported"
        )


LATENT_NAMES: Mapping[str, str] = {
    ".attention.q_a": "self_attn.q_a_proj.weight",
    ".attention.q_a_norm": "self_attn.q_a_layernorm.weight",
    ".attention.q_b": "self_attn.q_b_proj.weight",
    ".attention.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    ".attention.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    ".attention.kv_b": "self_attn.kv_b_proj.weight",
}


def read_latent(
    config: family.Config,
    head_dim: int | None = None,
    *,
    reads_head_dim: bool = True,
    reads_kv_heads: bool = True,
    may_lack_rank: bool = False,
) -> parts.LatentSpec:
    """Reads latent attention; its scale includes `yarn_scale`.

    Args:    head_dim: the value of the key of this name; None for that of the rotated part.   reads_head_dim: whether
             it must be that; if not, the key means nothing.   reads_kv_heads: likewise of `num_key_value_heads`, which
             must be the number of heads.
             may_lack_rank: whether queries have no latent where `q_lora_rank` is missing.
    """
    config.only(attention_bias=False)
    nope, rope, num_heads = (
        config.whole(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads")
    )
    if reads_kv_heads:
        config.only(num_key_value_heads=num_heads)
    else:
        config.ignore("num_key_value_heads")
    config.only(qk_head_dim=nope + rope)
    if reads_head_dim:
        config.only(head_dim=rope if head_dim is None else head_dim)
    else:
        config.ignore("head_dim")
    if not may_lack_rank:
        config.require("q_lora_rank")  # null says that queries have no latent; missing, transformers takes 1536
    return parts.LatentSpec(
        kind="latent",
        num_heads=num_heads,
        q_lora_rank=config.whole("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.whole("v_head_dim"),
        scale=(nope + rope) ** -0.5 * rotary.yarn_scale(config),
        lora_norm_eps=1e-6,  # transformers does not read rms_norm_eps here
    )
