"""Experts in pages against whole ones: bytes, rows, checks; and a pack's weights with experts in pages."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import case
from support.families import Tiny, write
from support.models import TinyMixtral, pack
from support.native import INSTRUCTION_SETS, kernels_limited_to, select
from support.random_experts import RandomExpert, Shape, random_expert, random_tokens, threshold_at

from moe_pack.formats import DISK_BLOCK_BYTES, Pack, PackError, dense_roles
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import ExpertWork, Kernels
from moe_pack.runtime.model import Decoder, PackedExpert, PackWeights, StreamedPackWeights, activations
from moe_pack.runtime.offload.disk import PageArena, Pieces, pieces_of_rows
from moe_pack.runtime.offload.expert_store import PagedExpert

SHAPE = Shape(num_rows=67, num_cols=256)
OFFSET = 12_288
NAME = "experts-000.safetensors"


@pytest.fixture
def arena() -> Iterator[PageArena]:
    """Room for two of the experts, in pages that no row length divides."""
    held = PageArena(40, DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)
    yield held
    held.close()


def brought(arena: PageArena, expert: RandomExpert, threshold: float = 0.0) -> PagedExpert:
    """The expert in pages, as reads bring it: in whole blocks, the last beyond its end."""
    held = PagedExpert(
        arena, expert.shape.layout, expert.shape.selector, expert.shape.function, threshold, OFFSET, NAME
    )
    bring(arena, held, expert, held.all_blocks())
    return held


def bring(arena: PageArena, held: PagedExpert, expert: RandomExpert, blocks: np.ndarray) -> None:
    bring_pieces(arena, held, expert, held.pieces(blocks))


def bring_pieces(arena: PageArena, held: PagedExpert, expert: RandomExpert, pieces: Pieces) -> None:
    file = np.zeros(OFFSET + held.num_blocks * DISK_BLOCK_BYTES, np.uint8)
    file[OFFSET : OFFSET + len(expert.extent)] = expert.extent
    for offset, place, size in zip(*(part.tolist() for part in pieces[1:]), strict=True):
        arena.memory[place : place + size] = file[offset : offset + size]
    held.arrived(pieces.blocks)


def scattered(arena: PageArena) -> None:
    """Makes the pages that are taken next lie in no order; none is taken yet."""
    for slot in np.random.default_rng(1).permutation(arena.take(arena.num_pages)):
        arena.give(np.array([slot], np.int32))


def test_pages_give_what_one_piece_gives(arena: PageArena) -> None:
    for instruction_set, selector, num_tokens in product(INSTRUCTION_SETS, SELECTORS, [1, 3, 70]):
        with case(instruction_set, selector, num_tokens):
            kernels = kernels_limited_to(instruction_set)
            expert = random_expert(Shape(num_rows=67, num_cols=256, selector=selector))
            x = random_tokens(num_tokens, 256)
            threshold = 0.0 if selector == "none" else threshold_at(select(x, expert.rows(), kernels).a, 0.5)
            whole = expert.rows(threshold)
            scattered(arena)
            held = brought(arena, expert, threshold)
            held.stitch(kernels)
            tokens, weights = np.arange(num_tokens), np.linspace(0.1, 1, num_tokens, dtype=np.float32)
            expected = kernels.experts(x, [(whole, tokens, weights)])
            assert torch.equal(kernels.experts(x, [(held.rows, tokens, weights)]), expected)

            selected, known = select(x, held.rows, kernels), select(x, whole, kernels)
            assert torch.equal(selected.neurons, known.neurons) and torch.equal(selected.a, known.a)
            if selector != "none":
                out = np.zeros(x.shape, np.float32)
                kernels.experts_apart(x, [ExpertWork(held.rows, tokens, weights, tokens, selected)], out)
                assert np.array_equal(out, expected.numpy()), "selected before, or in the call: the same bits"
            held.close()


def test_experts_selected_at_once_are_selected_as_alone_and_others_records_are_not_read() -> None:
    for instruction_set, num_tokens in product(INSTRUCTION_SETS, [1, 3, 70, 130]):
        with case(instruction_set, num_tokens):
            kernels, x = kernels_limited_to(instruction_set), random_tokens(num_tokens, 256)
            generator = np.random.default_rng(num_tokens)
            works = []
            for seed in range(3):
                expert = random_expert(SHAPE, seed)
                tokens = np.sort(generator.permutation(num_tokens)[: max(num_tokens - seed, 0)])
                works.append((expert.rows(threshold_at(select(x, expert.rows(), kernels).a, 0.8)), tokens))
            every = kernels.select_each(x, works)
            for (rows, tokens), found in zip(works, every, strict=True):
                alone = select(x[torch.from_numpy(tokens)], rows, kernels)
                assert all(map(torch.equal, (found.a, found.runs, found.neurons), (alone.a, alone.runs, alone.neurons)))
                weights, out = np.linspace(0.1, 1, len(tokens), dtype=np.float32), np.zeros(x.shape, np.float32)
                records = np.full_like(rows.records, 0xFF)  # NaN, if it were read
                records[found.neurons.numpy()] = rows.records[found.neurons.numpy()]
                in_part = replace(rows, records=records)
                kernels.experts_apart(x, [ExpertWork(in_part, tokens, weights, tokens, found)], out)
                assert np.array_equal(out, kernels.experts(x, [(rows, tokens, weights)]).numpy())


def test_outputs_apart_add_up_to_the_sum_of_one_call(arena: PageArena) -> None:
    kernels = kernels_limited_to("portable")
    experts = [random_expert(SHAPE, seed) for seed in range(3)]
    x = random_tokens(5, 256)
    tokens = [np.array([0, 2, 4]), np.array([2]), np.array([0, 1, 2, 3, 4])]
    weights = [np.full(len(held), 0.3, np.float32) for held in tokens]
    works = [(expert.rows(), t, w) for expert, t, w in zip(experts, tokens, weights, strict=True)]
    out, y, first = np.zeros((9, 256), np.float32), np.zeros((5, 256), np.float32), 0
    for rows, t, w in reversed(works):  # in any order
        kernels.experts_apart(x, [ExpertWork(rows, t, w, np.arange(first, first + len(t)))], out)
        first += len(t)
    for _, t, _ in works:
        first -= len(t)
        y[t] += out[first : first + len(t)]
    assert np.array_equal(y, kernels.experts(x, works).numpy())


def test_an_extent_comes_back_as_it_was_written(arena: PageArena) -> None:
    expert = random_expert(SHAPE)
    scattered(arena)
    held = brought(arena, expert)
    assert np.array_equal(held.extent().numpy(), expert.extent)
    (block,) = PackedExpert(held.layout, held.extent()).blocks()
    assert torch.equal(block.down, expert.block().down)


def test_the_checksum_of_pages_is_that_of_the_bytes(arena: PageArena) -> None:
    kernels = kernels_limited_to("portable")
    expert = random_expert(SHAPE)
    scattered(arena)
    held = brought(arena, expert)
    for num_bytes in (0, 1, DISK_BLOCK_BYTES, DISK_BLOCK_BYTES + 1, len(expert.extent)):
        assert kernels.checksum_pages(held.records, num_bytes) == kernels.checksum(expert.extent[:num_bytes])


@pytest.mark.parametrize("row", [0, 15, 66])
def test_a_damaged_record_is_named(arena: PageArena, row: int) -> None:
    kernels = kernels_limited_to("portable")
    expert = random_expert(SHAPE)
    layout = SHAPE.layout
    expert.extent[layout.selector_bytes + row * layout.records.row_bytes + 5] ^= 1
    held = brought(arena, expert)
    held.stitch(kernels)
    every = np.arange(67, dtype=np.int32)
    held.check_selector(kernels, 3)
    held.check_rows(kernels, every[every != row], 3)
    with pytest.raises(PackError, match=rf"^{NAME}: expert 3: CRC-32 of row {row} does not match its bytes"):
        held.check_rows(kernels, every, 3)


def test_a_damaged_selector_row_is_named(arena: PageArena) -> None:
    kernels = kernels_limited_to("portable")
    expert = random_expert(SHAPE)
    layout = SHAPE.layout.selector
    assert layout is not None
    expert.extent[40 * layout.row_bytes] ^= 128
    held = brought(arena, expert)
    held.stitch(kernels)
    with pytest.raises(PackError, match="CRC-32 of row 40"):
        held.check_selector(kernels, 3)


@given(st.sets(st.integers(0, 66)), st.integers(0, 4), st.sets(st.integers(0, 40)))
def test_the_pieces_of_records_hold_what_is_missing_of_them_and_of_short_gaps(
    neurons: set[int], gap_blocks: int, arrived: set[int]
) -> None:
    arena = PageArena(20, 3 * DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)
    scattered(arena)
    layout = SHAPE.layout
    held = PagedExpert(arena, layout, "up", SHAPE.function, 0.0, OFFSET, NAME)
    expected = set()
    for neuron in neurons:
        begin = layout.selector_bytes + neuron * layout.records.row_bytes
        expected |= {byte // DISK_BLOCK_BYTES for byte in range(begin, begin + layout.records.row_bytes)}
    for before, after in pairwise(sorted(expected)):
        if after - before - 1 <= gap_blocks:
            expected |= set(range(before, after))
    there = np.array(sorted(block for block in arrived if block < held.num_blocks), np.int64)
    held.arrived(there)
    pieces = held.pieces_of_rows(np.array(sorted(neurons), np.int32), gap_blocks)
    assert pieces.blocks.tolist() == sorted(expected - set(there.tolist()))
    by_numpy = held.pieces(np.array(sorted(expected), np.int64))
    for found, plain in zip(pieces, by_numpy, strict=True):
        assert found.tolist() == plain.tolist()
    held.close()
    assert len(set(arena.take(20).tolist())) == 20, "all pages have been given back"
    arena.close()


def test_rows_and_pages_that_are_not_of_the_extent_are_refused(arena: PageArena) -> None:
    held = PagedExpert(arena, SHAPE.layout, "up", SHAPE.function, 0.0, OFFSET, NAME)
    assert len(held.pieces_of_rows(np.array([0, 66], np.int32), 0).blocks)
    for neurons in ([-1], [1 << 30], [3, 3], [5, 2]):
        with case(neurons), pytest.raises(ValueError, match=r"^neurons: "):
            held.pieces_of_rows(np.array(neurons, np.int32), 0)
    one, has_block = np.zeros(1, np.int32), np.zeros(4, bool)
    legal = {"page_places": np.array([0, 9000]), "begin": 0, "row_bytes": 100, "first_block": 0, "page_blocks": 2}
    last = {"gap_blocks": 0, "offset": 0}
    assert len(pieces_of_rows(one, has_block, **legal, **last).blocks) == 1
    wrong = {"page_places": np.array([0]), "begin": -1, "row_bytes": 0, "first_block": 5, "page_blocks": 0}
    for name, value in {**wrong, "gap_blocks": -1}.items():
        with case(name), pytest.raises(ValueError, match=r"^extent: its pages do not hold its blocks"):
            pieces_of_rows(one, has_block, **(legal | last | {name: value}))
    for name, value in {"offset": -1, "page_places": np.array([0, -4096])}.items():
        with case(name), pytest.raises(ValueError, match=r"^offset: a place is out of range"):
            pieces_of_rows(one, has_block, **(legal | last | {name: value}))


def test_rows_that_run_alone_can_be_used_before_the_rest_is_there(arena: PageArena) -> None:
    kernels = kernels_limited_to("portable")
    expert, x = random_expert(SHAPE), random_tokens(1, 256)
    threshold = threshold_at(select(x, expert.rows(), kernels).a, 0.9)
    scattered(arena)
    held = PagedExpert(arena, SHAPE.layout, "up", SHAPE.function, threshold, OFFSET, NAME)
    arena.memory[:] = 0xAA
    bring(arena, held, expert, held.selector_blocks())
    held.stitch(kernels)
    selected = select(x, held.rows, kernels)
    missing = held.pieces_of_rows(selected.neurons.numpy(), 0)
    assert 0 < len(missing.blocks) < held.num_blocks - len(held.selector_blocks())
    bring_pieces(arena, held, expert, missing)
    held.stitch(kernels)
    held.check_rows(kernels, selected.neurons.numpy(), 0)
    token, weight, out = np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros((1, 256), np.float32)
    kernels.experts_apart(x, [ExpertWork(held.rows, token, weight, token, selected)], out)
    assert np.array_equal(out, kernels.experts(x, [(expert.rows(threshold), token, weight)]).numpy())
    assert not held.is_whole


@pytest.mark.parametrize("num_cols", [256, 64])
def test_an_expert_whose_selector_stays_needs_pages_for_its_records_alone(arena: PageArena, num_cols: int) -> None:
    """At 64 columns the selector's last block has most of the records, too."""
    kernels, shape = kernels_limited_to("portable"), Shape(num_rows=67, num_cols=num_cols)
    expert, x = random_expert(shape), random_tokens(2, num_cols)
    layout = shape.layout
    assert layout.selector is not None
    selector_rows = expert.extent[: layout.selector_bytes].reshape(layout.num_rows, -1).copy()
    scattered(arena)
    arena.memory[:] = 0xAA
    held = PagedExpert(arena, layout, "up", shape.function, 0.0, OFFSET, NAME, selector_rows)
    assert len(held.selector_blocks()) == 0
    assert len(held.all_blocks()) == held.num_blocks - layout.selector_bytes // DISK_BLOCK_BYTES
    bring(arena, held, expert, held.all_blocks())
    held.stitch(kernels)
    held.check_selector(kernels, 0)
    held.check_all_rows(kernels, 0)
    assert held.is_whole
    y = np.zeros((2, num_cols), np.float32)
    tokens, weights = np.arange(2), np.ones(2, np.float32)
    kernels.experts_apart(x, [ExpertWork(held.rows, tokens, weights, tokens)], y)
    assert torch.equal(torch.from_numpy(y), kernels.experts(x, [(expert.rows(0.0), tokens, weights)]))
    selector_rows[40, 0] ^= 128
    with pytest.raises(PackError, match="CRC-32 of row 40"):
        held.check_selector(kernels, 0)
    held.close()


