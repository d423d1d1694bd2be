"""The project's own plan at given bytes: what `equal_bytes.py` compares with everything else."""

from itertools import product

import numpy as np

from moe_pack.calib import Profile
from moe_pack.formats import ExpertFormat, ModelSpec, Plan, PlanError, expert_layout, part_format

_GROUP = 64
_WIDTHS = (2, 3, 4, 8)  # as a profile has them, in this order


def ours(profile: Profile, spec: ModelSpec, max_bytes: int) -> Plan:
    """The plan with the least predicted loss whose experts take at most `max_bytes`.

    Meaning: a width for every matrix, in groups of 64; exact, by dynamic programming over the bytes spent.
    Raises:  PlanError if experts do not fit.
    """
    losses = np.stack([profile.errors(layer).quantized for layer in spec.moe_layers])  # [L, E, 3, widths]
    costs = (losses.astype(np.float64) * profile.effects().quantized[:, None]).reshape(-1, 3, len(_WIDTHS))
    choices = list(product(range(len(_WIDTHS)), repeat=3))
    formats = [ExpertFormat(*(part_format(_WIDTHS[number], _GROUP) for number in choice)) for choice in choices]
    sizes = [expert_layout(held, "none", spec.expert, spec.hidden_size).num_bytes for held in formats]
    unit = int(np.gcd.reduce(sizes))
    room, num_experts = max_bytes // unit, len(costs)
    best = np.zeros(room + 1)  # [units]: the least cost of the experts so far within so many
    taken = np.zeros((num_experts, room + 1), np.int64)
    for number, expert in enumerate(costs):
        tried = np.full((len(choices), room + 1), np.inf)
        for row, choice, size in zip(tried, choices, sizes, strict=True):
            row[size // unit :] = best[: max(room + 1 - size // unit, 0)] + expert[range(3), choice].sum()
        taken[number], best = tried.argmin(axis=0), tried.min(axis=0)
    if not np.isfinite(best[-1]):
        raise PlanError(f"experts take at least {min(sizes) * num_experts:,} bytes, expected at most {max_bytes:,}")
    chosen: list[ExpertFormat] = []
    for number in reversed(range(num_experts)):
        choice_idx = int(taken[number, room])
        chosen.insert(0, formats[choice_idx])
        room -= sizes[choice_idx] // unit
    E = spec.router.num_experts
    return Plan("none", "hqq", tuple(tuple(chosen[i : i + E]) for i in range(0, num_experts, E)), None)
