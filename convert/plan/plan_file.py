"""`plan.json`: what the planner decided, as a person reads it and `convert --plan` takes it. See docs/moe-pack.md.

Distinct experts' formats stand once, each expert is a number among them; dense tensors are named.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import (
    ExpertFormat,
    ModelSpec,
    PartFormat,
    Plan,
    PlanError,
    Quantizer,
    RangeReader,
    Selector,
    canonical,
    dense_roles,
    dump,
    load,
    parse,
)
from moe_pack.formats.plan import dense_quantizer, plan_fault, quantizer_fault

MAX_PLAN_BYTES = 1 << 30
VERSION = 1
FORMAT: Literal["moe-pack plan"] = "moe-pack plan"


@dataclass(frozen=True, slots=True)
class DenseChoice:
    """A dense matrix, by its role, that is stored in rows of this format."""

    name: str
    format: PartFormat


@dataclass(frozen=True, slots=True)
class PlanFile:
    """`plan.json`. `experts[l][e]` is a number in `formats`; `sparsity[l][e]` the share of neurons that shall not run.

    `dense`: the dense matrices that do not keep the source's bytes.   `sparsity` is empty where all run.   `theta`: one
    threshold for all experts in place of shares (CORM), or null.
    """

    format: Literal["moe-pack plan"]
    version: int
    selector: Selector
    quantizer: Quantizer
    formats: tuple[ExpertFormat, ...]
    experts: tuple[tuple[int, ...], ...]
    dense: tuple[DenseChoice, ...]
    sparsity: tuple[tuple[float, ...], ...]
    theta: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a pack shall be: formats, and the share of each expert's neurons that shall not run, float64 [L, E].

    `theta`: one threshold for all experts instead (CORM); `sparsity` is then what it is expected to give.
    """

    plan: Plan
    sparsity: NDArray[np.float64]
    theta: float | None = None


def plan_bytes(decision: Decision, spec: ModelSpec) -> bytes:
    """The whole `plan.json` of a decision."""
    plan = decision.plan
    formats = list(dict.fromkeys(expert for layer in plan.experts for expert in layer))
    numbers = {expert: number for number, expert in enumerate(formats)}
    roles = dense_roles(spec)
    dense = tuple(DenseChoice(role.name, part) for role, part in zip(roles, plan.dense, strict=True) if part)
    sparsity = tuple(map(tuple, decision.sparsity.tolist())) if decision.sparsity.any() else ()
    experts = tuple(tuple(numbers[expert] for expert in layer) for layer in plan.experts)
    file = PlanFile(
        FORMAT, VERSION, plan.selector, plan.quantizer, tuple(formats), experts, dense, sparsity, decision.theta
    )
    return canonical(dump(file))


def read_plan(path: Path, spec: ModelSpec) -> Decision:
    """The decision in a `plan.json`, checked against the model.

    Raises:  PlanError if it is no plan, or not one for this model.
    """
    with RangeReader(path, PlanError) as reader:
        if reader.num_bytes > MAX_PLAN_BYTES:
            raise PlanError(f"{path}: {reader.num_bytes:,} bytes, at most {MAX_PLAN_BYTES:,}")
        raw = reader.read(0, reader.num_bytes).tobytes()
    values = parse(raw, str(path), PlanError)
    if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise PlanError(f"{path}: expected format {FORMAT!r}, version {VERSION}; make it with moe-pack plan -o")
    file = load(PlanFile, values, str(path), PlanError)
    plan = _plan(file, spec, str(path))
    fault = plan_fault(plan, spec)
    if fault:
        raise PlanError(f"{path}: {fault}")
    if file.theta is not None and not 0 <= file.theta < 1e30:
        raise PlanError(f"{path}: theta: found {file.theta}, expected a threshold from 0 up")
    return Decision(plan, _sparsity(file, spec, str(path)), file.theta)


def _plan(file: PlanFile, spec: ModelSpec, place: str) -> Plan:
    wrong = next((n for layer in file.experts for n in layer if not 0 <= n < len(file.formats)), None)
    if wrong is not None:
        raise PlanError(f"{place}: experts: found format {wrong}, expected 0 to {len(file.formats) - 1}")
    _check_quantizer(file, place)
    named = {choice.name: choice.format for choice in file.dense}
    roles = dense_roles(spec)
    unknown = named.keys() - {role.name for role in roles}
    if unknown:
        raise PlanError(f"{place}: dense: the model has no {min(unknown)!r}")
    if len(named) < len(file.dense):
        names = [choice.name for choice in file.dense]
        raise PlanError(f"{place}: dense: {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    experts = tuple(tuple(file.formats[number] for number in layer) for layer in file.experts)
    return Plan(file.selector, file.quantizer, experts, tuple(named.get(role.name) for role in roles))


def _check_quantizer(file: PlanFile, place: str) -> None:
    experts = [(f"formats[{n}]", part) for n, one in enumerate(file.formats) for part in (one.gate, one.up, one.down)]
    dense = [(f"dense[{n}]", choice.format) for n, choice in enumerate(file.dense)]
    held = [(where, part, file.quantizer) for where, part in experts]
    for where, part, quantizer in [*held, *((where, part, dense_quantizer(file.quantizer)) for where, part in dense)]:
        if part is not None and (fault := quantizer_fault(part, quantizer)):
            raise PlanError(f"{place}: {where}: {fault}")


def _sparsity(file: PlanFile, spec: ModelSpec, place: str) -> NDArray[np.float64]:
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if not file.sparsity:
        return np.zeros(shape)
    if [len(layer) for layer in file.sparsity] != [shape[1]] * shape[0]:
        raise PlanError(f"{place}: sparsity: expected {shape[0]} lists of {shape[1]} shares: layers and experts")
    sparsity = np.array(file.sparsity)
    if not ((sparsity >= 0) & (sparsity < 1)).all():
        raise PlanError(f"{place}: sparsity: expected shares from 0 up to, but not, 1")
    return sparsity
