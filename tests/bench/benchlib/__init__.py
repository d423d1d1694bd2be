"""What the benchmark commands share: texts and models, how commands of the project run, how results are printed."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch

from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

ROOT = Path(__file__).parents[3]
DEMO_MODEL = ROOT / "tests" / "models" / "tiny-mixtral"
BOOK = ROOT / "tests" / "data" / "books-valid.txt"  # neither the demo model nor the shipped sample has seen it
SEQUENCE_LENGTH = 512
PACK_BITS = ("--selector-bits", "4", "--record-bits", "4", "--dense-bits", "4")
FLOE_BITS = ("--selector", "up", "--selector-bits", "2", "--record-bits", "16", "--dense-bits", "16")

sys.path.append(str(ROOT / "tests"))  # after all else: some commands use what tests have

_NUMBER = re.compile(r"[+-]?[\d.,]+( GiB| MiB|%|$| \[)")

F = TypeVar("F", bound=Callable[..., Any])


def sample_and_unseen(
    model: Path, num_sample: int, num_unseen: int, text: Path = BOOK, sample: Path | None = None
) -> tuple[Tokens, Tokens]:
    """Reads the text to calibrate on (the shipped sample by default), and the text to judge on."""
    tokenizer = Text(FolderFiles(model))
    calibration = read_tokens(str(sample) if sample else None, None, tokenizer, num_sample, SEQUENCE_LENGTH)
    return calibration, read_tokens(str(text), None, tokenizer, num_unseen, SEQUENCE_LENGTH)


def moe_pack_command(*arguments: object) -> list[str]:
    """Returns the command line of `moe-pack` with these arguments."""
    return [sys.executable, "-m", "moe_pack.convert.cli", *map(str, arguments)]


def moe_pack(*arguments: object) -> None:
    """Runs `moe-pack`; its output is dropped, its errors are shown."""
    click.echo(f"moe-pack {' '.join(map(str, arguments))}", err=True)
    subprocess.run(moe_pack_command(*arguments), check=True, stdout=subprocess.DEVNULL)


def json_option(body: F) -> F:
    """Adds `--json` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")(body)


def folder_option(body: F) -> F:
    """Adds `--folder`, where packs are made once and kept."""
    kind = click.Path(path_type=Path, file_okay=False)
    text = "Where packs are kept from run to run."
    return click.option("--folder", type=kind, default="build/bench-packs", show_default=True, help=text)(body)


def model_options(body: F) -> F:
    """Adds `--model` and `--text`: a checkpoint, and a text to judge on that it has not seen."""
    path = click.Path(path_type=Path, exists=True)
    body = click.option("--text", type=path, default=BOOK, help="To judge on.  [default: tests/data/books-valid.txt]")(
        body
    )
    text = "A checkpoint.  [default: the demo model]"
    return click.option("--model", type=path, default=DEMO_MODEL, help=text)(body)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown; columns of numbers are right-aligned. None is an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(3, *(len(row[idx]) for row in [list(header), *cells])) for idx in range(len(header))]
    is_text = [
        not all(_NUMBER.match(row[idx]) for row in cells if row[idx]) or not any(row[idx] for row in cells)
        for idx in range(len(header))
    ]
    rule = ["-" * width if text else "-" * (width - 1) + ":" for width, text in zip(widths, is_text, strict=True)]
    lines = [list(header), rule, *cells]
    aligned = [
        [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


def figure(value: float | None, form: str = ".2f") -> str:
    """Returns a figure, or an empty cell for None."""
    return "" if value is None else format(value, form)


def finish(facts: dict[str, Any], text: str, as_json: bool, faults: Sequence[str] = ()) -> None:
    """Prints a result as text or JSON, the faults on standard error; exits with 1 if there are any."""
    if as_json:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        machine = {"cores": cores, "load": load, "torch": torch.__version__, "python": platform.python_version()}
        click.echo(json.dumps({"machine": machine} | facts | {"faults": list(faults)}, indent=1, default=_plain))
    else:
        click.echo(text)
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
