"""Faces of folders, which load a module only when one of its names is used.

`__init__.py` imports the folder's names under `TYPE_CHECKING`, where type checkers see them. At run time its
`__getattr__` (PEP 562) imports the module of a name: importing a folder costs nothing.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def face(package: str, call: str | None = None) -> Callable[[str], object]:
    """Returns the `__getattr__` of a folder's `__init__.py`.

    Args:    package: the folder's `__name__`. It may offer no name of a module in it: Python sets modules as attributes
             of their folder.   call: a module whose function of the folder's name runs if the folder is called.
    """
    if call is not None:

        class Called(ModuleType):
            def __call__(self, *args: Any, **options: Any) -> object:
                return getattr(import_module(f"{package}.{call}"), package.rpartition(".")[2])(*args, **options)

        sys.modules[package].__class__ = Called

    def load(name: str) -> object:
        module = _modules(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return load


@cache
def _modules(package: str) -> dict[str, str]:  # by the name that each defines
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
