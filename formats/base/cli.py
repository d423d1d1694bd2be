"""Code that all commands share: error messages, signals, options from dataclasses, progress.

The folder's face does not import this file: packs are read without click.
"""

import errno
import functools
import io
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from moe_pack.formats.base import commands, errors
from moe_pack.formats.base.version import VERSION

if TYPE_CHECKING:
    from tqdm import tqdm

NOISE = "synthetic: its weights are random, its text is noise"  # every command says this about a synthetic pack

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_SHOWN = 4000  # characters of an error

C = TypeVar("C", bound=Callable[..., Any])


class _Failure(click.ClickException):
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
def _ended_by_sigterm() -> Iterator[None]:  # later ones are ignored while the command cleans up
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


def failure_of(fault: errors.MoePackError, exit_code: int = 1) -> Exception:
    """Returns the exception with which a command ends by an error of ours: itself with --debug, or else one line."""
    root = click.get_current_context().find_root()
    return fault if root.params.get("debug") else _Failure(root.info_name or "moe-pack", str(fault), exit_code)


class Program(click.Command):
    """A command that a shell starts. Its standard streams may be closed, full, or of an encoding that lacks letters."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs the command. Output to a closed stream is lost; a closed standard input is empty."""
        _open_streams()
        try:
            return super().main(*args, **options)
        except OSError as fault:  # of click's own output: --help, --version
            if fault.filename is not None or fault.errno not in _FULL:
                raise
            _Failure(Path(sys.argv[0]).name, f"standard output: cannot be written ({fault.strerror})").show()
            sys.exit(1)


def _open_streams() -> None:
    """Opens the standard streams that are closed, so that no other file gets their numbers."""
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
            stream.reconfigure(errors="backslashreplace")  # letters that the encoding lacks are written as numbers


def text_fault(text: str) -> str | None:
    """Returns why a text of the command line is no text, or None. Python decodes such bytes to lone surrogates."""
    place = _SURROGATE.search(text)
    if place is None:
        return None
    return f"is not {sys.getfilesystemencoding().upper()} text (character {place.start()})"


def _check_text(context: click.Context) -> None:
    for parameter in context.command.params:  # a path may have any bytes
        value = context.params.get(parameter.name or "")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (fault := text_fault(text)) is not None:
                raise click.BadParameter(fault, context, parameter)


def environment_text(name: str) -> str:
    """Returns a variable of the environment, empty if it is not set. Raises UsageError if it is no text."""
    text = os.environ.get(name, "")
    if (fault := text_fault(text)) is not None:
        raise errors.UsageError(f"{name} {fault}; set another value")
    return text


def command_errors(interrupted: str, exit_code: int = 1) -> Callable[[C], C]:
    """Wraps a command's body. Our errors print one line; Ctrl-C exits with 130, SIGTERM with 143.

    Args:    interrupted: the line that Ctrl-C and SIGTERM print.   exit_code: of our errors, except wrong usage.
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
            except errors.UsageError as fault:
                raise click.UsageError(str(fault)) from fault
            except errors.MoePackError as fault:
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
    """A command `name_command` of a module. The module is imported when the command is called."""

    def __init__(self, name: str, module: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._module = module

    def loaded(self) -> click.Command:
        """Returns the command."""
        command: click.Command = getattr(import_module(self._module), f"{self.name}_command")
        return command


class Commands(Program, click.Group):
    """A group of commands. Some are in modules that the group's help and completion do not import."""

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
    """Adds the options of a dataclass's fields (`formats/base/commands.py`); the body gets the dataclass as `options`.

    Raises:  click.UsageError for an option of a group whose required option is missing, and for errors of `check`.
    """
    command_options = list(_command_options(kind))

    def add(body: C) -> C:
        @functools.wraps(body)
        def gathered(*args: Any, **values: Any) -> Any:
            own = {one.place: values.pop(one.place) for one in command_options}
            try:
                options = _gathered(kind, own)
            except errors.UsageError as fault:
                raise click.UsageError(str(fault)) from fault
            return body(*args, options=options, **values)

        for one in reversed(command_options):
            one.click_option()(gathered)
        return gathered  # type: ignore[return-value]  # click calls it with the options that were added

    return add


class _Choice(click.Choice[str]):
    """One of some texts. Its error says what to do `instead`, or names the nearest choices."""

    def __init__(self, choices: list[str], instead: Mapping[str, str]) -> None:
        super().__init__(choices)
        self._instead = instead

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        if str(value) in self._instead:
            return self._instead[str(value)]
        return super().get_invalid_choice_message(value, ctx).removesuffix(".") + commands.did_you_mean(
            str(value), self.choices
        )


