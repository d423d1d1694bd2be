"""What the native kernels refuse: sizes, layouts and places that do not fit each other, before a byte is touched."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.native import kernels_limited_to, select
from support.random_experts import FOUR_BIT, Shape, random_expert, random_rows

from moe_pack.formats import BF16, RunError
from moe_pack.runtime.cpu import Kernels, row_numbers
from moe_pack.runtime.cpu.kernels import InstructionSet

native: Any = pytest.importorskip(
    "moe_pack.runtime.cpu._native", reason="native kernels were not built: no C++ compiler"
)

Arguments = dict[str, Any]
Change = Callable[[Arguments], object]
T, D, F = 3, 128, 5
HEADS, KV_HEADS, HEAD_DIM, ANGLES, CONTEXT = 4, 2, 20, 7, 11
REFUSED = (ValueError, BufferError, TypeError)
EXPERT, ROWS = random_expert(Shape(F, D)), random_rows(FOUR_BIT, F, D)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def numbers(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def legal_attention() -> Arguments:
    return {
        "q": floats(T, HEADS * HEAD_DIM), "k": floats(T, KV_HEADS * HEAD_DIM), "v": floats(T, KV_HEADS * HEAD_DIM),
        "q_norm": floats(HEAD_DIM), "k_norm": floats(HEAD_DIM), "cosines": floats(T, ANGLES),
        "sines": floats(T, ANGLES), "keys": floats(KV_HEADS, CONTEXT, HEAD_DIM),
        "values": floats(KV_HEADS, CONTEXT, HEAD_DIM), "sinks": floats(HEADS), "out": floats(T, HEADS * HEAD_DIM),
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "start": CONTEXT - T, "window": 4,
        "scale": 0.5, "eps": 1e-6, "interleaved": True, "kind": 0,
    }  # fmt: skip


def legal_coded_attention() -> Arguments:
    """The same over keys and values of 4 bits: 10 bytes of codes, a scale and a minimum a row."""
    rows = {name: np.zeros((KV_HEADS, CONTEXT, 14), np.uint8) for name in ("keys", "values")}
    return legal_attention() | rows | {"kind": 3}


def legal_routing() -> Arguments:
    return {
        "logits": floats(T, 6), "bias": floats(6), "experts": np.zeros((T, 2), np.int64), "weights": floats(T, 2),
        "kind": 0, "num_experts": 6, "chosen": 2, "groups": 3, "chosen_groups": 1, "least_sum": -1.0, "factor": 1.0,
        "jitter": 0.0,
    }  # fmt: skip


def legal(name: str) -> Arguments:
    """Arguments of an operation by name, in order; all of them fit."""
    rows, (layout, dense) = EXPERT.rows(), ROWS
    expert = {"layout": rows.layout, "selector": rows.selector, "records": rows.records, "extra": rows.extra}
    given: dict[str, Arguments] = {
        "experts": {
            **expert, "threshold": 0.1, "tokens": np.array([2, 0]), "weights": floats(2), "outputs": np.array([2, 1]),
            "a": floats(2, F), "runs": np.ones((2, F), np.uint8), "neurons": numbers(0, 2, 4), "x": floats(T, D),
            "y": floats(T, D), "d": D,
        },
        "select": {
            "layout": rows.layout, "selector": rows.selector, "threshold": 0.1, "tokens": np.array([2, 0]),
            "a": floats(2, F), "runs": np.zeros((2, F), np.uint8), "neurons": numbers(*range(F)), "x": floats(T, D),
            "d": D,
        },
        "dense": {"layout": row_numbers(layout, "weight"), "rows": dense, "x": floats(T, D), "out": floats(T, F)},
        "decode": {"layout": row_numbers(layout, "weight"), "rows": dense, "out": floats(F, D)},
        "gather": {
            "rows": dense, "row_bytes": dense.shape[1], "places": numbers(4, 0, 0),
            "out": np.zeros((3, dense.shape[1]), np.uint8),
        },
        "attend": legal_attention(),
        "recur": {
            "q": floats(T, 2, 5), "k": floats(T, 2, 5), "v": floats(T, 4, 7), "log_decay": floats(T, 4),
            "rate": floats(T, 4), "recurrent": floats(4, 5, 7), "out": floats(T, 4, 7), "num_key_heads": 2,
            "num_heads": 4, "num_keys": 5, "num_values": 7,
        },
        "convolve": {
            "x": floats(T, 6), "kernel": floats(6, 4), "bias": floats(6), "state": floats(3, 6), "out": floats(T, 6),
            "taps": 4,
        },
        "rms_norm": {"x": floats(T, D), "weight": floats(D), "eps": 1e-6, "out": floats(T, D)},
        "rotate": {
            "x": floats(T, 192), "scale": floats(192), "is_scaled_first": True, "hartley": floats(3, 3),
            "out": floats(T, 192),
        },
        "route": legal_routing(),
        "checksum": {"bytes": dense},
        "read": {"bytes": dense},
    }  # fmt: skip
    return given[name]


@cache
def open_pool() -> object:
    """Kernels as the extension knows them."""
    return native.open_pool(2, "portable")


def call(name: str, arguments: Arguments) -> object:
    """Calls an operation of the extension itself, past the face that allocates outputs."""
    pool = open_pool()
    if name == "experts":
        *expert, x, y, d = arguments.values()
        return native.experts(pool, [tuple(expert)], x, y, d)
    if name == "select":
        *selector, x, d = arguments.values()
        return native.select(pool, [tuple(selector)], x, d)
    return getattr(native, name)(pool, *arguments.values())


OPERATIONS = ("experts", "select", "dense", "decode", "gather", "attend")
OPERATIONS += ("rms_norm", "rotate", "route", "recur", "convolve")
OUTPUTS = {
    "experts": ["y"],
    "select": ["a", "runs", "neurons"],
    "dense": ["out"],
    "decode": ["out"],
    "gather": ["out"],
    "attend": ["keys", "values", "out"],
    "recur": ["recurrent", "out"],
    "convolve": ["state", "out"],
    "rms_norm": ["out"],
    "rotate": ["out"],
    "route": ["experts", "weights"],
}
BUFFERS = [
    (name, buffer) for name in OPERATIONS for buffer, value in legal(name).items() if isinstance(value, np.ndarray)
]


def test_arguments_that_fit_pass() -> None:
    for name in (*OPERATIONS, "checksum", "read"):
        with case(name):
            call(name, legal(name))


def test_rows_of_codes_have_the_bytes_of_their_kind() -> None:
    assert call("attend", legal_coded_attention()) is None
    for name, fault in (("keys", "keys: 309 values, expected 308"), ("values", "values: 307 values, expected 308")):
        arguments = legal_coded_attention()
        arguments[name] = np.zeros(309 if name == "keys" else 307, np.uint8)
        with case(name), pytest.raises(ValueError, match=fault):
            call("attend", arguments)


def changed(value: NDArray[Any], fault: str) -> object:
    flat = value.reshape(-1)
    doubled = np.concatenate([flat, flat])
    shifted = np.concatenate([doubled.view(np.uint8), np.zeros(8, np.uint8)])[1 : 1 + flat.nbytes]
    return {
        "one too few": flat[:-1].copy(),
        "one too many": np.concatenate([flat, flat[:1]]),
        "twice as many": doubled,
        "none": flat[:0].copy(),
        "missing": None,
        "twice as wide": flat.astype({1: np.uint16, 4: np.float64, 8: np.complex128}[flat.itemsize]),
        "with gaps": doubled[::2],
        "backwards": flat[::-1],
        "no buffer": flat.tolist(),
        "not aligned": shifted if flat.itemsize > 1 else flat[:-1].copy(),
    }[fault]


FAULTS = ("one too few", "one too many", "twice as many", "none", "missing", "twice as wide", "with gaps", "backwards")
FAULTS += ("no buffer", "not aligned")


# Where some rows are picked out of many, there may be any number of whole ones.
ANY_ROWS = {("gather", "rows")}
NOT_NEEDED = {("route", "bias", "missing"), ("attend", "sinks", "missing"), ("experts", "outputs", "missing")}
NOT_NEEDED |= {("recur", "rate", "missing"), ("convolve", "bias", "missing")}
# Any of the neurons may have been selected, or none; without them the selector is asked.
NOT_NEEDED |= {("select", "x", fault) for fault in ("twice as many", "twice as wide")}  # more tokens than are used
NOT_NEEDED |= {("experts", "neurons", fault) for fault in ("one too few", "one too many", "none", "missing")}


def test_a_buffer_of_another_size_or_kind_is_refused() -> None:
    for (name, buffer), fault in product(BUFFERS, FAULTS):
        with case((name, buffer, fault)):
            arguments = legal(name)
            arguments[buffer] = changed(arguments[buffer], fault)
            if ((name, buffer) in ANY_ROWS and fault.startswith("twice")) or (name, buffer, fault) in NOT_NEEDED:
                call(name, arguments)
                continue
            with pytest.raises(REFUSED) as refused:
                call(name, arguments)
            assert str(refused.value)


def test_an_output_that_may_only_be_read_is_refused() -> None:
    for name, outputs in OUTPUTS.items():
        for buffer in outputs:
            with case((name, buffer)):
                arguments = legal(name)
                arguments[buffer].flags.writeable = False
                with pytest.raises(REFUSED, match="read-only"):
                    call(name, arguments)


def test_an_input_may_be_read_only() -> None:
    for name, buffer in BUFFERS:
        if buffer not in OUTPUTS[name]:
            with case((name, buffer)):
                arguments = legal(name)
                arguments[buffer] = arguments[buffer].copy()
                arguments[buffer].flags.writeable = False
                call(name, arguments)


SIZES = [
    ("experts", "x", "x: expected whole tokens"),
    ("experts", "y", "y: 383 values, expected 384"),
    ("experts", "selector", "selector: 399 values, expected 400"),
    ("experts", "records", "records: 799 values, expected 800"),
    ("experts", "weights", "weights: 1 values, expected 2"),
    ("experts", "a", "a: 9 values, expected 10"),
    ("experts", "runs", "runs: 9 values, expected 10"),
    ("select", "x", "x: 383 values, expected 256"),
    ("select", "a", "a: 9 values, expected 10"),
    ("select", "runs", "runs: 9 values, expected 10"),
    ("select", "neurons", "neurons: 4 values, expected 5"),
    ("dense", "rows", "rows: 399 values, expected 320"),
    ("dense", "out", "out: 14 values, expected 15"),
    ("decode", "out", "out: 639 values, expected 640"),
    ("gather", "out", "out: 239 values, expected 240"),
    ("attend", "q", "q: 239 values, expected 160"),
    ("attend", "k", "k: 119 values, expected 120"),
    ("attend", "v", "v: 119 values, expected 120"),
    ("attend", "q_norm", "q_norm: 19 values, expected 20"),
    ("attend", "k_norm", "k_norm: 19 values, expected 20"),
    ("attend", "cosines", "cosines: 20 values, expected 18"),
    ("attend", "sines", "sines: 20 values, expected 21"),
    ("attend", "keys", "keys: 439 values, expected 400"),
    ("attend", "values", "values: 439 values, expected 440"),
    ("attend", "out", "out: 239 values, expected 240"),
    ("route", "logits", "logits: 17 values, expected 12"),
    ("route", "bias", "bias: 5 values, expected 6"),
    ("route", "experts", "experts: 5 values, expected 6"),
    ("route", "weights", "weights: 5 values, expected 6"),
    ("recur", "q", "q: 29 values, expected 30"),
    ("recur", "k", "k: 29 values, expected 30"),
    ("recur", "v", "v: 83 values, expected 56"),
    ("recur", "log_decay", "log_decay: 11 values, expected 60"),
    ("recur", "rate", "rate: 11 values, expected 12"),
    ("recur", "recurrent", "recurrent: 139 values, expected 140"),
    ("recur", "out", "out: 83 values, expected 84"),
    ("convolve", "x", "x: 17 values, expected 12"),
    ("convolve", "kernel", "kernel: 23 values, expected 20"),
    ("convolve", "bias", "bias: 5 values, expected 6"),
    ("convolve", "state", "state: 17 values, expected 18"),
    ("convolve", "out", "out: 17 values, expected 18"),
    ("rms_norm", "x", "x: 383 values, expected 256"),
    ("rms_norm", "weight", "x: 384 values, expected 381"),
    ("rms_norm", "out", "out: 383 values, expected 384"),
    ("rotate", "x", "x: 575 values, expected 384"),
    ("rotate", "scale", "scale: expected a multiple of 64, up to 2^24 values"),
    ("rotate", "hartley", "hartley: 8 values, expected 9"),
    ("rotate", "out", "out: 575 values, expected 576"),
]


def assert_refused(name: str, arguments: Arguments, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        call(name, arguments)
    assert str(refused.value) == message


def test_a_wrong_size_is_named_with_the_one_expected() -> None:
    for name, buffer, message in SIZES:
        with case((name, buffer)):
            arguments = legal(name)
            arguments[buffer] = changed(arguments[buffer], "one too few")
            assert_refused(name, arguments, message)


def put(key: str, value: object) -> Change:
    return lambda arguments: arguments.update({key: value})


UNSEEN = "start: what the new tokens see is not within the cache"

VALUES: dict[str, tuple[str, Change, str]] = {
    "token below 0": ("experts", put("tokens", np.array([0, -1])), "tokens: one is not in x"),
    "token beyond x": ("experts", put("tokens", np.array([T, 0])), "tokens: one is not in x"),
    "token far beyond": ("experts", put("tokens", np.array([1 << 62, 0])), "tokens: one is not in x"),
    "selected neuron below 0": ("experts", put("neurons", numbers(-1, 2, 4)), "neurons: -1, expected 0 to 4"),
    "selected neuron too high": ("experts", put("neurons", numbers(0, 2, F)), "neurons: 5, expected 0 to 4"),
    "too many selected": ("experts", put("neurons", numbers(*[0] * 6)), "neurons: more than the expert has"),
    "token of a selector beyond x": ("select", put("tokens", np.array([T, 0])), "tokens: one is not in x"),
    "selector of other columns": ("select", put("d", D // 2), "layout: its rows are not as long as x's"),
    "no columns": ("experts", put("d", 0), "x: expected whole tokens"),
    "columns below 0": ("experts", put("d", -D), "x: expected whole tokens"),
    "columns of no expert": ("experts", put("d", D // 2), "layout: its rows are not as long as x's"),
    "row below 0": ("gather", put("places", numbers(0, 0, -1)), "places: -1, expected 0 to 4"),
    "row too high": ("gather", put("places", numbers(0, F, 0)), "places: 5, expected 0 to 4"),
    "rows of nothing": ("gather", put("row_bytes", 0), "row_bytes: expected at least 1"),
    "rows below nothing": ("gather", put("row_bytes", -80), "row_bytes: expected at least 1"),
    "no kind of rows": ("attend", put("kind", 4), "kind: expected 0 to 3"),
    "kind of rows below 0": ("attend", put("kind", -1), "kind: expected 0 to 3"),
    "no heads": ("attend", put("num_heads", 0), "heads: sizes out of range"),
    "heads below 0": ("attend", put("num_heads", -4), "heads: sizes out of range"),
    "no key heads": ("attend", put("num_kv_heads", 0), "heads: sizes out of range"),
    "heads of nothing": ("attend", put("head_dim", 0), "heads: sizes out of range"),
    "too many heads": ("attend", put("num_heads", 65538), "heads: sizes out of range"),
    "heads too large": ("attend", put("head_dim", 2**30), "heads: sizes out of range"),
    "keys that some share": ("attend", put("num_heads", 5), "heads: keys are not shared by as many queries each"),
    "start below 0": ("attend", put("start", -1), "start: expected 0 to 2^30 - 1"),
    "start too high": ("attend", lambda a: a.update(start=9, window=0), UNSEEN),
    "start beyond all": ("attend", put("start", 2**62), "start: expected 0 to 2^30 - 1"),
    "window too large for the ring": ("attend", lambda a: a.update(start=30, window=CONTEXT - T + 2), UNSEEN),
    "sinks of other heads": ("attend", put("sinks", floats(HEADS + 1)), f"sinks: {HEADS + 1} values, expected {HEADS}"),
    "extra where there is none": ("experts", put("extra", floats(1, D)), "extra: the layout has none"),
    "no heads with states": ("recur", put("num_heads", 0), "heads: sizes out of range"),
    "keys of nothing": ("recur", put("num_keys", 0), "heads: sizes out of range"),
    "values below 0": ("recur", put("num_values", -7), "heads: sizes out of range"),
    "too many keys": ("recur", put("num_keys", 65538), "heads: sizes out of range"),
    "keys of other heads": ("recur", put("num_key_heads", 3), "heads: keys are not shared by as many values each"),
    "no taps": ("convolve", put("taps", 0), "taps: expected 1 to 64"),
    "too many taps": ("convolve", put("taps", 65), "taps: expected 1 to 64"),
    "no channels": ("convolve", put("kernel", floats(0)), "kernel: expected 1 to 2^24 channels"),
    "window below 0": ("attend", put("window", -1), "window: expected 0 to 2^30"),
    "window far beyond": ("attend", put("window", 2**62), "window: expected 0 to 2^30"),
    "more angles than pairs": (
        "attend",
        lambda a: a.update(cosines=floats(T, 11), sines=floats(T, 11)),
        "cosines: more than a head has pairs of values",
    ),
    "kind below 0": ("route", put("kind", -1), "kind: expected 0 to 5"),
    "kind too high": ("route", put("kind", 6), "kind: expected 0 to 5"),
    "no experts": ("route", put("num_experts", 0), "experts: expected 1 to 2^20"),
    "experts without end": ("route", put("num_experts", 2**30), "experts: expected 1 to 2^20"),
    "none chosen": ("route", put("chosen", 0), "chosen: more than there are, or none"),
    "more chosen than there are": ("route", put("chosen", 7), "chosen: more than there are, or none"),
    "groups of unequal size": ("route", put("groups", 4), "groups: not of equal size"),
    "no groups": ("route", put("groups", 0), "groups: not of equal size"),
    "no group chosen": ("route", put("chosen_groups", 0), "chosen groups: more than there are, or none"),
    "more groups chosen": ("route", put("chosen_groups", 4), "chosen groups: more than there are, or none"),
    "norm of nothing": ("rms_norm", put("weight", floats(0)), "weight: expected 1 to 2^20 values"),
    "rotation of nothing": ("rotate", put("scale", floats(0)), "scale: expected a multiple of 64, up to 2^24 values"),
    "too large an odd factor": ("rotate", put("scale", floats(64 * 1025)), "scale: its odd factor is above 1023"),
    "another odd factor": ("rotate", put("scale", floats(64)), "hartley: 9 values, expected 1"),
}


def test_what_lies_outside_is_refused() -> None:
    for name, (operation, change, message) in VALUES.items():
        with case(name):
            arguments = legal(operation)
            change(arguments)
            assert_refused(operation, arguments, message)


def test_the_first_and_last_of_everything_pass() -> None:
    passing: tuple[tuple[str, Arguments], ...] = (
        ("experts", {"tokens": np.array([0, T - 1])}),
        ("experts", {"neurons": numbers(0, 1, F - 1)}),
        ("gather", {"places": numbers(0, F - 1, F - 1)}),
        ("attend", {"start": 0}),
        ("attend", {"start": 2**30 - 1, "window": CONTEXT - T + 1}),
        ("attend", {"sinks": None}),
        ("attend", {"cosines": floats(T, 10), "sines": floats(T, 10)}),
        ("attend", {"q_norm": None, "k_norm": None, "window": 0}),
    )
    for name, changes in passing:
        with case((name, *changes)):
            call(name, legal(name) | changes)


# Places in a layout's numbers: an expert's begin d, f, selector kind, bytes of a selector row, of a record and of the
# row of extra values, function; then come eight for each of gate, up and down. The expert here has up in its selector.
GATE, UP, DOWN = 8, 16, 24
ONE = 0x3F800000  # the bits of 1.0, a limit
CODEC, WIDTH, GROUP, SCALE_BITS, OFFSET, SCALES, BIAS, PLACE = range(8)
NOT_THERE = "layout: a part is not where its selector kind puts it"
UNFIT = "layout: a part does not fit its row"
SCALES_UNFIT = "layout: a part's scales do not fit its row"
EXPERT_LAYOUTS = {
    "no columns": ({0: 0}, "layout: sizes out of range"),
    "columns below 0": ({0: -64}, "layout: sizes out of range"),
    "too many columns": ({0: (1 << 20) + 64}, "layout: sizes out of range"),
    "no rows": ({1: 0}, "layout: sizes out of range"),
    "rows below 0": ({1: -1}, "layout: sizes out of range"),
    "too many rows": ({1: (1 << 24) + 1}, "layout: sizes out of range"),
    "unknown kind": ({2: 4}, "layout: unknown selector kind"),
    "kind below 0": ({2: -1}, "layout: unknown selector kind"),
    "another kind": ({2: 2}, NOT_THERE),
    "no kind": ({2: 0}, NOT_THERE),
    "selector row below 0": ({3: -16}, "layout: sizes out of range"),
    "record below 0": ({4: -16}, "layout: sizes out of range"),
    "extra row below 0": ({5: -16}, "layout: sizes out of range"),
    "extra row too short": ({5: 4 * D - 1}, "layout: the row of extra values is too short"),
    "unknown function": ({6: 7}, "layout: unknown neuron function"),
    "function below 0": ({6: -1}, "layout: unknown neuron function"),
    "no gate to clamp": ({6: 2, GATE + PLACE: 0}, "layout: the neuron function needs a gate"),
    "no gate to clip": ({6: 5, 7: ONE, GATE + PLACE: 0}, "layout: the neuron function needs a gate"),
    "no limit": ({6: 5}, "layout: the limit does not go with the neuron function"),
    "limit below 0": ({6: 6, 7: -1}, "layout: the limit does not go with the neuron function"),
    "limit without use": ({7: ONE}, "layout: the limit does not go with the neuron function"),
    "selector row too short": ({3: 63}, UNFIT),
    "record too short": ({4: 128}, SCALES_UNFIT),
    "unknown codec": ({GATE + CODEC: 9}, "layout: unknown codec"),
    "codec below 1": ({GATE + CODEC: 0}, "layout: unknown codec"),
    "unknown width": ({UP + WIDTH: 5}, "layout: unknown width"),
    "width 16": ({UP + WIDTH: 16}, "layout: unknown width"),
    "unknown group": ({UP + GROUP: 48}, "layout: unknown group"),
    "group below 0": ({UP + GROUP: -64}, "layout: unknown group"),
    "unknown scale_bits": ({DOWN + SCALE_BITS: 4}, "layout: unknown scale_bits"),
    "offset below 0": ({DOWN + OFFSET: -1}, UNFIT),
    "offset too high": ({DOWN + OFFSET: 97}, UNFIT),
    "offset that overflows": ({DOWN + OFFSET: 2**31 - 1}, UNFIT),
    "scales below 0": ({DOWN + SCALES: -1}, SCALES_UNFIT),
    "scales too high": ({DOWN + SCALES: 153}, SCALES_UNFIT),
    "scales that overflow": ({DOWN + SCALES: 2**31 - 1}, SCALES_UNFIT),
    "half a bias": ({UP + BIAS: 2}, "layout: a part has a bias or not"),
    "unknown place": ({UP + PLACE: 3}, "layout: a part is neither in selector nor in record"),
    "up in the record": ({UP + PLACE: 2, 4: 400}, NOT_THERE),
    "no up": ({UP + PLACE: 0}, NOT_THERE),
    "no down": ({DOWN + PLACE: 0}, NOT_THERE),
    "down in the selector": ({DOWN + PLACE: 1, 3: 400}, NOT_THERE),
    "no gate to select by": ({2: 3, GATE + PLACE: 0}, "layout: no gate to select by"),
    "columns of half a block": ({0: 96}, "layout: rows of codes are multiples of 64"),
    "groups that do not divide": ({0: 192, UP + GROUP: 128, 3: 400, 4: 400}, "layout: groups do not divide rows"),
}


def assert_layout_refused(operation: str, changes: dict[int, int], message: str) -> None:
    arguments = legal(operation)
    arguments["layout"] = arguments["layout"].copy()
    for place, value in changes.items():
        arguments["layout"][place] = value
    assert_refused(operation, arguments, message)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    for operation, name in product(("experts", "select"), EXPERT_LAYOUTS):
        with case((operation, name)):
            assert_layout_refused(operation, *EXPERT_LAYOUTS[name])


ROW_LAYOUTS = {
    "no columns": ({0: 0}, "layout: sizes out of range"),
    "too many columns": ({0: (1 << 20) + 64}, "layout: sizes out of range"),
    "rows below nothing": ({1: -80}, "layout: sizes out of range"),
    "rows of nothing": ({1: 0}, UNFIT),
    "rows too short": ({1: 63}, UNFIT),
    "rows too short for zeros": ({1: 71}, SCALES_UNFIT),
    "unknown codec": ({2 + CODEC: 9}, "layout: unknown codec"),
    "unknown width": ({2 + WIDTH: 7}, "layout: unknown width"),
    "unknown group": ({2 + GROUP: 1}, "layout: unknown group"),
    "offset too high": ({2 + OFFSET: 17}, UNFIT),
    "scales too high": ({2 + SCALES: 73}, SCALES_UNFIT),
    "in a selector": ({2 + PLACE: 1}, UNFIT),
    "nowhere": ({2 + PLACE: 0}, "layout: rows hold their part"),
}


def test_a_layout_of_rows_that_makes_no_sense_is_refused() -> None:
    for operation, name in product(("dense", "decode"), ROW_LAYOUTS):
        with case((operation, name)):
            assert_layout_refused(operation, *ROW_LAYOUTS[name])


# Codec, width, group and scale_bits, as the extension takes them.
SOURCES = {"fp8": (3, 8, 128, 32), "e5m2": (4, 8, 0, 8), "mxfp4": (5, 4, 32, 8)}
OTHERS = {WIDTH: ("width", 2), GROUP: ("group", 64), SCALE_BITS: ("scale_bits", 16)}


def test_a_codec_of_a_source_in_another_format_is_refused() -> None:
    for operation, codec, place in product(("dense", "decode"), SOURCES, OTHERS):
        fact, value = OTHERS[place]
        with case((operation, codec, fact)):
            changes = dict(zip((2, 3, 4, 5), SOURCES[codec], strict=True)) | {2 + place: value}
            assert_layout_refused(operation, changes, f"layout: the codec has another {fact}")


def test_a_codec_of_a_source_takes_its_bytes_and_no_more() -> None:
    for codec, code_bytes, scale_bytes in (("fp8", 128, 4), ("e5m2", 128, 1), ("mxfp4", 64, 4)):
        with case(codec):
            arguments = legal("decode")
            row_bytes = code_bytes + scale_bytes
            layout = np.array([D, row_bytes, *SOURCES[codec], 0, code_bytes, 0, 2], np.int32)
            call("decode", arguments | {"layout": layout, "rows": np.zeros((F, row_bytes), np.uint8)})
            layout[1] -= 1
            short = arguments | {"layout": layout, "rows": np.zeros((F, row_bytes - 1), np.uint8)}
            assert_refused("decode", short, SCALES_UNFIT)
            layout[0] = 96
            assert_refused("decode", arguments | {"layout": layout}, "layout: rows of codes are multiples of 64")


def test_a_layout_that_just_fits_passes() -> None:
    """A row of 72 bytes of codes, scales and zeros may have its codes behind its scales, and no room for a checksum."""
    arguments = legal("decode")
    layout = arguments["layout"].copy()
    layout[2 + OFFSET], layout[2 + SCALES] = 16, 8
    call("decode", arguments | {"layout": layout})
    layout[2 + OFFSET], layout[2 + SCALES] = 8, 72
    call("decode", arguments | {"layout": layout})
    layout[1] = 72
    layout[2 + OFFSET], layout[2 + SCALES] = 0, 64
    call("decode", arguments | {"layout": layout, "rows": np.zeros((F, 72), np.uint8)})


def test_a_call_of_something_else_than_experts_is_refused() -> None:
    pool = open_pool()
    for given in ([], [1, 2], None, "experts"):
        with pytest.raises(REFUSED):
            native.experts(pool, [given], floats(T, D), floats(T, D), D)
    native.experts(pool, [], floats(T, D), floats(T, D), D)


def test_an_operation_without_kernels_is_refused() -> None:
    for pool in (None, object(), "pool"):
        with pytest.raises(REFUSED, match="PyCapsule"):
            native.checksum(pool, b"bytes")


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^instruction set: expected portable, avx2, avx512 or avx512vbmi$"):
        Kernels(1, cast(InstructionSet, "sse2"))


def test_the_face_refuses_what_does_not_fit() -> None:
    kernels, expert = kernels_limited_to("portable"), random_expert(Shape(F, D))
    layout, rows = random_rows(BF16, F, D)
    with pytest.raises(ValueError, match=r"^x: 130 values, expected 128$"):
        kernels.product(torch.zeros(1, 130), row_numbers(layout, "weight"), rows)
    with pytest.raises(ValueError, match=r"^selector: 400 values, expected 480$"):
        select(torch.zeros(1, D), replace(expert.rows(), layout=random_expert(Shape(F + 1, D)).rows().layout), kernels)
    with pytest.raises(ValueError, match=r"^places: 5, expected 0 to 4$"):
        kernels.gather(rows, numbers(5))
    with pytest.raises(REFUSED):
        kernels.checksum(rows[:, 1:])
    with pytest.raises(REFUSED, match="read-only"):
        out = np.zeros((1, rows.shape[1]), np.uint8)
        out.flags.writeable = False
        kernels.gather(rows, numbers(0), out)


def test_kernels_that_are_closed_cannot_be_used() -> None:
    kernels = Kernels(1)
    kernels.close()
    kernels.close()
    with pytest.raises((AssertionError, RunError)):
        kernels.checksum(np.zeros(4, np.uint8))
