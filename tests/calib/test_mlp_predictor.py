"""The learned predictor: rules planted in made-up tokens are found; what is kept is what was trained."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.statistics import USUAL_TRAINING, cost, shapes_for, train
from moe_pack.calib.statistics.predictors import (
    Adam,
    MLPShape,
    Standard,
    Training,
    folded,
    recall_precision,
    standard_of,
)
from moe_pack.formats import RunError
from moe_pack.runtime.offload import Predictor

ONE = MLPShape(1, 0)
TWO = MLPShape(2, 32)
SHAPES = pytest.mark.parametrize("shape", [ONE, TWO], ids=["one layer", "two layers"])
QUICK = Training(max_epochs=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_routes(num_tokens: int, num_previous: int, k: int, num_experts: int, seed: int = 1) -> Tensor:
    """int64 [T, P, k], different experts in each row."""
    scores = torch.rand(num_tokens, num_previous, num_experts, generator=generator(seed))
    return scores.argsort(-1)[..., :k]


def some_tokens(
    num_tokens: int, d: int = 8, num_previous: int = 2, k: int = 2, num_experts: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, previous and targets without any rule."""
    x = torch.randn(num_tokens, d, generator=generator(seed))
    previous = random_routes(num_tokens, num_previous, k, num_experts, seed + 1)
    return x, previous, random_routes(num_tokens, 1, k, num_experts, seed + 2)[:, 0]


def held_out_recall(
    shape: MLPShape, x: Tensor, previous: Tensor, targets: Tensor, num_experts: int, training: Training = USUAL_TRAINING
) -> float:
    """Recall of k experts on the last quarter, having learned from the rest."""
    first = len(x) * 3 // 4
    predictor = train(x[:first], previous[:first], targets[:first], num_experts, shape, 0, training)
    scores = predictor.scores(x[first:], previous[first:])
    return recall_precision(scores, targets[first:], targets.shape[1])[0]


# Rules that can be learned


def test_a_linear_rule_of_the_hidden_state_is_learned_exactly() -> None:
    """A token lies near one of 8 orthogonal directions; its experts are that many from there on, in a circle."""
    for shape, k in product([ONE, TWO], [1, 2, 4]):
        with case(shape, k):
            kind = torch.randint(8, (900,), generator=generator())
            directions = torch.linalg.qr(torch.randn(16, 16, generator=generator(1))).Q[:8]
            x = directions[kind] + 0.02 * torch.randn(900, 16, generator=generator(2))
            targets = (kind[:, None] + torch.arange(k)) % 8
            assert held_out_recall(shape, x, random_routes(900, 2, k, 8), targets, 8, Training(max_epochs=10)) == 1.0


@pytest.mark.slow
def test_a_rule_of_either_layers_routes_is_learned_exactly() -> None:
    """Expert e of the layer `source` is always followed by e + 3; the hidden state is noise."""
    for shape, source in product([ONE, TWO], [0, 1]):
        with case(shape, source):
            x, previous, _ = some_tokens(1000)
            assert held_out_recall(shape, x, previous, (previous[:, source] + 3) % 6, 6) == 1.0


@SHAPES
def test_a_rule_of_the_only_layer_before_is_learned_exactly(shape: MLPShape) -> None:
    x, previous, _ = some_tokens(1000, num_previous=1, k=1)
    assert held_out_recall(shape, x, previous, (previous[:, 0] * 5 + 1) % 6, 6) == 1.0


def test_two_layers_learn_what_one_cannot() -> None:
    """Exclusive or: expert 1 where the signs of two columns differ, else 0. No linear rule is right more than half."""
    signs = torch.randint(2, (1200, 2), generator=generator())
    x = 2.0 * signs - 1 + 0.1 * torch.randn(1200, 2, generator=generator(1))
    targets = (signs[:, :1] + signs[:, 1:]) % 2
    previous = torch.zeros(1200, 1, 1, dtype=torch.int64)
    training = Training(max_epochs=20)
    assert held_out_recall(TWO, x, previous, targets, 2, training) == 1.0
    # A line through the plane can be right on three corners of four at most.
    assert held_out_recall(ONE, x, previous, targets, 2, training) < 0.8


