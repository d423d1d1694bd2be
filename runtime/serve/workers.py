"""Pools of threads for work that computes before an answer: prompts, long prompts, grammars.

Each kind of work has its own threads and its own bounded queue, so that none waits for another kind. A job whose client
has left, or that waited too long, is dropped before it begins. The threads are daemons: none of them keeps the process
alive when the server ends.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_pack.runtime.serve.requests import QueueFullError

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    """A call, and the future in the event loop that gets what it returns or raises."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Any]"

    def finish(self, value: Any, fault: BaseException | None) -> None:
        """Brings the result to the event loop; nobody gets it if the client has left."""

        def give() -> None:
            if self.answer.done():
                return
            if fault is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(fault)

        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(give)


@dataclass(eq=False, slots=True)
class WorkPool:
    """Runs calls in a few threads, first come, first served.

    `name`: what it does, for messages.   `num_threads`: calls that run at once.   `most_waiting`: calls that may wait
    for a thread; more are refused.   `deadline_s`: how long a call may wait and run; then its client gets an answer,
    although a call that runs cannot be ended.
    """

    name: str
    num_threads: int
    most_waiting: int
    deadline_s: float
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: deque[_Job] = field(default_factory=deque)
    _num_started: int = 0
    _num_running: int = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Returns or raises what a call does in one of the threads.

        Cancelling it, as when the client leaves, drops a call that has not begun.
        Raises:  QueueFullError if too many calls wait, or this one waited or ran for too long.
        """
        loop = asyncio.get_running_loop()
        job = _Job(call, loop, loop.create_future())
        with self._changed:
            if self._num_running + len(self._waiting) >= self.num_threads + self.most_waiting:
                raise QueueFullError(f"{self.most_waiting} {self.name} are waiting already; try again later")
            self._waiting.append(job)
            if self._num_running + len(self._waiting) > self._num_started < self.num_threads:
                self._num_started += 1
                threading.Thread(target=self._work, name=f"moe-serve {self.name}", daemon=True).start()
            self._changed.notify()
        try:
            async with asyncio.timeout(self.deadline_s):
                value: T = await job.answer
                return value
        except TimeoutError as fault:
            if job.answer.done() and not job.answer.cancelled():
                raise  # the call's own
            raise QueueFullError(
                f"the server did not get to it within {self.deadline_s:g} seconds, because of other {self.name}; "
                "try again later"
            ) from fault
        finally:
            with self._changed, suppress(ValueError):  # it has begun
                self._waiting.remove(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                job = self._waiting.popleft()
                self._num_running += 1
            value, fault = None, None
            try:
                value = job.call()
            except BaseException as raised:  # the client's answer says it, whatever it is
                fault = raised
            with self._changed:
                self._num_running -= 1
            job.finish(value, fault)
            del job, value, fault  # what it holds may be large


def _prompts() -> WorkPool:
    return WorkPool("prompts", num_threads=2, most_waiting=256, deadline_s=120)


def _long_prompts() -> WorkPool:
    return WorkPool("long prompts", num_threads=1, most_waiting=8, deadline_s=120)


def _grammars() -> WorkPool:
    return WorkPool("grammars", num_threads=1, most_waiting=16, deadline_s=60)


@dataclass(frozen=True, slots=True)
class Workers:
    """The pools of a server. A grammar computes on one core for seconds, and a long prompt takes much memory."""

    prompts: WorkPool = field(default_factory=_prompts)
    long_prompts: WorkPool = field(default_factory=_long_prompts)
    grammars: WorkPool = field(default_factory=_grammars)
