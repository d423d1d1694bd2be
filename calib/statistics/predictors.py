"""Predictors of a MoE layer's experts and neurons: training, and their recall and precision on held-out tokens.

`predict_layer` judges popularity, path statistics (EdgeMoE), the next router on this layer's input (CORM) and on a
partial hidden state (Importance-Driven Expert Scheduling), a learned network (FloE), and for neurons the next layer's
selector on this layer's input (FloE, CORM). `train` trains FloE's network in float32; scores are those of its stored
bfloat16 weights. `InputFiles` keeps the inputs of MoE layers in files.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.forward import shared, store
from moe_pack.runtime import model, offload
from moe_pack.runtime.offload import routing_file


@dataclass(frozen=True, slots=True)
class MaskCounts:
    """How many entries were predicted, how many were actual, and how many were both; counts of blocks add up."""

    num_both: int = 0
    num_predicted: int = 0
    num_actual: int = 0

    def __add__(self, other: "MaskCounts") -> "MaskCounts":
        """Returns the counts of both blocks together."""
        return MaskCounts(
            self.num_both + other.num_both, self.num_predicted + other.num_predicted, self.num_actual + other.num_actual
        )

    @property
    def recall(self) -> float:
        """The share of the actual entries that were predicted; 1 if there are none."""
        return self.num_both / self.num_actual if self.num_actual else 1.0

    @property
    def precision(self) -> float:
        """The share of the predicted entries that were actual; 1 if there are none."""
        return self.num_both / self.num_predicted if self.num_predicted else 1.0


def mask_counts(predicted: Tensor, actual: Tensor) -> MaskCounts:
    """Returns the counts of a block of neurons, predicted to run and running: bool [T, n] (FloE §3.3.2, CORM §4.2)."""
    assert predicted.shape == actual.shape, "masks of different neurons"
    assert predicted.dtype == actual.dtype == torch.bool, "masks are bool: & of other types is bitwise"
    return MaskCounts(int((predicted & actual).sum()), int(predicted.sum()), int(actual.sum()))


def recall_precision(scores: Tensor, actual: Tensor, num_predicted: int) -> tuple[float, float]:
    """Returns recall and precision of the `num_predicted` largest scores; 1 without tokens; ties by index."""
    # A stable sort keeps the lower index first among equals; topk promises no order.
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :num_predicted]
    nothing = torch.zeros(scores.shape, dtype=torch.bool)
    counts = mask_counts(nothing.scatter(1, best, True), nothing.scatter(1, actual, True))
    return counts.recall, counts.precision


MAX_PARAMETERS = 2_000_000  # FloE's larger predictor
MAX_HIDDEN = 512  # wider gains nothing: 256, 512, 1024 are within 0.002 of recall (two small Mixtrals, 8192 tokens)
VALIDATION_SHARE = 8  # one token of so many: the last ones, because neighbours in a text resemble each other
BLOCK_TOKENS = 1024  # scored at once, to bound memory
LEAST_SCALE = 1e-3  # of the usual column's scale: a column that varies less is not scaled up to vary as the others
_NOT_FINITE = "predictor: hidden states are not finite; check that the checkpoint is complete"
BETAS = (0.9, 0.999)  # Adam's, as published; the next too
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class MLPShape:
    """The shape of a network."""

    num_layers: Literal[1, 2]
    hidden: int  # units between two layers; 0 where there is one

    def __post_init__(self) -> None:
        assert (self.hidden > 0) == (self.num_layers == 2), "one layer has no hidden units, two have some"

    def num_parameters(self, d: int, num_experts: int, num_previous: int = offload.MAX_PREVIOUS) -> int:
        """Returns the weights and biases for hidden states of size d and the routes of `num_previous` layers."""
        num_inputs = d + num_previous * num_experts
        if self.num_layers == 1:
            return (num_inputs + 1) * num_experts
        return (num_inputs + 1) * self.hidden + (self.hidden + 1) * num_experts


def shapes_for(d: int, num_experts: int) -> tuple[MLPShape, MLPShape]:
    """Returns the predictors of one layer and of two, of at most 2,000,000 parameters (FloE §3.3.1)."""
    allowed = (MAX_PARAMETERS - num_experts) // (d + (offload.MAX_PREVIOUS + 1) * num_experts + 1)
    return MLPShape(1, 0), MLPShape(2, max(8, min(MAX_HIDDEN, allowed) // 8 * 8))


@dataclass(frozen=True, slots=True)
class Training:
    """The options of training."""

    max_epochs: int = 20
    patience: int = 5  # epochs without a better one, after which training ends
    batch_tokens: int = 256  # at most. A step takes a 32nd of the tokens, at least 16: even few tokens give many steps


USUAL_TRAINING = Training()


def cost(shape: MLPShape, num_tokens: int, d: int, num_experts: int, training: Training = USUAL_TRAINING) -> int:
    """Returns the most multiplications that training takes: three for each parameter, token and epoch."""
    return 3 * training.max_epochs * num_tokens * shape.num_parameters(d, num_experts)


def train(
    x: Tensor,
    previous: Tensor,
    targets: Tensor,
    num_experts: int,
    shape: MLPShape,
    seed: int,
    training: Training = USUAL_TRAINING,
) -> offload.Predictor:
    """Trains a predictor of the experts of one MoE layer.

    Meaning: x is standardised by column. Adam with a cosine schedule lowers the binary cross entropy of the experts'
             logits. The last eighth of the tokens validates (all tokens if there are fewer than 8): the epoch with the
             best recall of k experts is kept, of equals the one with the least loss. Epoch 0 is popularity: biases are
             each expert's log-odds, the last layer's weights 0. Mean and scale are folded into the first layer. The
             same arguments, machine and number of threads give the same bits.
    Args:    x: float32 [T, d]; may be mapped from a file.   previous: int64 [T, P, k'], P 1 or 2.   targets: int64 [T,
             k].
    Raises:  RunError if there are no tokens, or if x is not finite.
    Source:  FloE §3.3.1, which leaves loss and training open. On two small Mixtrals (8192 tokens each), softmax cross
             entropy had 0.015 (one layer) and 0.006 (two) less recall, and keeping the epoch of least loss 0.0015 less.
    """
    assert len(x) == len(previous) == len(targets), "as many routes as hidden states"
    if not len(x):
        raise formats.RunError("predictor: found no tokens to learn from, expected at least 1; give more text")
    # A caller's inference mode, or its mode without gradients, would prevent learning: this ends both. Tensors created
    # in inference mode can still be read.
    with torch.inference_mode(False):
        return _Trainer(x, previous, targets, num_experts, shape, seed, training).train()


@dataclass(frozen=True, slots=True)
class Standard:
    """The mean and scale of each column of the hidden states, float32 [d] both."""

    mean: Tensor
    scale: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Returns x with columns of about mean 0 and deviation 1."""
        return (x - self.mean) / self.scale


