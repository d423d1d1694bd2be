"""The choices of a run that offloads experts: policy, expert cache, prefetcher, reads and recording.

If a choice needs something that is missing, there is another choice, and the engine lists it as a fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import offload
from moe_pack.runtime.cpu import is_available, reads
from moe_pack.runtime.cpu.reads import open_reads
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.options import EngineOptions
from moe_pack.runtime.offload.prefetch import make_prediction
from moe_pack.runtime.offload.presets import PredictionName

# If a token's experts of a layer have fewer bytes, `auto` predicts nothing: predicting takes longer than reading. With
# experts of 110 KB tokens took 7.5% longer (tests/bench/offloading.py overlap, the demo model; Intel Xeon, 2026-11-22).
_LEAST_PREDICTED_BYTES = 1 << 20
TOO_FEW_TO_TRUST = "--trust-experts changes nothing: fewer experts are predicted than a token uses"


class OffloadChoices:
    """Chooses what decides on the experts of a run, as the options say; the engine asks for one part after the other.

    `preset`: the policies, None until `choose_preset`.   `reads`: None until `open_reads`.   `is_direct`: whether reads
    bypass the system's cache.   `recorder`: None without `--record`.
    Args:    fall_back: notes a fallback; may raise RunError.   measure_disk: is called if a choice depends on the disk
             and the options have no measurement; None: the usual disk is assumed.
    """

    def __init__(
        self,
        pack: formats.Pack,
        options: EngineOptions,
        fall_back: Callable[[str], None],
        measure_disk: Callable[[], machine.MachineFacts] | None = None,
    ) -> None:
        self.routing = offload.Routing.open(pack) if offload.routing_bytes(pack.folder) else None
        self.preset: offload.Preset | None = None
        self.reads: reads.Reads | None = None
        self.is_direct = False
        self.recorder: offload.Recorder | None = None
        self._pack, self._options, self._fall_back = pack, options, fall_back
        self._machine, self._measure_disk = options.machine, measure_disk

    def choose_preset(self, facts: offload.CacheFacts, rows_below: float) -> offload.Preset:
        """Returns the policies of `--policy`; for `auto` those with the most hits on the profile's routes.

        Args:    rows_below: the cutover for `auto`.
        """
        if self._options.policy != "auto":
            self.preset = offload.PRESETS[self._options.policy]
        else:
            self.preset = auto_preset(self._profile_passes(facts), facts, self._pack.index.size, rows_below)
        return self.preset

    def _profile_passes(self, facts: offload.CacheFacts) -> offload.Passes | None:
        """Returns the profile's routes as passes of one token each; None if there are none."""
        if self.routing is None or not len(self.routing.routes):
            return None
        pass_tokens = np.ones(len(self.routing.routes), np.uint32)
        return offload.Passes(self.routing.routes, pass_tokens, None, facts.popularity)

    def open_cache(
        self, preset: offload.Preset, facts: offload.CacheFacts, budget_bytes: int, context_tokens: int
    ) -> offload.ExpertCache:
        """Returns an empty expert cache that follows a preset; with `--record`, one that `recorder` writes down.

        Args:    budget_bytes, context_tokens: of the run; the recording names them.
        Raises:  RunError if the recording cannot be written where `--record` says.
        """
        path = self._options.record
        if path is None:
            return offload.expert_cache_for(preset, facts)
        from moe_pack.runtime.offload.record import check_writable

        check_writable(path)
        root = self._pack.manifest.root
        self.recorder = offload.Recorder(facts, root, preset.name, budget_bytes, context_tokens, keeps_scores=True)
        return offload.recorded_expert_cache_for(preset, facts, self.recorder)

    def write_record(self) -> None:
        """Writes the recording, once, if there is one.

        Raises:  RunError if it cannot be written.
        """
        recorder, self.recorder = self.recorder, None
        if recorder is not None and self._options.record is not None:
            recorder.write(self._options.record)

    def needs_scores(self, preset: offload.Preset) -> bool:
        """Whether the policy or the recording uses the routers' scores of all experts."""
        return preset.needs_scores or self._options.record is not None

    def prefetcher(self, preset: offload.Preset, weights: offload.OffloadedWeights) -> offload.Prefetcher | None:
        """Returns what prefetches experts for these weights by the preset's prediction; None with `--no-prefetch`."""
        router = self._pack.spec.router
        num_ahead = preset.num_predicted(router.num_experts_per_tok) if self._options.prefetches else 0
        if self._options.approximations.runs_predicted and num_ahead < router.num_experts_per_tok:
            self._fall_back(TOO_FEW_TO_TRUST)
        if not self._options.prefetches:
            return None
        name = predicted_by(preset, self.routing, self._fall_back)
        prediction = make_prediction(name, weights, self.routing)
        return offload.Prefetcher(prediction, router.num_experts, router.num_experts_per_tok, num_ahead)

    def cutover(self) -> float:
        """Returns the share of running neurons below which single rows are read from the disk; 0: never.

        It is that of `--cutover`, else the policy's; `auto` takes that of the disk.
        """
        options = self._options
        if not runs_some_neurons(self._pack):
            return 0.0
        if options.cutover is not None:
            return options.cutover
        if options.policy != "auto":
            return offload.PRESETS[options.policy].rows_below
        if self._machine is None and self._measure_disk is not None:
            self._machine = self._measure_disk()
        return machine.disk_cutover(self._pack.layout, self._disk)

    def gap_bytes(self) -> int:
        """Returns the most bytes between two rows that one read covers."""
        return self._disk.gap_bytes()

    @property
    def _disk(self) -> machine.DiskFacts:
        """The disk as it was measured, or the usual one."""
        return machine.USUAL_DISK if self._machine is None else self._machine.drive

    def open_reads(self, arena: NDArray[np.uint8]) -> reads.Reads:
        """Opens the reads of this run, which fill an arena u8 [bytes]; the caller closes them.

        Raises:  RunError if `--read direct` is not possible.
        """
        self.is_direct = self._can_read_directly()
        self.reads = open_reads(arena, self.is_direct, self._disk.threads)
        if not is_available():
            self._fall_back("reads wait for one another: native reads were not built")
        return self.reads

    def _can_read_directly(self) -> bool:
        mode = self._options.read
        if mode == "pread" or (mode == "auto" and self._disk.mode == "pread"):
            return False
        if reads.reads_directly(self._pack.folder / self._pack.manifest.expert_files[0].name):
            return True
        if mode == "direct":
            raise formats.RunError(
                "--read direct: the pack's file system has no direct reads; use --read pread or auto"
            )
        self._fall_back("reads go through the system's cache: the file system has no direct reads")
        return False


