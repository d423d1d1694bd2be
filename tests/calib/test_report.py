"""The report page: its numbers against the profile's, its text harmless, and drawn without an error by a browser."""

import dataclasses
import html
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.browser import Browser
from support.cases import case
from support.losses import calibrated_losses
from support.report_pages import EXERCISE, HandMade, browse, held, needs_browser, unpacked
from support.specs import GROUPED

from moe_pack.calib.forward import Array
from moe_pack.calib.profile import Profile
from moe_pack.calib.profile.profiles import facts_bytes, layer_file
from moe_pack.calib.report import report_html
from moe_pack.calib.report.figures import THINNED_LEVELS
from moe_pack.calib.report.page import MeasuredPack, price_curves, prices_reading
from moe_pack.calib.report.readings import nats, percent, ranges
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.formats import ModelSpec, PackError, trellis_format
from moe_pack.runtime.offload import PREDICTORS
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
    return HandMade().write(tmp_path_factory.mktemp("report") / "profile")


def test_the_page_names_what_was_measured(profile: Profile) -> None:
    head = held(report_html(profile))["head"]
    assert (head["family"], head["text"], head["sensitivity"]) == ("mixtral", "a text", "fast")
    assert (head["num_tokens"], head["num_held_out_tokens"]) == (200, 40)
    assert (head["layers"], head["num_experts"], head["num_experts_per_tok"]) == ([0, 1, 2], 6, 2)


def test_the_page_has_the_profiles_tokens_and_router_weights(profile: Profile) -> None:
    found = held(report_html(profile))["popularity"]
    layers = [HandMade().statistics(l) for l in range(3)]
    np.testing.assert_array_equal(unpacked(found["tokens"]), [layer["tokens"] for layer in layers])
    shares = [layer["mass"] / layer["mass"].astype(np.float64).sum() for layer in layers]
    np.testing.assert_allclose(unpacked(found["mass"]), shares, rtol=1e-6)  # float32 holds 7 digits


def test_the_page_has_a_test_against_chance_for_every_layer(profile: Profile) -> None:
    tests = held(report_html(profile))["popularity"]["tests"]
    for l, test in enumerate(tests):
        late = np.bincount(HandMade().routes()[160:, l].ravel(), minlength=6)
        even = 40 * 2 / 6
        assert test["chi_square"] == pytest.approx(sum((n - even) ** 2 / even for n in late.tolist()) * 5 / 4)
    assert len(tests) == 3


def test_the_page_has_all_quantiles_of_a_small_model(profile: Profile) -> None:
    found = held(report_html(profile))["sparsity"]
    assert found["levels"] == list(QUANTILE_LEVELS)
    expected = [HandMade().statistics(l)["quantiles"] for l in range(3)]
    np.testing.assert_array_equal(unpacked(found["quantiles"]), expected)


def test_the_page_of_a_large_model_has_fewer_quantiles_and_says_so(tmp_path: Path) -> None:
    made = HandMade(L=5, E=512, f=1)
    found = held(report_html(made.write(tmp_path / "profile")))["sparsity"]
    assert found["levels"] == list(THINNED_LEVELS) and found["num_measured"] == 103
    kept = [QUANTILE_LEVELS.index(level) for level in THINNED_LEVELS]
    expected = [made.statistics(l)["quantiles"][:, :, kept] for l in range(5)]
    np.testing.assert_array_equal(unpacked(found["quantiles"]), expected)


def test_predicted_divergences_are_losses_times_growth(profile: Profile) -> None:
    found = held(report_html(profile))["sensitivity"]
    files = HandMade().losses(profile.spec)
    effects = files["effects.safetensors"]
    for l in range(3):
        losses = files[layer_file("sensitivity", l)]
        for name in ("quantized", "sparse"):
            expected = np.empty((6, 3, 4))
            for place in np.ndindex(expected.shape):
                expected[place] = float(losses[name][place]) * float(effects["growth"][l])
            np.testing.assert_allclose(unpacked(found[name])[l], expected, rtol=1e-6)  # float32 holds 7 digits
        dense = [matrix["kl"] for matrix in found["dense"] if matrix["layer"] == l]
        np.testing.assert_allclose(dense, losses["dense"] * effects["growth"][l], rtol=1e-6)
    assert found["head"] == effects["head"].tolist()


