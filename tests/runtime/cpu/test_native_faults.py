"""Files cut in use, bus errors and forks, which could end a process: each in a process of its own."""

import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.models import DEMO_MODEL, pack
from support.waiting import HANG_S

_native = pytest.importorskip("moe_pack.runtime.cpu._native", reason="native kernels were not built: no C++ compiler")

CUT = "experts-001.safetensors: was truncated while it was in use; restore the file and start again"
COMMAND = [sys.executable, "-m", "moe_pack.runtime.cli"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture
def copied(demo: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo, tmp_path / "copied")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    whole = f"import sys\nsys.path[:0] = {sys.path!r}\n" + textwrap.dedent(script)  # it finds what tests find
    command = [sys.executable, "-c", whole, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


# Prints the error of using an expert of a file that is cut; `used` before says what has been done with it by then.
USED = """
    import os
    from pathlib import Path
    import torch
    from moe_pack.formats import Pack, PackError
    from moe_pack.runtime.cpu import Kernels
    from moe_pack.runtime.model import NativeOperations
    from moe_pack.runtime.model.pack_weights import MappedPackWeights

    folder, before, then = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    kernels = Kernels(2)

    def use(layer_idx, num_tokens):
        routed, ones = torch.tensor([[5, 6]] * num_tokens), torch.ones(num_tokens, 2)
        return weights.run_experts(layer_idx, torch.ones(num_tokens, 128), routed, ones)

    with Pack(folder) as held:
        weights = MappedPackWeights(held, NativeOperations(kernels))
        weights.expert(1, 0)
        if before == "used":
            use(1, 1)
        os.truncate(folder / "experts-001.safetensors", 4096)
        for num_tokens in (1, 70, 1):  # a later time like the first
            try:
                list(weights.expert(1, 5).blocks()) if then == "blocks" else use(1, num_tokens)
            except PackError as fault:
                sys.stdout.write(f"{fault}\\n")
        assert use(0, 1).isfinite().all() and use(0, 70).isfinite().all()
    kernels.close()
"""


@pytest.mark.parametrize("before", ["mapped", "used"])
def test_a_file_cut_while_it_is_in_use_ends_in_an_error_that_names_it(before: str, copied: Path) -> None:
    """Cut before an expert is checked, or after; other files are used on."""
    done = run(USED, copied, before, "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{CUT}\n" * 3, "")


@pytest.mark.slow
def test_blocks_of_a_cut_file_end_in_an_error_that_names_it(copied: Path) -> None:
    done = run(USED, copied, "used", "blocks")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{CUT}\n" * 3, "")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_run_whose_pack_is_cut_ends_in_one_line(kernels: str, copied: Path) -> None:
    options = ["--prompt", "It was", "--max-tokens", "2000", "--seed", "1", "--threads", "2", "--kernels", kernels]
    options += ["--device", "cpu"]  # named, it needs no line that says which was found
    process = subprocess.Popen([*COMMAND, copied, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)  # it is writing
    with (copied / "experts-001.safetensors").open("r+b") as file:
        file.truncate(4096)
    rest, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert (first + rest).endswith(b"\n")
    line = r"experts-001.safetensors: ends at byte \d+, expected \d+" if kernels == "torch" else re.escape(CUT)
    assert re.fullmatch(rf"[^\n]*: {line}\n", errors.decode())


# The extension alone, which needs no torch and loads at once.
NATIVE = """
    import faulthandler, os
    from importlib.util import module_from_spec, spec_from_file_location
    import numpy as np

    spec = spec_from_file_location("_native", sys.argv[1])
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    path = sys.argv[2]
"""

# A map that no kernel reads, of a file that is cut. `faulthandler` may have been there before the kernels, or come
# after them; opening more of them changes nothing.
BUS_ERROR = """
    pools = []
    for step in sys.argv[3].split():
        if step == "trace":
            faulthandler.enable()
        if step == "kernels":
            pools.append(native.open_pool(2, None))
            native.checksum(pools[-1], np.zeros(1 << 20, np.uint8))
    with open(path, "wb") as file:
        file.truncate(1 << 16)
    held = np.memmap(path, np.uint8, "r")
    os.truncate(path, 0)
    sys.stdout.write(str(held[-1]))
"""


def run_native(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run(NATIVE + script, _native.__file__, *arguments)


@pytest.mark.parametrize("steps", ["kernels", "kernels kernels"])
def test_a_bus_error_elsewhere_still_ends_the_process(steps: str, tmp_path: Path) -> None:
    done = run_native(BUS_ERROR, tmp_path / "cut", steps)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGBUS, "", "")


@pytest.mark.parametrize("steps", ["trace kernels", "trace kernels kernels", "kernels trace", "kernels trace kernels"])
def test_a_bus_error_elsewhere_still_prints_its_trace(steps: str, tmp_path: Path) -> None:
    done = run_native(BUS_ERROR, tmp_path / "cut", steps)
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error\n")
    assert done.stderr.count("Fatal Python error") == 1


# What kernels read is cut, and made whole again.
CHECKSUM = """
    pool = native.open_pool(int(sys.argv[3]), None)
    with open(path, "wb") as file:
        file.truncate(8 << 20)
    held = np.memmap(path, np.uint8, "r")
    whole = native.checksum(pool, held)
    os.truncate(path, 3 << 20)
    last, out = np.array([1], np.int32), np.zeros(4 << 20, np.uint8)
    for operation in (
        lambda: native.checksum(pool, held),
        lambda: native.read(pool, held),
        lambda: native.gather(pool, held, 4 << 20, last, out),
    ):
        for _ in range(3):
            try:
                operation()
            except native.MapCutError:
                sys.stdout.write("cut ")
    os.truncate(path, 8 << 20)
    assert native.checksum(pool, held) == whole
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_after_a_fault_the_kernels_go_on(threads: int, tmp_path: Path) -> None:
    done = run_native(CHECKSUM, tmp_path / "cut", threads)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cut " * 9, "")


# A child has none of its parent's threads. The parent's are asleep when it forks, or still spinning.
FORK = """
    import time
    held = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    pool = native.open_pool(3, None)
    before = native.checksum(pool, held)
    time.sleep(float(sys.argv[3]))
    child = os.fork()
    if child == 0:
        same = native.checksum(pool, held) == before
        own = native.open_pool(2, None)
        same = same and native.checksum(own, held) == before
        del pool, own
        os._exit(0 if same else 3)
    _, status = os.waitpid(child, 0)
    assert native.checksum(pool, held) == before
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("pause", [0, 0.1], ids=["awake", "asleep"])
def test_a_forked_child_computes_and_closes_what_its_parent_opened(pause: float) -> None:
    done = run_native(FORK, "no file", pause)
    assert (done.returncode, done.stderr) == (0, "")
