"""Rotary positions, and how they are scaled for longer contexts, as data."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe_pack.formats.parts import part


class Scaling(part.Part, ABC):
    """How rotary positions are scaled."""

    __slots__ = ()

    @property
    def is_by_length(self) -> bool:
        """Whether the angle of a position depends on the length of the sequence."""
        return False

    @abstractmethod
    def fault(self, rotary_dim: int) -> str | None:
        """Returns why so many values of a head cannot rotate with this scaling, or None."""

    def gguf_values(self, is_latent: bool) -> dict[str, Any]:
        """Returns its keys in the metadata of GGUF files. The scale of latent attention has YaRN's factor itself."""
        return {}


@dataclass(frozen=True, slots=True)
class LinearSpec(Scaling):
    """All frequencies are divided by a factor.

    Source: transformers, modeling_rope_utils.py, _compute_linear_scaling_rope_parameters.
    """

    kind: Literal["linear"]
    factor: float

    def fault(self, rotary_dim: int) -> str | None:
        return part.numbers_fault({"linear factor": self.factor})

    def gguf_values(self, is_latent: bool) -> dict[str, Any]:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": self.factor}


@dataclass(frozen=True, slots=True)
class DynamicSpec(Scaling):
    """The base grows with the length of a sequence that is longer than the original context.

    Tokens that are given together have the base of the sequence's length with all of them; keys of earlier tokens stay.
    Source: transformers, modeling_rope_utils.py, _compute_dynamic_ntk_parameters and dynamic_rope_update.
    """

    kind: Literal["dynamic"]
    factor: float
    original_max_position_embeddings: int  # the original context

    @property
    def is_by_length(self) -> bool:
        return True

    def fault(self, rotary_dim: int) -> str | None:
        if not 1 <= self.factor < 1e6:
            return f"dynamic factor is {self.factor}, expected 1 to 1e6"
        return None if rotary_dim > 2 else f"dynamic scaling needs a rotary_dim above 2, found {rotary_dim}"


@dataclass(frozen=True, slots=True)
class YarnSpec(Scaling):
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

    def fault(self, rotary_dim: int) -> str | None:
        if not 1 <= self.factor < 1e6 or not 0 < self.attention_factor < 1e6:
            return f"yarn factor {self.factor} or attention_factor {self.attention_factor} is out of range"
        slow, fast = self.beta_slow, self.beta_fast
        if not 0 < slow <= fast < 1e6:
            return f"yarn beta_slow {slow} and beta_fast {fast} must satisfy 0 < beta_slow <= beta_fast"
        return None

    def gguf_values(self, is_latent: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.factor,
            "rope.scaling.original_context_length": self.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": self.beta_fast,
            "rope.scaling.yarn_beta_slow": self.beta_slow,
        }
        usual = 0.1 * math.log(self.factor) + 1
        if not is_latent and not math.isclose(self.attention_factor, usual, rel_tol=1e-6):
            # llama.cpp's converter writes the first, and llama.cpp multiplies its own factor by the second.
            values["rope.scaling.yarn_attn_factor"] = self.attention_factor
            values["rope.scaling.attn_factor"] = self.attention_factor / usual
        return values


@dataclass(frozen=True, slots=True)
class LongRopeSpec(Scaling):
    """Each frequency has a divisor of its own, and another one in sequences longer than the original context.

    Source: LongRoPE (2402.13753).
    """

    kind: Literal["longrope"]
    original_max_position_embeddings: int  # in longer sequences the long values count at every position
    short_factor: tuple[float, ...]  # the divisors
    long_factor: tuple[float, ...]
    short_mscale: float  # multiplies cosine and sine
    long_mscale: float

    @property
    def is_by_length(self) -> bool:
        return True

    def fault(self, rotary_dim: int) -> str | None:
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != rotary_dim // 2 or not all(0 < factor < 1e6 for factor in factors):
                return f"longrope {name} must be {rotary_dim // 2} numbers between 0 and 1e6"
        if not 0 < self.short_mscale < 1e6 or not 0 < self.long_mscale < 1e6:
            return f"longrope short_mscale {self.short_mscale} or long_mscale {self.long_mscale} is out of range"
        return None


@dataclass(frozen=True, slots=True)
class Llama3Spec(Scaling):
    """Low frequencies are divided by a factor, as with yarn, but the bounds are turns, not pairs.

    Source: transformers, modeling_rope_utils.py, _compute_llama3_parameters.
    """

    kind: Literal["llama3"]
    factor: float
    low_freq_factor: float  # frequencies of fewer turns in the original context are divided by `factor`
    high_freq_factor: float  # frequencies of more turns stay
    original_max_position_embeddings: int  # the original context

    def fault(self, rotary_dim: int) -> str | None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 1 <= self.factor < 1e6 or not 0 < low <= high < 1e6:
            return f"llama3 factor {self.factor}, low_freq_factor {low} or high_freq_factor {high} is out of range"
        return None


@dataclass(frozen=True, slots=True)
class ProportionalSpec(Scaling):
    """Only some pairs are rotated; all frequencies are divided by a factor.

    Unlike with a smaller `rotary_dim`, pairs and frequencies are those of a head that rotates as a whole.
    Source: transformers, modeling_rope_utils.py, _compute_proportional_rope_parameters; models/gemma4.
    """

    kind: Literal["proportional"]
    rotated_pairs: int  # the first pairs
    factor: float

    def fault(self, rotary_dim: int) -> str | None:
        if not 0 < self.rotated_pairs <= rotary_dim // 2 or not 0 < self.factor < 1e6:
            return (
                f"proportional rotated_pairs is {self.rotated_pairs} and factor is {self.factor}, expected "
                f"1 to {rotary_dim // 2}, and between 0 and 1e6"
            )
        return None


ScalingSpec = LinearSpec | DynamicSpec | YarnSpec | LongRopeSpec | Llama3Spec | ProportionalSpec


@dataclass(frozen=True, slots=True)
class RopeSpec(part.Part):
    """Rotary position embedding of the first values of a head."""

    theta: float  # the base
    rotary_dim: int  # values that are rotated; the others stay
    interleaved: bool  # value `2 j` is rotated with `2 j + 1`; else `j` with `j + rotary_dim / 2`
    scaling: ScalingSpec | None

    @property
    def is_by_length(self) -> bool:
        """Whether the angle of a position depends on the length of the sequence."""
        return self.scaling is not None and self.scaling.is_by_length

    def width_fault(self, width: int) -> str | None:
        """Returns why heads of so many values cannot rotate so, or None."""
        if self.rotary_dim % 2 or self.rotary_dim > width:
            return f"rotary_dim is {self.rotary_dim}, expected an even number up to {width}"
        return None

    def fault(self) -> str | None:
        """Returns why positions cannot rotate so, whatever the heads, or None."""
        if not 1 < self.theta < 1e12:
            return f"rope theta is {self.theta}, expected between 1 and 1e12"
        if self.scaling is None:
            return None
        # Those by length or by bands have an original context.
        key = "original_max_position_embeddings"
        fault = part.sizes_fault({key: getattr(self.scaling, key, 1)})
        return fault or self.scaling.fault(self.rotary_dim)

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if self.scaling is not None:
            yield from self.scaling.lacks(runner)
