"""The prices of lossy choices for a finished pack: the loss that a choice adds on few tokens. The pack does not change.

Sparsity: another text runs through the pack with new thresholds and, for the expected predictions, with all neurons.
Substitution (`moe-run --substitute`): a text is decoded with memory for a part of the experts, without prefetch, which
would depend on the disk. Rounded inputs (`moe-run --numerics`): a text runs through the native kernels in each mode.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats, runtime
from moe_pack.calib import forward, sensitivity
from moe_pack.calib.evaluate import reference
from moe_pack.calib.evaluate.model_pass import ModelPass
from moe_pack.calib.evaluate.thresholds import ThresholdRule, find_thresholds
from moe_pack.calib.forward.shared import torch_threads
from moe_pack.runtime import cpu, model, offload, quality
from moe_pack.runtime.engine import numerics
from moe_pack.runtime.offload.budgets import page_sizes


def sparsity_prices(
    pack: formats.Pack,
    tokens: forward.Tokens,
    calibration: forward.Tokens,
    progress: formats.Progress,
    folder: Path,
    where: torch.device,
    operations: model.Operations,
) -> tuple[quality.SparsityPrice, ...]:
    """Measures the prices of `SPARSITIES` on `tokens`; thresholds are by `calibration`, work is in `folder`."""
    every = [np.zeros(pack.thresholds.shape, np.float32)]
    for sparsity in sensitivity.SPARSITIES:
        work = folder / f"thresholds-{sparsity:g}"
        every.append(find_thresholds(pack, calibration, ThresholdRule(sparsity), progress, work, where, operations)[0])
    facts = {"root": pack.manifest.root, "calibration": calibration.sha256, "text": tokens.sha256}
    with forward.work_store(folder / "passes", facts, removes=False) as store:
        passes = []
        for sparsity, thresholds in zip((0.0, *sensitivity.SPARSITIES), every, strict=True):
            weights = forward.LayerwiseWeights(_Rethresholded(pack, thresholds, where, operations))
            passes.append(ModelPass(weights, tokens, store, f"at-{sparsity:g}", where))
            passes[-1].run(f"predictions at {sparsity:.0%} sparsity", progress)
        return _judged(passes, tokens, progress)


class _Rethresholded(model.StreamedPackWeights):
    def __init__(
        self, pack: formats.Pack, thresholds: NDArray[np.float32], device: torch.device, operations: model.Operations
    ) -> None:
        super().__init__(pack, device, operations)
        self._thresholds = thresholds

    def threshold(self, layer_idx: int, expert: int) -> float:
        return float(self._thresholds[layer_idx, expert])


@torch.inference_mode()
def _judged(
    passes: list[ModelPass], tokens: forward.Tokens, progress: formats.Progress
) -> tuple[quality.SparsityPrice, ...]:
    """Returns the prices after all layers are done; the first pass has the expected predictions."""
    first, others = passes[0], passes[1:]
    cost = first.prediction_cost() * len(passes)
    progress.begin(cost.stage("predictions"))
    losses: list[list[Tensor]] = [[] for _ in others]  # float64 [2, n]: KL, and likelihood lost
    for number, sequence in enumerate(first.predicted):
        for rows in first.pieces():
            expected = first.predictions(number, rows)
            likely = reference.next_log_probs(expected, sequence, rows)
            for row, other in zip(losses, others, strict=True):
                log_probs = other.predictions(number, rows)
                lost = likely - reference.next_log_probs(log_probs, sequence, rows)
                row.append(torch.stack([reference.whole_divergence(expected, log_probs), lost.double()]))
        progress.advance(cost.multiplications // len(tokens.sequences), f"sequence {number}")
    progress.end()
    return tuple(
        quality.SparsityPrice(sparsity, other.sparsity().overall, *estimates(torch.cat(row, dim=1)))
        for sparsity, other, row in zip(sensitivity.SPARSITIES, others, losses, strict=True)
    )


def estimates(losses: Tensor) -> tuple[quality.Estimate, quality.Estimate]:
    """Returns KL and the growth of perplexity, from each token's KL and loss of log-likelihood, float64 [2, n]."""
    kl, lost = map(_mean, losses.cpu().numpy())
    return kl, reference.exponential(lost, less=1.0)