def standard_of(x: Tensor) -> Standard:
    """Returns mean and deviation of the columns of x, float32 [T, d]; almost constant columns get the usual scale."""
    mean = sum((block.double().sum(0) for block in torch.split(x, BLOCK_TOKENS)), torch.zeros(())) / len(x)
    if not torch.isfinite(mean).all():
        raise formats.RunError(_NOT_FINITE)
    squares = ((block.double() - mean).square().sum(0) for block in torch.split(x, BLOCK_TOKENS))
    scale = (sum(squares, torch.zeros(())) / len(x)).sqrt()
    usual = scale.square().mean().sqrt()  # 0 if all columns are constant: then there is nothing to scale
    usual = usual if usual > 0 else torch.ones_like(usual)
    return Standard(mean.float(), torch.where(scale > LEAST_SCALE * usual, scale, usual).float())


def folded(layers: list[Tensor], standard: Standard, num_experts: int) -> offload.Predictor:
    """Returns the predictor that gives for x the outputs of `layers` for `standard.of(x)`, up to bfloat16 weights.

    Args:    layers: float32: x weights [h, d], route weights [h, P E], bias [h]; then, with two layers, weights [E, h]
             and bias [E].
    """
    x_weight = (layers[0] / standard.scale).bfloat16()
    # With the rounded weights, so that a large mean cancels fully, and in float64, because it may be large.
    shift = x_weight.double() @ standard.mean.double()
    bias = (layers[2].double() - shift).float()
    route_weight = layers[1].bfloat16().reshape(len(bias), -1, num_experts)  # [h, P E] -> [h, P, E]
    if len(layers) == 3:
        return offload.Predictor(x_weight, route_weight, bias)
    return offload.Predictor(x_weight, route_weight, bias, layers[3].bfloat16(), layers[4])


