"""`moe-pack convert --target-vram`, in-process, on a tiny random model: what it makes, says, and refuses."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from support.cases import case
from support.commands import moe_pack as run
from support.models import BOOK, TinyMixtral

from moe_pack.calib.profile import Profile, losses_of
from moe_pack.convert.autopack import work_folder
from moe_pack.convert.plan import PlanningModel, preset_decision
from moe_pack.convert.plan.planned import two_digits
from moe_pack.formats import Pack
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import GpuHere
from moe_pack.runtime.offload import divide_budget, routing_bytes

TEXT = ["--eval-data", str(BOOK), "--eval-tokens", "512"]
CPU = ["--target-vram", "16M", "--device", "cpu", "--context", "64"]

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
    result = run("convert", str(source), "-o", str(out), "--profile", str(profile), *CPU, *TEXT, "--max-loss", "0.02")
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
    again = run("convert", str(source), "-o", str(out), "--profile", str(profile), *CPU, *TEXT, "--max-loss", "0.02")
    assert again.exit_code == 0, again.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    other = run("convert", str(source), "-o", str(out), "--profile", str(profile), *CPU, *TEXT, "--max-loss", "0.03")
    assert other.exit_code == 1
    assert other.stderr.splitlines()[-1] == (
        f"moe-pack: {out}: contains a pack made with other options; give another output folder, or remove this one"
    )


def test_a_papers_pack_is_made_and_measured_whatever_it_loses(source: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    options = ["--profile", str(profile), *CPU, *TEXT, "--preset", "floe"]
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
        model = PlanningModel(pack.spec, (), losses_of(Profile(profile)))
        estimates.append(model.loss(preset_decision("floe", model, sparsity)))
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
    for here, out, options, said, line in cases:  # the second finds the pack of the first, and the others that of CPU
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
        ([*CPU, "--record-bits", "4"], 2, "--target-vram makes a plan, which decides this; remove --record-bits"),
        ([*CPU, "--sparsity", "0.5"], 2, "--target-vram makes a plan, which decides this; remove --sparsity"),
        ([*CPU, "--plan", "plan.json"], 2, "--target-vram makes a plan, which decides this; remove --plan"),
        ([*CPU, "--max-loss", "a bit"], 2, "found 'a bit', expected a share of perplexity such as 1%, or nats"),
        (["--target-vram", "lots"], 2, "found 'lots', expected a size such as 11G"),
        ([*CPU, "--profile", "/nowhere"], 1, "/nowhere: no such folder"),
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
