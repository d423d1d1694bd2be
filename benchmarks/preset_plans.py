"""The papers' packs at the dimensions of the models they measured: how large, and how much of them a card holds.

    python benchmarks/preset_plans.py

No weights: losses are assumed and routes drawn evenly, as `moe-pack plan NAME --preset PRESET` does without a profile;
so nothing is foretold of what CORM's threshold leaves out. The cards are those of the papers, or the nearest known.
"""

from dataclasses import dataclass

import click

from moe_pack.calib import assumed_losses
from moe_pack.convert.planned import Model
from moe_pack.convert.presets import PRESET_NAMES, PresetName, preset_decision
from moe_pack.convert.target import Target, planner_for
from moe_pack.formats import dense_roles, model_spec, num_parameters, size_text

_RAM = 64 << 30


@dataclass(frozen=True, slots=True)
class Setup:
    """A paper's pack of a model, in so many GiB of a card."""

    preset: PresetName
    model: str
    gibibytes: int
    gpu: str


SETUPS = (
    Setup("floe", "mixtral-8x7b", 11, "RTX 3090"),
    Setup("floe", "phi-3.5-moe", 11, "RTX 3090"),
    Setup("floe", "deepseek-moe-16b", 11, "RTX 3090"),
    Setup("floe", "qwen1.5-moe-a2.7b", 11, "RTX 3090"),
    Setup("corm", "mixtral-8x7b", 24, "RTX 3090"),
    Setup("corm", "deepseek-moe-16b", 24, "RTX 3090"),
    Setup("corm", "deepseek-moe-16b", 12, "RTX 3060 12G"),  # setting S1 of Importance-Driven Expert Scheduling,
    Setup("corm", "xverse-moe-a4.2b", 16, "RTX 4060 Ti 16G"),  # S2,
    Setup("corm", "qwen2-57b-a14b", 24, "RTX 4090"),  # and S3, which had a card of 48 GB
    Setup("fiddler", "mixtral-8x7b", 24, "L4"),
    Setup("edgemoe", "minicpm-moe-8x2b", 8, "RTX 3060 12G"),
)


def header() -> str:
    """Of the table, in Markdown."""
    return (
        "| preset | model | 16 bit | GiB | pack | bits | dense | experts held | there already | read a token |\n"
        "| --- | --- |" + 8 * " ---: |"
    )


def line(setup: Setup) -> str:
    """A setup's plan, in Markdown."""
    spec = model_spec(setup.model)
    losses, dtypes = assumed_losses(spec), ("BF16",) * len(dense_roles(spec))
    target = Target(setup.gibibytes << 30, "cuda", ram_bytes=_RAM, gpu=setup.gpu, preset=setup.preset)
    planner = planner_for(target, spec, dtypes, losses, None, None)
    planned = planner.foretold(preset_decision(setup.preset, Model(spec, dtypes, losses)))
    shares = {share.name: share.num_bytes for share in planned.foretold.shares}
    cells = [
        setup.preset,
        setup.model,
        size_text(2 * num_parameters(spec)),
        str(setup.gibibytes),
        size_text(planned.pack_bytes),
        f"{planned.bits_per_weight:.2f}",
        size_text(shares["dense weights"]),
        size_text(sum(shares[part] for part in ("resident selectors", "hot rows", "pages of experts"))),
        f"{planned.foretold.hit_rate:.1%}",
        size_text(planned.foretold.fetched_bytes),
    ]
    return f"| {' | '.join(cells)} |"


@click.command(help=__doc__)
@click.option("--preset", "presets", multiple=True, type=click.Choice(PRESET_NAMES), help="Which.  [default: all]")
def main(presets: tuple[PresetName, ...]) -> None:
    """Prints the table as it is made."""
    click.echo(header())
    for setup in SETUPS:
        if not presets or setup.preset in presets:
            click.echo(line(setup))


if __name__ == "__main__":
    main()
