"""Rows of weights as trellises, from the weights alone: errors, gains, and difficult rows."""

from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize import RowQuantizer, UnrepresentableError
from moe_pack.calib.quantize.trellis import search, unbiasing_gain
from moe_pack.formats import ROW_GROUP, PartFormat, PlanError, Quantizer, part_format, trellis_format
from moe_pack.formats.pack.codecs import TRELLIS_UNITS, Trellis, decode_part, trellis_columns
from moe_pack.formats.pack.plans import QUANTIZERS, TRELLIS_WIDTHS

FORMATS = [trellis_format(4, ROW_GROUP), trellis_format(4, 64, 8), trellis_format(5, 16, 16), trellis_format(6, 128, 8)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def stored(part: PartFormat, weights: Tensor, quantizer: Quantizer = "nearest") -> Tensor:
    """The weights after a way through bytes."""
    rows = RowQuantizer(part, weights.shape[1], quantizer).encode(weights)
    assert rows.shape == (len(weights), part.part_bytes(weights.shape[1]))
    return decode_part(part, weights.shape[1], rows)


def plain_scales(part: PartFormat, weights: Tensor) -> Tensor:
    """Scales of each group's own root mean square: [rows, groups]."""
    groups = weights.view(len(weights), part.num_groups(weights.shape[1]), -1)
    return groups.square().mean(dim=2).sqrt() * TRELLIS_UNITS[part.width]


def error(weights: Tensor, decoded: Tensor) -> float:
    return float((weights.double() - decoded.double()).square().sum() / weights.double().square().sum())


@pytest.mark.parametrize(("width", "share"), [(2, 0.5), (3, 0.65), (4, 0.7)])
def test_a_trellis_of_row_scales_loses_less_than_codes_of_groups(width: int, share: float) -> None:
    weights = random(32, 256)
    plain = stored(part_format(width, 64), weights)  # half a bit more, for scales and zeros
    assert error(weights, stored(trellis_format(2 * width, ROW_GROUP), weights)) < share * error(weights, plain)


def test_rows_are_stretched_until_they_are_as_long_as_they_were() -> None:
    for width, scale_bits in product(TRELLIS_WIDTHS, [8, 16]):
        with case(width, scale_bits):
            weights = random(16, 256, seed=width)
            gain = unbiasing_gain(weights, stored(trellis_format(width, 64, scale_bits), weights))
            # Scales are within 2^-11 of what they should be as float16; as bytes within half a step of some 200.
            assert (gain - 1).abs().max() < (2.0**-11 if scale_bits == 16 else 0.0025)


def test_a_stretched_row_errs_a_little_more_than_the_nearest() -> None:
    part, weights = trellis_format(4, ROW_GROUP), random(16, 256)
    scales = plain_scales(part, weights).half().float().expand_as(weights)
    columns = trellis_columns(256).flatten()
    found = search(weights[:, columns], scales[:, columns], torch.ones(256), 4)
    nearest = error(weights[:, columns], scales * found.values)
    assert nearest < error(weights, stored(part, weights)) < 1.1 * nearest


@pytest.mark.parametrize("part", [part for part in FORMATS if part.group != 16])
def test_rows_with_outliers_have_larger_scales(part: PartFormat) -> None:
    weights = random(16, 256)
    weights[::2, ::37] *= 8
    codec = Trellis(part, 256)
    least = plain_scales(part, weights)
    scales = codec.load_scales(RowQuantizer(part, 256, "nearest").encode(weights)[:, codec.code_bytes :])
    grown = (scales / least).amax(dim=1)
    assert grown[::2].mean() > 1.1 * grown[1::2].mean()


def test_zeros_are_read_as_zeros() -> None:
    for part in FORMATS:
        with case(part):
            weights = random(6, 128)
            weights[2] = 0
            weights[4, :64] = 0
            decoded = stored(part, weights)
            assert torch.equal(decoded[2], torch.zeros(128))
            assert error(weights, decoded) < 0.35
            if part.num_groups(128) > 1:
                assert torch.equal(decoded[4, :64], torch.zeros(64))


def test_errors_do_not_depend_on_how_large_weights_are() -> None:
    for part, size in product(FORMATS, [1e-3, 1.0, 1e4]):
        with case(part, size):
            weights = random(16, 128)
            small = error(weights, stored(part, weights * size) / size)
            # Scales below float16's normal numbers are multiples of 2^-24: these weights' of 13 of them.
            assert small < (1.02 if size > 1e-3 else 1.3) * error(weights, stored(part, weights))


def test_rows_do_not_depend_on_each_other() -> None:
    part, weights = trellis_format(7, 32, 8), random(70, 64)
    quantizer = RowQuantizer(part, 64, "nearest")
    assert torch.equal(quantizer.encode(weights)[66:69], quantizer.encode(weights[66:69]))


def test_a_constant_row_and_one_neuron_are_held() -> None:
    part = trellis_format(6, ROW_GROUP)
    assert error(torch.ones(1, 64), stored(part, torch.ones(1, 64))) < 0.05
    lone = torch.zeros(1, 64)
    lone[0, 40] = 3.0
    assert float(stored(part, lone)[0, 40]) > 2.0


@pytest.mark.parametrize("scale_bits", [8, 16])
def test_weights_beyond_float16_scales_are_refused(scale_bits: int) -> None:
    part, weights = trellis_format(4, 64, scale_bits), random(140, 64) / 0.02
    weights[131] *= 1e5  # a deviation of 1e5 is a scale of 3839
    assert stored(part, weights).isfinite().all()
    weights[131] *= 1e4
    with pytest.raises(
        UnrepresentableError, match="row 131 has weights too large for float16 scales; store it in 16 bits"
    ):
        stored(part, weights)


@pytest.mark.parametrize("quantizer", [each for each in QUANTIZERS if each != "nearest"])
def test_other_quantizers_are_refused(quantizer: Quantizer) -> None:
    expected = f"--quantizer {quantizer}: a trellis has no zeros, which this quantizer finds; use nearest"
    with pytest.raises(PlanError, match=expected):
        RowQuantizer(trellis_format(4, 64), 128, quantizer)
