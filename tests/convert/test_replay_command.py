"""The command that replays, in-process: what it prints, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import DEMO_MODEL, PackMaker, TinyMixtral, pack
from support.profiles import profiled, random_tokens

from moe_pack.formats import Pack
from moe_pack.runtime import offload
from moe_pack.runtime.offload.record import write_recording

BUDGET, CONTEXT = 11 << 20, 64  # of the demo pack's 32 experts, each a page, some two thirds have room
NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


@pytest.fixture(scope="module")
def routes(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run of the demo pack: a prompt of 6 tokens and 40 more, some experts chosen more often."""
    rng = np.random.default_rng(7)
    with Pack(demo) as opened:
        plan = offload.divide_budget(opened.layout, BUDGET, CONTEXT, 0)
        pages, root = offload.expert_pages(opened.layout, plan.page_bytes), opened.manifest.root
    popularity = rng.dirichlet(np.ones(NUM_EXPERTS), len(pages)).astype(np.float32)
    facts = offload.CacheFacts(pages, plan.num_pages, 2, popularity)
    recorder = offload.Recorder(facts, root, "corm", BUDGET, CONTEXT, keeps_scores=True)
    residency = offload.recorded_expert_cache_for(offload.PRESETS["corm"], facts, recorder)
    for num_tokens in [6] + [1] * 40:
        for layer_idx, shares in enumerate(popularity.astype(np.float64)):
            drawn = [rng.choice(NUM_EXPERTS, 2, replace=False, p=shares / shares.sum()) for _ in range(num_tokens)]
            recorder.routed(layer_idx, np.array(drawn))
            for number, _ in enumerate(residency.schedule(layer_idx, np.unique(drawn).tolist(), shares)):
                if number == 0 and layer_idx + 1 < len(pages):
                    list(
                        residency.prefetch(layer_idx + 1, rng.choice(NUM_EXPERTS, 2, replace=False).tolist(), layer_idx)
                    )
    path = tmp_path_factory.mktemp("routes") / "routes.safetensors"
    recorder.write(path)
    return path


@pytest.mark.slow
def test_every_policy_stands_under_every_budget_next_to_the_optimum(demo: Path, routes: Path) -> None:
    result = done("replay", routes, "--pack", demo, "--budget", "10.5M,11M", "--read-rate", "1G")
    lines = result.stdout.splitlines()
    assert lines[0] == f"{routes}: 6 tokens of prompts in 1 passes, 40 decoded"
    assert lines[1].startswith("run with corm in 11.0 MiB (")
    blocks = result.stdout.split("\n\n")[1:]
    assert [block.split(":")[0] for block in blocks] == ["budget 10.5 MiB", "budget 11.0 MiB"]
    for block in blocks:
        names = [line.split()[0] for line in block.splitlines()[2:]]
        assert names == [*offload.PRESETS, "optimum", "best:"]
        assert "tokens/s" in block.splitlines()[1]


def test_the_recorded_policy_is_replayed_with_what_was_predicted_hit_for_hit(demo: Path, routes: Path) -> None:
    result = run("replay", routes, "--pack", demo, "--budget", "11M", "--policy", "corm,lru", "--json")
    (outcome,) = json.loads(result.stdout)
    record = offload.read_recording(routes)
    corm, alone = outcome["predicted"]["corm"], outcome["alone"]
    assert corm["prediction"] == "recorded" and corm["decode"]["bytes_ahead"] > 0
    assert corm["decode"]["num_hits"] == record.hits[1:].sum() and corm["prefill"]["num_hits"] == record.hits[0].sum()
    assert corm["decode"]["num_tokens"] == 40 and corm["decode"]["num_needed"] == 40 * 4 * 2
    assert list(outcome["predicted"]) == ["corm"] and list(alone) == ["corm", "lru"]
    rates = {name: alone[name]["decode"]["hit_rate"] for name in alone}
    assert max(rates.values()) <= outcome["optimum"]["decode"]["hit_rate"] and outcome["best"] == max(
        rates, key=rates.get
    )
    assert (outcome["budget_bytes"], outcome["num_pages"]) == (BUDGET, record.facts.num_pages)