def test_the_page_has_the_predictors_figures_and_null_for_what_is_not_known(profile: Profile) -> None:
    found = held(report_html(profile))["prediction"]
    assert found["predictors"] == list(PREDICTORS)
    for l, layer in enumerate(found["layers"], 1):
        expected = HandMade().predictors(l)
        assert layer["experts"] == [*expected["experts"][:5].tolist(), [None, None, None]] and layer["best"] == 4
        assert layer["neurons"][2][3] == [None, None]
        assert layer["neurons"][1] == expected["neurons"][1].tolist()
    assert found["cosine"][0] == HandMade().statistics(1)["cosine"].tolist()


def test_path_figures_agree_with_counting_by_hand(profile: Profile) -> None:
    found = held(report_html(profile))["paths"]
    routes = np.sort(HandMade().routes(), axis=2)
    counts: dict[bytes, int] = {}
    for token in routes:
        counts[token.tobytes()] = counts.get(token.tobytes(), 0) + 1
    window, ordered = found["windows"][0], sorted(counts.values(), reverse=True)
    assert (window["num_paths"], window["num_single"]) == (len(counts), ordered.count(1))
    first = [sum(ordered[: math.ceil(p * len(ordered) / 100)]) / 200 for p in found["curve_percents"]]
    assert window["curve"] == pytest.approx(first)
    # The first k ranked, knowing two layers: told twice, by two functions.
    assert found["num_judged"] == 40
    assert [layer["recall"] for layer in found["recalls"]] == pytest.approx([row[1] for row in found["accumulated"][2]])


def test_experts_without_tokens_and_with_few_are_named(profile: Profile) -> None:
    found = held(report_html(profile))
    tokens = [HandMade().statistics(l)["tokens"].tolist() for l in range(3)]
    assert found["coverage"]["unreached"] == [[0, [5]]]
    scarce = [[l, [e for e, n in enumerate(held) if 0 < n < 64]] for l, held in enumerate(tokens)]
    assert found["coverage"]["scarce"] == [row for row in scarce if row[1]]
    assert found["coverage"]["least"][0] | {"high": 0} == {
        "layer": 0,
        "expert": 5,
        "num_tokens": 0,
        "low": 0,
        "high": 0,
    }
    assert found["readings"]["coverage"].startswith(
        "No token reached 1 of 18 experts. Their quantiles are those of all tokens"
    )


def test_the_reading_names_the_most_sensitive_layer(profile: Profile) -> None:
    found = held(report_html(profile))
    totals = unpacked(found["sensitivity"]["quantized"])[..., 0].sum(axis=(1, 2))
    share = f"{100 * totals.max() / totals.sum():.3g}%"
    said = found["readings"]["sensitivity"]
    assert said.startswith(f"Layer {totals.argmax()} is the most sensitive: with all its experts at 2 bits it costs")
    assert f"{share} of what all layers cost together" in said


def test_a_share_is_said_with_the_digits_it_needs() -> None:
    for share, text in [(0, "0%"), (0.125, "12.5%"), (0.9987, "99.87%"), (1, "100%")]:
        with case(share, text):
            assert percent(share) == text


def test_runs_of_layers_are_joined() -> None:
    assert ranges([1, 4, 5, 6, 8, 9]) == "1, 4 to 6, 8, 9"


def test_a_profile_without_sensitivity_says_how_to_measure_it(tmp_path: Path) -> None:
    found = held(report_html(HandMade(sensitivity="none").write(tmp_path / "profile")))
    assert found["sensitivity"] is None and found["readings"]["sensitivity"] == ""
    assert not any(found["prices"].values()) and found["readings"]["prices"] == ""
    assert "moe-pack profile MODEL -o NEW_PROFILE --sensitivity fast" in found["missing"]["sensitivity"]


