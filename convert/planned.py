"""A plan with what is foretold of it: bytes by layout, loss by a profile's losses, speed by a tier."""

from dataclasses import dataclass

import numpy as np

from moe_pack.calib import Losses
from moe_pack.convert.plan_file import Decision
from moe_pack.convert.tier import Foretold
from moe_pack.formats import BF16, E5M2, FP8, MATRICES, MXFP4, ModelSpec, PackLayout, Plan, pack_layout


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
        total = self._quantized_loss(plan) + self._sparse_loss(decision)
        for role_idx, part in enumerate(plan.dense):
            if part is not None and not part.keeps_source:
                width_idx = losses.dense_widths.index(part.width) if part.width in losses.dense_widths else None
                total += float("nan") if width_idx is None else float(losses.dense[role_idx, width_idx])
        return total

    def _quantized_loss(self, plan: Plan) -> float:
        """Of all experts' matrices."""
        formats, quantized = self.losses.of(plan.quantizer)
        numbers = {part: number for number, part in enumerate(formats)}
        # What keeps the source's codes loses what bfloat16 does: nothing.
        numbers |= dict.fromkeys((FP8, E5M2, MXFP4), numbers[BF16])
        kinds = {expert for layer in plan.experts for expert in layer}  # few, of thousands of experts
        if any(part is not None and part not in numbers for kind in kinds for part in (kind.gate, kind.up, kind.down)):
            return float("nan")
        # A gate that is not there is counted as any format, and adds nothing.
        known = {kind: [numbers[part] if part else 0 for part in (kind.gate, kind.up, kind.down)] for kind in kinds}
        places = np.array([[known[expert] for expert in layer] for layer in plan.experts])  # [L, E, 3]
        found = np.take_along_axis(quantized, places[..., None], axis=3)[..., 0]
        has_matrix = [matrix in self.spec.expert.matrices for matrix in MATRICES]
        return float(found[:, :, has_matrix].sum())

    def _sparse_loss(self, decision: Decision) -> float:
        """Of all neurons that do not run; between known sparsities interpolated, beyond them not a number."""
        losses, sparsity = self.losses, decision.sparsity
        kind_idx = losses.kinds.index("both" if decision.plan.selector == "none" else decision.plan.selector)
        levels, known = np.array(losses.sparsities), losses.sparse[:, :, kind_idx]
        if sparsity.max() > levels[-1]:
            return float("nan")
        above = np.clip(np.searchsorted(levels, sparsity), 1, len(levels) - 1)
        part = (sparsity - levels[above - 1]) / (levels[above] - levels[above - 1])
        low, high = (np.take_along_axis(known, place[..., None], axis=2)[..., 0] for place in (above - 1, above))
        return float((low + part * (high - low)).sum())


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
