"""The content of `assumed_losses.json`, from the losses that were measured of a model."""

import numpy as np

from moe_pack.calib import sensitivity
from moe_pack.calib.profile import losses
from moe_pack.formats.pack import plans
from moe_pack.formats.parts import specs


def assumed_figures(measured: losses.Losses, spec: specs.ModelSpec, name: str) -> losses.AssumedLosses:
    """Returns the losses of a whole model with three digits each, for a model whose head is not its embedding.

    The model's hidden size is 128, so that it has all group sizes, and a row is one group of 128.
    """
    totals = measured.quantized.sum(axis=(0, 1))  # [3, F]
    formats = [
        losses.FormatLoss(part.width, part.group, part.scale_bits, *_digits(column))
        for part, column in zip(measured.formats, totals.T, strict=True)
        if part != plans.BF16 and part.group != plans.ROW_GROUP
    ]
    absmax = [
        losses.FormatLoss(part.width, spec.hidden_size, part.scale_bits, *_digits(column))
        for part, column in zip(sensitivity.ABSMAX_FORMATS, measured.absmax[..., :-1].sum(axis=(0, 1)).T, strict=True)
    ]
    sparse = measured.sparse.sum(axis=(0, 1))[:, 1:]  # [kinds, sparsities]
    dense = {role.name: measured.dense[idx, 1:] for idx, role in enumerate(specs.dense_roles(spec))}
    layers = sum(
        (dense[n] for l in range(spec.num_hidden_layers) for n in sensitivity.roundable_roles(spec, l)), np.zeros(2)
    )
    return losses.AssumedLosses(
        origin=f"{name}: {measured.origin}",
        formats=tuple(formats),
        absmax=tuple(absmax),
        sparse=tuple(losses.KindLoss(kind, _digits(row)) for kind, row in zip(measured.kinds, sparse, strict=True)),
        layers=_digits(layers),
        embed=_digits(dense["embed"]),
        head=_digits(dense["head"]),
        nll_per_kl=_digits(np.asarray([measured.nll_per_kl]))[0],
    )


def _digits(values: losses.Floats) -> tuple[float, ...]:
    """Returns each value rounded to three digits."""
    return tuple(float(f"{value:.3g}") for value in values.tolist())
