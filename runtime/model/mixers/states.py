"""The states of layers without attention: a cache of its own next to that of keys and values.

A state has the last inputs of a short convolution and a recurrent state, both float32 (`StateShape` in
formats/parts/mixers.py). Each new token overwrites it. So a text can go on, and it can begin again, but a state cannot
be cut back to an earlier position as keys and values can. It leads back to one position alone: where it was copied. The
decoder has it copied after each prompt, so that several continuations, or a dialogue that leaves out what was thought
before an answer, need not read the prompt again (`Decoder.keep_beginning`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats.parts import MixerSpec


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state, which its mixer updates in place.

    `conv`: float32 [earlier inputs, channels], the oldest first.   `recurrent`: float32 [heads, keys, values]. Either
    is empty if the mixer has none.
    """

    conv: Tensor
    recurrent: Tensor

    @classmethod
    def empty(cls, mixer: MixerSpec, device: torch.device) -> "LayerState":
        """Returns the state before the first token: zeros."""
        conv, recurrent = (torch.zeros(shape or (0,), device=device) for shape in mixer.state)
        return cls(conv, recurrent)

    def copied(self) -> "LayerState":
        """Returns a copy, for a pass whose outcome does not count."""
        return LayerState(self.conv.clone(), self.recurrent.clone())

    def take(self, other: "LayerState") -> None:
        """Becomes a copy of another state of the same shape."""
        self.conv.copy_(other.conv)
        self.recurrent.copy_(other.recurrent)


class States:
    """The states of all layers with a mixer, and room for a copy of them, float32; allocated once.

    Args:    mixer: None for a model of attention alone, which has no states.
    """

    def __init__(self, mixer: MixerSpec | None, device: torch.device) -> None:
        layers = () if mixer is None else mixer.layers
        self._states = {layer: LayerState.empty(mixer, device) for layer in layers if mixer is not None}
        self._copies = {layer: state.copied() for layer, state in self._states.items()}
        self.num_bytes = 2 * sum(state.conv.nbytes + state.recurrent.nbytes for state in self._states.values())

    def __bool__(self) -> bool:
        """Whether there is any state."""
        return bool(self._states)

    def of(self, layer: int) -> LayerState | None:
        """Returns the state of a layer; None if the layer has attention."""
        return self._states.get(layer)

    def reset(self) -> None:
        """Begins again, before the first token."""
        for state in self._states.values():
            state.conv.zero_()
            state.recurrent.zero_()

    def save(self) -> None:
        """Copies the states, in place of an earlier copy."""
        for layer, state in self._states.items():
            self._copies[layer].take(state)

    def restore(self) -> None:
        """Returns to the copy."""
        for layer, state in self._states.items():
            state.take(self._copies[layer])
