"""How hot the slices of an expert's rows are, at every selector kind and sparsity that a plan may take."""

import numpy as np

from moe_pack.calib import HOT_SPARSITIES, KINDS, Profile
from moe_pack.convert.choices import Floats
from moe_pack.formats import Selector

NUM_SLICES = 16


class Heats:
    """The heat of slices of rows as they lie in a pack, hottest first; read from the profile when it is asked for.

    Args:    profile: None: all neurons run as often.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[int, Floats] = {}

    def at(self, selector: Selector, sparsity: Floats) -> Floats:
        """The share of an expert's tokens for which a row of each slice is read: float64 [L, E, slices].

        Meaning: between the sparsities that were counted, interpolated, and scaled to the one asked for on the mean.
                 Without a selector nobody knows what runs before it is there: 1.
        Args:    sparsity: [L, E].
        """
        if selector == "none":
            return np.ones((*sparsity.shape, 1))
        running = 1 - sparsity[:, :, None]
        if self._profile is None:
            return running
        levels = np.array((0.0, *HOT_SPARSITIES))
        counted = self._counted(KINDS.index(selector), self._profile)  # [L, E, levels, slices]
        above = np.clip(np.searchsorted(levels, sparsity, side="right"), 1, len(levels) - 1)
        part = np.clip((sparsity - levels[above - 1]) / (levels[above] - levels[above - 1]), 0, 1)[:, :, None]
        low, high = (np.take_along_axis(counted, n[:, :, None, None], axis=2)[:, :, 0] for n in (above - 1, above))
        found = low + (high - low) * part
        mean = found.mean(axis=2, keepdims=True)
        scaled: Floats = found * np.divide(running, mean, out=np.ones_like(mean), where=mean > 0)
        return np.minimum(scaled, 1.0)

    def _counted(self, kind_idx: int, profile: Profile) -> Floats:
        """The means of slices at sparsity 0 and all that were counted."""
        if kind_idx not in self._known:
            layers = []
            for layer_idx in range(len(profile.spec.moe_layers)):
                statistics = profile.statistics(layer_idx)
                shares = np.stack([statistics.hot_share(kind_idx, sparsity) for sparsity in HOT_SPARSITIES], axis=1)
                ordered = -np.sort(-shares.astype(np.float64), axis=2)  # [E, levels, f]
                ends = np.linspace(0, ordered.shape[2], min(NUM_SLICES, ordered.shape[2]) + 1).astype(np.int64)
                sums = np.concatenate([np.zeros((*ordered.shape[:2], 1)), np.cumsum(ordered, axis=2)], axis=2)
                means = np.diff(sums[:, :, ends], axis=2) / np.diff(ends)
                layers.append(np.concatenate([np.ones_like(means[:, :1]), means], axis=1))
            self._known[kind_idx] = np.stack(layers)
        return self._known[kind_idx]
