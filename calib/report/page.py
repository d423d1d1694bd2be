"""What each lossy choice costs, as the report's curves: nats that a profile foretells, and those measured of a pack.

Foretold are the losses that plans are made from (`losses`), all experts alike: so a curve is a sum over all of them.

A profile as one page to read: a self-contained HTML file with figures, exact values on hover, and short readings.

No network, no other file. `report_figures` and `report_prices` put the numbers together, `report_readings` the words,
`report.html` draws.
"""

import dataclasses
import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from moe_pack.calib.evaluate import QUALITY_FILE, Quality
from moe_pack.calib.forward import Array, packed_source_digest
from moe_pack.calib.profile import Losses, Profile, losses_of
from moe_pack.calib.report import figures, readings
from moe_pack.calib.report.readings import nats
from moe_pack.formats import (
    BF16,
    ROW_GROUP,
    ExpertFormat,
    ModelSpec,
    Pack,
    PartFormat,
    PlanError,
    Selector,
    dense_roles,
)
from moe_pack.formats.layout import expert_layout
from moe_pack.formats.sidecar import read_sidecar

_SELECTOR: Selector = "up"  # whose rows bytes are counted of; others differ by padding alone


@dataclass(frozen=True, slots=True)
class MeasuredPack:
    """What was measured of a pack. `bits_per_weight`: of its experts, all bytes counted."""

    name: str
    selector: Selector
    bits_per_weight: float
    quality: Quality


@dataclass(frozen=True, slots=True)
class Point:
    """`x`: bits a weight, or a share.   `kl`, `half_width`: nats; of its 95% interval, None where none is known.

    `note`: what `x` does not say.
    """

    x: float
    kl: float
    note: str
    half_width: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by rising `x`. `is_measured`: of a pack; else foretold."""

    name: str
    points: tuple[Point, ...]
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class PriceCurves:
    """By bits stored of an expert's weight, by share of neurons left out, by width of dense matrices, by alpha."""

    widths: tuple[Curve, ...]
    sparsity: tuple[Curve, ...]
    dense: tuple[Curve, ...]
    substitution: tuple[Curve, ...]


def measured_pack(pack: Pack, profile: Profile, bits_per_weight: float) -> MeasuredPack:
    """What was measured of a pack of the profile's checkpoint.

    Raises:  PlanError if it is of another one, or nothing was measured; PackError if its files are damaged.
    """
    if (profile.spec, profile.facts.source) != (pack.spec, packed_source_digest(pack)):
        raise PlanError(f"--pack {pack.folder}: is of another model than the profile {profile.folder}")
    quality = read_sidecar(pack.folder, QUALITY_FILE, Quality, pack.manifest.root)
    if quality is None:
        raise PlanError(
            f"--pack {pack.folder}: has no {QUALITY_FILE} for what it holds now; "
            f"measure it: moe-pack eval {pack.folder} --against MODEL --prices"
        )
    return MeasuredPack(pack.folder.name, pack.manifest.selector, bits_per_weight, quality)


def price_curves(spec: ModelSpec, losses: Losses | None, measured: MeasuredPack | None = None) -> PriceCurves:
    """What is foretold of all experts, and all dense matrices, stored alike; and what was measured."""
    found = PriceCurves((), (), (), ())
    if losses is not None:
        found = PriceCurves(_widths(spec, losses), _sparsity(losses), _dense(spec, losses), ())
    return found if measured is None else _with_measured(found, measured)


def _with_measured(found: PriceCurves, measured: MeasuredPack) -> PriceCurves:
    quality, name = measured.quality, f"{measured.name}, measured"
    widths = sparsity = substitution = tuple[Curve, ...]()
    if quality.against is not None:
        note = f"{quality.sparsity or 0:.1%} of neurons did not run; dense matrices as stored"
        kl = quality.against.kl
        widths = (Curve(name, (Point(measured.bits_per_weight, kl.value, note, kl.half_width),), is_measured=True),)
    if quality.prices is not None:
        own = quality.prices.substitution
        left_out = tuple(Point(p.sparsity, p.kl.value, "", p.kl.half_width) for p in quality.prices.sparsity)
        sparsity = (Curve(f"{name}, select by {measured.selector}", left_out, is_measured=True),)
        replaced = tuple(
            Point(p.alpha, p.kl.value, f"{p.replaced:.1%} replaced, {p.fetched:.1%} fetched", p.kl.half_width)
            for p in own.prices
        )
        substitution = (Curve(f"{name}, room for {own.room:.0%} of experts", replaced, is_measured=True),)
    return PriceCurves(found.widths + widths, found.sparsity + sparsity, found.dense, substitution)


