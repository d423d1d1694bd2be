"""Whether `convert --target-vram --max-loss` keeps its word on text it has not measured, and what uniform packs need.

A book is cut in two. Packs are made for a memory and several limits of perplexity, their loss measured on the first
half by the command itself; then they, and packs that store all experts alike (HQQ, groups of 64, dense matrices in 16,
8 and 4 bits), are measured on the second half. Ends with exit code 1 where a pack grows perplexity beyond its limit
there, or is no smaller than the smallest uniform pack that keeps to it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tqdm import tqdm

_TESTS = Path(__file__).parents[1] / "tests"
_WIDTHS, _DENSE_WIDTHS = (2, 3, 4, 8), (16, 8, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """A pack on the second half: bytes, and growth of perplexity as a share with its 95% half-width."""

    name: str
    content_bytes: int
    growth: float
    half_width: float
    kl: float

    def holds(self, limit: float) -> bool:
        """Whether the estimate is within a limit."""
        return self.growth <= limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """A limit, the pack made for it, and the smallest uniform pack within it: dense part as in the source; any."""

    limit: float
    made: Measured
    plain: Measured | None
    smallest: Measured | None

    def faults(self) -> Iterator[str]:
        """What is wrong."""
        if not self.made.holds(self.limit):
            yield f"{self.limit:.0%}: the pack grows perplexity by {self.made.growth:.2%} on text it was not made on"
        if self.plain is not None and self.made.content_bytes >= self.plain.content_bytes:
            yield f"{self.limit:.0%}: {self.plain.name} is no larger"


class Workplace:
    """A model, a book in two halves, a profile and packs, in a folder."""

    def __init__(self, model: Path, book: Path, folder: Path, num_tokens: int) -> None:
        self._model, self._folder, self._tokens = model, folder, str(num_tokens)
        text = book.read_text("utf-8")
        middle = text.index("\n\n", len(text) // 2)
        for name, half in (("first", text[:middle]), ("second", text[middle:])):
            (folder / f"{name}.txt").write_text(half, "utf-8")
        run("profile", model, "-o", folder / "profile")

    def made(self, limit: float, target: str) -> Measured:
        """The pack for a memory and a limit."""
        out = self._folder / f"made-{limit:g}"
        text = ("--eval-data", self._folder / "first.txt", "--eval-tokens", self._tokens)
        wish = ("--target-vram", target, "--device", "cpu", "--context", 512, "--max-loss", f"{100 * limit:g}%")
        run("convert", self._model, "-o", out, "--profile", self._folder / "profile", *wish, *text)
        return self._measured(f"made for {limit:.0%}", out)

    def uniform(self, width: int, dense: int) -> Measured:
        """A pack that stores all experts alike."""
        out = self._folder / f"uniform-{width}-{dense}"
        bits = ("--selector-bits", width, "--record-bits", width, "--dense-bits", dense, "--selector", "none")
        run("convert", self._model, "-o", out, *bits)
        return self._measured(f"{width} bit, dense {dense}", out)

    def _measured(self, name: str, pack: Path) -> Measured:
        reference = self._folder / "reference"
        if (reference / "reference.safetensors").exists():
            found = run("eval", pack, "--against", reference, "--json")
        else:
            text = ("--data", self._folder / "second.txt", "--tokens", self._tokens)
            found = run("eval", pack, "--against", self._model, "--keep-reference", reference, *text, "--json")
        quality = json.loads(found)["quality"]
        growth = quality["against"]["perplexity_increase"]
        kl = quality["against"]["kl"]["value"]
        return Measured(name, quality["content_bytes"], growth["value"], growth["half_width"], kl)


def run(*arguments: object) -> str:
    """Runs moe-pack; what it prints."""
    command = [sys.executable, "-m", "moe_pack.convert.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def smallest(packs: list[Measured], limit: float) -> Measured | None:
    """The smallest within a limit."""
    return min((one for one in packs if one.holds(limit)), key=lambda one: one.content_bytes, default=None)


def _table(outcomes: list[Outcome], uniform: list[Measured]) -> str:
    rows = [f"{'pack':22}{'bytes':>12}{'perplexity':>12}{'±':>8}{'KL':>10}"]
    for one in [*(outcome.made for outcome in outcomes), *uniform]:
        rows.append(f"{one.name:22}{one.content_bytes:>12,}{one.growth:>+12.2%}{one.half_width:>8.2%}{one.kl:>10.5f}")
    for outcome in outcomes:
        plain, any_dense = (
            "none" if held is None else f"{held.name}, {held.content_bytes / outcome.made.content_bytes:.2f} times"
            for held in (outcome.plain, outcome.smallest)
        )
        rows.append(f"{outcome.limit:.0%}: smallest uniform pack within it: {plain}; with any dense part: {any_dense}")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--target", default="10M", show_default=True, help="Memory to plan for.")
@click.option("--limits", default="1,2,5", show_default=True, help="Of perplexity, in percent.")
@click.option("--tokens", default=32768, show_default=True, help="Of each half.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(model: Path, text: Path, target: str, limits: str, tokens: int, as_json: bool) -> None:
    """Makes and measures packs in a temporary folder, prints, and judges."""
    wanted = [float(limit) / 100 for limit in limits.split(",")]
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
        place = Workplace(model, text, Path(name), tokens)
        made = [place.made(limit, target) for limit in tqdm(wanted, desc="made", disable=None)]
        pairs = [(width, dense) for dense in _DENSE_WIDTHS for width in _WIDTHS]
        uniform = [place.uniform(*pair) for pair in tqdm(pairs, desc="uniform", disable=None)]
    plain = uniform[: len(_WIDTHS)]
    outcomes = [
        Outcome(limit, one, smallest(plain, limit), smallest(uniform, limit))
        for limit, one in zip(wanted, made, strict=True)
    ]
    faults = [fault for outcome in outcomes for fault in outcome.faults()]
    if as_json:
        click.echo(json.dumps({"outcomes": [asdict(o) for o in outcomes], "uniform": [asdict(u) for u in uniform]}))
    else:
        click.echo(_table(outcomes, uniform))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
