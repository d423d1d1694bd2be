"""The scheduler: requests join and leave a running batch, token by token.

Each request gets a *slot*, which is one of the decoder's sequences. A turn of the loop runs one piece of one prompt, or
appends a token to every sequence that is past its prompt. While some decode and others are in prefill, both get the
same time. A prompt runs in passes of its own, whose boundaries do not depend on others, so that an answer depends on
its own request alone (and, by rounding, on how much of its prompt was computed before).

A slot keeps its tokens after a request. The next request uses the longest beginning that any slot, or a session on the
disk, has in common with its prompt.

The engine's memory is given back between requests (`memory`), and there are no slots until it is taken again. A request
that comes meanwhile waits in the queue.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe_pack import runtime
from moe_pack.formats.base import errors
from moe_pack.runtime import sampling
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.engine.options import check_sampling
from moe_pack.runtime.model import Decoder, choosing, kv_cache
from moe_pack.runtime.serve import requests
from moe_pack.runtime.serve.memory import EngineMemory, MemoryState
from moe_pack.runtime.serve.sessions import SessionStore
from moe_pack.runtime.text import TextStream

_LOG = logging.getLogger("moe_pack.serve")
_UNWRITTEN = "the answer could not be written; the server's log says why"
SCORED_BYTES = 64 << 20  # for logits of a prompt's tokens and two copies in float64, whatever the vocabulary
_PREPARE_S = 0.002  # between experts that are prepared
_KEPT_SHARE = 0.5  # a slot goes on in place if a prompt keeps at least this share of its sequence


class PromptScores:
    """Follows a prompt while it runs, and takes the log-probabilities of its tokens from the hidden states."""

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], top: int) -> None:
        self.found: list[sampling.TokenLogprob | None] = [None]  # the first token has nothing before it
        self._decoder, self._prompt_ids, self._top = decoder, prompt_ids, top
        num_rows = max(1, SCORED_BYTES // (20 * decoder.spec.vocab_size))
        self._num_rows = min(num_rows, decoder.most_logits or num_rows)
        self._other: kv_cache.Follower | None = None

    @contextmanager
    def following(self, sequence: kv_cache.CachedSequence) -> Iterator[None]:
        """Follows a sequence within a `with` block, together with its other follower."""
        self._other, sequence.follower = sequence.follower, self
        try:
            yield
        finally:
            sequence.follower = self._other

    def follow(self, ids: Sequence[int], first: int, hidden: Tensor) -> None:
        """Scores the tokens after some positions of the prompt; nothing comes after the last position."""
        if self._other is not None:
            self._other.follow(ids, first, hidden)
        tokens = self._prompt_ids[first + 1 : first + 1 + len(hidden)]
        del self.found[first + 1 :]  # of positions that are computed again
        for start in range(0, len(tokens), self._num_rows):
            own = tokens[start : start + self._num_rows]
            logits = self._decoder.logits_of(hidden[start : start + len(own)]).cpu()
            self.found += sampling.logprobs_of_rows(logits, own, self._top)


class Job:
    """A submitted request: waiting, in prefill, or in decode."""

    def __init__(
        self, request: requests.Request, on_event: Callable[[requests.Event], None], wake: Callable[[], None]
    ) -> None:
        self.request, self.is_cancelled = request, False
        self._on_event, self._wake = on_event, wake
        self._started = self._first_token = 0.0
        self.cached_tokens = self.completion_tokens = 0
        self.left: list[int] = list(request.prompt_ids)  # of the prompt, what has not run
        # Where the prefill pauses for a checkpoint, rising: where the next turn, or another prompt, may go on from.
        self.checkpoints: list[int] = []
        self.next_token: int | None = None  # chosen, and not appended yet
        self.scores: PromptScores | None = None  # until they are reported
        self._sampler: runtime.Sampler | None = None
        self._text: AnswerText | None = None

    def cancel(self) -> None:
        """Ends the request soon, with an `EndEvent` of reason `cancelled`; any thread may call it, at any time."""
        self.is_cancelled = True
        self._wake()

    def start(self, text: runtime.Text, kept: int) -> None:
        """Begins to run; the first `kept` tokens of the prompt are computed already."""
        request = self.request
        self._started = time.perf_counter()
        self.left = list(request.prompt_ids[kept:])
        self.cached_tokens = kept
        self._sampler = runtime.Sampler(request.sampling, request.prompt_ids, request.grammar)
        self._text = AnswerText(text.stream(list(request.prompt_ids), request.keeps_special), request.stop)

    @property
    def left_tokens(self) -> int:
        """How many tokens the answer may still get."""
        return self.request.max_tokens - self.completion_tokens

    def choice(self) -> choosing.Choice | None:
        """Returns how tokens are chosen, for a decoder that does it; None if logits or a grammar are needed."""
        assert self._sampler is not None, "it was started"
        return None if self.request.top_logprobs is not None else self._sampler.choice()

    def take(self, logits: Tensor | int, is_full: bool) -> requests.EndReason | None:
        """Chooses a token from logits float32 [vocabulary] and reports it; returns why the answer ends, or None.

        Args:    logits: or the token that the decoder has chosen.   is_full: whether the context has no place for it.
        """
        assert self._sampler is not None and self._text is not None, "it was started"
        request = self.request
        if self.scores is not None:
            self._on_event(requests.PromptEvent(tuple(self.scores.found)))
            self.scores = None
        if not request.max_tokens:
            return "length"
        if isinstance(logits, int):
            token = logits
            self._sampler.accept(token)
        else:
            token = self._sampler.choose(logits)
        if self.completion_tokens == 0:
            self._first_token = time.perf_counter()
        self.completion_tokens += 1
        logprob = None
        if request.top_logprobs is not None and not isinstance(logits, int):
            logprob = self._sampler.logprobs(logits, token, request.top_logprobs)
        if token in request.end_ids:
            if logprob is not None and request.prompt_logprobs is not None:
                self._on_event(requests.TokenEvent(token, "", logprob))
            return "stop"
        self._on_event(requests.TokenEvent(token, self._text.push(token), logprob))
        self.next_token = token
        if self._text.stop is not None:
            return "stop"
        return "length" if self.left_tokens <= 0 or is_full else None

    def end(self, reason: requests.EndReason, message: str = "") -> None:
        """Reports the end of the request."""
        now = time.perf_counter()
        started = self._started or now
        first = self._first_token or now
        timings = requests.Timings(first - started, now - first if self.completion_tokens else 0.0)
        rest = ""
        try:
            if self._text is not None and reason != "error":
                rest = self._text.finish()
        except BaseException as fault:  # a tokenizer's panic too
            _LOG.error("a request failed", exc_info=fault)
            reason, message = "error", _UNWRITTEN
        end = requests.EndEvent(
            reason=reason,
            text=rest,
            stop=None if self._text is None else self._text.stop,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            timings=timings,
            message=message,
        )
        try:
            self._on_event(end)
        except Exception as fault:  # the others go on
            _LOG.error("the end of a request could not be reported", exc_info=fault)


class AnswerText:
    """The text of an answer, which ends before the first of some stop texts."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, stops
        self._held = ""  # may be the beginning of a stop text
        self.stop: str | None = None  # the stop text that was found

    def push(self, token: int) -> str:
        """Returns the text that a token completes, without what may be the beginning of a stop text."""
        return self._take(self._stream.push(token))

    def finish(self) -> str:
        """Returns the text that was held back until the end; nothing after a stop text."""
        if self.stop is not None:
            return ""
        return self._take(self._stream.finish()) + self._held

    def _take(self, piece: str) -> str:
        if not self._stops or self.stop is not None:
            return piece if self.stop is None else ""
        text = self._held + piece
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop = min(found)
            self._held = ""
            return text[:place]
        longest = max(map(len, self._stops)) - 1
        tails = (text[place:] for place in range(max(len(text) - longest, 0), len(text)))
        self._held = next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stops)), "")
        return text.removesuffix(self._held)


