"""The house rules that a reader can check: who imports whom, where the world is touched, how large things are."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from moe_pack.formats.base.version import installed_version
from moe_pack.formats.families.registry import model_types, modules

ROOT = Path(__file__).parents[1]
ROOMS = ("formats", "runtime", "calib", "convert")
# Every folder, from the ground up: a folder imports from folders that stand before it, and never from one after it.
FLOORS = (
    "formats.base", "formats.parts", "formats.pack", "formats", "formats.families", "formats.gguf", "formats.hub",
    "runtime.cpu", "runtime.model.caches", "runtime.model.compute", "runtime.model.attention", "runtime.model",
    "runtime.offload", "runtime.drafts", "runtime.gpu.kernels", "runtime.gpu.kernels.attention",
    "runtime.gpu.kernels.mixers", "runtime.gpu", "runtime.gpu.token",
    "runtime.engine", "runtime",
    "runtime.serve", "runtime.serve.protocols", "runtime.serve.http", "runtime.cli",
    "calib.quantize", "calib.forward", "calib.statistics", "calib.sensitivity", "calib.evaluate", "calib.profile",
    "calib.report", "calib",
    "convert.plan", "convert", "convert.export", "convert.cli",
)  # fmt: skip
EXTENSION = "moe_pack.runtime.cpu._native"  # no Python: it imports nothing of ours
COMMAND_HELPERS = "moe_pack.formats.base.cli"  # what commands share; only folders and modules called cli may import it

FACES = "moe_pack.formats.base.faces"  # how faces load their names
TABLE = "moe_pack.formats.families.registry"  # imports a family when its `model_type` is used

# Where families may be named: their own folder, what GGUF files call their architectures and tokenizers, and fields of
# other servers' requests, some of which are named so.
FAMILY_TABLES = (
    "moe_pack.formats.families",
    "moe_pack.formats.gguf",
    "moe_pack.runtime.serve.protocols.constraints",
)

# Where code looks at the class of a model's part: where parts are defined and computed, and in the files below, which
# say parts in the words of GGUF, or choose a GPU's kernels. All others ask the part.
PARTS = ("moe_pack.formats.parts", "moe_pack.runtime.model")
LOOK_AT_PARTS = {
    "moe_pack.formats.gguf.factors", "moe_pack.formats.gguf.metadata", "moe_pack.runtime.gpu.token.attention",
    "moe_pack.runtime.gpu.token.fused",
}  # fmt: skip

MAX_FACE_NAMES = 40
FOR_USERS = {"moe_pack.runtime": {"Model", "load"}}  # names that a face offers to those who write Python
BY_ITSELF = {"formats.parts"}  # whose specs.py uses the face, so that a kind of part is loaded for a model that has one
MAX_FOLDER_FILES = 14  # the families' folder aside
MAX_FILE_LINES = 800
MIN_FILE_LINES = 100  # a shorter file is a family, an entry point, or imported by three others
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_SWEEP_LINES = 80
USUAL_FUNCTION_LINES = 40
USUAL_SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Source:
    """A source file of a room: its module's name, its text and its syntax tree."""

    module: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.module.split(".")[1]

    @property
    def is_cli(self) -> bool:
        return "cli" in self.module.split(".")

    @property
    def folder(self) -> str:
        module = self.module.removeprefix("moe_pack.")
        return module if self.is_face else module.rpartition(".")[0]

    @property
    def is_face(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(("moe_pack", *(part for part in parts if part != "__init__")))
            text = path.read_text(encoding="utf-8")
            found.append(Source(module, path, text, ast.parse(text)))
    return tuple(found)


@cache
def submodules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def names_bound(source: Source) -> set[str]:
    """The names that a face offers: what it imports from the modules of its folder, for type checkers alone."""
    blocks = [node.body for node in source.tree.body if isinstance(node, ast.If)]
    nodes = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes for alias in node.names}


@cache
def imported(source: Source) -> frozenset[str]:
    names = {f"moe_pack.formats.families.{module}" for module in modules()} if source.module == TABLE else set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{source.module}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in submodules() else node.module)
    return frozenset(names)


