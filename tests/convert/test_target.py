"""The goal of a plan: limits, printed defaults, devices, GPUs, and options that go together."""

from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from support.cases import case
from support.losses import random_losses

from moe_pack.convert.plan import PlanningModel, Target, check_budget, choose_target_device, defaults_text, planner_for
from moe_pack.convert.plan.machines import assumed_cpu
from moe_pack.convert.plan.options import Device, LossLimit, parse_limit
from moe_pack.convert.plan.target import context_of
from moe_pack.formats import ModelSpec, RunError, dense_roles
from moe_pack.formats.base.cli import options_from
from moe_pack.formats.families import model_spec
from moe_pack.runtime import FixedCosts, MachineFacts, WidthRate, total_bytes
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import CpuFacts, GpuHere, LinkFacts, SizedRate

GIB = 1 << 30
SPEC = model_spec("granite-3.0-1b-a400m", 2)
AUTO, CPU, CARD = Target(GIB), Target(GIB, "cpu"), Target(GIB, "cuda")
DTYPES = ("BF16",) * len(dense_roles(SPEC))


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: None)


def facts(link: LinkFacts | None = None) -> MachineFacts:
    """Of a machine of which only disk and link were measured."""
    return MachineFacts("2026-01-01", assumed_cpu().disk, CpuFacts(2, None, None, None, (), (), None), link)


@dataclass(frozen=True)
class Asked:
    """The options of a command that has no others."""

    target: Target | None = None


def asked(*arguments: str) -> Target | str | None:
    """What the options come to, or the last line of what is wrong with them."""
    found: list[Target | None] = []

    @click.command()
    @options_from(Asked)
    def command(options: Asked) -> None:
        found.append(options.target and options.target)

    done = CliRunner().invoke(command, list(arguments))
    assert (done.exit_code == 2) == (not found), done.output
    return found[0] if found else done.output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "limit", "nats"),
    [
        ("1%", LossLimit("perplexity", 0.01), 0.0199),
        ("0.02", LossLimit("kl", 0.02), 0.02),
        (" 5 %", LossLimit("perplexity", 0.05), 0.0976),
    ],
)
def test_a_limit_is_of_perplexity_or_in_nats(text: str, limit: LossLimit, nats: float) -> None:
    """ln(1.01) / 0.5 and ln(1.05) / 0.5, by hand."""
    found = parse_limit(text)
    assert found == limit
    assert limit.nats(0.5) == pytest.approx(nats, abs=1e-4)
    assert parse_limit(limit.text().split()[0]) == limit


def test_what_is_no_limit_is_refused() -> None:
    for text in ["", "%", "0", "0%", "-1%", "inf", "nan", "nan%", "1 percent"]:
        with case(text):
            assert asked("--target-vram", "1G", "--max-loss", text) == (
                f"Error: Invalid value for '--max-loss': found {text!r}, "
                "expected a share of perplexity such as 1%, or nats such as 0.02"
            )


def test_all_options_become_one_target() -> None:
    assert asked() is None
    assert asked("--target-vram", "1G") == AUTO
    assert asked("--target-vram", "1G", "--device", "cpu") == CPU
    assert asked("--target-vram", "1G", "--gpu", "L4", "--link", "2G", "--ram", "3G", "--context", "8") == Target(
        GIB, context_tokens=8, ram_bytes=3 * GIB, link_rate=2 * GIB, gpu="L4"
    )
    assert asked("--target-vram", "1G", "--device", "cuda", "--preset", "floe") == replace(CARD, preset="floe")


def test_options_that_would_do_nothing_are_usage_errors() -> None:
    cases = [
        (["--ram", "2G"], "--ram needs --target-vram; add --target-vram or remove --ram"),
        (["--max-loss", "1%"], "--max-loss needs --target-vram; add --target-vram or remove --max-loss"),
        (["--target-vram", "1G", "--device", "cpu", "--gpu", "L4"],
         "--gpu needs --device cuda; remove it or add --device cuda"),
        (["--target-vram", "1G", "--device", "cpu", "--ram", "2G"],
         "--ram needs --device cuda; remove it or add --device cuda"),
        (["--target-vram", "1G", "--kv-dtype", "q8", "--gpu", "L4"],
         "--gpu is for GPUs and --kv-dtype for the CPU; remove one of the two"),
        (["--target-vram", "1G", "--preset", "corm", "--search", "uniform"],
         "--search does not apply to --preset corm; remove one of the two"),
    ]  # fmt: skip
    for arguments, fault in cases:
        with case(arguments, fault):
            assert asked(*arguments) == f"Error: {fault}"


