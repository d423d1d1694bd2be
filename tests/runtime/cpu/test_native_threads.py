"""The native kernels with threads: any number gives the same bits; several callers at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from support.cases import case
from support.native import INSTRUCTION_SETS, kernels_limited_to, select, work
from support.random_experts import (
    FOUR_BIT,
    RandomExpert,
    Shape,
    random_expert,
    random_rows,
    random_tokens,
    threshold_at,
)
from torch import Tensor

from moe_pack.formats import BF16, RunError, Selector, part_format
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import CachedRows, ExpertWork, Kernels, num_cpus, open_kernels, row_numbers
from moe_pack.runtime.cpu.kernels import InstructionSet
from moe_pack.runtime.model import activations
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.model.caches.storage import RowStorage

Operation = Callable[[Kernels], Tensor]
D, F = 320, 700  # a record has 0.5 KiB: more than the 64 KiB that one thread does alone


def made(selector: Selector = "up") -> RandomExpert:
    return random_expert(Shape(F, D, selector, FOUR_BIT, part_format(3, 32, 8), part_format(2, 16, 8)))


def of_experts(num_tokens: int, selector: Selector, kernels: Kernels) -> Tensor:
    """Two experts with these tokens and one with others, half of their neurons."""
    x, expert = random_tokens(num_tokens + 2, D), made(selector)
    rows = expert.rows(threshold_at(activations(x, expert.block(), "silu").of(selector), 0.5))
    works = [work(rows, torch.arange(n), torch.linspace(0.1, 1, n)) for n in (num_tokens, 2, num_tokens)]
    return kernels.experts(x, works)


def of_select(num_tokens: int, kernels: Kernels) -> Tensor:
    return select(random_tokens(num_tokens, D), made().rows(0.3), kernels).a


def of_selected(num_tokens: int, kernels: Kernels) -> Tensor:
    x, rows, tokens = random_tokens(num_tokens, D), made().rows(0.3), np.arange(num_tokens)
    weights, out = np.ones(num_tokens, np.float32), np.zeros((num_tokens, D), np.float32)
    kernels.experts_apart(x, [ExpertWork(rows, tokens, weights, tokens, select(x, rows, kernels))], out)
    return torch.from_numpy(out)


def of_product(num_tokens: int, kernels: Kernels) -> Tensor:
    layout, rows = random_rows(FOUR_BIT, 2000, D)
    return kernels.product(random_tokens(num_tokens, D), row_numbers(layout, "weight"), rows)


def of_decode(kernels: Kernels) -> Tensor:
    layout, rows = random_rows(FOUR_BIT, 2000, D)
    return kernels.decode(row_numbers(layout, "weight"), rows)


def of_checksums(kernels: Kernels) -> Tensor:
    _, rows = random_rows(BF16, 4000, D)
    return torch.tensor([kernels.checksum(rows), kernels.read(rows) % 2**32])


def of_gather(kernels: Kernels) -> Tensor:
    _, rows = random_rows(BF16, 400, D)
    return torch.from_numpy(kernels.gather(rows, np.arange(0, 400, 3, dtype=np.int32)))


def of_attend(num_tokens: int, start: int, kernels: Kernels, kv_dtype: KvDtype = "f32") -> Tensor:
    """Eight heads that share two keys; their positions, and the cache afterwards."""
    q, k, v = (random_tokens(num_tokens, width, width) for width in (512, 128, 129))
    keys = random_tokens(2 * (start + num_tokens), 64).view(2, -1, 64)
    turns = random_tokens(num_tokens, 32)
    spec = GroupedQuerySpec("grouped_query", 8, 2, 64, None, 0.2, (), "none")
    storage, angles = RowStorage(kv_dtype, (64,)), (turns.cos(), turns.sin())
    cached = CachedRows(storage.encode(keys), storage.encode(keys.flip(1)), kv_dtype, start)
    y = kernels.attend((q, k, v[:, :128]), None, angles, False, cached, spec, None, None)
    return torch.cat([y.flatten(), cached.keys.flatten(), cached.values.flatten()])


def of_coded_attend(kv_dtype: KvDtype, num_tokens: int, kernels: Kernels) -> Tensor:
    """The same over codes, of which there are 700 positions before."""
    return of_attend(num_tokens, 700, kernels, kv_dtype)


def of_rms_norm(kernels: Kernels) -> Tensor:
    return kernels.rms_norm(random_tokens(400, D), torch.linspace(1, 2, D), 1e-6)


def of_rotate(kernels: Kernels) -> Tensor:
    return kernels.rotate(random_tokens(400, 576), torch.linspace(1, 2, 576), True, np.full((9, 9), 0.3, np.float32))


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
        f"attend, {dtype}, {n} tokens": partial(of_coded_attend, dtype, n)
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
    for kernels in held.values():
        kernels.close()


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """Kernels as a command opens them, with three threads."""
    opened = open_kernels(3)
    if opened is None:
        pytest.skip("native kernels were not built: no C++ compiler")
    with closing(opened):
        yield opened


def test_any_number_of_threads_gives_the_same_bits(teams: dict[int, Kernels]) -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            alone, *others = (operation(kernels) for kernels in teams.values())
            assert all(torch.equal(other, alone) for other in others)


@pytest.mark.slow
def test_the_same_operation_gives_the_same_bits_again(kernels: Kernels) -> None:
    for name in ("experts, 1 tokens, up", "experts, 70 tokens, none", "product, 3 tokens", "checksums"):
        with case(name):
            first = OPERATIONS[name](kernels)
            assert all(torch.equal(OPERATIONS[name](kernels), first) for _ in range(20))


@pytest.mark.slow
def test_callers_at_once_get_what_they_get_alone(kernels: Kernels) -> None:
    """Each of six threads of Python asks for all operations, each in another order."""
    alone = {name: operation(kernels) for name, operation in OPERATIONS.items()}
    names = list(OPERATIONS)

    def differing(caller: int) -> list[str]:
        turned = names[4 * caller :] + names[: 4 * caller]
        return [name for name in turned if not torch.equal(OPERATIONS[name](kernels), alone[name])]

    with ThreadPoolExecutor(6) as callers:
        assert list(callers.map(differing, range(6))) == [[]] * 6


def test_several_kernels_at_once_get_what_they_get_alone(teams: dict[int, Kernels]) -> None:
    operation = OPERATIONS["experts, 3 tokens, up"]
    alone = operation(teams[1])
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda kernels: [operation(kernels) for _ in range(5)], teams.values()))
    assert all(torch.equal(one, alone) for several in found for one in several)


def test_results_do_not_depend_on_what_was_computed_before(kernels: Kernels) -> None:
    """Memory of the kernels is kept and grows: what larger jobs left in it is not seen."""
    with closing(Kernels(3)) as fresh:
        expected = of_experts(1, "both", fresh)
    for num_tokens in (70, 3, 1):
        of_experts(num_tokens, "up", kernels)
        of_product(num_tokens, kernels)
    assert torch.equal(of_experts(1, "both", kernels), expected)


def test_all_cpus_work_unless_said_otherwise() -> None:
    opened = open_kernels()
    if opened is None:
        pytest.skip("native kernels were not built: no C++ compiler")
    with closing(opened):
        assert opened.threads == num_cpus() >= 1


def test_no_threads_or_too_many_are_refused() -> None:
    kernels_limited_to("portable")
    for threads in (-1, 0, 1025):
        with pytest.raises((ValueError, RunError), match=r"threads.*1 to 1024"):
            Kernels(threads)
    Kernels(1).close()
