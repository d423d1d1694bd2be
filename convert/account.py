"""The record of a pack: what decides its bytes, and what it says about itself.

`Recipe`: a checkpoint with the plan for it. `PackRecord`: what follows from it and is not in the large files.
Each expert's rounding loss is measured while it is quantized (`calib.quantize.guard`). Losses wait as notes in the
conversion's journal, so that they survive a kill, and become the sidecar `rounding.json` when the pack is complete.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.calib import quantize
from moe_pack.calib.profile import profiles
from moe_pack.formats.base.version import installed_version
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import layouts, manifests, sidecar
from moe_pack.formats.pack.plans import dense_quantizer
from moe_pack.formats.pack.writer import PackWriter


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """How experts are prepared for the formats of their plan."""

    order: NDArray[np.uint32] | None = None  # [L, E, f], the source's neuron in each row; None: the source's order
    # The profile with whose inputs a calibrated plan is quantized; other plans need none.
    calibration: profiles.Profile | None = None
    rotation: manifests.RotationVectors | None = None  # the coordinates of layers' experts; None: the source's
    # Whether a layer of a calibrated plan is quantized for the inputs that it has behind the stored layers before it;
    # never with a profile of an importance file, which has no inputs.
    sequential: bool = True


UNPREPARED = Preparation()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checkpoint, the plan for it, the layout that follows, and the preparation as far as the plan uses it."""

    checkpoint: Checkpoint
    plan: formats.Plan
    layout: formats.PackLayout
    order: NDArray[np.uint32] | None
    calibration: profiles.Profile | None = None
    rotation: manifests.RotationVectors | None = None
    is_sequential: bool = False


@dataclass(frozen=True, slots=True)
class PackOrigin:
    """The source of a pack and everything else that decides its bytes."""

    source: bytes
    copied: tuple[tuple[str, bytes], ...]
    made_with: tuple[manifests.PackageVersion, ...]
    decisions: Mapping[str, str]  # by name, digests or values of everything else that decides its bytes


def recipe_account(recipe: Recipe) -> "PackRecord":
    """Returns the record of the pack that a recipe makes; its thresholds are zero, so that all neurons run.

    Raises:  PlanError if the quantizer's package is not installed; CheckpointError if a file to copy cannot be read.
    """
    checkpoint, order = recipe.checkpoint, recipe.order
    files = checkpoint.files
    copied = [
        (name, files.read_file(name, manifests.MAX_SMALL_BYTES).tobytes())
        for name in manifests.COPIED_FILES
        if files.has(name)
    ]
    decisions = {} if order is None else {"order": hashlib.sha256(manifests.order_bytes(order)).hexdigest()}
    if recipe.calibration is not None:
        decisions["inputs"] = recipe.calibration.inputs_digest()
        if recipe.is_sequential:
            decisions["tokens"] = recipe.calibration.facts.text.sha256
    if recipe.rotation is not None:
        decisions["rotation"] = hashlib.sha256(manifests.rotation_bytes(recipe.rotation)).hexdigest()
    origin = PackOrigin(
        manifests.account_bytes(*checkpoint.account()), tuple(copied), _versions(recipe.plan), decisions
    )
    shape = (len(checkpoint.spec.moe_layers), checkpoint.spec.router.num_experts)
    return PackRecord(recipe.layout, recipe.plan, origin, np.zeros(shape, np.float32), order, recipe.rotation)


