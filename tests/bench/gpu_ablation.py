"""What each mechanism of the GPU's engine for missing experts brings, by replay on routes and neurons.

    python tests/bench/gpu_ablation.py packed/ --dimensions mixtral-8x7b
    python tests/bench/gpu_ablation.py drawn --dimensions qwen3-30b-a3b

A pack of a trained model runs a text token by token, and notes which experts are chosen and which of their neurons run;
`drawn` draws both at the dimensions of a published model. The tokens are then played in GPU memory for a share of the
experts. The base is static rows alone: the link pulls a share of the missing rows, and the CPU computes the others.
Every other line adds one mechanism in the same memory, or takes one away:

- the CPU's share: without it the link brings everything
- whole experts in place of the hottest rows of all
- records kept for a pass of four tokens (drafts): one pulls a record, and all use it; milliseconds are the pass's
- records ahead: those that the next layer's router and selectors choose on this layer's input are pulled before that
  layer, as many as the link brings in a layer's attention and dense matrices, or in all the time that it has left

Missing bytes are counted. Milliseconds are predicted (`gpu.roofline`) for the published model on an H200 with DDR5, of
which as large a share of the bytes is missing.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from benchlib import BOOK, finish, json_option, table
from benchlib.routes import ids_of
from gpu.ahead import Missing, Times
from gpu.packs import MIXTRAL, QWEN3, PackRequest
from gpu.roofline import CPU_RATES, Subject
from gpu_roofline import COUNTS, Counts
from numpy.typing import NDArray
from support.played_memory import PlayedToken, recorded_tokens, static_table

from moe_pack.convert.plan.speed import drawn_passes
from moe_pack.formats import Pack, PackLayout
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.engine.offloaded import popularity_shares
from moe_pack.runtime.gpu.placements import GpuPlacement, place_experts, usual_heat
from moe_pack.runtime.model import NativeOperations
from moe_pack.runtime.offload import Routing

Array = NDArray[np.float64]
Pulled = tuple[tuple[int, int], NDArray[np.int32]]  # layer and expert, and its missing neurons
_DIMENSIONS = {MIXTRAL.model: MIXTRAL, QWEN3.model: QWEN3}
_GPU, _CPU = "H200", "DDR5"
_SHARES = (0.25, 0.5, 0.75)  # of the experts' bytes
_DRAWN_TOKENS = 24
_ROWS = 4  # of a pass


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Tokens of a pack, and what a placement needs of it."""

    layout: PackLayout
    popularity: NDArray[np.floating]  # [L, E]
    heat: Array  # [L, E, H]
    tokens: Sequence[PlayedToken]

    @property
    def num_rows(self) -> int:
        return self.layout.experts[0][0].num_rows

    def place(self, share: float, is_pulled: bool) -> GpuPlacement:
        """Returns the placement with a share of the experts' bytes for rows; tables come on top."""

        def placed(num_bytes: int) -> GpuPlacement:
            return place_experts(self.layout, num_bytes, "split", self.popularity, self.heat, is_pulled=is_pulled)

        return placed(int(share * self._num_bytes) + placed(1 << 62).other_bytes)

    def place_whole(self, share: float) -> GpuPlacement:
        """Returns the placement of whole experts."""
        other_bytes = place_experts(self.layout, 1 << 62, "disk", self.popularity).other_bytes
        return place_experts(self.layout, int(share * self._num_bytes) + other_bytes, "disk", self.popularity)

    @property
    def _num_bytes(self) -> int:
        return sum(expert.num_bytes for layer in self.layout.experts for expert in layer)


def recorded(folder: Path, model: Path, num_tokens: int) -> Recorded:
    """Runs a pack on a text that it has not seen."""
    with Pack(folder) as pack, closing(Kernels()) as kernels:
        ids = ids_of(model, BOOK)[:num_tokens]
        tokens = recorded_tokens(pack, NativeOperations(kernels), ids)
        popularity = popularity_shares(pack, Routing.open(pack))
        return Recorded(pack.layout, popularity, usual_heat(pack.layout, pack.thresholds), tokens)


def drawn(request: PackRequest, num_tokens: int) -> Recorded:
    """Draws routes, and neurons as often as rows of their heat run."""
    subject, draw = Subject.of(request), np.random.default_rng(0)
    f, (_, _, num_slices) = subject.layout.experts[0][0].num_rows, subject.heat.shape
    routes = drawn_passes(subject.popularity, subject.layout.spec.router.num_experts_per_tok, num_tokens).routes
    slices = np.arange(f) * num_slices // f

    def neurons(l: int, expert: int) -> NDArray[np.int32]:
        return np.flatnonzero(draw.random(f) < subject.heat[l, expert, slices]).astype(np.int32)

    tokens = [
        PlayedToken(
            experts.astype(np.int64),
            [[neurons(l, expert) for expert in layer] for l, layer in enumerate(experts.tolist())],
            [[] for _ in experts],
        )
        for experts in routes
    ]
    return Recorded(subject.layout, subject.popularity, subject.heat, tokens)


@dataclass(frozen=True, slots=True)
class Played:
    """What tokens lack, and of what each four of them lack the share that is different."""

    missing: Missing
    distinct: float


