"""Quantizers that look at the weights alone, and the scales and zeros of affine codes.

A code is the nearest to its weight under scale and zero as the pack stores them. `affine_pairs` serves GPTQ, for which
hqq's scales lose more at 2 and 3 bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.quantize import trellis
from moe_pack.formats.base.errors import MoePackError
from moe_pack.formats.pack import codecs

# Weights a block: with hqq's temporaries they stay in 1 MiB of L2. Rows of 4096 in blocks of 16 are solved 11 times as
# fast as the whole matrix.
_BLOCK_WEIGHTS = 1 << 16
_MAX_BLOCK_ROWS = 64

# At this width a step of float16 is a large part of a step of the codes, so it matters which neighbour a scale becomes.
_REFINED_WIDTH = 8
# For a zero above this many times the largest code, a constant is nearer to the group than codes are.
_ZERO_STEPS = 2048

# Scale and zero of each group: float32 [groups, 1] each, for weights [groups, group] and a width.
Solver = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def block_rows(num_cols: int) -> int:
    """Returns how many rows are quantized together: at most 64 rows, and 65,536 weights unless one row has more."""
    return max(1, min(_MAX_BLOCK_ROWS, _BLOCK_WEIGHTS // num_cols))


class RowQuantizer:
    """Turns rows of `num_cols` weights into a part's bytes, with the solver `hqq`, `nearest` or `absmax`.

    Raises:  PlanError for hqq if it is not installed, for a format that keeps the source's codes, and for a trellis
             with another quantizer than nearest.
    """

    def __init__(self, part: formats.PartFormat, num_cols: int, quantizer: formats.Quantizer) -> None:
        if part.keeps_source:
            raise formats.PlanError(
                f"{part.codec}: this format keeps the codes of a checkpoint and cannot be computed; use 1 to 16 bits"
            )
        self._part = part
        self._num_cols = num_cols
        if part.codec == "trellis" and quantizer != "nearest":
            raise formats.PlanError(
                f"--quantizer {quantizer}: a trellis has no zeros, which this quantizer finds; use nearest"
            )
        self._codec: codecs.Affine | codecs.Bf16 | trellis.TrellisQuantizer
        self._solve: Solver | None = None
        if part.codec == "bf16":
            self._codec = codecs.Bf16(part, num_cols)
        elif part.codec == "trellis":
            self._codec = trellis.TrellisQuantizer(part, num_cols)
        elif quantizer == "calibrated":
            raise formats.PlanError(
                "--quantizer calibrated: needs an expert's inputs and cannot quantize rows alone; use hqq"
            )
        else:
            self._codec = codecs.affine(part, num_cols)
            self._solve = _hqq_solver() if quantizer == "hqq" else _nearest if quantizer == "nearest" else _absmax
        self._refined = quantizer == "hqq" and part.width == _REFINED_WIDTH and part.scale_bits == 16

    def encode(self, weights: Tensor) -> Tensor:
        """Quantizes finite rows [rows, num_cols] of any float dtype: u8 [rows, part_bytes].

        Raises:  UnrepresentableError for a row with weights too large for float16 scales and zeros, or for bfloat16.
        """
        if isinstance(self._codec, codecs.Bf16):
            rounded = weights.to(torch.bfloat16)
            if rounded is not weights and rounded.isinf().any():
                raise trellis.UnrepresentableError(_first_row(rounded.isinf()), "weights too large for bfloat16")
            return self._codec.encode(rounded)
        step = block_rows(self._num_cols)
        return torch.cat([self._encode_block(weights[i : i + step], i) for i in range(0, len(weights), step)])

    @torch.inference_mode()
    def _encode_block(self, weights: Tensor, first_row: int) -> Tensor:
        codec = self._codec
        if isinstance(codec, trellis.TrellisQuantizer):
            rows = weights.to(torch.float32)
            try:
                return codec.encode(rows, codec.scales(rows))[0]
            except trellis.UnrepresentableError as fault:
                raise trellis.UnrepresentableError(first_row + fault.row, fault.advice) from fault
        assert isinstance(codec, codecs.Affine) and self._solve is not None, "bf16 has no blocks"
        groups = weights.to(torch.float32).reshape(len(weights) * codec.num_groups, -1)
        scale, zero = self._solve(groups, self._part.width)
        scale, zero = representable_pairs(groups, scale, zero, self._part.width)
        if self._refined:
            scale, zero = _best_neighbours(groups, scale, zero, self._part.width)
        scales, zeros = codec.store_scales(scale.view(-1, codec.num_groups), zero.view(-1, codec.num_groups))
        scale, zero = codec.load_scales(scales, zeros)
        check_representable(scale, zero, first_row)
        codes = nearest_codes(groups, scale.view(-1, 1), zero.view(-1, 1), self._part.width)
        return codec.encode(codes.to(torch.uint8).view(len(weights), -1), scales, zeros)


def check_representable(scale: Tensor, zero: Tensor, first_row: int = 0) -> None:
    """Refuses scales and zeros, float32 [rows, groups] as stored, that overflowed float16: UnrepresentableError."""
    finite = scale.isfinite() & zero.isfinite()
    if not finite.all():
        raise trellis.UnrepresentableError(first_row + _first_row(~finite), trellis.TOO_LARGE_FOR_SCALES)


def _first_row(rows: Tensor) -> int:
    """Returns the first row of a bool [rows, n] with a true value."""
    return int(rows.any(dim=1).nonzero()[0])


def nearest_codes(groups: Tensor, scale: Tensor, zero: Tensor, width: int) -> Tensor:
    """Returns the codes nearest to weights [groups, group], as float32, under scale and zero [groups, 1]."""
    return groups.div(scale).add_(zero).round_().clamp_(0, 2**width - 1)


def _best_neighbours(groups: Tensor, scale: Tensor, zero: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the float16 neighbours of scale and zero with the smallest mean absolute error."""
    best = (torch.full_like(scale, torch.inf), scale, zero)
    for s in _neighbours(scale):
        for z in _neighbours(zero):
            error = (nearest_codes(groups, s, z, width) - z).mul_(s).sub_(groups).abs_().mean(dim=1, keepdim=True)
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, s, best[1]),
                torch.where(better, z, best[2]),
            )
    return best[1], best[2]


