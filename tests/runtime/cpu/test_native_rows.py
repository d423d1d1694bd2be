"""Native decoding and products of rows against the codecs; threads of the kernels."""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import random_experts
from support.cases import case
from support.expert_cases import ROW_CODECS, fitting
from support.native import INSTRUCTION_SETS, kernels_limited_to, select, work
from torch import Tensor

from moe_pack.formats import BF16, PartFormat, RowLayout, RunError, Selector, part_format, trellis_format
from moe_pack.formats.base.limits import num_cores
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import KEPT, format_text
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import CachedRows, ExpertWork, Kernels, open_kernels, row_numbers, stored_numbers
from moe_pack.runtime.cpu.kernels import InstructionSet
from moe_pack.runtime.model import activations
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.model.caches.storage import RowStorage
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES

FLOATS = [dtype for dtype in TORCH_DTYPES.values() if dtype.is_floating_point]

Bytes = NDArray[np.uint8]
SOME_CODECS = [BF16, part_format(4, 64), part_format(2, 16, 8), part_format(3, 0), *KEPT]
SOME_CODECS += [trellis_format(5, 0), trellis_format(4, 16, 8), trellis_format(8, 64)]
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


def decoded_part(stored: PartFormat, num_cols: int, layout: RowLayout, rows: Bytes) -> Tensor:
    return decode_part(stored, num_cols, torch.from_numpy(rows[:, : layout.parts[0].num_bytes]))


def test_products_are_those_of_the_decoded_rows(kernels: Kernels) -> None:
    """Numbers of tokens and of rows change with the columns, so that each codec meets many."""
    for stored in ROW_CODECS:
        draws = zip(fitting(stored), (1, 3, 64, 2, 65, 17, 4), (129, 7, 33, 1, 65, 200, 5), strict=False)
        for num_cols, num_tokens, num_rows in draws:
            with case((format_text(stored), num_cols)):
                check_product(stored, num_rows, num_cols, num_tokens, kernels)


def check_product(stored: PartFormat, num_rows: int, num_cols: int, num_tokens: int, kernels: Kernels) -> None:
    bias = num_tokens % 2 == 0
    layout, rows = random_experts.random_rows(stored, num_rows, num_cols, num_tokens, bias)
    x, section = random_experts.random_tokens(num_tokens, num_cols), rows[:, : layout.parts[0].num_bytes]
    expected = x @ decode_part(stored, num_cols, torch.from_numpy(section)).T
    errors = random_experts.product_magnitudes(x, random_experts.weight_magnitudes(stored, num_cols, section))
    if bias:
        biases = torch.from_numpy(rows[:, section.shape[1] : section.shape[1] + 4].copy()).view(torch.float32)[:, 0]
        expected, errors = expected + biases, errors + biases.double().abs()
    random_experts.assert_near(kernels.product(x, row_numbers(layout, "weight"), rows), expected, errors)


def test_products_with_stored_values_are_those_of_torch(kernels: Kernels) -> None:
    sizes = ((1, 1), (7, 64), (65, 70), (33, 1088), (129, 1031))
    for dtype, num_tokens in product(FLOATS, (1, 2, 3, 4, 5, 17, 64, 65, 100)):
        for num_rows, num_cols in sizes:
            with case((dtype, num_tokens, num_rows, num_cols)):
                weight = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(num_rows))
                weight, x = weight.to(dtype), random_experts.random_tokens(num_tokens, num_cols)
                found = kernels.product(x, stored_numbers(dtype, num_cols), weight.view(torch.uint8).numpy())
                random_experts.assert_near(
                    found, x @ weight.float().T, random_experts.product_magnitudes(x, weight.double().abs())
                )


def test_decoding_gives_the_bits_of_the_codec(kernels: Kernels) -> None:
    for stored in ROW_CODECS:
        for num_cols in fitting(stored):
            with case((format_text(stored), num_cols)):
                layout, rows = random_experts.random_rows(stored, 40, num_cols, seed=num_cols)
                expected = decoded_part(stored, num_cols, layout, rows)
                found = kernels.decode(row_numbers(layout, "weight"), rows)
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_decoding_gives_the_bits_of_the_codec_for_any_bytes(kernels: Kernels) -> None:
    """Scales and zeros of all kinds: subnormal, negative, infinite and no numbers, which alone may be others."""
    for stored in ROW_CODECS:
        with case(format_text(stored)):
            layout, rows = random_experts.random_rows(stored, 100, 128)
            rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
            expected = decoded_part(stored, 128, layout, rows)
            found = kernels.decode(row_numbers(layout, "weight"), rows)
            assert torch.equal(found.isnan(), expected.isnan())
            found, expected = (each.nan_to_num(nan=0).view(torch.int32) for each in (found, expected))
            assert torch.equal(found, expected)


