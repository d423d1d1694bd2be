"""Races in kernels, each made on purpose, are found: the interpreter runs one thread, so that results are right."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.attending import AttendingToken, AttentionShape
from support.gpu_layers import partly_there, random_layer
from support.kernel_accesses import RaceError
from support.ordered_engine import Watch
from support.ordered_work import OrderError
from support.random_experts import Shape, random_tokens

from moe_pack.formats import RouterSpec, part_format
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.kernels import (
    elementwise,
    grids,
    matmul,
    neurons,
    products,
    pull,
    router,
)
from moe_pack.runtime.gpu.kernels.attention import splits
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.mixers import recurrence
from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations, TokenStates
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.gpu.kernels.tables import RunningNeurons
from moe_pack.runtime.model.caches import LayerState
from moe_pack.runtime.model.compute.recurrence import Gates

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="kernels run on a GPU")
CPU = torch.device("cpu")


def experts() -> None:
    """Two experts of a token, whose codes of 3 bits lie in two planes, with biases of down."""
    three = part_format(3, 64)
    layer = partly_there(random_layer([Shape(40, 128, up=three, down=three, bias=("down",))] * 2), CPU, 0.5, 2)
    tables, x, numbers = layer.tables, random_tokens(1, 128)[0], torch.tensor([1, 0], dtype=torch.int32)
    running = RunningNeurons.allocate(2, tables.record_at.shape[1], CPU)
    neurons.select(x, numbers, tables, running)
    neurons.compact(numbers, tables, running, layer.landing, torch.zeros(1), layer.pinned(2), False)
    pull.pull_records(numbers, tables, running, layer.host, False)
    neurons.neurons(x, numbers, tables, running, torch.zeros(2, 3, 128), "here")


def route() -> None:
    spec, x = RouterSpec("softmax_topk", 128, 8, True), torch.ones(4)
    rows = StoredRows(torch.randn((128, 4), generator=torch.Generator().manual_seed(0)), stored_part("F32", 4))
    chosen, routed = torch.zeros(8, dtype=torch.int32), router.Routed.allocate(4, spec, CPU)
    router.route(x, router.Router(spec, Norm(x, None, 1e-6), rows, None, None, None), chosen, routed)


def attend() -> None:
    """A token that enters a cache of several splits."""
    token = AttendingToken(AttentionShape(2, 1, 16, position=40, places=64), 0, CPU)
    token.attended(token.cache)


def mixers() -> None:
    """Rows of two slots, one of which has several, through a convolution and a recurrence."""
    operations, slots = TokenOperations(), torch.tensor([1, 1, 0], dtype=torch.int32)
    state = TokenStates(torch.zeros(2, 3, 40), torch.zeros(2, 2, 4, 40), slots)
    x, numbers = torch.arange(120.0).view(3, 40), torch.ones(3, 2)
    operations.convolve(x, torch.ones(160), None, state)
    q, v = torch.ones(3, 1, 4), torch.ones(3, 2, 40)
    operations.recur_gated(q, q, v, Gates(numbers, numbers, numbers[0], numbers[0]), state)


def chunks() -> None:
    """A prompt of two chunks through a recurrence."""
    q, v, numbers = torch.ones(17, 1, 4), torch.ones(17, 2, 40), torch.ones(17, 2)
    state = LayerState(torch.zeros(0), torch.zeros(2, 4, 40))
    TokenOperations().recur_gated(q, q, v, Gates(numbers, numbers, numbers[0], numbers[0]), state)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel or a function of it with another text, what launches it, and what the error has to say."""

    name: str
    function: Any
    old: str
    new: str
    launch: Callable[[], None]
    found: str

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        rewriter, original = self.function.rewriter, self.function.fn
        lines, _ = inspect.getsourcelines(original)
        rewriter.filename, rewriter.def_file_lineno = rewriter._get_jit_fn_file_line()
        rewriter.def_lineno = rewriter._find_def(lines)
        source = rewriter._prepare_source(lines)
        assert source.count(self.old) == 1, f"{original.__name__} is written otherwise"
        changed = rewriter._compile_and_exec(rewriter._transform_ast(source.replace(self.old, self.new)))
        patch.setitem(self.function.rewritten_fn, original, changed)


