"""The command `moe-run`: options, one call, text on standard output."""

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import click

from moe_pack.formats import Pack, RunError
from moe_pack.formats.cli import byte_bar, cache_folder, command_errors, common_options, count_bar
from moe_pack.runtime.bench import measure, random_prompt
from moe_pack.runtime.bench_cli import BenchOptions, bench_options, show_bench
from moe_pack.runtime.chat import chat_prompt
from moe_pack.runtime.engine import Engine, EngineOptions
from moe_pack.runtime.engine_cli import engine_options
from moe_pack.runtime.generate import context_for, generate
from moe_pack.runtime.host_arena import host_bytes
from moe_pack.runtime.machine import load_facts
from moe_pack.runtime.run_report import report, report_lines
from moe_pack.runtime.sampling import Sampler
from moe_pack.runtime.text import Text


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What was asked for on the command line."""

    prompt: str
    chat: bool
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    engine: EngineOptions
    stats: bool
    bench: BenchOptions | None = None


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  moe-run packed/ --prompt "It was a dark night"
  moe-run packed/ --prompt "Why is the sky blue?" --chat --temperature 0
  moe-run packed/ --prompt-file chapter.txt --max-tokens 500 --seed 7 --stats
  moe-run packed/ --prompt "It was a dark night" --budget 2G --stats
  moe-run packed/ --bench""",
)
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--prompt", "-p", help="The text to continue.")
@click.option("--prompt-file", type=click.File("r", encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@click.option("--chat", is_flag=True, help="Ask the prompt as a chat message, in the pack's own template.")
@bench_options
@click.option(
    "--max-tokens", "-n", type=click.IntRange(1), help="Stop after N tokens.  [default: 256; 64 with --bench]"
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--top-p", type=float, default=0.95, show_default=True, help="Draw from the likeliest tokens of this mass only."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Repeat a draw; without it, every run differs.")
@engine_options
@click.option("--stats", is_flag=True, help="Report speed and memory on standard error at the end.")
@common_options
@command_errors(interrupted="interrupted")
def main(
    pack: Path,
    prompt: str | None,
    prompt_file: TextIO | None,
    chat: bool,
    bench: BenchOptions | None,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int | None,
    engine: EngineOptions,
    stats: bool,
    debug: bool,
) -> None:
    """Continue a text with the model in PACK, a folder that moe-pack convert made.

    The continuation alone goes to standard output, as it is generated; everything else goes to standard error.
    Generation ends at the model's own end of text, after --max-tokens, or when the context is full.
    """
    if bench is not None and stats:
        raise click.UsageError("--bench: reports all that --stats does; leave --stats out")
    text = _prompt(prompt, prompt_file, chat, bench)
    max_tokens = max_tokens or (256 if bench is None else 64)
    chosen_seed = secrets.randbits(32) if seed is None else seed
    options = RunOptions(text, chat, max_tokens, temperature, top_p, chosen_seed, engine, stats, bench)
    run(pack, options)


def _prompt(prompt: str | None, prompt_file: TextIO | None, chat: bool, bench: BenchOptions | None) -> str:
    """The text to continue; empty for a benchmark, which makes its own tokens."""
    if bench is not None:
        if prompt is not None or prompt_file is not None or chat:
            raise click.UsageError("--bench: makes its own prompt; leave --prompt, --prompt-file and --chat out")
        return ""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give the text to continue with --prompt or --prompt-file, one of them")
    text = prompt if prompt is not None else _read(prompt_file)
    if not text:
        raise RunError("--prompt: is empty; give at least one character")
    return text


def run(folder: Path, options: RunOptions) -> None:
    """Opens the pack, continues the prompt on standard output, reports; or measures how fast it is."""
    sampler = Sampler(options.temperature, options.top_p, options.seed)
    with ExitStack() as stack:
        pack = stack.enter_context(Pack(folder))
        text = None if options.bench else Text(pack)
        prompt_ids = _encoded(pack, text, options) if text else _random_ids(pack, options)
        machine = load_facts(cache_folder(), folder)
        spec = pack.spec
        context = context_for(
            len(prompt_ids), options.max_tokens, spec.max_position_embeddings, spec.encoder is not None
        )
        engine = stack.enter_context(_opened(pack, replace(options.engine, machine=machine), context))
        decoder = engine.decoder
        if text is None:
            _bench(options, pack, engine, sampler, prompt_ids)
            return
        clock = _Clock()
        stream = text.stream(prompt_ids if spec.encoder is None else [])
        last = ""
        try:
            for token in generate(decoder, prompt_ids, sampler, options.max_tokens, text.end_ids):
                clock.tick()
                piece = stream.push(token)
                last = piece or last
                click.echo(piece, nl=False)
            piece = stream.finish()
            last = piece or last
            click.echo(piece, nl=False)
        finally:
            if clock.num_tokens and not last.endswith("\n"):
                click.echo()
            if options.stats:
                _report(options, engine, clock, len(prompt_ids))


def _opened(pack: Pack, options: EngineOptions, context_tokens: int) -> Engine:
    """The engine; bars show experts on their way to the memory that a card reads, and kernels that are compiled."""
    if options.device == "cpu":
        return Engine(pack, options, context_tokens)
    with byte_bar(host_bytes(pack), "experts") as advance, count_bar("kernels compiled") as compiled:
        return Engine(pack, options, context_tokens, advance, compiled)


def _encoded(pack: Pack, text: Text, options: RunOptions) -> list[int]:
    if options.chat and pack.spec.encoder is not None:
        raise RunError("--chat: a model with an encoder answers one text; leave it out")
    prompt = chat_prompt(pack, options.prompt) if options.chat else options.prompt
    prompt_ids = text.encode(prompt, special_tokens=not options.chat)
    if not prompt_ids:
        raise RunError("--prompt: the tokenizer makes no token of it")
    return prompt_ids


def _random_ids(pack: Pack, options: RunOptions) -> list[int]:
    assert options.bench is not None, "only a benchmark has no text"
    spec = pack.spec
    return random_prompt(options.bench.prompt_tokens, spec.vocab_size, spec.max_position_embeddings, options.seed)


def _bench(options: RunOptions, pack: Pack, engine: Engine, sampler: Sampler, prompt_ids: list[int]) -> None:
    assert options.bench is not None, "a benchmark was asked for"
    times = measure(engine.decoder, prompt_ids, sampler, options.max_tokens)
    show_bench(options.bench.as_json, times, pack.is_synthetic, report(engine), options.seed)


class _Clock:
    """Seconds to the first token, and from there to the last."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.num_tokens = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0

    def tick(self) -> None:
        """A token is there."""
        elapsed = time.perf_counter() - self._start
        if self.num_tokens == 0:
            self.prefill_s = elapsed
        self.decode_s = elapsed - self.prefill_s
        self.num_tokens += 1


def _report(options: RunOptions, engine: Engine, clock: _Clock, num_prompt_tokens: int) -> None:
    made = clock.num_tokens
    lines = [
        ("prompt", f"{num_prompt_tokens} tokens, {_rate(num_prompt_tokens, clock.prefill_s)}"),
        ("generated", f"{made} tokens, {_rate(made - 1, clock.decode_s)}"),
        *report_lines(report(engine)),
        ("seed", str(options.seed) if options.temperature else "none: greedy"),
    ]
    for name, value in lines:
        click.echo(f"{name:16} {value}", err=True)


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tokens/s" if num_tokens > 0 and seconds > 0 else "no rate"


def _read(file: TextIO | None) -> str:
    assert file is not None, "one of the two is given"
    try:
        return file.read()
    except UnicodeDecodeError as fault:
        raise RunError(f"--prompt-file: {file.name} is not UTF-8 text (byte {fault.start})") from fault


if __name__ == "__main__":
    main()
