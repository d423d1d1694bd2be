"""Neurons stored in another order: the same rows elsewhere, the same model, and another conversion."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.killing import different_files, files_in, nothing
from support.models import TinyMixtral
from support.second_reader import SecondReader

from moe_pack.convert import ConversionResult, compare_logits, compare_weights, same_tensors
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.formats import ConversionError, Pack, PlanError, Quantizer, Selector, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import Step
from moe_pack.runtime.model import Decoder, PackWeights

NUM_NEURONS = 520  # more than are read at once, and no multiple of a quantizer's block
SHAPE = TinyMixtral(num_layers=2, num_experts=2, intermediate_size=NUM_NEURONS)
SMALL = TinyMixtral(num_layers=2, num_experts=2, intermediate_size=70)
IDS = list(range(40))

Order = NDArray[np.uint32]


class StoppedError(Exception):
    """Ends a conversion from within."""


def source_order(num_neurons: int = NUM_NEURONS) -> Order:
    return np.tile(np.arange(num_neurons, dtype=np.uint32), (2, 2, 1))


def random_order(seed: int = 0, num_neurons: int = NUM_NEURONS) -> Order:
    """Another permutation for each expert of both layers but the last, whose order is the source's own."""
    order = np.random.default_rng(seed).permuted(source_order(num_neurons), axis=2)
    order[1, 1] = source_order(num_neurons)[1, 1]
    return order


def converted(
    source: Path,
    out: Path,
    order: Order | None,
    *,
    selector: Selector = "up",
    width: int = 4,
    quantizer: Quantizer = "nearest",
    workers: int = 1,
    on_step: Callable[[Step], None] = nothing,
) -> ConversionResult:
    checkpoint = Checkpoint(source)
    try:
        part = part_format(width, 16)
        plan = uniform_plan(checkpoint.spec, selector, part, part, None, quantizer)
        return convert(checkpoint, plan, out, workers, on_step=on_step, prepared=Preparation(order=order))
    finally:
        checkpoint.close()


def logits(folder: Path) -> torch.Tensor:
    with Pack(folder) as opened:
        return Decoder(PackWeights(opened, torch.device("cpu")), len(IDS)).logits(IDS)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint `source`, and packs of it by width, in its own order and in a random one; read only."""
    work = tmp_path_factory.mktemp("work")
    SHAPE.write(work / "source")
    for width in (4, 16):
        converted(work / "source", work / f"plain-{width}", None, width=width)
        converted(work / "source", work / f"ordered-{width}", random_order(), width=width)
    return work


def halves(pack: Pack, layer_idx: int, expert: int) -> list[NDArray[np.uint8]]:
    """The expert's selector rows, where it has some, and its records: u8 [f, row_bytes] each."""
    extent, layout = pack.read_extent(layer_idx, expert), pack.layout.experts[layer_idx][expert]
    cuts = [layout.selector_bytes, layout.selector_bytes + layout.records_bytes]
    return [part.reshape(layout.num_rows, -1) for part in np.split(extent, cuts)[:2] if part.size]


def assert_rows_ordered(plain_folder: Path, ordered_folder: Path, order: Order) -> None:
    """Every row of the one pack has, bit for bit, the bytes of the neuron in the other that the order names."""
    with Pack(plain_folder) as plain, Pack(ordered_folder) as ordered:
        np.testing.assert_array_equal(ordered.read_order(), order)
        for layer_idx, expert in np.ndindex(2, 2):
            pairs = zip(halves(plain, layer_idx, expert), halves(ordered, layer_idx, expert), strict=True)
            for before, after in pairs:
                np.testing.assert_array_equal(after, before[order[layer_idx, expert]])


@pytest.mark.parametrize("width", [4, 16])
def test_every_row_is_the_neuron_that_the_order_names(work: Path, width: int) -> None:
    assert_rows_ordered(work / f"plain-{width}", work / f"ordered-{width}", random_order())


# Importing hqq makes torch load modules of its own that use what it now calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("selector", "quantizer"), [("up", "hqq"), ("gate", "nearest"), ("both", "nearest"), ("none", "nearest")]
)
def test_so_it_is_for_every_selector_kind_and_where_rows_are_quantized_together(
    tmp_path: Path, selector: Selector, quantizer: Quantizer
) -> None:
    source, order = SMALL.write(tmp_path / "source"), random_order(num_neurons=70)
    converted(source, tmp_path / "plain", None, selector=selector, quantizer=quantizer)
    converted(source, tmp_path / "ordered", order, selector=selector, quantizer=quantizer)
    assert_rows_ordered(tmp_path / "plain", tmp_path / "ordered", order)


def test_nothing_but_experts_index_order_and_manifest_differs(work: Path) -> None:
    assert different_files(files_in(work / "plain-4"), files_in(work / "ordered-4")) == [
        "experts-000.safetensors",
        "experts-001.safetensors",
        "index.safetensors",
        "manifest.json",
        "order.safetensors",
    ]


