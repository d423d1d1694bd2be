"""The published results of `make gpu-check`: one file a call, of which every line is one measurement.

`compact` joins rows that differ in one thing to one row, with a figure for each of its values. `read_runs` reads
either kind of file. Files of one GPU, day and commit are one run; a figure that a later run has too is left out.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

Row = dict[str, Any]
_COUNTED = (  # of ncu's metrics
    "Duration",
    "DRAM Throughput",
    "Memory Throughput",
    "Compute (SM) Throughput",
    "L2 Hit Rate",
    "Registers Per Thread",
    "Achieved Occupancy",
    "Warp Cycles Per Issued Instruction",
    "Executed Instructions",
)


@dataclass(frozen=True, slots=True)
class Series:
    """Rows of one kind as a table."""

    title: str
    kind: str  # the class of the rows that a part adds
    keys: tuple[str, ...]  # the fields that tell the table's rows apart
    across: tuple[str, ...]  # the fields whose values are the table's columns
    values: tuple[str, ...]  # the figures, the most telling first; a `share` stands in brackets behind it
    most_rows: int | None = None


SERIES = (
    Series(
        "Whole models",
        "Speed",
        ("pack", "wanted.misses", "wanted.policy", "wanted.ram_bytes", "wanted.budget_bytes"),
        ("prompt_tokens",),
        ("decode_per_s", "median_token_ms"),
    ),
    Series(
        "Several rows of a pass", "RowsSpeed", ("pack", "how", "budget_bytes"), ("rows",), ("tokens_per_s", "pass_ms")
    ),
    Series(
        "Tiny models against the CPU", "FamilyAnswers", ("model",), (), ("worst_rows", "worst_drafts", "worst_prompt")
    ),
    Series(
        "llama.cpp, which runs all neurons",
        "LlamaSpeed",
        ("model", "cpu_layers", "threads", "budget_bytes"),
        ("test",),
        ("per_s", "gpu_bytes"),
    ),
    Series("A cap against everything on the GPU", "Ratio", ("pack", "misses", "policy", "tier"), ("gib",), ("ratio",)),
    Series("Whole tokens", "TokenProfile", ("wanted.misses",), ("pack",), ("token_us",)),
    Series("Kernels of a token", "KernelShare", ("kernel",), ("pack",), ("us",), 12),
    Series("A token's experts", "ExpertTime", ("experts", "sparsity"), ("operation",), ("timed.us", "timed.share")),
    Series("Matrices", "DenseTime", ("operation", "rows", "cols", "bits"), ("tokens",), ("timed.us", "timed.share")),
    Series(
        "Attention of a token",
        "AttentionTime",
        ("heads", "kv_heads", "cache"),
        ("context",),
        ("timed.us", "timed.share"),
    ),
    Series(
        "Grids of a token's kernels",
        "GridTime",
        ("model", "operation"),
        ("scale",),
        ("timed.us", "timed.share", "waves", "programs"),
    ),
    Series("Experts of many tokens", "ProductTime", ("model", "how"), ("expert_rows",), ("tflops", "ms")),
    Series("What ncu counts", "Metric", ("kernel", "case"), ("metric", "unit"), ("value",)),
    Series(
        "Rows over the link", "Transfer", ("record_bits", "row_bytes", "running"), ("way", "programs"), ("gb_a_second",)
    ),
    Series("Memory and link", "CopyRate", ("what",), ("num_bytes",), ("gb_a_second",)),
    Series("Launches", "LaunchCost", ("what",), (), ("us",)),
    Series("Choosing a token on the host", "SamplerTime", ("sampler",), ("vocabulary",), ("ms",)),
    Series("Answers against the CPU's", "Answers", ("pack", "kv_dtype"), (), ("engines", "worst_token")),
)


def compact(whole: dict[str, Any]) -> dict[str, Any]:
    """Returns a call's file with the rows that a page reads; a file that is compact stays as it is."""
    if whole.get("compact"):
        return whole
    parts = [
        {
            **{name: part[name] for name in ("part", "state", "date", "seconds") if name in part},
            "errors": {name: text.splitlines()[-1] for name, text in part["errors"].items()},
            "rows": [*_verdicts(part["rows"]), *_series_rows(part["rows"])],
        }
        for part in whole["parts"]
    ]
    return {"compact": True} | whole | {"parts": parts}


def _verdicts(rows: list[Row]) -> Iterator[Row]:
    """Yields how many kernels equal their twins, how many promises hold, and what compute-sanitizer says."""
    for kind, name in (("Twin", "is_right"), ("Promise", "holds")):
        if found := [bool(row[name]) for row in rows if row["kind"] == kind]:
            yield {"kind": f"{kind}s", "right": sum(found), "of": len(found)}
    for row in rows:
        if row["kind"] == "Sanitized":
            yield {name: row[name] for name in ("kind", "tool", "summary", "cases")}


