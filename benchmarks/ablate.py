"""Each paper's parts turned on one after the other, by replay on the demo model's routes; published figures beside.

Time is bytes over the link and nothing else. "Faster" is the first line's bytes over the line's: at least, where what
is foretold takes its time too; at most, where it hides behind computing. Published figures are whole systems' times on
other models and machines.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
from demo_routes import Counted, DemoRoutes, by_paths, by_router, count_run, demo_routes

from moe_pack.runtime import CacheFacts
from moe_pack.runtime.policies import LRU, PRESETS, EdgeMoE, Importance, LayerLRU, placed_by_popularity
from moe_pack.runtime.residency import Residency

_ALPHA = 0.3  # importance §6.2 uses 0.25 to 0.35


@dataclass(frozen=True, slots=True)
class Part:
    """A line: a paper's parts so far. `bytes_share`: of a whole 16-bit expert, what bringing one reads."""

    paper: str
    parts: str
    run: Counted
    bytes_share: float
    published: str

    @property
    def all_bytes(self) -> float:
        """What a token reads, in whole 16-bit experts."""
        return self.run.read * self.bytes_share / self.run.num_tokens

    @property
    def late_bytes(self) -> float:
        """The same of what was not foretold."""
        return self.run.late * self.bytes_share / self.run.num_tokens


def _in_passing(facts: CacheFacts) -> Residency:
    """Nothing kept once it was used: two layers' worth of room, for what is foretold beside what runs."""
    room = CacheFacts(facts.pages, 2 * facts.num_active, facts.num_active, facts.popularity)
    return Residency(room, LRU(room), keeps=False)


def corm(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 8, Mixtral 8x7B and DeepSeekMoE 16B: B, +S, +P, +C. S: gate whole, of up and down the running rows."""
    rows = demo.packed_share * (1 + 2 * running) / 3
    ahead, name = by_router(demo, PRESETS["corm"].num_foretold(facts.num_active)), "CORM, Fig. 8"
    alone, foretold = count_run(demo, _in_passing(facts)), count_run(demo, _in_passing(facts), ahead)
    yield Part(name, "B: 4 bit, read when needed", alone, demo.packed_share, "1 / 1")
    yield Part(name, "+S: running rows", alone, rows, "1.25 / 1.40")
    yield Part(name, "+P: foretold by the next router", foretold, rows, "1.59 / 1.84")
    cached = count_run(demo, Residency(facts, LayerLRU(facts)), ahead)
    yield Part(name, "+C: experts kept, by last use in each layer", cached, rows, "2.07 / 2.14")


def edgemoe(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 18 and its text, Switch base-8 on a Jetson TX2: 0.789, 0.392, 0.305, 0.245 s a token."""
    ahead, name = by_paths(demo, PRESETS["edgemoe"].num_foretold(facts.num_active)), "EdgeMoE, Fig. 18"
    alone, foretold = count_run(demo, _in_passing(facts)), count_run(demo, _in_passing(facts), ahead)
    yield Part(name, "16 bit, read when needed", alone, 1.0, "1")
    yield Part(name, "+Q: 4 bit", alone, demo.packed_share, "2.01")
    yield Part(name, "+P: foretold from paths", foretold, demo.packed_share, "2.59")
    cached = count_run(demo, Residency(facts, EdgeMoE(facts)), ahead)
    yield Part(name, "+C: experts kept, by frequency over distance", cached, demo.packed_share, "3.22")


def importance(demo: DemoRoutes, facts: CacheFacts, running: float) -> Iterator[Part]:
    """Fig. 16's text, three models: time down by 8%, 20%, 14%, of the part before each. +BA needs two processors."""
    ahead, name = by_router(demo, PRESETS["importance"].num_foretold(facts.num_active)), "importance, Fig. 16"

    def kept() -> Residency:
        return Residency(facts, Importance(facts))

    fixed = Residency(facts, LRU(facts), placed_by_popularity(facts, facts.num_pages), keeps=False)
    yield Part(name, "some experts placed", count_run(demo, fixed), demo.packed_share, "1")
    yield Part(name, "+CE: kept by mean score", count_run(demo, kept()), demo.packed_share, "1.09")
    replaced = count_run(demo, kept(), alpha=_ALPHA)
    yield Part(name, f"+ER: substituted, alpha {_ALPHA}", replaced, demo.packed_share, "1.36")
    foretold = count_run(demo, kept(), ahead, alpha=_ALPHA)
    yield Part(name, "+Pre: foretold", foretold, demo.packed_share, "1.58")


@click.command()
@click.option("--learned", default=4096, show_default=True, help="Tokens that popularity and paths are learned from.")
@click.option("--tokens", default=2048, show_default=True, help="Tokens that are played.")
@click.option("--room", default=12, show_default=True, help="Experts that fast memory holds.")
@click.option("--running", default=0.45, show_default=True, help="Share of neurons that run: CORM, Fig. 2, theta 0.25.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(learned: int, tokens: int, room: int, running: float, as_json: bool) -> None:
    """Converts the demo model, runs it over its text and replays each paper's parts."""
    demo = demo_routes(learned, tokens)
    papers = [list(parts(demo, demo.facts(room), running)) for parts in (corm, edgemoe, importance)]
    if as_json:
        click.echo(
            json.dumps(
                [
                    asdict(part) | {"all_bytes": part.all_bytes, "late_bytes": part.late_bytes}
                    for parts in papers
                    for part in parts
                ],
                indent=2,
            )
        )
        return
    click.echo(f"room for {room} of {demo.passes.popularity.size} experts; {running:.0%} of neurons run")
    click.echo("| paper | parts | hits | experts read a token | late | faster, at least | at most | published |")
    click.echo("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for parts in papers:
        for part in parts:
            read, late = (number / part.run.num_tokens for number in (part.run.read, part.run.late))
            least, most = parts[0].all_bytes / part.all_bytes, parts[0].late_bytes / part.late_bytes
            click.echo(
                f"| {part.paper} | {part.parts} | {part.run.hit_rate:.1%} | {read:.2f} | {late:.2f} | {least:.2f} "
                f"| {most:.2f} | {part.published} |"
            )


if __name__ == "__main__":
    main()
