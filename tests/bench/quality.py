"""Quality by size: KL divergence from the source over stored bits an expert weight, against HQQ and llama.cpp.

    python tests/bench/quality.py --llama-python PYTHON --svg PICTURE.svg
    python tests/bench/quality.py --model MODEL --step 0.5 --other-text FILE

Ours: the planner's plan at every quarter of a bit (`--step`) from 1.75 to 4.5, and all experts in one format, of the
formats that a profile predicts to lose less than every smaller one. Against them: HQQ in groups of 64 at 2, 3 and 4
bits, and those of llama.cpp's types that the model's rows can hold, with an importance matrix; each is compared with
our plan within its bytes. Bits a weight are all bytes of experts: codes, scales, CRCs, padding. Selector `none`,
sparsity 0, the dense part as it is. All are calibrated on the shipped sample and judged on another text by the mean KL
divergence in nats; a difference counts when its 95% interval, of a paired bootstrap over blocks of 128 tokens, excludes
0. KL has 1.96 standard errors over these blocks. `--other-text` is of another kind: it gives a KL of its own, not the
differences. Exits with 1 if our plan is not lower than another of at least 1.75 bits.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from benchlib import SEQUENCE_LENGTH, figure, finish, json_option, model_options, sample_and_unseen, table
from benchlib.judging import (
    BLOCK_TOKENS,
    Blocks,
    Difference,
    Judge,
    num_expert_weights,
    paired_difference,
    planned,
    predicted_losses,
    stored_bytes,
    uniform,
)
from benchlib.llama import LlamaExperts, experts_with_inputs, libggml_option, llama_option, llama_types
from tqdm import tqdm

from moe_pack.calib.profile import Profile, ProfileOptions, make_profile
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.formats import NO_PROGRESS, Plan, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import format_text
from moe_pack.runtime.model import NeuronBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOW, HIGH = 1.75, 4.5  # bits a weight
_BEYOND = 0.25  # of single formats: how far outside these bounds they are still shown
PARTS = ("plans", "formats", "hqq", "llama")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement.

    `kl_error`: 1.96 standard errors.   `other_kl`, `other_kl_error`: on the other text.   `our_kl`, `difference`: of
    our plan within its bytes, ours less it; None where it is ours.
    """

    series: str
    name: str
    num_bytes: int
    bits: float
    kl: float
    kl_error: float
    other_kl: float | None
    other_kl_error: float | None
    is_ours: bool
    our_kl: float | None = None
    difference: Difference | None = None

    def fault(self) -> str | None:
        """Returns what is not as it should be, or None."""
        verdict = self.difference.verdict if self.difference else "no plan is so small"
        if self.is_ours or self.bits < LOW or verdict == "lower":
            return None
        return f"{self.series}, {self.name}, {self.bits:.3f} bits: {verdict}, lower expected"


