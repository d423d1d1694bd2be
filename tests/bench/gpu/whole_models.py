"""Parts `demo`, `token`, `mixtral`, `qwen3` and `sampling`: whole models on a GPU.

`demo`: the demo model on the GPU against plain torch on the CPU, in three budgets and without one. A budget must hold
by the driver's own count; a replayed graph must give the bits of single launches; decoding must take no memory, and
wait for nothing but a token's logits. The others have real dimensions and synthetic weights. `token`: a profile by
kernel of whole tokens. `mixtral`, `qwen3`: decoding and prompts with everything on the GPU, then within 11, 12, 13 and
8 GiB of it. `sampling`: what choosing a token costs the host.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from models import BOOK
from torch import Tensor

from gpu.engines import (
    EngineBench,
    EngineName,
    EngineRequest,
    KvDtype,
    Running,
    Speed,
    link_rate,
    make_demo,
    make_synthetic,
    open_engine,
    remove_packs,
)
from gpu.measuring import Clock, Results, host_seconds
from gpu.packs import MIXTRAL, QWEN3, PackRequest
from moe_pack.formats import ExpertFormat, ModelSpec, Pack, Plan, part_format, uniform_plan
from moe_pack.formats.plan import E5M2, MXFP4, uniform_dense
from moe_pack.runtime import Engine, EngineOptions, Sampler, Text
from moe_pack.runtime.gpu.device import host_bytes
from moe_pack.runtime.gpu.graph_engine import GraphDecoder

_PROMPT, _FORCED, _GREEDY = 48, 80, 48  # tokens
_CONTEXT = _PROMPT + _FORCED + _GREEDY
_REHEARSED = (2, 3, 3)
_EQUAL = 1e-4  # DESIGN section 4: logits, where routes and masks are the reference's
# An engine that copies rows has more kernels than one that does not; and the driver allocates in pieces, of which a
# model so small may leave 28 MiB unused.
_SLACK_BYTES = 28 << 20
_SHARES = (0.3, 0.6, 1.0)  # shares of all experts' bytes that fit into a budget
_STAGED = ("lru", "floe", "fiddler")  # policies that the staged engine is tried with
_MOST_KL = 0.01  # nats a token, of keys and values in bfloat16


@dataclass(frozen=True, slots=True)
class Answers:
    """An engine's answers compared with plain torch's on the CPU, over the same tokens.

    `worst_prompt`, `worst_token`: greatest difference of a logit, in the prompt and token by token.   `beyond`: tokens
    with one above 1e-4: a neuron at its threshold, or a near tie of experts, falls on the other side.   `greedy_equal`:
    how many tokens of the likeliest text are the same until the first that is not, of `greedy_tokens`.   `kl`: of the
    tokens' predictions, nats, the mean.   `used_bytes`: the driver's count at the end, within `budget`.
    """

    pack: str
    wanted: EngineRequest
    worst_prompt: float
    worst_token: float
    beyond: int
    tokens: int
    greedy_equal: int
    greedy_tokens: int
    kl: float
    budget: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Promise:
    """A property that the graph engine must have. `share`: of the experts' bytes that fit, None for all."""

    what: str
    share: float | None
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What plain torch answers. `prompt`: [P, vocabulary], `forced`: [T, vocabulary], `greedy`: tokens."""

    ids: list[int]
    prompt: Tensor
    forced: Tensor
    greedy: list[int]


def demo(results: Results, clock: Clock) -> None:
    """Runs packs at sparsity 0 and 0.8, then a tiny gpt-oss."""
    remove_packs(clock.is_rehearsal, ("demo-0", "demo-0.8"))
    for sparsity in (0.8,) if clock.is_rehearsal else (0.8, 0.0):
        results.section(f"sparsity {sparsity}", partial(_at_sparsity, results, clock, sparsity))
    results.section("gpt-oss", partial(_gpt_oss, results, clock))


def _at_sparsity(results: Results, clock: Clock, sparsity: float) -> None:
    folder = make_demo(results, sparsity)
    with Pack(folder) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[10_000:14_000])
    _compare_all(results, clock, folder, ids)
    if sparsity and not clock.is_rehearsal:  # in a rehearsal a smaller model does
        _all_promises(results, clock, folder, ids, (None, *_SHARES[:2]))


def _gpt_oss(results: Results, clock: Clock) -> None:
    """MXFP4 as its source has it, sinks, windows in a ring, biases, the clamped SwiGLU: of random weights."""
    folder = make_synthetic(results, PackRequest("tiny-gpt-oss", "gpt-oss-20b", _kept, 0.0), is_tiny=True)
    ids = [(37 * i + 5) % 256 for i in range(_CONTEXT)]
    _compare_all(results, clock, folder, ids, (None,))
    if clock.is_rehearsal:
        small = make_synthetic(results, MIXTRAL)
        _all_promises(results, clock, small, ids, (None,))


def _kept(spec: ModelSpec) -> Plan:
    """Experts as published models of this family have them, the dense part in 4 bits."""
    part = part_format(4, 64)
    plan = uniform_plan(spec, "both", part, part, part, "nearest")
    expert = ExpertFormat(MXFP4, MXFP4, E5M2)
    return replace(
        plan, experts=tuple(tuple(expert for _ in layer) for layer in plan.experts), dense=uniform_dense(spec, part)
    )


def _compare_all(
    results: Results, clock: Clock, folder: Path, ids: list[int], shares: tuple[float | None, ...] = (None, *_SHARES)
) -> None:
    with Pack(folder) as pack:
        expected = _answers(lambda context: Engine(pack, EngineOptions(kernels="torch"), context), ids, clock)
    graph = EngineRequest("graph", kv_dtype="f32")
    asked = [(graph, share) for share in (shares[:1] if clock.is_rehearsal else shares)]
    asked += [] if clock.is_rehearsal else [(replace(graph, kv_dtype="bf16"), None)]
    for policy in _STAGED[:1] if clock.is_rehearsal else _STAGED:
        asked += [(EngineRequest("staged", policy, kv_dtype="f32"), share) for share in shares[1:2] or shares]
    for wanted, share in asked:
        name = f"{folder.name}, {wanted.engine} {wanted.policy} {wanted.kv_dtype}, space for {share or 'all'}"
        results.section(name, partial(_compare, results, clock, folder, wanted, share, expected))


def _compare(
    results: Results, clock: Clock, folder: Path, wanted: EngineRequest, share: float | None, expected: _Reference
) -> None:
    with Pack(folder) as pack:
        if share is not None and not clock.is_rehearsal:
            wanted = replace(wanted, budget_bytes=_budget(folder, wanted, share))
        used, budget = [0], [0]

        def open_it(context_tokens: int) -> Running:
            return open_engine(pack, wanted, context_tokens, clock.is_rehearsal)

        def at_end(engine: Running) -> None:
            if isinstance(engine, Engine) and engine.gpu_memory is not None and engine.gpu_use is not None:
                used[0], budget[0] = engine.gpu_memory.used_bytes(), engine.gpu_use.budget

        found = _answers(open_it, expected.ids, clock, at_end)
    off = (found.forced - expected.forced).abs().amax(1)
    same = [ours == theirs for ours, theirs in zip(found.greedy, expected.greedy, strict=True)]
    ours, theirs = found.forced.double().log_softmax(1), expected.forced.double().log_softmax(1)
    kl = float((theirs.exp() * (theirs - ours)).sum(1).mean())
    row = Answers(
        folder.name, wanted, float((found.prompt - expected.prompt).abs().max()), float(off.max()),
        int((off > _EQUAL).sum()), len(off), (*same, False).index(False), len(same), kl, budget[0], used[0],
    )  # fmt: skip
    results.add(row)
    if wanted.kv_dtype == "f32":
        assert row.beyond <= len(off) // 10, f"{row.beyond} of {len(off)} tokens have a logit off by more than {_EQUAL}"
    else:
        assert row.kl <= _MOST_KL, f"KL {row.kl:.3g} nats a token, allowed {_MOST_KL}"
    assert row.used_bytes <= row.budget, f"the driver charges {row.used_bytes:,} bytes, the budget is {row.budget:,}"


def _budget(folder: Path, wanted: EngineRequest, share: float) -> int:
    """Returns a budget that leaves experts this share of their bytes, by the engine's own report of the rest."""
    experts, rest = _use(folder, wanted.engine, wanted.kv_dtype)
    return rest + _SLACK_BYTES + round(share * experts)