class Adam:
    """Adam (1412.6980) with a rate for each step. torch 2.13's own Adam would load its compiler first: 2 s, 70 MB."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._means = [torch.zeros_like(tensor) for tensor in tensors]
        self._squares = [torch.zeros_like(tensor) for tensor in tensors]
        self._num_steps = 0

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], rate: float) -> None:
        """Moves every tensor against its gradient."""
        self._num_steps += 1
        mean_share, square_share = (1 - beta**self._num_steps for beta in BETAS)  # of a full average seen so far
        for tensor, gradient, mean, square in zip(self._tensors, gradients, self._means, self._squares, strict=True):
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            deviation = (square / square_share).sqrt_().add_(EPSILON)
            tensor.addcdiv_(mean, deviation, value=-rate / mean_share)


class _Trainer:
    def __init__(
        self,
        x: Tensor,
        previous: Tensor,
        targets: Tensor,
        num_experts: int,
        shape: MLPShape,
        seed: int,
        training: Training,
    ) -> None:
        num_validating = len(x) // VALIDATION_SHARE
        num_learned = len(x) - num_validating
        first = num_learned if num_validating else 0
        self._learned = (x[:num_learned], previous[:num_learned], targets[:num_learned])
        self._validating = (x[first:], previous[first:], targets[first:])
        self._num_experts = num_experts
        self._training = training
        self._generator = torch.Generator().manual_seed(seed)
        self._standard = standard_of(self._learned[0])
        self._layers = self._first_layers(shape)
        # In one layer each step moves a logit by up to the rate times the inputs, of which there can be thousands.
        num_inputs = self._layers[0].shape[1] + self._layers[1].shape[1]
        self._rate = 0.002 if shape.num_layers == 2 else 0.01 * min(1.0, 256 / num_inputs)

    def train(self) -> offload.Predictor:
        adam, best_result, best_epoch, best = Adam(self._layers), (-math.inf, -math.inf), 0, self._layers
        for epoch in range(self._training.max_epochs + 1):
            if epoch:
                self._learn(adam, epoch)
            result = self._validate()
            if result > best_result:
                best_result, best_epoch, best = result, epoch, [layer.detach().clone() for layer in self._layers]
            if epoch and epoch - best_epoch >= self._training.patience:
                break
        return folded(best, self._standard, self._num_experts)

    def _first_layers(self, shape: MLPShape) -> list[Tensor]:
        """Returns layers that predict popularity for any input."""
        x, previous, targets = self._learned
        chosen = torch.bincount(targets.flatten(), minlength=self._num_experts)
        share = (chosen + 0.5) / (len(targets) + 1.0)  # off 0 and 1, which have no log-odds
        sizes = (x.shape[1], previous.shape[1] * self._num_experts)
        if shape.num_layers == 1:
            layers = [torch.zeros(self._num_experts, size) for size in sizes] + [share.logit()]
        else:
            deviation = 1 / math.sqrt(sum(sizes))
            layers = [torch.randn(shape.hidden, size, generator=self._generator) * deviation for size in sizes]
            layers += [torch.zeros(shape.hidden), torch.zeros(self._num_experts, shape.hidden), share.logit()]
        return [layer.requires_grad_() for layer in layers]

    def _learn(self, adam: Adam, epoch: int) -> None:
        x, previous, targets = self._learned
        order = torch.randperm(len(x), generator=self._generator)
        batches = torch.split(order, min(self._training.batch_tokens, max(16, len(x) // 32)))
        for number, batch in enumerate(batches):
            done = (epoch - 1 + number / len(batches)) / self._training.max_epochs
            rate = self._rate * (1 + math.cos(math.pi * done)) / 2
            loss = _loss(self._logits(x[batch], previous[batch]), targets[batch])
            adam.step(torch.autograd.grad(loss, self._layers), rate)

    @torch.no_grad()
    def _validate(self) -> tuple[float, float]:
        """Returns recall and negative loss on the validation tokens: larger is better."""
        x, previous, targets = self._validating
        blocks = zip(torch.split(x, BLOCK_TOKENS), torch.split(previous, BLOCK_TOKENS), strict=True)
        logits = torch.cat([self._logits(*block) for block in blocks])
        loss = float(_loss(logits, targets))
        if not math.isfinite(loss):
            raise formats.RunError(_NOT_FINITE)
        return recall_precision(logits, targets, targets.shape[1])[0], -loss

    def _logits(self, x: Tensor, previous: Tensor) -> Tensor:
        routes = routing_file.multi_hot(previous, self._num_experts)
        return routing_file.network_logits(self._layers, self._standard.of(x), routes)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = routing_file.multi_hot(targets[:, None], logits.shape[1])
    return functional.binary_cross_entropy_with_logits(logits, chosen)


MAX_LEARNED_TOKENS = 8192  # twice as many raised recall by less than a point on the small models
MAX_JUDGED_TOKENS = 4096
_NEURON_TOKENS = 256  # of an expert
_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class LayerPredictors:
    """How well the experts and neurons of one MoE layer can be predicted, on held-out tokens."""

    # f32 [6, 3]: for each of `PREDICTORS`, the recall of k predicted experts (which is their precision, too), then
    # recall and precision of 2k; NaN for a partial state of a layer that does not follow a MoE layer.
    experts: forward.Array
    # f32 [3, 4, 2]: recall and precision of the neurons that run, by selector kind (up, gate, both) and sparsity; NaN
    # if no held-out token reached an expert.
    neurons: forward.Array
    best: forward.Array  # u8 [1]: number of the best of PREDICTORS
    network: offload.Predictor  # the better of the two networks, whose weights are stored with the others

    def arrays(self) -> dict[str, forward.Array]:
        """Returns all arrays by name, as stored."""
        return {"experts": self.experts, "neurons": self.neurons, "best": self.best} | self.network.stored()

    @classmethod
    def from_arrays(cls, arrays: dict[str, forward.Array], place: str) -> "LayerPredictors":
        """Returns the predictors in a layer's file; PackError if an array is not as expected."""
        expected = {
            "experts": store.ArrayRule("F32", (len(offload.PREDICTORS), 3), 0, 1, has_nan=True),
            "neurons": store.ArrayRule("F32", (len(forward.KINDS), len(forward.HOT_SPARSITIES), 2), 0, 1, has_nan=True),
            "best": store.ArrayRule("U8", (1,), most=len(offload.PREDICTORS) - 1),
        }
        network = {name: array for name, array in arrays.items() if name.endswith(("weight", "bias"))}
        store.check_arrays({name: array for name, array in arrays.items() if name not in network}, expected, place)
        figures = {name: arrays[name] for name in expected}
        return cls(**figures, network=offload.Predictor.from_stored(network, place))


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """A MoE layer's inputs float32 [T, d] and routes int64 [T, k], of tokens to learn from and to judge on."""

    learned: Tensor
    judged: Tensor
    learned_routes: Tensor
    judged_routes: Tensor


