"""How long planning takes: the knapsack alone, and `moe-pack plan` as a whole, for models of many experts.

Losses are assumed, but differ from expert to expert, by a factor of up to ten: equal ones would be easier to choose
among. DeepSeek-V3's shape: DeepSeek-V2's with 60 layers of 256 experts.
"""

import time
from dataclasses import replace
from importlib.metadata import version

import click
import numpy as np

from moe_pack.calib import Losses, assumed_losses
from moe_pack.convert.allocation import least_time
from moe_pack.convert.planned import Model
from moe_pack.convert.pricing import menu_of, price
from moe_pack.convert.target import Target, planner_for, tier_for
from moe_pack.formats import ModelSpec, dense_roles, model_spec

_SHAPES = {"mixtral-8x7b": 11, "qwen3-30b-a3b": 11, "deepseek-v2": 24, "60 x 256": 48}  # GiB to plan for
_NATS = 0.02


def spec_of(name: str) -> ModelSpec:
    """A published model's dimensions, or DeepSeek-V3's shape."""
    if name != "60 x 256":
        return model_spec(name)
    spec = model_spec("deepseek-v2")
    router = replace(spec.router, num_experts=256, num_experts_per_tok=8)
    return replace(spec, router=router, moe_layers=tuple(range(1, 61)), num_hidden_layers=61)


def uneven_losses(spec: ModelSpec) -> Losses:
    """Assumed losses, multiplied for each expert by a factor from 0.3 to 3, on the mean about 1."""
    losses = assumed_losses(spec)
    shape = losses.popularity.shape
    factors = np.exp(np.random.default_rng(0).uniform(np.log(0.3), np.log(3), (*shape, 1, 1)))
    return replace(losses, quantized=losses.quantized * factors, sparse=losses.sparse * factors)


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(list(_SHAPES)), help="Which.  [default: all]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Planned for.")
def main(names: tuple[str, ...], device: str) -> None:
    """Times and prints."""
    click.echo(f"numpy {version('numpy')}")
    click.echo(
        f"{'model':14} {'experts':>8} {'choices':>8} {'knapsack s':>11} {'gap':>9} {'plan s':>7} {'tokens/s':>9}"
    )
    for name in names or tuple(_SHAPES):
        spec = spec_of(name)
        losses, dtypes = uneven_losses(spec), ("BF16",) * len(dense_roles(spec))
        target = Target(_SHAPES[name] << 30, "cpu" if device == "cpu" else "cuda")
        tier, model = tier_for(target, spec, losses, None, None), Model(spec, dtypes, losses)
        menu = menu_of(tier, model, "up")
        prices = price(tier, model, menu, None)
        began = time.perf_counter()
        found = least_time(spec, losses, _NATS, prices, menu.choices)
        solved = time.perf_counter() - began
        assert found is not None, "losses end in 16 bit, which loses nothing"
        began = time.perf_counter()
        planned = planner_for(target, spec, dtypes, losses, None, None).plan(_NATS)
        click.echo(
            f"{name:14} {losses.popularity.size:>8,} {len(menu.choices.formats) * len(losses.sparsities):>8,} "
            f"{solved:11.2f} {found.solution.gap:9.1e} {time.perf_counter() - began:7.1f} "
            f"{planned.foretold.tokens_per_second:9.2f}"
        )


if __name__ == "__main__":
    main()
