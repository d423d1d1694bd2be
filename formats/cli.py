"""What every command of the project shares: how an error is shown, how Ctrl-C ends, --version and --debug.

Not imported by the room's face, so that reading packs from Python needs no click.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from moe_pack.formats.errors import MoePackError

C = TypeVar("C", bound=Callable[..., Any])


class _Failure(click.ClickException):
    """One line on standard error, then exit code 1."""

    exit_code = 1

    def __init__(self, program: str, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self._program = program

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{self._program}: {self.message}", file=file, err=True)


class _Interruption(_Failure):
    """The same for Ctrl-C, with the exit code shells give it."""

    exit_code = 130


def command_errors(interrupted: str) -> Callable[[C], C]:
    """Wraps a command's body: errors of ours become one line and exit code 1, Ctrl-C one line and 130.

    Args:    interrupted: what is said on Ctrl-C.
    """

    def wrap(body: C) -> C:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> Any:
            root = click.get_current_context().find_root()
            program = root.info_name or "moe-pack"
            try:
                return body(*args, **options)
            except MoePackError as fault:
                if root.params.get("debug"):
                    raise
                raise _Failure(program, str(fault)) from fault
            except KeyboardInterrupt as fault:
                raise _Interruption(program, interrupted) from fault

        return guarded  # type: ignore[return-value]  # functools.wraps keeps the body's signature

    return wrap


def common_options(body: C) -> C:
    """Adds --version and --debug; use on a root command."""
    body = click.option("--debug", is_flag=True, help="On an error, show the whole traceback.")(body)
    return click.version_option(package_name="moe-pack", message="%(prog)s %(version)s")(body)


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them: 1023 B, 4.2 KiB, 26.1 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def cache_folder() -> Path:
    """Where the user's caches of ours are: `moe-pack` in XDG_CACHE_HOME, or in ~/.cache; it need not be there yet."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "moe-pack"
