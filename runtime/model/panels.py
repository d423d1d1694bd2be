"""Experts in panels: copies in the form that multiplies few tokens fastest, which a thread makes behind decoding.

A panel has 16 rows side by side (runtime/cpu/native/panels.h). Experts without thresholds compute the same bits from
rows and from panels, so it changes no answer when, or whether, the thread has come to one. Prompts use the rows.
"""

import mmap
import os
import queue
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from moe_pack.runtime import cpu

_SLAB_BYTES = 64 << 20  # of memory that is asked for at once: whole huge pages
_ALIGN = 64
_NICENESS = 10  # of the thread, which gives way to the kernels'

ExpertKey = tuple[int, int]  # MoE layer, expert


class ExpertPanels:
    """The panels of experts that were asked for, in the order in which they were made. `close` ends the thread.

    Args:    most_bytes: of all panels together; what does not fit stays in rows.
    """

    def __init__(self, kernels: cpu.Kernels, most_bytes: int) -> None:
        self._kernels, self._left_bytes = kernels, most_bytes
        self._slab = np.empty(0, np.uint8)
        self._wanted: queue.Queue[tuple[ExpertKey, cpu.ExpertRows] | None] = queue.Queue()
        self._made: list[tuple[ExpertKey, cpu.Bytes]] = []  # only ever appended to
        self._asked = set[ExpertKey]()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def left_bytes(self) -> int:
        """The memory for further panels."""
        return self._left_bytes

    @property
    def num_waiting(self) -> int:
        """How many were asked for and are not made."""
        return self._wanted.unfinished_tasks

    @property
    def num_bytes(self) -> int:
        """The bytes of all panels that were made."""
        return sum(panels.nbytes for _, panels in self._made)

    def want(self, key: ExpertKey, rows: cpu.ExpertRows) -> bool:
        """Asks for an expert's panels, unless it has none; returns False if they would take more than is left."""
        if key in self._asked:
            return True
        self._asked.add(key)
        num_bytes = self._kernels.expert_panel_bytes(rows)
        if num_bytes > self._left_bytes:
            return False
        if not num_bytes:
            return True
        self._left_bytes -= num_bytes
        self._wanted.put((key, rows))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="panels", daemon=True)
            self._thread.start()
        return True

    def made_since(self, count: int) -> Sequence[tuple[ExpertKey, cpu.Bytes]]:
        """Returns the panels made after the first `count`."""
        return self._made[count:] if count < len(self._made) else ()

    def wait(self) -> None:
        """Waits until all that was asked for is made: for measurements."""
        self._wanted.join()

    def close(self) -> None:
        """Ends the thread after the expert that it is at."""
        self._left_bytes = 0
        self._is_closed = True
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        if sys.platform == "linux":  # where this is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (wanted := self._wanted.get()) is not None and not self._is_closed:
            key, rows = wanted
            try:
                panels = self._memory(self._kernels.expert_panel_bytes(rows))
                cpu.panel_expert(rows, panels)
                self._made.append((key, panels))
            except (cpu.MapCutError, MemoryError, OSError):
                pass  # the expert stays in rows; who computes with a file that was cut says so
            finally:
                self._wanted.task_done()

    def _memory(self, num_bytes: int) -> cpu.Bytes:
        """Returns new memory, on huge pages where the system has them; they are first touched by this thread."""
        needed = -(-num_bytes // _ALIGN) * _ALIGN
        if needed > len(self._slab):
            slab = mmap.mmap(-1, max(needed, _SLAB_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    slab.madvise(mmap.MADV_HUGEPAGE)
            self._slab = np.frombuffer(slab, np.uint8)
        taken, self._slab = self._slab[:num_bytes], self._slab[needed:]
        return taken
