"""Switch base-8 to base-256, large-128: encoder and decoder, experts of two matrices with ReLU, one expert a token up
to its capacity, attention by relative position.

Source: transformers, models/switch_transformers; 2101.03961.
"""

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family
from moe_pack.formats.parts.specs import EncoderSpec

_NO_LIMIT = 2**31 - 1  # of positions: beyond max_distance all have one bias


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(is_encoder_decoder=True, is_decoder=False, add_cross_attention=False, num_selected_experts=1)
    config.choice("dense_act_fn", ("relu",))
    config.only(feed_forward_proj="relu", is_gated_act=False)
    num_encoding = config.num_layers("num_layers")
    num_decoding = config.num_layers("num_decoder_layers") if config.has("num_decoder_layers") else num_encoding
    moe_layers = (
        *_sparse(config, "encoder", num_encoding),
        *(num_encoding + layer for layer in _sparse(config, "decoder", num_decoding)),
    )
    d, f, is_tied = config.whole("d_model"), config.whole("d_ff"), config.flag("tie_word_embeddings", True)
    is_all = len(moe_layers) == num_encoding + num_decoding
    return formats.ModelSpec(
        family="",  # `read_spec` names it
        hidden_size=d,
        vocab_size=config.whole("vocab_size"),
        num_hidden_layers=num_encoding + num_decoding,
        moe_layers=moe_layers,
        dense_intermediate_size=None if is_all else f,
        max_position_embeddings=_NO_LIMIT,
        norm=formats.NormSpec("rms", config.number("layer_norm_epsilon", 1e-6)),
        tied_head=is_tied,
        head_bias=False,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=d**0.5 if is_tied else 1.0,
        attention=_read_attention(config),
        rope=None,
        router=_read_router(config),
        expert=formats.ExpertSpec("relu", f, ("up", "down"), bias=(), extra_floats=0),
        shared_expert=None,
        encoder=EncoderSpec(num_encoding, config.count("decoder_start_token_id")),
    )


def _sparse(config: family.Config, stack: str, num_layers: int) -> tuple[int, ...]:
    """Reads the layers of a stack that have experts: the second of each step.

    The step follows from their number; `*_sparse_step` repeats it. As in the reference implementation, 0 of them are
    one, the second layer, and more of them than layers are none.
    """
    num_sparse = config.count(f"num_sparse_{stack}_layers", 3)
    step = num_layers // num_sparse if num_sparse else num_layers
    config.only(**{f"{stack}_sparse_step": step})
    return tuple(i for i in range(num_layers) if step == 1 or (step and i % step == 1))


def _read_attention(config: family.Config) -> parts.RelativeSpec:
    return parts.RelativeSpec(
        kind="relative",
        num_heads=config.whole("num_heads"),
        head_dim=config.whole("d_kv"),
        num_buckets=config.whole("relative_attention_num_buckets", 32),
        max_distance=config.whole("relative_attention_max_distance", 128),
        scale=1.0,
    )


def _read_router(config: family.Config) -> formats.RouterSpec:
    config.only(router_bias=False, router_dtype="float32")
    return formats.RouterSpec(
        "softmax_topk",
        config.whole("num_experts", 8),
        num_experts_per_tok=1,
        normalize=False,
        capacity=config.whole("expert_capacity", 64),
    )


def _layer(mlp: int) -> dict[str, str]:
    """Returns the names of a stack's layers; `mlp` is the place of the second half in them."""
    own, second = "block.{i}.layer.0", f"block.{{i}}.layer.{mlp}"
    return {
        "{i}.attention_norm": f"{own}.layer_norm.weight",
        **{f"{{i}}.attention.{name}": f"{own}.SelfAttention.{name}.weight" for name in parts.PROJECTIONS},
        "{i}.mlp_norm": f"{second}.layer_norm.weight",
        "{i}.mlp.up": f"{second}.mlp.wi.weight",
        "{i}.mlp.down": f"{second}.mlp.wo.weight",
        "{i}.router": f"{second}.mlp.router.classifier.weight",
    }


def _experts(layer: str) -> family.ExpertNames:
    expert = f"{layer}.mlp.experts.expert_{{e}}"
    return family.ExpertNames(family.matrices(f"{expert}.*.weight", "wi", "wo"))


_COPY = "a copy of the embedding"

SWITCH_TRANSFORMERS = family.Family(
    model_type="switch_transformers",
    short_names={
        **{f"switch-base-{n}": f"google/switch-base-{n}" for n in (8, 16, 32, 64, 128, 256)},
        "switch-large-128": "google/switch-large-128",
    },
    published=(
        family.Published("switch-base-16", "1.1", "0.223"),
        family.Published("switch-base-128", "7.4", "0.22"),
        family.Published("switch-large-128", "26", "0.74"),
    ),
    read_config=_read_config,
    dense_names={
        "embed": "shared.weight",
        **{f"encoder.{role}": f"encoder.{name}" for role, name in _layer(1).items()},
        **{f"layers.{role}": f"decoder.{name}" for role, name in _layer(2).items()},
        "layers.{i}.cross_norm": "decoder.block.{i}.layer.1.layer_norm.weight",
        **{
            f"layers.{{i}}.cross.{q}": f"decoder.block.{{i}}.layer.1.EncDecAttention.{q}.weight"
            for q in parts.PROJECTIONS
        },
        "encoder_position_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "position_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder_norm": "encoder.final_layer_norm.weight",
        "norm": "decoder.final_layer_norm.weight",
        "head": "lm_head.weight",
    },
    expert_names=(_experts("decoder.block.{i}.layer.2"),),
    encoder_expert_names=(_experts("encoder.block.{i}.layer.1"),),
    dropped=(
        family.LeftOut("encoder.embed_tokens.weight", _COPY, copy_of="shared.weight"),
        family.LeftOut("decoder.embed_tokens.weight", _COPY, copy_of="shared.weight"),
    ),
    ignored_keys=family.keys(
        """
        add_router_probs dropout_rate initializer_factor n_positions output_past router_ignore_padding_tokens
        router_jitter_noise router_type router_z_loss_coef
        """
    ),
)
