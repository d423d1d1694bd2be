"""The speed of a pack before it exists, by measured rates: what every device has in common.

    seconds of a token = fixed + dense bytes / rate + sum over layers of (experts / rate, while missing bytes are read)

A tier is fast memory over slower memory, as a planner sees it: it estimates how fast a pack would be within its budget,
and what an expert costs to run and to fetch. `cpu_speed.CpuTier` is host memory over the disk, as `moe-run --budget`
runs a pack; `gpu_speed.GpuTier` is the memory of a GPU over host memory, as `moe-run --device cuda` runs it.

An estimate is of the steady state: tokens are decoded one by one, after the cache has filled. Prefill is not estimated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.convert.plan import machines
from moe_pack.formats.pack import layouts
from moe_pack.runtime import DiskFacts, offload
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets

Array = NDArray[Any]
Floats = NDArray[np.float64]


def drawn_passes(popularity: Array, num_active: int, num_tokens: int, seed: int = 0) -> offload.Passes:
    """Draws routes independently: for each token and layer, k different experts by the layer's popularity [L, E]."""
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    generator = np.random.default_rng(seed)
    # The k largest of log p + Gumbel noise: draws without replacement.
    noise = generator.gumbel(size=(num_tokens, *shares.shape))
    with np.errstate(divide="ignore"):
        scores = np.log(shares) + noise
    routes = np.argsort(-scores, axis=2, kind="stable")[:, :, :num_active].astype("<u2")
    return offload.Passes(routes, np.ones(num_tokens, np.uint32), None, shares.astype("<f4"))


# A replay has at most so many tokens: more change hit rates by less than the routes of another text do.
_MOST_TOKENS, _LEAST_TOKENS, _MOST_VISITS = 4096, 64, 50_000
_LEAST_ROUGH_TOKENS, _ROUGH_VISITS = 16, 6000


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """The seconds of a token."""

    fixed: float
    dense: float
    experts: float
    waiting: float  # for fetched bytes, or on a GPU for the CPU and the link, as far as computation does not hide it

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.fixed + self.dense + self.experts + self.waiting


