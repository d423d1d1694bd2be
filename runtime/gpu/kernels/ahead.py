"""Kernels compiled before they are needed, by several processes into Triton's cache on disk.

Triton compiles a kernel when it is first launched, one after the other: a first start takes minutes. Here a run's
launches are collected without compiling or launching anything, what the cache lacks is compiled by a pool of processes,
and the run that follows finds all of it in the cache.
"""

import hashlib
import importlib
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, get_cache_key, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable

from moe_pack.formats import NO_PROGRESS, Progress
from moe_pack.formats.commands import Stage
from moe_pack.runtime.gpu import kernels
from moe_pack.runtime.gpu.kernels.rows import INTERPRETED

_FEWEST = 4  # kernels: with fewer, processes take longer to start than to compile them
_NAME_CHARACTERS = 150  # of a kernel's file in the cache, as Triton cuts them
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:]; from moe_pack.runtime.gpu.kernels import ahead; ahead.compile_given()"
)


@dataclass(frozen=True, slots=True, eq=False)
class CompileJob:
    """A kernel with the constants and types of one launch: all that another process needs to compile it.

    `module`, `name`: of the jitted function.   `signature`: types by argument.   `constants`, `attributes`: values, and
    what is known of others, by position.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    def source(self) -> ASTSource:
        """The kernel as Triton compiles it."""
        function = getattr(importlib.import_module(self.module), self.name)
        return ASTSource(function, self.signature, self.constants, self.attributes)

    def is_cached(self) -> bool:
        """Whether Triton's cache on disk has it."""
        source, backend = self.source(), make_backend(self.target)
        options = backend.parse_options(self.options)
        environment = triton.compiler.compiler.get_cache_invalidating_env_vars()
        key = hashlib.sha256(get_cache_key(source, backend, options, env_vars=environment).encode()).hexdigest()
        name = f"{source.name[:_NAME_CHARACTERS]}.json"
        return name in (get_cache_manager(key).get_group(name) or {})


@contextmanager
def collected_launches() -> Iterator[dict[Any, CompileJob]]:
    """Collects the launches of kernels that this process has not compiled yet; they are neither compiled nor run.

    Yields:  a job for each kernel, by Triton's own key. Memory that the kernels would have written stays as it was:
             code in this context must not decide by it. Under Triton's interpreter kernels run, and nothing is
             collected.
    """
    settle_keys()
    jobs: dict[Any, CompileJob] = {}

    def keep(**event: Any) -> bool:
        found = event["compile"]
        (attributes,) = found["configs"]
        options = _as_tuples(json.loads(found["specialization_data"])["options"])
        target = driver.active.get_current_target()
        jobs[event["fn"].name, found["key"]] = CompileJob(
            event["fn"].module, event["fn"].name, found["signature"], found["constants"], attributes, options, target
        )
        return True  # which tells Triton not to compile it

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = keep
    try:
        yield jobs
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compile_ahead(jobs: list[CompileJob], num_processes: int, progress: Progress = NO_PROGRESS) -> int:
    """Compiles those jobs that Triton's cache lacks; returns how many these were.

    A kernel that cannot be compiled is left to its launch, which says why.
    """
    missing = [] if INTERPRETED else [job for job in jobs if not job.is_cached()]
    num_processes = min(num_processes, len(missing))
    if len(missing) < _FEWEST or num_processes < 2:
        return 0
    lock = Lock()

    def one_is_compiled() -> None:
        with lock:
            progress.advance(1)

    progress.begin(Stage("kernels compiled", len(missing)))
    with ThreadPoolExecutor(num_processes) as threads:
        for number in range(num_processes):
            threads.submit(_compile_elsewhere, missing[number::num_processes], one_is_compiled)
    progress.end()
    return len(missing)


def _compile_elsewhere(jobs: list[CompileJob], one_is_compiled: Callable[[], None]) -> None:
    """Compiles some jobs in a process of its own, which imports this module and nothing of the caller's.

    If the process cannot be started, or ends early, the kernels that it leaves are compiled when they are launched.
    """
    command = [sys.executable, "-c", _WORKER, *sys.path]
    with suppress(OSError), subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None, "both were asked for"
        pickle.dump(jobs, process.stdin)
        process.stdin.close()
        while process.stdout.read(1):
            one_is_compiled()


def compile_given() -> None:
    """Compiles the jobs that come, pickled, on standard input; writes a byte to standard output for each."""
    settle_keys()
    jobs: list[CompileJob] = pickle.load(sys.stdin.buffer)
    for job in jobs:
        with suppress(Exception):  # whatever it is, its launch will say
            triton.compile(job.source(), target=job.target, options=job.options)
        os.write(1, b".")


def settle_keys() -> None:
    """Gives each kernel the same key in Triton's cache in every process and run.

    Triton 3.6 makes a kernel's key from the globals of the functions that it calls, but only of those functions that
    have got their own keys already: the key depends on what the process used first. Here all get theirs in one order.
    """
    if INTERPRETED:
        return
    functions = []
    for found in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda found: found.name):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        functions += [held for held in vars(module).values() if isinstance(held, JITCallable)]
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        assert function.cache_key, "asking for it makes it"


def _as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _as_tuples(held) for name, held in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
