"""Matrices and experts that weights put into panels: in place, or by a thread, with no change of any answer."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import DEMO_MODEL, pack
from support.native import kernels_limited_to
from support.random_experts import FOUR_BIT, RandomExpert, Shape, random_expert, random_rows
from torch import Tensor

from moe_pack.formats import Pack, PackError, part_format
from moe_pack.runtime import cpu
from moe_pack.runtime.engine.numerics import LARGEST_KL
from moe_pack.runtime.model import Decoder, NativeOperations, linear, open_weights
from moe_pack.runtime.model.compute import matrices
from moe_pack.runtime.model.layer_calls import LayerCalls
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.model.panels import ExpertPanels

CONTEXT, ALL = 64, 1 << 30  # bytes: more than all panels of the demo model


@pytest.fixture(scope="module")
def kernels() -> cpu.Kernels:
    return kernels_limited_to("avx2")


@pytest.fixture(params=(0, 2), ids=("exact", "rounded"))
def rounds(request: pytest.FixtureRequest, kernels: cpu.Kernels) -> Iterator[None]:
    """The digits to which kernels round inputs meanwhile."""
    assert kernels.take_digits(request.param) == request.param
    yield
    kernels.take_digits(0)


# ---- matrices -------------------------------------------------------------------------------------------------------


def test_a_matrix_in_panels_gives_the_rows_and_products_of_one_in_rows(kernels: cpu.Kernels) -> None:
    """Whole, in parts that begin and end at panels or between them, and by numbers of rows."""
    operations, x = NativeOperations(kernels), torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    for stored in (FOUR_BIT, part_format(8, 64)):
        layout, held = random_rows(stored, 96, 192)
        rows = matrices.RowMatrix(layout, torch.from_numpy(held.copy()), operations)
        panels = matrices.RowMatrix(layout, torch.from_numpy(held), operations).to_panels()
        assert isinstance(panels, matrices.PanelMatrix) and (panels.num_rows, panels.num_cols) == (96, 192)
        expected = linear(x[:3], panels)
        for start, stop in ((0, 96), (16, 64), (0, 1), (7, 40), (95, 96), (32, 32)):
            with case(stored.width, start, stop):
                part = panels.part(start, stop)
                assert isinstance(part, matrices.PanelMatrix) == (start % 16 == stop % 16 == 0)
                for some in (panels.rows(start, stop), matrices.rows_of(part, 0, stop - start).rows(0, stop - start)):
                    assert torch.equal(some, rows.rows(start, stop))
                if isinstance(part, matrices.PanelMatrix):
                    assert torch.equal(linear(x[:3], part), expected[:, start:stop])
                else:
                    assert torch.allclose(linear(x[:3], part), expected[:, start:stop], rtol=1e-4, atol=1e-4)
        ids = torch.tensor([95, 0, 17, 17, 3])
        assert torch.equal(panels.take(ids), rows.take(ids))
        assert torch.equal(matrices.gather_rows(panels, ids), rows.take(ids))
        assert panels.native is not None and panels.native.layout[2] == 1


def test_a_matrix_that_has_no_panels_stays_what_it_is(kernels: cpu.Kernels) -> None:
    layout, held = random_rows(part_format(4, 32), 32, 192)
    for operations in (NativeOperations(kernels), NativeOperations(kernels_limited_to("portable"))):
        rows = matrices.RowMatrix(layout, torch.from_numpy(held), operations)
        assert rows.to_panels() is rows
    layout, held = random_rows(FOUR_BIT, 32, 192)
    of_torch = matrices.RowMatrix(layout, torch.from_numpy(held))
    assert of_torch.to_panels() is of_torch


# ---- experts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier() -> set[threading.Thread]:
    """The threads before a test."""
    return set(threading.enumerate())


def num_new(earlier: set[threading.Thread]) -> int:
    return len(set(threading.enumerate()) - earlier)


def made(seed: int, num_rows: int = 64) -> RandomExpert:
    return random_expert(Shape(num_rows, 128), seed)


EXPERT_BYTES = len(made(0).extent)


def assert_same_answer(expert: RandomExpert, panels: cpu.Bytes, kernels: cpu.Kernels) -> None:
    x, rows = torch.randn(1, 128, generator=torch.Generator().manual_seed(3)), expert.rows()
    token = np.zeros(1, np.int64), np.ones(1, np.float32)
    of_rows, of_panels = (kernels.experts(x, [(form, *token)]) for form in (rows, replace(rows, panels=panels)))
    assert panels.any() and torch.equal(of_panels, of_rows)


def test_panels_keep_to_their_bytes(kernels: cpu.Kernels) -> None:
    """An expert that does not fit is left out, and one that fits after it is taken. The third is twice as large."""
    for most_bytes, numbers in (
        (0, []),
        (EXPERT_BYTES - 1, []),
        (EXPERT_BYTES, [0]),
        (2 * EXPERT_BYTES - 1, [0]),
        (2 * EXPERT_BYTES, [0, 1]),
        (3 * EXPERT_BYTES - 1, [0, 1]),
        (3 * EXPERT_BYTES, [0, 1, 3]),
        (4 * EXPERT_BYTES - 1, [0, 1, 3]),
        (4 * EXPERT_BYTES, [0, 1, 2]),
        (6 * EXPERT_BYTES, [0, 1, 2, 3, 4]),
    ):
        with case(most_bytes), closing(ExpertPanels(kernels, most_bytes)) as panels:
            for number in range(5):
                panels.want((0, number), made(number, 128 if number == 2 else 64).rows())
            panels.wait()
            assert [number for (_, number), _ in panels.made_since(0)] == numbers
            assert panels.num_bytes == EXPERT_BYTES * (len(numbers) + (2 in numbers))


def test_they_lie_in_private_memory(kernels: cpu.Kernels, earlier: set[threading.Thread]) -> None:
    """By default a system gives shared memory no huge pages, whatever is asked for it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not list a process's mappings")
    with closing(ExpertPanels(kernels, ALL)) as panels:
        panels.want((0, 0), made(0).rows())
        panels.wait()
        ((_, memory),) = panels.made_since(0)
        own = []
        for line in maps.read_text().splitlines():
            places, kind, *_ = line.split()
            begin, end = (int(place, 16) for place in places.split("-"))
            own += [kind] if begin <= memory.ctypes.data < end else []
        assert own == ["rw-p"]


