"""A token's time on a GPU, predicted: bytes that must be moved, divided by rates, and the launches between.

Rates are those that kernels' grids allow (`gpu.flights`).

    seconds of a token = others + sum over layers of (serial + max(here, CPU, link))

`serial` is everything outside of forks: dense matrices, attention, selectors, the sum of parts, and a gap for each
launch. `here`: neurons whose records are in GPU memory. `CPU`: a call of the CPU and the records that it computes
from host memory. `link`: records that the GPU pulls, and their neurons. If every missing record is pulled, the link is
serial. Routes are drawn; of an expert's neurons as many run as are expected. A pass may have several rows, tokens that
choose experts independently: dense weights and resident experts come from memory once for all of them.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpu.flights import (
    CLOCK,
    COPY_SHARE,
    DEPENDENT_CAPABILITY,
    DEPENDENT_START_S,
    LATENCY_S,
    SMS,
    START_S,
    Grids,
    ReadRates,
    read_rates,
)
from gpu.launches import CPU_CALL, Mode, TokenLaunches
from gpu.packs import SKEW, PackRequest
from moe_pack.convert import skewed_popularity
from moe_pack.convert.plan.gpu_speed import pulled_records, running_rows
from moe_pack.convert.plan.machines import CALL_S, GPUS, HOST_RATE, LINK_SHARE
from moe_pack.convert.plan.speed import drawn_passes
from moe_pack.formats import PackLayout, dense_roles
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.gpu.fit import divide_gpu, gpu_needs
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.placements import GpuPlacement, offset_bytes_for, place_experts, usual_heat, work_of_whole
from moe_pack.runtime.offload.budgets import cache_bytes

Array = NDArray[Any]
Misses = Literal["cpu", "pull", "auto"]

CONTEXT_TOKENS = 1024
CPU_RATES = {"DDR5": HOST_RATE, "DDR4": 40e9}
# Streaming multiprocessors, which decide on the number of partial sums.
NUM_SMS = {name: number for name, (_, number) in SMS.items()}
# Of an H200 (docs/benchmarks/gpu.md), and assumed of others. What attention of one token takes in addition to the start
# of a launch: its latency, and its tiles of 32 positions one after the other; 6.9 us of 600 tokens, 15.9 of 4,096.
ATTEND_S, ATTEND_TILE_S = 1.5e-6, 3e-6
ROUTE_S = 2.6e-6  # likewise of a router: launches take 3.7 us with 8 experts, 5.4 us with 128
# A token outside of its launches: start and end, the logits' way, and the choice of the next token, drawn on the host.
# Fitted: what 3.15 ms of Mixtral and of Qwen3 leave.
TOKEN_S = 500e-6
# The choice of another row's token on the host, for each entry of the vocabulary: 0.29 ms of 151,936 (ibid., greedy).
CHOICE_S = 1.9e-9
# Assumed of passes whose tokens the GPU chooses, not measured: the start of a graph that waits behind another one. The
# host's own work for a token comes while the next one runs.
CHAINED_TOKEN_S = 10e-6
# Assumed of the choice: bytes that its two launches over the whole GPU move for each entry of the vocabulary, and
# float64 instructions of an exponential. Of the launch with one program for each row: the bytes that it has on their
# way where it adds up, the tokens and the loads one after the other of a step where it looks for one, and the time of a
# search among bins.
CHOICE_BYTES, EXP_INSTRUCTIONS, SUM_FLIGHT_BYTES = 28, 25, 3 * 8192
STEP_TOKENS, STEP_LOADS, BINS_S = 8192, 2, 2e-6
FLOAT64_LANES = {"RTX 3090": 2, "RTX 4090": 2, "RTX 5090": 2}  # of a multiprocessor; of all others 64
_DRAWN_TOKENS = 128
_UNITS_BYTES = 4  # of a row's offset in a table or a list, and of a neuron's number


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a GPU, its link and a CPU in bytes a second, and the time of launches and calls in seconds."""

    memory: float  # of sums, of keys and values, and of what comes over the link
    link: float
    cpu: float
    read: ReadRates  # of rows, by kernel
    launch_s: float = START_S
    layer_launch_s: float = START_S  # of a layer's launches that are not on forks
    call_s: float = CALL_S
    latency_s: float = ATTEND_S + ATTEND_TILE_S + ROUTE_S  # of a layer's attention, or mixer, and router

    @property
    def pulled_share(self) -> float:
        """The share of missing records that the link brings while the CPU computes the others."""
        return self.link / (self.link + self.cpu)


