"""Gradients of the model's predictions, one layer at a time, and the cost of rounding by them.

A change `dz` of a token's logits has, to second order, the KL divergence `1/2 dz^T F dz`, with `F = diag(p) - p p^T`.
For random `v` with the covariance `F` that is the mean of `1/2 (v . dz)^2`. `v` is drawn once for each token and goes
back through the model: a change `dx` of a hidden state costs `1/2 (g . dx)^2`, with the gradient `g` of `v . z`.

Changes of different tokens and weights are taken as independent, so their squares add. For a token with input `x`,
router weight `w` and gradient `g` of its output, and the derivative `D` of `h(gate . x, up . x)` by either product:

    gate, up    1/2 w^2 sum over neurons i of  (D_i down_i . g)^2  sum over columns j of  dW_ij^2 x_j^2
    down        1/2 w^2 sum over neurons i of  h_i^2               sum over columns j of  dW_ij^2 g_j^2
    sparsity    1/2 w^2 (sum over neurons i that do not run of  h_i down_i . g)^2

The factors next to `dW^2` are second moments that do not depend on the format: nothing is multiplied with rounded
weights.
Source:  the factored Fisher information of predictions, as in K-FAC (arXiv 1503.05671), sections 2 and 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.forward import KINDS, Context, DerivedWeights, LayerStates, LayerTokens
from moe_pack.calib.quantize import usual_repeats
from moe_pack.calib.sensitivity import errors
from moe_pack.runtime import model
from moe_pack.runtime.model import layers
from moe_pack.runtime.model.compute import matrices
from moe_pack.runtime.model.compute.operations import row_blocks

SPARSE_TOKENS = 256  # of an expert, to measure sparsity on


# --- differentiable weights


class _Product(torch.autograd.Function):
    """`x @ matrix.T`; its gradient reads the matrix again, a block of rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: model.Matrix) -> Tensor:
        ctx.matrix = matrix
        return model.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), matrix = grads, ctx.matrix
        total = grad.new_zeros((len(grad), matrix.num_cols))
        for start, stop in row_blocks(matrix.num_rows, matrix.num_cols):
            total.addmm_(grad[:, start:stop], matrix.rows(start, stop))
        return total, None


class _TrackedMatrix(matrices.DivisibleMatrix):
    def __init__(self, matrix: model.Matrix) -> None:
        self._matrix = matrix
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._matrix.rows(start, stop).clone()

    def take(self, ids: Tensor) -> Tensor:
        return torch.stack([self._matrix.rows(number, number + 1)[0] for number in ids.tolist()])

    def product(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self._matrix)  # type: ignore[no-untyped-call]  # torch has no type for it
        return product

    def part(self, start: int, stop: int) -> "_TrackedMatrix":
        return _TrackedMatrix(matrices.rows_of(self._matrix, start, stop))


class Tracked(DerivedWeights):
    """The weights of `source`, through which torch finds gradients with respect to hidden states."""

    def vector(self, role: str) -> Tensor:
        """Returns a copy, because torch keeps no tensor from inference mode."""
        return super().vector(role).clone()

    def matrix(self, role: str) -> model.Matrix:
        """Returns a matrix through whose products gradients flow."""
        return _TrackedMatrix(super().matrix(role))


# --- back through the parts of a model