@SHAPES
def test_popularity_is_beaten_where_there_is_a_rule(shape: MLPShape) -> None:
    """Half the tokens go to expert 0, the other half to the one after their last."""
    x, previous, _ = some_tokens(1000, k=1)
    popular = torch.rand(1000, 1, generator=generator(5)) < 0.5
    targets = torch.where(popular, 0, (previous[:, 1] + 1) % 6)
    popularity = float((targets[750:] == 0).float().mean())
    x[:, :1] = popular.float()  # so that the rule is all that there is
    assert popularity < 0.65
    assert held_out_recall(shape, x, previous, targets, 6, Training(max_epochs=10)) > popularity + 0.3


# What is trained, and how


@SHAPES
def test_before_learning_it_is_popularity(shape: MLPShape) -> None:
    """Seven of 8 tokens are learned from: expert 0 stands in 1, 1 in 6, 2 in 4, 3 in 3. The last one only validates."""
    x, previous, _ = some_tokens(8, num_experts=5)
    targets = torch.tensor([[0, 1], [1, 2], [1, 2], [1, 2], [2, 1], [3, 1], [3, 4], [3, 4]])
    scores = train(x, previous, targets, 5, shape, 0, Training(max_epochs=0)).scores(x, previous)
    shares = [(count + 0.5) / 8 for count in (1, 6, 4, 2, 1)]
    expected = torch.tensor([math.log(share / (1 - share)) for share in shares])
    torch.testing.assert_close(scores, expected.expand(8, 5))  # float32 rounding


@SHAPES
def test_what_fails_on_the_tokens_that_validate_is_not_kept(shape: MLPShape) -> None:
    """Expert 1 follows expert 0 and 0 follows 1, but not in the last eighth, where popularity is right."""
    x = torch.zeros(800, 2)
    previous = (torch.arange(800) % 5 < 3).long()[:, None, None]  # 1 in three of five, so that 0 is popular
    targets = 1 - previous[:, 0]
    previous[700:], targets[700:] = 0, 0
    scores = train(x, previous, targets, 2, shape, 0).scores(x, previous)
    assert torch.equal(scores, scores[:1].expand(800, 2))
    assert scores[0, 0] > scores[0, 1]


def test_learning_stops_when_the_patience_is_used_up() -> None:
    """14 tokens make an epoch of one step; the rate of the first is the same however many follow."""
    x, previous, _ = some_tokens(16)
    targets = previous[:, 0]
    one = train(x, previous, targets, 6, TWO, 0, Training(max_epochs=1))
    assert same(one, train(x, previous, targets, 6, TWO, 0, Training(max_epochs=9, patience=0)))
    assert not same(one, train(x, previous, targets, 6, TWO, 0, Training(max_epochs=9, patience=1)))


def test_the_rate_falls_to_nothing_over_the_epochs() -> None:
    """In 100 epochs of one step a weight moves by half of 100 full steps, about."""
    targets = torch.zeros(16, 1, dtype=torch.int64)
    x, previous, _ = some_tokens(16, num_previous=1, k=1, num_experts=2)
    previous[:] = 0
    training = Training(max_epochs=100, patience=100)
    route_weight = train(x, previous, targets, 2, ONE, 0, training).route_weight.float()
    # Adam's step is the rate while the gradient keeps its sign; 1% above for the first epoch at full rate.
    assert 0.4 < float(route_weight[0, 0, 0]) < 0.505 * 100 * 0.01
    assert float(route_weight[1, 0, 0]) == -float(route_weight[0, 0, 0])


@pytest.mark.parametrize(("d", "rate"), [(6, 0.01), (254, 0.01), (1022, 0.0025)])
def test_one_layer_of_many_inputs_learns_in_smaller_steps(d: int, rate: float) -> None:
    """Adam's first step is the rate, whatever the gradient; two of the inputs are routes."""
    x, previous, _ = some_tokens(16, d=d, num_previous=1, k=1, num_experts=2)
    predictor = train(x, previous * 0, torch.zeros(16, 1, dtype=torch.int64), 2, ONE, 0, Training(max_epochs=1))
    assert float(predictor.route_weight[0, 0, 0]) == pytest.approx(rate, rel=2**-8)  # a rounding to bfloat16


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_columns_of_any_mean_and_scale_are_learned_from_alike(offset: float) -> None:
    """Scaled by powers of two nothing is rounded otherwise, so the scores are the same bits."""
    x, previous, targets = some_tokens(800)
    x += offset
    targets[:, 0] = (x[:, 0] > offset).long()
    targets[:, 1] = 2 + (x[:, 1] > offset).long()
    scales = torch.tensor([1.0, 0.25, 2.0, 4.0, 0.5, 1.0, 8.0, 0.125])
    plain = train(x, previous, targets, 6, TWO, 0, QUICK)
    scaled = train(x * scales, previous, targets, 6, TWO, 0, QUICK)
    assert torch.equal(scaled.scores(x * scales, previous), plain.scores(x, previous))
    assert held_out_recall(TWO, x * scales, previous, targets, 6, Training(max_epochs=10)) > 0.9


