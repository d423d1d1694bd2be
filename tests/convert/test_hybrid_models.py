"""Models with mixers in place of attention, or other sums than plain ones, from a profile to text within a budget."""

from pathlib import Path

import pytest
import torch
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.profiles import profiled, random_tokens

from moe_pack.calib.profile import ProfileOptions
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, Sampler, SamplingOptions
from moe_pack.runtime.engine.options import EngineOptions
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload import PolicyName, least_budget
from moe_pack.runtime.offload.budgets import routing_bytes

FAMILIES = ("qwen3_next", "nemotron_h", "kimi_linear", "granitemoehybrid", "jamba", "lfm2_moe", "bailing_hybrid")
RESIDUALS = ("flex_olmo", "longcat_flash", "gemma4_text", "qwen4_exp_text", "minimax", "beam", "deepseek_v4")


def converted(family: str, folder: Path) -> Path:
    """A pack by a plan that rests on a profile with sensitivities and predictors, made by the commands."""
    source = write(Tiny(family, "as it comes"), folder / "source")
    profiled(source, folder / "profile", random_tokens(12, 40, 96), ProfileOptions("fast"))
    plan, profile = folder / "plan.json", folder / "profile"
    target = ("--target-vram", "64M", "--device", "cpu", "--context", 64)
    done("plan", source, "--profile", profile, *target, "-o", plan)
    done("convert", source, "--plan", plan, "--profile", profile, "-o", folder / "packed")
    return folder / "packed"


def greedy(engine: Engine) -> list[int]:
    engine.decoder.reset()
    return list(generate(engine.decoder, token_ids()[:30], Sampler(SamplingOptions(temperature=0)), 20, frozenset()))


def assert_runs_within_budgets(folder: Path) -> None:
    """The least budget gives the text of a run with all experts, whatever predicts them."""
    with Pack(folder) as opened:
        with Engine(opened, EngineOptions(read="map", kernels="torch"), NUM_POSITIONS) as engine:
            expected = greedy(engine)
        budget = least_budget(opened.layout, NUM_POSITIONS, routing_bytes(folder))
        policies: tuple[PolicyName, ...] = ("lru", "fiddler", "corm", "edgemoe", "importance", "floe", "auto")
        for policy in policies:
            options = EngineOptions(budget_bytes=budget, policy=policy)
            with case(folder.parent.name, policy), Engine(opened, options, NUM_POSITIONS) as engine:
                assert greedy(engine) == greedy(engine) == expected
                assert isinstance(engine.decoder, Decoder) and engine.plan is not None
                assert engine.plan.fixed.cache == engine.decoder.cache.num_bytes and engine.plan.left >= 0


@pytest.mark.slow
def test_a_hybrid_model_runs_within_its_least_budget(tmp_path: Path) -> None:
    for family in FAMILIES[:1]:
        assert_runs_within_budgets(converted(family, tmp_path / family))


@pytest.mark.slow
def test_every_such_family_runs_within_its_least_budget(tmp_path: Path) -> None:
    for family in (*FAMILIES[1:], *RESIDUALS):
        assert_runs_within_budgets(converted(family, tmp_path / family))


def test_commands_count_states(tmp_path: Path) -> None:
    source = write(Tiny("qwen3_next", "as it comes"), tmp_path / "source")
    done("synth", source / "config.json", "-o", tmp_path / "synthetic")
    printed = run("inspect", tmp_path / "synthetic").output
    # One layer of four with two heads of 32 as keys and values; three with 160 channels and four states of 16 by 24.
    assert "512 bytes of KV cache a token and 24,192 bytes of states (float32)" in printed
    assert 4 * 3 * (3 * 160 + 4 * 16 * 24) == 24_192


def test_gradients_of_a_mixer_are_those_of_differences(tmp_path: Path) -> None:
    from moe_pack.runtime.model.caches import LayerState
    from moe_pack.runtime.model.compute.recurrence import recur

    torch.manual_seed(0)
    for log_decay in [-torch.rand(20, 2), -torch.rand(20, 2, 4)]:
        given = [torch.randn(20, 1, 4), torch.randn(20, 1, 4) / 2, torch.randn(20, 2, 3), log_decay, torch.rand(20, 2)]

        def read(*inputs: torch.Tensor) -> torch.Tensor:
            return recur(*inputs, LayerState(torch.zeros(0), torch.ones(2, 4, 3))).sum()

        inputs = [each.clone().requires_grad_() for each in given]
        gradients = torch.autograd.grad(read(*inputs), inputs)
        for place, gradient in enumerate(gradients):
            step = torch.zeros_like(given[place])
            step.view(-1)[7] = 1e-2
            further, nearer = ([*given[:place], given[place] + sign * step, *given[place + 1 :]] for sign in (1, -1))
            difference = float(read(*further) - read(*nearer)) / 2e-2
            assert float(gradient.reshape(-1)[7]) == pytest.approx(difference, rel=2e-2, abs=2e-3)
