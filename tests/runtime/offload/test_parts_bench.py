"""The benchmark of the papers' parts: it runs what the engine runs where moe-run has options for the same parts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchlib.parts_side import Parts, open_parts
from support.models import DEMO_MODEL, pack
from support.streaming import budget_for

from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.offload import PRESETS, Approximations, OffloadedWeights, PhaseCounts, Preset

IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
CONTEXT, NUM_EXPERTS = 32, 12
FLOE = Parts(replace(PRESETS["floe"], prediction="router"), selectors=True)  # the pack has no networks

pytestmark = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


@pytest.fixture(scope="module")
def sparse_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one threshold, which most of the neurons do not reach."""
    folder = tmp_path_factory.mktemp("parts") / "sparse"
    pack(DEMO_MODEL, folder, group=64)
    with Pack(folder) as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(folder, np.full(shape, 0.8, np.float32))
    return folder


def steady_counts(counts: PhaseCounts) -> tuple[int, ...]:
    """Counts that do not depend on the disk's speed, if nothing is predicted."""
    return counts.tokens, counts.needed, counts.hits, counts.asked_bytes, counts.in_part


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (Parts(PRESETS["lru"]), EngineOptions(policy="lru")),
        (Parts(Preset("lru", "lru", rows_below=1.0), selectors=True), EngineOptions(policy="lru", cutover=1.0)),
        (FLOE, EngineOptions(policy="floe")),
        (
            Parts(PRESETS["importance"].without_prediction(), substitute=0.3),
            EngineOptions(policy="importance", prefetches=False, approximations=Approximations(substitute=0.3)),
        ),
    ],
    ids=["nothing", "rows and selectors", "FloE", "substitution"],
)
def test_parts_that_moe_run_has_options_for_run_as_in_the_engine(
    sparse_pack: Path, parts: Parts, options: EngineOptions
) -> None:
    with Pack(sparse_pack) as opened:
        given = replace(options, budget_bytes=budget_for(opened, NUM_EXPERTS, CONTEXT))
        with Engine(opened, given, CONTEXT) as engine:
            expected = [engine.decoder.next_logits([token]) for token in IDS]
            assert isinstance(engine.weights, OffloadedWeights) and engine.plan is not None
            assert (engine.plan.num_selectors > 0) == parts.selectors
            by_engine = engine.weights.decode
        with open_parts(opened, parts, given, CONTEXT) as (decoder, weights):
            found = [decoder.next_logits([token]) for token in IDS]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if parts.preset.prediction != "none":
        assert by_engine.prefetched > 0 and weights.decode.prefetched > 0
    else:
        assert steady_counts(weights.decode) == steady_counts(by_engine)


def test_predicted_rows_are_counted_for_the_experts_that_ran(sparse_pack: Path) -> None:
    with Pack(sparse_pack) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, NUM_EXPERTS, CONTEXT))
        with open_parts(opened, FLOE, options, CONTEXT) as (decoder, weights):
            for token in IDS:
                decoder.next_logits([token])
            assert weights.decode.rows_prefetched > 0
            assert 0 < weights.decode.running_predicted <= weights.rows_predicted