class PackRecord:
    """The facts of one pack, without its large files. `conversion`: a digest of everything that decides its bytes.

    Args:    thresholds: float32 [L, E].   order: u32 [L, E, f]; None: the source's.   rotation: None: no layer's.
    """

    def __init__(
        self,
        layout: formats.PackLayout,
        plan: formats.Plan,
        origin: PackOrigin,
        thresholds: NDArray[np.float32],
        order: NDArray[np.uint32] | None = None,
        rotation: manifests.RotationVectors | None = None,
    ) -> None:
        self._layout = layout
        self._rotation = rotation
        self._plan = plan
        self.origin = origin
        self._thresholds = thresholds
        spec = layout.spec
        neurons = np.arange(spec.expert.source_size, dtype=np.uint32)
        shape = (len(spec.moe_layers), spec.router.num_experts, len(neurons))
        self._order = np.broadcast_to(neurons, shape) if order is None else order
        facts = {
            "source": hashlib.sha256(origin.source).hexdigest(),
            "copied": [[name, hashlib.sha256(raw).hexdigest()] for name, raw in origin.copied],
            "model": formats.dump(layout.spec),
            "plan": formats.dump(plan),
            "made_with": [formats.dump(package) for package in origin.made_with],
            **origin.decisions,
        }
        self.conversion = hashlib.sha256(formats.canonical(facts)).hexdigest()

    def tables(self, writer: PackWriter) -> list[tuple[str, bytes]]:
        """Returns names and bytes of the files that are neither experts nor dense part nor manifest."""
        return [
            (manifests.INDEX_FILE, manifests.index_bytes(self._layout, self._plan, writer.expert_digests())),
            (manifests.THRESHOLDS_FILE, manifests.thresholds_bytes(self._thresholds)),
            (manifests.ORDER_FILE, manifests.order_bytes(self._stored_order(read_notes(writer.expert_notes())))),
            *([] if self._rotation is None else [(manifests.ROTATION_FILE, manifests.rotation_bytes(self._rotation))]),
            (manifests.SOURCE_FILE, self.origin.source),
            *self.origin.copied,
        ]

    def _stored_order(self, notes: Mapping[tuple[int, int], "ExpertNote"]) -> NDArray[np.uint32]:
        """Returns the order of all rows, u32 [L, E, f]; the second row of a neuron is behind its first."""
        repeats = self._layout.spec.expert.repeats
        if not repeats:
            return self._order
        shape = (*self._order.shape[:2], self._order.shape[2] + repeats)
        rows = np.empty(shape, np.uint32)
        for place in np.ndindex(*shape[:2]):
            twice = np.isin(self._order[place], notes[place[0], place[1]].repeated)
            rows[place] = np.repeat(self._order[place], 1 + twice)
        return rows

    def sidecars(self, manifest: bytes, writer: PackWriter) -> list[tuple[str, bytes]]:
        """Returns names and bytes of the sidecars that are measured while experts are made."""
        losses = {place: note.loss for place, note in read_notes(writer.expert_notes()).items()}
        if not any(losses.values()):
            return []
        layers, experts = map(range, self._order.shape[:2])
        rounding = Rounding(tuple(tuple(losses.get((layer, e)) for e in experts) for layer in layers))
        root = manifests.root_without_thresholds(manifests.read_manifest(manifest))
        return [(ROUNDING_FILE, sidecar.sidecar_bytes(ROUNDING_FILE, rounding, root))]

    def manifest(self, files: tuple[manifests.ContentFile, ...]) -> bytes:
        """Returns the manifest's bytes; `files` are all files with content, without the experts'."""
        layout = self._layout
        layers = list(zip(layout.spec.moe_layers, layout.expert_files, strict=True))
        expert_files = tuple(
            manifests.ExpertFile(
                layouts.experts_file(layer), f.num_bytes, len(f.header), hashlib.sha256(f.header).hexdigest()
            )
            for layer, f in layers
        )
        dense = tuple(
            manifests.QuantizedDense(
                tensor.role.name, tensor.role.shape[0], tensor.role.shape[1], tensor.rows.parts[0].format
            )
            for tensor in layout.dense
            if tensor.rows is not None
        )
        return manifests.manifest_bytes(
            manifests.Manifest(
                format=manifests.FORMAT,
                version=manifests.VERSION,
                features=_features(layout, self._rotation is not None),
                model=layout.spec,
                selector=self._plan.selector,
                quantizer=self._plan.quantizer,
                made_with=self.origin.made_with,
                conversion=self.conversion,
                dense=dense,
                files=files,
                expert_files=expert_files,
                totals=totals(layout, files),
                root=manifests.root_digest(files, expert_files),
                sha256="",
            )
        )


