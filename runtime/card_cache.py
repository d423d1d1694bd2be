"""A card's memory for experts: what is always there, and pages for the rest, each layer with its own.

Owns the arena on the device; host memory (`HostArena`) is the caller's. Needs triton: imported by engines on a card
alone. What is always there `card_placement` decides, who has pages `kernels.admit`, `kernels.pull` brings rows.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.card_placement import CardPlacement
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.kernels.admit import CacheState
from moe_pack.runtime.kernels.pull import NUM_PROGRAMS, HostRows
from moe_pack.runtime.kernels.tables import LayerTables, Selection


@dataclass(frozen=True, slots=True, eq=False)
class CardLayer:
    """A layer's experts on the device: `tables` for the kernels that compute, `state` and `host` for what comes.

    `has_dynamic_selectors`, `has_dynamic_records`: whether any have to be pulled, ever.
    """

    tables: LayerTables
    state: CacheState
    host: HostRows
    has_dynamic_selectors: bool
    has_dynamic_records: bool

    def admit(self, experts: Tensor) -> None:
        """Gives these experts their pages, where they take any; see `kernels.admit`. Launches only.

        Args:    experts: int32 [n], each once, on the device; n at most k.
        """

    def pull_selectors(self, experts: Tensor, num_programs: int = NUM_PROGRAMS) -> None:
        """Brings their selector rows that are not there, after `admit`. Launches only, nothing where all are there."""

    def pull_records(self, experts: Tensor, selection: Selection | None, num_programs: int = NUM_PROGRAMS) -> None:
        """Brings their selected records (all, for None) that are not there, after `admit`. Launches only."""


class CardCache:
    """All layers' experts on a device. Owns what it allocates: `close` it.

    `layers`: one for each MoE layer.   `counters`: int64 [L, 4] on the device: NEEDED, HITS, ROWS, BYTES of
    `kernels.admit`, summed since the start.   `num_bytes`: all that it holds on the device: at most what
    `placement.num_bytes` says.
    """

    layers: tuple[CardLayer, ...]
    counters: Tensor
    num_bytes: int

    def __init__(self, pack: Pack, placement: CardPlacement, host: HostArena) -> None:
        """Allocates, copies what is always there, and fills the tables.

        Args:    placement: `place_experts(...)`.   host: all experts' extents, page-locked for a card.
        Raises:  RunError if the device has not so much memory.
        """

    def close(self) -> None:
        """Lets go of the device's memory."""
