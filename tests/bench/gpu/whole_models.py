"""Parts `mixtral`, `qwen3`, `qwen36` and `demo`: whole models on a GPU.

The first three have real dimensions and synthetic weights: prompts of several lengths and decode; Mixtral and Qwen3.6
also passes of several rows. `demo` compares the
demo model with plain torch on the CPU: with each way to get missing rows, memory for shares of the experts, and within
budgets, which must hold by the driver's own count. If every missing row is pulled, bits depend neither on residency nor
on graphs. Decoding must take no memory, and wait only for a token's logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
from support.models import BOOK
from torch import Tensor

from gpu.calls import measure_calls
from gpu.engines import (
    EngineBench,
    EngineRequest,
    Running,
    counts,
    link_rate,
    make_demo,
    make_synthetic,
    measure_live,
    open_engine,
    remove_packs,
)
from gpu.measuring import Clock, Results
from gpu.packs import MIXTRAL, QWEN3, QWEN36, PackRequest
from gpu.several_rows import measure_rows
from moe_pack.formats import ExpertFormat, ModelSpec, Pack, Plan, part_format, uniform_plan
from moe_pack.formats.pack.plans import E5M2, MXFP4, uniform_dense
from moe_pack.runtime import Engine, EngineOptions, Text
from moe_pack.runtime.engine.options import MissesOption
from moe_pack.runtime.gpu.devices import host_bytes
from moe_pack.runtime.gpu.fit import GpuCounts
from moe_pack.runtime.gpu.kernels import grids
from moe_pack.runtime.gpu.placements import NUM_TURNS
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.model.caches import KvDtype

_PROMPT, _FORCED, _GREEDY = 48, 80, 48  # tokens
_CONTEXT = _PROMPT + _FORCED + _GREEDY
_REHEARSED = (2, 3, 1)
_EQUAL = 1e-4  # DESIGN section 4: logits, where routes and masks are the reference's
# An engine gives up to 24 MiB of its budget to the driver's pieces (`fit`); a little more, so that none is refused.
_SLACK_BYTES = 28 << 20
_SHARES = (0.0, 0.3, 0.6)  # of all experts' bytes that fit
_BUDGET_SHARE = 0.3  # likewise, where a budget is measured
_ALL_MISSES: tuple[MissesOption, ...] = ("auto", "cpu", "pull")
_TIER_BYTES = 1 << 20  # of the host's memory: less than any pack has experts, which are mapped
_ROUNDED: tuple[KvDtype, ...] = ("bf16", "q8", "q4")
_MOST_KL = 0.01  # nats a token, of keys and values in bfloat16; of codes, compared with plain torch with the same


@dataclass(frozen=True, slots=True)
class Answers:
    """An engine's answers compared with plain torch's on the CPU, over the same tokens.

    `worst_prompt`, `worst_token`: greatest difference of a logit, in the prompt and token by token.   `beyond`: tokens
    with one above 1e-4: a neuron at its threshold, or a near tie of experts, falls on the other side.   `greedy_equal`:
    how many tokens of the likeliest text are the same until the first that is not, of `greedy_tokens`.   `kl`: of the
    tokens' predictions, nats, the mean.   `resident`, `pulled`, `left`: shares of the running neurons of tokens,
    without those of experts that the CPU computed whole, `whole_per_token`.   `used_bytes`: the driver's count at the
    end, within `budget`; both 0 where no budget is measured.
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
    resident: float
    pulled: float
    left: float
    whole_per_token: float
    budget: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Promise:
    """A property that the engine must have. `share`: of the experts' bytes that fit, 1 for all."""

    what: str
    misses: MissesOption
    share: float
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """Plain torch's answers."""

    ids: list[int]
    prompt: Tensor  # [P, vocabulary]
    forced: Tensor  # [T, vocabulary]
    greedy: list[int]  # tokens


def demo(results: Results, clock: Clock) -> None:
    """Times calls of the CPU; runs packs at sparsity 0 and 0.8, then a tiny gpt-oss."""
    results.section("calls of the CPU", partial(measure_calls, results, clock))
    remove_packs(clock.is_rehearsal, ("demo-0", "demo-0.8"))
    for sparsity in (0.8,) if clock.is_rehearsal else (0.8, 0.0):
        results.section(f"sparsity {sparsity}", partial(_at_sparsity, results, clock, sparsity))
    results.section("gpt-oss", partial(_gpt_oss, results, clock))


