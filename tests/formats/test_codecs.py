"""Codecs against bytes written by hand, against hqq's arithmetic, and against plain numpy or Python."""

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from support.cases import assert_each, case
from torch import Tensor

from moe_pack.formats import BF16, ROW_GROUP, PartFormat, part_format, trellis_format
from moe_pack.formats.pack import codecs
from moe_pack.formats.pack.codecs import Affine, Bf16, E5m2, Fp8, Mxfp4, affine, decode_part, pack_codes, unpack_codes
from moe_pack.formats.pack.plans import E5M2, FP8, KEPT, MXFP4, TRELLIS_WIDTHS, format_fault

WIDTHS = (1, 2, 3, 4, 8)

# 1 bit: byte j holds codes j, j+8, ..., j+56 from bit 0 up. Of run k (codes 8k to 8k+7) the first k+1 codes are 1.
RISING = [1] + [0] * 7 + [1] * 2 + [0] * 6 + [1] * 3 + [0] * 5 + [1] * 4 + [0] * 4
RISING += [1] * 5 + [0] * 3 + [1] * 6 + [0] * 2 + [1] * 7 + [0] + [1] * 8
RISING_BYTES = "ff fe fc f8 f0 e0 c0 80"

# 2 bit: byte j holds codes j, j+16, j+32, j+48: here 0 1 2 3 ..., then 3, then 0, then 1: 0b01_00_11_cc.
QUARTERS = [0, 1, 2, 3] * 4 + [3] * 16 + [0] * 16 + [1] * 16
QUARTERS_BYTES = "4c 4d 4e 4f 4c 4d 4e 4f 4c 4d 4e 4f 4c 4d 4e 4f"

