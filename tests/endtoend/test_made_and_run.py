"""From a checkpoint of any family through a profile, a plan and a pack to an answer within a memory."""

import re
from pathlib import Path

import pytest
from click.testing import Result
from support.cases import case
from support.commands import done, moe_run
from support.families import Tiny, write
from support.models import BOOK, with_tokenizer

from moe_pack.formats import Pack
from moe_pack.runtime.loaded_model import load
from moe_pack.runtime.offload import least_budget, routing_bytes

WORDS = {"vocab_size": 4096}  # of the demo model's tokenizer
# Those whose attention and routers other families do not have.
FAMILIES = ("hunyuan_v1_moe", "exaone_moe", "mistral4", "deepseek_v32", "llama4_text", "glm_moe_dsa", "minimax_m3_vl")
# The models that two papers measured, small. CORM §5: Mixtral 8x7B, DeepSeekMoE 16B. Importance-driven scheduling,
# Table 1: deepseek-moe-16b, XVERSE-MoE-A4.2B, Qwen2-57B-A14B.
SHAPES = (
    Tiny("mixtral", "of CORM", WORDS | {"num_local_experts": 8}),
    Tiny("deepseek", "of both", WORDS | {"n_routed_experts": 16}),
    Tiny("xverse", "of importance", WORDS | {"num_experts": 16}),
    Tiny("qwen2_moe", "of importance", WORDS | {"num_experts": 16}),
)
CPU = ("--target-vram", "8M", "--device", "cpu", "--context", 64)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]  # packs are made by profiles and plans


def made(tiny: Tiny, folder: Path, *options: object) -> Path:
    """A profile with losses, a plan that takes any widths or those of a preset, and the pack it makes."""
    source = with_tokenizer(write(tiny, folder / "source"))
    profile, plan, packed = folder / "profile", folder / "plan.json", folder / "packed"
    done("profile", source, "-o", profile, "--tokens", 256, "--sequence-length", 64)
    planned = done("plan", source, *CPU, "--profile", profile, "-o", plan, *options).output
    assert not options or re.search(r"^preset corm +[\d.]+ +\+[\d.]+% ", planned, re.MULTILINE), planned
    done("convert", source, "--plan", plan, "--profile", profile, "-o", packed, "--workers", 1)
    return packed


@pytest.fixture(scope="module", params=SHAPES, ids=lambda tiny: tiny.family)
def corm_pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory.mktemp(request.param.family), "--preset", "corm")


def run(packed: Path, *options: object) -> Result:
    asked = ("--prompt", "It was a dark night", "--temperature", 0, "--max-tokens", 24, "--stats", *options)
    result = moe_run(packed, *asked)
    assert result.exit_code == 0, result.output
    return result


def small_budget(packed: Path, few_pages: int) -> int:
    """Some bytes beyond the room for one expert: some stay, most take turns."""
    with Pack(packed) as pack:
        return least_budget(pack.layout, pack.spec.max_position_embeddings, routing_bytes(packed)) + few_pages


def hits(result: Result) -> str:
    found = re.search(r"^decode +([\d.]+)% of \d+ experts were resident", result.stderr, re.MULTILINE)
    assert found is not None, result.stderr
    assert 0 < float(found[1]) < 100, "some stay, and some are read again"
    return found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_take_turns_say_what_all_in_memory_say(family: str, tmp_path: Path) -> None:
    """And the recorded run is replayed with the hits that it had."""
    packed = made(Tiny(family, "with words", WORDS), tmp_path)
    budget, record = small_budget(packed, 30_000), tmp_path / "record.safetensors"
    whole, few = run(packed), run(packed, "--budget", budget, "--policy", "lru", "--no-prefetch", "--record", record)
    assert few.stdout == whole.stdout and len(whole.stdout.strip()) > 24
    replayed = done("replay", record, "--pack", packed, "--budget", budget, "--policy", "lru").output
    of_lru = re.search(r"^ +lru +[\d.]+% +([\d.]+)%", replayed, re.MULTILINE)
    assert of_lru is not None and of_lru[1] == hits(few), replayed


def test_the_papers_policies_say_what_all_in_memory_say(corm_pack: Path) -> None:
    for policy in ["corm", "importance"]:
        with case(policy):
            whole = run(corm_pack)
            few = run(corm_pack, "--policy", policy, "--budget", small_budget(corm_pack, 100_000))
            hits(few)
            assert re.search(rf"^policy +{policy}, ", few.stderr, re.MULTILINE)
            assert "substituted" not in few.stderr
            assert few.stdout == whole.stdout and len(whole.stdout.strip()) > 24


def test_importance_substitutes_only_where_it_is_told_to(corm_pack: Path) -> None:
    few = run(corm_pack, "--policy", "importance", "--budget", small_budget(corm_pack, 100_000), "--substitute", 1)
    found = re.search(r"^substituted +(\d+) experts: the answer is not the pack's$", few.stderr, re.MULTILINE)
    assert found is not None and int(found[1]) > 0, few.stderr


def test_a_pack_of_biased_experts_for_a_memory_keeps_its_loss(tmp_path: Path) -> None:
    """Experts with clamped neurons and biases, with sinks and windows."""
    source = with_tokenizer(write(Tiny("gpt_oss", "with words", WORDS | {"num_hidden_layers": 2}), tmp_path / "source"))
    profile, out = tmp_path / "profile", tmp_path / "packed"
    done("profile", source, "-o", profile, "--tokens", 256, "--sequence-length", 64)
    limits = ("--target-vram", "16M", "--device", "cpu", "--context", 64, "--max-loss", 0.02)
    done("convert", source, "-o", out, "--profile", profile, *limits, "--eval-data", BOOK, "--eval-tokens", 256)
    done("verify", out, "--against", source)
    with Pack(out) as pack:
        assert pack.spec.expert.extra_floats == pack.spec.hidden_size
        assert pack.manifest.totals.extra > 0
    with load(out, "16M", context_tokens=64) as model:
        assert "".join(model.generate("It was a dark night", 20, temperature=0.0))