def predict_layer(
    weights: model.Weights,
    layer_idx: int,
    history: list[LayerInputs],
    paths: offload.PathStatistics,
    thresholds: forward.Array,
    device: torch.device,
    partial_scores: Tensor | None = None,
) -> LayerPredictors:
    """Trains the networks of a MoE layer and judges all its predictors.

    Args:    layer_idx: of the MoE layer, 1 or more.   history: at most two layers before it, then the layer itself.
             paths: not learned from held-out tokens.   thresholds: float32 [E, kinds, sparsities], on abs(a).
             partial_scores: float32 [T, E] of the judged tokens.
    """
    before, own = history[:-1], history[-1]
    x, learned = before[-1].learned, torch.stack([layer.learned_routes for layer in before], dim=1)  # [T, P, k]
    E = weights.spec.router.num_experts
    networks = [train(x, learned, own.learned_routes, E, shape, _SEED) for shape in shapes_for(x.shape[1], E)]
    previous = torch.stack([layer.judged_routes for layer in before], dim=1)
    scores = [
        *_scores_by_routes(layer_idx, paths, previous.numpy()),
        model.router_scores(before[-1].judged.to(device), weights, weights.spec.moe_layers[layer_idx]).cpu(),
        *(network.scores(before[-1].judged, previous) for network in networks),
        *(() if partial_scores is None else (partial_scores,)),
    ]
    figures = [_recalls(predicted, own.judged_routes) for predicted in scores]
    if partial_scores is None:
        figures.append((math.nan, math.nan, math.nan))
    experts = np.asarray(figures, np.float32)
    first_network = offload.PREDICTORS.index("MLP of one layer")
    best_network = networks[int(experts[first_network : first_network + len(networks), 0].argmax())]
    return LayerPredictors(
        experts=experts,
        neurons=_judge_neurons(weights, layer_idx, before[-1], own, thresholds, device),
        best=np.asarray([np.nanargmax(experts[:, 0])], np.uint8),
        network=best_network,
    )


