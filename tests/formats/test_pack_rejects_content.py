"""Every reason to refuse a pack for what its tables, dense part and expert files say, sealed around the fault."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.cases import case
from support.reseal import (
    ELEMENT_BYTES,
    HeldTensor,
    JsonObject,
    array_tensor,
    edit_array,
    edit_byte,
    read_tensors,
    read_whole,
    refusal,
    refuse_each,
    reseal,
    write_tensors,
)

from moe_pack.formats.pack.manifests import order_fault

THRESHOLDS, ORDER, INDEX = "thresholds.safetensors", "order.safetensors", "index.safetensors"
DENSE, EXPERTS = "dense.safetensors", "experts-000.safetensors"

Tensors = dict[str, HeldTensor]
Edit = Callable[[NDArray[Any]], object]


def putting(value: float, *place: int) -> Edit:
    return lambda array: array.__setitem__(place, value)


def with_tensors(folder: Path, name: str, change: Callable[[Tensors], object]) -> None:
    tensors = read_tensors(folder / name)
    change(tensors)
    write_tensors(folder / name, tensors)
    reseal(folder)


def with_array(folder: Path, name: str, tensor: str, edit: Edit) -> None:
    edit_array(folder / name, tensor, edit)
    reseal(folder)


def with_header(folder: Path, name: str, old: bytes, new: bytes) -> None:
    """Replaces text of a file's header, which keeps its length by its trailing spaces, and seals the pack."""
    raw = (folder / name).read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:length].rstrip(b" ")
    assert header.count(old) >= 1, old
    changed = header.replace(old, new, 1).ljust(length - 8)
    assert len(changed) == length - 8, "the header has room for the change"
    (folder / name).write_bytes(raw[:8] + changed + raw[length:])
    reseal(folder)


def test_a_table_may_have_any_padding_but_no_other_tensors(new_pack: Callable[[], Path]) -> None:
    def without_padding(tensors: Tensors) -> None:
        for pad in [held for held in tensors if held.startswith("pad.")]:
            del tensors[pad]

    for name in (THRESHOLDS, ORDER, INDEX):
        with case(name):
            folder = new_pack()
            with_tensors(folder, name, without_padding)
            read_whole(folder)
            with_tensors(folder, name, lambda tensors: tensors.update({"pad.99": array_tensor("U8", [0])}))
            read_whole(folder)
            with_tensors(folder, name, lambda tensors: tensors.update({"spare": array_tensor("U8", [0])}))
            assert refusal(folder) == f"{name}: unknown tensor 'spare'"


def test_a_header_of_huge_length_is_refused_before_it_is_read(new_pack: Callable[[], Path]) -> None:
    for name in [THRESHOLDS, ORDER, INDEX, DENSE]:
        with case(name):
            folder = new_pack()
            raw = (folder / name).read_bytes()
            (folder / name).write_bytes((1 << 62).to_bytes(8, "little") + raw[8:])
            reseal(folder)
            message = f"{name}: header of {1 << 62} bytes in a file of {len(raw)}; the file is cut or damaged"
            assert refusal(folder) == message


def test_a_huge_shape_or_offset_is_refused_before_it_is_read(new_pack: Callable[[], Path]) -> None:
    far = b'"data_offsets":[%d,%d]' % (1 << 62, (1 << 62) + 768)
    cases = [
        (INDEX, b'"shape":[2,2]', b'"shape":[%d,2]' % (1 << 62),
         f"index.safetensors: tensor 'offset': U64 [{1 << 62}, 2] needs {1 << 66} bytes, data_offsets give 32"),
        (ORDER, b'"data_offsets":[0,768]', far,
         f"order.safetensors: tensor 'order' leaves a hole before it (offset {1 << 62}, expected 0)"),
    ]  # fmt: skip
    refuse_each(new_pack, cases, with_header)