@cache
def _use(folder: Path, engine: EngineName, kv_dtype: KvDtype | None) -> tuple[int, int]:
    """Bytes of the GPU's memory that experts take where no budget is set, and all else."""
    wanted = EngineRequest(engine, kv_dtype=kv_dtype)
    with Pack(folder) as pack, Engine(pack, wanted.options(host_bytes(pack)), _CONTEXT) as opened:
        use = opened.gpu_use
    assert use is not None, "it is on a GPU"
    return use.experts, use.spent - use.experts


def _answers(
    open_it: Callable[[int], Running],
    ids: list[int],
    clock: Clock,
    at_end: Callable[[Running], None] = lambda engine: None,
) -> _Reference:
    """A prompt's logits, those of tokens that are given, and greedy text after them.

    Each is copied: an engine on a GPU has one place for logits, which the next token overwrites.
    """
    num_prompt, num_forced, num_greedy = _REHEARSED if clock.is_rehearsal else (_PROMPT, _FORCED, _GREEDY)
    ids = ids[: num_prompt + num_forced]
    with closing(open_it(len(ids) + num_greedy)) as engine:
        decoder = engine.decoder
        prompt = decoder.logits(ids[:num_prompt]).cpu().clone()
        forced = torch.stack([decoder.next_logits([token]).cpu().clone() for token in ids[num_prompt:]])
        greedy, logits = list[int](), forced[-1]
        for _ in range(num_greedy):
            greedy.append(int(logits.argmax()))
            logits = decoder.next_logits(greedy[-1:]).cpu()
        at_end(engine)
    return _Reference(ids, prompt, forced, greedy)


