"""Every preset through the whole engine of a GPU, as `moe-run` builds it, in plain memory; and what it reports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.gpu_runs import TOLERANCE, reference_logits
from support.models import TinyMixtral, pack
from support.plain_gpu import PlainMemoryOfAGpu, plain_gpu
from support.routings import random_routing

import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions, report
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import GpuHere
from moe_pack.runtime.engine.report import RunReport, report_lines
from moe_pack.runtime.offload import PRESETS, Approximations, PolicyName
from moe_pack.runtime.offload.routing_file import write_routing

SHAPE = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
IDS = [(37 * i + 5) % 96 for i in range(3)]
NO_ROUTING = "the next layer's router predicts, not {}: the pack has no routing of a profile; moe-pack attach adds it"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlainMemoryOfAGpu:
    return plain_gpu(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pack(SHAPE.write(tmp_path / "source"), tmp_path / "packed", selector="up")
    rewrite_thresholds(tmp_path / "packed", np.full((2, 4), 0.02, np.float32))
    return tmp_path / "packed"


def run(folder: Path, options: EngineOptions) -> tuple[Engine, RunReport]:
    """Runs tokens one by one; returns the engine, closed, and what it reported before."""
    with Pack(folder) as opened, Engine(opened, options, 64) as engine:
        decoder = engine.decoder
        found = torch.cat([decoder.logits([token]) for token in IDS])
        if options.approximations == Approximations():
            assert (found - reference_logits(folder, IDS)).abs().max() < TOLERANCE
        return engine, report(engine)


def options_for(policy: PolicyName, **others: Any) -> EngineOptions:
    return EngineOptions(device="cuda", policy=policy, kernels="portable", **others)


def check_preset(gpu: PlainMemoryOfAGpu, folder: Path, policy: PolicyName) -> None:
    preset = PRESETS[policy]
    _, facts = run(folder, options_for(policy))
    lines = report_lines(facts)
    prediction = gpu.inputs.prediction
    assert (prediction is None) == (preset.prediction == "none")
    predicts = "" if prediction is None else f", predicting by {preset.prediction}"
    assert dict(lines)["policy"] == f"{policy}{predicts}"
    assert gpu.inputs.by_expert == (policy == "importance") == (gpu.inputs.rates is None)
    names = {name for name, _ in lines}
    assert {"GPU memory", "missing rows", "neurons"} <= names
    assert facts.gpu is not None
    counts = facts.gpu.counts
    assert counts.resident and (counts.left or counts.pulled)
    assert bool(counts.ahead) == (prediction is not None) == ("pulled ahead" in names)


@pytest.mark.slow
def test_every_preset_runs_and_predicts_as_its_paper(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)  # the other test runs it
    with Pack(folder) as opened:
        write_routing(opened, random_routing(2, 4, 2, 64, best=(4,)))
    for policy in PRESETS:
        with case(policy):
            check_preset(gpu, folder, policy)
    run(folder, options_for("importance", misses="cpu"))
    assert not gpu.inputs.by_expert, "the link brings nothing"


def test_auto_runs_there_where_a_gpu_is_found(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)
    monkeypatch.setattr(machine, "gpu_here", lambda: GpuHere("NVIDIA H200", 139 << 30))
    with Pack(folder) as opened, Engine(opened, EngineOptions(kernels="portable"), 64) as engine:
        assert engine.options.device == "cuda" and report(engine).gpu is not None


@pytest.mark.slow
def test_trust_that_changes_nothing_is_a_fallback(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)
    trusting, begin = Approximations(runs_predicted=True), "--trust-experts changes nothing: "
    for policy, others, share, why in (
        ("lru", {}, 0.6, ["fewer experts are predicted than a token uses"]),
        ("corm", {"prefetches": False}, 0.6, ["fewer experts are predicted than a token uses"]),
        ("corm", {"misses": "cpu"}, 0.6, ["fewer experts are predicted than a token uses"]),
        ("corm", {}, 1.0, ["all experts are in GPU memory"]),
        ("corm", {}, 0.6, []),
    ):
        with case(policy, others, share), Pack(folder) as opened:
            gpu.share = share
            with Engine(opened, options_for(policy, approximations=trusting, **others), 64) as engine:
                assert [each for each in engine.fallbacks if "trust" in each] == [begin + each for each in why]


@pytest.mark.slow
def test_a_prediction_that_needs_a_profile_is_the_routers_without_one(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    engine, _ = run(folder, options_for("floe"))
    assert engine.fallbacks[0] == NO_ROUTING.format("mlp")
    assert gpu.inputs.prediction is not None and gpu.inputs.prediction.methods == {1: "router"}