def prediction_gradient(hidden: Tensor, weights: Tracked, generator: torch.Generator) -> Tensor:
    """Returns the gradient of `v . logits` for final hidden states float32 [n, d], with a random `v` for each token.

    Meaning: `v = sqrt(p) e - p (sqrt(p) . e)` with standard normal `e` has the covariance `diag(p) - p p^T`.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        hidden = hidden.clone().requires_grad_()
        logits = model.head(hidden, weights)
        p = logits.detach().softmax(dim=-1)
        v = p.sqrt() * torch.randn(p.shape, generator=generator).to(p.device)
        v -= p * v.sum(dim=-1, keepdim=True)
        (gradient,) = torch.autograd.grad(logits, hidden, v)
    return gradient


def half_gradient(
    states: LayerStates,
    layer: int,
    hidden: Tensor,
    weights: Tracked,
    above: tuple[Tensor, Tensor],
    context: Context,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient before a layer's first half, and that of the encoder's output, float32 [S, d] each.

    Args:    hidden, context: of a sequence.   above: the gradients with respect to `x` and `inputs` of `LayerTokens`.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        hidden = hidden.to(states.device).clone().requires_grad_()
        text = None if context.text is None else context.text.to(states.device).clone().requires_grad_()
        outputs = states.half_of(layer, hidden, weights, replace(context, text=text))
        sources = [hidden] if text is None else [hidden, text]
        # A layer without a second half has no inputs of one to go back through.
        pairs = [(out, each) for out, each in zip(outputs, above, strict=True) if out.requires_grad]
        given = [each.to(states.device).clone() for _, each in pairs]
        gradients = torch.autograd.grad([out for out, _ in pairs], sources, given)
    return gradients[0], gradients[1] if text is not None else None


def end_gradient(
    states: LayerStates, layer: int, half: tuple[Tensor, Tensor], outputs: Tensor, weights: Tracked, above: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients with respect to `x` and `inputs` of a layer's end, and to the sum of its experts.

    Args:    half, outputs: of some tokens, as for `LayerStates.after`.   above: the gradient after the layer.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        x, inputs, routed = (each.to(states.device).clone().requires_grad_() for each in (*half, outputs))
        result = states.after(layer, (x, inputs), routed, weights)
        given = above.to(states.device).clone()
        found = torch.autograd.grad(result, (x, inputs, routed), given, allow_unused=True)
    of_x, of_inputs, of_routed = (
        torch.zeros_like(each) if gradient is None else gradient
        for each, gradient in zip((x, inputs, routed), found, strict=True)
    )
    return of_x, of_inputs, of_routed


def router_gradient(tokens: LayerTokens, above: Tensor, weights: Tracked, layer: int) -> Tensor:
    """Returns the gradient with respect to a router's inputs float32 [T, d], from that of its weights [T, k]."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        x = tokens.inputs.to(above.device).clone().requires_grad_()
        experts, runs = tokens.experts.to(x.device).clone(), (tokens.weights != 0).to(x.device)
        chosen = layers.weights_of_experts(layers.router_logits(x, weights, layer), experts, weights, layer)
        (gradient,) = torch.autograd.grad(chosen, x, above * runs)
    return gradient


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGradients:
    """An expert's n tokens on the way back."""

    inputs: Tensor  # float32 [n, d]: the gradient with respect to its input
    weights: Tensor  # float32 [n]: with respect to its router weight
    quantized: Tensor  # float32 [3, widths]: the divergence by plain rounding, summed over tokens
    # float32 [widths]: that of down if the neurons that lose most lose nothing, as many as conversion repeats.
    repeated: Tensor
    sparse: Tensor  # float32 [kinds, sparsities]: the divergence by neurons that do not run, likewise
    # Of gate, up and down float32 [neurons, groups]: what a squared error of a weight costs, summed over tokens, for
    # the first neurons; None for a matrix that the expert lacks.
    moments: tuple[Tensor | None, ...]


