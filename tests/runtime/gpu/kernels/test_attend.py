"""One token's attention by kernels against plain torch: norms, rotation, windows, rings, sinks, caches in few bits."""

from typing import Any

import pytest
import torch
from support.attending import AttendingToken, AttentionShape
from support.cases import case
from support.combinations import Combination, sample
from torch import Tensor

from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, splits
from moe_pack.runtime.model.caches import KvDtype, RowStorage

CPU = torch.device("cpu")
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


def token_of(number: int, device: torch.device) -> AttendingToken:
    c: dict[str, Any] = SAMPLE[number]
    at, window = c["position"], c["window"]
    places = window + 3 if c["room"] == "ring" else at + 1 + c["room"]
    heads, others = c["num_kv_heads"] * c["group"], (c["sinks"], c["qk_norm"], c["rotated"], c["interleaved"])
    shape = AttentionShape(heads, c["num_kv_heads"], c["head_dim"], at, places, window, *others)
    return AttendingToken(shape, number, device)


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert found.shape == expected.shape
    if tolerance is None:
        tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
    assert (found.cpu() - expected.cpu()).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=name_of)
def test_attention_is_torchs(number: int, kernel_device: torch.device) -> None:
    held = token_of(number, kernel_device)
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
    held = token_of(number, kernel_device)
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


def test_a_small_cache_has_one_split_and_a_large_one_a_wave_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "wave", lambda *_: 396)

    def number(context: int, num_heads: int = 32, num_kv_heads: int = 8) -> int:
        return AttentionWorkspace.allocate(num_heads, num_kv_heads, 8, context, CPU).sums.shape[2]

    assert [number(context) for context in (1, 32, 33, 500, 4096, 100_000)] == [1, 1, 2, 16, 49, 49]
    assert number(4096, 128, 1) == 49 and number(5000, 16, 1) == 128 and number(4096, 600, 400) == 1


@pytest.mark.parametrize("dtype", CODED)
def test_codes_are_written_and_read_as_torch_does(dtype: KvDtype, kernel_device: torch.device) -> None:
    for number in range(0, len(SAMPLE), 3):
        with case(name_of(number)):
            held = token_of(number, kernel_device)
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
    """One of five pieces of 80 values has it; the others' blocks would stay numbers."""
    number = next(i for i, c in enumerate(SAMPLE) if (c["head_dim"], c["num_kv_heads"]) == (80, 2))
    held = token_of(number, kernel_device)
    held.projected[2][1] = torch.nan
    for dtype in CODED:
        with case(dtype):
            rows = RowStorage(dtype, (held.spec.head_dim,))
            keys, values = (rows.encode(each).to(kernel_device) for each in held.cache)
            held.attended((keys, values), rows=rows)
            read = rows.decode(values.cpu())
            assert read[0, held.place].isnan().all() and not read[1:, held.place].isnan().any()
            assert not rows.decode(keys.cpu()).isnan().any()