def totals(layout: formats.PackLayout, files: tuple[manifests.ContentFile, ...]) -> manifests.Totals:
    """Returns the bytes by part of the pack with this layout and these other files."""
    experts = [expert for layer in layout.experts for expert in layer]
    selectors = sum(expert.selector_bytes for expert in experts)
    records = sum(expert.records_bytes for expert in experts)
    extra = sum(expert.extra_bytes for expert in experts)
    headers = sum(len(file.header) for file in layout.expert_files)
    in_files = sum(file.num_bytes for file in layout.expert_files)
    copied = sum(file.bytes for file in files if file.name in manifests.COPIED_FILES)
    dense = sum(file.bytes for file in files if file.name == layouts.DENSE_FILE)
    unused = sum(file.bytes for file in files if file.name == layouts.UNUSED_FILE)
    tables = manifests.table_files(layout.spec)
    ngrams = sum(file.bytes for file in files if file.name in tables)
    listed = sum(file.bytes for file in files)
    return manifests.Totals(
        selectors=selectors,
        records=records,
        extra=extra,
        padding=in_files - selectors - records - extra - headers,
        headers=headers,
        dense=dense,
        tables=listed - copied - dense - unused - ngrams,
        copied=copied,
        content=in_files + listed,
        unused=unused,
        ngrams=ngrams,
    )


def _features(layout: formats.PackLayout, is_rotated: bool) -> tuple[str, ...]:
    features: set[str] = set()
    experts = [expert for layer in layout.experts for expert in layer]
    rows = [r for expert in experts for r in (expert.selector, expert.records) if r is not None]
    dense = [tensor.rows for tensor in layout.dense if tensor.rows is not None]
    for part in {part.format for layout_rows in (*rows, *dense) for part in layout_rows.parts}:
        features.add(part.codec)
        if part.has_byte_scales:
            features.add("byte_scales")
    if dense:
        features.add("dense_rows")
    if layout.spec.expert.repeats:
        features.add("repeated")
    if is_rotated:
        features.add("rotated")
    if layout.unused_file is not None:
        features.add("unused")
    if layout.ngrams:
        features.add("ngrams")
    return tuple(sorted(features))


def _versions(plan: formats.Plan) -> tuple[manifests.PackageVersion, ...]:
    """Returns the packages whose version decides the quantized bytes."""
    experts = {part for layer in plan.experts for e in layer for part in (e.gate, e.up, e.down)}
    if plan.quantizer == "calibrated":
        experts = {part for part in experts if part is not None and not quantize.needs_inputs(part)}
    solved = any(part is not None and part.codec == "affine" for part in experts | {*plan.dense})
    names = ["moe-pack", "torch"]
    if dense_quantizer(plan.quantizer) == "hqq" and solved:
        names.append("hqq")
    try:
        return tuple(manifests.PackageVersion(name, installed_version(name)) for name in names)
    except PackageNotFoundError as fault:
        raise formats.PlanError(
            f"--quantizer {plan.quantizer} needs the package {fault.name}, which is not installed; "
            "pip install 'moe-pack[convert]', or use --quantizer nearest"
        ) from fault


ROUNDING_FILE = "rounding.json"
# An expert loses much if the error of its output, without what it inherits, is above the first share of the output; or
# above the second, and so many times the median of the experts in the same formats.
_MOST_LOSS, _NOTED_LOSS, _MOST_RATIO = 0.5, 0.1, 4.0
_SHOWN_EXPERTS = 10
_JOURNAL = "conversion.journal"


@dataclass(frozen=True, slots=True)
class ExpertNote:
    """The journal's note of an expert."""

    loss: quantize.ExpertLoss | None  # None: not measured
    repeated: tuple[int, ...]  # the neurons with two rows, rising


def read_notes(notes: Mapping[tuple[int, int], bytes]) -> dict[tuple[int, int], ExpertNote]:
    """Reads notes by MoE layer and expert; raises ConversionError for a damaged one."""
    return {
        place: formats.load(
            ExpertNote, formats.parse(note, _JOURNAL, formats.ConversionError), _JOURNAL, formats.ConversionError
        )
        for place, note in notes.items()
    }


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding losses of a pack's experts."""

    experts: tuple[tuple[quantize.ExpertLoss | None, ...], ...]  # [layer][expert]; None: not measured


def read_rounding(pack: formats.Pack) -> Rounding | None:
    """Reads the sidecar of a pack; None if nothing was measured. PackError if it is damaged or of another shape."""
    found = sidecar.read_sidecar(pack.folder, ROUNDING_FILE, Rounding, manifests.root_without_thresholds(pack.manifest))
    if found is not None:
        shape = [len(layer) for layer in found.experts]
        expected = [pack.spec.router.num_experts] * len(pack.spec.moe_layers)
        if shape != expected:
            raise formats.PackError(f"{ROUNDING_FILE}: experts of layers {shape}, expected {expected}; convert again")
    return found


