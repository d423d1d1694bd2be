"""What really ran: figures of a run as facts, for people and for programs."""

from dataclasses import dataclass

from moe_pack.formats import size_text
from moe_pack.runtime.cpu import is_available, num_cpus, why_unavailable
from moe_pack.runtime.engine import Engine
from moe_pack.runtime.gpu.fit import CountsCache, GpuCacheCounts, GpuMemoryUse
from moe_pack.runtime.machine import anonymous_bytes
from moe_pack.runtime.model import NativeOperations
from moe_pack.runtime.offload import BudgetPlan, OffloadedWeights, PhaseCounts
from moe_pack.runtime.offload.disk import ReadStats


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Prefill, or decoding: see `PhaseCounts`. `stall_s`: seconds waited for reads."""

    tokens: int
    experts_needed: int
    hits: int
    foretold: int
    foretold_right: int
    foretold_abandoned: int
    substituted: int
    stall_s: float
    asked_bytes: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Experts that stream by the host's decisions. Sizes in bytes; `read_s`: while at least one read was under way.

    `plan`: of the budget; None on a card.   `peak_pages`: of the plan's, that experts had at once.
    """

    policy: str
    prediction: str
    direct: bool
    plan: BudgetPlan | None
    prefill: PhaseReport
    decode: PhaseReport
    read_needed: int
    read_ahead: int
    num_reads: int
    read_s: float
    peak_pages: int


@dataclass(frozen=True, slots=True)
class GpuReport:
    """A run on a card. `used_bytes`: what the driver charged at the end.   `locked_bytes`: of host memory for experts.

    `pulled`: what the graph engine was asked and pulled; None where experts are staged.
    """

    engine: str
    use: GpuMemoryUse
    used_bytes: int
    locked_bytes: int
    pulled: GpuCacheCounts | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """`stream`: None where the host does not decide on experts.   `anonymous_bytes`: None where not known.

    `card`: None on the CPU.
    """

    computed_by: str
    dense_bytes: int
    kv_cache_bytes: int
    context_tokens: int
    experts_asked_for_bytes: int
    anonymous_bytes: int | None
    stream: StreamReport | None
    card: GpuReport | None
    fallbacks: tuple[str, ...]


def report(engine: Engine) -> RunReport:
    """What an engine has done until now."""
    cache = engine.decoder.cache
    return RunReport(
        computed_by=_computed_by(engine),
        dense_bytes=engine.weights.dense_bytes,
        kv_cache_bytes=cache.num_bytes,
        context_tokens=cache.context_tokens,
        experts_asked_for_bytes=engine.weights.bytes_read,
        anonymous_bytes=anonymous_bytes(),
        stream=_stream(engine),
        card=_card(engine),
        fallbacks=tuple(engine.fallbacks),
    )


def _stream(engine: Engine) -> StreamReport | None:
    weights = engine.weights
    if not isinstance(weights, OffloadedWeights):
        return None
    assert engine.preset is not None, "what streams has one"
    stats = ReadStats() if engine.reads is None else engine.reads.stats()
    return StreamReport(
        policy=engine.preset.name,
        prediction=engine.preset.prediction if engine.options.foretells else "none",
        direct=engine.is_direct,
        plan=engine.plan,
        prefill=_phase(weights.prefill),
        decode=_phase(weights.decode),
        read_needed=stats.bytes_urgent,
        read_ahead=stats.bytes_ahead,
        num_reads=stats.num_reads,
        read_s=stats.busy_ns / 1e9,
        peak_pages=weights.store.peak_pages,
    )


def _card(engine: Engine) -> GpuReport | None:
    if engine.card_memory is None or engine.use is None:
        return None
    pulled = engine.decoder.counts() if isinstance(engine.decoder, CountsCache) else None
    locked = 0 if engine.host is None else engine.host.locked_bytes
    return GpuReport(engine.engine, engine.use, engine.card_memory.used_bytes(), locked, pulled)


def _phase(counts: PhaseCounts) -> PhaseReport:
    return PhaseReport(
        counts.tokens,
        counts.needed,
        counts.hits,
        counts.foretold,
        counts.right,
        counts.abandoned,
        counts.substituted,
        counts.stall_ns / 1e9,
        counts.asked_bytes,
    )


