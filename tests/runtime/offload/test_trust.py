"""What may change answers: experts and neurons that run in place of others, and that none does unless asked for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.models import DEMO_MODEL, pack
from support.native import operations_limited_to
from support.predicted_routes import PredictedRoutes
from support.streaming import budget_for
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions, offload
from moe_pack.runtime.cpu.reads import BlockingReads
from moe_pack.runtime.engine.offloaded import cache_facts
from moe_pack.runtime.model import Decoder, PackWeights, linear
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload.expert_store import ExpertJob, ExpertStore
from moe_pack.runtime.offload.experts import LayerRun
from moe_pack.runtime.offload.prefetch import NextRouterPrediction
from moe_pack.runtime.offload.split import substitute

IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
CONTEXT, NUM_EXPERTS = 32, 8
TRUSTING = offload.Approximations(runs_predicted=True)


class PromptReads(BlockingReads):
    """A disk that has read whatever it is asked for before it answers: what is predicted comes in time."""

    def submit(
        self, file: int, offsets: NDArray[np.int64], places: NDArray[np.int64], sizes: NDArray[np.int64], urgent: bool
    ) -> int:
        super().wait(super().submit(file, offsets, places, sizes, urgent))
        return 0

    def wait(self, ticket: int) -> None:
        """It is read."""

    def is_done(self, ticket: int) -> bool:
        return True

    def promote(self, ticket: int) -> None:
        """It is read."""

    def cancel(self, ticket: int) -> bool:
        return True


@pytest.fixture(scope="module")
def dense_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit; not to be changed."""
    folder = tmp_path_factory.mktemp("trust") / "dense"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture(scope="module")
