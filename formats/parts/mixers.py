"""The kinds of mixers: layers that mix tokens through a state of fixed size, in place of attention.

    state = decay * state + what the token writes;  output = what the token reads from the state

A state has up to two parts, both float32: the last inputs of a short convolution, and a recurrent state of each head.
Neither grows with the text, and neither can be cut back to an earlier position. docs/model.md says what each computes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import part

CHUNK_TOKENS = 64  # that see each other by products of matrices, and all earlier ones through the state
KEYED_CHUNK_TOKENS = 16  # where decays differ by key: tables are [heads, chunk, chunk, keys]
MAX_CONV_KERNEL = 64
MAX_STATE_VALUES = 2**31  # of a layer


class StateShape(NamedTuple):
    """The state of a layer: `conv` [earlier inputs, channels] and `recurrent` [heads, keys, values]; () for none."""

    conv: part.Shape
    recurrent: part.Shape

    @property
    def num_values(self) -> int:
        """The number of float32 values in both parts."""
        return sum(math.prod(shape) for shape in (self.conv, self.recurrent) if shape)


class Mixer(part.Part, ABC):
    """A kind of mixer."""

    __slots__ = ()
    kind: str
    layers: tuple[int, ...]

    @abstractmethod
    def roles(self, d: int) -> Iterator[part.DenseRole]:
        """Yields the tensors of a layer, for a hidden size d."""

    @property
    @abstractmethod
    def state(self) -> StateShape:
        """The shape of a layer's state."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The most floats of one token while the mixer runs."""

    @property
    def chunk_floats(self) -> int:
        """The most floats of a chunk of tokens that are computed together; 0 if none are."""
        return 0

    def fault(self, num_layers: int) -> str | None:
        """Returns why it cannot be the mixer of a model of so many layers, or None."""
        sizes = part.sizes_of(self)
        if (fault := part.sizes_fault(sizes, "mixer ")) is not None:
            return fault
        if not self.layers or not part.are_layers(self.layers, num_layers):
            return "mixer layers must list decoder layers, at least one, in rising order"
        if sizes.get("conv_kernel", 1) > MAX_CONV_KERNEL:
            return f"mixer conv_kernel is {sizes['conv_kernel']}, expected at most {MAX_CONV_KERNEL}"
        if self.state.num_values > MAX_STATE_VALUES:
            return f"a mixer's state has {self.state.num_values} values, expected at most 2^31"
        return self.own_fault()

    def own_fault(self) -> str | None:
        """Returns why values that this kind alone has cannot be, or None."""
        return None

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        """Returns its keys in the metadata of GGUF files. `rotates`: whether layers with attention do."""
        return {}

    def gguf_shape(self, name: str, shape: part.Shape) -> part.Shape:
        """Returns the shape of one of its tensors in GGUF files, where some vectors have more dimensions."""
        if name == "conv":
            kernel, channels = self.state.conv[0] + 1, self.state.conv[1]
            return (channels, kernel)
        return shape

    def checkpoint_shape(self, name: str, shape: part.Shape) -> part.Shape:
        """Returns the shape of one of its tensors in the family's checkpoints."""
        return (self.state.conv[1], 1, self.state.conv[0] + 1) if name == "conv" else shape


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(Mixer):
    """Gated DeltaNet: a state `[key_head_dim, value_head_dim]` for each value head, corrected towards the newest value.

    Queries, keys and values go through a causal convolution and silu first.
    Source: Gated Delta Networks (2412.06464); transformers, models/qwen3_next, Qwen3NextGatedDeltaNet.
    """

    kind: Literal["gated_delta_net"]
    layers: tuple[int, ...]  # rising
    num_key_heads: int  # of queries and keys, which serve the heads of values
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # taps of the convolution
    # the projections lie together, in two matrices, key head after key head; else each has its own matrix, but for
    # queries, keys and values, which share one
    interleaved: bool
    gate: Literal["silu", "sigmoid"] = added("silu")  # function of the output's gates, which come after its norm

    @property
    def key_width(self) -> int:
        """The values of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """The values of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        if self.interleaved:
            yield from part.matrices(qkvz=(self.conv_channels + self.value_width, d))
            yield from part.vectors(ba=(2 * self.num_value_heads, d))
        else:
            yield from part.matrices(qkv=(self.conv_channels, d), z=(self.value_width, d))
            yield from part.vectors(b=(self.num_value_heads, d), a=(self.num_value_heads, d))
        yield from part.vectors(
            conv=self.conv_channels * self.conv_kernel,
            a_log=self.num_value_heads,
            dt_bias=self.num_value_heads,
            out_norm=self.value_head_dim,
        )
        yield from part.matrices(o=(d, self.value_width))

    @property
    def state(self) -> StateShape:
        recurrent = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return StateShape((self.conv_kernel - 1, self.conv_channels), recurrent)

    @property
    def width(self) -> int:
        # Projections, also in order; the convolution's inputs and outputs; queries and keys of each value head, scaled;
        # values; what is read, normed, and gated.
        return 5 * (self.conv_channels + self.value_width) + 4 * self.num_value_heads * self.key_head_dim

    @property
    def chunk_floats(self) -> int:
        rows = self.key_head_dim + self.value_head_dim
        return self.num_value_heads * CHUNK_TOKENS * (8 * CHUNK_TOKENS + 4 * rows)

    def own_fault(self) -> str | None:
        if self.num_value_heads % self.num_key_heads:
            return f"{self.num_value_heads} value heads cannot share {self.num_key_heads} keys"
        return None

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and self.key_head_dim != self.value_head_dim:
            yield f"heads with {self.key_head_dim} keys and {self.value_head_dim} values; both must be equal"

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        recurrent = [layer in self.layers for layer in range(num_layers)]
        return {
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.state_size": self.key_head_dim,
            "ssm.group_count": self.num_key_heads,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.inner_size": self.value_width,
            "attention.recurrent_layers": recurrent,
            "full_attention_interval": recurrent.index(False) + 1,
        }


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(Mixer):
    """Kimi delta attention: Gated DeltaNet in which each of a head's `head_dim` keys has a decay of its own.

    Source: Kimi Linear (2510.26692), section 3; transformers, models/kimi_linear, KimiLinearDeltaAttention, and
    models/bailing_hybrid, BailingHybridDeltaAttention, for full rank and bounds.
    """

    kind: Literal["kimi_delta_attention"]
    layers: tuple[int, ...]  # rising
    num_heads: int
    head_dim: int
    conv_kernel: int  # taps of the convolution
    # decays, and gates of the output, come from the hidden state through one matrix, not through `head_dim` values
    # between two
    full_rank: bool = added(False)
    lower_bound: float | None = added(None)  # of the logarithm of a decay, which a sigmoid keeps above it; null: none

    @property
    def head_width(self) -> int:
        """The values of all heads."""
        return self.num_heads * self.head_dim

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        width, taps = self.head_width, self.head_width * self.conv_kernel
        yield from part.matrices(q=(width, d), k=(width, d), v=(width, d))
        yield from part.vectors(q_conv=taps, k_conv=taps, v_conv=taps, b=(self.num_heads, d))
        yield from self._ranked("decay", d)
        yield from part.vectors(a_log=self.num_heads, dt_bias=width)
        yield from self._ranked("gate", d)
        yield from part.vectors(out_norm=self.head_dim)
        yield from part.matrices(o=(d, width))

    def _ranked(self, name: str, d: int) -> Iterator[part.DenseRole]:
        """Yields the tensors between the hidden state and a number for each value of the heads."""
        if self.full_rank:
            yield part.DenseRole(name, (self.head_width, d), True)
        else:
            yield part.DenseRole(f"{name}_a", (self.head_dim, d), False)
            yield part.DenseRole(f"{name}_b", (self.head_width, self.head_dim), False)

    @property
    def state(self) -> StateShape:
        recurrent = (self.num_heads, self.head_dim, self.head_dim)
        return StateShape((self.conv_kernel - 1, 3 * self.head_width), recurrent)

    @property
    def width(self) -> int:
        return 16 * self.head_width

    @property
    def chunk_floats(self) -> int:
        return self.num_heads * KEYED_CHUNK_TOKENS * self.head_dim * (4 * KEYED_CHUNK_TOKENS + 12)

    def own_fault(self) -> str | None:
        if self.lower_bound is not None and not -1e6 < self.lower_bound < 0:
            return f"mixer lower_bound is {self.lower_bound}, expected above -1e6 and below 0"
        return None

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        return {"ssm.conv_kernel": self.conv_kernel, "kda.head_dim": self.head_dim}

    def gguf_shape(self, name: str, shape: part.Shape) -> part.Shape:
        if name.endswith("_conv"):
            return (1, self.head_width, 1, self.conv_kernel)
        if name == "a_log":
            return (self.num_heads, 1) if self.full_rank else (1, 1, self.num_heads, 1)
        return shape

    def checkpoint_shape(self, name: str, shape: part.Shape) -> part.Shape:
        if name.endswith("_conv"):
            return (self.head_width, 1, self.conv_kernel)
        return (1, 1, self.num_heads, 1) if name == "a_log" and not self.full_rank else shape


