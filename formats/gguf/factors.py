"""Factors of rotary positions: a GGUF tensor with a divisor for the frequency of each pair.

Metadata has no keys for scaling by bands, nor for pairs that do not rotate: both are found again in the factors.
Source: llama.cpp, conversion/llama.py and conversion/gemma.py.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ModelSpec, parts
from moe_pack.formats.gguf.architecture import Values
from moe_pack.formats.gguf.header import Metadata
from moe_pack.formats.parts import positions

STILL = 1e30  # of pairs that are not rotated


def rope_factors(spec: ModelSpec) -> NDArray[np.float32] | None:
    """Returns the factors of a model, float32 [pairs of a head]; None if its metadata is enough."""
    for attention, rope in spec.attention_kinds:
        if rope is not None and isinstance(rope.scaling, positions.Llama3Spec | positions.ProportionalSpec):
            assert isinstance(attention, parts.GroupedQuerySpec), "rotary positions of heads"
            return _factors(rope, attention.head_dim // 2)
    return None


def _factors(rope: parts.RopeSpec, count: int) -> NDArray[np.float32]:
    scaling = rope.scaling
    found = np.ones(count)  # 1: behind the last pair with a frequency
    if isinstance(scaling, positions.ProportionalSpec):
        found[: scaling.rotated_pairs], found[scaling.rotated_pairs :] = scaling.factor, STILL
        return found.astype(np.float32)
    assert isinstance(scaling, positions.Llama3Spec), "a scaling by bands"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * _frequencies(rope.theta, rope.rotary_dim) / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low  # of the frequency as it is
    found[: len(turns)] = 1 / ((1 - share) / scaling.factor + share)
    return found.astype(np.float32)


def with_bands(m: Metadata, rotary_dim: int) -> Values:
    """Returns the scaling by bands as `bands`, of an architecture with optional factors."""
    found = bands(m.factors, m.number("rope.freq_base", 10000.0), rotary_dim)
    return {"rope_scaling": found} if found else {}


def bands(factors: Sequence[float], theta: float, rotary_dim: int) -> Values:
    """Returns the scaling by bands with these factors, in the keys of `config.json`; empty if there is none.

    The lower bound is one turn in the original context, as in all published models.
    """
    if not factors or max(factors) <= 1:
        return {}
    own, frequencies = np.array(factors[: rotary_dim // 2]), _frequencies(theta, rotary_dim)
    factor = float(own.max())
    is_mixed = (own > 1) & (own < factor)
    if is_mixed.sum() < 2 or len(own) != len(frequencies):
        return {}
    share = (1 / own - 1 / factor) / (1 - 1 / factor)
    # A straight line: share = (turns - 1) / (high - 1), and turns are context * frequency / (2 pi).
    slope, start = (float(each) for each in np.polyfit(frequencies[is_mixed], share[is_mixed], 1))
    high = round(1 - 1 / start, 3)
    context = round(slope * (high - 1) * 2 * math.pi)
    if not 1 < high < 1e6 or not 0 < context < 2**31:
        return {}
    rope = parts.RopeSpec(
        theta, rotary_dim, interleaved=False, scaling=positions.Llama3Spec("llama3", factor, 1.0, high, context)
    )
    if not np.allclose(_factors(rope, len(factors)), factors, rtol=1e-5, atol=0):
        return {}
    found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    return found | {"original_max_position_embeddings": context}


def _frequencies(theta: float, rotary_dim: int) -> NDArray[np.float64]:
    powers: NDArray[np.float64] = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    return powers
