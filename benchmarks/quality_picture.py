"""The picture of `quality_curve.py`: KL divergence over stored bits a weight, a series each.

SVG made by hand: log scale of KL, one colour and mark a series, names beside what they name and no legend.
Deterministic for a result. Draws a result again that was kept:

    python benchmarks/quality_picture.py RESULT.json PICTURE.svg
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal

import click

WIDTH, HEIGHT = 880, 600
MOST_KL = 0.3  # nats: what is above is left out, and would press the rest together
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 62, 52
_CHAR, _LINE = 6.8, 13  # pixels of a letter and of a line of text at 11 pixels
_STEPS = (1, 2, 5)  # of a decade, that have a line
_STYLE = (
    "text{font:11px system-ui,'Segoe UI',Arial,sans-serif;fill:#333}"
    ".title{font-size:15px;font-weight:600}.axis{fill:#555}.grid{stroke:#e3e3e3}"
    ".series{font-size:12px;font-weight:600}"
)

Mark = Literal["circle", "ring", "square", "triangle", "diamond"]


@dataclass(frozen=True, slots=True)
class Dot:
    """One measurement; `label` stands beside it."""

    bits: float
    kl: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements of one colour and mark, joined by a line or not; `name` stands at the first of them."""

    name: str
    colour: str
    mark: Mark
    joined: bool
    dots: tuple[Dot, ...]


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle that text or a mark takes."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "_Box") -> bool:
        """Whether both share some place."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


class _Axes:
    """Where a measurement lies in the picture, and what is drawn behind."""

    def __init__(self, dots: Iterable[Dot]) -> None:
        held = list(dots)
        bits, kls = [dot.bits for dot in held], [dot.kl for dot in held]
        self._low_bits, self._high_bits = math.floor(min(bits) * 4) / 4, math.ceil(max(bits) * 4) / 4
        if self._low_bits == self._high_bits:
            self._high_bits += 0.25
        self._low_kl, self._high_kl = math.log10(min(kls) / 1.25), math.log10(max(kls) * 1.25)

    def place(self, bits: float, kl: float) -> tuple[float, float]:
        """x and y, pixels."""
        across = (bits - self._low_bits) / (self._high_bits - self._low_bits)
        up = (math.log10(kl) - self._low_kl) / (self._high_kl - self._low_kl)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def drawn(self) -> Iterator[str]:
        """Lines and numbers of both axes."""
        x_end, y_end = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for quarter in range(round(self._low_bits * 4), round(self._high_bits * 4) + 1):
            x, _ = self.place(quarter / 4, 10**self._low_kl)
            yield f'<path class="grid" d="M{x:.1f} {_TOP}V{y_end}"/>'
            if quarter % 2 == 0:
                yield f'<text class="axis" x="{x:.1f}" y="{y_end + 18}" text-anchor="middle">{quarter / 4:g}</text>'
        for decade in range(math.floor(self._low_kl), math.ceil(self._high_kl) + 1):
            for kl in (step * 10.0**decade for step in _STEPS):
                if self._low_kl <= math.log10(kl) <= self._high_kl:
                    _, y = self.place(self._low_bits, kl)
                    yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{x_end}"/>'
                    yield f'<text class="axis" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{kl:g}</text>'
        middle = (_LEFT + x_end) / 2
        yield f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 12}" text-anchor="middle">stored bits a weight</text>'
        yield f'<text class="axis" x="{_LEFT - 46}" y="{_TOP - 14}">KL divergence, nats a token (log)</text>'


def picture(title: str, series: tuple[Series, ...]) -> str:
    """The picture as SVG; every series has a measurement, and every KL is more than 0."""
    axes = _Axes(dot for held in series for dot in held.dots)
    marks, taken = [], list[_Box]()
    for held in series:
        places = [axes.place(dot.bits, dot.kl) for dot in held.dots]
        if held.joined:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            marks.append(f'<polyline points="{line}" fill="none" stroke="{held.colour}" stroke-width="2"/>')
            taken += _along(places)
        marks += [_mark(held.mark, held.colour, x, y) for x, y in places]
        taken += [_Box(x - 4, y - 4, 8, 8) for x, y in places]
    for held in series:
        names = [(held.dots[0], held.name, "series"), *((dot, dot.label, "") for dot in held.dots)]
        for dot, text, kind in names:
            if text:
                marks.append(_label(text, kind, held.colour, axes.place(dot.bits, dot.kl), taken))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f'<text class="title" x="24" y="26">{escape(title)}</text>'
    )
    return "\n".join([head, *axes.drawn(), *marks, "</svg>\n"])


def _along(places: list[tuple[float, float]]) -> Iterator[_Box]:
    """What a line through these places takes, in small boxes."""
    for (x, y), (x_end, y_end) in pairwise(places):
        num_steps = max(1, round(math.hypot(x_end - x, y_end - y) / 6))
        for share in (step / num_steps for step in range(num_steps)):
            yield _Box(x + share * (x_end - x) - 1, y + share * (y_end - y) - 1, 2, 2)


def _mark(mark: Mark, colour: str, x: float, y: float) -> str:
    if mark == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    if mark == "ring":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#fff" stroke="{colour}"/>'
    corners = {
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "triangle": ((0, -4.5), (4, 3), (-4, 3)),
        "diamond": ((0, -4.8), (4.8, 0), (0, 4.8), (-4.8, 0)),
    }[mark]
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" fill="{colour}"/>'


def _label(text: str, kind: str, colour: str, place: tuple[float, float], taken: list[_Box]) -> str:
    """A text beside a place, where nothing else is: the nearest such of some rings of places; else the first."""
    width, (x, y) = len(text) * _CHAR * (1.12 if kind else 1.0), place
    boxes = [_Box(x + dx, y + dy, width, _LINE) for distance in range(5) for dx, dy in _offsets(distance, width)]
    inside = [box for box in boxes if box.x >= _LEFT and box.x + width <= WIDTH and _TOP <= box.y < HEIGHT - _BOTTOM]
    free = (box for box in inside if not any(box.meets(other) for other in taken))
    box = next(free, (inside or boxes)[0])
    taken.append(box)
    shown = f'class="{kind}" ' if kind else ""
    style = f' style="fill:{colour}"'
    return f'<text {shown}x="{box.x:.1f}" y="{box.y + _LINE - 3:.1f}"{style}>{escape(text)}</text>'


def _offsets(distance: int, width: float) -> tuple[tuple[float, float], ...]:
    """Right, above right, below right, left, above and below, so many lines away."""
    up, down = -_LINE * (distance + 1) - 1.0, _LINE * distance + 4.0
    aside = 8.0 + 4 * distance
    beside = ((aside, -_LINE / 2), (-aside - width, -_LINE / 2)) if distance == 0 else ()
    around = ((aside - 4, up), (aside - 4, down), (4 - aside - width, down), (4 - aside - width, up))
    return (*beside, *around, (-width / 2, up), (-width / 2, down))


# How each series of a result is drawn, and in which order; names of single points stand beside those of llama.cpp.
_LOOKS: dict[str, tuple[str, Mark, bool, bool]] = {
    "random half": ("#9a9a9a", "square", False, False),
    "HQQ, groups of 64": ("#6b6b6b", "square", True, False),
    "EdgeMoE": ("#8a6d00", "square", False, False),
    "PMQ": ("#2b8a3e", "triangle", True, False),
    "moe-pack, one format": ("#1f5fd0", "ring", False, False),
    "llama.cpp": ("#c9480c", "diamond", False, True),
    "moe-pack, plans": ("#1f5fd0", "circle", True, False),
}
SERIES = tuple(_LOOKS)


def draw(model: str, points: Iterable[tuple[str, str, float, float]]) -> str:
    """The picture of a result.

    Args:    points: series of `SERIES`, name, stored bits a weight, KL. Of a joined series, the lowest of equal bits
             is drawn; what has a KL above `MOST_KL` is not.
    """
    held = list(points)
    series = []
    for name, (colour, mark, joined, labelled) in _LOOKS.items():
        dots = sorted((bits, kl, label) for own, label, bits, kl in held if name == own and kl <= MOST_KL)
        if joined:
            dots = [dot for idx, dot in enumerate(dots) if idx == 0 or dots[idx - 1][0] != dot[0]]
        if dots:
            shown = tuple(Dot(bits, kl, label if labelled else "") for bits, kl, label in dots)
            series.append(Series(name, colour, mark, joined, shown))
    return picture(f"{model}: divergence from the 16-bit model by the size of its experts", tuple(series))


@click.command(help=__doc__)
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("drawn", type=click.Path(path_type=Path, dir_okay=False))
def main(result: Path, drawn: Path) -> None:
    """Draws a result that was kept."""
    facts = json.loads(result.read_text("utf-8"))
    points = [(point["series"], point["name"], point["bits"], point["kl"]) for point in facts["points"]]
    drawn.write_text(draw(facts["model"], points), "utf-8")


if __name__ == "__main__":
    main()
