"""Every reason to refuse a pack for what its tables, dense part and expert files say, sealed around the fault."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    reseal,
    write_tensors,
)

from moe_pack.formats.pack.manifests import order_fault

THRESHOLDS, ORDER, INDEX = "thresholds.safetensors", "order.safetensors", "index.safetensors"
DENSE, EXPERTS = "dense.safetensors", "experts-000.safetensors"

Tensors = dict[str, HeldTensor]
Edit = Callable[[NDArray[Any]], object]


def putting(value: float, *place: int) -> Edit:
    """An edit that puts `value` at one place of an array."""
    return lambda array: array.__setitem__(place, value)


def with_tensors(folder: Path, name: str, change: Callable[[Tensors], object]) -> None:
    """Rewrites a file of the pack with changed tensors, and seals the pack."""
    tensors = read_tensors(folder / name)
    change(tensors)
    write_tensors(folder / name, tensors)
    reseal(folder)


def with_array(folder: Path, name: str, tensor: str, edit: Edit) -> None:
    """Changes values of a tensor in place, and seals the pack."""
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


@pytest.mark.parametrize("name", [THRESHOLDS, ORDER, INDEX])
def test_a_table_written_without_padding_is_read(folder: Path, name: str) -> None:
    def without_padding(tensors: Tensors) -> None:
        for pad in [held for held in tensors if held.startswith("pad.")]:
            del tensors[pad]

    with_tensors(folder, name, without_padding)
    read_whole(folder)


@pytest.mark.parametrize("name", [THRESHOLDS, ORDER, INDEX])
def test_an_unknown_tensor_in_a_table_is_refused_and_padding_is_not(folder: Path, name: str) -> None:
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
            assert refusal(folder) == (
                f"{name}: header of {1 << 62} bytes in a file of {len(raw)}; the file is cut or damaged"
            )


def test_a_tensor_of_huge_shape_is_refused_before_it_is_read(folder: Path) -> None:
    with_header(folder, INDEX, b'"shape":[2,2]', b'"shape":[%d,2]' % (1 << 62))
    assert refusal(folder) == (
        f"index.safetensors: tensor 'offset': U64 [{1 << 62}, 2] needs {1 << 66} bytes, data_offsets give 32"
    )


def test_a_tensor_at_a_huge_offset_is_refused(folder: Path) -> None:
    with_header(folder, ORDER, b'"data_offsets":[0,768]', b'"data_offsets":[%d,%d]' % (1 << 62, (1 << 62) + 768))
    message = f"order.safetensors: tensor 'order' leaves a hole before it (offset {1 << 62}, expected 0)"
    assert refusal(folder) == message


# --- thresholds


def test_a_threshold_that_is_no_number_from_0_up_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [(math.nan, "nan"), (-1.0, "-1.0"), (-0.5, "-0.5"), (math.inf, "inf"), (-math.inf, "-inf")]
    for value, text in cases:
        with case(value, text):
            folder = new_pack()
            with_array(folder, THRESHOLDS, "threshold", putting(value, 1, 0))
            assert refusal(folder) == (
                f"thresholds.safetensors: threshold of layer 1 expert 0 is {text}, expected a number of 0 or more"
            )


def test_a_threshold_from_0_to_the_largest_float_is_read(new_pack: Callable[[], Path]) -> None:
    for value in [0.0, -0.0, 1e-45, 3.4028235e38]:
        with case(value):
            folder = new_pack()
            with_array(folder, THRESHOLDS, "threshold", putting(value, 1, 0))
            read_whole(folder)


def test_thresholds_of_another_shape_or_type_are_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ("F32", (2, 3)),
        ("F32", (3, 2)),
        ("F32", (4,)),
        ("F32", (2, 2, 1)),
        ("F32", ()),
        ("F64", (2, 2)),
        ("F16", (2, 2)),
    ]
    for dtype, shape in cases:
        with case(dtype, shape):
            folder = new_pack()
            write_tensors(folder / THRESHOLDS, {"threshold": array_tensor(dtype, np.zeros(shape))})
            reseal(folder)
            assert refusal(folder) == (
                f"thresholds.safetensors: tensor 'threshold' is {dtype} {list(shape)}, expected F32 [2, 2]"
            )


def test_missing_thresholds_are_refused(folder: Path) -> None:
    with_tensors(folder, THRESHOLDS, lambda tensors: tensors.pop("threshold"))
    assert refusal(folder) == "thresholds.safetensors: tensor 'threshold' is missing"


# --- order


@pytest.mark.parametrize("value", [5, 48, 2**32 - 1])
def test_an_order_that_is_no_permutation_is_refused(folder: Path, value: int) -> None:
    with_array(folder, ORDER, "order", putting(value, 1, 1, 47))
    assert refusal(folder) == "order.safetensors: order of layer 1 expert 1 is not a permutation of 48 neurons"


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


def test_an_order_other_than_the_source_s_is_read(folder: Path) -> None:
    with_array(folder, ORDER, "order", lambda order: order.__setitem__((1, 1), np.arange(48)[::-1]))
    read_whole(folder)


def test_an_order_of_another_shape_or_type_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [("I32", (2, 2, 48)), ("U64", (2, 2, 48)), ("U32", (2, 2, 47)), ("U32", (4, 48))]
    for dtype, shape in cases:
        with case(dtype, shape):
            folder = new_pack()
            write_tensors(folder / ORDER, {"order": array_tensor(dtype, np.broadcast_to(np.arange(shape[-1]), shape))})
            reseal(folder)
            assert (
                refusal(folder)
                == f"order.safetensors: tensor 'order' is {dtype} {list(shape)}, expected U32 [2, 2, 48]"
            )


# --- index


def test_a_format_we_do_not_read_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ("codec", 7, 0, "unknown codec 7 for gate"),
        ("codec", 255, 2, "unknown codec 255 for down"),
        ("codec", 0, 1, "unknown codec 0 for up"),
        ("codec", 8, 0, "unknown codec 8 for gate"),
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
    ]
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


def test_a_missing_array_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = ["offset", "size", "crc32", "group", "codec", "width", "scale_bits", "sha256"]
    for name in cases:
        with case(name):
            folder = new_pack()
            with_tensors(folder, INDEX, lambda tensors: tensors.pop(name))
            assert refusal(folder) == f"index.safetensors: tensor {name!r} is missing"


def test_an_array_of_another_shape_or_type_is_refused(new_pack: Callable[[], Path]) -> None:
    cases = [
        ("offset", "U32", (2, 2), "U64 [2, 2]"),
        ("offset", "U64", (2, 3), "U64 [2, 2]"),
        ("crc32", "U64", (2, 2), "U32 [2, 2]"),
        ("codec", "U8", (2, 2), "U8 [2, 2, 3]"),
        ("width", "U8", (2, 2, 4), "U8 [2, 2, 3]"),
        ("sha256", "U8", (2, 2, 31), "U8 [2, 2, 32]"),
        ("group", "U8", (2, 2, 3), "U16 [2, 2, 3]"),
    ]
    for name, dtype, shape, expected in cases:
        with case(name, dtype, shape, expected):
            folder = new_pack()
            with_tensors(folder, INDEX, lambda tensors: tensors.update({name: array_tensor(dtype, np.ones(shape))}))
            assert (
                refusal(folder) == f"index.safetensors: tensor {name!r} is {dtype} {list(shape)}, expected {expected}"
            )


def test_another_crc_than_the_extent_s_is_refused_when_it_is_read(folder: Path) -> None:
    with_array(folder, INDEX, "crc32", lambda crc32: crc32.__setitem__((0, 1), crc32[0, 1] ^ 1))
    assert refusal(folder) == (
        "experts-000.safetensors: expert 1: CRC-32 does not match its bytes; the file is damaged"
    )


# --- dense part


def test_a_dense_tensor_that_is_missing_is_refused(folder: Path) -> None:
    for name in ("norm", "layers.1.attention.k", "head"):
        tensors = read_tensors(folder / DENSE)
        with_tensors(folder, DENSE, lambda held, name=name: held.pop(name))  # type: ignore[misc]  # bound early
        assert refusal(folder) == f"dense.safetensors: tensor {name!r} is missing"
        write_tensors(folder / DENSE, tensors)


def test_a_dense_tensor_of_a_type_we_do_not_compute_with_is_refused(new_pack: Callable[[], Path]) -> None:
    for dtype in ["F64", "U8", "I8", "U16"]:
        with case(dtype):
            folder = new_pack()
            tensors = read_tensors(folder / DENSE)
            shape = tensors["norm"].shape
            tensors["norm"] = HeldTensor(dtype, shape, bytes(ELEMENT_BYTES[dtype] * math.prod(shape)))
            write_tensors(folder / DENSE, tensors)
            reseal(folder)
            assert refusal(folder) == f"dense.safetensors: tensor 'norm' is {dtype}, expected one of BF16, F16, F32"


HEADER_FAULT = "dense.safetensors: header does not match its tensors; the file is damaged"


def test_a_misshapen_dense_tensor_is_refused(new_pack: Callable[[], Path]) -> None:
    for shape in ["[64,96]", "[6144]", "[96,64,1]", "[48,128]"]:
        with case(shape):
            folder = new_pack()
            with_header(folder, DENSE, b'"shape":[96,64]', b'"shape":' + shape.encode())
            assert refusal(folder) == HEADER_FAULT


def test_a_dense_tensor_of_more_rows_than_the_model_s_is_refused(folder: Path) -> None:
    reseal(folder, after=lambda values: values["model"].update(vocab_size=97))
    assert refusal(folder) == HEADER_FAULT


def test_a_dense_tensor_nobody_asks_for_is_refused(folder: Path) -> None:
    with_tensors(folder, DENSE, lambda tensors: tensors.update({"layers.2.router": array_tensor("F32", [1.0])}))
    assert refusal(folder) == HEADER_FAULT


def test_a_dense_tensor_of_another_16_bit_type_is_read(folder: Path) -> None:
    with_header(folder, DENSE, b'"dtype":"BF16"', b'"dtype":"F16"')
    read_whole(folder)


def test_the_pack_with_quantized_dense_matrices_is_sound(dense_folder: Path) -> None:
    reseal(dense_folder)
    read_whole(dense_folder)


def dense_entry(values: JsonObject, name: str = "embed") -> JsonObject:
    return next(entry for entry in values["dense"] if entry["name"] == name)


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
    ]  # fmt: skip
    for fault, message in cases:
        with case(fault, message):
            dense_folder = new_dense_pack()
            reseal(dense_folder, after=fault)
            assert refusal(dense_folder) == message


def test_a_dense_matrix_listed_twice_is_refused(dense_folder: Path) -> None:
    def twice(values: JsonObject) -> None:
        again = dict(dense_entry(values), format=EIGHT | {"width": 4})
        values["dense"].insert(0, again)

    reseal(dense_folder, after=twice)
    assert refusal(dense_folder) == "manifest.json: dense: a name is listed twice"


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
