"""Reading profiles: what a sealed one gives, and every fault of its JSON and its files by exact message."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from support.cases import case
from support.models import TinyMixtral
from support.profiles import SMALLEST, copied, profiled, random_tokens, reseal

from moe_pack.calib.profile import Profile, ProfileOptions
from moe_pack.calib.quantize import ExpertTokens
from moe_pack.convert.cli.main import main
from moe_pack.formats import PackError, RunError
from moe_pack.formats.pack.safetensors import read_header

TOKENS = random_tokens(3, 16, SMALLEST.vocab_size)
STATISTICS = "statistics-001.safetensors"
Values = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    profiled(SMALLEST.write(folder / "source"), folder / "profile", TOKENS)
    return folder / "profile"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return copied(whole, tmp_path / "profile")


def refusal(folder: Path, read: Callable[[Profile], object] = lambda profile: None) -> str:
    with pytest.raises(PackError) as refused:
        read(Profile(folder))
    return str(refused.value)


def opened(profile: Profile, layer_idx: int) -> ExpertTokens:
    with profile.inputs(layer_idx) as inputs:
        return inputs.of_expert(0)


def rewrite(folder: Path, change: Callable[[Values], object]) -> None:
    """Changes profile.json and leaves its digest."""
    values = json.loads((folder / "profile.json").read_text())
    change(values)
    (folder / "profile.json").write_text(json.dumps(values))


def test_a_profile_says_what_it_was_measured_on(whole: Path) -> None:
    profile = Profile(whole)
    text = profile.facts.text
    assert (text.name, text.sha256) == (TOKENS.name, TOKENS.sha256)
    assert (text.num_sequences, text.sequence_length, text.num_held_out, text.num_kept) == (3, 16, 1, 2)
    assert (profile.num_tokens, profile.num_held_out_tokens) == (48, 16)
    assert profile.spec.router.num_experts == 3
    assert {package.name for package in profile.facts.made_with} >= {"moe-pack", "numpy", "torch"}
    assert np.array_equal(profile.tokens().sequences, TOKENS.sequences)


def test_a_profile_gives_its_statistics_and_paths(whole: Path) -> None:
    profile = Profile(whole)
    for layer_idx in range(2):
        assert int(profile.statistics(layer_idx).tokens.sum()) == 48 * 2
    assert profile.paths().popularity.sum(axis=1).tolist() == [32 * 2] * 2
    assert profile.has(STATISTICS) and not profile.has("effects.safetensors")


def test_resealed_without_a_change_a_profile_is_as_it_was(folder: Path, whole: Path) -> None:
    reseal(folder, lambda values: None)
    assert (folder / "profile.json").read_bytes() == (whole / "profile.json").read_bytes()


def test_a_folder_without_profile_json_is_no_profile(folder: Path) -> None:
    (folder / "profile.json").unlink()
    assert refusal(folder) == (
        f"{folder}: found no profile.json; this is not a profile, or it is not finished; "
        "repeat the moe-pack profile command to finish it"
    )


def test_text_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "profile.json").write_text("{")
    assert refusal(folder).startswith("profile.json: not valid JSON (")


def test_a_profile_json_beyond_16_megabytes_is_refused(folder: Path) -> None:
    raw = (folder / "profile.json").read_bytes()
    (folder / "profile.json").write_bytes(raw + b" " * (16_000_000 - len(raw)))
    Profile(folder)
    (folder / "profile.json").write_bytes(raw + b" " * (16_000_001 - len(raw)))
    assert refusal(folder) == "profile.json: 16,000,001 bytes, at most 16,000,000"


OUTDATED = "profile.json: expected format 'moe-pack profile', version 9; profile the model again"
UNSEALED: list[tuple[Callable[[Values], object], str]] = [
    (lambda values: values.update(version=1), OUTDATED),
    (lambda values: values.update(version=0), OUTDATED),
    (lambda values: values.update(version=9.0), "profile.json: version: found 9.0, expected int"),
    (lambda values: values.update(version=7), OUTDATED),  # before partial states were judged
    (lambda values: values.pop("version"), OUTDATED),
    (lambda values: values.update(format="moe-pack"), OUTDATED),
    (lambda values: values.update(extra=1), "profile.json: unknown key 'extra'"),
    (lambda values: values["text"].update(extra=1), "profile.json: text: unknown key 'extra'"),
    (lambda values: values.pop("source"), "profile.json: key 'source' is missing"),
    (lambda values: values["text"].pop("name"), "profile.json: text: key 'name' is missing"),
    (lambda values: values.update(source=1), "profile.json: source: found 1, expected str"),
    (
        lambda values: values["text"].update(num_held_out="1"),
        "profile.json: text: num_held_out: found '1', expected int",
    ),
    (lambda values: values.update(files={}), "profile.json: files: found {}, expected a list"),
    (
        lambda values: values.update(sensitivity="slow"),
        "profile.json: sensitivity: found 'slow', expected one of none, fast, full, exact",
    ),
    (
        lambda values: values.update(sensitivity="fast"),
        "profile.json: SHA-256 does not match its values; profile the model again",
    ),
    (
        lambda values: values.update(sha256="0" * 64),
        "profile.json: SHA-256 does not match its values; profile the model again",
    ),
]


def test_a_changed_profile_json_is_refused(whole: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate(UNSEALED):
        with case(number, message):
            folder = copied(whole, tmp_path / str(number))
            rewrite(folder, change)
            assert refusal(folder) == message


def test_json_of_the_same_values_in_another_layout_is_the_same_profile(folder: Path) -> None:
    rewrite(folder, lambda values: None)
    assert Profile(folder).statistics(1)


READS: list[tuple[str, Callable[[Profile], object]]] = [
    (STATISTICS, lambda profile: profile.statistics(1)),
    ("paths.safetensors", lambda profile: profile.paths()),
    ("tokens.safetensors", lambda profile: profile.tokens()),
    ("predictors-001.safetensors", lambda profile: profile.predictors(1)),
    ("inputs-001.safetensors", lambda profile: opened(profile, 1)),
]


def test_a_file_changed_cut_longer_or_missing_is_refused_when_it_is_read(folder: Path) -> None:
    for name, read in READS:
        raw = (folder / name).read_bytes()
        flipped = [bytearray(raw) for _ in range(3)]
        for offset, changed in zip((0, 8, -1), flipped, strict=True):
            changed[offset] ^= 1
        for number, changed in enumerate((*flipped, raw[:-1], raw + b"\0", b"")):
            with case(name, number):
                (folder / name).write_bytes(changed)
                assert refusal(folder, read) == f"{name}: SHA-256 does not match profile.json; profile the model again"
        (folder / name).unlink()
        assert refusal(folder, read) == f"{name}: file is missing"
        (folder / name).write_bytes(raw)
        assert read(Profile(folder)) is not None


def test_files_that_are_not_listed_are_not_read(folder: Path) -> None:
    (folder / "letter.txt").write_text("mine")
    assert not Profile(folder).has("letter.txt")
    assert refusal(folder, lambda profile: profile.effects()) == (
        f"{folder}: the profile has no effects.safetensors; profile the model with the options that measure it"
    )
    (folder / "effects.safetensors").write_bytes(b"not listed")
    assert refusal(folder, lambda profile: profile.effects()) == (
        f"{folder}: the profile has no effects.safetensors; profile the model with the options that measure it"
    )


FAULTS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    (STATISTICS, "mass", lambda array: None, "tensor 'mass' is missing"),
    (STATISTICS, "more", lambda array: np.zeros(1, np.float32), "unknown tensor 'more'"),
    (STATISTICS, "tokens", lambda array: array.astype("u2"), "tensor 'tokens' is U16 [3], expected U32 [3]"),
    (STATISTICS, "routes", lambda array: array[:-1], "tensor 'routes' is U16 [47, 2], expected U16 [48, 2]"),
    ("paths.safetensors", "popularity", lambda array: array[:1], "tensor 'popularity': found <u4 [1, 3], expected <u4"),
    ("tokens.safetensors", "tokens", lambda a: a[:, 1:], "tensor 'tokens' is U32 [3, 15], expected U32 [3, 16]"),
]


def test_arrays_that_are_not_the_models_are_refused_by_name(whole: Path, folder: Path) -> None:
    reads = dict(READS)
    for name, tensor, change, fault in FAULTS:
        with case(name, fault):
            arrays = load_file(whole / name)
            changed = arrays | {tensor: change(arrays.get(tensor))}
            for kept in (arrays, {each: array for each, array in changed.items() if array is not None}):
                save_file(kept, folder / name)
                reseal(folder, lambda values: None)
                if kept is arrays:
                    reads[name](Profile(folder))
            assert refusal(folder, reads[name]).startswith(f"{name}: {fault}")
            save_file(arrays, folder / name)


def test_inputs_are_checked_once_and_then_read_as_they_are_asked_for(folder: Path) -> None:
    profile = Profile(folder)
    with profile.inputs(0) as inputs:
        before = inputs.rows(torch.tensor([31]))
    with (folder / "inputs-000.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x40")
    with profile.inputs(0) as inputs:
        assert not torch.equal(inputs.rows(torch.tensor([31])), before), "read again from the file"
    assert "SHA-256 does not match" in refusal(folder, lambda profile: profile.inputs(0))


def test_a_profile_without_inputs_says_so(tmp_path: Path) -> None:
    options = ProfileOptions("none", keeps_inputs=False)
    profile = profiled(SMALLEST.write(tmp_path / "source"), tmp_path / "profile", TOKENS, options)
    assert not profile.has_inputs and not list((tmp_path / "profile").glob("inputs-*"))
    assert refusal(tmp_path / "profile", lambda profile: profile.inputs(0)) == (
        f"{tmp_path / 'profile'}: the profile has no inputs-000.safetensors; profile the model with the options that "
        "measure it"
    )


@pytest.mark.parametrize("num_kept", [-1, 3])
def test_more_inputs_than_of_the_text_that_is_not_held_out_are_refused(num_kept: int, folder: Path) -> None:
    reseal(folder, lambda values: values["text"].update(num_kept=2))
    assert Profile(folder).has_inputs
    reseal(folder, lambda values: values["text"].update(num_kept=num_kept))
    expected = "found impossible counts; profile the model again" if num_kept > 0 else "num_kept: found -1, expected "
    assert refusal(folder).startswith(f"profile.json: text: {expected}")


def test_inputs_of_another_number_of_tokens_are_refused(folder: Path) -> None:
    reseal(folder, lambda values: values["text"].update(num_kept=1))
    assert refusal(folder, lambda profile: profile.inputs(1)) == (
        "inputs-001.safetensors: tensor 'experts' is U16 [32, 2], expected U16 [16, 2]"
    )


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
