"""Predictions of the GPU's engine: launches of a token, counted, and its time, from bytes and rates.

    python tests/bench/gpu_roofline.py

counts the launches (a minute), and writes docs/benchmarks/gpu-launches.jsonl. `make gpu-report` writes what
follows from them, next to what `make gpu-check` measured, into docs/benchmarks/gpu.md. No GPU is needed.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

os.environ.setdefault("TRITON_INTERPRET", "1")  # launches are counted in plain memory

import click
from benchlib import ROOT, table
from gpu.ahead import Missing, Times
from gpu.flights import COPY_SHARE, DEPENDENT_START_S, INSTRUCTIONS, LATENCY_S, ROW_INSTRUCTIONS, START_S
from gpu.launches import (
    CPU_CALL,
    TO_GPU,
    TO_HOST,
    WAIT,
    Launch,
    Mode,
    TokenLaunches,
    count,
    is_kernel,
    is_triton,
)
from gpu.packs import FLOE, MIXTRAL, QWEN3, QWEN36, SKEW
from gpu.roofline import (
    ATTEND_S,
    ATTEND_TILE_S,
    CHAINED_TOKEN_S,
    CHOICE_S,
    CONTEXT_TOKENS,
    CPU_RATES,
    NUM_SMS,
    ROUTE_S,
    TOKEN_S,
    KernelTime,
    Misses,
    Setup,
    Subject,
    choice_s,
    kernel_times,
    moved_bytes,
    predict,
    pulled_pass,
)
from gpu.runs import Run

from moe_pack.convert.plan.machines import CALL_S, GPUS, LINK_SHARE, known_gpu
from moe_pack.runtime.gpu.fit import usual_budget

COUNTS = ROOT / "docs" / "benchmarks" / "gpu-launches.jsonl"
_GIB = 1 << 30
_BUDGETS = (8, 11, 12, 16, 24)  # GiB
_CAP = 11 << 30  # of drafts and records ahead
_RIGHT = (0.6, 0.8, 0.99)  # of records that are pulled ahead; 99% in the packs that `make gpu-check` runs
# By policy, of what it predicts the share that its paper found right: experts, times neurons where it says so, else
# CORM's 0.8 of these. FloE Fig. 4, CORM Fig. 5, EdgeMoE Fig. 8, importance Fig. 18.
_PAPERS_RIGHT = {"floe": 0.88 * 0.95, "corm": 0.85 * 0.8, "edgemoe": 0.87 * 0.8, "importance": 0.95 * 0.8}
_CHOOSING = ("H200", "RTX 3090")
_CALLS_S = (24e-6, 6e-6, CALL_S)
_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
_MEASURED_HOST = 17e9  # bytes a second
_MODELS = {"Mixtral-8x7B": MIXTRAL, "Qwen3-30B-A3B": QWEN3, "Qwen3.6-35B-A3B": QWEN36}
_ROWS = (1, 2, 4, 8)  # of a pass, for these models
_ROWS_GPU = "H200"
_COUNTED = {
    "Mixtral-8x7B": "mixtral-8x7b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "DeepSeek-V2": "deepseek-v2",
    "gpt-oss-20b": "gpt-oss-20b",
}
_ANSWERS: tuple[tuple[Misses, str], ...] = (
    ("cpu", "DDR5"),
    ("cpu", "DDR4"),
    ("pull", "DDR5"),
    ("auto", "DDR5"),
    ("auto", "DDR4"),
)
# Public sources of the rates and sizes.
_SOURCES = {
    "RTX 3090": "NVIDIA Ampere GA102 architecture paper",
    "RTX 4090": "NVIDIA Ada architecture paper",
    "H100": "NVIDIA H100 data sheet and architecture paper",
    "H200": "NVIDIA H200 data sheet, H100 architecture paper",
}

_UNBROKEN = "\xa0"  # a space at which no line ends

Measured = dict[tuple[str, str, int | None], float]  # milliseconds by GPU, pack and budget in bytes
Table = tuple[list[str], list[list[object]]]  # header and rows


@dataclass(frozen=True, slots=True)
class Counts:
    """Counted launches of some models in all modes, and when and at which commit they were counted."""

    commit: str
    date: str
    launches: tuple[TokenLaunches, ...]

    def of(self, model: str, num_rows: int = 1) -> dict[Mode, TokenLaunches]:
        return {each.mode: each for each in self.launches if (each.model, each.num_rows) == (model, num_rows)}

    @classmethod
    def read(cls, path: Path) -> "Counts":
        first, *lines = map(json.loads, path.read_text().splitlines())
        return cls(first["commit"], first["date"], tuple(map(TokenLaunches.from_json, lines)))

    def write(self, path: Path) -> None:
        """Writes a file of JSON lines: the commit and the date, then each model's launches in each mode."""
        values = [{"commit": self.commit, "date": self.date}, *(each.as_json() for each in self.launches)]
        path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def count_all() -> Counts:
    found = list[TokenLaunches]()
    with TemporaryDirectory() as folder:
        for name, model in _COUNTED.items():
            click.echo(f"counting {model}", err=True)
            for num_rows in _ROWS if name in _MODELS else (1,):
                found += count(model, Path(folder), num_rows)
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return Counts(commit, f"{datetime.now(UTC):%Y-%m-%d}", tuple(found))