@dataclass(frozen=True, slots=True, eq=False)
class SpeedEstimate:
    """The estimated speed of a pack for a decoded token, in the steady state."""

    policy: str  # of the runtime
    # The share of experts that were resident when the router chose them, without prefetch; on a GPU of the bytes of
    # selectors and running records.
    hit_rate: float
    misses: Floats  # float64 [L, E], how often the expert is missing for a token
    fetched_bytes: float  # from the disk; on a GPU those that are not resident, which the CPU reads or the link brings
    read_bytes: float  # of weights in fast memory
    seconds: TokenSeconds
    shares: tuple[budgets.MemoryPart, ...] = ()  # the budget's parts; their sum is at most the budget

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of decode."""
        return 1 / self.seconds.total


def routed(
    layout: formats.PackLayout, popularity: Array, passes: offload.Passes | None, is_rough: bool
) -> tuple[offload.Passes, bool]:
    """Returns the routes to replay, not more than are worth their time, and whether they were drawn."""
    k = layout.spec.router.num_experts_per_tok
    most_visits, least = (_ROUGH_VISITS, _LEAST_ROUGH_TOKENS) if is_rough else (_MOST_VISITS, _LEAST_TOKENS)
    num_tokens = min(_MOST_TOKENS, max(least, most_visits // (k * len(layout.experts))))
    if passes is None:
        return drawn_passes(popularity, k, num_tokens), True
    routes = passes.routes[:num_tokens]
    return offload.Passes(routes, np.ones(len(routes), np.uint32), None, passes.popularity), False


def disk_seconds(expert: formats.ExpertLayout, running: float, disk: DiskFacts) -> float:
    """Returns the seconds to read an expert whole, or its selector and running rows if that is faster.

    Args:    running: the share of neurons that run.
    """
    whole = disk.seconds(1, expert.num_bytes)
    if expert.selector is None or running == 1:
        return whole
    rows = disk.seconds_for_rows(running, expert.records.row_bytes, expert.num_rows)
    return min(whole, disk.seconds(1, expert.selector_bytes) + rows)


def expert_seconds(expert: formats.ExpertLayout, running: float, machine: machines.Machine) -> tuple[float, float]:
    """Returns the seconds to compute an expert for one token, and the bytes that this reads from fast memory.

    Args:    running: the share of neurons that run. Without a selector all of the record is read.
    """
    running = 1.0 if expert.selector is None else running
    select_s, row_s = row_seconds(expert, machine)
    seconds = select_s + running * expert.num_rows * row_s
    return seconds, expert.selector_bytes + running * expert.records_bytes


def row_seconds(expert: formats.ExpertLayout, machine: machines.Machine) -> tuple[float, float]:
    """Returns the seconds for an expert's whole selector, 0 without one, and for one record.

    Each of a row's parts has its share of the row's CRC and padding.
    """

    def seconds(rows: formats.RowLayout) -> float:
        scale = rows.row_bytes / sum(part.num_bytes for part in rows.parts)
        return sum(scale * part.num_bytes / machine.expert_rate(part.format) + machine.row_s for part in rows.parts)

    return expert.num_rows * seconds(expert.selector) if expert.selector else 0.0, seconds(expert.records)


def dense_seconds(
    layout: formats.PackLayout, machine: machines.Machine, seen_tokens: int, kv_dtype: KvDtype | None = None
) -> tuple[float, float]:
    """Returns the seconds of the dense part for one token, and the bytes that it reads.

    The embedding does not count, unless it is the head too: a token reads one row of it, and one of a table to experts.
    States are read and written.
    Args:    kv_dtype: of the key-value cache; None: what the device has by default.
    """
    seconds = num_bytes = 0.0
    for dense in layout.read_dense():
        width = dense.rows.parts[0].format.width if dense.rows else {"F32": 32}.get(dense.dtype, 16)
        rate = machine.memory_rate if width == 32 else machines.rate_of(machine.dense_rates, width)
        seconds += dense.entry.num_bytes / rate
        num_bytes += dense.entry.num_bytes
    cached = budgets.cache_bytes(layout.spec, seen_tokens, 1, kv_dtype or ("f32" if machine.kind == "cpu" else "bf16"))
    return seconds + cached / machine.memory_rate, num_bytes + cached


def expert_table(
    layout: formats.PackLayout, running: Array, values: Callable[[formats.ExpertLayout, float], Sequence[float]]
) -> Array:
    """Returns some values of each expert, float64 [values, L, E].

    Args:    running: [L, E], the share of neurons that run.   values: of an expert and its share.
    """
    known: dict[tuple[int, float], Sequence[float]] = {}  # by layout object, as in `fetched_from_disk`

    def of(expert: formats.ExpertLayout, share: float) -> Sequence[float]:
        key = (id(expert), share)
        if key not in known:
            known[key] = values(expert, share)
        return known[key]

    shares = running.tolist()
    rows = [list(map(of, layer, shares[l])) for l, layer in enumerate(layout.experts)]
    return np.moveaxis(np.array(rows, np.float64), 2, 0)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingFacts:
    """The facts about routes and predictors that an estimate uses."""

    popularity: Floats  # float64 [L, E]
    # Routes to replay, of text not used for calibration; if None, routes are drawn independently.
    passes: offload.Passes | None = None
    # The share of the next layer's experts that the best predictor finds; None if no profile says it.
    recall: float | None = None
    predictor_bytes: int = 0  # host memory of the predictors


_SEEN_TOKENS = 512  # tokens in the key-value cache, or half of the context if that is less


class MemoryTier:
    """Fast memory of `budget_bytes` over slower memory."""

    def __init__(
        self, machine: machines.Machine, routing: RoutingFacts, budget_bytes: int, context_tokens: int
    ) -> None:
        self.budget_bytes = budget_bytes
        self._machine = machine
        self._routing = routing
        self._context_tokens = context_tokens
        self._seen_tokens = min(context_tokens // 2, _SEEN_TOKENS)

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> SpeedEstimate:
        """Estimates the speed of a pack of this layout.

        Args:    sparsity: [L, E].   less_bytes: to take away from the budget.   is_rough: faster and less exact, for a
                 search.
        Raises:  RunError if the pack does not fit; it says how many bytes are needed.
        """
        raise NotImplementedError

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        """Returns the smallest budget in which a pack of this layout runs."""
        raise NotImplementedError

    def run_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds to run a resident expert for one token."""
        return expert_seconds(expert, 1 - sparsity, self._machine)[0]

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds for which a token waits while an expert is fetched."""
        raise NotImplementedError

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """Returns the seconds to read a dense matrix of this size and width, for each token."""
        return num_bytes / machines.rate_of(self._machine.dense_rates, width)