ALPHAS = (0.1, 0.3, 0.5)
ROOM = 0.5  # of the experts
POLICY: offload.PolicyName = "importance"  # of the paper that introduced substitution
_SHARE_OF_MEMORY = 0.75  # the largest share of the available memory
_COMPARED_TOKENS = 128  # at once: limits the memory for predictions


def substitution(
    pack: formats.Pack, tokens: forward.Tokens, progress: formats.Progress, folder: Path
) -> quality.Substitution:
    """Measures the price of each of `ALPHAS` on the CPU, with memory for at most half of the experts.

    Args:    folder: for the predictions without substitution: 4 bytes for each token and entry of the vocabulary.
    Raises:  RunError if the machine has too little memory; PackError if the pack is damaged.
    """
    given = forward.Sequences.of(pack.spec, torch.from_numpy(tokens.sequences.astype(np.int64)))
    N, S = given.ids.shape  # sequences, their length
    budget = budget_with_room(pack, ROOM, S)
    if (free := runtime.available_bytes()) is not None:
        budget = min(budget, int(_SHARE_OF_MEMORY * free))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "predictions.f32"
    with torch_threads():  # an engine changes their number
        expected = np.memmap(path, np.float32, "w+", shape=(N, S - 1, pack.spec.vocab_size))
        with _engine(pack, budget, None, S) as engine:
            for number, log_probs in _decoded(engine, given, progress, "decoding"):
                expected[number] = log_probs.numpy()
            assert engine.plan is not None, "it has a budget"
            room = engine.plan.num_pages / int(offload.expert_pages(pack.layout, engine.plan.page_bytes).sum())
            fetched, _ = _shares(engine)
        prices = tuple(_price(pack, given, expected, alpha, budget, progress) for alpha in ALPHAS)
    path.unlink()
    return quality.Substitution(POLICY, room, fetched, prices)


def _price(
    pack: formats.Pack,
    given: forward.Sequences,
    expected: NDArray[np.float32],
    alpha: float,
    budget: int,
    progress: formats.Progress,
) -> quality.SubstitutionPrice:
    losses = []
    with _engine(pack, budget, alpha, given.length) as engine:
        for number, log_probs in _decoded(engine, given, progress, f"decoding with --substitute {alpha:g}"):
            losses.append(_losses(torch.from_numpy(expected[number]), log_probs, given.ids[number].numpy()))
        fetched, replaced = _shares(engine)
    return quality.SubstitutionPrice(alpha, replaced, fetched, *estimates(torch.cat(losses, dim=1)))


def _engine(pack: formats.Pack, budget: int, alpha: float | None, context_tokens: int) -> runtime.Engine:
    own = offload.Approximations(substitute=alpha)
    options = runtime.EngineOptions(
        device="cpu", budget_bytes=budget, policy=POLICY, prefetches=False, approximations=own
    )
    return runtime.Engine(pack, options, context_tokens)


def _shares(engine: runtime.Engine) -> tuple[float, float]:
    """Returns the shares of run experts that were fetched, and that replaced another one."""
    assert isinstance(engine.weights, offload.OffloadedWeights), "it has a budget"
    counts = engine.weights.decode
    return 1 - counts.hits / counts.needed, counts.substituted / counts.needed


def _losses(expected: Tensor, log_probs: Tensor, sequence: forward.Array) -> Tensor:
    """Returns KL and loss of log-likelihood, float64 [2, n] in nats, of predictions float32 [n, V]."""
    pieces = []
    for start in range(0, len(log_probs), _COMPARED_TOKENS):
        rows = slice(start, min(start + _COMPARED_TOKENS, len(log_probs)))
        some, other = expected[rows], log_probs[rows]
        lost = reference.next_log_probs(some, sequence, rows) - reference.next_log_probs(other, sequence, rows)
        pieces.append(torch.stack([reference.whole_divergence(some, other), lost.double()]))
    return torch.cat(pieces, dim=1)


