"""The memory that a Triton kernel loads and stores, seen under the interpreter, and races between its threads.

The interpreter runs a kernel's programs one after the other, each in one thread. On a GPU, programs run at the same
time, and each is many threads. So these are errors, which raise `RaceError`:

- A program loads what it has stored, without `tl.debug_barrier` in between: another thread may have stored it. This is
  so if the same thread does both, too, because nothing in a kernel says which thread stores what.
- It stores other values to the same place, without a barrier in between, or in one store.
- A program loads what another one stores, or both store different values, unless an atomic operation orders them: the
  one stores, has a barrier, and releases; the other acquires at the same address, and then loads.
- In a launch that may start before the end of the one before it (`kernels.grids`), a program stores before it
  waits for earlier launches, or does not wait. What it loads before that is noted (`Launch.early`).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]


class RaceError(AssertionError):
    """Two threads of a kernel use the same memory, and nothing says which comes first."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one operation of a program loads or stores."""

    number: int  # of the launch's loads or stores
    addresses: Array  # uint64 [n]
    size: int  # bytes of each
    program: int
    values: Array | None  # of a store, as integers
    acquired: dict[int, int] | None  # by program, how many of the launch's stores come before; None: of no program


@dataclass(slots=True, eq=False)
class Launch:
    """A kernel's launch: what it has loaded and stored until now."""

    name: str
    tensors: list[Tensor]
    is_dependent: bool  # it may start before the end of the one before it
    early: list[Chunk] = field(default_factory=list)  # loads before a wait for earlier launches
    waited: set[int] = field(default_factory=set)  # programs that have waited for earlier launches
    loads: list[Chunk] = field(default_factory=list)
    stores: list[Chunk] = field(default_factory=list)
    num_programs: int = 0
    race: str | None = None  # the first that was found
    _program: int = -1
    _recent: list[Chunk] = field(default_factory=list)  # the program's stores since its last barrier
    _num_ordered: int = 0  # of the launch's stores, before the program's last barrier
    _acquired: dict[int, int] | None = None
    _released: dict[int, dict[int, int]] = field(default_factory=dict)  # by address

    def load(self, program: int, pointers: Array, mask: Array, size: int) -> None:
        addresses = _of(pointers, mask)
        if not len(addresses):
            return
        self._begin(program)
        chunk = Chunk(len(self.loads), addresses, size, program, None, self._acquired)
        self.loads.append(chunk)
        if self.is_dependent and program not in self.waited:
            self.early.append(chunk)
        for stored in self._recent:
            if _overlap(chunk, stored) is not None:
                self._found_at("loads what it has stored, without a barrier in between", chunk)

    def store(self, program: int, pointers: Array, values: Array, mask: Array, size: int) -> None:
        addresses = _of(pointers, mask)
        if not len(addresses):
            return
        self._begin(program)
        if self.is_dependent and program not in self.waited:
            self._found(f"stores before it waits for earlier launches, at {self.place(int(addresses[0]))}", program)
        bits = np.ascontiguousarray(_of(np.broadcast_to(values, pointers.shape), mask)).view(f"u{values.itemsize}")
        chunk = Chunk(len(self.stores), addresses, size, program, bits, self._acquired)
        if _differs_from_itself(chunk):
            self._found_at("stores different values to one place", chunk)
        for stored in self._recent:
            both = _overlap(chunk, stored)
            if both is not None and not _same_values(chunk, stored):
                self._found_at("stores other values than before, without a barrier in between", chunk)
        self.stores.append(chunk)
        self._recent.append(chunk)

    def barrier(self, program: int) -> None:
        self._begin(program)
        self._recent.clear()
        self._num_ordered = len(self.stores)

    def atomic(self, program: int, pointers: Array, mask: Array, size: int, acquires: bool, releases: bool) -> None:
        addresses = _of(pointers, mask)
        self._begin(program)
        if self.is_dependent and program not in self.waited:
            self._found("has an atomic operation before it waits for earlier launches", program)
        for address in addresses.tolist():
            before = self._released.setdefault(address, {})
            if acquires:
                self._acquired = {**(self._acquired or {}), **before}
            if releases:
                before |= {**(self._acquired or {}), program: self._num_ordered}

    def check(self, num_programs: int) -> None:
        """Raises RaceError if threads of one program, or two programs, race, or one of all programs does not wait."""
        if self.is_dependent and len(self.waited) < num_programs:
            self._found("does not wait for earlier launches", min(set(range(num_programs)) - self.waited))
        if self.race is None and self.num_programs > 1:
            self._check_programs()
        if self.race is not None:
            raise RaceError(f"{self.name}: {self.race}")

    def by_region(self, chunks: Sequence[Chunk], begins: Sequence[int]) -> dict[int, list[Chunk]]:
        """Returns chunks by the number of the region that they lie in; regions begin at rising addresses."""
        found: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            found.setdefault(bisect_right(begins, int(chunk.addresses[0])) - 1, []).append(chunk)
        return found

    def _begin(self, program: int) -> None:
        if program != self._program:
            self._program, self._num_ordered, self._acquired = program, 0, None
            self._recent.clear()
            self.num_programs += 1

    def _found_at(self, race: str, chunk: Chunk) -> None:
        self._found(f"{race}, at {self.place(int(chunk.addresses[0]))}", chunk.program)

    def _found(self, race: str, program: int) -> None:
        if self.race is None:
            self.race = f"program {program} {race}"

    def place(self, address: int) -> str:
        """Returns the tensor that an address lies in, in words."""
        for tensor in self.tensors:
            if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes:
                return f"byte {address - tensor.data_ptr()} of {tensor.dtype} {list(tensor.shape)}"
        return hex(address)

    def _check_programs(self) -> None:
        begins = sorted({tensor.untyped_storage().data_ptr() for tensor in self.tensors})
        loads, stores = self.by_region(self.loads, begins), self.by_region(self.stores, begins)
        for region, stored in stores.items():
            unit = min(chunk.size for chunk in [*stored, *loads.get(region, ())])
            first = min(int(chunk.addresses.min()) for chunk in stored)
            last = max(int(chunk.addresses.max()) + chunk.size for chunk in stored)
            owners = _Owners(first, last, unit)
            owners.add(chunk for chunk in stored if chunk.acquired is None)
            owners.check(self, [chunk for chunk in stored if chunk.acquired is None], "stores other values than")
            loaded = loads.get(region, [])
            owners.check(self, [chunk for chunk in loaded if chunk.acquired is None], "loads what is stored by")
            for chunk in loaded:
                if chunk.acquired is not None:
                    known = chunk.acquired
                    rest = _Owners(first, last, unit)
                    rest.add(other for other in stored if other.number >= known.get(other.program, 0))
                    rest.check(self, [chunk], "loads what is stored by")