class Curve:
    """Collects the points of a checkpoint.

    Args:    num_first: blocks of the text that gives the differences; the judge's others are of the other text.
             step: of the plans, in bits.
    """

    def __init__(self, judge: Judge, profile: Profile, num_first: int, step: float) -> None:
        self._judge, self._profile, self._spec = judge, profile, judge.spec
        self._num_first, self._step = num_first, step
        self._num_weights = num_expert_weights(judge.spec)

    def plans(self) -> Iterator[Point]:
        """Yields our plans at every step that has one."""
        step = self._step
        for number in tqdm(range(ceil(LOW / step), floor(HIGH / step) + 1), desc="plans", disable=None):
            plan = planned(self._profile, self._spec, int(number * step * self._num_weights) // 8)
            if plan is not None:
                yield self._ours("moe-pack, plans", f"plan of {number * step:g}", plan)

    def formats(self) -> Iterator[Point]:
        """Yields all experts in one of our formats."""
        losses = predicted_losses(self._profile)
        plans = [(uniform(self._spec, part, "calibrated"), loss, format_text(part)) for part, loss in losses.items()]
        least = float("inf")
        in_order = sorted(
            ((stored_bytes(self._spec, plan), loss, name, plan) for plan, loss, name in plans), key=lambda one: one[:2]
        )
        for num_bytes, loss, name, plan in tqdm(in_order, desc="formats", disable=None):
            if loss < least and LOW - _BEYOND <= self._bits(num_bytes) <= HIGH + _BEYOND:
                yield self._ours("moe-pack, one format", name, plan)
            least = min(least, loss)

    def hqq(self) -> Iterator[Point]:
        """Yields HQQ in groups of 64."""
        for width in (2, 3, 4):
            plan = uniform(self._spec, part_format(width, 64), "hqq")
            name = f"{width} bit"
            yield self._other("HQQ, groups of 64", name, stored_bytes(self._spec, plan), self._judge.plan(plan))

    def llama(self, experts: LlamaExperts) -> Iterator[Point]:
        """Yields llama.cpp's types."""
        num_experts = self._spec.router.num_experts
        columns = (self._spec.hidden_size, self._spec.expert.intermediate_size)
        for kind in tqdm(llama_types(*columns), desc="llama.cpp", disable=None):
            num_bytes, blocks = experts.stored_as(kind)
            found = self._judge.experts(partial(_block, blocks, num_experts))
            yield self._other("llama.cpp", kind, num_bytes, found)

    def _bits(self, num_bytes: int) -> float:
        return num_bytes * 8 / self._num_weights

    def _ours(self, series: str, name: str, plan: Plan) -> Point:
        num_bytes = stored_bytes(self._spec, plan)
        return self._point(series, name, num_bytes, self._judge.plan(plan), is_ours=True)

    def _other(self, series: str, name: str, num_bytes: int, blocks: Blocks) -> Point:
        plan, point = planned(self._profile, self._spec, num_bytes), self._point(series, name, num_bytes, blocks)
        if plan is None:
            return point
        own = self._judge.plan(plan)[: self._num_first]
        difference = paired_difference(own, blocks[: self._num_first])
        return replace(point, our_kl=float(own.mean()), difference=difference)

    def _point(self, series: str, name: str, num_bytes: int, blocks: Blocks, is_ours: bool = False) -> Point:
        first, other = blocks[: self._num_first], blocks[self._num_first :]
        bits = self._bits(num_bytes)
        point = Point(series, name, num_bytes, bits, float(first.mean()), _error(first), None, None, is_ours)
        if len(other):
            point = replace(point, other_kl=float(other.mean()), other_kl_error=_error(other))
        return point


def _error(blocks: Blocks) -> float:
    return float(1.96 * blocks.std() / len(blocks) ** 0.5)


def _block(blocks: list[NeuronBlock], num_experts: int, layer_idx: int, expert: int) -> NeuronBlock:
    return blocks[layer_idx * num_experts + expert]


# --- the picture

MOST_KL = 0.3  # nats: higher points are left out, as they would press the rest together
_INCHES = (9.2, 6.2)


@dataclass(frozen=True, slots=True)
class Look:
    """How a series is drawn: as matplotlib names colours and markers; `joined` by a line, `named` point by point."""

    colour: str
    marker: str
    joined: bool = False
    named: bool = False


SERIES = {  # from the back to the front
    "HQQ, groups of 64": Look("#6b6b6b", "s", joined=True),
    "moe-pack, one format": Look("#1f5fd0", "x"),
    "llama.cpp": Look("#c9480c", "D", named=True),
    "moe-pack, plans": Look("#1f5fd0", "o", joined=True),
}


def draw(model: str, points: list[Point], path: Path) -> None:
    """Writes the picture as SVG: the same bytes for the same points and matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "moe-pack", "svg.fonttype": "none", "font.size": 9}):
        picture = Figure(_INCHES, layout="constrained")
        plot(picture.add_subplot(), model, points)
        picture.savefig(path, format="svg", metadata={"Date": None})


def plot(axes: "Axes", model: str, points: list[Point]) -> None:
    """Draws the picture in empty axes; of a joined series the lowest of equal bits, and no KL above `MOST_KL`."""
    for series, look in SERIES.items():
        dots = sorted((p.bits, p.kl, p.name) for p in points if p.series == series and p.kl <= MOST_KL)
        if look.joined:
            dots = [next(equal) for _, equal in groupby(dots, key=lambda dot: dot[0])]
        if not dots:
            continue
        bits, kls, names = zip(*dots, strict=True)
        line = "-" if look.joined else "none"
        axes.plot(bits, kls, linestyle=line, marker=look.marker, color=look.colour, markersize=4.5, label=series)
        for number, (at, kl, name) in enumerate(zip(bits, kls, names, strict=True)) if look.named else ():
            # Names of equal bits stand left and right in turn, out of each other's way.
            offset, side = ((6, 0), "left") if bits[:number].count(at) % 2 else ((-6, 0), "right")
            axes.annotate(name, (at, kl), offset, textcoords="offset points", ha=side, va="center", color=look.colour)
    axes.margins(x=0.07)
    axes.set_yscale("log")
    axes.set_xlabel("stored bits a weight")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title(f"{model}: divergence from the 16-bit model by the size of its experts")
    axes.grid(visible=True, which="both", color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


@click.command(help=__doc__)
@model_options
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to calibrate on.")
@click.option("--tokens", default=16384, show_default=True, help="Of the text, to judge on.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, default=PARTS, help="What to measure; all by default.")
@click.option("--step", default=0.25, show_default=True, help="Bits from plan to plan.")
@click.option("--other-text", type=click.Path(path_type=Path, exists=True), help="Also judge on as much of this text.")
@llama_option
@libggml_option
@click.option("--svg", type=click.Path(path_type=Path), help="Also draw the result here.")
@json_option
def main(
    model: Path,
    text: Path,
    sensitivity: Sensitivity,
    tokens_profiled: int,
    tokens: int,
    only: tuple[str, ...],
    step: float,
    other_text: Path | None,
    llama_python: Path | None,
    libggml: Path | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Profiles in a temporary folder, measures, prints, draws, and judges."""
    sample, unseen = sample_and_unseen(model, tokens_profiled, tokens, text)
    judged = unseen
    if other_text is not None:
        _, other = sample_and_unseen(model, tokens_profiled, tokens, other_text)
        judged = replace(unseen, sequences=np.concatenate((unseen.sequences, other.sequences)))
    checkpoint, points = Checkpoint(model), list[Point]()
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            profile = make_profile(checkpoint, sample, Path(folder) / "p", ProfileOptions(sensitivity), NO_PROGRESS)
            num_first = unseen.sequences.size // BLOCK_TOKENS
            curve = Curve(Judge(checkpoint, judged, profile), profile, num_first, step)
            points += curve.plans() if "plans" in only else ()
            points += curve.formats() if "formats" in only else ()
            points += curve.hqq() if "hqq" in only else ()
            if "llama" in only and llama_python:
                experts, function = experts_with_inputs(checkpoint, profile), checkpoint.spec.expert.function
                points += curve.llama(LlamaExperts(experts, function, llama_python, libggml, Path(folder)))
    finally:
        checkpoint.close()
    points.sort(key=lambda point: (point.num_bytes, point.series, point.name))
    if svg:
        draw(model.name, points, svg)
    rows = [
        (
            f"{p.bits:.3f}",
            p.series,
            p.name,
            f"{p.num_bytes:,}",
            f"{p.kl:.6f} ± {p.kl_error:.2g}",
            None if p.other_kl is None else f"{p.other_kl:.6f} ± {p.other_kl_error:.2g}",
            figure(p.our_kl, ".6f"),
            p.difference,
        )
        for p in points
    ]
    header = ("bits a weight", "series", "name", "bytes", "KL", "other text", "our plan's KL", "ours less it, 95%")
    facts = {"model": model.name, "tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size}
    facts |= {"sequence_length": SEQUENCE_LENGTH, "points": [asdict(point) for point in points]}
    finish(facts, table(header, rows), as_json, [fault for point in points if (fault := point.fault())])


if __name__ == "__main__":
    main()
