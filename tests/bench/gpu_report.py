"""`make gpu-report`: what the files of `make gpu-check` say, as a page of tables and a picture; runs side by side.

    python tests/bench/gpu_report.py docs/benchmarks/gpu-*.json -o docs/benchmarks/gpu

writes gpu.md and gpu.svg. Files of one GPU, day and commit are one run, whatever their calls. Of several runs each
table has the most telling figure of each, and the ratio of the last one on the first one's GPU to the first.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import click

Row = dict[str, Any]
_GIB = 1 << 30
_INCHES = (9.2, 4.2)
_MOST_KERNELS = 14  # of a token's profile
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
class Table:
    """Rows of one kind as a table. `keys`: what tells rows apart.   `values`: figures, the most telling first."""

    title: str
    kind: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    most_rows: int | None = None


TABLES = (
    Table(
        "Whole models",
        "Speed",
        ("pack", "wanted.misses", "wanted.policy", "wanted.ram_bytes", "wanted.budget_bytes", "prompt_tokens"),
        (
            "decode_per_s",
            "prefill_per_s",
            "median_token_ms",
            "resident",
            "pulled",
            "left",
            "whole_per_token",
            "bytes_per_token",
            "disk_bytes_per_token",
            "link_share",
            "cpu_share",
        ),
    ),
    Table(
        "A cap against everything on the GPU",
        "Ratio",
        ("pack", "misses", "policy", "tier", "gib"),
        ("ratio", "capped_per_s", "resident_per_s"),
    ),
    Table("Whole tokens", "TokenProfile", ("pack", "wanted.misses"), ("token_us", "kernels_us", "launches")),
    Table("Kernels of a token", "KernelShare", ("pack", "kernel"), ("us", "launches", "share"), _MOST_KERNELS),
    Table("A token's experts", "ExpertTime", ("experts", "sparsity", "operation"), ("timed.us", "timed.share")),
    Table(
        "Matrices",
        "DenseTime",
        ("operation", "rows", "cols", "bits", "tokens"),
        ("timed.us", "timed.share", "tflops"),
    ),
    Table(
        "Attention of a token", "AttentionTime", ("heads", "kv_heads", "cache", "context"), ("timed.us", "timed.share")
    ),
    Table("What ncu counts", "Metric", ("kernel", "case", "metric", "unit"), ("value",)),
    Table(
        "Rows over the link",
        "Transfer",
        ("way", "record_bits", "row_bytes", "running", "programs"),
        ("gb_a_second", "share"),
    ),
    Table("Memory and link", "CopyRate", ("what", "num_bytes"), ("gb_a_second",)),
    Table("Launches", "LaunchCost", ("what",), ("us",)),
    Table("Choosing a token on the host", "SamplerTime", ("sampler", "vocabulary"), ("ms",)),
    Table(
        "Answers against the CPU's",
        "Answers",
        (
            "pack",
            "wanted.misses",
            "wanted.policy",
            "wanted.kv_dtype",
            "wanted.ram_bytes",
            "wanted.budget_bytes",
            "wanted.share",
        ),
        (
            "worst_token",
            "worst_prompt",
            "beyond",
            "tokens",
            "greedy_equal",
            "kl",
            "resident",
            "pulled",
            "left",
            "whole_per_token",
        ),
    ),
)


@dataclass(slots=True)
class Run:
    """All that a GPU said on a day of a commit. `began`: the first part's time.   `faults`: parts that did not end
    well, and sections that failed.
    """

    name: str
    gpu: str
    began: str
    is_rehearsal: bool
    machine: str
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return [row for row in self.rows if row["kind"] == kind]


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs in some files, the oldest first."""
    runs: dict[str, Run] = {}
    for path in paths:
        whole = json.loads(path.read_text())
        gpu = whole["gpu"]["name"] if whole["gpu"] else "no GPU"
        began, commit = whole["parts"][0]["date"], whole["revision"][:7]
        versions = ", ".join(f"{name} {whole['versions'][name]}" for name in ("torch", "triton"))
        machine = f"{gpu}, {whole['cores']} cores of {whole['cpu']}, {versions}"
        name = f"{gpu}, {began[:10]}, {commit}"
        run = runs.setdefault(name, Run(name, gpu, began, whole["rehearsal"], machine))
        run.began = min(run.began, began)
        for part in whole["parts"]:
            run.rows += [row for row in part["rows"] if row["kind"] != "Metric"]
            counted = [row for row in part["rows"] if row.get("metric") in _COUNTED]
            run.rows += [row | {"value": float(row["value"])} for row in counted if _is_number(row["value"])]
            run.faults += [] if part["state"] == "done" else [f"`{part['part']}`: {part['state']}"]
            run.faults += [
                f"`{part['part']}`, {name}: {text.splitlines()[-1]}" for name, text in part["errors"].items()
            ]
    return sorted(runs.values(), key=lambda run: run.began)


def labels(runs: list[Run]) -> list[str]:
    """What tells runs apart: of one GPU and day the commit is enough."""
    names = [run.name.split(", ") for run in runs]
    differ = [number for number in range(3) if len({name[number] for name in names}) > 1]
    return [", ".join(name[number] for number in differ or range(3)) for name in names]


