"""Routers: the experts of each token and their weights. Experts with equal scores are taken in rising order.

A kind is named after its order of steps. Sources in transformers:

    softmax_topk         models/mixtral, MixtralTopKRouter; models/deepseek_v2, DeepseekV2TopkRouter
    topk_softmax         models/granitemoe, GraniteMoeTopKRouter
    sigmoid_topk         models/glm4_moe, Glm4MoeTopkRouter; DeepSeek-V3 (2412.19437), section 2.1.2
    topk_sigmoid         models/llama4, Llama4Router (without a bias); models/kolibri1, Kolibri1TopKRouter
    sqrtsoftplus_topk    models/deepseek_v4, DeepseekV4TopKRouter
    sparsemixer          models/phimoe, sparsemixer at inference; GRIN (2409.12136)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.formats import RouterSpec


def choose(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, best first, and their weights, without regard to capacity.

    With experts that return their input, these are the k best of the others; those not chosen have weight 0.
    Args:    logits: float32 [T, E + Z], Z = `num_identity`.   bias: float32 [E + Z], added for the choice only.
    Returns: int64 [T, k] and float32 [T, k].
    Source:  transformers, models/longcat_flash, LongcatFlashTopkRouter, for experts that return their input.
    """
    if spec.num_identity:
        return _choose_among_identities(logits, spec, bias)
    experts = _choice(logits, spec, bias)
    return experts, router_weights(logits, experts, spec)


def _choose_among_identities(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scores, k = _biased(_scores(logits, spec), bias), spec.num_experts_per_tok
    num_chosen = (_largest(scores, k) < spec.num_experts).sum(dim=-1, keepdim=True)
    experts = _largest(scores[:, : spec.num_experts], k)
    is_left = torch.arange(k, device=logits.device) >= num_chosen
    return experts, router_weights(logits, experts, spec).masked_fill(is_left, 0.0)


def identity_share(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> Tensor:
    """Returns the summed weights of the experts that return their input, float32 [T, 1]; arguments as `choose`."""
    experts = _choice(logits, spec, bias)
    weights = router_weights(logits, experts, spec)
    return (weights * (experts >= spec.num_experts)).sum(dim=-1, keepdim=True)


def limit_to_capacity(experts: Tensor, weights: Tensor, spec: RouterSpec) -> Tensor:
    """Returns the weights float32 [T, k], with zero for tokens beyond the first `capacity` of their expert.

    Source:  transformers, models/switch_transformers, SwitchTransformersTop1Router.
    """
    if spec.capacity is None or len(experts) <= spec.capacity:
        return weights
    return weights.masked_fill(~_within(spec.capacity, experts), 0.0)


def _within(capacity: int, experts: Tensor) -> Tensor:
    order = torch.sort(experts[:, 0], stable=True)  # the tokens of an expert are consecutive, in their order
    places = torch.arange(len(experts), device=experts.device)
    firsts = torch.searchsorted(order.values, order.values)
    within = torch.empty(len(experts), dtype=torch.bool, device=experts.device)
    within[order.indices] = places - firsts < capacity
    return within[:, None]


def router_weights(logits: Tensor, experts: Tensor, spec: RouterSpec) -> Tensor:
    """Returns the weights of given experts int64 [T, k], float32 [T, k], normalised as the family does."""
    weights = _WEIGHTS[spec.kind](logits, experts, spec)
    if spec.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least_sum(spec))
    return weights if spec.scaling_factor == 1.0 else weights * spec.scaling_factor


def expert_scores(logits: Tensor, spec: RouterSpec) -> Tensor:
    """Returns a nonnegative score of every expert, float32 [T, E]: sigmoid, root of softplus, or softmax."""
    return _scores(logits, spec)[:, : spec.num_experts]


def _scores(logits: Tensor, spec: RouterSpec) -> Tensor:
    if spec.kind == "sqrtsoftplus_topk":
        return _root_of_softplus(logits)
    return torch.sigmoid(logits) if "sigmoid" in spec.kind else torch.softmax(logits, dim=-1)


def _root_of_softplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits).sqrt()


def _biased(scores: Tensor, bias: Tensor | None) -> Tensor:
    return scores if bias is None else scores + bias


def least_sum(spec: RouterSpec) -> float:
    """Returns a term that keeps sums of weights from being zero before a division; sigmoids may vanish."""
    can_vanish = spec.kind in ("sigmoid_topk", "sqrtsoftplus_topk", "topk_sigmoid")
    return max(spec.least_sum, 1e-20 if can_vanish else 0.0)


def _sparsemixer(logits: Tensor, count: int) -> Tensor:
    """Chooses the largest logit, then the largest of the rest, and so on."""
    remaining, experts = logits, []
    for _ in range(count):
        experts.append(remaining.argmax(dim=-1, keepdim=True))  # the first of equals, as torch documents for argmax
        remaining = remaining.scatter(1, experts[-1], -torch.inf)
    return torch.cat(experts, dim=-1)


def _shares_near(logits: Tensor, experts: Tensor, spec: RouterSpec) -> Tensor:
    """Returns each chosen expert's share of a softmax over the logits near its own, by a distance of `2 jitter`."""
    remaining, weights = logits, []
    for place in range(experts.shape[1]):
        chosen = experts[:, place : place + 1]
        largest = remaining.gather(1, chosen)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * spec.jitter
        near = remaining.masked_fill(far, -torch.inf)
        weights.append(near.softmax(dim=-1).gather(1, chosen))
        remaining = remaining.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=-1)


def _choice(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> Tensor:
    """Returns the experts of each token, with `num_identity` also those without weights, int64 [T, k], best first."""
    if spec.kind == "sparsemixer":
        return _sparsemixer(logits, spec.num_experts_per_tok)
    scores = _biased(logits if spec.kind in ("topk_softmax", "topk_sigmoid") else _scores(logits, spec), bias)
    if spec.n_group > 1:
        best_of_group = 2 if spec.kind == "sigmoid_topk" else 1  # whose sum is the group's score
        grouped = scores.view(len(scores), spec.n_group, -1)  # [T, groups, experts a group]
        best = grouped.sort(dim=-1, descending=True).values[..., :best_of_group].sum(dim=-1)
        is_in_best = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, spec.topk_group), True)
        outside = 0.0 if spec.zero_outside else -torch.inf
        scores = grouped.masked_fill(~is_in_best[..., None], outside).flatten(1)
    return _largest(scores, spec.num_experts_per_tok)


def _largest(scores: Tensor, count: int) -> Tensor:
    # A stable sort keeps the lower index first among equals; topk promises no order.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


_WEIGHTS: dict[str, Callable[[Tensor, Tensor, RouterSpec], Tensor]] = {
    "softmax_topk": lambda logits, experts, spec: torch.softmax(logits, dim=-1).gather(1, experts),
    "topk_softmax": lambda logits, experts, spec: torch.softmax(logits.gather(1, experts), dim=-1),
    "sigmoid_topk": lambda logits, experts, spec: torch.sigmoid(logits).gather(1, experts),
    "topk_sigmoid": lambda logits, experts, spec: torch.sigmoid(logits.gather(1, experts)),
    "sqrtsoftplus_topk": lambda logits, experts, spec: _root_of_softplus(logits.gather(1, experts)),
    "sparsemixer": _shares_near,
}
