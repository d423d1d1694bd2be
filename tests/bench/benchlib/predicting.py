"""What the planner predicts of a pack in a budget on this machine, whose rates are measured just before."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchlib.packs import SKEW
from moe_pack.convert import measure_fixed_costs, skewed_popularity
from moe_pack.convert.plan.cpu_speed import estimate_on_cpu, planned_heat
from moe_pack.convert.plan.machines import machine_of_cpu
from moe_pack.convert.plan.speed import RoutingFacts, SpeedEstimate
from moe_pack.formats import NO_PROGRESS, Pack
from moe_pack.runtime import FixedCosts, MachineFacts, measure_disk
from moe_pack.runtime.doctor import MeasurementSteps, measure_cpu
from moe_pack.runtime.offload import Passes, divide_budget, routing_bytes

_FIXED_MEASUREMENTS = 50  # fixed costs take as long as so many measurements of the machine: 5 s, with 0.1 s each
_RECALL = 0.98  # a synthetic model's layers change the hidden state little: the next router predicts nearly all


def measured_machine(pack: Path, seconds: float, fixed: FixedCosts | None = None) -> MachineFacts:
    """Returns the rates of the disk that a pack is on, and of the CPU; rates differ from one minute to the next.

    Args:    seconds: of each measurement.   fixed: of `measured_fixed_costs`.
    """
    cpu = measure_cpu(MeasurementSteps(NO_PROGRESS, 0, seconds), seconds)
    return replace(measure_disk(pack, NO_PROGRESS, seconds), cpu=cpu, fixed=fixed)


def measured_fixed_costs(pack: Path, seconds: float) -> FixedCosts:
    """Returns what decoding takes on this machine in addition to bytes, as `moe-pack doctor` measures it.

    Args:    seconds: of each measurement of the machine before.
    """
    return measure_fixed_costs(measured_machine(pack, seconds), _FIXED_MEASUREMENTS * seconds)


def predicted_for(
    pack: Pack,
    budget_bytes: int,
    context_tokens: int,
    facts: MachineFacts,
    sparsity: float,
    seen_tokens: int,
    passes: Passes | None = None,
) -> SpeedEstimate:
    """Returns the cost model's estimate of a token, with the division of the budget that the planner makes.

    Args:    sparsity: the share of neurons that do not run.   seen_tokens: tokens in the key-value cache.   passes: the
             routes of a profile, which are replayed; None for a synthetic pack, whose routes are drawn by popularity,
             independently: how a token's experts follow from those of the layer before is not modelled.
    """
    machine, predictors = machine_of_cpu(facts), routing_bytes(pack.folder)
    popularity = passes.popularity if passes else skewed_popularity(pack.spec, SKEW, 0)
    shares = np.full(pack.index.size.shape, sparsity)
    heat = planned_heat(pack.layout, popularity, shares, machine.disk)
    plan = divide_budget(pack.layout, budget_bytes, context_tokens, predictors, heat=heat)
    recall = None if passes else _RECALL
    return estimate_on_cpu(pack.layout, plan, machine, RoutingFacts(popularity, passes, recall), shares, seen_tokens)
