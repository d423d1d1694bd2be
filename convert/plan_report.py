"""A plan as a person reads it, and as JSON: what it comes to, how its memory is divided, what it stores how."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import expm1, isfinite, isnan
from typing import Any

import numpy as np

from moe_pack.calib import Losses
from moe_pack.convert.planned import Planned
from moe_pack.formats import MATRICES, ExpertFormat, ModelSpec, format_text, num_parameters, size_text
from moe_pack.runtime import expert_compression

_MOST_FORMATS = 6  # lines of experts' formats
_LAYER_GROUPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """One of the plans to choose from: what it was asked for, and the plan; or, where there is none, why."""

    name: str
    planned: Planned | None
    fault: str | None = None


def model_text(spec: ModelSpec, name: str) -> str:
    """What is planned for, in a line."""
    parameters = num_parameters(spec)
    experts = f"{len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    return (
        f"{name}: {spec.family}, {experts}, {parameters / 1e9:.2f} B parameters, {size_text(2 * parameters)} in 16 bit"
    )


def offer_lines(offers: Sequence[Offer], losses: Losses) -> Iterator[str]:
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


def _offer_cells(planned: Planned, losses: Losses) -> str:
    foretold, loss = planned.foretold, planned.loss
    lost = f"{'not':>8} {'foretold':>11}" if isnan(loss) else f"{loss:8.4f} {_grown(planned, losses):>+11.2%}"
    sparsity = mean_sparsity(planned, losses)
    return (
        f"{lost} {size_text(planned.pack_bytes):>10} {planned.bits_per_weight:5.2f} {sparsity:8.0%} "
        f"{planned.decision.plan.selector:>8} {foretold.hit_rate:6.1%} {size_text(foretold.fetched_bytes):>12} "
        f"{foretold.tokens_per_second:9.2f}"
    )


def _grown(planned: Planned, losses: Losses) -> float:
    return expm1(losses.nll_per_kl * planned.loss)


def mean_sparsity(planned: Planned, losses: Losses) -> float:
    """The share of neurons that do not run, over the experts that tokens choose."""
    return float(np.average(planned.decision.sparsity, weights=losses.popularity))


def share_lines(planned: Planned) -> Iterator[str]:
    """How the memory is divided, to the byte."""
    shares = planned.foretold.shares
    total = sum(share.num_bytes for share in shares)
    yield f"{'memory':20} {'bytes':>17}   share"
    for share in shares:
        yield f"{share.name:20} {share.num_bytes:>17,} {share.num_bytes / total:7.1%}"
    yield f"{'total':20} {total:>17,} {1:7.1%}"


def decision_lines(planned: Planned) -> Iterator[str]:
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


def dense_text(planned: Planned) -> str:
    """How many dense matrices are stored how, by what they take."""
    counted: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for dense, part in zip(planned.layout.dense, planned.decision.plan.dense, strict=True):
        if dense.role.quantizable:
            name = "the source's" if part is None else format_text(part)
            counted[name] += 1
            taken[name] += dense.entry.num_bytes
    return ", ".join(f"{counted[name]} in {name} ({size_text(num_bytes)})" for name, num_bytes in taken.most_common())


def gap_text(planned: Planned) -> str | None:
    """How far the choice may be from the best."""
    if planned.gap is None:
        return None
    return f"no choice of formats costs less by more than {planned.gap:.4%} at this plan's prices (duality gap)"


def compression_text(planned: Planned) -> str:
    """How much less of an expert is moved than of its 16-bit weights."""
    expert, sparsity = planned.layout.experts[0][0], float(planned.decision.sparsity[0, 0])
    found = expert_compression(expert, sparsity)
    return (
        f"of an expert {found.codes:.1f} times less is moved than of its 16-bit weights by codes alone, "
        f"{found.stored:.1f} times as stored; the paper says 9.3 at 90%"
    )


def offer_json(offer: Offer, losses: Losses) -> dict[str, Any]:
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