def test_either_way_of_avx_512_gives_a_trellis_the_same_bits() -> None:
    by_words, by_bytes = kernels_limited_to("avx512"), kernels_limited_to("avx512vbmi")
    x = random_experts.random_tokens(3, 640)
    for stored in ROW_CODECS:
        if stored.codec != "trellis":
            continue
        with case(format_text(stored)):
            layout, rows = random_experts.random_rows(stored, 70, 640)
            numbers = row_numbers(layout, "weight")
            assert torch.equal(*(each.product(x, numbers, rows) for each in (by_words, by_bytes)))
            expert = work(
                random_experts.random_expert(random_experts.Shape(70, 640, down=stored)).rows(),
                torch.arange(3),
                torch.ones(3),
            )
            assert torch.equal(*(each.experts(x, [expert]) for each in (by_words, by_bytes)))


def test_decoding_stored_values_gives_those_of_torch(kernels: Kernels) -> None:
    """All 65,536 of 16 bits, and as many of 32."""
    values = torch.arange(0, 2**16, dtype=torch.int32)
    for dtype in FLOATS:
        with case(dtype):
            held = (values << 16 if dtype == torch.float32 else values.to(torch.int16)).view(dtype).view(-1, 64)
            found = kernels.decode(stored_numbers(dtype, 64), held.view(torch.uint8).numpy())
            assert torch.equal(found.isnan(), held.isnan())
            number = ~held.isnan()
            assert torch.equal(found[number].view(torch.int32), held.float()[number].view(torch.int32))


def test_products_of_inputs_that_are_zero_are_zero(kernels: Kernels) -> None:
    for stored, num_tokens in product(SOME_CODECS, (1, 4)):
        with case((format_text(stored), num_tokens)):
            layout, rows = random_experts.random_rows(stored, 33, 192 if stored.group != 128 else 128)
            x = torch.zeros(num_tokens, layout.num_cols)
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            assert torch.equal(found, torch.zeros(num_tokens, 33))


def test_products_bear_inputs_of_any_size(kernels: Kernels) -> None:
    """All inputs of one size, or mixed with ordinary ones. Inputs below 1e-30 may count as zero."""
    ordinary = torch.randn(96, generator=torch.Generator().manual_seed(1))
    for stored, num_tokens, size in product(SOME_CODECS, (1, 4), (1e-38, 1e-30, 1e-20, 1e20, 1e30, 1e36)):
        with case((format_text(stored), num_tokens, size)):
            layout, rows = random_experts.random_rows(stored, 33, 192)
            x = random_experts.random_tokens(num_tokens, 192).clamp_(-100, 100) / 100 * size
            x[-1, ::2] = ordinary
            expected = x @ decoded_part(stored, 192, layout, rows).T
            errors = random_experts.product_magnitudes(
                x, random_experts.weight_magnitudes(stored, 192, rows[:, : layout.parts[0].num_bytes])
            )
            found = kernels.product(x, row_numbers(layout, "weight"), rows)
            random_experts.assert_near(found, expected, errors.clamp(min=1e-30 / random_experts.MAX_ERROR))


def test_an_input_that_is_not_finite_is_seen_in_its_token_alone(kernels: Kernels) -> None:
    for stored, num_tokens in product(SOME_CODECS, (1, 3, 4, 20)):
        layout, rows = random_experts.random_rows(stored, 33, 192)
        x, bad_token = random_experts.random_tokens(num_tokens, 192), num_tokens // 2
        whole = kernels.product(x, row_numbers(layout, "weight"), rows)
        others = [t for t in range(num_tokens) if t != bad_token]
        for bad in (float("nan"), float("inf"), float("-inf")):
            with case((format_text(stored), num_tokens, bad)):
                x[bad_token, 150] = bad
                found = kernels.product(x, row_numbers(layout, "weight"), rows)
                assert not found[bad_token].isfinite().any()
                assert torch.equal(found[others], whole[others])


def test_a_checksum_is_zlibs(kernels: Kernels) -> None:
    sizes = (0, 1, 7, 15, 16, 17, 63, 64, 65, 255, 4096, 65537, MEBIBYTE, 5 * MEBIBYTE + 3)
    for num_bytes, start in product(sizes, (0, 1, 13)):
        with case((num_bytes, start)):
            held = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + start, np.uint8)[start:]
            assert kernels.checksum(held) == zlib.crc32(held.tobytes())


