"""What ranks a layer's experts, as a prediction takes it: the order that its router chooses in."""

from dataclasses import dataclass, replace
from itertools import product

import torch
from support.cases import case
from support.specs import GROUPED
from torch import Tensor

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.runtime.model import TORCH, StoredMatrix, router_scores

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
    for k, (kind, bias) in product(
        [1, 3],
        [
            ("softmax_topk", False),
            ("softmax_topk", True),
            ("sigmoid_topk", False),
            ("sigmoid_topk", True),
            ("sqrtsoftplus_topk", True),
            ("topk_sigmoid", False),
            ("topk_sigmoid", True),
            ("topk_softmax", False),
            ("sparsemixer", False),
        ],
    ):
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
