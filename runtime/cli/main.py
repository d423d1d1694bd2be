"""The command `moe-run`: it continues a text, holds a conversation, or with `--bench` measures speed.

The text goes to standard output; everything else goes to standard error.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

import click

from moe_pack import formats, runtime
from moe_pack.formats.base import cli, peak_resident_bytes
from moe_pack.formats.base.commands import given
from moe_pack.formats.hub.cli import PACK, pack_folder
from moe_pack.runtime.engine.options import MAX_SEED, AskedSampling, usual_sampling

if TYPE_CHECKING:
    from moe_pack.runtime.generate import Clock
    from moe_pack.runtime.offload import Sequences


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `moe-run --bench`."""

    is_given: bool = field(
        default=False,
        metadata=formats.option(
            "--bench", help="Measure speed: a prompt of random tokens, then new tokens that no end of text stops."
        ),
    )
    prompt_tokens: int | None = field(
        default=None,
        metadata=formats.option(
            "--prompt-tokens", least=1, metavar="N", help="With --bench: length of the prompt.  [default: 128]"
        ),
    )
    as_json: bool = field(
        default=False, metadata=formats.option("--json", help="With --bench: print the result as JSON.")
    )

    def check(self) -> None:
        """Refuses options of `--bench` without it. Raises: UsageError."""
        if not self.is_given and (others := given(self)):
            raise formats.UsageError(f"{others[-1]} needs --bench; remove it or add --bench")