def auto_preset(
    passes: offload.Passes | None, facts: offload.CacheFacts, extent_bytes: NDArray[np.int64], rows_below: float = 0.0
) -> offload.Preset:
    """Returns the preset of `--policy auto`: the eviction with the most hits on such routes, and the best prediction.

    Where single rows are read (`rows_below` above 0), the next layer's selectors predict them.

    Without routes it evicts as EdgeMoE does: layers come in turn, and the layer that ran longest ago is needed next.
    Measured on synthetic packs (docs/benchmarks/memory.md).
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


def predicted_by(
    preset: offload.Preset, routing: offload.Routing | None, fall_back: Callable[[str], None]
) -> PredictionName:
    """Returns the prediction of a preset, or what replaces one that needs a profile's routing.

    Args:    routing: of the pack's folder; None if there is none.   fall_back: notes a fallback; may raise RunError.
    """
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


def runs_some_neurons(pack: formats.Pack) -> bool:
    """Returns whether not all neurons of a pack run, so that single rows of experts may be read."""
    return pack.manifest.selector != "none" and bool(pack.thresholds.any())


def popularity_shares(pack: formats.Pack, routing: offload.Routing | None) -> NDArray[np.float32]:
    """Returns the share of a layer's tokens that each expert gets, float32 [L, E]; equal shares without a profile."""
    counts = np.ones(pack.index.size.shape) if routing is None else routing.popularity
    shares: NDArray[np.float32] = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares
