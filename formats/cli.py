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
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import IO, Any, Literal, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from tqdm import tqdm

from moe_pack.formats.commands import Option, Stage, option_of
from moe_pack.formats.errors import MoePackError, UsageError
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
            except UsageError as fault:
                raise click.UsageError(str(fault)) from fault
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


def options_from(kind: type[Any]) -> Callable[[C], C]:
    """Adds the options that the fields of a dataclass spell (`command_options`); the body gets it as `options`.

    Usage errors: an option of a group whose required option is missing; what the classes' `check` raises.
    """
    spelled = list(_spelled(kind))

    def add(body: C) -> C:
        @functools.wraps(body)
        def gathered(*args: Any, **values: Any) -> Any:
            own = {one.place: values.pop(one.place) for one in spelled}
            try:
                options = _gathered(kind, own)
            except UsageError as fault:
                raise click.UsageError(str(fault)) from fault
            return body(*args, options=options, **values)

        for one in reversed(spelled):
            one.click_option()(gathered)
        return gathered  # type: ignore[return-value]  # click calls it with the options it has added

    return add


@dataclass(frozen=True, slots=True)
class _Spelled:
    """An option of a dataclass or of one nested in it.

    `place`: the name of its parameter.   `hint`: the field's type less None.   `default`: MISSING if it is required.
    `is_grouped`: it is of a nested dataclass that may be None.
    """

    place: str
    option: Option
    hint: Any
    default: Any
    is_grouped: bool

    def click_option(self) -> Callable[[C], C]:
        """Returns click's decorator for it."""
        option, default = self.option, self.default
        has_default = default is not MISSING and default is not None
        if self._is_flag:
            kind: dict[str, Any] = {"is_flag": True}
        else:
            kind = {"type": self._type(), "required": default is MISSING and not self.is_grouped}
            if has_default:
                kind |= {"default": self._default(), "show_default": "[default:" not in option.help}
        names = (*option.flags, self.place)
        return click.option(*names, help=option.help, metavar=option.metavar, callback=self._value, **kind)

    @property
    def _is_flag(self) -> bool:
        return self.hint is bool and "/" not in self.option.flags[0]

    @property
    def _choices(self) -> dict[str, Any]:
        """The values that a text stands for, where only some texts are allowed."""
        if self.option.choices:
            return {text: text for text in self.option.choices}
        return {str(value): value for value in _literals(self.hint)}

    def _type(self) -> Any:
        option = self.option
        if self._choices:
            return click.Choice(list(self._choices))
        if option.parse is not None:
            return str
        if self.hint is Path:
            return click.Path(path_type=Path, dir_okay=option.path != "file", file_okay=option.path != "folder")
        if self.hint is TextIO:
            return click.File("r", encoding="utf-8")
        if option.least is None and option.most is None:
            return self.hint
        if self.hint is float:
            return click.FloatRange(option.least, option.most)
        least, most = (None if bound is None else int(bound) for bound in (option.least, option.most))
        return click.IntRange(least, most)

    def _default(self) -> Any:
        """The default as it would be written."""
        if self.option.default_text is not None:
            return self.option.default_text
        return str(self.default) if self._choices else self.default

    def _value(self, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        """The field's value of what click has read."""
        if self._is_flag:
            return value != (self.default is True)  # a flag turns the default around
        if value is None:
            return None
        if self.option.parse is None:
            return self._choices.get(value, value) if self._choices else value
        try:
            return self.option.parse(value)
        except ValueError as fault:
            raise click.BadParameter(str(fault)) from fault


def _spelled(kind: type[Any], before: str = "", is_grouped: bool = False) -> Iterator[_Spelled]:
    """The options of a dataclass and of those nested in it, in the order of their fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint, may_be_none = _without_none(hints[field.name])
        option, place = option_of(field), f"{before}{field.name}"
        if option is not None:
            yield _Spelled(place, option, hint, field.default, is_grouped)
        elif is_dataclass(hint) and isinstance(hint, type):
            yield from _spelled(hint, f"{place}_of_", is_grouped or may_be_none)


def _gathered(kind: type[Any], values: dict[str, Any], before: str = "") -> Any:
    """The dataclass with the values of its options; its other fields have their defaults."""
    hints, chosen = get_type_hints(kind), {}
    for field in fields(kind):
        hint, may_be_none = _without_none(hints[field.name])
        place = f"{before}{field.name}"
        if option_of(field) is not None:
            chosen[field.name] = values[place]
        elif own := list(_spelled(hint, f"{place}_of_")) if is_dataclass(hint) and isinstance(hint, type) else []:
            is_left_out = may_be_none and _is_left_out(own, values)
            chosen[field.name] = None if is_left_out else _gathered(hint, values, f"{place}_of_")
    made = kind(**chosen)
    if hasattr(made, "check"):
        made.check()
    return made


def _is_left_out(group: list[_Spelled], values: dict[str, Any]) -> bool:
    """Whether a group's required option is missing.

    Raises:  UsageError if it is, and another of the group is given.
    """
    decisive = next(one for one in group if one.default is MISSING)
    if values[decisive.place] is not None:
        return False
    needed = decisive.option.name
    source = click.get_current_context().get_parameter_source
    for one in group:
        if source(one.place) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{one.option.name} needs {needed}; add {needed} or remove {one.option.name}")
    return True


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type less None, and whether it had that."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kept = tuple(part for part in parts if part is not NoneType)
    return (Union[kept] if len(kept) > 1 else kept[0]), len(kept) < len(parts)  # noqa: UP007  # of a tuple


def _literals(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, or of a union of some; none of another type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return tuple(value for part in parts for value in _literals(part))


def cache_folder() -> Path:
    """Where the user's caches of ours are: `moe-pack` in XDG_CACHE_HOME, or in ~/.cache; it need not be there yet."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "moe-pack"


class TerminalProgress:
    """Shows progress on standard error: lines, and on a terminal a bar with the time left. Use it in a `with`."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, stage: Stage) -> None:
        """Announces the stage and shows its bar."""
        self.end()
        if stage.note:
            click.echo(f"{stage.name}: {stage.note}", err=True)
        self._bar = tqdm(
            desc=stage.name,
            total=stage.total,
            initial=stage.done,
            unit=stage.unit or "it",
            unit_scale=bool(stage.unit),
            disable=None,
            leave=False,
        )

    def advance(self, amount: int, what: str = "") -> None:
        """Moves the bar."""
        assert self._bar is not None, "a stage has begun"
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(amount)

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        click.echo(line, err=True)
