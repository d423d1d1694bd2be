"""Python's own documentation as a text: on every machine, of another kind than novels, the same for a Python version.

A document is a topic of the language reference, as `help()` shows it (`pydoc_data.topics`; left out where a Python
comes without), or a module of the standard library: its docstring and those of its classes and functions, by their
names, as they stand in the source; no module is imported for it. Documents lie in the order of their names' SHA-256,
so that every stretch shows both sorts; every third is for judging, the others to calibrate on. What a document has from
one before it is left out (topics hold others whole): nothing that is judged was calibrated on.

    python benchmarks/python_text.py FOLDER

writes `python-calibration.jsonl` and `python-valid.jsonl` there, an object a document, its text in `text`.
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

CALIBRATION, VALID = "python-calibration.jsonl", "python-valid.jsonl"
_JUDGED = 3  # of so many documents one
_NAME_CHARS = 40  # paragraphs as short may come again: mostly names
# Tables of codecs, and what distributors take out of Python or put elsewhere: it would not be everywhere the same.
_LEFT_OUT = {
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site",
    "sitecustomize",
    "sysconfig",
    "tkinter",
    "turtle",
    "turtledemo",
    "usercustomize",
    "venv",
}

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_documents() -> list[str]:
    """The documents, in order.

    Raises:  click.ClickException if this Python has no standard library in source form.
    """
    documents = dict(_topics()) | dict(_modules())
    in_order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    seen: set[str] = set()
    held = ("\n\n".join(_unseen(documents[name], seen)) for name in in_order)
    return [text for text in held if text.strip()]


def _unseen(text: str, seen: set[str]) -> Iterator[str]:
    """The paragraphs that are not among those seen, which they join."""
    for paragraph in text.split("\n\n"):
        if len(paragraph) <= _NAME_CHARS or paragraph.strip() not in seen:
            yield paragraph
        seen.add(paragraph.strip())


def write_python_text(folder: Path) -> tuple[Path, Path]:
    """Writes both files; where they are: the text to calibrate on, and that to judge on."""
    documents = python_documents()
    judged = documents[_JUDGED - 1 :: _JUDGED]
    others = [text for place, text in enumerate(documents) if place % _JUDGED != _JUDGED - 1]
    for name, texts in ((CALIBRATION, others), (VALID, judged)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / name).write_text(lines, "utf-8")
    return folder / CALIBRATION, folder / VALID


def _topics() -> Iterator[tuple[str, str]]:
    """The language reference by topic."""
    if find_spec("pydoc_data.topics") is None:
        return
    for name, text in import_module("pydoc_data.topics").topics.items():
        yield f"topic {name}", text


def _modules() -> Iterator[tuple[str, str]]:
    """Every module that has docstrings, with these."""
    library = Path(sysconfig.get_path("stdlib"))
    found = False
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        single = library / f"{name}.py"
        for path in [single] if single.exists() else sorted((library / name).rglob("*.py")):
            place = path.relative_to(library)
            if {"test", "tests", "__pycache__", "site-packages"} & set(place.parts):
                continue
            found = True
            if text := "\n\n".join(_docstrings(ast.parse(path.read_bytes()), "")):
                yield f"module {place.as_posix()}", text
    if not found:
        raise click.ClickException(f"{library}: found no modules in source form; run another Python")


def _docstrings(node: _Documented, name: str) -> Iterator[str]:
    """The docstrings of a definition and of those within it that are not private, each under its name."""
    if text := ast.get_docstring(node):
        yield f"{name}\n\n{text}" if name else text
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
            yield from _docstrings(inner, f"{name}.{inner.name}" if name else inner.name)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(folder: Path) -> None:
    """Writes, and says what."""
    for path in write_python_text(folder):
        click.echo(f"{path}: {path.stat().st_size:,} bytes, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
