"""The engine on the CPU that reads experts from the disk into pages within a budget, and what decides on them there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import drafts, model, offload
from moe_pack.runtime.cpu import is_available, reads
from moe_pack.runtime.engine import built, machine, mapped
from moe_pack.runtime.engine.drafting import DraftChoice
from moe_pack.runtime.offload import budgets
from moe_pack.runtime.offload.prefetch import make_prediction
from moe_pack.runtime.offload.presets import PredictionName

# If a token's experts of a layer have fewer bytes, `auto` predicts nothing: predicting takes longer than reading. With
# experts of 110 KB tokens took 7.5% longer (benchmarks/overlap.py of commit f1fe26a; Intel Xeon, 2026-11-22).
_LEAST_PREDICTED_BYTES = 1 << 20
TOO_FEW_TO_TRUST = "--trust-experts changes nothing: fewer experts are predicted than a token uses"


def build_offloaded(
    setup: built.Setup, computing: built.Computing, choice: DraftChoice, budget_bytes: int
) -> built.Built:
    """Builds the engine. The caller owns the operations.

    Raises:  BudgetTooSmall; RunError if an option cannot be followed.
    """
    with ExitStack() as stack:
        facts = offload_experts(setup, computing.operations, budget_bytes, setup.options.approximations, stack)
        decoder = mapped.cpu_decoder(setup, facts.weights, facts.plan.chunk_tokens)
        most = 1 + drafts.MOST_DRAFTED
        if isinstance(decoder, model.Decoder):
            most = budgets.most_verified_tokens(decoder.spec, decoder.chunk_tokens, most)
        opened = choice.open(setup, decoder, facts.weights, most)
        at_end = ExitStack()
        if facts.weights.recorder is not None and setup.options.record is not None:
            at_end.callback(facts.weights.recorder.write, setup.options.record)
        at_end.push(stack.pop_all())  # first, then the recording is written
        run = built.Facts("offloaded", facts.plan.budget, facts)
        return built.Built(setup, computing, facts.weights, decoder, opened, choice.why_not, run, at_end)


def offload_experts(
    setup: built.Setup,
    operations: model.Operations,
    budget_bytes: int,
    approximations: offload.Approximations,
    stack: ExitStack,
    is_elsewhere: NDArray[np.bool_] | None = None,
) -> built.OffloadFacts:
    """Builds what keeps experts within a budget of host memory and reads the others; the stack closes it.

    Args:    is_elsewhere: bool [L, E], the experts that a GPU has and computes: they get no memory here. None: none.
    """
    pack, options = setup.pack, setup.options
    routing = offload.Routing.open(pack) if offload.routing_bytes(pack.folder) else None
    needs = (pack.layout, budget_bytes, setup.context_tokens, offload.routing_bytes(pack.folder))
    plan, heat = offload.divide_budget(*needs, sequences=setup.sequences), None
    disk, rows_below = machine.USUAL_DISK if options.machine is None else options.machine.drive, 0.0
    # Torch needs whole experts. Where all experts fit, all rows are needed sooner or later, and whole experts are
    # computed together.
    shares = popularity_shares(pack, routing)
    is_here = np.ones(shares.shape, bool) if is_elsewhere is None else ~is_elsewhere
    has_all = int(offload.expert_pages(pack.layout, plan.page_bytes)[is_here].sum()) <= plan.num_pages
    if isinstance(operations, model.NativeOperations) and (not has_all or options.cutover is not None):
        disk, rows_below = _cutover(setup, disk)
    if rows_below > 0:
        heat = budgets.selector_heat(shares, (pack.thresholds > 0) & is_here)
        plan = offload.divide_budget(*needs, heat=heat, sequences=setup.sequences)
    has_selector = budgets.resident_selectors(pack.layout, heat, plan.num_selectors)
    facts = replace(cache_facts(pack, plan, routing, has_selector), is_elsewhere=is_elsewhere)
    preset = _preset(setup, facts, routing, rows_below)
    trace = stack.enter_context(offload.Trace(options.trace)) if options.trace else None
    expert_cache, recorder = _expert_cache(setup, facts, preset, budget_bytes)
    is_direct = reads_directly(setup, disk)
    store = offload.ExpertStore(
        pack,
        operations,
        plan,
        lambda arena: reads.open_reads(arena, is_direct, disk.threads),
        verify=options.verify == "lazy",
        rows_below=rows_below,
        gap_bytes=disk.gap_bytes(),
        has_selector=has_selector,
        trace=trace,
    )
    weights = offload.OffloadedWeights(
        pack,
        operations,
        stack.enter_context(closing(store)),
        expert_cache,
        scores_matter=preset.needs_scores or recorder is not None,
        reuses_selector=preset.reuse_selector and options.prefetches and rows_below > 0,
        approximations=approximations,
        recorder=recorder,
        trace=trace,
    )
    stack.enter_context(closing(weights))
    weights.prefetcher = prefetcher_for(setup, preset, weights, routing)
    return built.OffloadFacts(plan, preset, weights, is_direct)


def _expert_cache(
    setup: built.Setup, facts: offload.CacheFacts, preset: offload.Preset, budget_bytes: int
) -> tuple[offload.ExpertCache, offload.Recorder | None]:
    """Returns the cache of a preset, and the recorder of its decisions if the options ask for one."""
    if setup.options.record is None:
        return offload.expert_cache_for(preset, facts), None
    offload.check_writable(setup.options.record)
    root, context = setup.pack.manifest.root, setup.context_tokens
    recorder = offload.Recorder(facts, root, preset.name, budget_bytes, context, keeps_scores=True)
    return offload.recorded_expert_cache_for(preset, facts, recorder), recorder


# ---- policies -------------------------------------------------------------------------------------------------------


def _preset(
    setup: built.Setup, facts: offload.CacheFacts, routing: offload.Routing | None, rows_below: float
) -> offload.Preset:
    """Returns the policies of `--policy`; for `auto` those with the most hits on the profile's routes."""
    if setup.options.policy != "auto":
        return offload.PRESETS[setup.options.policy]
    passes = None
    if routing is not None and len(routing.routes):
        pass_tokens = np.ones(len(routing.routes), np.uint32)
        passes = offload.Passes(routing.routes, pass_tokens, None, facts.popularity)
    return auto_preset(passes, facts, setup.pack.index.size, rows_below)


