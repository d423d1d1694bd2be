"""Compares the project's plans with others of the same bytes: who is nearer to the source on a text nobody has seen.

At the stored bytes of all experts in HQQ (group 64) of 2, 3 and 4 bits, and midway (a random half of the experts at
each of two widths), the project plans within exactly these bytes; beside it stand EdgeMoE's plan (as published: one
absmax scale a row; and its widths alone, in HQQ) and Mixture-Compressor's PMQ (`pmq.py`). With --llama-python,
llama.cpp's types with an importance matrix too, each beside our plan within that type's bytes. Selector `none`,
sparsity 0, the dense part as it is.

All are calibrated on the shipped sample. Judged is the mean KL divergence in nats of predictions from the source's, on
another text; a difference counts when its 95% interval, of a paired bootstrap over blocks of 128 tokens, excludes 0.
Ends with exit code 1 if our plan is not lower than HQQ at some size.
"""

import json
import sys
import tempfile
from pathlib import Path

import click
from comparators import PMQ_WIDTHS, WIDE_WIDTHS, published, sizes, stored_bytes, uniform_plans
from contest import SEQUENCE_LENGTH, Contest, Line, compare_llama, table
from judge import BLOCK_TOKENS
from llama_experts import LlamaPython, llama_types
from pmq import measure_factors
from thresholds_hold import Silent
from tqdm import tqdm

from moe_pack.calib import Profile, ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.formats import Checkpoint
from moe_pack.runtime import FolderFiles, Text

_TESTS = Path(__file__).parents[1] / "tests"


def compare_plans(contest: Contest, sample: Tokens, exact: Profile, num_seeds: int) -> tuple[list[Line], list[str]]:
    """Ours beside all plans of others at every size; and what is not as it should be."""
    spec, lines, faults = contest.spec, [], []
    widths = tuple(sorted({*PMQ_WIDTHS, *WIDE_WIDTHS}))
    factors = measure_factors(contest.weights, sample, uniform_plans(spec, widths))
    importance = exact.exact()["losses"]
    for size in tqdm(list(sizes(spec, num_seeds)), desc="sizes", disable=None):
        others = size.plans | published(spec, size, importance, factors)
        for name, plan in others.items():
            num_bytes = stored_bytes(spec, plan)
            line = contest.line(f"{size.mean_width}", name, num_bytes, contest.judge(plan), size.max_bytes)
            lines.append(line)
            if name in size.plans and line.verdict() != "lower":
                faults.append(f"{line.size} bits, {name}: {line.verdict()}, lower expected")
    return lines, faults


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--sensitivity", type=click.Choice(["fast", "full"]), default="fast", show_default=True)
@click.option("--tokens-profiled", default=16384, show_default=True, help="Of the sample, to calibrate on.")
@click.option("--tokens", default=32768, show_default=True, help="Of the text, to judge on.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Random halves midway.")
@click.option("--llama-python", type=click.Path(path_type=Path, exists=True), help="A Python with gguf and llama_cpp.")
@click.option("--libggml", type=click.Path(path_type=Path, exists=True), help="The library, if llama_cpp is not there.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    model: Path,
    text: Path,
    sensitivity: Sensitivity,
    tokens_profiled: int,
    tokens: int,
    seeds: int,
    llama_python: Path | None,
    libggml: Path | None,
    as_json: bool,
) -> None:
    """Profiles in a temporary folder, compares, prints, and judges."""
    tokenizer = Text(FolderFiles(model))
    sample = read_tokens(None, None, tokenizer, tokens_profiled, SEQUENCE_LENGTH)
    unseen = read_tokens(str(text), None, tokenizer, tokens, SEQUENCE_LENGTH)
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
            folder = Path(name)
            profile = make_profile(checkpoint, sample, folder / "own", ProfileOptions(sensitivity), Silent())
            exact = make_profile(checkpoint, sample, folder / "exact", ProfileOptions("exact"), Silent())
            contest = Contest(checkpoint, unseen, profile)
            if llama_python and not llama_types(contest.spec):
                raise click.ClickException(f"{model}: no type of llama.cpp can hold its rows, multiples of 32 weights")
            lines, faults = compare_plans(contest, sample, exact, seeds)
            if llama_python:
                lines += compare_llama(contest, sample, LlamaPython(llama_python, libggml), folder)
    finally:
        checkpoint.close()
    if as_json:
        facts = {"tokens_profiled": sample.sequences.size, "tokens": unseen.sequences.size, "block": BLOCK_TOKENS}
        click.echo(json.dumps(facts | {"lines": [line.facts() for line in lines], "faults": faults}))
    else:
        click.echo(f"{sample.sequences.size:,} tokens profiled, {unseen.sequences.size:,} of {text.name} to judge on")
        click.echo(table(lines))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