@dataclass(frozen=True, slots=True)
class _CommandOption:
    place: str  # the name of its parameter
    option: commands.Option
    hint: Any  # the field's type without None
    default: Any  # MISSING if it is required
    is_grouped: bool  # whether it belongs to a nested dataclass that may be None

    def click_option(self) -> Callable[[C], C]:
        """Returns the click decorator that adds the option."""
        kind: dict[str, Any] = {"is_flag": True}
        if not self._is_flag:
            kind = {"type": self._type(), "required": self.default is MISSING and not self.is_grouped}
            if self.default is not MISSING and self.default is not None:
                kind |= {"default": self._default(), "show_default": "[default:" not in self.option.help}
        names = (*self.option.flags, self.place)
        return click.option(*names, help=self.option.help, metavar=self.option.metavar, callback=self._value, **kind)

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
            return _Choice(list(self._choices), option.instead)
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

    def _default(self) -> Any:  # as a user would type it
        if self.option.default_text is not None:
            return self.option.default_text
        return str(self.default) if self._choices else self.default

    def _value(self, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
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
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint, may_be_none = _without_none(hints[field.name])
        option, place = commands.option_of(field), f"{before}{field.name}"
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
        if commands.option_of(field) is not None:
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
    """Returns whether the required option of a group is missing, and each other option that begins it."""
    required = next(one for one in group if one.default is MISSING)
    if any(values[one.place] is not None for one in group if one is required or one.option.begins):
        return False
    needed = required.option.name
    source = click.get_current_context().get_parameter_source
    for one in group:
        if source(one.place) is ParameterSource.COMMANDLINE:
            raise errors.UsageError(f"{one.option.name} needs {needed}; add {needed} or remove {one.option.name}")
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


_WINDOW_S, _WINDOW_REPORTS = 60.0, 8  # of its own last work, by which the time of a kind's units is judged
_ENOUGH_SHARE = 0.01  # of a kind's units that this run has to do: fewer say little, as the first ones wait for others


class _KindTime:
    def __init__(self, kind: commands.Kind) -> None:
        self.cost, self.total, self.earlier, self.left = kind.cost, kind.total, kind.done, kind.total - kind.done
        self._enough = _ENOUGH_SHARE * self.left
        self._number, self._units = 0, 0
        self._last: deque[tuple[float, int]] = deque()  # seconds and units of each report in the window
        self.seconds, self.recent = 0.0, 0  # sums of the window

    def add(self, seconds: float, units: int) -> None:
        self.left = max(self.left - units, 0)
        self._number, self._units = self._number + 1, self._units + units
        self._last.append((seconds, units))
        self.seconds, self.recent = self.seconds + seconds, self.recent + units
        while len(self._last) > _WINDOW_REPORTS and self.seconds - self._last[0][0] >= _WINDOW_S:
            seconds, units = self._last.popleft()
            self.seconds, self.recent = self.seconds - seconds, self.recent - units

    @property
    def is_measured(self) -> bool:
        return self.recent > 0 and (self._number >= _WINDOW_REPORTS or self._units >= self._enough)

    @property
    def longest(self) -> float:  # seconds of a report in the window
        return max((seconds for seconds, _ in self._last), default=0.0)


_MOST_UNMEASURED = 0.5  # of the time left, in work of kinds that were not measured


class StageTime:
    """Predicts the rest of a stage's time, and the share that is over. Times are seconds of any clock.

    A unit of each kind takes as long as the last ones did: the prediction follows the machine's load. Kinds without a
    measurement are estimated by their `cost` relative to the others; if most of the rest is theirs, there is no
    prediction. Work of earlier runs counts at the rates of this run.
    """

    def __init__(self, stage: commands.Stage, now: float) -> None:
        kinds = stage.kinds or (commands.Kind("", stage.total, stage.done),)
        self._kinds = {kind.name: _KindTime(kind) for kind in kinds}
        self._expected, self._begin, self._last = stage.seconds, now, now
        self._all = sum(kind.cost * kind.left for kind in self._kinds.values())
        self._longest = 0.0  # the wait for a report that is usual: of the kind that was reported last

    def advance(self, amount: int, kind: str, now: float) -> None:
        """Adds a report: `amount` units of a kind took the time since the report before."""
        of_kind = self._kinds[kind]
        of_kind.add(now - self._last, amount)
        self._last, self._longest = now, of_kind.longest

    def left(self, now: float) -> float | None:
        """Returns the seconds that the rest takes; None while they are not known. Costs alone are only a guess."""
        waited = now - self._last
        rates = self._rates(max(waited - self._longest, 0.0))
        if rates is None:
            return None
        rests = [rate * kind.left for rate, kind in zip(rates, self._kinds.values(), strict=True)]
        is_measured = any(kind.is_measured for kind in self._kinds.values())
        rest = sum(rests)
        unmeasured = sum(r for r, kind in zip(rests, self._kinds.values(), strict=True) if not kind.is_measured)
        if is_measured and unmeasured > _MOST_UNMEASURED * rest:
            return None
        return max(rest - (min(waited, self._longest) if is_measured else waited), 0.0)

    def share(self, now: float) -> float:
        """Returns the share of the stage's time that is over, earlier runs included."""
        rates, left = self._rates(0.0), self.left(now)
        kinds = list(self._kinds.values())
        if rates is None or left is None:
            total = sum(kind.cost * kind.total for kind in kinds)
            return 1 - sum(kind.cost * kind.left for kind in kinds) / total if total else 1.0
        over = now - self._begin + sum(rate * kind.earlier for rate, kind in zip(rates, kinds, strict=True))
        return over / (over + left) if over + left else 1.0

    def _rates(self, late: float) -> list[float] | None:
        """Returns the seconds of a unit of each kind. If the next report is `late`, all kinds are slower."""
        kinds = self._kinds.values()
        measured = [kind for kind in kinds if kind.is_measured]
        seconds = sum(kind.seconds for kind in measured)
        if seconds:
            slower = 1 + late / seconds
            usual = seconds / sum(kind.cost * kind.recent for kind in measured)
            return [slower * (kind.seconds / kind.recent if kind.is_measured else usual * kind.cost) for kind in kinds]
        if self._expected and self._all:
            return [self._expected / self._all * kind.cost for kind in kinds]
        return None


LINE_S, BAR_S = 15.0, 0.5  # between two lines where there is no terminal, and between two drawings of a bar


class TerminalProgress:
    """Progress on standard error: on a terminal a bar, elsewhere a line at once and one each 15 seconds.

    Both say the share of a stage's time that is over, and how much is left. A thread shows them, because one unit of
    work may take minutes. A `with` ends a stage that an error has stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all that follows
        self._stage: commands.Stage | None = None
        self._time = StageTime(commands.Stage("", 0), 0.0)
        self._begin = 0.0
        self._what = ""
        self._bar: tqdm[None] | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, stage: commands.Stage) -> None:
        """Announces the stage and, on a terminal, shows its bar."""
        self._stop()
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        self._stage, self._time, self._begin, self._what = stage, StageTime(stage, now), now, ""
        if stage.note or not is_terminal:
            click.echo(f"{stage.name}: {_size_of(stage)}", err=True)
        if is_terminal:
            from tqdm import tqdm

            self._bar = tqdm(total=1.0, desc=stage.name, leave=False, dynamic_ncols=True, bar_format="{desc}")
        self._is_over = threading.Event()
        period = BAR_S if is_terminal else LINE_S
        thread = threading.Thread(target=self._show_often, args=(self._is_over, period), daemon=True)
        thread.start()
        self._thread = thread  # a thread whose start Ctrl-C interrupts is not awaited, and ends by itself

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        """Notes the work. The next line or drawing shows it."""
        with self._lock:
            self._time.advance(amount, kind, time.monotonic())
            self._what = what

    def end(self) -> None:
        """Removes the bar, or without a terminal says how long the stage took."""
        if (stage := self._stage) is not None and self._bar is None:
            click.echo(f"{stage.name}: done in {commands.time_text(time.monotonic() - self._begin)}", err=True)
        self._stop()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear()
            click.echo(line, err=True)

    def _stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.close()
        self._stage = self._thread = self._bar = None

    def _show_often(self, is_over: threading.Event, period: float) -> None:
        while not is_over.wait(period):
            with self._lock:
                self._show()

    def _show(self) -> None:
        stage, now = self._stage, time.monotonic()
        assert stage is not None, "its thread ends before the stage"
        elapsed, share, left = now - self._begin, self._time.share(now), self._time.left(now)
        words = [commands.time_text(elapsed)]
        if stage.total and left is not None:
            words.append(f"about {commands.time_text(left)} left")
        if self._what:
            words.append(self._what)
        if self._bar is None:
            click.echo(f"{stage.name}: {f'{share:.0%} in ' if stage.total else ''}{', '.join(words)}", err=True)
            return
        shown = ", ".join(words).replace("{", "{{").replace("}", "}}")
        self._bar.n = share
        self._bar.bar_format = f"{{desc}}: {'{percentage:3.0f}%|{bar}| ' if stage.total else ''}{shown}"
        self._bar.refresh()


def _size_of(stage: commands.Stage) -> str:
    if stage.note or not stage.total:
        return stage.note or "begins"
    total, done = (commands.size_text(n) if stage.unit == "B" else f"{n:,}" for n in (stage.total, stage.done))
    unit = f" {stage.unit}" if stage.unit not in ("", "B") else ""
    return f"{total}{unit}" + (f", {done} of it by an earlier run" if stage.done else "")