def test_a_column_that_never_moves_teaches_nothing_and_harms_nothing() -> None:
    x, previous, _ = some_tokens(1000)
    x[:, 3] = 1e4
    targets = previous[:, 1]
    assert held_out_recall(TWO, x, previous, targets, 6) == 1.0


def test_mean_and_scale_are_those_of_each_column() -> None:
    """Over several blocks, against float64 sums over everything."""
    x = torch.randn(2500, 3, generator=generator()) * torch.tensor([1.0, 20.0, 0.5]) + torch.tensor([5.0, 0.0, -900.0])
    found = standard_of(x)
    torch.testing.assert_close(found.mean, x.double().mean(0).float(), rtol=1e-6, atol=0)  # one rounding to float32
    torch.testing.assert_close(found.scale, x.double().std(0, unbiased=False).float(), rtol=1e-6, atol=0)


def test_a_column_that_hardly_moves_gets_the_usual_scale() -> None:
    x = torch.tensor([[3.0, 1.0, 5.0], [-3.0, 1.001, 5.0]])
    usual = math.sqrt((9 + 0.0005**2) / 3)  # the root of the mean square of the deviations 3, 0.0005, 0
    # 1.001 in float32 is off by 2e-8
    torch.testing.assert_close(standard_of(x).scale, torch.tensor([3.0, usual, usual]), rtol=1e-6, atol=0)
    assert torch.equal(standard_of(x[:1]).scale, torch.ones(3))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_folded_layers_give_what_the_layers_gave_to_the_standardised(num_layers: int) -> None:
    """Numbers of few bits, so that bfloat16 and every sum hold them exactly."""
    d, num_previous, num_experts, hidden = 5, 2, 3, 4
    width = num_experts if num_layers == 1 else hidden

    def few_bits(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator(sum(shape))) / 4

    layers = [few_bits(width, d), few_bits(width, num_previous * num_experts), few_bits(width)]
    layers += [] if num_layers == 1 else [few_bits(num_experts, hidden), few_bits(num_experts)]
    standard = Standard(few_bits(d), torch.tensor([0.5, 1.0, 2.0, 0.25, 4.0]))
    x, previous = few_bits(9, d), random_routes(9, num_previous, 2, num_experts)
    expected = torch.zeros(9, num_experts)
    for t in range(9):
        units = layers[0] @ ((x[t] - standard.mean) / standard.scale) + layers[2]
        for p in range(num_previous):
            for e in previous[t, p].tolist():
                units = units + layers[1][:, p * num_experts + e]
        expected[t] = units if num_layers == 1 else layers[3] @ units.clamp(min=0) + layers[4]
    assert torch.equal(folded(layers, standard, num_experts).scores(x, previous), expected)


def test_a_large_mean_cancels_though_weights_are_rounded() -> None:
    weight = torch.tensor([[1 / 3, 0.7]])
    predictor = folded(
        [weight, torch.zeros(1, 1), torch.zeros(1)], Standard(torch.tensor([1024.0, -2048.0]), torch.ones(2)), 1
    )
    at_mean = predictor.scores(torch.tensor([[1024.0, -2048.0]]), torch.zeros(1, 1, 1, dtype=torch.int64))
    # The products are about 1,000: float32 rounds them by 1e-4. Shifted by weights not rounded it would be off by 1.
    assert abs(float(at_mean)) < 1e-3


def test_scores_do_not_depend_on_the_other_tokens() -> None:
    x, previous, targets = some_tokens(1500)  # more than a block
    predictor = train(x, previous, targets, 6, TWO, 0, QUICK)
    scores = predictor.scores(x, previous)
    assert scores.shape == (1500, 6) and scores.dtype == torch.float32
    for t in (0, 1023, 1024, 1499):
        # Sums of 20 and 32 products may be taken in another order: float32 rounding.
        torch.testing.assert_close(scores[t : t + 1], predictor.scores(x[t : t + 1], previous[t : t + 1]))
    assert predictor.scores(x[:0], previous[:0]).shape == (0, 6)