@cache
def imported_names(source: Source) -> set[str]:
    """Returns the names that a file imports, or uses of an imported folder: `parts.MixerSpec`."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    folders = {name for name in names if name.removeprefix("moe_pack.") in FLOORS}
    used = {folder: re.findall(rf"(?<![\w.]){folder.rpartition('.')[2]}\.(\w+)", source.text) for folder in folders}
    return names | {f"{folder}.{name}" for folder in used for name in used[folder]}


def packages(source: Source) -> set[str]:
    return {name.partition(".")[0] for name in imported(source)}


def ours(source: Source) -> set[str]:
    return {name for name in imported(source) if name.startswith("moe_pack.")}


def folder_of(module: str) -> str:
    """The folder of an imported module, which may be a folder itself."""
    name = module.removeprefix("moe_pack.")
    return name if name in FLOORS else name.rpartition(".")[0]


def test_every_folder_has_its_floor() -> None:
    assert {source.folder for source in sources()} == set(FLOORS)


def test_imports_of_folders_go_down_only() -> None:
    wrong = [
        (source.module, name)
        for source in sources()
        for name in ours(source)
        if name != EXTENSION and FLOORS.index(folder_of(name)) > FLOORS.index(source.folder)
    ]
    assert wrong == []


def test_a_face_offers_names_of_its_own_folder_alone() -> None:
    """A room's face also offers names of folders below its own modules."""
    below = {
        "formats": ("formats.base", "formats.parts", "formats.pack"),
        "runtime": ("runtime.engine",),
        "runtime.model": ("runtime.model.compute",),
    }
    wrong = [
        (s.module, name)
        for s in sources()
        if s.is_face
        for name in ours(s)
        if folder_of(name) != s.folder and folder_of(name) not in below.get(s.folder, ())
    ]
    assert [(module, name) for module, name in wrong if name != FACES] == []


