"""Command-line code that all commands share: error messages, signals, options from dataclasses, progress bars.

The face of this folder does not import this file, so that Python code can read packs without click.
"""

import errno
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from moe_pack.formats.commands import Option, Stage, did_you_mean, option_of
from moe_pack.formats.errors import MoePackError, UsageError
from moe_pack.formats.version import VERSION

if TYPE_CHECKING:
    from tqdm import tqdm

NOISE = "synthetic: its weights are random, its text is noise"  # every command says this about a synthetic pack

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_SHOWN = 4000  # characters of an error

C = TypeVar("C", bound=Callable[..., Any])


class _Failure(click.ClickException):
    """An error that prints one line on standard error and exits with a code."""

    def __init__(self, program: str, message: str, exit_code: int = 1) -> None:
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(message.split()))
        super().__init__(line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 3] + "...")
        self._program = program
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it of the object

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{self._program}: {self.message}", file=file, err=True)


class _Termination(KeyboardInterrupt):
    """SIGTERM as an exception. Code that cleans up after Ctrl-C also cleans up after it."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes the first SIGTERM raise `_Termination`; later ones are ignored while the command cleans up."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread may set handlers; a handler that is already there stays
        return
    process_id = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process_id:  # a forked child inherits this handler, but has nothing to clean up
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


def failure_of(fault: MoePackError, exit_code: int = 1) -> Exception:
    """Returns the exception with which a command ends by an error of ours: itself with --debug, or else one line."""
    root = click.get_current_context().find_root()
    return fault if root.params.get("debug") else _Failure(root.info_name or "moe-pack", str(fault), exit_code)


class Program(click.Command):
    """A command that a shell starts: standard streams may be closed, full, or of an encoding that lacks letters."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs the command. What it prints to a closed stream is lost, and a closed standard input is empty."""
        _open_streams()
        try:
            return super().main(*args, **options)
        except OSError as fault:  # of click's own output: --help, --version
            if fault.filename is not None or fault.errno not in _FULL:
                raise
            _Failure(Path(sys.argv[0]).name, f"standard output: cannot be written ({fault.strerror})").show()
            sys.exit(1)


def _open_streams() -> None:
    """Opens the standard streams that are closed, so that no other file gets their numbers.

    A letter that the encoding of a stream lacks is written as its number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115  # open until the process ends
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # likewise
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def text_fault(text: str) -> str | None:
    """Returns why a text of the command line is none, in words; None if it is one.

    Python decodes bytes that are no text to halves of surrogates.
    """
    place = _SURROGATE.search(text)
    if place is None:
        return None
    return f"is not {sys.getfilesystemencoding().upper()} text (character {place.start()})"


def _check_text(context: click.Context) -> None:
    """Checks that the texts among a command's options and arguments are text. A path may have any bytes.

    Raises:  click.BadParameter.
    """
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (fault := text_fault(text)) is not None:
                raise click.BadParameter(fault, context, parameter)


def environment_text(name: str) -> str:
    """Returns a variable of the environment, empty if it is not set.

    Raises:  UsageError if it is no text.
    """
    text = os.environ.get(name, "")
    if (fault := text_fault(text)) is not None:
        raise UsageError(f"{name} {fault}; set another value")
    return text


def command_errors(interrupted: str, exit_code: int = 1) -> Callable[[C], C]:
    """Wraps a command's body: our errors print one line, Ctrl-C exits with 130, SIGTERM with 143.

    Args:    interrupted: the line that Ctrl-C and SIGTERM print.   exit_code: of our errors, but for wrong usage.
    """

    def wrap(body: C) -> C:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> Any:
            context = click.get_current_context()
            root = context.find_root()
            program = root.info_name or "moe-pack"
            _check_text(context)
            try:
                with _ended_by_sigterm():
                    return body(*args, **options)
            except UsageError as fault:
                raise click.UsageError(str(fault)) from fault
            except MoePackError as fault:
                raise failure_of(fault, exit_code) from fault
            except OSError as fault:
                # Errors of our own files are MoePackErrors. If the reader of a pipe ends, click ends quietly.
                if root.params.get("debug") or fault.filename is not None or fault.errno not in _FULL:
                    raise
                raise _Failure(program, f"standard output: cannot be written ({fault.strerror})") from fault
            except KeyboardInterrupt as fault:
                signal_number = signal.SIGTERM if isinstance(fault, _Termination) else signal.SIGINT
                raise _Failure(program, interrupted, 128 + signal_number) from fault  # as shells have it

        return guarded  # type: ignore[return-value]  # functools.wraps keeps the body's signature

    return wrap


class LateCommand(click.Command):
    """A place for a command `name_command` of a module, which is imported only when the command is called."""

    def __init__(self, name: str, module: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._module = module

    def loaded(self) -> click.Command:
        """Returns the command."""
        command: click.Command = getattr(import_module(self._module), f"{self.name}_command")
        return command


class Commands(Program, click.Group):
    """A group of commands, some of them in modules that the group's help and completion do not import."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the arguments call."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.loaded() if isinstance(command, LateCommand) else command, rest


