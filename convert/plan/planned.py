"""A plan with what is foretold of it: bytes by layout, loss by a profile's losses, speed by a tier.

A plan as a person reads it, and as JSON: what it comes to, how its memory is divided, what it stores how.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import expm1, isfinite, isnan
from typing import Any

import numpy as np

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.tiers import SpeedEstimate
from moe_pack.formats import BF16, MATRICES, ExpertFormat, ModelSpec, PackLayout, Plan, size_text
from moe_pack.formats.layout import pack_layout
from moe_pack.formats.plan import E5M2, FP8, MXFP4, format_text
from moe_pack.formats.spec import num_parameters
from moe_pack.runtime.offload.budget import expert_compression


@dataclass(frozen=True, slots=True, eq=False)
class PlanningModel:
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
class EstimatedPlan:
    """A plan and what is foretold of it.

    `loss`: nats of KL a token.   `gap`: what a better choice could save at most at this plan's prices, as a share of
    their cost; None where the search knows none.
    """

    decision: Decision
    layout: PackLayout
    loss: float
    gap: float | None
    foretold: SpeedEstimate

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


_MOST_FORMATS = 6  # lines of experts' formats
_LAYER_GROUPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PlanOption:
    """One of the plans to choose from: what it was asked for, and the plan; or, where there is none, why."""

    name: str
    planned: EstimatedPlan | None
    fault: str | None = None


def model_text(spec: ModelSpec, name: str) -> str:
    """What is planned for, in a line."""
    parameters = num_parameters(spec)
    experts = f"{len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    return (
        f"{name}: {spec.family}, {experts}, {parameters / 1e9:.2f} B parameters, {size_text(2 * parameters)} in 16 bit"
    )


def offer_lines(offers: Sequence[PlanOption], losses: Losses) -> Iterator[str]:
    """A table, one plan a line; under it why there is none where there is none."""
    yield (
        f"{'plan':28} {'KL':>8} {'perplexity':>11} {'pack':>10} {'bits':>5} {'sparsity':>8} {'selector':>8} "
        f"{'hits':>6} {'read a token':>12} {'tokens/s':>9}"
    )
    for offer in offers:
        if offer.planned is None:
            yield f"{offer.name:28} none"
        else:
            yield f"{offer.name:28} {_offer_cells(offer.planned, losses)}"
    for offer in offers:
        if offer.fault is not None:
            yield f"{offer.name}: {offer.fault}"


def _offer_cells(planned: EstimatedPlan, losses: Losses) -> str:
    foretold, loss = planned.foretold, planned.loss
    lost = f"{'not':>8} {'foretold':>11}" if isnan(loss) else f"{loss:8.4f} {_grown(planned, losses):>+11.2%}"
    sparsity = mean_sparsity(planned, losses)
    return (
        f"{lost} {size_text(planned.pack_bytes):>10} {planned.bits_per_weight:5.2f} {sparsity:8.0%} "
        f"{planned.decision.plan.selector:>8} {foretold.hit_rate:6.1%} {size_text(foretold.fetched_bytes):>12} "
        f"{foretold.tokens_per_second:9.2f}"
    )


def _grown(planned: EstimatedPlan, losses: Losses) -> float:
    return expm1(losses.nll_per_kl * planned.loss)


def mean_sparsity(planned: EstimatedPlan, losses: Losses) -> float:
    """The share of neurons that do not run, over the experts that tokens choose."""
    return float(np.average(planned.decision.sparsity, weights=losses.popularity))


def share_lines(planned: EstimatedPlan) -> Iterator[str]:
    """How the memory is divided, to the byte."""
    shares = planned.foretold.shares
    total = sum(share.num_bytes for share in shares)
    yield f"{'memory':20} {'bytes':>17}   share"
    for share in shares:
        yield f"{share.name:20} {share.num_bytes:>17,} {share.num_bytes / total:7.1%}"
    yield f"{'total':20} {total:>17,} {1:7.1%}"


def decision_lines(planned: EstimatedPlan) -> Iterator[str]:
    """What is stored how, in a few lines."""
    plan, sparsity = planned.decision.plan, planned.decision.sparsity
    counts = Counter(expert for layer in plan.experts for expert in layer)
    total = sum(counts.values())
    yield f"experts by gate / up / down, quantizer {plan.quantizer}:"
    for formats, number in counts.most_common(_MOST_FORMATS):
        yield f"{number / total:7.1%}  {expert_text(formats)}"
    if len(counts) > _MOST_FORMATS:
        left = sum(number for _, number in counts.most_common()[_MOST_FORMATS:])
        yield f"{left / total:7.1%}  in {len(counts) - _MOST_FORMATS} other formats"
    spec, experts = planned.layout.spec, planned.layout.experts
    weights = len(spec.expert.matrices) * spec.expert.intermediate_size * spec.hidden_size * spec.router.num_experts
    yield f"{'layers':>9}  bits  sparsity"
    for group in np.array_split(np.arange(len(experts)), min(_LAYER_GROUPS, len(experts))):
        bits = 8 * sum(e.num_bytes for idx in group for e in experts[idx]) / (weights * len(group))
        first, last = spec.moe_layers[group[0]], spec.moe_layers[group[-1]]
        ends = str(first) if first == last else f"{first}-{last}"
        yield f"{ends:>9} {bits:5.2f} {sparsity[group].mean():9.0%}"
    yield f"dense matrices: {dense_text(planned)}"


def expert_text(formats: ExpertFormat) -> str:
    """The formats of an expert's matrices: `3 bit g64 / 2 bit g64 / 4 bit g64`."""
    parts = (formats.of(matrix) for matrix in MATRICES)
    return " / ".join("-" if part is None else format_text(part) for part in parts)