def measured_ms(runs: Sequence[Run]) -> Measured:
    """Returns the median milliseconds of a token by GPU, pack and budget in bytes (None: all free memory), with `auto`.

    The last commit's run on a GPU counts; rehearsals do not.
    """
    last = {known.name: run for run in runs if not run.is_rehearsal and (known := known_gpu(run.gpu))}
    return {
        (gpu, row["pack"], row["wanted.budget_bytes"]): list(row["median_token_ms"].values())[-1]
        for gpu, run in last.items()
        for row in run.of("Speed")
        if (row["wanted.misses"], row["wanted.policy"], row["wanted.ram_bytes"]) == ("auto", "auto", None)
    }


def measured_rows(runs: Sequence[Run]) -> dict[tuple[str, int | None, int], float]:
    """Returns tokens a second of passes of several rows by pack, budget in bytes and rows, of the last run."""
    found = dict[tuple[str, int | None, int], float]()
    for run in runs:
        known = known_gpu(run.gpu)
        if not run.is_rehearsal and known is not None and known.name == _ROWS_GPU:
            for row in run.of("RowsSpeed"):
                found |= {(row["pack"], row["budget_bytes"], int(n)): rate for n, rate in row["tokens_per_s"].items()}
    return found


def predictions(runs: Sequence[Run]) -> str:
    subjects, counts = {name: Subject.of(request) for name, request in _MODELS.items()}, Counts.read(COUNTS)
    blocks = [
        "# Predictions",
        "**Every time and every speed from here on is a prediction, and none was measured**, except in columns named "
        "*measured*. Launches are counted.",
        "    python tests/bench/gpu_roofline.py",
        f"Commit {counts.commit}, {counts.date}. The command needs no GPU.",
        *_launches(counts),
        *_assumptions(),
        *_kernels(subjects, counts, measured_ms(runs)),
        *_speeds(subjects, counts, measured_ms(runs)),
        *_calls(subjects, counts),
        *_ahead(subjects, counts, measured_ms(runs)),
        *_policies(counts),
        *_sparse(counts),
        *_several(subjects, counts, measured_rows(runs)),
        *_drafts(subjects, counts, measured_rows(runs)),
    ]
    return "\n\n".join(map(_wrapped, blocks)) + "\n"


def _wrapped(block: str) -> str:
    """Returns a paragraph, or a list, in lines of at most 120 columns; everything else as it is."""
    if block.startswith(("|", "#", "    ")):
        return block
    block = re.sub("`[^`]*`", lambda code: code[0].replace(" ", _UNBROKEN), block)
    wrapped = "\n".join(
        fill(line, 120, subsequent_indent="  " * line.startswith("- "), break_long_words=False, break_on_hyphens=False)
        for line in block.splitlines()
    )
    return wrapped.replace(_UNBROKEN, " ")


