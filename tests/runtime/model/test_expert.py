"""The reference semantics of experts, and experts that return their input."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.specs import GROUPED
from support.streaming import budget_for
from support.synthetic import made, plan_for, small

from moe_pack.calib.forward import LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.statistics import measure_layer
from moe_pack.formats import LimitedFunction, Matrix, Pack, RunError, Selector
from moe_pack.formats.parts.specs import SELECTORS, LimitedName, LimitSpec, spec_fault
from moe_pack.runtime import Engine, EngineOptions, model
from moe_pack.runtime.model.layers import run_dense_expert
from moe_pack.runtime.offload import Approximations, OffloadedWeights


@dataclass
class Held:
    """An expert held in float32, given out in blocks of `step` neurons."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    step: int = 1000

    def down_bias(self) -> None:
        """It has none."""

    def blocks(self) -> Iterator[model.NeuronBlock]:
        for i in range(0, len(self.up), self.step):
            part = slice(i, i + self.step)
            yield model.NeuronBlock(self.gate[part], self.up[part], self.down[part])


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


# Two neurons over d = 2 and x = [1, 2]: gate activations silu(1), silu(2); up activations 3 and -1.
HAND = Held(gate=rows([1, 0], [0, 1]), up=rows([1, 1], [1, -1]), down=rows([1, 0], [10, 1]))
X = rows([1, 2])


def test_an_expert_is_the_sum_over_its_neurons() -> None:
    y = model.run_expert(X, HAND, "silu", "none", 0.0)
    expected = [[silu(1) * 3 - silu(2) * 10, -silu(2)]]
    torch.testing.assert_close(y, torch.tensor(expected))


def test_neurons_run_unless_their_activation_is_below_the_threshold() -> None:
    for selector, threshold, running in [
        ("up", 2.0, [0]),  # |u| = 3, 1
        ("up", 1.0, [0, 1]),  # not below the threshold: runs
        ("gate", 1.0, [1]),  # silu(1) = 0.73, silu(2) = 1.76
        ("both", 2.0, [0]),  # |h| = 2.19, 1.76
        ("both", 2.5, []),
        ("none", 2.0, [0]),
    ]:
        with case(selector, threshold, running):
            h = [silu(1) * 3, -silu(2)]
            down = HAND.down.tolist()
            expected = [[sum(h[i] * down[i][column] for i in running) for column in (0, 1)]]
            y = model.run_expert(X, HAND, "silu", selector, threshold)
            torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float32))


def test_a_threshold_of_zero_drops_exactly_what_contributes_nothing() -> None:
    """An up activation of zero times an infinite gate is NaN in arithmetic; the neuron does not run."""
    expert = Held(gate=rows([1e38, 1e38]), up=rows([2, -1]), down=rows([5, 5]))
    assert model.run_expert(X * 4, expert, "silu", "up", 0.0).tolist() == [[0, 0]]


def test_a_nan_runs_and_is_seen() -> None:
    for selector in SELECTORS:
        with case(selector):
            expert = Held(gate=rows([math.nan, 0]), up=rows([math.nan, 1]), down=rows([1, 1]))
            assert model.run_expert(X, expert, "silu", selector, 1e9).isnan().all()


def test_an_expert_agrees_with_brute_force_whatever_the_blocks() -> None:
    for selector, num_tokens in product(SELECTORS, [0, 1, 5]):
        with case(selector, num_tokens):
            random = np.random.default_rng(3)
            gate, up, down = (random.normal(size=(13, 8)) * 0.3 for _ in range(3))
            x = random.normal(size=(num_tokens, 8))
            g, u = x @ gate.T, x @ up.T
            active = g / (1 + np.exp(-g))
            a = {"up": u, "gate": active, "both": active * u, "none": active * u}[selector]
            threshold = 0.1
            expected = np.where(abs(a) >= threshold, active * u, 0) @ down
            for step in (1, 4, 13):
                held = Held(*(torch.tensor(m, dtype=torch.float32) for m in (gate, up, down)), step)
                y = model.run_expert(torch.tensor(x, dtype=torch.float32), held, "silu", selector, threshold)
                # Sums of 13 float32 products of order 1: a few times 2^-24 each.
                np.testing.assert_allclose(y.numpy(), expected, atol=1e-5)


