"""The way back through a model against torch's own gradients and finite differences; losses against loops by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import Tiny, write
from support.held_experts import HeldExpert
from torch import Tensor

from moe_pack.calib.forward import KINDS, Context, LayerStates, LayerTokens, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.sensitivity import WIDTHS
from moe_pack.calib.sensitivity.errors import plainly_rounded
from moe_pack.calib.sensitivity.gradients import (
    ExpertGradients,
    Tracked,
    expert_gradients,
    half_gradient,
    prediction_gradient,
    router_gradient,
)
from moe_pack.formats import LimitedFunction, NeuronFunction
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, embed, head, neuron_of, route_tokens, run_expert

CPU = torch.device("cpu")
S = 12
THRESHOLDS = torch.tensor([[0.2, 0.4, 0.6, 0.9], [0.1, 0.2, 0.3, 0.5], [0.05, 0.1, 0.2, 0.4]])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def an_expert(f: int = 70, d: int = 128, biases: bool = False, gate: bool = True, step: int = 1000) -> HeldExpert:
    rows = [random(f, d, seed=seed) * 0.1 for seed in (1, 2, 3)]
    of_neurons = (random(f, seed=4) if gate else None, random(f, seed=5)) if biases else (None, None)
    return HeldExpert(
        NeuronBlock(rows[0] if gate else None, *rows[1:], *of_neurons), random(d) if biases else None, step
    )


EXPERTS: dict[str, tuple[HeldExpert, NeuronFunction]] = {
    "silu": (an_expert(), "silu"),
    "in blocks": (an_expert(step=13), "silu"),
    "biases, clamped": (an_expert(biases=True), "clamped_swiglu"),
    "without a gate": (an_expert(gate=False), "relu"),
    "squared, without a gate": (an_expert(gate=False), "relu2"),
    "clipped": (an_expert(biases=True), LimitedFunction("clipped_silu", 0.5)),
    "capped": (an_expert(), LimitedFunction("capped_silu", 0.3)),
    "gelu": (an_expert(), "gelu_tanh"),
    "one neuron": (an_expert(f=1), "silu"),
}
X, ABOVE, ROUTER = random(9, 128, seed=9), random(9, 128, seed=10), torch.linspace(0.1, 1, 9)


def gone_back(name: str, x: Tensor = X, weights: Tensor = ROUTER, above: Tensor = ABOVE) -> ExpertGradients:
    expert, function = EXPERTS[name]
    with torch.inference_mode():
        return expert_gradients(expert, function, x, weights, above, THRESHOLDS)


def test_an_experts_gradients_are_torchs() -> None:
    for name, (expert, function) in EXPERTS.items():
        with case(name):
            x, weights = X.clone().requires_grad_(), ROUTER.clone().requires_grad_()
            output = run_expert(x, expert, function, "none", 0.0) * weights[:, None]
            expected = torch.autograd.grad(output, (x, weights), ABOVE)
            found = gone_back(name)
            torch.testing.assert_close(found.inputs, expected[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.weights, expected[1], atol=1e-4, rtol=1e-4)


def test_what_rounding_costs_is_the_sum_over_neurons_and_columns() -> None:
    """Each neuron's derivative by torch; an input's square is that of its group of 64, as an error's gradient is."""
    for name, (expert, function) in EXPERTS.items():
        with case(name):
            w, neuron, found = expert.whole, neuron_of(function), gone_back(name)
            u = (X @ w.up.T + (0 if w.up_bias is None else w.up_bias)).requires_grad_()
            g = None
            if w.gate is not None:
                g = (X @ w.gate.T + (0 if w.gate_bias is None else w.gate_bias)).requires_grad_()
            h = neuron.h(g, u)
            gain = ABOVE @ w.down.T * ROUTER[:, None]
            slopes = torch.autograd.grad(h.sum(), [one for one in (g, u) if one is not None])
            factors = {"up": (slopes[-1] * gain, X), "down": (h.detach() * ROUTER[:, None], ABOVE)}
            if w.gate is not None:
                factors["gate"] = slopes[0] * gain, X
            for matrix_idx, matrix in enumerate(("gate", "up", "down")):
                rows = getattr(w, matrix)
                for width_idx, width in enumerate(WIDTHS[:-1]):
                    expected = 0.0
                    if rows is not None:
                        of_neuron, of_column = factors[matrix]
                        squares = (plainly_rounded(rows, width) - rows).double().square()
                        for group in range(2):
                            columns = slice(64 * group, 64 * group + 64)
                            mean = of_column[:, columns].double().square().mean(1)  # [tokens]
                            expected += float(of_neuron.double().square().T @ mean @ squares[:, columns].sum(1)) / 2
                    assert found.quantized[matrix_idx, width_idx].item() == pytest.approx(expected, rel=1e-4)


