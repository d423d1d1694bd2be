"""Plans, synthetic packs and verification of models with an encoder, by the commands."""

import json
from pathlib import Path

import pytest
from support.commands import done
from support.commands import moe_pack as run
from support.families import Tiny, config_of, write
from support.models import pack

from moe_pack.convert import compare_logits
from moe_pack.formats import Pack
from moe_pack.formats.families import Checkpoint

TINY = Tiny("switch_transformers", "as it comes")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("config")
    config_of(TINY).save_pretrained(folder)
    return str(folder / "config.json")


def test_a_plan_for_a_gpu_is_refused(config: str) -> None:
    result = run("plan", config, "--target-vram", "11G", "--device", "cuda")
    assert result.exit_code == 1
    assert "--device cuda: models with an encoder do not run on GPUs; give --device cpu" in result.stderr


def test_edgemoe_plans_for_the_cpu(config: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    arguments = ("--target-vram", "1G", "--device", "cpu", "--preset", "edgemoe", "-o", str(plan))
    result = done("plan", config, *arguments)
    assert "tokens/s count encoder and decoder for every token" in result.output
    assert json.loads(plan.read_text())


def test_a_synthetic_pack_is_made(config: str, tmp_path: Path) -> None:
    done("synth", config, "-o", tmp_path / "synthetic")
    with Pack(tmp_path / "synthetic") as opened:
        assert opened.spec.encoder is not None and opened.spec.moe_layers == (1, 3, 5)


def test_a_16_bit_pack_has_the_source_s_logits(tmp_path: Path) -> None:
    pack(write(TINY, tmp_path / "source"), tmp_path / "packed", width=16)
    checkpoint = Checkpoint(tmp_path / "source")
    with Pack(tmp_path / "packed") as opened:
        found = compare_logits(opened, checkpoint, [(7 * i + 3) % 96 for i in range(60)])
    checkpoint.close()
    assert (found.num_tokens, found.agreement) == (60, 1.0)
    assert found.largest < 1e-4
