"""Part `demo`: the demo model under every engine, policy and budget: the CPU's answers, computed by plain torch."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_clock import Clock
from gpu_engine import Ask, EngineName, Running, open_engine, options_of
from gpu_packs import make_demo, make_room
from gpu_results import Results
from models import BOOK
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime import PRESETS, Engine, EngineOptions, Text

_PROMPT, _FORCED, _GREEDY = 48, 80, 48  # tokens
_EQUAL = 1e-4  # DESIGN section 4: logits, where routes and masks are the reference's
# An engine that pulls has kernels more than one that does not; of a model so small, 24 MiB are kept for pieces that
# memory is given in.
_SLACK_BYTES = 28 << 20
_SHARES = (0.3, 0.6, 1.0)  # of all experts' bytes, that a budget has room for


@dataclass(frozen=True, slots=True)
class Answers:
    """An engine's answers beside plain torch's on the CPU, over the same tokens.

    `worst_prompt`, `worst_token`: greatest difference of a logit, in the prompt and token by token.   `beyond`: tokens
    with one above 1e-4: a neuron at its threshold, or a near tie of experts, falls on the other side.   `greedy_equal`:
    how many tokens of the likeliest text are the same until the first that is not, of `greedy_tokens`.
    """

    pack: str
    ask: Ask
    worst_prompt: float
    worst_token: float
    beyond: int
    tokens: int
    greedy_equal: int
    greedy_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What plain torch answers. `prompt`: [P, vocabulary], `forced`: [T, vocabulary], `greedy`: tokens."""

    ids: list[int]
    prompt: Tensor
    forced: Tensor
    greedy: list[int]


def run(results: Results, clock: Clock) -> None:
    """Runs every way on packs at sparsity 0 and 0.8."""
    make_room(clock.is_rehearsal, ("demo-0", "demo-0.8"))
    for sparsity in (0.8,) if clock.is_rehearsal else (0.0, 0.8):
        results.section(f"sparsity {sparsity}", partial(_at_sparsity, results, clock, sparsity))


def _at_sparsity(results: Results, clock: Clock, sparsity: float) -> None:
    folder = make_demo(results, sparsity)
    with Pack(folder) as pack:
        ids = Text(pack).encode(BOOK.read_text("utf-8")[10_000:14_000])
        expected = _answers(partial(Engine, pack, EngineOptions(kernels="torch")), ids, clock.is_rehearsal)
    for ask in _asks(folder, clock.is_rehearsal):
        results.section(f"{folder.name} {ask}", partial(_compare, results, clock, folder, ask, expected))


def _asks(folder: Path, is_rehearsal: bool) -> list[Ask]:
    """Every engine and policy, without a budget and with those that hold more or less of the experts."""
    engines: tuple[EngineName, ...] = ("graph", "staged")
    asks = []
    for engine in engines:
        ask = Ask(engine, kv_dtype="f32")
        budgets = () if is_rehearsal else _budgets(folder, ask)
        for policy in ("auto",) if engine == "graph" else PRESETS:
            asks += [replace(ask, policy=policy, budget_bytes=budget) for budget in (None, *budgets)]
    return asks


def _budgets(folder: Path, ask: Ask) -> tuple[int, ...]:
    """Those that leave experts so much, beside what an engine says that all else takes."""
    with Pack(folder) as pack, Engine(pack, options_of(ask), _PROMPT + _FORCED + _GREEDY) as engine:
        use = engine.use
    torch.cuda.empty_cache()
    assert use is not None, "it is on a card"
    return tuple(use.spent - use.experts + _SLACK_BYTES + round(share * use.experts) for share in _SHARES)


def _compare(results: Results, clock: Clock, folder: Path, ask: Ask, expected: _Reference) -> None:
    with Pack(folder) as pack:
        is_rehearsal = clock.is_rehearsal

        def open_it(context_tokens: int) -> Running:
            return open_engine(pack, ask, context_tokens, is_rehearsal)

        found = _answers(open_it, expected.ids, is_rehearsal)
    off = (found.forced - expected.forced).abs().amax(1)
    same = [ours == theirs for ours, theirs in zip(found.greedy, expected.greedy, strict=True)]
    results.add(
        Answers(
            folder.name,
            ask,
            float((found.prompt - expected.prompt).abs().max()),
            float(off.max()),
            int((off > _EQUAL).sum()),
            len(off),
            (*same, False).index(False),
            len(same),
        )
    )


def _answers(open_it: Callable[[int], Running], ids: list[int], is_rehearsal: bool) -> _Reference:
    num_prompt, num_forced, num_greedy = (2, 1, 1) if is_rehearsal else (_PROMPT, _FORCED, _GREEDY)
    ids = ids[: num_prompt + num_forced]
    with closing(open_it(len(ids) + num_greedy)) as engine:
        decoder = engine.decoder
        prompt = decoder.logits(ids[:num_prompt]).cpu()
        forced = torch.stack([decoder.next_logits([token]).cpu() for token in ids[num_prompt:]])
        greedy, logits = list[int](), forced[-1]
        for _ in range(num_greedy):
            greedy.append(int(logits.argmax()))
            logits = decoder.next_logits(greedy[-1:]).cpu()
    return _Reference(ids, prompt, forced, greedy)