def prices_reading(spec: ModelSpec, losses: Losses) -> str:
    """The format of each width that loses least, and the selector kind that is cheapest to begin with."""
    formats, quantized = losses.of(losses.quantizer)
    lost, best = quantized.sum(axis=(0, 1, 2)), []
    for width in sorted({part.bits for part in formats if part != BF16}):
        held = [
            (float(kl), stored_bits(spec, part), _groups_text(part))
            for kl, part in zip(lost, formats, strict=True)
            if part.bits == width
        ]
        kl, bits, groups = min(held)
        best.append(f"{nats(kl)} at {width:g} bits ({groups}; {bits:.2f} stored)")
    at_first = losses.sparse[:, :, :, 1].sum(axis=(0, 1))  # [kinds]
    cheapest = int(at_first.argmin())
    return (
        f"All experts alike lose least with {', '.join(best)}. Leaving out {losses.sparsities[1]:.0%} of neurons costs "
        f"least by {losses.kinds[cheapest]} ({nats(float(at_first[cheapest]))}). A plan gives bits to the experts and "
        "matrices that need them, and so loses less at the same bytes than these curves, on which all are alike."
    )


def _widths(spec: ModelSpec, losses: Losses) -> tuple[Curve, ...]:
    """A curve for each codec, length of groups and bits of scales, of the quantizer that plans take."""
    formats, quantized = losses.of(losses.quantizer)
    lost = quantized.sum(axis=(0, 1, 2))  # [F]
    curves: dict[str, list[Point]] = {}
    for part, kl in zip(formats, lost.tolist(), strict=True):
        if part != BF16:
            point = Point(stored_bits(spec, part), kl, f"{part.bits:g} bits")
            curves.setdefault(_groups_text(part), []).append(point)
    return tuple(Curve(name, tuple(points)) for name, points in curves.items())


def stored_bits(spec: ModelSpec, part: PartFormat) -> float:
    """Bits an expert's weight takes when all its matrices are stored in a format: scales, checksums, padding too."""
    gate = part if "gate" in spec.expert.matrices else None
    layout = expert_layout(ExpertFormat(gate, part, part), _SELECTOR, spec.expert, spec.hidden_size)
    num_weights = spec.expert.intermediate_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (layout.selector_bytes + layout.records_bytes) / num_weights


def _groups_text(part: PartFormat) -> str:
    groups = "a row as one group" if part.group == ROW_GROUP else f"groups of {part.group}"
    codec = "trellis, " if part.codec == "trellis" else ""
    return f"{codec}{groups}" + ("" if part.scale_bits == 16 else ", byte scales")


def _sparsity(losses: Losses) -> tuple[Curve, ...]:
    lost = losses.sparse.sum(axis=(0, 1))  # [kinds, sparsities]
    return tuple(
        Curve(
            f"select by {kind}",
            tuple(Point(s, kl, "") for s, kl in zip(losses.sparsities, row, strict=True) if s),
        )
        for kind, row in zip(losses.kinds, lost.tolist(), strict=True)
    )


def _dense(spec: ModelSpec, losses: Losses) -> tuple[Curve, ...]:
    """Of the layers' matrices together, of embedding and head; those that cannot be quantized are left out."""
    names = [role.name for role in dense_roles(spec)]
    in_layers = np.array([name.startswith("layers.") for name in names])
    parts = {"all matrices of layers": in_layers, **{name: np.array(names) == name for name in ("embed", "head")}}
    known = np.isfinite(losses.dense).all(axis=1)
    curves = []
    for name, chosen in parts.items():
        held = losses.dense[chosen & known]
        points = zip(losses.dense_widths, held.sum(axis=0).tolist(), strict=True)
        if len(held):
            curves.append(Curve(name, tuple(Point(w, kl, "") for w, kl in sorted(points) if w < 16)))
    return tuple(curves)


