"""How much loss to plan for next, so that the loss measured holds: nothing is read or written here.

A plan's loss is foretold in nats; what its pack loses is measured. Of small losses the one is nearly a multiple of the
other, so the next plan's nats are the last one's times what is allowed over what was measured, and a little less. A
pack that holds but leaves much of what is allowed unused is tried once more with more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ATTEMPTS = 10
_AIM = 0.95  # of what is allowed, aimed at
_ENOUGH = 0.85  # of what is allowed, from which a pack that holds is good enough
_ENOUGH_ATTEMPTS = 4  # after which one that holds is, whatever it leaves unused
_LEAST_STEP = 1.03  # a change of nats not worth a conversion
_MOST_LOOSER, _MOST_TIGHTER, _LEAST_TIGHTER = 4.0, 0.2, 0.93


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan made into a pack and measured.

    `nats`: that were planned for.   `measured`: what counts against what is allowed, in the same unit: the upper end
    of the 95% interval.
    """

    nats: float
    measured: float


def best_of(attempts: Sequence[Attempt], allowed: float) -> int | None:
    """Which attempt holds and was planned with the most nats; None where none holds."""
    holding = [number for number, attempt in enumerate(attempts) if attempt.measured <= allowed]
    return max(holding, key=lambda number: attempts[number].nats, default=None)


def next_nats(attempts: Sequence[Attempt], allowed: float, first: float) -> float | None:
    """The nats to plan for next; None where the best attempt so far is the pack to keep.

    Args:    first: for the first attempt.
    """
    if not attempts:
        return first
    best = best_of(attempts, allowed)
    failing = min((attempt.nats for attempt in attempts if attempt.measured > allowed), default=None)
    if best is None:
        assert failing is not None, "one of the two"
        worst = min(attempts, key=lambda attempt: attempt.nats)
        return worst.nats * min(max(_AIM * allowed / worst.measured, _MOST_TIGHTER), _LEAST_TIGHTER)
    held = attempts[best]
    if held.measured >= _ENOUGH * allowed or len(attempts) >= _ENOUGH_ATTEMPTS:
        return None
    wanted = held.nats * min(_AIM * allowed / max(held.measured, 1e-12), _MOST_LOOSER)
    if failing is not None:
        wanted = min(wanted, (held.nats * failing) ** 0.5)
    return wanted if wanted >= _LEAST_STEP * held.nats else None
