"""What every command of the project shares: how an error is shown, how signals end it, --version and --debug.

Not imported by the room's face, so that reading packs from Python needs no click.
"""

import errno
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

import click
from tqdm import tqdm

from moe_pack.formats.errors import MoePackError
from moe_pack.formats.sizes import parse_size
from moe_pack.formats.sizes import size_text as size_text
from moe_pack.formats.version import VERSION

NOISE = "synthetic: its weights are random, its text is noise"  # what every command says of a synthetic pack

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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

    exit_code = 128 + signal.SIGINT


class _Ended(_Failure):
    """The same for SIGTERM."""

    exit_code = 128 + signal.SIGTERM


class _Termination(KeyboardInterrupt):
    """SIGTERM: whatever cleans up after Ctrl-C cleans up after it too."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within it, a first SIGTERM raises, as Ctrl-C does; further ones change nothing while what is open is closed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread may set handlers; whoever set one before, or ignores the signal, decides
        return
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a forked child inherits this handler, and not what it is for
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)
        raise _Termination

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def command_errors(interrupted: str) -> Callable[[C], C]:
    """Wraps a command's body: errors of ours become one line and exit code 1, Ctrl-C one line and 130, SIGTERM 143.

    Args:    interrupted: what is said on Ctrl-C and SIGTERM.
    """

    def wrap(body: C) -> C:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> Any:
            root = click.get_current_context().find_root()
            program = root.info_name or "moe-pack"
            try:
                with _ended_by_sigterm():
                    return body(*args, **options)
            except MoePackError as fault:
                if root.params.get("debug"):
                    raise
                raise _Failure(program, str(fault)) from fault
            except OSError as fault:
                # Of files of ours errors are of our tree; click itself ends quietly where nobody reads on.
                if root.params.get("debug") or fault.filename is not None or fault.errno not in _FULL:
                    raise
                raise _Failure(program, f"standard output: cannot be written ({fault.strerror})") from fault
            except KeyboardInterrupt as fault:
                kind = _Ended if isinstance(fault, _Termination) else _Interruption
                raise kind(program, interrupted) from fault

        return guarded  # type: ignore[return-value]  # functools.wraps keeps the body's signature

    return wrap


def common_options(body: C) -> C:
    """Adds --version and --debug; use on a root command."""
    body = click.option("--debug", is_flag=True, help="On an error, show the whole traceback.")(body)
    return click.version_option(VERSION, message="%(prog)s %(version)s")(body)


def read_size(text: str) -> int:
    """The bytes that `11G`, `512M`, `1.5g`, `64K` or `1048576` stand for: G is 2^30.

    Raises:  click.BadParameter if it is none of these.
    """
    num_bytes = parse_size(text)
    if not num_bytes:
        raise click.BadParameter(f"found {text!r}, expected a size such as 11G, 1.5G or 512M")
    return num_bytes


def cache_folder() -> Path:
    """Where the user's caches of ours are: `moe-pack` in XDG_CACHE_HOME, or in ~/.cache; it need not be there yet."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "moe-pack"


@contextmanager
def byte_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on standard error, on a terminal only."""
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield lambda num_bytes: bar.update(num_bytes) and None


@contextmanager
def count_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on standard error, only on a terminal, from the first call of what it yields.

    Yields:  a function that takes how many things are done, and how many there are.
    """
    bars: list[tqdm[None]] = []

    def tell(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc=what, disable=None, leave=False))
        bars[0].update(done - bars[0].n)

    try:
        yield tell
    finally:
        for bar in bars:
            bar.close()
