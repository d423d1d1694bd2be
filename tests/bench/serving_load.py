"""Whether moe-serve stands load and faults: clients at once, some of which leave, full disks, and kills.

    python tests/bench/serving_load.py
    python tests/bench/serving_load.py --budget 15M --parallel 4

It starts the server on the demo model, with a chat template and a key, and asks it on 127.0.0.1. Every request has a
deadline. The verdict is that each gets an answer or the refusal that it deserves, that marked requests get the answer
that they got alone, that memory does not grow, that no request is left running, and that the server ends in order.
With --budget it runs in a memory cgroup with the budget and some spare bytes.
"""

import contextlib
import itertools
import json
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import httpx2
from benchlib import BOOK, PACK_BITS, figure, finish, folder_option, json_option, moe_pack, table
from benchlib.asking import MAX_BODY_BYTES, Asked, Clients, Outcome, Questions, answer_text
from benchlib.confined import SAMPLE_SECONDS, SPARE_BYTES, MemoryCgroup, NoCgroupError, tree_anonymous_bytes
from support.chat_model import chat_source
from support.server_process import ServerProcess, is_itself

from moe_pack.formats.base.commands import read_size

KEY = "the-key-of-the-bench"
CONTEXT = 1024
NUM_MARKED = 20
_FIRST_REQUESTS = 200  # after so many, or a tenth, memory is not to grow any more
_GROWTH_SHARE, _GROWTH_BYTES = 0.05, 16 << 20  # the larger of both is allowed
_IDLE_S = 30.0
_STOP_S = 30.0
_DISK_BYTES = 3 << 20  # has space for a session or two