# --- what the graph engine must hold to


def _all_promises(
    results: Results, clock: Clock, folder: Path, ids: list[int], shares: tuple[float | None, ...]
) -> None:
    promises = _Promises(results, clock, folder, ids)
    for share in shares:
        results.section(f"promises, space for {share or 'all'}", partial(promises.check, share))


class _Promises:
    """Properties of the graph engine with any share of experts; all bits are compared with the first."""

    def __init__(self, results: Results, clock: Clock, folder: Path, ids: list[int]) -> None:
        self._results, self._clock, self._folder = results, clock, folder
        self._ids, self._bits = ids[: 5 if clock.is_rehearsal else 24], list[Tensor]()

    def check(self, share: float | None) -> None:
        """Opens the engine with memory for a share of the experts, None for all, and checks all properties."""
        clock, wanted, ids = self._clock, EngineRequest("graph", kv_dtype="f32"), self._ids
        if share is not None and not clock.is_rehearsal:
            wanted = replace(wanted, budget_bytes=_budget(self._folder, wanted, share))
        with Pack(self._folder) as pack, closing(open_engine(pack, wanted, _CONTEXT, clock.is_rehearsal)) as engine:
            decoder = engine.decoder
            assert isinstance(decoder, GraphDecoder), "it was asked for"
            bits = _logits(decoder, ids)
            self._bits.append(bits)
            self._add("a second run gives the same bits", share, torch.equal(_logits(decoder, ids), bits))
            taken, waits = _watched(decoder, ids, clock)
            self._add("decoding takes no memory", share, taken == 0, f"{taken} allocations")
            self._add("decoding waits only for its logits", share, not waits, waits)
            decoder._run = decoder._launch
            one_by_one = torch.equal(_logits(decoder, ids), bits)
            self._add("a replayed graph gives the bits of launches one by one", share, one_by_one)
        self._add("bits do not depend on the memory for experts", share, torch.equal(self._bits[0], bits))

    def _add(self, what: str, share: float | None, holds: bool, found: str = "") -> None:
        self._results.add(Promise(what, share, holds, found))
        if not holds:
            self._results.fail(f"{what}, space for {share or 'all'}", found or "it does not")


def _logits(decoder: object, ids: list[int]) -> Tensor:
    assert isinstance(decoder, GraphDecoder), "graph engines alone"
    decoder.reset()
    decoder.next_logits(ids[:2])
    return torch.stack([decoder.next_logits([token]).clone() for token in ids[2:]])