def test_an_expert_asked_for_again_is_made_once(kernels: cpu.Kernels, earlier: set[threading.Thread]) -> None:
    with closing(ExpertPanels(kernels, ALL)) as panels:
        for number in (1, 2, 1, 1, 3, 2):
            panels.want((0, number), made(number).rows())
        panels.wait()
        panels.want((0, 1), made(1).rows())
        panels.want((1, 1), made(4).rows())
        panels.wait()
        assert [key for key, _ in panels.made_since(0)] == [(0, 1), (0, 2), (0, 3), (1, 1)]
        assert [key for key, _ in panels.made_since(3)] == [(1, 1)] and not panels.made_since(4)
        assert panels.num_bytes == 4 * EXPERT_BYTES
        assert num_new(earlier) == 1
    assert num_new(earlier) == 0


def test_panels_that_were_made_give_the_answers_of_rows(kernels: cpu.Kernels) -> None:
    with closing(ExpertPanels(kernels, ALL)) as panels:
        for number in range(1, 5):
            panels.want((0, number), made(number, 64 * number).rows())
        panels.wait()
        assert len(panels.made_since(0)) == 4
        for (_, number), found in panels.made_since(0):
            assert found.ctypes.data % 64 == 0
            assert_same_answer(made(number, 64 * number), found, kernels)


def test_experts_without_panels_start_no_thread(kernels: cpu.Kernels, earlier: set[threading.Thread]) -> None:
    with closing(ExpertPanels(kernels, ALL)) as panels:
        panels.want((0, 0), made(0).rows(0.5))
        panels.want((0, 1), made(0, 65).rows())
        panels.wait()
        assert num_new(earlier) == 0 and not panels.made_since(0) and panels.num_bytes == 0


