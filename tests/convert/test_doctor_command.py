"""`moe-pack doctor`, in-process: the table, the JSON, what is kept, what is refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moe_pack.convert.cli.main import main
from moe_pack.formats import dump
from moe_pack.runtime import load_facts


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(cache: Path, *arguments: str) -> Result:
    environment = {"XDG_CACHE_HOME": str(cache)}
    command = ["doctor", "--seconds", "0.001", *arguments]
    return CliRunner().invoke(main, command, prog_name="moe-pack", env=environment)


@pytest.mark.slow
def test_a_table_says_what_was_measured_and_where_it_is_kept(tiny_pack: Path, cache: Path) -> None:
    result = run(cache, "--path", str(tiny_pack))
    assert result.exit_code == 0, result.output
    facts = load_facts(cache / "moe-pack", tiny_pack)
    assert facts is not None
    said = result.stdout.splitlines()
    assert said[0].startswith(f"disk {facts.drive.name or 'without a name'}, at {tiny_pack.resolve()}: ")
    assert said[0].endswith("of this pack")
    (row,) = (line for line in said if line.strip().startswith("4 KiB"))
    (rate,) = (one for one in facts.drive.best if (one.mode, one.size) == ("pread", 4096))
    assert f"{rate.rate / 1e6:,.0f} ({rate.threads:>2})" in row
    assert any(line.startswith("smallest efficient read: ") for line in said)
    assert any(line.startswith(f"CPU: {facts.cpu.cores} cores") for line in said)
    assert (
        said[-1].startswith(f"stored in {cache}/moe-pack/doctor-")
        and Path(said[-1].removeprefix("stored in ")).is_file()
    )
    assert "measurements, about " in result.stderr


@pytest.mark.slow
def test_as_json_it_is_what_is_kept(tiny_pack: Path, cache: Path) -> None:
    result = run(cache, "--path", str(tiny_pack), "--json")
    assert result.exit_code == 0, result.output
    facts = load_facts(cache / "moe-pack", tiny_pack)
    assert json.loads(result.stdout) == json.loads(json.dumps(dump(facts)))


def test_a_folder_that_is_missing_is_one_line_and_nothing_is_kept(tmp_path: Path, cache: Path) -> None:
    result = run(cache, "--path", str(tmp_path / "missing"))
    assert result.exit_code == 1
    expected = f"moe-pack: {tmp_path / 'missing'}: no such folder; give a folder on the disk to measure\n"
    assert result.stderr == expected
    assert not cache.exists()