def _neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest float16 to each value and the float16 on its other side, as float32."""
    nearest = values.to(torch.float16)
    direction = torch.where(nearest.to(torch.float32) < values, torch.inf, -torch.inf).to(torch.float16)
    other = torch.where(nearest.isinf(), nearest, torch.nextafter(nearest, direction))  # too large stays too large
    return nearest.to(torch.float32), other.to(torch.float32)


def representable_pairs(groups: Tensor, scale: Tensor, zero: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Makes narrow groups far from zero constant, whose zeros [groups, 1] float16 cannot represent."""
    lost = (zero.abs() > min(65504, _ZERO_STEPS * (2**width - 1))) | ~torch.isfinite(zero)
    if not lost.any():
        return scale, zero
    middle = groups.amin(dim=1, keepdim=True).add(groups.amax(dim=1, keepdim=True)).div(2)
    return torch.where(lost, torch.ones_like(scale), scale), torch.where(lost, -middle, zero)


def _hqq_solver() -> Solver:
    """hqq's with its default settings (hqq 0.2.8, core/quantize.py, along rows)."""
    try:
        from hqq.core.quantize import Quantizer as HqqQuantizer
    except ModuleNotFoundError as fault:
        raise formats.PlanError(
            "--quantizer hqq: the package hqq is not installed; run pip install 'moe-pack[convert]', or use nearest"
        ) from fault

    def solve(groups: Tensor, width: int) -> tuple[Tensor, Tensor]:
        _, pairs = HqqQuantizer.quantize(
            groups, nbits=width, axis=1, group_size=groups.shape[1], optimize=True, bitpack=False, device="cpu"
        )
        return pairs["scale"], pairs["zero"]

    return solve


