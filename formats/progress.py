"""How long work tells how far it is: in stages, one after another, each of a known size."""

from dataclasses import dataclass
from typing import Protocol


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
