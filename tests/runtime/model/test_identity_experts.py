"""Models whose router may choose experts that return their input: in memory, inside a budget, and layer by layer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.streaming import budget_for
from support.synthetic import made, plan_for, small

from moe_pack.calib.forward import LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.statistics import measure_layer
from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import Decoder, PackWeights, StreamedPackWeights, embed, head
from moe_pack.runtime.offload import Approximations, OffloadedWeights

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
        return Decoder(PackWeights(pack, CPU), CONTEXT).logits(token_ids())


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
        weights = LayerwiseWeights(StreamedPackWeights(pack, CPU))
        states = LayerStates(weights, Beginning(lambda number: embed(ids[number], weights)), 1, S, tmp_path, CPU)
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
            found = head(states.before(0), weights)
        assert difference(found, expected) < 2e-5


def test_synthetic_routers_choose_them_as_often_as_others(packed: Path) -> None:
    with Pack(packed) as pack:
        router = pack.spec.router
        weights = PackWeights(pack, CPU)
        decoder = Decoder(weights, 512)
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