@dataclass(frozen=True, slots=True)
class Mamba2Spec(Mixer):
    """Mamba-2: a state `[state_size, head_dim]` for each head, with one decay a head.

    The output's gate comes before its norm, which each group has for itself.
    Source: Mamba-2 (2405.21060), section 7; transformers, models/granitemoehybrid and models/nemotron_h.
    """

    kind: Literal["mamba2"]
    layers: tuple[int, ...]  # rising
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # pairs of B and C (keys and queries), which serve the heads
    conv_kernel: int  # taps of the convolution
    conv_bias: bool  # of the convolution
    proj_bias: bool  # of both projections
    time_step_min: float  # the least step

    @property
    def head_width(self) -> int:
        """The values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """The channels of the convolution: values of all heads, then B and C of all groups."""
        return self.head_width + 2 * self.num_groups * self.state_size

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        projected = self.head_width + self.conv_channels + self.num_heads
        yield part.DenseRole("in", (projected, d), True)
        if self.proj_bias:
            yield part.DenseRole("in_bias", (projected,), False)
        yield part.DenseRole("conv", (self.conv_channels * self.conv_kernel,), False)
        if self.conv_bias:
            yield part.DenseRole("conv_bias", (self.conv_channels,), False)
        heads = self.num_heads
        yield from part.vectors(a_log=heads, dt_bias=heads, skip=heads, out_norm=self.head_width)
        yield from part.matrices(o=(d, self.head_width))
        if self.proj_bias:
            yield part.DenseRole("o_bias", (d,), False)

    @property
    def state(self) -> StateShape:
        recurrent = (self.num_heads, self.state_size, self.head_dim)
        return StateShape((self.conv_kernel - 1, self.conv_channels), recurrent)

    @property
    def width(self) -> int:
        return 5 * (self.head_width + self.conv_channels) + 4 * self.num_heads * self.state_size

    @property
    def chunk_floats(self) -> int:
        return self.num_heads * CHUNK_TOKENS * (8 * CHUNK_TOKENS + 4 * (self.state_size + self.head_dim))

    def own_fault(self) -> str | None:
        if self.num_heads % self.num_groups:
            return f"{self.num_heads} heads cannot share {self.num_groups} groups"
        if not 0 <= self.time_step_min < 1e6:
            return f"mixer time_step_min is {self.time_step_min}, expected from 0 to less than 1e6"
        return None

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and self.proj_bias:
            yield "biases of Mamba's projections"

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        return {
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.num_groups,
            "ssm.inner_size": self.head_width,
            "ssm.time_step_rank": self.num_heads,
            "rope.scaling.finetuned": rotates,
        }

    def gguf_shape(self, name: str, shape: part.Shape) -> part.Shape:
        if name in ("a_log", "skip"):
            return (self.num_heads, 1)
        if name == "out_norm":
            return (self.num_groups, self.head_width // self.num_groups)
        return Mixer.gguf_shape(self, name, shape)


@dataclass(frozen=True, slots=True)
class MambaSpec(Mixer):
    """Mamba: a state `[state_size]` for each of `channels`, in which each value has a decay of its own.

    Source: Mamba (2312.00752), section 3; Jamba (2403.19887), section 6.4, for the norms; transformers, models/jamba.
    """

    kind: Literal["mamba"]
    layers: tuple[int, ...]  # rising
    channels: int
    state_size: int
    # values through which a step of each channel comes from the hidden state; these, B and C are normed (rms, the
    # model's eps)
    step_rank: int
    conv_kernel: int  # taps of the convolution
    conv_bias: bool  # of the convolution
    proj_bias: bool  # of both outer projections

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        yield part.DenseRole("in", (2 * self.channels, d), True)
        if self.proj_bias:
            yield part.DenseRole("in_bias", (2 * self.channels,), False)
        yield part.DenseRole("conv", (self.channels * self.conv_kernel,), False)
        if self.conv_bias:
            yield part.DenseRole("conv_bias", (self.channels,), False)
        yield from part.vectors(
            x=(self.step_rank + 2 * self.state_size, self.channels),
            dt_norm=self.step_rank,
            b_norm=self.state_size,
            c_norm=self.state_size,
            dt=(self.channels, self.step_rank),
            dt_bias=self.channels,
            a_log=self.channels * self.state_size,
            skip=self.channels,
        )
        yield from part.matrices(o=(d, self.channels))
        if self.proj_bias:
            yield part.DenseRole("o_bias", (d,), False)

    @property
    def state(self) -> StateShape:
        return StateShape((self.conv_kernel - 1, self.channels), (self.channels, self.state_size, 1))

    @property
    def width(self) -> int:
        return self.channels * (12 + 4 * self.state_size)

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and (self.proj_bias or not self.conv_bias):
            yield "biases of Mamba's projections, or none of its convolution"

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        return {
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.channels,
            "ssm.state_size": self.state_size,
            "ssm.time_step_rank": self.step_rank,
        }

    def gguf_shape(self, name: str, shape: part.Shape) -> part.Shape:
        return (self.channels, self.state_size) if name == "a_log" else Mixer.gguf_shape(self, name, shape)

    def checkpoint_shape(self, name: str, shape: part.Shape) -> part.Shape:
        return (self.channels, self.state_size) if name == "a_log" else Mixer.checkpoint_shape(self, name, shape)


@dataclass(frozen=True, slots=True)
class ShortConvSpec(Mixer):
    """A short convolution of `channels`, between two gates: the only state is its last inputs.

    Source: transformers, models/lfm2_moe, Lfm2MoeShortConv.
    """

    kind: Literal["short_conv"]
    layers: tuple[int, ...]  # rising
    channels: int
    conv_kernel: int  # taps of the convolution
    bias: bool  # of the convolution and both projections

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        yield part.DenseRole("in", (3 * self.channels, d), True)
        if self.bias:
            yield part.DenseRole("in_bias", (3 * self.channels,), False)
        yield part.DenseRole("conv", (self.channels * self.conv_kernel,), False)
        if self.bias:
            yield part.DenseRole("conv_bias", (self.channels,), False)
        yield part.DenseRole("o", (d, self.channels), True)
        if self.bias:
            yield part.DenseRole("o_bias", (d,), False)

    @property
    def state(self) -> StateShape:
        return StateShape((self.conv_kernel - 1, self.channels), ())

    @property
    def width(self) -> int:
        return 10 * self.channels

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and self.bias:
            yield "biases of short convolutions"

    def gguf_values(self, num_layers: int, rotates: bool) -> dict[str, Any]:
        return {"shortconv.l_cache": self.conv_kernel}


@dataclass(frozen=True, slots=True)
class LightningSpec(Mixer):
    """Lightning attention: a state `[head_dim, head_dim]` for each head, with a decay that no token changes.

    The decay of head `h` in the layer with `factor` is `exp(-factor * 2^(-8 (h + 1) / num_heads))`. Outputs of all
    heads are normed together (rms), and have gates.
    Source: MiniMax-01 (2501.08313), section 2.2; transformers, models/minimax, MiniMaxLightningAttention.
    """

    kind: Literal["lightning_attention"]
    layers: tuple[int, ...]  # rising
    num_heads: int
    head_dim: int
    factors: tuple[float, ...]  # one for each of `layers`
    norm_eps: float  # of the norm of outputs

    @property
    def head_width(self) -> int:
        """The values of all heads."""
        return self.num_heads * self.head_dim

    def factor(self, layer: int) -> float:
        """Returns the factor of a layer's decays."""
        return self.factors[self.layers.index(layer)]

    def of_layers(self, first: int, last: int) -> Self:
        found = part.of_layers(self, first, last)
        return replace(found, factors=tuple(self.factor(layer + first) for layer in found.layers))

    def roles(self, d: int) -> Iterator[part.DenseRole]:
        yield from part.matrices(qkv=(3 * self.head_width, d), gate=(self.head_width, d))
        yield from part.vectors(out_norm=self.head_width)
        yield from part.matrices(o=(d, self.head_width))

    @property
    def state(self) -> StateShape:
        return StateShape((), (self.num_heads, self.head_dim, self.head_dim))

    @property
    def width(self) -> int:
        return 14 * self.head_width

    @property
    def chunk_floats(self) -> int:
        return self.num_heads * CHUNK_TOKENS * (8 * CHUNK_TOKENS + 8 * self.head_dim)

    def own_fault(self) -> str | None:
        if len(self.factors) != len(self.layers):
            return f"mixer factors are {len(self.factors)} numbers for {len(self.layers)} layers"
        if not all(0 < factor <= 2 for factor in self.factors):
            return f"mixer factors are {self.factors}, expected above 0 and at most 2"
        return part.numbers_fault({"mixer norm_eps": self.norm_eps}, "1")


MixerSpec = GatedDeltaSpec | KimiDeltaSpec | Mamba2Spec | MambaSpec | ShortConvSpec | LightningSpec


@dataclass(frozen=True, slots=True)
class HalvesSpec(part.Part):
    """Layers with one half alone: `first` has attention or a mixer, `second` has experts or a dense expert.

    Source: transformers, models/nemotron_h, NemotronHBlock.
    """

    first: tuple[int, ...]  # rising
    second: tuple[int, ...]  # rising

    def of_layers(self, first: int, last: int) -> Self:
        return replace(self, first=part.shifted(self.first, first, last), second=part.shifted(self.second, first, last))

    def fault(self, num_layers: int) -> str | None:
        """Returns why halves cannot be those of a model of so many layers, or None."""
        for name, layers in (("first", self.first), ("second", self.second)):
            if not part.are_layers(layers, num_layers):
                return f"halves {name} must list decoder layers, in rising order"
        if set(self.first) & set(self.second):
            return "halves list a layer twice"
        return None