def test_an_expert_of_two_matrices_activates_up() -> None:
    class TwoMatrices:
        def down_bias(self) -> None:
            """It has none."""

        def blocks(self) -> Iterator[model.NeuronBlock]:
            yield model.NeuronBlock(None, rows([1, 1]), rows([2, 4]), up_bias=torch.tensor([1.0]))

    y = model.run_expert(X, TwoMatrices(), "silu", "up", 0.0)
    torch.testing.assert_close(y, torch.tensor([[2 * silu(4), 4 * silu(4)]]))


@pytest.mark.parametrize("matrices", [("gate", "up", "down"), ("up", "down")], ids=str)
def test_a_dense_expert_is_the_same_function_over_all_neurons(matrices: tuple[Matrix, ...]) -> None:
    """Two neurons: (2, 4) through up rows (1, 1) and (1, 0), gate rows (1, 0) and (0, 1); down [d, f]."""
    held = {"gate": [[1, 0], [0, 1]], "up": [[1, 1], [1, 0]], "down": [[1, 2], [3, 4]]}

    class DenseWeights:
        spec = replace(GROUPED, expert=replace(GROUPED.expert, matrices=matrices))
        operations = model.TORCH

        def matrix(self, role: str) -> model.StoredMatrix:
            name = role.removeprefix("layers.0.shared.")
            assert name in matrices, role
            return model.StoredMatrix(torch.tensor(held[name], dtype=torch.bfloat16))

    y = run_dense_expert(torch.tensor([[2.0, 4.0]]), DenseWeights(), "layers.0.shared", "silu")
    h = (6 * silu(2), 2 * silu(4)) if "gate" in matrices else (silu(6), silu(2))
    torch.testing.assert_close(y, torch.tensor([[h[0] + 2 * h[1], 3 * h[0] + 4 * h[1]]]))


def swish(gate: float) -> float:
    c = min(gate, 7.0)
    return c / (1 + math.exp(-1.702 * c))


def one_more(up: float) -> float:
    return min(max(up, -7.0), 7.0) + 1


# Gate and up values of nine neurons: below, at and above the limits, and an up of -1, whose factor is 0.
GATES = [-20.0, -7.0, -1.0, 0.0, 2.0, 6.9, 7.0, 7.1, 30.0]
UPS = [30.0, 7.0, -8.0, 3.0, -1.0, -7.0, 7.1, 0.5, -7.1]
CLAMPED = model.NeuronBlock(
    torch.zeros(9, 1), torch.zeros(9, 1), torch.ones(9, 1), torch.tensor(GATES), torch.tensor(UPS)
)


def test_the_clamped_swiglu_is_its_formula_on_both_sides_of_its_limits() -> None:
    found = model.activations(torch.zeros(1, 1), CLAMPED, "clamped_swiglu")
    gates, ups = torch.tensor([[swish(g) for g in GATES]]), torch.tensor([[one_more(u) for u in UPS]])
    torch.testing.assert_close(found.gate, gates)
    torch.testing.assert_close(found.up, ups)
    torch.testing.assert_close(found.h, gates * ups)
    assert torch.equal(found.of("up"), found.up) and torch.equal(found.of("gate"), found.gate)


def test_limited_functions_are_their_formulas_on_both_sides_of_their_limits() -> None:
    """One limits what SiLU takes, the other what it gives; both limit up, and let a NaN pass."""
    for limit in [0.5, 7.0]:
        formulas: dict[LimitedName, list[float]] = {
            "clipped_silu": [silu(min(g, limit)) for g in GATES],
            "capped_silu": [min(silu(g), limit) for g in GATES],
        }
        for name, gates in formulas.items():
            with case(name, limit):
                found = model.activations(torch.zeros(1, 1), CLAMPED, LimitedFunction(name, limit))
                torch.testing.assert_close(found.gate[0], torch.tensor(gates))
                assert found.up[0].tolist() == [min(max(u, -limit), limit) for u in UPS]
                assert torch.equal(found.h, found.gate * found.up)
                bad = replace(CLAMPED, gate_bias=torch.full((9,), torch.nan), up_bias=torch.full((9,), torch.nan))
                found = model.activations(torch.zeros(1, 1), bad, LimitedFunction(name, limit))
                assert found.gate.isnan().all() and found.up.isnan().all()


def test_gelu_is_the_approximation_by_tanh() -> None:
    def gelu(g: float) -> float:
        return g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))

    found = model.activations(torch.zeros(1, 1), CLAMPED, "gelu_tanh")
    torch.testing.assert_close(found.gate[0], torch.tensor([gelu(g) for g in GATES]))
    assert found.up[0].tolist() == torch.tensor(UPS).tolist()


