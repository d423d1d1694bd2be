"""How the halves of layers read the hidden state and how their outputs enter it, where that is not a plain sum.

    plain:  x = x + attention(norm(x));  x = x + experts(norm(x))

`ResidualSpec` is part of a `ModelSpec`; null means plain. Each kind says how many vectors of `hidden_size` a token's
hidden state has between layers (`streams`), which tensors it needs, and whether it can run. docs/model.md says
what each kind computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import part

Half = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True)
class NormedResidualSpec:
    """The outputs of the halves of a layer are normed before they are added to the hidden state.

    Source: transformers, models/afmoe, models/flex_olmo, models/axk1, models/gemma4 (apart, scaled), and models/beam
    (by depth).
    """

    kind: Literal["normed"]
    before: bool  # a half's input is normed
    after: tuple[Literal["attention", "mlp", "experts"], ...]  # halves whose output is normed; `experts`: in MoE layers
    # In layers with experts, the router, the shared expert and the routed experts get the hidden state over its rms.
    # Each multiplies it by weights of its own. The outputs of shared and routed experts are normed each.
    apart: bool
    scaled: bool  # a learned number multiplies the hidden state after each layer
    # Before the n-th sum, the hidden state is multiplied by `sqrt((n - 1) / n)` and the output by `sqrt(1 / n)`.
    by_depth: bool = added(False)

    @property
    def streams(self) -> int:
        """One: the hidden state itself."""
        return 1


@dataclass(frozen=True, slots=True)
class ShortcutResidualSpec:
    """The routed experts of some layers join the hidden state one layer later, with the second half of the next layer.

    The second stream keeps their output until then.
    Source: LongCat-Flash (2509.01322), section 2.1.2; transformers, models/longcat_flash.
    """

    kind: Literal["shortcut"]
    layers: tuple[int, ...]  # rising; no two follow each other

    @property
    def streams(self) -> int:
        """Two: the hidden state, and what waits."""
        return 2


@dataclass(frozen=True, slots=True)
class ParallelResidualSpec:
    """Both halves of a layer read the same hidden state, through one norm, and are added together.

    The second stream keeps the output of the first half until then.
    Source: transformers, models/cohere2_moe.
    """

    kind: Literal["parallel"]
    averaged: bool  # the sum of shared and routed experts is halved

    @property
    def streams(self) -> int:
        """Two: the hidden state, and what the first half adds."""
        return 2


@dataclass(frozen=True, slots=True)
class GatedNormsSpec:
    """The normed input of a half goes through gates of its own, one for each value, which come from `rank` values.

    Attention has such gates in all layers, the second half in layers with experts alone.
    Source: transformers, models/axk2, AXK2GatedRMSNorm.
    """

    kind: Literal["gated_norms"]
    rank: int  # values between the two matrices of the gates

    @property
    def streams(self) -> int:
        """One: the hidden state itself."""
        return 1


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """Several residual streams. A half reads their gated average, and its output enters each with a weight.

    Gates, for each value of each stream, come from all streams through `rank` values. There is no other norm.
    Source: transformers, models/qwen4_exp, Qwen4ExpTextGatedResidual.
    """

    kind: Literal["gated_streams"]
    streams: int
    rank: int  # values between the two matrices of the gates


@dataclass(frozen=True, slots=True)
class MixedStreamsSpec:
    """Several residual streams (hyper-connections). A half reads a weighted sum, normed, and is added to each stream.

    Weights come from all streams.
    Source: mHC (2512.24880), section 4; transformers, models/deepseek_v4 and models/hy_v4.
    """

    kind: Literal["mixed_streams"]
    streams: int
    # how often the weights that mix streams are divided by the sums of their columns, with rows in between; 0: streams
    # are not mixed
    mixing: int
    magnitude: float  # the largest weight with which an output enters a stream
    eps: float  # added to the weights of reading and mixing, and of entering where streams are not mixed

    @property
    def num_weights(self) -> int:
        """The weights of a half: to read, to enter, and to mix."""
        return self.streams * (2 + (self.streams if self.mixing else 0))


@dataclass(frozen=True, slots=True)
class FactorsSpec:
    """The factors of a sum."""

    state: float  # of the normed hidden state
    output: float  # of the output that is added to it


@dataclass(frozen=True, slots=True)
class NormedStateSpec:
    """A half's output is added to the normed hidden state that the half read, not to what was normed.

    Source: MiniMax-01 (2501.08313), section 2.2.4; transformers, models/minimax, MiniMaxDecoderLayer.
    """

    kind: Literal["normed_state"]
    attention: FactorsSpec  # of first halves with attention
    mixer: FactorsSpec | None  # of first halves with a mixer; null: there are none
    mlp: FactorsSpec  # of second halves

    @property
    def streams(self) -> int:
        """One: the hidden state itself."""
        return 1


ResidualSpec = (
    NormedResidualSpec
    | NormedStateSpec
    | ShortcutResidualSpec
    | ParallelResidualSpec
    | GatedNormsSpec
    | GatedStreamsSpec
    | MixedStreamsSpec
)


def has_input_norm(residual: ResidualSpec | None, half: Half, has_experts: bool) -> bool:
    """Returns whether a half has the norm of its input that a plain residual has."""
    if isinstance(residual, NormedResidualSpec):
        return residual.before and not (residual.apart and has_experts and half == "mlp")
    if isinstance(residual, ParallelResidualSpec):
        return half == "attention"
    return not isinstance(residual, GatedStreamsSpec)


def has_output_norm(residual: ResidualSpec | None, half: Half, has_experts: bool) -> bool:
    """Returns whether the output of a half is normed."""
    if not isinstance(residual, NormedResidualSpec):
        return False
    return half in residual.after or (half == "mlp" and has_experts and "experts" in residual.after)


def has_input_gates(residual: ResidualSpec | None, half: Half, has_experts: bool) -> bool:
    """Returns whether the normed input of a half goes through gates."""
    return isinstance(residual, GatedNormsSpec) and (half == "attention" or has_experts)


def input_gate_roles(residual: ResidualSpec | None, half: Half, d: int, has_experts: bool) -> Iterator[part.DenseRole]:
    """Yields the tensors of the gates of a half's normed input, for a hidden size d."""
    if isinstance(residual, GatedNormsSpec) and has_input_gates(residual, half, has_experts):
        yield part.DenseRole(f"{half}_gates.down", (residual.rank, d), False)
        yield part.DenseRole(f"{half}_gates.up", (d, residual.rank), False)


