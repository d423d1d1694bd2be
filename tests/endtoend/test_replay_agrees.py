"""Replay's figures of a run are the run's own counts: every policy, prediction or not, at several budgets."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import DEMO_MODEL, pack
from support.native import operations_limited_to
from support.streaming import budget_for

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions
from moe_pack.runtime.drafts import Drafts, NgramDrafter
from moe_pack.runtime.engine.offloaded import cache_facts
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, PartialState
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import PRESETS, Routing, read_recording
from moe_pack.runtime.offload.replay import replay

CONTEXT = 80
NUM_PROMPT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit; not to be changed."""
    made = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, made, group=64)
    return made


@pytest.mark.parametrize(
    "runs",
    [((False, 6), (True, 17)), pytest.param(tuple(product((False, True), (1, 6, 17))), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_replay_gives_the_hits_that_the_engine_counted(
    folder: Path, new_folder: Callable[[], Path], runs: tuple[tuple[bool, int], ...]
) -> None:
    for policy in sorted(PRESETS):
        for prefetches, num_experts in runs:
            with case(policy, prefetches, num_experts):
                tmp_path = new_folder()
                ids = torch.randint(0, 4000, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
                record = tmp_path / "routes.safetensors"
                with Pack(folder) as opened:
                    options = EngineOptions(
                        budget_bytes=budget_for(opened, num_experts, CONTEXT),
                        policy=PRESETS[policy].name,
                        prefetches=prefetches,
                        record=record,
                        kernels="portable",
                    )
                    with Engine(opened, options, CONTEXT) as engine:
                        engine.decoder.next_logits(ids[:NUM_PROMPT])
                        for token in ids[NUM_PROMPT:]:
                            engine.decoder.next_logits([token])
                        counted, plan = engine.weights, engine.plan
                    assert plan is not None
                    found = read_recording(record)
                    facts = cache_facts(opened, plan, Routing.open(opened))
                    played = replay(
                        found.passes, facts, opened.index.size.astype(np.int64), PRESETS[policy], record=found
                    )
                assert (played.prefill.num_hits, played.prefill.num_needed) == (
                    counted.prefill.hits,
                    counted.prefill.needed,
                )
                assert (played.decode.num_hits, played.decode.num_needed) == (
                    counted.decode.hits,
                    counted.decode.needed,
                )
                assert counted.decode.needed == 2 * 4 * (CONTEXT - NUM_PROMPT)
                assert found.hits.sum() == counted.prefill.hits + counted.decode.hits


def test_replay_counts_verified_passes_as_decode(folder: Path, new_folder: Callable[[], Path]) -> None:
    draw = torch.Generator().manual_seed(4)
    some = torch.randint(0, 4000, (10,), generator=draw).tolist()
    for policy, prefetches, num_experts in (("lru", False, 6), ("edgemoe", True, 9), ("importance", False, 4)):
        with case(policy, prefetches, num_experts):
            record = new_folder() / "routes.safetensors"
            with Pack(folder) as opened:
                budget = budget_for(opened, num_experts, CONTEXT)
                name = PRESETS[policy].name
                options = EngineOptions(budget_bytes=budget, policy=name, prefetches=prefetches, record=record)
                with Engine(opened, options, CONTEXT) as engine:
                    assert isinstance(engine.decoder, Decoder)
                    drafts = Drafts(NgramDrafter(), None)
                    sampler = Sampler(SamplingOptions(temperature=0))
                    tokens = [*generate(engine.decoder, [*some, *some], sampler, 50, frozenset(), drafts)]
                    counted, plan = engine.weights, engine.plan
                assert plan is not None and len(tokens) == 50
                found = read_recording(record)
                facts, sizes = cache_facts(opened, plan, Routing.open(opened)), opened.index.size.astype(np.int64)
                played = replay(found.passes, facts, sizes, PRESETS[policy], record=found)
            assert drafts.counts.drafted > 0 and (found.passes.chunks[found.passes.is_decode] > 1).any()
            assert found.passes.chunks[found.passes.is_decode].sum() == drafts.counts.passes + drafts.counts.drafted
            for phase in ("prefill", "decode"):
                own, other = getattr(played, phase), getattr(counted, phase)
                assert (own.num_hits, own.num_needed) == (other.hits, other.needed), phase


def test_a_record_has_the_routes_of_the_plain_decoder(folder: Path, tmp_path: Path) -> None:
    ids = torch.randint(0, 4000, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    record = tmp_path / "routes.safetensors"
    routes: list[list[int]] = []

    class Watched(MappedPackWeights):
        def run_experts(
            self,
            layer_idx: int,
            x: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            partial_state: PartialState | None = None,
        ) -> torch.Tensor:
            routes.append(experts[0].tolist())
            return super().run_experts(layer_idx, x, experts, weights)

    with Pack(folder) as opened:
        options = EngineOptions(budget_bytes=budget_for(opened, 3, CONTEXT), record=record, kernels="portable")
        with Engine(opened, options, CONTEXT) as engine:
            for token in ids:
                engine.decoder.next_logits([token])
        plain = Decoder(Watched(opened, operations_limited_to("portable")), CONTEXT)
        for token in ids:
            plain.next_logits([token])
    assert read_recording(record).passes.routes.reshape(-1, 2).tolist() == routes