def test_of_repeated_neurons_down_loses_nothing() -> None:
    """Two of 300 neurons: those that lose most at the width."""
    expert = an_expert(f=300, step=70)
    with torch.inference_mode():
        found = expert_gradients(expert, "silu", X, ROUTER, ABOVE, THRESHOLDS)
    w = expert.whole
    assert w.gate is not None
    h = torch.nn.functional.silu(X @ w.gate.T) * (X @ w.up.T) * ROUTER[:, None]
    means = ABOVE.double().square().view(9, 2, 64).mean(2)  # [tokens, groups]
    for width_idx, width in enumerate(WIDTHS[:-1]):
        squares = (plainly_rounded(w.down, width) - w.down).double().square().view(300, 2, 64).sum(2)
        lost = ((h.double().square().T @ means) * squares).sum(1) / 2
        assert found.quantized[2, width_idx].item() == pytest.approx(float(lost.sum()), rel=1e-4)
        expected = float(lost.sum() - lost.topk(2).values.sum())
        assert found.repeated[width_idx].item() == pytest.approx(expected, rel=1e-4)
        assert expected < 0.98 * float(lost.sum())


def test_what_sparsity_costs_is_the_square_of_what_is_left_out_along_the_gradient() -> None:
    for name, (expert, function) in EXPERTS.items():
        with case(name):
            found = gone_back(name)
            whole = run_expert(X, expert, function, "none", 0.0)
            for kind_idx, kind in enumerate(KINDS):
                for idx, threshold in enumerate(THRESHOLDS[kind_idx].tolist()):
                    change = (run_expert(X, expert, function, kind, threshold) - whole) * ROUTER[:, None]
                    expected = float((change * ABOVE).sum(1).double().square().sum()) / 2
                    assert found.sparse[kind_idx, idx].item() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_without_tokens_an_expert_costs_nothing() -> None:
    found = gone_back("silu", X[:0], ROUTER[:0], ABOVE[:0])
    assert not found.quantized.any() and not found.sparse.any()
    assert found.inputs.shape == (0, 128)


def test_what_rounding_costs_is_about_what_the_rounded_expert_changes_along_the_gradient() -> None:
    """The errors' independence is an assumption: over many tokens of random inputs it is within a quarter."""
    expert, function = an_expert(f=200), "silu"
    x, above, weights = random(2000, 128, seed=11), random(2000, 128, seed=12), torch.rand(2000)
    found = expert_gradients(expert, "silu", x, weights, above, THRESHOLDS)
    whole = run_expert(x, expert, "silu", "none", 0.0)
    for matrix_idx, matrix in enumerate(("gate", "up", "down")):
        for width_idx, width in enumerate(WIDTHS):
            rows = plainly_rounded(getattr(expert.whole, matrix), width)
            changed = replace(expert, whole=replace(expert.whole, **{matrix: rows}))
            change = (run_expert(x, changed, function, "none", 0.0) - whole) * weights[:, None]
            expected = float((change * above).sum(1).square().sum()) / 2
            assert found.quantized[matrix_idx, width_idx].item() == pytest.approx(expected, rel=0.25)


# --- models

MODELS = [
    Tiny("mixtral", "plain"),
    Tiny("glm4_moe", "dense first layer, shared experts"),
    Tiny("granitemoe", "multipliers, tied head", {"embedding_multiplier": 2.0, "logits_scaling": 0.5}),
    Tiny("deepseek_v3", "latent attention"),
    Tiny("gpt_oss", "sinks, biases"),
    Tiny("exaone_moe", "norms of heads, layers that do not rotate"),
    Tiny("deepseek_v32", "queries attend where an indexer says"),
    Tiny("axk2", "gates with queries, gated norms"),
    Tiny("hy_v4", "sinks and gates of latents, streams that do not mix"),
    Tiny("minimax_m3_vl", "queries attend to blocks that an indexer chooses, zero-centered norms"),
    Tiny("llama4_text", "norms of rotated heads, temperature, chunks"),
    Tiny("mimo_v2_flash", "attention of their own in layers with windows, smaller values"),
]


@dataclass(frozen=True)
class Opened:
    """A model's weights, and the states of one sequence of S tokens before its layers."""

    weights: LayerwiseWeights
    states: LayerStates
    hidden: Tensor


