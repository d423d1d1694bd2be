"""Part `demo`: the demo model on the GPU beside plain torch on the CPU, in three budgets and without one.

A budget must hold by the driver's own count; a replayed graph must give the bits of launches one by one, whatever has
room; decoding must take no memory, and wait for nothing but a token's logits.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_clock import Clock
from gpu_engine import EngineWanted, Running, open_engine
from gpu_packs import MIXTRAL, PackWanted, make_demo, make_synthetic, remove_packs
from gpu_results import Results
from models import BOOK
from torch import Tensor

from moe_pack.formats import E5M2, MXFP4, ExpertFormat, ModelSpec, Pack, Plan, part_format, uniform_dense, uniform_plan
from moe_pack.runtime import Engine, EngineOptions, Text
from moe_pack.runtime.graph import GraphDecoder
from moe_pack.runtime.host_arena import host_bytes

_PROMPT, _FORCED, _GREEDY = 48, 80, 48  # tokens
_REHEARSED = (2, 3, 3)
_EQUAL = 1e-4  # DESIGN section 4: logits, where routes and masks are the reference's
# An engine that pulls has kernels more than one that does not; of a model so small, 28 MiB are kept for the pieces that
# memory is given in.
_SLACK_BYTES = 28 << 20
_SHARES = (0.3, 0.6, 1.0)  # of all experts' bytes, that a budget has room for
_STAGED = ("lru", "floe", "fiddler")  # policies that the staged engine is tried with
_MOST_KL = 0.01  # nats a token, of keys and values in bfloat16


@dataclass(frozen=True, slots=True)
class Answers:
    """An engine's answers beside plain torch's on the CPU, over the same tokens.

    `worst_prompt`, `worst_token`: greatest difference of a logit, in the prompt and token by token.   `beyond`: tokens
    with one above 1e-4: a neuron at its threshold, or a near tie of experts, falls on the other side.   `greedy_equal`:
    how many tokens of the likeliest text are the same until the first that is not, of `greedy_tokens`.   `kl`: of the
    tokens' predictions, nats, the mean.   `used_bytes`: the driver's count at the end, within `budget`.
    """

    pack: str
    wanted: EngineWanted
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
    """Something that the graph engine must hold to."""

    what: str
    share: float
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What plain torch answers. `prompt`: [P, vocabulary], `forced`: [T, vocabulary], `greedy`: tokens."""

    ids: list[int]
    prompt: Tensor
    forced: Tensor
    greedy: list[int]


def run(results: Results, clock: Clock) -> None:
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
    if not clock.is_rehearsal:  # there a smaller model's suffice
        _all_promises(results, clock, folder, ids, _SHARES)


def _gpt_oss(results: Results, clock: Clock) -> None:
    """MXFP4 as its source has it, sinks, windows in a ring, biases, the clamped SwiGLU: of random weights."""
    folder = make_synthetic(results, PackWanted("tiny-gpt-oss", "gpt-oss-20b", _kept, 0.0), is_tiny=True)
    ids = [(37 * i + 5) % 256 for i in range(_PROMPT + _FORCED + _GREEDY)]
    _compare_all(results, clock, folder, ids, (None,))
    if clock.is_rehearsal:
        small = make_synthetic(results, MIXTRAL)
        _all_promises(results, clock, small, ids, _SHARES[:1])


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
    graph = EngineWanted("graph", kv_dtype="f32")
    asked = [(graph, share) for share in (shares[:1] if clock.is_rehearsal else shares)]
    asked += [] if clock.is_rehearsal else [(replace(graph, kv_dtype="bf16"), None)]
    for policy in _STAGED[:1] if clock.is_rehearsal else _STAGED:
        asked += [(EngineWanted("staged", policy, kv_dtype="f32"), share) for share in shares[1:2] or shares]
    for wanted, share in asked:
        name = f"{folder.name}, {wanted.engine} {wanted.policy} {wanted.kv_dtype}, room for {share or 'all'}"
        results.section(name, partial(_compare, results, clock, folder, wanted, share, expected))


def _compare(
    results: Results, clock: Clock, folder: Path, wanted: EngineWanted, share: float | None, expected: _Reference
) -> None:
    with Pack(folder) as pack:
        if share is not None and not clock.is_rehearsal:
            wanted = replace(wanted, budget_bytes=_budget(pack, wanted, share))
        used, budget = [0], [0]

        def open_it(context_tokens: int) -> Running:
            return open_engine(pack, wanted, context_tokens, clock.is_rehearsal)

        def at_end(engine: Running) -> None:
            if isinstance(engine, Engine) and engine.card_memory is not None and engine.use is not None:
                used[0], budget[0] = engine.card_memory.used_bytes(), engine.use.budget

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


def _budget(pack: Pack, wanted: EngineWanted, share: float) -> int:
    """What leaves experts this share of their bytes, beside what an engine says that all else takes."""
    with Engine(pack, wanted.options(host_bytes(pack)), _PROMPT + _FORCED + _GREEDY) as engine:
        use = engine.use
    torch.cuda.empty_cache()
    assert use is not None, "it is on a GPU"
    return use.spent - use.experts + _SLACK_BYTES + round(share * use.experts)


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


def _all_promises(results: Results, clock: Clock, folder: Path, ids: list[int], shares: tuple[float, ...]) -> None:
    for share in shares:
        results.section(f"promises, room for {share}", partial(_promises, results, clock, folder, ids, share))


def _promises(results: Results, clock: Clock, folder: Path, ids: list[int], share: float) -> None:
    def add(what: str, holds: bool, found: str = "") -> None:
        results.add(Promise(what, share, holds, found))
        assert holds, f"{what}: {found}"

    wanted, tokens = EngineWanted("graph", kv_dtype="f32"), ids[: 5 if clock.is_rehearsal else 24]
    with Pack(folder) as pack:
        if not clock.is_rehearsal:
            wanted = replace(wanted, budget_bytes=_budget(pack, wanted, share))
        with closing(open_engine(pack, wanted, 64, clock.is_rehearsal)) as engine:
            decoder = engine.decoder
            assert isinstance(decoder, GraphDecoder), "it was asked for"
            replayed = _logits(decoder, tokens)
            add("a second run gives the same bits", torch.equal(_logits(decoder, tokens), replayed))
            taken, waits = _watched(decoder, tokens, clock)
            add("decoding takes no memory", taken == 0, f"{taken} allocations")
            add("decoding waits for its logits alone", not waits, waits)
            run, decoder._run = decoder._run, decoder._launch
            one_by_one = _logits(decoder, tokens)
            decoder._run = run
            add("a replayed graph gives the bits of launches one by one", torch.equal(one_by_one, replayed))
        with closing(open_engine(pack, replace(wanted, budget_bytes=None), 64, clock.is_rehearsal)) as engine:
            alike = torch.equal(_logits(engine.decoder, tokens), replayed)
            add("bits do not depend on what has room", alike)


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
