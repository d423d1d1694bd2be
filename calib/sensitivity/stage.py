"""The sensitivity stage: the cost of each matrix at each width, as the KL divergence of the model's predictions.

The pass takes some sequences through the model, and with them *copies* of the first ones. A copy begins where something
was changed (a layer's experts at 2 bits, its dense matrices at 4) and goes through the unchanged rest of the model. At
the end, its KL divergence from the original says what a squared error in that layer does to predictions. Errors of
single matrices are measured on the output of their layer. KL grows with the square of a small error, and errors of
different matrices, experts and layers are nearly independent. So estimated KLs add.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.forward import (
    CHUNK_TOKENS,
    MAX_MEMORY_BYTES,
    Array,
    KeptInputs,
    LayerStates,
    LayerTokens,
    LayerwiseWeights,
    Sequences,
    sample_places,
)
from moe_pack.calib.sensitivity.costs import (
    Cost,
    Trial,
    compared_multiplications,
    expert_multiplications,
    half_multiplications,
    kind_of,
    kinds_of_layers,
)
from moe_pack.calib.sensitivity.effects import (
    DENSE_WIDTHS,
    Divergences,
    LayerErrors,
    Level,
    all_copies,
    copies_of,
    divergence,
    head_pieces,
    likelihood_lost,
    log_probabilities,
)
from moe_pack.calib.sensitivity.errors import (
    QUANTIZED,
    SPARSE,
    Change,
    RoundedDense,
    Rounding,
    calibrated_multiplications,
    calibrated_ratios,
    format_ratios,
    mean_square,
    output_changes,
    ratios_of_widths,
    roundable_roles,
)
from moe_pack.formats import NO_PROGRESS, Progress
from moe_pack.runtime.model import embed, run_expert

_FAST_TOKENS, _FULL_TOKENS = 256, 512  # of an expert, to measure errors on
_MOST_COPY_TOKENS, _LEAST_COPY_TOKENS = 2048, 512  # of a copy: fewer in deep models, where copies are many
_TRIED_TOKENS = 512
_HEAD_TOKENS = 256  # to judge a rounded head on
CHANGES_BYTES = 128 << 20  # of changed outputs at once
DELTA_BYTES = 128 << 20  # of new copies' changes in memory
ARRAY_BYTES = MAX_MEMORY_BYTES - CHANGES_BYTES - DELTA_BYTES  # of a layer's arrays: they grow with the copies
_CHANGES_COST = 11  # `output_changes` multiplies about as much as this many runs of the expert


class SensitivityPass:
    """Runs the stage layer by layer. `states` says how far it is.

    `ids` int64 [N, n]: the tokens of the decoder (`Sequences`).
    Args:    ids: int64 [N, S], all sequences of the profile; the pass uses as many of the first as it needs.
             thresholds: returns, for a MoE layer index, quantiles of abs(a), float32 [E, kinds, sparsities].
             kept: the inputs of experts to calibrate on; None if none are kept.
             folder: for hidden states; a killed pass goes on there.
    """

    def __init__(
        self,
        weights: LayerwiseWeights,
        ids: Tensor,
        level: Level,
        thresholds: Callable[[int], Array],
        folder: Path,
        device: torch.device,
        kept: KeptInputs | None = None,
    ) -> None:
        spec = weights.spec
        self.weights = weights
        self.kept = kept
        self.spec = spec
        given = Sequences.of(spec, ids)
        self.ids = given.ids
        self.level: Level = level
        self.thresholds = thresholds
        self.device = device
        self.plain = Rounding("nearest")
        self.solved = Rounding("hqq")
        self.rounding = self.solved if level == "full" else self.plain
        self.expert_tokens = _FULL_TOKENS if level == "full" else _FAST_TOKENS
        S = given.length
        # Three copies a layer on half of the layers each: this keeps them within about twice the statistics' pass.
        copied = 4 * given.ids.numel() // (3 * spec.num_hidden_layers)
        copied = min(max(copied, _LEAST_COPY_TOKENS), _MOST_COPY_TOKENS)
        self.num_copied = min(len(ids), -(-copied // S))  # sequences
        wanted = self.expert_tokens * spec.router.num_experts // spec.router.num_experts_per_tok
        self.num_base = min(len(ids), max(self.num_copied, -(-wanted // S)))
        embeddings = copies_of(spec, level, None)
        rounded = [RoundedDense(weights, ("embed",), copy.width, self.plain) for copy in embeddings]

        def embedded(ids: Tensor, number: int) -> Tensor:
            if number < self.num_base:
                return embed(ids[number], weights)
            copy, place = divmod(number - self.num_base, self.num_copied)
            return embed(ids[place], rounded[copy])

        def origin(branched: int) -> int:
            return (branched - self.num_base) % self.num_copied

        num_sequences = self.num_base + len(embeddings) * self.num_copied
        first, answer = given.begun(embedded)
        self.states = LayerStates(
            weights, first, num_sequences, S, folder, device, ARRAY_BYTES, answer=answer, origin=origin
        )

    @property
    def num_copy_tokens(self) -> int:
        """The number of tokens of one copy."""
        return self.num_copied * self.states.sequence_length

    @property
    def usual_tokens(self) -> int:
        """The number of tokens that errors are measured on, for an expert of average popularity."""
        router = self.spec.router
        return max(self.expert_tokens, self.num_copy_tokens * router.num_experts_per_tok // router.num_experts)

    @property
    def changed_tokens(self) -> int:
        """The number of an expert's tokens whose changed outputs are in memory at once."""
        one = 4 * (len(QUANTIZED) + len(SPARSE)) * self.spec.hidden_size  # bytes of all changes of a token's output
        return max(1, CHANGES_BYTES // one)

    @property
    def compared_tokens(self) -> int:
        """The number of tokens that formats are compared on, for an expert of average popularity."""
        return min(self.usual_tokens, self.changed_tokens, self.num_base * self.states.sequence_length)

    @torch.inference_mode()
    def layer(self, layer: int, progress: Progress = NO_PROGRESS) -> LayerErrors:
        """Takes all sequences through the next layer and measures; after it `leave` begins the layer's copies."""
        spec, states = self.spec, self.states
        roles = roundable_roles(spec, layer)
        begun = copies_of(spec, self.level, layer)
        originals = [states.half(layer, number, self.weights)[0] for number in range(self.num_copied) if roles]
        dense_errors = [[self._dense_error(layer, originals, r, width) for width in DENSE_WIDTHS] for r in roles]
        del originals
        branches = [
            (RoundedDense(self.weights, roles, copy.width, self.plain), self.num_copied)
            for copy in begun
            if copy.kind == "dense"
        ]
        num_before = states.num_sequences
        tokens = states.enter(layer, branches)
        half = half_multiplications(spec, layer, states.sequence_length)
        progress.advance(half * (len(tokens.x) + self._tried_tokens(layer)), f"layer {layer}")
        errors = [self._branch_error(tokens, num_before)] if branches else []
        deltas = self._allocate_deltas(sum(copy.kind == "experts" for copy in begun))
        quantized, sparse, ratios, calibrated = (torch.zeros(0) for _ in range(4))
        if layer in spec.moe_layers:
            changes = [copy.changes for copy in begun if copy.kind == "experts"]
            experts = _Experts(self, layer, tokens, changes, deltas)
            quantized, sparse, ratios, calibrated = experts.measure(progress)
        errors += [float(delta.square().mean()) for delta in deltas]
        self._measured = tokens, deltas
        return LayerErrors(
            dense=np.asarray(dense_errors, np.float32).reshape(len(roles), len(DENSE_WIDTHS)),
            copies=np.asarray(errors, np.float32),
            quantized=quantized.numpy(),
            sparse=sparse.numpy(),
            ratios=ratios.numpy(),
            calibrated=calibrated.numpy(),
        )

    def _allocate_deltas(self, number: int) -> list[Tensor]:
        """Returns this many zeros float32 [copied tokens, d], in mapped files if they take much memory."""
        mapped = 4 * number * self.num_copy_tokens * self.spec.hidden_size > DELTA_BYTES
        return [self.states.allocate(f"delta-{i}", self.num_copy_tokens, mapped).zero_() for i in range(number)]

    def leave(self, layer: int) -> None:
        """Ends the layer that was measured last; the caller has stored the result of `layer`."""
        tokens, deltas = self._measured
        self.states.leave(layer, tokens, (tokens.x[: self.num_copy_tokens] + delta for delta in deltas))
        del self._measured

    def cost(self, layers: range) -> Cost:
        """Returns the estimated cost of these layers, with the divergences after them."""
        spec, trial = self.spec, Trial(self.weights, self.states)
        router = spec.router
        halves = {kind: trial.half(kind) for kind in kinds_of_layers(spec)}
        plain = trial.plain(_TRIED_TOKENS)
        self.solved(torch.zeros((1, 64)), 4)  # loads the package hqq, which takes longer than its work
        number = self.usual_tokens
        at_once = min(number, self.changed_tokens)
        changed = trial.changed(at_once, self.rounding) * (number / at_once)
        compared = trial.compared(self.compared_tokens, self.rounding)
        if self.kept is not None:
            compared += trial.calibrated(self.compared_tokens, self.rounding)
        total = trial.predicted(self.num_copy_tokens) * (1 + len(all_copies(spec, self.level)))
        num_sequences = self.states.num_sequences
        for layer in layers:
            begun = copies_of(spec, self.level, layer)
            num_sequences += self.num_copied * sum(copy.kind == "dense" for copy in begun)
            tried = self._tried_tokens(layer) / self.states.sequence_length
            total += halves[kind_of(spec, layer)] * (num_sequences + tried)
            if layer in spec.moe_layers:
                tokens = num_sequences * self.states.sequence_length * router.num_experts_per_tok
                total += plain * (tokens / _TRIED_TOKENS) + changed * router.num_experts + compared
            num_sequences += self.num_copied * sum(copy.kind == "experts" for copy in begun)
        return total

    def _tried_tokens(self, layer: int) -> int:
        """Returns how many tokens go through a layer's first half again, to measure its dense matrices."""
        number = len(roundable_roles(self.spec, layer))
        return (number * len(DENSE_WIDTHS) + (number > 0)) * self.num_copy_tokens

    @torch.inference_mode()
    def divergences(self, progress: Progress = NO_PROGRESS) -> Divergences:
        """Returns the divergences of the copies' predictions, and of those with the head at 8 and 4 bits.

        A head that is also the embedding is changed as the head only. A head that cannot be quantized has 0.
        """
        copies = all_copies(self.spec, self.level)
        sums = np.zeros((2, len(copies)))  # of KL, of log-likelihood lost
        for number in range(self.num_copied):
            base, next_ids = self.states.before(number), self.ids[number, 1:]
            copied = [self.states.before(self._number_of(copy, number)) for copy in range(len(copies))]
            for rows in head_pieces(0, len(base), self.spec.vocab_size):
                original = self._log_probabilities(base[rows], self.weights)
                for copy, hidden in enumerate(copied):
                    changed = self._log_probabilities(hidden[rows], self.weights)
                    sums[0, copy] += divergence(original, changed)
                    sums[1, copy] += likelihood_lost(original, changed, next_ids[rows])
            done = len(base) * (1 + len(copies)) * self.spec.hidden_size * self.spec.vocab_size
            progress.advance(done, "predictions")
        num_judged = self.num_copied * (self.states.sequence_length - 1)  # the last tokens have none after them
        kls, nlls = sums[0] / self.num_copy_tokens, sums[1] / max(num_judged, 1)
        return Divergences(kls.astype(np.float32), nlls.astype(np.float32), self._head_divergences(), num_judged)

    def _number_of(self, copy: int, number: int) -> int:
        return self.num_base + copy * self.num_copied + number

    def _head_divergences(self) -> Array:
        kls = np.zeros(len(DENSE_WIDTHS), np.float32)
        role = "embed" if self.spec.tied_head else "head"
        if role not in roundable_roles(self.spec, None):
            return kls
        hidden = self.states.before(0)[:_HEAD_TOKENS]
        copies = [RoundedDense(self.weights, (role,), width, self.plain) for width in DENSE_WIDTHS]
        for rows in head_pieces(0, len(hidden), self.spec.vocab_size):
            original = self._log_probabilities(hidden[rows], self.weights)
            for idx, rounded in enumerate(copies):
                kls[idx] += divergence(original, self._log_probabilities(hidden[rows], rounded)) / len(hidden)
        return kls

    def _log_probabilities(self, hidden: Tensor, weights: LayerwiseWeights | RoundedDense) -> Tensor:
        return log_probabilities(hidden, weights, self.device)

    def _dense_error(self, layer: int, originals: list[Tensor], role: str, width: int) -> float:
        """Returns the mean squared change of the copied sequences' hidden states by one dense matrix at this width."""
        rounded, total = RoundedDense(self.weights, (role,), width, self.plain), 0.0
        for number, original in enumerate(originals):
            changed, _ = self.states.half(layer, number, rounded)
            total += float((changed - original).square().mean())
        return total / self.num_copied

    def _branch_error(self, tokens: LayerTokens, num_before: int) -> float:
        start = num_before * self.states.sequence_length
        changed = tokens.x[start : start + self.num_copy_tokens]
        return float((changed - tokens.x[: self.num_copy_tokens]).square().mean())


class _Experts:
    """A layer's routed experts: runs them for all tokens and measures them on some of the original's."""

    def __init__(
        self,
        stage: SensitivityPass,
        layer: int,
        tokens: LayerTokens,
        changes: list[tuple[Change, ...]],
        deltas: list[Tensor],
    ) -> None:
        self._stage = stage
        self._tokens = tokens
        self._changes = changes
        self._deltas = deltas
        self._layer = layer
        self._layer_idx = stage.spec.moe_layers.index(layer)
        self._num_base_tokens = stage.num_base * stage.states.sequence_length
        self._thresholds = torch.from_numpy(stage.thresholds(self._layer_idx)).to(stage.device)
        self._chunk = stage.changed_tokens

    def measure(self, progress: Progress) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs and measures all experts; returns `quantized`, `sparse`, `ratios` and `calibrated` of `LayerErrors`."""
        spec = self._stage.spec
        reached = [self._tokens.of_expert(expert)[0] for expert in range(spec.router.num_experts)]
        num_tokens = [len(token_idx) for token_idx in reached]
        popular = int(np.argmax([int((token_idx < self._num_base_tokens).sum()) for token_idx in reached]))
        del reached
        ratios, calibrated = self._ratios(popular, progress), self._calibrated(popular, progress)
        # Of the measured errors to hqq's: `full` measures those of hqq itself, whose ratios are 1.
        ratio = torch.from_numpy(ratios_of_widths(ratios.numpy(), spec.hidden_size)).flatten()
        quantized, sparse = [], []
        for expert in range(spec.router.num_experts):
            self._run(expert)
            expert_quantized, expert_sparse = self._measure_expert(expert, ratio)
            quantized.append(expert_quantized)
            sparse.append(expert_sparse)
            work = expert_multiplications(spec) * (num_tokens[expert] + _CHANGES_COST * self._stage.usual_tokens)
            progress.advance(work, f"layer {self._layer} expert {expert}")
        # [E, changes] -> [E, matrices, widths] and [E, kinds, sparsities]
        return torch.stack(quantized).view(-1, 3, 4), torch.stack(sparse).view(-1, 3, 4), ratios, calibrated

    def _run(self, expert: int) -> None:
        """Adds the expert's outputs for the tokens of all sequences, copies included."""
        stage = self._stage
        token_idx, weights = self._tokens.of_expert(expert)
        for start in range(0, len(token_idx), CHUNK_TOKENS):
            chunk = token_idx[start : start + CHUNK_TOKENS]
            x = self._tokens.inputs[chunk].to(stage.device)
            output = run_expert(
                x, stage.weights.expert(self._layer_idx, expert), stage.spec.expert.function, "none", 0.0
            )
            stage.states.add(self._tokens, chunk, weights[start : start + CHUNK_TOKENS], output)

    def _sample(self, expert: int) -> tuple[Tensor, Tensor, int]:
        """Returns the tokens that errors are measured on, those of the copies first, and their router weights.

        The third value is how many of the original's tokens the expert has in all.
        """
        stage = self._stage
        token_idx, weights = self._tokens.of_expert(expert)
        num_tokens = int((token_idx < self._num_base_tokens).sum())
        num_copied = int((token_idx < stage.num_copy_tokens).sum())
        more = sample_places(num_tokens - num_copied, max(stage.expert_tokens - num_copied, 0)) + num_copied
        places = torch.cat((torch.arange(num_copied), more))
        return token_idx[places], weights[places], num_tokens

    def _ratios(self, expert: int, progress: Progress) -> Tensor:
        """Returns the errors of an expert in every format over the measured ones: float32 [3, F]."""
        stage = self._stage
        token_idx, weights, _ = self._sample(expert)
        token_idx, weights = token_idx[: self._chunk], weights[: self._chunk]
        x = self._tokens.inputs[token_idx].to(stage.device)
        weights = weights.to(x.device)
        model_expert = stage.weights.expert(self._layer_idx, expert)
        ratios = format_ratios(model_expert, stage.spec.expert.function, x, weights, stage.rounding).cpu()
        progress.advance(compared_multiplications(stage.spec, stage.compared_tokens), f"layer {self._layer} formats")
        return ratios

    def _calibrated(self, expert: int, progress: Progress) -> Tensor:
        """Returns the same for the calibrated quantizer, float32 [3, C], judged on other tokens; [0] without inputs."""
        stage, kept = self._stage, self._stage.kept
        if kept is None:
            return torch.zeros(0)
        num_judged, first_kept = kept.split(self._num_base_tokens)
        token_idx, weights, _ = self._sample(expert)
        judged = (token_idx < num_judged).nonzero()[: self._chunk, 0]
        x = self._tokens.inputs[token_idx[judged]].to(stage.device)
        with kept.open(self._layer_idx) as inputs:
            tokens = inputs.of_expert(expert, first_kept)
        weights = weights[judged].to(x.device)
        model_expert, function = stage.weights.expert(self._layer_idx, expert), stage.spec.expert.function
        ratios = calibrated_ratios(model_expert, function, x, weights, stage.rounding, tokens).cpu()
        progress.advance(
            calibrated_multiplications(stage.spec, stage.compared_tokens), f"layer {self._layer} calibrated formats"
        )
        return ratios

    def _measure_expert(self, expert: int, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Returns errors for a token, float32 [len(QUANTIZED)] and [len(SPARSE)]; adds to the copies' deltas."""
        stage = self._stage
        token_idx, weights, num_tokens = self._sample(expert)
        if not num_tokens:
            return torch.zeros(len(QUANTIZED)), torch.zeros(len(SPARSE))
        scaled = weights * stage.spec.residual_multiplier
        sums = torch.zeros(len(QUANTIZED)), torch.zeros(len(SPARSE))
        size = dict(zip(QUANTIZED, ratio.sqrt().tolist(), strict=True))
        for idx, part in zip(torch.split(token_idx, self._chunk), torch.split(scaled, self._chunk), strict=True):
            x = self._tokens.inputs[idx].to(stage.device)
            model_expert, function = stage.weights.expert(self._layer_idx, expert), stage.spec.expert.function
            changes = output_changes(model_expert, function, x, stage.rounding, self._thresholds[expert])
            for total, outputs in zip(sums, changes, strict=True):
                total += mean_square(outputs, part.to(stage.device)).cpu() * (len(idx) / len(token_idx))
            self._add_to_copies(idx, part, changes, size)
        share = num_tokens / self._num_base_tokens
        return sums[0] * ratio * share, sums[1] * share

    def _add_to_copies(
        self, token_idx: Tensor, weights: Tensor, outputs: tuple[Tensor, Tensor], size: dict[Change, float]
    ) -> None:
        """Adds changes of outputs to the copies that begin with them; `size` scales those of quantization."""
        quantized, sparse = outputs
        copied = token_idx < self._stage.num_copy_tokens
        for changes, delta in zip(self._changes, self._deltas, strict=True):
            for change in changes:
                changed = quantized[QUANTIZED.index(change)] if change in size else sparse[SPARSE.index(change)]
                output = changed.cpu()[copied] * (weights[copied, None] * size.get(change, 1.0))
                delta.index_add_(0, token_idx[copied], output)
