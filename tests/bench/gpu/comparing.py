"""How a kernel's answer is compared with its twin's: what `make gpu-check`'s lists of cases share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EXP = 1e-5  # bound of errors of exponentials, of the magnitudes behind a value


@dataclass(frozen=True, slots=True)
class Difference:
    error: float
    bound: float

    @property
    def is_small(self) -> bool:
        """Whether the kernel is right; a NaN is never small."""
        return self.error <= self.bound


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A case with its inputs on a device: `launch` may be called again, `compare` follows it."""

    launch: Callable[[], object]
    compare: Callable[[], Difference]


def assert_right(prepared: Prepared, bound: float | None = None) -> None:
    """Launches a case, whose difference from the twin is its bound at most; or another one, which a test knows."""
    prepared.launch()
    found = prepared.compare()
    assert found.error <= (found.bound if bound is None else bound), found


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A public operation on one set of inputs. `kernels`: the jitted functions that it launches."""

    kernels: str
    name: str
    prepare: Callable[[torch.device], Prepared]


def excess(found: Tensor, expected: Tensor, magnitude: Tensor) -> float:
    """The largest error by its magnitude; infinite where one is no number and the other is."""
    found, expected = found.cpu().double(), expected.cpu().double()
    error = torch.where(found == expected, 0.0, (found - expected).abs() / magnitude.cpu().double())
    error = torch.where(found.isnan() & expected.isnan(), 0.0, error)
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def against_rms(found: Tensor, expected: Tensor) -> float:
    return excess(found, expected, expected.double().square().mean().sqrt().expand(expected.shape))


def exact(is_same: bool) -> Difference:
    return Difference(0.0 if is_same else float("inf"), 0.0)


def random_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nans(like: Tensor | tuple[int, ...], device: torch.device) -> Tensor:
    """Room for an answer, of which every value has to be written."""
    return torch.full(tuple(like) if isinstance(like, tuple) else tuple(like.shape), torch.nan, device=device)