def test_the_device_of_a_plan_is_that_of_a_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of this machine if it runs the model in so much memory, else the CPU; a line says which, and why."""
    rtx, old = GpuHere("NVIDIA GeForce RTX 3090", 24 * GIB), GpuHere("Tesla T4", 15 * GIB, "Tesla T4 is too old")
    here, of_cpu = "--target-vram is this machine's memory", replace(AUTO, kv_dtype="q8")
    hybrid = replace(SPEC, logits_softcap=30.0)
    cases: list[tuple[GpuHere | None, Target, ModelSpec, str]] = [
        (rtx, AUTO, SPEC, "device: cuda (NVIDIA GeForce RTX 3090)"),
        (None, AUTO, SPEC, f"device: cpu (no GPU found; --gpu NAME plans for one): {here}"),
        (old, AUTO, SPEC, f"device: cpu (Tesla T4 is too old): {here}"),
        (rtx, AUTO, hybrid, f"device: cpu (models with a softcap of logits do not run on GPUs): {here}"),
        (rtx, of_cpu, SPEC, f"device: cpu (--kv-dtype needs it): {here}"),
        (
            rtx,
            Target(25 * GIB),
            SPEC,
            f"device: cpu (--target-vram is 25.0 GiB, NVIDIA GeForce RTX 3090 has 24.0 GiB): {here}",
        ),
        (None, replace(AUTO, gpu="L4"), SPEC, "device: cuda (--gpu describes a GPU)"),
        (None, replace(AUTO, link_rate=1e9), SPEC, "device: cuda (--link describes a GPU)"),
        (None, replace(AUTO, ram_bytes=GIB), SPEC, "device: cuda (--ram describes a GPU)"),
    ]
    for gpu, target, spec, line in cases:
        with case(gpu, target, line):
            monkeypatch.setattr(machine, "gpu_here", lambda gpu=gpu: gpu)
            device: Device = "cuda" if "cuda" in line else "cpu"
            assert choose_target_device(target, spec, DTYPES) == (replace(target, device=device), line)
    for given in (CPU, CARD):
        assert choose_target_device(given, SPEC, DTYPES) == (given, None), "what is given stays, and nothing is said"


def test_a_memory_too_small_for_the_gpu_is_planned_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: GpuHere("NVIDIA GeForce RTX 3090", 24 * GIB))
    found = {mib: choose_target_device(Target(mib << 20), SPEC, DTYPES) for mib in range(256, 1025, 32)}
    devices = [target.device for target, _ in found.values()]
    least = devices.index("cuda")
    assert least > 0 and devices == ["cpu"] * least + ["cuda"] * (len(devices) - least)
    for mib, (target, line) in found.items():
        with case(mib):
            assert ("(a GPU needs" in str(line)) == (target.device == "cpu")
            if target.device == "cuda":
                check_budget(target, SPEC, DTYPES)
            else:
                with pytest.raises(RunError, match=r"^--target-vram: \S+ MiB is too small; "):
                    check_budget(replace(target, device="cuda"), SPEC, DTYPES)


def test_a_gpu_that_is_here_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: GpuHere("NVIDIA GeForce RTX 3090", 24 * GIB))
    assert "--gpu NVIDIA GeForce RTX 3090: this machine's" in defaults_text(CARD, SPEC, None)


def test_every_default_is_said_and_nothing_that_was_asked_for() -> None:
    assert defaults_text(CPU, SPEC, None) == [
        "--max-loss 1%: of perplexity",
        "--context 4096: tokens of key-value cache",
        "the CPU: a CPU of 2 cores, assumed; moe-pack doctor measures this machine",
    ]
    assert [line.split()[0] for line in defaults_text(CARD, SPEC, None)] == [
        "--max-loss",
        "--context",
        "the",
        "--gpu",
        "--link",
        "--ram:" if total_bytes() is None else "--ram",
    ]
    whole = Target(GIB, "cuda", LossLimit("kl", 0.1), 16, "L4", 1e9, GIB)
    host = "the CPU: a CPU that computes experts at 60 GB/s, assumed; moe-pack doctor measures this machine"
    assert defaults_text(whole, SPEC, None) == [host]
    measured = CpuFacts(2, None, 1.0, 1.0, (WidthRate(4, 1e9),), (), 0.0)
    found = replace(facts(), cpu=measured, fixed=FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    assert defaults_text(whole, SPEC, found) == []


def test_the_link_is_the_doctors_else_half_of_pcie_4_and_no_more_than_the_slot_has() -> None:
    measured = LinkFacts("a GPU", GIB, (SizedRate(1 << 20, 3.0 * GIB), SizedRate(1 << 24, 5.0 * GIB)))
    assert "--link 5.0G: bytes a second; as measured" in defaults_text(CARD, SPEC, facts(measured))
    unknown = "bytes a second; the link was not measured; moe-pack doctor measures it"
    assert f"--link 14.9G: {unknown}" in defaults_text(replace(CARD, gpu="L4"), SPEC, None)
    assert f"--link 11.7G: {unknown}" in defaults_text(replace(CARD, gpu="RTX 4060 Ti 16G"), SPEC, None)


def test_without_a_card_the_smallest_with_room_is_assumed() -> None:
    cases = [(11, "RTX 3060 12G"), (16, "RTX 4060 Ti 16G"), (80, "A100 80G"), (500, "H200")]
    for size, name in cases:
        with case(size, name):
            lines = defaults_text(Target(size * GIB, "cuda"), SPEC, None)
            assert any(line.startswith(f"--gpu {name}: assumed: ") for line in lines)


def test_a_context_beyond_the_models_is_refused_and_its_longest_is_not() -> None:
    most = SPEC.max_position_embeddings
    assert context_of(replace(CPU, context_tokens=most), SPEC) == most
    with pytest.raises(RunError, match=f"^--context: found {most + 1}, this model takes at most {most} tokens$"):
        context_of(replace(CPU, context_tokens=most + 1), SPEC)


def planned(target: Target, machine: MachineFacts | None = None) -> Any:
    dtypes = ("BF16",) * len(dense_roles(SPEC))
    return planner_for(target, PlanningModel(SPEC, dtypes, random_losses(SPEC)), None, machine).plan(0.05)


@pytest.mark.parametrize("target", [replace(CPU, budget_bytes=GIB // 2), replace(CARD, budget_bytes=GIB)])
def test_the_parts_of_a_plan_sum_to_the_target(target: Target) -> None:
    found = planned(target, facts())
    assert sum(share.num_bytes for share in found.speed.shares) == target.budget_bytes
    assert min(share.num_bytes for share in found.speed.shares) >= 0
    assert found.loss <= 0.05 and np.isfinite(found.speed.seconds.total)
