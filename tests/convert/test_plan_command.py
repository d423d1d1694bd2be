"""`moe-pack plan`: what it prints, what it writes, and that the parts it names are what the runtime allocates."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.cases import case
from support.commands import moe_pack as run
from support.losses import random_losses
from support.models import DEMO_MODEL, TinyMixtral
from support.published import CONFIGS, PUBLISHED

from moe_pack.calib.profile import Profile
from moe_pack.convert.plan import PlanningModel, Target, check_budget, kv_text, planner_for, read_plan, with_kv_dtype
from moe_pack.convert.plan.planned import two_digits
from moe_pack.formats import Pack, RunError, UsageError, dense_roles, part_format, size_text, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import GpuHere
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import divide_budget, expert_pages, least_budget, whole_bytes
from moe_pack.runtime.offload.budgets import cache_bytes

GIB, MIB = 1 << 30, 1 << 20
NAME = "granite-3.0-1b-a400m"
BUDGET = "5400000"  # bytes in which the experts of `source` take turns
NAMES = [model.name for model in PUBLISHED]


@pytest.fixture(autouse=True)
def _no_card_and_nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "gpu_here", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a published model cut to two layers, so that plans are made in a second."""
    values = json.loads((CONFIGS / f"{NAME}.json").read_text()) | {"num_hidden_layers": 2}
    path = tmp_path_factory.mktemp("small") / "small.json"
    path.write_text(json.dumps(values))
    return path


def profiled(source: Path, folder: Path) -> Path:
    done = run("profile", source, "-o", folder, "--tokens", 256, "--sequence-length", 32)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that has the demo model's tokenizer."""
    shape = TinyMixtral(num_layers=2, num_experts=6, intermediate_size=96, vocab_size=4096)
    return shape.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiled(source, tmp_path_factory.mktemp("profiled") / "profile")


def planned(*arguments: object) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fault(*arguments: object) -> str:
    done = run("plan", *arguments)
    assert done.exit_code != 0
    return done.output.strip().splitlines()[-1]


FEW = ["demo", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "switch-base-16"]


@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_the_parts_sum_to_the_target_from_just_enough_to_all_in_memory(names: list[str]) -> None:
    """Thirty budgets on the CPU, of many models twelve, 4 bits; test_gpu_speed has those on a GPU."""
    for name in names:
        with case(name):
            spec = model_spec(str(DEMO_MODEL) if name == "demo" else name)
            part, context = part_format(4, 64), min(4096, spec.max_position_embeddings)
            layout = pack_layout(spec, uniform_plan(spec, "up", part, part), ["BF16"] * len(dense_roles(spec)))
            least, most = least_budget(layout, context, 1 << 20), whole_bytes(layout, context, 1 << 20)
            for target in np.linspace(least, most, 30 if names is FEW else 12).astype(np.int64).tolist():
                plan = divide_budget(layout, target, context, 1 << 20)
                assert plan.fixed.num_bytes + plan.arena + plan.left == target
                assert plan.left >= 0 and plan.num_pages > 0


