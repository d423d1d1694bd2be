"""What a layer's native call refuses: sizes, layouts and experts that do not fit, before a byte is touched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cases import case
from support.native import kernels_limited_to
from support.random_experts import FOUR_BIT, Shape, random_expert, random_rows

from moe_pack.formats import RouterSpec
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.cpu import (
    CACHE_KINDS,
    LayerFacts,
    LayerMatrices,
    LayerMatrix,
    LayerPass,
    LayerVectors,
    NativeLayers,
    row_numbers,
)

D, F, T, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, PLACES = 128, 64, 2, 4, 2, 32, 6, 2, 11
REFUSED = (ValueError, BufferError, TypeError)
ATTENTION = GroupedQuerySpec("grouped_query", HEADS, KV_HEADS, HEAD_DIM, None, 0.2, (), "head")
FACTS = LayerFacts(D, ATTENTION, None, False, 1e-6, 1.0, RouterSpec("softmax_topk", EXPERTS, CHOSEN, True), 0.0, "silu")


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def matrix(num_rows: int, num_cols: int) -> LayerMatrix:
    layout, rows = random_rows(FOUR_BIT, num_rows, num_cols)
    return LayerMatrix(row_numbers(layout, "weight"), rows, floats(num_rows))


VECTORS = LayerVectors(
    *(floats(D), floats(D), floats(HEAD_DIM), floats(HEAD_DIM), floats(HEADS), floats(EXPERTS)),
    *(floats(D), floats(D), floats(1, 1)),
)
MATRICES = LayerMatrices(
    *(matrix(HEADS * HEAD_DIM, D), matrix(KV_HEADS * HEAD_DIM, D), matrix(KV_HEADS * HEAD_DIM, D)),
    *(matrix(D, HEADS * HEAD_DIM), matrix(EXPERTS, D), matrix(F, D), matrix(F, D), matrix(D, F)),
)


F32 = CACHE_KINDS.index("f32")


def cache() -> NDArray[np.uint8]:
    """The bytes of a cache of float32."""
    return floats(KV_HEADS, PLACES, HEAD_DIM).view(np.uint8)


def opened(num_experts: int = EXPERTS, **changes: Any) -> NativeLayers:
    """A layer of a model, and some of its experts."""
    layers = NativeLayers(kernels_limited_to("portable"), 2)
    given = {"facts": FACTS, "vectors": VECTORS, "matrices": MATRICES} | changes
    layers.set(0, given["facts"], given["vectors"], given["matrices"])
    for expert in range(num_experts):
        layers.set_expert(0, expert, random_expert(Shape(F, D)).rows())
    return layers


def arrays() -> LayerPass:
    return LayerPass(floats(T, D), floats(T, D), floats(T, D), np.zeros((T, CHOSEN), np.int64), floats(T, CHOSEN))


def begin(layers: NativeLayers, layer: int = 0, **changes: Any) -> None:
    given = {
        "arrays": arrays(),
        "angles": (floats(T, HEAD_DIM // 2), floats(T, HEAD_DIM // 2)),
        "caches": [(cache(), cache(), 3, F32)],
    } | changes
    layers.begin(layer, given["arrays"], given["angles"], given["caches"])


def run(layers: NativeLayers, first: int = 0, **changes: Any) -> int:
    turns, keys = floats(T, HEAD_DIM // 2), cache()
    given = {"arrays": arrays(), "steps": [(turns, turns, [(keys, keys.copy(), 3, F32)])]} | changes
    return layers.run(first, given["arrays"], given["steps"])


def faults(value: NDArray[Any]) -> list[object]:
    """One value too few and too many, another type, gaps, and no buffer."""
    flat = value.reshape(-1)
    return [flat[:-1].copy(), np.append(flat, flat[:1]), flat.astype(np.complex128), np.append(flat, flat)[::2], [0]]


def test_what_fits_runs() -> None:
    begin(opened())
    assert run(opened()) == 1
    layers, taken = opened(num_experts=0), arrays()
    assert run(layers, arrays=taken) == 0
    for expert in range(EXPERTS):
        layers.set_expert(0, expert, random_expert(Shape(F, D)).rows())
    layers.end(0, taken)


def test_arrays_of_a_pass_that_do_not_fit_are_refused() -> None:
    layers = opened()
    for name in ("x", "inputs", "unrouted", "experts", "weights"):
        for number, fault in enumerate(faults(getattr(arrays(), name))):
            for call in (begin, run):
                with case(name, number), pytest.raises(REFUSED):
                    call(layers, arrays=replace(arrays(), **{name: fault}))
        for call in (begin, run):
            with case(name, "missing"), pytest.raises(REFUSED):
                call(layers, arrays=replace(arrays(), **{name: None}))
    turns, keys = floats(T, HEAD_DIM // 2), cache()
    for number, fault in enumerate(faults(turns)):
        with case("angles", number), pytest.raises(REFUSED):
            begin(layers, angles=(turns, fault))
    for number, fault in enumerate(faults(keys)):
        with case("values", number), pytest.raises(REFUSED):
            begin(layers, caches=[(keys, fault, 0, F32)])
    wide = floats(T, HEAD_DIM)
    for name, changes in {
        "more angles than pairs": {"angles": (wide, wide)},
        "no sequence": {"caches": []},
        "more sequences than tokens": {"caches": [(keys, keys, 0, F32)] * 3},
        "no place for the new tokens": {"caches": [(keys, keys, PLACES - 1, F32)]},
        "a start below 0": {"caches": [(keys, keys, -1, F32)]},
        "no tuple": {"caches": [keys]},
        "rows of another kind": {"caches": [(keys, keys, 0, 9)]},
        "rows of another size": {"caches": [(keys, keys, 0, CACHE_KINDS.index("q4"))]},
    }.items():
        with case(name), pytest.raises(REFUSED):
            begin(layers, **changes)


def test_steps_that_do_not_fit_are_refused() -> None:
    layers, turns, keys = opened(), floats(T, HEAD_DIM // 2), cache()
    step = turns, turns, [(keys, keys, 0, F32)]
    for name, steps in {
        "a layer that is not set": [step, step],
        "no tuple": [turns],
        "no caches": [(turns, turns, [])],
        "other angles": [(turns, turns[:1], [(keys, keys, 0, F32)])],
        "no step for the chosen": [],
    }.items():
        with case(name), pytest.raises(REFUSED):
            run(layers, steps=steps)


def test_weights_that_do_not_fit_are_refused() -> None:
    for name in LayerVectors.__slots__:
        for number, fault in enumerate(faults(getattr(VECTORS, name))[:3]):
            with case(name, number), pytest.raises(REFUSED):
                opened(vectors=replace(VECTORS, **{name: fault}))
    for name in LayerMatrices.__slots__:
        own: LayerMatrix = getattr(MATRICES, name)
        wrong = [replace(own, rows=own.rows[:-1]), replace(own, bias=floats(1)), replace(own, layout=own.layout[:-1])]
        for number, fault in enumerate([*wrong, replace(own, rows=own.rows.reshape(-1)[:-1].copy())]):
            with case(name, number), pytest.raises(REFUSED):
                opened(matrices=replace(MATRICES, **{name: fault}))
    for name in ("q", "k", "v", "o", "up", "down"):
        with case(name, "missing"), pytest.raises(REFUSED):
            opened(matrices=replace(MATRICES, **{name: None}))
    for number, attention in enumerate(
        (replace(ATTENTION, num_heads=0), replace(ATTENTION, num_kv_heads=3), replace(ATTENTION, head_dim=1 << 17))
    ):
        with case("attention", number), pytest.raises(REFUSED):
            opened(facts=replace(FACTS, attention=attention))


def test_layers_and_experts_that_are_not_there_are_refused() -> None:
    layers, rows = opened(num_experts=1), random_expert(Shape(F, D)).rows()
    for layer in (-1, 1, 2):
        with case("layer", layer), pytest.raises(ValueError, match="layer: there is none of this number"):
            begin(layers, layer)
    for expert in (-1, 0, EXPERTS):
        with case("expert", expert), pytest.raises(ValueError, match="there is none of this number, or it is set"):
            layers.set_expert(0, expert, rows)
    with pytest.raises(ValueError, match="rows are not as long"):
        layers.set_expert(0, 1, random_expert(Shape(F, 2 * D)).rows())
    for name in ("selector", "records"):
        with case(name), pytest.raises(REFUSED):
            layers.set_expert(0, 1, replace(rows, **{name: getattr(rows, name)[:-1]}))
    for expert, message in ((1, "one is not set"), (EXPERTS, "not of the layer"), (-1, "not of the layer")):
        chosen = np.full((T, CHOSEN), expert, np.int64)
        with case("chosen", expert), pytest.raises(ValueError, match=message):
            layers.end(0, replace(arrays(), experts=chosen, weights=np.ones((T, CHOSEN), np.float32)))
    with pytest.raises(ValueError, match="it is set"):
        layers.set(0, FACTS, VECTORS, MATRICES)