def _watched(decoder: GraphDecoder, ids: list[int], clock: Clock) -> tuple[int, str]:
    """Allocations while tokens are decoded, and what torch says of a wait for a stream; waits for events it allows.

    Without a GPU there is nothing to watch: tests of the step's launches see both there.
    """
    if clock.is_rehearsal:
        return 0, ""
    decoder.reset()
    decoder.next_logits(ids[:2])
    before, waits = _allocations(), ""
    with _forbidden_waits():
        try:
            for token in ids[2:]:
                decoder.next_logits([token])
        except RuntimeError as fault:
            waits = str(fault)
    return _allocations() - before, waits


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def _forbidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


_CAP_GIB, _OTHER_GIB = 11, (12, 13, 8)
_LENGTHS = (128, 16, 512)  # of prompts; the first also warms up
_DECODED = 96
_SAMPLERS = {"greedy": (0.0, 1.0), "temperature 1": (1.0, 1.0), "temperature 0.8, top-p 0.95": (0.8, 0.95)}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Decoding under a cap, relative to that with everything on the GPU (FloE: 0.91 with 2-bit experts resident)."""

    pack: str
    gib: int
    capped_per_s: float
    resident_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SamplerTime:
    """The host's milliseconds to choose a token, the median."""

    sampler: str
    vocabulary: int
    ms: float


def profile(results: Results, clock: Clock) -> None:
    """Whole tokens under the profiler: Mixtral under the cap, Qwen3 with everything on the GPU."""
    remove_packs(clock.is_rehearsal, (MIXTRAL.name, QWEN3.name))
    rate = link_rate(clock)
    for wanted, engine in ((MIXTRAL, _graph(_CAP_GIB)), (QWEN3, _graph(None))):

        def body(wanted: PackRequest = wanted, engine: EngineRequest = engine) -> None:
            folder = make_synthetic(results, wanted)
            with closing(EngineBench(results, clock, folder, rate)) as bench:
                bench.profile(engine, 2 if clock.is_rehearsal else 128)

        results.section(wanted.name, body)


def mixtral(results: Results, clock: Clock) -> None:
    """Mixtral's dimensions: 11 GiB, all of it, other budgets; the staged engine for comparison, last."""
    remove_packs(clock.is_rehearsal, (MIXTRAL.name, QWEN3.name))
    _budgets(results, clock, MIXTRAL)


def qwen3(results: Results, clock: Clock) -> None:
    """Qwen3's dimensions."""
    remove_packs(clock.is_rehearsal, (QWEN3.name,))
    _budgets(results, clock, QWEN3)


def _budgets(results: Results, clock: Clock, wanted: PackRequest) -> None:
    lengths, decoded = ((2, 3), 3) if clock.is_rehearsal else (_LENGTHS, _DECODED)
    rate, folder = link_rate(clock), make_synthetic(results, wanted)
    with closing(EngineBench(results, clock, folder, rate)) as bench:
        found: dict[int | None, Speed] = {}

        def measure(gib: int | None) -> None:
            found[gib] = bench.measure(_graph(gib), lengths, decoded)[1]
            capped, resident = found.get(gib), found.get(None)
            if gib is not None and capped is not None and resident is not None:
                ratio = capped.decode_per_s / resident.decode_per_s
                results.add(Ratio(bench.name, gib, capped.decode_per_s, resident.decode_per_s, ratio))

        for gib in (None, _CAP_GIB) if clock.is_rehearsal else (None, _CAP_GIB, *_OTHER_GIB):
            results.section("resident" if gib is None else f"{gib} GiB", partial(measure, gib))
        staged = EngineRequest("staged", "lru", _CAP_GIB << 30)
        results.section(f"{_CAP_GIB} GiB, staged", partial(bench.measure, staged, lengths[:2], decoded // 3))


def _graph(gib: int | None) -> EngineRequest:
    return EngineRequest("graph", budget_bytes=None if gib is None else gib << 30)


def sampling(results: Results, clock: Clock) -> None:
    """A model's peaked predictions, and those of random weights, at both vocabularies."""
    for vocabulary in (32_000, 151_936):
        flat = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
        peaked = 2.5 * flat
        peaked[:50] += 12
        for name, (temperature, top_p) in _SAMPLERS.items():
            for kind, logits in (("peaked", peaked), ("flat", flat)):
                sampler = Sampler(temperature, top_p, 0)
                choose: Callable[[], object] = partial(sampler.choose, logits)
                ms = 1000 * host_seconds(choose, 3 if clock.is_rehearsal else 31)
                results.add(SamplerTime(f"{name}, {kind}", vocabulary, ms))