def test_keys_and_values_of_eight_bits_are_planned_where_those_of_float32_fit_in_no_pack() -> None:
    spec = model_spec(str(DEMO_MODEL))
    dtypes, context = ("BF16",) * len(dense_roles(spec)), min(4096, spec.max_position_embeddings)

    def is_refused(budget: int, kv_dtype: KvDtype | None) -> bool:
        try:
            check_budget(Target(budget, "cpu", kv_dtype=kv_dtype), spec, dtypes)
        except RunError:
            return True
        return False

    budgets = range(MIB, 64 * MIB, MIB // 4)
    least = {dtype: next(each for each in budgets if not is_refused(each, dtype)) for dtype in (None, "q8")}
    assert least["q8"] < least[None]
    for budget, kv_dtype in ((least["q8"], "q8"), (least[None], None), (least["q8"] - MIB // 4, None)):
        with case(budget):
            target = with_kv_dtype(Target(budget, "cpu"), spec, dtypes)
            assert target.kv_dtype == kv_dtype
            assert (kv_text(target) or "").endswith("give moe-run --kv-dtype q8 too" if kv_dtype else "")
    asked = Target(least["q8"], "cpu", kv_dtype="f32")
    assert with_kv_dtype(asked, spec, dtypes) == asked, "what is asked for stays"
    target, model = Target(GIB, "cpu", kv_dtype="q8"), PlanningModel(spec, dtypes, random_losses(spec))
    planned = planner_for(target, model, None, None).plan(10.0)
    shares = {share.name: share.num_bytes for share in planned.speed.shares}
    assert shares["key-value cache"] == cache_bytes(spec, context, 16, "q8")
    with pytest.raises(UsageError, match="--kv-dtype needs --device cpu; remove it or add --device cpu"):
        Target(GIB, "cuda", kv_dtype="q8").check()


def test_a_plan_without_a_profile_says_that_its_losses_are_assumed(small: Path) -> None:
    done = run("plan", small, "--target-vram", "256M", "--device", "cpu")
    assert done.exit_code == 0, done.output
    stages = [line.split(" done in ")[0] for line in done.stderr.splitlines()]
    assert stages == ["planning: 11 plans", "planning:"] * 3  # for the given loss and two others
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{small}: granitemoe, 2 layers of 32 experts, ")
    assert lines[1].startswith("losses assumed: the losses of another model, ") and "routes drawn evenly" in lines[1]
    assert "by default --max-loss 1%: of perplexity" in lines
    named = ("asked: 1% of perplexity", "a quarter of the loss", "four times the loss")
    found = [re.search(rf"^{name} +[\d.]+ +\+([\d.]+)% ", done.output, re.MULTILINE) for name in named]
    growth = [float(one[1]) for one in found if one is not None]
    assert len(growth) == 3 and growth[0] <= 1 and growth[1] <= 0.25 and growth[2] <= 4
    assert re.search(r"^total +268,435,456  100.0%$", done.output, re.MULTILINE)


def test_a_loss_asked_for_is_kept_by_all_three_plans_and_more_loss_is_no_slower(small: Path) -> None:
    found = planned(small, "--target-vram", "256M", "--device", "cpu", "--max-loss", "0.02")
    asked, quarter, fourfold = found["plans"]
    assert (asked["kl"] <= 0.02, quarter["kl"] <= 0.005, fourfold["kl"] <= 0.08) == (True, True, True)
    assert quarter["tokens_per_second"] <= asked["tokens_per_second"] <= fourfold["tokens_per_second"]
    assert found["is_assumed"] and found["defaults"][0].startswith("--context 4096")
    assert all(sum(plan["memory_bytes"].values()) == GIB // 4 == found["target_bytes"] for plan in found["plans"])


def test_a_card_is_planned_for_in_all_its_parts_and_is_said_to_be_an_estimate(small: Path) -> None:
    done = run("plan", small, "--target-vram", "768M", "--gpu", "L4", "--ram", "4G", "--selector", "up")
    assert done.exit_code == 0, done.output
    for part in ("overhead", "static rows", "slots", "tables of rows", "left over"):
        assert re.search(rf"^{part} +[\d,]+ +[\d.]+%$", done.output, re.MULTILINE), part
    assert "measured speeds on an H200 were 0.36 to 0.62 times the estimate" in done.output


@pytest.mark.slow
def test_floes_pack_says_its_compression_as_the_paper_counts_and_as_stored() -> None:
    done = run("plan", "mixtral-8x7b", "--target-vram", "11G", "--gpu", "RTX 3060 12G", "--preset", "floe")
    assert done.exit_code == 0, done.output
    assert "9.2 times fewer bytes than its 16-bit weights have if only codes count, 8.4 times fewer as" in done.output
    assert "100.0%  bf16 / 2 bit g64 / bf16" in done.output


def test_a_paper_whose_loss_nobody_knows_has_none(small: Path) -> None:
    asked = (small, "--target-vram", "256M", "--device", "cpu", "--preset", "corm")
    assert [plan["kl"] for plan in planned(*asked)["plans"]] == [None]
    assert re.search(r"^preset corm +unknown +unknown ", run("plan", *asked).output, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "target", "gpu"),
    [("deepseek-moe-16b", 12, "RTX 3060 12G"), ("xverse-moe-a4.2b", 16, "RTX 4060 Ti 16G")],
)
def test_corms_pack_is_planned_at_true_dimensions_for_the_cards_of_papers(name: str, target: int, gpu: str) -> None:
    """Settings S1 and S2 of Importance-Driven Expert Scheduling, Table 1; CORM has the first model too."""
    found = planned(name, "--target-vram", f"{target}G", "--gpu", gpu, "--ram", "64G", "--preset", "corm")
    (plan,) = found["plans"]
    assert sum(plan["memory_bytes"].values()) == found["target_bytes"] == target * GIB
    spec = model_spec(name)
    weights = len(spec.moe_layers) * 64 * 3 * spec.expert.intermediate_size * spec.hidden_size
    assert 3.5 * weights / 8 < plan["pack_bytes"] - plan["memory_bytes"]["dense weights"] < 3.8 * weights / 8


@pytest.mark.slow
def test_the_model_of_edgemoes_phone_is_planned_in_edgemoes_widths() -> None:
    (plan,) = planned("minicpm-moe-8x2b", "--target-vram", "8G", "--device", "cpu", "--preset", "edgemoe")["plans"]
    assert sum(plan["memory_bytes"].values()) == 8 * GIB
    assert plan["kl"] is not None and 2 <= plan["bits_per_weight"] <= 8.1


@pytest.mark.slow
def test_the_memory_a_plan_names_is_what_moe_run_allocates(source: Path, profile: Path, tmp_path: Path) -> None:
    """A budget in which experts take turns: part by part to the byte, and as --stats prints them."""
    plan, packed, budget = tmp_path / "plan.json", tmp_path / "packed", BUDGET
    asked = ("--target-vram", budget, "--context", 64, "--device", "cpu", "--max-loss", "0.5", "--profile", profile)
    memory = planned(source, *asked, "-o", plan)["plans"][0]["memory_bytes"]
    made = run("convert", source, "--plan", plan, "--profile", profile, "-o", packed, "--workers", 1)
    assert made.exit_code == 0, made.output
    with Pack(packed) as pack, Engine(pack, EngineOptions(budget_bytes=int(BUDGET)), 64) as engine:
        found = engine.plan
        assert found is not None and found.num_pages < expert_pages(pack.layout, found.page_bytes).sum()
        assert memory == {
            "dense weights": found.fixed.dense,
            "key-value cache": found.fixed.cache,
            "workspace": found.fixed.workspace,
            "predictors": found.fixed.predictors,
            "resident selectors": found.selectors,
            "pages of experts": found.arena,
            "left over": found.left,
        }
    done = CliRunner().invoke(
        moe_run, [str(packed), "--prompt", "a", "--max-tokens", "62", "--budget", budget, "--stats"]
    )
    assert done.exit_code == 0, done.output
    for line, part in (("dense weights", "dense weights"), ("for experts", "pages of experts")):
        assert re.search(rf"^{line} +{re.escape(size_text(memory[part]))}", done.output, re.MULTILINE), done.output


@pytest.mark.slow
def test_a_profile_with_inputs_gives_plans_of_calibrated_formats(source: Path, profile: Path) -> None:
    memory = "5600000"  # enough for a quarter of the loss too
    asked = ("--target-vram", memory, "--context", 64, "--device", "cpu", "--max-loss", "0.5", "--profile", profile)
    plans = planned(source, *asked)["plans"]
    assert [plan["quantizer"] for plan in plans] == ["calibrated"] * 3
    done = run("plan", source, *asked)
    assert "experts by gate / up / down, quantizer calibrated:" in done.output
    assert re.search(r"^ *[\d.]+%  [\d.]+ bit trellis (row|g32|g128)", done.output, re.MULTILINE)


def test_figures_of_a_plan_have_the_digits_that_they_deserve(small: Path) -> None:
    """Two digits, and speed as the range in which measured speeds were, as the line below the table says."""
    for device, least, most in (("cpu", 1 / 1.42, 1 / 0.69), ("cuda", 1 / 2.8, 1 / 1.6)):
        with case(device):
            asked = (small, "--target-vram", "768M", "--device", device, "--preset", "edgemoe")
            (plan,) = planned(*asked)["plans"]
            low, high = plan["tokens_per_second_range"]
            assert (low, high) == pytest.approx((least * plan["tokens_per_second"], most * plan["tokens_per_second"]))
            printed = run("plan", *asked).stdout
            (line,) = (line for line in printed.splitlines() if line.startswith("preset edgemoe"))
            figures = re.search(r"([\d.,]+) to ([\d.,]+)$", line)
            assert figures is not None
            for text, value in zip(figures.groups(), (low, high), strict=True):
                assert len(text.replace(".", "").replace(",", "").strip("0")) <= 2
                assert float(text.replace(",", "")) == pytest.approx(value, rel=0.051)
            assert re.search(rf"^tokens/s: .*{least:.2g} to {most:.2g} times the estimate", printed, re.MULTILINE)


def test_estimates_are_rounded_to_two_digits() -> None:
    for value, text in ((117.57, "120"), (0.01493, "0.015"), (4.1, "4.1"), (1234.0, "1,200"), (0.0, "0")):
        assert two_digits(value) == text


def test_a_plan_says_which_device_auto_is(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "--target-vram is this machine's memory"
    for gpu, options, device, line in (
        (None, (), "cpu", f"device: cpu (no GPU found; --gpu NAME plans for one): {here}"),
        (GpuHere("NVIDIA L4", 24 * GIB), (), "cuda", "device: cuda (NVIDIA L4)"),
        (None, ("--device", "cpu"), "cpu", ""),
    ):
        with case(gpu, options):
            monkeypatch.setattr(machine, "gpu_here", lambda gpu=gpu: gpu)
            done = run("plan", small, "--target-vram", "768M", "--preset", "edgemoe", "--json", *options)
            assert json.loads(done.stdout)["device"] == device
            assert done.stderr.strip() == line


def test_a_plan_file_holds_the_first_plan(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = planned(small, "--target-vram", "256M", "--device", "cpu", "-o", path)["plans"][0]
    spec = model_spec(str(small))
    plan = read_plan(path, spec).plan
    layout = pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec)))
    assert (plan.selector, sum(file.num_bytes for _, file in layout.files())) == (
        found["selector"],
        found["pack_bytes"],
    )


@pytest.mark.slow
def test_for_vllm_a_layer_has_one_format_and_all_of_its_neurons_run(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    """Without that, plans take formats of their own for each matrix, and calibrated ones rows that are stored twice."""
    usual, path = tmp_path / "usual.json", tmp_path / "vllm.json"
    for options, out in (((), usual), (("--for", "vllm"), path)):
        done = run("plan", source, "--profile", profile, "--target-vram", "24M", "--device", "cpu", *options, "-o", out)
        assert done.exit_code == 0, done.output
        assert ("the loss here is the pack's" in done.output) == bool(options)
    spec = Profile(profile).spec
    decision = read_plan(path, spec)
    assert not decision.plan.repeats and not decision.sparsity.any()
    for layer in decision.plan.experts:
        (expert,) = set(layer)
        assert expert.gate == expert.up == expert.down and expert.up.width in (4, 8) and expert.up.group == 32
    assert read_plan(usual, spec).plan.experts != decision.plan.experts


def test_wrong_options_are_refused(small: Path) -> None:
    cases = [
        ([], "Error: --target-vram is missing; give the memory to plan for, such as --target-vram 11G"),
        (["--target-vram", "1G", "--sparsity", "0.5"],
         "Error: --sparsity needs --preset floe, because other plans decide it; remove --sparsity"),
        (["--target-vram", "1G", "--preset", "floe", "--selector", "up"],
         "Error: --selector: preset floe decides it; remove --selector"),
        (["--target-vram", "1G", "--preset", "floe", "--for", "vllm"],
         "Error: --preset does not apply to --for vllm, which restricts the search; remove one of the two"),
        (["--target-vram", "1G", "--search", "uniform", "--for", "vllm"],
         "Error: --search does not apply to --for vllm, which restricts the search; remove one of the two"),
        (["--target-vram", "13G", "--gpu", "RTX 3060 12G"],
         "moe-pack: --target-vram: found 13.0 GiB, RTX 3060 12G has 12.0 GiB; give less, or another GPU with --gpu"),
        (["--target-vram", "1G", "--context", "1000000"],
         "moe-pack: --context: found 1000000, this model takes at most 4096 tokens"),
        (["--target-vram", "1G", "-o", "/proc/none/plan.json"],
         "moe-pack: --output /proc/none/plan.json: cannot be written (No such file or directory); give another file"),
    ]  # fmt: skip
    for arguments, message in cases:
        with case(arguments, message):
            assert fault(small, *arguments) == message


def test_a_profile_of_another_model_is_refused(profile: Path) -> None:
    assert fault(NAME, "--target-vram", "1G", "--profile", profile).endswith(
        f"--profile {profile}: is a profile of another model; give a profile of {NAME}"
    )


def test_an_unknown_model_gets_similar_names() -> None:
    assert fault("mixtrall", "--target-vram", "1G") == (
        "moe-pack: mixtrall: no such file or folder, and no known model has this name; did you mean mixtral-8x7b? "
        "moe-pack synth --list prints all names"
    )


def test_too_small_a_memory_says_the_least_that_would_do(small: Path) -> None:
    message = fault(small, "--target-vram", "32M", "--device", "cpu")
    assert "--target-vram: 32.0 MiB is too small; " in message and message.endswith("or a shorter --context")
