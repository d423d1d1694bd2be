"""One token's attention by kernels against plain torch: norms, rotation, windows, rings, sinks, caches in few bits."""

import pytest
import torch
from support.cases import case
from support.combinations import Combination, sample
from torch import Tensor

from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, Entering, QkNorms, attend
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.caches import KvDtype, LayerCache
from moe_pack.runtime.model.caches.storage import RowStorage
from moe_pack.runtime.model.compute.operations import HeadNorms
from moe_pack.runtime.model.compute.softmax import View

CPU = torch.device("cpu")
Cache = tuple[Tensor, Tensor]
TOLERANCE = 3e-6  # float32 sums in another order
# A GPU multiplies in three tf32 parts, without the product of what is left of both, and cuts sums off: scores of
# about 10 are off by some 1e-6 of that, and powers by as much.
GPU_TOLERANCE = 1e-5
CODED: tuple[KvDtype, ...] = ("q8", "q4")
CODES_TOLERANCE = 1e-4  # a code that differs
CHOICES: dict[str, tuple[object, ...]] = {
    "num_kv_heads": (1, 2),
    "group": (1, 3, 20),
    "head_dim": (8, 80, 128, 256),
    "position": (0, 31, 32, 150),
    "window": (None, 1, 2, 50),
    "qk_norm": ("none", "head", "projection"),
    "rotated": (0.5, 1.0),
    "interleaved": (False, True),
    "room": (0, 150, "ring"),
    "sinks": (False, True),
}


def can_be(c: Combination) -> bool:
    if c["room"] == "ring" and c["window"] is None:
        return False
    return c["num_kv_heads"] * c["group"] * c["head_dim"] <= 4096  # type: ignore[operator]


SAMPLE = sample(CHOICES, can_be, 30)


def name_of(number: int) -> str:
    return "-".join(str(value) for value in SAMPLE[number].values())


class Case:
    """A token that comes to a layer's cache; all on the host, caches that kernels are given on `device`."""

    def __init__(self, c: Combination, seed: int, device: torch.device) -> None:
        self.device = device
        self.draw = torch.Generator().manual_seed(seed)
        kv_heads, dim, self.position = int(c["num_kv_heads"]), int(c["head_dim"]), int(c["position"])  # type: ignore[call-overload]
        heads, window, qk_norm = kv_heads * c["group"], c["window"], c["qk_norm"]  # type: ignore[operator]
        self.spec = GroupedQuerySpec(
            "grouped_query",
            heads,
            kv_heads,
            dim,
            window,
            1.5 * dim**-0.5,
            (),
            qk_norm,  # type: ignore[arg-type]
        )
        self.at = torch.tensor([self.position], dtype=torch.int32)
        self.interleaved = bool(c["interleaved"])
        self.projected = (self.random(heads * dim), self.random(kv_heads * dim), self.random(kv_heads * dim))
        self.norms = None
        if qk_norm != "none":
            widths = (dim, dim) if qk_norm == "head" else (heads * dim, kv_heads * dim)
            self.norms = QkNorms(1 + self.random(widths[0]) / 4, 1 + self.random(widths[1]) / 4, 1e-5)
        is_ring = c["room"] == "ring"
        context = self.position + 1 + (0 if is_ring else int(c["room"]))  # type: ignore[call-overload]
        turns = 9 * self.random(context, int(c["rotated"] * dim / 2))  # type: ignore[operator]
        self.angles = (turns.cos(), turns.sin())
        num_places = window + 3 if is_ring else context  # type: ignore[operator]
        self.cache = (self.random(kv_heads, num_places, dim), self.random(kv_heads, num_places, dim))
        self.sinks = 2 * self.random(heads) if c["sinks"] else None

    @property
    def place(self) -> int:
        """Where the token's keys and values enter the cache."""
        return self.position % self.cache[0].shape[1]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def entering(self) -> Entering:
        """The token on the device."""
        q, k, v, cos, sin = (each.to(self.device) for each in (*self.projected, *self.angles))
        norms = self.norms and QkNorms(self.norms.q.to(self.device), self.norms.k.to(self.device), self.norms.eps)
        return Entering(q, k, v, norms, self.spec.qk_norm == "projection", (cos, sin), self.interleaved)

    def attended(
        self, cache: Cache, rotated: Tensor | None = None, rows: RowStorage | None = None
    ) -> tuple[Tensor, Tensor]:
        """The kernels' output, and the rotated queries; the token enters the cache if these are not given."""
        spec = self.spec
        room = AttentionWorkspace.allocate(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, cache[0].shape[1], self.device
        )
        room.sums.fill_(torch.nan)  # what is left of another token's
        room.mixed.fill_(torch.nan)
        entering = self.entering() if rotated is None else None
        q = torch.full((spec.num_heads, spec.head_dim), torch.nan, device=self.device) if rotated is None else rotated
        out = torch.full_like(q, torch.nan)
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        at, window = self.at.to(self.device), spec.sliding_window
        attend(q, cache, at, spec.scale, window, room, out, sinks, entering, rows)
        return out, q

    def expected(self, cached: Cache | None = None, rows: RowStorage | None = None) -> tuple[Tensor, Cache]:
        """Torch's output, and the cache afterwards, if this is in it before; None: what the case has."""
        (q, k, v), norms = self.projected, None
        if self.norms is not None and self.spec.qk_norm == "head":
            norms = HeadNorms(*self.norms)
        elif self.norms is not None:
            q, k = TORCH.rms_norm(q, self.norms.q, self.norms.eps), TORCH.rms_norm(k, self.norms.k, self.norms.eps)
        cos, sin = (each[self.position : self.position + 1] for each in self.angles)
        keys, values = (each.clone() for each in cached or self.cache)
        cache = LayerCache(keys, values, self.position, storage=None if rows is None else (rows, rows))
        projected = (q[None], k[None], v[None])
        view = View(cache, self.spec, self.spec.sliding_window, self.sinks)
        y = TORCH.attend(projected, norms, (cos, sin), self.interleaved, view)
        return y.view(self.spec.num_heads, -1), (cache.keys, cache.values)


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert found.shape == expected.shape
    if tolerance is None:
        tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
    assert (found.cpu() - expected.cpu()).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=name_of)
