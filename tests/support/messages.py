"""Collects every text that a user of the product can read: `make messages` writes build/messages.txt.

A text is a string in the code of two words or more: errors, help, progress, reports. Docstrings are not shown to users,
but for those of commands. Values that a message fills in stand as {name}.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("formats", "runtime", "calib", "convert")
PAGE = ROOT / "build" / "messages.txt"
_TWO_WORDS = re.compile(r"[A-Za-z{}][\w{}'.,:;)-]*\s+[\w({'-]")


@cache
def collected_messages() -> str:
    """Returns the content of the page: each source file's name, then its messages, one a line."""
    pages = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            lines = list(dict.fromkeys(_messages(ast.parse(path.read_text("utf-8")))))
            if lines:
                pages.append("\n".join([f"# {path.relative_to(ROOT).as_posix()}", *lines]))
    return "\n\n".join(pages) + "\n"


def _messages(tree: ast.Module) -> Iterator[str]:
    hidden = {id(node) for node in (*_docstrings(tree), *_assertions(tree))}
    inside: set[int] = set()
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(child) for child in ast.walk(node) if child is not node}
        if id(node) in inside or id(node) in hidden:
            continue
        text = _text(node)
        if text is not None and _TWO_WORDS.search(text):
            texts.append((node.lineno, node.col_offset, text))  # type: ignore[attr-defined]  # strings have places
    for _, _, text in sorted(texts):
        yield " ".join(text.split())


def _text(node: ast.AST) -> str | None:
    """Returns a string's text with its values as {name}; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            value.value if isinstance(value, ast.Constant) else f"{{{ast.unparse(value.value)}}}"  # type: ignore[attr-defined]
            for value in node.values
        )
        return "".join(map(str, parts))
    return None


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the docstrings that no user sees: all but those of commands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_command = any(
                "command" in ast.unparse(name) or "group" in ast.unparse(name)
                for name in getattr(node, "decorator_list", [])
            )
            if isinstance(first, ast.Expr) and not is_command:
                yield first.value


def _assertions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.msg is not None:
            yield from ast.walk(node.msg)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("takes no arguments: writes build/messages.txt")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(collected_messages(), encoding="utf-8")
