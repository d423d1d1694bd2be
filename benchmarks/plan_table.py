"""What every published model that we know would come to in 8, 11, 16 and 24 GiB of a card: docs/plans.md.

No weights: losses are assumed and routes drawn evenly, as `moe-pack plan NAME` does without a profile. Models with an
encoder do not run on cards: theirs is so much of a CPU's memory.
"""

from collections.abc import Sequence
from math import expm1

import click

from moe_pack.calib import assumed_losses
from moe_pack.convert.plan_report import mean_sparsity
from moe_pack.convert.planned import Planned
from moe_pack.convert.target import Target, planner_for
from moe_pack.formats import ModelSpec, RunError, dense_roles, model_spec, num_parameters, size_text
from moe_pack.formats.families import published_names

_SIZES = (8, 11, 16, 24)  # GiB
_RAM = 64 << 30
_GPUS = {8: "RTX 3060 12G", 11: "RTX 3060 12G", 16: "RTX 4060 Ti 16G", 24: "RTX 4090"}


def header() -> str:
    """Of the table, in Markdown."""
    return (
        "| model | 16 bit | GiB | loss: KL | perplexity | pack | bits | sparsity | selector | dense | experts held | "
        "read a token | tokens/s |\n| --- |" + 7 * " ---: |" + " --- |" + 4 * " ---: |"
    )


def name_of(name: str, spec: ModelSpec) -> str:
    """How the table names a model: with what it runs on, where that is no card."""
    return name if spec.encoder is None else f"{name} (CPU)"


def row(name: str, gibibytes: int, planned: Planned, nll_per_kl: float, sparsity: float) -> str:
    """A plan, in Markdown."""
    shares = {share.name: share.num_bytes for share in planned.foretold.shares}
    held = sum(shares.get(part, 0) for part in ("resident selectors", "hot rows", "pages of experts"))
    cells = [
        name_of(name, planned.layout.spec),
        size_text(2 * num_parameters(planned.layout.spec)),
        str(gibibytes),
        f"{planned.loss:.3f}",
        f"{expm1(nll_per_kl * planned.loss):+.1%}",
        size_text(planned.pack_bytes),
        f"{planned.bits_per_weight:.2f}",
        f"{sparsity:.0%}",
        planned.decision.plan.selector,
        size_text(shares["dense weights"]),
        size_text(held),
        size_text(planned.foretold.fetched_bytes),
        f"{planned.foretold.tokens_per_second:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def line(name: str, gibibytes: int) -> str:
    """The plan of a model in so much memory, or why there is none."""
    spec = model_spec(name)
    losses, dtypes = assumed_losses(spec), ("BF16",) * len(dense_roles(spec))
    target = Target(gibibytes << 30, "cuda", ram_bytes=_RAM, gpu=_GPUS[gibibytes])
    if spec.encoder is not None:
        target = Target(gibibytes << 30, "cpu")
    try:
        planner = planner_for(target, spec, dtypes, losses, None, None)
        planned = planner.plan(target.limit.nats(losses.nll_per_kl))
    except RunError as fault:  # `--target-vram: 8.0 GiB, the least within this loss is ...; give more ...`
        reason = str(fault).partition(", ")[2].partition(";")[0]
        return f"| {name_of(name, spec)} | {size_text(2 * num_parameters(spec))} | {gibibytes} | {reason} |" + " |" * 9
    return row(name, gibibytes, planned, losses.nll_per_kl, mean_sparsity(planned, losses))


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(published_names()), help="Which.  [default: all]")
@click.option("--size", "sizes", multiple=True, type=click.IntRange(1), default=_SIZES, help="GiB.")
def main(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Prints the table as it is made."""
    click.echo(header())
    for name in names or published_names():
        for gibibytes in sizes:
            click.echo(line(name, gibibytes))


if __name__ == "__main__":
    main()