def refused(kernels: Kernels, arena: PageArena, **changes: object) -> str:
    expert = random_expert(SHAPE)
    held = brought(arena, expert)
    rows = held.records._replace(**changes)
    with pytest.raises(ValueError) as fault:
        kernels.damaged_row(rows, SHAPE.layout.records, np.zeros(1, np.int32))
    held.close()
    return str(fault.value)


def test_pages_that_cannot_be_are_refused(arena: PageArena) -> None:
    kernels = kernels_limited_to("portable")
    assert refused(kernels, arena, slots=np.array([0, 40], np.int32)) == "slots: 40, expected 0 to 39"
    assert refused(kernels, arena, slots=np.array([-1], np.int32)) == "slots: -1, expected 0 to 39"
    long = "rows: a row is longer than a page or the room before it"
    assert refused(kernels, arena, head_bytes=64) == refused(kernels, arena, page_bytes=128) == long
    assert refused(kernels, arena, slot_bytes=5000) == "slot_bytes: less than a page and the room before it"
    assert refused(kernels, arena, begin=-1) == "slots: an extent has 2^40 bytes at most"
    assert refused(kernels, arena, slots=np.zeros(1, np.int32), begin=4000) == "wanted: there are no rows"


CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[None, 8, 4, 3], ids=["16 bit", "8 bit", "4 bit", "3 bit"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pack]:
    """A pack with a shared expert, biases and a dense layer, its dense matrices in this width."""
    folder = tmp_path_factory.mktemp("packed")
    tiny = Tiny("qwen2_moe", "shared expert, biases, a dense layer", {"mlp_only_layers": [1]})
    pack(write(tiny, folder / "source"), folder / "pack", dense_width=request.param)
    with Pack(folder / "pack") as opened:
        yield opened


