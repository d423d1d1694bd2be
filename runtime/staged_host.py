"""Where experts on their way to the device come from: memory that holds all of them, or the drive by way of a ring."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DISK_BLOCK_BYTES, Pack, PackError, whole_blocks
from moe_pack.runtime.device import Device, Mark
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.reads import Reads
from moe_pack.runtime.residency import Key


class HostExperts(Protocol):
    """Experts' bytes in page-locked memory of the host. `holds_all`: always there, without being asked for."""

    holds_all: bool

    def begin(self, key: Key, urgent: bool) -> None:
        """Asks for an expert's bytes; to be called where there `has_room`."""
        ...

    def has_room(self) -> bool:
        """Whether one more expert can be asked for before another is given back."""
        ...

    def promote(self, key: Key) -> None:
        """Makes what was asked for urgent."""
        ...

    def is_there(self, key: Key) -> bool:
        """Whether `extent` would not wait."""
        ...

    def extent(self, key: Key) -> Tensor:
        """The bytes of an expert that was asked for, u8 [num_bytes], once they are there; the memory stays the host's.

        Raises:  PackError if they are damaged or cannot be read.
        """
        ...

    def give_back(self, key: Key, mark: Mark | None) -> None:
        """Takes note that an expert's bytes are not needed once a mark is reached; None: not at all."""
        ...


class ArenaExperts:
    """All experts in one place: `layers[l]` u8, an extent of layer l beginning at byte `offsets[l][e]` of it.

    The memory stays the caller's, who has checked what lies in it; page-locked, if copies are to overlap.
    Args:    sizes: int64 [L, E], extents' bytes.
    """

    holds_all = True

    def __init__(
        self, layers: Sequence[Tensor], offsets: Sequence[NDArray[np.int64]], sizes: NDArray[np.int64]
    ) -> None:
        self._layers, self._offsets, self._sizes = layers, offsets, sizes

    def begin(self, key: Key, urgent: bool) -> None:
        """Nothing: all are there."""

    def has_room(self) -> bool:
        """Always."""
        return True

    def promote(self, key: Key) -> None:
        """Nothing."""

    def is_there(self, key: Key) -> bool:
        """Always."""
        return True

    def extent(self, key: Key) -> Tensor:
        """An expert's bytes where they lie."""
        begin = int(self._offsets[key.layer_idx][key.expert])
        return self._layers[key.layer_idx][begin : begin + int(self._sizes[key])]

    def give_back(self, key: Key, mark: Mark | None) -> None:
        """Nothing."""


@dataclass(slots=True)
class _Asked:
    slot: int
    ticket: int | None  # None once it is there


class DriveExperts:
    """Experts read from the pack's files into slots of a ring, each as large as the largest; whole ones alone.

    Args:    open_reads: into this memory; `close` ends them.   verify: whether experts are checked when they are first
             read.
    """

    holds_all = False

    def __init__(
        self,
        pack: Pack,
        device: Device,
        open_reads: Callable[[NDArray[np.uint8]], Reads],
        num_slots: int,
        verify: bool,
    ) -> None:
        self._pack, self._device, self._verify = pack, device, verify
        self._slot_bytes = drive_slot_bytes(pack)
        memory = device.on_host(num_slots * self._slot_bytes + DISK_BLOCK_BYTES)
        first = -memory.data_ptr() % DISK_BLOCK_BYTES  # direct reads begin on whole units
        self._memory = memory[first : first + num_slots * self._slot_bytes]
        self._free: list[tuple[int, Mark | None]] = [(slot, None) for slot in range(num_slots)]
        self._asked: dict[Key, _Asked] = {}
        self._checked = np.zeros(pack.index.size.shape, bool)
        self._reads = open_reads(self._memory.numpy())
        self._files = [self._reads.open(pack.folder / file.name) for file in pack.manifest.expert_files]

    def close(self) -> None:
        """Ends the reads."""
        self._reads.close()

    def begin(self, key: Key, urgent: bool) -> None:
        """Begins to read an expert."""
        slot, mark = self._free.pop(0)
        if mark is not None and not self._device.is_done(mark):
            self._device.synchronize(mark, "host memory is reused")
        num_bytes = whole_blocks(self._pack.layout.experts[key.layer_idx][key.expert].num_bytes)
        offset = self._pack.layout.offsets[key.layer_idx][key.expert]
        offsets, places, sizes = np.array([[offset], [slot * self._slot_bytes], [num_bytes]], np.int64)
        ticket = self._reads.submit(self._files[key.layer_idx], offsets, places, sizes, urgent)
        self._asked[key] = _Asked(slot, ticket)

    def has_room(self) -> bool:
        """Whether a slot is free, or soon is."""
        return bool(self._free)

    def promote(self, key: Key) -> None:
        """Reads an expert before all that is not needed yet."""
        ticket = self._asked[key].ticket
        if ticket is not None:
            self._reads.promote(ticket)

    def is_there(self, key: Key) -> bool:
        """Whether an expert has been read."""
        ticket = self._asked[key].ticket
        return ticket is None or self._reads.is_done(ticket)

    def extent(self, key: Key) -> Tensor:
        """An expert's bytes, once they have been read."""
        asked = self._asked[key]
        begin = asked.slot * self._slot_bytes
        held = self._memory[begin : begin + self._pack.layout.experts[key.layer_idx][key.expert].num_bytes]
        if asked.ticket is not None:
            self._reads.wait(asked.ticket)
            asked.ticket = None
            self._check(key, held)
        return held

    def give_back(self, key: Key, mark: Mark | None) -> None:
        """Frees an expert's slot; its read ends."""
        asked = self._asked.pop(key)
        if asked.ticket is not None:
            self._reads.cancel(asked.ticket)
        self._free.append((asked.slot, mark))

    def _check(self, key: Key, held: Tensor) -> None:
        if not self._verify or self._checked[key]:
            return
        if zlib.crc32(held.numpy().data) != int(self._pack.index.crc32[key]):
            place = self._pack.manifest.expert_files[key.layer_idx].name
            raise PackError(f"{place}: expert {key.expert}: CRC-32 does not match its bytes; the file is damaged")
        self._checked[key] = True


def drive_slot_bytes(pack: Pack) -> int:
    """The bytes of a slot of `DriveExperts`: of the largest expert, in whole units of reading."""
    return whole_blocks(int(pack.index.size.max()))


def arena_experts(pack: Pack, arena: HostArena) -> ArenaExperts:
    """A pack's experts in an arena, which stays the caller's."""
    layers = [arena.rows(layer_idx) for layer_idx in range(len(pack.layout.experts))]
    return ArenaExperts(layers, arena.extent_at, pack.index.size)
