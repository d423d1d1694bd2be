"""Faults of order in the engine, each made on purpose, are found: the numbers are right, because all runs in turn."""

import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu_runs import CPU, GpuRun, gpu_decoder
from support.models import TinyMixtral, pack
from support.ordered_engine import Watch
from support.ordered_work import OrderError

from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.devices import Queues
from moe_pack.runtime.gpu.token import experts as layer_experts
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.gpu.token.step import TokenStep

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="kernels run on a GPU")
IDS = [(37 * i + 5) % 96 for i in range(12)]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A method with another text, what is run with it, and what the error has to say."""

    name: str
    owner: type
    method: str
    old: str
    new: str
    run: Callable[[Path], None]
    found: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.method} is written otherwise"
        names: dict[str, Any] = {}
        code = compile(source.replace(self.old, self.new), inspect.getfile(self.owner), "exec")
        exec(code, vars(sys.modules[self.owner.__module__]), names)
        patch.setattr(self.owner, self.method, names[self.method])


def run_tokens(folder: Path, run: GpuRun, num_tokens: int) -> None:
    with gpu_decoder(folder, run) as built:
        for token in IDS[:num_tokens]:
            built.next_logits([token])


def split(folder: Path) -> None:
    """A token of which the GPU, the CPU and the link have a share each."""
    run_tokens(folder, GpuRun(0.4), 1)


def two_tokens(folder: Path) -> None:
    """The same twice, which is two graphs."""
    run_tokens(folder, GpuRun(0.4), 2)


def predicted(folder: Path) -> None:
    """A token for which records are pulled ahead."""
    run_tokens(folder, GpuRun(0.6, dynamic_share=0.3, prediction=PredictionPlan({1: "router"}, 2, None)), 1)


def resident(folder: Path) -> None:
    """A token with all experts on the GPU, whose kernels may start before the end of the one before."""
    run_tokens(folder, GpuRun(1.0), 1)


def prompt(folder: Path) -> None:
    """A prompt whose experts come one after the other into the same memory."""
    with gpu_decoder(folder, GpuRun(0.0, "pull")) as built:
        built.next_logits(IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two layers of four experts; about half of the neurons lie below the thresholds."""
    folder = tmp_path_factory.mktemp("order")
    shape = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
    pack(shape.write(folder / "source"), folder / "packed", selector="up")
    rewrite_thresholds(folder / "packed", np.full((2, 4), 0.02, np.float32))
    return folder / "packed"


