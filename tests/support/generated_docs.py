"""Writes the parts of pages that follow from the code: `make docs`.

A page has a part between two lines:

    <!-- keys: GroupedQuerySpec, LatentSpec -->      the keys of these dataclasses
    <!-- options: moe-pack plan -->                  the options of a command, as its --help has them
    <!-- options: moe-serve without moe-run -->      those of them that another command does not have, or has otherwise
    <!-- end -->
"""

import re
from pathlib import Path

import click

from support.documented_keys import table
from support.shown_commands import PAGES, PRODUCT

_PART = re.compile(r"(<!-- (keys|options): (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_DEFAULT = re.compile(r"\s*\[default[:,] ([^\]]*)\]")
_BOUNDS = re.compile(r"(?:; )?\b(?:[\d.]+<=)?x[<>]=?[\d.]+|\s*\[(?:[\d.]+<=)?x[<>]=?[\d.]+\]")  # which --help shows
_PLACES = {"INTEGER RANGE": "N", "FLOAT RANGE": "X", "FLOAT": "X", "FILENAME": "FILE"}  # of Click for what it parses
_EVERYWHERE = {"--help", "--version", "--debug", "--list"}


def generated(page: Path) -> str:
    """Returns a page's text with its parts as they follow from the code."""
    return _PART.sub(_written, page.read_text("utf-8"))


def _written(match: re.Match[str]) -> str:
    begin, what, names, end = match.groups()
    if what == "keys":
        lines = table([name.strip() for name in names.split(",")])
    else:
        command, _, without = names.partition(" without ")
        lines = _options(command, without)
    return "\n".join([begin.rstrip("\n"), "", *lines, "", end])


def documented_options(page: Path) -> list[tuple[str, str]]:
    """Returns the commands whose options a page has, each with the command whose options are left out, or ""."""
    found = [match.group(3) for match in _PART.finditer(page.read_text("utf-8")) if match.group(2) == "options"]
    return [(first, second) for first, _, second in (names.partition(" without ") for names in found)]


def command_named(name: str) -> click.Command:
    """Returns the command of a name such as `moe-pack plan`."""
    program, _, rest = name.partition(" ")
    command = PRODUCT[program]
    if not rest:
        return command
    assert isinstance(command, click.Group)
    _, found, _ = command.resolve_command(click.Context(command), [rest])
    assert found is not None
    return found


def _options(name: str, without: str) -> list[str]:
    left_out = set(_rows(without)) if without else set()
    rows = [row for row in _rows(name) if row not in left_out]
    return ["| option | default | meaning |", "| --- | --- | --- |", *rows]


def _rows(name: str) -> list[str]:
    """Returns a line for each option of a command."""
    command = command_named(name)
    context = click.Context(command, info_name=name)
    rows = []
    for option in command.params:
        if not isinstance(option, click.Option) or max(option.opts, key=len) in _EVERYWHERE:
            continue
        record = option.get_help_record(context)
        if record is None:
            continue
        names, text = record[0].replace("[", "").replace("]", ""), _BOUNDS.sub("", record[1])
        for place, short in _PLACES.items():
            names = re.sub(f" {place}$", f" {short}", names)
        default = _DEFAULT.search(text)
        meaning = " ".join(_DEFAULT.sub("", text).split())
        cells = (f"`{names}`", default[1].strip() if default else "", meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def main() -> None:
    """Writes all pages."""
    for page in PAGES:
        text = generated(page)
        if text != page.read_text("utf-8"):
            page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
