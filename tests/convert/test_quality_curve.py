"""The parts of the benchmark of quality by size: what it finds fault with, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from comparators import edgemoe_plans, sizes, stored_bytes
from contest import Contest, Line
from models import TinyMixtral
from paired_bootstrap import Difference
from planned import foretold, single
from profiles import profiled, random_tokens
from quality_curve import Curve, Point, measure
from quality_picture import MOST_KL, SERIES, draw, plot

from moe_pack.calib import Profile, ProfileOptions, losses_of
from moe_pack.formats import QUANTIZERS, Checkpoint, format_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT = random_tokens(2, 512, 96)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("curve")
    model = TinyMixtral(128, 64, num_layers=2, num_experts=4, config={"max_position_embeddings": 512})
    return profiled(model.write(folder / "model"), folder / "profile", TEXT, ProfileOptions("fast"))


@pytest.fixture(scope="module")
def curve(profile: Profile) -> Curve:
    checkpoint = Checkpoint(profile.folder.parent / "model")
    return Curve(Contest(checkpoint, TEXT, profile), profile)


@pytest.mark.slow
def test_single_formats_are_foretold_to_lose_less_the_more_they_store(curve: Curve, profile: Profile) -> None:
    points = list(curve.single())
    sizes = [point.num_bytes for point in points]
    assert sizes == sorted(set(sizes))
    assert all(1.5 <= point.bits <= 4.75 for point in points)
    losses = {format_text(part): loss for part, loss in foretold(profile).items()}
    shown = {point.name: (point.num_bytes, losses[point.name]) for point in points}
    held = [loss for _, loss in shown.values()]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
    for part, loss in foretold(profile).items():
        num_bytes = stored_bytes(profile.spec, single(profile.spec, part))
        if format_text(part) not in shown and num_bytes <= sizes[-1]:
            assert any(size <= num_bytes and least <= loss for size, least in shown.values())
    assert points[-1].kl < points[0].kl / 4


@pytest.mark.slow
def test_a_format_throughout_is_foretold_to_lose_what_all_matrices_lose(profile: Profile) -> None:
    losses = losses_of(profile)
    for quantizer in QUANTIZERS:
        found, (formats, quantized) = foretold(profile, quantizer), losses.of(quantizer)
        assert tuple(found) == formats
        for number, part in enumerate(formats):
            assert found[part] == pytest.approx(sum(quantized[:, :, :, number].ravel().tolist()))


@pytest.mark.slow
def test_our_plans_fill_the_bytes_of_every_quarter_of_a_bit(curve: Curve) -> None:
    sizes = dict(curve.grid())
    assert list(sizes) == [1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.25, 4.5]
    for bits, num_bytes in sizes.items():
        assert num_bytes * 8 == pytest.approx(bits * 2 * 4 * 3 * 64 * 128, abs=8)
    found = {float(point.name.removeprefix("plan of ")): point for point in curve.ours()}
    assert {3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5} <= set(found)
    for bits, point in found.items():
        assert bits - 0.2 < point.bits <= bits
    assert found[4.5].kl < found[4.0].kl < found[3.0].kl


@pytest.mark.slow
def test_only_what_was_asked_for_is_measured(curve: Curve, tmp_path: Path) -> None:
    found = measure(curve, TEXT, 1, None, ("plans", "hqq", "llama"), tmp_path)
    assert {point.series for point in found} == {"moe-pack, plans", "HQQ, groups of 64", "random half"}
    assert [point.num_bytes for point in found] == sorted(point.num_bytes for point in found)
    uniform = [point for point in found if point.series == "HQQ, groups of 64"]
    assert [point.name for point in uniform] == ["2 bit, uniform", "3 bit, uniform", "4 bit, uniform"]
    for point in uniform:
        assert point.line is not None and point.line.our_bytes is not None
        assert point.line.our_bytes <= point.num_bytes
        assert point.facts()["is"] in point.row()


@pytest.mark.slow
def test_edgemoes_plans_are_at_hqqs_bytes_and_the_widths_are_its_importances(curve: Curve, tmp_path: Path) -> None:
    found = measure(curve, TEXT, 1, None, ("edgemoe",), tmp_path)
    assert {point.series for point in found} == {"EdgeMoE"} and len(found) == 2 * 5
    room = {size.mean_width: size.max_bytes for size in sizes(curve.contest.spec, 1)}
    importance = Profile(tmp_path / "exact").exact()["losses"]
    for point in found:
        mean_width, name = float(point.name.split(",")[0]), point.name.split(", ", 1)[1]
        plan = edgemoe_plans(curve.contest.spec, room[mean_width], importance)[name]
        assert point.num_bytes == stored_bytes(curve.contest.spec, plan) <= room[mean_width]
        assert plan.quantizer == ("absmax" if name == "as published" else "hqq")


def line(low: float, high: float) -> Line:
    return Line("Q4_K", 4_500, 0.004, 4_400, 0.003, Difference((low + high) / 2, low, high))


def test_a_point_that_ours_is_not_below_is_a_fault() -> None:
    assert Point("llama.cpp", "Q4_K", 4_500, 4.5, 0.004, line(-0.002, -0.001)).fault() is None
    for held, verdict in ((line(-0.002, 0.001), "not told apart"), (line(0.001, 0.002), "behind")):
        fault = Point("llama.cpp", "Q4_K", 4_500, 4.5, 0.004, held).fault()
        assert fault == f"llama.cpp, Q4_K, 4.500 bits: {verdict}, lower expected"
    unplanned = Line("IQ1_M", 1_750, 0.05, None, None, None)
    assert Point("llama.cpp", "IQ1_M", 1_750, 1.75, 0.05, unplanned).fault() is not None
    assert Point("llama.cpp", "IQ1_S", 1_562, 1.5625, 0.05, unplanned).fault() is None, "below the range"


def plotted(points: list[tuple[str, str, float, float]]) -> Axes:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot(axes, "model", points)
    return axes


def test_a_picture_has_each_series_in_its_order_without_what_is_far_above() -> None:
    far = ("PMQ", "1.75, pmq", 1.75, MOST_KL * 1.01)
    near = [(name, "Q4_K", 2.0 + idx / 2, 0.01 * (idx + 1)) for idx, name in enumerate(SERIES)]
    lines = plotted([far, *reversed(near)]).get_lines()
    assert [line.get_label() for line in lines] == list(SERIES)
    for line, (_, _, bits, kl) in zip(lines, near, strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([bits], [kl])


def test_a_joined_series_has_the_lowest_of_equal_bits_and_others_have_all() -> None:
    twice = [("PMQ", "worse", 2.0, 0.2), ("PMQ", "better", 2.0, 0.1), ("llama.cpp", "Q4_0", 4.5, 0.004)]
    joined, apart = plotted([*twice, ("llama.cpp", "Q4_K", 4.5, 0.003)]).get_lines()
    assert (list(joined.get_ydata()), joined.get_linestyle()) == ([0.1], "-")
    assert (list(apart.get_ydata()), apart.get_linestyle()) == ([0.003, 0.004], "None")


def test_llamas_types_are_named_and_those_of_equal_bits_on_two_sides() -> None:
    points = [("llama.cpp", "Q4_K", 4.5, 0.003), ("llama.cpp", "Q4_0", 4.5, 0.004), ("PMQ", "unnamed", 2.0, 0.1)]
    texts = {text.get_text(): text.get_horizontalalignment() for text in plotted(points).texts}
    assert texts == {"Q4_K": "right", "Q4_0": "left"}


def test_a_result_is_drawn_alike_each_time(tmp_path: Path) -> None:
    points = [(name, "Q4_K", 2.0 + idx / 2, 0.01 * (idx + 1)) for idx, name in enumerate(SERIES)]
    draw("model", points, tmp_path / "first.svg")
    draw("model", reversed(points), tmp_path / "second.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    shown = {"".join(text.itertext()) for text in ElementTree.parse(tmp_path / "first.svg").iter(SVG + "text")}
    assert set(SERIES) | {"Q4_K", "stored bits a weight"} <= shown