def test_adam_steps_as_published() -> None:
    """Against the paper's algorithm in Python's floats, on f(w) = (w - 3)^2."""
    tensor = torch.tensor([1.0])
    adam = Adam([tensor])
    w, mean, square = 1.0, 0.0, 0.0
    for step, rate in enumerate([0.1, 0.1, 0.05, 0.5, 0.2], start=1):
        adam.step((2 * (tensor - 3),), rate)
        gradient = 2 * (w - 3)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        w -= rate * (mean / (1 - 0.9**step)) / (math.sqrt(square / (1 - 0.999**step)) + 1e-8)
        assert float(tensor) == pytest.approx(w, rel=1e-5)  # float32 rounding, a few times


# Determinism and inference mode


def same(one: Predictor, other: Predictor) -> bool:
    arrays, others = one.arrays(), other.arrays()
    return arrays.keys() == others.keys() and all(torch.equal(arrays[name], others[name]) for name in arrays)


@SHAPES
def test_the_same_seed_gives_the_same_bits(shape: MLPShape) -> None:
    x, previous, _ = some_tokens(600)
    targets = previous[:, 1]
    one, two, other = (train(x, previous, targets, 6, shape, seed, QUICK) for seed in (4, 4, 5))
    assert same(one, two)
    assert not same(one, other)


def test_global_random_state_is_neither_used_nor_changed() -> None:
    x, previous, targets = some_tokens(300)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = train(x, previous, targets, 6, TWO, 0, QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(one, train(x, previous, targets, 6, TWO, 0, QUICK))


@SHAPES
def test_it_learns_under_inference_mode_from_tensors_made_there(shape: MLPShape) -> None:
    x, previous, targets = some_tokens(300)
    outside = train(x, previous, targets, 6, shape, 0, QUICK)
    with torch.inference_mode():
        inside = train(x.clone(), previous.clone(), targets.clone(), 6, shape, 0, QUICK)
        scores = inside.scores(x.clone(), previous.clone())
    assert same(outside, inside)
    assert torch.equal(scores, outside.scores(x, previous))
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in inside.arrays().values())
    with torch.no_grad():
        assert same(outside, train(x, previous, targets, 6, shape, 0, QUICK))


def test_training_leaves_its_inputs_as_they_were() -> None:
    tokens = some_tokens(100)
    copies = [tensor.clone() for tensor in tokens]
    train(*tokens, 6, TWO, 0, QUICK)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tokens, copies, strict=True))


# Small and lopsided


def test_a_handful_of_tokens_is_enough() -> None:
    for shape, num_tokens in product([ONE, TWO], [1, 7, 8, 9]):
        with case(shape, num_tokens):
            x, previous, targets = some_tokens(num_tokens)
            scores = train(x, previous, targets, 6, shape, 0).scores(x, previous)
            assert scores.shape == (num_tokens, 6) and bool(torch.isfinite(scores).all())


@SHAPES
def test_fewer_than_eight_tokens_are_all_learned(shape: MLPShape) -> None:
    x = torch.eye(4)
    previous = torch.zeros(4, 1, 1, dtype=torch.int64)
    targets = torch.tensor([[0], [1], [2], [2]])
    scores = train(x, previous, targets, 3, shape, 0, Training(max_epochs=100, patience=100)).scores(x, previous)
    assert recall_precision(scores, targets, 1) == (1.0, 1.0)


@SHAPES
def test_one_column_one_expert_and_one_token_will_do(shape: MLPShape) -> None:
    nothing = torch.zeros(1, 1, 1, dtype=torch.int64)
    predictor = train(torch.ones(1, 1), nothing, nothing[0], 1, shape, 0)
    assert bool(torch.isfinite(predictor.scores(torch.ones(1, 1), nothing)).all())


@SHAPES
def test_an_expert_never_chosen_comes_last(shape: MLPShape) -> None:
    x, previous, _ = some_tokens(800)
    targets = random_routes(800, 1, 2, 5)[:, 0]  # of 6
    scores = train(x, previous, targets, 6, shape, 0).scores(x, previous)
    assert bool((scores.argmin(-1) == 5).all())


