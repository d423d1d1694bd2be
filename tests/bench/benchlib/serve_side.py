"""The server of a synthetic pack, which has no tokenizer: a token's text is its number.

    python tests/bench/benchlib/serve_side.py PACK --port 8080 --parallel 4 --context 256 [--budget SIZE]

All else is what moe-serve runs: the application, the scheduler, the engine.
"""

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from moe_pack.formats import Pack
from moe_pack.formats.base.commands import read_size
from moe_pack.runtime import Engine, EngineOptions, SamplingOptions
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload import Approximations, Sequences
from moe_pack.runtime.serve.http.app import ServeOptions, create_app, server_of
from moe_pack.runtime.serve.parsers import parser_for
from moe_pack.runtime.serve.scheduler import BatchScheduler
from moe_pack.runtime.serve.service import ModelFacts, Service
from moe_pack.runtime.serve.styles import style_of


class Numbers:
    """A tokenizer, and its stream: a token is its number and a space."""

    end_ids = answer_end_ids = frozenset[int]()
    most_bytes_per_token = 8  # the digits of a number and a space

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the numbers in a text."""
        return [int(word) for word in text.split()]

    def stream(self, prompt_ids: list[int], keeps_special: bool = False) -> "Numbers":
        """Returns a stream after a prompt."""
        return self

    def push(self, token: int) -> str:
        """Returns a token's text."""
        return f"{token} "

    def finish(self) -> str:
        """Returns nothing: no text waits."""
        return ""

    def token_bytes(self, token: int) -> bytes:
        """Returns the token's number, as a compiler of grammars returns the token's bytes."""
        return str(token).encode()


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--port", type=int, required=True)
@click.option("--parallel", type=int, required=True)
@click.option("--context", type=int, required=True)
@click.option("--threads", type=int, default=None)
@click.option("--budget", default=None)
@click.option("--substitute", type=float, default=None)
@click.option("--numerics", default="auto")
def main(
    pack: Path,
    port: int,
    parallel: int,
    context: int,
    threads: int | None,
    budget: str | None,
    substitute: float | None,
    numerics: Any,
) -> None:
    """Serves until a signal comes."""
    options = EngineOptions(
        device="cpu",
        budget_bytes=None if budget is None else read_size(budget),
        read="map" if budget is None else "auto",
        threads=threads,
        numerics=numerics,
        approximations=Approximations(substitute=substitute),
    )
    with ExitStack() as stack:
        opened = stack.enter_context(Pack(pack))
        engine = stack.enter_context(Engine(opened, options, context, sequences=Sequences(parallel)))
        assert isinstance(engine.decoder, Decoder)
        text: Any = Numbers(opened.spec.vocab_size)
        scheduler = BatchScheduler(engine.decoder, text)
        stack.enter_context(closing(scheduler))
        service = Service(
            ModelFacts("synthetic", "synthetic", 0, SamplingOptions(temperature=0)),
            scheduler,
            text,
            None,
            partial(parser_for, style_of("")),
            text,
        )
        allowed = ServeOptions()
        server_of(create_app(service, allowed), "127.0.0.1", port, allowed).run()


if __name__ == "__main__":
    main()
