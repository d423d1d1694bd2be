"""What a pack is made from: everything that decides its bytes, in one hand."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import Checkpoint, ModelSpec, PackLayout, Plan, PlanError, order_fault


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checkpoint, the plan for it, the layout that follows, and the neuron order: u32 [L, E, f], or the source's."""

    checkpoint: Checkpoint
    plan: Plan
    layout: PackLayout
    order: NDArray[np.uint32] | None


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