BARRIER, LOADS = "tl.debug_barrier()", "loads what it has stored, without a barrier"
OTHERS = "loads what is stored by program 0"
MUTANTS = (
    Mutant("planes", products.store_part, BARRIER, "pass", experts, LOADS),
    Mutant("activations", neurons._select_block, BARRIER, "pass", experts, LOADS),
    Mutant("biases", neurons._neurons_kernel, BARRIER, "pass", experts, LOADS),
    Mutant("a token that enters", splits._attend_kernel, BARRIER, "pass", attend, LOADS),
    Mutant("chunks of a prompt", recurrence._chunk_kernel, BARRIER, "pass", chunks, LOADS),
    Mutant("logits", router._route_kernel, BARRIER, "pass", route, OTHERS),
    Mutant("no release", router._route_kernel, '"acq_rel"', '"acquire"', route, OTHERS),
    Mutant("no acquisition", router._route_kernel, '"acq_rel"', '"release"', route, OTHERS),
    Mutant("of a program alone", router._route_kernel, '"gpu"', '"cta"', route, OTHERS),
    Mutant("one sum for all", neurons._neurons_kernel, "+ program) * D", "+ 0) * D", experts,
           "stores other values than program"),
    Mutant("one count for two", neurons._select_block, "counts_ptr + others", "counts_ptr", experts,
           "stores other values than before, without a barrier"),
    Mutant("one place in a list", neurons._select_block, "+ before, neuron", "+ before * 0, neuron", experts,
           "stores different values to one place"),
    Mutant("all rows of a slot", recurrence._rows_of_slot, "num_earlier == 0", "num_earlier >= 0", mixers,
           "stores other values than program"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_race_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(RaceError, match=mutant.found):
        mutant.launch()


def chain(watch: Watch) -> None:
    """A token whose last two kernels may start before the one before them ends."""
    x, rows = torch.ones(4), StoredRows(torch.ones((4, 4)), stored_part("F32", 4))
    by, normed, out = Norm(x, None, 1e-6), torch.zeros(4), torch.zeros(4)
    with watch.on(), watch.order.captured():
        elementwise.norm(x, by, normed)
        with grids.chained():
            matmul.gemv(normed, rows, out)
            elementwise.norm(out, by, normed)


WAIT = "wait_for_earlier()"
LOAD_INPUT = "x, x_factor = _load_input(x_ptr, norm, PART, BLOCKS.has_norm)"
NORMALIZE = "normalize(x_ptr + row, norm, out_ptr + row, D)"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "error", "found"),
    [
        (elementwise._norm_kernel, f"{WAIT}\n    {NORMALIZE}", "pass", RaceError,
         "_norm_kernel: program 0 does not wait"),
        (matmul._gemv, f"{WAIT}\n    {LOAD_INPUT}", f"{LOAD_INPUT}\n    {WAIT}", OrderError,
         r"_gemv .* reads float32 \[4\] before it waits, and its graph writes it"),
        (elementwise._norm_kernel, f"{WAIT}\n    {NORMALIZE}", f"{NORMALIZE}\n    {WAIT}", RaceError,
         "_norm_kernel: program 0 stores before it waits"),
    ],
)  # fmt: skip
def test_a_kernel_that_starts_early_waits_for_earlier_ones(
    kernel: Any, old: str, new: str, error: type[Exception], found: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(watch)
    Mutant("", kernel, old, new, experts, "").apply(monkeypatch)
    with pytest.raises(error, match=found):
        chain(watch)


def test_a_kernel_starts_early_only_directly_after_another_one_of_its_graph(watch: Watch) -> None:
    x = torch.ones(4)
    by, out = Norm(x, None, 1e-6), torch.zeros(4)

    def norm_early() -> None:
        with grids.chained():
            elementwise.norm(x, by, out)

    with watch.on():
        queues, early = devices.Queues(CPU), "starts early, and not directly after a kernel"
        elementwise.norm(x, by, out)
        with pytest.raises(OrderError, match=early):
            norm_early()
        with watch.order.captured():
            with pytest.raises(OrderError, match=early):
                norm_early()
            elementwise.norm(x, by, out)
            norm_early()
            with queues.forked("link"):
                elementwise.norm(x, by, torch.zeros(4))
                with pytest.raises(OrderError, match="stream link starts early"):
                    norm_early()
            queues.join("link")
            with pytest.raises(OrderError, match=early):
                norm_early()


@pytest.mark.parametrize("launch", [experts, route, attend, mixers])
def test_kernels_do_not_race(launch: Callable[[], None]) -> None:
    launch()