def test_closing_ends_the_thread_whatever_waits(kernels: cpu.Kernels, earlier: set[threading.Thread]) -> None:
    """What was made stays, in the order in which it was asked for; nothing is made any more."""
    panels = ExpertPanels(kernels, ALL)
    for number in range(40):
        panels.want((0, number), made(number).rows())
    panels.close()
    assert num_new(earlier) == 0
    found = panels.made_since(0)
    assert [key for key, _ in found] == [(0, number) for number in range(len(found))]
    for (_, number), own in found:
        assert_same_answer(made(number), own, kernels)
    unused = ExpertPanels(kernels, ALL)
    for closed in (panels, unused):
        closed.close()
        closed.want((1, 0), made(50).rows())
        assert num_new(earlier) == 0
    assert len(panels.made_since(0)) == len(found) and not unused.made_since(0)


# ---- a decoder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in 4 bit, with matrices of 8, in groups of 64."""
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64, dense_width=8)
    return folder


@contextmanager
def opened(folder: Path, kernels: cpu.Kernels, most_bytes: int) -> Iterator[MappedPackWeights]:
    with Pack(folder) as held, closing(MappedPackWeights(held, NativeOperations(kernels), most_bytes)) as weights:
        yield weights


@contextmanager
def layers_run(how: str) -> Iterator[None]:
    """Layers run by native calls, or by their operations."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "operations":
            patch.setattr(LayerCalls, "begin", lambda *given: None)
        yield


IDS = [(11 * i * i + 5 * i + 3) % 4096 for i in range(CONTEXT)]


def some_logits(decoder: Decoder) -> Tensor:
    """After one token and after two, of three sequences together, and after more tokens."""
    found = list[Tensor]()
    for sequence in decoder.sequences:
        found += [decoder.extend(sequence, [token]) for token in IDS[:4]]
        found.append(decoder.extend(sequence, IDS[4:6]))
    found += decoder.extend_each(decoder.sequences, IDS[: len(decoder.sequences)])
    found.append(decoder.extend(decoder.sequences[0], IDS[:12]))
    return torch.stack(found)


@pytest.mark.usefixtures("rounds")
def test_a_decoder_gives_the_same_logits_before_while_and_after_panels_are_made(
    demo: Path, kernels: cpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No panel is made before the first round has ended. All of the first two rounds are, before the third begins."""
    set_panels, make, given, may_begin = (
        cpu.NativeLayers.set_panels,
        cpu.panel_expert,
        Counter[object](),
        threading.Event(),
    )

    def counting(layers: cpu.NativeLayers, layer: int, expert: int, panels: cpu.Bytes) -> None:
        given[layer, expert] += 1
        set_panels(layers, layer, expert, panels)

    def waiting(rows: cpu.ExpertRows, out: cpu.Bytes) -> None:
        may_begin.wait()
        make(rows, out)

    monkeypatch.setattr(cpu.NativeLayers, "set_panels", counting)
    monkeypatch.setattr(cpu, "panel_expert", waiting)
    for how in ("calls", "operations"):
        given.clear()
        may_begin.clear()
        with case(how), layers_run(how):
            with opened(demo, kernels, 0) as weights:
                decoder = Decoder(weights, CONTEXT, num_sequences=3)
                before, meanwhile, after = (some_logits(decoder) for _ in range(3))
                assert not weights.panels.made_since(0)
            with opened(demo, kernels, ALL) as weights:
                decoder = Decoder(weights, CONTEXT, num_sequences=3)
                try:
                    assert torch.equal(some_logits(decoder), before)
                    assert not weights.panels.made_since(0)
                finally:
                    may_begin.set()
                assert torch.equal(some_logits(decoder), meanwhile)
                weights.panels.wait()
                made = weights.panels.made_since(0)
                assert torch.equal(some_logits(decoder), after)
                assert made and all(weights.expert_rows(*key).panels is panels for key, panels in made)
                assert set(given.values()) == ({1} if how == "calls" else set())
                assert how == "operations" or len(given) >= len(made)
                assert torch.equal(some_logits(Decoder(weights, CONTEXT, num_sequences=3)), before)


def test_experts_of_prompts_are_not_put_in_panels(demo: Path, kernels: cpu.Kernels) -> None:
    """Those of 16 tokens are; of 17 only those of the last token in the last layer, which runs it alone."""
    for how, num_tokens in product(("calls", "operations"), (17, 40, 16)):
        with case(how, num_tokens), layers_run(how), opened(demo, kernels, ALL) as weights:
            Decoder(weights, CONTEXT).next_logits(IDS[:num_tokens])
            weights.panels.wait()
            router, last = weights.spec.router, len(weights.spec.moe_layers) - 1
            made = Counter(layer_idx for (layer_idx, _), _ in weights.panels.made_since(0))
            if num_tokens == 16:
                assert set(made) == set(range(last + 1)) and made[0] > router.num_experts_per_tok
            else:
                assert set(made) <= {last} and made[last] <= router.num_experts_per_tok


