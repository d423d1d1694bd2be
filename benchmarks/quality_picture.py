"""The picture of `quality_curve.py`: KL divergence over stored bits a weight, a series each.

The same bytes for the same result and matplotlib. Draws a result again that was kept:

    python benchmarks/quality_picture.py RESULT.json PICTURE.svg
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MOST_KL = 0.3  # nats: what is above is left out, and would press the rest together
_INCHES = (9.2, 6.2)


@dataclass(frozen=True, slots=True)
class Look:
    """How a series is drawn: as matplotlib names colours and markers; `joined` by a line, `named` point by point."""

    colour: str
    marker: str
    joined: bool = False
    named: bool = False


SERIES = {  # from the back to the front
    "random half": Look("#9a9a9a", "s"),
    "HQQ, groups of 64": Look("#6b6b6b", "s", joined=True),
    "EdgeMoE": Look("#8a6d00", "v"),
    "PMQ": Look("#2b8a3e", "^", joined=True),
    "moe-pack, one format": Look("#1f5fd0", "x"),
    "llama.cpp": Look("#c9480c", "D", named=True),
    "moe-pack, plans": Look("#1f5fd0", "o", joined=True),
}


Points = Iterable[tuple[str, str, float, float]]  # a name of `SERIES`, the point's own, stored bits a weight, KL


def draw(model: str, points: Points, drawn: Path) -> None:
    """Writes the picture of a result, as SVG."""
    with mpl.rc_context({"svg.hashsalt": "moe-pack", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(_INCHES, layout="constrained")
        plot(figure.add_subplot(), model, points)
        figure.savefig(drawn, format="svg", metadata={"Date": None})


def plot(axes: Axes, model: str, points: Points) -> None:
    """The picture in empty axes; of a joined series the lowest of equal bits, and no KL above `MOST_KL`."""
    held = [point for point in points if point[3] <= MOST_KL]
    for series, look in SERIES.items():
        dots = sorted((bits, kl, name) for own, name, bits, kl in held if own == series)
        if look.joined:
            dots = [next(equal) for _, equal in groupby(dots, key=lambda dot: dot[0])]
        if dots:
            _plot_series(axes, series, look, dots)
    axes.margins(x=0.07)
    axes.set_yscale("log")
    axes.set_xlabel("stored bits a weight")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title(f"{model}: divergence from the 16-bit model by the size of its experts")
    axes.grid(visible=True, which="both", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


def _plot_series(axes: Axes, series: str, look: Look, dots: list[tuple[float, float, str]]) -> None:
    bits, kls, names = zip(*dots, strict=True)
    line = "-" if look.joined else "none"
    axes.plot(bits, kls, linestyle=line, marker=look.marker, color=look.colour, markersize=4.5, label=series)
    if not look.named:
        return
    seen: dict[float, int] = {}
    for at, kl, name in zip(bits, kls, names, strict=True):
        seen[at] = seen.get(at, 0) + 1
        is_left = seen[at] % 2 == 1  # names of equal bits stand left and right in turn, out of each other's way
        offset, side = ((-6, 0), "right") if is_left else ((6, 0), "left")
        axes.annotate(name, (at, kl), offset, textcoords="offset points", ha=side, va="center", color=look.colour)


@click.command(help=__doc__)
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("drawn", type=click.Path(path_type=Path, dir_okay=False))
def main(result: Path, drawn: Path) -> None:
    """Draws a result that was kept."""
    facts = json.loads(result.read_text("utf-8"))
    points = ((point["series"], point["name"], point["bits"], point["kl"]) for point in facts["points"])
    draw(facts["model"], points, drawn)


if __name__ == "__main__":
    main()
