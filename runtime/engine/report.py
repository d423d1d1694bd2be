"""The report of a run: what really ran, as figures for programs and as lines for people.

`moe-run --bench --json` prints the fields of `RunReport` under their names; docs/moe-run.md describes each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_pack.formats import size_text
from moe_pack.formats.base.limits import num_cores
from moe_pack.runtime import cpu, model
from moe_pack.runtime.engine.engine import Engine
from moe_pack.runtime.engine.machine import anonymous_bytes
from moe_pack.runtime.engine.numerics import NumericsMode, mode_text
from moe_pack.runtime.gpu import fit
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import BudgetPlan, PhaseCounts

if TYPE_CHECKING:
    from moe_pack.runtime.drafts import Drafts
    from moe_pack.runtime.engine.built import GpuFacts, OffloadFacts


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Offload in prefill, or in decode; the counts are those of `PhaseCounts`."""

    tokens: int
    experts_needed: int
    hits: int
    prefetched: int
    prefetched_chosen: int
    prefetched_abandoned: int
    substituted: int
    mispredicted: int
    stall_s: float  # in which the computation waited for bytes
    asked_bytes: int


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Offload by the host's decisions."""

    policy: str
    prediction: str
    direct: bool
    plan: BudgetPlan  # the division of the budget of host memory
    prefill: PhaseReport
    decode: PhaseReport
    read_needed: int  # bytes that were read after a router chose them
    read_ahead: int  # bytes that were read before
    num_reads: int
    read_s: float  # in which at least one read was in progress
    peak_pages: int  # the most that experts had at once


@dataclass(frozen=True, slots=True)
class GpuReport:
    """A run on a GPU."""

    misses: str  # `pull`, `auto`, `cpu` or `disk`: who brings or computes the rows that are not in GPU memory
    policy: str  # by which records come and go
    prediction: str  # of experts
    use: fit.GpuMemoryUse
    num_layers: int
    used_bytes: int  # GPU memory that the driver counts at the end
    locked_bytes: int  # page-locked host memory for experts
    counts: fit.GpuCounts  # of tokens that ran alone


@dataclass(frozen=True, slots=True)
class DraftReport:
    """Drafts in decode."""

    passes: int
    proposed: int  # passes for which there was a proposal
    drafted: int  # tokens that were verified behind another
    accepted: int  # drafted tokens that were right
    tokens_per_pass: float  # new tokens of the text, on average
    layer_bytes: int  # of the prediction layer that drafts; 0 if none does


@dataclass(frozen=True, slots=True)
class RunReport:
    """The work of an engine since it was built."""

    computed_by: str
    numerics: NumericsMode  # the mode in which inputs were rounded
    numerics_kl: float | None  # its loss for this pack, in nats a token; None if not measured, or nothing is lost
    dense_bytes: int
    kv_cache_bytes: int
    context_tokens: int
    experts_asked_for_bytes: int  # of the needed experts, in memory or not
    panel_bytes: int  # of experts' copies in panels
    anonymous_bytes: int | None  # the process's own memory; None where the system does not report it
    stream: OffloadReport | None  # None unless the host decides which experts to bring
    gpu: GpuReport | None  # None on the CPU; of several GPUs the first, which has the last layers
    other_gpus: tuple[GpuReport, ...]
    drafts: DraftReport | None  # None where nothing drafts
    why_no_drafts: str | None  # None also if the options say it
    fallbacks: tuple[str, ...]


def report(engine: Engine) -> RunReport:
    """Reports what an engine has done until now."""
    built = engine.built
    others = [facts.engine for facts in built.facts.other_gpus]
    return RunReport(
        computed_by=_computed_by(engine),
        numerics=built.computing.numerics,
        numerics_kl=built.computing.numerics_kl,
        dense_bytes=engine.weights.dense_bytes + sum(other.weights.dense_bytes for other in others),
        kv_cache_bytes=_cache_bytes(engine.decoder),
        context_tokens=engine.decoder.cache.context_tokens,
        experts_asked_for_bytes=engine.weights.bytes_read + sum(other.weights.bytes_read for other in others),
        panel_bytes=engine.weights.panels.num_bytes if isinstance(engine.weights, MappedPackWeights) else 0,
        anonymous_bytes=anonymous_bytes(),
        stream=None if built.facts.offload is None else _offload(built.facts.offload, engine.options.prefetches),
        gpu=None if built.facts.gpu is None else _gpu(built.facts.gpu),
        other_gpus=tuple(map(_gpu, built.facts.other_gpus)),
        drafts=None if built.drafts is None else _drafts(built.drafts, built.setup.sequences.draft_bytes),
        why_no_drafts=engine.why_no_drafts,
        fallbacks=tuple(engine.fallbacks),
    )