def report_lines(facts: RunReport) -> list[tuple[str, str]]:
    """A report as names and values, for people."""
    cache = f"{size_text(facts.kv_cache_bytes)} for {facts.context_tokens} tokens"
    lines = [("dense weights", size_text(facts.dense_bytes)), ("key-value cache", cache)]
    if facts.card is not None:
        lines += _card_lines(facts.card)
    if facts.stream is not None:
        lines += _stream_lines(facts.stream)
    elif facts.card is None:
        lines.insert(0, ("experts used", f"{size_text(facts.experts_asked_for_bytes)}, where they lie in mapped files"))
    if facts.anonymous_bytes is not None:
        lines.append(("memory", f"{size_text(facts.anonymous_bytes)} of the process's own, libraries' too"))
    lines.append(("computed by", facts.computed_by))
    return lines + [("fallback", what) for what in facts.fallbacks]


def _card_lines(card: GpuReport) -> list[tuple[str, str]]:
    use = card.use
    lines = [
        ("engine", card.engine),
        ("budget", f"{size_text(use.budget)} of the card, {size_text(card.used_bytes)} in use"),
        ("for experts", f"{size_text(use.experts)}, {size_text(use.pages)} of it for those that come and go"),
        ("overhead", f"{size_text(use.overhead)}, measured: the driver's, kernels, room to work in"),
        ("page-locked", f"{size_text(card.locked_bytes)} of host memory"),
    ]
    if card.pulled is not None and card.pulled.needed:
        pulled = card.pulled
        lines.append(
            (
                "experts",
                f"{pulled.hits / pulled.needed:.1%} of {pulled.needed} had their pages; {size_text(pulled.num_bytes)} "
                f"pulled, {pulled.rows} rows",
            )
        )
    return lines


def _stream_lines(stream: StreamReport) -> list[tuple[str, str]]:
    read = stream.read_needed + stream.read_ahead
    rate = f", {read / stream.read_s / 1e6:,.0f} MB/s" if stream.read_s else ""
    way = "past the system's cache" if stream.direct else "through the system's cache"
    lines = [
        *_plan_lines(stream),
        ("policy", stream.policy + ("" if stream.prediction == "none" else f", foretelling by {stream.prediction}")),
        ("prefill", _phase_text(stream.prefill)),
        ("decode", _phase_text(stream.decode)),
        ("experts read", f"{size_text(read)}, {size_text(stream.read_ahead)} of it ahead{rate}, {way}"),
    ]
    foretold = stream.prefill.foretold + stream.decode.foretold
    if foretold:
        right = stream.prefill.foretold_right + stream.decode.foretold_right
        lines.append(("foretold", f"{foretold} experts, {right / foretold:.0%} of them chosen"))
    if stream.decode.substituted:
        lines.append(("substituted", f"{stream.decode.substituted} experts: another answer than the pack's"))
    if stream.read_s:
        hidden = 1 - (stream.prefill.stall_s + stream.decode.stall_s) / stream.read_s
        lines.append(("read time", f"{stream.read_s:.2f} s, {max(hidden, 0):.0%} of it behind computation"))
    return lines


def _plan_lines(stream: StreamReport) -> list[tuple[str, str]]:
    plan = stream.plan
    if plan is None:
        return []
    return [
        ("budget", f"{size_text(plan.budget)}, {size_text(plan.spent)} spent"),
        ("for experts", f"{size_text(plan.arena)}, {stream.peak_pages / plan.num_pages:.0%} of it at most in use"),
    ]


def _phase_text(phase: PhaseReport) -> str:
    if not phase.experts_needed:
        return "no experts needed"
    rate = phase.hits / phase.experts_needed
    read = size_text(phase.asked_bytes / phase.tokens)
    return (
        f"{rate:.1%} of {phase.experts_needed} experts were there or on their way; {read} read a token, "
        f"waited {phase.stall_s:.2f} s"
    )


def _computed_by(engine: Engine) -> str:
    threads = engine.options.threads or num_cpus()
    counted = f"{threads} thread{'s' if threads > 1 else ''}"
    if isinstance(engine.operations, NativeOperations):
        return f"native kernels, {engine.operations.kernels.instruction_set}, {counted}"
    if engine.options.device != "cpu":
        return f"Triton kernels on {engine.options.device}"
    if not is_available():
        return f"torch, {counted}; native kernels {why_unavailable()}"
    return f"torch on cpu, {counted}"