def _nearest(groups: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Maps a group's lowest and highest weight to the lowest and highest code."""
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = (high - low) / (2**width - 1)
    scale = torch.where(scale < 2.0**-14, torch.ones_like(scale), scale)  # below float16's normal range: constant
    return scale, -low / scale


def _absmax(groups: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Takes the middle code as zero and a scale by the largest magnitude (EdgeMoE §III-B)."""
    middle = 2 ** (width - 1)
    scale = groups.abs().amax(dim=1, keepdim=True) / (middle - 1)
    scale = scale.clamp(min=2.0**-24)  # float16's smallest: a group of zeros keeps its middle codes
    return scale, torch.full_like(scale, middle)


def check_finite(
    weights: Tensor,
    place: str,
    error: type[MoePackError],
    number: Callable[[int, int], tuple[int, int]] = lambda row, col: (row, col),
) -> None:
    """Refuses NaN and infinity in weights [rows, columns].

    Args:    place: tensor and file, for the message.   error: the class to raise.   number: the row and column in the
             message for a place in `weights`.
    """
    # A sum is infinite or NaN if any term is; finite weights can only overflow it in float16, hence float32.
    if torch.isfinite(weights.sum(dtype=torch.float32)):
        return
    wrong = (~torch.isfinite(weights)).nonzero()
    if len(wrong):
        row, column = (int(position) for position in wrong[0])
        shown = list(number(row, column))
        raise error(f"{place}: weight {shown} is {float(weights[row, column])}, expected a number")


# Shares of a group's range that `affine_pairs` tries: the narrowest by width, and how many, from the whole range on.
_LEAST_SHARE = {1: 0.2, 2: 0.4, 3: 0.55, 4: 0.65}
_NUM_SHARES = 10
_NUM_FITS = 2  # for each share: codes, then the scale and zero that fit these codes best
_PIECE_WEIGHTS = 1 << 16  # fitted at once: temporaries stay in cache
_LEAST_SCALE = 2.0**-14  # below float16's normal range a group counts as constant


def affine_pairs(groups: Tensor, importance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns a scale above 0 and a zero for every group of some rows, float32 [rows, groups] each, not yet rounded.

    Meaning: of `_NUM_SHARES` ranges about the group's middle, each fitted `_NUM_FITS` times, the one with the least sum
             of importance times squared error.
    Args:    groups: float32 [rows, groups, group].   importance: float32 [groups, group], above 0.   width: 1 to 4.
    """
    step = max(1, _PIECE_WEIGHTS // groups[0].numel())
    pairs = [_fit(piece, importance, width) for piece in torch.split(groups, step)]
    return torch.cat([scale for scale, _ in pairs]), torch.cat([zero for _, zero in pairs])


def stored_pairs(codec: codecs.Affine, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and zeros [rows, groups] as stored; refuses a row with one that overflows float16."""
    scale, zero = codec.load_scales(*codec.store_scales(scale, zero))
    check_representable(scale, zero)
    return scale, zero


def code_values(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns the weights that codes stand for, float32; the three arguments broadcast."""
    return (codes - zero).mul_(scale)


def _fit(groups: Tensor, importance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    share = importance / importance.sum(dim=1, keepdim=True)  # [groups, group]
    mean = (share * groups).sum(dim=2, keepdim=True)
    best = (torch.full_like(low, torch.inf), low, low)
    for part in torch.linspace(1.0, _LEAST_SHARE[width], _NUM_SHARES).tolist():
        scale = (high - low) * (part / (2**width - 1))
        scale = torch.where(scale < _LEAST_SCALE, torch.ones_like(scale), scale)
        zero = ((high - low) * (part / 2) - (high + low) / 2) / scale
        for _ in range(_NUM_FITS):
            scale, zero = _refit(groups, share, mean, scale, zero, width)
        errors = code_values(nearest_codes(groups, scale, zero, width), scale, zero).sub_(groups)
        cost = errors.square_().mul_(share).sum(dim=2, keepdim=True)
        better, (least, best_scale, best_zero) = cost < best[0], best
        best = (
            torch.where(better, cost, least),
            torch.where(better, scale, best_scale),
            torch.where(better, zero, best_zero),
        )
    flat = groups.flatten(0, 1)
    scale, zero = representable_pairs(flat, best[1].view(-1, 1), best[2].view(-1, 1), width)
    return scale.view(groups.shape[:2]), zero.view(groups.shape[:2])


def _refit(
    groups: Tensor, share: Tensor, mean: Tensor, scale: Tensor, zero: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Returns scale and zero of least squares for the codes that are nearest under the given ones."""
    codes = nearest_codes(groups, scale, zero, width)
    middle = (share * codes).sum(dim=2, keepdim=True)
    codes -= middle
    spread = (share * codes.square()).sum(dim=2, keepdim=True)
    covariance = (share * codes).mul_(groups).sum(dim=2, keepdim=True)
    fitted = covariance / spread
    varies = (spread > 0) & (fitted >= _LEAST_SCALE)  # else all codes are equal, or the group is almost constant
    return torch.where(varies, fitted, scale), torch.where(varies, middle - mean / fitted, zero)