class _Owners:
    """The program that stores each unit of some memory, and its value."""

    def __init__(self, first: int, last: int, unit: int) -> None:
        self._first, self._unit = first, unit
        self._program = np.full((last - first) // unit + 1, -1, np.int32)
        self._value = np.zeros(len(self._program), np.uint64)

    def add(self, chunks: Iterator[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.values is not None, "it is a store"
            units = self._units(chunk)
            self._program[units] = chunk.program
            self._value[units] = np.repeat(chunk.values, chunk.size // self._unit)

    def check(self, launch: Launch, chunks: Sequence[Chunk], relation: str) -> None:
        """Finds a unit that another program stores, and if these are stores, with another value."""
        for chunk in chunks:
            units = self._units(chunk)
            is_near = (units >= 0) & (units < len(self._program))
            near = units[is_near]
            owner = self._program[near]
            is_other = (owner >= 0) & (owner != chunk.program)
            if chunk.values is not None and is_other.any():
                is_other &= self._value[near] != np.repeat(chunk.values, chunk.size // self._unit)[is_near]
            elif is_other.any():  # what a program has stored itself, with the same values, it may load
                stored = [_bytes_of(each)[:: self._unit] for each in launch.stores if each.program == chunk.program]
                own = np.concatenate([np.zeros(0, np.int64), *stored]).astype(np.int64)
                is_other &= ~np.isin(near, (own - self._first) // self._unit)
            if is_other.any():
                at = int(np.flatnonzero(is_other)[0])
                address = self._first + int(near[at]) * self._unit
                launch.race = f"program {chunk.program} {relation} program {int(owner[at])}, at {launch.place(address)}"
                return

    def _units(self, chunk: Chunk) -> Array:
        units = (chunk.addresses.astype(np.int64) - self._first) // self._unit
        steps = chunk.size // self._unit
        return units if steps <= 1 else (units[:, None] + np.arange(steps)).ravel()


def _of(values: Array, mask: Array) -> Array:
    mask = mask.astype(bool)  # a mask may be of 0 and 1
    return values.ravel() if mask.all() else values[np.broadcast_to(mask, values.shape)]


def _overlap(some: Chunk, others: Chunk) -> Array | None:
    """Returns which addresses of a chunk another one has, None if none."""
    first, last = others.addresses.min(), others.addresses.max()
    if some.addresses.max() + some.size <= first or last + others.size <= some.addresses.min():
        return None
    found = np.isin(_bytes_of(some), _bytes_of(others))
    return found if found.any() else None


def _bytes_of(chunk: Chunk) -> Array:
    return (chunk.addresses[:, None] + np.arange(chunk.size, dtype=np.uint64)).ravel()


def _same_values(some: Chunk, others: Chunk) -> bool:
    """Whether two stores write the same values where they overlap."""
    assert some.values is not None and others.values is not None, "both are stores"
    if some.size != others.size:
        return False
    order = np.argsort(others.addresses)
    sorted_ = others.addresses[order]
    places = np.minimum(np.searchsorted(sorted_, some.addresses), len(sorted_) - 1)
    is_both = sorted_[places] == some.addresses
    return bool(is_both.any()) and np.array_equal(others.values[order][places][is_both], some.values[is_both])


def _differs_from_itself(chunk: Chunk) -> bool:
    if len(chunk.addresses) < 2 or bool((chunk.addresses[1:] > chunk.addresses[:-1]).all()):
        return False
    assert chunk.values is not None, "it is a store"
    order = np.argsort(chunk.addresses, kind="stable")
    addresses, values = chunk.addresses[order], chunk.values[order]
    return bool(((addresses[1:] == addresses[:-1]) & (values[1:] != values[:-1])).any())


Launched: TypeAlias = Callable[[Launch], None]
_launched: Launched | None = None  # gets each launch that was seen; None: none are
_launch: Launch | None = None  # that runs


@contextmanager
def seen_launches(launched: Launched) -> Iterator[None]:
    """Checks all launches in this context for races, and hands them over after they have run."""
    global _launched
    _install()
    before, _launched = _launched, launched
    try:
        yield
    finally:
        _launched = before


def is_launching() -> bool:
    """Whether a kernel runs: what torch is asked for then is the interpreter's own work."""
    return _launch is not None


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.nbytes:
                yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


_is_installed = False


def _install() -> None:
    """Replaces the interpreter's operations on memory, once for the process."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    from moe_pack.runtime.gpu.kernels import grids

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, barrier = builder.create_masked_load, builder.create_masked_store, builder.create_barrier
    rmw, cas, run = builder.create_atomic_rmw, builder.create_atomic_cas, executor.__call__
    size_of, call = interpreter._get_np_dtype, interpreter.InterpretedFunction.__call__
    acquiring = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
    releasing = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)

    def program(self: Any) -> int:
        (x, y, z), (_, num_y, num_z) = self.grid_idx, self.grid_dim
        return int((x * num_y + y) * num_z + z)

    def see_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        if _launch is not None:
            _launch.load(program(self), ptrs.data, mask.data, size_of(ptrs.get_element_ty()).itemsize)
        return load(self, ptrs, mask, *others)

    def see_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        if _launch is not None:
            _launch.store(program(self), ptrs.data, value.data, mask.data, size_of(ptrs.get_element_ty()).itemsize)
        return store(self, ptrs, value, mask, *others)

    def see_barrier(self: Any) -> Any:
        if _launch is not None:
            _launch.barrier(program(self))
        return barrier(self)

    def see_atomic(self: Any, ptr: Any, mask: Any, sem: Any, scope: Any) -> None:
        if _launch is not None:
            size, is_wide = size_of(ptr.get_element_ty()).itemsize, scope != ir.MEM_SYNC_SCOPE.CTA
            _launch.atomic(
                program(self), ptr.data, mask, size, is_wide and sem in acquiring, is_wide and sem in releasing
            )

    def see_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        see_atomic(self, ptr, mask.data, sem, scope)
        return rmw(self, op, ptr, value, mask, sem, scope)

    def see_cas(self: Any, ptr: Any, compared: Any, value: Any, sem: Any, scope: Any) -> Any:
        see_atomic(self, ptr, np.ones_like(ptr.data, bool), sem, scope)
        return cas(self, ptr, compared, value, sem, scope)

    def see_run(self: Any, *args: Any, **options: Any) -> None:
        global _launch
        launched = _launched
        if launched is None:
            run(self, *args, **options)
            return
        tensors, is_dependent = list(_tensors([*args, *options.values()])), bool(options.get("launch_pdl"))
        launch = _launch = Launch(self.fn.__name__, tensors, is_dependent)
        try:
            run(self, *args, **options)
        finally:
            _launch = None
        launch.check(math.prod(interpreter.interpreter_builder.grid_dim))
        launched(launch)

    def see_call(self: Any, *args: Any, **options: Any) -> Any:
        if _launch is not None and self.fn is grids.wait_for_earlier.fn:
            _launch.waited.add(program(interpreter.interpreter_builder))
        return call(self, *args, **options)

    builder.create_masked_load, builder.create_masked_store, builder.create_barrier = see_load, see_store, see_barrier
    builder.create_atomic_rmw, builder.create_atomic_cas, executor.__call__ = see_rmw, see_cas, see_run
    interpreter.InterpretedFunction.__call__ = see_call
