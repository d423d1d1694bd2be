"""What a pack is made from: everything that decides its bytes, in one hand.

What a pack says of itself: the digest that tells its making from others, its small tables, its manifest.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.profile import Profile, check_same_source
from moe_pack.calib.quantize import needs_inputs
from moe_pack.formats import CheckpointError, ModelSpec, PackLayout, Plan, PlanError, RangeReader, canonical, dump
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.layout import DENSE_FILE, UNUSED_FILE, experts_file
from moe_pack.formats.manifest import (
    COPIED_FILES,
    FORMAT,
    INDEX_FILE,
    ORDER_FILE,
    SOURCE_FILE,
    THRESHOLDS_FILE,
    VERSION,
    ContentFile,
    ExpertFile,
    Manifest,
    PackageVersion,
    QuantizedDense,
    Totals,
    account_bytes,
    index_bytes,
    manifest_bytes,
    order_bytes,
    order_fault,
    root_digest,
    thresholds_bytes,
)
from moe_pack.formats.plan import dense_quantizer
from moe_pack.formats.version import installed_version
from moe_pack.formats.writer import PackWriter


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checkpoint, the plan for it, the layout that follows, and the neuron order: u32 [L, E, f], or the source's.

    `calibration`: the profile whose inputs a calibrated plan rounds by; None for other plans.
    """

    checkpoint: Checkpoint
    plan: Plan
    layout: PackLayout
    order: NDArray[np.uint32] | None
    calibration: Profile | None = None


def check_calibration(checkpoint: Checkpoint, plan: Plan, profile: Profile | None) -> None:
    """Checks that there is what a calibrated plan rounds by.

    Raises:  PlanError without a profile, for one that kept no inputs, or for one of another checkpoint.
    """
    if plan.quantizer != "calibrated":
        return
    if profile is None:
        raise PlanError("calibrated rounding: found no profile to go by; give --profile, made by moe-pack profile")
    if not profile.has_inputs:
        raise PlanError(
            f"--profile {profile.folder}: keeps no inputs of experts, which calibrated rounding goes by; profile the "
            "model anew, without --no-inputs"
        )
    check_same_source(profile, checkpoint)


def check_order(order: NDArray[np.uint32], spec: ModelSpec) -> None:
    """Checks that a neuron order is one for this model.

    Raises:  PlanError for another shape, or an expert whose order is no permutation.
    """
    assert order.dtype == np.uint32, order.dtype
    shape = (len(spec.moe_layers), spec.router.num_experts, spec.expert.intermediate_size)
    if order.shape != shape:
        raise PlanError(f"order: shape {list(order.shape)}, expected {list(shape)}: layers, experts and neurons")
    fault = order_fault(order)
    if fault:
        raise PlanError(f"order: {fault}")


_MAX_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PackOrigin:
    """Where a pack comes from: its whole `source.json`, the files it copies, the packages that decide its bytes.

    `decisions`: digests by name of what else decides them.
    """

    source: bytes
    copied: tuple[tuple[str, bytes], ...]
    made_with: tuple[PackageVersion, ...]
    decisions: Mapping[str, str]


def recipe_account(recipe: Recipe) -> "PackRecord":
    """The account of what is made from a checkpoint. Thresholds are zero: no neuron is dropped.

    Raises:  PlanError if the quantizer's package is missing; CheckpointError if a file to copy cannot be read.
    """
    checkpoint, order = recipe.checkpoint, recipe.order
    copied = [(name, raw) for name in COPIED_FILES if (raw := _copied(checkpoint.folder, name)) is not None]
    decisions = {} if order is None else {"order": hashlib.sha256(order_bytes(order)).hexdigest()}
    if recipe.calibration is not None:
        decisions["inputs"] = recipe.calibration.inputs_digest()
    origin = PackOrigin(account_bytes(*checkpoint.account()), tuple(copied), _versions(recipe.plan), decisions)
    shape = (len(checkpoint.spec.moe_layers), checkpoint.spec.router.num_experts)
    return PackRecord(recipe.layout, recipe.plan, origin, np.zeros(shape, np.float32), order)


