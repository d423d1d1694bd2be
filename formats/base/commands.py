"""Options of commands as dataclass fields, and the protocol by which long work reports its progress.

A field's metadata describes its option; the field's type and default are the option's:
`option_field(0.8, "--temperature", help="...")`, or without a default `field(metadata=option("--output", help="..."))`.
`formats/base/cli.py` derives the command line from these fields. This file does not import click.

A field whose type is a dataclass with options adds these options. If the field may be None, it is None unless the user
gives its option without a default, or one that `begins` it. A method `check` is called once all options are read.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from moe_pack.formats.base.errors import PackError

Work = TypeVar("Work")
_KEY = "option"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = ("", "K", "M", "G", "T")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command line."""

    flags: tuple[str, ...]  # `--output`, `-o`, or `--inputs/--no-inputs`
    help: str
    metavar: str | None = None
    least: float | None = None  # bounds of a number, both allowed
    most: float | None = None
    choices: tuple[str, ...] = ()  # the allowed texts, if the field's type does not list them
    parse: Callable[[str], Any] | None = None  # makes the field's value; its ValueError says what it expects
    default_text: str | None = None  # the default as a user would type it, if there is a `parse`
    path: Literal["any", "file", "folder"] = "any"  # what a path may lead to, if it exists
    mark: str | None = None  # a word by which `given` selects options
    begins: bool = False  # a dataclass that may be None is there if this option is given; without a default it is None
    instead: Mapping[str, str] = field(default_factory=dict)  # what to do for texts that are no choice, but are known

    @property
    def name(self) -> str:
        """The flag that messages name: the first long flag."""
        long = next(flag for flag in self.flags if flag.startswith("--"))
        return long.partition("/")[0]


def option(*flags: str, **fields: Any) -> Mapping[str, Option]:
    """Returns a field's metadata: the option that sets the field, with the `fields` of `Option`.

    A `bool` is a flag, which inverts the default; a `Literal` is a choice; a `TextIO` is a UTF-8 file or `-`. Help
    shows the default, unless it is None or `help` has "[default: ...]" itself. The last flag may be followed by the
    metavar: "--output FILE".
    """
    *others, last = flags
    name, _, metavar = last.partition(" ")
    fields.setdefault("metavar", metavar or None)
    return {_KEY: Option((*others, name), **fields)}


def option_field(default: Any, *flags: str, **fields: Any) -> Any:
    """Returns a dataclass field with a default, which the option of these arguments sets."""
    return dataclasses.field(default=default, metadata=option(*flags, **fields))


def option_of(field_: "Field[Any]") -> Option | None:
    """Returns the option that sets a field; None if the command line does not set it."""
    return cast("Option | None", field_.metadata.get(_KEY))


def given(options: object, mark: str | None = None) -> list[str]:
    """Lists the options, all or those of a mark, whose fields differ from the defaults, also in nested dataclasses."""
    assert is_dataclass(options), "options are fields of a dataclass"
    names: list[str] = []
    for each in fields(options):
        value, spelled = getattr(options, each.name), option_of(each)
        if spelled is not None:
            if mark in (None, spelled.mark) and (each.default is MISSING or value != each.default):
                names.append(spelled.name)
        elif is_dataclass(value):
            names += given(value, mark)
    return names


@dataclass(frozen=True, slots=True)
class Part:
    """One of `count` processes that do the same work over the same folder; `index` counts from 1."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> "Part":
        """Returns the part that `I/N` means. Raises ValueError if it means none."""
        index, slash, count = text.partition("/")
        if not slash or not index.isdecimal() or not count.isdecimal() or not 1 <= int(index) <= int(count):
            raise ValueError(f"found {text!r}, expected I/N with I from 1 to N, such as 1/3")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def suffix(self) -> str:
        """The end of the names of files that only this part writes."""
        return f"-{self.index}-of-{self.count}"

    def owns(self, number: int) -> bool:
        """Returns whether this part does the `number`-th piece of work before others do."""
        return number % self.count == self.index - 1

    def apart(self, missing: Sequence[Work]) -> list[Work]:
        """Returns work that other parts have left, last first. Each part starts at another place."""
        start = (self.index - 1) * len(missing) // self.count
        falling = list(reversed(missing))
        return falling[start:] + falling[:start]


@dataclass(frozen=True, slots=True)
class Kind:
    """Work of a stage whose units take about the same time."""

    name: str  # as `advance` names it
    total: int  # units
    done: int = 0  # those that an earlier run has done
    cost: float = 1.0  # the time of a unit relative to those of other kinds, until the kind's own time is measured


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of long work."""

    name: str
    total: int  # its size, in `unit`; 0 if nobody knows it
    unit: str = ""  # "B" for bytes; empty for things that are counted
    done: int = 0  # how much of it an earlier run has done
    seconds: float = 0.0  # an estimate of the time that is left; 0 if there is none
    note: str = ""  # a line that announces the stage; empty for its size
    kinds: tuple[Kind, ...] = ()  # if units take unlike times, the kinds of work that it consists of

    @classmethod
    def of_kinds(cls, name: str, kinds: Sequence[Kind], note: str, seconds: float = 0.0) -> "Stage":
        """Returns a stage of several kinds of work."""
        assert len({kind.name for kind in kinds}) == len(kinds), "each kind has a name of its own"
        total, done = sum(kind.total for kind in kinds), sum(kind.done for kind in kinds)
        return cls(name, total, done=done, seconds=seconds, note=note, kinds=tuple(kinds))


