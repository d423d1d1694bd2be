"""A target's defaults, device and planner; convert --target-vram on a tiny random model: what it makes and refuses."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.cases import case
from support.commands import moe_pack as run
from support.losses import random_losses
from support.models import BOOK, TinyMixtral

from moe_pack.calib.profile import Profile, losses_of
from moe_pack.convert import plan
from moe_pack.convert.autopack import MAX_ATTEMPTS, Attempt, best_of, next_nats, work_folder
from moe_pack.convert.plan.machines import assumed_cpu
from moe_pack.convert.plan.options import Device, LossLimit, read_limit
from moe_pack.convert.plan.planned import two_digits
from moe_pack.convert.plan.target import context_of
from moe_pack.formats import ModelSpec, Pack, RunError, dense_roles
from moe_pack.formats.base.cli import options_from
from moe_pack.formats.families import model_spec
from moe_pack.runtime import FixedCosts, MachineFacts, WidthRate, total_bytes
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import CpuFacts, GpuHere, LinkFacts, SizedRate
from moe_pack.runtime.offload import divide_budget, routing_bytes

GIB = 1 << 30
SPEC = model_spec("granite-3.0-1b-a400m", 2)
AUTO, CPU, CARD = plan.Target(GIB), plan.Target(GIB, "cpu"), plan.Target(GIB, "cuda")
DTYPES = ("BF16",) * len(dense_roles(SPEC))


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: None)


def facts(link: LinkFacts | None = None) -> MachineFacts:
    """Returns the facts of a machine with only disk and link measured."""
    return MachineFacts("2026-01-01", assumed_cpu().disk, CpuFacts(2, None, None, None, (), (), None), link)


@dataclass(frozen=True)
class Asked:
    """The options of a command that has no others."""

    target: plan.Target | None = None


def asked(*arguments: str) -> plan.Target | str | None:
    """Returns the target of the options, or the last line of the error."""
    found: list[plan.Target | None] = []

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
    assert read_limit(text) == limit
    assert limit.nats(0.5) == pytest.approx(nats, abs=1e-4)
    assert read_limit(limit.text().split()[0]) == limit


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
    assert asked("--target-vram", "1G", "--gpu", "L4", "--link", "2G", "--ram", "3G", "--context", "8") == plan.Target(
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
    hybrid = replace(SPEC, router=replace(SPEC.router, table_layers=(0,)))
    cases: list[tuple[GpuHere | None, plan.Target, ModelSpec, str]] = [
        (rtx, AUTO, SPEC, "device: cuda (NVIDIA GeForce RTX 3090)"),
        (None, AUTO, SPEC, f"device: cpu (no GPU found; --gpu NAME plans for one): {here}"),
        (old, AUTO, SPEC, f"device: cpu (Tesla T4 is too old): {here}"),
        (rtx, AUTO, hybrid, f"device: cpu (models with a table from tokens to experts do not run on GPUs): {here}"),
        (rtx, of_cpu, SPEC, f"device: cpu (--kv-dtype needs it): {here}"),
        (
            rtx,
            plan.Target(25 * GIB),
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
            assert plan.choose_target_device(target, spec, DTYPES) == (replace(target, device=device), line)
    for given in (CPU, CARD):
        assert plan.choose_target_device(given, SPEC, DTYPES) == (given, None), (
            "what is given stays, and nothing is said"
        )


def test_a_memory_too_small_for_the_gpu_is_planned_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: GpuHere("NVIDIA GeForce RTX 3090", 24 * GIB))
    found = {mib: plan.choose_target_device(plan.Target(mib << 20), SPEC, DTYPES) for mib in range(256, 1025, 32)}
    devices = [target.device for target, _ in found.values()]
    least = devices.index("cuda")
    assert least > 0 and devices == ["cpu"] * least + ["cuda"] * (len(devices) - least)
    for mib, (target, line) in found.items():
        with case(mib):
            assert ("(a GPU needs" in str(line)) == (target.device == "cpu")
            if target.device == "cuda":
                plan.check_budget(target, SPEC, DTYPES)
            else:
                with pytest.raises(RunError, match=r"^--target-vram: \S+ MiB is too small; "):
                    plan.check_budget(replace(target, device="cuda"), SPEC, DTYPES)


def test_a_gpu_that_is_here_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: GpuHere("NVIDIA GeForce RTX 3090", 24 * GIB))
    assert "--gpu NVIDIA GeForce RTX 3090: this machine's" in plan.defaults_text(CARD, SPEC, None)


def test_every_default_is_said_and_nothing_that_was_asked_for() -> None:
    assert plan.defaults_text(CPU, SPEC, None) == [
        "--max-loss 1%: of perplexity",
        "--context 4096: tokens of key-value cache",
        "the CPU: a CPU of 2 cores, assumed; moe-pack doctor measures this machine",
    ]
    assert [line.split()[0] for line in plan.defaults_text(CARD, SPEC, None)] == [
        "--max-loss",
        "--context",
        "the",
        "--gpu",
        "--link",
        "--ram:" if total_bytes() is None else "--ram",
    ]
    whole = plan.Target(GIB, "cuda", LossLimit("kl", 0.1), 16, "L4", 1e9, GIB)
    host = "the CPU: a CPU that computes experts at 60 GB/s, assumed; moe-pack doctor measures this machine"
    assert plan.defaults_text(whole, SPEC, None) == [host]
    measured = CpuFacts(2, None, 1.0, 1.0, (WidthRate(4, 1e9),), (), 0.0)
    found = replace(facts(), cpu=measured, fixed=FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    assert plan.defaults_text(whole, SPEC, found) == []


def test_the_link_is_the_doctors_else_half_of_pcie_4_and_no_more_than_the_slot_has() -> None:
    measured = LinkFacts("a GPU", GIB, (SizedRate(1 << 20, 3.0 * GIB), SizedRate(1 << 24, 5.0 * GIB)))
    assert "--link 5.0G: bytes a second; as measured" in plan.defaults_text(CARD, SPEC, facts(measured))
    unknown = "bytes a second; the link was not measured; moe-pack doctor measures it"
    assert f"--link 14.9G: {unknown}" in plan.defaults_text(replace(CARD, gpu="L4"), SPEC, None)
    assert f"--link 11.7G: {unknown}" in plan.defaults_text(replace(CARD, gpu="RTX 4060 Ti 16G"), SPEC, None)


def test_without_a_card_the_smallest_with_room_is_assumed() -> None:
    cases = [(11, "RTX 3060 12G"), (16, "RTX 4060 Ti 16G"), (80, "A100 80G"), (500, "H200")]
    for size, name in cases:
        with case(size, name):
            lines = plan.defaults_text(plan.Target(size * GIB, "cuda"), SPEC, None)
            assert any(line.startswith(f"--gpu {name}: assumed: ") for line in lines)


def test_a_context_beyond_the_models_is_refused_and_its_longest_is_not() -> None:
    most = SPEC.max_position_embeddings
    assert context_of(replace(CPU, context_tokens=most), SPEC) == most
    with pytest.raises(RunError, match=f"^--context: found {most + 1}, this model takes at most {most} tokens$"):
        context_of(replace(CPU, context_tokens=most + 1), SPEC)


def planned(target: plan.Target, machine: MachineFacts | None = None) -> Any:
    dtypes = ("BF16",) * len(dense_roles(SPEC))
    return plan.planner_for(target, plan.PlanningModel(SPEC, dtypes, random_losses(SPEC)), None, machine).plan(0.05)


@pytest.mark.parametrize("target", [replace(CPU, budget_bytes=GIB // 2), replace(CARD, budget_bytes=GIB)])
def test_the_parts_of_a_plan_sum_to_the_target(target: plan.Target) -> None:
    found = planned(target, facts())
    assert sum(share.num_bytes for share in found.speed.shares) == target.budget_bytes
    assert min(share.num_bytes for share in found.speed.shares) >= 0
    assert found.loss <= 0.05 and np.isfinite(found.speed.seconds.total)


TEXT = ["--eval-data", str(BOOK), "--eval-tokens", "512"]
ON_CPU = ["--target-vram", "16M", "--device", "cpu", "--context", "64"]

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, config={"num_experts_per_tok": 2})
    return shape.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    assert run("profile", str(source), "-o", str(folder), "--tokens", "512", "--sequence-length", "64").exit_code == 0
    return folder


@pytest.fixture(scope="module")
def packed(source: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("target") / "packed"
    result = run(
        "convert", str(source), "-o", str(out), "--profile", str(profile), *ON_CPU, *TEXT, "--max-loss", "0.02"
    )
    assert result.exit_code == 0, result.output
    return out, result


def test_the_pack_keeps_to_the_loss_and_runs_in_the_budget(packed: tuple[Path, Result]) -> None:
    out, result = packed
    quality = json.loads((out / "quality.json").read_text())["content"]
    kl = quality["against"]["kl"]
    assert kl["value"] + kl["half_width"] <= 0.02
    with Pack(out) as pack:
        assert pack.manifest.quantizer == "calibrated"  # the profile keeps inputs
        divide_budget(pack.layout, 16 << 20, 64, routing_bytes(out))
    assert not work_folder(out).exists()
    assert "by default the CPU: a CPU of 2 cores, assumed; moe-pack doctor measures this machine" in result.stderr
    assert f"run it: moe-run {out} --budget 16M" in result.stdout


def test_the_same_command_finds_its_pack(packed: tuple[Path, Result], source: Path, profile: Path) -> None:
    out, _ = packed
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = run("convert", str(source), "-o", str(out), "--profile", str(profile), *ON_CPU, *TEXT, "--max-loss", "0.02")
    assert again.exit_code == 0, again.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    other = run("convert", str(source), "-o", str(out), "--profile", str(profile), *ON_CPU, *TEXT, "--max-loss", "0.03")
    assert other.exit_code == 1
    assert other.stderr.splitlines()[-1] == (
        f"moe-pack: {out}: contains a pack made with other options; give another output folder, or remove this one"
    )


def test_a_papers_pack_is_made_and_measured_whatever_it_loses(source: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    options = ["--profile", str(profile), *ON_CPU, *TEXT, "--preset", "floe"]
    result = run("convert", str(source), "-o", str(out), *options)
    assert result.exit_code == 0, result.output
    with Pack(out) as pack:
        assert pack.manifest.selector == "up"
        assert {e.up.width for layer in pack.index.experts for e in layer} == {2}
        assert {e.down.width for layer in pack.index.experts for e in layer} == {16}
    rule = json.loads((out / "thresholds.json").read_text())["content"]["rule"]
    assert set(map(tuple, rule["planned"])) == {(0.9,) * 4}
    estimates = []
    for sparsity in (0.9, 0.95):
        model = plan.PlanningModel(pack.spec, (), losses_of(Profile(profile)))
        estimates.append(model.loss(plan.preset_decision("floe", model, sparsity)))
    assert f"attempt 1: planned with an estimated loss of {two_digits(estimates[0])} nats\n" in result.stderr
    other = run("convert", str(source), "-o", str(tmp_path / "other"), *options, "--sparsity", "0.95")
    assert math.isnan(estimates[1]) and "attempt 1: planned with no estimate of the loss\n" in other.stderr


@pytest.mark.slow
def test_the_last_line_runs_the_pack_where_it_was_planned_for(
    packed: tuple[Path, Result], source: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a GPU that is not here, for one that is, and for the CPU with and without a GPU here."""
    gpu = GpuHere("NVIDIA GeForce RTX 3060", 12 << 30)
    for_cpu, for_gpu = packed[0], tmp_path / "packed"
    cpu_only = ["--target-vram", "16M", "--context", "64", *TEXT, "--max-loss", "0.02"]
    large = ["--target-vram", "1G", "--gpu", "RTX 3060 12G", "--context", "64", *TEXT, "--max-loss", "0.5"]
    elsewhere = f"run it here, on the CPU: moe-run {for_gpu}; where the GPU is: moe-run {for_gpu} --budget 1G"
    cases: list[tuple[GpuHere | None, Path, list[str], str, str]] = [
        (None, for_gpu, large, "device: cuda (--gpu describes a GPU)", elsewhere),
        (gpu, for_gpu, large, "device: cuda (--gpu describes a GPU)", f"run it: moe-run {for_gpu} --budget 1G"),
        (None, for_cpu, cpu_only, "device: cpu (no GPU found", f"run it: moe-run {for_cpu} --budget 16M"),
        (gpu, for_cpu, cpu_only, "device: cpu (a GPU needs", f"run it: moe-run {for_cpu} --device cpu --budget 16M"),
    ]
    for (
        here,
        out,
        options,
        said,
        line,
    ) in cases:  # the second finds the pack of the first, and the others that of CPU
        with case(here, options):
            monkeypatch.setattr(machine, "gpu_here", lambda here=here: here)
            result = run("convert", str(source), "-o", str(out), "--profile", str(profile), *options)
            assert result.exit_code == 0, result.output
            assert result.stderr.startswith(said)
            assert line in result.stdout.splitlines()


