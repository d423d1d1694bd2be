"""The keys of a manifest's `model`, read from the source of the dataclasses that describe it.

Nothing is imported: a class is found by its name in formats/parts/, its fields by `ast`, and what explains a field by
`tokenize`: the comment at the end of its line, and comment lines directly above it.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SIMPLE = {"int": "whole number", "float": "float", "bool": "true or false", "str": "text", "None": "null"}
_VALUES = {"False": "false", "True": "true", "None": "null", "()": "`[]`"}
_TOOL = re.compile(r"\b(?:noqa|type|fmt|pragma)\b:")  # what follows on the line is for tools


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    type: str  # in words
    default: str | None  # its value if the key is left out; None if it is always there
    meaning: str


@dataclass(frozen=True, slots=True)
class _Source:
    tree: ast.ClassDef
    comments: dict[int, tuple[str, bool]]  # by line: the text, and whether it has the line for itself


def keys_of(name: str) -> list[Key]:
    source = _classes()[name]
    annotated = [node for node in source.tree.body if isinstance(node, ast.AnnAssign)]
    return [_key(field, source.comments) for field in annotated if "ClassVar" not in ast.unparse(field.annotation)]


def summary_of(name: str) -> str:
    """Returns the first paragraph of a class's docstring, in one line."""
    return " ".join((ast.get_docstring(_classes()[name].tree) or "").partition("\n\n")[0].split())


def spec_names() -> set[str]:
    return {name for name, source in _classes().items() if name.endswith("Spec")}


@cache
def _classes() -> dict[str, _Source]:
    found: dict[str, _Source] = {}
    for path in sorted((ROOT / "formats" / "parts").glob("*.py")):
        text = path.read_text("utf-8")
        comments = dict(_comments(text))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                found[node.name] = _Source(node, comments)
    return found


def _comments(text: str) -> Iterator[tuple[int, tuple[str, bool]]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.removeprefix("#").strip()
            kept = _TOOL.split(words)[0].strip().removesuffix("#").strip()
            yield token.start[0], (kept, not token.line[: token.start[1]].strip())


def _key(field: ast.AnnAssign, comments: dict[int, tuple[str, bool]]) -> Key:
    above: list[str] = []
    line = field.lineno - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    last = field.end_lineno or field.lineno
    behind = [comments[line][0] for line in range(field.lineno, last + 1) if line in comments]
    meaning = " ".join(part for part in (*above, *behind) if part)
    return Key(ast.unparse(field.target), _in_words(field.annotation), _default(field.value), meaning)


def _default(value: ast.expr | None) -> str | None:
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "added":
        return None
    shown = ast.unparse(value.args[0])
    return _VALUES.get(shown, f'`"{shown[1:-1]}"`' if shown.startswith("'") else f"{shown}")


def _in_words(annotation: ast.expr) -> str:
    """Returns a field's type as a stranger's JSON has it."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _in_words(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        parts = (_in_words(annotation.left), _in_words(annotation.right))
        return " or ".join(parts)
    if isinstance(annotation, ast.Subscript):
        items = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if ast.unparse(annotation.value) == "Literal":
            return ", ".join(f'`"{ast.literal_eval(each)}"`' for each in items)
        inner = _in_words(items[0])
        return "list of lists" if inner.startswith("list") else f"list of {_several(inner)}"
    name = ast.unparse(annotation).rpartition(".")[2]
    if name in _SIMPLE:
        return _SIMPLE[name]
    if name.endswith("Spec"):
        return f"object *{_object_name(name)}*"
    return _in_words(_alias(name))


def _several(words: str) -> str:
    return {"whole number": "whole numbers", "float": "floats"}.get(words, words.replace("object", "objects", 1))


def _object_name(name: str) -> str:
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name.removesuffix("Spec"))
    return words.strip()


@cache
def _alias(name: str) -> ast.expr:
    for path in sorted((ROOT / "formats" / "parts").glob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return node.value
    raise AssertionError(f"{name} is no type that this page can name")


def table(names: list[str]) -> list[str]:
    """Returns a Markdown table of the keys of some classes; a class's keys come after a line with its name."""
    lines = ["| key | value | if left out | meaning |", "| --- | --- | --- | --- |"]
    for name in names:
        keys = keys_of(name)
        kind = next((key for key in keys if key.name == "kind" and "," not in key.type), None)
        if kind is not None:
            lines.append(_row(f"**`kind`**: {kind.type}", "", "", summary_of(name)))
        elif len(names) > 1:
            lines.append(_row(f"**{_object_name(name)}**", "", "", summary_of(name)))
        lines += [
            _row(", ".join(f"`{each.name}`" for each in alike), alike[0].type, alike[0].default or "", alike[0].meaning)
            for alike in _alike([key for key in keys if key is not kind])
        ]
    return lines


def _alike(keys: list[Key]) -> Iterator[list[Key]]:
    """Yields keys with all that follow them and differ from them in the name alone."""
    for _, group in groupby(keys, lambda key: (key.type, key.default, key.meaning)):
        yield list(group)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
