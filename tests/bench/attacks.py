"""Whether a server answers while it is attacked: seconds of a plain chat during each attack, memory, and its end.

    python tests/bench/attacks.py PACK

Each attack meets a server of its own, with `ulimit -n 256` and a context of 512 tokens. Meanwhile a client chats, four
tokens a time. Then the attack begins once more, and SIGTERM has to end the server within the time for answers.
"""

import tempfile
import time
from pathlib import Path

import click
import httpx2
from benchlib import table
from support.server_attacks import ATTACKS, CHAT, chat
from support.server_process import ServerProcess

DRAIN_S = 3


def few_descriptors(command: list[str]) -> list[str]:
    """Returns a command that runs another one with 256 descriptors."""
    return ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *command]


def resident_mib(pid: int) -> float:
    """Returns the memory of a process that is in RAM."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def attacked(pack: Path, name: str, log: Path, num_chats: int) -> list[str]:
    """Returns a row of the table for an attack."""
    attack = ATTACKS[name]
    with ServerProcess(pack, log, "--context", 512, "--drain", DRAIN_S, inside=few_descriptors) as server:
        with httpx2.Client(base_url=server.url, timeout=120) as http:
            http.post(CHAT, json=chat()).raise_for_status()
        before = peak = resident_mib(server.pid)
        times = list[float]()
        with attack(server.url, server.port):
            for number in range(num_chats):
                began = time.perf_counter()
                with httpx2.Client(base_url=server.url, timeout=120) as http:  # a new connection each time
                    http.post(CHAT, json=chat(f"Hello {number}")).raise_for_status()
                times.append(time.perf_counter() - began)
                peak = max(peak, resident_mib(server.pid))
                time.sleep(0.2)
        time.sleep(1)
        after = resident_mib(server.pid)
        with attack(server.url, server.port):
            time.sleep(0.5)
            began = time.perf_counter()
            server.stop(120)
            ended = time.perf_counter() - began
    return [name, f"{max(times):.2f}", f"{before:.0f}", f"{peak:.0f}", f"{after:.0f}", f"{ended:.2f}"]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("pack", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--attack", "names", multiple=True, type=click.Choice(list(ATTACKS)), help="One attack.  [default: all]")
@click.option("--chats", default=15, show_default=True, type=click.IntRange(1), help="Chats during each attack.")
def main(pack: Path, names: tuple[str, ...], chats: int) -> None:
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ATTACKS:
            rows.append(attacked(pack, name, Path(folder) / "log", chats))
            click.echo(f"{name}: done", err=True)
    heads = ["attack", "slowest chat, s", "MiB before", "at most", "after", f"SIGTERM, s (--drain {DRAIN_S})"]
    click.echo(table(heads, rows))


if __name__ == "__main__":
    main()