def test_a_profile_is_replayed_by_its_held_out_text_and_predicts_by_its_paths(tmp_path: Path) -> None:
    shape = TinyMixtral(num_layers=3, num_experts=6, vocab_size=64, config={"num_experts_per_tok": 2})
    source = shape.write(tmp_path / "source")
    pack(source, tmp_path / "packed")
    profiled(source, tmp_path / "profile", random_tokens(10, 32, 64))
    result = done("replay", tmp_path / "profile", "--pack", tmp_path / "packed", "--budget", "7M", "--json")
    (outcome,) = json.loads(result.stdout)
    edgemoe = outcome["predicted"]["edgemoe"]
    assert edgemoe["prediction"] == "routes" and edgemoe["decode"]["num_tokens"] == 64
    assert list(outcome["predicted"]) == ["edgemoe"] and outcome["alone"]["edgemoe"]["decode"]["bytes_ahead"] == 0
    shown = run("replay", tmp_path / "profile", "--pack", tmp_path / "packed", "--budget", "7M", "--policy", "edgemoe")
    assert "scores are not known" in shown.stdout and "best:" not in shown.stdout and "from paths" in shown.stdout


@pytest.mark.slow
def test_paths_next_to_the_pack_predict_where_a_record_has_nothing_predicted(
    demo: Path, routes: Path, tmp_path: Path
) -> None:
    shutil.copytree(demo, tmp_path / "packed")
    profiled(DEMO_MODEL, tmp_path / "profile", random_tokens(4, 64, 4096))
    arguments = ["replay", routes, "--pack", tmp_path / "packed", "--budget", "11M", "--policy", "edgemoe"]
    assert "from paths" not in run(*arguments).stdout
    assert run("attach", tmp_path / "packed", "--profile", tmp_path / "profile").exit_code == 0
    assert "from paths" in run(*arguments).stdout


def test_routes_that_do_not_fit_the_pack_or_the_budget_are_refused(demo: Path, routes: Path, tmp_path: Path) -> None:
    record = offload.read_recording(routes)
    narrow = replace(record.passes, routes=record.passes.routes[:, :, :1])
    for name, changed in {
        "another": replace(record, facts=replace(record.facts, root="0" * 64)),
        "narrow": replace(record, passes=narrow),
        "pageless": replace(record, facts=replace(record.facts, num_pages=0)),
    }.items():
        write_recording(changed, tmp_path / name)
    source = TinyMixtral(num_layers=2, num_experts=3, vocab_size=32, intermediate_size=16).write(tmp_path / "source")
    profiled(source, tmp_path / "profile", random_tokens(4, 64, 32))
    for path, budget, message in (
        (tmp_path / "another", "11M", "was recorded with another pack"),
        (tmp_path / "narrow", "11M", "found layers, experts and experts a token (4, 8, 1), expected"),
        (tmp_path / "pageless", "11M", "found 0 pages, expected 1 at least"),
        (routes, "5M", "--budget: 5.0 MiB is too little; the model needs at least"),
        (tmp_path / "profile", "11M", "is a profile of another model"),
        (tmp_path / "none", "11M", "moe-pack: none: file is missing\n"),
    ):
        with case(message):
            result = run("replay", path, "--pack", demo, "--budget", budget)
            assert result.exit_code == 1 and message in result.stderr and result.stderr.count("\n") < 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--budget", "11X"], "found '11X', expected a size such as 11G"),
        (["--budget", "11M", "--policy", "lru,belady"], "found 'belady', expected all, or some of lru, floe"),
        ([], "Missing option '--budget'"),
    ],
)
def test_options_that_mean_nothing_are_refused(demo: Path, routes: Path, option: list[str], message: str) -> None:
    result = run("replay", routes, "--pack", demo, *option)
    assert result.exit_code == 2 and message in result.stderr
