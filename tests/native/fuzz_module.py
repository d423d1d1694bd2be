"""Random right and wrong arguments for the extension of runtime/cpu/native, built with sanitizers (`make fuzz`).

    fuzz_module.py EXTENSION [--seconds N] [--cases N] [--seed S]

Nothing a caller hands over may do more than raise one of a few errors. Case i is made from seed S + i alone; the cases
run in a child, whose last seed is told if it dies.
"""

import argparse
import array
import importlib.machinery
import importlib.util
import mmap
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ALLOWED = (ValueError, TypeError, BufferError, OverflowError, OSError)  # the last of descriptors that are none
BLOCK, MAX_BYTES = 64, 1 << 20
SELECTOR_ROW, RECORD = 1, 2
BF16, AFFINE, FP8, E5M2, MXFP4, TRELLIS, F16, F32 = *range(1, 7), 64, 65  # codecs
SOURCES = ([FP8, 8, 128, 32], [E5M2, 8, 0, 8], [MXFP4, 4, 32, 8])  # codec, width, group, bits of a scale
LIMITED = 5  # the first neuron function with a limit
FEW_CASES = 2000  # in which some function may not have met right arguments
MOST_IN_BLOCK = 32  # codes of a cache
TILE, PANEL_ROWS = 64, 16  # neurons, and rows of a matrix, that are in panels together
Arguments = list[Any]


class Changing:
    """A number whose conversion empties the list it came in."""

    def __init__(self, holder: list[Any]) -> None:
        self.holder = holder

    def __float__(self) -> float:
        self.holder.clear()
        return 0.5


