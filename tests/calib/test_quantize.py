"""The quantizers: hqq in blocks against hqq on the whole matrix, the plain ones against numpy, and difficult rows."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from support.cases import case as named_case
from support.models import DEMO_MODEL, TinyMixtral, pack
from torch import Tensor

from moe_pack.calib.quantize import RowQuantizer, check_finite
from moe_pack.calib.quantize.plain import block_rows
from moe_pack.formats import BF16, CheckpointError, PlanError, Quantizer, part_format
from moe_pack.formats.pack.codecs import affine, decode_part, unpack_codes
from moe_pack.formats.pack.plans import KEPT, QUANTIZERS

WIDTHS = (1, 2, 3, 4, 8)
GROUPS = (16, 64, 128, 0)
ALONE = tuple(each for each in QUANTIZERS if each != "calibrated")  # need no more than the rows
PLAIN: list[tuple[Quantizer, int]] = [
    (quantizer, width) for quantizer in ALONE for width in WIDTHS if (quantizer, width) != ("absmax", 1)
]
# Scale and zero are each stored within 2^-11 of their value, and a weight is their product.
SCALE_ROUNDING = 2.0**-10


def encoded(weights: Tensor, width: int, group: int, quantizer: Quantizer) -> Tensor:
    return RowQuantizer(part_format(width, group), weights.shape[1], quantizer).encode(weights)


def stored(weights: Tensor, width: int, group: int, quantizer: Quantizer) -> Tensor:
    """The weights after a way through bytes."""
    return decode_part(part_format(width, group), weights.shape[1], encoded(weights, width, group, quantizer))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_outliers() -> Tensor:
    weights = random(200, 128)
    weights[torch.rand(200, 128, generator=torch.Generator().manual_seed(1)) < 0.001] *= 50
    weights[:, 7] *= 30
    weights[100] *= 100
    return weights


def matrices() -> dict[str, Tensor]:
    held = load_file(DEMO_MODEL / "model.safetensors")
    expert = "model.layers.{}.block_sparse_moe.experts.{}"
    return {
        "demo gate": held[f"{expert.format(0, 0)}.w1.weight"],
        "demo up": held[f"{expert.format(3, 5)}.w3.weight"],
        "demo down": held[f"{expert.format(1, 2)}.w2.weight"].T.contiguous(),
        "random": random(200, 256),
        "eight rows": random(8, 128),
        "outliers": with_outliers(),
    }


def mean_error(weights: Tensor, decoded: Tensor) -> float:
    return float((decoded.double() - weights.double()).abs().mean())


def hqq_whole(weights: Tensor, width: int, group: int) -> Tensor:
    """hqq's weights of the whole matrix, its scales and zeros left in float32."""
    from hqq.core.quantize import Quantizer as HqqQuantizer

    found: tuple[Tensor, dict[str, Any]] = HqqQuantizer.quantize(
        weights, nbits=width, axis=1, group_size=group or weights.shape[1], device="cpu", bitpack=False
    )
    codes, facts = found
    return ((codes.float() - facts["zero"]) * facts["scale"]).view(weights.shape)


@pytest.mark.slow
def test_blocks_err_at_most_a_thousandth_more_than_hqq_on_the_whole_matrix() -> None:
    for name, width, group in product(matrices(), WIDTHS, GROUPS):
        with named_case(name, width, group):
            weights = matrices()[name]
            ours = mean_error(weights, stored(weights, width, group, "hqq"))
            assert ours <= 1.001 * mean_error(weights, hqq_whole(weights, width, group))


def test_every_code_is_the_nearest_under_the_stored_scale() -> None:
    for quantizer, width in PLAIN:
        with named_case(quantizer, width):
            weights, codec = with_outliers(), affine(part_format(width, 16), 128)
            rows = encoded(weights, width, 16, quantizer)
            packed, scales, zeros = torch.split(rows, [codec.code_bytes, codec.scale_bytes, codec.scale_bytes], dim=1)
            scale, zero = codec.load_scales(scales, zeros)
            choices = torch.arange(2**width).view(1, 1, -1, 1)
            possible = (choices - zero[:, :, None, None]) * scale[:, :, None, None]  # [rows, groups, codes, 1]
            distance = (possible - weights.view(200, 8, 1, 16)).abs()
            taken = unpack_codes(packed, width).long().view(200, 8, 1, 16)
            # A weight half way between two codes may go to either: w / scale + zero is rounded, by 2^-22 of up to
            # |zero| + 256.
            slack = scale[:, :, None] * (zero.abs()[:, :, None] + 256) * 2.0**-22
            assert (distance.gather(2, taken)[:, :, 0] <= distance.amin(dim=2) + slack).all()


