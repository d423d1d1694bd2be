"""What a pack is made from: everything that decides its bytes, in one hand."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import Profile, check_same_source
from moe_pack.formats import Checkpoint, ModelSpec, PackLayout, Plan, PlanError, order_fault


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checkpoint, the plan for it, the layout that follows, and the neuron order: u32 [L, E, f], or the source's.

    `calibration`: the profile whose inputs a calibrated plan rounds by; None for other plans.
    """

    checkpoint: Checkpoint
    plan: Plan
    layout: PackLayout
    order: NDArray[np.uint32] | None
    calibration: Profile | None = None


def check_calibration(checkpoint: Checkpoint, plan: Plan, profile: Profile | None) -> None:
    """Checks that there is what a calibrated plan rounds by.

    Raises:  PlanError without a profile, for one that kept no inputs, or for one of another checkpoint.
    """
    if plan.quantizer != "calibrated":
        return
    if profile is None:
        raise PlanError("calibrated rounding: found no profile to go by; give --profile, made by moe-pack profile")
    if not profile.has_inputs:
        raise PlanError(
            f"--profile {profile.folder}: keeps no inputs of experts, which calibrated rounding goes by; profile the "
            "model anew, without --no-inputs"
        )
    check_same_source(profile, checkpoint)


def check_order(order: NDArray[np.uint32], spec: ModelSpec) -> None:
    """Checks that a neuron order is one for this model.

    Raises:  PlanError for another shape, or an expert whose order is no permutation.
    """
    assert order.dtype == np.uint32, order.dtype
    shape = (len(spec.moe_layers), spec.router.num_experts, spec.expert.intermediate_size)
    if order.shape != shape:
        raise PlanError(f"order: shape {list(order.shape)}, expected {list(shape)}: layers, experts and neurons")
    fault = order_fault(order)
    if fault:
        raise PlanError(f"order: {fault}")