@pytest.fixture(scope="module", params=MODELS, ids=lambda tiny: tiny.family)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("model")
    checkpoint = Checkpoint(write(request.param, folder / "source"))
    weights = LayerwiseWeights(CheckpointWeights(checkpoint))
    hidden = embed(torch.arange(S) * 7 % 90, weights).clone()
    yield Opened(weights, LayerStates(weights, Beginning(lambda number: hidden), 1, S, folder / "states", CPU), hidden)
    checkpoint.close()


def test_a_half_layers_gradient_is_that_of_finite_differences(opened: Opened) -> None:
    spec, states, x = opened.weights.spec, opened.states, opened.hidden
    for layer in {0, spec.num_hidden_layers - 1}:
        with case(layer), torch.inference_mode():
            above = random(S, spec.stream_width, seed=3), random(S, spec.hidden_size, seed=4)
            gradient, of_text = half_gradient(states, layer, x, Tracked(opened.weights), above, Context())
            assert of_text is None
            for seed in range(3):
                step = random(S, spec.stream_width, seed=seed) * 1e-3 * x.std()
                outputs = [states.half_of(layer, x + sign * step, opened.weights, Context()) for sign in (1, -1)]
                moved = sum(
                    float(((one - other) * g).double().sum()) for one, other, g in zip(*outputs, above, strict=True)
                )
                size = float(gradient.norm() * step.norm())
                assert float((2 * gradient * step).sum()) == pytest.approx(moved, abs=5e-3 * size)


def test_a_routers_gradient_is_that_of_finite_differences(opened: Opened) -> None:
    spec, weights = opened.weights.spec, opened.weights
    layer, x = spec.moe_layers[0], random(S, spec.hidden_size, seed=6)
    with torch.inference_mode():
        experts, chosen = route_tokens(x, weights, layer)
        above = random(*chosen.shape, seed=7)
        gradient = router_gradient(LayerTokens(x, x, experts, chosen), above, Tracked(weights), layer)
        step = random(S, spec.hidden_size, seed=8) * 1e-3
        routed = [route_tokens(x + sign * step, weights, layer) for sign in (1, -1)]
    same = ((routed[0][0] == experts) & (routed[1][0] == experts)).all(dim=1)  # a tie may turn
    moved = ((routed[0][1] - routed[1][1]) * above).sum(dim=1)[same]
    assert same.sum() > S // 2
    torch.testing.assert_close((2 * gradient * step).sum(dim=1)[same], moved, atol=1e-5, rtol=2e-2)


def test_the_mean_square_along_prediction_gradients_is_twice_the_divergence(opened: Opened) -> None:
    """One token, many times: 4,000 squares of normal values have a deviation of 2.2%."""
    weights, d = opened.weights, opened.weights.spec.stream_width
    x = opened.hidden[:1]
    with torch.inference_mode():
        step = random(1, d, seed=5) * 0.02 * x.std()
        expected, changed = (head(one, weights).double().log_softmax(-1) for one in (x, x + step))
        kl = float((expected.exp() * (expected - changed)).sum())
        gradients = prediction_gradient(x.repeat(4000, 1), Tracked(weights), torch.Generator().manual_seed(0))
    assert float((gradients @ step[0]).square().mean()) / 2 == pytest.approx(kl, rel=0.1)


def test_of_a_decoder_the_encoders_output_has_a_gradient_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(Tiny("switch_transformers", "encoder and decoder"), tmp_path / "source"))
    weights, d = LayerwiseWeights(CheckpointWeights(checkpoint)), checkpoint.spec.hidden_size
    x, text, above = random(S, d, seed=1), random(S, d, seed=2), (random(S, d, seed=3), random(S, d, seed=4))
    states = LayerStates(weights, Beginning(lambda number: x, lambda number: x), 1, S, tmp_path / "states", CPU)
    layer = checkpoint.spec.num_hidden_layers - 1
    with torch.inference_mode():
        found = half_gradient(states, layer, x, Tracked(weights), above, Context(text))
        for place, gradient in enumerate(found):
            assert gradient is not None
            step = random(S, d, seed=5) * 1e-3
            moved = 0.0
            for sign in (1, -1):
                given = [value + sign * step if place == idx else value for idx, value in enumerate((x, text))]
                outputs = states.half_of(layer, given[0], weights, Context(given[1]))
                moved += sign * sum(float((one * g).double().sum()) for one, g in zip(outputs, above, strict=True))
            size = float(gradient.norm() * step.norm())
            assert float((2 * gradient * step).sum()) == pytest.approx(moved, abs=5e-3 * size)
            assert size > 0
    checkpoint.close()
