"""Routing data of a pack and its networks: read as written, ignored if of other content, hostile arrays refused."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import TinyMixtral, pack
from support.predictors import random_arrays, random_predictor
from support.routings import random_routing
from torch import Tensor

from moe_pack.formats import Pack, PackError
from moe_pack.formats.base.errors import MoePackError
from moe_pack.formats.pack.manifests import root_without_thresholds
from moe_pack.formats.pack.sidecar import TensorSidecar, write_tensor_sidecar
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime.offload import ROUTING_FILE, Predictor, Routing, routing_file

SHAPE = TinyMixtral(intermediate_size=16, num_layers=4, num_experts=4)
ROUTING = random_routing(4, 4, 2, 64, best=(3, 1, 4))
Tensors = dict[str, tuple[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of four layers of four experts, two a token; tests write sidecars into it."""
    folder = tmp_path_factory.mktemp("routed")
    pack(SHAPE.write(folder / "source"), folder / "pack")
    return folder / "pack"


def written(folder: Path, routing: Routing = ROUTING) -> None:
    with Pack(folder) as opened:
        routing_file.write_routing(opened, routing)


def opened(folder: Path) -> Routing:
    with Pack(folder) as held:
        found = Routing.open(held)
    assert found is not None
    return found


def test_what_was_written_is_read_back(packed: Path) -> None:
    written(packed)
    found = opened(packed)
    for name in ("popularity", "mass", "recalls", "best", "routes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(ROUTING, name))
        assert getattr(found, name).dtype == getattr(ROUTING, name).dtype
    assert found.sequence_length == 6
    for name, array in ROUTING.paths.arrays().items():
        np.testing.assert_array_equal(found.paths.arrays()[name], array)
    assert found.judged_layers == (1, 2, 3)
    assert found.best_recall == 0.75
    for layer_idx in found.judged_layers:
        kept, network = ROUTING.network(layer_idx).arrays(), found.network(layer_idx).arrays()
        assert network.keys() == kept.keys()
        assert all(torch.equal(network[name], kept[name]) for name in kept)


def test_its_length_is_known_before_it_is_written(packed: Path) -> None:
    written(packed)
    assert routing_file.routing_file_bytes(ROUTING) == (packed / ROUTING_FILE).stat().st_size


def test_the_mean_recall_is_that_of_each_layers_best(packed: Path) -> None:
    routing = random_routing(4, 4, 2, 64, best=(0, routing_file.NO_PREDICTOR, 2))
    routing.recalls[1, 0, 0], routing.recalls[3, 2, 0] = 1.0, 0.5
    written(packed, routing)
    found = opened(packed)
    assert found.judged_layers == (1, 3) and found.best_recall == 0.75


def test_without_held_out_text_there_are_no_predictors_and_no_routes(packed: Path) -> None:
    none = random_routing(4, 4, 2, 64, best=(routing_file.NO_PREDICTOR,) * 3)
    written(
        packed,
        Routing(none.popularity, none.mass, none.paths, none.recalls, none.best, none.routes[:0], 512, none.network),
    )
    found = opened(packed)
    assert found.judged_layers == () and found.best_recall is None
    assert found.routes.shape == (0, 4, 2)


def test_it_outlives_new_thresholds_but_belongs_to_no_other_pack(packed: Path, tmp_path: Path) -> None:
    written(packed)
    with Pack(packed) as held:
        changed = held.thresholds + 0.5
    rewrite_thresholds(packed, changed)
    assert opened(packed).best_recall == 0.75
    pack(SHAPE.write(tmp_path / "source"), tmp_path / "pack", width=8)
    (tmp_path / "pack" / ROUTING_FILE).write_bytes((packed / ROUTING_FILE).read_bytes())
    with Pack(tmp_path / "pack") as held:
        assert Routing.open(held) is None
        (tmp_path / "pack" / ROUTING_FILE).unlink()
        assert Routing.open(held) is None


def test_networks_are_not_read_when_it_is_opened_and_found_damaged_when_they_are(packed: Path) -> None:
    written(packed)
    found = opened(packed)
    (packed / ROUTING_FILE).rename(packed / "elsewhere")
    with pytest.raises(PackError, match=rf"^{ROUTING_FILE}: file is missing$"):
        found.network(1)
    (packed / "elsewhere").rename(packed / ROUTING_FILE)
    assert found.network(1).num_experts == 4


def tensors_of(folder: Path) -> Tensors:
    with TensorSidecar(folder, ROUTING_FILE) as sidecar:
        return {name: (entry.dtype, sidecar.read(name)) for name, entry in sidecar.entries.items()}


def rewrite(folder: Path, tensors: Tensors) -> None:
    with Pack(folder) as opened:
        root = root_without_thresholds(opened.manifest)
    write_tensor_sidecar(folder, ROUTING_FILE, [(name, *opened) for name, opened in tensors.items()], root)


Change = Callable[[Tensors], object]


def put(name: str, place: Any, value: Any) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name][1][place] = value

    return change