def _distinct_bytes(pulled: list[Pulled], sizes: NDArray[np.int64]) -> int:
    by_expert = dict[tuple[int, int], list[NDArray[np.int32]]]()
    for key, rows in pulled:
        by_expert.setdefault(key, []).append(rows)
    return sum(int(sizes[key]) * len(np.unique(np.concatenate(rows))) for key, rows in by_expert.items())


def play(subject: Recorded, placement: GpuPlacement) -> Played:
    at, needed, lacking, ahead, ahead_ran = static_table(placement, subject.num_rows), 0, 0, 0, 0
    whole, lacked, distinct, of_pass = 0, 0, 0, list[Pulled]()
    sizes = np.array([[expert.records.row_bytes for expert in layer] for layer in subject.layout.experts])
    for number, token in enumerate(subject.tokens):
        for l, layer in enumerate(token.neurons):
            would = {e: rows[at[l, e, rows] < 0] for e, rows in token.predicted[l] if placement.has_selector[l, e]}
            ahead += sum(len(rows) * int(sizes[l, e]) for e, rows in would.items())
            for expert, rows in zip(token.experts[l].tolist(), layer, strict=True):
                gone, has_selector = rows[at[l, expert, rows] < 0], placement.has_selector[l, expert]
                needed += len(rows) * int(sizes[l, expert])
                if not has_selector:
                    whole += len(rows) * int(sizes[l, expert]) + subject.layout.experts[l][expert].selector_bytes
                    continue
                lacking += len(gone) * int(sizes[l, expert])
                ahead_ran += int(np.isin(gone, would.get(expert, gone[:0])).sum()) * int(sizes[l, expert])
                of_pass.append(((l, expert), gone))
        if number % _ROWS == _ROWS - 1:
            lacked += sum(len(rows) * int(sizes[key]) for key, rows in of_pass)
            distinct += _distinct_bytes(of_pass, sizes)
            of_pass.clear()
    found = (lacking / needed, whole / needed, ahead_ran / max(lacking, 1), ahead_ran / max(ahead, 1))
    return Played(Missing(*found), distinct / max(lacked, 1))


@dataclass(frozen=True, slots=True)
class Line:
    """A mechanism: missing share of the bytes, and milliseconds of a token without and with it."""

    share: float
    name: str
    missing: float
    before_ms: float
    ms: float


def lines(subject: Recorded, times: Times, shares: Sequence[float]) -> Iterator[Line]:
    """Yields the base and each mechanism for each share of the experts that fits."""
    for share in shares:
        for is_pulled in (True, False):
            found = play(subject, subject.place(share, is_pulled))
            missing, who = found.missing, "link and CPU" if is_pulled else "CPU alone"
            base = times.token_ms(missing, is_pulled)
            yield Line(share, f"static rows, {who}", missing.lacking, base, base)
            if is_pulled:
                yield from _others(subject, times, share, found, base)
            if is_pulled and missing.right > 0:
                for is_whole in (False, True):
                    ms, rest = times.ahead_ms(missing, is_whole)
                    name = "all time that the link has left" if is_whole else "attention's time"
                    yield Line(share, f"+ records ahead in {name}", rest, base, ms)


def _others(subject: Recorded, times: Times, share: float, found: Played, base: float) -> Iterator[Line]:
    lacking = found.missing.lacking
    yield Line(share, "- the CPU's share", lacking, base, times.pulled_ms(lacking))
    whole = play(subject, subject.place_whole(share)).missing
    name = "- hottest rows: whole experts are static"
    yield Line(share, name, whole.lacking, base, times.token_ms(whole, True))
    alone, shared = (times.pulled_ms(_ROWS * part * lacking) for part in (1.0, found.distinct))
    yield Line(share, f"+ records kept for {_ROWS} tokens", lacking * found.distinct, alone, shared)


@click.command(help=__doc__)
@click.argument("pack")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="The checkpoint, for its tokenizer.")
@click.option("--dimensions", type=click.Choice(list(_DIMENSIONS)), default=MIXTRAL.model, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="That are played; drawn are 24 at most.")
@json_option
def main(pack: str, model: Path | None, dimensions: str, tokens: int, as_json: bool) -> None:
    """Prints the table."""
    request = _DIMENSIONS[dimensions]
    times = Times.of(Subject.of(request), Counts.read(COUNTS).of(request.model)["split"], _GPU, CPU_RATES[_CPU])
    subject = (
        drawn(request, min(tokens, _DRAWN_TOKENS))
        if pack == "drawn"
        else recorded(Path(pack), model or Path(pack), tokens)
    )
    found = list(lines(subject, times, _SHARES))
    header = ["experts that fit", "mechanism", "missing bytes", "ms a token", "against the base"]
    rows = [
        [f"{each.share:.0%}", each.name, f"{each.missing:.1%}", f"{each.ms:.2f}", f"{each.before_ms / each.ms:.2f}"]
        for each in found
    ]
    finish({"lines": [asdict(each) for each in found]}, table(header, rows), as_json)


if __name__ == "__main__":
    main()
