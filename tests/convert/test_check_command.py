"""`moe-pack check`, in-process: each check passing, failing and skipped, its exit codes, JSON and JUnit XML."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.models import TinyMixtral, pack, with_tokenizer
from support.reseal import reseal

from moe_pack.convert.checks import CheckResult, check_losses, exit_code_of, junit_xml, markdown_table
from moe_pack.convert.options import CheckLimits
from moe_pack.runtime.quality import Estimate, Quality, SourceQuality

SHAPE = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096)
NAMES = ["schema", "digests", "tensors", "kl", "perplexity", "bytes", "budget"]
SHORT = ["--sample", "512"]


def checked(*arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    """Returns the JSON of the command, with each check also under its name."""
    result = run("check", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert [check["name"] for check in found["checks"]] == NAMES
    return found | {check["name"]: check for check in found["checks"]}


def statuses(found: dict[str, Any]) -> str:
    """One letter a check: passed, failed, skipped."""
    return "".join(found[name]["status"][0] for name in NAMES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that has the demo model's tokenizer."""
    folder = SHAPE.write(tmp_path_factory.mktemp("source"))
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "packed"
    pack(source, folder, width=4)
    return folder


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "packed"))


def content_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")


def test_without_limits_integrity_alone_is_checked(made: Path) -> None:
    found = checked(made)
    assert statuses(found) == "pppssss" and found["passed"]
    assert found["digests"]["found"].startswith(f"{content_bytes(made):,} bytes, root ")
    assert found["bytes"]["found"] == f"{content_bytes(made):,}" and found["bytes"]["allowed"] == "no limit"


def test_limits_that_hold_pass_and_what_was_measured_is_kept(source: Path, made: Path, packed: Path) -> None:
    limits = ["--max-kl", "1", "--max-ppl-increase", "90%", "--max-bytes", "1G", "--budget", "1G"]
    found = checked(packed, "--against", source, *limits, *SHORT)
    assert statuses(found) == "ppppppp"
    kl = found["quality"]["against"]["kl"]
    assert (
        found["kl"]["found"]
        == f"{kl['value']:.4g} nats, at most {kl['value'] + kl['half_width']:.4g} nats with 95% confidence (508 tokens)"
    )
    assert found["kl"]["allowed"] == "1 nats" and found["perplexity"]["allowed"] == "+90.000%"
    numbers = {name: [found[name][key] for key in ("value", "upper", "limit", "unit")] for name in NAMES[3:]}
    increase = found["quality"]["against"]["perplexity_increase"]
    assert numbers == {
        "kl": [kl["value"], kl["value"] + kl["half_width"], 1.0, "nats"],
        "perplexity": [increase["value"], increase["value"] + increase["half_width"], 0.9, "share"],
        "bytes": [content_bytes(made), None, 1 << 30, "bytes"],  # without the quality.json that was written
        "budget": [None, None, 1 << 30, "bytes"],
    }
    assert all(found[name]["seconds"] >= 0 for name in NAMES) and found["digests"]["seconds"] > 0
    assert (packed / "quality.json").exists()


def test_a_broken_limit_fails_alone_and_ends_in_exit_code_1(source: Path, packed: Path) -> None:
    cases = [
        (["--max-kl", "1e-6"], "kl"),
        (["--max-ppl-increase", "0.0001%"], "perplexity"),
        (["--max-bytes", "1K"], "bytes"),
        (["--budget", "1K"], "budget"),
    ]
    for limit, broken in cases:
        with case(limit, broken):
            against = ["--against", str(source), *SHORT] if broken in ("kl", "perplexity") else []
            found = checked(packed, *against, *limit, exit_code=1)
            assert not found["passed"]
            assert [name for name in NAMES if found[name]["status"] == "failed"] == [broken]
            assert broken != "budget" or "the model needs at least" in found["budget"]["found"]


def test_the_size_allowed_is_the_last_that_passes(made: Path) -> None:
    size = content_bytes(made)
    assert checked(made, "--max-bytes", str(size))["bytes"]["status"] == "passed"
    assert checked(made, "--max-bytes", str(size - 1), exit_code=1)["bytes"]["status"] == "failed"


def test_loss_measured_before_is_taken_from_next_to_the_pack_and_said_to_be(source: Path, packed: Path) -> None:
    assert run("eval", packed, "--against", source, "--tokens", "512").exit_code == 0
    found = checked(packed, "--max-kl", "1")
    assert found["kl"]["status"] == "passed" and found["kl"]["found"].endswith("(508 tokens, quality.json)")


