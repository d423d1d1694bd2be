"""Calls from the driver's thread that a thread of Python answers: answers, limits, faults, closing, forks."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from support.native import kernels_limited_to
from support.waiting import HANG_S, wait_until
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.cpu import host_share
from moe_pack.runtime.cpu.host_share import WorkerCalls
from moe_pack.runtime.gpu.cpu_share import Exchange, TierShare

PLACES, K, D = 4, 2, 3
LIMIT_S = 0.05  # that is over in tests where nobody answers
SYSTEM = ctypes.CDLL(None)
LOCKED_SYSTEM = ctypes.PyDLL(None)  # the same functions, which keep the interpreter's lock


@pytest.fixture(autouse=True)
def native() -> None:
    kernels_limited_to("portable")


class SystemThread:
    """A thread that Python did not start, as the driver's, in which a C function runs."""

    def __init__(self, function: int, argument: int, keeps_lock: bool = False) -> None:
        self._thread = ctypes.c_ulong()
        given = (ctypes.byref(self._thread), None, ctypes.c_void_p(function), ctypes.c_void_p(argument))
        assert (LOCKED_SYSTEM if keeps_lock else SYSTEM).pthread_create(*given) == 0

    def join(self, keeps_lock: bool = False) -> None:
        assert (LOCKED_SYSTEM if keeps_lock else SYSTEM).pthread_join(self._thread, None) == 0


