"""A plan with its estimates, as lines of text and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import expm1, isfinite, isnan
from typing import Any, Literal

import numpy as np

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.rotation import PlanRotation, with_rotation
from moe_pack.convert.plan.speed import SpeedEstimate
from moe_pack.formats import size_text
from moe_pack.formats.pack import layouts, plans
from moe_pack.formats.parts import specs
from moe_pack.runtime.offload.budgets import expert_compression

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, eq=False)
class PlanningModel:
    """The model for which plans are made."""

    spec: specs.ModelSpec
    dense_dtypes: tuple[str, ...]  # of each dense tensor in the source, in the order of `dense_roles`
    losses: Losses  # of every choice
    rotation: PlanRotation = field(default_factory=PlanRotation)  # of the layers of packs made by the plans

    def layout(self, plan: plans.Plan) -> layouts.PackLayout:
        """Returns the layout of a plan's pack."""
        return with_rotation(layouts.pack_layout(self.spec, plan, self.dense_dtypes), self.rotation.of(plan))

    def loss(self, decision: Decision) -> float:
        """Estimates the loss of a decision in nats of KL divergence a token.

        Returns: NaN if the losses of its formats or sparsities are not known, or not how much its threshold drops.
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

    def _quantized_loss(self, plan: plans.Plan) -> float:
        formats, quantized = self.losses.of(plan.quantizer)
        numbers = {part: number for number, part in enumerate(formats)}
        # Formats that keep the source's codes lose nothing, like bfloat16.
        numbers |= dict.fromkeys(plans.KEPT, numbers[plans.BF16])
        kinds = {expert for layer in plan.experts for expert in layer}  # few, even for thousands of experts
        if any(part is not None and part not in numbers for kind in kinds for part in (kind.gate, kind.up, kind.down)):
            return float("nan")
        # A family without gates gets any format for them: their loss is 0.
        known = {kind: [numbers[part] if part else 0 for part in (kind.gate, kind.up, kind.down)] for kind in kinds}
        places = np.array([[known[expert] for expert in layer] for layer in plan.experts])  # [L, E, 3]
        lost = np.take_along_axis(quantized, places[..., None], axis=3)[..., 0]
        has_matrix = [matrix in self.spec.expert.matrices for matrix in specs.MATRICES]
        return float(lost[:, :, has_matrix].sum())

    def _sparse_loss(self, decision: Decision) -> float:
        """Returns the loss of all neurons that do not run, interpolated between known sparsities; NaN beyond them."""
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
    """A plan with its estimates."""

    decision: Decision
    layout: layouts.PackLayout
    loss: float  # nats of KL divergence a token
    # The most that a better choice could save at this plan's prices, as a share of the plan's cost; None if the search
    # does not know it.
    gap: float | None
    speed: SpeedEstimate  # with the division of the memory

    @property
    def pack_bytes(self) -> int:
        """The bytes of the pack's large files."""
        return sum(file.num_bytes for _, file in self.layout.files())

    @property
    def expert_bytes(self) -> int:
        """The bytes of all experts' extents."""
        return sum(expert.num_bytes for layer in self.layout.experts for expert in layer)

    @property
    def bits_per_weight(self) -> float:
        """The bits of an expert's weight, with scales, CRCs and padding."""
        spec = self.layout.spec
        matrices = len(spec.expert.matrices) * spec.expert.source_size * spec.hidden_size
        return 8 * self.expert_bytes / (matrices * len(spec.moe_layers) * spec.router.num_experts)


_MOST_FORMATS = 6  # lines of experts' formats
_LAYER_GROUPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PlanOption:
    """One of the plans to choose from."""

    name: str  # what was asked for
    planned: EstimatedPlan | None
    fault: str | None = None  # why there is no plan


def model_text(spec: specs.ModelSpec, name: str) -> str:
    """Returns a line that describes the model."""
    parameters = specs.num_parameters(spec)
    experts = f"{len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    return (
        f"{name}: {spec.family}, {experts}, {parameters / 1e9:.2f} B parameters, {size_text(2 * parameters)} in 16 bits"
    )


# Measured tokens a second as shares of the estimated ones: on CPUs in 22 runs (docs/benchmarks/memory.md), on a
# GPU with the plans of docs/benchmarks/gpu.md.
_MEASURED_SHARES: dict[Kind, tuple[float, float]] = {"cpu": (1 / 1.42, 1 / 0.69), "cuda": (1 / 2.8, 1 / 1.6)}


def speed_range(planned: EstimatedPlan, device: Kind) -> tuple[float, float]:
    """Returns the tokens a second to expect, least and most: the estimate, as far as measured speeds were off."""
    least, most = _MEASURED_SHARES[device]
    return least * planned.speed.tokens_per_second, most * planned.speed.tokens_per_second


def speed_note(device: Kind) -> str:
    """Returns a line that says where the range of tokens a second comes from."""
    least, most = (two_digits(share) for share in _MEASURED_SHARES[device])
    if device == "cpu":
        return f"tokens/s: measured speeds were {least} to {most} times the estimate"
    return (
        f"tokens/s: measured speeds on an H200 were {least} to {most} times the estimate, for moe-run --misses auto, "
        "where the CPU and the link share what GPU memory lacks"
    )


def speed_text(planned: EstimatedPlan, device: Kind) -> str:
    """Returns the tokens a second to expect: 42 to 73."""
    return " to ".join(two_digits(rate) for rate in speed_range(planned, device))


def two_digits(value: float) -> str:
    """Returns an estimate with two significant digits, because estimates have no more: 0.015, 4.1, 860, 1,200."""
    return f"{float(f'{value:.2g}'):,.10g}"


