"""Whether clients work with moe-serve as they are: it installs them, runs their checks, and prints a table.

    python tests/bench/clients.py PACK
    python tests/bench/clients.py PACK --only openai --only litellm --folder build/clients

Each file of tests/bench/client_checks is run in an environment of its own, with pinned versions from PyPI or npm, which
is kept in --folder. The pack needs a chat template; its model may say nonsense: what is checked are protocols and
schemas. With --url the checks use a server that runs already, with --newest the newest versions.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx2
from benchlib import finish, json_option, table
from support.server_process import ServerProcess

CHECKS = Path(__file__).parent / "client_checks"
LIMIT_S = 900
NODE = "node@22.23.3"  # the newest clients need 22; this package is the program itself


@dataclass(frozen=True, slots=True)
class Suite:
    """A file of checks, and the packages that it needs with their versions."""

    file: str
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What --only calls it."""
        return self.file.partition(".")[0].removesuffix("_checks")

    @property
    def is_npm(self) -> bool:
        """Whether it is JavaScript."""
        return self.file.endswith(".mjs")


SUITES = (
    Suite("agent_shapes.py"),
    Suite("openai_python.py", ("openai==3.57.0",)),
    Suite("anthropic_python.py", ("anthropic==2.14.0",)),
    Suite("langchain_checks.py", ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10")),
    Suite("instructor_checks.py", ("instructor==1.17.0", "anthropic==0.93.0")),
    Suite("pydantic_ai_checks.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    Suite("agents_checks.py", ("openai-agents==0.24.0",)),
    Suite("litellm_checks.py", ("litellm==1.110.2",)),
    Suite("command_checks.py", ("llm==0.36", "lm-eval[api]==0.4.13")),
    Suite("openai_npm.mjs", (NODE, "openai@7.59.0", "zod@4.6.7")),
    Suite("anthropic_npm.mjs", (NODE, "@anthropic-ai/sdk@1.14.0", "zod@4.6.7")),
    Suite(
        "ai_sdk.mjs",
        (
            NODE,
            "ai@7.0.173",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/anthropic@4.0.105",
            "zod@4.6.7",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a file of checks found. `results`: of each check its client, version, description and fault."""

    suite: str
    install_s: float
    run_s: float
    results: list[dict[str, str]]


@click.command()
@click.argument("pack", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--url", help="Use the server at this address in place of one of PACK.")
@click.option("--only", multiple=True, type=click.Choice([suite.name for suite in SUITES]), help="These checks alone.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where environments are kept.")
@click.option("--newest", is_flag=True, help="Install the newest versions in place of the pinned ones.")
@json_option
def main(
    pack: Path | None, url: str | None, only: tuple[str, ...], folder: Path | None, newest: bool, as_json: bool
) -> None:
    """Runs the checks of all clients against moe-serve with PACK."""
    if (pack is None) == (url is None):
        raise click.UsageError("give a pack, or --url of a server that runs")
    chosen = [suite for suite in SUITES if not only or suite.name in only]
    with tempfile.TemporaryDirectory() as made, _address(pack, url, Path(made)) as address:
        name = httpx2.get(f"{address}/v1/models").json()["data"][0]["id"]
        own = {"MOE_SERVE_URL": address, "MOE_SERVE_MODEL": name}
        ran = [_ran(suite, (folder or Path(made)).resolve(), newest, own) for suite in chosen]
    results = [result for each in ran for result in each.results]
    date = datetime.now(UTC).date()
    rows = [(client, version, tried, date, result) for client, version, tried, result in _by_client(results)]
    times = [(each.suite, f"{each.install_s:.0f} s", f"{each.run_s:.0f} s") for each in ran]
    text = table(("client", "version", "tried", "date", "result"), rows)
    text += "\n\n" + table(("checks", "install", "run"), times)
    faults = [f"{result['client']}: {result['what']}: {result['fault']}" for result in results if result["fault"]]
    finish({"results": results, "seconds": times}, text, as_json, faults)


def _by_client(results: list[dict[str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Yields for each client its version, what was tried, and the result: ok, or what failed with which fault."""
    for client, version in dict.fromkeys((result["client"], result["version"]) for result in results):
        own = [result for result in results if (result["client"], result["version"]) == (client, version)]
        faults = [f"{result['what']}: {result['fault']}" for result in own if result["fault"]]
        yield client, version, "; ".join(result["what"] for result in own), "; ".join(faults).replace("|", "/") or "ok"


@contextmanager
def _address(pack: Path | None, url: str | None, folder: Path) -> Iterator[str]:
    """Yields the address of a server that answers."""
    if pack is None:
        yield str(url).rstrip("/")
        return
    with ServerProcess(pack, folder / "log", "--parallel", 2) as server:
        yield server.url


def _ran(suite: Suite, folder: Path, newest: bool, own: dict[str, str]) -> Ran:
    """Installs what a file of checks needs, and runs it."""
    click.echo(f"{suite.name}", err=True)
    begun = time.monotonic()
    install = _npm_command if suite.is_npm else _python_command
    packages = [_unpinned(package) if newest else package for package in suite.packages]
    command, place = install(suite, folder / suite.name, packages)
    installed = time.monotonic()
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **own}, cwd=place, timeout=LIMIT_S
    )
    results: list[dict[str, Any]] = [json.loads(line) for line in found.stdout.splitlines() if line[:1] == "{"]
    if found.returncode:
        fault = f"ended with {found.returncode}: {found.stderr[-200:]}"
        results.append({"client": suite.name, "version": "", "what": "all checks", "fault": fault})
    return Ran(suite.name, installed - begun, time.monotonic() - installed, results)


def _unpinned(package: str) -> str:
    """Returns a package without its version; npm's names may begin with @."""
    return package[0] + package[1:].partition("==")[0].partition("@")[0]


def _python_command(suite: Suite, folder: Path, packages: list[str]) -> tuple[list[str], Path]:
    python = folder / "bin" / "python"
    if not python.exists():
        _install(sys.executable, "-m", "venv", folder)
    if packages:
        _install(python, "-m", "pip", "install", "--quiet", *packages)
    return [str(python), str(CHECKS / suite.file)], folder


def _npm_command(suite: Suite, folder: Path, packages: list[str]) -> tuple[list[str], Path]:
    """Copies the checks beside the packages, which is where node looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("checking.mjs", suite.file):
        (folder / name).write_bytes((CHECKS / name).read_bytes())
    _install("npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--silent", *packages)
    return [str(folder / "node_modules" / ".bin" / "node"), suite.file], folder


def _install(*command: object) -> None:
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if found.returncode:
        raise click.ClickException(f"{' '.join(map(str, command))}: {found.stderr[-1000:]}")


if __name__ == "__main__":
    main()