WAIT, WORK = "wait_stream(torch.cuda.current_stream())", "work()\n        return self.mark()"
MUTANTS = (
    Mutant("no join before the sum", TokenStep, "_add_experts", 'join("cpu", "link")', "join()", split,
           "_reduce .* current stream reads .* the CPU's share .* cpu writes"),
    Mutant("the link is not joined", TokenStep, "_add_experts", 'join("cpu", "link")', 'join("cpu")', split,
           "_reduce .* current stream reads .* _neurons_kernel .* link writes"),
    Mutant("a prediction is not joined", TokenStep, "run",
           'join("next")\n                sh', "join()\n                sh", predicted, "current stream .* next "),
    Mutant("the last prediction is not joined", TokenStep, "run",
           'join("next")\n        if', "join()\n        if", predicted, "next .*no order|not joined"),
    Mutant("forks wait for nothing", Queues, "forked", f"stream.{WAIT}", "pass", split, "is not forked"),
    Mutant("joins wait for nothing", Queues, "join", ".wait_stream(self._forks[fork])", "", split,
           "current stream reads .* no order"),
    Mutant("the CPU's input comes from a fork", layer_experts.SplitExperts, "launch", "elementwise.hand_over(",
           'with self._queues.forked("link"): elementwise.hand_over(', split,
           "the CPU's share .* cpu reads .* link writes"),
    Mutant("a result is copied on a fork", TokenStep, "run", "there[turn].copy_(",
           'with self.inputs.queues.forked("link"): there[turn].copy_(', split, "not joined"),
    Mutant("kernels start early in spite of forks", TokenStep, "run",
           "chained(self.weights.memory.placement.is_whole and layers.is_chained)", "chained()", split,
           "starts early, and not directly after a kernel"),
    Mutant("a graph waits for another", TokenStep, "run", "layers.start()",
           "self.inputs.queues.wait_for(self._own_pulled); layers.start()", two_tokens, "in another graph"),
    Mutant("the host does not wait for a token", GpuDecoder, "wait", "self.queues.mark().wait()", "pass",
           split, "host reads page-locked .* current stream writes"),
    Mutant("experts are used before they are there", Queues, "wait_for",
           "torch.cuda.current_stream().wait_event(mark.event)", "pass", prompt,
           "current stream reads uint8 .* copies writes"),
    Mutant("copies wait for nothing", Queues, "beside", "self._copy.wait_event(mark.event)", "pass", prompt,
           "copy_ .* copies writes uint8 .* current stream reads"),
    Mutant("marks are where a stream begins", Queues, "mark", "event.record()", "pass", prompt, "no order"),
    Mutant("a copy's end is before it", Queues, "beside", WORK, "mark = self.mark(); work()\n        return mark",
           prompt, "current stream reads uint8 .* copies writes"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_of_order_is_found(mutant: Mutant, folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(OrderError, match=mutant.found):
        mutant.run(folder)


@pytest.mark.parametrize(
    ("run", "forks"),
    [(resident, set()), (split, {"cpu", "link"}), (predicted, {"cpu", "link", "next"}), (prompt, {"copies"})],
)
def test_the_engine_is_in_order(run: Callable[[Path], None], forks: set[str], folder: Path, watch: Watch) -> None:
    """All streams that a run needs have work."""
    run(folder)
    assert used_streams(watch) == {"current stream"} | forks


def used_streams(watch: Watch) -> set[str]:
    return {stream.name for stream in watch.order.streams if stream.works}


def ordered_queues(watch: Watch) -> tuple[Queues, torch.Tensor]:
    return devices.Queues(CPU), torch.zeros(64, device=CPU)


def test_memory_is_not_freed_while_a_fork_uses_it(watch: Watch) -> None:
    with watch.on():
        for is_joined in (True, False):
            queues, x = ordered_queues(watch)
            out = torch.zeros(64, device=CPU)
            with queues.forked("link"):
                torch.sigmoid(x, out=out)
            if is_joined:
                queues.join("link")
            del x
            if is_joined:
                torch.zeros(4, device=CPU)
        with pytest.raises(OrderError, match=r"float32 \[64\] is freed, and sigmoid .* link may still use it"):
            torch.zeros(4, device=CPU)


def test_pieces_of_memory_are_told_apart(watch: Watch) -> None:
    """Two streams may use different columns at once, and not the same ones."""
    with watch.on():
        queues, x = ordered_queues(watch)
        columns = x.view(8, 8)
        with queues.forked("link"):
            columns[:, :4].fill_(1)
        columns[:, 4:].fill_(2)
        with pytest.raises(
            OrderError, match=r"fill_ .* current stream writes float32 .* at byte 12, which fill_ .* link"
        ):
            columns[:, 3:5].fill_(3)


def test_the_host_reads_a_copy_after_its_mark(watch: Watch) -> None:
    with watch.on():
        queues, x = ordered_queues(watch)
        there = torch.zeros(64, pin_memory=False)
        there.copy_(x, non_blocking=True)
        with pytest.raises(
            OrderError, match=r"numpy .* host reads page-locked float32 .* copy_ .* current stream writes"
        ):
            there.numpy()
        with pytest.raises(OrderError, match="host writes page-locked"):
            there[3] = 1
        queues.mark().wait()
        there[3] = float(there.numpy()[0])


def test_values_and_blocking_copies_make_the_host_wait(watch: Watch) -> None:
    with watch.on():
        _, x = ordered_queues(watch)
        there = torch.zeros(64, pin_memory=False)
        for wait in (lambda: x[0].item(), x.cpu, lambda: there.copy_(x), x.tolist):
            there.copy_(x, non_blocking=True)
            wait()
            there.numpy()
