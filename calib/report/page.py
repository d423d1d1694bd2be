"""A profile as one HTML page: figures with exact values on hover, and a short text for each. It needs no network.

`figures` provides the numbers of the profile, this file the curves of losses, `readings` the texts; `report.html`
draws. A cost curve has all experts stored alike. It comes from a plan's losses, and from `moe-pack eval --prices` of a
pack.
"""

import dataclasses
import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from moe_pack.calib.profile import Losses, Profile, losses_of
from moe_pack.calib.report import figures, readings
from moe_pack.calib.report.readings import nats
from moe_pack.formats import Pack, PlanError
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.parts import specs
from moe_pack.runtime.quality import QUALITY_FILE, Quality, read_quality

_SELECTOR: specs.Selector = "up"  # the layout whose bytes are counts; those of other selectors differ only by padding


@dataclass(frozen=True, slots=True)
class MeasuredPack:
    """The measurements of a pack."""

    name: str
    selector: specs.Selector
    bits_per_weight: float  # all bytes of its experts for each of their weights
    quality: Quality


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve."""

    x: float  # bits a weight, or a share
    kl: float  # in nats
    note: str  # what `x` does not say
    half_width: float | None = None  # of its 95% interval in nats; None if it is not known


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by rising `x`."""

    name: str
    points: tuple[Point, ...]
    is_measured: bool = False  # of a pack; other curves are estimates


@dataclass(frozen=True, slots=True)
class PriceCurves:
    """Curves by an expert's bits a weight, by sparsity, by width of dense matrices, and by alpha of `--substitute`."""

    widths: tuple[Curve, ...]
    sparsity: tuple[Curve, ...]
    dense: tuple[Curve, ...]
    substitution: tuple[Curve, ...]


def measured_pack(pack: Pack, profile: Profile, bits_per_weight: float) -> MeasuredPack:
    """Reads the measurements of a pack; PlanError if it is of another checkpoint, or nothing was measured."""
    profile.check_source_of(pack)
    quality = read_quality(pack)
    if quality is None:
        raise PlanError(
            f"--pack {pack.folder}: has no {QUALITY_FILE} for its present content; "
            f"measure it with moe-pack eval {pack.folder} --against MODEL --prices"
        )
    return MeasuredPack(pack.folder.name, pack.manifest.selector, bits_per_weight, quality)


def price_curves(spec: specs.ModelSpec, losses: Losses | None, measured: MeasuredPack | None = None) -> PriceCurves:
    """Returns the curves of estimates, where all experts are stored alike, and those of what was measured."""
    widths = sparsity = dense = substitution = tuple[Curve, ...]()
    if losses is not None:
        widths, sparsity, dense = _widths(spec, losses), _sparsity(losses), _dense(spec, losses)
    if measured is None:
        return PriceCurves(widths, sparsity, dense, ())
    quality, name = measured.quality, f"{measured.name}, measured"
    if quality.against is not None:
        note = f"{quality.sparsity or 0:.1%} of neurons did not run; dense matrices as stored"
        kl = quality.against.kl
        widths += (Curve(name, (Point(measured.bits_per_weight, kl.value, note, kl.half_width),), is_measured=True),)
    if quality.prices is not None:
        own = quality.prices.substitution
        left_out = tuple(Point(p.sparsity, p.kl.value, "", p.kl.half_width) for p in quality.prices.sparsity)
        sparsity += (Curve(f"{name}, select by {measured.selector}", left_out, is_measured=True),)
        replaced = tuple(
            Point(p.alpha, p.kl.value, f"{p.replaced:.1%} replaced, {p.fetched:.1%} fetched", p.kl.half_width)
            for p in own.prices
        )
        substitution = (Curve(f"{name}, {own.room:.0%} of experts in memory", replaced, is_measured=True),)
    return PriceCurves(widths, sparsity, dense, substitution)


def prices_reading(spec: specs.ModelSpec, losses: Losses) -> str:
    """Words which format of each width loses least, and which selector costs least at the lowest sparsity."""
    formats, quantized = losses.of(losses.quantizer)
    lost, best = quantized.sum(axis=(0, 1, 2)), []
    for width in sorted({part.bits for part in formats if part != plans.BF16}):
        of_width = [
            (float(kl), stored_bits(spec, part), _groups_text(part))
            for kl, part in zip(lost, formats, strict=True)
            if part.bits == width
        ]
        kl, bits, groups = min(of_width)
        best.append(f"{nats(kl)} at {width:g} bits ({groups}; {bits:.2f} stored)")
    at_first = losses.sparse[:, :, :, 1].sum(axis=(0, 1))  # [kinds]
    cheapest = int(at_first.argmin())
    return (
        f"With all experts stored alike, the formats that lose least are {', '.join(best)}. At "
        f"{losses.sparsities[1]:.0%} sparsity, selection by {losses.kinds[cheapest]} costs least "
        f"({nats(float(at_first[cheapest]))}). A plan gives more bits to the experts and matrices that need them, so "
        "that it loses less than these curves at the same bytes."
    )


def _widths(spec: specs.ModelSpec, losses: Losses) -> tuple[Curve, ...]:
    """Returns a curve for each codec, group size and scale width of the plans' quantizer."""
    formats, quantized = losses.of(losses.quantizer)
    lost = quantized.sum(axis=(0, 1, 2))  # [F]
    curves: dict[str, list[Point]] = {}
    for part, kl in zip(formats, lost.tolist(), strict=True):
        if part != plans.BF16:
            point = Point(stored_bits(spec, part), kl, f"{part.bits:g} bits")
            curves.setdefault(_groups_text(part), []).append(point)
    return tuple(Curve(name, tuple(points)) for name, points in curves.items())


