"""The time of a call of the CPU in a graph, by the driver's operations and by the kernel that waits (part `demo`).

    kernel 1 -> call -> kernel 2 -> call -> ...        each kernel writes what the CPU needs, as in a layer

Nothing is left to the CPU, so that the thread only writes zeros. The time of the kernels alone is taken away. A call
may take `MOST_US` at most; `CALL_S` (convert/plan/machines.py) predicts it.
"""

from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.measuring import Clock, Results
from moe_pack.runtime.cpu.host_share import FlagCalls
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.kernels import elementwise

MOST_US = 6.0
_D, _K = 4096, 8
_CALLS = 48  # of a graph: layers of Qwen3-30B-A3B
_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LaunchCost:
    what: str
    us: float


def measure_calls(results: Results, clock: Clock) -> None:
    """Adds a row for each way to call, and a fault if the one that the engine takes is too slow."""
    is_locked, queues = not clock.is_rehearsal, devices.Queues(clock.device)
    number = 2 if clock.is_rehearsal else _CALLS

    def there(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=is_locked)

    handed = (there(1, _D), there(1, _K), there(1, _K, dtype=torch.int32))
    x, weights, experts = (each.to(clock.device) for each in handed)
    flag, counts = there(1, dtype=torch.int32), there(1, _K, dtype=torch.int32)

    def hand_over() -> None:
        elementwise.hand_over(x, weights, experts, *handed)

    def call(ask: devices.Ask) -> None:
        hand_over()
        with queues.forked("cpu"):
            ask(flag, calls.number(0, 1))
        queues.join("cpu")

    alone_s = clock.graphed([hand_over] * number)
    results.add(LaunchCost("kernel that writes what the CPU needs, node of a graph", 1e6 * alone_s))
    by_driver = None if clock.is_rehearsal else devices.driver_ask()
    ways = {"the driver": by_driver, "a kernel": elementwise.ask}
    with closing(FlagCalls(flag, counts, there(1, _D), lambda at: None, _LIMIT_S)) as calls:
        found_us = {}
        for name, ask in ways.items():
            if ask is None:
                continue
            found_us[name] = 1e6 * (clock.graphed([partial(call, ask)] * number) - alone_s)
            results.add(LaunchCost(f"call of the CPU by {name}, between two kernels", found_us[name]))
            if calls.take_unanswered() is not None:
                results.fail(f"calls by {name}", f"the GPU waited {_LIMIT_S:g} s for the CPU")
    name, taken_us = next(iter(found_us.items()))
    if taken_us > MOST_US and not clock.is_rehearsal:
        results.fail("calls of the CPU", f"by {name} one takes {taken_us:.1f} us, expected at most {MOST_US:g} us")
