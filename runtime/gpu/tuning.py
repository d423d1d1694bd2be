"""Finds settings of a GPU's engine by the time that its own tokens take."""

from collections.abc import Callable

_SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


def fastest_share(seconds_with: Callable[[float], float], estimate: float) -> float:
    """Returns the share, 0 to 1, with which something takes the least time, of an estimate and eight others.

    All are tried. The time need not fall and then rise: where link and CPU slow each other down, it may be least with
    either alone, and greatest with half of each (seen with an H200).
    """
    return min((estimate, *_SHARES), key=seconds_with)