def rates_of(
    gpu: str,
    cpu_rate: float,
    layout: PackLayout,
    mode: Mode,
    grids: Grids = "waves",
    num_rows: int = 1,
    rows_of_expert: float = 1.0,
) -> Rates:
    """Returns the rates of a pass; `num_rows` and `rows_of_expert` as of `read_rates`."""
    memory, link = COPY_SHARE * GPUS[gpu].memory_rate, LINK_SHARE * GPUS[gpu].link_rate
    has_waves = grids == "waves" and SMS[gpu][0] >= DEPENDENT_CAPABILITY
    is_chained = mode == "resident" and has_waves and layout.spec.mixer is None
    layer_launch_s = DEPENDENT_START_S if is_chained else START_S
    read, mixers = read_rates(layout, gpu, grids, num_rows, rows_of_expert), layout.spec.mixer
    share = 1.0 if mixers is None else 1 - len(mixers.layers) / layout.spec.num_hidden_layers
    latency_s = ATTEND_S + share * ATTEND_TILE_S + ROUTE_S
    return Rates(memory, link, cpu_rate, read, layer_launch_s=layer_launch_s, latency_s=latency_s)


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches that a token waits for: `layer` of a layer, `cpu` and `link` of its forks, `others` of a token.

    Layers of several kinds count by their means. torch's operations are launches like others.
    """

    layer: float
    cpu: float
    link: float
    others: int

    @classmethod
    def of(cls, counted: TokenLaunches) -> "Launches":
        """Returns the sums of launches by queue; calls of the CPU have a time of their own."""
        numbers = {"main": 0, "cpu": 0, "link": 0}
        for layers in counted.layers:
            for launch, number in layers.launches.items():
                numbers[launch.queue] += 0 if launch.name == CPU_CALL else layers.number * number
        main, cpu, link = (numbers[queue] / counted.num_layers for queue in numbers)
        return cls(main, cpu, link, sum(counted.others.values()))


@dataclass(frozen=True, slots=True, eq=False)
class LayerBytes:
    """The bytes of a token's layers; arrays are float64 [T, L]."""

    dense: float  # of a layer
    attention: float  # likewise, and of states
    partials: float  # float32 sums of neurons, which are written and then read
    select: Array  # of selectors that are read
    here: Array  # of records in GPU memory
    pulled: Array  # of pulled records
    left: Array  # that the CPU reads
    selectors: Array  # that are pulled


@dataclass(frozen=True, slots=True, eq=False)
class Forks:
    """The seconds of a token's layers, float64 [T, L]: what is serial, and what runs at the same time."""

    serial: Array
    here: Array
    cpu: Array
    link: Array

    @property
    def seconds(self) -> Array:
        seconds: Array = self.serial + np.maximum(self.here, np.maximum(self.cpu, self.link))
        return seconds