@dataclass(frozen=True, slots=True)
class Memory:
    """Anonymous bytes of the server: after the first requests, at the end, and the most at any time.

    `kills`: processes that the cgroup killed; None without a cgroup.
    """

    first_bytes: int
    last_bytes: int
    peak_bytes: int
    kills: int | None = None

    def fault(self) -> str:
        """Returns what is wrong; nothing if memory did not grow."""
        allowed = max(_GROWTH_SHARE * self.first_bytes, _GROWTH_BYTES)
        if self.last_bytes - self.first_bytes > allowed:
            return f"memory grew from {_mib(self.first_bytes)} to {_mib(self.last_bytes)}"
        return f"{self.kills} processes were killed for want of memory" if self.kills else ""


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--requests", "num_requests", default=2000, show_default=True, help="Of mixed sizes and kinds.")
@click.option("--clients", default=32, show_default=True, help="That ask at once.")
@click.option("--parallel", default=4, show_default=True, help="Requests that the server runs at once.")
@click.option("--budget", default=None, help="Of the server, as 15M, which offloads.  [default: the pack is mapped]")
@click.option("--seed", default=1, show_default=True, help="Of the requests.")
@click.option("--faults/--no-faults", default=True, help="Also fill a disk and kill servers.  [default: yes]")
@folder_option
@json_option
def main(
    num_requests: int,
    clients: int,
    parallel: int,
    budget: str | None,
    seed: int,
    faults: bool,
    folder: Path,
    as_json: bool,
) -> None:
    pack = chat_pack(folder)
    options: list[object] = ["--parallel", parallel, "--context", CONTEXT, "--queue", max(1, clients // 2)]
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moe-serve-") as name, contextlib.ExitStack() as stack:
        work, group = Path(name), None
        if budget is not None:
            options += ["--budget", budget]
            try:
                group = stack.enter_context(MemoryCgroup(read_size(budget) + SPARE_BYTES))
            except NoCgroupError as fault:
                raise click.ClickException(str(fault)) from fault
        inside = is_itself if group is None else group.inside
        sizes = ["--max-body", MAX_BODY_BYTES, "--api-key", KEY]
        server = stack.enter_context(ServerProcess(pack, work / "log", *options, *sizes, inside=inside))
        load = Load(server, clients, Questions(BOOK.read_text().split(), seed))
        load.run(num_requests)
        memory = Memory(*load.memory, None if group is None else group.num_kills)
        found += [*load.faults, *filter(None, [memory.fault(), stop_fault(server)])]
        if faults:
            for name, check in (("full disk", full_disk), ("kill", killed)):
                click.echo(f"fault: {name}", err=True)
                found += [f"{name}: {fault}" for fault in check(pack, work, options)]
    facts = facts_of(load, memory)
    finish(facts, text_of(load.outcomes, facts), as_json, found)


def chat_pack(folder: Path) -> Path:
    """Returns the pack of the demo model with a chat template, made unless it is there."""
    made = folder / "demo-chat"
    if not (made / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="moe-serve-") as name:
            moe_pack("convert", chat_source(Path(name) / "source"), *PACK_BITS, "-o", made)
    return made


class Load:
    """Many requests to a server, and what is wrong with the answers (`faults`).

    `memory`: anonymous bytes after the first requests, at the end, and at most.
    """

    def __init__(self, server: ServerProcess, num_clients: int, questions: Questions) -> None:
        self._server, self._num_clients, self._questions = server, num_clients, questions
        self.outcomes: list[Outcome] = []
        self.faults: list[str] = []
        self.memory = (0, 0, 0)
        self.seconds = 0.0
        self.metrics: dict[str, float] = {}

    def run(self, number: int) -> None:
        """Asks the marked requests alone, then all at once."""
        server, marked = self._server, self._questions.marked(min(NUM_MARKED, number))
        alone = Clients(server.url, KEY, 1).ask(iter(marked))
        self._note(alone)
        answers = [outcome.text or "" for outcome in sorted(alone, key=lambda each: each.asked.mark or 0)]
        clients = Clients(server.url, KEY, self._num_clients, answers)
        first = min(_FIRST_REQUESTS, max(number // 10, 1))
        mixed = self._questions.mixed(number, marked)
        with _Peak(server.pid) as peak:
            began = time.monotonic()
            self._note(clients.ask(itertools.islice(mixed, first)))
            self._wait_until_idle()
            first_bytes = tree_anonymous_bytes(server.pid)
            self._note(clients.ask(mixed))
            self.seconds = time.monotonic() - began
            self._wait_until_idle()
            last_bytes = tree_anonymous_bytes(server.pid)
        self.memory = (first_bytes, last_bytes, peak.most_bytes)
        self._note(Clients(server.url, KEY, 1, answers).ask(iter(marked)))  # alone again

    def _note(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes
        for outcome in outcomes:
            if outcome.fault:
                asked = outcome.asked
                self.faults.append(f"{asked.protocol}, {'a stream' * asked.is_streamed}: {outcome.fault}")

    def _wait_until_idle(self) -> None:
        until = time.monotonic() + _IDLE_S
        while time.monotonic() < until:
            self.metrics = self._server.metrics(KEY)
            if self.metrics["moe_serve_running"] == self.metrics["moe_serve_waiting"] == 0:
                return
            time.sleep(0.05)
        running, waiting = self.metrics["moe_serve_running"], self.metrics["moe_serve_waiting"]
        self.faults.append(f"{running:.0f} requests run and {waiting:.0f} wait though all clients have gone")


class _Peak:
    """The most anonymous bytes that a process has while a block runs (`most_bytes`)."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ends = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most_bytes = 0

    def __enter__(self) -> "_Peak":
        self._thread.start()
        return self

    def __exit__(self, *of_an_exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(SAMPLE_SECONDS):
            self.most_bytes = max(self.most_bytes, tree_anonymous_bytes(self._pid))


def stop_fault(server: ServerProcess) -> str:
    """Ends a server; returns what is wrong with how it ends, or with what it wrote."""
    try:
        code = server.stop(_STOP_S)
    except subprocess.TimeoutExpired:
        return f"the server did not end within {_STOP_S:.0f} s"
    if code:
        return f"the server ended with {code}: {server.said()[-500:]}"
    said = server.said()
    return f"the server wrote: {said[said.index('Traceback') :][:2000]}" if "Traceback" in said else ""


# ---- faults ---------------------------------------------------------------------------------------------------------


def long_request(number: int, max_tokens: int = 24, is_streamed: bool = False) -> Asked:
    """Returns a request with a prompt of some 500 tokens that has nothing in common with others, and a seed."""
    words = BOOK.read_text().split()[number * 400 :][:350]
    body: dict[str, Any] = {"prompt": f"{number} {' '.join(words)}", "seed": number, "max_tokens": max_tokens}
    body |= {"stream": is_streamed, "ignore_eos": True}
    return Asked("completion", "waits", json.dumps(body).encode(), is_streamed)


def asked(server: ServerProcess, request: Asked) -> tuple[str, int]:
    """Returns the text of an answer, and how many tokens of the prompt were cached.

    Raises:  httpx2.HTTPError if there is no answer.
    """
    headers = {"content-type": "application/json"}
    answer = httpx2.post(f"{server.url}/v1/completions", content=request.content, headers=headers, timeout=60)
    answer.raise_for_status()
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer_text(request, answer.content), cached


def full_disk(pack: Path, work: Path, options: list[object]) -> Iterator[str]:
    """Fills the disk of --sessions: answers come all the same, and what was saved is used after a restart."""
    folder = work / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        click.echo(f"full disk: left out, because no small disk can be mounted ({mounted.stderr.strip()})", err=True)
        return
    try:
        texts: list[str] = []
        for round_number in range(2):
            with ServerProcess(pack, work / "log", *options, "--sessions", folder) as server:
                found = [asked(server, long_request(number)) for number in range(10)]
                texts = texts or [text for text, _ in found]
                if texts != [text for text, _ in found]:
                    yield "answers differ after a restart"
                if round_number == 0 and not any(folder.glob("*.session")):
                    yield "nothing was saved before the disk was full"
                if round_number and not any(cached for _, cached in found):
                    yield "no session was taken up after a restart"
                if fault := stop_fault(server):
                    yield fault
                if "the disk is full" not in server.said():
                    yield "the server did not say that the disk is full"
            if any(folder.glob("*.tmp")):
                yield "a part of a session was left"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def killed(pack: Path, work: Path, options: list[object]) -> Iterator[str]:
    """Kills servers at random moments while they answer and save sessions; the next one answers as the first did."""
    folder, text, is_cached = work / "sessions", "", False
    request = long_request(1)
    for number in range(4):
        with ServerProcess(pack, work / "log", *options, "--sessions", folder) as server:
            if any(folder.glob("*.tmp")):
                yield "a part of a session was left after a restart"
            found, cached = asked(server, request)
            text, is_cached = text or found, is_cached or cached > 0
            if found != text:
                yield f"the answer after {number} kills differs"
            for each in range(2, 8):  # they take its slot, so that it is saved
                asked(server, long_request(each))
            streams = [long_request(10 * number + each, 60, is_streamed=True) for each in range(8, 38)]
            killer = threading.Timer(0.3 + 0.2 * number, server.kill)
            killer.start()
            broken = [_is_broken(server, stream) for stream in streams]
            killer.join()
            if not any(broken):
                yield "the server was killed, and all answers came"
    if not is_cached:
        yield "no session was taken up after a kill"


def _is_broken(server: ServerProcess, request: Asked) -> bool:
    """Whether the answer to a request does not come whole."""
    try:
        asked_streamed(server, request)
    except (httpx2.HTTPError, ValueError):
        return True
    return False


def asked_streamed(server: ServerProcess, request: Asked) -> str:
    """Returns the text of a stream.

    Raises:  httpx2.HTTPError if it breaks.   ValueError if it has no end.
    """
    headers = {"content-type": "application/json"}
    answer = httpx2.post(f"{server.url}/v1/completions", content=request.content, headers=headers, timeout=60)
    answer.raise_for_status()
    return answer_text(request, answer.content)


# ---- figures --------------------------------------------------------------------------------------------------------


def facts_of(load: Load, memory: Memory) -> dict[str, Any]:
    """Returns the figures."""
    metrics = load.metrics
    waited = [each.seconds for each in load.outcomes if each.status == 200]
    return {
        "requests": len(load.outcomes),
        "seconds": load.seconds,
        "statuses": dict(Counter("left" if each.status is None else str(each.status) for each in load.outcomes)),
        "conducts": dict(Counter(each.asked.conduct for each in load.outcomes)),
        "queue_full": sum(each.num_full for each in load.outcomes),
        "marked": sum(each.asked.mark is not None for each in load.outcomes),
        "median_answer_s": median(waited),
        "slowest_percent_s": quantiles(waited, n=100)[-1],
        "prompt_tokens": metrics["moe_serve_prompt_tokens_total"],
        "cached_tokens": metrics["moe_serve_cached_tokens_total"],
        "generated_tokens": metrics["moe_serve_generated_tokens_total"],
        "tokens_a_step": metrics["moe_serve_generated_tokens_total"] / max(metrics["moe_serve_decode_steps_total"], 1),
        "first_bytes": memory.first_bytes,
        "last_bytes": memory.last_bytes,
        "peak_bytes": memory.peak_bytes,
    }


def text_of(outcomes: list[Outcome], facts: dict[str, Any]) -> str:
    """Returns the tables: what became of which clients, and the other figures."""
    statuses = sorted({_status(each) for each in outcomes})
    conducts = sorted({each.asked.conduct for each in outcomes}, key=lambda each: -facts["conducts"][each])
    rows: list[list[object]] = [
        [conduct, *(_count(outcomes, conduct, status) or None for status in statuses)] for conduct in conducts
    ]
    values = [
        ("requests", f"{facts['requests']} in {facts['seconds']:.1f} s, {facts['marked']} of them marked"),
        ("queue full", f"{facts['queue_full']} refusals with 429, after which the client tried again"),
        ("answers", f"median {facts['median_answer_s']:.2f} s, 99% within {facts['slowest_percent_s']:.2f} s"),
        ("prompts", f"{facts['prompt_tokens']:,.0f} tokens, {facts['cached_tokens']:,.0f} of them cached"),
        ("new tokens", f"{facts['generated_tokens']:,.0f}, {figure(facts['tokens_a_step'])} in a step"),
        ("memory", f"{_mib(facts['first_bytes'])} at first, {_mib(facts['last_bytes'])} at the end"),
        ("most memory", _mib(facts["peak_bytes"])),
    ]
    return table(["client", *statuses], rows) + "\n\n" + "\n".join(f"{name:12} {value}" for name, value in values)


def _status(outcome: Outcome) -> str:
    return "left" if outcome.status is None else str(outcome.status)


def _count(outcomes: list[Outcome], conduct: str, status: str) -> int:
    return sum(each.asked.conduct == conduct and _status(each) == status for each in outcomes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


if __name__ == "__main__":
    main()
