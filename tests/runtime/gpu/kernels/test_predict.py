"""Predicted experts and their records against path statistics, networks and routers in plain torch and numpy."""

from dataclasses import replace

import numpy as np
import torch
from support.cases import case
from support.gpu_layers import random_layer, random_running, running_on
from support.named_formats import named_format
from support.paths import CASES, EVERYTHING, Case
from support.predictors import random_predictor
from support.random_experts import Shape

from moe_pack.calib.statistics import learn_paths
from moe_pack.formats import Selector
from moe_pack.runtime.gpu.kernels.predict import (
    LayerPaths,
    PulledAhead,
    add_routes,
    enter_pulled,
    forget_pulled,
    rank,
    score_paths,
)
from moe_pack.runtime.offload.paths import BackoffLevel
from moe_pack.runtime.offload.prefetch import ranked
from moe_pack.runtime.offload.routing_file import multi_hot

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
    for num_layers, num_previous, hidden in ((1, 1, 0), (2, 2, 40), (2, 1, 300)):
        with case(num_layers, num_previous):
            network = random_predictor(num_layers, 8, 6, num_previous, hidden)
            h = len(network.bias)
            first = torch.randn(h, generator=torch.Generator().manual_seed(1))
            routes = torch.tensor([[4, 1, 0], [2, 5, 3]])[:num_previous]
            expected = first + multi_hot(routes[None], 6)[0] @ network.route_weight.flatten(1).float().T
            if num_layers == 2:
                expected = expected.relu()
            by_route = network.route_weight.permute(1, 2, 0).contiguous().to(kernel_device)
            found = first.to(kernel_device)
            add_routes(found, by_route, routes.int().to(kernel_device), is_rectified=num_layers == 2)
            assert (found.cpu() - expected).abs().max() < 1e-5


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
                        score_paths(torch.from_numpy(routes.astype(np.int32)).to(kernel_device), there, scores)
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
            layer = random_layer([Shape(300, 64, selector, *map(named_format, (4, 2, 4)))] * 4, thresholds=[0.5] * 4)
            draw = torch.Generator().manual_seed(1)
            neurons = torch.stack([torch.randperm(300, generator=draw)[:270].sort().values for _ in range(2)]).int()
            counts, predicted = (260, 2), (1, 0)
            before = layer.tables.record_at.clone()
            for expert, some, count in zip(predicted, neurons, counts, strict=True):
                before[expert, some[:count].long()] = -1
            pulled = PulledAhead(
                experts=torch.tensor(predicted, dtype=torch.int32).to(kernel_device),
                slots=torch.arange(540, dtype=torch.int32).view(2, 270).to(kernel_device),
                neurons=neurons.to(kernel_device),
                counts=torch.tensor(counts, dtype=torch.int32).to(kernel_device),
            )
            table, expected = before.to(kernel_device), before.clone()
            enter_pulled(pulled, table)
            expected[1, neurons[0, :260].long()] = torch.arange(260, dtype=torch.int32)
            expected[0, neurons[1, :2].long()] = torch.arange(270, 272, dtype=torch.int32)
            assert torch.equal(table.cpu(), expected)

            running = random_running(layer.tables, (3, 1), 0.5, seed=1)
            tables = replace(layer.tables, record_at=table, thresholds=layer.tables.thresholds.to(kernel_device))
            totals = torch.full((2, 3), -1, dtype=torch.int32, device=kernel_device)
            chosen = torch.tensor([3, 1], dtype=torch.int32).to(kernel_device)
            forget_pulled(pulled, chosen, tables, running_on(running, kernel_device), totals)
            assert torch.equal(table.cpu(), before)
            ran = 260 if selector == "none" else int((running.a[1, neurons[0, :260].long()].abs() >= 0.5).sum())
            assert ran > 0 and totals.tolist() == [[1, 260, ran], [0, 2, 0]]
