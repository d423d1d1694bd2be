"""The order of neurons in a pack: those that run most often first, so that fast memory can hold a part of an expert."""

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.expert_pass import KINDS
from moe_pack.calib.profile import Profile, check_same_source
from moe_pack.formats import Checkpoint, Selector


def hottest_first(
    profile: Profile, checkpoint: Checkpoint, selector: Selector, sparsity: NDArray[np.float64]
) -> NDArray[np.uint32]:
    """The order of every expert's neurons: `order[l, e, j]` is the source's neuron for row `j`, u32 [L, E, f].

    Meaning: falling share of calibration tokens on which the neuron runs at this selector and the expert's sparsity;
             ties by number.
    Args:    sparsity: float64 [L, E].
    Raises:  PlanError if the profile is of another checkpoint.
    """
    check_same_source(profile, checkpoint)
    kind_idx = KINDS.index("both" if selector == "none" else selector)
    shape = (*sparsity.shape, profile.spec.expert.intermediate_size)
    orders = np.empty(shape, np.uint32)
    for layer_idx, layer in enumerate(sparsity):
        statistics = profile.statistics(layer_idx)
        for share in np.unique(layer).tolist():
            held = layer == share
            shares = statistics.hot_share(kind_idx, share)[held]  # [experts with this sparsity, f]
            orders[layer_idx, held] = np.argsort(-shares, axis=1, kind="stable")
    return orders