def show_bench(
    as_json: bool, times: runtime.BenchTimes, is_synthetic: bool, facts: runtime.RunReport, seed: int
) -> None:
    """Prints the result of `--bench` on standard output."""

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
        click.echo(json.dumps(values | formats.dump(facts)))
        return
    decode = "no token after the first"
    if times.decode_rate is not None:
        decode = (
            f"{len(times.tokens_s)} tokens, {times.decode_rate:.1f} tokens/s, median {times.median_token_ms:.1f} ms"
        )
    lines = [
        *([("pack", cli.NOISE)] if is_synthetic else []),
        ("prefill", f"{times.num_prompt_tokens} tokens, {times.prefill_rate:.1f} tokens/s"),
        ("decode", decode),
        *runtime.report_lines(facts),
        *([] if peak is None else [("resident", f"{formats.size_text(peak)} at most, including mapped files")]),
        ("seed", str(seed)),
    ]
    for name, value in lines:
        click.echo(f"{name:16} {value}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `moe-run`."""

    prompt: str | None = field(
        default=None,
        metadata=formats.option(
            "--prompt", "-p", help="The text to continue.  [default: standard input; on a terminal a conversation]"
        ),
    )
    prompt_file: TextIO | None = field(
        default=None, metadata=formats.option("--prompt-file", help="Read the prompt from a file; - is standard input.")
    )
    chat: bool = field(
        default=False,
        metadata=formats.option("--chat", help="Send the prompt as a chat message, in the pack's own template."),
    )
    context: int | None = field(
        default=None,
        metadata=formats.option(
            "--context",
            "-c",
            least=16,
            metavar="TOKENS",
            help="In a conversation: tokens of all messages together.  [default: 4096, or all that the model has]",
        ),
    )
    bench: BenchOptions = field(default_factory=BenchOptions)
    max_tokens: int | None = field(
        default=None,
        metadata=formats.option(
            "--max-tokens",
            "-n",
            least=1,
            help="Stop after N tokens.  [default: 256; 64 with --bench; in a conversation the rest of the context]",
        ),
    )
    sampling: AskedSampling = field(default_factory=AskedSampling)
    seed: int | None = field(
        default=None,
        metadata=formats.option("--seed", least=0, most=MAX_SEED, help="Repeat a draw.  [default: a new seed]"),
    )
    engine: runtime.EngineOptions = field(default_factory=runtime.EngineOptions)
    stats: bool = field(
        default=False, metadata=formats.option("--stats", help="Print to standard error at the end what really ran.")
    )

    def check(self) -> None:
        """Refuses options that do not go together. Raises: UsageError."""
        if self.context is not None and not self.is_conversation:
            raise formats.UsageError(
                "--context needs a conversation; remove it, or leave out the prompt, on a terminal"
            )
        if not self.bench.is_given:
            if self.prompt is not None and self.prompt_file is not None:
                raise formats.UsageError("--prompt and --prompt-file are both the text to continue; remove one of them")
            return
        if self.stats:
            raise formats.UsageError("--bench reports everything that --stats does; remove --stats")
        if self.prompt is not None or self.prompt_file is not None or self.chat:
            raise formats.UsageError("--bench has its own prompt; remove --prompt, --prompt-file and --chat")

    @property
    def is_conversation(self) -> bool:
        """Whether the user talks to the model on the terminal."""
        has_prompt = self.prompt is not None or self.prompt_file is not None
        return not has_prompt and not self.bench.is_given and sys.stdin is not None and sys.stdin.isatty()

    @property
    def num_tokens(self) -> int:
        """The most tokens to generate, with the default."""
        return self.max_tokens or (64 if self.bench.is_given else 256)

    def text(self) -> str:
        """Reads the text to continue, without the newline that a shell adds at the end of standard input.

        Raises:  RunError if it is empty or no UTF-8 text; UsageError if there is none.
        """
        if self.prompt is None and self.prompt_file is None:
            text = "" if sys.stdin is None else _read(click.open_file("-", encoding="utf-8")).removesuffix("\n")
            if not text:
                raise formats.UsageError(
                    "standard input is empty; give the text to continue with --prompt or --prompt-file"
                )
            return text
        text = _read(self.prompt_file) if self.prompt is None else self.prompt
        if not text:
            raise formats.RunError("--prompt is empty; give at least one character")
        return text


@click.command(
    cls=cli.Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  moe-run packed/ --prompt "It was a dark night"
  moe-run packed/ --prompt "Why is the sky blue?" --chat --temperature 0
  moe-run packed/
  echo "It was a dark night" | moe-run packed/
  moe-run packed/ --prompt-file chapter.txt --max-tokens 500 --seed 7 --stats
  moe-run packed/ --prompt "It was a dark night" --budget 2G --stats
  moe-run packed/ --bench""",
)
@click.argument("pack", type=PACK)
@cli.options_from(RunOptions)
@cli.common_options
@cli.command_errors(interrupted="interrupted")
def main(pack: Path, options: RunOptions, debug: bool) -> None:
    """Continue a text with the model in PACK, or without a prompt, on a terminal, hold a conversation with it.

    PACK is a folder that moe-pack convert wrote, or a pack on the hub, such as owner/repository:4bit, which is
    downloaded first.

    The continuation alone goes to standard output, as it is generated; everything else goes to standard error.
    The continuation ends at the model's end of text, after --max-tokens, or when the context is full.
    """
    needs_text = not (options.bench.is_given or options.is_conversation)
    words = options.text() if needs_text else ""
    # A wrong option is refused before a download, and before torch is loaded.
    options.sampling.over(runtime.SamplingOptions())
    if options.engine.device == "cpu":
        options.engine.check_cpu_alone()
    pack = pack_folder(pack)
    import_torch()
    if options.bench.is_given:
        _bench(pack, options)
    elif options.is_conversation:
        _converse(pack, options)
    else:
        _continue(pack, options, words)


def import_torch() -> None:
    """Imports torch without the garbage collector, which would walk through its objects again and again meanwhile."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401  # what follows uses it
    finally:
        gc.freeze()  # what is there stays
        gc.enable()


def _sampling(pack: formats.Pack, options: RunOptions) -> runtime.SamplingOptions:
    return replace(options.sampling.over(usual_sampling(pack)), seed=options.seed)


def _continue(folder: Path, options: RunOptions, words: str) -> None:
    """Continues the prompt on standard output, and reports."""
    from moe_pack.runtime.generate import Clock, generate

    with ExitStack() as stack:
        pack = stack.enter_context(formats.Pack(folder))
        sampler = runtime.Sampler(_sampling(pack, options))
        text = runtime.Text(pack)
        prompt_ids = _encoded(pack, text, words, options.chat)
        end_ids = text.answer_end_ids if options.chat else text.end_ids
        context = _context_for(pack, options, len(prompt_ids))
        engine = stack.enter_context(_engine_on_device(pack, options.engine, context))
        clock = Clock()
        stream = text.stream(prompt_ids if pack.spec.encoder is None else [])
        last = ""
        try:
            for token in generate(engine.decoder, prompt_ids, sampler, options.num_tokens, end_ids, engine.drafts):
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
                _report(sampler, engine, clock, len(prompt_ids))


def _bench(folder: Path, options: RunOptions) -> None:
    """Measures and prints the speed on random tokens."""

    with ExitStack() as stack:
        pack = stack.enter_context(formats.Pack(folder))
        sampler = runtime.Sampler(_sampling(pack, options))
        spec, number = pack.spec, options.bench.prompt_tokens or 128
        prompt_ids = runtime.random_prompt(number, spec.vocab_size, spec.max_position_embeddings, sampler.seed)
        context = _context_for(pack, options, number)
        chosen = options.engine
        if chosen.draft == "auto":  # random tokens say nothing about drafts
            chosen = replace(chosen, draft="off")
        engine = stack.enter_context(_engine_on_device(pack, chosen, context))
        times = runtime.measure(engine.decoder, prompt_ids, sampler, options.num_tokens, engine.drafts)
        show_bench(options.bench.as_json, times, pack.is_synthetic, runtime.report(engine), sampler.seed)


def _converse(folder: Path, options: RunOptions) -> None:
    """Holds a conversation on the terminal, and reports."""
    from moe_pack.runtime.cli.chat import ChatOptions, converse
    from moe_pack.runtime.model import Decoder

    click.echo(f"loading {folder.resolve().name}", err=True)
    with ExitStack() as stack:
        pack = stack.enter_context(formats.Pack(folder))
        text = runtime.Text(pack)
        if not options.chat and (pack.spec.encoder is not None or text.chat_template is None):
            raise formats.RunError("this pack has no chat template; give the text to continue with --prompt")
        _chat_prompt(pack, "Hello")  # a pack that cannot chat is refused before its weights are read
        # With a checkpoint, a turn continues the one before, also if the cache cannot be cut back anywhere.
        context = asked_context(pack, options.context)
        engine = stack.enter_context(_engine_on_device(pack, options.engine, context, 1, "--context"))
        assert isinstance(engine.decoder, Decoder), "a model without an encoder"
        chosen = ChatOptions(_sampling(pack, options), options.max_tokens, options.stats)
        try:
            converse(folder.resolve().name, text, engine.decoder, chosen, engine.drafts)
        finally:
            if options.stats:
                _show(runtime.report_lines(runtime.report(engine)))


def _context_for(pack: formats.Pack, options: RunOptions, num_prompt_tokens: int) -> int:
    spec = pack.spec
    has_encoder = spec.encoder is not None
    return runtime.context_for(num_prompt_tokens, options.num_tokens, spec.max_position_embeddings, has_encoder)


def asked_context(pack: formats.Pack, asked: int | None) -> int:
    """Returns the context of `--context`, or the usual one. Raises: RunError if the model has fewer positions."""
    from moe_pack.runtime.generate import USUAL_CONTEXT

    most = pack.spec.max_position_embeddings
    context = min(USUAL_CONTEXT, most) if asked is None else asked
    if context > most:
        raise formats.RunError(f"--context {context}: this model has {most} positions; give at most {most}")
    return context


def _engine_on_device(
    pack: formats.Pack,
    options: runtime.EngineOptions,
    context_tokens: int,
    checkpoints: int = 0,
    context_option: str = "--max-tokens",
) -> runtime.Engine:
    """Builds the engine of one sequence, which has so many checkpoints; on a GPU none."""
    from moe_pack.runtime.engine.engine import choose_device
    from moe_pack.runtime.offload import Sequences

    on_device, device_line = choose_device(pack, options, context_tokens)
    sequences = Sequences(1, 0 if on_device.device == "cuda" else checkpoints)
    engine = open_engine(pack, on_device, context_tokens, sequences, context_option, keeps_facts=True)
    if device_line is not None:
        click.echo(device_line, err=True)
    return engine


def open_engine(
    pack: formats.Pack,
    options: runtime.EngineOptions,
    context_tokens: int,
    sequences: Sequences,
    context_option: str,
    keeps_facts: bool,
) -> runtime.Engine:
    """Builds an engine; bars show the experts that are read into host memory for a GPU, and the compiled kernels.

    Args:    context_option: the option that sets the context.   keeps_facts: whether a measurement of the disk is
             saved.
    """
    from moe_pack.runtime.offload.budgets import named_budget

    chosen = replace(options, machine=runtime.load_facts(cli.cache_folder(), pack.folder))
    with named_budget("--budget", context_option), cli.TerminalProgress() as progress:

        def measured() -> runtime.MachineFacts:

            progress.say("measuring the disk once; moe-pack doctor measures the whole machine")
            facts = runtime.measure_disk(pack.folder, progress)
            if keeps_facts:
                with suppress(formats.RunError):  # a run does not need the file
                    runtime.save_facts(facts, cli.cache_folder(), pack.folder)
            return facts

        return runtime.Engine(pack, chosen, context_tokens, progress, None, measured, sequences)


def _encoded(pack: formats.Pack, text: runtime.Text, words: str, chat: bool) -> list[int]:
    prompt_ids = text.encode(_chat_prompt(pack, words) if chat else words, special_tokens=not chat)
    if not prompt_ids:
        raise formats.RunError("--prompt: the tokenizer finds no token in it; give another text")
    return prompt_ids


def _chat_prompt(pack: formats.Pack, words: str) -> str:
    """Returns the prompt of a message. Raises: RunError if the model cannot chat."""

    if pack.spec.encoder is not None:
        raise formats.RunError("--chat does not support models with an encoder; remove it")
    return runtime.chat_prompt(pack, words)


def _report(sampler: runtime.Sampler, engine: runtime.Engine, clock: Clock, num_prompt_tokens: int) -> None:
    from moe_pack.runtime.generate import rate_text

    lines = [
        ("prompt", f"{num_prompt_tokens} tokens, {rate_text(num_prompt_tokens, clock.prefill_s)}"),
        ("generated", f"{clock.num_tokens} tokens, {rate_text(clock.num_tokens - 1, clock.decode_s)}"),
        *runtime.report_lines(runtime.report(engine)),
        ("seed", str(sampler.seed) if sampler.temperature else "none: greedy"),
    ]
    _show(lines)


def _show(lines: list[tuple[str, str]]) -> None:
    for name, value in lines:
        click.echo(f"{name:16} {value}", err=True)


def _read(file: IO[str] | None) -> str:
    assert file is not None, "there is either --prompt or --prompt-file"
    try:
        return file.read()
    except UnicodeDecodeError as fault:
        raise formats.RunError(f"--prompt-file: {file.name} is not UTF-8 text (byte {fault.start})") from fault
