"""A budget is kept by the whole process, and over a long run."""

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchlib.confined import SPARE_BYTES, MemoryCgroup, NoCgroupError, Task, run_ours, tree_anonymous_bytes
from benchlib.confined import measure as measured
from benchlib.packs import SyntheticPack, budget_with
from support.cases import case
from support.models import BOOK, PackMaker

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions, Text
from moe_pack.runtime.engine.machine import anonymous_bytes
from moe_pack.runtime.generate import generate
from moe_pack.runtime.offload import PolicyName

PACK = SyntheticPack("qwen3-30b-a3b", layers=3, vocab=4096)  # 384 experts, 1 GB
TASK = Task(prompt_tokens=512, decode_tokens=16, threads=2, seed=0, decode_limit_s=float("inf"))
NEEDED_DISK_BYTES = 2 * 10**9
SLOW = pytest.mark.slow  # some seconds a run, 1 GB of disk


def cgroup(limit_bytes: int) -> MemoryCgroup:
    try:
        return MemoryCgroup(limit_bytes)
    except NoCgroupError as reason:
        pytest.skip(f"no memory cgroup can be made: {reason}")


@pytest.fixture(scope="module")
def fine_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_DISK_BYTES:
        pytest.skip(f"{folder} has {free:,} bytes free, {NEEDED_DISK_BYTES:,} are needed")
    moe_pack(["synth", *PACK.arguments(), "-o", str(folder / "packed")], standalone_mode=False)
    return folder / "packed"


@SLOW
@pytest.mark.parametrize(("share", "policy"), [(0.25, "auto"), (0.75, "auto"), (0.25, "corm")])
def test_a_pack_runs_in_its_budget_and_400_mb(fine_pack: Path, share: float, policy: str) -> None:
    budget = int(share * sum(path.stat().st_size for path in fine_pack.iterdir()))
    with cgroup(budget + SPARE_BYTES):
        pass  # or the test is skipped
    run = run_ours(policy, fine_pack, TASK, ["--budget", str(budget), "--policy", policy], budget + SPARE_BYTES)
    assert run.fault() is None
    assert not run.kills
    assert run.num_tokens == TASK.decode_tokens
    assert run.facts["stream"]["plan"]["budget"] == budget
    assert run.measured.num_samples > 40, "sampled too rarely to tell"
    assert run.measured.peak_bytes >= run.facts["anonymous_bytes"] * 0.9, "the sampler saw it"
    assert run.measured.peak_bytes <= budget + SPARE_BYTES


@SLOW
def test_what_needs_more_than_its_cgroup_has_is_killed_and_seen() -> None:
    take = "held = bytearray(300_000_000); import time; time.sleep(1)"
    with cgroup(100_000_000) as small:
        ended = measured(small.inside(["python3", "-c", take]), tree_anonymous_bytes)
        assert ended.exit_code == -9
        assert small.num_kills == 1
    with cgroup(600_000_000) as large:
        ended = measured(large.inside(["python3", "-c", take]), tree_anonymous_bytes)
        assert ended.exit_code == 0
        assert large.num_kills == 0
        assert ended.peak_bytes > 300_000_000


NUM_TOKENS = int(os.environ.get("MOE_PACK_SOAK_TOKENS", "1000"))
# After the first fifth 2.5 KB a token, and what the allocator moves about, which is under 1 MiB.
MOST_GROWTH_BYTES = (1 << 20) + 2500 * NUM_TOKENS * 4 // 5
PROMPT_TOKENS, NEW_TOKENS, NUM_SLICES = 96, 64, 10


def memory_of_slices(pack: Pack, policy: PolicyName, seed: int) -> Iterator[int]:
    """Yields the process's anonymous bytes after each tenth of a run of prompts, each continued, with resets."""
    context, draw = PROMPT_TOKENS + NEW_TOKENS, np.random.default_rng(seed)
    ids, sampler, made = Text(pack).encode(BOOK.read_text("utf-8")[:100_000]), Sampler(SamplingOptions(seed=seed)), 0
    with Engine(pack, EngineOptions("cpu", budget_with(pack, 1, context), policy=policy), context) as engine:
        for number in range(1, NUM_SLICES + 1):
            while made < NUM_TOKENS * number // NUM_SLICES:
                length, start = int(draw.integers(1, PROMPT_TOKENS + 1)), int(draw.integers(len(ids) // 2))
                wanted, prompt = int(draw.integers(1, NEW_TOKENS + 1)), ids[start : start + length]
                engine.decoder.reset()
                made += sum(1 for _ in generate(engine.decoder, prompt, sampler, wanted, frozenset()))
            taken = anonymous_bytes()
            if taken is None:
                pytest.skip("the system does not say how much memory a process has")
            yield taken


@pytest.mark.slow  # some ten seconds each
@pytest.mark.parametrize("policy", ["lru", "corm"])
def test_memory_stays_what_it_was_after_the_first_tokens(demo_pack: PackMaker, policy: PolicyName) -> None:
    seed = int(os.environ.get("MOE_PACK_SEED", secrets.randbelow(1 << 31)))
    with case(f"MOE_PACK_SEED={seed}"), Pack(demo_pack("up", 4)) as opened:
        _, *warm = memory_of_slices(opened, policy, seed)
        assert max(warm) - warm[0] <= MOST_GROWTH_BYTES