class Opened:
    """Calls that note which places are computed; `hold` keeps the thread in the next one until `go_on`."""

    def __init__(self, limit_s: float = HANG_S) -> None:
        self.counts, self.y = torch.ones(PLACES, K, dtype=torch.int32), torch.full((D,), torch.nan)
        self.computed, self._free = list[int](), threading.Event()
        self._free.set()
        self.calls = WorkerCalls(self.counts, self.y, self._compute, limit_s)

    def _compute(self, place: int) -> None:
        self.computed.append(place)
        assert self._free.wait(HANG_S)
        self.y.fill_(place)

    def start(self, place: int, keeps_lock: bool = False) -> SystemThread:
        return SystemThread(*self.calls.function(place), keeps_lock)

    def call(self, place: int) -> list[float]:
        self.start(place).join()
        return list(self.y.tolist())

    def hold(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()

    def close(self) -> None:
        self.go_on()
        self.calls.close()


@contextmanager
def never_switching() -> Iterator[None]:
    """Lets no other thread of Python run until this one waits."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(HANG_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def test_a_thread_computes_what_is_called_for() -> None:
    with closing(Opened()) as opened:
        assert [opened.call(place) for place in (2, 0, 3, 3)] == [[2.0] * D, [0.0] * D, [3.0] * D, [3.0] * D]
        assert opened.computed == [2, 0, 3, 3]
        assert opened.calls.take_unanswered() is None


def test_calls_at_the_same_time_are_all_answered() -> None:
    with closing(Opened()) as opened:
        threads = [opened.start(place) for place in range(PLACES) for _ in range(5)]
        for thread in threads:
            thread.join()
        assert sorted(opened.computed) == sorted(list(range(PLACES)) * 5)


def test_where_nothing_is_left_to_the_cpu_the_thread_is_not_asked() -> None:
    with closing(Opened()) as opened:
        opened.counts[1] = 0
        assert opened.call(1) == [0.0] * D and not opened.computed
        opened.counts[1, K - 1] = -1  # a whole expert
        assert opened.call(1) == [1.0] * D and opened.computed == [1]


def test_a_call_that_is_not_answered_ends_and_so_do_those_behind_it() -> None:
    with closing(Opened(LIMIT_S)) as opened:
        opened.hold()
        opened.call(1)
        for place in (2, 3):
            opened.call(place)
        assert opened.computed == [1]
        assert opened.calls.take_unanswered() == 1
        assert opened.calls.take_unanswered() is None, "it is told once"


def test_an_answer_that_comes_late_is_not_that_of_the_next_call() -> None:
    with closing(Opened(LIMIT_S)) as opened:
        opened.hold()
        opened.call(1)
        assert opened.calls.take_unanswered() == 1
        opened.counts[2] = 0
        opened.call(2)  # its zeros would be overwritten, so that it waits for the thread too
        assert opened.calls.take_unanswered() == 2
        opened.go_on()
        wait_until(lambda: opened.y.tolist() == [1.0] * D)


def test_who_waits_for_a_call_with_the_interpreters_lock_does_not_wait_forever() -> None:
    """A main thread that waits for the GPU in a library that keeps the lock: nobody can answer meanwhile."""
    with closing(Opened(LIMIT_S)) as opened, never_switching():
        opened.start(1, keeps_lock=True).join(keeps_lock=True)
        assert opened.calls.take_unanswered() == 1


def test_a_call_with_nothing_left_needs_no_interpreters_lock() -> None:
    with closing(Opened()) as opened, never_switching():
        opened.counts.zero_()
        opened.start(1, keeps_lock=True).join(keeps_lock=True)
        assert opened.calls.take_unanswered() is None and opened.y.tolist() == [0.0] * D


def test_calls_that_wait_end_when_they_are_closed() -> None:
    opened = Opened()
    opened.hold()
    waiting = [opened.start(place) for place in (1, 2)]
    wait_until(lambda: len(opened.computed) == 1)
    closer = threading.Thread(target=opened.calls.close)
    closer.start()
    for thread in waiting:
        thread.join()  # although the thread is still at its first place
    assert closer.is_alive()
    opened.go_on()
    closer.join()
    opened.y.fill_(7)
    assert opened.call(3) == [7.0] * D and len(opened.computed) == 1, "nothing is called any more"
    opened.calls.close()


def test_a_child_that_is_forked_while_a_call_waits_closes_what_it_has_not() -> None:
    with closing(Opened()) as opened:
        opened.hold()
        waiting = opened.start(1)
        wait_until(lambda: opened.computed == [1])
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs is ended
            opened.calls.close()
            opened.calls.close()
            os._exit(0 if opened.calls.take_unanswered() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        opened.go_on()
        waiting.join()
        assert opened.call(2) == [2.0] * D, "the parent goes on"


def test_wrong_arguments_are_refused() -> None:
    right = (torch.ones(PLACES, K, dtype=torch.int32), torch.ones(D))
    for counts, y, limit_s, message in (
        (torch.ones(PLACES, 257, dtype=torch.int32), right[1], 1.0, "k: expected 1 to 256"),
        (right[0], torch.ones(0), 1.0, "y: sizes out of range"),
        (*right, 1e6, "limit: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            WorkerCalls(counts, y, print, limit_s)
    with closing(Opened()) as opened:
        for place in (-1, PLACES):
            with pytest.raises(ValueError, match="place: there is none of this number"):
                opened.calls.function(place)


def test_without_native_code_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_share, "_native", None)
    with pytest.raises(RunError, match=r"experts from the disk on a GPU: native kernels .* --ram"):
        Opened()


# ---- the CPU's own engine behind them -------------------------------------------------------------------------------


class Driver:
    """Calls at once, in a thread of the system, what a graph would."""

    def add(self, function: int, argument: int) -> None:
        SystemThread(function, argument).join()


class Tier:
    """Experts whose output is the layer's number, or what `fault` raises."""

    def __init__(self) -> None:
        self.layers = list[int]()
        self.act: Callable[[], object] = lambda: None

    def run_experts(self, layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self.layers.append(layer)
        self.act()
        return torch.full_like(x, layer) + experts.sum()


def share_of(tier: Tier, driver: Driver | None, limit_s: float = HANG_S) -> tuple[TierShare, Exchange]:
    """A share of two turns of two layers."""
    counts = torch.ones(2, PLACES // 2, K, dtype=torch.int32)
    whole = torch.zeros(0)
    chosen = torch.tensor([[5, 6]], dtype=torch.int32)
    exchange = Exchange(torch.ones(1, D), torch.ones(1, K), chosen, torch.zeros(1, D), whole, counts, whole, whole, ())
    given: Any = (tier, exchange, driver)
    return TierShare(*given, limit_s), exchange


def test_experts_are_the_same_in_the_thread_and_at_once() -> None:
    for driver in (Driver(), None):
        share, exchange = share_of(Tier(), driver)
        with closing(share):
            exchange.counts[1, 1, 0] = 0
            found = []
            for turn, layer_idx in ((0, 0), (0, 1), (1, 1)):
                share.launch(turn, layer_idx)
                found.append(exchange.y[0, 0].item())
            share.check()
            assert found == [11.0, 12.0, 7.0]
            assert share.busy_seconds() > 0


def test_a_fault_of_the_experts_is_raised_once_and_the_thread_lives() -> None:
    for driver in (Driver(), None):
        tier = Tier()
        share, exchange = share_of(tier, driver)
        with closing(share):
            tier.act = lambda: exec("raise SystemExit('no more')")
            share.launch(0, 0)
            share.launch(0, 1)
            assert tier.layers == [0] and not exchange.y.any(), "the token is lost: the rest of it is not computed"
            with pytest.raises(SystemExit, match="no more"):
                share.check()
            tier.act = lambda: None
            share.launch(0, 1)
            share.check()
            assert exchange.y[0, 0] == 12


def test_experts_that_do_not_come_say_which_layer_waited() -> None:
    tier, free = Tier(), threading.Event()
    share, _ = share_of(tier, Driver(), LIMIT_S)
    with closing(share):
        tier.act = lambda: free.wait(HANG_S)
        share.launch(1, 1)
        with pytest.raises(RunError, match=r"MoE layer 1: the GPU waited 0.05 s for the CPU.*; .* give more --ram"):
            share.check()
        free.set()
