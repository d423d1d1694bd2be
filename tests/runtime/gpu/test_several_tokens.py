"""The experts of several tokens in one graph: each token's sum is the one that it has alone, whatever is missing."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.cases import case
from support.gpu_runs import CPU, GpuRun, gpu_engine
from support.models import TinyMixtral, pack
from support.native import kernels_limited_to
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime.gpu import devices, placements
from moe_pack.runtime.gpu.cpu_share import CpuShare, Exchange, PoolShare, TierShare
from moe_pack.runtime.gpu.kernels import elementwise
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.tables import MISSING
from moe_pack.runtime.gpu.token.engine import GpuEngine
from moe_pack.runtime.gpu.token.experts import Buffers, layer_experts
from moe_pack.runtime.model import NativeOperations
from moe_pack.runtime.model.pack_weights import MappedPackWeights

K, E = 2, 8
ROUTES = {
    "shared": torch.tensor([[5, 0], [5, 0]]),
    "others": torch.tensor([[5, 0], [2, 7]]),
    "some": torch.tensor([[5, 0], [2, 5], [0, 5], [3, 2]]),
}
# With these shares of memory a part of each layer is resident. Without the CPU results are the same bits.
RUNS = {
    "resident": GpuRun(1.0),
    "pull": GpuRun(0.3, misses="pull"),
    "pull all": GpuRun(0.0, misses="pull"),
    "cpu": GpuRun(0.5, pulled_share=0.0),
    "shared": GpuRun(0.4, pulled_share=0.5, dynamic_share=0.3),
    "by expert": GpuRun(0.4, pulled_share=0.5, dynamic_share=0.3, by_expert=True),
    "disk": GpuRun(0.5, misses="disk", pulled_share=0.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a layer of eight experts; about half of the neurons lie below the thresholds."""
    folder = tmp_path_factory.mktemp("several")
    shape = TinyMixtral(num_layers=1, num_experts=E, config={"num_experts_per_tok": K})
    pack(shape.write(folder / "source"), folder / "packed", selector="up")
    rewrite_thresholds(folder / "packed", np.full((1, E), 0.02, np.float32))
    return folder / "packed"


@contextmanager
def opened_share(
    folder: Path, run: GpuRun, engine: GpuEngine, exchange: Exchange, given: devices.Ask | None
) -> Iterator[CpuShare | None]:
    with ExitStack() as stack:
        opened, kernels = stack.enter_context(Pack(folder)), kernels_limited_to("portable")
        if run.misses == "disk":
            tier = MappedPackWeights(opened, NativeOperations(kernels))
            yield stack.enter_context(closing(TierShare(tier, exchange, given)))
        elif run.misses == "split" and not engine.memory.placement.is_whole:
            host = engine.decoder._inputs.host
            assert host is not None
            yield stack.enter_context(closing(PoolShare(opened, host, kernels, exchange, given)))
        else:
            yield None


def sums(folder: Path, run: GpuRun, engine: GpuEngine, x: Tensor, routes: Tensor, most_rows: int) -> Tensor:
    """Runs the experts of tokens x [T, d] in buffers for so many tokens; returns their sums [T, d]."""
    return run_tokens(folder, run, engine, x, routes, most_rows)[0]