def auto_preset(
    passes: offload.Passes | None, facts: offload.CacheFacts, extent_bytes: NDArray[np.int64], rows_below: float = 0.0
) -> offload.Preset:
    """Returns the preset of `--policy auto`: the eviction with the most hits on such routes, and the best prediction.

    If single rows are read (`rows_below` above 0), the next layer's selectors predict them. Without routes it evicts as
    EdgeMoE does: layers come in turn, and the layer that ran longest ago is needed next (docs/benchmarks/memory.md).
    """
    name: offload.PolicyName = "edgemoe" if passes is None else offload.auto_policy(passes, facts, extent_bytes)[0]
    token_bytes = facts.num_active * int(extent_bytes.max())
    prediction: PredictionName = "best" if token_bytes >= _LEAST_PREDICTED_BYTES else "none"
    return replace(
        offload.PRESETS[name],
        prediction=prediction,
        max_predicted=None,
        rows_below=rows_below,
        reuse_selector=rows_below > 0,
    )


def prefetcher_for(
    setup: built.Setup, preset: offload.Preset, weights: offload.OffloadedWeights, routing: offload.Routing | None
) -> offload.Prefetcher | None:
    """Returns what prefetches experts for these weights by the preset's prediction; None with `--no-prefetch`."""
    router, options = setup.pack.spec.router, setup.options
    num_ahead = preset.num_predicted(router.num_experts_per_tok) if options.prefetches else 0
    if options.approximations.runs_predicted and num_ahead < router.num_experts_per_tok:
        setup.fall_back(TOO_FEW_TO_TRUST)
    if not options.prefetches:
        return None
    prediction = make_prediction(predicted_by(preset, routing, setup.fall_back), weights, routing)
    return offload.Prefetcher(prediction, router.num_experts, router.num_experts_per_tok, num_ahead)


def predicted_by(
    preset: offload.Preset, routing: offload.Routing | None, fall_back: Callable[[str], None]
) -> PredictionName:
    """Returns the prediction of a preset, or what replaces one that needs a profile's routing."""
    if preset.prediction in ("popularity", "paths", "mlp") and routing is None:
        fall_back(
            f"the next layer's router predicts, not {preset.prediction}: the pack has no routing of a profile; "
            "moe-pack attach adds it"
        )
        return "router"
    return preset.prediction


def cache_facts(
    pack: formats.Pack,
    plan: offload.BudgetPlan,
    routing: offload.Routing | None,
    has_selector: NDArray[np.bool_] | None = None,
) -> offload.CacheFacts:
    """Returns what a policy knows about a pack inside a budget.

    Args:    has_selector: bool [L, E], the experts whose selectors stay in memory; None: no expert's does.
    """
    pages = offload.expert_pages(pack.layout, plan.page_bytes, has_selector)
    k, shares = pack.spec.router.num_experts_per_tok, popularity_shares(pack, routing)
    return offload.CacheFacts(pages, plan.num_pages, k, shares, first_moe_layers(pack.spec)[-1])


def popularity_shares(pack: formats.Pack, routing: offload.Routing | None) -> NDArray[np.float32]:
    """Returns the share of a layer's tokens that each expert gets, float32 [L, E]; equal shares without a profile."""
    counts = np.ones(pack.index.size.shape) if routing is None else routing.popularity
    shares: NDArray[np.float32] = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


# ---- reads ----------------------------------------------------------------------------------------------------------


def runs_some_neurons(pack: formats.Pack) -> bool:
    """Returns whether not all neurons of a pack run, so that single rows of experts may be read."""
    return pack.manifest.selector != "none" and bool(pack.thresholds.any())


def _cutover(setup: built.Setup, disk: machine.DiskFacts) -> tuple[machine.DiskFacts, float]:
    """Returns the share of running neurons below which single rows are read, 0 for never, and the disk.

    It is that of `--cutover`, else the policy's; `auto` takes that of the disk, which is measured now if it was not.
    """
    options = setup.options
    if not runs_some_neurons(setup.pack):
        return disk, 0.0
    if options.cutover is not None:
        return disk, options.cutover
    if options.policy != "auto":
        return disk, offload.PRESETS[options.policy].rows_below
    if options.machine is None and setup.measure_disk is not None:
        disk = setup.measure_disk().drive
    return disk, machine.disk_cutover(setup.pack.layout, disk)


def reads_directly(setup: built.Setup, disk: machine.DiskFacts) -> bool:
    """Returns whether reads of this run bypass the system's cache.

    Raises:  RunError if `--read direct` is not possible.
    """
    mode, pack = setup.options.read, setup.pack
    is_direct = mode != "pread" and not (mode == "auto" and disk.mode == "pread")
    if is_direct and not reads.reads_directly(pack.folder / pack.manifest.expert_files[0].name):
        if mode == "direct":
            raise formats.RunError(
                "--read direct: the pack's file system has no direct reads; use --read pread or auto"
            )
        setup.fall_back("reads go through the system's cache: the file system has no direct reads")
        is_direct = False
    if not is_available():
        setup.fall_back("reads wait for one another: native reads were not built")
    return is_direct
