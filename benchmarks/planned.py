"""The project's own plans: what `contest.py` compares with everything else."""

from dataclasses import replace

from moe_pack.calib import Profile, losses_of
from moe_pack.convert.allocation import least_loss
from moe_pack.formats import ExpertFormat, ModelSpec, PartFormat, Plan, PlanError, Quantizer, uniform_dense

QUANTIZER: Quantizer = "calibrated"  # of these plans


def ours(
    profile: Profile,
    spec: ModelSpec,
    max_bytes: int,
    allowed: tuple[PartFormat, ...] | None = None,
    quantizer: Quantizer = QUANTIZER,
) -> Plan:
    """The plan with the least predicted loss whose experts take at most `max_bytes`.

    Args:    allowed: formats to choose from; all by default.
    Raises:  PlanError if experts do not fit.
    """
    found = least_loss(spec, "none", replace(losses_of(profile), quantizer=quantizer), max_bytes, allowed)
    if found is None:
        raise PlanError(f"experts in the smallest format take more than {max_bytes:,} bytes")
    return found.decision.plan


def single(spec: ModelSpec, part: PartFormat, quantizer: Quantizer = QUANTIZER) -> Plan:
    """The plan that stores every matrix of every expert alike."""
    layer = (ExpertFormat(part, part, part),) * spec.router.num_experts
    return Plan("none", quantizer, (layer,) * len(spec.moe_layers), uniform_dense(spec, None))


def foretold(profile: Profile, quantizer: Quantizer = QUANTIZER) -> dict[PartFormat, float]:
    """The nats that a profile foretells to be lost with all experts in one format, for each that its rows allow."""
    formats, losses = losses_of(profile).of(quantizer)
    return dict(zip(formats, losses.sum(axis=(0, 1, 2)).tolist(), strict=True))