def stream_roles(residual: ResidualSpec | None, half: Half, d: int, offset: float) -> Iterator[part.DenseRole]:
    """Yields the tensors of a half with streams, for a hidden size d; `offset`: of norms."""
    if isinstance(residual, GatedStreamsSpec):
        width = residual.streams * d
        yield from _gates(residual, f"{half}_streams", d, offset)
        yield part.DenseRole(f"{half}_streams.inject", (residual.streams, width), False)
    elif isinstance(residual, MixedStreamsSpec):
        yield from _weights(f"{half}_streams", residual.num_weights, residual.streams * d, 3 if residual.mixing else 2)


def final_stream_roles(residual: ResidualSpec | None, d: int, offset: float) -> Iterator[part.DenseRole]:
    """Yields the tensors that make one stream of several after the last layer."""
    if isinstance(residual, GatedStreamsSpec):
        yield from _gates(residual, "streams", d, offset)
    elif isinstance(residual, MixedStreamsSpec):
        yield from _weights("streams", residual.streams, residual.streams * d, 1)


def _gates(residual: GatedStreamsSpec, name: str, d: int, offset: float) -> Iterator[part.DenseRole]:
    width = residual.streams * d
    yield part.DenseRole(f"{name}.norm", (width,), False, offset)
    yield part.DenseRole(f"{name}.down", (residual.rank, width), True)
    yield part.DenseRole(f"{name}.up", (width, residual.rank), True)


def _weights(name: str, number: int, width: int, num_scales: int) -> Iterator[part.DenseRole]:
    yield part.DenseRole(f"{name}.weights", (number, width), False)
    yield part.DenseRole(f"{name}.base", (number,), False)
    yield part.DenseRole(f"{name}.scale", (num_scales,), False)


MAX_STREAMS = 64


def residual_fault(residual: ResidualSpec, moe_layers: tuple[int, ...], num_layers: int) -> str | None:
    """Returns why a residual cannot be that of a model of so many layers, or None."""
    if isinstance(residual, NormedResidualSpec):
        halves = ("attention", "mlp"), ("attention", "experts")
        legal = [each[first:last] for each in halves for first, last in ((0, 1), (1, 2), (0, 2))]
        if residual.after not in legal:
            return f"residual after is {residual.after}, expected 'attention', and 'mlp' or 'experts', or one of these"
        return None if residual.before or residual.after == halves[0] else "residual leaves a half without a norm"
    if isinstance(residual, ShortcutResidualSpec):
        layers = residual.layers
        if not layers or not part.are_layers(layers, num_layers - 1) or not set(layers) <= set(moe_layers):
            return "residual layers must list MoE layers before the last layer, at least one, in rising order"
        return "residual layers must not follow each other" if {i + 1 for i in layers} & set(layers) else None
    if isinstance(residual, ParallelResidualSpec):
        return None
    if isinstance(residual, NormedStateSpec):
        given = [each for each in (residual.attention, residual.mixer, residual.mlp) if each is not None]
        numbers = [number for each in given for number in (each.state, each.output)]
        if all(0 < number < 1e6 for number in numbers):
            return None
        return f"residual factors are {numbers}, expected between 0 and 1e6"
    if not isinstance(residual, GatedNormsSpec) and not 2 <= residual.streams <= MAX_STREAMS:
        return f"residual streams is {residual.streams}, expected 2 to {MAX_STREAMS}"
    if isinstance(residual, GatedStreamsSpec | GatedNormsSpec):
        return None if 0 < residual.rank < 2**31 else f"residual rank is {residual.rank}, expected 1 to 2^31 - 1"
    if not 0 <= residual.mixing <= 1000 or not 0 < residual.magnitude < 1e6 or not 0 <= residual.eps < 1:
        named = f"mixing {residual.mixing}, magnitude {residual.magnitude} or eps {residual.eps}"
        return f"residual {named} is out of range"
    return None