def sparse_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one threshold, which most of the neurons do not reach; not to be changed."""
    folder = tmp_path_factory.mktemp("trust") / "sparse"
    pack(DEMO_MODEL, folder, group=64)
    with Pack(folder) as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(folder, np.full(shape, 0.8, np.float32))
    return folder


@contextmanager
def streaming(
    folder: Path, policy: offload.PolicyName, trust: offload.Approximations = offload.EXACT, num_experts: int = 24
) -> Iterator[offload.OffloadedWeights]:
    """Weights on a prompt disk; rows alone are read where not all neurons run, predicted where the policy does."""
    operations = operations_limited_to("portable")
    preset = offload.PRESETS[policy]
    with Pack(folder) as opened:
        plan = offload.divide_budget(opened.layout, budget_for(opened, num_experts, CONTEXT), CONTEXT, 0)
        facts = cache_facts(opened, plan, None)
        store = ExpertStore(
            opened,
            operations,
            plan,
            lambda memory: PromptReads(memory, False),
            verify=True,
            rows_below=1.0,
            gap_bytes=0,
        )
        try:
            residency = offload.expert_cache_for(preset, facts)
            weights = offload.OffloadedWeights(
                opened, operations, store, residency, reuses_selector=preset.reuse_selector, approximations=trust
            )
            if preset.reuse_selector:
                weights.prefetcher = offload.Prefetcher(NextRouterPrediction(weights), NUM_EXPERTS, 2, 2)
            yield weights
        finally:
            store.close()


def answers(weights: PackWeights) -> Tensor:
    decoder = Decoder(weights, CONTEXT)
    return torch.stack([decoder.next_logits([token]) for token in IDS])


def mapped(folder: Path) -> Tensor:
    with Pack(folder) as opened:
        return answers(MappedPackWeights(opened, operations_limited_to("portable")))


def test_nothing_that_changes_answers_is_on_unless_asked_for() -> None:
    off = offload.Approximations(substitute=None, is_predicted_enough=False, runs_predicted=False)
    assert EngineOptions().approximations == off


def test_predicted_experts_run_and_the_router_weights_them(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        plain = PredictedRoutes(opened, operations_limited_to("portable"))
        expected = answers(plain)
    with streaming(dense_pack, "corm", TRUSTING) as weights:
        found = answers(weights)
        counts = weights.decode
    # Weights by torch here, by the kernels there; logits reach 20.
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(found, mapped(dense_pack), rtol=0, atol=0.1)
    assert counts.mispredicted == plain.num_wrong > 0
    assert counts.needed == 2 * 4 * len(IDS)
    assert counts.prefetched_chosen == counts.prefetched > 0, "everything that was prefetched ran"


def test_only_the_first_layer_and_predictions_read_anything(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        size = -(-opened.layout.experts[0][0].num_bytes // 4096) * 4096
    with streaming(dense_pack, "corm", TRUSTING) as weights:
        answers(weights)
        counts = weights.decode
        num_misses = counts.needed - counts.hits
    assert num_misses <= 2 * len(IDS), "those of the first layer"
    assert counts.asked_bytes == (num_misses + counts.prefetched) * size


def test_without_a_prediction_the_router_chooses(dense_pack: Path) -> None:
    with streaming(dense_pack, "lru", TRUSTING) as weights:
        assert torch.equal(answers(weights), mapped(dense_pack))
        assert weights.decode.mispredicted == 0
    with streaming(dense_pack, "corm", TRUSTING) as weights:
        weights.prefetcher = offload.Prefetcher(
            NextRouterPrediction(weights), NUM_EXPERTS, 2, 1
        )  # fewer than a token uses
        assert torch.equal(answers(weights), mapped(dense_pack))


def test_a_prompt_runs_the_experts_of_its_routers(dense_pack: Path) -> None:
    with Pack(dense_pack) as opened:
        expected = Decoder(MappedPackWeights(opened, operations_limited_to("portable")), CONTEXT).next_logits(IDS)
    with streaming(dense_pack, "corm", TRUSTING) as weights:
        assert torch.equal(Decoder(weights, CONTEXT).next_logits(IDS), expected)
        assert weights.prefill.mispredicted == weights.decode.mispredicted == 0


def test_a_pass_that_was_broken_off_leaves_no_prediction_to_the_next(dense_pack: Path) -> None:
    with streaming(dense_pack, "corm", TRUSTING) as weights:
        x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
        two, half = torch.tensor([[0, 1]]), torch.full((1, 2), 0.5)
        weights.run_experts(1, x, two, half)  # predicts layer 2, which does not come
        for layer_idx in (0, 2):
            weights.run_experts(layer_idx, x, two, half)
        assert weights.decode.mispredicted == 0


def test_where_nothing_is_predicted_the_engine_says_so(dense_pack: Path) -> None:
    said = "--trust-experts changes nothing: fewer experts are predicted than a token uses"
    for options, expected in (
        (EngineOptions(policy="lru", approximations=TRUSTING), [said]),
        (EngineOptions(policy="corm", prefetches=False, approximations=TRUSTING), [said]),
        (EngineOptions(policy="corm", approximations=TRUSTING), []),
        (EngineOptions(policy="lru"), []),
    ):
        with Pack(dense_pack) as opened, Engine(opened, options, CONTEXT) as engine:
            assert [each for each in engine.fallbacks if "--trust" in each] == expected


def test_with_alpha_0_only_equal_scores_could_change_places(dense_pack: Path) -> None:
    with streaming(dense_pack, "lru", offload.Approximations(substitute=0.0), num_experts=5) as weights:
        assert torch.equal(answers(weights), mapped(dense_pack))
        assert weights.decode.substituted == 0


def substituted_by_hand(scores: list[float], chosen: list[int], resident: set[int], alpha: float) -> list[int]:
    """One token's experts, lowest first to go; the paper's rule for k = 2 and no equal scores."""
    beta = sorted(scores, reverse=True)[2]
    free = resident | {e for e in chosen if scores[e] > (1 + alpha) * beta}
    leaving = sorted((e for e in chosen if e not in free), key=lambda e: scores[e])
    coming = sorted((e for e in free - set(chosen) if scores[e] >= (1 - alpha) * beta), key=lambda e: -scores[e])
    replaced = dict(zip(leaving, coming, strict=False))
    return [replaced.get(e, e) for e in chosen]


def test_who_comes_is_in_memory_and_weights_are_the_familys_own(dense_pack: Path) -> None:
    """Mixtral's weights: the softmax of the logits of the experts that run."""
    generator, resident, num_replaced = torch.Generator().manual_seed(3), {0, 1, 2, 3}, 0
    with Pack(dense_pack) as opened, streaming(dense_pack, "lru", offload.Approximations(substitute=0.5)) as weights:
        plain = MappedPackWeights(opened, operations_limited_to("portable"))
        d = opened.spec.hidden_size
        two = torch.tensor([[0, 1], [2, 3]])
        weights.run_experts(0, torch.randn(2, d, generator=generator), two, torch.full((2, 2), 0.5))  # brings them in
        for _ in range(12):
            x = torch.randn(1, d, generator=generator)
            logits = linear(x, weights.matrix("layers.0.router"))
            top = logits.topk(2)
            scores, chosen = logits.softmax(1)[0].tolist(), top.indices[0].tolist()
            run = substituted_by_hand(scores, chosen, resident, 0.5)
            num_replaced += sum(a != b for a, b in zip(run, chosen, strict=True))
            expected = plain.run_experts(0, x, torch.tensor([run]), logits[:, run].softmax(1))
            found = weights.run_experts(0, x, top.indices, top.values.softmax(1))
            # Weights by torch here, by the kernels there: a few units of the last place of values of about 1.
            assert torch.allclose(found, expected, rtol=0, atol=1e-5)
            resident |= set(run)
    assert weights.decode.substituted == num_replaced > 0


