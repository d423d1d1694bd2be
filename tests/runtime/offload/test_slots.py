"""Slots of a GPU's memory: no running token reads what is overwritten, and the tables name what the slots have."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.cases import case

from moe_pack.runtime.gpu.placements import GpuPlacement
from moe_pack.runtime.gpu.residency import Promotion, Residency, TableChanges, TokenRoutes
from moe_pack.runtime.offload import PRESETS, CacheFacts
from moe_pack.runtime.offload.eviction import eviction_of

L, E, F, K = 3, 5, 40, 2
SLOT_UNITS = 4
POLICIES = ("lru", "corm", "edgemoe", "importance")


def placement_of(num_slots: int, num_landing: int, first: int = 0) -> GpuPlacement:
    """Layers with so many slots each; the first records of each expert are static."""
    return GpuPlacement(
        misses="split", has_selector=np.ones((L, E), bool), first_dynamic=np.full((L, E), first),
        static_bytes=np.zeros(L, np.int64), num_slots=np.full(L, num_slots), slot_bytes=np.full(L, 16 * SLOT_UNITS),
        num_landing=np.full(L, num_landing), num_scratch=np.zeros(L, np.int64), num_ahead=np.zeros(L, np.int64),
        scratch_bytes=0, ahead_bytes=0, dynamic_bytes=16 * SLOT_UNITS * L * num_slots, other_bytes=0, offset_bytes=4,
        num_rows=F, num_active=K, num_predicted=0,
    )  # fmt: skip


@dataclass
class Gpu:
    """A double of the GPU: a table, what each slot has, and copies that end when the draw says so."""

    placement: GpuPlacement
    residency: Residency
    table: np.ndarray = field(init=False)
    content: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    coming: list[list[Promotion]] = field(default_factory=list)
    next: list[tuple[TableChanges, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.residency.at.copy()
        nothing = TableChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))
        self.next = [(nothing, landing.copy()) for landing in self.residency.landing]

    def token(self, draw: np.random.Generator, share: float, most_rows: int, before: "Token | None") -> "Token":
        """Runs a token as `GpuDecoder` does, and checks all that it reads, before and after what happens beside it."""
        turn = 0 if before is None else 1 - before.turn
        changes, landing = self.next[turn]
        self.table.reshape(-1)[changes.places] = changes.values
        assert len(np.unique(self.residency.landing)) == self.residency.landing.size
        found = Token.drawn(draw, self, landing, share, turn)
        used = {*found.reads, *landing.tolist()}
        if before is not None:
            self.residency.pulled(before.turn, before.experts, before.pulled_counts, lambda l: before.pulled[l])
        while self.coming and draw.random() < 0.5:
            self.residency.arrived(self.coming.pop(0))
        if before is not None:
            promotions = self.residency.decide(before.routes(), most_rows)
            assert sum(len(promotion.neurons) for promotion in promotions) <= most_rows
            for promotion in promotions:
                for neuron, unit in zip(promotion.neurons.tolist(), promotion.units.tolist(), strict=True):
                    assert unit not in used, "a running token's rows are not overwritten"
                    self.content[unit] = (*promotion.key, neuron)
            if promotions:
                self.coming.append(promotions)
        changes = self.residency.changes()
        assert len(np.unique(changes.places)) == len(changes.places) <= self.residency.most_changes
        expected = self.table.copy()
        expected.reshape(-1)[changes.places] = changes.values
        assert np.array_equal(expected, self.residency.at), "the mirror is what the next token's table will be"
        self.next[1 - turn] = changes, self.residency.landing[1 - turn].copy()
        for unit, row in found.reads.items():
            assert self.content[unit] == row
        return found


@dataclass
class Token:
    """A token's routes, the slots that it reads, what it pulled, and what it left to the CPU."""

    experts: np.ndarray
    reads: dict[int, tuple[int, int, int]]
    pulled_counts: np.ndarray
    pulled: list[np.ndarray]
    missing: dict[tuple[int, int], np.ndarray]
    turn: int

    def routes(self) -> TokenRoutes:
        counts = np.array([[len(self.missing[l, place]) for place in range(K)] for l in range(L)])
        return TokenRoutes(self.experts, counts, lambda l, place: self.missing[l, place], None)

    @classmethod
    def drawn(cls, draw: np.random.Generator, gpu: Gpu, landing: np.ndarray, share: float, turn: int) -> "Token":
        experts = np.stack([draw.permutation(E)[:K] for _ in range(L)])
        counts, pulled, missing, reads = np.zeros((L, K), np.int32), [], {}, {}
        num_landing = landing.size // (L * K)
        for l in range(L):
            slots = landing.reshape(L, K, num_landing)[l]
            names = np.zeros((K, num_landing), np.int32)
            for place, e in enumerate(experts[l].tolist()):
                running = np.flatnonzero(draw.random(F) < 0.5).astype(np.int32)
                at = gpu.table[l, e, running]
                reads |= {int(unit): (l, e, int(n)) for unit, n in zip(at, running, strict=True) if unit >= 0}
                lacking = running[at < 0]
                number = min(int(share * len(lacking)), num_landing)
                counts[l, place], names[place, :number] = number, lacking[:number]
                for unit, neuron in zip(slots[place].tolist(), lacking[:number].tolist(), strict=False):
                    gpu.content[unit] = (l, e, neuron)
                missing[l, place] = lacking[number:]
            pulled.append(names)
        return cls(experts, reads, counts, pulled, missing, turn)