def forks(moved: LayerBytes, launches: Launches, rates: Rates, is_pull: bool, is_split: Array) -> Forks:
    """Returns the times of layers.

    Args:    is_pull: whether all that is missing is pulled, before neurons run.   is_split: bool [L], the layers that
             have forks because rows may be missing, if they are not pulled.
    """
    partials = moved.partials / rates.memory  # written, or read
    fixed = launches.layer * rates.layer_launch_s + rates.latency_s + moved.attention / rates.memory + partials
    serial = fixed + moved.dense / rates.read.dense + moved.select / rates.read.select
    here, none = moved.here / rates.read.records + partials, np.zeros_like(moved.here)
    over_link = (moved.pulled + moved.selectors) / rates.link
    if is_pull:  # a launch more where selectors are missing
        serial = serial + over_link + np.where(moved.selectors > 0, rates.launch_s, 0.0)
        return Forks(serial, here + moved.pulled / rates.read.records, none, none)
    cpu = rates.call_s + launches.cpu * rates.launch_s + moved.left / rates.cpu
    pulls = is_split & (moved.pulled > 0)
    link = launches.link * rates.launch_s + over_link + moved.pulled / rates.read.records + partials
    serial = serial + np.where(pulls, partials, 0.0)
    return Forks(serial, here, np.where(is_split, cpu, 0.0), np.where(pulls, link, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A pack that need not exist, and what its tokens choose. `routes`: int [T, L, k]."""

    request: PackRequest
    layout: PackLayout
    popularity: Array
    heat: Array
    routes: Array

    @classmethod
    def of(cls, request: PackRequest) -> "Subject":
        spec = model_spec(request.model, None)
        layout = pack_layout(spec, request.plan(spec), ["BF16"] * len(dense_roles(spec)))
        popularity = skewed_popularity(spec, SKEW, 0)
        heat = usual_heat(layout, np.full(popularity.shape, request.sparsity))
        routes = drawn_passes(popularity, spec.router.num_experts_per_tok, _DRAWN_TOKENS).routes
        return cls(request, layout, popularity, heat, routes.astype(np.int64))

    @property
    def head_bytes(self) -> int:
        """Dense bytes that a token reads once: those of no layer, without the embedding if the head is another."""
        spec = self.layout.spec
        others = [each for each in self.layout.dense if not each.role.name.startswith("layers.")]
        return sum(each.entry.num_bytes for each in others if each.role.name != "embed" or spec.tied_head)

    @property
    def layer_bytes(self) -> float:
        layers = [each for each in self.layout.dense if each.role.name.startswith("layers.")]
        return sum(each.entry.num_bytes for each in layers) / self.layout.spec.num_hidden_layers

    @cache  # noqa: B019  # subjects live as long as the program
    def times_chosen(self, num_rows: int) -> Array:
        """Returns how many rows of a pass choose each expert, int [T / rows, L, E]."""
        num_tokens, num_layers, _ = self.routes.shape
        found = np.zeros((num_tokens, *self.popularity.shape), np.int64)
        np.put_along_axis(found, self.routes, 1, axis=2)
        sums: Array = found.reshape(-1, num_rows, num_layers, found.shape[2]).sum(axis=1)
        return sums

    def runs(self) -> Array:
        """Returns how often rows run, all equally often as in synthetic packs: float64 [L, E, H]."""
        return np.full((*self.popularity.shape, self.heat.shape[2]), 1 - self.request.sparsity)

    @cache  # noqa: B019  # subjects live as long as the program
    def expert_bytes(self, budget_bytes: int) -> int:
        """Returns a budget's rest for experts, by the planner's estimate; raises RunError if there is too little."""
        needs = gpu_needs(self.layout, CONTEXT_TOKENS)
        return divide_gpu(needs, budget_bytes, CONTEXT_TOKENS).experts

    @cache  # noqa: B019  # likewise
    def place(self, expert_bytes: int, misses: Misses) -> GpuPlacement:
        """Returns the engine's placement in so many bytes; raises RunError if they are too few."""
        who: Literal["pull", "split"] = "pull" if misses == "pull" else "split"
        is_pulled = misses == "auto"
        offset_bytes = offset_bytes_for(self.layout, expert_bytes)
        return place_experts(
            self.layout, expert_bytes, who, self.popularity, self.heat, is_pulled=is_pulled, offset_bytes=offset_bytes
        )


def moved_bytes(
    subject: Subject, placement: GpuPlacement, runs: Array, pulled_share: float, num_sms: int, num_rows: int = 1
) -> LayerBytes:
    """Returns the bytes of the drawn tokens' layers, in passes of so many.

    Selectors and records count once in a pass if all are in GPU memory, else for each row; what is pulled comes once.
    Args:    runs: [L, E, H], of `Subject.runs`.   pulled_share: of missing records, if not all are pulled.
    """
    spec, is_pull = subject.layout.spec, placement.misses == "pull"
    assert num_rows == 1 or is_pull or placement.is_whole, "passes of rows that the CPU shares are not predicted"
    k, f = spec.router.num_experts_per_tok, spec.expert.intermediate_size
    selector, record = _row_bytes(subject.layout)
    in_gpu, missing = running_rows(placement, runs)
    is_whole = ~(placement.has_selector | is_pull)  # the CPU selects, and computes all rows
    chosen = (np.arange(len(selector))[:, None], subject.routes)  # of [L, E]: [T, L, k]
    times = subject.times_chosen(num_rows)
    once = times > 0
    served = once if placement.is_whole else times
    lacking = np.where(is_whole, 0.0, missing)[chosen]
    if is_pull:
        pulled_bytes = (once * (np.where(is_whole, 0.0, missing) * record)).sum(axis=2)
        pulled = lacking
    else:
        work = work_of_whole(subject.layout, subject.heat)
        pulled = pulled_records(placement, np.where(is_whole, 0.0, missing), subject.routes, pulled_share, work)
        pulled_bytes = _by_pass((pulled * record[chosen]).sum(axis=2), num_rows)
    # With each record comes its place in the list and its neuron; with each selector row two tables' offsets.
    here_bytes = np.where(is_whole, 0.0, in_gpu * (record + 2 * _UNITS_BYTES))
    left_bytes = ((missing[chosen] - pulled) * record[chosen]) + np.where(is_whole, f * selector, 0)[chosen]
    selector_bytes = f * (selector + 2 * _UNITS_BYTES)
    attention = cache_bytes(spec, CONTEXT_TOKENS, 1, "bf16") / spec.num_hidden_layers
    return LayerBytes(
        dense=subject.layer_bytes,
        attention=num_rows * attention,
        partials=4.0 * num_rows * k * num_partials(k, f, num_sms) * spec.hidden_size,
        select=(served * np.where(is_whole, 0.0, selector_bytes)).sum(axis=2),
        here=(served * here_bytes).sum(axis=2),
        pulled=pulled_bytes,
        left=_by_pass(left_bytes.sum(axis=2), num_rows),
        selectors=(once * np.where(placement.has_selector, 0.0, f * selector) * is_pull).sum(axis=2),
    )


def _by_pass(values: Array, num_rows: int) -> Array:
    """Returns the sums of passes of so many tokens, [T / rows, L], of values [T, L]."""
    sums: Array = values.reshape(-1, num_rows, values.shape[1]).sum(axis=1)
    return sums


def _row_bytes(layout: PackLayout) -> tuple[Array, Array]:
    experts = layout.experts
    selector = np.array([[each.selector.row_bytes if each.selector else 0 for each in layer] for layer in experts])
    return selector, np.array([[each.records.row_bytes for each in layer] for layer in experts])


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token's means; `serial_s`, `here_s`, `cpu_s` and `link_s` are sums over layers."""

    resident: float  # of the bytes of running neurons, those in GPU memory
    missing_bytes: float  # of the others
    serial_s: float  # with what runs once a token
    here_s: float
    cpu_s: float
    link_s: float
    token_s: float  # of the critical path


@dataclass(frozen=True, slots=True)
class Setup:
    """A GPU, a CPU's memory, a budget in bytes, and who has missing records."""

    gpu: str
    cpu: str
    budget_bytes: int
    misses: Misses


def predict(subject: Subject, setup: Setup, counted: dict[Mode, TokenLaunches], call_s: float = CALL_S) -> Prediction:
    """Predicts a token's time from its model's launches by mode; raises RunError if the budget is too small."""
    placement, is_pull = subject.place(subject.expert_bytes(setup.budget_bytes), setup.misses), setup.misses == "pull"
    mode: Mode = "resident" if placement.is_whole else "pull" if is_pull else "split"
    rates = replace(rates_of(setup.gpu, CPU_RATES[setup.cpu], subject.layout, mode), call_s=call_s)
    share = rates.pulled_share if setup.misses == "auto" else 0.0
    moved = moved_bytes(subject, placement, subject.runs(), share, NUM_SMS[setup.gpu])
    launches = Launches.of(counted[mode])
    f = subject.layout.spec.expert.intermediate_size
    is_split = ~((placement.first_dynamic == f) & placement.has_selector).all(axis=1)
    layers = forks(moved, launches, rates, is_pull, is_split)
    once = end_s(setup.gpu, subject.layout.spec.vocab_size)
    once += launches.others * rates.launch_s + subject.head_bytes / rates.read.head
    missing = moved.pulled + moved.left + moved.selectors
    needed = missing + moved.here

    def mean(values: Array) -> float:
        return float(values.sum(axis=1).mean())

    return Prediction(
        resident=1 - mean(missing) / mean(needed),
        missing_bytes=mean(missing),
        serial_s=once + mean(layers.serial),
        here_s=mean(layers.here),
        cpu_s=mean(layers.cpu),
        link_s=mean(layers.link),
        token_s=once + mean(layers.seconds),
    )


def choice_s(gpu: str, vocab_size: int, num_rows: int) -> float:
    """Returns the seconds of a choice by top-p without the starts of its three launches.

    They are the most: the token that is drawn is the vocabulary's last.
    """
    num_sms, memory = NUM_SMS[gpu], COPY_SHARE * GPUS[gpu].memory_rate
    exps = num_rows * vocab_size * EXP_INSTRUCTIONS / (num_sms * FLOAT64_LANES.get(gpu, 64) * CLOCK[gpu])
    over_all = num_rows * vocab_size * CHOICE_BYTES / memory + exps
    sums = 2 * 4 * vocab_size * LATENCY_S / SUM_FLIGHT_BYTES
    steps = -(-vocab_size // STEP_TOKENS) * STEP_LOADS * LATENCY_S
    return over_all + sums + steps + 3 * BINS_S


def end_s(gpu: str, vocab_size: int, num_rows: int = 1) -> float:
    """Returns the seconds of a token outside of its layers and launches: the choice, and the start of the next pass."""
    return CHAINED_TOKEN_S + choice_s(gpu, vocab_size, num_rows)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A part of a token with everything resident: bytes that it must move, and seconds; None for gaps' bytes."""

    name: str
    num_bytes: float | None
    seconds: float


def kernel_times(
    subject: Subject, gpu: str, counted: TokenLaunches, grids: Grids = "waves", num_rows: int = 1
) -> list[KernelTime]:
    """Returns the parts of a pass of so many rows with all experts resident; their sum is the pass's time."""
    times = subject.times_chosen(num_rows)
    of_expert = float(times.sum() / (times > 0).sum())
    rates = rates_of(gpu, CPU_RATES["DDR5"], subject.layout, counted.mode, grids, num_rows, of_expert)
    launches = Launches.of(counted)
    moved = moved_bytes(subject, subject.place(1 << 62, "auto"), subject.runs(), 0.0, NUM_SMS[gpu], num_rows)
    partials = moved.partials * (1 if grids == "waves" else 2 / 3)
    spec, num_layers = subject.layout.spec, len(subject.layout.experts)

    def moves(name: str, num_bytes: float, rate: float) -> KernelTime:
        return KernelTime(name, num_bytes, num_bytes / rate)

    num_launches = round(num_layers * launches.layer) + launches.others
    starts_s = num_layers * launches.layer * rates.layer_launch_s + launches.others * rates.launch_s
    vocab_size, logits_bytes = spec.vocab_size, 4.0 * spec.vocab_size
    if grids == "waves":
        ends = [
            KernelTime("choice of the next tokens, by top-p", None, choice_s(gpu, vocab_size, num_rows)),
            KernelTime("start of a pass behind another", None, CHAINED_TOKEN_S),
        ]
    else:  # as measured: the host chooses
        ends = [
            KernelTime("logits to the host, over the link", logits_bytes, logits_bytes / rates.link),
            KernelTime("start and end of a token, choice of the next", None, TOKEN_S),
        ]
    mixed = "attention" if spec.mixer is None else "attention and states"
    return [
        moves("dense matrices of layers", num_layers * moved.dense, rates.read.dense),
        moves(f"{mixed} over {CONTEXT_TOKENS:,} tokens", num_layers * moved.attention, rates.memory),
        KernelTime(f"{mixed} and router: latency", None, num_layers * rates.latency_s),
        moves("select", float(moved.select.sum(axis=1).mean()), rates.read.select),
        moves("neurons: records", float(moved.here.sum(axis=1).mean()), rates.read.records),
        moves("neurons: partial sums", num_layers * partials, rates.memory),
        moves("reduce", num_layers * partials, rates.memory),
        moves("head", float(subject.head_bytes), rates.read.head),
        KernelTime(f"starts of {num_launches:,} launches and copies", None, starts_s),
        *ends,
    ]


def pulled_pass(subject: Subject, gpu: str, budget_bytes: int, counted: TokenLaunches) -> tuple[float, float]:
    """Returns the seconds and the pulled bytes of a pass of rows in a budget; the link brings all that is missing.

    Args:    counted: in mode `pull`, for the pass's rows.
    """
    num_rows, spec = counted.num_rows, subject.layout.spec
    placement = subject.place(subject.expert_bytes(budget_bytes), "pull")
    rates = rates_of(gpu, CPU_RATES["DDR5"], subject.layout, "pull", num_rows=num_rows)
    moved = moved_bytes(subject, placement, subject.runs(), 0.0, NUM_SMS[gpu], num_rows)
    launches, is_split = Launches.of(counted), np.zeros(len(subject.layout.experts), bool)
    layers = forks(moved, launches, rates, True, is_split)
    once = end_s(gpu, spec.vocab_size)
    if num_rows > 1:  # the host verifies drafts
        once = TOKEN_S + num_rows * 4 * spec.vocab_size / rates.link + (num_rows - 1) * CHOICE_S * spec.vocab_size
    once += launches.others * rates.launch_s + subject.head_bytes / rates.read.head
    pulled = (moved.pulled + moved.selectors).sum(axis=1).mean()
    return once + float(layers.seconds.sum(axis=1).mean()), float(pulled)
