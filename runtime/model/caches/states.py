"""The states of layers without attention, and of n-grams.

A layer with n-grams keeps the last inputs of their convolution, besides its mixer's state or its keys and values. Each
new token overwrites a state, so it can be cut back to one position alone, where it was copied. The decoder copies it
after each prompt: several continuations, or a dialogue without its earlier thoughts, need not read the prompt again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, parts


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state, which its mixer or its n-grams update in place; a part is empty if the layer has none."""

    conv: Tensor  # float32 [earlier inputs, channels], the oldest first
    recurrent: Tensor  # float32 [heads, keys, values]

    @classmethod
    def zeros(cls, shape: "parts.StateShape", device: torch.device) -> "LayerState":
        """Returns the state before the first token, of a shape that a mixer or n-grams have."""
        conv, recurrent = (torch.zeros(part or (0,), device=device) for part in shape)
        return cls(conv, recurrent)

    def copied(self) -> "LayerState":
        """Returns a copy, for a pass whose outcome does not count."""
        return LayerState(self.conv.clone(), self.recurrent.clone())

    def take(self, other: "LayerState") -> None:
        self.conv.copy_(other.conv)
        self.recurrent.copy_(other.recurrent)


def stacked_states(spec: ModelSpec, number: int, device: torch.device) -> dict[int, LayerState]:
    """Returns the states of each layer with a mixer for so many sequences, with a leading dimension."""
    mixer = spec.mixer
    if mixer is None:
        return {}
    shape = tuple((number, *(part or (0,))) for part in mixer.state)
    return {layer: LayerState(*(torch.zeros(part, device=device) for part in shape)) for layer in mixer.layers}


class States:
    """The states of all layers with a mixer or n-grams, and room for a copy; none without a spec.

    Args:    mixers: of layers with a mixer; None: they are allocated.
    """

    def __init__(
        self, spec: ModelSpec | None, device: torch.device, mixers: Mapping[int, LayerState] | None = None
    ) -> None:
        self._mixers, self._ngrams = dict[int, LayerState](mixers or {}), dict[int, LayerState]()
        if spec is not None and spec.mixer is not None and mixers is None:
            self._mixers = {layer: LayerState.zeros(spec.mixer.state, device) for layer in spec.mixer.layers}
        if spec is not None and spec.ngrams is not None:
            shape = spec.ngrams.state(spec.stream_width)
            self._ngrams = {layer: LayerState.zeros(shape, device) for layer in spec.ngrams.layers}
        self._states = (*self._mixers.values(), *self._ngrams.values())
        self._copies = tuple(state.copied() for state in self._states)
        self.num_bytes = 2 * sum(state.conv.nbytes + state.recurrent.nbytes for state in self._states)

    @classmethod
    def joined(cls, each: Iterable[tuple[int, "States"]], device: torch.device) -> "States":
        """Returns the states of a whole model, which are those of some layers each, from a first layer on."""
        found, parts = cls(None, device), list(each)
        found._mixers = {first + layer: state for first, own in parts for layer, state in own._mixers.items()}
        found._states = tuple(found._mixers.values())
        found._copies = tuple(copy for _, own in parts for copy in own._copies)
        return found

    def __bool__(self) -> bool:
        return bool(self._states)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All states' tensors, without their copies."""
        return tuple(part for state in self._states for part in (state.conv, state.recurrent))

    def of(self, layer: int) -> LayerState | None:
        """Returns the state of a layer's mixer; None if the layer has attention."""
        return self._mixers.get(layer)

    def of_ngrams(self, layer: int) -> LayerState | None:
        return self._ngrams.get(layer)

    def reset(self) -> None:
        for state in self._states:
            state.conv.zero_()
            state.recurrent.zero_()

    def save(self) -> None:
        for copy, state in zip(self._copies, self._states, strict=True):
            copy.take(state)

    def restore(self) -> None:
        for copy, state in zip(self._copies, self._states, strict=True):
            state.take(copy)