def _is_number(text: str) -> bool:
    """Whether ncu had a figure; for what it could not count it says `n/a` or `nan`."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def page(runs: list[Run], picture: str) -> str:
    """The page, in Markdown."""
    lines = [
        "# On a GPU: figures",
        "",
        "Made by `make gpu-report` from the files of `make gpu-check` in this folder.",
        "",
    ]
    for run in runs:
        lines.append(f"- **{run.name}**: {run.machine}{'; **a rehearsal: no time means anything**' * run.is_rehearsal}")
    lines += ["", f"![Tokens a second by budget]({picture})", ""]
    for run in runs:
        lines += [*_verdicts(run), ""]
    for table in TABLES:
        lines += _table(table, runs)
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(run: Run) -> Iterator[str]:
    """What is right or wrong, rather than fast or slow."""
    twins, promises = run.of("Twin"), run.of("Promise")
    yield f"**{run.name}.** {sum(row['is_right'] for row in twins)} of {len(twins)} kernel cases equal their twins."
    yield f"{sum(row['holds'] for row in promises)} of {len(promises)} promises of the engine hold."
    for row in run.of("Sanitized"):
        yield f"compute-sanitizer {row['tool']}: {row['summary']} ({row['cases']} cases)."
    if run.faults:
        yield "What failed:"
        yield ""
        yield from (f"- {fault}" for fault in run.faults)


def _table(table: Table, runs: list[Run]) -> list[str]:
    found = [{_key(table, row): row for row in run.of(table.kind)} for run in runs]
    keys = list(dict.fromkeys(key for rows in found for key in rows))
    if table.most_rows is not None:
        keys = _largest(table, keys, found)
    if not keys:
        return []
    if len(runs) == 1:
        names, body = list(table.values), [[_figure(_get(found[0][key], v)) for v in table.values] for key in keys]
    else:
        first = table.values[0]
        names = [f"{first}, {label}" for label in labels(runs)] + ["last / first"]
        last = max(number for number, run in enumerate(runs) if run.gpu == runs[0].gpu)
        body = [_compared([_get(rows[key], first) if key in rows else None for rows in found], last) for key in keys]
    heads = [key.rpartition(".")[2] for key in table.keys] + [name.replace("timed.", "") for name in names]
    rule = [*["---"] * len(table.keys), *["---:"] * len(names)]
    lines = [f"## {table.title}", "", _line(heads), _line(rule)]
    lines += [_line([*map(str, key), *cells]) for key, cells in zip(keys, body, strict=True)]
    return [*lines, ""]


def _largest(table: Table, keys: list[tuple[Any, ...]], found: list[dict[Any, Row]]) -> list[tuple[Any, ...]]:
    """Of each first key those with the largest figures."""
    kept = []
    for group in dict.fromkeys(key[0] for key in keys):
        ours = [key for key in keys if key[0] == group]
        ours.sort(key=lambda key: -max(float(_get(rows[key], table.values[0])) for rows in found if key in rows))
        kept += ours[: table.most_rows]
    return kept


def _compared(values: list[Any], last_idx: int) -> list[str]:
    first, last = values[0], values[last_idx]
    return [*map(_figure, values), f"{last / first:.2f}" if first and last is not None else ""]


def _key(table: Table, row: Row) -> tuple[Any, ...]:
    return tuple(_named(_get(row, key), key) for key in table.keys)


def _named(value: Any, key: str) -> Any:
    if key.endswith(("budget_bytes", "ram_bytes")):
        return "all" if value is None else f"{value / _GIB:.4g} GiB"
    if key.endswith("share"):
        return "" if value is None else f"{value:.3g}"
    return f"{value:.3g}" if isinstance(value, float) else value


def _get(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value[name]
    return value


def _figure(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_plain(wanted: Row) -> bool:
    """Whether an engine has enough host memory, and predicts nothing."""
    return wanted["ram_bytes"] is None and wanted["policy"] == "auto"


def draw(runs: list[Run], path: Path) -> None:
    """Writes the picture: tokens a second of each model by budget, a line for each way of missing rows, as SVG."""
    packs = list(dict.fromkeys(row["pack"] for run in runs for row in run.of("Speed")))
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "moe-pack", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(_INCHES, layout="constrained")
        for number, pack in enumerate(packs):
            axes = figure.add_subplot(1, len(packs), number + 1)
            axes.set_title(pack)
            axes.set_ylabel("tokens a second, decoding")
            for run, label in zip(runs, labels(runs), strict=True):
                rows = [row for row in run.of("Speed") if row["pack"] == pack and _is_plain(row["wanted"])]
                for misses in dict.fromkeys(row["wanted"]["misses"] for row in rows):
                    # Of each budget the last row, which is not the one that warms up.
                    best = {
                        row["wanted"]["budget_bytes"]: row["decode_per_s"]
                        for row in rows
                        if row["wanted"]["misses"] == misses
                    }
                    order = sorted(best, key=lambda budget: float("inf") if budget is None else budget)
                    names = ["all" if budget is None else f"{budget / _GIB:.4g} GiB" for budget in order]
                    axes.plot(names, [best[budget] for budget in order], marker="o", label=f"{label}, {misses}")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o",
    "out",
    type=click.Path(path_type=Path),
    required=True,
    help="Path of the page and of the picture, without .md.",
)
@click.option("--rehearsal", is_flag=True, help="Take rehearsals' files too.")
def main(files: tuple[Path, ...], out: Path, rehearsal: bool) -> None:
    """Writes OUT.md and OUT.svg from files of `make gpu-check`."""
    if not files:
        raise click.UsageError("no files; run make gpu-check on a GPU, and copy what it writes to docs/benchmarks")
    runs = read_runs(list(files))
    if any(run.is_rehearsal for run in runs) and not rehearsal:
        raise click.UsageError(
            "some files are rehearsals, whose times mean nothing; leave them out, or add --rehearsal"
        )
    draw(runs, out.with_suffix(".svg"))
    out.with_suffix(".md").write_text(page(runs, out.with_suffix(".svg").name))
    click.echo(f"{out.with_suffix('.md')}: {len(runs)} runs, {sum(len(run.rows) for run in runs):,} rows")


if __name__ == "__main__":
    main()