def test_an_array_of_another_shape_or_type_is_refused(new_pack: Callable[[], Path]) -> None:
    def change(folder: Path, name: str, tensor: str, dtype: str, shape: tuple[int, ...]) -> None:
        values = np.broadcast_to(np.arange(shape[-1] if shape else 1), shape or (1,)).reshape(shape)
        with_tensors(folder, name, lambda tensors: tensors.update({tensor: array_tensor(dtype, values)}))

    wrong: dict[tuple[str, str, str], list[tuple[str, tuple[int, ...]]]] = {
        (THRESHOLDS, "threshold", "F32 [2, 2]"): [
            *(("F32", shape) for shape in [(2, 3), (3, 2), (4,), (2, 2, 1), ()]),
            *((dtype, (2, 2)) for dtype in ("F64", "F16")),
        ],
        (ORDER, "order", "U32 [2, 2, 48]"): [
            ("I32", (2, 2, 48)), ("U64", (2, 2, 48)), ("U32", (2, 2, 47)), ("U32", (4, 48)),
        ],
        (INDEX, "offset", "U64 [2, 2]"): [("U32", (2, 2)), ("U64", (2, 3))],
        (INDEX, "crc32", "U32 [2, 2]"): [("U64", (2, 2))],
        (INDEX, "codec", "U8 [2, 2, 3]"): [("U8", (2, 2))],
        (INDEX, "width", "U8 [2, 2, 3]"): [("U8", (2, 2, 4))],
        (INDEX, "sha256", "U8 [2, 2, 32]"): [("U8", (2, 2, 31))],
        (INDEX, "group", "U16 [2, 2, 3]"): [("U8", (2, 2, 3))],
    }  # fmt: skip
    cases = [
        (name, tensor, *found, f"{name}: tensor {tensor!r} is {found[0]} {list(found[1])}, expected {expected}")
        for (name, tensor, expected), each in wrong.items()
        for found in each
    ]
    refuse_each(new_pack, cases, change)


def test_a_missing_tensor_is_refused(new_pack: Callable[[], Path]) -> None:
    def remove(folder: Path, name: str, tensor: str) -> None:
        with_tensors(folder, name, lambda tensors: tensors.pop(tensor))

    index = ("offset", "size", "crc32", "group", "codec", "width", "scale_bits", "sha256")
    tensors = [*((INDEX, name) for name in index), (THRESHOLDS, "threshold")]
    tensors += [(DENSE, name) for name in ("norm", "layers.1.attention.k", "head")]
    refuse_each(new_pack, [(*each, f"{each[0]}: tensor {each[1]!r} is missing") for each in tensors], remove)


# --- thresholds and order


def test_a_threshold_is_a_number_from_0_up(new_pack: Callable[[], Path]) -> None:
    def change(folder: Path, value: float) -> None:
        with_array(folder, THRESHOLDS, "threshold", putting(value, 1, 0))

    place, expected = "thresholds.safetensors: threshold of layer 1 expert 0", "expected a number of 0 or more"
    wrong = [math.nan, -1.0, -0.5, math.inf, -math.inf]
    refuse_each(new_pack, [(value, f"{place} is {value}, {expected}") for value in wrong], change)
    for value in [0.0, -0.0, 1e-45, 3.4028235e38]:
        with case(value):
            folder = new_pack()
            change(folder, value)
            read_whole(folder)


def test_an_order_is_a_permutation_but_not_one_that_the_source_has(new_pack: Callable[[], Path]) -> None:
    message = "order.safetensors: order of layer 1 expert 1 is not a permutation of 48 neurons"
    cases = [(putting(value, 1, 1, 47), message) for value in (5, 48, 2**32 - 1)]
    refuse_each(new_pack, cases, lambda folder, edit: with_array(folder, ORDER, "order", edit))
    folder = new_pack()
    with_array(folder, ORDER, "order", lambda order: order.__setitem__((1, 1), np.arange(48)[::-1]))
    read_whole(folder)


