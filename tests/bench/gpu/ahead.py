"""A token's time where records of predicted experts are pulled ahead, from means of its layers (`gpu.roofline`).

The link brings what a layer itself lacks first. In the time that it has left, or in that of attention alone, it brings
records of the next layer's predicted experts. Of these a part runs, which the next layer does not lack then; link and
CPU share the rest by their rates.
"""

from dataclasses import dataclass

import numpy as np

from gpu.launches import TokenLaunches
from gpu.roofline import NUM_SMS, Launches, Rates, Subject, end_s, moved_bytes, rates_of

_STEPS = 200  # of the bytes ahead, of which the best number is taken


@dataclass(frozen=True, slots=True)
class Missing:
    """Shares of bytes: of running records in `missing` and `whole`, of the missing ones in the others.

    `missing`: those that are not static.   `whole`: those of experts that the CPU has as a whole, with their selectors.
    `foreseen`: predicted ones.   `right`: of all that a prediction would bring, those that ran.
    """

    missing: float
    whole: float
    foreseen: float
    right: float

    @property
    def lacking(self) -> float:
        """The share of bytes that are missing, those of whole experts too."""
        return self.missing + self.whole


@dataclass(frozen=True, slots=True)
class Times:
    """The mean layer of a model on a GPU, in seconds and bytes."""

    once_s: float  # of a token
    num_layers: int
    serial_s: float  # of a layer, without what is missing
    attention_s: float  # the part of it without experts
    needed: float  # bytes of running records
    rates: Rates
    cpu_s: float  # of a call
    link_s: float  # of the launches that pull

    @classmethod
    def of(cls, subject: Subject, counted: TokenLaunches, gpu: str, cpu_rate: float) -> "Times":
        """Returns the times; `counted` are the launches in mode `split`."""
        rates, launches = rates_of(gpu, cpu_rate, subject.layout, "split"), Launches.of(counted)
        moved = moved_bytes(subject, subject.place(1 << 62, "auto"), subject.runs(), 0.0, NUM_SMS[gpu])
        partials = moved.partials / rates.memory
        attention = launches.layer * rates.layer_launch_s + rates.latency_s + moved.attention / rates.memory
        attention += moved.dense / rates.read.dense
        serial = attention + 2 * partials + float(moved.select.mean()) / rates.read.select
        once = launches.others * rates.launch_s + subject.head_bytes / rates.read.head
        once += end_s(gpu, subject.layout.spec.vocab_size)
        cpu_s = rates.call_s + launches.cpu * rates.launch_s
        link_s = launches.link * rates.launch_s + partials
        return cls(once, len(subject.layout.experts), serial, attention, float(moved.here.mean()), rates, cpu_s, link_s)

    def token_ms(self, missing: Missing, is_pulled: bool) -> float:
        """Returns the time of a token that brings nothing ahead; the CPU computes all if nothing `is_pulled`."""
        return self._token_ms(self._layer_s(missing.missing * self.needed, is_pulled, missing.whole * self.needed)[0])

    def pulled_ms(self, lacking: float) -> float:
        """Returns the time of a token whose missing bytes, this share, come over the link before its records run."""
        over_link = lacking * self.needed / self.rates.link
        return self._token_ms(self.serial_s + over_link + self.needed / self.rates.read.records)

    def ahead_ms(self, missing: Missing, is_whole: bool = True) -> tuple[float, float]:
        """Returns the time of a token with records ahead, and the share of bytes that is missing still.

        Args:    is_whole: whether they come in all the time that the link has left; else in attention's.
        """
        right, lacking = max(missing.right, 1e-9), missing.missing * self.needed
        whole = missing.whole * self.needed
        best = self._layer_s(lacking, True, whole)[0], lacking
        for brought in np.linspace(0, missing.foreseen * lacking / right, _STEPS + 1)[1:].tolist():
            rest = lacking - right * brought
            layer_s, own_s = self._layer_s(rest, True, whole)
            layer_s += 2 * self.rates.launch_s  # a router's product and the ranking
            window = layer_s - own_s if is_whole else self.attention_s
            if brought / self.rates.link <= window:
                best = min(best, (layer_s, rest))
        return self._token_ms(best[0]), best[1] / self.needed + missing.whole

    def _layer_s(self, missing: float, is_pulled: bool, whole: float) -> tuple[float, float]:
        """Returns the seconds of a layer, and those in which the link is busy, for so many missing bytes."""
        rates, here_s = self.rates, (self.needed - missing) / self.rates.read.records
        pulled = min(missing, (missing + whole) * rates.pulled_share) if is_pulled else 0.0
        over_link = pulled / rates.link
        link_s = over_link + self.link_s + pulled / rates.read.records if pulled else 0.0
        cpu_s = self.cpu_s + (missing + whole - pulled) / rates.cpu
        return self.serial_s + max(here_s, cpu_s, link_s), over_link

    def _token_ms(self, layer_s: float) -> float:
        return 1e3 * (self.once_s + self.num_layers * layer_s)
