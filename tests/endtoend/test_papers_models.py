"""CORM's packs and the policies `corm` and `importance` on small shapes of the models that the two papers measured."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.cases import case
from support.families import Tiny, write
from support.models import DEMO_MODEL

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import Pack
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.offload import least_budget, routing_bytes

WORDS = {"vocab_size": 4096}  # of the demo model's tokenizer
# CORM §5: Mixtral 8x7B, DeepSeekMoE 16B. Importance-driven scheduling, Table 1: deepseek-moe-16b, XVERSE-MoE-A4.2B,
# Qwen2-57B-A14B.
SHAPES = (
    Tiny("mixtral", "of CORM", WORDS | {"num_local_experts": 8}),
    Tiny("deepseek", "of both", WORDS | {"n_routed_experts": 16}),
    Tiny("xverse", "of importance", WORDS | {"num_experts": 16}),
    Tiny("qwen2_moe", "of importance", WORDS | {"num_experts": 16}),
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]  # packs are made by profiles and plans
FEW_PAGES = 100_000  # bytes beyond the room for one expert: some stay, most take turns


def done(*arguments: object) -> Result:
    result = CliRunner().invoke(moe_pack, [str(argument) for argument in arguments], prog_name="moe-pack")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(
    scope="module",
    params=SHAPES,
    ids=lambda tiny: tiny.family,
)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile, a plan by --preset corm, and the pack it makes."""
    folder = tmp_path_factory.mktemp(request.param.family)
    source = write(request.param, folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, source / name)
    profile, plan, packed = folder / "profile", folder / "plan.json", folder / "packed"
    done("profile", source, "-o", profile, "--tokens", 256, "--sequence-length", 64)
    target = ("--target-vram", "8M", "--device", "cpu", "--context", 64)
    planned = done("plan", source, *target, "--preset", "corm", "--profile", profile, "-o", plan).output
    assert re.search(r"^preset corm +[\d.]+ +\+[\d.]+% ", planned, re.MULTILINE), planned
    done("convert", source, "--plan", plan, "--profile", profile, "-o", packed, "--workers", 1)
    return packed


def run(packed: Path, *options: object) -> Result:
    asked = ("--prompt", "It was a dark night", "--temperature", 0, "--max-tokens", 24, "--stats", *options)
    result = CliRunner().invoke(moe_run, [str(part) for part in (packed, *asked)], prog_name="moe-run")
    assert result.exit_code == 0, result.output
    return result


def small_budget(packed: Path) -> int:
    with Pack(packed) as pack:
        return least_budget(pack.layout, pack.spec.max_position_embeddings, routing_bytes(packed)) + FEW_PAGES


def hits(result: Result) -> float:
    found = re.search(r"^decode +([\d.]+)% of \d+ experts were resident", result.stderr, re.MULTILINE)
    assert found is not None, result.stderr
    return float(found[1])


def test_the_pack_is_corms(packed: Path) -> None:
    """Gates decide at one threshold; the popular half in INT4, groups of 64, the rest in INT2, groups of 16."""
    with Pack(packed) as pack:
        assert pack.manifest.selector == "gate"
        for layer in pack.index.experts:
            assert {(expert.up.width, expert.up.group) for expert in layer} == {(4, 64), (2, 16)}
            assert 2 * sum(expert.up.width == 4 for expert in layer) == len(layer)
    assert json.loads((packed / "thresholds.json").read_text())["content"]["rule"]["theta"] == 0.25


def test_experts_that_take_turns_say_what_all_in_memory_say(packed: Path) -> None:
    for policy in ["corm", "importance"]:
        with case(policy):
            whole = run(packed)
            few = run(packed, "--policy", policy, "--budget", small_budget(packed))
            assert 0 < hits(few) < 100, "some stay, and some are read again"
            assert re.search(rf"^policy +{policy}, ", few.stderr, re.MULTILINE)
            assert "substituted" not in few.stderr
            assert few.stdout == whole.stdout and len(whole.stdout.strip()) > 24


def test_importance_substitutes_only_where_it_is_told_to(packed: Path) -> None:
    few = run(packed, "--policy", "importance", "--budget", small_budget(packed), "--substitute", 1)
    found = re.search(r"^substituted +(\d+) experts: the answer is not the pack's$", few.stderr, re.MULTILINE)
    assert found is not None and int(found[1]) > 0, few.stderr
