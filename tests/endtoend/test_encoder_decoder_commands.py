"""The commands on a model with an encoder, in-process: profile, plan, convert, measure, run; and to a target."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.commands import moe_pack as run
from support.families import Tiny, write
from support.models import BOOK, with_tokenizer

from moe_pack.formats import Pack
from moe_pack.runtime.cli.main import main as run_main
from moe_pack.runtime.offload import divide_budget, routing_bytes

# The demo model's tokenizer takes a vocabulary of 4,096.
SHAPE = Tiny(
    "switch_transformers",
    "two layers with experts in each stack",
    {"vocab_size": 4096, "num_decoder_layers": 4, "num_sparse_decoder_layers": 2, "expert_capacity": 8},
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]  # every command on one model
MEMORY, CONTEXT = 20 << 20, 64
CPU = ["--target-vram", str(MEMORY), "--device", "cpu", "--context", str(CONTEXT)]
TEXT = ["--tokens", "512", "--sequence-length", "64"]


def done(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(write(SHAPE, tmp_path_factory.mktemp("source")))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    result = done("profile", str(source), "-o", str(folder), *TEXT)
    assert "32" in result.output and "encoder reads" in result.output
    assert "of choices were beyond an expert's capacity of 8 tokens in half a sequence" in result.output
    return folder


@pytest.fixture(scope="module")
def packed(source: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EdgeMoE's pack, by its own plan."""
    folder = tmp_path_factory.mktemp("edgemoe")
    plan, out = folder / "plan.json", folder / "packed"
    done("plan", str(source), "--profile", str(profile), "--preset", "edgemoe", *CPU, "-o", str(plan))
    done("convert", str(source), "--plan", str(plan), "--profile", str(profile), "-o", str(out))
    return out


def test_edgemoes_pack_runs_by_its_policy_in_the_budget(packed: Path) -> None:
    with Pack(packed) as opened:
        divide_budget(opened.layout, MEMORY, CONTEXT, routing_bytes(packed))
    arguments = [str(packed), "--prompt", "Once upon a time", "--policy", "edgemoe", "--budget", str(MEMORY)]
    result = CliRunner().invoke(run_main, [*arguments, "--max-tokens", "8", "--seed", "1"], prog_name="moe-run")
    assert result.exit_code == 0, result.output


def test_its_loss_is_measured_and_its_thresholds_rewritten(packed: Path, source: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(packed, tmp_path / "packed")
    found = json.loads(done("thresholds", str(copied), "--sparsity", "0.7", *TEXT, "--json").stdout)
    assert found["learned"]["overall"] == pytest.approx(0.7, abs=0.05)
    result = done("eval", str(copied), "--against", str(source), "--data", str(BOOK), "--tokens", "512")
    assert "255 tokens predicted, in sequences of 512" in result.output
    assert "KL" in result.output


def test_tasks_are_refused_in_one_line(packed: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n')
    result = run("eval", str(packed), "--tasks", str(tasks))
    assert result.exit_code == 1
    assert "--tasks: a model with an encoder does not continue a prompt" in result.output


def test_a_pack_for_a_target_keeps_to_its_loss_and_fits(source: Path, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    text = ["--eval-data", str(BOOK), "--eval-tokens", "512"]
    done("convert", str(source), "-o", str(out), "--profile", str(profile), *CPU, *text, "--max-loss", "0.05")
    quality = json.loads((out / "quality.json").read_text())["content"]
    assert quality["num_tokens"] == 255
    kl = quality["against"]["kl"]
    assert kl["value"] + kl["half_width"] <= 0.05
    with Pack(out) as opened:
        divide_budget(opened.layout, MEMORY, CONTEXT, routing_bytes(out))
