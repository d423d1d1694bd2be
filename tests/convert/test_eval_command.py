"""`moe-pack eval`, in-process: what it measures, keeps, prints and refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import BOOK, TinyMixtral, pack, with_tokenizer

from moe_pack.calib.evaluate import REFERENCE_FILE, read_reference
from moe_pack.calib.forward import read_tokens, unseen_tokens
from moe_pack.convert.cli.eval import quality_lines
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.quality import Estimate, Prices, Quality, SparsityPrice, Substitution, SubstitutionPrice

SHAPE = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096)
SHORT = ["--tokens", "256"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that has the demo model's tokenizer."""
    return with_tokenizer(SHAPE.write(tmp_path_factory.mktemp("source")))


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its 2-bit pack; not written to."""
    folder = tmp_path_factory.mktemp("made") / "packed"
    pack(source, folder, width=2)
    return folder


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "packed"))


def measured(*arguments: str | Path) -> dict[str, Any]:
    result = done("eval", *arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return found["quality"]


def test_alone_a_pack_has_perplexity_sparsity_and_bytes_and_keeps_nothing(packed: Path) -> None:
    before = sorted(path.name for path in packed.iterdir())
    found = measured(packed, *SHORT)
    assert found["against"] is None and found["num_tokens"] == 2 * 127
    assert 4096 < found["perplexity"]["value"] < 40960 and found["perplexity"]["half_width"] > 0
    assert sorted(path.name for path in packed.iterdir()) == before


def test_against_its_source_what_was_measured_is_kept_and_inspect_shows_it(source: Path, packed: Path) -> None:
    before = {path.name for path in packed.iterdir()}
    found = measured(packed, "--against", source, *SHORT)
    assert found["against"]["kl"]["value"] > found["against"]["kl_bound"]["value"] > 0.01
    assert {path.name for path in packed.iterdir()} - before == {"quality.json", "numerics.json"}
    assert json.loads((packed / "quality.json").read_bytes())["content"] == found
    assert json.loads(run("inspect", packed, "--json").stdout)["quality"] == found
    assert f"measured: perplexity {found['perplexity']['value']:.1f} (" in run("inspect", packed).stdout


def test_what_was_measured_before_thresholds_changed_is_not_shown(source: Path, packed: Path) -> None:
    measured(packed, "--against", source, *SHORT)
    assert run("thresholds", packed, "--theta", "0.1", "--sequence-length", "64", *SHORT).exit_code == 0
    assert json.loads(run("inspect", packed, "--json").stdout)["quality"] is None
    assert "measured:" not in run("inspect", packed).stdout


def test_a_kept_reference_serves_without_the_checkpoint(source: Path, packed: Path, tmp_path: Path) -> None:
    found = measured(packed, "--against", source, "--keep-reference", tmp_path / "kept", *SHORT)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [REFERENCE_FILE]
    (packed / "quality.json").unlink()
    for path in (tmp_path / "kept", tmp_path / "kept" / REFERENCE_FILE):
        assert measured(packed, "--against", path) == found
    assert (packed / "quality.json").exists()


def test_a_kept_reference_is_not_made_again(source: Path, packed: Path, tmp_path: Path) -> None:
    arguments = ("eval", packed, "--against", source, "--keep-reference", tmp_path / "kept", *SHORT)
    assert "predictions of the source" in run(*arguments).stderr
    assert "predictions of the source" not in run(*arguments).stderr


@pytest.mark.slow
def test_what_an_interrupted_run_left_of_other_text_is_in_nobodys_way(
    source: Path, packed: Path, tmp_path: Path
) -> None:
    measured(packed, "--against", source, "--keep-reference", tmp_path / "kept", *SHORT)
    shutil.copytree(tmp_path / "kept", packed / "eval.work")
    found = measured(packed, "--against", source, "--tokens", "256", "--data", BOOK)
    assert found["num_tokens"] == 2 * 127 and not (packed / "eval.work").exists()


@pytest.mark.slow
def test_exactly_the_source_runs_next_to_the_pack(source: Path, packed: Path) -> None:
    compact = measured(packed, "--against", source, *SHORT)["against"]
    exact = measured(packed, "--against", source, "--exact", *SHORT)["against"]
    assert exact["is_exact"] and not compact["is_exact"]
    assert exact["kl_bound"]["value"] == pytest.approx(compact["kl_bound"]["value"], rel=1e-4)
    assert exact["kl"]["value"] == pytest.approx(compact["kl"]["value"], rel=0.05)  # nearly all mass is in this tail


@pytest.mark.slow
def test_a_table_for_people_says_how_sure_it_is_and_that_the_tail_is_long(source: Path, packed: Path) -> None:
    said = run("eval", packed, "--against", source, *SHORT).stdout
    for words in ("± ", "of the source", "nats; at least", "noise floor ", "--exact runs"):
        assert words in said
    exact = run("eval", packed, "--against", source, "--exact", *SHORT).stdout
    assert "over the whole vocabulary" in exact and "--exact runs" not in exact


def test_the_text_is_the_samples_end_which_profiles_do_not_see(source: Path) -> None:
    """Nor does convert --target-vram, which measures its loss on 16,384 tokens."""
    text = Text(FolderFiles(source))
    seen = {sequence.tobytes() for sequence in read_tokens(None, None, text, 16384, 512).sequences}
    found = unseen_tokens(text, 16384, 512)
    assert found.name == "the end of the sample: prose, chat, code and languages"
    assert len(seen) == len(found.sequences) == 32
    assert not seen & {sequence.tobytes() for sequence in found.sequences}


def test_options_that_mean_nothing_are_wrong_usage(packed: Path) -> None:
    cases = [
        (["--exact"], "--exact runs the source; give the checkpoint with --against"),
        (["--keep-reference", "kept"], "--keep-reference runs the source; give the checkpoint with --against"),
        (["--prices"], "--prices are stored together with the loss; give the checkpoint or a reference with --against"),
        (["--tokens", "100"], "Invalid value for '--tokens': 100 is not in the range x>=256."),
    ]
    for arguments, message in cases:
        with case(arguments, message):
            result = run("eval", packed, *arguments)
            assert result.exit_code == 2 and message in result.stderr


def test_a_reference_has_its_own_text(source: Path, packed: Path, tmp_path: Path) -> None:
    measured(packed, "--against", source, "--keep-reference", tmp_path, *SHORT)
    result = run("eval", packed, "--against", tmp_path, "--data", BOOK)
    assert result.exit_code == 2 and "a reference has its own text" in result.stderr
    kept = run("eval", packed, "--against", source, "--keep-reference", tmp_path, "--exact")
    assert kept.exit_code == 2 and "remove --keep-reference" in kept.stderr


def test_another_checkpoint_is_refused_before_it_is_run(packed: Path, tmp_path: Path) -> None:
    other = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, seed=1).write(tmp_path / "other")
    result = run("eval", packed, "--against", other, *SHORT)
    assert result.exit_code == 1 and result.stderr.endswith(
        f"--against {other}: {packed} was made from another checkpoint; give that one\n"
    )
    assert "predictions" not in result.stderr


def test_a_damaged_reference_ends_in_a_line(source: Path, packed: Path, tmp_path: Path) -> None:
    measured(packed, "--against", source, "--keep-reference", tmp_path, *SHORT)
    raw = bytearray((tmp_path / REFERENCE_FILE).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / REFERENCE_FILE).write_bytes(raw)
    result = run("eval", packed, "--against", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "moe-pack: reference.safetensors: SHA-256 does not match its bytes; the file is damaged\n"


def test_a_kept_reference_says_how_many_tokens_it_has(source: Path, packed: Path, tmp_path: Path) -> None:
    measured(packed, "--against", source, "--keep-reference", tmp_path, *SHORT)
    facts = read_reference(tmp_path).facts
    assert (facts.num_sequences, facts.sequence_length, facts.vocab_size) == (2, 128, 4096)


def tasks_file(folder: Path, answer: int = 0) -> Path:
    path = folder / "tasks.jsonl"
    task = {"prompt": "It was a dark", "choices": [" night", " and stormy day"], "answer": answer}
    path.write_text(json.dumps(task) + "\n")
    return path


@pytest.mark.slow
def test_tasks_are_answered_by_the_pack_and_by_its_source(source: Path, packed: Path, tmp_path: Path) -> None:
    path = tasks_file(tmp_path)
    alone = json.loads(run("eval", packed, "--tasks", path, *SHORT, "--json").stdout)["tasks"]
    both = run("eval", packed, "--tasks", path, "--against", source, *SHORT, "--json")
    found = json.loads(both.stdout)["tasks"]
    assert list(alone) == ["pack"] and list(found) == ["pack", "source"] and found["pack"] == alone["pack"]
    assert found["source"]["num_tasks"] == 1 and found["source"]["accuracy"]["value"] in (0.0, 1.0)
    said = run("eval", packed, "--tasks", path, *SHORT).stdout
    assert "right by the pack" in said and "by the source" not in said
    assert not [entry.name for entry in packed.iterdir() if entry.name.endswith(".work")]


def test_a_wrong_line_of_tasks_is_found_before_anything_runs(packed: Path, tmp_path: Path) -> None:
    path = tasks_file(tmp_path, answer=2)
    result = run("eval", packed, "--tasks", path)
    assert result.exit_code == 1 and result.stderr.startswith(f"moe-pack: --tasks {path}: line 1: found 2 choices")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_prices_are_measured_on_demand_kept_and_shown(source: Path, packed: Path) -> None:
    found = measured(packed, "--against", source, "--prices", *SHORT)
    kept = json.loads((packed / "quality.json").read_bytes())["content"]
    assert kept == found and json.loads(run("inspect", packed, "--json").stdout)["quality"] == found
    prices = found["prices"]
    assert prices["num_tokens"] == found["num_tokens"] and len(prices["sparsity"]) == 4
    last = prices["substitution"]["prices"][-1]
    said = run("inspect", packed).stdout.splitlines()[-1]
    assert said.startswith("prices: KL by sparsity 50% ") and said.endswith(f"0.5 {last['kl']['value']:.2g} nats")
    assert not [entry.name for entry in packed.iterdir() if entry.name.endswith(".work")]


def test_prices_are_lines_for_people() -> None:
    kl, increase = Estimate(0.0123, 0.0045), Estimate(0.015, 0.002)
    replaced = Substitution("importance", 0.5, 0.48, (SubstitutionPrice(0.3, 0.091, 0.386, kl, increase),))
    prices = Prices(1022, "text", (SparsityPrice(0.8, 0.79, kl, increase),), replaced)
    quality = Quality("text", "", 1, 1023, 1022, 1, None, Estimate(60.0, None), None, prices)
    assert quality_lines(quality)[-4:] == [
        "prices       on 1,022 tokens, compared with the same pack; sparsity: with all neurons running",
        "  80% sparse 0.0123 ± 0.0045 nats, perplexity 1.500% ± 0.200%",
        "substitute   memory for 50% of experts, policy importance; without substitution 48.0% of experts fetched",
        "  0.3        0.0123 ± 0.0045 nats, perplexity 1.500% ± 0.200%; 9.1% replaced, 38.6% fetched",
    ]


def test_without_prices_none_are_kept(source: Path, packed: Path) -> None:
    assert measured(packed, "--against", source, *SHORT)["prices"] is None
    assert "prices:" not in run("inspect", packed).stdout
