"""Published models: the specs of their real config.json, and the figures that their publishers print."""

import json
import math
from pathlib import Path

from moe_pack.formats import ModelSpec, dense_roles
from moe_pack.formats.families.family import Config, Published
from moe_pack.formats.families.registry import all_families, read_spec
from moe_pack.formats.parts.specs import num_active_parameters, num_parameters
from support.models import TESTS

CONFIGS = TESTS.parent / "formats" / "families" / "configs"


PUBLISHED: tuple[Published, ...] = tuple(model for family in all_families() for model in family.published)
# Families of which no public copy of a real config.json was found, and why.
UNPUBLISHED = {family.model_type: family.unpublished for family in all_families() if family.unpublished}


def path_of(published: Published) -> Path:
    return CONFIGS / f"{published.name}.json"


def counted(published: Published) -> str:
    """What the publisher counts otherwise than all weights; empty where nothing is."""
    both = published.leaves_out
    total, active = both + published.total_leaves_out, both + published.active_leaves_out
    notes = [f"total without {' and '.join(total)}"] if total else []
    notes += ["with the layer that predicts two tokens ahead"] if published.adds_prediction_layer else []
    notes += [f"active without {' and '.join(active)}"] if active else []
    return ", ".join(notes)


def spec_of(published: Published) -> ModelSpec:
    """The spec that our reader makes of the real config."""
    values = json.loads(path_of(published).read_text())
    return read_spec(Config(values, path_of(published).name))[1]


def total(published: Published, spec: ModelSpec) -> int:
    """All parameters, counted as the publisher counts."""
    added = prediction_layer(spec) if published.adds_prediction_layer else 0
    return num_parameters(spec) - left_out(published.leaves_out + published.total_leaves_out, spec) + added


def active(published: Published, spec: ModelSpec) -> int:
    """The parameters one token uses, counted as the publisher counts."""
    return num_active_parameters(spec) - left_out(published.leaves_out + published.active_leaves_out, spec)


def left_out(roles: tuple[str, ...], spec: ModelSpec) -> int:
    return sum(math.prod(role.shape) for role in dense_roles(spec) if role.name.split(".")[-1] in roles)


def prediction_layer(spec: ModelSpec) -> int:
    """A decoder layer with experts, its input's projection from two hidden states, and three norms (GLM-4.5)."""
    last, d = f"layers.{spec.num_hidden_layers - 1}.", spec.hidden_size
    dense = sum(math.prod(role.shape) for role in dense_roles(spec) if role.name.startswith(last))
    experts = spec.router.num_experts * spec.expert.intermediate_size * d * len(spec.expert.matrices)
    return dense + experts + 2 * d * d + 3 * d


def agrees(number: int, unit: float, printed: str) -> bool:
    """Whether a number is less than one unit of the last printed digit away from what is printed of it."""
    return abs(number / unit - float(printed)) < 10.0 ** -len(printed.partition(".")[2])
