"""The report's curves of what each lossy choice costs: estimates against sums by hand, and what was measured."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.losses import calibrated_losses
from support.report_pages import EXERCISE, HandMade, browse, held, needs_browser
from support.specs import GROUPED

from moe_pack.calib.forward import Array
from moe_pack.calib.profile import Profile
from moe_pack.calib.profile.profiles import layer_file
from moe_pack.calib.report import report_html
from moe_pack.calib.report.page import MeasuredPack, price_curves, prices_reading
from moe_pack.calib.report.readings import nats
from moe_pack.formats import trellis_format
from moe_pack.runtime.quality import (
    Estimate,
    Prices,
    Quality,
    SourceQuality,
    SparsityPrice,
    Substitution,
    SubstitutionPrice,
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Three layers of six experts; read only."""
    return HandMade().write(tmp_path_factory.mktemp("report") / "profile")


def test_width_prices_are_sums_of_predicted_losses_over_the_bits_of_stored_rows(profile: Profile) -> None:
    curves = {curve["name"]: curve["points"] for curve in held(report_html(profile))["prices"]["widths"]}
    files = HandMade().losses(profile.spec)
    growth = files["effects.safetensors"]["growth"].astype(np.float64)
    assert len(curves) == 7  # groups of 16, 32, 64, with scales of 16 bits or a byte; and the row
    for place, width in enumerate((2, 3, 4, 8)):
        point = curves["groups of 64"][place]
        lost = [np.minimum.accumulate(_predicted(files, growth, l), axis=2)[..., place].sum() for l in range(3)]
        assert point["note"] == f"{width} bits" and point["kl"] == pytest.approx(sum(lost), rel=1e-5)
        # Up's row, and a record of gate and down: codes, a scale and a zero of 2 bytes, a CRC of 4, padded to 16.
        # Gate's codes, before down's, are padded to 16 too.
        gap = -8 * width % 16
        rows = [-(-(n * (8 * width + 4) + (n - 1) * gap + 4) // 16) * 16 for n in (1, 2)]
        assert point["x"] == pytest.approx(8 * sum(rows) / (3 * 64))


def _predicted(files: dict[str, dict[str, Array]], growth: Array, l: int) -> Array:
    losses = files[layer_file("sensitivity", l)]["quantized"]
    found: Array = losses.astype(np.float64) * growth[l]
    return found


def test_sparsity_prices_rise_and_are_sums_over_experts(profile: Profile) -> None:
    curves = held(report_html(profile))["prices"]["sparsity"]
    files = HandMade().losses(profile.spec)
    growth = files["effects.safetensors"]["growth"].astype(np.float64)
    for kind, curve in enumerate(curves):
        found = [files[layer_file("sensitivity", l)]["sparse"].astype(np.float64) * growth[l] for l in range(3)]
        lost = np.maximum.accumulate(np.stack(found), axis=3)[:, :, kind].sum(axis=(0, 1))
        assert [point["x"] for point in curve["points"]] == [0.5, 0.7, 0.8, 0.9]
        assert [point["kl"] for point in curve["points"]] == pytest.approx(lost.tolist(), rel=1e-5)
    assert [curve["name"] for curve in curves] == ["select by up", "select by gate", "select by both"]


def test_dense_prices_are_those_of_layers_embedding_and_head(profile: Profile) -> None:
    layers, embed, head = held(report_html(profile))["prices"]["dense"]
    files = HandMade().losses(profile.spec)
    effects = files["effects.safetensors"]
    found = [files[layer_file("sensitivity", l)]["dense"] * effects["growth"][l] for l in range(3)]
    eight, four = np.maximum.accumulate(np.concatenate(found), axis=1).sum(axis=0)
    assert [(point["x"], point["kl"]) for point in layers["points"]] == [
        (4, pytest.approx(four)),
        (8, pytest.approx(eight)),
    ]
    assert [point["kl"] for point in embed["points"]] == pytest.approx([2e-4, 1e-5])
    assert [point["kl"] for point in head["points"]] == pytest.approx([4e-3, 2e-5])


def measured(prices: Prices | None) -> MeasuredPack:
    """What might have been measured of a pack with thresholds."""
    one = Estimate(1.0, 0.1)
    against = SourceQuality("", True, 256, Estimate(0.02, 0.003), one, 0.0, one, one, one, 0.0, 0.0)
    quality = Quality("text", "", 1, 512, 511, 1000, 0.81, one, against, prices)
    return MeasuredPack("</script>packed", "both", 3.25, quality)


MEASURED_PRICES = Prices(
    511,
    "a text",
    (SparsityPrice(0.5, 0.49, Estimate(0.01, None), Estimate(0.0, None)),),
    Substitution(
        "importance", 0.5, 0.48, (SubstitutionPrice(0.3, 0.09, 0.386, Estimate(0.0, 0.0), Estimate(0.0, 0.0)),)
    ),
)


def test_what_was_measured_of_a_pack_stands_among_what_was_estimated(profile: Profile) -> None:
    plain = held(report_html(profile))["prices"]
    found = held(report_html(profile, measured(MEASURED_PRICES)))["prices"]
    assert found["dense"] == plain["dense"] and plain["substitution"] == []
    (width,), (sparse,) = found["widths"][len(plain["widths"]) :], found["sparsity"][len(plain["sparsity"]) :]
    assert width["is_measured"] and width["points"] == [
        {"x": 3.25, "kl": 0.02, "half_width": 0.003, "note": "81.0% of neurons did not run; dense matrices as stored"}
    ]
    assert sparse["name"] == "</script>packed, measured, select by both" and sparse["is_measured"]
    assert sparse["points"] == [{"x": 0.5, "kl": 0.01, "half_width": None, "note": ""}]
    (replaced,) = found["substitution"]
    assert replaced["name"].endswith("50% of experts in memory")
    assert replaced["points"] == [{"x": 0.3, "kl": 0.0, "half_width": 0.0, "note": "9.0% replaced, 38.6% fetched"}]


def test_of_a_pack_without_prices_its_loss_alone_is_drawn(tmp_path: Path) -> None:
    alone = HandMade(sensitivity="none").write(tmp_path / "profile")
    found = held(report_html(alone, measured(None)))["prices"]
    assert [len(found[name]) for name in ("widths", "sparsity", "dense", "substitution")] == [1, 0, 0, 0]


def test_the_reading_of_prices_names_what_costs_least(profile: Profile) -> None:
    found = held(report_html(profile))
    # Formats are alike at a width here: the one that takes least is named.
    bits, kl, name = min(
        (curve["points"][0]["x"], curve["points"][0]["kl"], curve["name"]) for curve in found["prices"]["widths"]
    )
    assert name == "a row as one group"
    said = f"With all experts stored alike, the formats that lose least are {nats(kl)} at 2 bits ("
    assert found["readings"]["prices"].startswith(f"{said}{name}; {bits:.2f} stored), ")
    halves = [
        (curve["points"][0]["kl"], curve["name"].removeprefix("select by ")) for curve in found["prices"]["sparsity"]
    ]
    assert f"selection by {min(halves)[1]} costs least ({nats(min(halves)[0])})" in found["readings"]["prices"]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sensitivity", "prices"), [("fast", MEASURED_PRICES), ("none", MEASURED_PRICES), ("none", None)]
)
def test_a_browser_draws_what_was_measured(sensitivity: str, prices: Prices | None, tmp_path: Path) -> None:
    made = HandMade(sensitivity=sensitivity).write(tmp_path / "profile")
    document, console = browse(report_html(made, measured(prices)).replace("</body>", EXERCISE), tmp_path)
    assert console == [] and 'data-exercised="yes"' in document
    assert not re.search(r'="[^"]*\b(NaN|undefined|Infinity)\b', document), "no figure has a place that is no number"
    assert document.count("packed, measured") > 1


def test_of_calibrated_losses_the_curves_are_of_trellises_and_affine_codes_by_bits_of_a_weight() -> None:
    losses = calibrated_losses(GROUPED)
    curves = {curve.name: curve.points for curve in price_curves(GROUPED, losses).widths}
    assert list(curves) == [
        "trellis, a row as one group",
        "trellis, groups of 32, byte scales",
        "a row as one group",
        "groups of 32, byte scales",
    ]
    points = curves["trellis, a row as one group"]
    assert [point.note for point in points] == [f"{bits} bits" for bits in ("2", "2.5", "3", "3.5", "4")]
    place = losses.calibrated_formats.index(trellis_format(5, 0))
    assert points[1].kl == pytest.approx(losses.calibrated[..., place].sum())
    assert "at 2 bits (trellis, " in prices_reading(GROUPED, losses)
