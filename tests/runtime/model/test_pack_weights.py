"""The weights of a pack: mapped experts, dense matrices, packed experts."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.answers import our_logits
from support.cases import case
from support.families import Tiny, write
from support.models import DEMO_MODEL, pack
from support.native import INSTRUCTION_SETS, operations_limited_to
from support.random_experts import random_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_pack.formats import BF16, ExpertFormat, ExpertSpec, Matrix, Pack, PackError, RangeReader, Selector, part_format
from moe_pack.formats.families.registry import model_types
from moe_pack.formats.pack.layouts import expert_layout, write_rows
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime import model
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model.compute import operations
from moe_pack.runtime.model.compute.matrices import gather_rows
from moe_pack.runtime.model.compute.operations import MAX_DECODED_BYTES, row_blocks
from moe_pack.runtime.model.pack_weights import MappedExpert, MappedPackWeights

CPU = torch.device("cpu")
# The project's bound. Logits of the demo model reach 20; float32 sums in another order move them by about 1e-5.
TOLERANCE = 1e-4
IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
DAMAGED = "experts-001.safetensors: expert 5: CRC-32 does not match its bytes; the file is damaged"


@pytest.fixture
def native() -> model.NativeOperations:
    return operations_limited_to("portable")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[Selector, Path]:
    """The demo model at 4 bit by selector kind; not to be changed."""
    folder = tmp_path_factory.mktemp("packs")
    for selector in SELECTORS:
        pack(DEMO_MODEL, folder / selector, selector=selector, group=64)
    return {selector: folder / selector for selector in SELECTORS}


@pytest.fixture
def copied(packs: dict[Selector, Path], tmp_path: Path) -> Path:
    """A pack that a test may damage."""
    return shutil.copytree(packs["up"], tmp_path / "copied")


def at_threshold(weights: model.PackWeights, threshold: float) -> model.PackWeights:
    """Weights with one threshold for all experts, whatever the pack says."""
    weights.threshold = lambda layer_idx, expert: threshold  # type: ignore[method-assign]
    return weights


def logits(weights: model.PackWeights, ids: list[int]) -> Tensor:
    return model.Decoder(weights, len(ids)).logits(ids)


def next_logits(weights: model.PackWeights, ids: list[int]) -> Tensor:
    decoder = model.Decoder(weights, len(ids))
    return torch.stack([decoder.next_logits([token]) for token in ids])


def clear_threshold(opened: Pack, about: float) -> float:
    """A threshold near one given that no activation of these tokens lies near."""
    for step in range(60):
        threshold = about * (1 + 1e-3 * step)
        below, above = (
            logits(at_threshold(model.PackWeights(opened, CPU), threshold * side), IDS) for side in (1 - 5e-6, 1 + 5e-6)
        )
        if torch.equal(below, above):
            return threshold
    raise AssertionError("every threshold has an activation near it")


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.slow
def test_logits_are_those_without_kernels(packs: dict[Selector, Path]) -> None:
    selectors: list[tuple[str, Selector]] = [("portable", selector) for selector in SELECTORS]
    for instruction_set, selector in [*selectors, *((limit, "both") for limit in INSTRUCTION_SETS[1:])]:
        with case(instruction_set, selector):
            native = operations_limited_to(instruction_set)
            with Pack(packs[selector]) as opened:
                expected = logits(model.PackWeights(opened, CPU), IDS)
                assert distance(logits(MappedPackWeights(opened, native), IDS), expected) < TOLERANCE
                assert distance(next_logits(MappedPackWeights(opened, native), IDS), expected) < TOLERANCE


@pytest.mark.slow
def test_logits_are_those_without_kernels_where_neurons_are_left_out(packs: dict[Selector, Path]) -> None:
    for selector, about in [("up", 0.4), ("gate", 0.1), ("both", 0.02), ("none", 0.02)]:
        with case(selector, about), Pack(packs[selector]) as opened:
            threshold = clear_threshold(opened, about)
            expected = logits(at_threshold(model.PackWeights(opened, CPU), threshold), IDS)
            assert distance(expected, logits(model.PackWeights(opened, CPU), IDS)) > 0.1, "many are left out"
            for native in (operations_limited_to("portable"), model.NativeOperations(Kernels(1))):
                weights = at_threshold(MappedPackWeights(opened, native), threshold)
                assert distance(logits(weights, IDS), expected) < TOLERANCE
                assert distance(next_logits(weights, IDS), expected) < TOLERANCE


def test_the_packs_own_thresholds_are_used(copied: Path, native: model.NativeOperations) -> None:
    with Pack(copied) as opened:
        threshold = np.float32(clear_threshold(opened, 0.4))
        expected = logits(at_threshold(model.PackWeights(opened, CPU), float(threshold)), IDS)
    rewrite_thresholds(copied, np.full((4, 8), threshold))
    with Pack(copied) as opened:
        assert distance(logits(MappedPackWeights(opened, native), IDS), expected) < TOLERANCE


@pytest.mark.slow
def test_logits_are_those_without_kernels_at_any_width(
    new_folder: Callable[[], Path], native: model.NativeOperations
) -> None:
    """Dense matrices at 8 bit, or as they are; more tokens than are taken at once."""
    for width in [1, 3, 8, 16]:
        case_folder = new_folder()
        with case(width):
            pack(DEMO_MODEL, case_folder / "packed", width=width, scale_bits=8, dense_width=None if width == 16 else 8)
            ids = [(7 * i * i + 3) % 4096 for i in range(100)]
            with Pack(case_folder / "packed") as opened:
                expected = logits(model.PackWeights(opened, CPU), ids)
                assert distance(logits(MappedPackWeights(opened, native), ids), expected) < TOLERANCE


@pytest.mark.slow
def test_logits_of_other_families_are_those_without_kernels(
    new_folder: Callable[[], Path], native: model.NativeOperations
) -> None:
    for family in model_types():
        case_folder = new_folder()
        with case(family):
            pack(write(Tiny(family, "as it comes"), case_folder / "source"), case_folder / "packed", dense_width=8)
            ids = [(7 * i * i + 3) % 96 for i in range(30)]
            with Pack(case_folder / "packed") as opened:
                expected = our_logits(model.PackWeights(opened, CPU), ids)
                assert distance(our_logits(MappedPackWeights(opened, native), ids), expected) < TOLERANCE
                assert (
                    distance(our_logits(MappedPackWeights(opened, native), ids, one_by_one=True), expected) < TOLERANCE
                )


def test_any_number_of_threads_gives_the_same_logits(packs: dict[Selector, Path]) -> None:
    operations_limited_to("portable")
    with Pack(packs["up"]) as opened, closing(Kernels(1)) as one, closing(Kernels(3)) as three:
        by_one, by_three = (MappedPackWeights(opened, model.NativeOperations(kernels)) for kernels in (one, three))
        assert torch.equal(logits(by_one, IDS), logits(by_three, IDS))


def test_the_same_bytes_are_counted(packs: dict[Selector, Path], native: model.NativeOperations) -> None:
    with Pack(packs["up"]) as opened:
        plain, mapped = model.PackWeights(opened, CPU), MappedPackWeights(opened, native)
        for weights in (plain, mapped):
            logits(weights, IDS)
        assert mapped.bytes_read == plain.bytes_read > 0


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_the_system_is_asked_for_a_layers_experts_before_one_is_mapped(
    packs: dict[Selector, Path], native: model.NativeOperations, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls of layers and without them; each expert once."""
    asked = list[tuple[int, int]]()

    def ask(reader: RangeReader, offset: int, num_bytes: int) -> None:
        asked.append((offset, num_bytes))

    monkeypatch.setattr(RangeReader, "read_ahead", ask)
    with Pack(packs["up"]) as opened, closing(model.open_weights(opened, CPU, native)) as weights:
        assert isinstance(weights, MappedPackWeights)
        decoder = model.Decoder(weights, 64)
        for ids in (IDS[:1] * num_tokens, IDS[:1] * num_tokens):
            decoder.reset()
            decoder.next_logits(ids)
            offsets, experts = opened.layout.offsets, opened.layout.experts
            assert sorted(asked) == sorted((offsets[l][e], experts[l][e].num_bytes) for l, e in weights._mapped)


