"""From a profile to an answer, with models whose attention and routers other families do not have."""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.families import Tiny, write
from support.models import DEMO_MODEL

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import Pack
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.offload import least_budget, routing_bytes

WORDS = {"vocab_size": 4096}  # of the demo model's tokenizer
FAMILIES = (
    "hunyuan_v1_moe",
    "exaone_moe",
    "mistral4",
    "deepseek_v32",
    "llama4_text",
    "glm_moe_dsa",
    "minimax_m3_vl",
)
FEW_PAGES = 30_000  # bytes beyond the room for one expert: some stay, most take turns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]  # packs are made by profiles and plans


def done(*arguments: object) -> Result:
    result = CliRunner().invoke(moe_pack, [str(argument) for argument in arguments], prog_name="moe-pack")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module", params=FAMILIES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with losses, a plan that takes any widths, and the pack it makes."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write(Tiny(request.param, "with words", WORDS), folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, source / name)
    profile, plan, packed = folder / "profile", folder / "plan.json", folder / "packed"
    done("profile", source, "-o", profile, "--tokens", 256, "--sequence-length", 64)
    done("plan", source, "--target-vram", "8M", "--device", "cpu", "--context", 64, "--profile", profile, "-o", plan)
    done("convert", source, "--plan", plan, "--profile", profile, "-o", packed, "--workers", 1)
    return packed


def run(packed: Path, *options: object) -> Result:
    asked = ("--prompt", "It was a dark night", "--temperature", 0, "--max-tokens", 24, "--stats", *options)
    result = CliRunner().invoke(moe_run, [str(part) for part in (packed, *asked)], prog_name="moe-run")
    assert result.exit_code == 0, result.output
    return result


def hits(text: str) -> str:
    found = re.search(r"^decode +([\d.]+)% of \d+ experts were resident", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


def test_experts_that_take_turns_say_what_all_in_memory_say(packed: Path, tmp_path: Path) -> None:
    """And the recorded run is replayed with the hits that it had."""
    with Pack(packed) as pack:
        budget = least_budget(pack.layout, pack.spec.max_position_embeddings, routing_bytes(packed)) + FEW_PAGES
    record = tmp_path / "record.safetensors"
    whole, few = run(packed), run(packed, "--budget", budget, "--policy", "lru", "--no-prefetch", "--record", record)
    assert few.stderr != whole.stderr and 0 < float(hits(few.stderr)) < 100, few.stderr
    assert few.stdout == whole.stdout and len(whole.stdout.strip()) > 24
    replayed = done("replay", record, "--pack", packed, "--budget", budget, "--policy", "lru").output
    of_lru = re.search(r"^ +lru +[\d.]+% +([\d.]+)%", replayed, re.MULTILINE)
    assert of_lru is not None and of_lru[1] == hits(few.stderr), replayed
