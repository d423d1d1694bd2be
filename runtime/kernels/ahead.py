"""Kernels compiled before they are needed, by several processes into Triton's cache on disk.

Triton compiles a kernel when it is first launched, one after the other: a first start takes minutes. Here a run's
launches are collected without compiling or launching anything, what the cache lacks is compiled by a pool of processes,
and the run that follows finds all of it in the cache.
"""

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, get_cache_key, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable

from moe_pack.runtime import kernels
from moe_pack.runtime.kernels.tiles import INTERPRETED

_FEWEST = 4  # kernels: with fewer, processes take longer to start than to compile them
_NAME_CHARACTERS = 150  # of a kernel's file in the cache, as Triton cuts them

OnCompiled = Callable[[int, int], None]  # how many kernels are compiled, of how many


@dataclass(frozen=True, slots=True, eq=False)
class CompileJob:
    """A kernel with the constants and types of one launch: all that compiling it takes, in another process too.

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
    """While it is entered, kernels that this process has not compiled yet are neither compiled nor launched.

    Yields:  a job for each of them, by Triton's own key. What they would have written stays as it was: whatever runs
             meanwhile must not read it to decide. Empty under Triton's interpreter, which compiles nothing.
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


def compile_ahead(
    jobs: list[CompileJob], num_processes: int, on_compiled: OnCompiled = lambda done, total: None
) -> int:
    """Compiles those jobs that Triton's cache lacks; returns how many these were.

    A kernel that cannot be compiled is left to its launch, which says why.
    """
    missing = [] if INTERPRETED else [job for job in jobs if not job.is_cached()]
    num_processes = min(num_processes, len(missing))
    if len(missing) < _FEWEST or num_processes < 2:
        return 0
    try:
        with ProcessPoolExecutor(num_processes, get_context("spawn"), settle_keys) as processes:
            for done, _ in enumerate(as_completed([processes.submit(_compile, job) for job in missing]), 1):
                on_compiled(done, len(missing))
    except (OSError, BrokenProcessPool):  # no processes to be had, or one ended: kernels compile as they are launched
        pass
    return len(missing)


def settle_keys() -> None:
    """Gives each kernel the key in Triton's cache that it has in every other process and run.

    Triton 3.6 counts the globals of the functions that a kernel calls only where these functions had their own keys
    before: a kernel's key depends on what the process happened to use first. Here all get theirs in one order.
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


def _compile(job: CompileJob) -> None:
    triton.compile(job.source(), target=job.target, options=job.options)


def _as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _as_tuples(held) for name, held in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
