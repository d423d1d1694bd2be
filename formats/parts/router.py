"""Routers as data: how a token's experts and their weights follow from logits, or from a table of tokens."""

from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.base.json_files import added


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts and their weights follow from the router's logits; ties go to the lowest index.

    `softmax_topk`: softmax over all logits, then the `num_experts_per_tok` largest. `topk_softmax`: the largest logits,
    then softmax over these. `sigmoid_topk`: the sigmoid of each logit, then the largest. `topk_sigmoid`: the largest
    logits, then the sigmoid of each; here a bias is added to logits. `sqrtsoftplus_topk`: the root of each logit's
    softplus, then the largest. `sparsemixer`: the largest logit, again and again; the weight is the softmax over the
    remaining logits within `2 jitter` of it.
    Source of the scales: transformers, models/gemma4, Gemma4TextRouter; of `num_identity`: models/longcat_flash; of
    tables: models/deepseek_v4, DeepseekV4HashRouter; of `zero_outside`: models/axk2, AXK2TopkRouter.
    """

    kind: Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sqrtsoftplus_topk", "sparsemixer"]
    num_experts: int  # `E`
    num_experts_per_tok: int  # `k`
    normalize: bool  # weights are divided by their sum
    bias: bool = False  # each expert's bias is added to its score for the choice, but not to its weight
    n_group: int = 1  # groups of equal size, which compete first; 1: none
    # groups that stay; a group's score is that of its best expert, with `sigmoid_topk` the sum of its two best
    topk_group: int = 1
    scaling_factor: float = 1.0  # multiplies weights
    jitter: float = 0.0  # of `sparsemixer`
    logit_bias: bool = added(False)  # the router's linear map has a bias, a part of the logits
    least_sum: float = added(0.0)  # added to the sum by which weights are divided
    capacity: int | None = added(None)  # an expert runs for the first so many of its tokens in a pass; null: for all
    on_input: bool = added(False)  # the weight multiplies the input of a token's one expert, not its output
    input_scale: bool = added(False)  # the router's input is multiplied by a vector and by `hidden_size ** -0.5`
    expert_scale: bool = added(False)  # each expert has a factor for its weight, last of all
    num_identity: int = added(0)  # so many more experts return their input and have no weights
    # rising; in these layers a table names the experts of each token of the vocabulary: logits give the weights alone,
    # and there is no `bias`
    table_layers: tuple[int, ...] = added(())
    zero_outside: bool = added(False)  # experts of groups that do not stay score 0, and may be chosen

    @property
    def num_outputs(self) -> int:
        """The number of the router's logits."""
        return self.num_experts + self.num_identity


def router_fault(router: RouterSpec) -> str | None:
    """Returns why a router cannot be that of a model, or None."""
    if router.num_experts_per_tok > router.num_experts:
        return (
            f"num_experts_per_tok is {router.num_experts_per_tok}, expected at most num_experts, {router.num_experts}"
        )
    if router.num_experts % router.n_group or router.topk_group > router.n_group:
        return (
            f"n_group is {router.n_group} and topk_group is {router.topk_group}; "
            f"{router.num_experts} experts must divide into n_group groups, and topk_group must not exceed n_group"
        )
    group_size = router.num_experts // router.n_group
    if router.num_experts_per_tok > router.topk_group * group_size:
        return (
            f"num_experts_per_tok is {router.num_experts_per_tok}, "
            f"but topk_group leaves only {router.topk_group * group_size} experts"
        )
    is_plain = router.kind in ("topk_softmax", "sparsemixer")
    if is_plain and (router.n_group > 1 or router.bias or router.normalize):
        return f"a {router.kind} router cannot have n_group, bias or normalize"
    if router.kind in ("sqrtsoftplus_topk", "topk_sigmoid") and router.n_group > 1:
        return f"a {router.kind} router cannot have n_group"
    if router.zero_outside and (router.n_group == 1 or router.kind != "sigmoid_topk"):
        return "zero_outside needs a sigmoid_topk router with n_group above 1"
    if not 0 <= router.num_identity < 2**20:
        return f"router num_identity is {router.num_identity}, expected 0 to 2^20 - 1"
    if router.num_identity and (
        router.kind != "softmax_topk" or router.n_group > 1 or router.normalize or router.capacity or router.on_input
    ):
        return "num_identity needs a softmax_topk router without n_group, normalize, capacity and on_input"
    if router.kind == "sigmoid_topk" and router.n_group > 1 and group_size < 2:
        return f"n_group is {router.n_group}, but sigmoid_topk needs at least two experts in each group"
    if router.capacity is not None and (router.kind != "softmax_topk" or router.num_experts_per_tok > 1):
        return f"router capacity is {router.capacity}; only softmax_topk with one expert a token can have a capacity"
    if router.on_input and router.num_experts_per_tok > 1:
        return f"router on_input needs one expert a token, but num_experts_per_tok is {router.num_experts_per_tok}"
    if not 0 <= router.jitter < 1 or (router.jitter > 0 and router.kind != "sparsemixer"):
        return f"router jitter is {router.jitter} with {router.kind}, expected 0, or less than 1 with sparsemixer"
    if not 0 <= router.least_sum < 1 or (router.least_sum > 0 and not router.normalize):
        return (
            f"router least_sum is {router.least_sum} with normalize {router.normalize}, "
            "expected 0, or less than 1 with normalize True"
        )
    return None


def table_fault(router: RouterSpec, moe_layers: tuple[int, ...], has_encoder: bool) -> str | None:
    """Returns why the tables of a router cannot be in a model with these MoE layers, or None."""
    if not router.table_layers:
        return None
    listed = [layer for layer in moe_layers if layer in router.table_layers]
    if router.table_layers != tuple(listed):
        return "router table_layers must list MoE layers, in rising order"
    if has_encoder or router.num_identity or router.capacity or router.kind == "sparsemixer":
        return "router table_layers need a model without an encoder, num_identity, capacity and sparsemixer"
    return None