def test_an_order_has_every_neuron_once_or_twice() -> None:
    for rows, num_neurons, fault in (
        ([0, 1, 2, 3], 4, ""),
        ([3, 1, 0, 2, 1, 3], 4, ""),
        ([0, 0, 2, 3], 4, "is not a permutation of 4 neurons"),  # without neuron 1, in the middle
        ([0, 0, 1, 3, 3], 4, "is not a permutation of 4 neurons, 1 of them twice"),
        ([0, 1, 1, 1, 2, 3], 4, "is not a permutation of 4 neurons, 2 of them twice"),
        ([0, 0, 0, 1], 2, "is not a permutation of 2 neurons, 2 of them twice"),
        ([1, 2, 3, 3], 4, "is not a permutation of 4 neurons"),
        ([0, 1, 2, 2], 4, "is not a permutation of 4 neurons"),
    ):
        with case(rows):
            found = order_fault(np.array([[rows]], np.uint32), num_neurons)
            assert found == (fault and f"order of layer 0 expert 0 {fault}")


# --- index


def test_a_format_we_do_not_read_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ("codec", 7, 0, "unknown codec 7 for gate"), ("codec", 255, 2, "unknown codec 255 for down"),
        ("codec", 0, 1, "unknown codec 0 for up"), ("codec", 8, 0, "unknown codec 8 for gate"),
        ("codec", 3, 1, "format of up: fp8 has scales of 32 bits, found 16"),
        ("codec", 4, 0, "format of gate: e5m2 has scales of 8 bits, found 16"),
        ("codec", 5, 1, "format of up: mxfp4 has scales of 8 bits, found 16"),
        ("codec", 1, 1, "format of up: bf16 has width 16 and no groups, found width 4, group 16"),
        ("width", 5, 0, "format of gate: width 5, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
        ("width", 0, 2, "format of down: width 0, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
        ("width", 16, 1, "format of up: width 16, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
        ("group", 48, 1, "format of up: group size 48, expected one of 16, 32, 64, 128 or row"),
        ("group", 65535, 1, "format of up: group size 65535, expected one of 16, 32, 64, 128 or row"),
        ("group", 128, 0, "format of gate: group size 128 does not divide rows of 64 values"),
        ("scale_bits", 4, 2, "format of down: scales of 4 bits, expected 8 or 16"),
        ("scale_bits", 0, 2, "format of down: scales of 0 bits, expected 8 or 16"),
    ]  # fmt: skip
    for tensor, value, matrix, message in cases:
        with case(tensor, value, matrix, message):
            folder = new_pack()
            held = np.frombuffer(read_tensors(folder / INDEX)[tensor].raw, np.uint16 if tensor == "group" else np.uint8)
            with_array(folder, INDEX, tensor, putting(value, 1, 0, matrix))
            assert refusal(folder) == f"index.safetensors: {message}"
            with_array(folder, INDEX, tensor, putting(int(held.reshape(2, 2, 3)[1, 0, matrix]), 1, 0, matrix))
            read_whole(folder)


def test_a_format_of_other_size_than_the_rows_is_refused(folder: Path) -> None:
    with_array(folder, INDEX, "width", putting(8, 0, 1, 1))
    # 64 codes of 8 bit, 8 + 8 bytes of scales and zeros, a CRC: 84, padded to 96; at 4 bit 52, padded to 64.
    assert refusal(folder) == "index.safetensors: size of layer 0 expert 1 is 8448, expected 9984"


def test_an_extent_that_lies_elsewhere_than_its_formats_say_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ("offset", 4096, 16384),  # where expert 0 lies
        ("offset", 8192, 16384),  # within expert 0
        ("offset", 16385, 16384),
        ("offset", 0, 16384),
        ("offset", 2**62, 16384),
        ("offset", 2**64 - 4096, 16384),
        ("size", 8449, 8448),
        ("size", 0, 8448),
        ("size", 2**62, 8448),
        ("selector_row_bytes", 48, 64),
        ("selector_row_bytes", 0, 64),
        ("record_row_bytes", 2**32 - 16, 112),
    ]
    for tensor, value, expected in cases:
        with case(tensor, value, expected):
            folder = new_pack()
            with_array(folder, INDEX, tensor, putting(value, 1, 1))
            assert refusal(folder) == f"index.safetensors: {tensor} of layer 1 expert 1 is {value}, expected {expected}"
            with_array(folder, INDEX, tensor, putting(expected, 1, 1))
            read_whole(folder)


def test_another_crc_than_the_extent_s_is_refused_when_it_is_read(folder: Path) -> None:
    with_array(folder, INDEX, "crc32", lambda crc32: crc32.__setitem__((0, 1), crc32[0, 1] ^ 1))
    message = "experts-000.safetensors: expert 1: CRC-32 does not match its bytes; the file is damaged"
    assert refusal(folder) == message


# --- dense part


def test_a_dense_tensor_of_a_type_we_do_not_compute_with_is_refused(new_pack: Callable[[], Path]) -> None:
    def change(folder: Path, dtype: str) -> None:
        def retype(tensors: Tensors) -> None:
            shape = tensors["norm"].shape
            tensors["norm"] = HeldTensor(dtype, shape, bytes(ELEMENT_BYTES[dtype] * math.prod(shape)))

        with_tensors(folder, DENSE, retype)

    message = "dense.safetensors: tensor 'norm' is {}, expected one of BF16, F16, F32".format
    refuse_each(new_pack, [(dtype, message(dtype)) for dtype in ["F64", "U8", "I8", "U16"]], change)


HEADER_FAULT = "dense.safetensors: header does not match its tensors; the file is damaged"


def test_a_dense_header_that_is_not_the_models_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [(b'"shape":' + shape, HEADER_FAULT) for shape in (b"[64,96]", b"[6144]", b"[96,64,1]", b"[48,128]")]
    refuse_each(new_pack, cases, lambda folder, new: with_header(folder, DENSE, b'"shape":[96,64]', new))
    reseal(folder := new_pack(), after=lambda values: values["model"].update(vocab_size=97))
    assert refusal(folder) == HEADER_FAULT
    extra = {"layers.2.router": array_tensor("F32", [1.0])}
    with_tensors(folder := new_pack(), DENSE, lambda tensors: tensors.update(extra))
    assert refusal(folder) == HEADER_FAULT
    with_header(folder := new_pack(), DENSE, b'"dtype":"BF16"', b'"dtype":"F16"')
    read_whole(folder)


def dense_entry(values: JsonObject, name: str = "embed") -> JsonObject:
    return next(entry for entry in values["dense"] if entry["name"] == name)


def twice(values: JsonObject) -> None:
    values["dense"].insert(0, dict(dense_entry(values), format=EIGHT | {"width": 4}))


EIGHT = {"codec": "affine", "width": 8, "group": 16, "scale_bits": 16}


def test_a_quantized_dense_matrix_that_is_not_what_the_manifest_says_is_refused(
    new_dense_pack: Callable[[], Path],
) -> None:
    cases = [
        (lambda v: dense_entry(v).update(rows=97), "manifest.json: dense 'embed': shape [97, 64], expected [96, 64]"),
        (lambda v: dense_entry(v).update(cols=128), "manifest.json: dense 'embed': shape [96, 128], expected [96, 64]"),
        (lambda v: dense_entry(v)["format"].update(width=5),
         "manifest.json: dense 'embed': width 5, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
        (lambda v: dense_entry(v)["format"].update(group=128),
         "manifest.json: dense 'embed': group size 128 does not divide rows of 64 values"),
        (lambda v: dense_entry(v)["format"].update(codec="ternary"),
         "manifest.json: dense[0]: format: codec: found 'ternary', "
         "expected one of bf16, affine, fp8, e5m2, mxfp4, trellis"),
        (lambda v: dense_entry(v)["format"].update(codec="trellis", width=2),
         "manifest.json: dense 'embed': trellis of width 2, expected one of 4, 5, 6, 7, 8"),
        (lambda v: dense_entry(v)["format"].update(codec="fp8", group=128, scale_bits=16),
         "manifest.json: dense 'embed': fp8 has scales of 32 bits, found 16"),
        (lambda v: dense_entry(v)["format"].update(codec="e5m2", scale_bits=8),
         "manifest.json: dense 'embed': e5m2 has width 8 and no groups, found width 8, group 16"),
        (lambda v: dense_entry(v)["format"].update(codec="mxfp4", group=32, scale_bits=8),
         "manifest.json: dense 'embed': mxfp4 has width 4 and groups of 32, found width 8, group 32"),
        (lambda v: dense_entry(v)["format"].update(width=4), HEADER_FAULT),
        (lambda v: dense_entry(v).update(name="layers.9.attention.q"),
         "dense.safetensors: tensor 'embed' is U8, expected one of BF16, F16, F32"),
        (lambda v: v["dense"].remove(dense_entry(v)),
         "dense.safetensors: tensor 'embed' is U8, expected one of BF16, F16, F32"),
        (lambda v: v["dense"].append({"name": "layers.9.attention.q", "rows": 64, "cols": 64, "format": EIGHT}),
         "manifest.json: dense 'layers.9.attention.q' is not a tensor of this model"),
        (lambda v: v["dense"].append({"name": "layers.0.router", "rows": 2, "cols": 64, "format": EIGHT}),
         "manifest.json: dense 'layers.0.router': must not be quantized"),
        (lambda v: v["dense"].append({"name": "norm", "rows": 1, "cols": 64, "format": EIGHT}),
         "manifest.json: dense 'norm': shape [1, 64], expected [64]"),
        (twice, "manifest.json: dense: a name is listed twice"),
    ]  # fmt: skip
    folder = new_dense_pack()
    reseal(folder)
    read_whole(folder)
    refuse_each(new_dense_pack, cases, lambda folder, fault: reseal(folder, after=fault))


# --- expert files


def test_an_expert_header_that_changed_is_refused(folder: Path) -> None:
    edit_byte(folder / EXPERTS, 4095)  # a space of its padding
    assert refusal(folder) == "experts-000.safetensors: header does not match the index; the file is damaged"


def test_another_expert_header_is_refused_even_where_the_manifest_agrees(folder: Path) -> None:
    with_header(folder, EXPERTS, b'"0.selector"', b'"0.selectors"')
    assert refusal(folder) == (
        "manifest.json: header digest of experts-000.safetensors does not match the header that the index gives"
    )


def test_an_expert_file_longer_than_its_extents_is_refused_even_where_the_manifest_agrees(folder: Path) -> None:
    raw = (folder / EXPERTS).read_bytes()
    (folder / EXPERTS).write_bytes(raw + bytes(4096))
    reseal(folder)
    assert refusal(folder) == (
        f"manifest.json: experts-000.safetensors has {len(raw) + 4096} bytes, 4096 of them header; "
        f"the index gives {len(raw)} and 4096"
    )


def test_a_header_of_another_length_than_the_index_gives_is_refused(folder: Path) -> None:
    reseal(folder, after=lambda values: values["expert_files"][1].update(header_bytes=4097))
    message = refusal(folder)
    assert message.startswith("manifest.json: ") and "4097" in message


def test_another_selector_kind_than_the_rows_are_laid_out_for_is_refused(folder: Path) -> None:
    reseal(folder, after=lambda values: values.update(selector="both"))
    # Selector rows of gate and up: 96 + 4 bytes, padded to 112.
    assert refusal(folder) == "index.safetensors: selector_row_bytes of layer 0 expert 0 is 64, expected 112"
