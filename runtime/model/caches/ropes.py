"""Rotary positions: the angles of positions under each scaling, and `rotate`, which turns queries and keys by them."""

import math

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec
from moe_pack.formats.parts import RopeSpec, positions

Angles = tuple[Tensor, Tensor]  # cosine and sine, float32 [T, rotary_dim / 2] each


class Rope:
    """Rotary angles of positions; without rotary positions, none.

    Source:  transformers, modeling_rope_utils.py. There a sequence that outgrows longrope's original context keeps the
             keys that it has; here they are computed again with the long factors, as in Phi-3.5-MoE's own code.
    """

    def __init__(self, spec: RopeSpec | None, device: torch.device) -> None:
        if spec is None:
            spec = RopeSpec(theta=1.0, rotary_dim=0, interleaved=False, scaling=None)
        self._exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=device)
        self._exponents /= max(spec.rotary_dim, 1)
        powers, scaling = spec.theta**self._exponents, spec.scaling
        self._spec, self._frequencies, self._factor = spec, 1.0 / powers, 1.0
        self._limit: int | None = None  # of the length, beyond which angles depend on it
        if isinstance(scaling, positions.LinearSpec):
            self._frequencies /= scaling.factor
        elif isinstance(scaling, positions.YarnSpec):
            self._frequencies, self._factor = _yarn(powers, scaling, spec), scaling.attention_factor
        elif isinstance(scaling, positions.Llama3Spec):
            self._frequencies = _llama3(self._frequencies, scaling)
        elif isinstance(scaling, positions.ProportionalSpec):
            is_still = torch.arange(len(powers), device=device) >= scaling.rotated_pairs
            self._frequencies = self._frequencies.masked_fill(is_still, 0.0) / scaling.factor
        elif isinstance(scaling, positions.DynamicSpec):
            self._limit = scaling.original_max_position_embeddings
        elif isinstance(scaling, positions.LongRopeSpec):
            self._limit = scaling.original_max_position_embeddings
            self._frequencies, self._long = (
                1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * powers)
                for factors in (scaling.short_factor, scaling.long_factor)
            )
            self._factor = scaling.short_mscale

    def are_same(self, before: int, after: int) -> bool:
        """Returns whether two lengths of a sequence surely give its common positions the same angles."""
        if self._limit is None or max(before, after) <= self._limit:
            return True
        return isinstance(self._spec.scaling, positions.LongRopeSpec) and min(before, after) > self._limit

    def outgrows(self, before: int, after: int) -> bool:
        """Returns whether all positions must be computed again when a sequence grows from one length to another."""
        return (
            isinstance(self._spec.scaling, positions.LongRopeSpec) and before > 0 and not self.are_same(before, after)
        )

    def __call__(self, positions: Tensor, num_tokens: int) -> Angles:
        """Returns the angles at positions [T] of a sequence of `num_tokens`."""
        frequencies, factor = self._frequencies, self._factor
        if self._limit is not None and num_tokens > self._limit:
            frequencies, factor = self._beyond(torch.tensor(num_tokens))
        angles = positions.to(torch.float32)[:, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def as_last(self, num_positions: int) -> Angles:
        """Returns the angles at all positions below `num_positions`, each that of a sequence's last token."""
        every = torch.arange(num_positions, device=self._exponents.device)
        cos, sin = self(every, 0)
        if self._limit is not None and num_positions > self._limit:
            late = every[self._limit :, None]
            frequencies, factor = self._beyond(late + 1)
            angles = late.to(torch.float32) * frequencies
            cos[self._limit :], sin[self._limit :] = angles.cos() * factor, angles.sin() * factor
        return cos, sin

    def _beyond(self, lengths: Tensor) -> tuple[Tensor, float]:
        """Returns frequencies and factor in sequences of lengths, int64 [] or [T, 1], above the limit."""
        scaling, n = self._spec.scaling, self._spec.rotary_dim
        if isinstance(scaling, positions.LongRopeSpec):
            return self._long, scaling.long_mscale
        assert isinstance(scaling, positions.DynamicSpec), "a scaling that depends on the length"
        stretch = scaling.factor * lengths.double() / scaling.original_max_position_embeddings - (scaling.factor - 1)
        base = self._spec.theta * stretch ** (n / (n - 2))
        return 1.0 / base.float().to(self._exponents.device) ** self._exponents, self._factor


class LayerRopes:
    """The rotary angles of a model's kinds of attention, in the order of `ModelSpec.attention_kinds`."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._ropes = tuple(Rope(rope, device) for _, rope in spec.attention_kinds)

    def are_same(self, before: int, after: int) -> bool:
        return all(rope.are_same(before, after) for rope in self._ropes)

    def outgrows(self, before: int, after: int) -> bool:
        return any(rope.outgrows(before, after) for rope in self._ropes)

    def __call__(self, positions: Tensor, num_tokens: int) -> tuple[Angles, ...]:
        return tuple(rope(positions, num_tokens) for rope in self._ropes)

    def as_last(self, num_positions: int) -> tuple[Angles, ...]:
        return tuple(rope.as_last(num_positions) for rope in self._ropes)


def _yarn(powers: Tensor, yarn: positions.YarnSpec, spec: RopeSpec) -> Tensor:
    """Returns YaRN's frequencies: high ones stay, low ones are divided by the factor, those between are mixed."""

    def bound(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return spec.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = bound(yarn.beta_fast), bound(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(frequencies: Tensor, spec: positions.Llama3Spec) -> Tensor:
    """Returns Llama 3.1's frequencies: high ones stay, low ones are divided by the factor, those between are mixed."""
    turns = spec.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return kept * frequencies + (1 - kept) * frequencies / spec.factor


def rotate(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Returns x [heads, T, n] with its first `rotary_dim` values turned by the angles of its positions."""
    cos, sin = angles
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return both if rest.shape[-1] == 0 else torch.cat((both, rest), dim=-1)


def rotate_last(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Returns x [heads, T, n] with its last `rotary_dim` values turned by the angles of its positions."""
    first = x.shape[-1] - 2 * angles[0].shape[1]
    return torch.cat((x[..., :first], rotate(x[..., first:], angles, interleaved)), dim=-1)
