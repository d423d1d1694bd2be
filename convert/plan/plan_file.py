"""`plan.json`: the planner's decision in a form that people read and `moe-pack convert --plan` takes.

Each distinct combination of an expert's formats is listed once, and every expert refers to it by number; dense matrices
are listed by role. docs/moe-pack.md describes the file.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import PlanError
from moe_pack.formats.base import json_files
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.safetensors import read_small
from moe_pack.formats.parts import specs

MAX_PLAN_BYTES = 1 << 30
VERSION = 1
FORMAT: Literal["moe-pack plan"] = "moe-pack plan"


@dataclass(frozen=True, slots=True)
class DenseChoice:
    """The format of the rows of one dense matrix, which is named by its role."""

    name: str
    format: plans.PartFormat


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of `plan.json`."""

    format: Literal["moe-pack plan"]
    version: int
    selector: specs.Selector
    quantizer: plans.Quantizer
    formats: tuple[plans.ExpertFormat, ...]
    experts: tuple[tuple[int, ...], ...]  # [l][e], an index of `formats`
    dense: tuple[DenseChoice, ...]  # the dense matrices that do not keep the source's bytes
    # [l][e], the share of the expert's neurons that will not run; empty if all run.
    sparsity: tuple[tuple[float, ...], ...]
    theta: float | None  # one threshold for all experts in place of shares (CORM), or null
    repeats: int = json_files.added(0)  # as in `Plan`
    is_plain: bool = json_files.added(False)  # as in `Decision`


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The decision of what a pack stores."""

    plan: plans.Plan
    sparsity: NDArray[np.float64]  # float64 [L, E], the share of each expert's neurons that will not run
    # One threshold for all experts in place of shares (CORM); `sparsity` is then the estimate of what it drops.
    theta: float | None = None
    # Whether layers are rotated only if `--rotate on` asks for it: in a paper's pack, and in one for vLLM.
    is_plain: bool = False


def plan_bytes(decision: Decision, spec: specs.ModelSpec) -> bytes:
    """Returns the content of a decision's `plan.json`."""
    plan = decision.plan
    formats = list(dict.fromkeys(expert for layer in plan.experts for expert in layer))
    numbers = {expert: number for number, expert in enumerate(formats)}
    roles = specs.dense_roles(spec)
    dense = tuple(DenseChoice(role.name, part) for role, part in zip(roles, plan.dense, strict=True) if part)
    sparsity = tuple(map(tuple, decision.sparsity.tolist())) if decision.sparsity.any() else ()
    experts = tuple(tuple(numbers[expert] for expert in layer) for layer in plan.experts)
    of_plan = (plan.selector, plan.quantizer, tuple(formats), experts, dense, sparsity)
    file = PlanFile(FORMAT, VERSION, *of_plan, decision.theta, plan.repeats, decision.is_plain)
    return json_files.canonical(json_files.dump(file))


def read_plan(path: Path, spec: specs.ModelSpec) -> Decision:
    """Reads the decision in a `plan.json` and checks it against the model.

    Raises:  PlanError if the file is not a plan, or not one for this model.
    """
    raw = read_small(path, MAX_PLAN_BYTES, PlanError).tobytes()
    values = json_files.parse(raw, str(path), PlanError)
    if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise PlanError(f"{path}: expected format {FORMAT!r}, version {VERSION}; make it with moe-pack plan -o")
    file = json_files.load(PlanFile, values, str(path), PlanError)
    plan = _plan(file, spec, str(path))
    fault = plans.plan_fault(plan, spec)
    if fault:
        raise PlanError(f"{path}: {fault}")
    if file.theta is not None and not 0 <= file.theta < 1e30:
        raise PlanError(f"{path}: theta: found {file.theta}, expected at least 0 and less than 1e30")
    return Decision(plan, _sparsity(file, spec, str(path)), file.theta, file.is_plain)


def _plan(file: PlanFile, spec: specs.ModelSpec, place: str) -> plans.Plan:
    wrong = next((n for layer in file.experts for n in layer if not 0 <= n < len(file.formats)), None)
    if wrong is not None:
        raise PlanError(f"{place}: experts: found format {wrong}, expected a number from 0 to {len(file.formats) - 1}")
    _check_quantizer(file, place)
    named = {choice.name: choice.format for choice in file.dense}
    roles = specs.dense_roles(spec)
    unknown = named.keys() - {role.name for role in roles}
    if unknown:
        raise PlanError(f"{place}: dense: the model has no matrix {min(unknown)!r}")
    if len(named) < len(file.dense):
        twice = next(name for name, number in Counter(choice.name for choice in file.dense).items() if number > 1)
        raise PlanError(f"{place}: dense: {twice!r} is listed twice")
    experts = tuple(tuple(file.formats[number] for number in layer) for layer in file.experts)
    dense = tuple(named.get(role.name) for role in roles)
    return plans.Plan(file.selector, file.quantizer, experts, dense, file.repeats)


def _check_quantizer(file: PlanFile, place: str) -> None:
    experts = [(f"formats[{n}]", part) for n, e in enumerate(file.formats) for part in (e.gate, e.up, e.down)]
    dense = [(f"dense[{n}]", choice.format) for n, choice in enumerate(file.dense)]
    for parts, quantizer in ((experts, file.quantizer), (dense, plans.dense_quantizer(file.quantizer))):
        for where, part in parts:
            if part is not None and (fault := plans.quantizer_fault(part, quantizer)):
                raise PlanError(f"{place}: {where}: {fault}")


def _sparsity(file: PlanFile, spec: specs.ModelSpec, place: str) -> NDArray[np.float64]:
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if not file.sparsity:
        return np.zeros(shape)
    if [len(layer) for layer in file.sparsity] != [shape[1]] * shape[0]:
        raise PlanError(f"{place}: sparsity: expected {shape[0]} lists of {shape[1]} shares, one list for each layer")
    sparsity = np.array(file.sparsity)
    if not ((sparsity >= 0) & (sparsity < 1)).all():
        raise PlanError(f"{place}: sparsity: expected shares of at least 0 and less than 1")
    return sparsity
