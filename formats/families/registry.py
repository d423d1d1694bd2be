"""The families by their `model_type`, and the step from a `config.json` to a `ModelSpec`.

A family is data, one file a `model_type`, which nothing else lists. A module is imported when a `config.json` names it:
a pack has its spec in the manifest, and runs without.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.base.commands import did_you_mean

if TYPE_CHECKING:
    from moe_pack.formats.families.encodings import Quantization
    from moe_pack.formats.families.family import Config, Family

# The modules of this folder that are no family's.
_SHARED = frozenset(
    (
        *("__init__", "checkpoint", "checkpoint_files", "claiming", "encodings", "family", "given_names"),
        *("multimodal", "ngrams", "prediction", "published", "readers", "registry", "rotary", "source_reader"),
        *("text_files", "weight_files"),
    )
)
LOADED: dict[str, Family] = {}  # those that have been used

# The keys for the number of experts in all known checkpoints. A config without any of them is that of a dense model.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def family_of(model_type: str) -> Family | None:
    """Returns the family of a `model_type`; None if it is unknown.

    A family's module is imported: that of this name, or all, because a module may have several types.
    """
    for module in (model_type, *modules()):
        if model_type not in LOADED and module in modules():
            LOADED.update((each.model_type, each) for each in families_of(module) if each.model_type not in LOADED)
    return LOADED.get(model_type)


@cache
def modules() -> tuple[str, ...]:
    """Returns the names of the families' modules, which are this folder's other modules, sorted."""
    return tuple(sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - _SHARED))


@cache
def families_of(module: str) -> tuple[Family, ...]:
    """Imports a module, and returns its families but those whose names it keeps to itself."""
    from moe_pack.formats.families.family import Family

    found = vars(import_module(f"{__package__}.{module}"))
    return tuple(each for name, each in found.items() if isinstance(each, Family) and not name.startswith("_"))


@cache
def all_families() -> tuple[Family, ...]:
    """Returns every family, sorted by `model_type`; it imports all of their modules."""
    by_type = {each.model_type: each for module in modules() for each in families_of(module)}
    return tuple(by_type[model_type] for model_type in sorted(by_type))


def model_types() -> tuple[str, ...]:
    """Returns every known `model_type`, sorted."""
    return tuple(family.model_type for family in all_families())


@cache
def short_names() -> dict[str, str]:
    """Returns the name on the hub of each model by its short names; it imports all families."""
    return {short: hub_id for family in all_families() for short, hub_id in family.short_names.items()}


def read_spec(config: Config) -> tuple[Family, ModelSpec, Quantization]:
    """Returns the family of a `config.json`, the model that it describes, and the encoding of quantized tensors.

    Raises:  CheckpointError for a dense model, an unknown architecture, or a key whose effect we do not implement.
    """
    from moe_pack.formats.families.encodings import read_quantization
    from moe_pack.formats.families.readers import dense_model
    from moe_pack.formats.parts.specs import spec_fault

    model_type = config.text("model_type")
    family = family_of(model_type)
    if family is None:
        text = config.group("text_config") if config.has("text_config") else None
        if not any(each.has(key) for each in (config, text) if each is not None for key in _EXPERT_COUNTS):
            raise dense_model(config)
        similar = did_you_mean(model_type, model_types(), "docs/families.md lists the supported ones")
        raise CheckpointError(f"{config.place}: architecture {model_type!r} is not supported{similar}")
    config = config.renamed(family.old_keys)
    quantization = read_quantization(config, family.text_keys)
    spec = replace(family.read_config(config), family=model_type)
    config.refuse_unread(family.ignored_keys)
    fault = spec_fault(spec)
    if fault:
        raise CheckpointError(f"{config.place}: {fault}")
    return family, spec, quantization