def test_layers_have_limits_of_their_own() -> None:
    """In layer 0 the routed experts alone, in layer 2, which is dense, the dense expert alone, in layer 1 neither."""
    limits = (LimitSpec((0,), 7.0, None), LimitSpec((2,), None, 16.0))
    expert = replace(GROUPED.expert, function="capped_silu", limits=limits)
    spec = replace(GROUPED, expert=expert)
    assert spec_fault(spec) is None
    assert [spec.expert_function(idx) for idx in range(2)] == [LimitedFunction("capped_silu", 7.0), "silu"]
    unrouted = [expert.unrouted_function(layer) for layer in range(3)]
    assert unrouted == ["silu", "silu", LimitedFunction("capped_silu", 16.0)]
    everywhere = replace(expert, limits=(LimitSpec(None, 10.0, None),))
    assert everywhere.routed_function(1) == LimitedFunction("capped_silu", 10.0)
    assert everywhere.unrouted_function(1) == "silu"


@pytest.mark.parametrize(("selector", "runs"), [("up", [1, 3, 5]), ("gate", [0, 1, 4]), ("both", [0, 1, 4])])
def test_a_threshold_drops_neurons_by_what_the_clamped_swiglu_makes_known(selector: Selector, runs: list[int]) -> None:
    gates, ups = [5.0, 3.0, -2.0, 0.0, 7.5, -1.2], [-1.5, 2.0, -0.5, 3.0, -1.9, 6.0]
    block = model.NeuronBlock(
        torch.zeros(6, 1), torch.zeros(6, 1), torch.ones(6, 1), torch.tensor(gates), torch.tensor(ups)
    )
    a = model.activations(torch.zeros(1, 1), block, "clamped_swiglu").of(selector)[0].abs()
    values = {
        "up": [abs(one_more(u)) for u in ups],
        "gate": [abs(swish(g)) for g in gates],
        "both": [abs(swish(g) * one_more(u)) for g, u in zip(gates, ups, strict=True)],
    }[selector]
    threshold = (sorted(values)[2] + sorted(values)[3]) / 2
    assert torch.nonzero(a >= threshold).flatten().tolist() == runs
    y = model.run_expert(torch.zeros(1, 1), Given(block), "clamped_swiglu", selector, threshold)
    expected = sum(swish(gates[i]) * one_more(ups[i]) for i in runs)
    assert float(y) == pytest.approx(expected, abs=4e-6)  # of terms up to 9


@dataclass
class Given:
    """An expert of one block, whose output has a bias."""

    block: model.NeuronBlock
    bias: torch.Tensor | None = None

    def down_bias(self) -> torch.Tensor | None:
        return self.bias

    def blocks(self) -> Iterator[model.NeuronBlock]:
        yield self.block


@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_the_bias_of_down_is_added_whichever_neurons_run(threshold: float) -> None:
    bias = torch.tensor([0.25, -3.0])
    x = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    held = Given(next(HAND.blocks()), bias)
    without = model.run_expert(x, HAND, "silu", "both", threshold)
    torch.testing.assert_close(model.run_expert(x, held, "silu", "both", threshold), without + bias)
    assert held.bias is bias and bias.tolist() == [0.25, -3.0]


@pytest.mark.parametrize("has_gate", [True, False])
def test_relu_lets_through_what_is_above_zero(has_gate: bool) -> None:
    block = model.NeuronBlock(HAND.gate if has_gate else None, HAND.up, HAND.down)
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])  # gates 1, 2 and -1, 2; ups 3, -1 and 1, -3
    y = model.run_expert(x, Given(block), "relu", "none", 0.0)
    assert y.tolist() == ([[3 - 20, -2], [-60, -6]] if has_gate else [[3, 0], [1, 0]])


CPU = torch.device("cpu")
CONTEXT, S = 32, 24
E, Z, K = 6, 10, 2  # more than a third of all tokens choose no other expert


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small(num_experts=E)
    router = replace(spec.router, num_experts_per_tok=K, normalize=False, scaling_factor=2.0, num_identity=Z)
    return made(replace(spec, router=router), tmp_path_factory.mktemp("identity") / "packed", plan=plan_for(spec))


