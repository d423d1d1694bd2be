"""The memory of a server's engine on GPUs: it is given back when nobody asks for anything, or when a client says so.

The scheduler's thread owns the engine, and calls everything here but `state` and `check_budget`. Memory changes between
requests: those that run end first, and those that come wait. A released engine keeps its host memory and its
measurements, so that its memory is soon taken again. Conversations in slots are lost: prompts are computed again.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from moe_pack.formats.base import errors
from moe_pack.runtime import Engine
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload.budgets import BudgetTooSmall
from moe_pack.runtime.serve.requests import RequestError


class NoMemoryError(errors.RunError):
    """The memory that an engine needs is not free now; others may give it back."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The memory of an engine since its last change."""

    budget_bytes: int  # of all GPUs; with which the memory is taken again, if it is given back
    used_bytes: int  # by this process, as the driver counts: context and loaded kernels stay
    is_released: bool
    seconds: float  # that the last change took


class EngineMemory:
    """Gives an engine's memory back and takes it again.

    Args:    engine: a live one; it stays the caller's.   idle_s: after so many seconds without a request the memory is
             given back; None: only when a client says so.   clock: returns seconds.
    """

    def __init__(
        self, engine: Engine, idle_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._idle_s, self._clock = engine, idle_s, clock
        self._used_at, self._lock = clock(), Lock()
        self._state = MemoryState(self._budget(), engine.used_bytes(), False, 0.0)

    def state(self) -> MemoryState:
        """Returns the state after the last change; any thread may call it."""
        with self._lock:
            return self._state

    @property
    def decoder(self) -> Decoder:
        """The model that runs."""
        decoder = self._engine.decoder
        assert isinstance(decoder, Decoder), "a model without an encoder"
        return decoder

    @property
    def drafts(self) -> Drafts | None:
        """The drafts; None if there are none."""
        return self._engine.drafts

    # ---- time without requests --------------------------------------------------------------------------------------

    def note_use(self) -> None:
        """Notes that a request has ended now."""
        self._used_at = self._clock()

    def idle_left(self) -> float | None:
        """Returns in how many seconds the memory is given back if nothing comes; None: it is not."""
        if self._idle_s is None or self._engine.is_released:
            return None
        return max(0.0, self._used_at + self._idle_s - self._clock())

    def is_as_asked(self, budget_bytes: int | None) -> bool:
        """Returns whether nothing has to change: for 0 it is released, else taken; None: within any budget."""
        is_released = self._engine.is_released
        return is_released if budget_bytes == 0 else not is_released and budget_bytes in (None, self._budget())

    def check_budget(self, budget_bytes: int | None) -> None:
        """Refuses a budget for several GPUs, as of `is_as_asked`. Raises: RequestError."""
        if budget_bytes and self._engine.facts.other_gpus:
            raise RequestError("budget: it divides the layers between several GPUs; start the server again", "budget")

    # ---- changes ----------------------------------------------------------------------------------------------------

    def release(self) -> MemoryState:
        """Gives the memory back; nothing but the engine may refer to the decoder or the drafts."""
        began = time.perf_counter()
        gc.unfreeze()  # cycles are found only so
        self._engine.release()
        return self._changed(began)

    def take(self, budget_bytes: int | None = None) -> MemoryState:
        """Takes the memory, within another budget if one is given.

        Raises:  RequestError if that budget is too small: the engine is as before; NoMemoryError if the memory is not
                 free: then it stays given back.
        """
        began, was_released = time.perf_counter(), self._engine.is_released
        if not was_released:
            self.release()
        try:
            self._engine.take(budget_bytes)
        except errors.RunError as fault:
            if budget_bytes is not None and not was_released:
                self._take_as_before()
            if isinstance(fault, BudgetTooSmall):
                raise RequestError(str(fault), "budget") from fault
            raise NoMemoryError(str(fault)) from fault
        finally:
            state = self._changed(began)
        return state

    def _take_as_before(self) -> None:
        try:
            self._engine.take()
        except errors.RunError as fault:
            raise NoMemoryError(f"the engine could not take its memory as before: {fault}") from fault

    def _budget(self) -> int:
        facts = self._engine.facts
        return sum(each.use.budget for each in (facts.gpu, *facts.other_gpus) if each is not None)

    def _changed(self, began: float) -> MemoryState:
        engine = self._engine
        if not engine.is_released:
            gc.collect()
        gc.freeze()  # as after the start
        state = MemoryState(self._budget(), engine.used_bytes(), engine.is_released, time.perf_counter() - began)
        with self._lock:
            self._state = state
        return state