def test_a_limit_of_loss_that_nothing_was_measured_for_is_unchecked(made: Path, tmp_path: Path) -> None:
    found = checked(made, "--max-kl", "1", "--junit", tmp_path / "check.xml", exit_code=3)
    assert statuses(found) == "pppusss" and not found["passed"]
    says = "quality.json does not have the loss of this content; give the checkpoint or a reference: --against"
    assert (found["kl"]["found"], found["kl"]["limit"], found["perplexity"]["found"]) == (says, 1.0, says)
    suite = ET.parse(tmp_path / "check.xml").getroot()[0]
    assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
    assert suite[3][0].tag == "error" and suite[3][0].get("message") == f"{says}; allowed: 1 nats"
    found = checked(made, "--max-kl", "1", "--max-bytes", "1K", exit_code=1)  # a failure counts for more
    assert statuses(found) == "pppusfs"


def test_a_loss_that_cannot_be_measured_is_unchecked(source: Path, packed: Path, tmp_path: Path) -> None:
    other = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, seed=1).write(tmp_path / "other")
    with_tokenizer(other)
    pack(other, tmp_path / "strange", width=4)
    kept = tmp_path / "kept"
    assert run("eval", packed, "--against", source, "--tokens", "512", "--keep-reference", kept).exit_code == 0
    found = checked(tmp_path / "strange", "--against", kept, "--max-kl", "1", exit_code=3)
    assert statuses(found) == "pppusss" and "give one of the checkpoint that was packed" in found["kl"]["found"]


def test_what_is_not_there_cannot_be_checked(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        "no such folder": (tmp_path / "nowhere",),
        "no such file or folder": (made, "--against", tmp_path / "nowhere", "--max-kl", "1"),
        "config.json": (made, "--against", tmp_path / "empty", "--max-kl", "1"),
        "cannot be written": (made, "--junit", tmp_path / "nowhere" / "check.xml"),
    }
    for says, arguments in cases.items():
        with case(says):
            result = run("check", *arguments)
            assert (result.exit_code, result.stdout) == (3, "")
            assert says in result.stderr.splitlines()[-1]


def test_a_kept_reference_is_enough_to_measure_loss(source: Path, packed: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("eval", packed, "--against", source, "--tokens", "512", "--keep-reference", kept).exit_code == 0
    (packed / "quality.json").unlink()
    assert checked(packed, "--against", kept, "--max-kl", "1")["kl"]["status"] == "passed"
    result = run("check", packed, "--against", kept, "--max-kl", "1", *SHORT)
    assert result.exit_code == 2 and "--sample: a reference has its own text" in result.stderr


def test_a_damaged_byte_fails_and_loss_is_not_measured(source: Path, packed: Path) -> None:
    path = packed / "experts-001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    found = checked(packed, "--against", source, "--max-kl", "1", *SHORT, exit_code=1)
    assert statuses(found) == "pfpusss"
    assert found["digests"]["found"].startswith("experts-001.safetensors: pad.3 is not zero")
    assert found["kl"]["found"] == "not measured, because an earlier check failed"


def test_what_is_no_pack_fails_and_nothing_else_is_looked_at(tmp_path: Path) -> None:
    found = checked(tmp_path, exit_code=1)
    assert statuses(found) == "fuuuuuu" and found["root"] is None
    assert found["schema"]["found"].endswith("this is not a pack, or its conversion has not finished")


def test_another_checkpoint_fails_the_account_of_tensors(made: Path, tmp_path: Path) -> None:
    other = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, seed=1).write(tmp_path / "other")
    found = checked(made, "--against", other, "--max-kl", "1", *SHORT, exit_code=1)
    assert statuses(found) == "ppfusss" and "was made from another checkpoint" in found["tensors"]["found"]
    fewer = TinyMixtral(num_layers=1, num_experts=4, vocab_size=4096).write(tmp_path / "fewer")
    assert "is missing there" in checked(made, "--against", fewer, exit_code=1)["tensors"]["found"]


def account_changed(folder: Path, change: dict[str, Any]) -> Path:
    """The pack with its first account entry changed, sealed again."""
    path = folder / "source.json"
    values = json.loads(path.read_text())
    values["tensors"][0] |= change
    path.write_text(json.dumps(values))
    reseal(folder)
    return folder


def test_an_account_sealed_again_without_a_change_passes(packed: Path) -> None:
    assert statuses(checked(account_changed(packed, {}))) == "pppssss"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [4096, 63]}, "source.json: found 619,328 weights in the pack, expected 623,424: the model's"),
        (
            {"reason": "why not"},
            "source.json: tensor 'lm_head.weight': found fate resident and reason 'why not', expected a reason for a "
            "tensor that is left out, and for no other",
        ),
    ],
)
def test_an_account_that_does_not_add_up_fails(change: dict[str, Any], says: str, packed: Path) -> None:
    found = checked(account_changed(packed, change), exit_code=1)
    assert statuses(found) == "ppfssss" and found["tensors"]["found"] == says