def test_a_profile_without_held_out_text_says_so(tmp_path: Path) -> None:
    made = HandMade(num_sequences=1, sequence_length=200, num_held_out=0)
    found = held(report_html(made.write(tmp_path / "profile")))
    assert found["prediction"]["layers"] == found["paths"]["recalls"] == found["popularity"]["tests"] == []
    assert found["missing"]["prediction"].startswith("No text was held out")
    assert found["readings"]["popularity"].endswith("it is not known whether other text chooses the same experts.")


def test_the_page_fetches_nothing(profile: Profile) -> None:
    page = report_html(profile)
    for word in ("http://", "https://", "src=", "@import", "url(", "fetch(", "XMLHttpRequest", "<link"):
        assert word not in page, word


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!-- @REPORT@ \u2028"
    page = report_html(HandMade(name=name).write(tmp_path / "profile"))
    assert page.count("</script>") == 2  # the data's and the program's own
    assert held(page)["head"]["text"] == name
    assert "innerHTML" not in page and "document.write" not in page


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    damaged = HandMade().write(tmp_path / "profile")
    path = damaged.folder / layer_file("sensitivity", 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(PackError, match=r"sensitivity-001.safetensors: SHA-256 does not match"):
        report_html(damaged)


@dataclass(frozen=True)
class Broken(HandMade):
    """A profile whose digests hold but one of whose arrays is wrong."""

    wrong: str = ""

    def statistics(self, l: int) -> dict[str, Array]:
        arrays = HandMade.statistics(self, l)
        if self.wrong == "expert":
            arrays["routes"] = arrays["routes"].copy()
            arrays["routes"][0, 0] = self.E
        if self.wrong == "twice":
            arrays["routes"] = np.zeros_like(arrays["routes"])
        return arrays

    def predictors(self, l: int) -> dict[str, Array]:
        arrays = HandMade.predictors(self, l)
        if self.wrong == "best":
            arrays["best"] = np.asarray([6], np.uint8)
        if self.wrong == "experts":
            arrays["experts"] = arrays["experts"][:4]
        return arrays

    def losses(self, spec: ModelSpec) -> dict[str, dict[str, Array]]:
        files = HandMade.losses(self, spec)
        if self.wrong == "sparse":
            files[layer_file("sensitivity", 0)]["sparse"] = np.zeros((self.E, 3, 3), np.float32)
        return files


def test_arrays_that_cannot_be_drawn_are_refused_by_name(tmp_path: Path) -> None:
    for number, (wrong, message) in enumerate(
        [
            (
                "expert",
                "statistics-000.safetensors: tensor 'routes' is 6 at [0, 0], expected a finite number of at most 5; "
                "the file is damaged, make it again",
            ),
            (
                "twice",
                "statistics-000.safetensors: tensor 'routes' does not name 2 different experts for each token; "
                "profile the model again",
            ),
            (
                "best",
                "predictors-001.safetensors: tensor 'best' is 6 at [0], expected a finite number of at most 5; the "
                "file is damaged, make it again",
            ),
            ("experts", "predictors-001.safetensors: tensor 'experts' is F32 [4, 3], expected F32 [6, 3]"),
            ("sparse", "sensitivity-000.safetensors: tensor 'sparse' is F32 [6, 3, 3], expected F32 [6, 3, 4]"),
        ]
    ):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(wrong, message):
            with pytest.raises(PackError) as refusal:
                report_html(Broken(wrong=wrong).write(case_folder / "profile"))
            assert str(refusal.value) == message


def test_a_text_of_no_tokens_is_refused(tmp_path: Path) -> None:
    whole = HandMade().write(tmp_path / "profile")
    text = dataclasses.replace(whole.facts.text, num_held_out=10)
    (whole.folder / "profile.json").write_bytes(facts_bytes(dataclasses.replace(whole.facts, text=text)))
    with pytest.raises(PackError, match="text: found impossible counts; profile the model again"):
        report_html(Profile(whole.folder))


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        HandMade(),
        HandMade(sensitivity="none"),
        HandMade(num_sequences=1, sequence_length=200, num_held_out=0),
        HandMade(L=1, E=3, k=1, f=1),
        HandMade(L=9, E=40, k=1),
        HandMade(one_expert=True),
        HandMade(name="</script><img onerror=alert(1)>"),
    ],
    ids=["whole", "no sensitivity", "nothing held out", "one layer", "many layers", "one expert", "hostile"],
)
def test_a_browser_draws_every_figure_and_reports_no_error(made: HandMade, tmp_path: Path) -> None:
    page = report_html(made.write(tmp_path / "profile")).replace("</body>", EXERCISE)
    document, console = browse(page, tmp_path)
    assert console == []
    assert 'data-ready="yes"' in document and 'data-exercised="yes"' in document
    assert not re.search(r'="[^"]*\b(NaN|undefined|Infinity)\b', document), "no figure has a place that is no number"
    assert not re.search(r">[^<{]*\b(NaN|undefined|Infinity)\b[^<}]*<", document.partition('<script type="app')[0])


