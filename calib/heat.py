"""The order of neurons in a pack: those that run most often first, so that fast memory can hold a part of an expert."""

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.expert_pass import KINDS
from moe_pack.calib.profile import Profile
from moe_pack.calib.provenance import source_digest
from moe_pack.formats import Checkpoint, PlanError, Selector


def hottest_first(profile: Profile, checkpoint: Checkpoint, selector: Selector, sparsity: float) -> NDArray[np.uint32]:
    """The order of every expert's neurons: `order[l, e, j]` is the source's neuron for row `j`, u32 [L, E, f].

    Meaning: falling share of calibration tokens on which the neuron runs at this selector and sparsity; ties by number.
    Raises:  PlanError if the profile is of another checkpoint.
    """
    if (profile.spec, profile.facts.source) != (checkpoint.spec, source_digest(checkpoint)):
        raise PlanError(f"--profile {profile.folder}: is of another checkpoint; profile this one")
    kind_idx = KINDS.index("both" if selector == "none" else selector)
    orders = []
    for layer_idx in range(len(profile.spec.moe_layers)):
        shares = profile.statistics(layer_idx).hot_share(kind_idx, sparsity)  # [E, f]
        orders.append(np.argsort(-shares, axis=1, kind="stable").astype(np.uint32))
    return np.stack(orders)
