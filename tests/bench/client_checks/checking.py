"""What the checks of clients share: where the server is, and how a check is run and written.

A file of checks is run in an environment that has the client, and that this project is not installed in. Each check is
a function without arguments that raises an exception if something is wrong; a result is a line of JSON.
"""

import asyncio
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

ADDRESS = os.environ.get("MOE_SERVE_URL", "http://127.0.0.1:8080")
MODEL = os.environ.get("MOE_SERVE_MODEL", "default")
KEY = "none"
MAX_TOKENS = 200
MAX_MESSAGE = 300

# Every string of these schemas is one of a few: a model that says nonsense ends them all the same.
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "is_warm": {"type": "boolean"}},
    "required": ["city", "is_warm"],
    "additionalProperties": False,
}
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

Check = Callable[[], Any]
_checks: list[tuple[str, str, Check]] = []


def check(client: str, what: str) -> Callable[[Check], Check]:
    """Notes a check of a client; `client`: the name that its package has on PyPI."""

    def note(function: Check) -> Check:
        _checks.append((client, what, function))
        return function

    return note


def expect(is_right: object, found: object) -> None:
    """Raises an exception that says what was found, unless it is right."""
    if not is_right:
        raise AssertionError(f"found {found!r}")


def expect_city(found: Any) -> None:
    """Raises an exception unless this is an object of `CITY_SCHEMA`, or JSON text of one."""
    if isinstance(found, str):
        found = json.loads(found)
    is_right = set(found) == {"city", "is_warm"} and found["city"] in ("Rome", "Oslo") and found["is_warm"] in (0, 1)
    expect(is_right, found)


def fault_text(fault: BaseException) -> str:
    """Returns an exception as one short line."""
    text = re.sub(r"\s+", " ", f"{type(fault).__name__}: {fault}")
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def main() -> None:
    """Runs all checks that were noted; with words as arguments those whose description has one of them."""
    wanted = sys.argv[1:]
    for client, what, function in _checks:
        if wanted and not any(word in what for word in wanted):
            continue
        fault = ""
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as found:
            fault = fault_text(found)
        result = {"client": client, "version": _version(client), "what": what, "fault": fault}
        print(json.dumps(result), flush=True)


def _version(client: str) -> str:
    try:
        return version(client)
    except ModuleNotFoundError:
        return ""