def test_vectors_are_equal(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    roles = [role.name for role in dense_roles(packed.spec) if len(role.shape) == 1]
    assert any("bias" in role for role in roles) and any("norm" in role for role in roles)
    for role in roles:
        found = streamed.vector(role)
        assert found.dtype == torch.float32 and torch.equal(found, whole.vector(role)), role


def test_rows_of_matrices_are_equal_streamed_or_loaded(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    for role in (role for role in dense_roles(packed.spec) if len(role.shape) == 2):
        expected = whole.matrix(role.name)
        for found in (streamed.matrix(role.name), streamed.load(role.name)):
            assert (found.num_rows, found.num_cols) == (expected.num_rows, expected.num_cols) == role.shape
            n = found.num_rows
            for start, stop in {(0, 1), (0, n), (n // 2, n), (n - 1, n)}:
                rows = found.rows(start, stop)
                assert rows.dtype == torch.float32 and rows.shape == (stop - start, found.num_cols)
                assert torch.equal(rows, expected.rows(start, stop)), role.name


def test_experts_and_thresholds_are_equal(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    assert (streamed.spec, streamed.selector) == (whole.spec, whole.selector)
    x = torch.randn(3, packed.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer_idx in range(len(packed.spec.moe_layers)):
        for expert in range(packed.spec.router.num_experts):
            assert streamed.threshold(layer_idx, expert) == whole.threshold(layer_idx, expert)
            found, expected = (
                [activations(x, block, "silu").h @ block.down for block in held.expert(layer_idx, expert).blocks()]
                for held in (streamed, whole)
            )
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_logits_are_equal(packed: Pack) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found = Decoder(StreamedPackWeights(packed, CPU), 8).logits(ids)
    assert torch.equal(found, Decoder(PackWeights(packed, CPU), 8).logits(ids))


def test_a_matrix_is_read_anew_whenever_asked_for(tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack", width=16)
    with Pack(tmp_path / "pack") as opened:
        matrix = StreamedPackWeights(opened, CPU).matrix("embed")
        before = matrix.rows(0, 96)
        path = tmp_path / "pack" / "dense.safetensors"
        entry = next(dense.entry for dense in opened.layout.dense if dense.role.name == "embed")
        with path.open("r+b") as file:
            file.seek(entry.offset)
            file.write(bytes(entry.num_bytes))
        assert before.any() and not matrix.rows(0, 96).any()


@pytest.mark.parametrize("dense_width", [None, 4])
def test_a_damaged_dense_file_is_refused_before_anything_is_read(dense_width: int | None, tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack", dense_width=dense_width)
    path = tmp_path / "pack" / "dense.safetensors"
    with Pack(tmp_path / "pack") as opened:
        StreamedPackWeights(opened, CPU)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with Pack(tmp_path / "pack") as opened, pytest.raises(PackError) as refused:
        StreamedPackWeights(opened, CPU)
    assert str(refused.value) == "dense.safetensors: SHA-256 does not match the manifest's; the file is damaged"


def test_a_damaged_expert_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack")
    with Pack(tmp_path / "pack") as opened:
        offset = opened.layout.offsets[0][1]
        with (tmp_path / "pack" / "experts-000.safetensors").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        weights = StreamedPackWeights(opened, CPU)
        weights.expert(0, 0)
        with pytest.raises(PackError, match=r"^experts-000.safetensors: expert 1: CRC-32 does not match its bytes"):
            weights.expert(0, 1)
