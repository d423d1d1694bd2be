"""Estimates the cost of a stage of calibration before it begins: multiplications, and seconds on this machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from moe_pack.calib import forward, quantize, statistics
from moe_pack.calib.sensitivity import effects, errors, gradients
from moe_pack.calib.statistics import cost as training_cost
from moe_pack.formats.base import commands
from moe_pack.formats.pack import plans
from moe_pack.formats.parts import specs
from moe_pack.runtime import model

_TRIED_TOKENS = 512
_LONG_SECONDS = 1.0  # work that takes this long is measured once
_MOST_TRIES, _ENOUGH_SECONDS = 5, 0.2  # for shorter work: single tries vary by a factor of two


@dataclass(frozen=True, slots=True)
class Cost:
    """Multiplications, estimated seconds, and the bytes of large files that a stage leaves on disk."""

    multiplications: int = 0
    seconds: float = 0.0
    kept_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.multiplications + other.multiplications,
            self.seconds + other.seconds,
            self.kept_bytes + other.kept_bytes,
        )

    def __mul__(self, number: float) -> "Cost":
        return Cost(round(self.multiplications * number), self.seconds * number, round(self.kept_bytes * number))

    def stage(self, name: str, is_most: bool = False) -> commands.Stage:
        """Returns a stage of this cost, whose note announces it; `is_most`: it may end much earlier."""
        estimate = f", {'at most' if is_most else 'about'} {commands.time_text(self.seconds)}" if self.seconds else ""
        kept = f", {commands.size_text(self.kept_bytes)} on disk for experts' inputs" if self.kept_bytes else ""
        note = f"{self.multiplications / 1e9:,.1f} G multiplications{estimate}{kept}"
        return commands.Stage(name, self.multiplications, "mul", seconds=0.0 if is_most else self.seconds, note=note)


def stage_of_phases(name: str, phases: Mapping[str, Cost]) -> commands.Stage:
    """Returns a stage whose phases take unlike times for a multiplication; `advance` names them as its kinds."""
    kinds = tuple(
        commands.Kind(phase, cost.multiplications, cost=cost.seconds / max(cost.multiplications, 1))
        for phase, cost in phases.items()
    )
    return replace(sum(phases.values(), start=Cost()).stage(name), kinds=kinds)


def half_multiplications(spec: specs.ModelSpec, layer: int, sequence_length: int) -> int:
    """Returns the multiplications a token of everything but the routed experts in a layer."""
    matrices = [r for r in specs.dense_roles(spec) if r.name.startswith(f"layers.{layer}.") and len(r.shape) == 2]
    matrix_multiplications = sum(role.shape[0] * role.shape[1] for role in matrices)
    if (mixer := spec.mixer_of(layer)) is not None:
        return matrix_multiplications + 3 * mixer.state.num_values
    if not spec.has_first(layer):
        return matrix_multiplications
    attended = 1 if spec.encoder is None else 2 + forward.stack_of(spec, layer)  # halves of a sequence
    return matrix_multiplications + attended * sequence_length * spec.hidden_size


def expert_multiplications(spec: specs.ModelSpec) -> int:
    """Returns the multiplications of one expert for one token."""
    return len(spec.expert.matrices) * spec.hidden_size * spec.expert.intermediate_size


def prediction_cost(spec: specs.ModelSpec, num_tokens: int) -> Cost:
    """Returns the most that training one layer's predictors on this many tokens costs; an epoch of each is timed."""
    d, E, k = spec.hidden_size, spec.router.num_experts, spec.router.num_experts_per_tok
    tried = min(num_tokens, _TRIED_TOKENS)
    x, routes = torch.randn(tried, d), torch.rand(tried, E).argsort(dim=1)[:, :k]
    total = Cost()
    for shape in statistics.shapes_for(d, E):
        once = replace(statistics.USUAL_TRAINING, max_epochs=1)
        seconds = _seconds(partial(statistics.train, x, routes[:, None], routes, E, shape, 0, once))
        epochs = statistics.USUAL_TRAINING.max_epochs * num_tokens / tried
        total += Cost(training_cost(shape, num_tokens, d, E), seconds * epochs)
    return total