def _launches(counts: Counts) -> Iterator[str]:
    yield "## Launches of a token"
    yield (
        "Counted in plain memory, where the engine of a shrunk model makes the launches of one token. What a layer "
        "adds is the difference between models of three layers and of two; Qwen3.6 has layers of two kinds, with a "
        "mixer (Gated DeltaNet) and with attention. Totals are for the real number of layers: *layers* are those with "
        "experts. *Kernels* are the project's, *torch* are operations of torch on the GPU. *Rows* are the tokens of a "
        "pass. In mode `split` a part of the records is missing, and the link and the CPU "
        "share them; in `pull` the link brings all of them; in `resident` nothing is missing. *Copies* are between GPU "
        "and host. One CUDA graph has all of these. The host starts it once and waits once, for its end; *waits* also "
        "counts reads of GPU memory by the host."
    )
    kinds = (
        lambda launch: launch.name in (TO_GPU, TO_HOST),
        lambda launch: launch.name == CPU_CALL,
        lambda launch: launch.name == WAIT,
    )
    body = list[list[object]]()
    for (name, model), num_rows in product(_COUNTED.items(), (1, 4)):
        for mode, each in counts.of(model, num_rows).items():
            copies, calls, waits = (each.total(is_counted) for is_counted in kinds)
            for layers in each.layers:
                own = [
                    sum(n for launch, n in layers.launches.items() if is_one(launch)) for is_one in (_is_own, _is_torch)
                ]
                body.append([name, num_rows, mode, layers.kind, layers.number, *own, "", "", "", "", ""])
            body[-1][7:] = [each.total(_is_own), each.total(_is_torch), copies, calls, 1 + waits]
    header = ["model", "rows", "mode", "layers with", "layers", "kernels a layer", "torch a layer", "kernels"]
    yield table([*header, "torch", "copies", "CPU calls", "waits"], body)


def _is_own(launch: Launch) -> bool:
    return is_kernel(launch) and is_triton(launch.name)


def _is_torch(launch: Launch) -> bool:
    return is_kernel(launch) and not is_triton(launch.name)


