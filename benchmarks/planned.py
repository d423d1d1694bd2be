"""The project's own plan at given bytes: what `equal_bytes.py` compares with everything else."""

from moe_pack.calib import Profile, losses_of
from moe_pack.convert.allocation import least_loss
from moe_pack.formats import ModelSpec, Plan, PlanError


def ours(profile: Profile, spec: ModelSpec, max_bytes: int) -> Plan:
    """The plan with the least predicted loss whose experts take at most `max_bytes`.

    Raises:  PlanError if experts do not fit.
    """
    found = least_loss(spec, "none", losses_of(profile), max_bytes)
    if found is None:
        raise PlanError(f"experts in the smallest format take more than {max_bytes:,} bytes")
    return found.decision.plan
