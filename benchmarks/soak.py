"""Runs the demo model for long in the smallest budget, and watches memory and speed: neither may drift.

One process: prompts of 1 to 96 tokens from a book, each continued by up to 64, with the decoder reset between; the
budget has room for --experts of the model's 32. Printed in ten slices: tokens a second, and the anonymous memory at the
slice's end. Ends with exit code 1 where it grows by more than --most-growth after the second slice.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from bench_packs import DEMO, budget_with, make_pack, run_options

from moe_pack.formats import Pack
from moe_pack.runtime import Sampler, Text, generate
from moe_pack.runtime.engine import Engine, EngineOptions
from moe_pack.runtime.memory import anonymous_bytes
from moe_pack.runtime.policies import PRESETS, PolicyName

_BOOK = Path(__file__).parents[1] / "tests" / "data" / "books-valid.txt"
_BOOK_CHARACTERS = 100_000
_PROMPT_TOKENS, _NEW_TOKENS = 96, 64
_NUM_SLICES, _NUM_WARM = 10, 2


@dataclass(frozen=True, slots=True)
class Slice:
    """A tenth of the run: tokens made, the time prompts and tokens took, and what was held at its end."""

    num_tokens: int
    seconds: float
    anonymous_bytes: int


def soak(pack: Pack, policy: PolicyName, num_experts: int, num_tokens: int, seed: int) -> Iterator[Slice]:
    """Runs, a slice at a time."""
    context = _PROMPT_TOKENS + _NEW_TOKENS
    options = EngineOptions(budget_bytes=budget_with(pack, num_experts, context), policy=policy)
    generator = np.random.default_rng(seed)
    ids = Text(pack).encode(_BOOK.read_text("utf-8")[:_BOOK_CHARACTERS])
    with Engine(pack, options, context) as engine:
        sampler, made, done = Sampler(0.8, 0.95, seed), 0, 0
        began = time.perf_counter()
        for number in range(1, _NUM_SLICES + 1):
            while made < num_tokens * number // _NUM_SLICES:
                length, start = int(generator.integers(1, _PROMPT_TOKENS + 1)), int(generator.integers(len(ids) // 2))
                engine.decoder.reset()
                wanted = int(generator.integers(1, _NEW_TOKENS + 1))
                made += sum(
                    1 for _ in generate(engine.decoder, ids[start : start + length], sampler, wanted, frozenset())
                )
            held = anonymous_bytes()
            if held is None:
                raise click.ClickException("the system does not tell how much memory a process holds")
            ended = time.perf_counter()
            yield Slice(made - done, ended - began, held)
            began, done = ended, made


def growth(slices: list[Slice]) -> int:
    """By how many bytes the process has grown after its first slices, at most."""
    warm = [one.anonymous_bytes for one in slices[_NUM_WARM - 1 :]]
    return max(warm) - warm[0]


@click.command(help=__doc__)
@run_options("the demo model's pack")
@click.option("--tokens", default=20000, show_default=True, type=click.IntRange(_NUM_SLICES), help="To make.")
@click.option("--policy", type=click.Choice(list(PRESETS)), default="corm", show_default=True)
@click.option("--experts", default=1, show_default=True, type=click.IntRange(1), help="That the budget has room for.")
@click.option("--most-growth", default=4.0, show_default=True, help="MiB.")
def main(
    folder: Path,
    tokens: int,
    policy: PolicyName,
    experts: int,
    seed: int,
    most_growth: float,
    json_file: Path | None,
) -> None:
    """Runs, prints, judges."""
    load_before, slices = os.getloadavg()[0], list[Slice]()
    with Pack(make_pack(DEMO, folder)) as pack:
        click.echo("slice   tokens   tokens/s   anonymous MiB")
        for one in soak(pack, policy, experts, tokens, seed):
            slices.append(one)
            rate, held = one.num_tokens / one.seconds, one.anonymous_bytes / (1 << 20)
            click.echo(f"{len(slices):5}{one.num_tokens:9,}{rate:11.1f}{held:16.2f}")
    if json_file:
        facts = {"cores": os.cpu_count(), "load_before": load_before, "policy": policy, "growth_bytes": growth(slices)}
        json_file.write_text(json.dumps(facts | {"slices": [asdict(one) for one in slices]}, indent=1))
    if growth(slices) > most_growth * (1 << 20):
        click.echo(f"grew by {growth(slices):,} bytes after the first {_NUM_WARM} slices", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
