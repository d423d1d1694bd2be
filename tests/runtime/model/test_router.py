"""Routers against their rules, in plain Python: groups, biases, ties, scores, and experts that a table names."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import DEMO_MODEL, pack
from support.native import operations_limited_to
from support.specs import GROUPED
from support.streaming import budget_for
from torch import Tensor

from moe_pack.formats import ModelSpec, Pack, RouterSpec
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import TORCH, Decoder, StoredMatrix, router_scores
from moe_pack.runtime.model.compute import router as routers
from moe_pack.runtime.offload import PRESETS, Approximations, OffloadedWeights, PolicyName, read_recording

Chosen = list[tuple[int, float]]  # experts and weights, best first
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["torch", "native"])
def route(request: pytest.FixtureRequest) -> Route:
    """Both that compute it."""
    return (TORCH if request.param == "torch" else operations_limited_to("portable")).route


def spec(num_experts: int, k: int, normalize: bool = True) -> RouterSpec:
    return RouterSpec("softmax_topk", num_experts, k, normalize)


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    return [power / sum(powers) for power in powers]


def largest(scores: list[float], count: int) -> list[int]:
    """The rule for ties: among equals the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def in_best_groups(scores: list[float], spec: RouterSpec, deciding: int) -> list[float]:
    """Scores with those of the groups that do not stay out of the running."""
    size = len(scores) // spec.n_group
    groups = [scores[g * size : (g + 1) * size] for g in range(spec.n_group)]
    strength = [sum(sorted(group, reverse=True)[:deciding]) for group in groups]
    stays = largest(strength, spec.topk_group) if spec.n_group > 1 else [0]
    return [score if i // size in stays else -math.inf for i, score in enumerate(scores)]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# Each expert's score by itself, or its share of all.
SCORES: dict[str, Callable[[list[float]], list[float]]] = {
    "softmax_topk": softmax,
    "sigmoid_topk": lambda logits: [sigmoid(logit) for logit in logits],
    "topk_sigmoid": lambda logits: [sigmoid(logit) for logit in logits],
    "sqrtsoftplus_topk": lambda logits: [math.sqrt(math.log1p(math.exp(logit))) for logit in logits],
}


def by_rule(logits: list[float], bias: list[float], spec: RouterSpec) -> Chosen:
    if spec.kind == "sparsemixer":
        return sparsemixer(logits, spec)
    ranked = logits if spec.kind.startswith("topk") else SCORES[spec.kind](logits)
    biased = [score + b for score, b in zip(ranked, bias, strict=True)]
    best = in_best_groups(biased, spec, 2 if spec.kind == "sigmoid_topk" else 1)
    chosen = largest(best, spec.num_experts_per_tok)
    return list(zip(chosen, weights_by_rule(logits, chosen, spec), strict=True))


def sparsemixer(logits: list[float], spec: RouterSpec) -> Chosen:
    running, made, band = dict(enumerate(logits)), [], 2 * spec.jitter
    for _ in range(spec.num_experts_per_tok):
        best = largest([running.get(i, -math.inf) for i in range(len(logits))], 1)[0]
        top = running[best]
        near = [i for i, logit in running.items() if top == logit or (top - logit) / max(abs(logit), top) <= band]
        made.append((best, softmax([running[i] for i in near])[near.index(best)]))
        del running[best]
    return made


ROUTERS = [
    RouterSpec("softmax_topk", 8, 3, True), RouterSpec("softmax_topk", 8, 3, False, scaling_factor=16.0),
    RouterSpec("softmax_topk", 12, 4, False, n_group=4, topk_group=2),
    RouterSpec("softmax_topk", 12, 3, True, n_group=4, topk_group=1, bias=True),
    RouterSpec("softmax_topk", 10, 3, True, least_sum=0.125), RouterSpec("sigmoid_topk", 10, 3, True, least_sum=1e-6),
    RouterSpec("topk_softmax", 8, 3, False), RouterSpec("topk_softmax", 8, 8, False, scaling_factor=0.5),
    RouterSpec("sigmoid_topk", 8, 3, True, bias=True, scaling_factor=2.5), RouterSpec("sigmoid_topk", 8, 2, False),
    RouterSpec("sigmoid_topk", 12, 4, True, bias=True, n_group=4, topk_group=2),
    RouterSpec("sigmoid_topk", 12, 3, True, bias=True, n_group=6, topk_group=2),
    RouterSpec("sqrtsoftplus_topk", 8, 3, True, bias=True, scaling_factor=1.5),
    RouterSpec("sqrtsoftplus_topk", 8, 2, False), RouterSpec("topk_sigmoid", 8, 3, True, bias=True, scaling_factor=1.5),
    RouterSpec("topk_sigmoid", 8, 1, False), RouterSpec("sparsemixer", 8, 2, False, jitter=0.01),
    RouterSpec("sparsemixer", 8, 2, False, jitter=0.3), RouterSpec("sparsemixer", 8, 3, False, jitter=0.1),
]  # fmt: skip


def named(router: RouterSpec) -> str:
    groups = f"-{router.topk_group}of{router.n_group}" if router.n_group > 1 else ""
    return f"{router.kind}-{router.num_experts_per_tok}{groups}{'-bias' if router.bias else ''}-{router.jitter}"


def check(route: Route, router: RouterSpec, logits: list[list[float]], bias: list[float]) -> None:
    experts, weights = route(torch.tensor(logits), router, torch.tensor(bias) if router.bias else None)
    for token, row in enumerate(logits):
        expected = by_rule(row, bias if router.bias else [0.0] * len(row), router)
        assert experts[token].tolist() == [expert for expert, _ in expected], row
        # The rule is computed in float64: what differs is float32 softmax and sigmoid, a few times 2^-24 of their size.
        torch.testing.assert_close(weights[token], torch.tensor([w for _, w in expected]), rtol=2e-5, atol=1e-7)


def test_random_scores_follow_the_rule(route: Route) -> None:
    for router in ROUTERS:
        with case(router):
            rng = random.Random(3)
            logits = [[rng.gauss(0, 1.5) for _ in range(router.num_experts)] for _ in range(200)]
            # Quarters are exact in float32, so that rule and code see the same numbers.
            check(route, router, logits, [rng.randrange(-8, 9) / 4 for _ in range(router.num_experts)])


def test_equal_scores_go_to_the_lowest_index(route: Route) -> None:
    """Logits of two values only: nearly every comparison, of experts and of groups, is a tie."""
    for router in ROUTERS:
        with case(router):
            rng = random.Random(5)
            logits = [[float(rng.randrange(2)) for _ in range(router.num_experts)] for _ in range(100)]
            check(route, router, [*logits, [0.0] * router.num_experts], [0.0] * router.num_experts)


def test_of_many_equal_scores_the_first_are_chosen_where_topk_promises_no_order(route: Route) -> None:
    logits = torch.zeros(3, 64)
    logits[1, [60, 7, 33]] = 1.0
    experts, _ = TORCH.route(logits, spec(64, 4))
    assert experts.tolist() == [[0, 1, 2, 3], [7, 33, 60, 0], [0, 1, 2, 3]]


def test_sigmoids_that_all_vanish_give_weight_zero(route: Route) -> None:
    _, weights = route(torch.full((1, 4), -200.0), RouterSpec("sigmoid_topk", 4, 2, True))
    assert weights.tolist() == [[0.0, 0.0]]


def test_all_experts_and_one_expert_can_be_asked_for(route: Route) -> None:
    experts, weights = route(torch.tensor([[1.0, 2.0]]), spec(2, 2))
    assert experts.tolist() == [[1, 0]]
    assert math.isclose(float(weights.sum()), 1, rel_tol=1e-6)
    assert route(torch.tensor([[5.0]]), spec(1, 1))[1].tolist() == [[1.0]]


def test_not_a_number_is_seen(route: Route) -> None:
    for router in [router for router in ROUTERS if router.kind != "sparsemixer"]:
        with case(router):
            logits = torch.zeros(2, router.num_experts)
            logits[1, -1] = math.nan
            experts, weights = TORCH.route(logits, router, torch.zeros(router.num_experts) if router.bias else None)
            assert weights[0].isfinite().all()
            assert weights[1].isnan().any()
            assert ((experts >= 0) & (experts < router.num_experts)).all()


def test_no_tokens_go_nowhere(route: Route) -> None:
    experts, weights = route(torch.zeros(0, 8), spec(8, 3))
    assert (experts.shape, weights.shape) == ((0, 3), (0, 3))


def test_weights_of_the_routers_own_experts_are_the_routers() -> None:
    for router in ROUTERS:
        with case(router):
            torch.manual_seed(11)
            logits, bias = torch.randn(50, router.num_experts), torch.randn(router.num_experts)
            experts, weights = TORCH.route(logits, router, bias if router.bias else None)
            assert torch.equal(routers.router_weights(logits, experts, router), weights)


def test_weights_of_other_experts_are_normalised_as_the_family_does() -> None:
    for router in ROUTERS:
        with case(router):
            torch.manual_seed(12)
            logits = torch.randn(40, router.num_experts)
            experts = torch.stack([torch.randperm(router.num_experts)[: router.num_experts_per_tok] for _ in logits])
            expected = [weights_by_rule(*each, router) for each in zip(logits.tolist(), experts.tolist(), strict=True)]
            weights = routers.router_weights(logits, experts, router)
            torch.testing.assert_close(weights, torch.tensor(expected), rtol=2e-5, atol=1e-7)


def weights_by_rule(logits: list[float], experts: list[int], router: RouterSpec) -> list[float]:
    if router.kind == "sparsemixer":
        return sparsemixer_weights(logits, experts, router)
    if router.kind == "topk_softmax":
        return [share * router.scaling_factor for share in softmax([logits[i] for i in experts])]
    scores = SCORES[router.kind](logits)
    weights = [scores[i] for i in experts]
    total = sum(weights) + router.least_sum if router.normalize else 1.0
    return [weight / total * router.scaling_factor for weight in weights]


def sparsemixer_weights(logits: list[float], experts: list[int], router: RouterSpec) -> list[float]:
    running, made = dict(enumerate(logits)), []
    for expert in experts:
        top = running[expert]
        near = [i for i, logit in running.items() if (top - logit) / max(abs(logit), top) <= 2 * router.jitter]
        made.append(softmax([running[i] for i in near])[near.index(expert)])
        del running[expert]
    return made


def test_scores_of_all_experts_are_shares_or_sigmoids() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    shares = routers.expert_scores(logits, RouterSpec("topk_softmax", 2, 1, False))
    torch.testing.assert_close(shares, torch.tensor([[0.25, 0.75]]))
    sigmoids = routers.expert_scores(logits, RouterSpec("sigmoid_topk", 2, 1, False))
    torch.testing.assert_close(sigmoids, torch.tensor([[0.5, 0.75]]))
    roots = routers.expert_scores(logits, RouterSpec("sqrtsoftplus_topk", 2, 1, False))
    torch.testing.assert_close(roots, torch.tensor([[math.log(2.0), math.log(4.0)]]).sqrt())
    some = routers.expert_scores(logits, RouterSpec("softmax_topk", 1, 1, False, num_identity=1))
    torch.testing.assert_close(some, torch.tensor([[0.25]]))


IDENTITIES = [
    RouterSpec("softmax_topk", 5, 3, False, bias=True, scaling_factor=6.0, num_identity=4),
    RouterSpec("softmax_topk", 5, 5, False, num_identity=9),
    RouterSpec("softmax_topk", 2, 1, False, num_identity=3),
]


def test_of_experts_that_return_their_input_the_share_is_told_and_the_places_weigh_nothing(route: Route) -> None:
    """The others that were chosen come first, best first, and then the best that were not."""
    for router in IDENTITIES:
        with case(router):
            E, k = router.num_experts, router.num_experts_per_tok
            rng = random.Random(7)
            logits = [[rng.gauss(0, 1.5) for _ in range(router.num_outputs)] for _ in range(200)]
            bias = [rng.randrange(-2, 3) / 8 if router.bias else 0.0 for _ in range(router.num_outputs)]
            given = torch.tensor(bias) if router.bias else None
            experts, weights = route(torch.tensor(logits), router, given)
            shares = routers.identity_share(torch.tensor(logits), router, given)
            nums = set()
            for token, row in enumerate(logits):
                scores = softmax(row)
                biased = [score + b for score, b in zip(scores, bias, strict=True)]
                chosen = largest(biased, k)
                running = [(e, scores[e] * router.scaling_factor) for e in chosen if e < E]
                nums.add(len(running))
                assert experts[token].tolist() == largest(biased[:E], k), row
                assert experts[token, : len(running)].tolist() == [e for e, _ in running]
                expected = [*(w for _, w in running), *[0.0] * (k - len(running))]
                torch.testing.assert_close(weights[token], torch.tensor(expected), rtol=2e-5, atol=1e-7)
                left = sum(scores[e] for e in chosen if e >= E) * router.scaling_factor
                torch.testing.assert_close(shares[token], torch.tensor([left]), rtol=2e-5, atol=1e-7)
            assert len(nums) > 1 and 0 in nums, "some tokens run no expert, others do"


def by_hand(experts: list[int], capacity: int) -> list[bool]:
    """Whether each token is among the first of its expert."""
    return [experts[:place].count(expert) < capacity for place, expert in enumerate(experts)]


def test_tokens_beyond_an_expert_s_capacity_weigh_nothing() -> None:
    for capacity in [1, 2, 5, 40]:
        with case(capacity):
            logits = torch.randn((40, 4), generator=torch.Generator().manual_seed(1)) + torch.tensor(
                [2.0, 0.0, 0.0, -9.0]
            )
            unlimited, limited = (RouterSpec("softmax_topk", 4, 1, False, capacity=c) for c in (None, capacity))
            experts, weights = TORCH.route(logits, unlimited)
            found, kept = TORCH.route(logits, limited)
            within = torch.tensor(by_hand(experts[:, 0].tolist(), capacity))[:, None]
            assert torch.equal(found, experts)
            assert torch.equal(kept, torch.where(within, weights, 0.0))
            assert bool(within.all()) == (capacity == 40)


D = 64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_inputs(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, D, generator=generator(seed))


@dataclass(frozen=True)
class Router:
    """The weights of one layer's router."""

    spec: ModelSpec
    rows: Tensor
    bias: Tensor

    def matrix(self, role: str) -> StoredMatrix:
        assert role == "layers.1.router"
        return StoredMatrix(self.rows)

    def vector(self, role: str) -> Tensor:
        assert role == "layers.1.router_bias"
        return self.bias


def test_a_routers_scores_rank_experts_as_it_chooses_them() -> None:
    with_bias = ("softmax_topk", "sigmoid_topk", "topk_sigmoid")
    kinds = [*product(with_bias, [False, True]), ("sqrtsoftplus_topk", True), ("topk_softmax", False)]
    for k, (kind, bias) in product([1, 3], [*kinds, ("sparsemixer", False)]):
        with case(k, kind, bias):
            spec = RouterSpec(kind, 8, k, normalize=False, bias=bias, jitter=0.1)  # type: ignore[arg-type]  # a Literal each
            rows = torch.randn(8, D, generator=generator(1)) * 0.2
            held = Router(replace(GROUPED, router=spec), rows, torch.randn(8, generator=generator(2)))
            x = random_inputs(200, 3)
            scores = router_scores(x, held, 1)  # type: ignore[arg-type]  # of a model's weights, no more is asked for
            chosen, _ = TORCH.route(x @ rows.T, spec, held.bias if bias else None)
            assert torch.equal(scores.argsort(dim=1, descending=True, stable=True)[:, :k], chosen)
            if bias:
                unbiased, _ = TORCH.route(x @ rows.T, spec, torch.zeros(8))
                assert not torch.equal(chosen, unbiased)


CONTEXT = 80
KINDS = ["hash_moe", "hash_moe", "moe", "hash_moe", "moe"]


class Reads:
    """An observer that says of each read of an expert whether it began before its layer, and whether it was needed."""

    def __init__(self) -> None:
        self.early, self.late, self.unneeded = [set[tuple[int, int]]() for _ in range(3)]
        self._coming = set[tuple[int, int]]()
        self._running = -1

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        self._running = layer_idx
        needed = {(layer_idx, expert) for expert in experts.ravel().tolist()}
        self.unneeded |= {key for key in self._coming if key[0] == layer_idx} - needed
        self._coming = {key for key in self._coming if key[0] != layer_idx}

    def fetched(self, layer_idx: int, expert: int) -> None:
        key = (layer_idx, expert)
        if layer_idx == self._running:
            self.late.add(key)
        else:
            self.early.add(key)
            self._coming.add(key)

    def of(self, layer_idx: int) -> int:
        """Returns how many experts of a layer were read."""
        return sum(layer == layer_idx for layer, _ in (*self.early, *self.late))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V4 of 5 layers of 6 experts, three of them with tables; not to be changed."""
    folder = tmp_path_factory.mktemp("tables")
    pack(
        write(Tiny("deepseek_v4", "tables", {"mlp_layer_types": KINDS}), folder / "source"), folder / "packed", width=16
    )
    return folder / "packed"


@contextmanager
def engine_of(opened: Pack, num_experts: int, **options: Any) -> Iterator[Engine]:
    """An engine with room for so many experts, with portable kernels."""
    budget = budget_for(opened, num_experts, CONTEXT)
    with Engine(opened, EngineOptions(budget_bytes=budget, kernels="portable", **options), CONTEXT) as engine:
        yield engine


def watched(engine: Engine) -> Reads:
    """An observer of an engine's reads from now on."""
    assert isinstance(engine.weights, OffloadedWeights)
    reads = engine.weights.observer = Reads()
    return reads


# ---- the last layer of a prompt -------------------------------------------------------------------------------------


def test_the_last_layer_of_a_prompt_reads_the_experts_of_one_token(demo: Path) -> None:
    """All 8 experts of three layers, 2 of the last and at most as many that were predicted for its token."""
    ids = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    answers, spare = list[torch.Tensor](), {"lru": 0, "fiddler": 0, "floe": 2, "corm": 2, "importance": 0}
    for policy, most_spare in spare.items():
        with case(policy), Pack(demo) as opened, engine_of(opened, 32, policy=PRESETS[policy].name) as engine:
            reads = watched(engine)
            answers.append(Decoder(engine.weights, CONTEXT).next_logits(ids))
            assert isinstance(engine.weights, OffloadedWeights)
            assert engine.weights.prefill.needed == 8 + 8 + 8 + 2
            if policy != "fiddler":  # placed experts are read before the run
                assert [reads.of(layer_idx) for layer_idx in range(3)] == [8, 8, 8]
                assert 2 <= reads.of(3) <= 2 + most_spare and len(reads.unneeded) <= most_spare
    assert all(torch.equal(each, answers[0]) for each in answers)


def test_each_pass_of_a_long_prompt_reads_one_tokens_experts_in_the_last_layer(demo: Path) -> None:
    ids = torch.randint(0, 4000, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    with Pack(demo) as opened:
        with engine_of(opened, 8, policy="lru") as engine:
            found = Decoder(engine.weights, CONTEXT, chunk_tokens=20).next_logits(ids)
            assert isinstance(engine.weights, OffloadedWeights)
            assert engine.weights.prefill.needed <= 3 * (8 + 8 + 8 + 2)
        with Engine(opened, EngineOptions(read="map", kernels="portable"), CONTEXT) as engine:
            torch.testing.assert_close(found, engine.decoder.next_logits(ids), atol=1e-4, rtol=1e-4)


def test_what_is_predicted_for_a_prompts_last_token_does_not_run_instead(demo: Path) -> None:
    ids = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(approximations: Approximations) -> torch.Tensor:
        with Pack(demo) as opened, engine_of(opened, 32, policy="corm", approximations=approximations) as engine:
            return Decoder(engine.weights, CONTEXT).next_logits(ids)

    assert torch.equal(logits(Approximations(runs_predicted=True)), logits(Approximations()))


# ---- tables ---------------------------------------------------------------------------------------------------------


def run_all(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Runs a prompt, single tokens, tokens of two sequences together, and several of one; returns their logits."""
    first, second = decoder.sequences
    found = [decoder.extend(first, ids[:20])[None], decoder.extend(second, ids[5:12])[None]]
    found += [decoder.extend(first, [token])[None] for token in ids[20:26]]
    for token in ids[26:30]:
        found.append(decoder.extend_each([first, second], [token, token + 1]))
    for start in range(30, 36, 3):
        found.append(decoder.verify(second, ids[start : start + min(3, decoder.most_verified(second))]))
    return torch.cat(found)


@pytest.mark.parametrize("policy", ["lru", pytest.param("all", marks=pytest.mark.slow)])
def test_experts_that_tables_name_are_all_prefetched_and_no_others(policy: str, tables: Path, tmp_path: Path) -> None:
    ids = token_ids()
    with Pack(tables) as opened:
        layers = [opened.spec.moe_layers.index(layer) for layer in opened.spec.router.table_layers]
        assert layers == [0, 1, 3], "the first, the second, and one whose router is predicted before"

        def answers(prefetches: bool, name: PolicyName) -> tuple[torch.Tensor, Reads]:
            options = {"policy": name, "prefetches": prefetches, "record": tmp_path / "routes"}
            with engine_of(opened, 20, **options) as engine:
                reads = watched(engine)
                return run_all(Decoder(engine.weights, CONTEXT, num_sequences=2, chunk_tokens=16), ids), reads

        for name in ("lru",) if policy == "lru" else sorted(set(PRESETS) - {"fiddler", "lru"}):
            with case(name):
                found, reads = answers(True, PRESETS[name].name)
                recorded = read_recording(tmp_path / "routes")
                assert not [key for key in (*reads.late, *reads.unneeded) if key[0] in layers]
                assert sum(key[0] in layers for key in reads.early) > 3 * 3
                assert (recorded.hits[:, layers] == recorded.needed[:, layers]).all()
                expected, without = answers(False, PRESETS[name].name)
                assert torch.equal(found, expected) and not without.early


def test_experts_that_tables_name_are_not_substituted(tables: Path, tmp_path: Path) -> None:
    ids = token_ids()
    with Pack(tables) as opened:
        layers = [opened.spec.moe_layers.index(layer) for layer in opened.spec.router.table_layers]

        def routes(alpha: float | None) -> NDArray[np.uint16]:
            options = {"record": tmp_path / "routes", "approximations": Approximations(substitute=alpha)}
            with engine_of(opened, 8, policy="lru", prefetches=False, **options) as engine:
                run_all(Decoder(engine.weights, CONTEXT, num_sequences=2, chunk_tokens=16), ids)
            return read_recording(tmp_path / "routes").passes.routes

        plain, substituted = routes(None), routes(1.0)
    assert np.array_equal(plain[:, layers], substituted[:, layers])
    assert not np.array_equal(plain, substituted), "the other layers have substitutes"


def test_without_a_table_least_recently_used_experts_are_prefetched_for_whole_passes_alone(demo: Path) -> None:
    with Pack(demo) as opened, engine_of(opened, 8, policy="lru") as engine:
        reads = watched(engine)
        for token in range(20):
            engine.decoder.next_logits([token])
        assert not reads.early and reads.late
