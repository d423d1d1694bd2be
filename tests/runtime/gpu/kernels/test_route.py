"""The router's kernel against plain torch: the same experts, ties to the lowest index, weights to rounding.

Most tests give the logits themselves: the router's rows have one value each, and the hidden state is ones.
"""

import numpy as np
import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.router import ChangedChoice, Routed, Router, route
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.compute.router import expert_scores, router_weights
from moe_pack.runtime.offload.split import substitute

SPECS = [
    RouterSpec("softmax_topk", 8, 2, True), RouterSpec("softmax_topk", 60, 4, False, scaling_factor=2.5),
    RouterSpec("softmax_topk", 128, 8, True),
    RouterSpec("softmax_topk", 160, 6, False, n_group=8, topk_group=3, scaling_factor=16.0),
    RouterSpec("softmax_topk", 12, 3, True, bias=True, n_group=4, topk_group=2),
    RouterSpec("softmax_topk", 512, 10, True), RouterSpec("softmax_topk", 64, 6, True, least_sum=0.125),
    RouterSpec("sigmoid_topk", 24, 4, True, least_sum=0.25), RouterSpec("softmax_topk", 1, 1, True),
    RouterSpec("topk_softmax", 40, 8, False), RouterSpec("topk_softmax", 128, 4, False, logit_bias=True),
    RouterSpec("softmax_topk", 20, 3, True, least_sum=0.5), RouterSpec("topk_softmax", 3, 3, False, scaling_factor=0.5),
    RouterSpec("sigmoid_topk", 128, 8, True, bias=True),
    RouterSpec("sigmoid_topk", 256, 8, True, bias=True, n_group=8, topk_group=4, scaling_factor=2.5),
    RouterSpec("sigmoid_topk", 384, 8, True, bias=True, scaling_factor=2.827),
    RouterSpec("sigmoid_topk", 20, 10, False, n_group=4, topk_group=2),
    RouterSpec("sparsemixer", 16, 2, False, jitter=0.01), RouterSpec("sparsemixer", 7, 3, False, jitter=0.3),
]  # fmt: skip


def name_of(spec: RouterSpec) -> str:
    return f"{spec.kind}-{spec.num_experts}-{spec.num_experts_per_tok}-{spec.n_group}"