def test_rows_are_gathered_in_the_order_asked_for(kernels: Kernels) -> None:
    for row_bytes, count in product((1, 48, 1000, 20_000), (0, 1, 49, 300)):
        with case((row_bytes, count)):
            random = np.random.default_rng(row_bytes + count)
            rows = random.integers(0, 256, (50, row_bytes), np.uint8)
            places = random.integers(0, 50, count).astype(np.int32)
            assert np.array_equal(kernels.gather(rows, places), rows[places])
            out = np.zeros((count, row_bytes), np.uint8)
            assert kernels.gather(rows, places, out) is out
            assert np.array_equal(out, rows[places])


def test_reading_gives_the_parity_of_whole_pieces(kernels: Kernels) -> None:
    for num_bytes in (0, 100, 255, 256, 4096, 3 * MEBIBYTE):
        with case(num_bytes):
            held = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
            words = held[: num_bytes // 256 * 256].view(np.uint64)
            assert kernels.read(held) == (int(np.bitwise_xor.reduce(words)) if len(words) else 0)


Operation = Callable[[Kernels], Tensor]
D, F = 320, 700  # a record has 0.5 KiB: more than the 64 KiB that one thread does alone


def made(selector: Selector = "up") -> random_experts.RandomExpert:
    return random_experts.random_expert(
        random_experts.Shape(F, D, selector, random_experts.FOUR_BIT, part_format(3, 32, 8), part_format(2, 16, 8))
    )


def of_experts(num_tokens: int, selector: Selector, kernels: Kernels) -> Tensor:
    """Two experts with these tokens and one with others, half of their neurons."""
    x, expert = random_experts.random_tokens(num_tokens + 2, D), made(selector)
    rows = expert.rows(random_experts.threshold_at(activations(x, expert.block(), "silu").of(selector), 0.5))
    works = [work(rows, torch.arange(n), torch.linspace(0.1, 1, n)) for n in (num_tokens, 2, num_tokens)]
    return kernels.experts(x, works)


def of_select(num_tokens: int, kernels: Kernels) -> Tensor:
    return select(random_experts.random_tokens(num_tokens, D), made().rows(0.3), kernels).a


def of_selected(num_tokens: int, kernels: Kernels) -> Tensor:
    x, rows, tokens = random_experts.random_tokens(num_tokens, D), made().rows(0.3), np.arange(num_tokens)
    weights, out = np.ones(num_tokens, np.float32), np.zeros((num_tokens, D), np.float32)
    kernels.experts_apart(x, [ExpertWork(rows, tokens, weights, tokens, select(x, rows, kernels))], out)
    return torch.from_numpy(out)


def of_product(num_tokens: int, kernels: Kernels) -> Tensor:
    layout, rows = random_experts.random_rows(random_experts.FOUR_BIT, 2000, D)
    return kernels.product(random_experts.random_tokens(num_tokens, D), row_numbers(layout, "weight"), rows)


def of_decode(kernels: Kernels) -> Tensor:
    layout, rows = random_experts.random_rows(random_experts.FOUR_BIT, 2000, D)
    return kernels.decode(row_numbers(layout, "weight"), rows)


def of_checksums(kernels: Kernels) -> Tensor:
    _, rows = random_experts.random_rows(BF16, 4000, D)
    return torch.tensor([kernels.checksum(rows), kernels.read(rows) % 2**32])


def of_gather(kernels: Kernels) -> Tensor:
    _, rows = random_experts.random_rows(BF16, 400, D)
    return torch.from_numpy(kernels.gather(rows, np.arange(0, 400, 3, dtype=np.int32)))


def of_attend(num_tokens: int, start: int, kernels: Kernels, kv_dtype: KvDtype = "f32") -> Tensor:
    """Eight heads that share two keys; their positions, and the cache afterwards."""
    q, k, v = (random_experts.random_tokens(num_tokens, width, width) for width in (512, 128, 129))
    keys = random_experts.random_tokens(2 * (start + num_tokens), 64).view(2, -1, 64)
    turns = random_experts.random_tokens(num_tokens, 32)
    spec = GroupedQuerySpec("grouped_query", 8, 2, 64, None, 0.2, (), "none")
    storage, angles = RowStorage(kv_dtype, (64,)), (turns.cos(), turns.sin())
    cached = CachedRows(storage.encode(keys), storage.encode(keys.flip(1)), kv_dtype, start)
    y = kernels.attend((q, k, v[:, :128]), None, angles, False, cached, spec, None, None)
    return torch.cat([y.flatten(), cached.keys.flatten(), cached.values.flatten()])


def of_rms_norm(kernels: Kernels) -> Tensor:
    return kernels.rms_norm(random_experts.random_tokens(400, D), torch.linspace(1, 2, D), 1e-6)


def of_rotate(kernels: Kernels) -> Tensor:
    return kernels.rotate(
        random_experts.random_tokens(400, 576), torch.linspace(1, 2, 576), True, np.full((9, 9), 0.3, np.float32)
    )


OPERATIONS: dict[str, Operation] = {
    **{
        f"experts, {n} tokens, {selector}": partial(of_experts, n, selector)
        for n in (1, 3, 70)
        for selector in SELECTORS
    },
    **{f"select, {n} tokens": partial(of_select, n) for n in (1, 3, 70)},
    **{f"experts of selected neurons, {n} tokens": partial(of_selected, n) for n in (1, 3, 70)},
    **{f"product, {n} tokens": partial(of_product, n) for n in (1, 3, 70)},
    "decode": of_decode,
    "checksums": of_checksums,
    "gather": of_gather,
    **{f"attend, {n} tokens": partial(of_attend, n, start) for n, start in ((1, 3000), (3, 700), (70, 200), (300, 0))},
    **{
        f"attend, {dtype}, {n} tokens": partial(of_attend, n, 700, kv_dtype=dtype)
        for dtype in ("bf16", "q8", "q4")
        for n in (1, 70)
    },
    "rms_norm": of_rms_norm,
    "rotate": of_rotate,
}


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def teams(request: pytest.FixtureRequest) -> Iterator[dict[int, Kernels]]:
    """Kernels with 1, 2, 3 and 5 threads, whatever the machine's number of CPUs."""
    limit: InstructionSet = request.param
    kernels_limited_to(limit)  # or skip
    held = {threads: Kernels(threads, limit) for threads in (1, 2, 3, 5)}
    yield held
    for each in held.values():
        each.close()


@pytest.fixture
def opened_kernels() -> Iterator[Kernels]:
    """Kernels as a command opens them, with three threads."""
    opened = open_kernels(3)
    if opened is None:
        pytest.skip("native kernels were not built: no C++ compiler")
    with closing(opened):
        yield opened


def test_any_number_of_threads_gives_the_same_bits(teams: dict[int, Kernels]) -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            alone, *others = map(operation, teams.values())
            assert all(torch.equal(other, alone) for other in others)


@pytest.mark.slow
def test_the_same_operation_gives_the_same_bits_again(opened_kernels: Kernels) -> None:
    for name in ("experts, 1 tokens, up", "experts, 70 tokens, none", "product, 3 tokens", "checksums"):
        with case(name):
            first = OPERATIONS[name](opened_kernels)
            assert all(torch.equal(OPERATIONS[name](opened_kernels), first) for _ in range(20))


@pytest.mark.slow
def test_callers_at_once_get_what_they_get_alone(opened_kernels: Kernels) -> None:
    """Each of six threads of Python asks for all operations, each in another order."""
    alone = {name: operation(opened_kernels) for name, operation in OPERATIONS.items()}
    names = list(OPERATIONS)

    def differing(caller: int) -> list[str]:
        turned = names[4 * caller :] + names[: 4 * caller]
        return [name for name in turned if not torch.equal(OPERATIONS[name](opened_kernels), alone[name])]

    with ThreadPoolExecutor(6) as callers:
        assert list(callers.map(differing, range(6))) == [[]] * 6


def test_several_kernels_at_once_get_what_they_get_alone(teams: dict[int, Kernels]) -> None:
    operation = OPERATIONS["experts, 3 tokens, up"]
    alone = operation(teams[1])
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda kernels: [operation(kernels) for _ in range(5)], teams.values()))
    assert all(torch.equal(one, alone) for several in found for one in several)


def test_results_do_not_depend_on_what_was_computed_before(opened_kernels: Kernels) -> None:
    """Memory of the kernels is kept and grows: what larger jobs left in it is not seen."""
    with closing(Kernels(3)) as fresh:
        expected = of_experts(1, "both", fresh)
    for num_tokens in (70, 3, 1):
        of_experts(num_tokens, "up", opened_kernels)
        of_product(num_tokens, opened_kernels)
    assert torch.equal(of_experts(1, "both", opened_kernels), expected)


def test_all_cores_work_unless_said_otherwise() -> None:
    opened = open_kernels()
    if opened is None:
        pytest.skip("native kernels were not built: no C++ compiler")
    with closing(opened):
        assert opened.threads == num_cores() >= 1


def test_no_threads_or_too_many_are_refused() -> None:
    kernels_limited_to("portable")
    for threads in (-1, 0, 1025):
        with pytest.raises((ValueError, RunError), match=r"threads.*1 to 1024"):
            Kernels(threads)
    Kernels(1).close()
