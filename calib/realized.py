"""The sparsity that thresholds really give: neurons that did not run, over tokens, by layer and expert."""

from collections.abc import Iterable
from dataclasses import dataclass

from moe_pack.calib.arrays import Array


@dataclass(frozen=True, slots=True)
class RealizedSparsity:
    """The share of neurons that do not run, of all experts' tokens and by MoE layer and expert; None without tokens.

    `tokens`: how many tokens each expert's share is taken over.
    """

    overall: float | None
    experts: tuple[tuple[float | None, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


def realized(counts: Iterable[tuple[Array, Array]], num_neurons: int) -> RealizedSparsity:
    """The sparsity of neurons dropped, over tokens: int64 [E] each, for every MoE layer."""
    layers = [(dropped.tolist(), number.tolist()) for dropped, number in counts]
    total = sum(sum(number) for _, number in layers)
    return RealizedSparsity(
        overall=sum(sum(dropped) for dropped, _ in layers) / (total * num_neurons) if total else None,
        experts=tuple(
            tuple(d / (n * num_neurons) if n else None for d, n in zip(dropped, number, strict=True))
            for dropped, number in layers
        ),
        tokens=tuple(tuple(number) for _, number in layers),
    )
