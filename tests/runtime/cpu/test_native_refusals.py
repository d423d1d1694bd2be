"""The native kernels refuse sizes, layouts and places that do not fit each other, before they touch a byte."""

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
from moe_pack.runtime.cpu import Kernels, panel_numbers, row_numbers
from moe_pack.runtime.cpu.kernels import InstructionSet

native: Any = pytest.importorskip(
    "moe_pack.runtime.cpu._native", reason="native kernels were not built: no C++ compiler"
)

Arguments = dict[str, Any]
T, D, F = 3, 128, 5
HEADS, KV_HEADS, HEAD_DIM, ANGLES, CONTEXT = 4, 2, 20, 7, 11
REFUSED = (ValueError, BufferError, TypeError)
EXPERT, ROWS = random_expert(Shape(F, D)), random_rows(FOUR_BIT, F, D)
# Such as may be in panels.
WHOLE_F, MATRIX_ROWS = 64, 32
WHOLE, MATRIX = random_expert(Shape(WHOLE_F, D)), random_rows(FOUR_BIT, MATRIX_ROWS, D)


PANEL_BYTES = len(WHOLE.extent)  # panels take the bytes of rows


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
    whole, (_, matrix) = WHOLE.rows(), MATRIX
    given: dict[str, Arguments] = {
        "experts": {
            **expert, "panels": None, "threshold": 0.1, "tokens": np.array([2, 0]), "weights": floats(2),
            "outputs": np.array([2, 1]), "a": floats(2, F), "runs": np.ones((2, F), np.uint8),
            "neurons": numbers(0, 2, 4), "x": floats(T, D), "y": floats(T, D), "d": D,
        },
        "select": {
            "layout": rows.layout, "selector": rows.selector, "threshold": 0.1, "tokens": np.array([2, 0]),
            "a": floats(2, F), "runs": np.zeros((2, F), np.uint8), "neurons": numbers(*range(F)), "x": floats(T, D),
            "d": D,
        },
        "dense": {"layout": row_numbers(layout, "weight"), "rows": dense, "x": floats(T, D), "out": floats(T, F)},
        "dense_each": {"layout": row_numbers(layout, "weight"), "rows": dense, "out": floats(T, F), "x": floats(T, D)},
        "decode": {"layout": row_numbers(layout, "weight"), "rows": dense, "out": floats(F, D)},
        "put_in_panels": {"layout": row_numbers(layout, "weight"), "rows": matrix.copy()},
        "take_rows": {
            "layout": panel_numbers(row_numbers(layout, "weight")), "rows": matrix,
            "places": numbers(MATRIX_ROWS - 1, 0), "out": np.zeros((2, matrix.shape[1]), np.uint8),
        },
        "expert_panel_bytes": {"layout": whole.layout, "threshold": 0.0},
        "panel_expert": {
            "layout": whole.layout, "selector": whole.selector, "records": whole.records,
            "panels": np.zeros(PANEL_BYTES, np.uint8),
        },
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
        "gated_delta": {
            "qkv": floats(T, 48), "z": floats(T, 4, 7), "steps": floats(T, 4), "rates": floats(T, 4),
            "kernel": floats(48, 4), "a_log": floats(4), "dt_bias": floats(4), "norm": floats(7), "conv": floats(3, 48),
            "recurrent": floats(4, 5, 7), "mixed": floats(T, 48), "out": floats(T, 4, 7), "num_key_heads": 2,
            "num_heads": 4, "num_keys": 5, "num_values": 7, "taps": 4, "is_sigmoid": False, "eps": 1e-6,
        },
        "scale_by_sigmoid": {"logits": floats(T), "y": floats(T, D), "d": D},
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
    if name == "dense_each":
        *matrix, x = arguments.values()
        return native.dense_each(pool, [tuple(matrix)], x)
    if name == "panel_expert":  # in the caller's thread
        return native.panel_expert(*arguments.values())
    return getattr(native, name)(pool, *arguments.values())


OPERATIONS = ("experts", "select", "dense", "dense_each", "decode", "gather", "attend")
OPERATIONS += ("scale_by_sigmoid", "rms_norm", "rotate", "route", "recur", "convolve", "gated_delta")
OPERATIONS += ("put_in_panels", "take_rows", "expert_panel_bytes", "panel_expert")
OUTPUTS = {
    "experts": ["y"],
    "select": ["a", "runs", "neurons"],
    "dense": ["out"],
    "dense_each": ["out"],
    "decode": ["out"],
    "gather": ["out"],
    "attend": ["keys", "values", "out"],
    "recur": ["recurrent", "out"],
    "convolve": ["state", "out"],
    "gated_delta": ["conv", "recurrent", "mixed", "out"],
    "scale_by_sigmoid": ["y"],
    "rms_norm": ["out"],
    "rotate": ["out"],
    "route": ["experts", "weights"],
    "put_in_panels": ["rows"],
    "take_rows": ["out"],
    "expert_panel_bytes": [],
    "panel_expert": ["panels"],
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
ANY_ROWS = {("gather", "rows"), ("take_rows", "rows"), ("put_in_panels", "rows")}
NOT_NEEDED = {("route", "bias", "missing"), ("attend", "sinks", "missing"), ("experts", "outputs", "missing")}
NOT_NEEDED |= {("recur", "rate", "missing"), ("convolve", "bias", "missing")}
NOT_NEEDED |= {("put_in_panels", "rows", fault) for fault in ("none", "missing")}  # a matrix without rows
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


# The values that a buffer must have, which one too few does not give; an input that comes first decides on the others.
SIZES = {
    "experts": {"y": 384, "selector": 400, "records": 800, "weights": 2, "a": 10, "runs": 10},
    "select": {"x": 256, "a": 10, "runs": 10, "neurons": 5},
    "dense": {"rows": 320, "out": 15}, "dense_each": {"rows": 320, "out": 15}, "decode": {"out": 640},
    "gather": {"out": 240},
    "attend": {"q": 160, "k": 120, "v": 120, "q_norm": 20, "k_norm": 20, "cosines": 18, "sines": 21, "keys": 400,
               "values": 440, "out": 240},
    "route": {"logits": 12, "bias": 6, "experts": 6, "weights": 6},
    "recur": {"q": 30, "k": 30, "v": 56, "log_decay": 60, "rate": 12, "recurrent": 140, "out": 84},
    "convolve": {"x": 12, "kernel": 20, "bias": 6, "state": 18, "out": 18},
    "gated_delta": {"qkv": 96, "z": 84, "steps": 12, "rates": 12, "kernel": 192, "a_log": 4, "dt_bias": 4, "norm": 7,
                    "conv": 144, "recurrent": 140, "mixed": 144, "out": 84},
    "scale_by_sigmoid": {"logits": 3, "y": 256},
    "rms_norm": {"x": 256, "out": 384}, "rotate": {"x": 384, "hartley": 9, "out": 576},
    "put_in_panels": {"rows": 2480}, "take_rows": {"out": 160},
    "panel_expert": {"selector": 5120, "records": 10240, "panels": 15360},
}  # fmt: skip
OTHER_SIZES = {
    ("experts", "x"): "x: expected whole tokens",
    ("take_rows", "rows"): "rows: no whole panels",
    ("rms_norm", "weight"): "x: 384 values, expected 381",
    ("rotate", "scale"): "scale: expected a multiple of 64, up to 2^24 values",
}


def assert_refused(name: str, arguments: Arguments, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        call(name, arguments)
    assert str(refused.value) == message


def test_a_wrong_size_is_named_with_the_one_expected() -> None:
    expected = OTHER_SIZES | {
        (name, buffer): f"{buffer}: {legal(name)[buffer].size - 1} values, expected {number}"
        for name, sizes in SIZES.items()
        for buffer, number in sizes.items()
    }
    for (name, buffer), message in expected.items():
        with case((name, buffer)):
            arguments = legal(name)
            arguments[buffer] = changed(arguments[buffer], "one too few")
            assert_refused(name, arguments, message)


PANELLED: Arguments = {"layout": panel_numbers(row_numbers(MATRIX[0], "weight")), "rows": MATRIX[1]}
# Changes of the arguments of an operation, by the message that refuses them.
VALUES: dict[tuple[str, str], list[Arguments]] = {
    ("experts", "tokens: one is not in x"): [{"tokens": np.array([token, 0])} for token in (-1, T, 1 << 62)],
    ("experts", "neurons: -1, expected 0 to 4"): [{"neurons": numbers(-1, 2, 4)}],
    ("experts", "neurons: 5, expected 0 to 4"): [{"neurons": numbers(0, 2, F)}],
    ("experts", "neurons: more than the expert has"): [{"neurons": numbers(*[0] * 6)}],
    ("experts", "x: expected whole tokens"): [{"d": 0}, {"d": -D}],
    ("experts", "layout: its rows are not as long as x's"): [{"d": D // 2}],
    ("experts", "extra: the layout has none"): [{"extra": floats(1, D)}],
    ("experts", "panels: the layout has none"): [{"panels": np.zeros(PANEL_BYTES, np.uint8)}],
    ("dense", "layout: these kernels have no panels"): [PANELLED | {"out": floats(T, MATRIX_ROWS)}],
    ("dense", "rows: no whole panels"): [{"layout": PANELLED["layout"]}],
    ("dense_each", "layout: these kernels have no panels"): [PANELLED | {"out": floats(T, MATRIX_ROWS)}],
    ("decode", "layout: rows are in panels"): [PANELLED | {"out": floats(MATRIX_ROWS, D)}],
    ("put_in_panels", "layout: rows are in panels already"): [{"layout": PANELLED["layout"]}],
    ("take_rows", "layout: rows are in no panels"): [{"layout": row_numbers(MATRIX[0], "weight")}],
    ("take_rows", "rows: no whole panels"): [{"rows": MATRIX[1][:24]}],
    ("take_rows", "places: -1, expected 0 to 31"): [{"places": numbers(0, -1)}],
    ("take_rows", "places: 32, expected 0 to 31"): [{"places": numbers(MATRIX_ROWS, 0)}],
    ("take_rows", "places: there are no rows"): [{"rows": MATRIX[1][:0]}],
    ("panel_expert", "layout: has no panels"): [
        {"layout": EXPERT.rows().layout, "selector": EXPERT.rows().selector, "records": EXPERT.rows().records},
    ],
    ("scale_by_sigmoid", "d: out of range"): [{"d": 0}, {"d": -D}, {"d": 1 << 30}],
    ("select", "tokens: one is not in x"): [{"tokens": np.array([T, 0])}],
    ("select", "layout: its rows are not as long as x's"): [{"d": D // 2}],
    ("gather", "places: -1, expected 0 to 4"): [{"places": numbers(0, 0, -1)}],
    ("gather", "places: 5, expected 0 to 4"): [{"places": numbers(0, F, 0)}],
    ("gather", "row_bytes: expected at least 1"): [{"row_bytes": 0}, {"row_bytes": -80}],
    ("attend", "kind: expected 0 to 3"): [{"kind": 4}, {"kind": -1}],
    ("attend", "heads: sizes out of range"): [
        *({"num_heads": number} for number in (0, -4, 65538)), {"num_kv_heads": 0}, {"head_dim": 0},
        {"head_dim": 2**30},
    ],
    ("attend", "heads: keys are not shared by as many queries each"): [{"num_heads": 5}],
    ("attend", "start: expected 0 to 2^30 - 1"): [{"start": -1}, {"start": 2**62}],
    ("attend", "start: what the new tokens see is not within the cache"): [
        {"start": 9, "window": 0}, {"start": 30, "window": CONTEXT - T + 2},
    ],
    ("attend", f"sinks: {HEADS + 1} values, expected {HEADS}"): [{"sinks": floats(HEADS + 1)}],
    ("attend", "window: expected 0 to 2^30"): [{"window": -1}, {"window": 2**62}],
    ("attend", "cosines: more than a head has pairs of values"): [{"cosines": floats(T, 11), "sines": floats(T, 11)}],
    ("recur", "heads: sizes out of range"): [
        {"num_heads": 0}, {"num_keys": 0}, {"num_values": -7}, {"num_keys": 65538},
    ],
    ("recur", "heads: keys are not shared by as many values each"): [{"num_key_heads": 3}],
    ("convolve", "taps: expected 1 to 64"): [{"taps": 0}, {"taps": 65}],
    ("convolve", "kernel: expected 1 to 2^24 channels"): [{"kernel": floats(0)}],
    ("gated_delta", "heads: sizes out of range"): [{"num_heads": 0}, {"num_keys": -5}, {"num_values": 65538}],
    ("gated_delta", "heads: keys are not shared by as many values each"): [{"num_key_heads": 3}],
    ("gated_delta", "heads: expected up to 2^24 channels"): [{"num_heads": 1 << 16, "num_values": 1 << 16}],
    ("gated_delta", "taps: expected 1 to 64"): [{"taps": 0}, {"taps": 65}],
    ("route", "kind: expected 0 to 5"): [{"kind": -1}, {"kind": 6}],
    ("route", "experts: expected 1 to 2^20"): [{"num_experts": 0}, {"num_experts": 2**30}],
    ("route", "chosen: more than there are, or none"): [{"chosen": 0}, {"chosen": 7}],
    ("route", "groups: not of equal size"): [{"groups": 4}, {"groups": 0}],
    ("route", "chosen groups: more than there are, or none"): [{"chosen_groups": 0}, {"chosen_groups": 4}],
    ("rms_norm", "weight: expected 1 to 2^20 values"): [{"weight": floats(0)}],
    ("rotate", "scale: expected a multiple of 64, up to 2^24 values"): [{"scale": floats(0)}],
    ("rotate", "scale: its odd factor is above 1023"): [{"scale": floats(64 * 1025)}],
    ("rotate", "hartley: 9 values, expected 1"): [{"scale": floats(64)}],
}  # fmt: skip


def test_what_lies_outside_is_refused() -> None:
    for (operation, message), changes in VALUES.items():
        for change in changes:
            with case((operation, *change.items())):
                assert_refused(operation, legal(operation) | change, message)


def test_products_side_by_side_are_of_one_to_four_tuples() -> None:
    layout, rows, out, x = legal("dense_each").values()
    for matrices in ([], [(layout, rows, out)] * 5):
        with pytest.raises(ValueError, match="matrices: expected 1 to 4"):
            native.dense_each(open_pool(), matrices, x)
    for matrix in ([layout, rows, out], None, (layout, rows)):
        with case(type(matrix)), pytest.raises(REFUSED):
            native.dense_each(open_pool(), [matrix], x)


def test_the_first_and_last_of_everything_pass() -> None:
    passing: tuple[tuple[str, Arguments], ...] = (
        ("experts", {"tokens": np.array([0, T - 1])}),
        ("experts", {"neurons": numbers(0, 1, F - 1)}),
        ("gather", {"places": numbers(0, F - 1, F - 1)}),
        ("take_rows", {"rows": MATRIX[1][:16], "places": numbers(0, 15)}),
        ("expert_panel_bytes", {"threshold": float("nan")}),
        ("attend", {"start": 0}),
        ("attend", {"start": 2**30 - 1, "window": CONTEXT - T + 1}),
        ("attend", {"sinks": None}),
        ("attend", {"cosines": floats(T, 10), "sines": floats(T, 10)}),
        ("attend", {"q_norm": None, "k_norm": None, "window": 0}),
    )
    for name, changes in passing:
        with case((name, *changes)):
            call(name, legal(name) | changes)


# Places in a layout's numbers: an expert's begin with eight; then come eight for each of gate, up and down. The expert
# here has up in its selector.
COLUMNS, NEURONS, KIND, SELECTOR_BYTES, RECORD_BYTES, EXTRA_BYTES, FUNCTION, LIMIT, GATE, UP, DOWN = *range(9), 16, 24
ONE = 0x3F800000  # the bits of 1.0, a limit
CODEC, WIDTH, GROUP, SCALE_BITS, OFFSET, SCALES, BIAS, PLACE = range(8)
UNFIT = "layout: a part does not fit its row"
SCALES_UNFIT = "layout: a part's scales do not fit its row"
EXPERT_LAYOUTS: dict[str, list[dict[int, int]]] = {
    "layout: sizes out of range": [
        {COLUMNS: 0}, {COLUMNS: -64}, {COLUMNS: (1 << 20) + 64}, {NEURONS: 0}, {NEURONS: -1},
        {NEURONS: (1 << 24) + 1}, {SELECTOR_BYTES: -16}, {RECORD_BYTES: -16}, {EXTRA_BYTES: -16},
    ],
    "layout: unknown selector kind": [{KIND: 4}, {KIND: -1}],
    "layout: a part is not where its selector kind puts it": [
        {KIND: 2}, {KIND: 0}, {UP + PLACE: 2, RECORD_BYTES: 400}, {UP + PLACE: 0}, {DOWN + PLACE: 0},
        {DOWN + PLACE: 1, SELECTOR_BYTES: 400},
    ],
    "layout: the row of extra values is too short": [{EXTRA_BYTES: 4 * D - 1}],
    "layout: unknown neuron function": [{FUNCTION: 7}, {FUNCTION: -1}],
    "layout: the neuron function needs a gate": [
        {FUNCTION: 2, GATE + PLACE: 0}, {FUNCTION: 5, LIMIT: ONE, GATE + PLACE: 0},
    ],
    "layout: the limit does not go with the neuron function": [{FUNCTION: 5}, {FUNCTION: 6, LIMIT: -1}, {LIMIT: ONE}],
    UNFIT: [{SELECTOR_BYTES: 63}, *({DOWN + OFFSET: offset} for offset in (-1, 97, 2**31 - 1))],
    SCALES_UNFIT: [{RECORD_BYTES: 128}, *({DOWN + SCALES: offset} for offset in (-1, 153, 2**31 - 1))],
    "layout: unknown codec": [{GATE + CODEC: codec} for codec in (-1, 0, 7, 63, 66)],
    "layout: unknown width": [{UP + WIDTH: 5}, {UP + WIDTH: 16}],
    "layout: unknown group": [{UP + GROUP: 48}, {UP + GROUP: -64}],
    "layout: unknown scale_bits": [{DOWN + SCALE_BITS: 4}],
    "layout: a part has a bias or not": [{UP + BIAS: 2}],
    "layout: a part is neither in selector nor in record": [{UP + PLACE: 3}],
    "layout: no gate to select by": [{KIND: 3, GATE + PLACE: 0}],
    "layout: rows of codes are multiples of 64": [{COLUMNS: 96}],
    "layout: groups do not divide rows": [{COLUMNS: 192, UP + GROUP: 128, SELECTOR_BYTES: 400, RECORD_BYTES: 400}],
}  # fmt: skip


def assert_layout_refused(operation: str, changes: dict[int, int], message: str) -> None:
    arguments = legal(operation)
    arguments["layout"] = arguments["layout"].copy()
    for place, value in changes.items():
        arguments["layout"][place] = value
    assert_refused(operation, arguments, message)


def assert_layouts_refused(operations: tuple[str, ...], layouts: dict[str, list[dict[int, int]]]) -> None:
    for operation, (message, changes) in product(operations, layouts.items()):
        for change in changes:
            with case((operation, change)):
                assert_layout_refused(operation, change, message)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    assert_layouts_refused(("experts", "select", "expert_panel_bytes", "panel_expert"), EXPERT_LAYOUTS)


ROW_BYTES, IN_PANELS, PART = 1, 2, 3  # places in the numbers of a layout of rows
ROW_LAYOUTS: dict[str, list[dict[int, int]]] = {
    "layout: sizes out of range": [{COLUMNS: 0}, {COLUMNS: (1 << 20) + 64}, {ROW_BYTES: -80}],
    UNFIT: [{ROW_BYTES: 0}, {ROW_BYTES: 63}, {PART + OFFSET: 17}, {PART + PLACE: 1}],
    SCALES_UNFIT: [{ROW_BYTES: 71}, {PART + SCALES: 73}],
    "layout: unknown codec": [{PART + CODEC: 9}],
    "layout: unknown width": [{PART + WIDTH: 7}],
    "layout: unknown group": [{PART + GROUP: 1}],
    "layout: rows hold their part": [{PART + PLACE: 0}],
    "layout: in panels or not": [{IN_PANELS: 2}, {IN_PANELS: -1}],
    # A panel of 1152 bytes, which may begin 63 bytes behind 16 rows' first; the next is whole lines of 64 behind.
    "layout: such rows have no panels": [
        {IN_PANELS: 1} | change for change in (
            {ROW_BYTES: 72}, {ROW_BYTES: 77}, {PART + WIDTH: 3}, {PART + GROUP: 32}, {PART + SCALE_BITS: 8},
            {PART + OFFSET: 1}, {PART + BIAS: 1}, {PART + CODEC: 6}, {PART + PLACE: 0},
        )
    ],
}  # fmt: skip


def test_a_layout_of_rows_that_makes_no_sense_is_refused() -> None:
    assert_layouts_refused(("dense", "decode", "put_in_panels"), ROW_LAYOUTS)


def test_rows_that_just_hold_their_panel_pass() -> None:
    layout, matrix = PANELLED["layout"].copy(), np.zeros((MATRIX_ROWS, 76), np.uint8)
    layout[ROW_BYTES] = 76
    call("take_rows", legal("take_rows") | {"layout": layout, "rows": matrix, "out": np.zeros((2, 76), np.uint8)})


def test_an_expert_takes_its_own_panels_and_no_others() -> None:
    whole = WHOLE.rows()
    rows = {"layout": whole.layout, "selector": whole.selector, "records": whole.records}
    told = {"a": floats(2, WHOLE_F), "runs": np.ones((2, WHOLE_F), np.uint8)}
    for panel_bytes in (PANEL_BYTES, PANEL_BYTES - 1, PANEL_BYTES + 1, 0):
        arguments = legal("experts") | rows | told | {"panels": np.zeros(panel_bytes, np.uint8)}
        with case(panel_bytes):
            if panel_bytes == PANEL_BYTES:
                call("experts", arguments)
            else:
                assert_refused("experts", arguments, f"panels: {panel_bytes} values, expected {PANEL_BYTES}")
    for panels in (np.zeros(2 * PANEL_BYTES, np.uint8)[::2], [0] * PANEL_BYTES, "panels"):
        with pytest.raises(REFUSED):
            call("experts", legal("experts") | rows | told | {"panels": panels})


# Codec, width, group and scale_bits in the extension's numbers.
SOURCES = {"fp8": (3, 8, 128, 32), "e5m2": (4, 8, 0, 8), "mxfp4": (5, 4, 32, 8)}
OTHERS = {WIDTH: ("width", 2), GROUP: ("group", 64), SCALE_BITS: ("scale_bits", 16)}


def test_a_codec_of_a_source_in_another_format_is_refused() -> None:
    for operation, codec, place in product(("dense", "decode"), SOURCES, OTHERS):
        fact, value = OTHERS[place]
        with case((operation, codec, fact)):
            changes = dict(zip(range(PART, PART + 4), SOURCES[codec], strict=True)) | {PART + place: value}
            assert_layout_refused(operation, changes, f"layout: the codec has another {fact}")


def test_a_codec_of_a_source_takes_its_bytes_and_no_more() -> None:
    for codec, code_bytes, scale_bytes in (("fp8", 128, 4), ("e5m2", 128, 1), ("mxfp4", 64, 4)):
        with case(codec):
            arguments = legal("decode")
            row_bytes = code_bytes + scale_bytes
            layout = np.array([D, row_bytes, 0, *SOURCES[codec], 0, code_bytes, 0, 2], np.int32)
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
    layout[PART + OFFSET], layout[PART + SCALES] = 16, 8
    call("decode", arguments | {"layout": layout})
    layout[PART + OFFSET], layout[PART + SCALES] = 8, 72
    call("decode", arguments | {"layout": layout})
    layout[1] = 72
    layout[PART + OFFSET], layout[PART + SCALES] = 0, 64
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
    with pytest.raises(ValueError, match=r"^instruction set: expected portable, neon, avx2, avx512 or avx512vbmi$"):
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
