"""The cases of predicted experts and of changed choices for `cases`; each makes its inputs on a device."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from support.gpu_layers import random_layer, random_running, running_on
from support.named_formats import named_format
from support.random_experts import Shape

from gpu.comparing import EXP, Difference, Prepared, exact, excess, random_values
from moe_pack.calib.statistics import learn_paths
from moe_pack.formats import RouterSpec, Selector
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.predict import (
    LayerPaths,
    PulledAhead,
    add_routes,
    enter_pulled,
    forget_pulled,
    rank,
    score_paths,
)
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.compute.router import expert_scores, router_weights
from moe_pack.runtime.offload.prefetch import ranked
from moe_pack.runtime.offload.routing_file import multi_hot
from moe_pack.runtime.offload.split import substitute


def substituted_case(spec: RouterSpec, num_tokens: int, device: torch.device) -> Prepared:
    """Half of the experts are resident; the router's rows have a value a token, half of its logit."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn((num_tokens, spec.num_experts), generator=draw) / 2
    bias = torch.randn(spec.num_experts, generator=draw) / 8 if spec.bias else None
    is_resident = torch.rand(spec.num_experts, generator=draw) < 0.5
    own, _ = TORCH.route(logits, spec, bias)
    chosen = torch.from_numpy(substitute(expert_scores(logits, spec).numpy(), own.numpy(), is_resident.numpy(), 0.5))
    weights = router_weights(logits, chosen, spec)
    # A token is 1 in its column; its norm is 2 there, because a quarter of the columns has it.
    x, ones = torch.eye(4, device=device)[:num_tokens], torch.ones(4, device=device)
    rows = torch.zeros((spec.num_experts, 4))
    rows[:, :num_tokens] = logits.T / 2
    stored = StoredRows(rows.to(device), stored_part("F32", 4))
    experts = torch.zeros((num_tokens, spec.num_experts_per_tok), dtype=torch.int32, device=device)
    routed = Routed.allocate(4, spec, device, num_tokens)
    changed = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    choice = ChangedChoice(None, is_resident.int().to(device), 0.5, changed)

    def compare() -> Difference:
        if not torch.equal(experts.cpu().long(), chosen) or changed.tolist() != (chosen != own).sum(1).tolist():
            return exact(False)
        return Difference(excess(routed.weights, weights, weights.abs()), 2 * EXP)

    router = Router(spec, Norm(ones, None, 0.0), stored, None, None if bias is None else bias.to(device), None)
    return Prepared(partial(route, x, router, experts, routed, choice), compare)


def paths_case(num_experts: int, device: torch.device) -> Prepared:
    """Statistics of drawn routes, and the best of what they say about a token; the scores are logarithms."""
    draw, k = np.random.default_rng(num_experts), 4
    routes = np.argsort(-draw.gumbel(size=(400, 3, num_experts)), axis=2)[:, :, :k].astype(np.uint16)
    statistics = learn_paths(routes, num_experts, 1 << 20)
    before = torch.from_numpy(routes[7, :2].astype(np.int32))
    shares, _ = statistics.predict(2, before[None].numpy())
    scores, found = (torch.zeros(n, device=device) for n in (num_experts, 8))
    experts, paths = found.int(), LayerPaths.of(statistics, 2, 2, device)

    def launch() -> None:
        score_paths(before.to(device), paths, scores)
        rank(scores, experts)

    def compare() -> Difference:
        if experts.tolist() != ranked(scores.cpu()[None].numpy(), len(experts))[0].tolist():
            return exact(False)
        found = (scores.cpu().double() / (2 * k)).softmax(0)
        return Difference(float((found - torch.from_numpy(shares[0])).abs().max()), EXP)

    return Prepared(launch, compare)


def routes_case(num_units: int, num_previous: int, is_rectified: bool, device: torch.device) -> Prepared:
    """A network's first layer gets a row for each route; a token's are one row of those of several."""
    routes = torch.tensor([[4, 1, 0], [2, 5, 3]])[:num_previous]
    first, weights = random_values(num_units), random_values(num_units, num_previous, 8, seed=1).bfloat16()
    expected = first + multi_hot(routes[None], 8)[0] @ weights.flatten(1).float().T
    expected = expected.relu() if is_rectified else expected
    by_route, there = weights.permute(1, 2, 0).contiguous().to(device), torch.zeros(num_units, device=device)
    rows = torch.stack([routes, 7 - routes], 1).int().to(device)

    def launch() -> None:
        there.copy_(first)
        add_routes(there, by_route, rows[:, 0], is_rectified)

    return Prepared(launch, lambda: Difference(excess(there, expected, 1 + expected.abs()), EXP))


def pulled_ahead_case(selector: Selector, device: torch.device) -> Prepared:
    """Records of two experts are entered and forgotten, one of which runs."""
    shape = Shape(300, 64, selector, named_format(4), named_format(2), named_format(4))
    layer = random_layer([shape] * 3, thresholds=[0.5] * 3)
    record_at, draw = layer.tables.record_at.clone(), torch.Generator().manual_seed(1)
    running, counts = running_on(random_running(layer.tables, (2, 1), 0.5, seed=1), device), (260, 3)
    neurons = torch.stack([torch.randperm(300, generator=draw)[:280].sort().values for _ in range(2)]).int()
    named = [some[:count].long() for some, count in zip(neurons, counts, strict=True)]
    for expert, some in zip((1, 0), named, strict=True):
        record_at[expert, some] = -1
    table = record_at.to(device, copy=True)
    tables = replace(layer.tables, record_at=table, thresholds=layer.tables.thresholds.to(device))
    pulled = PulledAhead(
        torch.tensor([1, 0], dtype=torch.int32).to(device),
        neurons.to(device),
        torch.tensor(counts, dtype=torch.int32).to(device),
    )
    entered, totals = torch.zeros_like(table), torch.zeros((2, 3), dtype=torch.int32, device=device)
    chosen = torch.tensor([2, 1], dtype=torch.int32).to(device)

    def launch() -> None:
        enter_pulled(pulled, table, 0, 1)
        entered.copy_(table)
        forget_pulled(pulled, chosen, tables, running, totals)

    def compare() -> Difference:
        expected = record_at.clone()
        for place, (expert, some) in enumerate(zip((1, 0), named, strict=True)):
            expected[expert, some] = torch.arange(place * 280, place * 280 + len(some), dtype=torch.int32)
        ran = 260 if selector == "none" else int((running.a[1].cpu()[named[0]].abs() >= 0.5).sum())
        is_same = torch.equal(entered.cpu(), expected) and torch.equal(table.cpu(), record_at)
        return exact(is_same and totals.tolist() == [[1, 260, ran], [0, 3, 0]])

    return Prepared(launch, compare)
