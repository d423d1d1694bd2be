"""The modules that a command loads, and who imported each first. Runs in an interpreter of its own."""

import ast
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

PROGRAMS = {
    "moe-run": "moe_pack.runtime.cli.main",
    "moe-serve": "moe_pack.runtime.cli.serve",
    "moe-pack": "moe_pack.convert.cli.main",
}
OURS = "moe_pack."
READY = b"ready on http"  # what moe-serve says when it has loaded its pack


@dataclass(frozen=True)
class LoadedModule:
    """A module of ours: its folder, the lines of its file, and those of them that are code, no text and no comment."""

    name: str
    folder: str
    lines: int
    code_lines: int
    importer: str


@dataclass(frozen=True)
class Loaded:
    """The modules that a command loaded. `packages`: the top packages of other projects."""

    modules: tuple[LoadedModule, ...]
    packages: tuple[str, ...]

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules)

    @property
    def code_lines(self) -> int:
        return sum(module.code_lines for module in self.modules)

    def folders(self) -> dict[str, tuple[int, int]]:
        found = dict[str, tuple[int, int]]()
        for module in sorted(self.modules, key=lambda each: each.folder):
            number, lines = found.get(module.folder, (0, 0))
            found[module.folder] = (number + 1, lines + module.lines)
        return found

    def table(self) -> str:
        """The modules of each folder, the longest first, with lines and the first importer."""
        shown = list[str]()
        for folder, (number, lines) in self.folders().items():
            shown.append(f"{lines:6} {folder} ({number} modules)")
            own = sorted((m for m in self.modules if m.folder == folder), key=lambda each: -each.lines)
            shown += [f"       {m.lines:5} {m.name.rpartition('.')[2]:24} imported by {m.importer}" for m in own]
        return "\n".join([*shown, f"{self.lines:6} lines of {len(self.modules)} modules"])


def loaded_by(program: str, *arguments: object, exit_code: int = 0) -> Loaded:
    """Runs a program to its end, and returns what it loaded; a server ends when it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, str(found), program, *map(str, arguments)]
        said, pipe = list[bytes](), subprocess.PIPE
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if program == "moe-serve" and READY in line:
                    process.terminate()
        text = b"".join(said).decode(errors="replace")
        assert process.returncode == exit_code and found.exists(), f"{program} ended with {process.returncode}: {text}"
        facts = json.loads(found.read_bytes())
    return Loaded(tuple(LoadedModule(**each) for each in facts["modules"]), tuple(facts["packages"]))


class _Importers:
    """A finder that finds nothing, but notes who asks first for a module of ours."""

    def __init__(self) -> None:
        self.first = dict[str, str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith(OURS) and name not in self.first:
            frame: FrameType | None = sys._getframe(1)
            # A face imports what another module wanted of it.
            while frame is not None and (
                "importlib" in frame.f_code.co_filename or "faces.py" in frame.f_code.co_filename
            ):
                frame = frame.f_back
            place = "" if frame is None else f"{frame.f_globals.get('__name__')}, {frame.f_code.co_name}"
            self.first[name] = place.removeprefix(OURS).replace(", <module>", "")


def _code_lines(text: str) -> int:
    """The lines with something else than comments, docstrings and white space."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            bodies = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            last = min((each.lineno - 1 for each in bodies), default=node.end_lineno or node.lineno)
            lines |= set(range(node.lineno, max(last, node.lineno) + 1))
    rows = text.splitlines()
    return sum(bool(rows[number - 1].strip()) and not rows[number - 1].strip().startswith("#") for number in lines)


def _facts(first: dict[str, str]) -> dict[str, object]:
    modules, packages = list[dict[str, object]](), set[str]()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or ("site-packages" not in file and not name.startswith(OURS)):
            continue
        if not name.startswith(OURS):
            packages.add(name.partition(".")[0])
        elif file.endswith(".py"):
            text = Path(file).read_text("utf-8")
            folder = name if file.endswith("__init__.py") else name.rpartition(".")[0]
            each = LoadedModule(
                name, folder.removeprefix(OURS), len(text.splitlines()), _code_lines(text), first.get(name, "")
            )
            modules.append(asdict(each))
    return {"modules": modules, "packages": sorted(each for each in packages if not each.startswith("_"))}


def _record(found: str, program: str, *arguments: str) -> None:
    importers = _Importers()
    sys.meta_path.insert(0, importers)
    command, end = import_module(PROGRAMS[program]).main, os._exit

    def write_and_end(status: int) -> NoReturn:
        Path(found).write_text(json.dumps(_facts(importers.first)))
        end(status)

    os._exit = write_and_end  # as the server ends
    try:
        command(list(arguments), prog_name=program)
    except SystemExit as ended:
        write_and_end(ended.code if isinstance(ended.code, int) else 0)


if __name__ == "__main__":
    _record(*sys.argv[1:])
