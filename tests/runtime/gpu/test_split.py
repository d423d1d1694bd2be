"""Splits of missing experts: the papers' algorithms worked by hand, and against all subsets."""

import itertools
import random

from support.printed_split import balanced

from moe_pack.runtime.offload.split import LoadOrCompute, fastest


def test_two_pointers_load_what_has_most_tokens_and_compute_what_has_fewest() -> None:
    """Tokens 9, 1, 4, 2; 1 s a token, 3 s a load. Load 9 (3 against 0), compute 1, 2 (1, 3), load 4 (3 <= 3)."""
    split = balanced([9, 1, 4, 2], [3.0] * 4)
    assert split == LoadOrCompute(loaded=(0, 2), computed=(1, 3))
    assert split.seconds([9, 1, 4, 2], [3.0] * 4) == 6.0


def test_two_pointers_begin_with_a_load_even_where_computing_is_quicker() -> None:
    """Both costs are 0 at first, and line 5 loads where they are equal."""
    assert balanced([1], [100.0]) == LoadOrCompute(loaded=(0,), computed=())
    assert balanced([1, 1, 1], [100.0] * 3) == LoadOrCompute(loaded=(0,), computed=(2, 1))


def test_the_fastest_split_computes_a_lone_token_that_loading_would_delay() -> None:
    assert fastest([1], [100.0]) == LoadOrCompute(loaded=(), computed=(0,))


def test_the_fastest_split_worked_by_hand() -> None:
    """Tokens 9, 1, 4, 2; 1 s a token, 3 s a load. m = 2: max(3, 6) = 6; m = 3: max(7, 3) = 7; m = 1: 9; m = 0: 12."""
    split = fastest([9, 1, 4, 2], [3.0] * 4)
    assert split == LoadOrCompute(loaded=(0, 2), computed=(1, 3))


def test_of_equally_fast_splits_the_one_that_loads_least_is_taken() -> None:
    """Tokens 2, 2 at 1 s, loads 4 s: both computed 4 s, one of each 4 s."""
    assert fastest([2, 2], [4.0, 4.0]) == LoadOrCompute(loaded=(), computed=(1, 0))


def test_nothing_missing_splits_into_nothing() -> None:
    assert balanced([], []) == fastest([], []) == LoadOrCompute((), ())


def least_time(computing: list[float], loading: list[float]) -> float:
    """The least time over all subsets."""
    places = range(len(computing))
    subsets = itertools.chain.from_iterable(itertools.combinations(places, m) for m in range(len(places) + 1))
    return min(
        max(sum(computing[i] for i in subset), sum(loading[i] for i in places if i not in subset)) for subset in subsets
    )


def test_no_subset_is_faster_and_the_two_pointers_take_every_expert_once() -> None:
    rng = random.Random(4)
    for _ in range(150):
        tokens = [rng.randint(1, 30) for _ in range(rng.randint(1, 8))]
        token_seconds, load_seconds = rng.random() + 0.01, rng.random() * 20 + 0.01
        times = [number * token_seconds for number in tokens], [load_seconds] * len(tokens)
        best, quick, least = fastest(*times), balanced(*times), least_time(*times)
        assert abs(best.seconds(*times) - least) < 1e-9
        assert sorted(quick.loaded + quick.computed) == list(range(len(tokens)))
        assert quick.seconds(*times) >= least - 1e-9


def test_experts_of_different_sizes_are_split_nearly_as_well_as_by_the_best_subset() -> None:
    """By the bytes of each: a narrow expert loads sooner, and one that is nearly all there sooner still."""
    assert fastest([4, 4], [1.0, 4.0]).loaded == (0,)
    rng = random.Random(5)
    for _ in range(150):
        tokens = [rng.randint(1, 30) for _ in range(rng.randint(1, 8))]
        sizes, lacking = ([rng.randint(1, 4) / 4 for _ in tokens] for _ in range(2))
        computing = [number * size for number, size in zip(tokens, sizes, strict=True)]
        loading = [20 * size * part for size, part in zip(sizes, lacking, strict=True)]
        best = fastest(computing, loading)
        assert sorted(best.loaded + best.computed) == list(range(len(tokens)))
        most = max(min(each) for each in zip(computing, loading, strict=True))
        assert best.seconds(computing, loading) <= least_time(computing, loading) + most + 1e-9
