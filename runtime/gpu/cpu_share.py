"""The CPU's share of a token: the experts, or their neurons, whose records are not in GPU memory.

The GPU writes what it leaves to the CPU into page-locked memory (`Exchange`), then a call's number to a flag there, and
waits until the CPU has set the flag back. `PoolShare` computes experts in host memory: no Python runs. `TierShare`
is for packs larger than host memory: the CPU's own engine, with its cache over the disk, runs in a thread of Python.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack, RunError
from moe_pack.runtime.cpu import ExpertRows, Kernels, extent_rows, host_share
from moe_pack.runtime.gpu import devices, placements
from moe_pack.runtime.gpu.kernels.tables import LeftToCpu
from moe_pack.runtime.model import ExpertRunner
from moe_pack.runtime.offload.split import fastest

Tokens: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
MEASURED_TOKENS = (1, 4, 16, 64)  # for 4 and more the kernels decode a row once, so that times are no line
_MEASURED_TIMES, _MEASURED_BYTES = 5, 64 << 20
# For which the GPU waits for a layer: far more than slow disks take.
_MOST_LAYER_SECONDS = 120.0
_LISTED_STEP = 8  # every eighth neuron is listed where the CPU's rate is measured


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The memory that a graph of T tokens and the CPU share, page-locked; L layers of k experts with f neurons.

    Each token has lists of its own for each turn: those of token t and turn u stand at `t * NUM_TURNS + u`, so that the
    first token's are at `u`.
    """

    x: Tensor  # float32 [T, d], the input of a layer's experts
    weights: Tensor  # float32 [T, k]
    experts: Tensor  # int32 [T, k]
    y: Tensor  # float32 [T, d], the sum of what the CPU has computed
    a: Tensor  # float32 [T, k, f]
    counts: Tensor  # int32 [T * turns, L, k], of all of `left`; so is the next
    neurons: Tensor  # int32 [T * turns, L, k, f]
    left: tuple[tuple[LeftToCpu, ...], ...]  # [T * turns][L]
    flag: Tensor  # int32 [1], as of `host_share.FlagCalls`

    @classmethod
    def allocate(cls, pack: Pack, placement: placements.GpuPlacement, is_locked: bool, num_rows: int = 1) -> "Exchange":
        """Allocates the memory of so many tokens, page-locked if a GPU uses it."""
        d, k = pack.spec.hidden_size, pack.spec.router.num_experts_per_tok
        num_layers, f = len(placement.slot_bytes), pack.spec.expert.intermediate_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=is_locked)

        a, num_lists = zeros(num_rows, k, f, dtype=torch.float32), num_rows * placements.NUM_TURNS
        counts, neurons = zeros(num_lists, num_layers, k), zeros(num_lists, num_layers, k, f)
        left = tuple(
            tuple(LeftToCpu(counts[at, l], neurons[at, l], a[at // placements.NUM_TURNS]) for l in range(num_layers))
            for at in range(num_lists)
        )
        x, y, weights = (zeros(num_rows, n, dtype=torch.float32) for n in (d, d, k))
        return cls(x, weights, zeros(num_rows, k), y, a, counts, neurons, left, zeros(1))

    def of_row(self, row: int) -> "Exchange":
        """Returns the memory of one of the tokens, as that of a graph of one: T is 1."""
        each = {name: getattr(self, name)[row : row + 1] for name in ("x", "weights", "experts", "y", "a")}
        turns = slice(row * placements.NUM_TURNS, (row + 1) * placements.NUM_TURNS)
        return Exchange(
            **each,
            counts=self.counts[turns],
            neurons=self.neurons[turns],
            left=self.left[turns],
            flag=self.flag,
        )


class CpuShare:
    """A computation of the share, and its calls from a token's launches. Owns the thread that answers: `close` it.

    Args:    serve: computes the share of a token's place, as in `host_share.FlagCalls`.   ask: adds to torch's current
             stream that the GPU calls the CPU and waits; None without a GPU, where the share is computed at once.
             limit_s: how long the GPU waits.
    """

    adds_output: bool  # whether `y` is in the layer's own coordinates, and not in those of its rotated experts
    waited_for: str  # by a call that is not answered in time, and what to do

    def __init__(
        self,
        exchange: Exchange,
        serve: host_share.HostShare | Callable[[int], None],
        ask: devices.Ask | None,
        limit_s: float = _MOST_LAYER_SECONDS,
    ) -> None:
        counts, self._ask = exchange.counts.flatten(0, 1), ask
        self._num_layers, self._num_places = exchange.counts.shape[1], len(counts) // len(exchange.y)
        self._run = serve.run if isinstance(serve, host_share.HostShare) else serve
        self._calls: host_share.FlagCalls | None = None
        if ask is not None:
            self._calls = host_share.FlagCalls(exchange.flag, counts, exchange.y, serve, limit_s)

    def launch(self, turn: int, layer_idx: int, num_rows: int = 1) -> None:
        """Adds the first rows' computation of a layer to torch's current stream."""
        place = turn * self._num_layers + layer_idx
        if self._ask is not None and self._calls is not None:
            self._ask(self._calls.flag, self._calls.number(place, num_rows))
            return
        for row in range(num_rows):
            self._run(row * self._num_places + place)

    def check(self) -> None:
        """Raises a fault since the last call."""
        if self._calls is not None and (place := self._calls.take_unanswered()) is not None:
            raise RunError(
                f"MoE layer {place % self._num_layers}: the GPU waited {self._calls.limit_s:g} s for the CPU, which "
                f"{self.waited_for}"
            )

    def busy_seconds(self) -> float:
        """Returns the seconds in which the CPU had work, since the share was opened."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread; no graph that calls may run any more."""
        if self._calls is not None:
            self._calls.close()


class PoolShare(CpuShare):
    """The native kernels compute from host memory. Owns nothing of its arguments."""

    adds_output = False
    waited_for = "computes the layer's experts; end programs that take all CPUs, or use --misses pull"

    def __init__(
        self, pack: Pack, host: devices.HostArena, kernels: Kernels, exchange: Exchange, ask: devices.Ask | None
    ) -> None:
        buffers = host_share.HostShareBuffers(
            x=exchange.x,
            weights=exchange.weights,
            experts=exchange.experts,
            counts=exchange.counts.flatten(0, 1),
            neurons=exchange.neurons.flatten(0, 1),
            a=exchange.a,
            y=exchange.y,
        )
        layers = [host_rows(pack, host, layer_idx) for layer_idx in range(len(pack.layout.experts))]
        self._share = host_share.HostShare(kernels, layers, buffers)
        super().__init__(exchange, self._share, ask)

    def check(self) -> None:  # noqa: D102  # as of the base class
        self._share.check()
        super().check()

    def busy_seconds(self) -> float:  # noqa: D102  # as of the base class
        return self._share.counts().busy_ns / 1e9

    def close(self) -> None:  # noqa: D102  # as of the base class
        super().close()
        self._share.close()


class TierShare(CpuShare):
    """The CPU's own engine computes whole experts, which it reads from the disk into its cache."""

    adds_output = True
    waited_for = "reads the layer's experts from the disk and computes them; use a faster disk, or give more --ram"

    def __init__(
        self, tier: ExpertRunner, exchange: Exchange, ask: devices.Ask | None, limit_s: float = _MOST_LAYER_SECONDS
    ) -> None:
        self._tier, self._exchange = tier, exchange
        self._fault: BaseException | None = None
        self._busy_seconds = 0.0
        super().__init__(exchange, self._compute, ask, limit_s)

    def check(self) -> None:  # noqa: D102  # as of the base class
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        super().check()

    def busy_seconds(self) -> float:  # noqa: D102  # as of the base class
        return self._busy_seconds

    @torch.inference_mode()
    def _compute(self, at: int) -> None:
        """Computes the share of a token's place."""
        there, row = self._exchange, at // self._num_places
        is_left = there.counts.flatten(0, 1)[at] != 0
        y = there.y[row].zero_()
        if self._fault is not None or not is_left.any():
            return
        started = time.perf_counter()
        try:
            experts, weights = (each[row : row + 1, is_left] for each in (there.experts, there.weights))
            x, layer_idx = there.x[row : row + 1].clone(), at % self._num_layers
            y.copy_(self._tier.run_experts(layer_idx, x, experts.long(), weights)[0])
        except BaseException as fault:  # `check` raises it
            self._fault = fault
        self._busy_seconds += time.perf_counter() - started


def host_rows(pack: Pack, host: devices.HostArena, layer_idx: int) -> list[ExpertRows]:
    """Returns a layer's experts in host memory as the kernels take them."""
    selector, function, thresholds = (
        pack.manifest.selector,
        pack.spec.expert_function(layer_idx),
        pack.thresholds[layer_idx],
    )
    return [
        extent_rows(layout, selector, function, float(threshold), host.extent(layer_idx, e, layout.num_bytes).numpy())
        for e, (layout, threshold) in enumerate(zip(pack.layout.experts[layer_idx], thresholds, strict=True))
    ]


class PromptShare:
    """Computes some missing experts of long passes, while the link brings the others. Owns a thread: `close` it."""

    def __init__(self, pack: Pack, host: devices.HostArena, kernels: Kernels, rates: "Rates") -> None:
        self._sizes = [[expert.num_bytes for expert in layer] for layer in pack.layout.experts]
        self._rows = [host_rows(pack, host, layer_idx) for layer_idx in range(len(pack.layout.experts))]
        self._kernels, self._rates = kernels, rates
        self._thread = ThreadPoolExecutor(1, "experts")

    def choose(
        self, layer_idx: int, experts: Sequence[int], num_tokens: Sequence[int], num_bytes: Sequence[int]
    ) -> list[int]:
        """Returns which of a layer's missing experts the CPU computes, by the measured rates.

        Args:    num_tokens: of each expert.   num_bytes: of each, that the GPU lacks.
        """
        sizes, rates = self._sizes[layer_idx], self._rates
        computing = [rates.computing(sizes[expert], n) for expert, n in zip(experts, num_tokens, strict=True)]
        computed = fastest(computing, [n / rates.link for n in num_bytes]).computed
        return [expert for place, expert in enumerate(experts) if place in computed]

    def start(self, layer_idx: int, x: Tensor, jobs: Sequence[tuple[int, Tokens, Floats]]) -> Future[Tensor]:
        """Begins to compute experts, and returns their weighted sum later: float32 [T, d], for x float32 [T, d].

        Args:    jobs: each expert's number, tokens and router weights.
        """
        works = [(self._rows[layer_idx][expert], tokens, weights) for expert, tokens, weights in jobs]
        return self._thread.submit(self._kernels.experts, x, works)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of link and CPU, measured."""

    link: float  # bytes a second that the link brings
    cpu: float  # bytes a second of records that the CPU computes for one token
    prompt: tuple[float, ...]  # seconds for a byte of a whole expert on the CPU, with each of `MEASURED_TOKENS`

    @property
    def pulled_share(self) -> float:
        """The share of missing bytes that the link brings in the time in which the CPU computes the others."""
        return self.link / (self.link + self.cpu)

    def computing(self, num_bytes: int, num_tokens: int) -> float:
        """Returns the CPU's seconds for an expert of so many bytes: on lines between measured times."""
        known, times = (0, *MEASURED_TOKENS), (0.0, *self.prompt)
        beyond = max(num_tokens / known[-1], 1.0)
        return num_bytes * beyond * float(np.interp(num_tokens, known, times))

    @classmethod
    def measure(cls, pack: Pack, host: devices.HostArena, kernels: Kernels, device: torch.device) -> "Rates":
        """Measures all, each the median of some runs."""
        return cls(link_rate(host, device), _cpu_rate(pack, host, kernels), _prompt_times(pack, host, kernels))


def link_rate(host: devices.HostArena, device: torch.device) -> float:
    """Returns the bytes a second that come over the link, as measured now."""
    source = host.rows(0)[:_MEASURED_BYTES]
    target = torch.empty_like(source, device=device)

    def bring() -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return len(source) / _median_seconds([bring] * _MEASURED_TIMES)


def _cpu_rate(pack: Pack, host: devices.HostArena, kernels: Kernels) -> float:
    """Returns the bytes of records a second that the CPU computes for one token, call by call, as tokens do it.

    Each of k experts has an eighth of its neurons listed. The layers follow one another, so that no cache has the rows.
    """
    spec, num_layers = pack.spec, len(pack.layout.experts)
    k, f, d = spec.router.num_experts_per_tok, spec.expert.intermediate_size, spec.hidden_size
    listed = torch.arange(0, f, _LISTED_STEP, dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    buffers = host_share.HostShareBuffers(
        x=torch.randn(1, d, generator=draw),
        weights=torch.ones(1, k),
        experts=torch.randperm(spec.router.num_experts, generator=draw)[:k].int().view(1, k),
        counts=torch.full((num_layers, k), len(listed), dtype=torch.int32),
        neurons=torch.zeros(num_layers, k, f, dtype=torch.int32),
        a=torch.ones(1, k, f),
        y=torch.zeros(1, d),
    )
    buffers.neurons[..., : len(listed)] = listed
    share = host_share.HostShare(
        kernels, [host_rows(pack, host, layer_idx) for layer_idx in range(num_layers)], buffers
    )
    try:
        seconds = _median_seconds([partial(share.run, layer_idx) for layer_idx in range(num_layers)])
        share.check()
        num_bytes = share.counts().record_bytes / (num_layers + 1)
    finally:
        share.close()
    return num_bytes / seconds


def _prompt_times(pack: Pack, host: devices.HostArena, kernels: Kernels) -> tuple[float, ...]:
    """Returns the CPU's seconds for a byte of a whole expert, with each of `MEASURED_TOKENS`."""
    sizes = [expert.num_bytes for expert in pack.layout.experts[0][: _MEASURED_TIMES + 1]]
    all_rows = host_rows(pack, host, 0)[: _MEASURED_TIMES + 1]
    draw, times = torch.Generator().manual_seed(0), list[float]()
    for number in MEASURED_TOKENS:
        x = torch.randn(number, pack.spec.hidden_size, generator=draw)
        tokens, weights = np.arange(number), np.ones(number, np.float32)
        times.append(
            _median_seconds([partial(kernels.experts, x, [(rows, tokens, weights)]) for rows in all_rows], sizes)
        )
    return tuple(times)


def _median_seconds(actions: Sequence[Callable[[], object]], sizes: Sequence[int] | None = None) -> float:
    """Returns the median of the actions' seconds, each divided by its size if there are sizes."""
    actions[0]()  # the first run also loads memory and kernels
    taken = []
    for number, action in enumerate(actions):
        started = time.perf_counter()
        action()
        taken.append((time.perf_counter() - started) / (1 if sizes is None else sizes[number]))
    return sorted(taken)[len(taken) // 2]