def judge_by_routes(layer_idx: int, paths: offload.PathStatistics, history: list[Tensor]) -> forward.Array:
    """Returns the recalls [2, 3] of popularity and path statistics, by routes [T, k] of two layers before and own."""
    *before, own = history
    previous = torch.stack(before, dim=1).numpy()
    return np.asarray([_recalls(scores, own) for scores in _scores_by_routes(layer_idx, paths, previous)], np.float32)


def _scores_by_routes(layer_idx: int, paths: offload.PathStatistics, previous: forward.Array) -> tuple[Tensor, Tensor]:
    """Returns the scores [T, E] of popularity and of path statistics after the routes [T, P, k]."""
    shares = np.tile(paths.popularity[layer_idx].astype(np.float32), (len(previous), 1))
    likely, _ = paths.predict(layer_idx, previous)
    return torch.from_numpy(shares), torch.from_numpy(likely)


def _recalls(predicted: Tensor, routes: Tensor) -> tuple[float, float, float]:
    """Returns the recall of k predicted experts, then recall and precision of 2k."""
    k = routes.shape[1]
    recall, _ = recall_precision(predicted, routes, k)
    return recall, *recall_precision(predicted, routes, 2 * k)


@torch.inference_mode()
def _judge_neurons(
    weights: model.Weights,
    layer_idx: int,
    before: LayerInputs,
    own: LayerInputs,
    thresholds: forward.Array,
    device: torch.device,
) -> forward.Array:
    counts = [[MaskCounts() for _ in forward.HOT_SPARSITIES] for _ in forward.KINDS]
    function = weights.spec.expert_function(layer_idx)
    for expert in range(weights.spec.router.num_experts):
        token_idx = (own.judged_routes == expert).any(dim=1).nonzero().flatten()
        token_idx = token_idx[forward.sample_places(len(token_idx), _NEURON_TOKENS)]
        inputs = [layer.judged[token_idx].to(device) for layer in (before, own)]
        for block in weights.expert(layer_idx, expert).blocks() if len(token_idx) else ():
            early, late = (model.activations(x, block, function) for x in inputs)
            for kind, selector in enumerate(forward.KINDS):
                predicted, actual = early.of(selector).abs(), late.of(selector).abs()
                for level, threshold in enumerate(thresholds[expert, kind].tolist()):
                    counts[kind][level] += mask_counts(predicted >= threshold, actual >= threshold)
    return np.asarray(
        [[(c.recall, c.precision) if c.num_actual else (np.nan, np.nan) for c in row] for row in counts], np.float32
    )


