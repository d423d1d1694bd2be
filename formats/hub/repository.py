"""A repository of the hub at one commit: its list of files, downloads to the hub's cache, and ranges of files.

The client is `huggingface_hub`, which the extra `[hub]` installs. Tokens, the hub's address and the cache's folder are
its own (`hf auth login`, HF_TOKEN, HF_ENDPOINT, HF_HOME).

Requests that time out, are cut, or are answered with 408, 429 or 5xx are made again with growing pauses, after the
pause that the hub asks for with Retry-After; ranges go on where they were cut. Every request names the commit, so that
all bytes belong to one state of the repository.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.base.errors import MoePackError
from moe_pack.formats.hub.names import HubName

T = TypeVar("T")

_AGAIN = frozenset((408, 429, 500, 502, 503, 504))
_FIRST_TRIES = 3  # before anything has answered, a machine without a network is likelier than a fault that passes
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class Patience:
    """The attempts at a request in a row without a byte of success, and the pauses between, in seconds."""

    tries: int = 8
    first_pause: float = 1.0  # each pause is twice the one before ...
    longest_pause: float = 60.0
    longest_asked: float = 600.0  # ... or what the hub's Retry-After asks for

    def pause(self, attempt: int, asked: float | None) -> float:
        """Returns the pause after the failed attempt of this number, from 0."""
        if asked is not None:
            return min(asked, self.longest_asked)
        return min(self.first_pause * 2.0**attempt, self.longest_pause)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    path: str
    num_bytes: int
    digest: str  # the SHA-256 of a large file, the git id of a small one


class HubRepository:
    """A repository at the commit that its revision names now.

    Args:    error: the class of the errors.
    Raises:  `error` without `huggingface_hub`, network, repository or permission; its message says what to do.
    """

    def __init__(self, name: HubName, error: type[MoePackError], patience: Patience | None = None) -> None:
        self.name = name
        self._error = error
        self._patience = Patience() if patience is None else patience
        self._stop = Event()
        client = import_client(name, error)
        found = patiently(
            name,
            error,
            lambda: client.HfApi().model_info(name.repository, revision=name.revision, files_metadata=True),
            self._patience,
            stop=self._stop,
            unanswered_tries=_FIRST_TRIES,
        )
        self.commit: str = found.sha
        card = found.card_data
        self.license: str | None = None if card is None else card.license  # as the repository's card names it
        self.files = {
            sibling.rfilename: HubFile(
                sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or ""
            )
            for sibling in found.siblings or []
        }
        # httpx follows redirects to other hosts without the token.
        self._headers = {**client.utils.build_hf_headers(library_name="moe-pack"), "Accept-Encoding": "identity"}
        self._root = f"{client.constants.ENDPOINT}/{name.repository}/resolve/{self.commit}"

    def names(self) -> list[str]:
        """Returns the paths of the files within the folder that the name means."""
        top = self.name.path("")
        return [path.removeprefix(top) for path in self.files if path.startswith(top)]

    def read(self, path: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of a file: u8 [num_bytes], own memory. Raises as `fetch`."""
        raw = bytearray()
        self.fetch(path, start, num_bytes, raw.extend)
        return np.frombuffer(raw, np.uint8)

    def fetch(self, path: str, start: int, num_bytes: int, take: Callable[[bytes], object]) -> None:
        """Fetches a range of a file and passes it piece by piece to `take`, each byte once.

        Raises:  the repository's error if the range cannot be had, after all patience; OSError of `take`.
        """
        size = self.files[path].num_bytes
        assert 0 <= start <= start + num_bytes <= size, (path, start, num_bytes)
        done = 0

        def go_on() -> bool:
            nonlocal done
            before = done
            for piece in self._pieces(path, start + done, start + num_bytes, size):
                take(piece)
                done += len(piece)
            if done == before:
                raise ConnectionError("the answer has no bytes")
            return done == num_bytes

        while done < num_bytes and not self._patiently(go_on, lambda: done):
            pass

    def download(
        self, patterns: Sequence[str], unwanted: Sequence[str] = (), progress: formats.Progress = formats.NO_PROGRESS
    ) -> Path:
        """Downloads the files that match to the hub's cache, except those there, and returns the snapshot's folder.

        Raises:  the repository's error.
        """
        client = import_client(self.name, self._error)
        wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(unwanted)}
        present = cached_snapshot(self.name, self._error)
        missing = [
            self.files[path].num_bytes
            for path in client.utils.filter_repo_objects(self.files, **wanted)
            if present is None or not (present / path).exists()
        ]
        progress.begin(Stage(f"downloading {self.name.text()}", sum(missing), "B"))
        blobs = self.cache / f"models--{self.name.repository.replace('/', '--')}" / "blobs"
        with _without_bars(client), _counted(blobs, progress):
            where = {"revision": self.name.revision, "cache_dir": client.constants.HF_HUB_CACHE}
            snapshot: str = self._patiently(lambda: client.snapshot_download(self.name.repository, **where, **wanted))
        progress.end()
        return Path(snapshot)

    @property
    def cache(self) -> Path:
        """Returns the folder of the hub's cache."""
        return Path(import_client(self.name, self._error).constants.HF_HUB_CACHE)

    def close(self) -> None:
        """Ends pauses between attempts; requests that fail afterwards are not made again."""
        self._stop.set()

    def _pieces(self, path: str, start: int, end: int, size: int) -> Iterator[bytes]:
        """Yields the bytes of one answer to a request for a range; the answer may be cut short."""
        client = import_client(self.name, self._error)
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}"}
        url = f"{self._root}/{quote(path)}"
        timeout = client.constants.HF_HUB_DOWNLOAD_TIMEOUT
        session = client.utils.get_session()
        with session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
            if answer.is_error:
                answer.read()
            client.utils.hf_raise_for_status(answer)
            expected = f"bytes {start}-{end - 1}/{size}"
            found = answer.headers.get("Content-Range", "the whole file")
            if answer.status_code != 206 or found != expected:
                raise self._error(f"{self.name.text()}: {path}: the hub sent {found}, expected {expected}; try later")
            yield from answer.iter_bytes()

    def _patiently(self, work: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        return patiently(self.name, self._error, work, self._patience, progress, self._stop)


@contextmanager
def _without_bars(client: Any) -> Iterator[None]:
    """Hides the bars of the hub's client: `Progress` shows how far a download is."""
    are_shown = not client.utils.are_progress_bars_disabled()
    if are_shown:
        client.utils.disable_progress_bars()
    try:
        yield
    finally:
        if are_shown:
            client.utils.enable_progress_bars()


_COUNT_S = 1.0  # between two looks at the bytes of a download


@contextmanager
def _counted(folder: Path, progress: formats.Progress) -> Iterator[None]:
    """Reports the bytes by which the files of a folder grow, those that are not finished too."""

    def num_bytes() -> int:
        total = 0
        for path in folder.glob("*"):
            with suppress(OSError):  # it was renamed
                total += path.stat().st_blocks * 512  # a file that is not finished may have holes
        return total

    def count() -> None:
        before = num_bytes()
        while not is_over.wait(_COUNT_S):
            now = num_bytes()
            progress.advance(max(now - before, 0))
            before = max(now, before)

    is_over = Event()
    thread = Thread(target=count, daemon=True)
    try:
        thread.start()
        yield
    finally:
        is_over.set()
        if thread.is_alive():  # it is not where Ctrl-C interrupts its start
            thread.join()


def patiently(
    name: HubName,
    error: type[MoePackError],
    work: Callable[[], T],
    patience: Patience | None = None,
    progress: Callable[[], int] = lambda: 0,
    stop: Event | None = None,
    unanswered_tries: int | None = None,
) -> T:
    """Returns what `work` returns; calls it again after faults of the network and the hub that may pass.

    Args:    progress: a number that rises with what was done; the count of attempts then begins again.
             stop: ends a pause, and the attempts.   unanswered_tries: the most attempts in a row that nothing answers;
             None: as many as of others.
    Raises:  `error` after faults that stay, with what to do.
    """
    patience, stop = patience or Patience(), stop or Event()
    attempt, before = 0, progress()
    while True:
        try:
            return work()
        except _network_faults() as fault:
            if progress() > before:
                attempt, before = 0, progress()
            passes, asked = _passes(fault)
            attempt += 1
            is_answered = getattr(fault, "response", None) is not None
            tries = patience.tries if is_answered or unanswered_tries is None else min(unanswered_tries, patience.tries)
            if passes and attempt < tries and not stop.wait(patience.pause(attempt - 1, asked)):
                continue
            raise error(f"{name.text()}: {fault_text(name, fault, attempt if passes else 0)}") from fault


def import_client(name: HubName, error: type[MoePackError]) -> Any:
    """Returns the package `huggingface_hub`. Raises `error` if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ModuleNotFoundError as fault:
        raise error(f"{name.text()}: no such folder; to look it up on the hub, pip install 'moe-pack[hub]'") from fault
    return huggingface_hub


def fault_text(name: HubName, fault: Exception, tries: int = 0) -> str:
    """Returns in words what went wrong with the hub, and what to do about it.

    Args:    tries: how often it was tried, if the fault is one that may pass.
    """
    from huggingface_hub import constants, errors

    if isinstance(fault, errors.LocalEntryNotFoundError) and isinstance(fault.__cause__, Exception):
        return fault_text(name, fault.__cause__, tries)
    if isinstance(fault, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so that the hub is not asked; unset it"
    if isinstance(fault, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{name.repository}"
        return f"access is restricted; ask for it at {page}, and {_LOG_IN}"
    if isinstance(fault, errors.RevisionNotFoundError):
        return f"the repository has no revision {name.revision}"
    if isinstance(fault, errors.RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private; check the name, and if it is private, {_LOG_IN}"
    if isinstance(fault, errors.HfHubHTTPError):
        status = fault.response.status_code
        if status in (401, 403):
            return f"the hub refuses access ({status}); {_LOG_IN}, with a token that may do this"
        if tries:
            return f"the hub answered {status} {tries} times in a row; run the same command again later to continue"
        return f"the hub answered {status}: {_first_line(fault)}"
    if tries:
        return (
            f"the hub cannot be reached ({_first_line(fault)}), tried {tries} times; run the same command again later "
            "to continue"
        )
    return f"the download failed: {_first_line(fault)}"


def _passes(fault: BaseException) -> tuple[bool, float | None]:
    """Returns whether a fault may pass, and the pause in seconds that the hub asks for."""
    from httpx2 import TransportError
    from huggingface_hub import errors

    if isinstance(fault, errors.OfflineModeIsEnabled):
        return False, None
    if isinstance(fault, errors.LocalEntryNotFoundError):  # the client looked into the cache after another fault
        return (False, None) if fault.__cause__ is None else _passes(fault.__cause__)
    if isinstance(fault, errors.HfHubHTTPError):
        asked = fault.response.headers.get("Retry-After", "")
        return fault.response.status_code in _AGAIN, float(asked) if asked.isdecimal() else None
    return isinstance(fault, (ConnectionError, TransportError)), None


def _network_faults() -> tuple[type[Exception], ...]:
    """Returns the classes of faults of the hub and the network."""
    from httpx2 import TransportError
    from huggingface_hub import errors

    of_hub = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError)
    return (*of_hub, ConnectionError, TransportError)


def _first_line(fault: Exception) -> str:
    text = str(fault).strip()
    return text.splitlines()[0] if text else type(fault).__name__


def cached_snapshot(name: HubName, error: type[MoePackError]) -> Path | None:
    """Returns the folder of a repository's revision in the hub's cache, perhaps incomplete; None if there is none.

    The hub is not asked.
    Raises:  `error` without `huggingface_hub`.
    """
    client = import_client(name, error)
    folder = Path(client.constants.HF_HUB_CACHE) / f"models--{name.repository.replace('/', '--')}"
    revision = name.revision or "main"
    ref = folder / "refs" / revision
    try:
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    except OSError as fault:
        raise error(f"{ref}: cannot be read ({fault.strerror})") from fault
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def has_repository(name: HubName, error: type[MoePackError]) -> bool:
    """Returns whether the hub has a repository that this user may see. Raises `error` if the hub cannot be asked."""
    client = import_client(name, error)
    return bool(patiently(name, error, lambda: client.HfApi().repo_exists(name.repository)))
