"""Shared by all tests."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before triton is imported: kernels run one program after the other in numpy, unless a GPU is asked for.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("MOE_PACK_GPU") == "1" else "1")
# A GPU of this machine is hidden from tests and their processes unless it is asked for: `--device auto` would take it.
if os.environ.get("MOE_PACK_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.interpreted_bf16 import correct_bf16
from support.models import DEMO_MODEL, PackMaker, TinyMixtral, pack
from support.quick_interpreter import spare_the_interpreter

from moe_pack.calib.sensitivity import costs
from moe_pack.formats import Selector

# Without clocks: on a busy machine an example takes any time.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Lets Ctrl-C reach the commands that tests start, and gives each worker of the fast suite a CPU of its own.

    A shell starts background jobs with SIGINT ignored, as their children have it. Kernels take a thread for each CPU,
    and several threads on a busy CPU take longer than one. Slow tests start long commands, which take all CPUs.
    """
    gc.set_threshold(100_000, 50, 100)  # the usual ones cost a twentieth of the time
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.getoption("markexpr") == "not slow" and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(worker.removeprefix("gw")) % len(cpus)]})


# Files of the slow suite that take longest: they begin first, or one worker ends with them while others do nothing.
LONGEST_FIRST = ("test_foreign_keys.py", "test_families.py", "test_runs.py", "test_hybrid_models.py",
                 "test_wheel.py", "test_compiled.py", "test_fuzz.py", "test_conversion_memory.py",
                 "test_target_kills.py", "test_gpu_check.py")  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="Run the files whose number is I modulo N.")


@pytest.hookimpl(trylast=True)  # after tests of other marks are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts tests by file, as LONGEST_FIRST says; the fast suite's workers take files of many tests first anyway."""
    places = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    part: str | None = config.getoption("--part")
    if part is None:
        return
    which, num_parts = map(int, part.split("/"))
    # The longest are dealt out first, then the others by name.
    names = {item.path.name: None for item in items}
    order = [*(name for name in LONGEST_FIRST if name in names), *sorted(names.keys() - set(LONGEST_FIRST))]
    number = {name: place % num_parts for place, name in enumerate(order)}
    left_out = [item for item in items if number[item.path.name] != which % num_parts]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if number[item.path.name] == which % num_parts]


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No doctor has been here: plans are the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_walk() -> None:
    """Takes what stays from file to file out of the garbage collector: a walk over all modules takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def work_is_timed_once() -> Iterator[None]:
    """Lets a profile try each kind of work twice instead of six times; what it then predicts is no test's matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_MOST_TRIES", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    if "triton" in sys.modules and os.environ["TRITON_INTERPRET"] != "0":
        spare_the_interpreter()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the tests a cache folder of their own: what they measure of the disk is not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Makes fsync return at once in this process: a pack takes a hundred of 5 ms each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a file that is not open, too
        yield


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[], Path]:
    numbers = itertools.count()

    def make() -> Path:
        folder = tmp_path / f"case-{next(numbers)}"
        folder.mkdir()
        return folder

    return make


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Tests run kernels on the CPU, by Triton's interpreter, or on a GPU if MOE_PACK_GPU=1 asks for it."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") != "0"
    if interpreted:
        correct_bf16()
    return torch.device("cuda" if os.environ.get("MOE_PACK_GPU") == "1" and not interpreted else "cpu")


@pytest.fixture(scope="session")
def demo_pack(tmp_path_factory: pytest.TempPathFactory) -> PackMaker:
    """Packs of the demo model by selector kind and width, made once."""
    made: dict[tuple[Selector, int], Path] = {}

    def make(selector: Selector, width: int) -> Path:
        if (selector, width) not in made:
            folder = tmp_path_factory.mktemp("demo") / f"{selector}-{width}"
            pack(DEMO_MODEL, folder, selector=selector, width=width, group=64, quantizer="hqq", workers=2)
            made[selector, width] = folder
        return made[selector, width]

    return make


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of one layer and two experts; read only."""
    return TinyMixtral().write(tmp_path_factory.mktemp("tiny-source"))


@pytest.fixture(scope="session")
def tiny_pack(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-pack") / "packed"
    pack(tiny_source, folder)
    return folder