def test_a_memory_too_small_for_a_gpu_that_is_given_is_refused(source: Path, profile: Path, tmp_path: Path) -> None:
    options = ["--profile", str(profile), "--context", "64", "--target-vram", "64M", "--device", "cuda"]
    small = run("convert", str(source), "-o", str(tmp_path / "packed"), *options)
    assert "--target-vram: 64.0 MiB is too small; with a context of 64 tokens this model needs 48" in small.stderr


def test_wrong_targets_end_in_a_line(source: Path, new_folder: Callable[[], Path]) -> None:
    cases = [
        (["--max-loss", "2%"], 2, "--max-loss needs --target-vram; add --target-vram or remove --max-loss"),
        (["--eval-tokens", "512"], 2, "--eval-tokens needs --target-vram or --preset; add one of them"),
        ([*ON_CPU, "--record-bits", "4"], 2, "--target-vram makes a plan, which decides this; remove --record-bits"),
        ([*ON_CPU, "--sparsity", "0.5"], 2, "--target-vram makes a plan, which decides this; remove --sparsity"),
        ([*ON_CPU, "--plan", "plan.json"], 2, "--target-vram makes a plan, which decides this; remove --plan"),
        ([*ON_CPU, "--max-loss", "a bit"], 2, "found 'a bit', expected a share of perplexity such as 1%, or nats"),
        (["--target-vram", "lots"], 2, "found 'lots', expected a size such as 11G"),
        ([*ON_CPU, "--profile", "/nowhere"], 1, "/nowhere: no such folder"),
    ]
    for options, exit_code, says in cases:
        with case(options, exit_code, says):
            tmp_path = new_folder()
            result = run("convert", str(source), "-o", str(tmp_path / "packed"), *options)
            assert result.exit_code == exit_code, result.output
            assert says in result.stderr.splitlines()[-1]
            assert not (tmp_path / "packed").exists()


