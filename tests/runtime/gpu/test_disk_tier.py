"""A pack larger than host memory on a GPU: the CPU's own engine has, reads and prefetches no expert that the GPU has.

`pytest -s` prints bytes and hits of tokens with such a tier, and with one that does not know what the GPU has.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.models import PackMaker, TinyMixtral, pack
from support.plain_gpu import BUDGET, PlainMemoryOfAGpu, plain_gpu
from support.routings import random_routing

import moe_pack.runtime.engine.gpu as builder
import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.engine import offloaded
from moe_pack.runtime.offload import OffloadedWeights, PolicyName, least_budget
from moe_pack.runtime.offload.expert_store import ExpertStore
from moe_pack.runtime.offload.routing_file import write_routing
from moe_pack.runtime.serve.http.live import live_counts

NUM_LAYERS, NUM_EXPERTS, K = 3, 8, 2
SHAPE = TinyMixtral(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, config={"num_experts_per_tok": K})
CONTEXT = 64


@dataclass(frozen=True)
class Counts:
    """What a tier did for tokens, without what it read to start."""

    read_bytes: int
    start_bytes: int
    needed: int
    hits: int
    hits_of_gpus: int  # resident experts that the GPU has too


@pytest.fixture(autouse=True)
def watch() -> None:
    """Leaves out the order of work, which other tests look at."""


@pytest.fixture
def gpu(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> PlainMemoryOfAGpu:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)
    monkeypatch.setattr(gpu_engine, "run_longest_pass", lambda *of_engine: None)
    monkeypatch.setattr(builder, "_host_memory", lambda *given: None)  # small experts would always fit
    return plain_gpu(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    pack(SHAPE.write(folder / "source"), folder / "packed", selector="up")
    rewrite_thresholds(folder / "packed", np.full((NUM_LAYERS, NUM_EXPERTS), 0.02, np.float32))
    with Pack(folder / "packed") as opened:
        write_routing(opened, random_routing(NUM_LAYERS, NUM_EXPERTS, K, 64, best=(2, 2)))
    return folder / "packed"


@contextmanager
def tiered(gpu: PlainMemoryOfAGpu, folder: Path, ram_experts: float, **options: Any) -> Iterator[Engine]:
    """An engine with memory for a share of the experts on the GPU, and for so many experts in host memory."""
    with Pack(folder) as opened:
        largest = max(expert.num_bytes for layer in opened.layout.experts for expert in layer)
        least = least_budget(opened.layout, CONTEXT, offloaded.offload.routing_bytes(folder))
        gpu.ram_bytes = least + round(ram_experts * largest)
        chosen = EngineOptions(device="cuda", kernels="portable", read="pread", **options)
        with Engine(opened, chosen, CONTEXT) as engine:
            yield engine


def on_gpu(engine: Engine) -> NDArray[np.bool_]:
    placement = engine.weights.memory.placement  # type: ignore[attr-defined]  # those of a GPU
    return np.asarray(placement.first_dynamic == placement.num_rows)


def counts_of(engine: Engine, num_tokens: int) -> Counts:
    tier = engine.offloaded
    assert tier is not None, "host memory is too small"

    def read() -> int:
        stats = tier.store.reads.stats()
        return stats.bytes_urgent + stats.bytes_prefetched

    draw, vocab_size = torch.Generator().manual_seed(1), engine.pack.spec.vocab_size
    asked = tier.store.asked_bytes
    for token in torch.randint(vocab_size, (num_tokens,), generator=draw).tolist():
        engine.decoder.logits([token])
    done, both = tier.decode, int((tier.resident_experts() & on_gpu(engine)).sum())
    return Counts(tier.store.asked_bytes - asked, asked, done.needed, done.hits, both)


def knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tier not know what the GPU has, as it was."""
    real = offloaded.offload_experts
    monkeypatch.setattr(offloaded, "offload_experts", lambda *given: real(*given[:-1], None))


@pytest.mark.parametrize("policy", ["auto", "fiddler", "edgemoe"])
def test_no_expert_of_the_gpu_comes_into_host_memory(
    policy: PolicyName, gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    fetch = ExpertStore.fetch

    def note(store: ExpertStore, key: Any, urgent: bool) -> None:
        fetched.append(key)
        fetch(store, key, urgent)

    monkeypatch.setattr(ExpertStore, "fetch", note)
    gpu.share = 0.4
    found = {}
    for knows in (True, False):
        with case(knows), monkeypatch.context() as patch:
            if not knows:
                knows_nothing(patch)
            fetched.clear()
            with tiered(gpu, folder, 4, policy=policy) as engine:
                static = on_gpu(engine)
                assert 0 < static.sum() < static.size
                found[knows] = counts_of(engine, 6)
                wrong = [key for key in fetched if static[key.layer_idx, key.expert]]
                assert bool(wrong) != knows, "only a tier that does not know fetches them"
    assert found[True].hits_of_gpus == 0
    assert found[True].needed == found[False].needed, "the GPU computes its own in any case"
    assert found[True].hits >= found[False].hits and found[True].read_bytes <= found[False].read_bytes


def test_the_tier_stays_while_the_gpus_memory_is_given_back(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    gpu.share = 0.4
    with tiered(gpu, folder, 4) as engine:
        tier, live = engine.offloaded, live_counts(engine)
        assert isinstance(tier, OffloadedWeights)
        expected = engine.decoder.logits([5])
        engine.release()
        engine.take()
        assert engine.offloaded is tier, "its cache is as warm as it was"
        assert (engine.decoder.logits([5]) - expected).abs().max() < 1e-4
        engine.release()
        engine.take(BUDGET - (16 << 10))
        assert engine.offloaded is not None and engine.offloaded is not tier, "the GPU has other experts"
        assert engine.offloaded.observer is live, "the page goes on"
        engine.decoder.reset()
        assert (engine.decoder.logits([5]) - expected).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["edgemoe", "fiddler"])
def test_figures_of_the_demo_model(
    policy: PolicyName, gpu: PlainMemoryOfAGpu, demo_pack: PackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are equally popular without a profile: both caches begin with the same ones."""
    gpu.share, found = 0.33, {}
    for knows in (False, True):
        with monkeypatch.context() as patch:
            if not knows:
                knows_nothing(patch)
            with tiered(gpu, demo_pack("none", 4), 8, policy=policy) as engine:
                found[knows] = counts_of(engine, 8)
    sys.stdout.write(f"\n{policy}: before {found[False]}\n{policy}: after {found[True]}\n")
    assert found[True].hits_of_gpus == 0 and found[True].needed == found[False].needed
    assert found[True].read_bytes <= found[False].read_bytes