def option_lines(options: Sequence[PlanOption], losses: Losses, device: Kind) -> Iterator[str]:
    """Yields a table with a line for each plan, then the reasons for the plans that do not exist."""
    yield (
        f"{'plan':28} {'KL':>8} {'perplexity':>11} {'pack':>10} {'bits':>5} {'sparsity':>8} {'selector':>8} "
        f"{'hits':>5} {'read a token':>12} {'tokens/s':>16}"
    )
    for option in options:
        if option.planned is None:
            yield f"{option.name:28} none"
        else:
            yield f"{option.name:28} {_cells(option.planned, losses, device)}"
    for option in options:
        if option.fault is not None:
            yield f"{option.name}: {option.fault}"


def _cells(planned: EstimatedPlan, losses: Losses, device: Kind) -> str:
    speed, loss, sparsity = planned.speed, planned.loss, mean_sparsity(planned, losses)
    lost = f"{'unknown':>8} {'unknown':>11}"
    if not isnan(loss):
        lost = f"{two_digits(loss):>8} {f'+{two_digits(100 * expm1(losses.nll_per_kl * planned.loss))}%':>11}"
    number, unit = size_text(speed.fetched_bytes).split()
    return (
        f"{lost} {size_text(planned.pack_bytes):>10} {planned.bits_per_weight:5.2f} {sparsity:8.0%} "
        f"{planned.decision.plan.selector:>8} {speed.hit_rate:5.0%} {f'{two_digits(float(number))} {unit}':>12} "
        f"{speed_text(planned, device):>16}"
    )


def mean_sparsity(planned: EstimatedPlan, losses: Losses) -> float:
    """Returns the share of neurons that do not run, as a mean over the experts that tokens choose."""
    return float(np.average(planned.decision.sparsity, weights=losses.popularity))


def share_lines(planned: EstimatedPlan) -> Iterator[str]:
    """Yields the division of the memory budget, to the byte."""
    shares = planned.speed.shares
    total = sum(share.num_bytes for share in shares)
    yield f"{'memory':20} {'bytes':>17}   share"
    for share in shares:
        yield f"{share.name:20} {share.num_bytes:>17,} {share.num_bytes / total:7.1%}"
    yield f"{'total':20} {total:>17,} {1:7.1%}"


def decision_lines(planned: EstimatedPlan) -> Iterator[str]:
    """Yields the formats and sparsities of the plan, in a few lines."""
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
    weights = len(spec.expert.matrices) * spec.expert.source_size * spec.hidden_size * spec.router.num_experts
    yield f"{'layers':>9}  bits  sparsity"
    for group in np.array_split(np.arange(len(experts)), min(_LAYER_GROUPS, len(experts))):
        bits = 8 * sum(e.num_bytes for idx in group for e in experts[idx]) / (weights * len(group))
        first, last = spec.moe_layers[group[0]], spec.moe_layers[group[-1]]
        ends = str(first) if first == last else f"{first}-{last}"
        yield f"{ends:>9} {bits:5.2f} {sparsity[group].mean():9.0%}"
    yield f"dense matrices: {dense_text(planned)}"


def expert_text(formats: plans.ExpertFormat) -> str:
    """Returns the formats of an expert's matrices: `3 bit g64 / 2 bit g64 / 4 bit g64`."""
    parts = (formats.of(matrix) for matrix in specs.MATRICES)
    return " / ".join("-" if part is None else plans.format_text(part) for part in parts)


def dense_text(planned: EstimatedPlan) -> str:
    """Returns the formats of the dense matrices, with number and bytes, the largest first."""
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for dense, part in zip(planned.layout.dense, planned.decision.plan.dense, strict=True):
        if dense.role.quantizable:
            name = "the source's format" if part is None else plans.format_text(part)
            numbers[name] += 1
            sizes[name] += dense.entry.num_bytes
    return ", ".join(f"{numbers[name]} in {name} ({size_text(num_bytes)})" for name, num_bytes in sizes.most_common())


def gap_text(planned: EstimatedPlan) -> str | None:
    """Returns how far the plan may be from the best one, or None if that is not known."""
    if planned.gap is None:
        return None
    return f"at this plan's prices, no choice of formats costs more than {planned.gap:.4%} less (duality gap)"


def compression_text(planned: EstimatedPlan) -> str:
    """Returns how many times fewer bytes of an expert are moved than its 16-bit weights have."""
    expert, sparsity = planned.layout.experts[0][0], float(planned.decision.sparsity[0, 0])
    codes, stored = expert_compression(expert, sparsity)
    return (
        f"an expert moves {codes:.1f} times fewer bytes than its 16-bit weights have if only codes count, "
        f"{stored:.1f} times fewer as stored; the paper says 9.3 times at 90% sparsity"
    )


def option_json(option: PlanOption, losses: Losses, device: Kind) -> dict[str, Any]:
    """Returns a plan's figures, or only its name and fault if it does not exist."""
    if option.planned is None:
        return {"name": option.name, "fault": option.fault}
    planned = option.planned
    speed = planned.speed
    return {
        "name": option.name,
        "kl": planned.loss if isfinite(planned.loss) else None,
        "perplexity_increase": expm1(losses.nll_per_kl * planned.loss) if isfinite(planned.loss) else None,
        "pack_bytes": planned.pack_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "selector": planned.decision.plan.selector,
        "quantizer": planned.decision.plan.quantizer,
        "sparsity": mean_sparsity(planned, losses),
        "duality_gap": planned.gap,
        "memory_bytes": {share.name: share.num_bytes for share in speed.shares},
        "policy": speed.policy,
        "hit_rate": speed.hit_rate,
        "fetched_bytes_per_token": speed.fetched_bytes,
        "read_bytes_per_token": speed.read_bytes,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_range": speed_range(planned, device),
    }
