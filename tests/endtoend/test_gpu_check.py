"""`make gpu-check` without a GPU: parts that cost one another nothing, whole files, tools' reports, a bare machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import pytest
import torch
from click.testing import CliRunner, Result
from gpu import checks, engines
from gpu.engines import EngineRequest
from gpu.kernels import QWEN3, _routes
from gpu.measuring import Clock, Results, setting
from gpu.runs import compact, compact_text
from gpu_check import PARTS, Ended, main, run_call, run_part, table
from gpu_report import main as report
from packaging.requirements import Requirement
from support.native import quick_compiler

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PART = """
import subprocess, time
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Row:
    number: int

def fails():
    raise ValueError("this section fails")

def run(results, clock):
    results.add(Row(1))
    results.section("bad", fails)
    child = subprocess.Popen(["sleep", "600"], process_group=0) if {seconds} else None
    results.add(Row(child.pid if child else 2))
    time.sleep({seconds})
"""


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A part of two rows and a section that fails between them; then it takes a while, as does what it started."""
    (folder / "gpu_made.py").write_text(PART.format(seconds=seconds))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


def read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text())
    return whole


def new_results(folder: Path) -> Results:
    return Results(folder / "part.json", "part", False, setting(True), [], "2026-01-01T00:00:00+00:00")


# --- parts and calls


@pytest.mark.slow  # it takes as long as the part may
def test_a_part_that_takes_too_long_is_ended_with_all_it_started_and_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, monkeypatch, 600)
    for limit_s in (20, 60, 180, 540):  # longer on a machine that is so busy that torch is not imported by then
        ended = run_part("made", tmp_path / "made.json", limit_s, "", is_rehearsal=True)
        assert ended.state == f"stopped after {limit_s} s"
        if ended.num_rows == 2:
            break
    assert ended.num_rows == 2
    whole = read(tmp_path / "made.json")
    assert whole["state"] == ended.state
    child = Path(f"/proc/{whole['rows'][1]['number']}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z", (
        "what a part starts ends with it"
    )


@pytest.mark.slow
def test_a_section_that_fails_is_told_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, monkeypatch, 0)
    ended = run_part("made", tmp_path / "made.json", 100, "", is_rehearsal=True)
    whole = read(tmp_path / "made.json")
    assert [row["number"] for row in whole["rows"]] == [1, 2]
    assert whole["state"] == ended.state == "failed"
    assert whole["errors"]["bad"].endswith("ValueError: this section fails")
    assert str(ROOT) not in whole["errors"]["bad"], "results are published: they name no folder of the machine"
    assert 'File "tests/bench/gpu/measuring.py"' in whole["errors"]["bad"]
    assert table([ended])[-1] == "made, bad: ValueError: this section fails"


def test_a_part_is_not_begun_when_no_time_is_left(tmp_path: Path) -> None:
    ended = run_part("sweep", tmp_path / "sweep.json", 1, "", is_rehearsal=True)
    assert ended == Ended("sweep", tmp_path / "sweep.json", "not begun: no time left", 0, 0.0, {})
    assert not (tmp_path / "sweep.json").exists()


def test_the_limits_of_parts_add_up_to_those_of_calls_and_both_calls_fit_a_quarter_of_an_hour() -> None:
    """With half a minute for the native kernels, and two minutes for the machine."""
    assert gpu_check._CALL_SECONDS == {1: 480, 2: 300, 3: 300} and gpu_check._USUAL_CALLS == (1, 2)
    assert sum(gpu_check._CALL_SECONDS[call] for call in gpu_check._USUAL_CALLS) <= 15 * 60 - 120
    assert next(iter(PARTS)) == "preflight"
    for call, other_s in ((1, 30), (2, 0), (3, 0)):
        assert (
            sum(part.seconds for part in PARTS.values() if part.call == call) + other_s <= gpu_check._CALL_SECONDS[call]
        )


