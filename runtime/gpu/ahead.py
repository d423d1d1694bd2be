"""Compiles kernels before they are needed, in several processes, into Triton's cache on disk.

Triton compiles a kernel when it is first launched, one after the other, so a first start takes minutes. Here the
launches of a run are collected without compiling or launching, processes compile the kernels that the cache lacks, and
the run that follows finds all of them in the cache.
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
from moe_pack.formats.base.commands import Stage
from moe_pack.runtime.gpu import kernels
from moe_pack.runtime.gpu.kernels.grids import INTERPRETED

_FEWEST = 4  # with fewer kernels, starting processes takes longer than compiling
_NAME_CHARACTERS = 150  # Triton cuts the name of a kernel's file in the cache to so many
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from moe_pack.runtime.gpu.ahead import compile_from_stdin; compile_from_stdin()"
)


@dataclass(frozen=True, slots=True, eq=False)
class CompileJob:
    """A kernel with the constants and types of one launch, from which another process compiles it."""

    module: str
    name: str
    signature: dict[str, Any]  # types by argument
    constants: dict[tuple[int, ...], Any]  # values by position
    attributes: dict[tuple[int, ...], Any]  # known facts of other arguments, by position
    options: dict[str, Any]
    target: GPUTarget

    def source(self) -> ASTSource:
        """Returns the kernel as Triton compiles it."""
        function = getattr(importlib.import_module(self.module), self.name)
        return ASTSource(function, self.signature, self.constants, self.attributes)

    def is_cached(self) -> bool:
        """Whether Triton's cache on disk has the compiled kernel."""
        source, backend = self.source(), make_backend(self.target)
        options = backend.parse_options(self.options)
        environment = triton.compiler.compiler.get_cache_invalidating_env_vars()
        key = hashlib.sha256(get_cache_key(source, backend, options, env_vars=environment).encode()).hexdigest()
        name = f"{source.name[:_NAME_CHARACTERS]}.json"
        return name in (get_cache_manager(key).get_group(name) or {})


@contextmanager
def collected_launches() -> Iterator[dict[Any, CompileJob]]:
    """Collects the launches of kernels that this process has not compiled yet, and neither compiles nor runs them.

    Memory that the kernels would have written stays as it was, so code in this context must not decide by it. Under
    Triton's interpreter kernels run, and nothing is collected.
    Yields:  a job for each kernel, by Triton's own key.
    """
    settle_keys()
    jobs: dict[Any, CompileJob] = {}

    def keep(**event: Any) -> bool:
        function, launch = event["fn"], event["compile"]
        (attributes,) = launch["configs"]
        jobs[function.name, launch["key"]] = CompileJob(
            module=function.module,
            name=function.name,
            signature=launch["signature"],
            constants=launch["constants"],
            attributes=attributes,
            options=_as_tuples(json.loads(launch["specialization_data"])["options"]),
            target=driver.active.get_current_target(),
        )
        return True  # Triton then does not compile the kernel

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = keep
    try:
        yield jobs
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compile_ahead(jobs: list[CompileJob], num_processes: int, progress: Progress = NO_PROGRESS) -> int:
    """Compiles the jobs that Triton's cache lacks, and returns their number; faults appear at the kernel's launch."""
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
    """Compiles some jobs in a process of its own; its end leaves the others to their launches."""
    command = [sys.executable, "-c", _WORKER, *sys.path]
    with suppress(OSError), subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        pickle.dump(jobs, process.stdin)
        process.stdin.close()
        while process.stdout.read(1):
            one_is_compiled()


def compile_from_stdin() -> None:
    """Compiles the pickled jobs on standard input, and writes a byte to standard output after each."""
    settle_keys()
    jobs: list[CompileJob] = pickle.load(sys.stdin.buffer)
    for job in jobs:
        with suppress(Exception):  # the kernel's launch raises it again
            triton.compile(job.source(), target=job.target, options=job.options)
        os.write(1, b".")


def settle_keys() -> None:
    """Gives each kernel the same key in Triton's cache in every process and run.

    Triton 3.6 makes a kernel's key from the globals of the functions that it calls, but only of functions that have
    their own keys already: the key depends on what the process used first. Here all get their keys in one order.
    """
    if INTERPRETED:
        return
    functions = []
    for name in sorted(module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")):
        module = importlib.import_module(name)
        functions += [value for value in vars(module).values() if isinstance(value, JITCallable)]
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        assert function.cache_key, "reading a key makes it"


def _as_tuples(value: Any) -> Any:
    """Returns JSON's lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _as_tuples(item) for name, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
