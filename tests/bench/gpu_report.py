"""`make gpu-report`: the page of measured and predicted figures of GPUs, and a picture.

    python tests/bench/gpu_report.py build/gpu/gpu-*.json

makes of each file of `make gpu-check` a compact one in docs/benchmarks, and of all that are there gpu.md and gpu.svg.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from gpu.measuring import gpu_slug
from gpu.runs import SERIES, Row, Run, Series, compact, compact_text, read_runs

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
_GIB = 1 << 30
_INCHES = (9.2, 4.2)


def compact_name(path: Path, whole: dict[str, Any]) -> str:
    """Returns the name of a file's compact form: its GPU, day, commit and call."""
    slug, day = gpu_slug(whole["gpu"] and whole["gpu"]["name"]), whole["parts"][0]["date"][:10]
    return f"gpu-{slug}-{day}-{whole['revision'][:7]}-{path.stem.rpartition('-')[2]}.json"


def measured_page(runs: list[Run], picture: str) -> str:
    lines = [
        "# GPUs: figures",
        "",
        "    make gpu-check     # on each machine",
        "    make gpu-report    # writes this page",
        "",
        "Every figure is of the last run of a GPU that measured it. The runs, by their number in the tables:",
        "",
    ]
    for number, run in enumerate(runs, 1):
        rehearsal = "; **a rehearsal: no time means anything**" * run.is_rehearsal
        lines.append(f"{number}. {run.machine}; {run.began[:10]}, commit `{run.commit}`{rehearsal}")
    lines += ["", f"![Tokens a second by budget]({picture})", ""]
    for number, run in enumerate(runs, 1):
        if said := list(_verdicts(run)):
            lines += [f"Run {number}:", "", *said, ""]
    for series in SERIES:
        lines += _table(series, runs)
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(run: Run) -> Iterator[str]:
    """Yields what is right or wrong, rather than fast or slow."""
    for row in run.of("Twins"):
        yield f"- {row['right']} of {row['of']} kernel cases equal their twins."
    for row in run.of("Promises"):
        yield f"- {row['right']} of {row['of']} promises of the engine hold."
    for row in run.of("Sanitized"):
        yield f"- compute-sanitizer {row['tool']}: {row['summary']} ({row['cases']} cases)."
    for fault in (fault for faults in run.faults.values() for fault in faults):
        yield f"- What failed: {fault}"


def _table(series: Series, runs: list[Run]) -> list[str]:
    rows = [(number, row) for number, run in enumerate(runs, 1) for row in run.of(series.kind)]
    columns = list(dict.fromkeys(column for _, row in rows for column in row[series.values[0]]))
    columns.sort(key=lambda column: (0, float(column)) if column.isdigit() else (1, 0.0))
    if series.most_rows is not None:
        rows.sort(key=lambda each: (each[0], -max(each[1][series.values[0]].values())))
        rows = [each for number in range(len(runs)) for each in rows if each[0] == number + 1][: series.most_rows]
    if not rows:
        return []
    unit = series.values[0].removeprefix("timed.")
    shared = [name for name in series.values if name.endswith("share")]
    others = [] if shared else [name for name in series.values[1:] if not series.across]
    heads = [key.rpartition(".")[2] for key in series.keys]
    figures = [*(_column(series, column) or unit for column in columns), *others]
    lines = [f"## {series.title}", ""]
    if series.across:
        names = " and ".join(name.replace("_", " ") for name in series.across)
        share = "; in brackets the share of the rate at which the GPU copies its memory" * bool(shared)
        lines += [f"`{unit}` by {names}{share}.", ""]
    lines += [_line(["run", *heads, *figures]), _line(["---:", *["---"] * len(heads), *["---:"] * len(figures)])]
    for number, row in rows:
        cells = [_cell(row, series.values[0], shared, column) for column in columns]
        cells += [_figure(next(iter(row[name].values()))) for name in others]
        lines.append(_line([str(number), *(_named(row[key], key) for key in series.keys), *cells]))
    return [*lines, ""]


def _column(series: Series, column: str) -> str:
    if series.across == ("num_bytes",):
        return f"{int(column) / (1 << 20):,.0f} MiB"
    return f"{int(column):,}" if column.isdigit() else column


def _cell(row: Row, value: str, shared: list[str], column: str) -> str:
    if column not in row[value]:
        return ""
    share = row[shared[0]][column] if shared else None
    return _figure(row[value][column]) + (f" ({share:.0%})" if share is not None else "")


def _named(value: Any, key: str) -> str:
    if key.endswith(("budget_bytes", "ram_bytes")):
        return "all" if value is None else f"{value / _GIB:.4g} GiB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _figure(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(runs: list[Run], path: Path) -> None:
    """Writes the picture: tokens a second of each model by budget, a line for each way of missing rows, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    packs = list(dict.fromkeys(row["pack"] for run in runs for row in run.of("Speed")))
    with mpl.rc_context({"svg.hashsalt": "moe-pack", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(_INCHES, layout="constrained")
        for number, pack in enumerate(packs):
            axes = figure.add_subplot(1, len(packs), number + 1)
            axes.set_title(pack)
            axes.set_ylabel("tokens a second, decoding")
            for run_number, run in enumerate(runs, 1):
                rows = [row for row in run.of("Speed") if row["pack"] == pack and _is_plain(row)]
                for misses in dict.fromkeys(row["wanted.misses"] for row in rows):
                    # Of each budget the last figure, which is not the one that warms up.
                    best = {
                        row["wanted.budget_bytes"]: list(row["decode_per_s"].values())[-1]
                        for row in rows
                        if row["wanted.misses"] == misses
                    }
                    order = sorted(best, key=lambda budget: float("inf") if budget is None else budget)
                    names = ["all" if budget is None else f"{budget / _GIB:.4g} GiB" for budget in order]
                    label = f"run {run_number}, {run.gpu}, {misses}"
                    axes.plot(names, [best[budget] for budget in order], marker="o", label=label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


def _is_plain(row: Row) -> bool:
    """Whether an engine has enough host memory, and predicts nothing."""
    return row["wanted.ram_bytes"] is None and row["wanted.policy"] == "auto"


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=FOLDER,
    help="Where compact files lie, and page and picture go.  [default: docs/benchmarks]",
)
@click.option("--rehearsal", is_flag=True, help="Take rehearsals' files too.")
@click.option("--no-predictions", is_flag=True, help="Write what was measured alone.")
def main(files: tuple[Path, ...], folder: Path, rehearsal: bool, no_predictions: bool) -> None:
    """Makes FILES of `make gpu-check` compact, and writes the page of all compact files."""
    wholes = [(path, json.loads(path.read_text())) for path in files]
    if any(whole["rehearsal"] for _, whole in wholes) and not rehearsal:
        raise click.UsageError(
            "some files are rehearsals, whose times mean nothing; leave them out, or add --rehearsal"
        )
    for path, whole in wholes:
        if path.parent.resolve() != folder.resolve():
            (folder / compact_name(path, whole)).write_text(compact_text(compact(whole)))
    published = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    if not published:
        raise click.UsageError("no files; run make gpu-check on a GPU, and give what it writes")
    runs = read_runs(published)
    draw(runs, folder / "gpu.svg")
    text = measured_page(runs, "gpu.svg")
    if not no_predictions:
        from gpu_roofline import predictions  # which needs Triton

        text += f"\n{predictions(runs)}"
    (folder / "gpu.md").write_text(text)
    click.echo(f"{folder / 'gpu.md'}: {len(runs)} runs, {sum(len(run.rows) for run in runs):,} rows")


if __name__ == "__main__":
    main()