def test_attention_is_torchs(number: int, kernel_device: torch.device) -> None:
    held = Case(SAMPLE[number], number, kernel_device)
    keys, values = (each.to(kernel_device, copy=True) for each in held.cache)
    y, _ = held.attended((keys, values))
    expected, (expected_keys, expected_values) = held.expected()
    assert_near(y, expected)
    assert_near(keys, expected_keys)
    assert torch.equal(values.cpu(), expected_values)
    others = torch.arange(keys.shape[1]) != held.place
    assert torch.equal(keys.cpu()[:, others], held.cache[0][:, others]), "only the token's own place is written"


@pytest.mark.parametrize("number", range(0, len(SAMPLE), 6), ids=name_of)
def test_a_cache_in_16_bit_is_read_as_the_values_it_holds(number: int, kernel_device: torch.device) -> None:
    held = Case(SAMPLE[number], number, kernel_device)
    wide, narrow = (
        [each.to(kernel_device, dtype, copy=True) for each in held.cache] for dtype in (torch.float32, torch.bfloat16)
    )
    _, turned = held.attended((wide[0], wide[1]))
    found, also_turned = held.attended((narrow[0], narrow[1]))
    assert torch.equal(also_turned, turned)
    for entered, whole in zip(narrow, wide, strict=True):
        exact = whole[:, held.place]
        # A GPU rounds to the nearest; the interpreter cuts off.
        assert ((entered[:, held.place].float() - exact).abs() <= 2**-7 * exact.abs()).all()
    expected, _ = held.attended((narrow[0].float(), narrow[1].float()), turned)
    if kernel_device.type == "cpu":
        assert torch.equal(found, expected)
    else:  # compiled apart, sums may be in another order
        assert_near(found, expected)


def test_a_small_cache_has_one_split_and_a_large_one_many() -> None:
    def splits(context: int, num_heads: int = 32, num_kv_heads: int = 8) -> int:
        return AttentionWorkspace.allocate(num_heads, num_kv_heads, 8, context, CPU).sums.shape[1]

    assert [splits(context) for context in (1, 32, 63, 64, 500, 4096, 100_000)] == [1, 1, 2, 2, 16, 32, 32]
    assert splits(4096, 128, 1) == 32 and splits(4096, 16, 1) == 64 and splits(4096, 600, 300) == 1


@pytest.mark.parametrize("dtype", CODED)
def test_codes_are_written_and_read_as_torch_does(dtype: KvDtype, kernel_device: torch.device) -> None:
    for number in range(0, len(SAMPLE), 3):
        with case(name_of(number)):
            held = Case(SAMPLE[number], number, kernel_device)
            rows = RowStorage(dtype, (held.spec.head_dim,))
            before = (rows.encode(held.cache[0]), rows.encode(held.cache[1]))
            keys, values = (each.to(kernel_device, copy=True) for each in before)
            y, turned = held.attended((keys, values), rows=rows)
            expected, written = held.expected(before, rows)
            assert_near(y, expected, CODES_TOLERANCE)
            others = torch.arange(keys.shape[1]) != held.place
            for found, known, old in zip((keys.cpu(), values.cpu()), written, before, strict=True):
                assert_same_codes(rows, found[:, held.place], known[:, held.place])
                assert torch.equal(found[:, others], old[:, others]), "only the token's own place is written"
            again, _ = held.attended((keys, values), turned, rows)
            assert torch.equal(again, y), "a token that is in the cache attends as it did when it entered"


def assert_same_codes(rows: RowStorage, found: Tensor, expected: Tensor) -> None:
    """Hadamard sums in another order may turn a value between two codes, or two scales, into the other one."""
    assert (found != expected).float().mean() <= 0.02, "bytes differ"
    read, known = rows.decode(found), rows.decode(expected)
    step = (2 / 127 if rows.dtype == "q8" else 2 / 15) * known.abs().amax(dim=-1, keepdim=True)
    assert ((read - known).abs() <= step).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in the interpreter
def test_a_value_that_is_not_finite_makes_its_row_nans(kernel_device: torch.device) -> None:
    """Of 80 values it makes one of five pieces NaN; the others' blocks would stay numbers."""
    held = Case(next(c for c in SAMPLE if (c["head_dim"], c["num_kv_heads"]) == (80, 2)), 0, kernel_device)
    held.projected[2][1] = torch.nan
    for dtype in CODED:
        with case(dtype):
            rows = RowStorage(dtype, (held.spec.head_dim,))
            keys, values = (rows.encode(each).to(kernel_device) for each in held.cache)
            held.attended((keys, values), rows=rows)
            read = rows.decode(values.cpu())
            assert read[0, held.place].isnan().all() and not read[1:, held.place].isnan().any()
            assert not rows.decode(keys.cpu()).isnan().any()