def test_a_face_loads_its_modules_when_their_names_are_used() -> None:
    for source in sources():
        if not source.is_face or not names_bound(source):
            continue
        imports = [ast.unparse(node) for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports == ["from typing import TYPE_CHECKING", f"from {FACES} import face"], source.module
        modules = {other.path.stem for other in sources() if other.folder == source.folder and not other.is_face}
        hidden = names_bound(source) & modules  # Python sets a module as an attribute of its folder
        assert hidden == set(), f"{source.module}: offer no name that a module of the folder has"
        offered = importlib.import_module(source.module)
        for name in names_bound(source):
            defined = importlib.import_module(chapters_of_faces()[f"{source.module}.{name}"])
            assert getattr(offered, name) is getattr(defined, name), f"{source.module}.{name}"
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
            _ = offered.nothing


def test_what_a_face_offers_is_imported_from_the_face() -> None:
    faces = {source.module: names_bound(source) for source in sources() if source.is_face}
    wrong = [
        (source.module, name)
        for source in sources()
        for name in imported_names(source)
        if name.count(".") > 1 and name.startswith("moe_pack.")
        if folder_of(name.rpartition(".")[0]) != source.folder
        for face in [f"moe_pack.{folder_of(name.rpartition('.')[0])}"]
        if name.rpartition(".")[0] != face and name.rpartition(".")[2] in faces[face]
    ]
    assert wrong == []


def test_a_face_has_few_names_each_of_which_another_folder_imports() -> None:
    imports = {(s.folder, name) for s in sources() for name in imported_names(s)}
    for source in sources():
        if not source.is_face:
            continue
        names = names_bound(source)
        assert len(names) <= MAX_FACE_NAMES, source.module
        names -= FOR_USERS.get(source.module, set())
        folders = {name: {f for f, i in imports if i == f"{source.module}.{name}"} for name in names}
        unused = [name for name, found in folders.items() if not found - ({source.folder} - BY_ITSELF)]
        assert unused == [], source.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = {source.module: ours(source) - {source.module, EXTENSION} for source in sources()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for other in edges[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_modules_are_imported_by_statements_which_the_tests_above_read() -> None:
    # By name: commands, families, names of faces, what one system has, kernels that another process compiles.
    by_name = {COMMAND_HELPERS, TABLE, FACES, "moe_pack.formats.base.files", "moe_pack.runtime.gpu.ahead"}
    assert {source.module for source in sources() if re.search(r"import_module\(|__import__\(", source.text)} == by_name


def test_formats_imports_torch_in_one_module() -> None:
    formats = [source.module for source in sources() if source.room == "formats" and "torch" in packages(source)]
    assert formats == ["moe_pack.formats.pack.codecs"]


def test_runtime_and_formats_run_without_the_extras() -> None:
    extras = {"hqq", "datasets", "transformers", "huggingface_hub", "safetensors"}
    found = [(s.module, packages(s) & extras) for s in sources() if s.room in ("formats", "runtime")]
    # A name of the hub needs its client, which is imported then.
    assert [(module, names) for module, names in found if names] == [
        ("moe_pack.formats.hub.repository", {"huggingface_hub"})
    ]


def test_packages_are_imported_where_they_may_be() -> None:
    commands = {source.module for source in sources() if source.is_cli}
    text = {"moe_pack.calib.forward.text"}
    allowed: dict[str, set[str]] = {"datasets": text, "pyarrow": text, "click": commands, "tqdm": commands}
    allowed |= {name: set() for name in ("transformers", "safetensors", "pytest", "hypothesis")}
    wrong = [
        (s.module, name) for s in sources() for name in packages(s) & allowed.keys() if s.module not in allowed[name]
    ]
    assert wrong == []


def test_only_one_module_asks_for_installed_versions_which_knows_ours_where_nothing_is_installed() -> None:
    assert [s.module for s in sources() if "importlib.metadata.version" in imported_names(s)] == [
        "moe_pack.formats.base.version"
    ]
    assert installed_version("moe-pack") == version("moe-pack")


def world(source: Source) -> Iterator[str]:
    """Yields the places where a file prints, ends the process or reads the environment."""
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("print", "input", "exit")
        ):
            yield node.func.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("sys.exit", "os.environ", "os.getenv", "os._exit", "sys.argv", "sys.stdout", "sys.stderr"):
                yield name
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
            yield from (alias.name for alias in node.names if alias.name in ("environ", "getenv", "exit"))
        if isinstance(node, ast.Name) and node.id == "SystemExit":
            yield "SystemExit"


def test_only_commands_print_exit_or_read_the_environment() -> None:
    assert [(source.module, found) for source in sources() if not source.is_cli for found in world(source)] == []


def test_errors_are_not_swallowed() -> None:
    wrong = [
        (source.module, node.lineno)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert wrong == []


def code_words(source: Source) -> Iterator[tuple[int, str]]:
    texts = {
        id(node.body[0].value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias | ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_a_family_is_named_in_the_family_table_alone() -> None:
    # A name that begins inside a word is none: "variance" does not name Aria.
    names = re.compile(f"(?<![a-z])(?:{'|'.join(map(re.escape, model_types()))})", re.IGNORECASE)
    wrong = [
        (source.module, line, word)
        for source in sources()
        if not source.module.startswith(FAMILY_TABLES)
        for line, word in code_words(source)
        if names.search(word)
    ]
    assert wrong == []


def test_a_part_is_asked_and_its_class_is_not_looked_at() -> None:
    found = {
        source.module
        for source in sources()
        if not source.module.startswith(PARTS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if re.search(r"Spec\b", ast.unparse(node.args[1]))
    }
    assert found == LOOK_AT_PARTS


def written_by_hand() -> list[Path]:
    folders = [ROOT / name for name in (*ROOMS, "tests")]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def chapters_of_faces() -> dict[str, str]:
    """The module that defines each name of a face, by the name with its package."""
    return {
        f"{source.module}.{name.rpartition('.')[2]}": name.rpartition(".")[0]
        for source in sources()
        if source.is_face
        for name in imported_names(source)
        if name.startswith("moe_pack.") and not name.startswith(FACES)
    }


def defined_in(name: str) -> str:
    """The module that an imported name is, or that defines it; the name may come through a face."""
    return name if name in submodules() else chapters_of_faces().get(name, name.rpartition(".")[0])


def test_a_file_is_a_chapter() -> None:
    importers = Counter(
        chapter
        for source in sources()
        if not source.is_face
        for chapter in {n if n in submodules() else defined_in(n) for n in imported_names(source)}
    )
    for source in sources():
        lines = len(source.text.splitlines())
        assert lines <= MAX_FILE_LINES, f"{source.module}: {lines} lines"
        is_small_by_right = (
            source.is_face
            or source.folder == "formats.families"
            or source.path.name in ("version.py", "errors.py", "__main__.py")
            or importers[source.module] >= 3
            or source.module == FACES
        )
        assert lines >= MIN_FILE_LINES or is_small_by_right, f"{source.module}: {lines} lines"


def test_a_folder_has_few_files() -> None:
    counts = Counter(source.folder for source in sources() if not source.is_face)
    counts.pop("formats.families")
    assert {folder: count for folder, count in counts.items() if count > MAX_FOLDER_FILES} == {}


def test_tests_and_benchmarks_are_no_longer_than_chapters() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in written_by_hand()}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def functions(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    statements: list[ast.stmt] = [*tree.body]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}: {node.name}", node.end_lineno - node.lineno + 1
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, block, [])


def test_no_function_is_longer_than_it_may_be() -> None:
    tests = [(path, ast.parse(path.read_text("utf-8"))) for path in sorted((ROOT / "tests").rglob("*.py"))]
    trees = [*((source.path, source.tree) for source in sources()), *tests]
    lengths = dict(entry for path, tree in trees for entry in functions(path, tree))
    too_long = {name: lines for name, lines in lengths.items() if lines > most_lines(name)}
    assert too_long == {}


def most_lines(name: str) -> int:
    """Kernels pass everything by name, an argument a line; a sweep lists its cases."""
    if name.startswith("runtime/gpu/kernels/"):
        return MAX_KERNEL_LINES
    return MAX_SWEEP_LINES if name.startswith("tests/") else MAX_FUNCTION_LINES


def test_nine_functions_of_ten_are_short() -> None:
    lengths = [lines for source in sources() for _, lines in functions(source.path, source.tree)]
    short = sum(lines <= USUAL_FUNCTION_LINES for lines in lengths)
    assert short / len(lengths) >= USUAL_SHARE


def test_no_sentence_of_a_docstring_has_a_clause_in_place_of_its_subject() -> None:
    """`What a file has.` is a puzzle; `The content of a file.` or `Returns the content of a file.` is a sentence."""
    found = [
        f"{source.path.relative_to(ROOT)}:{node.body[0].lineno}: {sentence[:60]}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for sentence in re.split(r"(?<=[.:;])\s+", ast.get_docstring(node) or "")
        if re.match(r"(What|Of|Where|Which|Whose|That)\b", sentence) and not sentence.endswith("?")
    ]
    assert not found, "\n".join(found)


def test_files_that_code_and_pages_name_are_there() -> None:
    """A file that is gone may be named with the commit that has it."""
    pages = [path for room in (*ROOMS, "docs") for path in (ROOT / room).rglob("*.md")]
    texts = [(source.path, source.text) for source in sources()]
    texts += [(path, path.read_text("utf-8")) for path in (*pages, ROOT / "README.md", ROOT / "tests" / "README.md")]
    gone = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts
        if path.parent.name
        not in ("benchmarks", "configs")  # test_documentation.py reads the results; other projects' files
        for match in re.finditer(r"\b(?:tests|formats|runtime|calib|convert)/[a-z0-9_/]+\.(?:py|h|cpp)\b", text)
        if not any((folder / match[0]).exists() for folder in (ROOT, path.parent))
        and "newmoe" not in match[0]  # the example of a family that is to be written
        and not re.match(r"`?\s+of\s+commit\b", text[match.end() :])
    ]
    assert not gone, "\n".join(gone)