def _cache_bytes(decoder: model.Decoder | model.EncoderDecoder) -> int:
    if not isinstance(decoder, model.Decoder):
        return decoder.cache.num_bytes
    return sum(sequence.num_bytes for sequence in decoder.sequences)


def _computed_by(engine: Engine) -> str:
    num_threads = engine.options.threads or num_cores()
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    if isinstance(engine.operations, model.NativeOperations):
        return f"native kernels, {engine.operations.kernels.instruction_set}, {threads}"
    if engine.options.device != "cpu":
        return f"Triton kernels on {engine.options.device}"
    if not cpu.is_available():
        return f"torch, {threads}; native kernels {cpu.why_unavailable()}"
    return f"torch on cpu, {threads}"


def _offload(facts: OffloadFacts, prefetches: bool) -> OffloadReport:
    weights, stats = facts.weights, facts.weights.store.reads.stats()
    return OffloadReport(
        policy=facts.preset.name,
        prediction=facts.preset.prediction if prefetches else "none",
        direct=facts.is_direct,
        plan=facts.plan,
        prefill=_phase(weights.prefill),
        decode=_phase(weights.decode),
        read_needed=stats.bytes_urgent,
        read_ahead=stats.bytes_prefetched,
        num_reads=stats.num_reads,
        read_s=stats.busy_ns / 1e9,
        peak_pages=weights.store.peak_pages,
    )


def _phase(counts: PhaseCounts) -> PhaseReport:
    return PhaseReport(
        tokens=counts.tokens,
        experts_needed=counts.needed,
        hits=counts.hits,
        prefetched=counts.prefetched,
        prefetched_chosen=counts.prefetched_chosen,
        prefetched_abandoned=counts.prefetched_abandoned,
        substituted=counts.substituted,
        mispredicted=counts.mispredicted,
        stall_s=counts.stall_ns / 1e9,
        asked_bytes=counts.asked_bytes,
    )


def _gpu(facts: GpuFacts) -> GpuReport:
    names, engine = (facts.misses, facts.preset.name, facts.preset.prediction), facts.engine
    num_layers, used_bytes = engine.weights.spec.num_hidden_layers, facts.memory.used_bytes()
    return GpuReport(*names, facts.use, num_layers, used_bytes, facts.locked_bytes, engine.decoder.counts())


def _drafts(drafts: Drafts, layer_bytes: int) -> DraftReport:
    found = drafts.counts
    counts = (found.passes, found.proposed, found.drafted, found.accepted, found.tokens_per_pass)
    return DraftReport(*counts, layer_bytes=layer_bytes)


def report_lines(facts: RunReport) -> list[tuple[str, str]]:
    """Returns a report as names and values, for people."""
    cache = f"{size_text(facts.kv_cache_bytes)} for {facts.context_tokens} tokens"
    lines = [("dense weights", size_text(facts.dense_bytes)), ("key-value cache", cache)]
    if facts.gpu is not None:
        lines += _gpu_lines(facts.gpu)
        if facts.other_gpus:
            lines += [(f"GPU {n}", _layers_text(gpu)) for n, gpu in enumerate((facts.gpu, *facts.other_gpus))]
    if facts.stream is not None:
        lines += _offload_lines(facts.stream)
    elif facts.gpu is None:
        used = f"{size_text(facts.experts_asked_for_bytes)} in all, each as often as it was used, in the mapped files"
        lines.insert(0, ("experts used", used))
        if facts.panel_bytes:
            lines.append(("experts copied", f"{size_text(facts.panel_bytes)}, to panels, which multiply faster"))
    if facts.drafts is not None:
        lines.append(("drafts", _draft_text(facts.drafts)))
        if facts.drafts.layer_bytes:
            lines.append(("prediction layer", size_text(facts.drafts.layer_bytes)))
    elif facts.why_no_drafts is not None:
        lines.append(("drafts", f"none: {facts.why_no_drafts}"))
    if facts.anonymous_bytes is not None:
        lines.append(("memory", f"{size_text(facts.anonymous_bytes)} of the process's own, with its libraries"))
    lines.append(("computed by", facts.computed_by))
    if facts.gpu is None:
        lines.append(("numerics", mode_text(facts.numerics, facts.numerics_kl)))
    return lines + [("fallback", what) for what in facts.fallbacks]


def _draft_text(drafts: DraftReport) -> str:
    if not drafts.drafted:
        return f"none in {drafts.passes} passes, {drafts.proposed} of which had a proposal"
    return (
        f"{drafts.accepted} of {drafts.drafted} drafted tokens were right; {drafts.tokens_per_pass:.2f} tokens a pass "
        f"in {drafts.passes} passes"
    )


_MISSES = {
    "pull": "pulled over the link",
    "auto": "shared between the CPU and the link",
    "cpu": "computed by the CPU",
    "disk": "computed by the CPU, which reads experts from the disk",
}