def numpy_nearest(groups: NDArray[np.float32], width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    scale = (high - low) / np.float32(2**width - 1)
    scale[scale < 2.0**-14] = 1
    return scale, -low / scale


def numpy_absmax(groups: NDArray[np.float32], width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    middle = 2 ** (width - 1)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(middle - 1)
    scale = np.maximum(scale, np.float32(2.0**-24))
    return scale, np.full_like(scale, middle)


def test_a_plain_quantizer_is_bit_equal_to_its_numpy_twin() -> None:
    for (quantizer, width), group in product([case for case in PLAIN if case[0] != "hqq"], [32, 0]):
        with named_case(quantizer, width, group):
            weights = with_outliers()
            weights[3] = 0
            weights[4, :32] = 0.37
            groups = weights.numpy().reshape(200, -1, group or 128)
            scale, zero = {"nearest": numpy_nearest, "absmax": numpy_absmax}[quantizer](groups, width)
            scale, zero = scale.astype(np.float16).astype(np.float32), zero.astype(np.float16).astype(np.float32)
            codes = np.clip(np.rint(groups / scale + zero), 0, 2**width - 1).astype(np.float32)
            expected = ((codes - zero) * scale).reshape(200, 128)
            np.testing.assert_array_equal(stored(weights, width, group, quantizer).numpy(), expected)


def test_zeros_stay_exactly_zero() -> None:
    for quantizer, width in PLAIN:
        with named_case(quantizer, width):
            assert (stored(torch.zeros(3, 128), width, 64, quantizer) == 0).all()


def test_a_constant_row_is_its_constant_in_float16() -> None:
    for width, quantizer, constant in product(WIDTHS, ["hqq", "nearest"], [0.37, -5.0, 30000.0]):
        with named_case(width, quantizer, constant):
            weights = torch.full((3, 128), constant)
            # Never farther than float16's nearest; 8-bit hqq looks among its neighbours and finds nearer products.
            assert (stored(weights, width, 64, quantizer) - weights).abs().max() <= (
                weights.half() - weights
            ).abs().max()


def test_absmax_keeps_a_constant_row_as_well_as_its_scale() -> None:
    for width, constant in product([2, 3, 4, 8], [0.37, -5.0, 30000.0]):
        with named_case(width, constant):
            weights = torch.full((3, 128), constant)
            assert (stored(weights, width, 64, "absmax") - weights).abs().max() <= abs(constant) * SCALE_ROUNDING


def test_a_narrow_group_far_from_zero_stays_there() -> None:
    for width, quantizer, middle in product(WIDTHS, ["hqq", "nearest"], [100.0, 1000.0, -30000.0]):
        with named_case(width, quantizer, middle):
            weights = middle + random(3, 128) / 20
            allowed = float(weights.max() - weights.min()) + abs(middle) * SCALE_ROUNDING
            assert (stored(weights, width, 64, quantizer) - weights).abs().max() <= allowed


def test_a_narrow_group_does_not_disturb_the_group_beside_it() -> None:
    for width in WIDTHS:
        with named_case(width):
            weights = random(3, 128)
            alone = stored(weights[:, 64:].contiguous(), width, 64, "nearest")
            weights[:, :64] = 30000.0 + weights[:, :64]
            assert torch.equal(stored(weights, width, 64, "nearest")[:, 64:], alone)


def test_tiny_values_never_move_further_than_their_own_range() -> None:
    for (quantizer, width), size in product(PLAIN, [1e-6, 1e-20, 1e-42]):
        with named_case(quantizer, width, size):
            weights = random(3, 128) * (50 * size)
            # Float16 steps by 2^-24 where it is smallest: a zero kept there is off by at most half of it.
            allowed = float(weights.max() - weights.min()) + 2.0**-25
            assert (stored(weights, width, 64, quantizer) - weights).abs().max() <= allowed


def test_values_beyond_float16_scales_are_refused_by_row() -> None:
    for quantizer, width in PLAIN:
        with named_case(quantizer, width):
            weights = random(100, 128).to(torch.bfloat16)
            weights[70] = 1e30
            with pytest.raises(
                ValueError, match=r"^row 70 has weights too large for float16 scales; store it in 16 bits$"
            ):
                encoded(weights, width, 64, quantizer)


def test_16_bits_store_what_codes_cannot() -> None:
    weights = random(3, 128).to(torch.bfloat16)
    weights[1] = 1e30
    rows = RowQuantizer(BF16, 128, "hqq").encode(weights)
    assert torch.equal(decode_part(BF16, 128, rows), weights.float())


@pytest.mark.parametrize("quantizer", ALONE)
def test_the_largest_values_float16_can_scale_pass(quantizer: Quantizer) -> None:
    weights = torch.where(random(3, 128) > 0, 30000.0, -30000.0)
    # Two values only, each at an end of the codes: what is left is rounding, or for hqq and absmax half a step.
    assert (stored(weights, 8, 64, quantizer) - weights).abs().max() <= 60000 / 254 / 2 + 30000 * SCALE_ROUNDING


def test_a_row_of_the_source_is_named_by_its_number_there(tmp_path: Path) -> None:
    source = TinyMixtral(intermediate_size=600)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    source.write(tmp_path / "source", lambda tensors: tensors[name][550].fill_(1e30))
    with pytest.raises(CheckpointError, match=r"experts\.1\.w1\.weight': row 550 has weights too large for float16"):
        pack(tmp_path / "source", tmp_path / "out")


def test_a_neuron_of_down_is_named_as_the_column_it_is(tmp_path: Path) -> None:
    source = TinyMixtral(intermediate_size=600)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    source.write(tmp_path / "source", lambda tensors: tensors[name][:, 550].fill_(1e30))
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2\.weight': column 550 has weights too large for float16"):
        pack(tmp_path / "source", tmp_path / "out")


def test_any_number_of_rows_is_quantized_block_by_block() -> None:
    for num_rows, quantizer in product([1, 63, 65, 130], ALONE):
        with named_case(num_rows, quantizer):
            weights = random(num_rows, 128)
            blocks = [encoded(block, 4, 64, quantizer) for block in weights.split(block_rows(128))]
            rows = encoded(weights, 4, 64, quantizer)
            assert len(rows) == num_rows
            assert torch.equal(rows, torch.cat(blocks))


def test_a_block_has_at_most_64_rows_and_as_many_weights_as_stay_in_cache() -> None:
    for num_cols, expected in [(64, 64), (1024, 64), (4096, 16), (65536, 1), (131072, 1)]:
        with named_case(num_cols, expected):
            assert block_rows(num_cols) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_source_dtype_does_not_change_the_bytes(dtype: torch.dtype) -> None:
    weights = random(70, 128).to(dtype)
    assert torch.equal(encoded(weights, 4, 64, "hqq"), encoded(weights.float(), 4, 64, "hqq"))


def test_a_weight_that_is_no_number_is_named_by_row_and_column() -> None:
    for (value, text), dtype in product(
        [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")],
        [torch.bfloat16, torch.float16, torch.float32],
    ):
        with named_case(value, text, dtype):
            weights = random(5, 64).to(dtype)
            weights[3, 17] = weights[4, 2] = value
            with pytest.raises(CheckpointError) as caught:
                check_finite(
                    weights, "model.safetensors: tensor 'w'", CheckpointError, lambda row, col: (512 + row, col)
                )
            assert str(caught.value) == f"model.safetensors: tensor 'w': weight [515, 17] is {text}, expected a number"


def test_infinities_that_cancel_in_a_sum_are_found() -> None:
    weights = random(5, 64)
    weights[1, 1], weights[2, 2] = float("inf"), float("-inf")
    with pytest.raises(CheckpointError, match=r"weight \[1, 1\] is inf"):
        check_finite(weights, "w", CheckpointError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finite_weights_whose_sum_overflows_pass(dtype: torch.dtype) -> None:
    weights = torch.full((4, 64), 3e38, dtype=dtype)
    assert not torch.isfinite(weights.sum(dtype=torch.float32))
    check_finite(weights, "w", CheckpointError)


def test_float16_weights_at_their_largest_pass() -> None:
    check_finite(torch.full((4, 64), 65504.0, dtype=torch.float16), "w", CheckpointError)


def test_nothing_is_quantized_to_a_codec_of_sources() -> None:
    for quantizer, part in product(ALONE, KEPT):
        with named_case(quantizer, part):
            with pytest.raises(PlanError) as error:
                RowQuantizer(part, 128, quantizer)
            expected = (
                f"{part.codec}: this format keeps the codes of a checkpoint and cannot be computed; use 1 to 16 bits"
            )
            assert str(error.value) == expected


def test_calibrated_rounding_is_refused_for_rows_alone() -> None:
    with pytest.raises(PlanError) as error:
        RowQuantizer(part_format(4, 64), 128, "calibrated")
    expected = "--quantizer calibrated: needs an expert's inputs and cannot quantize rows alone; use hqq"
    assert str(error.value) == expected