_PIECE_TOKENS = 2048  # compared at once


@dataclass(frozen=True, slots=True)
class Shares:
    """The sequences that predictors learn from, the first `num_learned`, and are judged on, the last `num_judged`."""

    num_sequences: int
    sequence_length: int
    num_learned: int
    num_judged: int

    @classmethod
    def of(cls, num_sequences: int, sequence_length: int, num_held_out: int) -> "Shares":
        """Returns as many sequences as predictors take; they learn from none that is held out."""
        learned = min(num_sequences - num_held_out, -(-MAX_LEARNED_TOKENS // sequence_length))
        return cls(num_sequences, sequence_length, learned, min(num_held_out, -(-MAX_JUDGED_TOKENS // sequence_length)))

    def tokens(self) -> tuple[slice, slice]:
        """Returns the places of the tokens to learn from and to judge on, among all tokens."""
        S, end = self.sequence_length, self.num_sequences * self.sequence_length
        return slice(0, self.num_learned * S), slice(end - self.num_judged * S, end)


class InputFiles:
    """The files `inputs-*` in `folder`, with float32 rows of `hidden_size`; `first_layers` begin a stack."""

    def __init__(
        self,
        folder: Path,
        hidden_size: int,
        shares: Shares,
        first_layers: Collection[int] = (0,),
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        self._results = results
        self._first_layers = first_layers
        self.shares = shares
        self._folder = folder
        self._hidden_size = hidden_size

    def keep(self, layer_idx: int, inputs: Tensor) -> tuple[float, float]:
        """Writes a layer's inputs [T, d]; returns mean and deviation of the cosine with the layer before, or NaN."""
        learned, judged = self.shares.tokens()
        self._write(self._folder / f"inputs-{layer_idx:03d}.bin", inputs[learned], inputs[judged])
        cosine = (math.nan, math.nan) if layer_idx in self._first_layers else self._cosine(layer_idx, inputs)
        self._write(self._whole(layer_idx), inputs)
        if layer_idx > 1:  # the file before this one is needed if this layer is repeated
            self._whole(layer_idx - 2).unlink(missing_ok=True)
        return cosine

    def read(self, layer_idx: int, routes: Tensor) -> LayerInputs:
        """Maps a layer's inputs for predictors from the file; adds their part of all `routes` int64 [T, k]."""
        # Mapped copy-on-write because torch refuses read-only arrays; nothing writes to it.
        mapped = np.memmap(self._folder / f"inputs-{layer_idx:03d}.bin", np.float32, "c")
        rows = torch.from_numpy(mapped).view(-1, self._hidden_size)
        learned, judged = self.shares.tokens()
        number = learned.stop - learned.start
        return LayerInputs(rows[:number], rows[number:], routes[learned], routes[judged])

    def _cosine(self, layer_idx: int, inputs: Tensor) -> tuple[float, float]:
        cosines = []
        with self._whole(layer_idx - 1).open("rb") as file:
            for piece in torch.split(inputs, _PIECE_TOKENS):
                before = torch.from_numpy(np.fromfile(file, np.float32, piece.numel())).view_as(piece)
                product = (piece * before).sum(dim=1)  # [n]
                lengths = (piece.square().sum(dim=1) * before.square().sum(dim=1)).sqrt()
                cosines.append(product / lengths.clamp(min=torch.finfo(torch.float32).tiny))
        all_cosines = torch.cat(cosines).to(torch.float64)
        return float(all_cosines.mean()), float(all_cosines.std(correction=0))

    def _whole(self, layer_idx: int) -> Path:
        return self._folder / f"inputs-whole-{layer_idx:03d}.bin"

    def _write(self, path: Path, *pieces: Tensor) -> None:
        unfinished = path.with_name(self._results.own_name(f"{path.stem}.tmp"))
        with unfinished.open("wb") as file:
            for piece in pieces:
                piece.numpy().tofile(file)
        self._results.publish(unfinished, path)
