"""A pack from Python, in three lines: load it, generate, close it.

with load("packed/", budget="2G") as model:
    print(model.generate("It was a dark night"))
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from moe_pack import formats
from moe_pack.formats.base.commands import read_sizes
from moe_pack.runtime.engine.engine import Engine
from moe_pack.runtime.engine.options import EngineOptions, SamplingOptions
from moe_pack.runtime.engine.report import RunReport, report
from moe_pack.runtime.generate import USUAL_CONTEXT, context_for, generate
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload.budgets import named_budget
from moe_pack.runtime.sampling import Sampler
from moe_pack.runtime.text import Text


def load(
    folder: str | Path,
    budget: str | int | None = None,
    *,
    context_tokens: int | None = None,
    options: EngineOptions | None = None,
) -> "Model":
    """Opens a pack, ready to generate; `close` the model, or use it in a `with`.

    Args:    folder: a pack.   budget: memory for weights, key-value cache and workspace, in bytes, as "11G", or as
             "11G,24G" for two GPUs; None: the free memory.   context_tokens: the most tokens of prompt and continuation
             together; None: 4096, or all positions of the model if it has fewer.   options: everything else; `budget`
             replaces theirs.
    Raises:  PackError if the pack is damaged; RunError if it has no tokenizer, or cannot run with these options.
    """
    chosen = options or EngineOptions()
    if budget is not None:
        try:
            chosen = replace(chosen, budget_bytes=read_sizes(str(budget)))
        except ValueError as fault:
            message = f"budget: found {budget!r}, expected a size as '11G', '1.5G' or '800M'"
            raise formats.RunError(message) from fault
    with ExitStack() as stack:
        pack = stack.enter_context(formats.Pack(Path(folder)))
        text = Text(pack)
        most = pack.spec.max_position_embeddings
        with named_budget("budget", "context_tokens"):
            engine = stack.enter_context(Engine(pack, chosen, context_tokens or min(USUAL_CONTEXT, most)))
        return Model(engine, text, stack.pop_all())


class Model:
    """A pack that is ready to generate text; one text at a time."""

    def __init__(self, engine: Engine, text: Text, opened: ExitStack) -> None:
        self._engine, self._text, self._opened = engine, text, opened
        self._is_open = True

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees memory, threads and files; afterwards the model cannot be used."""
        self._is_open = False
        self._opened.close()

    def generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        *,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int | None = None,
    ) -> str:
        """Returns the text that follows a prompt; arguments and errors are those of `stream`."""
        return "".join(self.stream(prompt, max_tokens, temperature=temperature, top_p=top_p, seed=seed))

    def stream(
        self,
        prompt: str,
        max_tokens: int = 256,
        *,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Yields the text that follows a prompt, in pieces of whole characters.

        It ends at the model's end of text, after `max_tokens`, or when the context is full. A new call ends the text of
        an earlier one; if both have a beginning in common, it is not read again, as far as the cache leads back.
        Args:    temperature: 0 always takes the likeliest token.   top_p: draws come from the smallest set of tokens
                 with this probability.   seed: repeats a draw; None: every call differs.
        Raises:  RunError if the prompt is empty, too long, or the model is closed; PackError if a file is damaged.
        """
        if not self._is_open:
            raise formats.RunError("the model is closed; load it again")
        ids = self._text.encode(prompt)
        if not ids:
            raise formats.RunError("the tokenizer finds no token in the prompt; give at least one character")
        decoder = self._engine.decoder
        context_for(len(ids), max_tokens, decoder.cache.context_tokens, decoder.spec.encoder is not None)
        sampler = Sampler(SamplingOptions(temperature, top_p, seed=seed))
        return self._pieces(ids, sampler, max_tokens)

    def report(self) -> RunReport:
        """Reports what really ran since the model was loaded."""
        return report(self._engine)

    def _pieces(self, ids: list[int], sampler: Sampler, max_tokens: int) -> Iterator[str]:
        decoder = self._engine.decoder
        stream = self._text.stream(ids if isinstance(decoder, Decoder) else [])
        if isinstance(decoder, Decoder):
            ids = decoder.keep_beginning(ids)
        else:
            decoder.reset()
        for token in generate(decoder, ids, sampler, max_tokens, self._text.end_ids, self._engine.drafts):
            if piece := stream.push(token):
                yield piece
        if piece := stream.finish():
            yield piece