def replaced(name: str, dtype: str, values: Any, code: str) -> Change:
    return lambda tensors: tensors.update({name: (dtype, np.asarray(values, code))})


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


AGAIN = "; attach the profile again"
COUNTS = "found impossible counts, expected 2 experts of each token in every layer"
HOSTILE: list[tuple[Change, str | None]] = [
    (without("popularity"), "tensor 'popularity' is missing"),
    (replaced("popularity", "U16", np.ones((4, 4)), "<u2"),
     f"tensor 'popularity': found U16 [4, 4], expected U32 [4, 4]{AGAIN}"),
    (replaced("popularity", "U32", np.ones((4, 3)), "<u4"),
     f"tensor 'popularity': found U32 [4, 3], expected U32 [4, 4]{AGAIN}"),
    (replaced("popularity", "U32", np.zeros((4, 4)), "<u4"), f"tensor 'popularity': {COUNTS}{AGAIN}"),
    (put("popularity", 1, 36), None),  # the nearest that passes: 72 tokens, two experts each
    (put("popularity", (1, 0), 500), f"tensor 'popularity': {COUNTS}{AGAIN}"),
    (put("popularity", 1, [73, 71, 0, 0]), f"tensor 'popularity': {COUNTS}{AGAIN}"),
    (put("mass", (0, 0), -1), f"tensor 'mass': found a negative or infinite sum, expected sums of weights{AGAIN}"),
    (put("mass", (0, 0), np.nan), f"tensor 'mass': found a negative or infinite sum, expected sums of weights{AGAIN}"),
    (put("mass", (0, 0), 0), None),
    (put("recalls", (1, 0, 1), 1.5),
     f"tensor 'recalls': found other values, expected shares from 0 to 1, or all NaN, as in layer 0{AGAIN}"),
    (put("recalls", (1, 0, 1), np.nan),
     f"tensor 'recalls': found other values, expected shares from 0 to 1, or all NaN, as in layer 0{AGAIN}"),
    (put("recalls", 0, 0.5),
     f"tensor 'recalls': found other values, expected shares from 0 to 1, or all NaN, as in layer 0{AGAIN}"),
    (put("recalls", (1, 5, 1), np.nan),
     f"tensor 'recalls': found other values, expected shares from 0 to 1, or all NaN, as in layer 0{AGAIN}"),
    (put("recalls", (1, 4), np.nan),
     f"tensor 'recalls': found other values, expected shares from 0 to 1, or all NaN, as in layer 0{AGAIN}"),
    (put("recalls", (1, 5), np.nan), None),  # no partial hidden state predicts this layer
    (replaced("recalls", "F32", np.full((4, 5, 3), np.nan), "<f4"),  # of a program before partial states were judged
     f"tensor 'recalls': found F32 [4, 5, 3], expected F32 [4, 6, 3]{AGAIN}"),
    (put("recalls", (1, 0, 1), 1.0), None),
    (put("best", 1, 2), f"tensor 'best': found [255, 2, 1, 4], expected [255, 3, 1, 4], the largest recalls{AGAIN}"),
    (put("best", 1, 255),
     f"tensor 'best': found [255, 255, 1, 4], expected [255, 3, 1, 4], the largest recalls{AGAIN}"),
    (put("sequence_length", 0, 0), f"tensor 'sequence_length': found 0, expected from 1 to 4096 tokens{AGAIN}"),
    (put("sequence_length", 0, 4097), f"tensor 'sequence_length': found 4097, expected from 1 to 4096 tokens{AGAIN}"),
    (put("sequence_length", 0, 5),
     f"tensor 'routes': found 12 tokens, expected whole sequences of 5, at most 4096{AGAIN}"),
    (put("sequence_length", 0, 4), None),
    (put("routes", (3, 2, 1), 4), f"tensor 'routes': found other values, expected 2 different experts below 4{AGAIN}"),
    (put("routes", (3, 2), 1), f"tensor 'routes': found other values, expected 2 different experts below 4{AGAIN}"),
    (put("routes", (3, 2), [3, 0]), None),
    (replaced("routes", "U16", np.zeros(()), "<u2"),
     f"tensor 'routes': found U16 [], expected U16 [0, 4, 2]{AGAIN}"),
    (replaced("routes", "U16", np.zeros((4098, 4, 2)), "<u2"),
     f"tensor 'routes': found 4098 tokens, expected whole sequences of 6, at most 4096{AGAIN}"),
    (replaced("note", "U8", [1], "<u1"), f"unknown tensor 'note'{AGAIN}"),
    (replaced("network.0.bias", "F32", [1], "<f4"), f"unknown tensor 'network.0.bias'{AGAIN}"),
    (without("paths.keys_seen"), "tensor 'paths.keys_seen' is missing"),
    (put("paths.popularity", (1, 0), 1000),
     "paths.*: tensor 'popularity', layer 1: found 1083, expected 2 choices of each token, and equally many tokens "
     "in every layer; profile the model again"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_arrays_that_cannot_be_are_refused_by_name(packed: Path, change: Change, message: str | None) -> None:
    written(packed)
    tensors = tensors_of(packed)
    change(tensors)
    rewrite(packed, tensors)
    if message is None:
        opened(packed)
        return
    with pytest.raises(PackError) as refused:
        opened(packed)
    assert str(refused.value) == f"{ROUTING_FILE}: {message}"


def test_where_experts_return_their_input_the_others_may_have_fewer_choices(packed: Path) -> None:
    def popularity(counts: list[int], all_have_weights: bool) -> object:
        written(packed)
        tensors = tensors_of(packed)
        tensors["popularity"][1][:] = 0
        tensors["popularity"][1][1] = counts
        rewrite(packed, tensors)
        with TensorSidecar(packed, ROUTING_FILE) as sidecar:
            return routing_file.RoutingChecks(sidecar, ROUTING_FILE, 4, 4, 2, all_have_weights).popularity("popularity")

    np.testing.assert_array_equal(popularity([3, 0, 1, 0], False), [[0] * 4, [3, 0, 1, 0], [0] * 4, [0] * 4])
    with pytest.raises(PackError, match="found no counts, expected experts that some tokens chose"):
        popularity([0, 0, 0, 0], False)
    with pytest.raises(PackError, match=COUNTS):
        popularity([3, 0, 1, 0], True)


@pytest.mark.parametrize(
    ("d", "num_experts", "num_previous", "found"),
    [(128, 4, 2, [128, 4, 2]), (64, 5, 2, [64, 5, 2]), (64, 4, 1, [64, 4, 1])],
)
def test_a_network_of_another_shape_is_refused_when_it_is_read(
    packed: Path, d: int, num_experts: int, num_previous: int, found: list[int]
) -> None:
    written(packed)
    tensors = tensors_of(packed)
    for name, array in random_predictor(2, d, num_experts, num_previous, 8).stored().items():
        tensors[f"network.2.{name}"] = ("BF16" if name.endswith("weight") else "F32", array)
    rewrite(packed, tensors)
    routing = opened(packed)
    with pytest.raises(PackError) as refused:
        routing.network(2)
    assert str(refused.value) == (
        f"{ROUTING_FILE}: network.2.*: found sizes {found}, expected d = 64, E = 4, P = 2; attach the profile again"
    )
    assert routing.network(1).num_previous == 1


def test_a_network_that_is_not_there_is_refused_when_it_is_read(packed: Path) -> None:
    written(packed)
    rewrite(packed, {name: held for name, held in tensors_of(packed).items() if not name.startswith("network.3.")})
    with pytest.raises(PackError, match=rf"^{re.escape(ROUTING_FILE)}: network\.3\.\*: found tensors \[\], expected"):
        opened(packed).network(3)


LAYERS = pytest.mark.parametrize("num_layers", [1, 2])


@LAYERS
@pytest.mark.parametrize("num_previous", [1, 2])
def test_scores_are_those_of_loops_over_units_and_experts(num_layers: int, num_previous: int) -> None:
    predictor = random_predictor(num_layers, num_previous=num_previous)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 8, generator=generator)
    previous = torch.rand(5, num_previous, 6, generator=generator).argsort(-1)[..., :2]
    for t in range(5):
        units = [float(predictor.x_weight[i].double() @ x[t].double()) for i in range(len(predictor.bias))]
        for i in range(len(units)):
            chosen = [float(predictor.route_weight[i, p, e]) for p in range(num_previous) for e in previous[t, p]]
            units[i] += float(predictor.bias[i]) + sum(chosen)
        if predictor.out_weight is not None and predictor.out_bias is not None:
            hidden = [max(unit, 0.0) for unit in units]
            rows = predictor.out_weight.double().tolist()
            units = [
                math.fsum(w * h for w, h in zip(row, hidden, strict=True)) + float(bias)
                for row, bias in zip(rows, predictor.out_bias, strict=True)
            ]
        # float32 sums of 42 products at most
        np.testing.assert_allclose(predictor.scores(x[t : t + 1], previous[t : t + 1])[0], units, rtol=1e-4, atol=1e-5)


@LAYERS
def test_what_is_stored_gives_the_same_bits_back(num_layers: int) -> None:
    predictor = random_predictor(num_layers)
    stored = predictor.stored()
    assert {name: array.dtype.str for name, array in stored.items()} == {
        name: "<u2" if name.endswith("weight") else "<f4" for name in stored
    }
    again = Predictor.from_stored(stored, PLACE).arrays()
    for name, tensor in predictor.arrays().items():
        assert torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype


PLACE = "predictors.safetensors: layer 3"


@LAYERS
def test_arrays_give_the_same_predictor_back(num_layers: int) -> None:
    x, previous = torch.randn(20, 8), torch.randint(6, (20, 2, 2))
    arrays = random_arrays(num_layers)
    read = Predictor.from_arrays({name: tensor.clone() for name, tensor in arrays.items()}, PLACE)
    assert read.arrays().keys() == arrays.keys()
    assert all(torch.equal(read.arrays()[name], arrays[name]) for name in arrays)
    assert torch.equal(read.scores(x, previous), Predictor(**arrays).scores(x, previous))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


ONE_NAMES = "['bias', 'route_weight', 'x_weight']"
TWO_NAMES = "['bias', 'out_bias', 'out_weight', 'route_weight', 'x_weight']"
NO_BIAS = "['out_bias', 'out_weight', 'route_weight', 'x_weight']"
AND_X = "['bias', 'out_bias', 'out_weight', 'route_weight', 'x', 'x_weight']"
ODD = "['bias', 'out_bias', 'route_weight', 'x_weight']"
REJECTED: list[tuple[int, dict[str, Tensor | None], str]] = [
    (2, {"bias": None}, f": found tensors {NO_BIAS}, expected {TWO_NAMES}"),
    (2, {"x": zeros(1)}, f": found tensors {AND_X}, expected {TWO_NAMES}"),
    (2, {"out_weight": None}, f": found tensors {ODD}, expected {ONE_NAMES}"),
    (2, {"bias": zeros(32)}, ": bias: found torch.bfloat16, expected torch.float32"),
    (1, {"x_weight": torch.zeros(6, 8)}, ": x_weight: found torch.float32, expected torch.bfloat16"),
    (2, {"x_weight": zeros(31, 8)}, ": x_weight: found shape [31, 8], expected [h = 32, d]"),
    (2, {"x_weight": zeros(32, 0)}, ": x_weight: found shape [32, 0], expected [h = 32, d]"),
    (2, {"x_weight": zeros(256)}, ": x_weight: found shape [256], expected [h = 32, d]"),
    (2, {"out_bias": torch.zeros(7)}, ": out_weight: found shape [6, 32], expected [E = 7, h = 32]"),
    (1, {"route_weight": zeros(6, 2, 5)}, ": route_weight: found shape [6, 2, 5], expected [E = 6, P = 2, E = 6]"),
    (1, {"route_weight": zeros(6, 3, 6)}, ": found routes of 3 layers, expected at most 2"),
    (1, {"bias": torch.tensor([0.0] * 5 + [math.nan])}, ": bias: found NaN or infinity, expected finite numbers"),
    (2, {"out_weight": zeros(6, 32) - math.inf}, ": out_weight: found NaN or infinity, expected finite numbers"),
]


def test_arrays_that_are_no_predictor_are_refused() -> None:
    for num_layers, change, message in REJECTED:
        with case(num_layers, change, message):
            arrays = {
                name: tensor for name, tensor in (random_arrays(num_layers) | change).items() if tensor is not None
            }
            with pytest.raises(PackError) as caught:
                Predictor.from_arrays(arrays, PLACE)
            assert str(caught.value) == f"{PLACE}{message}; the predictor is damaged, train it again"
            assert isinstance(caught.value, MoePackError)


def test_the_smallest_arrays_are_a_predictor() -> None:
    arrays = {"x_weight": zeros(1, 1), "route_weight": zeros(1, 1, 1), "bias": torch.zeros(1)}
    assert Predictor.from_arrays(arrays, PLACE).num_experts == 1
