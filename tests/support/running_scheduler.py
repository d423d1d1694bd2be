"""A scheduler over the engine of a small pack, the answers that it gives, and the sessions of a folder."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, SamplingOptions, Text
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.engine.options import ReadOption
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import Sequences, least_budget
from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.requests import Event, PromptEvent, PromptLogprobs, Request, TokenEvent
from moe_pack.runtime.serve.scheduler import BatchScheduler, Job
from moe_pack.runtime.serve.sessions import SessionOwner, SessionStore
from support.waiting import HANG_S

CONTEXT, VOCAB = 160, 4096  # of the demo model's packs
GREEDY = SamplingOptions(temperature=0)
WORDS = "It was a dark night, and the rain fell in torrents"


@dataclass
class Answer:
    """What came back for a request."""

    events: "queue.Queue[Event]" = field(default_factory=queue.Queue)
    steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: Any = None  # its `EndEvent`, after `wait`
    prompt: PromptLogprobs | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take_in_steps(self, event: Event) -> None:
        """Takes an event, and stops the scheduler until one of `steps` is released."""
        self.events.put(event)
        assert self.steps.acquire(timeout=HANG_S)

    def wait(self) -> "Answer":
        while self.end is None:
            event = self.events.get(timeout=HANG_S)
            if isinstance(event, PromptEvent):
                assert self.prompt is None and not self.tokens, "once, before the first token"
                self.prompt = event.logprobs
                continue
            self.text += event.text
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token)
                self.logprobs += [] if event.logprob is None else [event.logprob]
            else:
                self.end = event
        return self


@dataclass
class Served:
    """A scheduler over a pack, with its parts."""

    scheduler: BatchScheduler
    text: Text
    engine: Engine

    def submit(self, request: Request) -> tuple[Job, Answer]:
        answer = Answer()
        return self.scheduler.submit(request, answer.events.put), answer

    def run(self, request: Request) -> Answer:
        return self.submit(request)[1].wait()


def plain_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Logits after each token, float32 [T, vocabulary], of an engine of its own: a scheduler's thread alone uses its
    decoder, while nothing is asked too."""
    with Pack(folder) as opened, Engine(opened, EngineOptions(read="map", chunk_tokens=16), CONTEXT) as engine:
        assert isinstance(engine.decoder, Decoder)
        return engine.decoder.logits([*ids])


@contextmanager
def served(
    folder: Path,
    number: int = 3,
    budget: int | None = None,
    most_waiting: int = 64,
    sessions: SessionStore | None = None,
    context: int = CONTEXT,
    drafts: Drafts | None = None,
    kv_dtype: KvDtype = "f32",
    text: Any = None,
) -> Iterator[Served]:
    """Serves a pack; `text` takes the place of its tokenizer."""
    with Pack(folder) as opened:
        sequences = Sequences(number, checkpoints=2, kv_dtype=kv_dtype)
        extra = None if budget is None else least_budget(opened.layout, context, 0, sequences) + budget
        reads: ReadOption = "auto" if budget is not None else "map"
        options = EngineOptions(budget_bytes=extra, read=reads, chunk_tokens=16, kv_dtype=kv_dtype)
        with Engine(opened, options, context, sequences=sequences) as engine:
            assert isinstance(engine.decoder, Decoder)
            text = text or Text(opened)
            with closing(BatchScheduler(engine.decoder, text, most_waiting, sessions, drafts)) as scheduler:
                yield Served(scheduler, text, engine)


def request(ids: Sequence[int], max_tokens: int = 12, sampling: SamplingOptions = GREEDY) -> Request:
    return Request(tuple(ids), sampling, max_tokens, frozenset())


def keep_nothing(server: Served) -> None:
    """Makes every prompt run whole: what is kept changes rounding."""
    for slot in server.scheduler.slots:
        slot.sequence.num_kept = lambda prompt_ids: 0  # type: ignore[method-assign]  # of this server alone


class NoText:
    """A tokenizer for tokens without text."""

    def stream(self, prompt_ids: list[int], keeps_special: bool = False) -> "NoText":
        return self

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def sessions_in(
    folder: Path, digest: str = "a" * 64, most_bytes: int = 1 << 30, kv_dtype: KvDtype = "f32", context: int = CONTEXT
) -> SessionStore:
    return SessionStore(folder, SessionOwner(digest, context, VOCAB, kv_dtype), most_bytes)