def run_tokens(
    folder: Path, run: GpuRun, engine: GpuEngine, x: Tensor, routes: Tensor, most_rows: int,
    given: devices.Ask | None = None,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Returns the sums of `sums`, and how many records of each token were missing.

    Args:    given: calls the CPU's share; None: it is computed at once.
    """
    num_rows, step, weights = len(x), engine.decoder._step, torch.tensor([0.7, 0.4])
    there = torch.full((1, most_rows, K), -1, dtype=torch.int32)
    there[0, :num_rows] = routes
    with Pack(folder) as opened:
        exchange = Exchange.allocate(opened, engine.memory.placement, is_locked=False, num_rows=most_rows)
    with opened_share(folder, run, engine, exchange, given) as share:
        inputs: Any = SimpleNamespace(
            queues=step.inputs.queues, share=share, exchange=exchange, pulled_share=run.pulled_share,
            whole_records=step.inputs.whole_records, by_expert=run.by_expert,
        )  # fmt: skip
        of_rows = weights.expand(most_rows, K).contiguous()
        layers: Any = SimpleNamespace(routes=there, normed=x, router_weights=of_rows, output_weights=of_rows)
        own = Buffers(engine.weights, CPU, 1, run.pulled_share, most_rows)
        parts: Any = SimpleNamespace(
            weights=engine.weights, layers=layers, own=own, host_rows=step.host_rows, inputs=inputs
        )
        pulled = layer_experts(parts, 0, num_rows).launch(1, x, lambda mark: None)
        y = torch.empty_like(x)
        for row in range(num_rows):
            its = slice(row * K, (row + 1) * K)
            host = None if share is None else exchange.y[row]
            reduce(own.partials[its], weights, y[row], pulled=None if pulled is None else pulled[its], host=host)
        if share is not None:
            share.check()
            assert num_rows == 1 or exchange.y[:num_rows].any(), "something is left to the CPU"
        if pulled is not None:
            assert pulled[: num_rows * K].any(dim=2).any(dim=1).view(num_rows, K).any(dim=1).all()
        lacks = own.totals[0, : num_rows * K, MISSING].view(num_rows, K).sum(dim=1)
        assert share is not None or lacks.any() or engine.memory.placement.is_whole
        return y, lacks.tolist()


@pytest.mark.parametrize("name", RUNS)
def test_a_token_among_others_has_the_sum_that_it_has_alone(name: str, folder: Path) -> None:
    run, draw = RUNS[name], torch.Generator().manual_seed(1)
    with gpu_engine(folder, run) as engine, torch.inference_mode():
        for routes_name, routes in ROUTES.items():
            x = 0.3 * torch.randn(len(routes), engine.weights.spec.hidden_size, generator=draw)
            with case(routes_name):
                together = sums(folder, run, engine, x, routes, 4)
                for row in range(len(x)):
                    alone = sums(folder, run, engine, x[row : row + 1], routes[row : row + 1], 1)[0]
                    assert alone.any()
                    if run.misses == "pull" or name == "resident":
                        assert torch.equal(together[row], alone), row
                    else:
                        assert (together[row] - alone).abs().max() < 1e-6, row


@pytest.mark.parametrize("misses", ["split", "disk"])
def test_calls_through_a_flag_give_the_same_bits(misses: Literal["split", "disk"], folder: Path) -> None:
    """The kernel that calls waits for the thread that computes, as on a GPU."""
    run, draw = GpuRun(0.4, misses=misses, pulled_share=0.0, num_rows=3), torch.Generator().manual_seed(2)
    with gpu_engine(folder, run) as engine, torch.inference_mode():
        x = 0.3 * torch.randn(3, engine.weights.spec.hidden_size, generator=draw)
        for num_rows in (3, 1, 2):
            those, routes = x[:num_rows], ROUTES["some"][:num_rows]
            at_once, called = (
                run_tokens(folder, run, engine, those, routes, 3, given)[0] for given in (None, elementwise.ask)
            )
            with case(num_rows):
                assert at_once.any() and torch.equal(called, at_once)


@pytest.mark.parametrize("kept_share", [0.9, 0.3])
def test_a_record_that_several_tokens_need_is_pulled_once(
    kept_share: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as there is memory to keep it; the bits and the table stay."""
    monkeypatch.setattr(placements, "_KEPT_SHARE", kept_share)
    run, draw = GpuRun(0.3, misses="pull", dynamic_share=0.8, num_rows=4), torch.Generator().manual_seed(1)
    with gpu_engine(folder, run) as engine, torch.inference_mode():
        memory, routes = engine.memory, ROUTES["some"]
        assert memory.placement.kept_bytes
        before = memory.record_at.clone()
        for num_rows, is_same in ((4, False), (2, True)):
            x = 0.3 * torch.randn(num_rows, engine.weights.spec.hidden_size, generator=draw)
            routes = ROUTES["some"][:num_rows]
            if is_same:
                x, routes = x[:1].expand_as(x).contiguous(), routes[:1].expand_as(routes)
            together, lacks = run_tokens(folder, run, engine, x, routes, 4)
            assert torch.equal(memory.record_at, before)
            alone = [run_tokens(folder, run, engine, x[t : t + 1], routes[t : t + 1], 1) for t in range(num_rows)]
            for row, (expected, _) in enumerate(alone):
                assert torch.equal(together[row], expected[0]), row
            assert lacks[-1] == alone[-1][1][0], "the last token runs first"
            assert sum(lacks) < sum(number for _, (number,) in alone)
            if is_same:
                assert (lacks[0] == 0) == (kept_share == 0.9)