def common_options(body: C) -> C:
    """Adds --version and --debug to a root command."""
    body = click.option("--debug", is_flag=True, help="On an error, show the whole traceback.")(body)
    return click.version_option(VERSION, message="%(prog)s %(version)s")(body)


def options_from(kind: type[Any]) -> Callable[[C], C]:
    """Adds the options of a dataclass's fields (`formats/commands.py`); the body gets the dataclass as `options`.

    Raises:  click.UsageError for an option of a group whose required option is missing, and for errors of `check`.
    """
    command_options = list(_command_options(kind))

    def add(body: C) -> C:
        @functools.wraps(body)
        def gathered(*args: Any, **values: Any) -> Any:
            own = {one.place: values.pop(one.place) for one in command_options}
            try:
                options = _gathered(kind, own)
            except UsageError as fault:
                raise click.UsageError(str(fault)) from fault
            return body(*args, options=options, **values)

        for one in reversed(command_options):
            one.click_option()(gathered)
        return gathered  # type: ignore[return-value]  # click calls it with the options that were added

    return add


class _Choice(click.Choice[str]):
    """One of some texts; a text that is none of them gets the nearest ones."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return super().get_invalid_choice_message(value, ctx).removesuffix(".") + did_you_mean(str(value), self.choices)


@dataclass(frozen=True, slots=True)
class _CommandOption:
    """An option of a dataclass or of a dataclass nested in it.

    `place`: the name of its parameter.   `hint`: the field's type without None.   `default`: MISSING if it is required.
    `is_grouped`: whether it belongs to a nested dataclass that may be None.
    """

    place: str
    option: Option
    hint: Any
    default: Any
    is_grouped: bool

    def click_option(self) -> Callable[[C], C]:
        """Returns the click decorator that adds the option."""
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
        """The allowed texts and their values; empty if any text is allowed."""
        if self.option.choices:
            return {text: text for text in self.option.choices}
        return {str(value): value for value in _literals(self.hint)}

    def _type(self) -> Any:
        option = self.option
        if self._choices:
            return _Choice(list(self._choices))
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
        """Returns the default as a user would type it."""
        if self.option.default_text is not None:
            return self.option.default_text
        return str(self.default) if self._choices else self.default

    def _value(self, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        """Returns the field's value for the value that click has read."""
        if self._is_flag:
            return value != (self.default is True)  # a flag inverts the default
        if value is None:
            return None
        if self.option.parse is None:
            return self._choices.get(value, value) if self._choices else value
        try:
            return self.option.parse(value)
        except ValueError as fault:
            raise click.BadParameter(str(fault)) from fault


def _command_options(kind: type[Any], before: str = "", is_grouped: bool = False) -> Iterator[_CommandOption]:
    """Yields the options of a dataclass and of its nested dataclasses, in the order of their fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint, may_be_none = _without_none(hints[field.name])
        option, place = option_of(field), f"{before}{field.name}"
        if option is not None:
            yield _CommandOption(place, option, hint, field.default, is_grouped)
        elif is_dataclass(hint) and isinstance(hint, type):
            yield from _command_options(hint, f"{place}_of_", is_grouped or may_be_none)


def _gathered(kind: type[Any], values: dict[str, Any], before: str = "") -> Any:
    """Returns the dataclass with the values of its options; its other fields get their defaults."""
    hints, chosen = get_type_hints(kind), {}
    for field in fields(kind):
        hint, may_be_none = _without_none(hints[field.name])
        place = f"{before}{field.name}"
        if option_of(field) is not None:
            chosen[field.name] = values[place]
        elif is_dataclass(hint) and isinstance(hint, type):
            group = list(_command_options(hint, f"{place}_of_"))
            if group:
                is_left_out = may_be_none and _is_left_out(group, values)
                chosen[field.name] = None if is_left_out else _gathered(hint, values, f"{place}_of_")
    options = kind(**chosen)
    if hasattr(options, "check"):
        options.check()
    return options


def _is_left_out(group: list[_CommandOption], values: dict[str, Any]) -> bool:
    """Returns whether the required option of a group is missing.

    Raises:  UsageError if it is missing, but another option of the group is given.
    """
    required = next(one for one in group if one.default is MISSING)
    if values[required.place] is not None:
        return False
    needed = required.option.name
    source = click.get_current_context().get_parameter_source
    for one in group:
        if source(one.place) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{one.option.name} needs {needed}; add {needed} or remove {one.option.name}")
    return True


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether None was part of it."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kept = tuple(part for part in parts if part is not NoneType)
    return (Union[kept] if len(kept) > 1 else kept[0]), len(kept) < len(parts)  # noqa: UP007  # of a tuple


def _literals(hint: Any) -> tuple[Any, ...]:
    """Returns the values of a Literal or of a union of Literals; no values for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return tuple(value for part in parts for value in _literals(part))


def cache_folder() -> Path:
    """Returns the folder of our caches: `moe-pack` in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "moe-pack"


class TerminalProgress:
    """Progress on standard error: lines and, on a terminal, a bar with the time left. A `with` removes the bar."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, stage: Stage) -> None:
        """Prints the stage's note and shows its bar."""
        from tqdm import tqdm

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