def _at_sparsity(results: Results, clock: Clock, sparsity: float) -> None:
    folder = make_demo(results, sparsity)
    with Pack(folder) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[10_000:14_000])
    if clock.is_rehearsal:  # a smaller model does
        return
    if sparsity:
        _compare_all(results, clock, folder, ids, _measured() + _shared())
        _all_promises(results, clock, folder, ids)
    else:
        _compare_all(results, clock, folder, ids, _measured()[:1] + _shared(_SHARES[1:2]))


def _measured() -> list[EngineRequest]:
    """Returns engines that measure their memory, as users open them; a budget of 0 stands for that of `_BUDGET_SHARE`.

    They come first: they compile all kernels at once.
    """
    f32 = EngineRequest("auto", kv_dtype="f32")
    capped = [replace(f32, misses=misses, budget_bytes=0) for misses in _ALL_MISSES]
    return [f32, *(replace(f32, kv_dtype=dtype) for dtype in _ROUNDED), *capped]


def _shared(shares: Sequence[float] = _SHARES) -> list[EngineRequest]:
    """Engines that are built for a share of the experts: no budget is measured."""
    found = [EngineRequest(misses, kv_dtype="f32", share=share) for misses in _ALL_MISSES for share in shares]
    auto = EngineRequest("auto", kv_dtype="f32", share=shares[-1])
    return [*found, replace(auto, ram_bytes=_TIER_BYTES), replace(auto, policy="corm")]


def _gpt_oss(results: Results, clock: Clock) -> None:
    """MXFP4 as its source has it, sinks, windows in a ring, biases, the clamped SwiGLU: of random weights."""
    folder = make_synthetic(results, PackRequest("tiny-gpt-oss", "gpt-oss-20b", _kept, 0.0), is_tiny=True)
    ids = [(37 * i + 5) % 256 for i in range(_CONTEXT)]
    whole = EngineRequest("auto", kv_dtype="f32")
    part = replace(whole, misses="cpu", share=_SHARES[1])
    _compare_all(results, clock, folder, ids, [part] if clock.is_rehearsal else [whole, part])
    if clock.is_rehearsal:
        small, pull, auto = make_synthetic(results, MIXTRAL), replace(part, misses="pull"), replace(part, misses="auto")
        _compare_all(results, clock, small, ids, [pull, auto, replace(auto, ram_bytes=_TIER_BYTES)])
        _all_promises(results, clock, small, ids)


def _kept(spec: ModelSpec) -> Plan:
    """Experts as published models of this family have them, the dense part in 4 bits."""
    part = part_format(4, 64)
    plan = uniform_plan(spec, "both", part, part, part, "nearest")
    expert = ExpertFormat(MXFP4, MXFP4, E5M2)
    return replace(
        plan, experts=tuple(tuple(expert for _ in layer) for layer in plan.experts), dense=uniform_dense(spec, part)
    )


def _compare_all(
    results: Results, clock: Clock, folder: Path, ids: list[int], requests: Sequence[EngineRequest]
) -> None:
    expected = {dtype: _plain_answers(folder, ids, clock, dtype) for dtype in {*map(_reference_dtype, requests)}}
    for wanted in requests:
        space = "a budget" if wanted.budget_bytes is not None else _space(1.0 if wanted.share is None else wanted.share)
        tier = ", disk" if wanted.ram_bytes is not None else ""
        name = f"{folder.name}, {wanted.misses}{tier}, {wanted.policy}, {wanted.kv_dtype}, {space}"
        known = expected[_reference_dtype(wanted)]
        results.section(name, partial(_compare, results, clock, folder, wanted, known))


def _reference_dtype(wanted: EngineRequest) -> KvDtype:
    """How the reference stores keys and values: as codes where the request does."""
    return "f32" if wanted.kv_dtype in (None, "bf16") else wanted.kv_dtype


def _plain_answers(folder: Path, ids: list[int], clock: Clock, dtype: KvDtype) -> _Reference:
    options = EngineOptions("cpu", kernels="torch", kv_dtype=dtype)
    with Pack(folder) as pack:
        return _answers(lambda context: Engine(pack, options, context), ids, clock)


def _space(share: float) -> str:
    return f"space for {'all' if share == 1 else share}"