class Cases:
    """Arguments from a seed: right ones for each function, then perhaps tampered with."""

    def __init__(self, seed: int, pools: list[object]) -> None:
        self.random = np.random.default_rng(seed)
        self.pools = pools
        self.d = BLOCK * self.number(1, 4) if self.chance(60) else self.number(1, 100)
        self.f = self.number(1, 80)
        self.may_panel = self.d % BLOCK == 0 and self.chance(30)  # experts and rows have the form that panels take
        self.tokens = int(self.random.choice([0, 1, 2, 3, 4, 9, 65]))

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def chance(self, percent: int) -> bool:
        return self.number(1, 100) <= percent

    def floats(self, *shape: int) -> Any:
        return self.random.standard_normal(shape).astype(np.float32)

    def bytes(self, *shape: int) -> Any:
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def part(self, place: int, width: int = 4) -> list[int]:
        if self.may_panel and self.d % BLOCK == 0:  # of other columns too: a matrix of a layer
            return [AFFINE, width, BLOCK, 16, 0, 0, 0, place]
        affine = self.d % BLOCK == 0 and self.chance(75)
        width, group = int(self.random.choice([1, 2, 3, 4, 8])), int(self.random.choice([0, 16, 32, 64]))
        codec = AFFINE if affine else int(self.random.choice([BF16, F16, F32]))
        if affine and self.chance(30):
            codec, width = TRELLIS, self.number(4, 8)
        if self.d % BLOCK == 0 and self.chance(30):
            return [*SOURCES[self.number(0, 2)], 0, 0, self.number(0, 1), place]
        return [codec, width, group, int(self.random.choice([8, 16])), 0, 0, self.number(0, 1), place]

    def part_bytes(self, part: list[int]) -> tuple[int, int]:
        codec, width, group, scale_bits, _, _, has_bias, _ = part
        groups = -(-self.d // group) if group else 1
        scales = 2 * groups if scale_bits == 16 else 2 + groups
        if codec == TRELLIS:
            return self.d * width // 16, scales + 4 * has_bias
        if codec in (FP8, E5M2, MXFP4):
            return self.d * width // 8, groups * scale_bits // 8 + 4 * has_bias
        if codec != AFFINE:
            return self.d * (4 if codec == F32 else 2), 4 * has_bias
        return self.d * width // 8, 2 * scales + 4 * has_bias

    def place(self, parts: list[list[int]]) -> list[int]:
        row_bytes = [0, 0, 0]
        for number, offset in ((0, 4), (1, 5)):
            for part in parts:
                part[offset] = row_bytes[part[7]]
                row_bytes[part[7]] += self.part_bytes(part)[number]
        return [each + 4 if self.may_panel and each else each for each in row_bytes]  # of a checksum: room for panels

    def expert(self) -> tuple[Any, Any, Any, Any]:
        kind = self.number(0, 3)
        if self.may_panel:
            self.f = -(-self.f // TILE) * TILE
        parts = [self.part(SELECTOR_ROW if kind in (2, 3) else RECORD)]
        parts += [self.part(SELECTOR_ROW if kind in (1, 3) else RECORD), self.part(RECORD)]
        row_bytes = self.place(parts)
        extra_bytes = 4 * self.d + self.number(0, 20) if self.chance(40) else 0
        function = self.number(0, 6)
        limit = int(np.float32(7.0).view(np.int32)) if function >= LIMITED else 0
        numbers = [self.d, self.f, kind, *row_bytes[1:], extra_bytes, function, limit]
        numbers += [number for part in parts for number in part]
        selector = self.rows_of(self.f, row_bytes[1]) if kind else None
        extra = self.rows_of(1, extra_bytes) if extra_bytes else None
        return np.array(numbers, np.int32), selector, self.rows_of(self.f, row_bytes[2]), extra

    def rows_of(self, num_rows: int, row_bytes: int) -> Any:
        return self.bytes(num_rows, row_bytes) if self.chance(60) else self.pages(num_rows, row_bytes)

    def pages(self, num_rows: int, row_bytes: int) -> Any:
        begin, page_bytes = self.number(0, 99), self.number(max(row_bytes, 2), 2 * row_bytes + 100)
        head_bytes, slots = row_bytes + self.number(0, 9), -(-(begin + num_rows * row_bytes) // page_bytes)
        slot_bytes, there = head_bytes + page_bytes + self.number(0, 9), slots + self.number(0, 2)
        order = self.random.permutation(there)[:slots].astype(np.int32)
        return self.bytes(there * slot_bytes), order, slot_bytes, head_bytes, page_bytes, begin

    def panels_of(self, layout: Any) -> Any:
        """Bytes of an expert's panels."""
        return self.bytes(int(layout[1]) * int(layout[4] + (layout[3] if layout[2] else 0)))

    def rows(self, in_panels: bool | None = None) -> tuple[Any, Any]:
        """Rows of one part; in panels: None for perhaps, if they have the form."""
        part = self.part(RECORD, int(self.random.choice([4, 8])))
        row_bytes, num_rows = self.place([part])[RECORD], self.number(0, 60)
        if in_panels is None:
            in_panels = self.may_panel and self.chance(50)
        if in_panels:
            num_rows = -(-num_rows // PANEL_ROWS) * PANEL_ROWS
        return np.array([self.d, row_bytes, in_panels, *part], np.int32), self.bytes(num_rows, row_bytes)

    def experts_arguments(self) -> Arguments:
        given: list[Any] = []
        for _ in range(self.number(0, 4)):
            self.f = self.number(1, 40)
            tokens = self.random.integers(0, max(self.tokens, 1), self.number(0, 5) if self.tokens else 0)
            expert = self.expert()
            threshold = float(self.random.normal()) if self.chance(50) else 0.0
            panels = self.panels_of(expert[0]) if self.may_panel and self.chance(50) else None
            one = [*expert, panels, threshold, tokens, self.floats(len(tokens))]
            if self.chance(40):
                neurons = self.random.integers(0, self.f, self.number(0, self.f)).astype(np.int32)
                one += [tokens, self.floats(len(tokens), self.f), self.bytes(len(tokens), self.f), neurons]
            given.append(tuple(self.tampered(one) if self.chance(10) else one))
        if given and self.chance(5):
            layout, selector, records, extra, panels, _, tokens, weights = (*given[0], *[None] * 8)[:8]
            given[0] = (layout, selector, records, extra, panels, Changing(given), tokens, weights)
        return [given, self.floats(self.tokens, self.d), self.floats(self.tokens, self.d), self.d]

    def select_arguments(self) -> Arguments:
        given: list[Any] = []
        for _ in range(self.number(0, 4)):
            self.f = self.number(1, 40)
            layout, selector, _, _ = self.expert()
            tokens = self.random.integers(0, max(self.tokens, 1), self.number(0, 5) if self.tokens else 0)
            found = [self.floats(len(tokens), self.f), self.bytes(len(tokens), self.f), np.empty(self.f, np.int32)]
            one = [layout, selector, 0.5, tokens, *found]
            given.append(tuple(self.tampered(one) if self.chance(10) else one))
        return [given, self.floats(self.tokens, self.d), self.d]

    def dense_arguments(self) -> Arguments:
        layout, rows = self.rows()
        return [layout, rows, self.floats(self.tokens, self.d), self.floats(self.tokens, len(rows))]

    def decode_arguments(self) -> Arguments:
        layout, rows = self.rows(in_panels=False)
        return [layout, rows, self.floats(len(rows), self.d)]

    def put_in_panels_arguments(self) -> Arguments:
        return list(self.rows(in_panels=False))

    def take_rows_arguments(self) -> Arguments:
        layout, rows = self.rows(in_panels=self.may_panel)
        places = self.random.integers(0, max(len(rows), 1), self.number(0, 60)).astype(np.int32)
        return [layout, rows, places, self.bytes(len(places), rows.shape[1])]

    def expert_panel_bytes_arguments(self) -> Arguments:
        return [self.expert()[0], float(self.random.choice([0.0, 1.0]))]

    def panel_expert_arguments(self) -> Arguments:
        layout, selector, records, _ = self.expert()
        return [layout, selector, records, self.panels_of(layout)]

    def checksum_arguments(self) -> Arguments:
        return [self.bytes(self.number(0, 300_000 if self.chance(5) else 500))]

    read_arguments = checksum_arguments

    def gather_arguments(self) -> Arguments:
        rows = self.bytes(self.number(1, 50), self.number(1, 200))
        places = self.random.integers(0, len(rows), self.number(0, 60)).astype(np.int32)
        return [rows, rows.shape[1], places, self.bytes(len(places), rows.shape[1])]

    def checksum_pages_arguments(self) -> Arguments:
        pages = self.pages(self.number(1, 50), self.number(1, 200))[:-1]
        return [(*pages, 0), self.number(0, len(pages[1]) * pages[4])]

    def stitch_arguments(self) -> Arguments:
        num_rows, row_bytes = self.number(0, 50), self.number(1, 200)
        return [self.pages(num_rows, row_bytes), num_rows, row_bytes]

    def damaged_row_arguments(self) -> Arguments:
        num_rows, row_bytes = self.number(1, 50), self.number(4, 200)
        wanted = self.random.integers(0, num_rows, self.number(0, 60)).astype(np.int32)
        rows = self.bytes(num_rows, row_bytes) if self.chance(50) else self.pages(num_rows, row_bytes)
        return [rows, wanted, row_bytes, self.number(0, row_bytes - 4)]

    def row_pieces_arguments(self) -> Arguments:
        begin, row_bytes, page_blocks = self.number(0, 9000), self.number(1, 9000), self.number(1, 5)
        first_block, num_rows = self.number(0, begin // 4096), self.number(1, 40)
        num_blocks = -(-(begin + num_rows * row_bytes) // 4096)
        has_block, pages = self.bytes(num_blocks) & 1, -(-(num_blocks - first_block) // page_blocks)
        neurons = np.sort(self.random.permutation(num_rows)[: self.number(0, num_rows)]).astype(np.int32)
        places = 4096 * self.random.permutation(pages).astype(np.int64)
        return [neurons, has_block, places, begin, row_bytes, first_block, page_blocks, self.number(0, 3), 8192]

    def attend_arguments(self) -> Arguments:
        kv_heads, head_dim = self.number(1, 3), self.number(1, 40)
        heads, tokens, angles = kv_heads * self.number(1, 4), self.number(0, 9), self.number(0, head_dim // 2)
        start = self.number(0, 300 if self.chance(20) else 20)
        kind, places = self.number(0, 3), start + tokens + self.number(0, 2)
        norms = [self.floats(head_dim), self.floats(head_dim)] if self.chance(50) else [None, None]
        projected = [self.floats(tokens, each * head_dim) for each in (heads, kv_heads, kv_heads)]
        turns = [self.floats(tokens, angles), self.floats(tokens, angles)]
        held: list[Any] = [self.cached(kind, kv_heads, places, head_dim) for _ in range(2)]
        held.append(self.floats(heads) if self.chance(50) else None)
        held.append(self.floats(tokens, heads * head_dim))
        numbers = [heads, kv_heads, head_dim, start, self.number(0, 9), 0.5, 1e-6, self.chance(50), kind]
        return [*projected, *norms, *turns, *held, *numbers]

    def cached(self, kind: int, heads: int, places: int, width: int) -> Any:
        if kind == 0:
            return self.floats(heads, places, width)
        blocks = -(-width // MOST_IN_BLOCK)
        block = -(-width // blocks) + -(-width // blocks) % 2
        code_bytes = blocks * (block + 2 if kind == 2 else block // 2 + 4)
        return self.bytes(heads, places, 2 * width if kind == 1 else code_bytes)

    def matrix(self, num_rows: int, num_cols: int) -> tuple[Any, Any, Any]:
        hidden, self.d = self.d, num_cols
        part = self.part(RECORD)
        row_bytes = self.place([part])[RECORD]
        self.d = hidden
        bias = self.floats(num_rows) if self.chance(30) else None
        in_panels = self.may_panel and num_cols % BLOCK == 0 and num_rows % PANEL_ROWS == 0
        numbers = np.array([num_cols, row_bytes, in_panels and self.chance(50), *part], np.int32)
        return numbers, self.bytes(num_rows, row_bytes), bias

    def activate_arguments(self) -> Arguments:
        count = self.number(0, 300)
        gate = self.floats(count) if self.chance(60) else None
        return [gate, self.floats(count), self.number(0, 6), self.float_bits(), self.floats(count)]

    def float_bits(self) -> int:
        return int(np.float32(self.random.choice([0.0, 0.5, 7.0])).view(np.int32))

    def rms_norm_arguments(self) -> Arguments:
        return [self.floats(self.tokens, self.d), self.floats(self.d), 1e-6, self.floats(self.tokens, self.d)]

    def rotate_arguments(self) -> Arguments:
        m = 2 * self.number(0, 9) + 1
        d = 64 * m << self.number(0, 3)
        return [
            self.floats(self.tokens, d),
            self.floats(d),
            self.chance(50),
            self.floats(m, m),
            self.floats(self.tokens, d),
        ]

    def route_arguments(self) -> Arguments:
        groups = self.number(1, 4)
        experts, tokens = groups * self.number(1, 9), self.number(0, 5)
        chosen = self.number(1, experts)
        found = [np.zeros((tokens, chosen), np.int64), self.floats(tokens, chosen)]
        bias = self.floats(experts) if self.chance(50) else None
        numbers = [self.number(0, 3), experts, chosen, groups, self.number(1, groups)]
        return [self.floats(tokens, experts), bias, *found, *numbers, 0.0, 1.0, 0.1]

    def search_trellis_arguments(self) -> Arguments:
        steps, rows = self.number(1, 75), self.number(0, 4)
        kept, pieces = self.number(0, steps), [self.floats(rows, 2 * steps) for _ in range(3)]
        factor = self.floats(2 * steps, 2 * steps) if self.chance(50) else None
        first = int(self.random.choice([1, 2, 4]))
        second = 2 * first if first < 4 and self.chance(50) else first
        tables = [self.bytes(3, 16), self.floats(first, 16), self.floats(second, 16)]
        found = [self.bytes(rows, kept), self.floats(rows, 2 * kept), self.bytes(rows)]
        limit = [None, "portable", "avx2", "avx512"][self.number(0, 3)]
        return [limit, steps, kept, *pieces, self.floats(2 * steps), factor, *tables, self.bytes(rows), *found]

    def open_pool_arguments(self) -> Arguments:
        return [self.number(1, 3), [None, "portable", "neon", "avx2", "avx512", "avx512vbmi"][self.number(0, 5)]]

    def instruction_set_arguments(self) -> Arguments:
        return []

    def tampered(self, arguments: Arguments) -> Arguments:
        changed = list(arguments)
        if not changed or self.chance(5):
            return [*changed, None]
        i = self.number(0, len(changed) - 1)
        if self.chance(5):
            del changed[i]
        elif self.chance(10):
            changed[i] = changed[self.number(0, len(changed) - 1)]  # one memory read and written
        else:
            changed[i] = self.other(changed[i])
        return changed

    def other(self, value: Any) -> Any:
        junk = [None, -1, 0, 1, 2**31, 2**63, 2**64, float("nan"), float("inf"), "avx2", b"", object(), [], {}, (1, 2)]
        if isinstance(value, np.ndarray) and self.chance(80):
            return self.other_array(value)
        if isinstance(value, tuple) and self.chance(80):
            return tuple(self.tampered(list(value)))
        if isinstance(value, list) and value and self.chance(80):
            return [*value, junk[self.number(0, len(junk) - 1)]]
        if isinstance(value, int | float) and self.chance(60):
            return [value + 1, -value, 2 * value, int(np.iinfo(np.int64).max), int(np.iinfo(np.int32).min)][
                self.number(0, 4)
            ]
        return junk[self.number(0, len(junk) - 1)]

    def other_array(self, given: Any) -> Any:
        flat = np.ascontiguousarray(given).reshape(-1)
        readonly = flat.copy()
        readonly.flags.writeable = False
        values = flat.copy()
        if len(values):  # numbers of a layout, tokens, neurons, places; of others it changes only the result
            at = self.number(0, len(values) - 1)
            odd = [0, 1, 2, 3, 63, 64, 65, 2**20, 2**20 + 1, 2**24, 2**31 - 1, -1, -(2**31)]
            wide = np.array([odd[self.number(0, len(odd) - 1)]], np.int64)
            values[at : at + 1] = wide.astype(values.dtype)
        choices: list[Any] = [
            values, values, values, flat[:-1], flat[1:], np.append(flat, flat[:1]), flat[::2], flat[::-1],
        ]  # fmt: skip
        choices += [readonly, flat.tobytes(), bytearray(flat), flat.data, array.array("i", range(8)), flat[:0]]
        choices += [
            flat.astype(np.float64),
            flat.view(np.uint8)[1:],
            np.zeros((0, 3), flat.dtype),
            np.array(1, flat.dtype),
        ]
        return choices[self.number(0, len(choices) - 1)]


def scribble(over: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        over[:] = 2**31 - 1
        over[:] = 0


def call_while_scribbled(module: ModuleType, cases: Cases) -> None:
    """Indices change under a call from another thread: what was checked is what is used."""
    rows, places = cases.bytes(100, 3000), np.zeros(500, np.int32)
    out, stop = np.empty((500, 3000), np.uint8), threading.Event()
    other = threading.Thread(target=scribble, args=(places, stop))
    other.start()
    for _ in range(20):
        attempt(lambda: module.gather(cases.pools[0], rows, 3000, places, out))
    stop.set()
    other.join()


def call_reader(module: ModuleType, cases: Cases) -> bool:
    """Opens a reader, asks for pieces of a file and ends that in some way; any of the calls with wrong arguments."""

    def call(name: str, *right: Any) -> Any:
        arguments = cases.tampered(list(right)) if cases.chance(15) else list(right)
        found: list[Any] = [None]
        attempt(lambda: found.insert(0, getattr(module, name)(*arguments)))
        return found[0]

    memory, pieces = cases.bytes(cases.number(1, 20_000)), cases.number(0, 9)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(cases.number(1, 20_000)))
        file.flush()
        reader = call("open_reader", memory, cases.number(1, 4), cases.chance(5), 4096 * cases.number(1, 3))
        opened = call("add_file", reader, file.fileno())
    if reader is None or opened is None:
        return False
    numbers = [cases.random.integers(0, most, pieces) for most in (opened[1], len(memory))]
    sizes = np.minimum(len(memory) - numbers[1], cases.random.integers(1, 5000, pieces))
    for _ in range(cases.number(1, 4)):
        ticket = call("submit_reads", reader, opened[0], *numbers, sizes, cases.chance(50))
        for name in ("are_read", "promote_reads", "read_stats", "wait_reads", "cancel_reads"):
            if cases.chance(50):
                call(name, *([reader] if name == "read_stats" else [reader, ticket]))
    if cases.chance(50):
        call("close_reader", reader)
        call("submit_reads", reader, opened[0], *numbers, sizes, True)
    return ticket is not None


class Layer:
    """A layer of a decoder, what a call of it gets, and which experts are set."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases
        self.kv_heads, self.head_dim, self.window = cases.number(1, 3), cases.number(1, 40), cases.number(0, 20)
        self.heads, self.num_experts = self.kv_heads * cases.number(1, 3), cases.number(1, 5)
        self.chosen = cases.number(1, self.num_experts)
        self.routes = cases.chance(75)
        self.has_unrouted = not self.routes or cases.chance(50)

    def arguments(self) -> Arguments:
        cases, d, per_head = self.cases, self.cases.d, self.cases.chance(70)
        sizes = [self.heads, self.kv_heads, self.head_dim, self.window, 0]
        flags = [cases.chance(50), not per_head, cases.number(0, 6), cases.float_bits(), cases.number(0, 5)]
        numbers = np.array([d, *sizes, *flags, self.num_experts, self.chosen, 1, 1], np.int32)
        norms: list[Any] = [None, None]
        if cases.chance(50):
            widths = (self.head_dim if per_head else each * self.head_dim for each in (self.heads, self.kv_heads))
            norms = [cases.floats(width) for width in widths]
        odd = d // (d & -d)
        is_rotated = d % BLOCK == 0 and cases.chance(40)
        rotation = [cases.floats(d), cases.floats(d), cases.floats(odd, odd)] if is_rotated else [None] * 3
        sinks = cases.floats(self.heads) if cases.chance(30) else None
        vectors = (cases.floats(d), cases.floats(d), *norms, sinks, None, *rotation)
        floats = np.array([0.5, 1e-5, 1, -1, 1, 0.1], np.float32)
        return [numbers, floats, vectors, self._matrices()]

    def _matrices(self) -> tuple[Any, ...]:
        cases, d, f = self.cases, self.cases.d, self.cases.number(1, 70)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made: list[Any] = [cases.matrix(rows, d) for rows in (width, kv_width, kv_width)]
        made += [cases.matrix(d, width), cases.matrix(self.num_experts, d) if self.routes else None]
        gate = cases.matrix(f, d) if cases.chance(60) else None
        return (*made, *([cases.matrix(f, d), gate, cases.matrix(d, f)] if self.has_unrouted else [None] * 3))

    def arrays(self, tokens: int, *, of_all: bool) -> Arguments:
        cases, d = self.cases, self.cases.d
        unrouted = cases.floats(tokens, d) if self.has_unrouted or of_all else None
        if unrouted is None and cases.chance(50):
            unrouted = np.empty(0, np.float32)  # nothing, but somewhere
        chosen = (tokens, self.chosen if self.routes else 0)
        experts = cases.random.integers(0, self.num_experts, chosen)
        return [cases.floats(tokens, d), cases.floats(tokens, d), unrouted, experts, cases.floats(*chosen)]

    def step(self, sequences: int, tokens: int) -> Arguments:
        cases, caches = self.cases, list[Any]()
        angles = (sequences * tokens, cases.number(0, self.head_dim // 2))
        for _ in range(sequences):
            start, kind = cases.number(0, 40), cases.number(0, 3)
            places = start + tokens + cases.number(0, 2)
            keys, values = (cases.cached(kind, self.kv_heads, places, self.head_dim) for _ in range(2))
            caches.append((keys, values, start, kind))
        return [cases.floats(*angles), cases.floats(*angles), caches]


def call_layers(module: ModuleType, cases: Cases) -> bool:
    """Opens layers of a decoder, sets what they compute with and calls them."""
    pool, handle = cases.pools[cases.number(0, len(cases.pools) - 1)], module.open_layers(1)
    layer = Layer(cases)

    def call(name: str, percent: int, *right: Any) -> bool:
        arguments = cases.tampered(list(right)) if cases.chance(percent) else list(right)
        return attempt(lambda: getattr(module, name)(*arguments))

    if not call("set_layer", 20, handle, 0, *layer.arguments()):
        return False
    for expert in range(layer.num_experts if layer.routes else 0):
        cases.f = cases.number(1, 30)
        layout, selector, records, extra = cases.expert()
        while any(isinstance(rows, tuple) for rows in (selector, records, extra)):  # in pages
            layout, selector, records, extra = cases.expert()
        if cases.chance(95):
            threshold = 0.5 if cases.chance(50) else 0.0
            call("set_layer_expert", 5, handle, 0, expert, layout, selector, records, extra, threshold)
            if cases.may_panel and cases.chance(70):
                call("set_layer_panels", 10, handle, 0, expert, cases.panels_of(layout))
    accepted = False
    for _ in range(3):
        sequences, tokens = cases.number(1, 3), int(cases.random.choice([1, 1, 2, 4]))
        own = layer.arrays(sequences * tokens, of_all=False)
        accepted |= call("begin_layer", 30, pool, handle, 0, *own, *layer.step(sequences, tokens))
        accepted |= call("end_layer", 30, pool, handle, 0, *own)
        own = layer.arrays(sequences * tokens, of_all=True)
        accepted |= call("run_layers", 30, pool, handle, 0, *own, [tuple(layer.step(sequences, tokens))])
    return accepted


def call_share(module: ModuleType, cases: Cases) -> bool:
    """Opens a share of the host and runs its layers, with any numbers in what a GPU writes."""
    k, num_layers, f = cases.number(1, 3), cases.number(1, 3), TILE if cases.may_panel else cases.number(1, 60)
    t, places = cases.number(1, 2), num_layers * cases.number(1, 2)
    num_experts, given = cases.random.integers(1, 4, num_layers).astype(np.int32), list[Any]()
    for _ in range(num_experts.sum()):
        cases.f = cases.number(1, f)
        layout, selector, records, _ = cases.expert()
        while isinstance(selector, tuple) or isinstance(records, tuple):  # in pages
            layout, selector, records, _ = cases.expert()
        one = [layout, selector, records, float(cases.random.normal())]
        given.append(tuple(cases.tampered(one) if cases.chance(3) else one))
    asked = [cases.random.integers(-2, 5, shape).astype(np.int32) for shape in ((t, k), (t * places, k))]
    lists = np.sort(cases.random.integers(0, 2 * f, (t * places, k, f)).astype(np.int32), axis=-1)
    x, y = (cases.floats(t, cases.d) for _ in range(2))
    arguments = [cases.pools[0], given, num_experts, t, x, cases.floats(t, k), *asked, lists, cases.floats(t, k, f), y]
    if cases.chance(40):
        arguments = cases.tampered(arguments)
    found: list[Any] = []
    if not attempt(lambda: found.append(module.open_share(*arguments))):
        return False
    for name in ("run_share", "share_counts", "take_share_fault", "run_share"):
        right = [*found, *([cases.number(0, t * places - 1)] if name == "run_share" else [])]
        call = right if cases.chance(70) else cases.tampered(right)
        attempt(lambda name=name, call=call: getattr(module, name)(*call))  # type: ignore[misc]  # bound at once
    return True


def call_calls(module: ModuleType, cases: Cases) -> bool:
    """Opens a GPU's calls with any number in the flag, closes them, and asks for the next."""
    t, num_places, k = cases.number(1, 2), cases.number(1, 3), cases.number(1, 3)
    counts = cases.random.integers(-1, 2, (t * num_places, k)).astype(np.int32)
    flag = np.array([cases.number(-2, t * num_places + 2)], np.int32)
    arguments: list[Any] = [flag, counts, cases.floats(t, cases.d), t, k, cases.number(0, 5)]
    if cases.chance(40):
        arguments = cases.tampered(arguments)
    found: list[Any] = []
    if not attempt(lambda: found.append(module.open_calls(*arguments))):
        return False
    module.close_calls(*found)  # after which nothing waits
    attempt(lambda: module.serve_calls(*found, *found))
    for name in ("next_call", "take_call_fault", "close_calls"):
        call = found if cases.chance(70) else cases.tampered(found)
        attempt(lambda name=name, call=call: getattr(module, name)(*call))  # type: ignore[misc]  # bound at once
    return True


def attempt(call: Callable[[], object]) -> bool:
    try:
        call()
    except ALLOWED:
        return False
    return True


def run_case(module: ModuleType, seed: int, pools: list[object]) -> tuple[str, bool]:
    cases = Cases(seed, pools)
    digits, are_tokens_alone = cases.number(0, 2), cases.chance(10)
    for pool in pools:
        module.take_digits(pool, digits)
        module.take_tokens_alone(pool, are_tokens_alone)
    if cases.chance(1) and cases.chance(20):
        call_while_scribbled(module, cases)
    if cases.chance(10):
        return "reader", call_reader(module, cases)
    if cases.chance(8):
        return "share", call_share(module, cases)
    if cases.chance(3):
        return "calls", call_calls(module, cases)
    if cases.chance(15):
        return "layers", call_layers(module, cases)
    names = [name.removesuffix("_arguments") for name in dir(Cases) if name.endswith("_arguments")]
    name = names[cases.number(0, len(names) - 1)]
    arguments = getattr(cases, f"{name}_arguments")()
    if name not in ("open_pool", "stitch", "search_trellis", "row_pieces", "panel_expert"):
        arguments = [pools[cases.number(0, len(pools) - 1)], *arguments]
    for _ in range(cases.number(0, 2)):
        arguments = cases.tampered(arguments)
    return name, attempt(lambda: getattr(module, name)(*arguments))


def load(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_native", path)
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run_cases(arguments: argparse.Namespace, last_seed: mmap.mmap) -> None:
    module = load(arguments.extension)
    pools = [module.open_pool(threads, name) for threads in (1, 3) for name in ("portable", "avx2", None)]
    cases = 0
    accepted: Counter[str] = Counter()
    end = time.monotonic() + arguments.seconds
    while cases < arguments.cases or time.monotonic() < end:
        last_seed[:8] = struct.pack("<q", arguments.seed + cases)
        name, is_accepted = run_case(module, arguments.seed + cases, pools)
        accepted[name] += is_accepted
        cases += 1
    sys.stdout.write(f"fuzz_module: {cases} calls from seed {arguments.seed} on\n    {accepted.total()} accepted\n")
    # Right arguments that are always refused would try nothing: a layout may have got another form.
    never = [name for name, count in accepted.items() if count == 0]
    assert cases < FEW_CASES or not never, f"no call is right: {never}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("extension")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--last-seed", help="a file for the seed of the case that runs: this is the child")
    arguments = parser.parse_args()
    if arguments.last_seed is not None:
        with Path(arguments.last_seed).open("r+b") as file, mmap.mmap(file.fileno(), 8) as last_seed:
            run_cases(arguments, last_seed)
        return 0
    with tempfile.NamedTemporaryFile() as seeds:
        seeds.write(struct.pack("<q", arguments.seed))
        seeds.flush()
        rest = ["--seconds", str(arguments.seconds), "--cases", str(arguments.cases), "--seed", str(arguments.seed)]
        child = subprocess.run([sys.executable, __file__, arguments.extension, *rest, "--last-seed", seeds.name])
        if child.returncode != 0:
            (seed,) = struct.unpack("<q", Path(seeds.name).read_bytes())
            sys.stderr.write(f"fuzz_module: failed ({child.returncode}); repeat it with --seed {seed} --cases 1\n")
        return min(abs(child.returncode), 1)


if __name__ == "__main__":
    sys.exit(main())
