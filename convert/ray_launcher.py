"""Ray as the launcher of parts: the machines of a Ray cluster make one profile or one pack together.

Each part is a Ray task that does the work of `--part I/N` over a folder that all machines see. Ray starts a task again
if its process or its machine dies; the new process continues from the folder. Parts make what others have left, so the
result is complete as soon as one part returns. The driver is the process of the command: it reads the checkpoint and
the text, so that all parts get the same plan and tokens, and learns the progress from the folder.
"""

import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch

from moe_pack import formats
from moe_pack.calib import profile
from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile.profiles import layer_file
from moe_pack.convert import hub, options, pipeline
from moe_pack.convert.account import Preparation
from moe_pack.formats.base import FolderLock, commands
from moe_pack.formats.base.errors import MoePackError, PartBusyError
from moe_pack.formats.base.version import VERSION
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.writer import journaled_bytes

PROCESS_BYTES = 2 << 30  # memory of a part besides the experts it works on
MAX_RETRIES = 8  # of a part whose process or machine dies
_LOCAL_STORE_BYTES = 128 << 20  # of Ray's own objects, in a cluster that we start
_CONNECT_S = 10.0  # within which the port of a head node must answer; Ray itself tries for many minutes
_PROBE_S = 300.0  # within which a machine must answer: parts have Ray's low priority, and load torch first
_LOCK_PATIENCE_S = 180.0  # a network file system keeps the lock of a machine that died, NFS for some 90 s
_LAST_PARTS_S = 20.0  # within which the other parts should end once one has returned
_KILL_S = 10.0  # within which Ray kills the parts of a process that has disconnected
_POLL_S = 0.5
_MARKER = "conversion.json-of-driver-"  # begins the name of the file by which machines recognize the folder


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Work that can be made in parts over one folder. It is sent to the machines, so it has no open files."""

    output: Path  # the absolute path of the folder
    run: Callable[[commands.Part], None]  # makes a part, and returns when the result is complete


def _make_pack(order: options.PackOrder, plan: formats.Plan, prepared: Preparation, part: commands.Part) -> None:
    with closing(Checkpoint(hub.find_checkpoint(order.source))) as checkpoint:
        pipeline.convert(
            checkpoint,
            plan,
            order.output,
            order.workers,
            prepared=prepared,
            memory_bytes=order.memory_bytes,
            part=part,
        )


def _make_profile(order: options.ProfileOrder, tokens: Tokens, num_threads: int, part: commands.Part) -> None:
    torch.set_num_threads(num_threads)  # on which the rounding of sums depends
    with closing(Checkpoint(hub.find_checkpoint(order.source))) as checkpoint:
        profile.make_profile(checkpoint, tokens, order.output, order.profile, part=part)


Order = TypeVar("Order", options.PackOrder, options.ProfileOrder)


def absolute(order: Order) -> Order:
    """Returns the order with the paths for other machines; a source on the hub keeps its name, as they have a cache."""
    source = str(Path(order.source).absolute()) if Path(order.source).exists() else order.source
    return replace(order, source=source, output=order.output.absolute())


def make_pack_on_cluster(
    order: options.PackOrder,
    plan: formats.Plan,
    prepared: Preparation,
    layout: formats.PackLayout,
    progress: formats.Progress,
) -> pipeline.ConversionResult:
    """Makes a pack on a Ray cluster."""
    order = absolute(order)
    total, done = pipeline.large_bytes(layout), journaled_bytes(order.output, layout)
    each = Resources(order.workers, order.memory_bytes + PROCESS_BYTES)
    stage = commands.Stage("packing", total, "B", done)
    job = Job(order.output, partial(_make_pack, order, plan, prepared))
    _run_on_cluster(job, order.many, each, progress, stage, lambda: (journaled_bytes(order.output, layout), ""))
    return pipeline.ConversionResult(done, written=done < total)


def make_profile_on_cluster(
    order: options.ProfileOrder, tokens: Tokens, layers: Sequence[int], progress: formats.Progress
) -> profile.Profile:
    """Makes a profile on a Ray cluster, of a model whose `layers` have experts."""
    order, num_threads = absolute(order), torch.get_num_threads()

    def done() -> tuple[int, str]:
        finished = [layer for layer in layers if (order.output / layer_file("statistics", layer)).exists()]
        return len(finished), "" if len(finished) < len(layers) else "sensitivity and predictors follow"

    stage = commands.Stage("statistics", len(layers), "layers", done()[0])
    each = Resources(num_threads, options.MEMORY_BYTES + PROCESS_BYTES)
    job = Job(order.output, partial(_make_profile, order, tokens, num_threads))
    _run_on_cluster(job, order.many, each, progress, stage, done)
    return profile.Profile(order.output)


def _run_on_cluster(
    job: Job,
    many: options.PartOptions,
    each: "Resources",
    progress: formats.Progress,
    stage: commands.Stage,
    done: Callable[[], tuple[int, str]],
) -> None:
    """Connects to the cluster that the options name, and makes all parts of a job there."""
    assert many.ray is not None, "the options name a cluster"
    with closing(Cluster(many.ray)) as cluster:
        room = cluster.num_parts(each)
        num_parts = many.num_parts or room
        cluster.check(job)
        progress.say(
            f"{num_parts} part{'' if num_parts == 1 else 's'} by Ray, {min(num_parts, room)} at once, each with {each}"
        )
        cluster.run(job, num_parts, each, progress, stage, done)


@dataclass(frozen=True, slots=True)
class Resources:
    """The CPUs and the memory of a part, by which Ray places it."""

    num_cpus: int
    memory_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_cpus} CPU{'' if self.num_cpus == 1 else 's'} and {formats.size_text(self.memory_bytes)} "
            "of memory"
        )


@dataclass(frozen=True, slots=True)
class _Node:
    """A machine of the cluster; `name` is its host."""

    node_id: str
    name: str
    num_cpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """The facts of a machine on which its parts depend."""

    sees_folder: bool
    made_with: str
    instructions: str


class Cluster:
    """A Ray cluster to which this process is connected. `close` disconnects, and ends a cluster that it started.

    Args:    address: `local` starts a cluster of this machine; `auto` is the cluster that runs on it; HOST:PORT is that
             of a head node.
    Raises:  RunError if Ray is not installed or nothing answers.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as fault:
            raise formats.RunError(
                "--ray: the package ray is not installed; run pip install 'moe-pack[ray]'"
            ) from fault
        self._ray: Any = ray
        _check_address(address)
        started = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES} if address == "local" else {}
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started)
        except (ConnectionError, ValueError, RuntimeError) as fault:
            raise formats.RunError(
                f"--ray {address}: no Ray cluster answers ({_first_line(fault)}); start one with ray start --head or "
                "use --ray local; if it has token authentication, set RAY_AUTH_MODE and RAY_AUTH_TOKEN as for ray start"
            ) from fault

    def close(self) -> None:
        """Disconnects from the cluster; may be called again."""
        self._ray.shutdown()

    def num_parts(self, each: Resources) -> int:
        """Returns the number of parts for which the cluster has room; RunError if no machine has room for one."""
        nodes = self._nodes()
        total = sum(min(n.num_cpus // each.num_cpus, n.memory_bytes // each.memory_bytes) for n in nodes)
        if not total:
            found = "; ".join(f"{node.name}: {Resources(node.num_cpus, node.memory_bytes)}" for node in nodes)
            raise formats.RunError(
                f"--ray: a part needs {each}, and no machine of the cluster has both ({found}); use fewer CPUs "
                "(--workers, for a profile OMP_NUM_THREADS) or less --memory"
            )
        return total

    def check(self, job: Job) -> None:
        """Raises RunError if a machine does not see the folder of a job, or would make other bytes."""
        try:
            job.output.mkdir(parents=True, exist_ok=True)
            for old in job.output.glob(f"{_MARKER}*.tmp"):  # of a driver that was killed
                old.unlink(missing_ok=True)
            marker = job.output / f"{_MARKER}{uuid4().hex}.tmp"
            marker.touch()
        except OSError as fault:
            raise formats.RunError(f"{job.output}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            asked = {node.name: self._ask(node, marker) for node in self._nodes()}
            probes = {name: self._answer(name, ref) for name, ref in asked.items()}
        finally:
            marker.unlink(missing_ok=True)
        if blind := [name for name, probe in probes.items() if not probe.sees_folder]:
            raise formats.RunError(
                f"{job.output}: {', '.join(blind)} does not see this folder; mount the same folder on every machine, "
                "under the same path"
            )
        for what, found in (
            ("packages", {name: probe.made_with for name, probe in probes.items()}),
            ("instructions", {name: probe.instructions for name, probe in probes.items()}),
        ):
            if len(set(found.values())) > 1:
                listed = "; ".join(f"{name}: {value}" for name, value in found.items())
                raise formats.RunError(
                    f"--ray: machines with other {what} would make other bytes ({listed}); use equal ones"
                )

    def run(
        self,
        job: Job,
        num_parts: int,
        each: Resources,
        progress: formats.Progress,
        stage: commands.Stage,
        done: Callable[[], tuple[int, str]],
    ) -> None:
        """Runs all parts of a job until the result is complete.

        If parts still run at the end, of an error for example, this disconnects from the cluster, by which Ray kills
        them. It does not cancel them: `ray.cancel` of a task that is just ending can abort this process (Ray 2.60:
        "Tried to complete task that was not pending").

        Args:    stage, done: what the progress shows, how much of it is there now, and what was made last.
        Raises:  the error of a part; RunError if all parts have died too often.
        """
        errors = self._ray.exceptions
        task = self._ray.remote(_run_part).options(
            num_cpus=each.num_cpus, memory=each.memory_bytes, max_retries=MAX_RETRIES, name=f"moe-pack {stage.name}"
        )
        running = {task.remote(job, commands.Part(index, num_parts)): index for index in range(1, num_parts + 1)}
        before = stage.done
        progress.begin(stage)
        try:
            end: float | None = None
            while running and (end is None or time.monotonic() < end):
                ended, _ = self._ray.wait(list(running), timeout=_POLL_S)
                now, what = done()
                if now > before:
                    progress.advance(now - before, what)
                    before = now
                for ref in ended:
                    index = running.pop(ref)
                    try:
                        self._ray.get(ref)
                    except errors.RayTaskError as fault:
                        if isinstance(fault.cause, MoePackError):
                            raise fault.cause from None
                        raise
                    except errors.RayError as fault:
                        if not running and end is None:
                            raise formats.RunError(
                                f"--ray: all parts died, each {MAX_RETRIES + 1} times, the last by {_first_line(fault)}"
                                "; run the same command again to continue"
                            ) from fault
                        progress.say(f"part {index} died {MAX_RETRIES + 1} times; the other parts make what it left")
                    else:
                        end = end or time.monotonic() + _LAST_PARTS_S
            progress.end()
        finally:
            if running:
                self.close()
                _wait_until_unused(job.output)

    def _nodes(self) -> list[_Node]:
        nodes = list[_Node]()
        for node in self._ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                nodes.append(_Node(node["NodeID"], name, int(has.get("CPU", 0)), int(has.get("memory", 0))))
        return nodes

    def _ask(self, node: _Node, marker: Path) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        task = self._ray.remote(_probed).options(num_cpus=0, scheduling_strategy=place, max_retries=0)
        return task.remote(marker)

    def _answer(self, name: str, ref: Any) -> _Probe:
        try:
            return self._ray.get(ref, timeout=_PROBE_S)  # type: ignore[no-any-return]  # ray.get has no types here
        except self._ray.exceptions.GetTimeoutError as fault:
            raise formats.RunError(
                f"--ray: {name} gave no answer within {_PROBE_S:.0f} s; it may be busy with other work, or load "
                "packages from a slow disk; run the same command again"
            ) from fault
        except self._ray.exceptions.RayError as fault:
            raise formats.RunError(
                f"--ray: {name} cannot run moe-pack ({_first_line(fault)}); install the same moe-pack, with the same "
                "packages, on all machines"
            ) from fault


def _run_part(job: Job, part: commands.Part) -> None:
    if not job.output.is_dir():
        raise formats.RunError(
            f"{job.output}: {platform.node()} does not see this folder; mount the same folder on every machine, under "
            "the same path"
        )
    end = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return job.run(part)
        except PartBusyError:
            if time.monotonic() > end:
                raise
            time.sleep(1.0)


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as fault:
        reason = (fault.strerror or _first_line(fault)) if isinstance(fault, OSError) else f"{port!r} is no port"
        raise formats.RunError(
            f"--ray {address}: nothing answers there ({reason}); give HOST:PORT of the head node, as ray start --head "
            "printed it, or auto on a machine of the cluster"
        ) from fault


def _wait_until_unused(folder: Path) -> None:
    """Waits until no part has locked a folder, for `_KILL_S` at most."""
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        try:
            return FolderLock(folder).close()
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # its file system has no locks, so nothing tells when parts are gone
            return


def _probed(marker: Path) -> _Probe:
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return _Probe(
        marker.exists(), f"moe-pack {VERSION}, torch {torch.__version__}, numpy {np.__version__}", instructions
    )


def _first_line(fault: BaseException) -> str:
    lines = [line for line in str(fault).splitlines() if line.strip()]
    return lines[0].strip().rstrip(".") if lines else type(fault).__name__
