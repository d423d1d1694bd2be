"""Layers as native calls: the same bits as the operations one by one; wrong arguments are refused."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.families import Tiny, write
from support.models import DEMO_MODEL, pack
from support.native import INSTRUCTION_SETS, kernels_limited_to
from support.random_experts import FOUR_BIT, Shape, random_expert, random_rows
from torch import Tensor

from moe_pack.formats import Pack, PackError, RouterSpec
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime import Engine, EngineOptions, cpu
from moe_pack.runtime.model import Decoder, NativeOperations, Operations, PackWeights, open_weights
from moe_pack.runtime.model.layer_calls import BegunLayer, LayerCalls
from moe_pack.runtime.model.passes import Pass
from moe_pack.runtime.offload import least_budget

CPU = torch.device("cpu")
CONTEXT, PROMPTS, NUM_STEPS = 48, (6, 9, 4), 5
# What calls do of the layers of each: all that is standard, up to the end, or the first half and the router.
FAMILIES = (
    (Tiny("mixtral", "window of 7", {"sliding_window": 7}), {"whole"}),
    (Tiny("qwen3_moe", "as it comes"), {"whole"}),
    (Tiny("olmoe", "norms of projections"), {"whole"}),
    (Tiny("gpt_oss", "biases, sinks, clamped neurons"), {"whole"}),
    (Tiny("glm4_moe", "groups, a dense layer, a shared expert", {"n_group": 4, "topk_group": 2}), {"whole"}),
    (Tiny("granitemoe", "factors of halves"), {"whole"}),
    (Tiny("qwen2_moe", "dense layers, a gate at the shared expert", {"mlp_only_layers": [0]}), {"whole"}),
    (Tiny("deepseek_v3", "latent attention, whose layers a call ends"), {"whole"}),
    (Tiny("qwen3_next", "mixers, gated attention, a gate at the shared expert"), {"whole"}),
    (Tiny("lfm2_moe", "short convolutions"), {"whole"}),
    (Tiny("longcat_flash", "experts that return their input"), set()),
)

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="native kernels were not built")


@contextmanager
def native(limit: str | None = None) -> Iterator[NativeOperations]:
    with closing(cpu.Kernels(2, limit)) as kernels:  # type: ignore[arg-type]  # a name of the loop
        yield NativeOperations(kernels)


@contextmanager
def mapped(folder: Path) -> Iterator[PackWeights]:
    """The weights of a pack whose experts native kernels use in their files."""
    with Pack(folder) as opened, native() as operations, closing(open_weights(opened, CPU, operations)) as weights:
        yield weights


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the layers that calls ran whole, or in half."""
    counted, begin = Counter[str](), LayerCalls.begin

    def counting(calls: LayerCalls, x: Tensor, layer: int, batch: Pass) -> BegunLayer | None:
        begun = begin(calls, x, layer, batch)
        if begun is not None:
            counted["whole" if begun.is_complete else "half"] += begun.layer - layer + 1
        return begun

    monkeypatch.setattr(LayerCalls, "begin", counting)
    return counted


