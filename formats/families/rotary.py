"""Readers of rotary positions: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5.

Nearly all families have each scaling that transformers has for all models; a family's file says if it has others.
Source: transformers, modeling_rope_utils.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families.family import Config
from moe_pack.formats.parts import positions

# `ntk_alpha` is Hunyuan's fixed alpha, `mscales` is Phi-3.5-MoE's longrope with two of them.
Scaling = Literal["linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk_alpha", "mscales"]
# Those that transformers has for all models. Source: modeling_rope_utils.py, ROPE_INIT_FUNCTIONS.
SCALINGS: tuple[Scaling, ...] = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_OWN: Mapping[Scaling, Scaling] = {"ntk_alpha": "dynamic", "mscales": "longrope"}  # under which names configs have them
ATTENTION_KINDS = ("full_attention", "sliding_attention")
# How a head's values are divided among the three numbers of a position, which are the same for text.
MROPE_KEYS = frozenset({"mrope_interleaved", "mrope_section"})


def read_rope(
    config: Config,
    head_dim: int,
    default_theta: float = 1e4,
    interleaved: bool = False,
    partial_rotary_factor: float | None = None,
    scalings: tuple[Scaling, ...] = SCALINGS,
    ignored: frozenset[str] = frozenset(),
    group: Config | None = None,
) -> parts.RopeSpec:
    """Reads the rotary positions of a model whose heads (or their rotated part) have `head_dim` values.

    Args:    default_theta, partial_rotary_factor: the family's, if the config has none. A family without a partial
             factor rotates whole heads, and refuses the key, which most of transformers' models ignore.
             scalings: those of the family, beyond none.   ignored: keys of `rope_parameters` that change nothing.
             group: the object with the rotary positions, if it is not the config's usual one.
    Raises:  CheckpointError for a scaling that we do not implement, or an unknown key of a scaling.
    """
    group = rope_group(config) if group is None else group
    theta = _agreed(config, group, "rope_theta", default_theta)
    factor = _agreed(config, group, "partial_rotary_factor", partial_rotary_factor or 1.0)
    kind = "default" if group is None else group.text(group.either("rope_type", "type"), "default")
    if partial_rotary_factor is None and factor != 1 and kind != "proportional":
        raise formats.CheckpointError(f"{config.place}: partial_rotary_factor is {factor}; only 1.0 is supported")
    if kind == "dynamic" and "ntk_alpha" in scalings and group is not None and group.number("alpha", 0):
        return parts.RopeSpec(_ntk_alpha(config, group, theta, head_dim), head_dim, interleaved, None)
    own = next((each for each in scalings if _OWN.get(each, each) == kind), None)
    if own in (None, "ntk_alpha") and kind != "default":
        names = ["dynamic with an alpha" if each == "ntk_alpha" else _OWN.get(each, each) for each in scalings]
        known = ", ".join(("default", *names))
        raise formats.CheckpointError(f"{config.place}: rope_type {kind!r} is not supported; supported: {known}")
    scaling: positions.ScalingSpec | None = None
    if group is not None and kind == "proportional":
        scaling = positions.ProportionalSpec("proportional", int(factor * head_dim // 2), group.number("factor", 1.0))
        factor = 1.0
    elif group is not None and own is not None:
        scaling = _READ[own](config, group)
    if group is not None:
        group.refuse_unread(ignored)
    return parts.RopeSpec(theta, int(head_dim * factor), interleaved, scaling)


def read_rope_by_kind(
    config: Config,
    head_dim: int | Mapping[str, int],
    defaults: Mapping[str, parts.RopeSpec],
    partial_rotary_factor: float | None = None,
    scalings: tuple[Scaling, ...] = SCALINGS,
) -> dict[str, parts.RopeSpec]:
    """Reads the rotary positions of each kind of layer, for which `rope_parameters` has an object each.

    Args:    head_dim: of all kinds, or of each.
             defaults: of each kind that layers have, for a config without `rope_parameters`.
             partial_rotary_factor, scalings: as for `read_rope`.
    Raises:  CheckpointError for a kind without an object, a scaling that we do not implement, or an unknown key.
    """
    config.only(rope_scaling=None)  # transformers does not read it in these models
    group = config.group("rope_parameters")
    if group is None:
        return dict(defaults)
    outside = Config({"max_position_embeddings": config.whole("max_position_embeddings")}, config.place)
    ropes = {}
    for kind in sorted(defaults):
        inner = group.group(kind)
        if inner is None:
            raise formats.CheckpointError(f"{group.place}: key {kind!r} is missing, expected an object")
        theta = inner.number("rope_theta")
        inner.only(truncate=True)  # transformers looks for it next to the kinds
        size = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = read_rope(outside, size, theta, False, partial_rotary_factor, scalings, group=inner)
    group.refuse_unread(frozenset(ATTENTION_KINDS))
    return ropes


def _ntk_alpha(config: Config, group: Config, theta: float, head_dim: int) -> float:
    """Returns the base of positions that a fixed alpha stretches; the keys of yarn and of `dynamic` change nothing.

    Source: transformers, models/hunyuan_v1_moe, compute_ntk_alpha_rope_parameters.
    """
    alpha = group.number("alpha")
    if not 1 <= alpha < 1e6 or head_dim <= 2:
        raise formats.CheckpointError(
            f"{group.place}: alpha is {alpha}, expected 1 to 1e6, with heads of more than two values"
        )
    group.refuse_unread(frozenset({"beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"}))
    return float(theta * alpha ** (head_dim / (head_dim - 2)))


def yarn_scale(config: Config) -> float:
    """Returns the factor on the scale of attention: from yarn's `mscale_all_dim` if it has one, else 1.

    Source: DeepSeek-V2's modeling code, softmax_scale.
    """
    group = rope_group(config)
    if group is None or not group.number("mscale_all_dim", 0):
        return 1.0
    return _mscale(group.number("factor"), group.number("mscale_all_dim")) ** 2


def rope_group(config: Config) -> Config | None:
    """Returns the object with the rotary positions, of which each call has an account of its own; None without one."""
    return config.group(config.either("rope_parameters", "rope_scaling"))


def _agreed(config: Config, group: Config | None, key: str, default: float) -> float:
    """Reads a number that may be in the group, next to it, or in both with the same value."""
    if group is None or not group.has(key):
        return config.number(key, default)
    value = group.number(key)
    config.only(**{key: value})
    return value


def _written_positions(config: Config) -> int:
    return config.whole(config.either("max_position_embeddings", "model_max_length"))


def _original(config: Config, group: Config) -> int:
    """Reads the context of the first training: in the group, next to it, or all positions."""
    key = "original_max_position_embeddings"
    if not group.has(key):
        return config.whole(key, _written_positions(config))
    value = group.whole(key)
    config.only(**{key: value})
    return value


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: Config, group: Config) -> positions.YarnSpec:
    group.require("factor")
    original = _original(config, group)
    factor, mscale = _factor(config, group, original), group.number("mscale", 0)
    all_dim = group.number("mscale_all_dim", 0)
    is_consistent = bool(mscale) == bool(all_dim) or (mscale, all_dim) == (1, 0)
    if not is_consistent or not 0 <= mscale < 1e6 or not 0 <= all_dim < 1e6:
        # With only one of them, DeepSeek's code and transformers' use different factors.
        raise formats.CheckpointError(
            f"{group.place}: mscale is {mscale} and mscale_all_dim is {all_dim}; both must be above 0, or neither"
        )
    natural = _mscale(factor, mscale) / _mscale(factor, all_dim) if all_dim else None
    return positions.YarnSpec(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=group.number("beta_fast", 32),
        beta_slow=group.number("beta_slow", 1),
        attention_factor=group.number("attention_factor", natural or _mscale(factor, 1)),
        truncate=group.flag("truncate", True),
    )


def _factor(config: Config, group: Config, original: int) -> float:
    """Reads how much longer the context is than the original one; null says that the config has both."""
    return group.number("factor") if group.has("factor") else _written_positions(config) / original


def _longrope(config: Config, group: Config) -> positions.LongRopeSpec:
    original = _original(config, group)
    factor = _factor(config, group, original)
    if factor > 1 and original == 1:
        raise formats.CheckpointError(f"{group.place}: original_max_position_embeddings is 1, expected more")
    natural = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale = group.number("attention_factor", natural)
    short, long = group.numbers("short_factor"), group.numbers("long_factor")
    return positions.LongRopeSpec("longrope", original, short, long, short_mscale=mscale, long_mscale=mscale)


def _longrope_with_mscales(config: Config, group: Config) -> positions.LongRopeSpec:
    original, factors = _original(config, group), (group.numbers("short_factor"), group.numbers("long_factor"))
    return positions.LongRopeSpec(
        "longrope", original, *factors, group.number("short_mscale"), group.number("long_mscale")
    )


def _llama3(config: Config, group: Config) -> positions.Llama3Spec:
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    return positions.Llama3Spec("llama3", group.number("factor"), low, high, _original(config, group))


def _dynamic(config: Config, group: Config) -> positions.DynamicSpec:
    group.ignore("original_max_position_embeddings")  # transformers 4 accepted it, and no version reads it
    return positions.DynamicSpec("dynamic", group.number("factor"), _written_positions(config))


_READ: Mapping[Scaling, Callable[[Config, Config], positions.ScalingSpec]] = {
    "linear": lambda config, group: positions.LinearSpec("linear", group.number("factor")),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "mscales": _longrope_with_mscales,
    "llama3": _llama3,
}
