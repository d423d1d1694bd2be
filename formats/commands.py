"""How the options of commands are spelled: once, as fields of the dataclass that carries them.

A field says its option in its metadata, `field(default=0.8, metadata=option("--temperature", help="..."))`; its type
and its default are those of the option. `formats/cli.py` derives the command line from them, so this needs no click.

A field whose type is another dataclass with options contributes these; if it may be None, it is None unless an option
without a default is given. A class that has a method `check` gets it called once all its options are read.

How long work tells how far it is: in stages, one after another, each of a known size.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, cast

_KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command line; `option` says what its values mean."""

    flags: tuple[str, ...]
    help: str
    metavar: str | None
    least: float | None
    most: float | None
    choices: tuple[str, ...]
    parse: Callable[[str], Any] | None
    default_text: str | None
    path: Literal["any", "file", "folder"]
    mark: str | None

    @property
    def name(self) -> str:
        """The flag that messages name: the first long one."""
        long = next(flag for flag in self.flags if flag.startswith("--"))
        return long.partition("/")[0]


def option(
    *flags: str,
    help: str,  # noqa: A002  # as click calls it
    metavar: str | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    default_text: str | None = None,
    path: Literal["any", "file", "folder"] = "any",
    mark: str | None = None,
) -> Mapping[str, Option]:
    """Returns a field's metadata: the option that sets the field.

    A `bool` is a flag, which turns the field's default around; a `Literal` is a choice; a `Path` is a path; a `TextIO`
    is a UTF-8 file or `-`. Help shows the default, unless it is None or `help` has "[default: ...]" itself.

    Args:    flags: `--output`, `-o`, or `--inputs/--no-inputs`.   least, most: bounds of a number, both allowed.
             choices: the texts allowed, where the field's type does not list them.   parse: makes the field's value of
             the text; raises ValueError with what was expected.   default_text: how the default is written, where
             `parse` makes it of a text.   path: what a path may lead to, if it exists.   mark: a word that `given`
             selects options by.
    """
    return {_KEY: Option(flags, help, metavar, least, most, choices, parse, default_text, path, mark)}


def option_of(field: "Field[Any]") -> Option | None:
    """Returns the option that sets a field; None if the command line does not set it."""
    return cast("Option | None", field.metadata.get(_KEY))


def given(options: object, mark: str | None = None) -> list[str]:
    """Lists the names of the options whose fields differ from their defaults, those of nested dataclasses included.

    Args:    mark: restricts the list to options that carry this mark.
    """
    assert is_dataclass(options), "options are fields of a dataclass"
    found: list[str] = []
    for field in fields(options):
        value, spelled = getattr(options, field.name), option_of(field)
        if spelled is not None:
            differs = field.default is MISSING or value != field.default
            if differs and mark in (None, spelled.mark):
                found.append(spelled.name)
        elif is_dataclass(value):
            found += given(value, mark)
    return found


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of long work.

    `total`: how much there is to do, in `unit` ("B" for bytes; empty: things).   `done`: of it by an earlier run.
    `seconds`: an estimate for what is left; 0: there is none.   `note`: what to announce of the stage; empty: nothing.
    """

    name: str
    total: int
    unit: str = ""
    done: int = 0
    seconds: float = 0.0
    note: str = ""


class Progress(Protocol):
    """What long work tells how far it is."""

    def begin(self, stage: Stage) -> None:
        """Begins a stage; the one before has ended."""
        ...

    def advance(self, amount: int, what: str = "") -> None:
        """Adds to what is done of the stage. Called by one thread at a time.

        Args:    what: was done, in a few words.
        """
        ...

    def end(self) -> None:
        """Ends the stage."""
        ...

    def say(self, line: str) -> None:
        """Says a line, within a stage or between two."""
        ...


class _NoProgress:
    """Progress that nobody sees."""

    def begin(self, stage: Stage) -> None: ...

    def advance(self, amount: int, what: str = "") -> None: ...

    def end(self) -> None: ...

    def say(self, line: str) -> None: ...


NO_PROGRESS: Progress = _NoProgress()