def test_the_time_of_the_build_is_the_first_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, clock = list[float](), [0.0]

    def run(names: list[str], stem: Path, limit_s: float, revision: str, is_rehearsal: bool) -> list[Ended]:
        limits.append(limit_s)
        return []

    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "setting", lambda is_rehearsal: SimpleNamespace(gpu=None))
    monkeypatch.setattr(gpu_check, "run_call", run)
    monkeypatch.setattr(gpu_check, "_prepare", lambda: clock.__setitem__(0, 25.0))
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock[0], strftime=lambda _: "DAY"))
    assert CliRunner().invoke(main, ["--out", str(tmp_path)]).exit_code == 0
    assert limits == [455.0, 300.0]


def test_each_expert_has_as_many_rows_as_a_product_says() -> None:
    for expert_rows in (4, 1024):
        tokens = expert_rows * QWEN3.num_experts // QWEN3.k
        routes = _routes(QWEN3, tokens)
        assert routes.shape == (tokens, QWEN3.k) and all(len(set(row)) == QWEN3.k for row in routes.tolist())
        assert set(Counter(routes.reshape(-1).tolist()).values()) == {expert_rows}


def stopped(name: str, path: Path, limit_s: float, revision: str, is_rehearsal: bool) -> Ended:
    return Ended(name, path, "failed" if name == "preflight" else "done", 0, 1.0, {})


def test_a_machine_that_is_not_fit_is_asked_for_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_part", stopped)
    ended = run_call(["preflight", "twins", "demo"], tmp_path / "gpu", 540, "", is_rehearsal=False)
    assert [part.name for part in ended] == ["preflight"]
    assert [part.name for part in run_call(["twins", "demo"], tmp_path / "gpu", 540, "", False)] == ["twins", "demo"]


@pytest.mark.slow
def test_results_go_to_the_folder_that_out_names_as_one_file_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_prepare", lambda: None)
    made(tmp_path, monkeypatch, 0)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    done = CliRunner().invoke(main, ["--rehearse", "--part", "families,qwen36", "--revision", "abc"])
    assert done.exit_code == 0, done.output
    assert "its times mean nothing" in done.stderr
    paths = sorted((tmp_path / "out").iterdir())
    assert [re.sub(r"\d{4}-\d\d-\d\d", "DAY", path.name) for path in paths] == [
        "gpu-none-DAY-call1.json",
        "gpu-none-DAY-call2.json",
    ]
    whole = read(paths[0])
    assert whole["rehearsal"] is True and whole["gpu"] is None
    (part,) = whole["parts"]
    assert (part["part"], part["state"]) == ("families", "done")
    assert {row["kind"] for row in part["rows"]} == {"FamilyAnswers"}
    (part,) = read(paths[1])["parts"]
    rows = [row for row in part["rows"] if row["kind"] == "RowsSpeed"]
    assert {(row["how"], row["rows"]) for row in rows} == set(product(("requests", "drafts"), (1, 2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "twins,engine"], "--part: found engine, expected some of preflight, twins"),
        (["--call", "4"], "--call: found '4', expected some of 1, 2, 3"),
    ],
)
def test_unknown_parts_and_calls_are_refused_with_the_names_of_all(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_missing_package_ends_the_preflight_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("torch", "no-such-package"))
    results = new_results(tmp_path)
    with pytest.raises(checks.UnfitError, match=r"package no-such-package: .*; install no-such-package"):
        checks.preflight(results, Clock(CPU, True))
    assert "page-locking 1 GiB" in [row["name"] for row in results.rows], "all that is wrong is told at once"


# --- packs


