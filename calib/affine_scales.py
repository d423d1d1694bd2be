"""Scales and zeros of groups for the codec `affine`, by the least squared error that weighs columns by importance.

Not what is nearest to most weights (hqq's solver, `quantize`): where errors are fed back, and rows multiplied
afterwards so that none shrinks, the weighted square is what is lost, and hqq's scales lose more at 2 and 3 bits.
"""

import torch
from torch import Tensor

from moe_pack.calib.quantize import check_holdable, made_holdable, nearest_codes
from moe_pack.formats.codecs import Affine

# What is tried of a group's range: the narrowest share by width, and how many in all, the whole range among them.
_LEAST_SHARE = {1: 0.2, 2: 0.4, 3: 0.55, 4: 0.65}
_NUM_SHARES = 10
_NUM_FITS = 2  # after each: codes, then the scale and zero that fit these codes best
_PIECE_WEIGHTS = 1 << 16  # fitted at once: temporaries stay in cache
_LEAST_SCALE = 2.0**-14  # below float16's normal range a group counts as constant


def affine_pairs(groups: Tensor, importance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A scale and a zero for every group of some rows, before they are rounded to what is stored.

    Meaning: of `_NUM_SHARES` ranges about the group's middle, each fitted `_NUM_FITS` times, that of the least
             sum of importance times squared error.
    Args:    groups: float32 [rows, groups, group].   importance: float32 [groups, group], above 0.   width: 1 to 4.
    Returns: float32 [rows, groups] each, scales above 0.
    """
    step = max(1, _PIECE_WEIGHTS // groups[0].numel())
    found = [_fitted(piece, importance, width) for piece in torch.split(groups, step)]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])


def stored_pairs(codec: Affine, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros [rows, groups] as they will be read.

    Raises:  UnholdableError for a row that float16 cannot hold.
    """
    scale, zero = codec.load_scales(*codec.store_scales(scale, zero))
    check_holdable(scale, zero)
    return scale, zero


def code_values(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """What codes stand for."""
    return (codes - zero).mul_(scale)


def _fitted(groups: Tensor, importance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    share = importance / importance.sum(dim=1, keepdim=True)  # [groups, group]
    mean = (share * groups).sum(dim=2, keepdim=True)
    best = (torch.full_like(low, torch.inf), low, low)
    for part in torch.linspace(1.0, _LEAST_SHARE[width], _NUM_SHARES).tolist():
        scale = (high - low) * (part / (2**width - 1))
        scale = torch.where(scale < _LEAST_SCALE, torch.ones_like(scale), scale)
        zero = ((high - low) * (part / 2) - (high + low) / 2) / scale
        for _ in range(_NUM_FITS):
            scale, zero = _refitted(groups, share, mean, scale, zero, width)
        misses = code_values(nearest_codes(groups, scale, zero, width), scale, zero).sub_(groups)
        cost = misses.square_().mul_(share).sum(dim=2, keepdim=True)
        better, (least, best_scale, best_zero) = cost < best[0], best
        best = (
            torch.where(better, cost, least),
            torch.where(better, scale, best_scale),
            torch.where(better, zero, best_zero),
        )
    flat = groups.flatten(0, 1)
    scale, zero = made_holdable(flat, best[1].view(-1, 1), best[2].view(-1, 1), width)
    return scale.view(groups.shape[:2]), zero.view(groups.shape[:2])


def _refitted(
    groups: Tensor, share: Tensor, mean: Tensor, scale: Tensor, zero: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The scale and zero of least squares for the codes that are nearest under those given."""
    codes = nearest_codes(groups, scale, zero, width)
    middle = (share * codes).sum(dim=2, keepdim=True)
    codes -= middle
    spread = (share * codes.square()).sum(dim=2, keepdim=True)
    together = (share * codes).mul_(groups).sum(dim=2, keepdim=True)
    fitted = together / spread
    some = (spread > 0) & (fitted >= _LEAST_SCALE)  # else all codes are one, or the group is as good as constant
    return torch.where(some, fitted, scale), torch.where(some, middle - mean / fitted, zero)