@contextmanager
def separately() -> Iterator[None]:
    """Computes all layers by their operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCalls, "begin", lambda *given: None)
        yield


def answers(decoder: Decoder) -> Tensor:
    """The logits of sequences that go on alone, by one token and by two, and then together."""
    vocab_size, found = decoder.spec.vocab_size, list[Tensor]()
    ids = [(11 * i * i + 5 * i + 3) % vocab_size for i in range(CONTEXT)]
    for sequence, length in zip(decoder.sequences, PROMPTS, strict=True):
        found.append(decoder.extend(sequence, ids[:length]))
        found += [decoder.extend(sequence, [token]) for token in ids[length : length + NUM_STEPS]]
        found.append(decoder.extend(sequence, ids[:2]))
    for step in range(NUM_STEPS):
        found += decoder.extend_each(decoder.sequences, ids[step : step + len(decoder.sequences)])
    return torch.stack(found)


def decoded(folder: Path, operations: Operations) -> Tensor:
    """The same with the experts of a pack mapped."""
    with Pack(folder) as opened, closing(open_weights(opened, CPU, operations)) as weights:
        return answers(Decoder(weights, CONTEXT, num_sequences=len(PROMPTS)))


def test_a_call_gives_the_bits_of_the_operations(tmp_path: Path, counts: Counter[str]) -> None:
    for tiny, expected in FAMILIES:
        folder = tmp_path / tiny.family
        with case(str(tiny)), native() as operations:
            pack(write(tiny, folder / "source"), folder / "packed", dense_width=8)
            counts.clear()
            found = decoded(folder / "packed", operations)
            assert set(counts) == expected
            with separately():
                assert torch.equal(found, decoded(folder / "packed", operations))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """The demo model, with all neurons running, with half of them, and in a rotated pack."""
    folder = tmp_path_factory.mktemp("packs")
    for name, rotate in (("dense", "off"), ("rotated", "on")):
        pack(DEMO_MODEL, folder / name, selector="up", group=64, dense_width=8, rotate=rotate)
    shutil.copytree(folder / "dense", folder / "sparse")
    with Pack(folder / "dense") as opened:
        rewrite_thresholds(folder / "sparse", np.full(opened.thresholds.shape, 0.3, np.float32))
    return folder / "dense", folder / "sparse", folder / "rotated"


@pytest.mark.slow
def test_it_does_with_every_instruction_set(packs: tuple[Path, ...], counts: Counter[str]) -> None:
    for folder in packs:
        for limit in INSTRUCTION_SETS:
            with case(folder.name, limit), native(limit) as operations:
                counts.clear()
                found = decoded(folder, operations)
                assert set(counts) == {"whole"}
                with separately():
                    assert torch.equal(found, decoded(folder, operations))


@pytest.mark.slow
def test_it_does_with_offloaded_experts(packs: tuple[Path, ...], counts: Counter[str]) -> None:
    ids = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]

    def offloaded(folder: Path) -> Tensor:
        with Pack(folder) as opened:
            options = EngineOptions(budget_bytes=least_budget(opened.layout, CONTEXT, 0) + (1 << 20))
            with Engine(opened, options, CONTEXT) as engine:
                assert isinstance(engine.decoder, Decoder) and engine.offloaded is not None
                return torch.stack([engine.decoder.next_logits([token]) for token in ids])

    for folder in packs:
        with case(folder.name), native() as operations:
            counts.clear()
            found = offloaded(folder)
            assert set(counts) == {"half"}
            with separately():
                assert torch.equal(found, offloaded(folder))
            with Pack(folder) as opened, closing(open_weights(opened, CPU, operations)) as weights:
                decoder = Decoder(weights, CONTEXT)
                assert torch.equal(found, torch.stack([decoder.next_logits([token]) for token in ids]))


def test_a_long_pass_is_left_to_the_operations(packs: tuple[Path, ...], counts: Counter[str]) -> None:
    with mapped(packs[0]) as weights:
        decoder = Decoder(weights, CONTEXT)
        decoder.next_logits(list(range(32)))
        assert not counts
        decoder.next_logits([1])
        assert set(counts) == {"whole"}


def test_an_observer_and_the_count_of_bytes_see_what_they_see_without_calls(packs: tuple[Path, ...]) -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[tuple[int, list[list[int]]]] = []

        def routed(self, layer_idx: int, experts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
            self.seen.append((layer_idx, experts.tolist()))

        def fetched(self, layer_idx: int, expert: int) -> None:
            raise AssertionError("mapped experts are not fetched")

    def run() -> tuple[list[tuple[int, list[list[int]]]], int]:
        with mapped(packs[0]) as weights:
            weights.observer = observer = Observer()
            answers(Decoder(weights, CONTEXT, num_sequences=len(PROMPTS)))
            return observer.seen, weights.bytes_read

    found = run()
    with separately():
        assert found == run()


def test_a_damaged_or_truncated_expert_is_named(packs: tuple[Path, ...], tmp_path: Path) -> None:
    broken = shutil.copytree(packs[0], tmp_path / "broken")
    name = "experts-001.safetensors"
    file = broken / name
    with mapped(broken) as weights:
        decoder = Decoder(weights, CONTEXT)
        for token in range(1, 20):
            decoder.next_logits([token])
        with file.open("r+b") as cut:
            cut.truncate(4096)
        with pytest.raises(PackError, match=f"{name}: was truncated while it was in use"):
            decoder.next_logits([1])
    raw = bytearray((packs[0] / name).read_bytes())
    raw[len(raw) // 2 :: 64] = bytes(byte ^ 1 for byte in raw[len(raw) // 2 :: 64])
    file.write_bytes(raw)
    with mapped(broken) as weights, pytest.raises(PackError, match=rf"{name}: expert \d+: CRC-32 does not match"):
        answers(Decoder(weights, CONTEXT, num_sequences=len(PROMPTS)))


D, F, T, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, PLACES = 128, 64, 2, 4, 2, 32, 6, 2, 11
REFUSED = (ValueError, BufferError, TypeError)
ATTENTION = GroupedQuerySpec("grouped_query", HEADS, KV_HEADS, HEAD_DIM, None, 0.2, (), "head")
FACTS = cpu.LayerFacts(
    D, ATTENTION, None, False, 1e-6, 1.0, RouterSpec("softmax_topk", EXPERTS, CHOSEN, True), 0.0, "silu"
)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def matrix(num_rows: int, num_cols: int) -> cpu.LayerMatrix:
    layout, rows = random_rows(FOUR_BIT, num_rows, num_cols)
    return cpu.LayerMatrix(cpu.row_numbers(layout, "weight"), rows, floats(num_rows))


VECTORS = cpu.LayerVectors(
    *(floats(D), floats(D), floats(HEAD_DIM), floats(HEAD_DIM), floats(HEADS), floats(EXPERTS)),
    *(floats(D), floats(D), floats(1, 1)),
)
MATRICES = cpu.LayerMatrices(
    *(matrix(HEADS * HEAD_DIM, D), matrix(KV_HEADS * HEAD_DIM, D), matrix(KV_HEADS * HEAD_DIM, D)),
    *(matrix(D, HEADS * HEAD_DIM), matrix(EXPERTS, D), matrix(F, D), matrix(F, D), matrix(D, F), matrix(1, D)),
)
SECOND_HALF = {
    "facts": replace(FACTS, attention=None),
    "vectors": VECTORS._replace(q_norm=None, k_norm=None, sinks=None),
    "matrices": MATRICES._replace(q=None, k=None, v=None, o=None),
}


F32 = cpu.CACHE_KINDS.index("f32")


def cache() -> NDArray[np.uint8]:
    """The bytes of a cache of float32."""
    return floats(KV_HEADS, PLACES, HEAD_DIM).view(np.uint8)


def opened(num_experts: int = EXPERTS, **changes: Any) -> cpu.NativeLayers:
    """A layer of a model, and some of its experts."""
    layers = cpu.NativeLayers(kernels_limited_to("portable"), 2)
    given = {"facts": FACTS, "vectors": VECTORS, "matrices": MATRICES} | changes
    layers.set(0, given["facts"], given["vectors"], given["matrices"])
    for expert in range(num_experts):
        layers.set_expert(0, expert, random_expert(Shape(F, D)).rows())
    return layers


def arrays() -> cpu.LayerPass:
    return cpu.LayerPass(floats(T, D), floats(T, D), floats(T, D), np.zeros((T, CHOSEN), np.int64), floats(T, CHOSEN))


def begin(layers: cpu.NativeLayers, layer: int = 0, **changes: Any) -> None:
    given = {
        "arrays": arrays(),
        "angles": (floats(T, HEAD_DIM // 2), floats(T, HEAD_DIM // 2)),
        "caches": [(cache(), cache(), 3, F32)],
    } | changes
    layers.begin(layer, given["arrays"], given["angles"], given["caches"])


def run(layers: cpu.NativeLayers, first: int = 0, **changes: Any) -> int:
    turns, keys = floats(T, HEAD_DIM // 2), cache()
    given = {"arrays": arrays(), "steps": [(turns, turns, [(keys, keys.copy(), 3, F32)])]} | changes
    return layers.run(first, given["arrays"], given["steps"])


def faults(value: NDArray[Any]) -> list[object]:
    """One value too few and too many, another type, gaps, and no buffer."""
    flat = value.reshape(-1)
    return [flat[:-1].copy(), np.append(flat, flat[:1]), flat.astype(np.complex128), np.append(flat, flat)[::2], [0]]


def test_what_fits_runs() -> None:
    begin(opened())
    assert run(opened()) == 1
    assert run(opened(**SECOND_HALF), steps=[(floats(0), floats(0), [])]) == 1
    layers, taken = opened(num_experts=0), arrays()
    assert run(layers, arrays=taken) == 0
    for expert in range(EXPERTS):
        layers.set_expert(0, expert, random_expert(Shape(F, D)).rows())
    layers.end(0, taken)


def test_arrays_of_a_pass_that_do_not_fit_are_refused() -> None:
    layers = opened()
    for name in ("x", "inputs", "unrouted", "experts", "weights"):
        for number, fault in enumerate(faults(getattr(arrays(), name))):
            for call in (begin, run):
                with case(name, number), pytest.raises(REFUSED):
                    call(layers, arrays=replace(arrays(), **{name: fault}))
        for call in (begin, run):
            with case(name, "missing"), pytest.raises(REFUSED):
                call(layers, arrays=replace(arrays(), **{name: None}))
    turns, keys = floats(T, HEAD_DIM // 2), cache()
    for number, fault in enumerate(faults(turns)):
        with case("angles", number), pytest.raises(REFUSED):
            begin(layers, angles=(turns, fault))
    for number, fault in enumerate(faults(keys)):
        with case("values", number), pytest.raises(REFUSED):
            begin(layers, caches=[(keys, fault, 0, F32)])
    wide = floats(T, HEAD_DIM)
    for name, changes in {
        "more angles than pairs": {"angles": (wide, wide)},
        "no sequence": {"caches": []},
        "more sequences than tokens": {"caches": [(keys, keys, 0, F32)] * 3},
        "no place for the new tokens": {"caches": [(keys, keys, PLACES - 1, F32)]},
        "a start below 0": {"caches": [(keys, keys, -1, F32)]},
        "no tuple": {"caches": [keys]},
        "rows of another kind": {"caches": [(keys, keys, 0, 9)]},
        "rows of another size": {"caches": [(keys, keys, 0, cpu.CACHE_KINDS.index("q4"))]},
    }.items():
        with case(name), pytest.raises(REFUSED):
            begin(layers, **changes)


def test_steps_that_do_not_fit_are_refused() -> None:
    layers, turns, keys = opened(), floats(T, HEAD_DIM // 2), cache()
    step = turns, turns, [(keys, keys, 0, F32)]
    for name, steps in {
        "a layer that is not set": [step, step],
        "no tuple": [turns],
        "no caches": [(turns, turns, [])],
        "other angles": [(turns, turns[:1], [(keys, keys, 0, F32)])],
        "no step for the chosen": [],
    }.items():
        with case(name), pytest.raises(REFUSED):
            run(layers, steps=steps)
    with pytest.raises(ValueError, match="caches: the layer has no attention"):
        run(opened(**SECOND_HALF), steps=[(floats(0), floats(0), step[2])])


def test_weights_that_do_not_fit_are_refused() -> None:
    for name in cpu.LayerVectors._fields:
        for number, fault in enumerate(faults(getattr(VECTORS, name))[:3]):
            with case(name, number), pytest.raises(REFUSED):
                opened(vectors=VECTORS._replace(**{name: fault}))
    for name in cpu.LayerMatrices._fields:
        own: cpu.LayerMatrix = getattr(MATRICES, name)
        wrong = [
            own._replace(rows=own.rows[:-1]),
            own._replace(bias=floats(len(own.rows) + 1)),
            own._replace(layout=own.layout[:-1]),
        ]
        for number, fault in enumerate([*wrong, own._replace(rows=own.rows.reshape(-1)[:-1].copy())]):
            with case(name, number), pytest.raises(REFUSED):
                opened(matrices=MATRICES._replace(**{name: fault}))
    for name in ("q", "k", "v", "o", "up", "down"):
        with case(name, "missing"), pytest.raises(REFUSED):
            opened(matrices=MATRICES._replace(**{name: None}))
    for number, attention in enumerate(
        (replace(ATTENTION, num_heads=0), replace(ATTENTION, num_kv_heads=3), replace(ATTENTION, head_dim=1 << 17))
    ):
        with case("attention", number), pytest.raises(REFUSED):
            opened(facts=replace(FACTS, attention=attention))


def test_layers_and_experts_that_are_not_there_are_refused() -> None:
    layers, rows = opened(num_experts=1), random_expert(Shape(F, D)).rows()
    for layer in (-1, 1, 2):
        with case("layer", layer), pytest.raises(ValueError, match="layer: there is none of this number"):
            begin(layers, layer)
    for expert in (-1, 0, EXPERTS):
        with case("expert", expert), pytest.raises(ValueError, match="there is none of this number, or it is set"):
            layers.set_expert(0, expert, rows)
    with pytest.raises(ValueError, match="rows are not as long"):
        layers.set_expert(0, 1, random_expert(Shape(F, 2 * D)).rows())
    for name in ("selector", "records"):
        with case(name), pytest.raises(REFUSED):
            layers.set_expert(0, 1, replace(rows, **{name: getattr(rows, name)[:-1]}))
    for expert, message in ((1, "one is not set"), (EXPERTS, "not of the layer"), (-1, "not of the layer")):
        chosen = np.full((T, CHOSEN), expert, np.int64)
        with case("chosen", expert), pytest.raises(ValueError, match=message):
            layers.end(0, replace(arrays(), experts=chosen, weights=np.ones((T, CHOSEN), np.float32)))
    with pytest.raises(ValueError, match="it is set"):
        layers.set(0, FACTS, VECTORS, MATRICES)


def test_panels_that_do_not_fit_are_refused_and_right_ones_taken_once() -> None:
    layers, expert = opened(), random_expert(Shape(F, D))
    panels = np.zeros(len(expert.extent), np.uint8)
    for number, fault in enumerate((*faults(panels), panels[:0])):
        with case(number), pytest.raises(REFUSED):
            layers.set_panels(0, 1, fault)  # type: ignore[arg-type]  # which is the fault
    layers.set_panels(0, 1, panels)
    with pytest.raises(ValueError, match="panels: they are set"):
        layers.set_panels(0, 1, panels)
    for layer, other, message in (
        (1, 0, "layer: there is none"),
        (0, -1, "it is not set"),
        (0, EXPERTS, "it is not set"),
    ):
        with case(layer, other), pytest.raises(ValueError, match=message):
            layers.set_panels(layer, other, panels)
    with pytest.raises(ValueError, match="expert: it is not set"):
        opened(num_experts=1).set_panels(0, 1, panels)
    narrow = random_expert(Shape(F - 1, D)).rows()
    layers = opened(num_experts=0)
    layers.set_expert(0, 0, narrow)
    with pytest.raises(ValueError, match="panels: the layout has none"):
        layers.set_panels(0, 0, panels)


def test_a_matrix_of_no_whole_panels_is_refused() -> None:
    for name, whole in (("q", True), ("o", True), ("router", False)):
        own: cpu.LayerMatrix = getattr(MATRICES, name)
        given = MATRICES._replace(**{name: own._replace(layout=cpu.panel_numbers(own.layout))})
        with case(name):
            if whole:
                opened(matrices=given)
                continue
            with pytest.raises(ValueError, match="router: no whole panels"):
                opened(matrices=given)
