"""`--device auto` of moe-run and moe-serve: what it chooses, what it says, and what keeps it from the GPU."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.cases import case
from support.models import TinyMixtral, pack

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cli import main as run_module
from moe_pack.runtime.cli import serve as serve_module
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.engine import choose_device
from moe_pack.runtime.engine.machine import GpuHere, gpu_fault
from moe_pack.runtime.offload import Approximations
from moe_pack.runtime.serve.http import live

GIB = 1 << 30
GPU = GpuHere("NVIDIA H200", 139 * GIB)
OLD = GpuHere("Tesla T4", 15 * GIB, gpu_fault("Tesla T4", (7, 5)))
UNKNOWN = GpuHere("a GPU", 0, "the kernels need an NVIDIA GPU")
SMALL = GpuHere("NVIDIA GeForce MX", 200 << 20)
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    pack(
        TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096).write_with_tokenizer(folder / "m"), folder / "packed"
    )
    return folder / "packed"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[GpuHere | None], None]:
    """Puts a GPU into this machine, or takes it out."""
    return lambda gpu: monkeypatch.setattr(machine, "gpu_here", lambda: gpu)


def chosen(folder: Path, needs_cpu: str | None = None, **options: Any) -> str:
    with Pack(folder) as opened:
        found, line = choose_device(opened, EngineOptions(**options), CONTEXT, needs_cpu)
    assert line is not None and line.startswith(f"device: {found.device} (") and line.endswith(")")
    assert replace(found, device="auto") == EngineOptions(**options), "nothing else changes"
    return f"{found.device}: {line[len(f'device: {found.device} (') : -1]}"


def test_the_gpu_is_taken_where_there_is_one_that_runs_the_pack(
    folder: Path, here: Callable[[GpuHere | None], None]
) -> None:
    for gpu, expected in (
        (GPU, "cuda: NVIDIA H200"),
        (None, "cpu: no GPU found"),
        (
            OLD,
            "cpu: Tesla T4 has compute capability 7.5; the kernels need 8.0 or later (A100, RTX 30 series and newer)",
        ),
        (UNKNOWN, "cpu: the kernels need an NVIDIA GPU"),
    ):
        with case(gpu):
            here(gpu)
            assert chosen(folder) == expected


def test_what_only_one_device_has_decides(folder: Path, here: Callable[[GpuHere | None], None]) -> None:
    here(GPU)
    on_cpu: dict[str, dict[str, Any]] = {
        "--read map": {"read": "map"},
        "--numerics fastest": {"numerics": "fastest"},
        "--cutover": {"cutover": 0.5},
        "--trace": {"trace": Path("trace.json")},
        "--record": {"record": Path("routes")},
    }
    for name, options in on_cpu.items():
        with case(name):
            assert chosen(folder, **options) == f"cpu: {name} needs it"
    assert chosen(folder, needs_cpu="--sessions") == "cpu: --sessions needs it"
    for options in ({"misses": "pull"}, {"ram_bytes": GIB}, {"policy": "lru"}, {"kv_dtype": "q8"}):
        with case(options):
            assert chosen(folder, **options) == "cuda: NVIDIA H200"
    trusting = Approximations(runs_predicted=True)
    assert chosen(folder, approximations=trusting) == "cuda: NVIDIA H200", "GPUs have it too"


def test_an_option_of_gpus_is_refused_where_the_cpu_is_chosen_and_says_why(
    folder: Path, here: Callable[[GpuHere | None], None]
) -> None:
    for gpu, options, why in (
        (None, {}, "no GPU found"),
        (OLD, {}, str(OLD.fault)),
        (GPU, {"read": "map"}, "--read map needs it"),
    ):
        for name, of_gpus in {"--misses": {"misses": "pull"}, "--ram": {"ram_bytes": GIB}}.items():
            with case(gpu, options, name), Pack(folder) as opened, pytest.raises(RunError) as refused:
                here(gpu)
                Engine(opened, EngineOptions(**options, **of_gpus), CONTEXT)
            assert str(refused.value) == f"{name} needs a GPU, and --device auto is the CPU here ({why}); remove it"


def test_a_pack_that_does_not_fit_the_gpu_runs_on_the_cpu(folder: Path, here: Callable[[GpuHere | None], None]) -> None:
    here(GPU)
    assert chosen(folder, budget_bytes=2 * GIB) == "cuda: NVIDIA H200"
    assert chosen(folder, budget_bytes=140 * GIB) == "cpu: --budget is 140.0 GiB, NVIDIA H200 has 139.0 GiB"
    small = chosen(folder, budget_bytes=16 << 20)
    assert small.startswith("cpu: a GPU needs 4") and small.endswith(" MiB for this pack, --budget is 16.0 MiB")
    here(SMALL)
    small = chosen(folder)
    assert small.startswith("cpu: a GPU needs 4") and small.endswith("pack, NVIDIA GeForce MX has 200.0 MiB")


def test_a_model_that_no_gpu_runs_says_which_part_of_it(
    tmp_path: Path, here: Callable[[GpuHere | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TinyMixtral(num_layers=2, num_experts=4).write(tmp_path / "m")
    pack(source, tmp_path / "packed")
    here(GPU)
    monkeypatch.setattr("moe_pack.runtime.engine.options.cpu_only", lambda spec: "several kinds of attention")
    assert chosen(tmp_path / "packed") == "cpu: models with several kinds of attention do not run on GPUs"


def test_codes_that_are_not_shown_right_on_a_gpu_run_on_the_cpu(
    tmp_path: Path, here: Callable[[GpuHere | None], None]
) -> None:
    source = TinyMixtral(hidden_size=256, num_heads=1, num_layers=2, num_experts=4).write(tmp_path / "m")
    pack(source, tmp_path / "packed")
    here(GPU)
    why = "--kv-dtype q4 does not run on GPUs for models with heads of 256 values"
    assert chosen(tmp_path / "packed", kv_dtype="q4") == f"cpu: {why}"
    assert chosen(tmp_path / "packed", kv_dtype="q8") == "cuda: NVIDIA H200"
    with Pack(tmp_path / "packed") as opened:
        with pytest.raises(RunError, match=rf"here \({why}\); remove it"):
            Engine(opened, EngineOptions(kv_dtype="q4", misses="pull"), CONTEXT)
        with Engine(opened, EngineOptions(kv_dtype="q4"), CONTEXT) as engine:
            assert engine.device.type == "cpu"
            engine.decoder.next_logits([1])


def test_a_device_that_is_given_is_taken_or_refused(folder: Path, here: Callable[[GpuHere | None], None]) -> None:
    for gpu, why in ((None, "no GPU found"), (OLD, str(OLD.fault))):
        here(gpu)
        with case(gpu), Pack(folder) as opened, pytest.raises(RunError) as refused:
            Engine(opened, EngineOptions(device="cuda"), CONTEXT)
        assert str(refused.value) == f"--device cuda: {why}; use --device cpu"
    here(GPU)
    with Pack(folder) as opened:
        given = EngineOptions(device="cpu")
        assert choose_device(opened, given, CONTEXT) == (given, None), "nothing was chosen, so nothing is said"
        with Engine(opened, given, CONTEXT) as engine:
            assert engine.device.type == "cpu"


def test_gpus_are_judged_by_their_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        assert gpu_fault("some GPU", capability) is None
    for capability in ((7, 5), (6, 1)):
        assert "the kernels need 8.0 or later" in str(gpu_fault("some GPU", capability))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_fault("some GPU", (9, 0)) == "the kernels need triton, which is not installed: pip install triton"


@contextmanager
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lists the devices on which a command would build its engine; it is built on the CPU all the same."""
    found: list[str] = []

    def build(opened: Pack, options: EngineOptions, *others: Any, **named: Any) -> Engine:
        found.append(options.device)
        return Engine(opened, replace(options, device="cpu"), *others, **named)

    with monkeypatch.context() as patched:
        patched.setattr("moe_pack.runtime.Engine", build)
        yield found


