"""Routers as data: how a token's experts and their weights follow from logits, or from a table of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import part


@dataclass(frozen=True, slots=True)
class RouterSpec(part.Part):
    """How a token's experts and their weights follow from the router's logits; ties go to the lowest index.

    `softmax_topk`: softmax over all logits, then the `num_experts_per_tok` largest. `topk_softmax`: the largest logits,
    then softmax over these. `sigmoid_topk`: the sigmoid of each logit, then the largest. `topk_sigmoid`: the largest
    logits, then the sigmoid of each; here a bias is added to logits. `sqrtsoftplus_topk`: the root of each logit's
    softplus, then the largest. `sparsemixer`: the largest logit, again and again; the weight is the softmax over the
    remaining logits within `2 jitter` of it.
    Source: transformers, models/gemma4, Gemma4TextRouter, for scales; models/longcat_flash for `num_identity`;
    models/deepseek_v4, DeepseekV4HashRouter, for tables; models/axk2, AXK2TopkRouter, for `zero_outside`.
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

    def roles(self, d: int, vocab_size: int, layer: int) -> Iterator[part.DenseRole]:
        """Yields the dense tensors of a layer, for a hidden size d."""
        yield part.DenseRole("router", (self.num_outputs, d), False)
        if self.logit_bias:
            yield part.DenseRole("router_logit_bias", (self.num_outputs,), False)
        if layer in self.table_layers:
            yield part.DenseRole("router_table", (vocab_size, self.num_experts_per_tok), False, integers=True)
        elif self.bias:
            yield part.DenseRole("router_bias", (self.num_outputs,), False)
        if self.input_scale:
            yield part.DenseRole("router_scale", (d,), False)
        if self.expert_scale:
            yield part.DenseRole("router_expert_scale", (self.num_experts,), False)

    def fault(self, moe_layers: tuple[int, ...], has_encoder: bool) -> str | None:
        """Returns why it cannot be the router of a model with these MoE layers, or None."""
        return next(self._faults(moe_layers, has_encoder), None)

    def _faults(self, moe_layers: tuple[int, ...], has_encoder: bool) -> Iterator[str]:
        kind, chosen, num_experts, groups = self.kind, self.num_experts_per_tok, self.num_experts, self.n_group
        if chosen > num_experts:
            yield f"num_experts_per_tok is {chosen}, expected at most num_experts, {num_experts}"
        if num_experts % groups or self.topk_group > groups:
            yield (
                f"n_group is {groups} and topk_group is {self.topk_group}; {num_experts} experts must divide into "
                "n_group groups, and topk_group must not exceed n_group"
            )
        left = self.topk_group * (num_experts // groups)
        if chosen > left:
            yield f"num_experts_per_tok is {chosen}, but topk_group leaves only {left} experts"
        if kind in ("topk_softmax", "sparsemixer") and (groups > 1 or self.bias or self.normalize):
            yield f"a {kind} router cannot have n_group, bias or normalize"
        if kind in ("sqrtsoftplus_topk", "topk_sigmoid") and groups > 1:
            yield f"a {kind} router cannot have n_group"
        if self.zero_outside and (groups == 1 or kind != "sigmoid_topk"):
            yield "zero_outside needs a sigmoid_topk router with n_group above 1"
        if not 0 <= self.num_identity < 2**20:
            yield f"router num_identity is {self.num_identity}, expected 0 to 2^20 - 1"
        is_plain = kind == "softmax_topk" and groups == 1 and not self.normalize
        if self.num_identity and (not is_plain or self.capacity or self.on_input):
            yield "num_identity needs a softmax_topk router without n_group, normalize, capacity and on_input"
        if kind == "sigmoid_topk" and groups > 1 and num_experts // groups < 2:
            yield f"n_group is {groups}, but sigmoid_topk needs at least two experts in each group"
        if self.capacity is not None and (kind != "softmax_topk" or chosen > 1):
            yield f"router capacity is {self.capacity}; only softmax_topk with one expert a token can have a capacity"
        if self.on_input and chosen > 1:
            yield f"router on_input needs one expert a token, but num_experts_per_tok is {chosen}"
        if not 0 <= self.jitter < 1 or (self.jitter > 0 and kind != "sparsemixer"):
            yield f"router jitter is {self.jitter} with {kind}, expected 0, or less than 1 with sparsemixer"
        if not 0 <= self.least_sum < 1 or (self.least_sum > 0 and not self.normalize):
            yield (
                f"router least_sum is {self.least_sum} with normalize {self.normalize}, "
                "expected 0, or less than 1 with normalize True"
            )
        if self.table_layers != tuple(layer for layer in moe_layers if layer in self.table_layers):
            yield "router table_layers must list MoE layers, in rising order"
        if self.table_layers and (has_encoder or self.num_identity or self.capacity or kind == "sparsemixer"):
            yield "router table_layers need a model without an encoder, num_identity, capacity and sparsemixer"

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and self.kind == "softmax_topk" and self.n_group > 1:
            yield "groups of experts that compete by their best expert; llama.cpp adds up the best two"
        if runner == "gpu" and self.table_layers:
            yield "a table from tokens to experts"