class PackRecord:
    """The facts of one pack beside its large files; `conversion` tells its making from others.

    Args:    thresholds: float32 [L, E].   order: u32 [L, E, f]; the source's without one.
    """

    def __init__(
        self,
        layout: PackLayout,
        plan: Plan,
        origin: PackOrigin,
        thresholds: NDArray[np.float32],
        order: NDArray[np.uint32] | None = None,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self.origin = origin
        self._thresholds = thresholds
        self._order = _rows(layout) if order is None else order
        facts = {
            "source": hashlib.sha256(origin.source).hexdigest(),
            "copied": [[name, hashlib.sha256(raw).hexdigest()] for name, raw in origin.copied],
            "model": dump(layout.spec),
            "plan": dump(plan),
            "made_with": [dump(package) for package in origin.made_with],
            **origin.decisions,
        }
        self.conversion = hashlib.sha256(canonical(facts)).hexdigest()

    def tables(self, writer: PackWriter) -> list[tuple[str, bytes]]:
        """Names and bytes of every file but experts, dense and manifest."""
        return [
            (INDEX_FILE, index_bytes(self._layout, self._plan, writer.expert_digests())),
            (THRESHOLDS_FILE, thresholds_bytes(self._thresholds)),
            (ORDER_FILE, order_bytes(self._order)),
            (SOURCE_FILE, self.origin.source),
            *self.origin.copied,
        ]

    def manifest(self, files: tuple[ContentFile, ...]) -> bytes:
        """The manifest's bytes, given the account of all content but the experts'."""
        layout = self._layout
        layers = list(zip(layout.spec.moe_layers, layout.expert_files, strict=True))
        expert_files = tuple(
            ExpertFile(experts_file(layer), f.num_bytes, len(f.header), hashlib.sha256(f.header).hexdigest())
            for layer, f in layers
        )
        dense = tuple(
            QuantizedDense(held.role.name, held.role.shape[0], held.role.shape[1], held.rows.parts[0].format)
            for held in layout.dense
            if held.rows is not None
        )
        return manifest_bytes(
            Manifest(
                format=FORMAT,
                version=VERSION,
                features=_features(layout),
                model=layout.spec,
                selector=self._plan.selector,
                quantizer=self._plan.quantizer,
                made_with=self.origin.made_with,
                conversion=self.conversion,
                dense=dense,
                files=files,
                expert_files=expert_files,
                totals=totals(layout, files),
                root=root_digest(files, expert_files),
                sha256="",
            )
        )


def _rows(layout: PackLayout) -> NDArray[np.uint32]:
    """The source's neuron order: u32 [L, E, f]."""
    spec = layout.spec
    rows = np.arange(spec.expert.intermediate_size, dtype=np.uint32)
    return np.broadcast_to(rows, (len(spec.moe_layers), spec.router.num_experts, len(rows)))


def totals(layout: PackLayout, files: tuple[ContentFile, ...]) -> Totals:
    """Bytes by part of the pack with this layout and these other files."""
    experts = [expert for layer in layout.experts for expert in layer]
    selectors = sum(expert.selector_bytes for expert in experts)
    records = sum(expert.records_bytes for expert in experts)
    extra = sum(expert.extra_bytes for expert in experts)
    headers = sum(len(file.header) for file in layout.expert_files)
    in_files = sum(file.num_bytes for file in layout.expert_files)
    copied = sum(file.bytes for file in files if file.name in COPIED_FILES)
    dense = sum(file.bytes for file in files if file.name == DENSE_FILE)
    unused = sum(file.bytes for file in files if file.name == UNUSED_FILE)
    listed = sum(file.bytes for file in files)
    return Totals(
        selectors=selectors,
        records=records,
        extra=extra,
        padding=in_files - selectors - records - extra - headers,
        headers=headers,
        dense=dense,
        tables=listed - copied - dense - unused,
        copied=copied,
        content=in_files + listed,
        unused=unused,
    )


def _features(layout: PackLayout) -> tuple[str, ...]:
    """What a reader must know to read this pack."""
    found: set[str] = set()
    experts = [expert for layer in layout.experts for expert in layer]
    rows = [r for expert in experts for r in (expert.selector, expert.records) if r is not None]
    dense = [held.rows for held in layout.dense if held.rows is not None]
    for part in {part.format for layout_rows in (*rows, *dense) for part in layout_rows.parts}:
        found.add(part.codec)
        if part.has_byte_scales:
            found.add("byte_scales")
    if dense:
        found.add("dense_rows")
    if layout.unused_file is not None:
        found.add("unused")
    return tuple(sorted(found))


def _versions(plan: Plan) -> tuple[PackageVersion, ...]:
    """The packages that quantize.

    Raises:  PlanError if the quantizer's is missing.
    """
    experts = {part for layer in plan.experts for e in layer for part in (e.gate, e.up, e.down)}
    if plan.quantizer == "calibrated":
        experts = {part for part in experts if part is not None and not needs_inputs(part)}
    solved = any(part is not None and part.codec == "affine" for part in experts | {*plan.dense})
    names = ["moe-pack", "torch"]
    if dense_quantizer(plan.quantizer) == "hqq" and solved:
        names.append("hqq")
    try:
        return tuple(PackageVersion(name, installed_version(name)) for name in names)
    except PackageNotFoundError as fault:
        raise PlanError(
            f"--quantizer {plan.quantizer}: the {fault.name} package is not installed; "
            "pip install 'moe-pack[convert]', or use --quantizer nearest"
        ) from fault


def _copied(folder: Path, name: str) -> bytes | None:
    if not (folder / name).exists():
        return None
    with RangeReader(folder / name, CheckpointError) as reader:
        if reader.num_bytes > _MAX_COPIED_BYTES:
            raise CheckpointError(f"{name}: {reader.num_bytes} bytes, at most {_MAX_COPIED_BYTES}")
        return reader.read(0, reader.num_bytes).tobytes()