def test_rows_are_predicted_of_experts_whose_selectors_come_in_time(sparse_pack: Path) -> None:
    with streaming(sparse_pack, "corm") as weights:
        Decoder(weights, CONTEXT).next_logits(IDS[:1])
        counts = weights.decode
        assert counts.hits == counts.prefetched_chosen > 0, "nothing was there but what was predicted"
        assert counts.rows_prefetched == counts.prefetched_chosen
        assert counts.in_part == counts.needed
        assert 0 < counts.running_predicted < counts.running


def test_predicted_rows_change_no_answer_unless_they_are_trusted(sparse_pack: Path) -> None:
    with streaming(sparse_pack, "floe") as weights:
        assert torch.equal(answers(weights), mapped(sparse_pack))
    with streaming(sparse_pack, "floe", offload.Approximations(is_predicted_enough=True)) as trusting:
        assert not torch.equal(answers(trusting), mapped(sparse_pack))
        assert trusting.decode.rows_prefetched > 0


def test_of_a_trusted_expert_the_neurons_run_whose_records_are_there(sparse_pack: Path) -> None:
    key = offload.ExpertKey(1, 3)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    with streaming(sparse_pack, "corm", offload.Approximations(is_predicted_enough=True)) as weights:
        store = weights.store
        assert isinstance(store, ExpertStore) and store.by_rows is not None
        store.fetch(key, urgent=True)
        held = store.arrive(key)
        (selected,) = store.by_rows.select(x, [(held, np.zeros(1, np.int64))])
        running = selected.neurons.numpy()
        store.fetch_records(key, running[:3], urgent=False)
        weights.predicted[key] = running[:3]
        job = ExpertJob(key, np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros(1, np.int64))
        run = LayerRun(weights, store, x, {key.expert: job}, offload.PhaseCounts())
        run.add(job)
        run.flush()
        first, size = held.layout.selector_bytes, held.layout.records.row_bytes
        there = [
            n
            for n in running
            if held.has_block[(first + n * size) // 4096 : -(-(first + (n + 1) * size) // 4096)].all()
        ]
    assert set(running[:3]) <= set(there) < set(running)
    with Pack(sparse_pack) as whole:
        blocks = list(PackWeights(whole, torch.device("cpu")).expert(*key).blocks())
    up, gate, down = (torch.cat([getattr(block, name) for block in blocks]) for name in ("up", "gate", "down"))
    h = torch.nn.functional.silu(x @ gate[there].T) * (x @ up[there].T)
    assert np.allclose(run.outputs, (h @ down[there]).numpy(), rtol=0, atol=1e-4)


Row = list[float]


def replaced(scores: list[Row], chosen: list[list[int]], is_resident: list[int], alpha: float) -> list[list[int]]:
    resident = np.zeros(len(scores[0]), bool)
    resident[is_resident] = True
    given_chosen = np.array(chosen)
    found = substitute(np.array(scores, np.float32), given_chosen, resident, alpha)
    assert given_chosen.tolist() == chosen, "what was given is not changed"
    result: list[list[int]] = found.tolist()
    return result


# k = 3, beta = 8/64 (rank 4). With alpha = 1/4 top is above 10/64, low down to 8, alternatives from 6/64.
SCORES = [score / 64 for score in (30, 10, 9, 8, 6, 1, 0, 0)]


def test_an_expert_at_the_upper_bound_is_low_and_one_at_the_lower_bound_may_come() -> None:
    """10/64 is exactly (1 + 1/4) * 8/64, and 6/64 exactly (1 - 1/4) * 8/64."""
    assert replaced([SCORES], [[0, 1, 2]], [2, 4], 0.25) == [[0, 4, 2]]
    assert replaced([SCORES], [[0, 1, 2]], [2, 4], 0.2499) == [[0, 1, 2]]


def test_what_serves_the_most_tokens_of_a_batch_comes_first() -> None:
    """The example of §5.4: tokens with the experts {1, 2, 4}, {1, 5, 4} and {2, 6, 7}; the third gets {2, 4, 7}.

    4 is a top expert of the others. The third token's 6 is low; 3 is in fast memory, with a better score than 4, and
    no other token has chosen it. Alone, the third token would get 3.
    """
    first = [score / 64 for score in (0, 20, 18, 1, 16, 2, 2, 2)]
    second = [score / 64 for score in (0, 20, 2, 1, 16, 18, 2, 2)]
    third = [score / 64 for score in (0, 1, 20, 8, 7, 1, 9, 18)]  # beta 8: low up to 10, alternatives from 6
    batch = [[1, 2, 4], [1, 5, 4], [2, 6, 7]]
    assert replaced([first, second, third], batch, [2, 3, 5, 7], 0.25)[2] == [2, 4, 7]
    assert replaced([third], [[2, 6, 7]], [2, 3, 5, 7], 0.25) == [[2, 3, 7]]


def test_where_every_expert_is_chosen_nothing_can_be_replaced() -> None:
    assert replaced([[0.5, 0.3, 0.2]], [[0, 1, 2]], [], 1.0) == [[0, 1, 2]]


def by_rule(scores: list[Row], chosen: list[list[int]], resident: set[int], alpha: float) -> list[list[int]]:
    """The docstring's rule, token by token."""
    k, betas = len(chosen[0]), [sorted(row, reverse=True)[len(chosen[0])] for row in scores]
    top = [{e for e in row if scores[t][e] > (1 + alpha) * betas[t]} for t, row in enumerate(chosen)]
    free = resident | set().union(*top)
    num_tokens = [sum(e in row for row in chosen) for e in range(len(scores[0]))]
    made = []
    for t, row in enumerate(chosen):
        new = list(row)
        while True:
            leaving = [e for e in new if e in row and e not in top[t] and e not in free]
            fits = [e for e in free if e not in new and e not in row and scores[t][e] >= (1 - alpha) * betas[t]]
            if not leaving or not fits:
                break
            lowest = min(leaving, key=lambda e: (scores[t][e], -e))
            new[new.index(lowest)] = max(fits, key=lambda e: (num_tokens[e], scores[t][e], -e))
        made.append(new)
        assert len(set(new)) == k
    return made


@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@settings(max_examples=200, deadline=None)
def test_random_scores_follow_the_rule(seed: int, alpha: float) -> None:
    rng = random.Random(seed)
    num_experts = rng.randint(2, 10)
    k = rng.randint(1, num_experts - 1)
    # Few different scores, exact in float32: many equals, many on the bounds.
    scores = [[rng.randint(0, 8) / 8 for _ in range(num_experts)] for _ in range(rng.randint(1, 4))]
    chosen = [sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:k] for row in scores]
    resident = {e for e in range(num_experts) if rng.random() < 0.4}
    assert replaced(scores, chosen, sorted(resident), alpha) == by_rule(scores, chosen, resident, alpha)


def test_a_share_outside_0_to_1_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="alpha"):
        replaced([SCORES], [[0, 1, 2]], [], 1.5)
