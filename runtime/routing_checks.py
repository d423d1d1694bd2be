"""The checks of the arrays of `routing.safetensors`: one of another form, or that nothing could have given, is refused.

Path statistics have checks of their own (`path_checks`), and networks (`mlp_predictor`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import PackError, TensorSidecar

Array = NDArray[Any]


class RoutingChecks:
    """Reads the arrays of a sidecar for a model of L MoE layers of E experts, k a token, each checked.

    Raises:  PackError, from every method, naming the array that is missing or cannot be.
    """

    def __init__(self, sidecar: TensorSidecar, place: str, num_layers: int, num_experts: int, num_chosen: int) -> None:
        self._sidecar = sidecar
        self._place = place
        self._L, self._E, self._k = num_layers, num_experts, num_chosen
        self._left = set(sidecar.entries)

    def popularity(self, name: str) -> Array:
        """Tokens that chose each expert, u32 [L, E]: k choices of each token, equally many tokens at every layer."""
        counts = self._form(name, "U32", (self._L, self._E))
        choices = counts.sum(axis=1, dtype=np.int64)
        T = int(choices[0]) // self._k
        if T < 1 or (choices != T * self._k).any() or counts.max() > T:
            raise self._fault(name, "counts that no tokens give", f"{self._k} experts of each token at every layer")
        return counts

    def mass(self, name: str) -> Array:
        """Sums of router weights, f32 [L, E]."""
        sums = self._form(name, "F32", (self._L, self._E))
        if not (np.isfinite(sums) & (sums >= 0)).all():
            raise self._fault(name, "a negative sum or no number", "sums of weights")
        return sums

    def recalls(self, name: str, num_predictors: int) -> Array:
        """What was judged of each predictor, f32 [L, predictors, 3]: shares, or all NaN for a layer without."""
        shares = self._form(name, "F32", (self._L, num_predictors, 3))
        judged: Array = np.asarray(~np.isnan(shares).all(axis=(1, 2)))
        are_shares: Array = np.asarray(((shares >= 0) & (shares <= 1)).all(axis=(1, 2)))
        if judged[0] or (judged & ~are_shares).any():
            raise self._fault(name, "no shares", "shares from 0 to 1, or all NaN, as in layer 0")
        return shares

    def best(self, name: str, recalls: Array, none: int) -> Array:
        """The first predictor of largest recall in each layer, u8 [L]; `none` where none was judged."""
        best = self._form(name, "U8", (self._L,))
        recall = np.where(np.isnan(recalls[:, :, 0]), -1, recalls[:, :, 0])
        expected = np.where(np.isnan(recalls[:, 0, 0]), none, recall.argmax(axis=1))
        if (best != expected).any():
            raise self._fault(name, f"{best.tolist()}", f"{expected.tolist()}, the largest recalls")
        return best

    def sequence_length(self, name: str, most: int) -> int:
        """Tokens of a sequence, u32 [1]."""
        length = int(self._form(name, "U32", (1,))[0])
        if not 0 < length <= most:
            raise self._fault(name, f"{length}", f"from 1 to {most} tokens")
        return length

    def routes(self, name: str, sequence_length: int, most: int) -> Array:
        """The experts of tokens, u16 [T, L, k]: T whole sequences, a token's experts different ones of a layer's."""
        shape = self._shape(name)
        T = shape[0] if shape else 0
        if most < T or T % sequence_length:
            raise self._fault(name, f"{T} tokens", f"whole sequences of {sequence_length}, at most {most}")
        routes = self._form(name, "U16", (T, self._L, self._k))
        ordered = np.sort(routes, axis=2)
        if T and (ordered.max() >= self._E or (ordered[..., 1:] == ordered[..., :-1]).any()):
            raise self._fault(name, "no routes", f"{self._k} different experts below {self._E}")
        return routes

    def read(self, name: str) -> Array:
        """An array that is checked elsewhere."""
        self._left.discard(name)
        return self._sidecar.read(name)

    def leave(self, prefix: str) -> None:
        """Arrays of these names are checked when they are read."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def nothing_else(self) -> None:
        """All arrays of the file have been read, or left for later."""
        if self._left:
            raise PackError(f"{self._place}: unknown tensor {min(self._left)!r}; attach the profile again")

    def _shape(self, name: str) -> tuple[int, ...]:
        entry = self._sidecar.entries.get(name)
        return () if entry is None else entry.shape

    def _form(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """Size before anything is read: of another form nothing is allocated."""
        entry = self._sidecar.entries.get(name)
        if entry is not None and (entry.dtype, entry.shape) != (dtype, shape):
            raise self._fault(name, f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}")
        return self.read(name)

    def _fault(self, name: str, found: str, expected: str) -> PackError:
        return PackError(
            f"{self._place}: tensor {name!r}: found {found}, expected {expected}; attach the profile again"
        )
