"""`moe-run --bench`: its options, and how its result is shown."""

import json
from dataclasses import dataclass, field

import click

from moe_pack.formats import UsageError, dump, given, option
from moe_pack.formats.cli import NOISE, size_text
from moe_pack.runtime.bench import BenchTimes, peak_resident_bytes
from moe_pack.runtime.run_report import RunReport, report_lines


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `--bench` was asked for."""

    is_asked: bool = field(
        default=False,
        metadata=option(
            "--bench", help="Measure speed: a prompt of random tokens, and 64 more that no end of text cuts short."
        ),
    )
    prompt_tokens: int | None = field(
        default=None,
        metadata=option(
            "--prompt-tokens", least=1, metavar="N", help="With --bench: length of the prompt.  [default: 128]"
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="With --bench: print the result as JSON."))

    def check(self) -> None:
        """Refuses options of a benchmark that is not asked for.

        Raises:  UsageError.
        """
        if not self.is_asked and (others := given(self)):
            raise UsageError(f"{others[-1]}: goes with --bench; give both")


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