def kind_of(spec: specs.ModelSpec, layer: int) -> int:
    """Returns the first layer of the same cost as this one: alike in experts, attention or mixer, n-grams and stack."""

    def kind(layer: int) -> tuple[int, ...]:
        halves = spec.has_first(layer), spec.has_second(layer)
        first = -1 if spec.mixer_of(layer) is not None else spec.attention_kind(layer)
        return (*halves, layer in spec.moe_layers, first, spec.ngrams_of(layer) is None, forward.stack_of(spec, layer))

    return next(l for l in range(spec.num_hidden_layers) if kind(l) == kind(layer))


def kinds_of_layers(spec: specs.ModelSpec) -> set[int]:
    """Returns one layer of each cost."""
    return {kind_of(spec, layer) for layer in range(spec.num_hidden_layers)}


def layers_cost(trial: "Trial", layers: range, num_sequences: int, experts: Cost) -> Cost:
    """Returns the cost of some layers for sequences, with `experts` where a layer has some; times a layer a kind."""
    spec, total = trial.spec, Cost()
    halves = {kind: trial.half(kind) * num_sequences for kind in kinds_of_layers(spec)}
    for layer in layers:
        total += halves[kind_of(spec, layer)] + (experts if layer in spec.moe_layers else Cost())
    return total