@SHAPES
def test_all_tokens_on_one_expert_are_predicted(shape: MLPShape) -> None:
    x, previous, _ = some_tokens(100, k=1)
    scores = train(x, previous, torch.full((100, 1), 4), 6, shape, 0).scores(x, previous)
    assert recall_precision(scores, torch.full((100, 1), 4), 1) == (1.0, 1.0)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(RunError) as caught:
        train(*some_tokens(0), 6, ONE, 0)
    assert str(caught.value) == ("predictor: found no tokens to learn from, expected at least 1; give more text")


def test_hidden_states_that_are_no_numbers_are_refused() -> None:
    for shape, token, wrong in product([ONE, TWO], [3, 19], [math.nan, math.inf]):
        with case(shape, token, wrong):
            x, previous, targets = some_tokens(20)
            x[token, 2] = wrong
            with pytest.raises(RunError) as caught:
                train(x, previous, targets, 6, shape, 0)
            assert str(caught.value) == (
                "predictor: hidden states are not finite; check that the checkpoint is complete"
            )


# Sizes and cost


def test_the_sizes_are_those_of_the_paper() -> None:
    small, large = shapes_for(4096, 8)
    assert small.num_parameters(4096, 8) == 32 * 1024 + 2 * 64 + 8
    assert large == MLPShape(2, 480)  # 1,999,992 / 4,121 is 485.3; in eights 480
    assert large.num_parameters(4096, 8) == (4096 + 16 + 1) * 480 + (480 + 1) * 8 == 1_978_088


def test_the_larger_has_as_many_hidden_units_as_are_allowed() -> None:
    for d, num_experts, hidden in [(128, 8, 512), (1, 1, 512), (7168, 256, 248), (3800, 8, 512), (10**6, 8, 8)]:
        with case(d, num_experts, hidden):
            assert shapes_for(d, num_experts)[1].hidden == hidden


def test_the_larger_keeps_within_two_million_and_wastes_less_than_eight_units() -> None:
    for d, num_experts in product([64, 2048, 3886, 4096, 12288], [1, 8, 60, 512]):
        with case(d, num_experts):
            large = shapes_for(d, num_experts)[1]
            assert large.num_parameters(d, num_experts) <= 2_000_000
            wider = replace(large, hidden=large.hidden + 8)
            assert large.hidden == 512 or wider.num_parameters(d, num_experts) > 2_000_000


def test_a_predictor_has_the_parameters_its_shape_says() -> None:
    for shape, num_previous in product([ONE, TWO], [1, 2]):
        with case(shape, num_previous):
            predictor = train(*some_tokens(20, num_previous=num_previous), 6, shape, 0, QUICK)
            assert sum(each.numel() for each in predictor.arrays().values()) == shape.num_parameters(8, 6, num_previous)
            assert (predictor.hidden_size, predictor.num_previous, predictor.num_experts) == (8, num_previous, 6)


def test_the_cost_is_three_products_a_parameter_token_and_epoch() -> None:
    # (3 + 2 * 2 + 1) * 2 = 16 parameters
    assert cost(ONE, 100, 3, 2) == 3 * 20 * 100 * 16
    assert cost(ONE, 100, 3, 2, Training(max_epochs=1)) == 3 * 100 * 16
    # (3 + 2 * 2 + 1) * 5 + (5 + 1) * 2 = 52 parameters
    assert cost(MLPShape(2, 5), 7, 3, 2) == 3 * 20 * 7 * 52


@pytest.mark.parametrize(("num_layers", "hidden"), [(1, 8), (2, 0)])
def test_hidden_units_go_with_two_layers(num_layers: int, hidden: int) -> None:
    with pytest.raises(AssertionError, match="one layer has no hidden units"):
        MLPShape(num_layers, hidden)  # type: ignore[arg-type] # the test's point is the pair


def test_arrays_are_named_and_shaped_as_documented() -> None:
    def trained(shape: MLPShape) -> dict[str, Tensor]:
        return train(*some_tokens(20), 6, shape, 0, QUICK).arrays()

    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in trained(TWO).items()}
    one = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in trained(ONE).items()}
    assert found == {
        "x_weight": (torch.bfloat16, (32, 8)),
        "route_weight": (torch.bfloat16, (32, 2, 6)),
        "bias": (torch.float32, (32,)),
        "out_weight": (torch.bfloat16, (6, 32)),
        "out_bias": (torch.float32, (6,)),
    }
    assert one == {
        "x_weight": (torch.bfloat16, (6, 8)),
        "route_weight": (torch.bfloat16, (6, 2, 6)),
        "bias": (torch.float32, (6,)),
    }