def _decoded(
    engine: runtime.Engine, given: forward.Sequences, progress: formats.Progress, stage: str
) -> Iterator[tuple[int, Tensor]]:
    """Yields each sequence's number and the log-probabilities after all tokens but the last, float32 [S - 1, V]."""
    spec, (N, S) = engine.decoder.spec, given.ids.shape
    one = _multiplications(spec, S)
    progress.begin(sensitivity.Cost(one * N * (S - 1)).stage(stage))
    for number, stacks in enumerate(zip(*given.stacks, strict=True)):
        log_probs = torch.empty((S - 1, spec.vocab_size))
        *text, ids = (stack.tolist() for stack in stacks)
        for place, logits in enumerate(fed_singly(engine, ids[:-1], *text)):
            log_probs[place] = logits.log_softmax(dim=0)
            progress.advance(one, f"sequence {number} token {place}")
        yield number, log_probs
    progress.end()


def fed_singly(engine: runtime.Engine, ids: list[int], text: list[int] | None = None) -> Iterator[Tensor]:
    """Yields the logits, float32 [V], after each token, fed one by one; `text` is the encoder's input."""
    engine.decoder.reset()
    if isinstance(engine.decoder, model.EncoderDecoder):
        assert text is not None, "an encoder needs text"
        engine.decoder.encode(text)
    for token in ids:
        yield engine.decoder.next_logits([token])


def budget_with_room(pack: formats.Pack, share: float, context_tokens: int) -> int:
    """Returns the smallest budget for this share of experts, each as large as the largest; at least for one expert."""
    page_bytes, head_bytes = page_sizes(pack.layout)
    pages, predictors = offload.expert_pages(pack.layout, page_bytes), offload.routing_bytes(pack.folder)
    wanted = min(int(pages.max()) * max(round(share * pages.size), 1), int(pages.sum()))
    least = pack.layout.dense_file.num_bytes + wanted * (page_bytes + head_bytes)
    # The search goes up page by page, because a larger budget also gives forward passes more workspace.
    while True:
        with suppress(formats.RunError):  # less than the dense part needs
            if offload.divide_budget(pack.layout, least, context_tokens, predictors).num_pages >= wanted:
                return least
        least += page_bytes + head_bytes


NUMERICS_TOKENS = 1024  # on which rounded inputs are judged
_NUMERICS_LENGTH = 512  # of their sequences, at most


def measure_numerics(
    pack: formats.Pack, tokens: forward.Tokens, progress: formats.Progress = formats.NO_PROGRESS
) -> numerics.NumericsLoss | None:
    """Measures the loss of each numeric mode of the CPU, compared with `exact`; None if kernels do not round."""
    if pack.spec.encoder is not None or not cpu.is_available():
        return None
    sequences = first_tokens(tokens, NUMERICS_TOKENS).sequences[:, :_NUMERICS_LENGTH]
    S = sequences.shape[1]
    with (
        torch_threads(),
        runtime.Engine(pack, runtime.EngineOptions(device="cpu", numerics="exact", read="map"), S) as engine,
    ):
        assert isinstance(engine.operations, model.NativeOperations) and isinstance(engine.decoder, model.Decoder), (
            "as checked"
        )
        kernels = engine.operations.kernels
        losses: dict[numerics.NumericsMode, list[float]] = {"fast": [], "fastest": []}
        if not kernels.take_digits(numerics.DIGITS["fast"]):
            return None
        one = S * _multiplications(pack.spec, S)
        progress.begin(sensitivity.Cost(one * 3 * len(sequences)).stage("rounded inputs"))
        for number, ids in enumerate(sequences.tolist()):
            expected = _hidden(engine.decoder, kernels, ids, "exact")
            progress.advance(one, f"sequence {number}")
            for mode, divergences in losses.items():
                found = _hidden(engine.decoder, kernels, ids, mode)
                divergences += _divergences(engine.decoder, kernels, expected, found, mode)
                progress.advance(one, f"sequence {number}")
        progress.end()
        fast, fastest = (_mean(np.array(divergences)) for divergences in losses.values())
        of_modes = (numerics.ModeLoss(each.value, each.half_width) for each in (fast, fastest))
        return numerics.NumericsLoss(tokens.name, sequences.size, kernels.instruction_set, *of_modes)


