"""How the halves of layers read the hidden state and how their outputs enter it, where that is not a plain sum.

    plain:  x = x + attention(norm(x));  x = x + experts(norm(x))

`streams` is how many vectors of `hidden_size` a token's hidden state has between layers. docs/model.md says what each
kind computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import part

Half = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that decide whether a residual can be its."""

    num_layers: int
    moe_layers: tuple[int, ...]
    norm: part.NormSpec
    multiplier: float  # of the output of each half
    has_mixer: bool
    has_shared_expert: bool
    weighs_inputs: bool  # router weights multiply the input of experts


class Residual(part.Part):
    """A kind of residual. Methods return here the answer of a plain one."""

    __slots__ = ()
    kind: str

    def has_input_norm(self, half: Half, has_experts: bool) -> bool:
        """Returns whether a half has the norm of its input that a plain residual has."""
        return True

    def has_output_norm(self, half: Half, has_experts: bool) -> bool:
        """Returns whether the output of a half is normed."""
        return False

    def has_input_gates(self, half: Half, has_experts: bool) -> bool:
        """Returns whether the normed input of a half goes through gates."""
        return False

    @property
    def router_norm(self) -> str:
        """The norm whose output the router reads."""
        return "mlp_norm"

    @property
    def is_read_as_is(self) -> bool:
        """Whether halves read hidden states that are not normed, or add to what they read."""
        return False

    def half_roles(self, half: Half, has_experts: bool, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        """Yields the tensors of a half around attention or experts, for a hidden size d."""
        if self.has_input_norm(half, has_experts):
            yield from norm.roles(f"{half}_norm", d)

    def final_roles(self, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        """Yields the tensors after the last layer."""
        yield from norm.roles("norm", d)

    def fault(self, model: ModelFacts) -> str | None:
        """Returns why it cannot be the residual of a model, or None."""
        if model.multiplier != 1.0:
            return f"a {self.kind} residual cannot have a residual_multiplier of {model.multiplier}"
        return self.own_fault(model)

    def own_fault(self, model: ModelFacts) -> str | None:
        """Returns why values that this kind alone has cannot be, or None."""
        return None


PLAIN = Residual()


@dataclass(frozen=True, slots=True)
class NormedResidualSpec(Residual):
    """The outputs of the halves of a layer are normed before they are added to the hidden state.

    Source: transformers, models/afmoe, models/flex_olmo, models/axk1, models/gemma4 (apart, scaled), and models/beam
    (by depth).
    """

    streams: ClassVar[int] = 1  # the hidden state itself
    kind: Literal["normed"]
    before: bool  # a half's input is normed
    after: tuple[Literal["attention", "mlp", "experts"], ...]  # halves whose output is normed; `experts`: in MoE layers
    # In layers with experts, the router, the shared expert and the routed experts get the hidden state over its rms.
    # Each multiplies it by weights of its own. The outputs of shared and routed experts are normed each.
    apart: bool
    scaled: bool  # a learned number multiplies the hidden state after each layer
    # Before the n-th sum, the hidden state is multiplied by `sqrt((n - 1) / n)` and the output by `sqrt(1 / n)`.
    by_depth: bool = added(False)

    def has_input_norm(self, half: Half, has_experts: bool) -> bool:
        return self.before and not (self.apart and has_experts and half == "mlp")

    def has_output_norm(self, half: Half, has_experts: bool) -> bool:
        return half in self.after or (half == "mlp" and has_experts and "experts" in self.after)

    @property
    def is_read_as_is(self) -> bool:
        return not self.before

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gpus" and self.by_depth:
            yield "sums that are weighed by their depth"

    def half_roles(self, half: Half, has_experts: bool, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from Residual.half_roles(self, half, has_experts, d, norm)
        if self.apart and has_experts:
            for name in ("shared_norm", "experts_norm", "shared_post_norm", "experts_post_norm"):
                yield from norm.roles(name, d)
        if self.has_output_norm(half, has_experts):
            yield from norm.roles(f"{half}_post_norm", d)
        if self.scaled and half == "mlp":
            yield part.DenseRole("scale", (1,), False)

    def fault(self, model: ModelFacts) -> str | None:
        if self.by_depth and model.multiplier != 1.0:
            return f"residual by_depth cannot have a residual_multiplier of {model.multiplier}"
        if self.apart:
            has_plain_norms = model.norm.kind == "rms" and not model.norm.zero_centered
            if not model.has_shared_expert or not has_plain_norms or model.weighs_inputs:
                return "residual apart needs a shared expert, rms norms, and router weights on outputs"
            if not self.before:
                return "residual apart needs norms before"
        halves = ("attention", "mlp"), ("attention", "experts")
        legal = [each[first:last] for each in halves for first, last in ((0, 1), (1, 2), (0, 2))]
        if self.after not in legal:
            return f"residual after is {self.after}, expected 'attention', and 'mlp' or 'experts', or one of these"
        return None if self.before or self.after == halves[0] else "residual leaves a half without a norm"


@dataclass(frozen=True, slots=True)
class ShortcutResidualSpec(Residual):
    """The routed experts of some layers join the hidden state one layer later, with the second half of the next layer.

    The second stream keeps their output until then.
    Source: LongCat-Flash (2509.01322), section 2.1.2; transformers, models/longcat_flash.
    """

    streams: ClassVar[int] = 2  # the hidden state, and what waits
    kind: Literal["shortcut"]
    layers: tuple[int, ...]  # rising; no two follow each other

    def own_fault(self, model: ModelFacts) -> str | None:
        layers = self.layers
        is_legal = part.are_layers(layers, model.num_layers - 1) and set(layers) <= set(model.moe_layers)
        if not layers or not is_legal:
            return "residual layers must list MoE layers before the last layer, at least one, in rising order"
        return "residual layers must not follow each other" if {i + 1 for i in layers} & set(layers) else None


@dataclass(frozen=True, slots=True)
class ParallelResidualSpec(Residual):
    """Both halves of a layer read the same hidden state, through one norm, and are added together.

    The second stream keeps the output of the first half until then.
    Source: transformers, models/cohere2_moe.
    """

    streams: ClassVar[int] = 2  # the hidden state, and what the first half adds
    kind: Literal["parallel"]
    averaged: bool  # the sum of shared and routed experts is halved

    def has_input_norm(self, half: Half, has_experts: bool) -> bool:
        return half == "attention"

    @property
    def router_norm(self) -> str:
        return "attention_norm"


@dataclass(frozen=True, slots=True)
class GatedNormsSpec(Residual):
    """The normed input of a half goes through gates of its own, one for each value, which come from `rank` values.

    Attention has such gates in all layers, the second half in layers with experts alone.
    Source: transformers, models/axk2, AXK2GatedRMSNorm.
    """

    streams: ClassVar[int] = 1  # the hidden state itself
    kind: Literal["gated_norms"]
    rank: int  # values between the two matrices of the gates

    def has_input_gates(self, half: Half, has_experts: bool) -> bool:
        return half == "attention" or has_experts

    def half_roles(self, half: Half, has_experts: bool, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from norm.roles(f"{half}_norm", d)
        if self.has_input_gates(half, has_experts):
            yield part.DenseRole(f"{half}_gates.down", (self.rank, d), False)
            yield part.DenseRole(f"{half}_gates.up", (d, self.rank), False)

    def own_fault(self, model: ModelFacts) -> str | None:
        return part.sizes_fault({"residual rank": self.rank})


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec(Residual):
    """Several residual streams. A half reads their gated average, and its output enters each with a weight.

    Gates, for each value of each stream, come from all streams through `rank` values. There is no other norm.
    Source: transformers, models/qwen4_exp, Qwen4ExpTextGatedResidual.
    """

    kind: Literal["gated_streams"]
    streams: int
    rank: int  # values between the two matrices of the gates

    def has_input_norm(self, half: Half, has_experts: bool) -> bool:
        return False

    def half_roles(self, half: Half, has_experts: bool, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from self._gates(f"{half}_streams", d, norm.offset)
        yield part.DenseRole(f"{half}_streams.inject", (self.streams, self.streams * d), False)

    def final_roles(self, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from self._gates("streams", d, norm.offset)

    def _gates(self, name: str, d: int, offset: float) -> Iterator[part.DenseRole]:
        width = self.streams * d
        yield part.DenseRole(f"{name}.norm", (width,), False, offset)
        yield part.DenseRole(f"{name}.down", (self.rank, width), True)
        yield part.DenseRole(f"{name}.up", (width, self.rank), True)

    def own_fault(self, model: ModelFacts) -> str | None:
        return _streams_fault(self.kind, self.streams, model) or part.sizes_fault({"residual rank": self.rank})


@dataclass(frozen=True, slots=True)
class MixedStreamsSpec(Residual):
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

    def half_roles(self, half: Half, has_experts: bool, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from self._weights(f"{half}_streams", self.num_weights, d, 3 if self.mixing else 2)
        yield from norm.roles(f"{half}_norm", d)

    def final_roles(self, d: int, norm: part.NormSpec) -> Iterator[part.DenseRole]:
        yield from self._weights("streams", self.streams, d, 1)
        yield from norm.roles("norm", d)

    def _weights(self, name: str, number: int, d: int, num_scales: int) -> Iterator[part.DenseRole]:
        yield part.DenseRole(f"{name}.weights", (number, self.streams * d), False)
        yield part.DenseRole(f"{name}.base", (number,), False)
        yield part.DenseRole(f"{name}.scale", (num_scales,), False)

    def own_fault(self, model: ModelFacts) -> str | None:
        if (fault := _streams_fault(self.kind, self.streams, model)) is not None:
            return fault
        if not 0 <= self.mixing <= 1000 or not 0 < self.magnitude < 1e6 or not 0 <= self.eps < 1:
            named = f"mixing {self.mixing}, magnitude {self.magnitude} or eps {self.eps}"
            return f"residual {named} is out of range"
        return None


@dataclass(frozen=True, slots=True)
class FactorsSpec:
    """The factors of a sum."""

    state: float  # of the normed hidden state
    output: float  # of the output that is added to it


@dataclass(frozen=True, slots=True)
class NormedStateSpec(Residual):
    """A half's output is added to the normed hidden state that the half read, not to what was normed.

    Source: MiniMax-01 (2501.08313), section 2.2.4; transformers, models/minimax, MiniMaxDecoderLayer.
    """

    streams: ClassVar[int] = 1  # the hidden state itself
    kind: Literal["normed_state"]
    attention: FactorsSpec  # of first halves with attention
    mixer: FactorsSpec | None  # of first halves with a mixer; null: there are none
    mlp: FactorsSpec  # of second halves

    @property
    def is_read_as_is(self) -> bool:
        return True

    def own_fault(self, model: ModelFacts) -> str | None:
        if (self.mixer is not None) != model.has_mixer:
            return "a normed_state residual needs factors of layers with a mixer where there are any, and only there"
        given = [each for each in (self.attention, self.mixer, self.mlp) if each is not None]
        numbers = [number for each in given for number in (each.state, each.output)]
        is_legal = all(0 < number < 1e6 for number in numbers)
        return None if is_legal else f"residual factors are {numbers}, expected between 0 and 1e6"


MAX_STREAMS = 64


def _streams_fault(kind: str, streams: int, model: ModelFacts) -> str | None:
    if model.norm.kind != "rms":
        return f"a {kind} residual needs norms of kind rms, found {model.norm.kind}"
    return None if 2 <= streams <= MAX_STREAMS else f"residual streams is {streams}, expected 2 to {MAX_STREAMS}"


ResidualSpec = (
    NormedResidualSpec
    | NormedStateSpec
    | ShortcutResidualSpec
    | ParallelResidualSpec
    | GatedNormsSpec
    | GatedStreamsSpec
    | MixedStreamsSpec
)