def gpu_of(num_slots: int, num_landing: int, policy: str) -> Gpu:
    placement = placement_of(num_slots, num_landing)
    facts = CacheFacts(np.full((L, E), F), L * num_slots, K, np.full((L, E), 1 / E))
    slots_at = 8 + SLOT_UNITS * num_slots * np.arange(L)
    eviction = eviction_of(PRESETS[policy], facts)
    return Gpu(placement, Residency(placement, np.full((L, E, F), -1, np.int32), slots_at, eviction))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_running_token_reads_what_is_overwritten(policy: str) -> None:
    for number, (num_slots, num_landing) in enumerate([(0, 0), (7, 1), (40, 0), (60, 5), (60, 15), (300, 20)]):
        for share, most_rows in ((0.0, 1000), (0.5, 1000), (1.0, 0), (0.3, 10)):
            with case(f"{num_slots} slots, {num_landing} to pull into, {share}, {most_rows} rows at most"):
                gpu, draw, token = gpu_of(num_slots, num_landing, policy), np.random.default_rng(number), None
                for _ in range(25):
                    token = gpu.token(draw, share, most_rows, token)


def hits_of(gpu: Gpu, draw: np.random.Generator, experts: np.ndarray, tokens: int) -> int:
    """Runs tokens with the same experts and all neurons; returns how many rows the last token found in slots."""
    token = None
    for _ in range(tokens):
        token = gpu.token(draw, 0.0, 10_000, token)
        token.experts = experts
        token.missing = {
            (l, p): np.flatnonzero(gpu.table[l, experts[l, p]] < 0).astype(np.int32) for l in range(L) for p in range(K)
        }
    return int((gpu.table[np.arange(L)[:, None], experts] >= 0).sum())


def test_rows_that_come_again_and_fit_are_resident_in_the_end() -> None:
    experts = np.array([[0, 1], [2, 3], [4, 0]])
    assert hits_of(gpu_of(2 * F + 10, 0, "lru"), np.random.default_rng(0), experts, 20) == L * K * F
    assert hits_of(gpu_of(F, 0, "lru"), np.random.default_rng(0), experts, 20) <= L * F


def test_what_is_forgotten_is_not_entered_when_it_arrives() -> None:
    gpu, draw, token = gpu_of(60, 0, "lru"), np.random.default_rng(0), None
    for _ in range(3):
        token = gpu.token(draw, 0.0, 10, token)
    assert gpu.coming
    gpu.residency.reset()
    for promotions in gpu.coming:
        gpu.residency.arrived(promotions)
    assert (gpu.residency.at < 0).all() and not len(gpu.residency.changes().places)


def test_a_least_recently_used_expert_gives_its_slots() -> None:
    gpu, draw = gpu_of(2 * F, 0, "lru"), np.random.default_rng(0)
    hits_of(gpu, draw, np.array([[0, 1]] * L), 12)
    hits_of(gpu, draw, np.array([[2, 3]] * L), 12)
    resident = (gpu.table >= 0).any(axis=2)
    assert resident[:, [2, 3]].all() and not resident[:, [0, 1]].any()


def test_offsets_of_64_bits_reach_slots_of_a_large_memory() -> None:
    placement, begin = placement_of(20, 3), 1 << 33
    facts = CacheFacts(np.full((L, E), F), L * 20, K, np.full((L, E), 1 / E))
    slots_at = begin + SLOT_UNITS * 20 * np.arange(L)
    residency = Residency(placement, np.full((L, E, F), -1, np.int64), slots_at, eviction_of(PRESETS["lru"], facts))
    counts, names = np.full((L, K), 2), np.tile(np.arange(3, dtype=np.int32), (K, 1))
    residency.pulled(0, np.array([[0, 1]] * L), counts, lambda layer_idx: names)
    values = residency.changes().values
    assert len(values) == 2 * K * L and (values >= begin).all() and (residency.landing >= begin).all()