@pytest.fixture(params=SELECTORS)
def both_experts(
    request: pytest.FixtureRequest, packs: dict[Selector, Path], native: model.NativeOperations
) -> Iterator[tuple[model.PackedExpert, MappedExpert]]:
    with Pack(packs[request.param]) as opened:
        plain, mapped = (model.open_weights(opened, CPU, given).expert(2, 3) for given in (model.TORCH, native))
        assert isinstance(plain, model.PackedExpert) and isinstance(mapped, MappedExpert)
        yield plain, mapped


def test_blocks_of_a_mapped_expert_are_those_of_its_bytes(
    both_experts: tuple[model.PackedExpert, MappedExpert],
) -> None:
    plain, mapped = both_experts
    for expected, found in zip(plain.blocks(), mapped.blocks(), strict=True):
        assert expected.gate is not None and found.gate is not None
        for one, other in ((expected.gate, found.gate), (expected.up, found.up), (expected.down, found.down)):
            assert torch.equal(one, other)


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def cut(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_damaged_expert_is_refused_when_it_is_first_used(
    with_kernels: bool, copied: Path, native: model.NativeOperations
) -> None:
    with Pack(copied) as opened:
        damage(copied / "experts-001.safetensors", opened.layout.offsets[1][5] + 1000)
        weights = model.open_weights(opened, CPU, native if with_kernels else model.TORCH)
        x, ones = torch.ones(1, 128), torch.ones(1, 2)
        weights.expert(1, 4)
        for _ in range(2):
            with pytest.raises(PackError) as refused:
                weights.expert(1, 5)
            assert str(refused.value) == DAMAGED
        if isinstance(weights, MappedPackWeights):
            with pytest.raises(PackError) as refused:
                weights.run_experts(1, x, torch.tensor([[5, 6]]), ones)
            assert str(refused.value) == DAMAGED
            assert weights.run_experts(1, x, torch.tensor([[4, 6]]), ones) is not None


@pytest.mark.parametrize("left", [0, 100, 4096, 500_000])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_file_cut_before_it_is_first_used_is_refused(
    with_kernels: bool, left: int, copied: Path, native: model.NativeOperations
) -> None:
    with Pack(copied) as opened:
        weights = model.open_weights(opened, CPU, native if with_kernels else model.TORCH)
        cut(copied / "experts-001.safetensors", left)
        with pytest.raises(PackError, match=r"^experts-001.safetensors: [^\n]*$"):
            weights.expert(1, 5)
        weights.expert(0, 5)


def test_without_kernels_a_file_cut_while_it_is_in_use_is_refused(copied: Path) -> None:
    with Pack(copied) as opened:
        weights = model.PackWeights(opened, CPU)
        weights.expert(1, 5)
        cut(copied / "experts-001.safetensors", 4096)
        with pytest.raises(PackError, match=r"^experts-001.safetensors: ends at byte \d+, expected \d+$"):
            weights.expert(1, 5)


def test_an_expert_checked_without_kernels_is_refused_with_them_where_its_file_was_cut_between(
    copied: Path, native: model.NativeOperations
) -> None:
    with Pack(copied) as opened:
        model.PackWeights(opened, CPU).expert(1, 5)
        cut(copied / "experts-001.safetensors", 4096)
        with pytest.raises(PackError, match=r"^experts-001.safetensors: [^\n]*$"):
            MappedPackWeights(opened, native).expert(1, 5)


WEIGHT = torch.randn((100, 3), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class FromDisk:
    """A matrix whose rows are read when they are asked for; it remembers which."""

    num_rows, num_cols = WEIGHT.shape

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def rows(self, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        return WEIGHT[start:stop].to(torch.float32)


class Operations(TorchDispatchMode):
    """Counts what torch is asked for: on a GPU each is a launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch has it
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_row_on_disk_is_read_once_however_often_its_token_comes() -> None:
    held = FromDisk()
    ids = torch.tensor([7, 99, 7, 0, 7, 99])
    assert torch.equal(gather_rows(held, ids), WEIGHT[ids].to(torch.float32))
    assert held.asked == [(0, 1), (7, 8), (99, 100)]


@pytest.mark.parametrize("number", [0, 7, 99])
def test_of_one_row_that_alone_is_read(number: int) -> None:
    held = FromDisk()
    assert torch.equal(gather_rows(held, torch.tensor([number])), WEIGHT[[number]].to(torch.float32))
    assert held.asked == [(number, number + 1)]


@pytest.mark.parametrize("bound", [4 * 3, 4 * 3 * 7, operations.MAX_DECODED_BYTES])
def test_stored_values_and_codes_give_the_rows_asked_for(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_DECODED_BYTES", bound)
    layout, codes = random_rows(part_format(4, 64), 100, 128)
    ids = torch.arange(100).flip(0)[::3].repeat(2)
    for held in (model.StoredMatrix(WEIGHT), model.RowMatrix(layout, torch.from_numpy(codes))):
        assert torch.equal(gather_rows(held, ids), held.rows(0, 100)[ids])


def test_a_long_prompts_embedding_takes_as_many_operations_as_a_short_ones() -> None:
    layout, codes = random_rows(part_format(4, 64), 1000, 128)
    held, counts = model.RowMatrix(layout, torch.from_numpy(codes)), []
    for num_tokens in (2, 512):
        with Operations() as operations:
            gather_rows(held, torch.arange(num_tokens))
        counts.append(operations.count)
    assert counts[0] == counts[1]


D, F = 64, 7


def section(weights: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    raw = weights.to(torch.bfloat16).view(torch.uint8)
    parts = [raw] if bias is None else [raw, bias.view(torch.uint8).view(F, 4)]
    return torch.cat(parts, dim=1).numpy()


def packed(
    selector: Selector, matrices: tuple[Matrix, ...], bias: tuple[Matrix, ...]
) -> tuple[model.PackedExpert, dict]:
    spec = ExpertSpec("silu", F, matrices, bias, 0)
    layout = expert_layout(ExpertFormat(BF16 if "gate" in matrices else None, BF16, BF16), selector, spec, D)
    generator = torch.Generator().manual_seed(1)
    weights = {m: torch.randn(F, D, generator=generator).to(torch.bfloat16).float() for m in matrices}
    biases = {m: torch.randn(F, generator=generator) for m in bias}
    sections = {m: section(weights[m], biases.get(m)) for m in matrices}
    extent = np.zeros(layout.num_bytes, np.uint8)
    if layout.selector:
        write_rows(layout.selector, sections, extent[: layout.selector_bytes].reshape(F, -1))
    write_rows(layout.records, sections, extent[layout.selector_bytes :].reshape(F, -1))
    return model.PackedExpert(layout, torch.from_numpy(extent)), {"weights": weights, "biases": biases}


def test_weights_and_biases_come_back_from_wherever_they_lie() -> None:
    for selector, bias in product(["up", "gate", "both", "none"], [(), ("gate",), ("up",), ("gate", "up")]):
        with case(selector, bias):
            expert, expected = packed(selector, ("gate", "up", "down"), bias)
            (block,) = expert.blocks()
            assert block.gate is not None
            for matrix, found in (("gate", block.gate), ("up", block.up), ("down", block.down)):
                assert torch.equal(found, expected["weights"][matrix])
            for matrix, found_bias in (("gate", block.gate_bias), ("up", block.up_bias)):
                if matrix in bias:
                    assert found_bias is not None
                    assert torch.equal(found_bias, expected["biases"][matrix])
                else:
                    assert found_bias is None


@pytest.mark.parametrize("selector", ["up", "none"])
def test_an_expert_of_two_matrices_has_no_gate(selector: Selector) -> None:
    expert, expected = packed(selector, ("up", "down"), ("up",))
    (block,) = expert.blocks()
    assert block.gate is None
    assert torch.equal(block.up, expected["weights"]["up"])
    assert torch.equal(block.down, expected["weights"]["down"])


def test_blocks_cover_all_rows_within_16_mib() -> None:
    for num_rows, num_cols, parts in [(14336, 4096, 3), (1, 64, 1), (5, 1 << 23, 1), (2049, 4096, 1)]:
        with case(num_rows, num_cols, parts):
            blocks = list(row_blocks(num_rows, num_cols, parts))
            assert [row for start, stop in blocks for row in range(start, stop)] == list(range(num_rows))
            for start, stop in blocks:
                assert 4 * num_cols * parts * (stop - start) <= MAX_DECODED_BYTES or stop - start == 1