def test_a_decoder_prepares_experts_before_they_are_chosen(demo: Path, kernels: cpu.Kernels) -> None:
    """All of them, and no other answer comes of it. Few wait for the thread at any time, so that it is idle soon."""
    with opened(demo, kernels, 0) as weights:
        before = some_logits(Decoder(weights, CONTEXT, num_sequences=3))
    with opened(demo, kernels, ALL) as weights:
        decoder = Decoder(weights, CONTEXT, num_sequences=3)
        while decoder.prepare_next():
            assert weights.panels.num_waiting <= 2
        weights.panels.wait()
        assert weights.panels.num_waiting == 0
        made = [key for key, _ in weights.panels.made_since(0)]
        spec = weights.spec
        assert made == list(product(range(len(spec.moe_layers)), range(spec.router.num_experts)))
        assert not decoder.prepare_next()
        assert torch.equal(some_logits(decoder), before)


def test_a_decoder_prepares_what_there_is_memory_for(demo: Path, kernels: cpu.Kernels) -> None:
    with opened(demo, kernels, ALL) as weights:
        most_bytes = 2 * kernels.expert_panel_bytes(weights.expert_rows(0, 0))
    for some_bytes, number in ((0, 0), (most_bytes - 1, 1), (most_bytes, 2), (most_bytes + 1, 2)):
        with case(some_bytes), opened(demo, kernels, some_bytes) as weights:
            decoder = Decoder(weights, CONTEXT)
            while decoder.prepare_next():
                pass
            weights.panels.wait()
            assert len(weights.panels.made_since(0)) == number and not decoder.prepare_next()


def test_a_damaged_expert_is_not_prepared_and_the_others_are(demo: Path, kernels: cpu.Kernels, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(demo, damaged)
    file = next(damaged.glob("experts-*1.safetensors"))
    raw = bytearray(file.read_bytes())
    for place in range(len(raw) // 2, len(raw), 4096):
        raw[place] ^= 1
    file.write_bytes(raw)
    with opened(damaged, kernels, ALL) as weights:
        decoder = Decoder(weights, CONTEXT)
        while decoder.prepare_next():
            pass
        weights.panels.wait()
        made = {key for key, _ in weights.panels.made_since(0)}
        every = set(product(range(len(weights.spec.moe_layers)), range(weights.spec.router.num_experts)))
        lost = every - made
        assert lost and {layer for layer, _ in lost} == {1} and len(lost) < weights.spec.router.num_experts
        for key in lost:
            with pytest.raises(PackError, match=file.name):
                weights.expert_rows(*key)


def test_kernels_without_panels_prepare_experts_and_torch_nothing(demo: Path) -> None:
    with opened(demo, kernels_limited_to("portable"), ALL) as weights:
        decoder, calls = Decoder(weights, CONTEXT), 0
        while decoder.prepare_next():
            calls += 1
        assert calls == len(weights.spec.moe_layers) * weights.spec.router.num_experts
        assert not weights.panels.made_since(0)
    with Pack(demo) as held, closing(open_weights(held, torch.device("cpu"))) as of_torch:
        assert not Decoder(of_torch, CONTEXT).prepare_next()


def test_rounded_inputs_of_single_tokens_lose_little(demo: Path, kernels: cpu.Kernels) -> None:
    """`moe-pack eval` measures prompts; single tokens have the same 16 bits, and lose less than `auto` tolerates."""
    with opened(demo, kernels, ALL) as weights:
        decoder, found = Decoder(weights, CONTEXT), list[Tensor]()
        for digits in (0, 2):
            kernels.take_digits(digits)
            decoder.reset()
            logits = torch.stack([decoder.extend(decoder.sequences[0], [token]) for token in IDS])
            found.append(logits.double().log_softmax(-1))
        kernels.take_digits(0)
    exact, rounded = found
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < kl < LARGEST_KL / 10