class Slot:
    """One of the decoder's sequences, and the job that runs on it; None if it is idle."""

    def __init__(self, sequence: kv_cache.CachedSequence) -> None:
        self.sequence = sequence
        self.job: Job | None = None
        self.used = 0  # a number that rises with each use

    @property
    def state(self) -> Literal["idle", "prefill", "decode"]:
        """The kind of work; a later request may use the tokens of an idle slot."""
        job = self.job
        return "idle" if job is None else "prefill" if job.left else "decode"


@dataclass(frozen=True, slots=True)
class _MemoryChange:
    """A change that a client asked for."""

    budget_bytes: int | None  # 0: the memory is given back; None: it is taken as before
    done: Future[MemoryState]


class BatchScheduler:
    """Runs requests on a decoder, several at once, in a thread of its own; `close` it.

    Args:    most_waiting: requests that may wait for a slot; more are refused.   sessions: keeps sequences that leave a
             slot, until they come back.   drafts: while one request alone is past its prompt, several of its tokens
             may come from one pass; the answer is the same.   memory: of the engine that has the decoder and the
             drafts; None: it is never given back.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: runtime.Text,
        most_waiting: int = 64,
        sessions: SessionStore | None = None,
        drafts: Drafts | None = None,
        memory: EngineMemory | None = None,
    ) -> None:
        self.context_tokens = decoder.sequences[0].cache.context_tokens
        self.failure: str | None = None  # the fault that ended the thread
        self.memory = memory
        self._text, self._most_waiting, self._sessions = text, most_waiting, sessions
        self._is_prepared = False  # while nobody asks for anything, the decoder prepares experts
        self._enter(decoder, drafts)
        self._waiting: deque[Job] = deque()
        self._changes: deque[_MemoryChange] = deque()  # of the memory, in the order in which they were asked for
        self._changed = threading.Condition()
        self._is_closing = False
        self._clock = 0
        self._owed_s = 0.0  # to decode, since the last piece of a prompt
        self._totals = requests.SchedulerCounts(num_slots=len(self.slots))
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="moe-serve engine", daemon=True)
        self._thread.start()

    # ---- from any thread --------------------------------------------------------------------------------------------

    def submit(self, request: requests.Request, on_event: Callable[[requests.Event], None], num_places: int = 1) -> Job:
        """Queues a request.

        Args:    on_event: is called from the scheduler's thread and must not wait.   num_places: free places that the
                 queue needs: for the first of several requests their number, for the others 0. An empty queue takes any
                 number.
        Raises:  RequestError if the prompt is empty, or too long for the context; QueueFullError.
        """
        number = len(request.prompt_ids)
        if not number:
            raise requests.RequestError("the prompt has no tokens; give at least one character")
        if number >= self.context_tokens:
            raise requests.RequestError(
                f"the prompt has {number} tokens, and the context of this server is {self.context_tokens}; shorten it "
                "to leave room for an answer, or start the server with a longer --context"
            )
        try:
            check_sampling(request.sampling)
        except errors.RunError as fault:
            raise requests.RequestError(str(fault), str(fault).partition(":")[0]) from fault
        job = Job(request, on_event, self._wake)
        with self._changed:
            if self._is_closing or self.failure is not None:
                raise errors.RunError(self.failure or "the server is shutting down")
            num_idle = self._totals.num_slots - sum(slot.job is not None for slot in self.slots)
            left = self._most_waiting + num_idle - len(self._waiting)
            if num_places > max(left, 0) and (self._waiting or left <= 0):
                raise requests.QueueFullError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def counts(self) -> requests.SchedulerCounts:
        """Returns the counts so far."""
        with self._changed:
            return replace(
                self._totals,
                running=sum(slot.job is not None for slot in self.slots),
                waiting=len(self._waiting),
                **self._draft_totals(),
            )

    def change_memory(self, budget_bytes: int | None) -> "Future[MemoryState]":
        """Asks for a change of the engine's memory, once no request runs; those that come after it wait.

        Args:    budget_bytes: 0 gives it back; another one takes it within this budget; None takes it as before.
        Returns: the state afterwards, or a fault as of `EngineMemory.take`.
        Raises:  RunError if the scheduler has ended; RequestError as of `EngineMemory.check_budget`.
        """
        assert self.memory is not None, "there is some to change"
        self.memory.check_budget(budget_bytes)
        change = _MemoryChange(budget_bytes, Future())
        with self._changed:
            if self._is_closing or self.failure is not None:
                raise errors.RunError(self.failure or "the server is shutting down")
            self._changes.append(change)
            self._changed.notify_all()
        return change.done

    def close(self) -> None:
        """Ends all requests and the thread, and saves the slots' sequences."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _draft_totals(self) -> dict[str, int]:
        """Returns the counts of these drafts and of those before."""
        now, totals = None if self._drafts is None else self._drafts.counts, self._totals
        if now is None:
            return {"drafted": totals.drafted, "accepted": totals.accepted}
        return {"drafted": totals.drafted + now.drafted, "accepted": totals.accepted + now.accepted}

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # OpenMP has a number of threads for each thread. The engine set that of the thread that built it; torch's own
        # would spin next to the kernels' threads.
        torch.set_num_threads(self._torch_threads)
        try:
            while self._take_turn():
                pass
            for slot in self.slots:
                self._save(slot, 0)
        except BaseException as fault:
            self.failure = f"the engine failed: {str(fault) or type(fault).__name__}"
            if not isinstance(fault, errors.MoePackError):
                raise
        finally:
            with self._changed:
                jobs = [slot.job for slot in self.slots if slot.job is not None] + list(self._waiting)
                changes = list(self._changes)
                self._waiting.clear()
                self._changes.clear()
                for slot in self.slots:
                    slot.job = None
            for job in jobs:
                job.end("error" if self.failure else "cancelled", self.failure or "the server is shutting down")
            for change in changes:
                change.done.set_exception(errors.RunError(self.failure or "the server is shutting down"))

    def _take_turn(self) -> bool:
        """Does one piece of work, or waits for some; returns whether the loop goes on."""

        def has_work() -> bool:
            is_due = self.memory is not None and self.memory.idle_left() == 0
            return is_due or self._is_closing or bool(self._waiting or self._changes) or self._is_running()

        with self._changed:
            self._changed.wait_for(has_work, self._idle_s())
            if self._is_closing:
                return False
            is_idle = not (self._waiting or self._changes or self._is_running())
        if is_idle and not self._is_prepared:
            self._is_prepared = not self._decoder.prepare_next()
        self._drop_cancelled()
        if self.memory is not None and not self._is_running():
            self._change_between_requests(self.memory, is_idle)
        if not self._changes:
            self._admit()
        filling = [slot for slot in self.slots if slot.state == "prefill"]
        decoding = [slot for slot in self.slots if slot.state == "decode"]
        if filling and (not decoding or self._owed_s <= 0):
            self._fill(min(filling, key=lambda slot: slot.used), bool(decoding))
        elif len(decoding) == 1 and self._drafts is not None:
            self._decode_drafted(decoding[0], self._drafts)
        elif decoding:
            self._decode(decoding)
        return True

    def _idle_s(self) -> float | None:
        """Returns how long the thread may wait for work; None: for ever."""
        if not self._is_prepared:
            return _PREPARE_S
        return None if self.memory is None else self.memory.idle_left()

    def _drop_cancelled(self) -> None:
        with self._changed:
            dropped = [job for job in self._waiting if job.is_cancelled]
            for job in dropped:
                self._waiting.remove(job)
        for job in dropped:
            job.end("cancelled")
        for slot in self.slots:
            if slot.job is not None and slot.job.is_cancelled:
                self._end(slot, "cancelled")

    def _end(self, slot: Slot, reason: requests.EndReason, message: str = "") -> None:
        job = slot.job
        assert job is not None, "a slot at work"
        with self._changed:
            slot.job = None
        job.scores = None  # it refers to the decoder
        if self.memory is not None:
            self.memory.note_use()
        job.end(reason, message)

    # ---- the engine's memory ----------------------------------------------------------------------------------------

    def _is_running(self) -> bool:
        return any(slot.job is not None for slot in self.slots)

    def _enter(self, decoder: Decoder, drafts: Drafts | None) -> None:
        """Uses an engine."""
        self._decoder, self._drafts = decoder, drafts
        self._is_prepared = False
        self.slots = tuple(Slot(sequence) for sequence in decoder.sequences)

    def _leave(self) -> None:
        """Refers to nothing of the engine any more; what its slots have is lost."""
        with self._changed:
            self._totals = replace(self._totals, **self._draft_totals())
            self.slots, self._drafts = (), None
        self._is_prepared = True
        del self._decoder

    def _change_between_requests(self, memory: EngineMemory, is_idle: bool) -> None:
        """Carries out what clients asked for, gives memory back that nobody uses, or takes it for those that wait."""
        while self._changes:
            change = self._changes[0]
            try:
                state = self._with_memory(memory, change.budget_bytes)
            except errors.RunError as fault:
                change.done.set_exception(fault)
            else:
                change.done.set_result(state)
            self._changes.popleft()
            memory.note_use()
        if is_idle and memory.idle_left() == 0:
            self._with_memory(memory, 0)
            _LOG.info("the GPU's memory is given back until the next request")
        elif self._waiting and not self.slots:
            try:
                self._with_memory(memory, None)
            except errors.RunError as fault:
                with self._changed:
                    jobs = list(self._waiting)
                    self._waiting.clear()
                for job in jobs:
                    job.end("unready", str(fault))

    def _with_memory(self, memory: EngineMemory, budget_bytes: int | None) -> MemoryState:
        """Gives memory back or takes it, as of `_MemoryChange`; raises as `EngineMemory.take`."""
        if memory.is_as_asked(budget_bytes):
            return memory.state()
        if self.slots:
            self._leave()
        try:
            return memory.release() if budget_bytes == 0 else memory.take(budget_bytes)
        finally:
            if not memory.state().is_released:
                self._enter(memory.decoder, memory.drafts)

    # ---- a request gets a slot --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives the idle slots to waiting requests."""
        while True:
            with self._changed:
                idle = [slot for slot in self.slots if slot.job is None]
                if not idle or not self._waiting:
                    return
                job = self._waiting.popleft()
            # The job is in no queue and in no slot now: whatever happens, it gets a slot or its end.
            try:
                slot, kept = self._begin(job, idle)
            except errors.RunError as fault:
                job.end("error", str(fault))
                continue
            except BaseException as fault:  # a tokenizer's panic too ends one request
                _LOG.error("a request could not begin", exc_info=fault)
                job.end("error", "the request could not begin; the server's log says why")
                continue
            with self._changed:
                slot.job = job
                self._totals.num_requests += 1
                self._totals.prompt_tokens += len(job.request.prompt_ids)
                self._totals.cached_tokens += kept

    def _begin(self, job: Job, idle: list[Slot]) -> tuple[Slot, int]:
        """Begins a request in an idle slot; returns the slot, and how many tokens of the prompt it has."""
        prompt, top = list(job.request.prompt_ids), job.request.prompt_logprobs
        stable = len(prompt) if job.request.stable_tokens is None else job.request.stable_tokens
        pauses = [stable]
        if top is None:
            pauses.append(max(slot.sequence.num_common(prompt) for slot in self.slots))
            slot, kept = self._place(prompt, idle)
        else:
            # Nothing is kept: logits of tokens that were computed before are gone.
            slot, kept = min(idle, key=lambda slot: (slot.sequence.num_tokens > 0, slot.used)), 0
            self._save(slot, 0)
            slot.sequence.reset()
            job.scores = PromptScores(self._decoder, prompt, top)
        job.start(self._text, kept)
        if not slot.sequence.cache.is_cut_anywhere:
            job.checkpoints = sorted({place for place in pauses if kept < place < len(prompt)})
        self._clock += 1
        slot.used = self._clock
        return slot, kept

    def _place(self, prompt: list[int], idle: list[Slot]) -> tuple[Slot, int]:
        """Chooses a slot for a prompt; returns it, and how many tokens of the prompt it has.

        A slot whose sequence goes on with the prompt is used in place. Else the slot that was used least recently gets
        a copy of the beginning, so that the longer sequence is not lost.
        """
        kept, best = max(((slot.sequence.num_kept(prompt), slot) for slot in self.slots), key=lambda each: each[0])
        goes_on = best in idle and kept >= _KEPT_SHARE * best.sequence.num_tokens
        others = [slot for slot in idle if slot is not best or not kept]
        if kept and (goes_on or (not others and best in idle)):
            self._save(best, kept)
            best.sequence.keep_beginning(prompt)
            return best, kept
        target = min(others or idle, key=lambda slot: (slot.sequence.num_tokens > 0, slot.used))
        self._save(target, 0)
        loaded = self._load(target, prompt, kept)
        if loaded:
            return target, loaded
        if kept:
            target.sequence.take_beginning(best.sequence, kept)
        else:
            target.sequence.reset()
        return target, kept

    # ---- work -------------------------------------------------------------------------------------------------------

    def _fill(self, slot: Slot, others_decode: bool) -> None:
        job, sequence, began = slot.job, slot.sequence, time.perf_counter()
        assert job is not None, "a slot in prefill"
        place = len(job.request.prompt_ids) - len(job.left)
        number = min(len(job.left), self._decoder.chunk_tokens)
        if job.checkpoints:
            number = min(number, job.checkpoints[0] - place)
        try:
            with nullcontext() if job.scores is None else job.scores.following(sequence):
                logits = self._decoder.extend(sequence, job.left[:number])
        except errors.MoePackError as fault:
            self._end(slot, "error", str(fault))
            return
        job.left = job.left[number:]
        if job.checkpoints and job.checkpoints[0] == place + number:
            job.checkpoints.pop(0)
            sequence.save_checkpoint()
        if not job.left:
            sequence.save_checkpoint()
            self._choose(slot, logits, sequence.num_tokens)
        seconds = time.perf_counter() - began
        self._owed_s = seconds if others_decode else 0.0
        with self._changed:
            self._totals.prefill_s += seconds

    def _decode(self, slots: list[Slot]) -> None:
        """Appends the chosen token to each slot's sequence, and chooses the next one."""
        began = time.perf_counter()
        jobs = [slot.job for slot in slots if slot.job is not None]
        tokens = [job.next_token for job in jobs if job.next_token is not None]
        chooser, sequences = self._decoder.chooser, [slot.sequence for slot in slots]
        rows = choosing.chosen_rows(chooser, sequences, tokens, [job.choice() for job in jobs])
        if chooser is not None and rows is not None:
            self._decode_chosen(slots, chooser, rows)
            return
        try:
            logits = self._decoder.extend_each(sequences, tokens)
        except errors.MoePackError as fault:
            for slot in slots:
                self._end(slot, "error", str(fault))
            return
        for slot, row in zip(slots, logits, strict=True):
            self._choose(slot, row, slot.sequence.num_tokens)
        self._note_step(began)

    def _decode_chosen(self, slots: list[Slot], chooser: choosing.Chooser, rows: Sequence[choosing.ChosenRow]) -> None:
        """Does the same with a decoder that chooses, pass after pass, until there is other work."""
        jobs, began = [slot.job for slot in slots], time.perf_counter()

        def goes_on() -> bool:
            with self._changed:
                is_admitting = bool(self._waiting) and any(slot.job is None for slot in self.slots)
                if self._is_closing or is_admitting or any(job.is_cancelled for job in self._waiting):
                    return False
            if self._owed_s <= 0 and any(slot.state == "prefill" for slot in self.slots):
                return False
            return all(
                slot.job is job and job is not None and not job.is_cancelled and job.left_tokens > 1
                for slot, job in zip(slots, jobs, strict=True)
            )

        try:
            for tokens in chooser.steps(rows, goes_on):
                for slot, job, token in zip(slots, jobs, tokens, strict=True):
                    if slot.job is job:
                        self._choose(slot, token, slot.sequence.num_tokens)
                self._note_step(began)
                began = time.perf_counter()
        except errors.MoePackError as fault:
            for slot, job in zip(slots, jobs, strict=True):
                if slot.job is job:
                    self._end(slot, "error", str(fault))

    def _decode_drafted(self, slot: Slot, drafts: Drafts) -> None:
        """Does the same for one slot, with a draft behind its token."""
        job, began = slot.job, time.perf_counter()
        assert job is not None and job.next_token is not None, "a slot in decode"

        def take(logits: Tensor, num_tokens: int) -> int | None:
            self._choose(slot, logits, num_tokens)
            return None if slot.job is None else job.next_token

        try:
            drafts.begin(job)
            most = job.left_tokens
            drafts.advance(self._decoder, slot.sequence, job.next_token, most, take)
        except errors.MoePackError as fault:
            self._end(slot, "error", str(fault))
            return
        self._note_step(began)

    def _note_step(self, began: float) -> None:
        seconds = time.perf_counter() - began
        self._owed_s -= seconds
        with self._changed:
            self._totals.decode_s += seconds
            self._totals.decode_steps += 1

    def _choose(self, slot: Slot, logits: Tensor | int, num_tokens: int) -> None:
        """Chooses the token after the first `num_tokens` of a slot's sequence, and ends the request if it is over.

        Args:    logits: or the token that the decoder has chosen.
        """
        job = slot.job
        assert job is not None, "a slot at work"
        before = job.completion_tokens
        try:
            reason = job.take(logits, num_tokens >= self.context_tokens)
        except errors.RunError as fault:
            self._end(slot, "error", str(fault))
            return
        except BaseException as fault:  # a tokenizer's or a grammar's panic too ends one request
            _LOG.error("a request failed", exc_info=fault)
            self._end(slot, "error", _UNWRITTEN)
            return
        with self._changed:
            self._totals.generated_tokens += job.completion_tokens - before
        if reason is not None:
            self._end(slot, reason)

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def _save(self, slot: Slot, kept: int) -> None:
        """Saves a slot's sequence before all but `kept` of its tokens are lost."""
        if self._sessions is None or slot.sequence.num_tokens <= kept:
            return
        try:
            self._sessions.save(slot.sequence)
        except Exception as fault:  # sessions only save time: the requests go on
            _LOG.error("a session was not saved", exc_info=fault)

    def _load(self, slot: Slot, prompt: list[int], kept: int) -> int:
        """Loads a session that has more in common with a prompt than `kept`; returns what it keeps, or 0."""
        if self._sessions is None:
            return 0
        try:
            if self._sessions.load(prompt, slot.sequence, kept):
                number = slot.sequence.num_kept(prompt)
                slot.sequence.keep_beginning(prompt)
                return number
        except Exception as fault:  # the prompt is computed
            _LOG.error("a session was not loaded", exc_info=fault)
            slot.sequence.reset()
        return 0