def _assumptions() -> Iterator[str]:
    yield "## What predictions assume"
    body = []
    for name, num_sms in NUM_SMS.items():
        gpu = GPUS[name]
        rates = (f"{gpu.memory_rate / 1e9:,.0f}", f"{gpu.link_rate / 1e9:.1f}")
        body.append([name, *rates, num_sms, f"{gpu.memory_bytes / _GIB:.4g}", _SOURCES[name]])
    yield table(["GPU", "memory, GB/s", "link, GB/s", "multiprocessors", "GiB", "source"], body)
    rates_text = " and ".join(f"{rate / 1e9:g} GB/s with {name}" for name, rate in CPU_RATES.items())
    yield "\n".join(
        (
            f"- Kernels that read rows reach what their grids allow ([flights.py](../../tests/bench/gpu/flights.py)): "
            f"a launch takes {1e6 * START_S:g} us to start, memory has a latency of {1e6 * LATENCY_S:g} us, and a "
            f"copy reaches {COPY_SHARE:.1%} of the memory's rate. These are fitted to ten launches of an H200, which "
            "they give within a fifth, and assumed for other GPUs.",
            "- With everything resident, on an H100 and an H200, a layer's launches [start before the one before "
            f"ends](../kernels.md#launches). Such a start is assumed to take {1e6 * DEPENDENT_START_S:.2f} us, less by "
            "the time of a node of a graph.",
            f"- torch's operations, too, take {1e6 * START_S:g} us each to start. Their values are a few KiB, which "
            "take no time. States of mixers are read and written at the rate of a copy.",
            f"- Pulled records reach {LINK_SHARE:.0%} of the link's rate. A call of the CPU costs {1e6 * CALL_S:.1f} "
            "us, by prediction: two edges of the graph (0.93 us each, measured on an H200), 0.5 us for a number's way "
            "over the link, 0.6 us for the CPU, and 1 us for the GPU's look at the answer. Calls of a function by the "
            "driver, which came before, took 24.2 us.",
            f"- Attention and the router of a layer take {1e6 * (ATTEND_S + ATTEND_TILE_S + ROUTE_S):.1f} us in "
            "addition, which the H200's tokens leave. Where the host chose tokens, as in all that was measured, a "
            f"token's start and end, and the choice of the next one, took {1e6 * TOKEN_S:g} us more.",
            "- The GPU chooses tokens. By top-p that takes at most "
            + " and ".join(f"{1e6 * (choice_s(gpu, 151_936, 1) + 3 * START_S):.0f} us on an {gpu}" for gpu in _CHOOSING)
            + " at a vocabulary of 151,936, and a pass that waits behind another one "
            f"{1e6 * CHAINED_TOKEN_S:g} us to start: both are assumed from latencies, not measured.",
            f"- Of several rows, tokens are of different texts, and choose experts independently. A weight takes "
            f"{INSTRUCTIONS:g} instructions of a thread; a further row adds {ROW_INSTRUCTIONS:g} in dense matrices, "
            "which are decoded once, and all of them in experts, which each row decodes. The host verifies drafts one "
            f"after the other, in {1e9 * CHOICE_S:.1f} ns for each entry of the vocabulary.",
            f"- The CPU computes its share at {rates_text}: two thirds of two channels of DDR5-5600 (89.6 GB/s), and "
            "three quarters of two channels of DDR4-3200 (51.2 GB/s).",
            f"- Attention reads the keys and values of {CONTEXT_TOKENS:,} tokens in bfloat16. Partial sums are written "
            "to memory and read from it, although a large L2 cache may have them.",
            "- A layer takes the time of its serial part and of its longest fork: neurons whose records are in GPU "
            "memory, the CPU, the link.",
            "- Experts are as popular as in the synthetic packs of `make gpu-check` (Zipf's law with exponent "
            f"{SKEW:g}), and routes are drawn independently. Rows are placed by `place_experts` with `usual_heat`.",
            "- If an expert's selector is missing, the CPU selects and computes the whole expert: nothing of it is "
            "pulled. With `pull` the selector is pulled too.",
        )
    )


def _kernels(subjects: dict[str, Subject], counts: Counts, measured: Measured) -> Iterator[str]:
    yield "## A token by kernel, everything resident"
    yield (
        "MB that must be moved, and the predicted ms. The grids of kernels that read rows are waves of programs, "
        "which no GPU has run. The measured speeds are those of grids of 256 programs, whose predictions stand next "
        "to them."
    )
    for name, subject in subjects.items():
        counted = counts.of(subject.request.model)["resident"]
        found = {gpu: kernel_times(subject, gpu, counted) for gpu in NUM_SMS}
        body = []
        for parts in zip(*found.values(), strict=True):
            cells = []
            for part in parts:
                cells += ["" if part.num_bytes is None else f"{part.num_bytes / 1e6:,.1f}", f"{1e3 * part.seconds:.3f}"]
            body.append([parts[0].name, *cells])
        totals = [sum(part.seconds for part in parts) for parts in found.values()]
        body.append(["**token**", *(cell for total in totals for cell in ("", f"{1e3 * total:.2f}"))])
        body.append(["**tokens a second**", *(cell for total in totals for cell in ("", f"{1 / total:.0f}"))])
        before = [
            1 / sum(part.seconds for part in kernel_times(subject, gpu, counted, "256 programs")) for gpu in NUM_SMS
        ]
        body.append(["with grids of 256 programs", *(cell for speed in before for cell in ("", f"{speed:.0f}"))])
        whole = [measured.get((gpu, subject.request.name, None)) for gpu in NUM_SMS]
        body.append(
            ["those, measured", *(cell for ms in whole for cell in ("", "" if ms is None else f"{1e3 / ms:.0f}"))]
        )
        body.append(["**measured, untested on a GPU**", *([""] * 2 * len(NUM_SMS))])
        yield f"### {name} by kernel"
        yield table(["", *(f"{gpu.removeprefix('RTX ')}, {unit}" for gpu in found for unit in ("MB", "ms"))], body)