def expert_gradients(
    expert: model.Expert,
    function: formats.NeuronFunction,
    x: Tensor,
    weights: Tensor,
    above: Tensor,
    thresholds: Tensor,
) -> ExpertGradients:
    """Takes the gradient of an expert's output back through it, and weighs errors of its weights by it.

    Args:    x: float32 [n, d]; sparsity is measured on the first `SPARSE_TOKENS`.   weights: float32 [n], of the
             router.   above: float32 [n, d], the gradient with respect to the weighted output.   thresholds: float32
             [kinds, sparsities].
    """
    few = min(len(x), SPARSE_TOKENS)
    inputs, by_weight = torch.zeros_like(x), x.new_zeros(len(x))
    quantized = x.new_zeros((len(formats.MATRICES), len(errors.WIDTHS)))
    dropped = x.new_zeros((*thresholds.shape, few))
    kept: list[list[Tensor]] = [[] for _ in formats.MATRICES]
    by_neuron = list[Tensor]()  # what down loses
    x_squares, above_squares = _group_means(x), _group_means(above)
    num_neurons = 0
    for block in expert.blocks():
        values, slopes = _neurons(x, block, function)
        gains = above @ block.down.T  # of a unit of h
        by_weight += (values.h * gains).sum(dim=1)
        _add_dropped(dropped, values, gains[:few], thresholds)
        gains *= weights[:, None]
        h = values.h * weights[:, None]
        for matrix_idx, rows in enumerate((block.gate, block.up, block.down)):
            if rows is None:
                continue
            is_down = rows is block.down
            shares = h if is_down else slopes[matrix_idx] * gains
            if not is_down:
                inputs.addmm_(shares, rows)
            shares = shares.square_()
            moments = shares.T @ (above_squares if is_down else x_squares)  # [neurons, groups]
            lost = torch.stack([(moments * squares).sum(dim=1) for squares in errors.rounding_squares(rows)], dim=1) / 2
            quantized[matrix_idx] += lost.sum(dim=0)
            if is_down:
                by_neuron.append(lost)
            if num_neurons < errors.COMPARED_NEURONS:
                kept[matrix_idx].append(moments[: errors.COMPARED_NEURONS - num_neurons])
        num_neurons += len(block.up)
    bias = expert.down_bias()
    if bias is not None:
        by_weight += above @ bias
    sparse = (dropped * weights[:few]).square().sum(dim=-1) * (len(x) / max(few, 1) / 2)
    rising = torch.cat(by_neuron).sort(dim=0).values  # [neurons, widths]
    repeated = rising[: num_neurons - usual_repeats(num_neurons)].sum(dim=0)
    firsts = tuple(torch.cat(pieces) if pieces else None for pieces in kept)
    return ExpertGradients(inputs, by_weight, quantized, repeated, sparse, firsts)


def _add_dropped(dropped: Tensor, values: model.Activations, gains: Tensor, thresholds: Tensor) -> None:
    """Adds the contribution of a block's neurons below each threshold: float32 [kinds, sparsities, n]."""
    few = len(gains)
    share = values.h[:few] * gains
    for kind_idx, kind in enumerate(KINDS):
        a = values.of(kind)[:few].abs()
        for of_threshold, threshold in zip(dropped[kind_idx], thresholds[kind_idx], strict=True):
            of_threshold += (share * (a < threshold)).sum(dim=1)


def _neurons(
    x: Tensor, block: model.NeuronBlock, function: formats.NeuronFunction
) -> tuple[model.Activations, tuple[Tensor, Tensor]]:
    """Returns a block's activations, and the derivatives of h by the products with gate and with up."""
    neuron = model.neuron_of(function)
    with torch.inference_mode(mode=False), torch.enable_grad():
        up = _products(x, block.up, block.up_bias)
        if block.gate is None:
            h, slope = _with_slope(neuron.act, up)
            return model.Activations(h, h, h), (slope, slope)
        act, act_slope = _with_slope(neuron.act, _products(x, block.gate, block.gate_bias))
        factor, factor_slope = _with_slope(neuron.factor, up)
    return model.Activations(up=factor, gate=act, h=act * factor), (act_slope * factor, act * factor_slope)


def _products(x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.mm(x, rows.T) if bias is None else torch.addmm(bias, x, rows.T)
    return product.clone() if product.is_inference() else product


def _with_slope(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a function of each value, and its derivative."""
    values.requires_grad_()
    result = function(values)
    (slope,) = torch.autograd.grad(result, values, torch.ones_like(result))
    return result.detach(), slope


def _group_means(values: Tensor) -> Tensor:
    """Returns the mean square in each group of columns: float32 [n, groups]."""
    return values.square().view(len(values), values.shape[1] // errors.GROUP, errors.GROUP).mean(dim=2)