def _compare(results: Results, clock: Clock, folder: Path, wanted: EngineRequest, expected: _Reference) -> None:
    with Pack(folder) as pack:
        if wanted.budget_bytes is not None:
            wanted = replace(wanted, budget_bytes=_budget(folder, wanted))
        used, budget, needed = [0], [0], [GpuCounts()]

        def open_it(context_tokens: int) -> Running:
            return open_engine(pack, wanted, context_tokens, clock)

        def at_end(engine: Running) -> None:
            needed[0] = counts(engine)
            if isinstance(engine, Engine) and (facts := engine.facts.gpu) is not None:
                used[0], budget[0] = facts.memory.used_bytes(), facts.use.budget

        found = _answers(open_it, expected.ids, clock, at_end)
    off = (found.forced - expected.forced).abs().amax(1)
    same = [ours == theirs for ours, theirs in zip(found.greedy, expected.greedy, strict=True)]
    ours, theirs = found.forced.double().log_softmax(1), expected.forced.double().log_softmax(1)
    kl = float((theirs.exp() * (theirs - ours)).sum(1).mean())
    by = (needed[0].resident, needed[0].pulled, needed[0].left)
    resident, pulled, left = (number / max(sum(by), 1) for number in by)
    row = Answers(
        folder.name, wanted, float((found.prompt - expected.prompt).abs().max()), float(off.max()),
        int((off > _EQUAL).sum()), len(off), (*same, False).index(False), len(same), kl, resident, pulled, left,
        needed[0].whole / needed[0].tokens, budget[0], used[0],
    )  # fmt: skip
    results.add(row)
    if wanted.kv_dtype == "f32":
        assert row.beyond <= len(off) // 10, f"{row.beyond} of {len(off)} tokens have a logit off by more than {_EQUAL}"
    else:
        assert row.kl <= _MOST_KL, f"KL {row.kl:.3g} nats a token, allowed {_MOST_KL}"
    assert row.used_bytes <= row.budget, f"the driver charges {row.used_bytes:,} bytes, the budget is {row.budget:,}"


def _budget(folder: Path, wanted: EngineRequest) -> int:
    """Returns a budget that leaves experts a share of their bytes, by the engine's own report of the rest."""
    experts, rest = _use(folder, wanted.misses, wanted.kv_dtype)
    return rest + _SLACK_BYTES + round(_BUDGET_SHARE * experts)


@cache
def _use(folder: Path, misses: MissesOption, kv_dtype: KvDtype | None) -> tuple[int, int]:
    """Bytes of the GPU's memory that experts take where no budget is set, and all else."""
    wanted = EngineRequest(misses, kv_dtype=kv_dtype)
    with Pack(folder) as pack, Engine(pack, wanted.options(host_bytes(pack)), _CONTEXT) as opened:
        facts = opened.facts.gpu
    assert facts is not None
    use = facts.use
    return use.experts, use.spent - use.experts


def _answers(
    open_it: Callable[[int], Running],
    ids: list[int],
    clock: Clock,
    at_end: Callable[[Running], None] = lambda engine: None,
) -> _Reference:
    """Returns copies of a prompt's logits and of those of given tokens, and greedy text after them."""
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


# --- what the engine must hold to


def _all_promises(results: Results, clock: Clock, folder: Path, ids: list[int]) -> None:
    promises = _Promises(results, clock, folder, ids[: 4 if clock.is_rehearsal else 24])
    for share in (1.0, *_SHARES[:1]) if clock.is_rehearsal else (1.0, *_SHARES):
        results.section(f"promises, pull, {_space(share)}", partial(promises.check, "pull", share))
    with patch.object(grids, "ENABLED", False):  # the same bits where each launch waits for the end of the one before
        results.section("promises, pull, no early starts", partial(promises.check, "pull", 1.0))
    results.section("promises, auto", partial(promises.check, "auto", _SHARES[-1]))


