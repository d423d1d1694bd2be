"""Experts with clamped neurons and biases, with sinks and windows: from a checkpoint to a pack in a budget."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.families import Tiny, write
from support.models import BOOK, DEMO_MODEL

from moe_pack.convert.cli.main import main
from moe_pack.formats import Pack
from moe_pack.runtime.loaded_model import load

TINY = Tiny("gpt_oss", "vocabulary of the demo's tokenizer", {"vocab_size": 4096, "num_hidden_layers": 2})
TEXT = ["--eval-data", str(BOOK), "--eval-tokens", "256"]
CPU = ["--target-vram", "16M", "--device", "cpu", "--context", "64"]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments, prog_name="moe-pack")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(TINY, tmp_path_factory.mktemp("source"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    run("profile", str(source), "-o", str(folder), "--tokens", "256", "--sequence-length", "64")
    return folder


@pytest.mark.slow
def test_a_pack_for_a_memory_is_made_from_a_profile_and_keeps_its_loss(
    source: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no doctor has been here
    out = tmp_path / "packed"
    run("convert", str(source), "-o", str(out), "--profile", str(profile), *CPU, *TEXT, "--max-loss", "0.02")
    run("verify", str(out), "--against", str(source))
    with Pack(out) as pack:
        assert pack.spec.expert.extra_floats == pack.spec.hidden_size
        assert pack.manifest.totals.extra > 0
    with load(out, "16M", context_tokens=64) as model:
        text = "".join(model.generate("It was a dark night", 20, temperature=0.0))
    assert text