@pytest.mark.parametrize(("in_memory", "on_disk", "found"), [(40, 0, "memory"), (10, 40, "disk"), (10, 10, None)])
def test_a_pack_lies_where_there_is_space(
    in_memory: int, on_disk: int, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system in memory may be much smaller than the memory: that it may be written to says nothing."""
    free = {tmp_path / "memory": in_memory << 30, tmp_path / "disk": on_disk << 30}
    monkeypatch.setattr(engines, "_folders", lambda is_rehearsal: list(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    if found is None:
        with pytest.raises(OSError, match=r"^mixtral: needs 21,474,836,480 bytes; free are .*memory 8,589,934,592"):
            engines.folder_for("mixtral", 20 << 30, False)
    else:
        assert engines.folder_for("mixtral", 20 << 30, False) == tmp_path / found / "mixtral"


def test_engines_are_told_how_much_host_memory_they_may_take() -> None:
    """The free memory of a virtual machine may show only when it is used: 75% of that may be less than a pack."""
    assert EngineRequest("auto").options(17 << 30).ram_bytes == 17 << 30
    assert EngineRequest("auto", ram_bytes=6 << 30).options(17 << 30).ram_bytes == 6 << 30


# --- processes that die, and NVIDIA's tools, by stand-ins

# Cases 0 to 4, of which 1 is wrong, 2 ends the process, and 3 fails and leaves a GPU that runs no more.
DYING = """
import json, os, signal, sys
for number in range(int(sys.argv[3]), 5):
    print(json.dumps({"kernels": "kernel", "case": str(number)}), flush=True)
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 3:
        print(json.dumps({"fault": "CUDA error: an illegal memory access", "seconds": 0.1}), flush=True)
        sys.exit(3)
    event = {"error": float(number == 1), "bound": 0.5, "is_right": number != 1, "seconds": 0.1}
    print(json.dumps(event), flush=True)
"""


def test_a_kernel_that_ends_its_process_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases.py").write_text(DYING)
    monkeypatch.setattr(checks, "_CASES", tmp_path / "cases.py")
    results = new_results(tmp_path)
    checks.twins(results, Clock(CPU, False))
    assert [(row["case"], row["is_right"]) for row in results.rows] == [("0", True), ("1", False), ("4", True)]
    assert results.errors == {
        "kernel: 1": "differs from its twin by 1, allowed 0.5",
        "kernel: 2": "the process died: SIGSEGV",
        "kernel: 3": "CUDA error: an illegal memory access",
    }


# What compute-sanitizer writes of a load outside of an allocation, shortened.
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at _gemv+0x7d0
========= ERROR SUMMARY: 1 error
"""
TWO_CASES = """
import json
for case, is_right in (("right", True), ("wrong", False)):
    print(json.dumps({"kernels": "kernel", "case": case}))
    print(json.dumps({"error": 0.0 if is_right else 1.0, "bound": 0.5, "is_right": is_right, "seconds": 0.1}))
"""


@pytest.mark.parametrize("is_clean", [True, False])
def test_what_compute_sanitizer_finds_is_told(is_clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "========= ERROR SUMMARY: 0 errors\n" if is_clean else INVALID
    tool = tmp_path / "compute-sanitizer"
    # Its arguments: five options and their values, LOG the fourth's, then PYTHON CASES DEVICE SIZE FIRST.
    body = f"shift 10\n\"$@\"\ncat > $log <<'END'\n{log}END\nexit {0 if is_clean else 9}\n"
    tool.write_text(f"#!/bin/sh\nlog=$8\n{body}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "cases.py").write_text(TWO_CASES)
    monkeypatch.setattr(checks, "_CASES", tmp_path / "cases.py")
    results = new_results(tmp_path)
    checks.sanitize(results, Clock(CPU, False))
    rows = {row["tool"]: row for row in results.rows}
    assert rows["none"]["cases"] == rows["memcheck"]["cases"] == 2
    assert {name for name in results.errors if "," in name} == {f"{tool}, kernel: wrong" for tool in rows}, (
        "a kernel that does nothing misuses no memory"
    )
    assert rows["memcheck"]["is_clean"] is is_clean
    assert rows["memcheck"]["summary"] == f"ERROR SUMMARY: {'0 errors' if is_clean else '1 error'}"
    assert ("Invalid __global__ read" in rows["memcheck"]["first_lines"]) is not is_clean
    assert ("memcheck" in results.errors) is not is_clean
    assert [path.name for path in tmp_path.glob("part*")] == ["part.json"], "logs are read, and go"


# --- the report


@dataclass(frozen=True)
class Said:
    """The content of a call's file."""

    day: str = "2026-11-23"
    is_rehearsal: bool = False
    decode_per_s: float = 40.0
    has_ncu: bool = True
    commit: str = "abc"
    gpu: str = "GPU X"

    def write(self, path: Path) -> Path:
        wanted = {"misses": "auto", "policy": "auto", "budget_bytes": 11 << 30, "kv_dtype": None, "ram_bytes": None}
        speed: dict[str, Any] = {"kind": "Speed", "pack": "mixtral", "wanted": wanted, "prompt_tokens": 128}
        figures = ["prefill_per_s", "median_token_ms", "resident", "pulled", "left", "whole_per_token"]
        figures += ["bytes_per_token", "disk_bytes_per_token", "link_share", "cpu_share"]
        speed |= dict.fromkeys(figures, 0.5)
        rows: list[dict[str, Any]] = [speed | {"decode_per_s": self.decode_per_s}, {"kind": "Twin", "is_right": True}]
        counted = {"kind": "Metric", "model": "mixtral", "kernel": "_gemv", "case": "4096x4096"}
        if self.has_ncu:
            rows.append(counted | {"metric": "Registers Per Thread", "unit": "register/thread", "value": "80"})
        rows.append(counted | {"metric": "L2 Hit Rate", "unit": "%", "value": "n/a"})
        part: dict[str, Any] = {"part": "mixtral", "state": "failed", "date": f"{self.day}T10:00:00", "rows": rows}
        part["errors"] = {"12 GiB": "Traceback\nRunError: too little"}
        whole = {"gpu": {"name": self.gpu}, "cores": 16, "cpu": "CPU", "versions": {"torch": "2", "triton": "3"}}
        path.write_text(json.dumps(whole | {"rehearsal": self.is_rehearsal, "revision": self.commit, "parts": [part]}))
        return path


def reported(folder: Path, *files: Path, options: tuple[str, ...] = ()) -> Result:
    (folder / "out").mkdir()
    return CliRunner().invoke(report, [*map(str, files), "-o", str(folder / "out"), "--no-predictions", *options])


def test_the_report_has_each_gpus_last_figures_what_failed_and_a_picture(tmp_path: Path) -> None:
    files = [Said().write(tmp_path / "a-call3.json")]
    files.append(Said("2026-12-01", decode_per_s=60.0, commit="def", has_ncu=False).write(tmp_path / "b-call3.json"))
    files.append(Said("2026-12-02", decode_per_s=50.0, gpu="GPU Y").write(tmp_path / "c-call3.json"))
    done = reported(tmp_path, *reversed(files))
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "| run | pack | misses | policy | ram_bytes | budget_bytes | 128 |" in page
    assert "| 2 | mixtral | auto | auto | all | 11 GiB | 60 |" in page
    assert "| 3 | mixtral | auto | auto | all | 11 GiB | 50 |" in page
    assert "| 1 | mixtral |" not in page, "a later run of the same GPU measured it again"
    assert "- What failed: `mixtral`, 12 GiB: RunError: too little" in page
    assert page.count("- 1 of 1 kernel cases equal their twins.") == 3
    assert "| 1 | _gemv | 4096x4096 | 80 |" in page, "the later run has none"
    assert "L2 Hit Rate" not in page, "what ncu could not count is no figure"
    drawn = (tmp_path / "out" / "gpu.svg").read_text()
    assert "run 2, GPU X, auto" in drawn and "run 3, GPU Y, auto" in drawn


def test_a_compact_file_has_a_line_a_measurement_and_says_the_same(tmp_path: Path) -> None:
    assert reported(tmp_path, Said().write(tmp_path / "a-call3.json")).exit_code == 0
    (path,) = (tmp_path / "out").glob("gpu-*.json")
    assert path.name == "gpu-gpu-x-2026-11-23-abc-call3.json"
    speeds = [line for line in path.read_text().splitlines() if '"Speed"' in line]
    assert len(speeds) == 1 and '"decode_per_s": {"128": 40.0}' in speeds[0]
    whole = read(path)
    assert compact(whole) == whole and json.loads(compact_text(whole)) == whole
    page = (tmp_path / "out" / "gpu.md").read_text()
    done = CliRunner().invoke(report, ["-o", str(tmp_path / "out"), "--no-predictions"])
    assert done.exit_code == 0 and (tmp_path / "out" / "gpu.md").read_text() == page


def test_rehearsals_are_no_results(tmp_path: Path) -> None:
    file = replace(Said(), is_rehearsal=True).write(tmp_path / "a-call3.json")
    done = reported(tmp_path, file)
    assert done.exit_code == 2 and "whose times mean nothing" in done.stderr
    assert not (tmp_path / "out" / "gpu.md").exists()


# --- a machine on which nothing is installed


def bare_python(folder: Path, packages: list[str]) -> Path:
    """The Python of an environment that has these packages and what they require, and nothing else."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    done, todo = set[str](), list(packages)
    while todo:
        name = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in done:
            continue
        done.add(key)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        required = [Requirement(text) for text in found.requires or ()]
        todo += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return folder / "bin" / "python"


def rehearsed(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Runs `make gpu-check` by the interpreter in a copy of the repository, and returns what each part wrote.

    Its Python has nothing but what the page names.
    """
    python = bare_python(tmp_path / "venv", list(checks._PACKAGES))
    for missing in ("moe_pack", "pytest", "hqq", "datasets", "transformers"):
        done = subprocess.run([python, "-I", "-c", f"import {missing}"], capture_output=True, text=True, check=False)
        assert "ModuleNotFoundError" in done.stderr, missing
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "copy" / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OUT": str(tmp_path / "out"), "TRITON_INTERPRET": "0"}
    if shutil.which("g++"):
        (tmp_path / "bin").mkdir()
        environment["PATH"] = f"{quick_compiler(tmp_path / 'bin').parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={python}", *options],
        cwd=tmp_path / "copy",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {part["part"]: part for path in (tmp_path / "out").iterdir() for part in read(path)["parts"]}


@pytest.mark.slow
def test_a_part_runs_where_nothing_is_installed_but_what_the_page_names(tmp_path: Path) -> None:
    parts = rehearsed(tmp_path, "PART=preflight")
    assert {name: part["state"] for name, part in parts.items()} == {"preflight": "done"}
    assert parts["preflight"]["rows"]


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("MOE_PACK_REHEARSE") != "1",
    reason="all of gpu-check by the interpreter takes minutes: MOE_PACK_REHEARSE=1",
)
def test_every_part_runs_where_nothing_is_installed_but_what_the_page_names(tmp_path: Path) -> None:
    parts = rehearsed(tmp_path, "CALL=1,2,3")
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(PARTS, "done")
    kinds = {name: {row["kind"] for row in part["rows"]} for name, part in parts.items()}
    assert kinds["demo"] == {"Answers", "Promise"}
    assert kinds["qwen3"] == {"Opened", "Speed"}
    assert kinds["mixtral"] == kinds["qwen36"] == {"Opened", "Speed", "RowsSpeed"}
    answers = [row for row in parts["demo"]["rows"] if row["kind"] == "Answers"]
    # Each token's logits are its own: were they one memory's, all but the last would differ.
    assert all(row["tokens"] >= 3 and row["worst_token"] < 1e-4 and row["greedy_equal"] for row in answers)
    assert {row["wanted"]["misses"] for row in answers} == {"auto", "cpu", "pull"}
    assert all(row["resident"] < 1 or row["whole_per_token"] for row in answers if row["wanted"]["misses"] != "pull")
    speeds = [row for row in parts["mixtral"]["rows"] if row["kind"] == "Speed"]
    assert all(row["decode_tokens"] >= 2 for row in speeds)
    assert {row["wanted"]["budget_bytes"] is None for row in speeds} == {True, False}