class Progress(Protocol):
    """The receiver of progress reports from long work."""

    def begin(self, stage: Stage) -> None:
        """Begins a stage. The stage before must have ended."""
        ...

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        """Adds `amount`, in the stage's unit, to the work that is done. Only one thread may call it at a time.

        Args:    what: the work that was done, in a few words.   kind: which of the stage's kinds it was, if it has any.
        """
        ...

    def end(self) -> None:
        """Ends the stage."""
        ...

    def say(self, line: str) -> None:
        """Shows a line, within a stage or between two."""
        ...


class _NoProgress:
    def begin(self, stage: Stage) -> None: ...

    def advance(self, amount: int, what: str = "", kind: str = "") -> None: ...

    def end(self) -> None: ...

    def say(self, line: str) -> None: ...


NO_PROGRESS: Progress = _NoProgress()


@contextmanager
def stage_of(progress: Progress, name: str) -> Iterator[None]:
    """Reports what the `with` does as a stage whose size nobody knows."""
    progress.begin(Stage(name, 0))
    yield
    progress.end()


def time_text(seconds: float) -> str:
    """Returns seconds as text for people: 0.4 s, 12 s, 3 min, 2.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size_text(num_bytes: float) -> str:
    """Returns bytes as text: 1023 B, 4.2 KiB, 26.1 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def parse_size(text: str) -> int | None:
    """Returns the bytes in a text such as 11G, 1.5 GiB or 800m (powers of 1024); None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(float(match[1]) * 1024 ** _UNITS.index(match[2].upper()))


def read_size(text: str) -> int:
    """Returns the bytes that `11G`, `512M`, `1.5g`, `64K` or `1048576` stand for: G is 2^30.

    Raises:  ValueError if it is none of these.
    """
    num_bytes = parse_size(text)
    if not num_bytes:
        raise ValueError(f"found {text!r}, expected a size such as 11G, 1.5G or 512M")
    return num_bytes


def read_sizes(text: str) -> int | tuple[int, ...]:
    """Returns the bytes of one size, or of several as in `11G,24G`; raises as `read_size`."""
    sizes = tuple(read_size(each) for each in text.split(","))
    return sizes[0] if len(sizes) == 1 else sizes


def did_you_mean(name: str, known: Iterable[str], more: str = "") -> str:
    """Returns `; did you mean this or that?` with at most three similar names, and `more` after it; may be empty."""
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in known}
    similar = [by_lower[match] for match in get_close_matches(name.lower(), by_lower, cutoff=0.7)]
    question = f"did you mean {' or '.join(filter(None, [', '.join(similar[:-1]), *similar[-1:]]))}?" if similar else ""
    said = " ".join(filter(None, [question, more]))
    return f"; {said}" if said else ""


def names_beside(path: Path, suffix: str | None = None) -> list[str]:
    """Returns the names of folders, and of files with a suffix, in the folder of a path that need not exist."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return [each.name for each in beside if each.is_dir() or each.suffix == suffix]


def check_is_folder(path: Path) -> None:
    """Checks that the path of a pack is a folder. Raises PackError if it is missing, or a file such as a GGUF model."""
    if path.is_file():
        raise PackError(
            f"{path}: is a file, but a pack is a folder; make a pack of a checkpoint first: moe-pack convert {path} "
            "-o packed/"
        )
    if not path.is_dir():
        raise PackError(f"{path}: no such folder{did_you_mean(path.name, names_beside(path))}")
