"""Rotary positions, and how they are scaled for longer contexts, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """All frequencies are divided by a factor.

    Source: transformers, modeling_rope_utils.py, _compute_linear_scaling_rope_parameters.
    """

    kind: Literal["linear"]
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicSpec:
    """The base grows with the length of a sequence that is longer than the original context.

    Tokens that are given together have the base of the sequence's length with all of them; keys of earlier tokens stay.
    Source: transformers, modeling_rope_utils.py, _compute_dynamic_ntk_parameters and dynamic_rope_update.
    """

    kind: Literal["dynamic"]
    factor: float
    original_max_position_embeddings: int  # the original context


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """Low frequencies are divided by a factor, high ones stay, and those between two bounds are mixed.

    Source: YaRN (2309.00071), section 3.2.
    """

    kind: Literal["yarn"]
    factor: float
    original_max_position_embeddings: int  # the original context
    beta_fast: float  # frequencies of more turns in the original context stay
    beta_slow: float  # frequencies of fewer turns are divided by `factor`
    attention_factor: float  # multiplies cosine and sine
    truncate: bool  # the two bounds are rounded outwards to whole dimensions


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """Each frequency has a divisor of its own, and another one in sequences longer than the original context.

    Source: LongRoPE (2402.13753).
    """

    kind: Literal["longrope"]
    original_max_position_embeddings: int  # in longer sequences the long values count at every position
    short_factor: tuple[float, ...]  # the divisors
    long_factor: tuple[float, ...]
    short_mscale: float  # multiplies cosine and sine
    long_mscale: float


@dataclass(frozen=True, slots=True)
class Llama3Spec:
    """Low frequencies are divided by a factor, as with yarn, but the bounds are turns, not pairs.

    Source: transformers, modeling_rope_utils.py, _compute_llama3_parameters.
    """

    kind: Literal["llama3"]
    factor: float
    low_freq_factor: float  # frequencies of fewer turns in the original context are divided by `factor`
    high_freq_factor: float  # frequencies of more turns stay
    original_max_position_embeddings: int  # the original context


@dataclass(frozen=True, slots=True)
class ProportionalSpec:
    """Only some pairs are rotated; all frequencies are divided by a factor.

    Unlike with a smaller `rotary_dim`, pairs and frequencies are those of a head that rotates as a whole.
    Source: transformers, modeling_rope_utils.py, _compute_proportional_rope_parameters; models/gemma4.
    """

    kind: Literal["proportional"]
    rotated_pairs: int  # the first pairs
    factor: float


ScalingSpec = LinearSpec | DynamicSpec | YarnSpec | LongRopeSpec | Llama3Spec | ProportionalSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first values of a head."""

    theta: float  # the base
    rotary_dim: int  # values that are rotated; the others stay
    interleaved: bool  # value `2 j` is rotated with `2 j + 1`; else `j` with `j + rotary_dim / 2`
    scaling: ScalingSpec | None


def is_by_length(rope: RopeSpec) -> bool:
    """Returns whether the angle of a position depends on the length of the sequence."""
    return isinstance(rope.scaling, DynamicSpec | LongRopeSpec)


def scaling_fault(rope: RopeSpec) -> str | None:
    """Returns why positions cannot be scaled in this way, or None."""
    if isinstance(rope.scaling, LinearSpec):
        factor = rope.scaling.factor
        return None if 0 < factor < 1e6 else f"linear factor is {factor}, expected between 0 and 1e6"
    if isinstance(rope.scaling, DynamicSpec):
        return _dynamic_fault(rope.scaling, rope.rotary_dim)
    if isinstance(rope.scaling, YarnSpec):
        return _yarn_fault(rope.scaling)
    if isinstance(rope.scaling, LongRopeSpec):
        return _longrope_fault(rope.scaling, rope.rotary_dim)
    if isinstance(rope.scaling, ProportionalSpec):
        return _proportional_fault(rope.scaling, rope.rotary_dim)
    return _llama3_fault(rope.scaling) if isinstance(rope.scaling, Llama3Spec) else None


def _dynamic_fault(dynamic: DynamicSpec, rotary_dim: int) -> str | None:
    if not 0 < dynamic.original_max_position_embeddings < 2**31:
        return f"original_max_position_embeddings is {dynamic.original_max_position_embeddings}, expected 1 to 2^31 - 1"
    if not 1 <= dynamic.factor < 1e6:
        return f"dynamic factor is {dynamic.factor}, expected 1 to 1e6"
    return None if rotary_dim > 2 else f"dynamic scaling needs a rotary_dim above 2, found {rotary_dim}"


def _proportional_fault(proportional: ProportionalSpec, rotary_dim: int) -> str | None:
    if not 0 < proportional.rotated_pairs <= rotary_dim // 2 or not 0 < proportional.factor < 1e6:
        return (
            f"proportional rotated_pairs is {proportional.rotated_pairs} and factor is {proportional.factor}, expected "
            f"1 to {rotary_dim // 2}, and between 0 and 1e6"
        )
    return None


def _llama3_fault(llama3: Llama3Spec) -> str | None:
    if not 0 < llama3.original_max_position_embeddings < 2**31:
        return f"original_max_position_embeddings is {llama3.original_max_position_embeddings}, expected 1 to 2^31 - 1"
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    if not 1 <= llama3.factor < 1e6 or not 0 < low <= high < 1e6:
        return f"llama3 factor {llama3.factor}, low_freq_factor {low} or high_freq_factor {high} is out of range"
    return None


def _yarn_fault(yarn: YarnSpec) -> str | None:
    if not 0 < yarn.original_max_position_embeddings < 2**31:
        return f"original_max_position_embeddings is {yarn.original_max_position_embeddings}, expected 1 to 2^31 - 1"
    if not 1 <= yarn.factor < 1e6 or not 0 < yarn.attention_factor < 1e6:
        return f"yarn factor {yarn.factor} or attention_factor {yarn.attention_factor} is out of range"
    if not 0 < yarn.beta_slow <= yarn.beta_fast < 1e6:
        return f"yarn beta_slow {yarn.beta_slow} and beta_fast {yarn.beta_fast} must satisfy 0 < beta_slow <= beta_fast"
    return None


def _longrope_fault(longrope: LongRopeSpec, rotary_dim: int) -> str | None:
    if not 0 < longrope.original_max_position_embeddings < 2**31:
        return (
            f"original_max_position_embeddings is {longrope.original_max_position_embeddings}, expected 1 to 2^31 - 1"
        )
    for name, factors in (("short_factor", longrope.short_factor), ("long_factor", longrope.long_factor)):
        if len(factors) != rotary_dim // 2 or not all(0 < factor < 1e6 for factor in factors):
            return f"longrope {name} must be {rotary_dim // 2} numbers between 0 and 1e6"
    if not 0 < longrope.short_mscale < 1e6 or not 0 < longrope.long_mscale < 1e6:
        return f"longrope short_mscale {longrope.short_mscale} or long_mscale {longrope.long_mscale} is out of range"
    return None
