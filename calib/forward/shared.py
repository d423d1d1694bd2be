"""Results that several processes share, so that a profile can be made in parts on many machines.

Every part runs the whole program over the same folder. Each dear result (an expert's outputs, a sequence's attention)
is computed by one part, which first makes its own (every N-th), and is a file that the others read. A part that would
only wait makes a missing result. A result depends on checkpoint, text and options alone, so any number of parts gives
the same bytes, also if some are killed. No part waits for a lock of another machine.

Parts go through a `step`, a layer of a stage, together. An ended step is marked, and the files of the step before it
are removed. A part that finds files missing gets `PassedError` and goes on from the newest hidden states, as a
restarted process does.
"""

import itertools
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats.base.commands import Part

Array = NDArray[Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
Arrays = tuple[Tensor, ...]  # a result
Work = Callable[[int], Arrays]


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yields the result of `work` for each item, in their order; at most one finished result waits."""
    if workers == 1:
        yield from map(work, items)
        return

    def job(item: Item) -> Result:
        with torch.inference_mode():
            return work(item)

    with torch_threads(max(1, torch.get_num_threads() // workers)), ThreadPoolExecutor(workers, "calib") as pool:
        remaining = iter(items)
        started = deque(pool.submit(job, item) for item in itertools.islice(remaining, workers + 1))
        while started:
            result = started.popleft().result()
            started.extend(pool.submit(job, item) for item in itertools.islice(remaining, 1))
            yield result
            del result


@contextmanager
def torch_threads(number: int | None = None) -> Iterator[None]:
    """Gives torch this number of threads; None keeps it. Restores the number at the end."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PassedError(Exception):
    """Other parts have ended the step, and its files are gone: the stage must go on from what they left."""


class Results:
    """The results of one process: each is computed when it is wanted, and no file is written."""

    is_shared = False

    def in_order(self, phase: str, work: Work, items: Sequence[int], workers: int) -> Iterator[Arrays]:
        """Yields the result of `work` for each item, in their order; `phase` names the kind of result within a step."""
        return in_order(work, items, workers)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Surrounds a step; its name occurs once in a profile."""
        yield

    def own_name(self, name: str) -> str:
        """Returns the name of a file that only this process writes."""
        return name

    def publish(self, unfinished: Path, path: Path) -> None:
        """Gives a finished file its name."""
        unfinished.replace(path)

    def missed(self, fault: Exception) -> bool:
        """Returns whether the fault only says that other parts are ahead, so that the stage must be entered again."""
        return False


ONE_PROCESS = Results()


def publish_once(unfinished: Path, path: Path) -> None:
    """Gives a finished file its name unless another process has written the same file."""
    try:
        os.link(unfinished, path)  # of several processes one succeeds, also over NFS; nobody's open file is replaced
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if unfinished.exists() and not path.exists():
            unfinished.replace(path)
            return
    unfinished.unlink()


_LEAST_WAIT_S, _MOST_WAIT_S = 0.005, 0.5  # between two looks for a file


class SharedResults(Results):
    """The results of one of several parts, in files in `folder`, which is created if missing."""

    is_shared = True

    def __init__(self, folder: Path, part: Part) -> None:
        self._folder = folder
        self._part = part
        self._step = ""
        self._passed = set[str]()  # steps in which this part has found itself late
        self._seconds = dict[str, float]()  # that the last result of each phase took
        folder.mkdir(exist_ok=True)

    def in_order(self, phase: str, work: Work, items: Sequence[int], workers: int) -> Iterator[Arrays]:
        """Yields each item's result, in their order; computes those of this part, then those still missing."""
        held = _Phase(self._folder / self._step, phase, self.own_name(""))

        def make(item: int) -> None:
            if not held.has(item):
                self._check_passed()
                start = time.monotonic()
                held.write(item, work(item))
                self._seconds[phase] = time.monotonic() - start

        own = [item for number, item in enumerate(items) if self._part.owns(number)]
        for _ in in_order(make, own, workers):
            pass
        # A result that another part computes now is there after the time that one takes, if it computes one at all.
        patience = self._seconds.get(phase, max(self._seconds.values(), default=_LEAST_WAIT_S))
        for number, item in enumerate(items):
            start, wait = time.monotonic(), _LEAST_WAIT_S
            while (found := held.read(item)) is None:
                self._check_passed()
                if time.monotonic() - start < patience:
                    time.sleep(wait)
                    wait = min(2 * wait, _MOST_WAIT_S)
                    continue
                patience = 0.0  # another part is slow or gone: do not wait for its next ones either
                missing = [each for each in items[number:] if not held.has(each)]
                for _ in in_order(make, self._part.apart(missing)[:workers], workers):
                    pass
            yield found

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Surrounds a step, and removes the files of earlier ones; PassedError if others have ended and removed it."""
        self._step = name
        if name in self._passed:  # and yet it must be done: what the others left of it was damaged
            self._mark.unlink(missing_ok=True)
        (self._folder / name).mkdir(exist_ok=True)
        yield
        self._mark.touch()
        for folder in self._folder.iterdir():
            if folder.name != name and folder.with_name(f"{folder.name}{_ENDED}").exists():
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _mark(self) -> Path:
        return self._folder / f"{self._step}{_ENDED}"

    def _check_passed(self) -> None:
        if self._step not in self._passed and self._mark.exists():
            raise PassedError(self._step)

    def own_name(self, name: str) -> str:
        """Returns the name with the number of this part."""
        return f"{name}{self._part.suffix}"

    def publish(self, unfinished: Path, path: Path) -> None:
        """Gives a finished file its name unless another part has written it."""
        publish_once(unfinished, path)

    def missed(self, fault: Exception) -> bool:
        """Returns whether a part that is late has met the fault, because others removed what it wanted to read."""
        if self._step in self._passed or not (isinstance(fault, PassedError) or self._mark.exists()):
            return False
        self._passed.add(self._step)
        return True


_ENDED = ".ended"


class _Phase:
    """The files `PHASE.ITEM` of a step: numpy's arrays, then their checksum. The first file of an item stays."""

    def __init__(self, folder: Path, phase: str, own: str) -> None:
        self._folder, self._phase, self._own = folder, phase, own

    def has(self, item: int) -> bool:
        return self._path(item).exists()

    def read(self, item: int) -> Arrays | None:
        """Returns an item's result, or None if its file is missing or damaged; removes a damaged file."""
        try:
            with self._path(item).open("rb") as file:
                size, arrays = os.fstat(file.fileno()).st_size, list[Array]()
                while file.tell() < size:
                    arrays.append(np.lib.format.read_array(file, allow_pickle=False))
        except FileNotFoundError:
            return None
        except (EOFError, ValueError):
            arrays = []
        if not arrays or arrays[-1].tolist() != [_crc32_of(arrays[:-1])]:
            self._path(item).unlink(missing_ok=True)
            return None
        return tuple(torch.from_numpy(array) for array in arrays[:-1])

    def write(self, item: int, result: Arrays) -> None:
        arrays = [np.ascontiguousarray(tensor.cpu().numpy()) for tensor in result]
        unfinished = self._folder / f"{self._phase}.{item}{self._own}.tmp"
        with unfinished.open("wb") as file:
            for array in (*arrays, np.asarray([_crc32_of(arrays)], np.uint32)):
                np.lib.format.write_array(file, array, allow_pickle=False)
        publish_once(unfinished, self._path(item))

    def _path(self, item: int) -> Path:
        return self._folder / f"{self._phase}.{item}"


def _crc32_of(arrays: Sequence[Array]) -> int:
    crc32 = 0
    for array in arrays:
        crc32 = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc32)
    return crc32
