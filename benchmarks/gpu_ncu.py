"""Part `ncu`: what NVIDIA's profiler counts of the five main kernels, at Mixtral's and Qwen3's dimensions.

The kernels run once each in a process of their own, in a known order, under `ncu`; its report is read back as rows, a
metric each. Run as a program (`gpu_ncu.py DEVICE MODEL`), it launches them, and tells the order as JSON.
"""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_clock import Clock
from gpu_experts import Model, make_experts, make_matrices
from gpu_preflight import find_tool
from gpu_results import Results
from gpu_timings import MIXTRAL, QWEN3, attends
from gpu_transfer import one_pull

from moe_pack.runtime.kernels.gemv import gemv
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import Selection
from moe_pack.runtime.kernels.tiles import num_partials

_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats", "InstructionStats")
_TINY = Model("tiny", 128, 96, 2)
_MODELS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "tiny": _TINY}
_KERNELS = "regex:^(_select|_neurons|_gemv|_attend_kernel|_pull)$"
_SECONDS = 90  # that a model's launches may take
_SPARSITY = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A launch of a kernel. `case`: what it works on.   `after`: makes another launch do the same again."""

    kernel: str
    case: str
    launch: Callable[[], object]
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a kernel's launch, as ncu has it; numbers without their separators."""

    model: str
    kernel: str
    case: str
    metric: str
    unit: str
    value: str


def run(results: Results, clock: Clock) -> None:
    """Profiles each model's kernels apart."""
    for name in ("tiny",) if clock.is_rehearsal else ("mixtral", "qwen3"):
        results.section(name, partial(_profile, results, clock, name))


def _profile(results: Results, clock: Clock, model: str) -> None:
    command = [sys.executable, str(Path(__file__)), clock.device.type, model]
    if clock.is_rehearsal:  # the launches are rehearsed, and that their order is told
        told = json.loads(_output(command))
        for kernel, case in told:
            results.add(Metric(model, kernel, case, "rehearsed", "", ""))
        return
    tool = find_tool("ncu")
    assert tool is not None, "ncu is not installed"
    report = results.path.with_name(f"{results.path.stem}-{model}.ncu-rep")
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    options += ["--kernel-name", _KERNELS, "--force-overwrite"]
    lines = _output([tool, *options, *sections, "--export", str(report), *command]).splitlines()
    (told,) = (json.loads(line) for line in lines if line.startswith("[["))
    page = _output([tool, "--import", str(report), "--csv", "--page", "details", "--print-units", "base"])
    for metric in read_metrics(page, model, told):
        results.add(metric)


def read_metrics(page: str, model: str, launches: list[list[str]]) -> list[Metric]:
    """The metrics of ncu's `details` page as CSV; the launches' kernels and cases, in their order.

    Raises:  AssertionError if the report has other kernels, or in another order.
    """
    begin = page.index('"ID"')
    rows = [row for row in csv.DictReader(io.StringIO(page[begin:])) if row["Metric Name"]]
    names = {row["ID"]: row["Kernel Name"].partition("(")[0] for row in rows}
    numbers, kernels = list(names), list(names.values())
    assert kernels == [kernel for kernel, _ in launches], f"ncu saw {kernels}, launched were {launches}"
    cases = {number: case for number, (_, case) in zip(numbers, launches, strict=True)}
    return [
        Metric(
            model, names[row["ID"]], cases[row["ID"]], row["Metric Name"], row["Metric Unit"],
            row["Metric Value"].replace(",", ""),
        )
        for row in rows
    ]  # fmt: skip


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    said = (done.stdout + done.stderr)[-800:]
    assert done.returncode == 0, f"{Path(command[0]).name} ended with {done.returncode}: {said}"
    return done.stdout


def launches(clock: Clock, model: Model) -> list[Launch]:
    """The kernels' launches, in the order in which they are to run."""
    device, is_tiny, is_mixtral = clock.device, model.name == _TINY.name, model.name == MIXTRAL.name
    experts = make_experts(clock, model, "up", 2 if is_mixtral else 4, 4)
    x, batch, tables = torch.randn(model.d).to(device), experts.batches[-1], experts.tables
    chosen = Selection.room(model.k, model.f, device)
    select(x, batch, tables, chosen)
    tables.thresholds.fill_(float(torch.quantile(chosen.a[0].abs(), _SPARSITY)))
    partials = torch.zeros((model.k, num_partials(model.k, model.f, clock.num_sms), model.d), device=device)
    found = [
        Launch("_select", model.name, lambda: select(x, batch, tables, chosen)),
        Launch("_neurons", f"{model.name}, {_SPARSITY}", lambda: neurons(x, batch, tables, chosen, partials)),
    ]
    vocabulary = 32_000 if is_mixtral else 151_936
    for rows, cols in ((96, 128),) if is_tiny else ((model.d, model.d), (vocabulary, model.d)):
        matrices, out = make_matrices(clock, rows, cols, 4), torch.zeros(rows, device=device)
        product = partial(gemv, torch.randn(cols).to(device), matrices.rows[-1], matrices.part, out)
        found.append(Launch("_gemv", f"{rows}x{cols}, 4 bit", product))
    heads, kv_heads, context, dim = (4, 2, 48, 16) if is_tiny else (32, 8 if is_mixtral else 4, 4096, 128)
    caches = torch.randn((1, 2, kv_heads, context, dim), device=device).to(torch.bfloat16)
    found.append(Launch("_attend_kernel", f"{heads}/{kv_heads}, {context} tokens", partial(attends(caches, heads), 0)))
    pull, forget = one_pull(clock, replace(model, k=1), 4)
    return [*found, Launch("_pull", f"{model.name}, a fifth of an expert's records", pull, forget)]


def main(device_name: str, name: str) -> None:
    """Launches everything once to compile it, then once for the profiler, and tells the order."""
    device = torch.device(device_name)
    clock = Clock(device, device.type == "cpu")
    chosen = launches(clock, _MODELS[name])
    for each in chosen:
        each.launch()
        each.after()
    clock.synchronize()
    if device.type == "cuda":
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch has no types for it
    for each in chosen:
        each.launch()
    clock.synchronize()
    if device.type == "cuda":
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # likewise
    sys.stdout.write(json.dumps([[each.kernel, each.case] for each in chosen]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