@needs_browser
@pytest.mark.slow
def test_tooltips_say_what_the_profile_says(tmp_path: Path) -> None:
    made = HandMade()
    whole = made.write(tmp_path / "profile")
    document, _ = browse(report_html(whole).replace("</body>", EXERCISE), tmp_path)
    text = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
    assert text is not None
    found = json.loads(html.unescape(text.group(1)))
    chosen, dropped = (
        found["Heat map of choices by layer and expert"],
        found["Heat map of the share of neurons that would not run"],
    )
    prices = {curve["name"]: curve["points"] for curve in held(report_html(whole))["prices"]["sparsity"]}
    for name, lines in found["KL divergence by sparsity"].items():
        said = re.fullmatch(r"(\d+)% do not run: (\S+) nats", lines[0])
        assert said is not None, lines
        point = next(point for point in prices[name] if f"{100 * point['x']:.0f}" == said.group(1))
        assert float(said.group(2)) == pytest.approx(point["kl"], rel=1e-4)  # five digits are shown
    assert len(found["KL divergence by sparsity"]) == 3
    costs = found["Heat map of predicted KL divergence by layer and expert"]
    for l in range(3):
        layer, losses = made.statistics(l), whole.layer_losses(l)
        for e in range(6):
            title, num_tokens = f"layer {l}, expert {e}", int(layer["tokens"][e])
            assert chosen[title][0].startswith(f"{num_tokens} of 200 tokens, 95% interval ")
            assert chosen[title][1].startswith(f"{100 * num_tokens / 400:.2f}% of the layer's choices")
            said = re.fullmatch(r"([\d.]+)% of neurons below ([\d.]+) on up", dropped[title][0])
            assert said is not None, dropped[title]
            expected = np.interp(float(said.group(2)), layer["quantiles"][e, 0], QUANTILE_LEVELS)
            assert float(said.group(1)) == pytest.approx(100 * expected, abs=0.006)  # two decimals are shown
            cost = sum(float(losses.quantized[e, m, 0]) for m in range(3))
            said = re.fullmatch(r"all three at 2 bits: (\S+) nats", costs[title][0])
            assert said is not None, costs[title]
            assert float(said.group(1)) == pytest.approx(cost, rel=1e-4)  # five digits are shown


@needs_browser
@pytest.mark.slow
def test_no_table_is_cut_on_a_wide_screen_and_nothing_leaves_a_narrow_one(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report_html(profile), "utf-8")
    unfold = "for (const node of document.querySelectorAll('details')) { node.open = true; }"
    cut = "[...document.querySelectorAll('.scroll')].filter(node => node.scrollWidth > node.clientWidth + 1)"
    with Browser(tmp_path / "browser") as browser:
        for width, is_dark in itertools.product((390, 1280), (False, True)):
            page = browser.open((tmp_path / "report.html").as_uri(), width=width, is_dark=is_dark)
            page.run(unfold)
            page.wait("[...document.querySelectorAll('details')].every(node => node.children.length > 1)")
            with case(width, is_dark):
                assert page.run("document.documentElement.scrollWidth") == width
                if width == 1280:
                    assert page.run(f"{cut}.map(node => node.textContent.slice(0, 60))") == []
            page.close()
        assert browser.said == []


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
