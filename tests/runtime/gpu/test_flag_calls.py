"""Calls of the CPU through a flag: answers, limits, faults, closing, forks; and the driver's operations that call."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import case
from support.native import kernels_limited_to
from support.waiting import HANG_S, wait_until
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.cpu import host_share
from moe_pack.runtime.cpu.host_share import FlagCalls
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.cpu_share import Exchange, TierShare
from moe_pack.runtime.gpu.kernels import elementwise

T, PLACES, K, D = 2, 4, 2, 3
LIMIT_S = 0.05  # that is over in tests where nobody answers


@pytest.fixture(autouse=True)
def native() -> None:
    kernels_limited_to("portable")


def ask(flag: Tensor, number: int) -> None:
    """Writes the number and waits, as a GPU does, with the interpreter's lock now and then."""
    flag[0] = number
    wait_until(lambda: not flag.item())


def ask_with_the_lock(flag: Tensor, number: int) -> None:
    """Keeps the interpreter's lock meanwhile, as a library may that waits for the GPU."""
    word, usual = flag.numpy(), sys.getswitchinterval()
    sys.setswitchinterval(HANG_S)
    try:
        word[0] = number
        while word[0]:
            pass
    finally:
        sys.setswitchinterval(usual)


class Opened:
    """Calls that note which places are computed; `hold` keeps the thread in the next one until `go_on`."""

    def __init__(self, limit_s: float = HANG_S) -> None:
        self.flag, self.y = torch.zeros(1, dtype=torch.int32), torch.full((T, D), torch.nan)
        self.counts = torch.ones(T * PLACES, K, dtype=torch.int32)
        self.computed, self._free = list[int](), threading.Event()
        self._free.set()
        self.calls = FlagCalls(self.flag, self.counts, self.y, self._compute, limit_s)

    def _compute(self, at: int) -> None:
        self.computed.append(at)
        assert self._free.wait(HANG_S)
        self.y[at // PLACES].fill_(at)

    def call(self, place: int, num_tokens: int = 1, ask: Callable[[Tensor, int], None] = ask) -> list[float]:
        """Returns each token's answer, of which all columns are alike."""
        ask(self.flag, self.calls.number(place, num_tokens))
        assert all(row.isnan().all() or (row == row[0]).all() for row in self.y)
        return self.y[:num_tokens, 0].tolist()

    def start(self, place: int) -> threading.Thread:
        thread = threading.Thread(target=self.call, args=(place,))
        thread.start()
        return thread

    def hold(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()

    def close(self) -> None:
        self.go_on()
        self.calls.close()


def test_a_thread_computes_what_is_called_for() -> None:
    for given in (ask, elementwise.ask):
        with case(given), closing(Opened()) as opened:
            assert [opened.call(place, ask=given) for place in (2, 0, 3, 3)] == [[2.0], [0.0], [3.0], [3.0]]
            assert opened.computed == [2, 0, 3, 3]
            assert opened.calls.take_unanswered() is None


def test_a_call_is_of_as_many_tokens_as_it_says() -> None:
    with closing(Opened()) as opened:
        assert opened.call(3, 1) == [3.0] and opened.y[1].isnan().all()
        assert opened.call(3, 2) == [3.0, 3.0 + PLACES]
        assert opened.computed == [3, 3, 3 + PLACES]


def test_where_nothing_is_left_to_the_cpu_the_thread_is_not_asked() -> None:
    with closing(Opened()) as opened:
        opened.counts[1] = 0
        assert opened.call(1) == [0.0] and not opened.computed
        opened.counts[1, K - 1] = -1  # a whole expert
        assert opened.call(1) == [1.0] and opened.computed == [1]
        opened.counts[1] = 0
        assert opened.call(1, 2) == [0.0, 1.0 + PLACES], "the other token's is computed"


def test_a_call_that_is_not_answered_ends_and_so_do_those_behind_it() -> None:
    with closing(Opened(LIMIT_S)) as opened:
        opened.hold()
        for place in (1, 2, 3):
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
        wait_until(lambda: opened.y[0].tolist() == [1.0] * D)
        assert opened.call(2) == [0.0] and opened.calls.take_unanswered() is None


def test_who_waits_for_a_call_with_the_interpreters_lock_does_not_wait_forever() -> None:
    """The thread that computes cannot get the lock: the watchdog, which needs none, answers."""
    with closing(Opened(LIMIT_S)) as opened:
        opened.call(1, ask=ask_with_the_lock)
        assert opened.calls.take_unanswered() == 1


def test_a_call_with_nothing_left_needs_no_interpreters_lock() -> None:
    with closing(Opened()) as opened:
        opened.counts.zero_()
        for place in (1, 1, 0):
            assert opened.call(place, ask=ask_with_the_lock) == [0.0]
        assert opened.calls.take_unanswered() is None


def test_a_number_of_no_call_is_a_fault() -> None:
    with closing(Opened()) as opened:
        for number in (-1, T * PLACES + 1, 2**31 - 1, -(2**31)):
            with case(number):
                ask(opened.flag, number)
                assert opened.calls.take_unanswered() == 0
        assert opened.call(1, T) == [1.0, 1.0 + PLACES]


def test_a_call_that_waits_ends_when_the_calls_are_closed() -> None:
    opened = Opened()
    opened.hold()
    waiting = opened.start(1)
    wait_until(lambda: opened.computed == [1])
    closer = threading.Thread(target=opened.calls.close)
    closer.start()
    waiting.join()  # although the thread is still at its place
    assert closer.is_alive()
    opened.go_on()
    closer.join()
    opened.calls.close()


def test_a_child_that_is_forked_while_a_call_waits_closes_what_it_has_not() -> None:
    with closing(Opened()) as opened:
        opened.hold()
        waiting = opened.start(1)
        wait_until(lambda: opened.computed == [1])
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs is ended
            host_share._native.close_calls(opened.calls.opened)
            os._exit(0 if opened.calls.take_unanswered() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        opened.go_on()
        waiting.join()
        assert opened.call(2) == [2.0], "the parent goes on"


def test_wrong_arguments_are_refused() -> None:
    flag, right = torch.zeros(1, dtype=torch.int32), torch.ones(T * PLACES, K, dtype=torch.int32)
    y = torch.ones(T, D)
    for found_flag, counts, found_y, limit_s, message in (
        (flag, torch.ones(PLACES, 257, dtype=torch.int32), y, 1.0, "k: expected 1 to 256"),
        (flag, right[:3], y, 1.0, "counts: 6 values, expected 4"),
        (flag, right, torch.ones(1, 0), 1.0, "y: sizes out of range"),
        (torch.zeros(2, dtype=torch.int32), right, y, 1.0, "flag: 2 values, expected 1"),
        (flag, right, y, 1e6, "limit: expected"),
    ):
        with case(message), pytest.raises(ValueError, match=message):
            FlagCalls(found_flag, counts, found_y, print, limit_s)


def test_without_native_code_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_share, "_native", None)
    with pytest.raises(RunError, match=r"experts from the disk on a GPU: native kernels .* --ram"):
        Opened()


def test_two_threads_have_no_race() -> None:
    """A fake GPU replays graphs under ThreadSanitizer: right calls, late ones, faults, closing while it waits."""
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("no g++ and make: nothing can be built with ThreadSanitizer")
    command = ["make", "-C", str(Path(__file__).parents[2] / "native"), "flags"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


# ---- the CPU's own engine behind them -------------------------------------------------------------------------------


class Tier:
    """Experts whose output is the layer's number, or what `fault` raises."""

    def __init__(self) -> None:
        self.layers = list[int]()
        self.act: Callable[[], object] = lambda: None

    def run_experts(self, layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self.layers.append(layer)
        self.act()
        return torch.full_like(x, layer) + experts.sum() + x


def share_of(tier: Tier, given: devices.Ask | None, limit_s: float = HANG_S) -> tuple[TierShare, Exchange]:
    """A share of two tokens with two turns of two layers."""
    counts, whole = torch.ones(2 * T, PLACES // 2, K, dtype=torch.int32), torch.zeros(0)
    chosen = torch.tensor([[5, 6], [1, 2]], dtype=torch.int32)
    x = torch.tensor([[0.0], [100.0]]).expand(T, D).contiguous()
    flag = torch.zeros(1, dtype=torch.int32)
    exchange = Exchange(x, torch.ones(T, K), chosen, torch.zeros(T, D), whole, counts, whole, (), flag)
    experts: Any = tier
    return TierShare(experts, exchange, given, limit_s), exchange


def test_experts_are_the_same_in_the_thread_and_at_once() -> None:
    for given in (ask, elementwise.ask, None):
        share, exchange = share_of(Tier(), given)
        with case(given), closing(share):
            exchange.counts[1, 1, 0] = 0
            found = []
            for turn, layer_idx in ((0, 0), (0, 1), (1, 1)):
                share.launch(turn, layer_idx)
                found.append(exchange.y[0, 0].item())
            share.check()
            assert found == [11.0, 12.0, 7.0]
            share.launch(1, 1, 2)
            share.check()
            assert exchange.y[:, 0].tolist() == [7.0, 104.0]
            assert share.busy_seconds() > 0


def test_a_fault_of_the_experts_is_raised_once_and_the_thread_lives() -> None:
    for given in (ask, None):
        tier = Tier()
        share, exchange = share_of(tier, given)
        with case(given), closing(share):
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
    share, _ = share_of(tier, ask, LIMIT_S)
    with closing(share):
        tier.act = lambda: free.wait(HANG_S)
        share.launch(1, 1)
        with pytest.raises(RunError, match=r"MoE layer 1: the GPU waited 0.05 s for the CPU.*; .* give more --ram"):
            share.check()
        free.set()


# ---- the driver's operations ----------------------------------------------------------------------------------------


class Graph:
    """A graph of the operations that were captured; a thread replays it."""

    def __init__(self, driver: "Driver") -> None:
        self._driver, self.operations = driver, list[tuple[int, int, int, int]]()

    def replay(self) -> None:
        self._driver.start(self.operations)


class Driver:
    """A driver's library without a GPU: `fault` is what the function returns."""

    def __init__(self) -> None:
        self.fault, self.waits, self.ends_waits = 0, True, True
        self.threads = list[threading.Thread]()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self.cuStreamBatchMemOp_v2 = prototype(self._add)
        self.capturing: Graph | None = None

    def _add(self, stream: int, count: int, operations: int, flags: int) -> int:
        """Reads the structures by their bytes, as `CUstreamBatchMemOpParams` has them."""
        assert (stream, flags) == (7, 0) and self.capturing is not None
        for number in range(0 if self.fault else count):
            raw = ctypes.string_at(operations + 48 * number, 48)
            operation, address, value = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8, 16))
            self.capturing.operations.append((operation, address, value, int.from_bytes(raw[24:28], "little")))
        return self.fault

    @contextmanager
    def graph(self, graph: Graph) -> Iterator[None]:
        self.capturing = graph
        yield
        self.capturing = None

    def start(self, operations: list[tuple[int, int, int, int]]) -> None:
        self.threads.append(threading.Thread(target=self._run, args=(operations,), daemon=True))
        self.threads[-1].start()

    def _run(self, operations: list[tuple[int, int, int, int]]) -> None:
        for operation, address, value, flags in operations:
            word = ctypes.c_int32.from_address(address)
            if operation == 2:
                assert flags == 0
                word.value = value
            elif self.waits:
                assert (operation, flags) == (1, 1), "a wait for an equal value"
                wait_until(lambda word=word, value=value: word.value == value and self.ends_waits)  # type: ignore[misc]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Makes it the library that `devices` loads, and torch's CUDA."""
        event = SimpleNamespace(record=lambda: None, query=lambda: not self.threads[-1].is_alive())
        cuda = SimpleNamespace(
            CUDAGraph=lambda: Graph(self),
            graph=self.graph,
            Event=lambda: event,
            current_stream=lambda: SimpleNamespace(cuda_stream=7),
            synchronize=lambda: None,
        )
        zeros = lambda size, dtype=None, **_: torch.zeros(size, dtype=dtype)  # noqa: E731
        patch.setattr(devices, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, int32=torch.int32, empty=torch.empty))
        patch.setattr(devices.ctypes, "CDLL", lambda name: self)


def test_a_graph_of_the_drivers_operations_calls_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.install(monkeypatch)
    given = devices.driver_ask()
    assert given is not None
    with closing(Opened()) as opened:
        graph = Graph(driver)
        with driver.graph(graph):
            for place in (2, 3):
                given(opened.flag, opened.calls.number(place, 2))
        for _ in range(3):
            opened.y.fill_(torch.nan)
            graph.replay()
            driver.threads[-1].join()
            assert opened.y[:, 0].tolist() == [3.0, 3.0 + PLACES]
        assert opened.computed == 3 * [2, 2 + PLACES, 3, 3 + PLACES]


def test_a_driver_without_such_operations_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing, running = Driver(), Driver()
    refusing.fault, running.waits = 801, False
    for driver in (refusing, running):
        with monkeypatch.context() as patch, case(driver.fault):
            driver.install(patch)
            assert devices.driver_ask() is None
    with monkeypatch.context() as patch:
        patch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace())
        assert devices.driver_ask() is None

    def missing(name: str) -> Any:
        raise OSError(name)

    with monkeypatch.context() as patch:
        patch.setattr(devices.ctypes, "CDLL", missing)
        assert devices.driver_ask() is None


def test_a_gpu_that_does_not_see_the_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.ends_waits = False
    driver.install(monkeypatch)
    monkeypatch.setattr(devices, "_ANSWER_SECONDS", LIMIT_S)
    with pytest.raises(RunError, match="the GPU does not see what the CPU writes; use --misses pull"):
        devices.driver_ask()
    driver.ends_waits = True