def _series_rows(rows: list[Row]) -> Iterator[Row]:
    for series in SERIES:
        found: dict[tuple[Any, ...], Row] = {}
        for row in _figures(series, rows):
            key = tuple(_get(row, name) for name in series.keys)
            made = found.setdefault(key, {"kind": series.kind, **dict(zip(series.keys, key, strict=True))})
            column = " ".join(str(_get(row, name)) for name in series.across)
            for name in series.values:
                made.setdefault(name, {})[column] = _rounded(_get(row, name))
        yield from found.values()


def _figures(series: Series, rows: list[Row]) -> Iterator[Row]:
    """Yields the rows of a kind that have figures; the answers of all engines of a pack and a cache as one."""
    own = [row for row in rows if row["kind"] == series.kind]
    if series.kind == "Answers":
        for key in dict.fromkeys((row["pack"], row["wanted"]["kv_dtype"]) for row in own):
            worst = [row["worst_token"] for row in own if (row["pack"], row["wanted"]["kv_dtype"]) == key]
            yield {"pack": key[0], "kv_dtype": key[1], "engines": len(worst), "worst_token": max(worst)}
        return
    for row in own:
        if series.kind != "Metric":
            yield row
        elif row["metric"] in _COUNTED and row["unit"] != "byte/s" and _is_number(row["value"]):
            yield row | {"value": float(row["value"])}


def _is_number(text: str) -> bool:
    """Whether ncu had a figure; for what it could not count it says `n/a` or `nan`."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _get(row: Row, path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value[name]
    return value


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def compact_text(whole: dict[str, Any]) -> str:
    """Returns a compact file's text: a line for each common value, each part, and each row."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in whole.items() if name != "parts"]
    parts = []
    for part in whole["parts"]:
        head = json.dumps({name: value for name, value in part.items() if name != "rows"})
        rows = ",\n".join(f"   {json.dumps(row)}" for row in part["rows"])
        parts.append(f'  {head[:-1]}, "rows": [\n{rows}\n  ]}}')
    return "\n".join(["{", *lines, ' "parts": [', ",\n".join(parts), " ]", "}"]) + "\n"


@dataclass(slots=True)
class Run:
    """The results of a GPU on a day, of one commit."""

    name: str
    gpu: str
    commit: str
    began: str  # the first part's time
    is_rehearsal: bool
    machine: str
    rows: list[Row] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)  # of each part that ran: how it ended badly

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]


def read_runs(wholes: Iterable[dict[str, Any]]) -> list[Run]:
    """Returns the runs in the contents of some files, the oldest first, each figure of a GPU's last run that has it."""
    runs: dict[str, Run] = {}
    for whole in map(compact, wholes):
        gpu = whole["gpu"]["name"] if whole["gpu"] else "no GPU"
        began, commit = whole["parts"][0]["date"], whole["revision"][:7]
        versions = ", ".join(f"{name} {whole['versions'][name]}" for name in ("torch", "triton"))
        machine = f"{gpu}, {whole['cores']} cores of {whole['cpu']}, {versions}"
        name = f"{gpu}, {began[:10]}, {commit}"
        run = runs.setdefault(name, Run(name, gpu, commit, began, whole["rehearsal"], machine))
        run.began = min(run.began, began)
        for part in whole["parts"]:
            run.rows += part["rows"]
            failed = [f"`{part['part']}`, {name}: {text}" for name, text in part["errors"].items()]
            ended = [] if part["state"] in ("done", "failed") and failed else [f"`{part['part']}`: {part['state']}"]
            run.faults[part["part"]] = failed + (ended if part["state"] != "done" else [])
    ordered = sorted(runs.values(), key=lambda run: run.began)
    _leave_out_old(ordered)
    return ordered


def _leave_out_old(runs: list[Run]) -> None:
    """Removes figures and faults of parts that a later run of the same GPU has."""
    known = set[tuple[Any, ...]]()
    series = {each.kind: each for each in SERIES}
    for run in reversed(runs):
        run.faults = {part: faults for part, faults in run.faults.items() if (run.gpu, part) not in known}
        known |= {(run.gpu, part) for part in run.faults}
        kept, seen = list[Row](), set[tuple[Any, ...]]()
        for row in run.rows:
            if row["kind"] not in series:
                kept.append(row)
                continue
            one = series[row["kind"]]
            place = (run.gpu, one.kind, *(row[name] for name in one.keys))
            columns = [column for column in row[one.values[0]] if (*place, column) not in known]
            seen |= {(*place, column) for column in columns}
            if columns:
                figures = {name: {column: row[name][column] for column in columns} for name in one.values}
                kept.append(row | figures)
        run.rows, known = kept, known | seen