def _mean(values: NDArray[np.float64]) -> quality.Estimate:
    numbers = reference.block_sums(np.ones(len(values))).astype(np.int64)
    return reference.mean(reference.block_sums(values), numbers)


def _multiplications(spec: formats.ModelSpec, num_tokens: int) -> int:
    layers = sum(sensitivity.half_multiplications(spec, layer, num_tokens) for layer in range(spec.num_hidden_layers))
    experts = len(spec.moe_layers) * spec.router.num_experts_per_tok * sensitivity.expert_multiplications(spec)
    return layers + experts + spec.vocab_size * spec.hidden_size


def _hidden(decoder: model.Decoder, kernels: cpu.Kernels, ids: list[int], mode: numerics.NumericsMode) -> Tensor:
    kernels.take_digits(numerics.DIGITS[mode])
    decoder.reset()
    return decoder.hidden_states(ids)


@torch.inference_mode()
def _divergences(
    decoder: model.Decoder, kernels: cpu.Kernels, expected: Tensor, found: Tensor, mode: numerics.NumericsMode
) -> list[float]:
    """Returns each token's KL divergence in nats, from the hidden states of `exact` and of a mode, float32 [S, d]."""
    divergences = list[float]()
    for start in range(0, len(expected), _COMPARED_TOKENS):
        rows = slice(start, start + _COMPARED_TOKENS)
        kernels.take_digits(numerics.DIGITS["exact"])
        likely = decoder.logits_of(expected[rows]).log_softmax(dim=-1)
        kernels.take_digits(numerics.DIGITS[mode])
        divergences += reference.whole_divergence(likely, decoder.logits_of(found[rows]).log_softmax(dim=-1)).tolist()
    return divergences


NUM_CALIBRATION_TOKENS = 2048  # to find thresholds on
NUM_TOKENS = 1024  # to judge sparsity on, and to decode
_WORK_FOLDER = "prices.work"


def measure_prices(
    pack: formats.Pack,
    tokens: forward.Tokens,
    calibration: forward.Tokens,
    progress: formats.Progress = formats.NO_PROGRESS,
    device: torch.device | None = None,
    operations: model.Operations = model.TORCH,
) -> quality.Prices:
    """Measures the prices of a pack on the first `NUM_TOKENS` of a text; killed, all but decoding continues."""
    judged = first_tokens(tokens, NUM_TOKENS)
    facts = {"root": pack.manifest.root, "calibration": calibration.sha256, "text": judged.sha256}
    with forward.work_store(pack.folder / _WORK_FOLDER, facts) as store:
        where = device or torch.device("cpu")
        sparsity = sparsity_prices(pack, judged, calibration, progress, store.work, where, operations)
        replaced = substitution(pack, judged, progress, store.work)
    N, S = judged.sequences.shape
    return quality.Prices(N * (forward.stack_tokens(pack.spec, S) - 1), calibration.name, sparsity, replaced)


def first_tokens(tokens: forward.Tokens, number: int) -> forward.Tokens:
    """Returns the first sequences of a text with at least `number` tokens, or all sequences."""
    kept = tokens.sequences[: -(-number // tokens.sequences.shape[1])]
    return replace(tokens, sequences=kept, sha256=sha256(kept.astype("<i4").tobytes()).hexdigest())