def _speeds(subjects: dict[str, Subject], counts: Counts, measured: Measured) -> Iterator[str]:
    yield "## Tokens a second by budget"
    yield (
        "With `--misses cpu` the CPU computes what is missing; with `pull` the link brings it; with `auto` the link "
        "brings its share of that work by rate, `link / (link + CPU)`, as far as it lies in experts whose selector is "
        "resident, and the CPU computes the rest. *Resident* is the share of "
        "the bytes of running neurons that is in GPU memory. *Missing* are the other bytes of a token, with selectors "
        "that are missing. Both are for `cpu`. *All* is a budget of all free memory. *Measured* is the speed of the "
        "median token in the last run of `make gpu-check`."
    )
    for name, subject in subjects.items():
        yield f"### {name} by budget"
        yield (
            f"The pack is `{subject.request.name}`. Everything is resident from a budget of "
            f"{_least_resident(subject) / _GIB:.1f} GiB on."
        )
        if subject.request.sparsity:
            yield (
                f"{subject.request.sparsity:.0%} of an expert's neurons do not run, and all rows run equally often, as "
                "in the synthetic packs that `make gpu-check` runs:"
            )
        yield table(*_speed_table(subject, counts, measured))


def _budgets(gpu: str) -> Iterator[tuple[str, int | None, int]]:
    """Returns a GPU's budgets: name, the option's bytes, and the bytes."""
    most = usual_budget(GPUS[gpu].memory_bytes)
    for gib in _BUDGETS:
        if gib * _GIB < most:
            yield str(gib), gib * _GIB, gib * _GIB
    yield f"all, {most / _GIB:.1f}", None, most


def _speed_table(subject: Subject, counts: Counts, measured: Measured) -> Table:
    launches, body = counts.of(subject.request.model), list[list[object]]()
    for gpu in NUM_SMS:
        for name, option, budget in _budgets(gpu):
            found = [predict(subject, Setup(gpu, cpu, budget, misses), launches) for misses, cpu in _ANSWERS]
            speeds = [f"{1 / each.token_s:.0f}" for each in found]
            ms = measured.get((gpu, subject.request.name, option))
            share = (f"{found[0].resident:.0%}", f"{found[0].missing_bytes / 1e6:.0f}")
            body.append([gpu, name, *share, *speeds, None if ms is None else f"{1e3 / ms:.0f}"])
    answers = [misses if misses == "pull" else f"{misses}, {cpu}" for misses, cpu in _ANSWERS]
    return ["GPU", "budget, GiB", "resident", "missing, MB", *answers, "measured"], body


def _calls(subjects: dict[str, Subject], counts: Counts) -> Iterator[str]:
    yield "## Calls of the CPU in 11 GiB"
    yield (
        f"Tokens a second with `auto` on an {_ROWS_GPU} with DDR5, by the time of a call of the CPU: 24 us were "
        f"measured of a host function in a graph, {1e6 * CALL_S:.0f} are predicted of a flag."
    )
    setup = Setup(_ROWS_GPU, "DDR5", _CAP, "auto")
    body = [
        [name, *(f"{1 / predict(one, setup, counts.of(one.request.model), call_s).token_s:.0f}" for call_s in _CALLS_S)]
        for name, one in subjects.items()
    ]
    yield table(["model", *(f"{1e6 * call_s:.0f} us" for call_s in _CALLS_S)], body)


