"""No byte of a pack can change unnoticed: `verify` refuses every change, `moe-run` every change it would use."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral, pack

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.runtime.cli.main import main as moe_run

FILES = [
    "manifest.json", "index.safetensors", "experts-000.safetensors", "experts-001.safetensors", "dense.safetensors",
    "thresholds.safetensors", "order.safetensors", "source.json", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip
RUN = ["--device", "cpu", "--prompt", "It was a dark night", "--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with everything a pack can have: tokenizer, quantized dense matrices, padding, two layers."""
    root = tmp_path_factory.mktemp("any-byte")
    source = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096).write(root / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO_MODEL / name, source / name)
    pack(source, root / "packed", dense_width=4)
    assert sorted(path.name for path in (root / "packed").iterdir()) == sorted(FILES)
    return root / "packed"


@pytest.fixture(scope="module")
def undamaged_text(folder: Path) -> str:
    result = CliRunner().invoke(moe_run, [str(folder), *RUN])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@contextmanager
def changed(path: Path, place: float, difference: int) -> Iterator[str]:
    """Changes one byte of a file until the end of the `with`."""
    raw = path.read_bytes()
    offset = min(int(place * len(raw)), len(raw) - 1)
    path.write_bytes(raw[:offset] + bytes([raw[offset] ^ difference]) + raw[offset + 1 :])
    try:
        yield f"{path.name} byte {offset}"
    finally:
        path.write_bytes(raw)


def changes(times: int) -> Iterator[tuple[str, float, int]]:
    """Bytes to change: of every file its first and last, and `times` anywhere, with a seed that is printed."""
    seed = int(os.environ.get("MOE_PACK_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"MOE_PACK_SEED={seed}")  # noqa: T201  # pytest shows it with a failure
    chance = random.Random(seed)
    for name in FILES:
        for place in (0.0, 1.0, *(chance.random() for _ in range(times))):
            yield name, place, chance.choice((1, 0x80, chance.randrange(1, 256)))


often = pytest.mark.parametrize("times", [8, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"])


def assert_one_line(stderr: str, program: str) -> None:
    """The last line is the error; before it there may be lines of progress."""
    *progress, line = stderr.splitlines()
    assert line.startswith(f"{program}: ")
    assert all(re.match(r"[a-z ]+: ", each) for each in progress), stderr
    assert "Traceback" not in stderr


@often
def test_verify_refuses_every_changed_byte(folder: Path, times: int) -> None:
    for name, place, difference in changes(times):
        with case(name, place, difference):
            with changed(folder / name, place, difference):
                result = CliRunner().invoke(moe_pack, ["verify", str(folder)], prog_name="moe-pack")
            assert (result.exit_code, result.stdout) == (1, "")
            assert_one_line(result.stderr, "moe-pack")


@often
def test_moe_run_refuses_a_changed_byte_or_does_not_use_it(folder: Path, undamaged_text: str, times: int) -> None:
    for name, place, difference in changes(times):
        with case(name, place, difference):
            with changed(folder / name, place, difference):
                result = CliRunner().invoke(moe_run, [str(folder), *RUN], prog_name="moe-run")
            if result.exit_code == 0:
                assert result.stdout == undamaged_text
            else:
                assert result.exit_code == 1
                assert_one_line(result.stderr, "moe-run")
                assert undamaged_text.startswith(result.stdout.rstrip("\n"))


def test_moe_run_refuses_damage_to_what_it_always_reads(folder: Path) -> None:
    cases = ["manifest.json", "index.safetensors", "dense.safetensors", "tokenizer.json"]
    for name in cases:
        with case(name):
            for place in (0.0, 0.3, 0.7, 0.999999):
                with changed(folder / name, place, 1) as where:
                    result = CliRunner().invoke(moe_run, [str(folder), *RUN], prog_name="moe-run")
                assert (result.exit_code, result.stdout) == (1, ""), where


def assert_refused_by_both(folder: Path, name: str) -> None:
    for command, arguments in ((moe_pack, ["verify", str(folder)]), (moe_run, [str(folder), *RUN])):
        result = CliRunner().invoke(command, arguments, prog_name="moe-pack")
        assert (result.exit_code, result.stdout) == (1, "")
        assert_one_line(result.stderr, "moe-pack")
        assert name in result.stderr


def test_a_file_cut_short_or_missing_is_refused_by_both(folder: Path) -> None:
    for name, kept in product(FILES, (None, 0.0, 0.5, 0.99)):
        with case(name, kept):
            raw = (folder / name).read_bytes()
            if kept is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(raw[: int(len(raw) * kept)])
            try:
                assert_refused_by_both(folder, name)
            finally:
                (folder / name).write_bytes(raw)
