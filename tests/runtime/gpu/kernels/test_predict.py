"""Predicted experts and their records against path statistics, networks and routers in plain torch and numpy."""

import numpy as np
import torch
from gpu import predicted_cases
from gpu.comparing import assert_right
from support.cases import case
from support.paths import CASES, EVERYTHING, Case

from moe_pack.calib.statistics import learn_paths
from moe_pack.formats import Selector
from moe_pack.runtime.gpu.kernels.predict import LayerPaths, rank, score_paths
from moe_pack.runtime.offload.paths import BackoffLevel
from moe_pack.runtime.offload.prefetch import ranked

SELECTORS: tuple[Selector, ...] = ("up", "none")


def test_the_largest_scores_come_first_equals_by_index(kernel_device: torch.device) -> None:
    for num_experts, n in ((1, 1), (6, 3), (60, 8), (256, 8), (512, 10)):
        with case(num_experts):
            scores = torch.randint(-4, 5, (num_experts,), generator=torch.Generator().manual_seed(n)).float()
            found = torch.full((n,), -1, dtype=torch.int32, device=kernel_device)
            rank(scores.to(kernel_device), found)
            assert found.tolist() == ranked(scores[None].numpy(), n)[0].tolist()


def test_a_routers_biases_are_added_to_its_scores(kernel_device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, bias = 2 * torch.randn(24, generator=draw), torch.randn(24, generator=draw) / 4
    orders = []
    for is_sigmoid in (False, True):
        scores = (logits.sigmoid() if is_sigmoid else logits.softmax(0)) + bias
        found = torch.full((24,), -1, dtype=torch.int32, device=kernel_device)
        rank(logits.to(kernel_device), found, bias=bias.to(kernel_device), is_sigmoid=is_sigmoid)
        assert found.tolist() == ranked(scores[None].numpy(), 24)[0].tolist()
        orders.append(found.tolist())
    assert orders[0] != orders[1]


def test_a_networks_first_layer_gets_a_row_for_each_route(kernel_device: torch.device) -> None:
    for num_units, num_previous, is_rectified in ((6, 1, False), (40, 2, True), (300, 1, True)):
        with case(num_units, num_previous):
            assert_right(predicted_cases.routes_case(num_units, num_previous, is_rectified, kernel_device))


def test_paths_are_scored_as_the_statistics_say(kernel_device: torch.device) -> None:
    reached = set[int]()
    for paths_of in [*CASES, Case(1000, 3, 8, 128, 120)]:
        with case(str(paths_of)):
            statistics = learn_paths(paths_of.draw(seed=1), paths_of.E, EVERYTHING)
            tokens = np.concatenate([paths_of.draw(seed=2)[:6], paths_of.draw(seed=3, drawn_from=paths_of.E)[:6]])
            for l in range(1, paths_of.L):
                for num_before in {1, min(l, 2)}:
                    before = tokens[:, l - num_before : l]
                    there = LayerPaths.of(statistics, l, num_before, kernel_device)
                    for routes in before:
                        expected, stage = statistics.predict(l, routes[None])
                        scores = torch.full((paths_of.E,), torch.nan, device=kernel_device)
                        # A token's routes are one row of those of several.
                        rows = torch.from_numpy(np.stack([routes, -routes - 1], 1).astype(np.int32)).to(kernel_device)
                        score_paths(rows[:, 0], there, scores)
                        found = scores.cpu().double()
                        if stage[0] == BackoffLevel.FACTORED:  # a sum of logarithms
                            num_known = there.is_known.cpu().gather(1, torch.from_numpy(routes.astype(np.int64))).sum()
                            found = (found / num_known).softmax(0)
                        found /= found.sum()
                        np.testing.assert_allclose(found.numpy(), expected[0], atol=1e-6)
                        reached.add(int(stage[0]))
    assert reached == set(BackoffLevel)


def test_pulled_records_are_in_the_table_until_they_are_forgotten(kernel_device: torch.device) -> None:
    for selector in SELECTORS:
        with case(selector):
            assert_right(predicted_cases.pulled_ahead_case(selector, kernel_device))