def _gpu_lines(gpu: GpuReport) -> list[tuple[str, str]]:
    use, counts = gpu.use, gpu.counts
    lines = [
        ("GPU memory", f"{size_text(use.budget)}, {size_text(gpu.used_bytes)} in use"),
        ("for experts", f"{size_text(use.experts)}, {size_text(use.dynamic)} of it for rows on their way"),
        ("overhead", f"{size_text(use.overhead)}, as measured: driver, kernels and workspace"),
        ("page-locked", f"{size_text(gpu.locked_bytes)} of host memory"),
        ("missing rows", _MISSES[gpu.misses]),
    ]
    if gpu.misses != "disk":  # there the policy is the CPU's
        lines.append(("policy", _policy_text(gpu.policy, gpu.prediction)))
    needed = counts.resident + counts.pulled + counts.left
    if needed:
        shares = f"{counts.resident / needed:.1%} were resident, {counts.pulled / needed:.1%} pulled"
        lines.append(("neurons", f"{shares}, {counts.left / needed:.1%} computed by the CPU, in decode"))
        lines.append(("copied", f"{size_text(counts.link_bytes)} over the link in {counts.tokens} tokens"))
    if counts.ahead:
        right = counts.ahead_ran / counts.ahead
        lines.append(("pulled ahead", f"{counts.ahead} records of predicted experts, {right:.0%} of them needed"))
    if counts.changed:
        number = counts.changed
        lines.append(("changed", f"{number} experts ran in place of the router's: the answer is not the pack's"))
    if counts.cpu_seconds:
        lines.append(("CPU's share", f"computed in {counts.cpu_seconds:.2f} s, in {counts.tokens} tokens"))
    if counts.whole:
        lines.append(("experts", f"{counts.whole} were computed by the CPU as a whole"))
    return lines


def _layers_text(gpu: GpuReport) -> str:
    use, counts = gpu.use, gpu.counts
    needed = counts.resident + counts.pulled + counts.left
    resident = f"; {counts.resident / needed:.1%} of neurons were resident in decode" if needed else ""
    memory = f"{size_text(use.budget)}, {size_text(gpu.used_bytes)} in use, {size_text(use.experts)} for experts"
    return f"{gpu.num_layers} layers: {memory}{resident}"


def _policy_text(policy: str, prediction: str) -> str:
    return policy if prediction == "none" else f"{policy}, predicting by {prediction}"


def _offload_lines(offload: OffloadReport) -> list[tuple[str, str]]:
    read = offload.read_needed + offload.read_ahead
    rate = f", {read / offload.read_s / 1e6:,.0f} MB/s" if offload.read_s else ""
    way = "bypassing the system's cache" if offload.direct else "through the system's cache"
    lines = [
        *_plan_lines(offload),
        ("policy", _policy_text(offload.policy, offload.prediction)),
        ("prefill", _phase_text(offload.prefill)),
        ("decode", _phase_text(offload.decode)),
        ("experts read", f"{size_text(read)}, {size_text(offload.read_ahead)} of it prefetched{rate}, {way}"),
    ]
    prefetched = offload.prefill.prefetched + offload.decode.prefetched
    if prefetched:
        right = offload.prefill.prefetched_chosen + offload.decode.prefetched_chosen
        lines.append(("prefetched", f"{prefetched} experts, {right / prefetched:.0%} of them chosen"))
    if offload.decode.substituted:
        lines.append(("substituted", f"{offload.decode.substituted} experts: the answer is not the pack's"))
    if offload.decode.mispredicted:
        number = offload.decode.mispredicted
        lines.append(("mispredicted", f"{number} experts ran in place of the router's: the answer is not the pack's"))
    if offload.read_s:
        hidden = 1 - (offload.prefill.stall_s + offload.decode.stall_s) / offload.read_s
        lines.append(("read time", f"{offload.read_s:.2f} s, {max(hidden, 0):.0%} of it without a stall"))
    return lines


def _plan_lines(offload: OffloadReport) -> list[tuple[str, str]]:
    plan = offload.plan
    lines = [
        ("budget", f"{size_text(plan.budget)}, {size_text(plan.spent)} of it used"),
        ("for experts", f"{size_text(plan.arena)}, {offload.peak_pages / plan.num_pages:.0%} of it in use at most"),
    ]
    if plan.num_selectors:
        resident = f"{size_text(plan.selectors)}: those of {plan.num_selectors} experts stay in memory"
        lines.append(("selectors", resident))
    return lines


def _phase_text(phase: PhaseReport) -> str:
    if not phase.experts_needed:
        return "no experts needed"
    rate = phase.hits / phase.experts_needed
    read = size_text(phase.asked_bytes / phase.tokens)
    return (
        f"{rate:.1%} of {phase.experts_needed} experts were resident or on their way; {read} read for a token, "
        f"{phase.stall_s:.2f} s stalled"
    )
