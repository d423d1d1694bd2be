"""A layer as one native call: the bits of its operations called one by one, in every pass that takes calls."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import Tiny, write
from support.models import DEMO_MODEL, pack
from support.native import INSTRUCTION_SETS
from torch import Tensor

from moe_pack.formats import Pack, PackError
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cpu import Kernels, is_available
from moe_pack.runtime.model import Decoder, NativeOperations, Operations, open_weights
from moe_pack.runtime.model.layer_calls import BegunLayer, LayerCalls
from moe_pack.runtime.model.passes import Pass
from moe_pack.runtime.offload import least_budget

CPU = torch.device("cpu")
CONTEXT, PROMPTS, NUM_STEPS = 48, (6, 9, 4), 5
# What calls do of the layers of each: the whole, or the first half and the router.
FAMILIES = (
    (Tiny("mixtral", "window of 7", {"sliding_window": 7}), {"whole"}),
    (Tiny("qwen3_moe", "as it comes"), {"whole"}),
    (Tiny("olmoe", "norms of projections"), {"whole"}),
    (Tiny("gpt_oss", "biases, sinks, clamped neurons"), {"whole"}),
    (Tiny("glm4_moe", "groups, a dense layer, a shared expert", {"n_group": 4, "topk_group": 2}), {"whole"}),
    (Tiny("granitemoe", "factors of halves"), {"whole"}),
    (Tiny("qwen2_moe", "dense layers, a gate at the shared expert", {"mlp_only_layers": [0]}), {"whole", "half"}),
    (Tiny("deepseek_v3", "latent attention"), set()),
)

pytestmark = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


@contextmanager
def native(limit: str | None = None) -> Iterator[NativeOperations]:
    with closing(Kernels(2, limit)) as kernels:  # type: ignore[arg-type]  # a name of the loop
        yield NativeOperations(kernels)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What calls have done: layers whole, or in half."""
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
    with Pack(packs[0]) as opened, native() as operations, closing(open_weights(opened, CPU, operations)) as weights:
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
        with (
            Pack(packs[0]) as opened,
            native() as operations,
            closing(open_weights(opened, CPU, operations)) as weights,
        ):
            weights.observer = observer = Observer()
            answers(Decoder(weights, CONTEXT, num_sequences=len(PROMPTS)))
            return observer.seen, weights.bytes_read

    found = run()
    with separately():
        assert found == run()


def test_a_damaged_or_truncated_expert_is_named(packs: tuple[Path, ...], tmp_path: Path) -> None:
    broken = shutil.copytree(packs[0], tmp_path / "broken")
    with Pack(broken) as opened, native() as operations, closing(open_weights(opened, CPU, operations)) as weights:
        name = opened.manifest.expert_files[1].name
        file = broken / name
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
    with (
        Pack(broken) as opened,
        native() as operations,
        closing(open_weights(opened, CPU, operations)) as weights,
        pytest.raises(PackError, match=rf"{name}: expert \d+: CRC-32 does not match"),
    ):
        answers(Decoder(weights, CONTEXT, num_sequences=len(PROMPTS)))