def stored_bits(spec: specs.ModelSpec, part: plans.PartFormat) -> float:
    """Returns the bits that an expert's weight takes in a format: codes, scales, checksums and padding."""
    gate = part if "gate" in spec.expert.matrices else None
    layout = expert_layout(plans.ExpertFormat(gate, part, part), _SELECTOR, spec.expert, spec.hidden_size)
    num_weights = spec.expert.intermediate_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (layout.selector_bytes + layout.records_bytes) / num_weights


def _groups_text(part: plans.PartFormat) -> str:
    groups = "a row as one group" if part.group == plans.ROW_GROUP else f"groups of {part.group}"
    codec = "trellis, " if part.codec == "trellis" else ""
    return f"{codec}{groups}" + ("" if part.scale_bits == 16 else ", byte scales")


def _sparsity(losses: Losses) -> tuple[Curve, ...]:
    lost = losses.sparse.sum(axis=(0, 1))  # [kinds, sparsities]
    return tuple(
        Curve(f"select by {kind}", tuple(Point(s, kl, "") for s, kl in zip(losses.sparsities, row, strict=True) if s))
        for kind, row in zip(losses.kinds, lost.tolist(), strict=True)
    )


def _dense(spec: specs.ModelSpec, losses: Losses) -> tuple[Curve, ...]:
    """Returns the curves of all layers' matrices, the embedding and the head, if they can be quantized."""
    names = [role.name for role in specs.dense_roles(spec)]
    in_layers = np.array([name.startswith("layers.") for name in names])
    parts = {"all matrices of layers": in_layers, **{name: np.array(names) == name for name in ("embed", "head")}}
    known = np.isfinite(losses.dense).all(axis=1)
    curves = []
    for name, chosen in parts.items():
        kls = losses.dense[chosen & known]
        points = zip(losses.dense_widths, kls.sum(axis=0).tolist(), strict=True)
        if len(kls):
            curves.append(Curve(name, tuple(Point(w, kl, "") for w, kl in sorted(points) if w < 16)))
    return tuple(curves)


_PLACE = "@REPORT@"  # where the data go in the template


@dataclass(frozen=True, slots=True)
class Readings:
    """The text below each figure; an empty one is not shown."""

    popularity: str
    sparsity: str
    sensitivity: str = ""
    dense: str = ""
    prices: str = ""
    experts_predicted: str = ""
    neurons_predicted: str = ""
    path_spread: str = ""
    path_recall: str = ""
    accumulated: str = ""
    coverage: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Why figures are missing, and which command measures them; empty if they are there."""

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
    """Returns the page of a profile, with what was measured of a pack of the same checkpoint."""
    return fill(make_report(profile, measured))


def fill(report: Report) -> str:
    """Returns the template with the report's data, as JSON that cannot end its script element."""
    content = json.dumps(dataclasses.asdict(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files("moe_pack.calib.report").joinpath("report.html").read_text("utf-8")
    before, _, after = template.partition(_PLACE)
    return before + content + after


def make_report(profile: Profile, measured: MeasuredPack | None = None) -> Report:
    """Returns everything that the page shows."""
    levels = figures.levels_for(profile)
    counts = figures.read_counts(profile, levels)
    head = figures.head(profile)
    kls = figures.predicted_kl(profile) if profile.facts.sensitivity != "none" else None
    losses = losses_of(profile) if kls else None
    report = Report(
        head=head,
        popularity=figures.popularity(profile, counts),
        sparsity=figures.sparsity(counts, levels),
        sensitivity=figures.sensitivity(profile, *kls) if kls else None,
        prices=price_curves(profile.spec, losses, measured),
        prediction=figures.prediction(profile, counts),
        paths=figures.paths(profile, counts),
        coverage=figures.coverage(profile, counts),
        readings=Readings("", ""),
        missing=Missing(),
    )
    thresholds = counts.quantiles[..., levels.index(0.8)]  # [L, E, kinds]
    tokens, paths = report.popularity.tokens.array(), report.paths
    is_predicted = bool(report.prediction.layers)
    read = Readings(
        popularity=readings.popularity(head, tokens, report.popularity.tests),
        sparsity=readings.sparsity(head, thresholds, tokens, report.sparsity.kinds),
        sensitivity=readings.sensitivity(head, *kls, report.sensitivity) if kls and report.sensitivity else "",
        dense=readings.dense(report.sensitivity) if report.sensitivity else "",
        prices=prices_reading(profile.spec, losses) if losses else "",
        experts_predicted=readings.experts_predicted(head, report.prediction) if is_predicted else "",
        neurons_predicted=readings.neurons_predicted(head, report.prediction) if is_predicted else "",
        path_spread=readings.path_spread(paths),
        path_recall=readings.path_recall(head, paths) if paths.recalls else "",
        accumulated=readings.accumulated(head, paths) if paths.accumulated else "",
        coverage=readings.coverage(head, report.coverage),
    )
    return dataclasses.replace(report, readings=read, missing=_missing(report))


def _missing(report: Report) -> Missing:
    held_out = (
        ""
        if report.head.num_held_out_tokens
        else "No text was held out, because all text was one sequence. Profile the model again with more text "
        "(--tokens) or with shorter sequences (--sequence-length)."
    )
    alone = "" if report.head.predicted_layers else readings.alone(report.head)
    return Missing(
        sensitivity=""
        if report.sensitivity
        else "Not measured. To measure it, run moe-pack profile MODEL -o NEW_PROFILE --sensitivity fast",
        held_out=held_out,
        prediction="" if report.prediction.layers else alone or held_out or "Not measured.",
    )
