"""Kernels compiled before they are needed: all of them, by several processes, and found again by their launches."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.launched_kernels import launched
from support.models import TinyMixtral

from moe_pack.convert import SyntheticTraits, synthesize
from moe_pack.formats import ExpertFormat, Plan, part_format, uniform_plan
from moe_pack.formats.families import model_spec

LOW, HIGH = part_format(2, 64), part_format(4, 64)
SHAPE = TinyMixtral(hidden_size=128, intermediate_size=160, num_experts=8, num_heads=4, num_kv_heads=2, vocab_size=128)
CONFIG = {"max_position_embeddings": 512}

# A program that launches kernels for a GPU that is not there: how many it collects, compiles in two processes, and how
# many of the launches after that find theirs in the cache. Kernels are used in another order than they are collected.
PROGRAM = """
import json, sys
import triton
from support.compiled_kernels import RecordingDriver
from support.profiles import Recorder
from support.kernel_calls import dense_calls, running_calls
from triton.runtime.driver import driver
from moe_pack.runtime.gpu.ahead import collected_launches, compile_ahead

if __name__ == "__main__":
    driver.set_active(RecordingDriver(90))
    calls = [call for _, call in (*dense_calls((4,), (128,)), *running_calls((4,), (128,)))]
    with collected_launches() as jobs:
        for call in calls:
            call()
    told, hits = Recorder(), []
    compiled = compile_ahead(list(jobs.values()), 2, told)
    triton.knobs.compilation.listener = lambda cache_hit, **event: hits.append(cache_hit)
    for call in reversed(calls):
        call()
    again = compile_ahead(list(jobs.values()), 2)
    print(json.dumps([len(jobs), compiled, told.done, len(hits), sum(hits), again]))
"""


def synthetic(folder: Path, plan_is_mixed: bool, num_layers: int) -> Path:
    """A pack whose experts are all of one format, or of two by turns, begun by another in every layer."""
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(replace(SHAPE, config=CONFIG, num_layers=num_layers).config_json()))
    spec = model_spec(str(config), None)
    plan: Plan = uniform_plan(spec, "up", HIGH, HIGH, HIGH, "nearest")
    if plan_is_mixed:
        formats = (ExpertFormat(LOW, LOW, LOW), ExpertFormat(HIGH, LOW, HIGH))
        plan = replace(plan, experts=tuple(tuple(formats[(l + e) % 2] for e in range(8)) for l in range(num_layers)))
    popularity = np.ones((num_layers, 8))
    synthesize(spec, plan, SyntheticTraits(0.5, popularity, 0.5, 0), folder / "packed", 1)
    return folder / "packed"


@pytest.mark.slow
@pytest.mark.parametrize("plan_is_mixed", [False, True])
def test_no_prompt_or_token_launches_a_kernel_that_did_not_run_before(plan_is_mixed: bool, tmp_path: Path) -> None:
    two, four = (launched(synthetic(tmp_path / str(number), plan_is_mixed, number)) for number in (2, 4))
    assert four["prompts"] == four["everything"]
    # Layers differ in where their routes, lists and scratch memory begin: none makes another kernel. There are 41, of
    # which 14 are products of dense matrices, for one token, for few, and for tiles of 16 to 128; 4 choose tokens.
    assert four["everything"] == two["everything"] <= 41


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found_by_every_launch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    collected, compiled, told, launches, found, again = json.loads(done.stdout)
    assert collected == compiled == launches == found > 8
    assert told == compiled
    assert again == 0