def _ahead(subjects: dict[str, Subject], counts: Counts, measured: Measured) -> Iterator[str]:
    yield "## Records ahead in 11 GiB"
    yield (
        f"Tokens a second with `auto` on an {_ROWS_GPU}, if records of predicted experts are pulled in "
        "all the time that the link has left, and so many of them run; *without* pulls none ahead. A CPU of "
        f"{_MEASURED_HOST / 1e9:.0f} GB/s is what the link's share of the missing bytes, 296 of 397 MB, says of the "
        "virtual CPUs of the H200 that was measured. *Measured* was without, and with other grids and calls."
    )
    body = list[list[object]]()
    for name, subject in subjects.items():
        share = _missing_share(subject)
        for cpu_rate in (_MEASURED_HOST, CPU_RATES["DDR5"]):
            times = Times.of(subject, counts.of(subject.request.model)["split"], _ROWS_GPU, cpu_rate)
            ahead = [times.ahead_ms(Missing(share, 0.0, right, right))[0] for right in _RIGHT]
            speeds = [f"{1e3 / ms:.0f}" for ms in (times.token_ms(Missing(share, 0.0, 0.0, 1.0), True), *ahead)]
            ms = measured.get((_ROWS_GPU, subject.request.name, _CAP))
            body.append([name, f"{cpu_rate / 1e9:.0f}", *speeds, None if ms is None else f"{1e3 / ms:.0f}"])
    yield table(["model", "CPU, GB/s", "without", *(f"{right:.0%} run" for right in _RIGHT), "measured"], body)


def _missing_share(subject: Subject) -> float:
    placement = subject.place(subject.expert_bytes(_CAP), "auto")
    moved = moved_bytes(subject, placement, subject.runs(), 0.0, NUM_SMS[_ROWS_GPU])
    return float(moved.left.mean() / (moved.left.mean() + moved.here.mean()))


def _policies(counts: Counts) -> Iterator[str]:
    yield "## Policies in 11 GiB"
    yield (
        f"Tokens a second of Mixtral-8x7B on an {_ROWS_GPU} with a CPU of {_MEASURED_HOST / 1e9:.0f} GB/s and "
        "`--misses auto`, by policy: FloE's own pack (up in 2 bits, the rest in 16) at two sparsities, and the pack "
        "that `make gpu-check` runs. *Right* is the share of the predicted records that run, as the policy's paper "
        "found it; where it counts experts alone, 80% of their neurons are right, as in CORM. Without a profile `auto` "
        "predicts as `corm` does. Algorithm 2 of importance, and what a policy substitutes, are not in it."
    )
    packs = {"FloE, 80%": FLOE, "FloE, 90%": replace(FLOE, sparsity=0.9), MIXTRAL.name: MIXTRAL}
    speeds = {name: _policy_speeds(Subject.of(request), counts) for name, request in packs.items()}
    rights = {"lru": 0.0, "fiddler": 0.0, **_PAPERS_RIGHT, "auto": _PAPERS_RIGHT["corm"]}
    body = [
        [f"`{policy}`", f"{right:.0%}" if right else "none", *(f"{speeds[name][right]:.0f}" for name in packs), None]
        for policy, right in rights.items()
    ]
    yield table(["policy", "right", *packs, "measured"], body)


def _policy_speeds(subject: Subject, counts: Counts) -> dict[float, float]:
    """Returns tokens a second by the share of predicted records that run; 0: nothing is predicted."""
    times = Times.of(subject, counts.of(subject.request.model)["split"], _ROWS_GPU, _MEASURED_HOST)
    share = _missing_share(subject)
    found = {0.0: 1e3 / times.token_ms(Missing(share, 0.0, 0.0, 1.0), True)}
    return found | {
        right: 1e3 / times.ahead_ms(Missing(share, 0.0, right, right))[0] for right in _PAPERS_RIGHT.values()
    }


def _sparse(counts: Counts) -> Iterator[str]:
    yield "## The sparse kernel"
    yield (
        f"The kernel that computes running neurons, on an {_ROWS_GPU} with everything resident: us a layer of "
        "Mixtral-8x7B by sparsity, and of all kernels of a layer's experts. Before its grid changed 60 us were "
        "measured without sparsity and 13 at 80% (*a token's experts* above)."
    )
    body = list[list[object]]()
    for request in (MIXTRAL, FLOE):
        for sparsity in _SPARSITIES:
            subject = Subject.of(replace(request, sparsity=sparsity))
            parts = {
                part.name: 1e6 * part.seconds / len(subject.layout.experts)
                for part in kernel_times(subject, _ROWS_GPU, counts.of(request.model)["resident"])
            }
            neurons = parts["neurons: records"] + parts["neurons: partial sums"]
            experts = neurons + parts["select"] + parts["reduce"]
            body.append([request.name, f"{sparsity:.0%}", f"{neurons:.1f}", f"{experts:.1f}", None])
    yield table(["pack", "sparsity", "neurons", "experts", "measured"], body)


