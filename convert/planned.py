"""A plan with what is foretold of it: bytes by layout, loss by a profile's losses, speed by a tier."""

from dataclasses import dataclass

import numpy as np

from moe_pack.calib import Losses
from moe_pack.convert.plan_file import Decision
from moe_pack.convert.tier import Foretold
from moe_pack.formats import ModelSpec, PackLayout, Plan, pack_layout


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What is planned for: dimensions, the dtype of each dense tensor in the source, and what choices lose."""

    spec: ModelSpec
    dense_dtypes: tuple[str, ...]
    losses: Losses

    def layout(self, plan: Plan) -> PackLayout:
        """The layout of the pack that a plan makes."""
        return pack_layout(self.spec, plan, self.dense_dtypes)

    def loss(self, decision: Decision) -> float:
        """The nats that a decision is expected to lose.

        Returns: not a number where losses of its formats, or so sparse, are not known; or not what a threshold drops.
        """
        losses, plan = self.losses, decision.plan
        if decision.theta and not decision.sparsity.any():
            return float("nan")
        formats, quantized = losses.of(plan.quantizer)
        numbers = {part: number for number, part in enumerate(formats)}
        kind_idx = losses.kinds.index("both" if plan.selector == "none" else plan.selector)
        total = 0.0
        for l, layer in enumerate(plan.experts):
            for e, expert in enumerate(layer):
                for m, part in enumerate((expert.gate, expert.up, expert.down)):
                    if part is not None:
                        total += float(quantized[l, e, m, numbers[part]]) if part in numbers else float("nan")
                known = losses.sparse[l, e, kind_idx]
                total += float(np.interp(decision.sparsity[l, e], losses.sparsities, known, right=np.nan))
        for role_idx, part in enumerate(plan.dense):
            if part is not None:
                width_idx = losses.dense_widths.index(part.width) if part.width in losses.dense_widths else None
                total += float("nan") if width_idx is None else float(losses.dense[role_idx, width_idx])
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan and what is foretold of it.

    `loss`: nats of KL a token.   `gap`: what a better choice could save at most at this plan's prices, as a share of
    their cost; None where the search knows none.
    """

    decision: Decision
    layout: PackLayout
    loss: float
    gap: float | None
    foretold: Foretold

    @property
    def pack_bytes(self) -> int:
        """Of the pack's large files."""
        return sum(file.num_bytes for _, file in self.layout.files())

    @property
    def expert_bytes(self) -> int:
        """Of all experts' extents."""
        return sum(expert.num_bytes for layer in self.layout.experts for expert in layer)

    @property
    def bits_per_weight(self) -> float:
        """Of the experts, with scales, CRCs and padding."""
        spec = self.layout.spec
        matrices = len(spec.expert.matrices) * spec.expert.intermediate_size * spec.hidden_size
        return 8 * self.expert_bytes / (matrices * len(spec.moe_layers) * spec.router.num_experts)
