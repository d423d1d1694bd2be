"""GPU memory that is given back and taken again: nothing of it stays, answers are the same, and nothing is measured."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import TinyMixtral, pack
from support.plain_gpu import BUDGET, PlainMemoryOfAGpu, plain_gpu

import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.formats import Pack, RunError
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.gpu import fit
from moe_pack.runtime.gpu.fit import GpuMemoryUse
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.offload.budgets import BudgetTooSmall

SHAPE = TinyMixtral(num_layers=1, num_experts=4, config={"num_experts_per_tok": 2})
IDS = [5, 42]
OPTIONS = EngineOptions(device="cuda", kernels="portable")


@pytest.fixture(autouse=True)
def watch() -> None:
    """Leaves out the order of work, which other tests look at: it would refer to tensors here."""


@pytest.fixture
def gpu(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> PlainMemoryOfAGpu:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)  # `test_presets` runs it
    return plain_gpu(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    pack(SHAPE.write(folder / "source"), folder / "packed", selector="up")
    rewrite_thresholds(folder / "packed", np.full((1, 4), 0.02, np.float32))
    return folder / "packed"


@contextmanager
def live(folder: Path, options: EngineOptions = OPTIONS) -> Iterator[Engine]:
    with Pack(folder) as opened, Engine(opened, options, 64) as engine:
        yield engine


def logits_of(engine: Engine) -> torch.Tensor:
    engine.decoder.reset()
    return torch.cat([engine.decoder.logits([token]) for token in IDS])


def use_of(engine: Engine) -> GpuMemoryUse:
    assert engine.facts.gpu is not None, "it was asked for"
    return engine.facts.gpu.use


def bytes_of_tensors() -> int:
    """The bytes of all storages that tensors refer to."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_nothing_of_an_engine_stays_but_what_is_in_host_memory(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    with live(folder) as engine:
        expected = logits_of(engine)
        engine.release()
        engine.take()  # the first engine's longest pass left hidden states
        taken = bytes_of_tensors()
        arena = engine.weights.memory.arena  # type: ignore[attr-defined]  # those of a GPU
        least = arena.nbytes + use_of(engine).cache
        gone = [weakref.ref(each) for each in (engine.decoder, engine.weights)]
        del arena
        engine.release()
        assert engine.is_released and [ref() for ref in gone] == [None, None]
        assert bytes_of_tensors() <= taken - least, "experts, keys and values"
        assert engine.bytes_read() == 0, "another thread may ask"
        engine.take()
        assert bytes_of_tensors() == taken, "the same as before, and nothing twice"
        assert (logits_of(engine) == expected).all()


def test_memory_is_measured_once(gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    init = gpu_engine.GpuEngine.__init__

    def count(engine: gpu_engine.GpuEngine, inputs: gpu_engine.GpuInputs, expert_bytes: int, *sizes: object) -> None:
        built.append(expert_bytes)
        init(engine, inputs, expert_bytes, *sizes)  # type: ignore[arg-type]  # as they were given

    monkeypatch.setattr(gpu_engine.GpuEngine, "__init__", count)
    passes: list[int] = []
    run_longest = gpu_engine.run_longest_pass

    def run(pack: Pack, engine: gpu_engine.GpuEngine, chunk_tokens: int) -> None:
        passes.append(chunk_tokens)
        run_longest(pack, engine, chunk_tokens)

    monkeypatch.setattr(gpu_engine, "run_longest_pass", run)
    with live(folder) as engine:
        room = use_of(engine).experts
        assert built == [gpu.inputs.least_bytes, built[1]], "one is measured, one stays"
        engine.release()
        engine.take(BUDGET - (4 << 10))
        assert len(built) == 3 and built[2] == built[1] - (4 << 10)
        assert use_of(engine).experts < room and use_of(engine).budget == BUDGET - (4 << 10)
        few = logits_of(engine)
        engine.release()
        engine.take(BUDGET)
        assert len(built) == 4 and use_of(engine).experts == room
        assert passes == [4], "later engines reserve what it took"
        assert (logits_of(engine) - few).abs().max() < 1e-4


def test_a_budget_that_is_too_small_leaves_the_memory_given_back(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    with live(folder) as engine:
        expected = logits_of(engine)
        engine.release()
        with pytest.raises(BudgetTooSmall, match=r"at least .* are needed"):
            engine.take(BUDGET - (50 << 20))
        assert engine.is_released
        engine.take()
        assert use_of(engine).budget == BUDGET and (logits_of(engine) == expected).all()


def test_memory_that_others_took_meanwhile_is_not_taken(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(folder) as engine:
        engine.release()
        monkeypatch.setattr(type(gpu._memory), "free_bytes", lambda memory: 0)
        with pytest.raises(
            RunError, match=r"^budget: 100.0 MiB is more than the .* of the GPU's memory now; give less"
        ):
            engine.take()
        monkeypatch.undo()
        assert engine.is_released


def test_an_allocation_that_fails_gives_everything_back(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(folder) as engine:
        expected = logits_of(engine)
        engine.release()
        before, prepare = bytes_of_tensors(), GpuDecoder.prepare

        def fail(decoder: GpuDecoder) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(GpuDecoder, "prepare", fail)
        with pytest.raises(RunError, match=r"too little free memory \(CUDA out of memory\); give less$"):
            engine.take()
        assert engine.is_released and bytes_of_tensors() == before
        monkeypatch.setattr(GpuDecoder, "prepare", prepare)
        engine.take()
        assert (logits_of(engine) == expected).all()


def test_without_a_budget_no_more_is_taken_than_others_leave(
    gpu: PlainMemoryOfAGpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "usual_budget", lambda available_bytes: BUDGET)
    gpu.budget_bytes = None
    with live(folder) as engine:
        for left in (BUDGET - (4 << 10), BUDGET + (4 << 10)):
            engine.release()
            monkeypatch.setattr(fit, "usual_budget", lambda available_bytes, left=left: left)
            engine.take()
            assert use_of(engine).budget == min(left, BUDGET), "no more than at first, which was measured"


def test_an_engine_that_drafts_drafts_again(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    with live(folder, replace(OPTIONS, draft="ngram")) as engine:
        drafts = weakref.ref(engine.drafts)
        engine.release()
        assert drafts() is None
        engine.take()
        assert engine.drafts is not None


def test_an_engine_is_closed_while_its_memory_is_given_back(gpu: PlainMemoryOfAGpu, folder: Path) -> None:
    with live(folder) as engine:
        engine.release()
