"""A profile as one page to read: a self-contained HTML file with figures, exact values on hover, and short readings.

No network, no other file. `report_figures` and `report_prices` put the numbers together, `report_readings` the words,
`report.html` draws.
"""

import dataclasses
import json
from dataclasses import dataclass
from importlib.resources import files

from moe_pack.calib import report_figures as figures
from moe_pack.calib import report_readings as readings
from moe_pack.calib.arrays import Array
from moe_pack.calib.losses import losses_of
from moe_pack.calib.profile import Profile
from moe_pack.calib.report_prices import MeasuredPack, PriceCurves, price_curves, prices_reading

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
    template = files("moe_pack.calib").joinpath("report.html").read_text("utf-8")
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
