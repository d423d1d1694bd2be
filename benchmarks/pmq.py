"""A comparator: the widths that Mixture-Compressor's PMQ gives the experts of a model.

    minimise    sum over experts i of  frequency_i^alpha * weight_i^beta * error_i(width_i)^gamma
    such that   the widths of a layer's experts fit its share of the bytes

`frequency`: share of the layer's choices that fell on the expert; `weight`: its share of the layer's router weights;
`error`: the Frobenius norm of the change of the layer's output when that expert alone is stored at the width. Layer by
layer, each with the same bytes; the integer program is solved exactly.

Source:  Huang et al., Mixture Compressor for Mixture-of-Experts LLMs Gains More, arXiv 2410.06270 (PMQ, taken over by
         MC#, arXiv 2510.10962), with the defaults of github.com/Aaronhuang-778/MC-MoE, precision_solver.py at 6356fc1:
         alpha 1, beta 1.5, gamma 2, widths 1, 2 and 3, at least one expert of a layer at 3 and one at 2 bits. That file
         raises the error to alpha, not to the gamma it takes: `RELEASED` is what it computes.
We differ: the bound is bytes as stored, not the sum of widths; quantization is HQQ in groups of 64 for all that is
         compared, GPTQ there; router weights are as the family normalises them, theirs before that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, inf

import numpy as np
import torch
from expert_inputs import expert_inputs
from memory_weights import MemoryWeights, WholeExpert
from numpy.typing import NDArray

from moe_pack.calib import Tokens
from moe_pack.formats import Plan
from moe_pack.runtime import run_expert

Costs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exponents:
    """Of frequency, router weight and error."""

    alpha: float
    beta: float
    gamma: float


PUBLISHED = Exponents(1.0, 1.5, 2.0)
RELEASED = Exponents(1.0, 1.5, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What PMQ weighs: `frequency`, `weight` [L, E]; `errors` [L, E, W] at the widths [W]."""

    widths: tuple[int, ...]
    frequency: Costs
    weight: Costs
    errors: Costs

    def costs(self, exponents: Exponents, widths: tuple[int, ...]) -> Costs:
        """The objective's terms at some of the widths: [L, E, W]."""
        significance = self.frequency**exponents.alpha * self.weight**exponents.beta
        chosen = self.errors[:, :, [self.widths.index(width) for width in widths]]
        return np.asarray(significance[:, :, None] * chosen**exponents.gamma, np.float64)


@torch.inference_mode()
def measure_factors(weights: MemoryWeights, tokens: Tokens, plans: Mapping[int, Plan]) -> Factors:
    """Measures a model on a text; `plans` has for each width the plan that stores every expert at it.

    Args:    weights: with the source's experts.
    """
    spec = weights.spec
    shape = (len(spec.moe_layers), spec.router.num_experts)
    chosen, mass, errors = np.zeros(shape), np.zeros(shape), np.zeros((*shape, len(plans)))
    for seen in expert_inputs(weights, tokens):
        place = (seen.layer_idx, seen.expert)
        chosen[place], mass[place] = len(seen.x), float(seen.weights.double().sum())
        expected = run_expert(seen.x, weights.expert(*place), spec.expert.function, "none", 0.0)
        for number, plan in enumerate(plans.values()):
            stored = WholeExpert(weights.rounded(*place, plan))
            change = run_expert(seen.x, stored, spec.expert.function, "none", 0.0) - expected
            errors[(*place, number)] = float((change * seen.weights[:, None]).double().norm())
    return Factors(
        tuple(plans), chosen / chosen.sum(axis=1, keepdims=True), mass / mass.sum(axis=1, keepdims=True), errors
    )


def pmq_widths(
    costs: Costs, widths: tuple[int, ...], width_bytes: tuple[int, ...], max_bytes: int, required: tuple[int, ...] = ()
) -> NDArray[np.int64]:
    """The widths [L, E] with the least cost, each layer within `max_bytes`.

    Args:    costs: [L, E, W].   width_bytes: of one expert at each width.   required: widths that at least one expert
             of each layer must have.
    Raises:  ValueError if no choice fits.
    """
    needed = tuple(widths.index(width) for width in required)
    return np.asarray(widths, np.int64)[[_layer(layer, width_bytes, max_bytes, needed) for layer in costs]]


def _layer(costs: Costs, width_bytes: tuple[int, ...], max_bytes: int, required: tuple[int, ...]) -> list[int]:
    """The choice [E] of one layer: dynamic programming over bytes spent and which of the required were chosen."""
    unit = gcd(*width_bytes)
    sizes = [size // unit for size in width_bytes]
    flags = [sum(1 << bit for bit, needed in enumerate(required) if needed == choice) for choice in range(len(sizes))]
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}  # (units, flags): cost, choices
    for expert in costs:
        longer: dict[tuple[int, int], tuple[float, list[int]]] = {}
        for (spent, met), (cost, choices) in best.items():
            for choice, size in enumerate(sizes):
                state, total = (spent + size, met | flags[choice]), cost + float(expert[choice])
                if state[0] <= max_bytes // unit and total < longer.get(state, (inf,))[0]:
                    longer[state] = (total, [*choices, choice])
        best = longer
    whole = (1 << len(required)) - 1
    ends = [found for (_, met), found in best.items() if met == whole]
    if not ends:
        raise ValueError(f"found no choice of widths within {max_bytes:,} bytes a layer")
    return min(ends)[1]