def test_too_small_a_target_is_refused_before_anything_is_measured(source: Path, tmp_path: Path) -> None:
    options = ["--target-vram", "1M", "--device", "cpu", "--context", "64"]
    result = run("convert", str(source), "-o", str(tmp_path / "packed"), *options)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"moe-pack: --target-vram: 1\.0 MiB is too small; with a context of 64 tokens this model needs \d\.\d MiB, "
        r"whatever the loss; give more memory, or a shorter --context\n",
        result.stderr,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_only_larger_losses_fit_says_what_would_have_to_give(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    least = run(
        "convert", str(source), "-o", str(tmp_path / "p"), "--target-vram", "1M", "--device", "cpu", "--context", "64"
    )
    found = re.search(r"this model needs (\d\.\d) MiB", least.stderr)
    assert found is not None
    target = f"{float(found[1]) + 0.1:.1f}M"
    options = ["--profile", str(profile), "--target-vram", target, "--device", "cpu", "--context", "64"]
    result = run("convert", str(source), "-o", str(tmp_path / "packed"), *options, *TEXT, "--max-loss", "0.000001")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert "a pack within this loss needs" in last and "of any loss" in last and "--max-loss" in last


def attempt(nats: float, measured: float) -> Attempt:
    return Attempt(nats, measured, content_bytes=1)


def played(lost: Callable[[float], float], allowed: float, first: float) -> list[Attempt]:
    """All attempts, where a plan of so many nats loses `lost` of them."""
    attempts: list[Attempt] = []
    while len(attempts) < MAX_ATTEMPTS and (nats := next_nats(attempts, allowed, first)) is not None:
        attempts.append(attempt(nats, lost(nats)))
    return attempts


def test_it_ends_with_a_pack_that_holds_and_uses_most_of_what_is_allowed() -> None:
    for factor in [0.05, 0.3, 0.9, 1.0, 1.1, 2.0, 20.0]:
        for power in [0.7, 1.0, 1.3]:
            with case(factor, power):
                allowed, first = 0.01, 0.01
                attempts = played(lambda nats: factor * allowed * (nats / first) ** power, allowed, first)
                best = best_of(attempts, allowed)
                assert best is not None
                assert len(attempts) < MAX_ATTEMPTS
                assert 0.5 * allowed <= attempts[best].measured <= allowed


def test_a_first_attempt_that_holds_and_uses_nearly_all_is_kept() -> None:
    assert next_nats([attempt(0.02, 0.0095)], 0.01, 0.02) is None


def test_a_pack_that_lost_too_much_is_followed_by_one_planned_with_less_in_proportion() -> None:
    assert next_nats([attempt(0.02, 0.02)], 0.01, 0.02) == pytest.approx(0.02 * 0.95 / 2)


def test_one_that_leaves_much_unused_is_followed_by_one_with_more_below_what_failed() -> None:
    assert next_nats([attempt(0.01, 0.002)], 0.01, 0.01) == pytest.approx(0.04)
    attempts = [attempt(0.03, 0.02), attempt(0.01, 0.005)]
    assert next_nats(attempts, 0.01, 0.03) == pytest.approx((0.01 * 0.03) ** 0.5)


def test_of_those_that_hold_the_one_planned_with_the_most_is_best() -> None:
    attempts = [
        attempt(0.03, 0.02),
        attempt(0.01, 0.005),
        attempt(0.017, 0.009),
        attempt(0.02, 0.011),
    ]
    assert best_of(attempts, 0.01) == 2
    assert best_of(attempts, 0.001) is None


def test_where_less_nats_lose_as_much_it_gives_up_at_the_last_attempt() -> None:
    assert len(played(lambda nats: 0.02, 0.01, 0.02)) == MAX_ATTEMPTS


def test_a_loss_measured_below_zero_asks_for_no_more_than_four_times() -> None:
    assert next_nats([attempt(0.01, -0.001)], 0.01, 0.01) == pytest.approx(0.04)
