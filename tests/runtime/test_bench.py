"""`moe-run --bench`: what is measured, and how it is shown."""

import json
import re
from pathlib import Path

import pytest
from support.cases import case
from support.commands import moe_run as run
from support.models import PackMaker, TinyMixtral, pack

from moe_pack.formats import RunError
from moe_pack.formats.base import peak_resident_bytes
from moe_pack.runtime import BenchTimes, random_prompt
from moe_pack.runtime.engine.machine import anonymous_bytes


@pytest.fixture
def demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


def test_rates_are_tokens_by_seconds_and_the_first_token_belongs_to_the_prompt() -> None:
    times = BenchTimes(100, 2.0, (0.1, 0.2, 0.6))
    assert (times.num_tokens, times.prefill_rate) == (4, 50)
    assert times.decode_rate == pytest.approx(3 / 0.9)
    assert times.median_token_ms == pytest.approx(200)
    alone = BenchTimes(100, 2.0, ())
    assert (alone.num_tokens, alone.decode_rate, alone.median_token_ms) == (1, None, None)


def test_a_prompt_has_any_token_and_a_seed_repeats_it() -> None:
    ids = random_prompt(2000, 50, 4000, seed=1)
    assert len(ids) == 2000
    assert set(ids) == set(range(50))
    assert ids == random_prompt(2000, 50, 4000, seed=1) != random_prompt(2000, 50, 4000, seed=2)


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    assert len(random_prompt(15, 50, 16, seed=0)) == 15
    with pytest.raises(RunError) as caught:
        random_prompt(16, 50, 16, seed=0)
    assert str(caught.value) == "--prompt-tokens: found 16, this model's context is 16; give at most 15"


def test_as_many_tokens_are_made_as_asked_for_whatever_they_are(tmp_path: Path) -> None:
    """Of two tokens one ends a text: no draw of 60 is without it."""
    source = TinyMixtral(vocab_size=2, config={"eos_token_id": 1}).write(tmp_path / "source")
    pack(source, tmp_path / "packed")
    result = run(tmp_path / "packed", "--bench", "--json", "--temperature", 1e6, "--prompt-tokens", 8, "-n", 60)
    facts = json.loads(result.stdout)
    assert (facts["prompt_tokens"], facts["generated_tokens"], facts["synthetic"]) == (8, 60, False)


def test_without_options_it_is_128_tokens_and_64_more(demo: Path) -> None:
    result = run(demo, "--bench")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^prefill +128 tokens, [\d.]+ tokens/s$", result.stdout, re.MULTILINE)
    assert re.search(r"^decode +63 tokens, [\d.]+ tokens/s, median [\d.]+ ms$", result.stdout, re.MULTILINE)
    for fact in ("experts used", "key-value cache", "at most, including mapped files", "computed by", "seed"):
        assert fact in result.stdout
    assert "noise" not in result.stdout
    assert result.stderr == "device: cpu (no GPU found)\n"


def test_json_has_every_fact_and_they_agree(demo: Path) -> None:
    facts = json.loads(run(demo, "--bench", "--json", "-n", 4, "--prompt-tokens", 9, "--seed", 7).stdout)
    assert list(facts) == [
        "synthetic", "prompt_tokens", "prefill_s", "prefill_tokens_per_s", "generated_tokens", "decode_s",
        "decode_tokens_per_s", "median_token_ms", "peak_resident_bytes", "seed", "computed_by", "numerics",
        "numerics_kl", "dense_bytes", "kv_cache_bytes", "context_tokens", "experts_asked_for_bytes", "panel_bytes",
        "anonymous_bytes", "stream", "gpu",
        "other_gpus", "drafts", "why_no_drafts", "fallbacks",
    ]  # fmt: skip
    assert facts["prefill_tokens_per_s"] == pytest.approx(9 / facts["prefill_s"])
    assert facts["decode_tokens_per_s"] > 0
    assert facts["gpu"] is None and facts["other_gpus"] == []
    assert facts["kv_cache_bytes"] == 2 * 4 * 4 * (9 + 4) * 128 // 2  # 4 layers, 2 of 4 heads; keys and values
    assert facts["anonymous_bytes"] < facts["peak_resident_bytes"]
    assert (facts["generated_tokens"], facts["seed"]) == (4, 7)


def test_one_token_has_no_rate_of_decoding(demo: Path) -> None:
    assert "no token after the first" in run(demo, "--bench", "-n", 1).stdout
    assert json.loads(run(demo, "--bench", "-n", 1, "--json").stdout)["decode_tokens_per_s"] is None


WRONG = {
    "prompt": (["--bench", "--prompt", "x"], 2, "--bench has its own prompt; remove --prompt, --prompt-file and"),
    "chat": (["--bench", "--chat"], 2, "--bench has its own prompt"),
    "stats": (["--bench", "--stats"], 2, "--bench reports everything that --stats does; remove --stats"),
    "json": (["--prompt", "x", "--json"], 2, "--json needs --bench; remove it or add --bench"),
    "tokens": (["--prompt", "x", "--prompt-tokens", "4"], 2, "--prompt-tokens needs --bench; remove it or add --bench"),
    "context": (["--bench", "--prompt-tokens", "2048"], 1, "--prompt-tokens: found 2048, this model's context is 2048"),
}


def test_wrong_input_ends_in_a_line_that_says_what_to_do(demo: Path) -> None:
    for name in WRONG:
        with case(name):
            options, exit_code, line = WRONG[name]
            result = run(demo, *options)
            assert (result.exit_code, result.stdout) == (exit_code, "")
            assert line in result.stderr


def test_a_process_knows_what_it_takes() -> None:
    own, peak = anonymous_bytes(), peak_resident_bytes()
    assert own is not None and peak is not None
    assert 10 << 20 < own <= peak
