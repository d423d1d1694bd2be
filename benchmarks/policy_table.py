"""Hit rates of every policy by room, on the demo model's routes, with Belady's optimum beside.

`policy` alone, then with what it foretells: the next layer's router stands for FloE's network and for importance's
partial hidden state, which a replay has not. A hot set is a share of the pages for the most popular experts, for good;
the rest goes by last use.
"""

import json
from collections.abc import Iterator

import click
from demo_routes import DemoRoutes, by_paths, by_router, demo_routes, run_recorded

from moe_pack.runtime import CacheFacts, optimum, replay
from moe_pack.runtime.policies import PRESETS, Preset
from moe_pack.runtime.replay import Tally

_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
_HOT = (0.25, 0.5, 0.75)


def rows_of(demo: DemoRoutes, facts: CacheFacts) -> Iterator[tuple[str, Tally]]:
    """Each policy with this room, in decoding."""
    extents = facts.pages
    variants = {name: preset for name, preset in PRESETS.items() if name != "floe"}  # alone, as lru
    variants |= {f"hot set {share:.0%}, lru": Preset("lru", "lru", placed_share=share) for share in _HOT}
    variants |= {"lfu": Preset("lru", "lfu")}
    for name, preset in variants.items():
        silent = Preset(preset.name, preset.eviction, preset.placed_share, preset.keeps)
        yield name, replay(demo.passes, facts, extents, silent).decode
    yield "optimum", optimum(demo.passes, facts, extents).decode
    for name in ("floe", "corm", "edgemoe", "importance"):
        preset = PRESETS[name]
        foretell = (by_paths if preset.prediction == "paths" else by_router)(
            demo, preset.num_foretold(facts.num_active)
        )
        record = run_recorded(demo, facts, preset, foretell)
        yield f"{name}, foretelling", replay(demo.passes, facts, extents, preset, record).decode


@click.command()
@click.option("--learned", default=4096, show_default=True, help="Tokens that popularity and paths are learned from.")
@click.option("--tokens", default=2048, show_default=True, help="Tokens that are played.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(learned: int, tokens: int, as_json: bool) -> None:
    """Converts the demo model, runs it over its text and replays its routes."""
    demo = demo_routes(learned, tokens)
    num_experts = demo.passes.popularity.size
    rooms = [round(share * num_experts) for share in _SHARES]
    table = {room: dict(rows_of(demo, demo.facts(room))) for room in rooms}
    if as_json:
        rates = {room: {name: tally.hit_rate for name, tally in rows.items()} for room, rows in table.items()}
        click.echo(json.dumps(rates, indent=2))
        return
    click.echo(f"hit rate in decoding; {num_experts} experts, {demo.facts(1).num_active} a token in each of 4 layers")
    click.echo("| room for |" + "".join(f" {room} |" for room in rooms))
    click.echo("| --- |" + " ---: |" * len(rooms))
    for name in table[rooms[0]]:
        click.echo(f"| {name} |" + "".join(f" {table[room][name].hit_rate:.1%} |" for room in rooms))


if __name__ == "__main__":
    main()
