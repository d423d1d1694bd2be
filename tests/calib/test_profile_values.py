"""Values that no measurement gives, in every number of a profile: each command that reads it says so in one line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.cases import case
from support.models import TinyMixtral
from support.profiles import copied, reseal

from moe_pack.convert.cli.main import main
from moe_pack.formats import RunError
from moe_pack.formats.pack.safetensors import read_header

MODEL = TinyMixtral(num_layers=2, num_experts=4, intermediate_size=64, vocab_size=4096)
COMMANDS = ("plan", "report", "imatrix", "convert", "attach")
# Tensors in which NaN stands for a figure that nothing measured.
WITH_NAN = ("cosine", "experts", "neurons")
NUMPY = {"U8": "<u1", "U16": "<u2", "BF16": "<u2", "U32": "<u4", "F32": "<f4"}
IMPOSSIBLE: dict[str, list[float]] = {
    "U8": [2**8 - 1], "U16": [2**16 - 1], "U32": [2**32 - 1], "BF16": [0x7F80, 0x7FC0, 0x7F7F],
    "F32": [np.nan, np.inf, -1.0, 3e38],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    options = ["--tokens", "256", "--sequence-length", "64"]
    done = CliRunner().invoke(main, ["profile", str(source), "-o", str(folder), *options])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ended(command: str, source: Path, profile: Path, out: Path) -> str:
    """Runs a command that reads a profile. Returns its error, empty if it has none; a traceback fails the test."""
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, list[object]] = {
        "plan": [source, "--profile", profile, "--target-vram", "40M", "--device", "cpu", "--context", 64],
        "report": [profile, "-o", out.with_suffix(".html")],
        "imatrix": [profile, "-o", out.with_suffix(".gguf")],
        "convert": [source, "-o", out, "--profile", profile, "--record-bits", 2, "--selector", "none"],
        "attach": [source.with_name("pack"), "--profile", profile],
    }
    if command == "attach" and not options[command][0].exists():  # type: ignore[attr-defined]  # a path
        made = ["convert", str(source), "-o", str(options[command][0]), "--record-bits", "4", "--selector", "none"]
        assert CliRunner().invoke(main, made).exit_code == 0
    result = CliRunner().invoke(main, [command, *map(str, options[command])], prog_name="moe-pack")
    assert result.exit_code in (0, 1), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code == 0:
        return ""
    assert result.stderr.splitlines()[-1].startswith("moe-pack: "), result.stderr
    return result.stderr.splitlines()[-1]


def with_value(profile: Path, to: Path, file: str, tensor: str, value: float) -> Path:
    """Returns a copy of a profile with a value of a tensor in place of its first; a BF16 value by its bits."""
    folder = copied(profile, to)
    (entry,) = (each for each in read_header(folder / file, RunError) if each.name == tensor)
    raw = bytearray((folder / file).read_bytes())
    first = np.array([value], NUMPY[entry.dtype]).tobytes()[: entry.num_bytes]
    raw[entry.offset : entry.offset + len(first)] = first
    (folder / file).write_bytes(raw)
    reseal(folder, lambda values: None)
    return folder


def test_impossible_figures_of_losses_end_a_plan_with_the_file_and_the_tensor(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    cases = [
        ("sensitivity-000.safetensors", name, value)
        for name in ("dense", "quantized", "repeated", "ratios", "calibrated")
        for value in (np.nan, -1, np.inf)
    ]
    cases += [("effects.safetensors", "growth", value) for value in (np.nan, -1, 0, np.inf, 3e38)]
    cases += [("effects.safetensors", name, np.nan) for name in ("embedding", "head", "copies", "nll_per_kl")]
    for number, (file, tensor, value) in enumerate(cases):
        with case(file, tensor, value):
            damaged = with_value(profile, tmp_path / str(number), file, tensor, value)
            assert ended("plan", source, damaged, tmp_path / "out").startswith(
                f"moe-pack: {file}: tensor '{tensor}' is {np.float32(value)!s} at ["
            )


def numbers(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all numbers, of lists only the first items'."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from numbers(value, (*path, key))
    elif isinstance(values, list):
        for place, value in enumerate(values[:1]):
            yield from numbers(value, (*path, place))
    elif type(values) in (int, float):
        yield path


def put(values: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


def test_impossible_numbers_in_profile_json_are_refused(source: Path, profile: Path, tmp_path: Path) -> None:
    damaged = copied(profile, tmp_path / "damaged")
    whole = (damaged / "profile.json").read_bytes()
    texts = [path for path in numbers(json.loads(whole)) if path[0] in ("text", "version")]
    assert len(texts) == 5
    for path in texts:
        for value in (np.nan, np.inf, -1, 2**62, 10**400, 1e308, "x", None, []):
            with case(path, str(value)[:20]):
                (damaged / "profile.json").write_bytes(whole)
                reseal(damaged, lambda values, path=path, value=value: put(values, path, value))
                assert ended("report", source, damaged, tmp_path / "out").startswith("moe-pack: profile.json: ")


@pytest.mark.slow
def test_no_command_takes_an_impossible_number_or_ends_with_a_traceback(
    source: Path, profile: Path, tmp_path: Path
) -> None:
    for file in sorted(profile.glob("*.safetensors")):
        if "-001" in file.name and not file.name.startswith("predictors"):
            continue  # as those of the first layer
        for entry in read_header(file, RunError):
            for value in IMPOSSIBLE[entry.dtype]:
                damaged = with_value(profile, tmp_path / "damaged", file.name, entry.name, value)
                with case(file.name, entry.name, value):
                    said = [ended(command, source, damaged, tmp_path / "out") for command in COMMANDS]
                    is_figure = entry.num_bytes and not entry.name.startswith("pad.")
                    if is_figure and np.isnan(value) and entry.name not in WITH_NAN:
                        assert any(said), "no command noticed"
                shutil.rmtree(damaged)
    damaged = copied(profile, tmp_path / "damaged")
    whole = (damaged / "profile.json").read_bytes()
    for path in numbers(json.loads(whole)):
        for value in (np.nan, -1, 2**62, 1e308, "x", None):
            (damaged / "profile.json").write_bytes(whole)
            reseal(damaged, lambda values, path=path, value=value: put(values, path, value))
            for command in ("plan", "report", "imatrix"):
                with case(path, value, command):
                    ended(command, source, damaged, tmp_path / "out")
