"""An engine over plain memory whose work has to be in order as on a GPU: `ordered_engines` finds what is not.

`devices.Queues` runs its own code for GPUs, with streams and events that record (`ordered_work`). All work is seen: a
kernel's loads and stores (`kernel_accesses`), torch's operations, calls of the CPU's share, and the host's reads and
writes of memory that is page-locked on a GPU. Torch's operations run on the device if one of their tensors does. Those
are tensors made with `device=` or `.to(device)`, and what comes from them; page-locked are those made with
`pin_memory=`. Reads of values (`.cpu()`, `.item()`) and copies that block make the host wait, as on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_pack.runtime.gpu import cpu_share, devices
from support.kernel_accesses import Chunk, Launch, is_launching, seen_launches
from support.ordered_work import UNIT_BYTES, Access, Event, Order, OrderError, Region, Stream, Units

_Queues = devices.Queues
# Operations that take only sizes from their tensors, and those that write nothing.
_BY_SIZE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided")
_WAITING = ("nonzero", "unique", "_unique2", "masked_select")  # the size of their result is a value


class Watch:
    """Who uses which memory, while an engine's methods run."""

    def __init__(self) -> None:
        self.order = Order()
        self._known: dict[int, tuple[StorageWeakRef, Region]] = {}  # by storage
        self._depth = 0
        self._is_off = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Sees what torch does in this context, if the engine's queues are those of this order."""
        if self._depth or devices.Queues is not OrderedQueues:
            yield
            return
        with _Functions(self), _Operations(self):
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextmanager
    def off(self) -> Iterator[None]:
        """Does not look at what torch does in this context."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    @property
    def is_looking(self) -> bool:
        return self._depth > 0 and not self._is_off and not is_launching()

    def region(self, tensor: Tensor) -> Region | None:
        """Returns the memory of a tensor, if it is the device's or page-locked."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def add(self, tensor: Tensor, kind: Literal["device", "locked"]) -> Region:
        """Enters a tensor's memory, unless it is known."""
        region, storage = self.region(tensor), tensor.untyped_storage()
        if region is None:
            name = f"{'page-locked ' * (kind == 'locked')}{tensor.dtype} {list(tensor.shape)}".replace("torch.", "")
            region = Region(name, kind, storage.data_ptr(), storage.nbytes(), *self._place())
            self._known[storage._cdata] = StorageWeakRef(storage), region  # type: ignore[no-untyped-call]  # in torch
            self._look_for_freed()
        return region

    def _place(self) -> tuple[int, int]:
        return self.order.current.number, self.order.current.device.number

    @contextmanager
    def on_its_device(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Makes the device of these tensors the current one, as torch does, unless they lie on several devices."""
        regions, current = [self.region(each) for each in tensors], self.order.current
        used = {region.device for region in regions if region is not None and region.kind == "device"}
        is_other = current is current.device and len(used) == 1 and used != {current.number}
        with self.order.on(self.order.streams[used.pop()] if is_other else current):
            yield

    def launch(self, launch: Launch) -> None:
        """Records a kernel's launch, which goes to the current device."""
        if not self._depth:
            return
        regions = {region.begin: region for region in (self.add(each, "device") for each in launch.tensors)}
        _, device = self._place()
        if any(region.kind == "device" and region.device != device for region in regions.values()):
            raise OrderError(f"{launch.name} uses memory of another device than {self.order.current.device.name}")
        begins = sorted(regions)

        def accesses(chunks: Sequence[Chunk]) -> list[Access]:
            found = launch.by_region(chunks, begins)
            return [(regions[begins[number]], _units(regions[begins[number]], some)) for number, some in found.items()]

        early = accesses(launch.early) if launch.is_dependent else None
        self.order.launch(launch.name, accesses(launch.loads), accesses(launch.stores), early)
        self.order.current.ends_with_kernel = True

    def call(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Records other work on the current stream, by the tensors that it reads and writes."""
        self.order.launch(name, self.accesses(reads), self.accesses(writes))

    def use_on_host(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.order.use_on_host(name, self.accesses(reads), self.accesses(writes))

    def accesses(self, tensors: Sequence[Tensor]) -> list[Access]:
        """Returns the units that tensors lie in, as far as their memory is known."""
        with_region = [(self.region(tensor), tensor) for tensor in tensors if tensor.nbytes]
        return [(region, _units_of(region, tensor)) for region, tensor in with_region if region is not None]

    def _look_for_freed(self) -> None:
        """Forgets memory that was freed; the new memory may be the same."""
        for key, (storage, region) in list(self._known.items()):
            if storage.expired():  # type: ignore[no-untyped-call]  # untyped in torch
                del self._known[key]
                if region.kind == "device":
                    self.order.check_freed(region)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records torch's operations."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._watch.is_looking:
            self._record(func, args, kwargs or {}, found)
        return found

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        watch, name = self._watch, func._schema.name.removeprefix("aten::")
        reads, writes = list[Tensor](), list[Tensor]()
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(each for each in tree_leaves(given) if isinstance(each, Tensor))
        regions = {each: watch.region(each) for each in (*reads, *writes)}
        is_on_device = any(region is not None and region.kind == "device" for region in regions.values())
        storages = {each.untyped_storage()._cdata for each in regions}
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        new = [each for each in results if each.untyped_storage()._cdata not in storages and each.nbytes]
        if not any(region is not None for region in regions.values()) or (results and not new and not writes):
            return  # memory of the host alone, or a view
        if name in _BY_SIZE:
            reads = []
        if not is_on_device:
            watch.use_on_host(name, reads, writes)
            return
        is_of_host = any(region is None or region.kind == "locked" for region in regions.values())
        is_blocking = name == "copy_" and is_of_host and not (kwargs.get("non_blocking") or args[2:] == (True,))
        with watch.on_its_device([*regions]):
            for each in new:
                watch.add(each, "device")
            watch.call(name, reads, [*writes, *(new if name not in _EMPTY else ())])
            if not results or is_blocking or name in _WAITING:
                watch.order.host_waits()


class _Functions(TorchFunctionMode):
    """Tells the device's memory from the host's by what torch's functions are asked for."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs = self._watch, kwargs or {}
        if not watch.is_looking:
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu, Tensor.numpy, Tensor.tolist):
            return self._moved(func, args, kwargs)
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and found.nbytes and watch.region(found) is None:
            if "pin_memory" in kwargs:
                watch.add(found, "locked")
            elif kwargs.get("device") is not None:
                watch.add(found, "device")
                watch.call(func.__name__, (), [found])
                if func in (torch.tensor, torch.as_tensor):
                    watch.order.host_waits()  # until its values are there
        return found

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copies between the host and the device, where a CPU would give the same memory."""
        watch, source = self._watch, args[0]
        region, found = watch.region(source), func(*args, **kwargs)
        if func is Tensor.to:
            to = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, torch.device)]
            if not to or (region is not None and region.kind == "device"):
                return found
            with watch.off():
                found = found.clone()
            if found.nbytes:
                watch.add(found, "device")
                watch.call("to", [source], [found])
                if not kwargs.get("non_blocking"):
                    watch.order.host_waits()
            return found
        if region is None:
            return found
        if region.kind == "device":
            with watch.on_its_device([source]):
                watch.call(func.__name__, [source], ())
                watch.order.host_waits()
        watch.use_on_host(func.__name__, [source], ())
        if func is Tensor.cpu and region.kind == "device":
            with watch.off():
                return found.clone()
        return found


class OrderedQueues(_Queues):
    """Queues of a device without a GPU that run their code for GPUs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cuda"))
        self._main: Stream = devices.torch.cuda.current_stream()  # type: ignore[assignment]  # of a double
        for fork, stream in self._forks.items():
            stream.name = fork  # type: ignore[attr-defined]  # of a double
        own: list[Any] = [*self._forks.values(), self._copy]
        for each in own:
            each.device = self._main
        self._copy.name = "copies"  # type: ignore[union-attr]  # a GPU has one

    def current(self) -> AbstractContextManager[None]:
        return self._main.order.on(self._main)


class _Overlay:
    """A module of which some names are others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _units(region: Region, chunks: Sequence[Chunk]) -> Units:
    """Returns the units that a launch's operations use, each once."""
    base, found = region.begin // UNIT_BYTES, np.zeros(region.units(region.begin, region.num_bytes).stop, bool)
    for chunk in chunks:
        for offset in range(0, chunk.size, UNIT_BYTES):
            found[(chunk.addresses.astype(np.int64) + offset) // UNIT_BYTES - base] = True
    return np.flatnonzero(found)


def _units_of(region: Region, tensor: Tensor) -> Units:
    """Returns the units that a tensor lies in, each once."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    steps = [(number, step) for number, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    if sum((number - 1) * step for number, step in steps) + 1 == np.prod([number for number, _ in steps]):
        return region.units(begin, size * int(np.prod([number for number, _ in steps])))
    at = np.array([begin])
    for number, step in steps:
        at = (at[:, None] + np.arange(number) * step * size).ravel()
    at = (at[:, None] + np.arange(0, size, UNIT_BYTES)).ravel()
    return np.unique(at // UNIT_BYTES - region.begin // UNIT_BYTES)


def _watched(watch: Watch, owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        with watch.on():
            return original(*args, **options)

    patch.setattr(owner, name, watched)


def _watch_engines(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Looks on while an engine is made and runs."""
    from moe_pack.runtime.gpu.prefill import GpuWeights
    from moe_pack.runtime.gpu.token.choice import ChoosingSteps, TokenChoice
    from moe_pack.runtime.gpu.token.decoder import GpuDecoder
    from moe_pack.runtime.gpu.token.engine import GpuEngine

    make, launch, close = GpuEngine.__init__, GpuDecoder.launch, GpuEngine.close

    def make_engine(self: GpuEngine, inputs: Any, *sizes: Any) -> None:
        with watch.on():
            if inputs.host is not None:
                watch.add(inputs.host.bytes, "locked")
            if inputs.tier is not None:
                inputs.tier.run_experts = _unseen(watch, inputs.tier.run_experts)
            make(self, inputs, *sizes)

    def launch_captured(self: GpuDecoder, turn: int, num_rows: int = 1) -> None:
        with watch.on():
            if not watch.is_looking:
                launch(self, turn, num_rows)
                return
            with watch.order.captured():
                launch(self, turn, num_rows)

    def close_engine(self: GpuEngine) -> None:
        watch.order.synchronize()
        close(self)

    patch.setattr(GpuEngine, "__init__", make_engine)
    patch.setattr(GpuEngine, "close", close_engine)
    patch.setattr(GpuDecoder, "launch", launch_captured)
    for owner, name in ((GpuEngine, "tune"), (GpuWeights, "run_experts"), (GpuDecoder, "logits"),
                        (GpuDecoder, "extend"), (GpuDecoder, "append"), (GpuDecoder, "extend_each"),
                        (GpuDecoder, "verify"), (GpuDecoder, "keep"), (TokenChoice, "begin"),
                        (ChoosingSteps, "_launch"), (ChoosingSteps, "_end")):  # fmt: skip
        _watched(watch, owner, name, patch)


def _unseen(watch: Watch, run: Callable[..., Any]) -> Callable[..., Any]:
    def unseen(*args: Any, **options: Any) -> Any:
        with watch.off():
            return run(*args, **options)

    return unseen


def _watch_share(watch: Watch, share: type[cpu_share.CpuShare], patch: pytest.MonkeyPatch) -> None:
    """Records the calls of the CPU's share, which uses the memory that it exchanges with a token."""
    make, launch = share.__init__, share.launch
    exchanges: dict[int, cpu_share.Exchange] = {}

    def make_share(self: Any, *args: Any) -> None:
        exchanges[id(self)] = next(each for each in args if isinstance(each, cpu_share.Exchange))
        make(self, *args)

    def launch_share(self: Any, turn: int, layer_idx: int, num_rows: int = 1) -> None:
        for row in range(num_rows if watch.is_looking else 0):
            there = exchanges[id(self)].of_row(row)
            left = there.left[turn][layer_idx]
            reads = [there.x, there.weights, there.experts, left.a, left.counts, left.neurons]
            watch.call("the CPU's share", reads, [there.y])
        with watch.off():
            launch(self, turn, layer_idx, num_rows)

    patch.setattr(share, "__init__", make_share)
    patch.setattr(share, "launch", launch_share)


@contextmanager
def ordered_engines(patch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Makes all engines in this context raise OrderError where work has no order, and RaceError within a kernel."""
    watch = Watch()
    order = watch.order
    patch.setattr(devices, "Queues", OrderedQueues)
    patch.setattr(devices, "torch", _Overlay(torch, cuda=_Overlay(torch.cuda, **{
        "Stream": lambda device: Stream(order, "another stream"),
        "Event": lambda: Event(order),
        "current_stream": lambda: order.current,
        "stream": order.on,
    })))  # fmt: skip
    _watch_engines(watch, patch)
    for share in (cpu_share.PoolShare, cpu_share.TierShare):
        _watch_share(watch, share, patch)
    with ExitStack() as stack:
        stack.enter_context(seen_launches(watch.launch))
        yield watch