# 4 bit: byte j holds codes j and j+32; code j is j // 4.
STAIRS = [j // 4 for j in range(64)]
STAIRS_BYTES = "80 80 80 80 91 91 91 91 a2 a2 a2 a2 b3 b3 b3 b3 c4 c4 c4 c4 d5 d5 d5 d5 e6 e6 e6 e6 f7 f7 f7 f7"

# 3 bit: the plane of the two low bits, then the plane of the high bit.
OCTAL = [low | high << 2 for low, high in zip(QUARTERS, RISING, strict=True)]

BLOCKS = [
    (1, RISING, RISING_BYTES),
    (2, QUARTERS, QUARTERS_BYTES),
    (3, OCTAL, f"{QUARTERS_BYTES} {RISING_BYTES}"),
    (4, STAIRS, STAIRS_BYTES),
    (8, [255 - 3 * j for j in range(64)], bytes(255 - 3 * j for j in range(64)).hex(" ")),
]


def codes_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def random_codes(rows: int, cols: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 2**width, (rows, cols), generator=generator, dtype=torch.uint8)


def bits(values: Tensor) -> Tensor:
    """Float32 values as their bits: equal only where they are the same number, sign of zero included."""
    return values.contiguous().view(torch.int32)


def test_a_block_of_codes_has_the_bytes_worked_out_by_hand() -> None:
    for width, codes, written in BLOCKS:
        with case(width, codes, written):
            assert bytes(pack_codes(codes_of([codes]), width)[0].tolist()).hex(" ") == written
            assert unpack_codes(codes_of([list(bytes.fromhex(written))]), width)[0].tolist() == codes
            # Blocks of a row follow each other, and rows share nothing.
            zeros, empty = [0] * 64, "00" * (8 * width)
            packed = pack_codes(codes_of([codes + zeros, zeros + codes]), width)
            raw = written.replace(" ", "")
            assert [bytes(row).hex() for row in packed.tolist()] == [raw + empty, empty + raw]


def test_packed_codes_come_back() -> None:
    for width in WIDTHS:
        ends = codes_of([[0] * 64, [2**width - 1] * 64])
        for codes in (ends, *(random_codes(5, cols, width) for cols in (64, 192, 448))):
            with case(width, codes.shape):
                packed = pack_codes(codes, width)
                assert packed.shape == (len(codes), codes.shape[1] * width // 8)
                assert torch.equal(unpack_codes(packed, width), codes)


def test_affine_decoding_is_bit_equal_to_hqq() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when hqq compiles a function on import
        from hqq.core.quantize import Quantizer as HqqQuantizer

    for width in WIDTHS:
        for group in [16, 32, 64, 128, 0]:
            with case(width, group):
                rows, cols = 7, 384
                part = part_format(width, group)
                codec = affine(part, cols)
                stored = random_scales(rows, codec.num_groups)
                codes = random_codes(rows, cols, width)
                scale, zero = (torch.from_numpy(half.numpy().view(np.float16).astype(np.float32)) for half in stored)
                meta = {
                    "compute_dtype": torch.float32,
                    "packing": None,
                    "scale": scale.view(-1, 1),
                    "zero": zero.view(-1, 1),
                    "axis": 1,
                    "nbits": width,
                    "group_size": cols // codec.num_groups,
                    "shape": torch.Size((rows, cols)),
                }
                theirs = HqqQuantizer.dequantize(codes.view(rows * codec.num_groups, -1), meta)
                ours = decode_part(part, cols, codec.encode(codes, *stored))
                assert torch.equal(bits(ours), bits(theirs))


def random_scales(rows: int, groups: int) -> tuple[Tensor, Tensor]:
    """Bytes of float16 scales and zeros: usual ones, and the smallest, the largest and none at all."""
    generator = torch.Generator().manual_seed(groups)
    scale = (torch.rand((rows, groups), generator=generator) * 0.1).to(torch.float16)
    zero = (torch.randn((rows, groups), generator=generator) * 30).to(torch.float16)
    scale[0, 0], scale[1, 0], scale[2, 0] = 2.0**-24, 65504.0, 0.0
    zero[1, 0], zero[2, 0], zero[3, 0] = -65504.0, 2.0**-24, 0.0
    return scale.view(torch.uint8), zero.view(torch.uint8)


def test_an_affine_row_is_codes_then_scales_then_zeros_and_means_code_minus_zero_times_scale() -> None:
    codec = affine(part_format(4, 32), 64)
    scales, zeros = codec.store_scales(torch.tensor([[1.0, 0.5]]), torch.tensor([[2.0, -2.0]]))
    row = codec.encode(codes_of([STAIRS]), scales, zeros)
    assert bytes(row[0].tolist()).hex(" ") == f"{STAIRS_BYTES} 00 3c 00 38 00 40 00 c0"
    expected = [j // 4 - 2.0 for j in range(32)] + [(j // 4 + 2.0) * 0.5 for j in range(32, 64)]
    assert decode_part(part_format(4, 32), 64, row)[0].tolist() == expected


def test_a_part_decodes_alike_from_the_middle_of_wider_rows() -> None:
    cases = [part_format(3, 16), part_format(4, 32, 8), part_format(8, 0), BF16, *KEPT]
    for part in cases:
        with case(part):
            size = part.part_bytes(64)
            held = torch.randint(0, 120, (6, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
            wider = torch.full((6, size + 13), 255, dtype=torch.uint8)
            wider[:, 5 : 5 + size] = held
            assert torch.equal(bits(decode_part(part, 64, wider[:, 5 : 5 + size])), bits(decode_part(part, 64, held)))


def numpy_byte_scales(values: NDArray[np.float32], signed: bool) -> NDArray[np.uint8]:
    """The plain twin: a float16 multiplier, then each value as the nearest multiple of it."""
    top = 127 if signed else 255
    out = np.empty((len(values), 2 + values.shape[1]), np.uint8)
    for i, row in enumerate(values):
        multiplier = np.float16(max(np.abs(row).max() / np.float32(top), np.float32(2.0**-24)))
        steps = np.clip(np.rint(row / np.float32(multiplier)), -top if signed else 1, top)
        out[i, :2] = np.frombuffer(multiplier.tobytes(), np.uint8)
        out[i, 2:] = steps.astype(np.int8 if signed else np.uint8).view(np.uint8)
    return out


def some_values(groups: int, signed: bool) -> NDArray[np.float32]:
    generator = np.random.default_rng(groups)
    values = generator.normal(0, 10, (9, groups)).astype(np.float32)
    values[1] = 0  # a row without scale
    values[2] = 3.5  # a constant row
    values[3] *= np.float32(1e-9)  # below what float16 can hold
    values[4, 0] = 4000  # one group far above the others
    return values if signed else np.abs(values)


def test_byte_scales_are_stored_as_plain_numpy_stores_them() -> None:
    for signed in [False, True]:
        for groups in [1, 4, 24]:
            with case(signed, groups):
                values = some_values(groups, signed)
                other = np.ones_like(values)
                scale, zero = (other, values) if signed else (values, other)
                codec = Affine(part_format(4, 16, 8), 16 * groups)
                stored = codec.store_scales(torch.from_numpy(scale), torch.from_numpy(zero))[signed]
                assert np.array_equal(stored.numpy(), numpy_byte_scales(values, signed))


def test_byte_scales_decode_as_plain_numpy_decodes_them() -> None:
    for group in [16, 32, 64, 128, 0]:
        with case(group):
            rows, cols, part = 9, 384, part_format(4, group, 8)
            codec = affine(part, cols)
            scales = numpy_byte_scales(some_values(codec.num_groups, False), False)
            zeros = numpy_byte_scales(some_values(codec.num_groups, True), True)
            codes = random_codes(rows, cols, 4)
            ours = decode_part(part, cols, codec.encode(codes, torch.from_numpy(scales), torch.from_numpy(zeros)))
            expected = np.empty((rows, cols), np.float32)
            for i in range(rows):
                for j in range(cols):
                    k = j // (cols // codec.num_groups)
                    scale = np.float32(scales[i, 2 + k]) * np.float32(scales[i, :2].view(np.float16)[0])
                    zero = np.float32(zeros[i, 2 + k].view(np.int8)) * np.float32(zeros[i, :2].view(np.float16)[0])
                    expected[i, j] = (np.float32(codes[i, j].item()) - zero) * scale
            assert torch.equal(bits(ours), bits(torch.from_numpy(expected)))


def test_a_byte_scale_is_within_half_a_step_of_the_scale_given_and_never_zero() -> None:
    for groups in [1, 4, 24]:
        with case(groups):
            scale = torch.rand((20, groups), generator=torch.Generator().manual_seed(0)) + 0.1
            codec = Affine(part_format(4, 16, 8), 16 * groups)
            loaded, _ = codec.load_scales(*codec.store_scales(scale, scale))
            largest = scale.amax(dim=1, keepdim=True)
            # Half a step, and what rounding the multiplier to float16 (2^-11 of it) shifts the largest scale by.
            assert ((loaded - scale).abs() <= 0.5 * largest / 255 + largest * 2**-11).all()
    codec = Affine(part_format(4, 16, 8), 64)
    loaded, _ = codec.load_scales(*codec.store_scales(torch.tensor([[1000.0, 1e-6, 1.0, 0.0]]), torch.zeros(1, 4)))
    assert (loaded > 0).all()


# -- What FP8 and MXFP4 sources hold -----------------------------------------------------------------------------------

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(1, 256)


def scales_of(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def test_rows_of_sources_are_codes_then_scales() -> None:
    codes = torch.arange(192, dtype=torch.uint8).view(1, 192)
    row = bytes(Fp8(FP8, 192).encode(codes, scales_of(1.0, -0.5))[0].tolist())
    assert row == bytes(range(192)) + bytes.fromhex("00 00 80 3f 00 00 00 bf")
    row = bytes(E5m2(E5M2, 256).encode(EVERY_BYTE, codes_of([[131]]))[0].tolist())
    assert row == bytes(range(256)) + b"\x83"
    row = bytes(Mxfp4(MXFP4, 64).encode(codes_of([STAIRS]), codes_of([[126, 129]]))[0].tolist())
    assert row.hex(" ") == f"{STAIRS_BYTES} 7e 81"


def test_fp8_codes_are_the_numbers_worked_out_by_hand() -> None:
    """Least and largest subnormal, least normal, one, the largest, and no number, of either sign."""
    codes = [0x00, 0x01, 0x07, 0x08, 0x38, 0x3C, 0x7E, 0x7F, 0x80, 0x81, 0xB8, 0xFE, 0xFF] + [0] * 51
    found = decode_part(FP8, 64, Fp8(FP8, 64).encode(codes_of([codes]), scales_of(1.0)))[0, :13]
    expected = [0.0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 1.5, 448.0, np.nan, -0.0, -(2**-9), -1.0, -448.0, np.nan]
    np.testing.assert_array_equal(found.numpy(), np.array(expected, np.float32))
    assert bits(found)[8] == -(2**31)  # zero below zero


def test_e5m2_codes_are_the_numbers_worked_out_by_hand() -> None:
    codes = [0x00, 0x01, 0x03, 0x04, 0x3C, 0x3E, 0x7B, 0x7C, 0x7D, 0x7F, 0x80, 0xBC, 0xFB, 0xFC, 0xFE] + [0] * 49
    found = decode_part(E5M2, 64, E5m2(E5M2, 64).encode(codes_of([codes]), codes_of([[127]])))[0, :15]
    expected = [0.0, 2**-16, 3 * 2**-16, 2**-14, 1.0, 1.5, 57344.0, np.inf, np.nan, np.nan]
    expected += [-0.0, -1.0, -57344.0, -np.inf, np.nan]
    np.testing.assert_array_equal(found.numpy(), np.array(expected, np.float32))
    assert bits(found)[10] == -(2**31)


def test_a_byte_of_scale_is_a_power_of_two() -> None:
    cases = [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (130, 8.0), (254, 2.0**127), (255, float("nan"))]
    for byte, scale in cases:
        with case(byte, scale):
            ones = codes_of([[2] * 32 + [10] * 32])  # 1 and -1
            found = decode_part(MXFP4, 64, Mxfp4(MXFP4, 64).encode(ones, codes_of([[byte, 127]])))[0]
            np.testing.assert_array_equal(found.numpy(), np.array([scale] * 32 + [-1.0] * 32, np.float32))
            row = E5m2(E5M2, 64).encode(codes_of([[0x3C] * 64]), codes_of([[byte]]))
            np.testing.assert_array_equal(decode_part(E5M2, 64, row)[0].numpy(), np.array([scale] * 64, np.float32))


def test_products_of_the_smallest_scale_are_exact() -> None:
    row = Mxfp4(MXFP4, 64).encode(codes_of([list(range(16)) * 4]), codes_of([[0, 1]]))
    expected = [v * 2.0**-127 for v in E2M1 * 2] + [v * 2.0**-126 for v in E2M1 * 2]
    assert decode_part(MXFP4, 64, row)[0].tolist() == expected
    least = decode_part(E5M2, 64, E5m2(E5M2, 64).encode(codes_of([[1] * 64]), codes_of([[0]])))
    assert least[0, 0].item() == 2.0**-143


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_mxfp4_is_bit_equal_to_transformers() -> None:
    """Every pair of codes, with every scale but the one that is no number, which transformers takes for 2^128."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(255, dtype=torch.uint8).view(-1, 1).repeat(1, 8)
    codes = torch.randint(0, 16, (255, 256), generator=generator, dtype=torch.uint8)
    codes[:, :16] = torch.arange(16, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(
        (codes[:, 0::2] | codes[:, 1::2] << 4).view(1, 255, 8, 16), scales.view(1, 255, 8), dtype=torch.float32
    )
    ours = decode_part(MXFP4, 256, Mxfp4(MXFP4, 256).encode(codes, scales))
    assert torch.equal(bits(ours), bits(theirs[0].T))


def test_fp8_is_bit_equal_to_plain_numpy_with_any_scale() -> None:
    scales = scales_of(1.0, -3.7e-5, 2.0**-149, 1e38, -0.0, float("inf"), float("nan"), 2.0**-126)
    row = Fp8(FP8, 1024).encode(EVERY_BYTE.repeat(1, 4), scales)
    numbers = np.concatenate([np.array([_e4m3(code) for code in range(256)], np.float32)] * 4)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = numbers * np.repeat(scales[0].numpy(), 128)
    found = decode_part(FP8, 1024, row)[0].numpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(found.view(np.int32)[is_number], expected.view(np.int32)[is_number])


def _e4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = fraction * 2.0**-9 if not exponent else (8 + fraction) * 2.0 ** (exponent - 10)
    return float("nan") if code & 127 == 127 else -magnitude if code & 128 else magnitude


def test_bfloat16_weights_come_back_unchanged() -> None:
    weights = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights[0, :4] = torch.tensor([0.0, -0.0, 3.3895314e38, 9.184e-41])  # the largest; the smallest subnormal
    codec = Bf16(BF16, 64)
    assert torch.equal(bits(codec.decode(codec.encode(weights))), bits(weights.to(torch.float32)))
    row = codec.encode(torch.tensor([[1.0, -2.0, 0.5] + [0.0] * 61]))[0]
    assert bytes(row[:8].tolist()).hex(" ") == "80 3f 00 c0 00 3f 00 00"  # little-endian


def test_float32_weights_round_to_the_nearest_bfloat16_ties_to_even() -> None:
    values = [1.0, 1.00390625, 1.01171875, 1.0039063, 1.0039062, -1.01171875]
    words = np.array(values, np.float32).view(np.uint32)
    expected = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")
    weights = torch.tensor([values + [0.0] * 58], dtype=torch.float32)
    assert bytes(Bf16(BF16, 64).encode(weights)[0, :12].tolist()) == expected.tobytes()


# -- Trellises ---------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
FORMATS = [trellis_format(width, group, bits) for width in TRELLIS_WIDTHS for group, bits in ((ROW_GROUP, 16), (16, 8))]


def random_steps(rows: int, num_cols: int, width: int) -> Tensor:
    """Random nibbles, and as many bits of refinements as the width has: u8 [rows, steps]."""
    generator = torch.Generator().manual_seed(width)
    first, second = (1 << bits for bits in codecs.trellis_refinements(width))
    nibbles, ours, theirs = (
        torch.randint(0, size, (rows, num_cols // 2), generator=generator, dtype=torch.uint8)
        for size in (16, first, second)
    )
    return nibbles | ours << 4 | theirs << 6


def decoded_slowly(part: PartFormat, num_cols: int, codes: list[int], scales: list[float]) -> list[float]:
    """A row's weights, step by step, from the codes that `encode` takes."""
    newest, middle, oldest = (bytes.fromhex(table) for table in codecs.TRELLIS_HASH)
    levels = [np.frombuffer(bytes.fromhex(table), np.int8).tolist() for table in codecs.TRELLIS_LEVELS[part.width]]
    weights, before = [0.0] * num_cols, [0, 0]
    for step, code in enumerate(codes):
        mixed = newest[code & 15] ^ middle[before[0]] ^ oldest[before[1]]
        before = [code & 15, before[0]]
        block, place = divmod(step, 32)
        column = block * 64 + place // 2 + (16 if place % 2 else 0)
        for half, (one_set, refinement) in enumerate(((mixed & 15, code >> 4 & 3), (mixed >> 4, code >> 6))):
            level = levels[half][16 * refinement + one_set]
            weights[column + 32 * half] = level * scales[(column + 32 * half) // (part.group or num_cols)]
    return weights


def test_rows_are_read_as_a_register_of_three_nibbles_reads_them() -> None:
    for part in FORMATS:
        with case(part):
            codec, codes = codecs.Trellis(part, 192), random_steps(4, 192, part.width)
            stored = codec.store_scales(torch.rand(4, codec.num_groups, generator=torch.Generator().manual_seed(1)))
            rows = codec.encode(codes, stored)
            assert rows.shape == (4, part.part_bytes(192))
            scales = codec.load_scales(stored).tolist()
            expected = [decoded_slowly(part, 192, row.tolist(), scales[i]) for i, row in enumerate(codes)]
            assert torch.equal(decode_part(part, 192, rows), torch.tensor(expected))


def test_each_code_has_its_bits_where_the_page_says() -> None:
    # One step's code alone, of 64 columns: where its nibble and its two refinements lie.
    cases: list[tuple[int, int, int, dict[int, int]]] = [
        (4, 0, 0b1001, {0: 0b1001}),
        (4, 31, 0b1001, {15: 0b1001_0000}),
        (5, 3, 0b01_00_0001, {1: 0b0001_0000, 16 + 1: 1 << 4}),  # columns 17 and 49: bit 17 // 4 of byte 17 % 4
        (6, 3, 0b00_01_0001, {1: 0b0001_0000, 16 + 1: 1 << 4}),
        (6, 3, 0b01_00_0001, {1: 0b0001_0000, 20 + 1: 1 << 4}),
        (7, 31, 0b10_01_0001, {15: 0b0001_0000, 16 + 3: 1 << 7, 20 + 7: 0b10 << 6}),  # columns 31 and 63
        (8, 12, 0b11_10_0001, {6: 0b0001, 16 + 6: 0b10, 24 + 6: 0b11}),  # columns 6 and 38
    ]
    for width, step, code, expected in cases:
        with case(width, step, code):
            codec, codes = codecs.Trellis(trellis_format(width, ROW_GROUP), 64), torch.zeros(1, 32, dtype=torch.uint8)
            codes[0, step] = code
            row = codec.encode(codes, codec.store_scales(torch.ones(1, 1)))[0].tolist()
            assert {i: byte for i, byte in enumerate(row[:-2]) if byte} == expected
            assert row[-2:] == [0x00, 0x3C]


def test_steps_have_the_columns_of_codes_of_two_bits() -> None:
    columns = codecs.trellis_columns(128)
    assert columns[:4].tolist() == [[0, 32], [16, 48], [1, 33], [17, 49]]
    assert columns[31:33].tolist() == [[31, 63], [64, 96]]
    assert columns.flatten().sort().values.tolist() == list(range(128))


def test_windows_have_the_newest_nibble_on_top_and_begin_with_zeros() -> None:
    windows = codecs.trellis_windows(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert windows.tolist() == [[0x100, 0x210, 0x321, 0x432]]
    newest, middle, oldest = (bytes.fromhex(table) for table in codecs.TRELLIS_HASH)
    assert codecs.trellis_hashes()[0x432] == newest[4] ^ middle[3] ^ oldest[2]


def test_a_scale_of_zero_is_kept() -> None:
    for scale_bits in (8, 16):
        codec = codecs.Trellis(trellis_format(4, 16, scale_bits), 64)
        scales = codec.store_scales(torch.tensor([[0.0, 1.0, 0.5, 0.0]]))
        assert (codec.load_scales(scales) == 0).tolist() == [[True, False, False, True]]


def test_tables_have_the_sizes_and_the_range_that_the_format_says() -> None:
    assert tuple(codecs.TRELLIS_LEVELS) == tuple(codecs.TRELLIS_UNITS) == TRELLIS_WIDTHS
    assert [len(bytes.fromhex(table)) for table in codecs.TRELLIS_HASH] == [16, 16, 16]
    for width in TRELLIS_WIDTHS:
        for levels, bits in zip(codecs.trellis_levels(width), codecs.trellis_refinements(width), strict=True):
            assert len(levels) == 16 << bits
            assert levels.abs().max() <= (32 if width <= 6 else 64)
        assert sum(codecs.trellis_refinements(width)) == width - 4


def test_the_specification_has_the_same_tables() -> None:
    documented = json.loads((ROOT / "docs" / "trellis-tables.json").read_text())
    hashes = [bytes(table) for table in documented["hash"].values()]
    assert list(documented["hash"]) == ["newest", "middle", "oldest"]
    assert hashes == [bytes.fromhex(table) for table in codecs.TRELLIS_HASH]
    assert [int(width) for width in documented["levels"]] == list(TRELLIS_WIDTHS)
    stored = b"".join(hashes)
    for width, tables in documented["levels"].items():
        levels = [np.array(table, np.int8).tobytes() for table in tables]
        assert levels == [bytes.fromhex(table) for table in codecs.TRELLIS_LEVELS[int(width)]], width
        stored += b"".join(levels)
    assert hashlib.sha256(stored).hexdigest() in (ROOT / "docs" / "pack.md").read_text()


def test_formats_that_rows_cannot_have_are_named() -> None:
    cases = [
        (trellis_format(3, 64), "trellis of width 3, expected one of 4, 5, 6, 7, 8"),
        (trellis_format(9, 64), "trellis of width 9, expected one of 4, 5, 6, 7, 8"),
        (trellis_format(4, 48), "group size 48, expected one of 16, 32, 64, 128 or row"),
        (trellis_format(4, 64, 4), "scales of 4 bits, expected 8 or 16"),
        (trellis_format(4, 128), "group size 128 does not divide rows of 192 values"),
        (trellis_format(4, 64), None),
    ]
    assert_each(cases, lambda part: format_fault(part, 192))