def token_ids() -> list[int]:
    return torch.randint(4096, (S,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def expected(packed: Path) -> torch.Tensor:
    """The logits of the reference semantics, [S, vocabulary]."""
    with Pack(packed) as pack:
        return model.Decoder(model.PackWeights(pack, CPU), CONTEXT).logits(token_ids())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kernels", ["torch", "portable"])
@pytest.mark.parametrize("num_experts", [None, 4])
def test_an_answer_is_the_same_whatever_computes_it(
    packed: Path, expected: torch.Tensor, kernels: str, num_experts: int | None
) -> None:
    """A prompt, then token by token: some tokens run no expert of a layer."""
    with Pack(packed) as pack:
        budget = None if num_experts is None else budget_for(pack, num_experts, CONTEXT)
        options = EngineOptions(kernels=kernels, budget_bytes=budget)  # type: ignore[arg-type]  # one of its names
        with Engine(pack, options, CONTEXT) as engine:
            assert isinstance(engine.weights, OffloadedWeights) == (num_experts is not None)
            ids = token_ids()
            found = [engine.decoder.next_logits(ids[:4]), *(engine.decoder.next_logits([i]) for i in ids[4:])]
            assert difference(torch.stack(found), expected[3:]) < 2e-5
            if isinstance(engine.weights, OffloadedWeights):
                counts = engine.weights.decode
                most = K * counts.layers
                assert 0 < counts.needed < 0.7 * most, "experts that do not run are not needed"


def test_experts_that_do_not_run_are_not_counted(packed: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    """Calibration's pass gives the decoder's hidden states, and counts the tokens that experts run for."""
    ids = torch.tensor([token_ids()])
    with Pack(packed) as pack:
        weights = LayerwiseWeights(model.StreamedPackWeights(pack, CPU))
        states = LayerStates(weights, Beginning(lambda number: model.embed(ids[number], weights)), 1, S, tmp_path, CPU)
        num_running = 0
        for layer_idx, layer in enumerate(pack.spec.moe_layers):
            tokens = states.enter(layer)
            runs = tokens.weights != 0
            num_running += int(runs.sum())
            assert tokens.experts.max() < E and bool((~runs).all(dim=1).any())
            with torch.inference_mode():
                counted = measure_layer(states, tokens, weights, layer_idx, (0.0, 0.0), num_held_out_tokens=8)
            chosen = [tokens.experts[runs] == e for e in range(E)]
            assert counted.tokens.tolist() == [int(each.sum()) for each in chosen]
            assert int(counted.held_out_tokens.sum()) == int(runs[-8:].sum())
            assert np.diag(counted.coactivation).tolist() == counted.tokens.tolist()
            both = (runs.all(dim=1)).sum()
            assert int(counted.coactivation.sum()) == int(runs.sum()) + 2 * int(both)
            states.leave(layer, tokens)
        assert 0 < num_running < K * S * len(pack.spec.moe_layers)
        with torch.inference_mode():
            found = model.head(states.before(0), weights)
        assert difference(found, expected) < 2e-5


def test_synthetic_routers_choose_them_as_often_as_others(packed: Path) -> None:
    with Pack(packed) as pack:
        router = pack.spec.router
        weights = model.PackWeights(pack, CPU)
        decoder = model.Decoder(weights, 512)
        seen: list[torch.Tensor] = []
        route = weights.operations.route

        class Watching(type(weights.operations)):  # type: ignore[misc]  # the class of an object
            def route(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
                found = route(*arguments)  # type: ignore[arg-type]
                seen.append(found[1])
                return found

        weights.operations = Watching()
        decoder.logits(torch.randint(4096, (400,), generator=torch.Generator().manual_seed(4)).tolist())
    share = torch.cat([(each != 0).float().mean(dim=1) for each in seen]).mean()
    assert abs(float(share) - router.num_experts / router.num_outputs) < 0.08


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (EngineOptions(record=Path("record")), "--record"),
        (EngineOptions(approximations=Approximations(substitute=0.5)), "--substitute"),
        (EngineOptions(approximations=Approximations(runs_predicted=True)), "--trust-experts"),
    ],
)
def test_what_such_models_cannot_follow_is_refused(packed: Path, options: EngineOptions, name: str) -> None:
    with Pack(packed) as pack, pytest.raises(RunError) as refused:
        Engine(pack, options, CONTEXT)
    message = "does not support models with experts that return their input; remove it"
    assert str(refused.value) == f"{name} {message}"