_PLACE = "@REPORT@"  # of the data, in the template


@dataclass(frozen=True, slots=True)
class Readings:
    """What stands under each figure; an empty one is not shown."""

    popularity: str
    sparsity: str
    sensitivity: str = ""
    dense: str = ""
    prices: str = ""
    experts_foretold: str = ""
    neurons_foretold: str = ""
    path_spread: str = ""
    path_recall: str = ""
    accumulated: str = ""
    coverage: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a stage's figures are not there, and what measures them; empty where they are."""

    sensitivity: str = ""
    held_out: str = ""
    prediction: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page draws."""

    head: figures.Head
    popularity: figures.Popularity
    sparsity: figures.Sparsity
    sensitivity: figures.Sensitivity | None
    prices: PriceCurves
    prediction: figures.Prediction
    paths: figures.Paths
    coverage: figures.Coverage
    readings: Readings
    missing: Missing


def report_html(profile: Profile, measured: MeasuredPack | None = None) -> str:
    """The page of a profile, with what was measured of a pack of the same checkpoint.

    Raises:  PackError if the profile is damaged.
    """
    return fill(make_report(profile, measured))


def fill(report: Report) -> str:
    """The template with the report's data in it, as JSON that cannot end its element."""
    held = json.dumps(dataclasses.asdict(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files("moe_pack.calib.report").joinpath("report.html").read_text("utf-8")
    before, _, after = template.partition(_PLACE)
    return before + held + after


def make_report(profile: Profile, measured: MeasuredPack | None = None) -> Report:
    """Everything the page shows.

    Raises:  PackError if the profile is damaged.
    """
    levels = figures.levels_for(profile)
    counted = figures.read_counted(profile, levels)
    head = figures.head(profile)
    kls = figures.predicted_kl(profile) if profile.facts.sensitivity != "none" else None
    losses = losses_of(profile) if kls else None
    report = Report(
        head=head,
        popularity=figures.popularity(profile, counted),
        sparsity=figures.sparsity(counted, levels),
        sensitivity=figures.sensitivity(profile, *kls) if kls else None,
        prices=price_curves(profile.spec, losses, measured),
        prediction=figures.prediction(profile, counted),
        paths=figures.paths(profile, counted),
        coverage=figures.coverage(profile, counted),
        readings=Readings("", ""),
        missing=Missing(),
    )
    thresholds = counted.quantiles[..., levels.index(0.8)]  # [L, E, kinds]
    read = _read(report, thresholds, kls)
    if losses:
        read = dataclasses.replace(read, prices=prices_reading(profile.spec, losses))
    return dataclasses.replace(report, readings=read, missing=_missing(report))


def _read(report: Report, thresholds: Array, kls: tuple[Array, Array] | None) -> Readings:
    head, found = report.head, report.paths
    tokens = report.popularity.tokens.array()
    foretold = bool(report.prediction.layers)
    return Readings(
        popularity=readings.popularity(head, tokens, report.popularity.tests),
        sparsity=readings.sparsity(head, thresholds, tokens, report.sparsity.kinds),
        sensitivity=readings.sensitivity(head, *kls, report.sensitivity) if kls and report.sensitivity else "",
        dense=readings.dense(report.sensitivity) if report.sensitivity else "",
        experts_foretold=readings.experts_foretold(head, report.prediction) if foretold else "",
        neurons_foretold=readings.neurons_foretold(head, report.prediction) if foretold else "",
        path_spread=readings.path_spread(found),
        path_recall=readings.path_recall(head, found) if found.recalls else "",
        accumulated=readings.accumulated(head, found) if found.accumulated else "",
        coverage=readings.coverage(head, report.coverage),
    )


def _missing(report: Report) -> Missing:
    text = (
        "all text was one sequence; profile again with more text (--tokens), or shorter sequences (--sequence-length)"
    )
    held_out = "" if report.head.num_held_out_tokens else f"No text was held out: {text}."
    alone = "" if report.head.foretold else readings.alone(report.head)
    return Missing(
        sensitivity=""
        if report.sensitivity
        else "Not measured. Measure it with: moe-pack profile MODEL -o NEW_PROFILE --sensitivity fast",
        held_out=held_out,
        prediction="" if report.prediction.layers else alone or held_out or "Not measured.",
    )
