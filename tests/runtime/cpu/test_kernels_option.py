"""`moe-run` with native kernels, at most some of them, or none: the same text, and errors that say what is lacking."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import moe_run as run
from support.models import DEMO_MODEL, pack
from support.native import INSTRUCTION_SETS, kernels_limited_to
from support.waiting import HANG_S

from moe_pack.runtime.cpu import Kernels, is_available, open_kernels
from moe_pack.runtime.cpu.kernels import InstructionSet

PROMPT = ["--prompt", "It was a dark night", "--max-tokens", "12", "--temperature", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture(autouse=True)
def one_torch_thread_again() -> Iterator[None]:
    """The command sets the threads of torch for its process, which here is that of other tests."""
    yield
    torch.set_num_threads(1)


# One process for all that is asked of an installation without kernels: as where no compiler was found, the extension
# cannot be imported.
WITHOUT = """
import json, sys
sys.modules["moe_pack.runtime.cpu._native"] = None
import torch
from click.testing import CliRunner
from moe_pack.runtime.cli.main import main
from moe_pack.runtime.cpu import is_available, open_kernels

torch.set_num_threads(1)
found = {"available": is_available(), "opened": repr(open_kernels())}
for kernels in ("auto", "portable", "neon", "avx2", "avx512", "avx512vbmi", "torch"):
    options = [*sys.argv[1:], "--threads", "1", "--stats", "--kernels", kernels]
    result = CliRunner().invoke(main, options, prog_name="moe-run")
    found[kernels] = result.exit_code, result.stdout, result.stderr
sys.stdout.write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def without(demo: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", WITHOUT, str(demo), *PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@cache
def torch_text(demo: Path) -> str:
    """The greedy continuation by plain torch."""
    result = run(demo, *PROMPT, "--kernels", "torch", "--threads", 1)
    assert result.exit_code == 0 and len(result.stdout) > 12
    return result.stdout


@pytest.mark.parametrize("kernels", ["auto", *INSTRUCTION_SETS])
def test_kernels_write_the_text_that_torch_writes(kernels: str, demo: Path) -> None:
    kernels_limited_to("portable" if kernels == "auto" else kernels)
    result = run(demo, *PROMPT, "--kernels", kernels)
    assert (result.exit_code, result.stdout, result.stderr) == (0, torch_text(demo), "")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_any_number_of_threads_writes_the_same_text(kernels: str, demo: Path) -> None:
    one, two = (run(demo, *PROMPT, "--max-tokens", 4, "--kernels", kernels, "--threads", n) for n in (1, 2))
    assert one.exit_code == two.exit_code == 0
    assert one.stdout == two.stdout != ""


@pytest.mark.parametrize("threads", ["0", "-1", "1025", "two"])
def test_a_wrong_number_of_threads_is_a_usage_error(threads: str, demo: Path) -> None:
    result = run(demo, *PROMPT, "--threads", threads)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--threads" in result.stderr


def test_unknown_kernels_are_a_usage_error(demo: Path) -> None:
    result = run(demo, *PROMPT, "--kernels", "sse2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--kernels" in result.stderr


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_statistics_say_what_computed(instruction_set: str, threads: int, demo: Path) -> None:
    kernels_limited_to(instruction_set)
    result = run(demo, *PROMPT, "--kernels", instruction_set, "--threads", threads, "--stats")
    expected = f"computed by      native kernels, {instruction_set}, {threads} thread{'s' if threads > 1 else ''}\n"
    assert expected in result.stderr


def test_statistics_say_when_torch_computed(demo: Path) -> None:
    kernels_limited_to("portable")
    result = run(demo, *PROMPT, "--kernels", "torch", "--threads", 1, "--stats")
    assert "computed by      torch on cpu, 1 thread\n" in result.stderr


@pytest.mark.parametrize("instruction_set", ["neon", "avx2", "avx512", "avx512vbmi"])
def test_instructions_that_the_machine_lacks_are_refused(instruction_set: InstructionSet, demo: Path) -> None:
    if not is_available():
        pytest.skip("native kernels were not built: no C++ compiler")
    found = Kernels(1, instruction_set).instruction_set
    result = run(demo, *PROMPT, "--kernels", instruction_set)
    if found == instruction_set:
        assert result.exit_code == 0
    else:
        assert result.exit_code == 1
        refused = f"moe-run: --kernels {instruction_set}: this machine cannot run these kernels; use --kernels auto\n"
        assert result.stderr == refused


@pytest.mark.slow
def test_an_installation_without_kernels_has_none(without: dict[str, Any]) -> None:
    assert (without["available"], without["opened"]) == (False, "None")


def test_an_installation_with_kernels_opens_them() -> None:
    kernels_limited_to("portable")
    opened = open_kernels(1)
    assert is_available() and opened is not None
    opened.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_without_kernels_torch_writes_the_same_text(kernels: str, demo: Path, without: dict[str, Any]) -> None:
    assert without[kernels][:2] == [0, torch_text(demo)]


def test_without_kernels_statistics_say_what_to_do(without: dict[str, Any]) -> None:
    line = "torch, 1 thread; native kernels were not built; install a C++ compiler, then install moe-pack again"
    assert f"computed by      {line}\n" in without["auto"][2]


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_kernels_asked_for_by_name_where_there_are_none_are_refused(kernels: str, without: dict[str, Any]) -> None:
    message = "native kernels were not built; install a C++ compiler, then install moe-pack again"
    assert without[kernels] == [1, "", f"moe-run: {message}\n"]