RUNS = (["--prompt", "It was", "-n", "2"], ["--bench", "--prompt-tokens", "4", "-n", "2"])
CASES: tuple[tuple[GpuHere | None, list[str], str, str | None], ...] = (
    (GPU, [], "cuda", "device: cuda (NVIDIA H200)"),
    (None, [], "cpu", "device: cpu (no GPU found)"),
    (GPU, ["--device", "cpu"], "cpu", None),
    (GPU, ["--trace", "trace.json"], "cpu", "device: cpu (--trace needs it)"),
)


def test_a_run_says_in_one_line_what_was_chosen(
    folder: Path, here: Callable[[GpuHere | None], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in RUNS:
        for gpu, options, device, line in CASES:
            with case(arguments, gpu, options), on_the_cpu(monkeypatch) as built:
                here(gpu)
                done = CliRunner().invoke(run_module.main, [str(folder), *arguments, *options], prog_name="moe-run")
                assert done.exit_code == 0, done.output
                assert [each for each in done.stderr.splitlines() if "device: " in each] == ([line] if line else [])
                assert built == [device]


def test_a_server_says_it_too_and_what_it_lacks_on_a_gpu_decides(
    folder: Path, here: Callable[[GpuHere | None], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def said_by(*arguments: str) -> list[str]:
        command = [str(folder), "--port", "0", *arguments]
        return CliRunner().invoke(serve_module.main, command, prog_name="moe-serve").stderr.splitlines()

    def stop(engine: Engine) -> None:
        raise RunError("stopped as soon as the engine is built")

    monkeypatch.setattr(live, "live_counts", stop)
    for gpu, options, device, line in (
        *CASES,
        (GPU, ["--parallel", "2"], "cuda", "device: cuda (NVIDIA H200)"),
        (GPU, ["--sessions", "sessions"], "cpu", "device: cpu (--sessions needs it)"),
    ):
        with case(gpu, options), on_the_cpu(monkeypatch) as built:
            here(gpu)
            said = said_by(*options)
            assert [each for each in said if "device: " in each] == ([f"moe-serve: {line}"] if line else [])
            assert built == [device]
    said = said_by("--sessions", "sessions", "--device", "cuda")
    assert said[-1].startswith("moe-serve: --sessions: with --device cuda ")


class Driver:
    """A driver's library that knows a GPU; `fault`: what its calls return."""

    def __init__(self, fault: int = 0) -> None:
        self.fault = fault

    def cuInit(self, flags: int) -> int:  # noqa: N802  # as the library calls it
        return self.fault

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802  # likewise
        return self.written(device, ctypes.c_int, number)

    def cuDeviceGetName(self, name: Any, num_bytes: int, device: ctypes.c_int) -> int:  # noqa: N802  # likewise
        name.value = b"NVIDIA A100"
        return self.fault

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> int:  # noqa: N802  # likewise
        return self.written(memory, ctypes.c_size_t, 40 * GIB)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802  # likewise
        return self.written(value, ctypes.c_int, {75: 8, 76: 0}[attribute])

    def written(self, pointer: Any, kind: Any, value: int) -> int:
        """Writes what a call returns through a pointer."""
        ctypes.cast(pointer, ctypes.POINTER(kind)).contents.value = value
        return self.fault


def test_the_driver_says_which_gpu_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Driver:
        raise OSError(name)

    assert machine.gpu_here() is None, "tests hide the GPU of this machine"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for library, expected in (
        (lambda name: Driver(), GpuHere("NVIDIA A100", 40 * GIB)),
        (lambda name: Driver(fault=3), GpuHere("a GPU", 0, "the driver does not say which GPU this is")),
        (missing, GpuHere("a GPU", 0, "the kernels need an NVIDIA GPU")),
    ):
        with case(expected):
            monkeypatch.setattr(ctypes, "CDLL", library)
            assert machine.gpu_here() == expected
    assert not torch.cuda.is_initialized(), "its context would count as ours"
