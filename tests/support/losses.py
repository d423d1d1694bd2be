"""Random losses of a small model: less at more bits and finer groups, experts as different as in trained ones."""

from dataclasses import replace

import numpy as np

from moe_pack.calib.profile import Losses
from moe_pack.calib.sensitivity import calibrated_formats
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.formats import BF16, ModelSpec, PartFormat, dense_roles, part_format
from moe_pack.formats.pack.plans import format_fault


def calibrated_losses(spec: ModelSpec, seed: int = 0, most: int | None = None) -> Losses:
    """Random losses of a model that was profiled with inputs.

    Args:    most: of calibrated formats, evenly many; None: all.
    """
    losses = random_losses(spec, seed)
    formats = calibrated_formats(spec.hidden_size)
    if most is not None:
        formats = tuple(formats[i] for i in np.linspace(0, len(formats) - 1, most).round().astype(int))
    size = losses.quantized[..., :1] * np.random.default_rng(seed).uniform(0.3, 0.9, losses.quantized[..., :1].shape)
    columns = [size * _calibrated_share(part) for part in formats]
    calibrated = np.concatenate([*columns, np.zeros_like(size)], axis=3)
    return replace(
        losses, quantizer="calibrated", calibrated_formats=(*formats, BF16), calibrated=calibrated, origin="inputs"
    )


def _calibrated_share(part: PartFormat) -> float:
    """Returns a share of the 2-bit loss: a trellis loses less than affine codes, shorter groups less than longer."""
    codec = 0.6 if part.codec == "trellis" else 1.0
    return float(codec * 4.0 ** -(part.bits - 2) * (1.0 if part.group == 0 else 0.7 + part.group / 600))


def random_losses(spec: ModelSpec, seed: int = 0) -> Losses:
    """Losses whose matrices, experts and layers differ by a factor of up to ten; of calibrated rounding none known."""
    generator = np.random.default_rng(seed)
    shape = (len(spec.moe_layers), spec.router.num_experts)
    formats = [
        part_format(width, group, scale_bits)
        for width in (2, 3, 4, 8)
        for group in (16, 32, 64, 128)
        for scale_bits in (16, 8)
        if format_fault(part_format(width, group), spec.hidden_size) is None
    ]
    size = generator.uniform(1e-3, 1e-2, (*shape, 3, 1))
    fall = np.array([4.0 ** -(part.width - 2) * (0.7 + part.group / 200) for part in formats])
    quantized = np.concatenate([size * fall, np.zeros((*shape, 3, 1))], axis=3)
    if "gate" not in spec.expert.matrices:
        quantized[:, :, 0] = 0
    sparse = generator.uniform(1e-3, 4e-3, (*shape, 3, 1)) * np.array([0.0, 0.1, 0.3, 0.6, 1.5])
    # By absmax a row loses three times what groups of 64 do, at 2, 4 and 8 bits.
    absmax = np.concatenate([3 * size * 4.0 ** -np.array([0, 2, 6]), np.zeros((*shape, 3, 1))], axis=3)
    if "gate" not in spec.expert.matrices:
        absmax[:, :, 0] = 0
    roles = dense_roles(spec)
    fits = [role.quantizable and format_fault(part_format(8, 64), role.shape[-1]) is None for role in roles]
    dense = np.array([[0.0, 1e-4, 2e-3] if quantizable else [0.0, np.inf, np.inf] for quantizable in fits])
    magnitudes = np.asarray(QUANTILE_LEVELS, np.float32)  # abs(a) evenly between 0 and 1
    popularity = generator.dirichlet(np.ones(shape[1]), shape[0]) * spec.router.num_experts_per_tok
    return Losses(
        quantizer="hqq", formats=(*formats, BF16), quantized=quantized, calibrated_formats=(BF16,),
        calibrated=np.zeros((*shape, 3, 1)), absmax=absmax, importance=absmax[..., 0].sum(axis=2),
        kinds=("up", "gate", "both"), sparsities=(0.0, 0.5, 0.7, 0.8, 0.9), sparse=sparse, dense_widths=(16, 8, 4),
        dense=dense, popularity=popularity, nll_per_kl=0.5,
        quantiles=np.broadcast_to(magnitudes, (*shape, 3, len(QUANTILE_LEVELS))), origin="random",
    )  # fmt: skip