def test_the_source_s_own_order_gives_the_same_content(tmp_path: Path) -> None:
    source = SMALL.write(tmp_path / "source")
    converted(source, tmp_path / "plain", None)
    converted(source, tmp_path / "ordered", source_order(70))
    assert different_files(files_in(tmp_path / "plain"), files_in(tmp_path / "ordered")) == ["manifest.json"]
    with Pack(tmp_path / "plain") as plain, Pack(tmp_path / "ordered") as ordered:
        assert plain.manifest.root == ordered.manifest.root


def test_a_second_reader_finds_the_source_s_weights_in_the_source_s_order(work: Path) -> None:
    second, tensors = SecondReader(work / "ordered-16"), SHAPE.tensors()
    for l, e in np.ndindex(2, 2):
        found = second.expert(l, e)
        for matrix, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            original = tensors[f"model.layers.{l}.block_sparse_moe.experts.{e}.{name}.weight"].to(torch.float32)
            expected = original.T if matrix == "down" else original
            np.testing.assert_array_equal(found[matrix], expected.numpy())


@pytest.mark.parametrize("width", [4, 16])
def test_the_model_gives_the_same_logits_in_any_order(work: Path, width: int) -> None:
    expected, found = logits(work / f"plain-{width}"), logits(work / f"ordered-{width}")
    # Sums of the same products in another order: some 5e-6 on logits up to 6; docs/model.md allows 1e-4.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_verify_against_the_source_passes(work: Path) -> None:
    checkpoint = Checkpoint(work / "source")
    with Pack(work / "ordered-16") as opened:
        audit(opened)
        same_tensors(opened, checkpoint)
        found = {(m.matrix, m.largest) for m in compare_weights(opened, checkpoint)}
        error = compare_logits(opened, checkpoint, IDS)
    checkpoint.close()
    assert found == {(matrix, 0.0) for matrix in ("dense", "gate", "up", "down")}
    assert error.agreement == 1.0
    assert error.largest < 1e-4  # as above


def test_any_number_of_workers_writes_the_same_bytes(work: Path, tmp_path: Path) -> None:
    converted(work / "source", tmp_path / "three", random_order(), workers=3)
    assert different_files(files_in(tmp_path / "three"), files_in(work / "ordered-4")) == []


def test_one_neuron_an_expert_has_one_order(tmp_path: Path) -> None:
    source = TinyMixtral(num_layers=2, intermediate_size=1).write(tmp_path / "source")
    converted(source, tmp_path / "ordered", source_order(1))
    with Pack(tmp_path / "ordered") as opened:
        audit(opened)


# --- killed


def stopped(source: Path, out: Path, order: Order | None, number: int) -> None:
    def on_step(step: Step) -> None:
        if step.number == number:
            raise StoppedError

    with pytest.raises(StoppedError):
        converted(source, out, order, on_step=on_step)


@pytest.mark.parametrize(("begun", "given"), [(0, 1), (0, None), (None, 0)], ids=str)
def test_another_order_is_another_conversion(tmp_path: Path, begun: int | None, given: int | None) -> None:
    source = SMALL.write(tmp_path / "source")
    first, other = (None if seed is None else random_order(seed, 70) for seed in (begun, given))
    out = tmp_path / "out"
    stopped(source, out, first, 60)
    before = files_in(out)
    with pytest.raises(ConversionError, match="out: contains an unfinished conversion of another source or with other"):
        converted(source, out, other)
    assert files_in(out) == before
    converted(source, out, first)
    with pytest.raises(ConversionError, match="out: contains another pack; give another output folder"):
        converted(source, out, other)
    assert not converted(source, out, first).written


# --- refused


def misordered(place: tuple[int, int, int], neuron: int) -> Order:
    order = random_order(num_neurons=70)
    order[place] = neuron
    return order


def test_an_order_that_is_none_of_this_model_is_refused_before_anything_is_written(
    new_folder: Callable[[], Path],
) -> None:
    cases = [
        (np.zeros((2, 2, 69), np.uint32), "shape [2, 2, 69], expected [2, 2, 70]: layers, experts and neurons"),
        (np.zeros((3, 2, 70), np.uint32), "shape [3, 2, 70], expected [2, 2, 70]: layers, experts and neurons"),
        (np.zeros((4, 70), np.uint32), "shape [4, 70], expected [2, 2, 70]: layers, experts and neurons"),
        (misordered((1, 1, 69), 0), "order of layer 1 expert 1 is not a permutation of 70 neurons"),
        (misordered((0, 1, 0), 70), "order of layer 0 expert 1 is not a permutation of 70 neurons"),
        (misordered((1, 0, 5), 2**32 - 1), "order of layer 1 expert 0 is not a permutation of 70 neurons"),
    ]
    for order, message in cases:
        with case(order, message):
            tmp_path = new_folder()
            source = SMALL.write(tmp_path / "source")
            with pytest.raises(PlanError) as refused:
                converted(source, tmp_path / "out", order)
            assert str(refused.value) == f"order: {message}"
            assert not (tmp_path / "out").exists()