class _Promises:
    """Properties of the engine with any share of experts; with `pull` all bits are the first's."""

    def __init__(self, results: Results, clock: Clock, folder: Path, ids: list[int]) -> None:
        self._results, self._clock, self._folder, self._ids = results, clock, folder, ids
        self._bits = list[Tensor]()

    def check(self, misses: MissesOption, share: float) -> None:
        clock, wanted, ids = self._clock, EngineRequest(misses, kv_dtype="f32", share=share), self._ids

        def add(what: str, holds: bool, found: str = "") -> None:
            self._results.add(Promise(what, misses, share, holds, found))
            if not holds:
                self._results.fail(f"{what}, {misses}, {_space(share)}", found or "it does not")

        with Pack(self._folder) as pack, closing(open_engine(pack, wanted, _CONTEXT, clock)) as engine:
            decoder = engine.decoder
            assert isinstance(decoder, GpuDecoder), "it was asked for"
            bits = _logits(decoder, ids)
            if misses == "pull":
                self._bits.append(bits)
                add("bits do not depend on the memory for experts", torch.equal(self._bits[0], bits))
                add("a second run gives the same bits", torch.equal(_logits(decoder, ids), bits))
            taken, waits = _watched(decoder, ids, clock)
            add("decoding takes no memory", taken == 0, f"{taken} allocations")
            add("decoding waits only for its logits", not waits, waits)
            if misses == "pull":
                decoder._runs = {(1, turn): partial(decoder.launch, turn) for turn in range(NUM_TURNS)}
                one_by_one = torch.equal(_logits(decoder, ids), bits)
                add("a replayed graph gives the bits of launches one by one", one_by_one)


def _logits(decoder: GpuDecoder, ids: list[int]) -> Tensor:
    decoder.reset()
    decoder.next_logits(ids[:2])
    return torch.stack([decoder.next_logits([token]).clone() for token in ids[2:]])


def _watched(decoder: GpuDecoder, ids: list[int], clock: Clock) -> tuple[int, str]:
    """Returns decoding's allocations, and torch's complaint about a wait for a stream; waits for events are allowed."""
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


# The first prompt warms up, and is measured again.
_LENGTHS, _CAPPED_LENGTHS, _DECODED = (128, 16, 128, 512, 2048, 8192), (128, 16, 128, 512, 2048), 96  # tokens
_FEW_LENGTHS = (128, 16, 128, 512)
_REHEARSED_LENGTHS, _REHEARSED_DECODED = (2, 2), 2
_CAP_BYTES = 11 << 30


def mixtral(results: Results, clock: Clock) -> None:
    """Prompts and decode with everything on the GPU, then in 11 GiB; rows of both; memory given back and taken."""
    _run_model(results, clock, MIXTRAL, _LENGTHS, _CAPPED_LENGTHS)
    _run_rows(results, clock, MIXTRAL)
    folder = make_synthetic(results, MIXTRAL)
    for name, budget_bytes in (("live, all", None), ("live, 11 GiB", 11 << 30)):
        results.section(name, partial(measure_live, results, clock, folder, budget_bytes))


def qwen3(results: Results, clock: Clock) -> None:
    """Prompts and decode with everything on the GPU, then in 11 GiB."""
    _run_model(results, clock, QWEN3, _LENGTHS, _CAPPED_LENGTHS)


def qwen36(results: Results, clock: Clock) -> None:
    """Decode with everything on the GPU, then in 11 GiB; rows of both."""
    _run_model(results, clock, QWEN36, _FEW_LENGTHS, _FEW_LENGTHS)
    _run_rows(results, clock, QWEN36)


def _run_rows(results: Results, clock: Clock, wanted: PackRequest) -> None:
    folder = make_synthetic(results, wanted)
    for name, budget_bytes in (("requests", None), ("drafts", _CAP_BYTES)):
        results.section(name, partial(measure_rows, results, clock, folder, budget_bytes))


def _run_model(
    results: Results, clock: Clock, wanted: PackRequest, whole_lengths: tuple[int, ...], capped: tuple[int, ...]
) -> None:
    remove_packs(clock.is_rehearsal, (MIXTRAL.name, QWEN3.name, QWEN36.name))
    rate, folder = link_rate(clock), make_synthetic(results, wanted)
    whole = EngineRequest("auto")
    in_budget = replace(whole, budget_bytes=_CAP_BYTES)
    with closing(EngineBench(results, clock, folder, rate)) as bench:
        for name, engine, lengths in (("all", whole, whole_lengths), ("11 GiB", in_budget, capped)):
            given = (_REHEARSED_LENGTHS, _REHEARSED_DECODED) if clock.is_rehearsal else (lengths, _DECODED)
            results.section(name, partial(bench.measure, engine, *given))
