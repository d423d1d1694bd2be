"""What routers find in fast memory: the same as replay counts, and draws as popular as they should be."""

import numpy as np
from support.cases import case

from moe_pack.convert.plan.cpu_speed import MAX_AGE, Visits, expected_misses, visits
from moe_pack.convert.plan.speed import drawn_passes
from moe_pack.runtime.offload import PRESETS, CacheFacts, Passes
from moe_pack.runtime.offload.replay import replay

L, E, K = 3, 6, 2
POPULARITY = np.random.default_rng(3).dirichlet(np.ones(E), L)


def facts(num_pages: int) -> CacheFacts:
    pages = np.random.default_rng(4).integers(1, 3, (L, E))
    return CacheFacts(pages, num_pages, K, POPULARITY.astype(np.float32))


def passes() -> Passes:
    return drawn_passes(POPULARITY, K, 60, seed=1)


def test_hits_and_bytes_are_those_that_replay_counts() -> None:
    for name in sorted(PRESETS):
        for num_pages in [5, 12]:
            with case(name, num_pages):
                preset, routed = PRESETS[name].without_prediction(), passes()
                extents = np.random.default_rng(5).integers(1000, 2000, (L, E))
                found = visits(routed, facts(num_pages), preset, 0)
                played = replay(routed, facts(num_pages), extents, preset).decode
                # What a policy places is there from the start, and was brought in by nobody.
                placed = name == "fiddler"
                assert len(found.keys) == played.num_needed == 60 * L * K
                assert placed or found.hit_rate == played.hit_rate
                assert placed or int(extents.ravel()[found.keys[found.ages == 0]].sum()) == played.bytes_fetched


def test_where_all_have_room_each_finds_what_has_long_been_there() -> None:
    found = visits(passes(), facts(1000), PRESETS["lru"], 10)
    assert found.hit_rate == 1 and found.num_tokens == 50
    assert set(found.ages.tolist()) == {MAX_AGE}
    routed = passes().routes[10:]
    cells = [(t * L + l, l * E + int(e)) for t in range(50) for l in range(L) for e in routed[t, l]]
    assert sorted(zip(found.steps.tolist(), found.keys.tolist(), strict=True)) == sorted(cells)


def test_ages_count_visits_since_an_expert_was_brought_in() -> None:
    """By hand: one layer, room for one expert, one expert a token: 0 0 1 0 0 0."""
    routed = Passes(np.array([[[e]] for e in (0, 0, 1, 0, 0, 0)], "<u2"), np.ones(6, np.uint32), None, np.ones((1, 2)))
    one_page = CacheFacts(np.ones((1, 2), np.int64), 1, 1, np.ones((1, 2), np.float32))
    assert visits(routed, one_page, PRESETS["lru"], 0).ages.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_filled_cache_begins_with_the_most_popular_experts_that_have_room() -> None:
    """By hand: room for two of three, of which 2 and 0 are chosen most: they have long been there, 1 has not."""
    routed = Passes(np.array([[[e]] for e in (2, 0, 1)], "<u2"), np.ones(3, np.uint32), None, np.ones((1, 3)))
    two_pages = CacheFacts(np.ones((1, 3), np.int64), 2, 1, np.array([[0.3, 0.1, 0.6]], np.float32))
    assert visits(routed, two_pages, PRESETS["lru"], 0, is_filled=True).ages.tolist() == [MAX_AGE, MAX_AGE, 0]
    assert visits(routed, two_pages, PRESETS["lru"], 0).ages.tolist() == [0, 0, 0]


def test_one_expert_is_drawn_as_often_as_it_is_popular() -> None:
    drawn = drawn_passes(POPULARITY, 1, 20_000).routes
    shares = [np.bincount(drawn[:, l, 0], minlength=E) / len(drawn) for l in range(L)]
    np.testing.assert_allclose(shares, POPULARITY, atol=0.015)  # 4 deviations of 20,000 draws


def test_a_token_never_draws_an_expert_twice_nor_one_that_is_never_chosen() -> None:
    never = np.array([[0.0, 1.0, 1.0, 1.0]])
    drawn = drawn_passes(never, 3, 50).routes
    assert np.sort(drawn, axis=2).tolist() == [[[1, 2, 3]]] * 50


def test_misses_expected_are_between_each_experts_own_and_those_of_all() -> None:
    """By hand: of 3 visits to expert 0 one missed, of 1 to expert 1 one, none came to expert 2: 2 of 4 in all.

    Sixteen visits of the mean are added to each: (1 + 8) / 19, (1 + 8) / 17 and 8 / 16 of what a token runs of each.
    """
    found = Visits(2, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 0]), np.array([0, 0, 1, 2]))
    runs = np.array([[1.5, 0.4, 0.1]])
    expected = [[1.5 * 9 / 19, 0.4 * 9 / 17, 0.1 * 8 / 16]]
    np.testing.assert_allclose(expected_misses(found, runs), expected, rtol=1e-12)
    assert not expected_misses(Visits(1, np.array([0]), np.array([2]), np.array([5])), runs).any()