def dense_text(planned: EstimatedPlan) -> str:
    """How many dense matrices are stored how, by what they take."""
    counted: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for dense, part in zip(planned.layout.dense, planned.decision.plan.dense, strict=True):
        if dense.role.quantizable:
            name = "the source's" if part is None else format_text(part)
            counted[name] += 1
            taken[name] += dense.entry.num_bytes
    return ", ".join(f"{counted[name]} in {name} ({size_text(num_bytes)})" for name, num_bytes in taken.most_common())


def gap_text(planned: EstimatedPlan) -> str | None:
    """How far the choice may be from the best."""
    if planned.gap is None:
        return None
    return f"no choice of formats costs less by more than {planned.gap:.4%} at this plan's prices (duality gap)"


def compression_text(planned: EstimatedPlan) -> str:
    """How much less of an expert is moved than of its 16-bit weights."""
    expert, sparsity = planned.layout.experts[0][0], float(planned.decision.sparsity[0, 0])
    found = expert_compression(expert, sparsity)
    return (
        f"of an expert {found.codes:.1f} times less is moved than of its 16-bit weights by codes alone, "
        f"{found.stored:.1f} times as stored; the paper says 9.3 at 90%"
    )


def offer_json(offer: PlanOption, losses: Losses) -> dict[str, Any]:
    """A plan's figures; only its name and what is wrong where there is none."""
    if offer.planned is None:
        return {"name": offer.name, "fault": offer.fault}
    planned = offer.planned
    foretold = planned.foretold
    return {
        "name": offer.name,
        "kl": planned.loss if isfinite(planned.loss) else None,
        "perplexity_increase": _grown(planned, losses) if isfinite(planned.loss) else None,
        "pack_bytes": planned.pack_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "selector": planned.decision.plan.selector,
        "quantizer": planned.decision.plan.quantizer,
        "sparsity": mean_sparsity(planned, losses),
        "duality_gap": planned.gap,
        "memory_bytes": {share.name: share.num_bytes for share in foretold.shares},
        "policy": foretold.policy,
        "hit_rate": foretold.hit_rate,
        "fetched_bytes_per_token": foretold.fetched_bytes,
        "read_bytes_per_token": foretold.read_bytes,
        "tokens_per_second": foretold.tokens_per_second,
    }
