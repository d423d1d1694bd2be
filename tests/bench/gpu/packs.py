"""The synthetic packs that GPU benchmarks run: models, plans, and how popular their experts are."""

from collections.abc import Callable
from dataclasses import dataclass

from moe_pack.formats import BF16, ExpertFormat, ModelSpec, Plan, part_format, uniform_plan
from moe_pack.formats.pack.plans import uniform_dense

SKEW, CORRELATION = 0.5, 0.5  # of experts' popularity, and of routes from layer to layer
_GROUP = 64


@dataclass(frozen=True, slots=True)
class PackRequest:
    """A synthetic pack. `model`: a published one's name.   `plan`: made for the model's spec."""

    name: str
    model: str
    plan: Callable[[ModelSpec], Plan]
    sparsity: float


def mixed_plan(spec: ModelSpec) -> Plan:
    low, high = part_format(2, _GROUP), part_format(4, _GROUP)
    formats = (ExpertFormat(low, low, low), ExpertFormat(high, low, high))
    experts = tuple(
        tuple(formats[(l + e) % 2] for e in range(spec.router.num_experts)) for l in range(len(spec.moe_layers))
    )
    return Plan("up", "nearest", experts, uniform_dense(spec, high))


def even_plan(bits: int) -> Callable[[ModelSpec], Plan]:
    part = part_format(bits, _GROUP)
    return lambda spec: uniform_plan(spec, "up", part, part, part, "nearest")


def floe_plan(spec: ModelSpec) -> Plan:
    """FloE's: up in 2 bits, everything else as it is."""
    return uniform_plan(spec, "up", part_format(2, _GROUP), BF16)


# Mixtral-8x7B with selectors of 2 bits, records of 2 and 4 by turns, 80% of the neurons not running; Qwen3-30B-A3B in 4
# bits, all neurons running; and Qwen3.6-35B-A3B likewise.
MIXTRAL = PackRequest("mixtral-8x7b-mixed", "mixtral-8x7b", mixed_plan, 0.8)
QWEN3 = PackRequest("qwen3-30b-a3b-4bit", "qwen3-30b-a3b", even_plan(4), 0.0)
QWEN36 = PackRequest("qwen3.6-35b-a3b-4bit", "qwen3.6-35b-a3b", even_plan(4), 0.0)
FLOE = PackRequest("mixtral-8x7b-floe", "mixtral-8x7b", floe_plan, 0.8)
