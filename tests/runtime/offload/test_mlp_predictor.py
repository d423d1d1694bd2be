"""The kept network: its scores against loops, its arrays, and arrays that are no network."""

import math

import numpy as np
import pytest
import torch
from support.cases import case
from support.predictors import random_arrays, random_predictor
from torch import Tensor

from moe_pack.formats import PackError
from moe_pack.formats.base.errors import MoePackError
from moe_pack.runtime.offload import Predictor

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
