"""A real `moe-serve` process on a free port of this machine, for tests and benchmarks with real clients."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from support.waiting import HANG_S, wait_until

SERVE = (sys.executable, "-c", "from moe_pack.runtime.cli.serve import main; main(prog_name='moe-serve')")
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
        text = httpx2.get(f"{self.url}/metrics", headers=headers, timeout=HANG_S).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: sample.value for sample in samples if not sample.labels}

    def stop(self, limit_s: float = HANG_S) -> int:
        """Ends the server as a system does, by SIGTERM; returns its exit code.

        Raises:  subprocess.TimeoutExpired if it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(limit_s)

    def signal(self, number: signal.Signals) -> None:
        """Sends the server a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the server, which cannot do anything about it."""
        self._process.kill()
        self._process.wait()

    def _wait_for_port(self) -> int:
        ports = list[str]()

        def is_ready() -> bool:
            is_running = self.is_running  # before its last words are read
            ports.extend(_READY.findall(self.said()))
            assert ports or is_running, f"moe-serve ended with {self._process.returncode}: {self.said()}"
            return bool(ports)

        wait_until(is_ready, lambda: f"moe-serve is not ready: {self.said()}")
        return int(ports[0])