def test_a_synthetic_pack_has_no_tensors_to_account_for(source: Path, tmp_path: Path) -> None:
    done("synth", source, "-o", tmp_path / "synthetic", "--group-size", "16")
    assert statuses(checked(tmp_path / "synthetic")) == "ppsssss"


def compared(kl: Estimate) -> Quality:
    one = Estimate(1.0, 0.0)
    found = SourceQuality("", True, 256, kl, kl, 0.0, one, Estimate(0.01, 0.001), one, 0.0, 0.0)
    return Quality("", "", 1, 2, 1, 1, None, one, found)


@pytest.mark.parametrize(
    ("value", "half_width", "status"),
    [(0.04, 0.01, "passed"), (0.04, 0.0101, "failed"), (0.01, None, "unchecked")],
)
def test_the_upper_end_of_the_interval_must_be_within_the_limit(
    value: float, half_width: float | None, status: str
) -> None:
    kl, _ = check_losses(compared(Estimate(value, half_width)), CheckLimits(max_kl=0.05), "here")
    assert kl.status == status


def test_table_and_junit_show_every_check(made: Path, tmp_path: Path) -> None:
    result = run("check", made, "--max-bytes", "1K", "--junit", tmp_path / "report.xml")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and [line.split()[0] for line in lines] == ["check", *NAMES]
    assert lines[6].split()[2] == "1,024"
    suite = ET.parse(tmp_path / "report.xml").getroot()[0]
    assert suite.tag == "testsuite" and suite.get("name") == f"moe-pack check {made}"
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "1", "3")
    assert [case.get("name") for case in suite] == NAMES
    children = {case.get("name"): case[0].tag for case in suite}
    assert children["bytes"] == "failure" and children["kl"] == "skipped" and children["schema"] == "system-out"


def test_junit_holds_characters_that_xml_cannot() -> None:
    raw = junit_xml([CheckResult("schema", "failed", "a\x00b\x1b<&\ud800", "c", seconds=0.25)], "s")
    root = ET.fromstring(raw)
    assert root[0][0][0].get("message") == "a?b?<&?; allowed: c"
    assert [element.get("time") for element in (root, root[0], root[0][0])] == ["0.250"] * 3


def test_no_sentence_of_junit_has_a_gap(made: Path, tmp_path: Path) -> None:
    done("check", made, "--junit", tmp_path / "check.xml")
    skipped = [case[0].get("message") for case in ET.parse(tmp_path / "check.xml").getroot()[0][3:]]
    unknown = "not measured; no limit"
    assert skipped == [unknown, unknown, f"{content_bytes(made):,}; no limit", "no limit"]


def test_a_summary_is_appended_as_a_table_whose_cells_hold_any_text(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert run("check", made, "--max-bytes", "1K", "--summary", path).exit_code == 1
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "before" and lines[1].startswith("### moe-pack check ")
    rows = [line.split(" | ") for line in lines[3:]]
    assert [row[0].removeprefix("| ") for row in rows] == ["check", "---", *NAMES, ""][: len(rows)]
    assert "❌ failed" in lines[3 + 2 + NAMES.index("bytes")]
    odd = markdown_table([CheckResult("schema", "failed", "a|b\n<img> `c` *d* \\", "e")], "t")
    assert odd.splitlines()[-2 if odd.endswith("\n\n") else -1].startswith("| schema | ❌ failed | a\\|b \\<img\\> ")


def test_a_failure_counts_for_more_than_what_could_not_be_checked() -> None:
    results = {status: CheckResult("kl", status, "") for status in ("passed", "failed", "skipped", "unchecked")}
    codes = {"passed": 0, "skipped": 0, "failed": 1, "unchecked": 3}
    assert {name: exit_code_of([result]) for name, result in results.items()} == codes
    assert exit_code_of(list(results.values())) == 1


def test_wrong_usage_is_said(made: Path) -> None:
    cases = [
        (["--max-ppl-increase", "1"], "found '1', expected a percentage such as 1% or 0.5%"),
        (["--max-ppl-increase", "-1%"], "found '-1%', expected a percentage such as 1% or 0.5%"),
        (["--max-ppl-increase", "nan%"], "found 'nan%', expected a percentage such as 1% or 0.5%"),
        (["--max-kl", "-1"], "-1.0 is not in the range x>=0"),
        (["--budget", "much"], "found 'much', expected a size such as 11G, 1.5G or 512M"),
        (["--sample", "512"], "--sample needs a loss to measure; give --against, and --max-kl or --max-ppl-increase"),
    ]
    for arguments, message in cases:
        with case(arguments, message):
            result = run("check", made, *arguments)
            assert result.exit_code == 2 and message in result.stderr
