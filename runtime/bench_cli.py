"""`moe-run --bench`: its options, and how its result is shown."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from moe_pack.formats import dump
from moe_pack.formats.cli import NOISE, size_text
from moe_pack.runtime.bench import BenchTimes, peak_resident_bytes
from moe_pack.runtime.run_report import RunReport, report_lines

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `--bench` was asked for."""

    prompt_tokens: int
    as_json: bool


def bench_options(body: F) -> F:
    """Adds the options of `--bench`; the body gets them as one argument, `bench`: None where it is not asked for."""

    @functools.wraps(body)
    def gathered(*args: Any, bench: bool, prompt_tokens: int | None, as_json: bool, **options: Any) -> Any:
        if not bench and (prompt_tokens is not None or as_json):
            raise click.UsageError(f"{'--json' if as_json else '--prompt-tokens'}: goes with --bench; give both")
        return body(*args, bench=BenchOptions(prompt_tokens or 128, as_json) if bench else None, **options)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="With --bench: print the result as JSON."),
        click.option(
            "--prompt-tokens",
            type=click.IntRange(1),
            metavar="N",
            help="With --bench: length of the prompt.  [default: 128]",
        ),
        click.option(
            "--bench",
            is_flag=True,
            help="Measure speed: a prompt of random tokens, and 64 more that no end of text cuts short.",
        ),
    ):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added


def show_bench(as_json: bool, times: BenchTimes, is_synthetic: bool, facts: RunReport, seed: int) -> None:
    """Prints a result on standard output."""
    peak = peak_resident_bytes()
    if as_json:
        values = {
            "synthetic": is_synthetic,
            "prompt_tokens": times.num_prompt_tokens,
            "prefill_s": times.prefill_s,
            "prefill_tokens_per_s": times.prefill_rate,
            "generated_tokens": times.num_tokens,
            "decode_s": times.decode_s,
            "decode_tokens_per_s": times.decode_rate,
            "median_token_ms": times.median_token_ms,
            "peak_resident_bytes": peak,
            "seed": seed,
        }
        click.echo(json.dumps(values | dump(facts)))
        return
    decode = "no token after the first"
    if times.decode_rate is not None:
        decode = (
            f"{len(times.tokens_s)} tokens, {times.decode_rate:.1f} tokens/s, median {times.median_token_ms:.1f} ms"
        )
    lines = [
        *([("pack", NOISE)] if is_synthetic else []),
        ("prefill", f"{times.num_prompt_tokens} tokens, {times.prefill_rate:.1f} tokens/s"),
        ("decode", decode),
        *report_lines(facts),
        ("resident", f"{size_text(peak)} at most, mapped files too"),
        ("seed", str(seed)),
    ]
    for name, value in lines:
        click.echo(f"{name:16} {value}")