@dataclass(frozen=True, slots=True)
class HeavyLoss:
    """An expert that loses much."""

    layer: int  # of the model
    expert: int
    loss: quantize.ExpertLoss
    usual: float  # the median of `own_error` over the experts in the same formats
    is_rotated: bool


def heavy_losses(pack: formats.Pack, rounding: Rounding) -> list[HeavyLoss]:
    """Returns the experts that lose much, the worst first."""
    kinds, alike = pack.index.experts, dict[object, list[float]]()
    measured = [(l, e, loss) for l, losses in enumerate(rounding.experts) for e, loss in enumerate(losses) if loss]
    for layer_idx, e, loss in measured:
        alike.setdefault(kinds[layer_idx][e], []).append(loss.own_error)
    found = []
    for layer_idx, e, loss in measured:
        usual = median(alike[kinds[layer_idx][e]])
        if loss.own_error > _MOST_LOSS or loss.own_error > max(_NOTED_LOSS, _MOST_RATIO * usual):
            is_rotated = pack.rotation is not None and pack.rotation.is_rotated(layer_idx)
            found.append(HeavyLoss(pack.spec.moe_layers[layer_idx], e, loss, usual, is_rotated))
    return sorted(found, key=lambda one: (-one.loss.own_error, one.layer, one.expert))


def warning_lines(pack: formats.Pack, rounding: Rounding) -> list[str]:
    """Returns lines about the experts that lose much."""
    found = heavy_losses(pack, rounding)
    if not found:
        return []
    noun, pronoun = ("expert loses", "it") if len(found) == 1 else ("experts lose", "them")
    advice = f"give {pronoun} more bits"
    if not all(one.is_rotated for one in found):
        advice += ", or convert with --rotate on"
    lines = [f"warning: {len(found)} {noun} much of the output; {advice}"]
    for one in found[:_SHOWN_EXPERTS]:
        lines.append(
            f"  layer {one.layer} expert {one.expert}: squared error {one.loss.own_error:.1%} of its output "
            f"({one.usual:.1%} is usual for its formats), median token {one.loss.median_error:.1%}"
        )
    if len(found) > _SHOWN_EXPERTS:
        lines.append(f"  and {len(found) - _SHOWN_EXPERTS} more")
    return lines


def _plain_line(rounding: Rounding) -> str | None:
    losses = [loss for layer in rounding.experts for loss in layer if loss is not None]
    counts = [
        (sum(loss.plain_gate for loss in losses), "row", "gate"),
        (sum(loss.plain_up for loss in losses), "row", "up"),
        (sum(loss.plain_down for loss in losses), "block", "down"),
    ]
    texts = [f"{number:,} {unit}{'s' if number > 1 else ''} of {matrix}" for number, unit, matrix in counts if number]
    if not texts:
        return None
    number = sum(bool(loss.plain_gate or loss.plain_up or loss.plain_down) for loss in losses)
    experts = f"{number:,} expert{'s' if number > 1 else ''}"
    return f"rounded plainly, because calibration lost more on other tokens: {', '.join(texts)}, in {experts}"


def rounding_lines(pack: formats.Pack, rounding: Rounding | None) -> list[str]:
    """Returns the lines of `inspect`: squared errors of experts' outputs by layer, and the experts that lose much."""
    if rounding is None:
        return ["rounding: not measured"]
    lines = ["rounding, as the squared error of experts' outputs on tokens that did not calibrate them:"]
    for layer, losses in zip(pack.spec.moe_layers, rounding.experts, strict=True):
        measured = [loss for loss in losses if loss is not None]
        errors = {e: loss.relative_error for e, loss in enumerate(losses) if loss is not None}
        if not errors:
            lines.append(f"  layer {layer}: not measured")
            continue
        worst = max(errors, key=lambda e: errors[e])
        inherited = median(loss.inherited_error for loss in measured)
        behind = f"; {inherited:.1%} from earlier layers" if inherited else ""
        lines.append(
            f"  layer {layer}: median {median(errors.values()):.1%}, worst {errors[worst]:.1%} (expert {worst}){behind}"
        )
    if line := _plain_line(rounding):
        lines.append(line)
    return lines + warning_lines(pack, rounding)
