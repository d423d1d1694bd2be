"""What a pack needs to run: the modules, lines and packages that commands load for a pack of the demo model.

    python -m support.loaded_packs

Every command runs in an interpreter of its own, to its first tokens, or as a server until it has loaded the pack. With
`--modules` it lists the modules, and who imported each first, so that what made a command larger is found.
"""

import re
import tempfile
from pathlib import Path

import click

from support.loaded_modules import Loaded, loaded_by
from support.models import DEMO_MODEL, pack

_NATIVE = Path(__file__).parents[2] / "runtime" / "cpu" / "native"
_NO_CODE = re.compile(r"\s*(//.*)?")
_TEXT = ("--prompt", "It was a dark night, and the wind blew over the long road to the town", "--max-tokens", "8")
CASES = {
    "moe-run PACK --prompt TEXT": _TEXT,
    "moe-run PACK --prompt TEXT --budget 16M": (*_TEXT, "--budget", "16M"),
    "moe-serve PACK --budget 16M": ("--budget", "16M", "--port", "0"),
}


def loaded_by_case(case: str, packed: Path) -> Loaded:
    """Returns what a command of `CASES` loads for a pack."""
    return loaded_by(case.partition(" ")[0], packed, *CASES[case])


def sizes(found: dict[str, Loaded]) -> str:
    """Returns the table of what commands load, and of the kernels in C++."""
    rows = [(f"`{name}`", len(each.modules), each.lines, each.code_lines) for name, each in found.items()]
    native = [line for path in sorted(_NATIVE.iterdir()) for line in path.read_text("utf-8").splitlines()]
    native_code = sum(_NO_CODE.fullmatch(line) is None for line in native)
    lines = ["| command | modules | lines | of code |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {name} | {modules} | {total:,} | {code:,} |" for name, modules, total, code in rows]
    lines += [f"| native kernels, C++ | | {len(native):,} | {native_code:,} |", "", "Other packages:"]
    return "\n".join([*lines, *(f"{name}: {', '.join(each.packages)}" for name, each in found.items())])


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--modules", "shows_modules", is_flag=True, help="List the modules of each folder.")
def main(shows_modules: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pack(DEMO_MODEL, Path(folder) / "packed")
        found = {case: loaded_by_case(case, Path(folder) / "packed") for case in CASES}
    for name, loaded in found.items() if shows_modules else ():
        click.echo(f"{name}\n{loaded.table()}\n")
    click.echo(sizes(found))


if __name__ == "__main__":
    main()
