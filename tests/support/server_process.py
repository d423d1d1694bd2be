"""A real `moe-serve` process on a free port of this machine, for tests and benchmarks with real clients."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx2
from prometheus_client.parser import text_string_to_metric_families

SERVE = (sys.executable, "-c", "from moe_pack.runtime.cli.serve import main; main(prog_name='moe-serve')")
READY_S = 60.0  # to load a pack on a busy machine
_READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+),")


def is_itself(command: list[str]) -> list[str]:
    """Returns a command as it is."""
    return command


class ServerProcess:
    """A server that has loaded its pack; at the end of its `with` block it is killed if it still runs.

    `url`, `port`: where it listens.   `pid`: its process.

    Args:    log: gets what the server writes.   options: of the command.   inside: returns the command that runs
             another one, in a memory cgroup.
    Raises:  AssertionError with what it wrote if it ends, or does not become ready.
    """

    def __init__(
        self, pack: Path, log: Path, *options: object, inside: Callable[[list[str]], list[str]] = is_itself
    ) -> None:
        self._log = log
        command = [*SERVE, str(pack), "--port", "0", *map(str, options)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(inside(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.pid = self._process.pid
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.kill()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def said(self) -> str:
        """Returns what the server has written."""
        return self._log.read_text(errors="replace")

    def metrics(self, key: str | None = None) -> dict[str, float]:
        """Returns the metrics without labels, by name."""
        headers = {} if key is None else {"x-api-key": key}
        text = httpx2.get(f"{self.url}/metrics", headers=headers, timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: sample.value for sample in samples if not sample.labels}

    def stop(self, limit_s: float = 30.0) -> int:
        """Ends the server as a system does, by SIGTERM; returns its exit code.

        Raises:  subprocess.TimeoutExpired if it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(limit_s)

    def kill(self) -> None:
        """Kills the server, which cannot do anything about it."""
        self._process.kill()
        self._process.wait()

    def _wait_for_port(self) -> int:
        until = time.monotonic() + READY_S
        while not (found := _READY.search(self.said())):
            assert self.is_running, f"moe-serve ended with {self._process.returncode}: {self.said()}"
            assert time.monotonic() < until, f"moe-serve is not ready after {READY_S:.0f} s: {self.said()}"
            time.sleep(0.02)
        return int(found[1])
