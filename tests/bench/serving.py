"""How many tokens a second a server makes for several requests at once, against llama.cpp's server at equal bytes.

    python tests/bench/serving.py --llama-server PATH
    python tests/bench/serving.py --budget-share 0.25

Requests begin at the same time, each with random tokens as its prompt, and decode greedily. The servers are started for
each number of requests, and take turns in every round. In memory, requests come when a server has copied its experts,
as both do. With a share of the pack as the budget, each server runs in a memory cgroup of the budget and 400 MB, and
begins with an empty page cache: ours offloads within the budget, llama.cpp maps its file. As root: it makes memory
cgroups and empties the page cache.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from benchlib import figure, finish, folder_option, json_option, table
from benchlib.confined import SPARE_BYTES, MemoryCgroup, drop_page_cache, tree_anonymous_bytes
from benchlib.gguf_files import make_gguf
from benchlib.packs import SYNTHETIC, make_pack

from moe_pack.formats import Pack
from moe_pack.formats.base.limits import num_cores

OURS, SUBSTITUTING, LLAMA = "moe-serve", "moe-serve --substitute", "llama-server"
_SIDE = Path(__file__).with_name("benchlib") / "serve_side.py"
_START_SECONDS, _REQUEST_SECONDS = 180, 1200
_STEADY_S, _STEADY_BYTES = 1.5, 4 << 20
_WARMING_TOKENS = 512  # of a prompt before the clock starts, which needs nearly all experts


@dataclass(frozen=True, slots=True)
class Task:
    """What each request asks for, and how the servers run. `budget_bytes`: None: everything is in memory."""

    prompt_tokens: int
    decode_tokens: int
    threads: int
    numerics: str
    budget_bytes: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Served:
    """A run of a server. `tokens_per_s`: new tokens of all requests, over the time from their start to the last end."""

    server: str
    pack: str
    requests: int
    tokens_per_s: float
    anonymous_bytes: int
    prepared_s: float | None  # from its start, until it has copied what it copies; None with a budget


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def asked(url: str, body: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
    """Sends a request and returns the answer."""
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def running(command: list[str], port: int, limit_bytes: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a server's process when it answers."""
    with ExitStack() as stack:
        if limit_bytes is not None:
            command = stack.enter_context(MemoryCgroup(limit_bytes)).inside(command)
        log = Path(stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log")).name)
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                try:
                    asked(f"http://127.0.0.1:{port}/health", None, 5)
                    break
                except OSError as fault:
                    if process.poll() is not None or time.monotonic() > deadline:
                        end = log.read_text(errors="replace")[-1500:]
                        raise click.ClickException(f"{command}: does not answer: {end}") from fault
                    time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_steady(pid: int) -> None:
    """Waits until a process's memory grows no more: both servers copy experts, ours after it answers."""
    last, since = 0, time.monotonic()
    while time.monotonic() - since < _STEADY_S:
        time.sleep(0.1)
        now = tree_anonymous_bytes(pid)
        if abs(now - last) > _STEADY_BYTES:
            last, since = now, time.monotonic()


def measured(
    server: str, name: str, pack: Path, gguf: Path | None, llama: Path | None, number: int, task: Task
) -> Served:
    """Runs a server, first with one long prompt, and then with so many requests at once."""
    with Pack(pack) as opened:
        vocab_size = opened.spec.vocab_size
    draw, port = np.random.default_rng(task.seed), free_port()
    context = max(task.prompt_tokens + task.decode_tokens, _WARMING_TOKENS) + 8
    if server == LLAMA:
        assert llama is not None and gguf is not None, "it was asked for"
        command = [str(llama), "-m", str(gguf), "--port", str(port), "-c", str(context * number), "-np", str(number)]
        command += ["-t", str(task.threads), "-tb", str(task.threads), "--no-warmup", "--no-cache-prompt"]
        command += [] if task.budget_bytes is None else ["--no-repack"]  # a copy in memory of its own
        url = f"http://127.0.0.1:{port}/completion"
    else:
        command = [sys.executable, str(_SIDE), str(pack), "--port", str(port), "--parallel", str(number)]
        command += ["--context", str(context), "--threads", str(task.threads), "--numerics", task.numerics]
        command += [] if task.budget_bytes is None else ["--budget", str(task.budget_bytes)]
        command += ["--substitute", "0.3"] if server == SUBSTITUTING else []
        url = f"http://127.0.0.1:{port}/v1/completions"

    def ask(tokens: list[int], number_new: int) -> int:
        if server == LLAMA:
            body: dict[str, Any] = {"prompt": tokens, "n_predict": number_new, "temperature": 0, "ignore_eos": True}
            return int(asked(url, body, _REQUEST_SECONDS)["tokens_predicted"])
        body = {"prompt": tokens, "max_tokens": number_new, "temperature": 0, "ignore_eos": True}
        return int(asked(url, body, _REQUEST_SECONDS)["usage"]["completion_tokens"])

    limit = None if task.budget_bytes is None else task.budget_bytes + SPARE_BYTES
    if limit is not None:
        drop_page_cache(pack)
    started, prepared_s = time.perf_counter(), None
    with running(command, port, limit) as process:
        if task.budget_bytes is None:
            wait_until_steady(process.pid)
            prepared_s = time.perf_counter() - started - _STEADY_S
        ask(draw.integers(3, vocab_size, _WARMING_TOKENS).tolist(), 4)
        prompts = [draw.integers(3, vocab_size, task.prompt_tokens).tolist() for _ in range(number)]
        began = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            made = sum(pool.map(lambda prompt: ask(prompt, task.decode_tokens), prompts))
        seconds = time.perf_counter() - began
        anonymous = tree_anonymous_bytes(process.pid)
    return Served(server, name, number, made / seconds, anonymous, prepared_s)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--pack", "packs", multiple=True, type=click.Choice(list(SYNTHETIC)), default=("qwen3-14-layers",))
@click.option("--requests", "numbers", multiple=True, type=click.IntRange(1, 64), default=(1, 2, 4, 8))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=4, show_default=True, type=click.IntRange(1))
@click.option("--decode-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=num_cores, show_default="all", type=click.IntRange(1))
@click.option(
    "--numerics", default="fast", show_default=True, help="Ours; most packs' default. llama.cpp's are 8 bits."
)
@click.option("--budget-share", type=click.FloatRange(0.01, 1), help="Of the pack's bytes.  [default: all in memory]")
@click.option("--substitute", is_flag=True, help="Measure --substitute 0.3 too, which changes answers.")
@click.option("--llama-server", type=click.Path(path_type=Path, exists=True), help="[default: llama.cpp is left out]")
@click.option("--seed", default=0, show_default=True)
@folder_option
@json_option
def main(
    packs: tuple[str, ...], numbers: tuple[int, ...], rounds: int, prompt_tokens: int, decode_tokens: int, threads: int,
    numerics: str, budget_share: float | None, substitute: bool, llama_server: Path | None,
    seed: int, folder: Path, as_json: bool,
) -> None:  # fmt: skip
    found = list[Served]()
    for name in packs:
        pack = make_pack(name, folder)
        gguf = make_gguf(pack) if llama_server else None
        total = sum(path.stat().st_size for path in pack.iterdir())
        budget = None if budget_share is None else int(budget_share * total)
        servers = [OURS, *([SUBSTITUTING] if substitute else []), *([LLAMA] if gguf else [])]
        for turn in range(rounds):
            task = Task(prompt_tokens, decode_tokens, threads, numerics, budget, seed + turn)
            for number in numbers:
                for server in servers:
                    run = measured(server, name, pack, gguf, llama_server, number, task)
                    found.append(run)
                    click.echo(f"{name}, {number} requests, {server}: {run.tokens_per_s:.2f} tokens/s", err=True)
    header = ("pack", "requests", "server", "tokens/s", "least", "most", "times one", "times llama.cpp",
              "anonymous MB", "prepared, s")  # fmt: skip
    text = table(header, list(rows(found)))
    finish({"runs": [asdict(run) for run in found]}, text, as_json)


def rows(found: list[Served]) -> Iterator[tuple[object, ...]]:
    """Yields a line for each pack, number of requests and server: medians over the rounds."""
    rates: dict[tuple[str, int, str], list[Served]] = {}
    for run in found:
        rates.setdefault((run.pack, run.requests, run.server), []).append(run)

    def rate(pack: str, requests: int, server: str) -> float | None:
        runs = rates.get((pack, requests, server))
        return median(run.tokens_per_s for run in runs) if runs else None

    for (pack, requests, server), runs in rates.items():
        own, one, theirs = rate(pack, requests, server), rate(pack, 1, server), rate(pack, requests, LLAMA)
        each = [run.tokens_per_s for run in runs]
        prepared = [run.prepared_s for run in runs if run.prepared_s is not None]
        yield (
            pack, requests, server, figure(own), figure(min(each)), figure(max(each)),
            figure(own / one if own and one else None), figure(own / theirs if own and theirs else None),
            f"{max(run.anonymous_bytes for run in runs) / 1e6:,.0f}",
            figure(median(prepared) if prepared else None),
        )  # fmt: skip


if __name__ == "__main__":
    main()