def found(
    logits: Tensor, spec: RouterSpec, bias: Tensor | None, device: torch.device, changed: ChangedChoice | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel's, of each row; all launches use one counter."""
    k, ones = spec.num_experts_per_tok, torch.ones(4, device=device)
    experts = torch.full((len(logits), k), -1, dtype=torch.int32, device=device)
    weights, routed = torch.full((len(logits), k), torch.nan, device=device), Routed.allocate(4, spec, device)
    held = None if bias is None else bias.to(device)
    for row in range(len(logits)):
        routed.weights.fill_(torch.nan)
        rows = torch.zeros((spec.num_experts, 4))
        rows[:, 0] = logits[row]
        stored = StoredRows(rows.to(device), stored_part("F32", 4))
        route(ones, Router(spec, Norm(ones, None, 0.0), stored, None, held, None), experts[row], routed, changed)
        weights[row] = routed.weights
        assert routed.num_done == 0
    return experts.cpu(), weights.cpu()


def assert_same(logits: Tensor, spec: RouterSpec, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(spec.num_experts, generator=draw) / 4 if spec.bias else None
    experts, weights = found(logits, spec, bias, device)
    expected_experts, expected_weights = TORCH.route(logits, spec, bias)
    assert torch.equal(experts.long(), expected_experts)
    # Exponentials of another library, some 2 units in the last place each.
    assert (weights - expected_weights).abs().max() < 1e-6 * max(1.0, spec.scaling_factor)


def test_experts_and_weights_are_torchs(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            logits = 3 * torch.randn((4, spec.num_experts), generator=torch.Generator().manual_seed(0))
            assert_same(logits, spec, kernel_device)


@pytest.mark.slow
def test_of_equal_logits_the_lowest_index_comes_first(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            draw = torch.Generator().manual_seed(0)
            logits = torch.randint(-1, 2, (4, spec.num_experts), generator=draw).float()
            logits[0] = 0.0
            logits[1] *= -0.0  # zeros of both signs are equal
            assert_same(logits, spec, kernel_device)


# Numpy, in which the interpreter computes, tells of overflow and NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_that_vanish_are_equal(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            logits = torch.full((2, spec.num_experts), -200.0)
            logits[:, -1] = 1.0
            logits[1, spec.num_experts // 2] = -150.0
            assert_same(logits, spec, kernel_device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_no_numbers_still_give_experts(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            bias = torch.zeros(spec.num_experts) if spec.bias else None
            experts, weights = found(torch.full((1, spec.num_experts), torch.nan), spec, bias, kernel_device)
            assert experts.unique().numel() == spec.num_experts_per_tok
            assert experts.min() >= 0 and experts.max() < spec.num_experts
            assert weights.isnan().all(), "what is wrong is seen"


ALPHA = 0.9
CHANGED_SPECS = [
    RouterSpec("softmax_topk", 8, 2, True),
    RouterSpec("softmax_topk", 128, 8, True),
    RouterSpec("softmax_topk", 160, 6, False, n_group=8, topk_group=3, scaling_factor=16.0),
    RouterSpec("softmax_topk", 3, 3, True),
    RouterSpec("topk_softmax", 40, 5, False),
    RouterSpec("sigmoid_topk", 24, 4, True, bias=True),
    RouterSpec("sparsemixer", 16, 2, False, jitter=0.3),
]


def test_resident_experts_replace_missing_ones_as_algorithm_1_does(kernel_device: torch.device) -> None:
    num_changed = torch.full((1,), -1, dtype=torch.int32, device=kernel_device)
    totals, draw = list[int](), torch.Generator().manual_seed(4)
    for spec in CHANGED_SPECS:
        for alpha in (0.0, 0.3, 1.0):
            with case(f"{name_of(spec)}, {alpha}"):
                logits = torch.randn((1, spec.num_experts), generator=draw) / 2
                bias = torch.randn(spec.num_experts, generator=draw) / 8 if spec.bias else None
                is_resident = torch.rand(spec.num_experts, generator=draw) < 0.5
                there = is_resident.int().to(kernel_device)
                changed = ChangedChoice(None, there, alpha, num_changed)
                experts, weights = found(logits, spec, bias, kernel_device, changed)
                own, _ = TORCH.route(logits, spec, bias)
                scores = expert_scores(logits, spec).numpy()
                expected = torch.from_numpy(substitute(scores, own.numpy(), is_resident.numpy(), alpha))
                assert torch.equal(experts.long(), expected)
                expected_weights = router_weights(logits, expected, spec)
                assert (weights - expected_weights).abs().max() < 1e-6 * max(1.0, spec.scaling_factor)
                totals.append(int((expected != own).sum()))
                if spec.num_experts > spec.num_experts_per_tok:
                    assert num_changed == totals[-1]
    assert sum(totals) > 5 and 0 in totals, "some are replaced, and not always"


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_the_top_experts_of_all_tokens_are_free_for_each(num_tokens: int, kernel_device: torch.device) -> None:
    draw, totals, others = torch.Generator().manual_seed(6), list[int](), 0
    for spec in CHANGED_SPECS:
        with case(name_of(spec)):
            d, bias = 32, torch.randn(spec.num_experts, generator=draw) / 8 if spec.bias else None
            is_resident = torch.rand(spec.num_experts, generator=draw) < 0.5
            rows = torch.randn((spec.num_experts, d), generator=draw).to(kernel_device) / 12
            x = torch.randn((num_tokens, d), generator=draw).to(kernel_device)
            held = None if bias is None else bias.to(kernel_device)
            ones = torch.ones(d, device=kernel_device)
            router = Router(spec, Norm(ones, None, 1e-6), StoredRows(rows, stored_part("F32", d)), None, held, None)
            out, experts = routed_of(x, router, (None, is_resident.int().to(kernel_device)))
            routed, num_changed = Routed(*out[:-1]), out[-1].cpu()
            logits = routed.logits.cpu()
            own, _ = TORCH.route(logits, spec, bias)
            scores, there = expert_scores(logits, spec).numpy(), is_resident.numpy()
            expected = torch.from_numpy(substitute(scores, own.numpy(), there, ALPHA))
            assert torch.equal(experts.cpu().long(), expected)
            expected_weights = router_weights(logits, expected, spec)
            assert (routed.weights.cpu() - expected_weights).abs().max() < 1e-6 * max(1.0, spec.scaling_factor)
            if spec.num_experts > spec.num_experts_per_tok:
                assert torch.equal(num_changed.long(), (expected != own).sum(1))
            totals.append(int((expected != own).sum()))
            alone = [substitute(scores[t : t + 1], own[t : t + 1].numpy(), there, ALPHA) for t in range(num_tokens)]
            others += int((np.concatenate(alone) != expected.numpy()).sum())
    assert sum(totals) > 5 and others, "what runs for others changes the choice"


def test_predicted_experts_run_whatever_the_router_chooses(kernel_device: torch.device) -> None:
    num_changed = torch.full((1,), -1, dtype=torch.int32, device=kernel_device)
    draw = torch.Generator().manual_seed(5)
    for spec in CHANGED_SPECS:
        for is_right in (False, True):
            with case(f"{name_of(spec)}, {is_right}"):
                logits, k = torch.randn((1, spec.num_experts), generator=draw), spec.num_experts_per_tok
                own, own_weights = TORCH.route(logits, spec, None)
                predicted = own[0].flip(0) if is_right else torch.randperm(spec.num_experts, generator=draw)
                given = predicted.int().to(kernel_device)
                changed = ChangedChoice(given, None, 0.0, num_changed)
                experts, weights = found(logits, spec, None, kernel_device, changed)
                assert set(experts[0].tolist()) == set(predicted[:k].tolist())
                assert num_changed == len(np.setdiff1d(predicted[:k], own[0]))
                if is_right:
                    assert torch.equal(experts.long(), own)
                    expected = own_weights
                else:
                    expected = router_weights(logits, experts.long(), spec)
                assert (weights - expected).abs().max() < 1e-6 * max(1.0, spec.scaling_factor)


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "d"), [(1, 8), (7, 64), (130, 200)])
def test_the_norm_the_logits_and_the_shared_experts_weight_are_torchs(
    num_experts: int, d: int, dtype: str, is_layer_norm: bool, kernel_device: torch.device
) -> None:
    draw = torch.Generator().manual_seed(num_experts)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    spec = RouterSpec("softmax_topk", num_experts, min(3, num_experts), True, logit_bias=True)
    x, weight, logit_bias = 2 + 3 * random(d), 1 + random(d) / 4, random(num_experts)
    bias = random(d) if is_layer_norm else None
    rows, shared = (random(n, d).to(DTYPES[dtype]) for n in (num_experts, 1))
    if is_layer_norm:
        expected = torch.nn.functional.layer_norm(x, (d,), weight, bias, 1e-5)
    else:
        expected = TORCH.rms_norm(x, weight, 1e-5)

    there = Norm(weight.to(kernel_device), None if bias is None else bias.to(kernel_device), 1e-5)
    part, shared_part = stored_part(dtype, d), stored_part("BF16", d)
    router = Router(
        spec,
        there,
        StoredRows(rows.to(kernel_device), part),
        logit_bias.to(kernel_device),
        None,
        StoredRows(shared.bfloat16().to(kernel_device), shared_part),
    )
    experts = torch.full((spec.num_experts_per_tok,), -1, dtype=torch.int32, device=kernel_device)
    routed = Routed.allocate(d, spec, kernel_device)
    for written in (routed.normed, routed.logits, routed.weights, routed.shared_weight):
        written.fill_(torch.nan)
    route(x.to(kernel_device), router, experts, routed)

    alone = torch.full((d,), torch.nan, device=kernel_device)
    norm(x.to(kernel_device), there, alone)
    assert torch.equal(routed.normed[0], alone), "experts get the values that the norm's kernel gives"
    torch.testing.assert_close(alone.cpu(), expected, rtol=2e-6, atol=2e-6)
    logits = expected @ rows.float().T + logit_bias
    bound = 1e-6 * (expected.abs() @ rows.float().abs().T + logit_bias.abs())
    assert ((routed.logits[0].cpu() - logits).abs() <= 4 * bound).all()
    of_shared = torch.sigmoid(shared.bfloat16().float() @ expected)
    torch.testing.assert_close(routed.shared_weight.cpu(), of_shared, rtol=2e-5, atol=1e-6)
    chosen, weights = TORCH.route(routed.logits.cpu(), spec, None)
    assert torch.equal(experts.cpu().long(), chosen[0])
    assert (routed.weights.cpu() - weights).abs().max() < 1e-6


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_each_of_several_tokens_is_routed_as_alone(num_tokens: int, kernel_device: torch.device) -> None:
    def random(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kernel_device)

    spec, d = RouterSpec("softmax_topk", 70, 3, True), 64
    x, rows = 2 + random(num_tokens, d, seed=1), StoredRows(random(70, d, seed=2), stored_part("F32", d))
    shared = StoredRows(random(1, d, seed=3).bfloat16(), stored_part("BF16", d))
    router = Router(spec, Norm(random(d, seed=4), None, 1e-5), rows, None, None, shared)
    predicted = torch.stack([torch.randperm(70)[:5] for _ in range(num_tokens)]).int().to(kernel_device)
    changes = (None, (predicted, None))
    for which, change in enumerate(changes):
        with case(which):
            several, experts = routed_of(x, router, change)
            for t in range(num_tokens):
                own = None if change is None else (None if change[0] is None else change[0][t : t + 1], change[1])
                one, chosen = routed_of(x[t : t + 1], router, own)
                assert torch.equal(chosen[0], experts[t])
                for found, alone in zip(several, one, strict=True):
                    assert torch.equal(found[t], alone[0])


def routed_of(
    x: Tensor, router: Router, change: tuple[Tensor | None, Tensor | None] | None
) -> tuple[list[Tensor], Tensor]:
    """The outputs for some tokens, the numbers of changed experts after them, and the experts."""
    num_tokens, k = len(x), router.spec.num_experts_per_tok
    out = Routed.allocate(x.shape[1], router.spec, x.device, num_tokens)
    num_changed = torch.full((num_tokens,), -1, dtype=torch.int32, device=x.device)
    experts = torch.full((num_tokens, k), -1, dtype=torch.int32, device=x.device)
    changed = None if change is None else ChangedChoice(change[0], change[1], ALPHA, num_changed)
    for _ in range(2):  # the counters are back at zero after a launch
        route(x, router, experts, out, changed)
        assert not out.num_done.any()
    return [*out, num_changed], experts


def test_without_a_shared_expert_its_weight_is_not_written(kernel_device: torch.device) -> None:
    spec = RouterSpec("softmax_topk", 5, 2, True)
    ones = torch.ones(4, device=kernel_device)
    routed, experts = Routed.allocate(4, spec, kernel_device), torch.zeros(2, dtype=torch.int32, device=kernel_device)
    routed.shared_weight.fill_(7.0)
    stored = StoredRows(torch.zeros((5, 4), device=kernel_device), stored_part("F32", 4))
    route(ones, Router(spec, Norm(ones, None, 0.0), stored, None, None, None), experts, routed)
    assert routed.shared_weight == 7.0
    assert experts.tolist() == [0, 1] and routed.weights.tolist() == [[0.5, 0.5]]