class Trial:
    """The measured cost of each kind of work, on the first sequence of `states`."""

    def __init__(self, weights: model.Weights, states: forward.LayerStates) -> None:
        self._weights = weights
        self.spec = weights.spec
        self._function = weights.spec.expert_function(0)
        self._states = states

    @torch.inference_mode()
    def half(self, layer: int) -> Cost:
        """Returns the cost of one sequence in a layer without its routed experts."""
        S, x = self._states.sequence_length, self._states.before(0)
        context = self._context(layer, x)
        seconds = _seconds(lambda: self._states.half_of(layer, x, self._weights, context))
        return Cost(half_multiplications(self.spec, layer, S) * S, seconds)

    @torch.inference_mode()
    def counted(self, num_tokens: float) -> Cost:
        """Returns the cost of running an expert and counting its activations, for this many tokens."""
        f = self.spec.expert.intermediate_size

        def work(x: Tensor) -> object:
            expert, idx = self._weights.expert(0, 0), torch.arange(len(x))
            return forward.measure_expert(
                expert, self._function, x, idx, f, lambda places, output: None, device=x.device
            )

        return self._of_expert(num_tokens, work)

    @torch.inference_mode()
    def plain(self, num_tokens: float) -> Cost:
        """Returns the cost of running an expert, for this many tokens."""
        expert = self._weights.expert(0, 0)
        return self._of_expert(num_tokens, lambda x: model.run_expert(x, expert, self._function, "none", 0.0))

    def _of_expert(self, num_tokens: float, work: Callable[[Tensor], object]) -> Cost:
        x = self._random(max(1, min(round(num_tokens), _TRIED_TOKENS)))
        seconds = _seconds(lambda: work(x)) * num_tokens / len(x)
        return Cost(round(expert_multiplications(self.spec) * num_tokens), seconds)

    @torch.inference_mode()
    def half_back(self, layer: int) -> Cost:
        """Returns the cost of one sequence on the way back through a layer without its routed experts."""
        S, x = self._states.sequence_length, self._states.before(0)
        context = self._context(layer, x)
        above, weights = (x, x[:, : self.spec.hidden_size]), gradients.Tracked(self._weights)
        seconds = _seconds(lambda: gradients.half_gradient(self._states, layer, x, weights, above, context))
        return Cost(2 * half_multiplications(self.spec, layer, S) * S, seconds)

    @torch.inference_mode()
    def back(self, num_tokens: float) -> Cost:
        """Returns the cost of the way back through an expert; rounding takes the same time for any number of tokens."""
        number = max(1, round(num_tokens))
        x, weights, expert = self._random(number), torch.ones(number), self._weights.expert(0, 0)
        thresholds = torch.zeros((len(forward.KINDS), len(forward.HOT_SPARSITIES)), device=x.device)
        seconds = _seconds(
            lambda: gradients.expert_gradients(expert, self._function, x, weights.to(x.device), x, thresholds)
        )
        return Cost(2 * expert_multiplications(self.spec) * number, seconds)

    @torch.inference_mode()
    def compared(self, formats: Sequence[tuple[plans.Quantizer, plans.PartFormat]]) -> Cost:
        """Returns the cost of comparing some rows of an expert in formats with plain rounding."""
        block = errors.joined(errors.first_neurons(self._weights.expert(0, 0), errors.COMPARED_NEURONS))
        matrices = block.gate, block.up, block.down
        moments = [torch.ones(len(block.up), 1, device=block.up.device)] * len(specs.MATRICES)
        errors.Rounding("hqq")(torch.zeros((1, 64)), 4)  # loads the package hqq, which takes longer than its work
        return Cost(0, _seconds(lambda: errors.format_ratios(matrices, moments, formats)))

    @torch.inference_mode()
    def calibrated(self, num_tokens: int, formats: Sequence[plans.PartFormat]) -> Cost:
        """Returns the cost of judging the calibrated quantizer, on the most tokens it takes for calibration."""
        x, expert = self._random(num_tokens), self._weights.expert(0, 0)
        number = quantize.MAX_OWN_TOKENS + quantize.MAX_OTHER_TOKENS
        tokens = quantize.ExpertTokens(self._random(number).cpu(), torch.ones(number))
        weights = torch.ones(num_tokens, device=x.device)
        seconds = _seconds(lambda: errors.calibrated_ratios(expert, self._function, x, weights, tokens, formats))
        return Cost(0, seconds)

    @torch.inference_mode()
    def rounded(self, weights: model.Weights) -> Cost:
        """Returns the cost of reading one expert of these weights, which round it."""
        return Cost(0, _seconds(lambda: [None for _ in weights.expert(0, 0).blocks()]))

    @torch.inference_mode()
    def predicted(self, num_tokens: int) -> Cost:
        """Returns the cost of comparing the model's predictions for this many tokens with others."""
        num_tried = effects.head_tokens(self.spec.vocab_size)
        x = self._random(num_tried, self.spec.stream_width)
        others = effects.log_probabilities(x, self._weights, x.device)
        seconds = _seconds(lambda: effects.divergence(others, effects.log_probabilities(x, self._weights, x.device)))
        seconds *= num_tokens / num_tried
        return Cost(num_tokens * self.spec.hidden_size * self.spec.vocab_size, seconds)

    @torch.inference_mode()
    def predicted_back(self, num_tokens: int) -> Cost:
        """Returns the cost of the gradient of the model's predictions for this many tokens."""
        x = self._random(effects.head_tokens(self.spec.vocab_size), self.spec.stream_width)
        weights = gradients.Tracked(self._weights)
        generator = torch.Generator().manual_seed(0)
        seconds = _seconds(lambda: gradients.prediction_gradient(x, weights, generator)) * num_tokens / len(x)
        return Cost(2 * num_tokens * self.spec.hidden_size * self.spec.vocab_size, seconds)

    def _context(self, layer: int, x: Tensor) -> forward.Context:
        # The time does not depend on the encoder's output.
        return forward.Context(x if forward.stack_of(self.spec, layer) else None, ids=self._states.ids(0))

    def _random(self, num_tokens: int, width: int | None = None) -> Tensor:
        width = self.spec.hidden_size if width is None else width
        return torch.randn(num_tokens, width, device=self._states.device)


def _seconds(work: Callable[[], object]) -> float:
    """Returns the median time of some tries after a first one; long work has fewer tries."""
    tries: list[float] = []
    while len(tries) <= _MOST_TRIES and sum(tries[1:]) < _ENOUGH_SECONDS:
        began = time.perf_counter()
        work()
        tries.append(time.perf_counter() - began)
        if tries[0] > _LONG_SECONDS:
            return tries[0]
    return median(tries[1:])