def _least_resident(subject: Subject) -> int:
    """Returns the smallest budget, to a tenth of a GiB, in which everything is resident."""
    tenths = range(1, 10 * 200)
    whole = subject.place(1 << 62, "auto").num_bytes
    return next(
        budget for tenth in tenths if (budget := tenth * _GIB // 10) > whole and subject.expert_bytes(budget) >= whole
    )


def _several(
    subjects: dict[str, Subject], counts: Counts, measured: dict[tuple[str, int | None, int], float]
) -> Iterator[str]:
    yield "## Several rows"
    yield (
        f"Tokens a second of so many requests at once, all of them, on an {_ROWS_GPU} with everything resident. "
        "*Times one* is the ratio to one request. *Longest* are the parts of a pass that take longest, in ms."
    )
    body = list[list[object]]()
    for (name, subject), num_rows in product(subjects.items(), _ROWS):
        counted = counts.of(subject.request.model, num_rows)["resident"]
        parts = kernel_times(subject, _ROWS_GPU, counted, num_rows=num_rows)
        seconds = sum(part.seconds for part in parts)
        if num_rows == 1:
            alone_s = seconds
        found = measured.get((subject.request.name, None, num_rows))
        cells = (f"{1e3 * seconds:.2f}", f"{num_rows / seconds:.0f}", f"{num_rows * alone_s / seconds:.2f}")
        body.append([name, num_rows, *cells, _longest(parts), "" if found is None else f"{found:.0f}"])
    yield table(["model", "rows", "ms a pass", "tokens a second", "times one", "longest", "measured"], body)


def _longest(parts: list[KernelTime]) -> str:
    ordered = sorted(parts, key=lambda part: -part.seconds)[:2]
    return ", ".join(
        f"{re.sub(' of [0-9,]+ launches and copies', '', part.name)} {1e3 * part.seconds:.2f}" for part in ordered
    )


def _drafts(
    subjects: dict[str, Subject], counts: Counts, measured: dict[tuple[str, int | None, int], float]
) -> Iterator[str]:
    yield f"## Drafts in {_CAP / _GIB:.0f} GiB"
    yield (
        f"A pass of so many rows of one text on an {_ROWS_GPU} with `--misses pull`, where a record that several rows "
        "lack comes once. *Tokens a second* are those of a pass of which every draft is kept. *Even at* is how many "
        "tokens a pass must bring, its own included, to be as fast as single tokens. Drafts of one text that choose "
        "the same experts more often than independent ones bring less over the link."
    )
    body = list[list[object]]()
    for (name, subject), num_rows in product(subjects.items(), _ROWS):
        counted = counts.of(subject.request.model, num_rows)["pull"]
        seconds, pulled = pulled_pass(subject, _ROWS_GPU, _CAP, counted)
        if num_rows == 1:
            alone_s = seconds
        found = measured.get((subject.request.name, _CAP, num_rows))
        cells = (
            f"{pulled / 1e6:,.0f}",
            f"{1e3 * seconds:.1f}",
            f"{num_rows / seconds:.0f}",
            f"{seconds / alone_s:.1f}",
        )
        body.append([name, num_rows, *cells, "" if found is None else f"{found:.0f}"])
    yield table(["model", "rows", "pulled, MB", "ms a pass", "tokens a second", "even at", "measured"], body)


@click.command(help=__doc__)
def main() -> None:
    """Writes the counts."""
    count_all().write(COUNTS)
    click.echo(f"wrote {COUNTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
