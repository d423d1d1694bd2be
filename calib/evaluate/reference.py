"""The compact reference: the part of a model's predictions on a text from which packs are judged without the model.

Means over tokens have 95% half-widths from sums over blocks of 128 consecutive tokens: neighbouring tokens have similar
errors, blocks hardly. KL divergences are in nats, from the kept part of a prediction p to another prediction q:

    kept of p:  its K likeliest tokens with log p;  log of the tail's mass;  m tokens drawn from the tail, with log p
    bound       KL over K + 1 outcomes, with the tail as one; joined outcomes can only be closer
    estimate    sum over the K likeliest of g(p, q)  +  tail mass of p * mean over drawn tokens of g(p, q) / p
                g(p, q) = p log(p / q) - p + q,  whose sum over all tokens is KL; without a tail it is exact

No term of g is negative, and g is of second order in the difference, so rounding has little effect and a few drawn
tokens suffice; the estimate of the tail is unbiased. `reference.safetensors` takes 2.3 kB a token; docs/moe-pack.md
specifies it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.evaluate.model_pass import ModelPass
from moe_pack.calib.forward.store import ArrayRule, check_arrays
from moe_pack.formats.base import json_files
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.sidecar import TensorSidecar, write_tensor_sidecar
from moe_pack.runtime.model import CheckpointWeights
from moe_pack.runtime.quality import Estimate

BLOCK_TOKENS = 128
_NORMAL = 1.959963984540054  # the 97.5% quantile of the normal distribution
_MOST_LOG = 700.0  # the largest argument of exp(): beyond it, a perplexity is infinite in practice, unlike in JSON


def block_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums values, float64 [T], over blocks of `BLOCK_TOKENS` consecutive tokens; the last block may be shorter."""
    return np.add.reduceat(values, np.arange(0, len(values), BLOCK_TOKENS))


def mean(sums: NDArray[np.float64], num_tokens: NDArray[np.int64]) -> Estimate:
    """Returns the mean over tokens from sums over B blocks, with a half-width by Student's t.

    Meaning: m = sum s / sum n;  variance B / (B - 1) * sum (s - m n)^2 / (sum n)^2;  t of B - 1 degrees of freedom.
    """
    number, total = len(sums), int(num_tokens.sum())
    m = float(sums.sum()) / total
    if number < 2:
        return Estimate(m, None)
    variance = number / (number - 1) * float(np.square(sums - m * num_tokens).sum()) / total**2
    return Estimate(m, student_t(number - 1) * math.sqrt(variance))


def exponential(estimate: Estimate, less: float = 0.0) -> Estimate:
    """Returns exp of an estimate, minus `less`; the half-width is the interval's upper half, which is longer."""
    value = math.exp(min(estimate.value, _MOST_LOG))
    if estimate.half_width is None:
        return Estimate(value - less, None)
    upper = math.exp(min(estimate.value + estimate.half_width, _MOST_LOG))
    return Estimate(value - less, upper - value)


def share(num_true: int, number: int) -> Estimate:
    """Returns the share of `number` independent cases, with half the width of Wilson's interval, which is never 0."""
    p, z2 = num_true / number, _NORMAL**2
    return Estimate(p, math.sqrt(z2 * p * (1 - p) / number + (z2 / (2 * number)) ** 2) / (1 + z2 / number))


def student_t(degrees: int) -> float:
    """Returns the 97.5% quantile of Student's t to 0.2% (Abramowitz and Stegun 26.7.5; exact for 1 and 2 degrees)."""
    if degrees < 3:
        return {1: math.tan(0.475 * math.pi), 2: 0.95 * math.sqrt(2 / (1 - 0.95**2))}[degrees]
    z = _NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))


NUM_OUTCOMES = 256  # likeliest tokens that are kept
NUM_DRAWN = 32  # of the tail's tokens
_ROWS_AT_ONCE = 32  # each as long as the vocabulary: limits the memory for temporaries


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The kept part of n predictions."""

    ids: Tensor  # int64 [n, K]: the likeliest tokens, in descending order
    log_probs: Tensor  # float32 [n, K]
    log_tail: Tensor  # float32 [n]: of the mass of all other tokens, -inf if there are none
    drawn_ids: Tensor  # int64 [n, m]: tokens drawn from the others
    drawn_log_probs: Tensor  # float32 [n, m]


@dataclass(frozen=True, slots=True)
class Distances:
    """The KL divergences of n predictions, float64 [n] each."""

    bound: Tensor
    estimate: Tensor
    tail: Tensor  # the predictions' own mass outside the K outcomes


def num_kept(vocab_size: int) -> tuple[int, int]:
    """Returns K and m for a vocabulary."""
    return (vocab_size, 0) if vocab_size <= NUM_OUTCOMES else (NUM_OUTCOMES, NUM_DRAWN)


def kept_outcomes(log_probs: Tensor, generator: torch.Generator) -> Outcomes:
    """Returns the kept part of log-probabilities, float32 [n, V]; `generator`, on the CPU, draws from the tail."""
    pieces = [_kept(piece, generator) for piece in torch.split(log_probs, _ROWS_AT_ONCE)]
    return Outcomes(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in _OUTCOMES))


def distances(expected: Outcomes, log_probs: Tensor) -> Distances:
    """Returns the KL divergences of log-probabilities, float32 [n, V], from the expected outcomes."""
    tops, tails, bounds, drawn = [], [], [], []
    for start in range(0, len(log_probs), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found, ids = log_probs[rows], expected.ids[rows]
        top = _terms(expected.log_probs[rows], found.gather(1, ids)).sum(dim=1, dtype=torch.float64)
        log_tail = found.scatter(1, ids, -torch.inf).logsumexp(dim=1)
        tops.append(top)
        tails.append(log_tail.double().exp())
        if found.shape[1] > ids.shape[1]:
            bounds.append(top + _terms(expected.log_tail[rows].double(), log_tail.double()))
            ratio = (expected.drawn_log_probs[rows] - found.gather(1, expected.drawn_ids[rows])).double()
            share = expected.log_tail[rows].double().exp()
            drawn.append(share * (ratio + (-ratio).expm1()).mean(dim=1))
    top, tail = torch.cat(tops), torch.cat(tails)
    if not bounds:
        return Distances(top, top, tail)
    return Distances(torch.cat(bounds), top + torch.cat(drawn), tail)


def whole_divergence(expected: Tensor, found: Tensor) -> Tensor:
    """Returns the KL divergence of log-probabilities, float32 [n, V], from the expected ones: float64 [n]."""
    pieces = zip(torch.split(expected, _ROWS_AT_ONCE), torch.split(found, _ROWS_AT_ONCE), strict=True)
    return torch.cat([_terms(one, other).sum(dim=1, dtype=torch.float64) for one, other in pieces])


def _kept(log_probs: Tensor, generator: torch.Generator) -> Outcomes:
    number, drawn = num_kept(log_probs.shape[1])
    likeliest = log_probs.topk(number, dim=1)
    others = log_probs.scatter(1, likeliest.indices, -torch.inf)
    drawn_ids = likeliest.indices[:, :0]
    if drawn:
        # softmax scales a tail of little mass up, so that it is not all zeros
        drawn_ids = torch.multinomial(others.softmax(dim=1).cpu(), drawn, replacement=True, generator=generator)
    drawn_ids = drawn_ids.to(log_probs.device)
    return Outcomes(
        likeliest.indices, likeliest.values, others.logsumexp(dim=1), drawn_ids, log_probs.gather(1, drawn_ids)
    )


def _terms(expected: Tensor, found: Tensor) -> Tensor:
    """Returns g(p, q) of log-probabilities; for close ones from log p - log q, because p and q would cancel."""
    ratio, p = expected - found, expected.exp()
    near = ratio.clamp(-1, 1)
    return torch.where(ratio.abs() < 1, p * (near + (-near).expm1()), p * ratio - p + found.exp())


REFERENCE_FILE = "reference.safetensors"
FORMAT: Literal["moe-pack reference"] = "moe-pack reference"
VERSION = 1
_WORK_FOLDER = "reference.work"
_MAX_FACTS_BYTES = 1 << 16
_ROUNDING = 1e-3  # the most by which the log of a probability may be above 0
# The arrays of a prediction, and the dtypes in the file.
_OUTCOMES = {"ids": "U32", "log_probs": "F32", "log_tail": "F32", "drawn_ids": "U32", "drawn_log_probs": "F32"}
_KEPT = {**_OUTCOMES, "next_log_probs": "F32"}
_NUMPY = {"U32": "<u4", "F32": "<f4"}


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """The model and the text of a reference."""

    format: Literal["moe-pack reference"]
    version: int
    source: str  # the checkpoint's digest
    text: str
    text_sha256: str  # of the tokens as little-endian int32
    num_sequences: json_files.Positive
    sequence_length: json_files.Positive
    vocab_size: json_files.Positive
    num_outcomes: json_files.Count  # K of `Outcomes`
    num_drawn: json_files.Count  # m of `Outcomes`
    # The mean KL in nats between two runs of the first sequence, one with each embedding value changed by one bit.
    noise_floor: json_files.Amount
    # Of a model with an encoder, which reads half of each sequence (`Sequences`); null without one
    start_token: int | None = json_files.added(None)  # a field, whose default is None

    @property
    def num_predicted(self) -> int:
        """Returns the predictions of a sequence: of all tokens of the decoder (`Sequences.ids`) but the first."""
        return (self.sequence_length if self.start_token is None else self.sequence_length // 2) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A model's predictions on a text of N sequences of S tokens, p of each (`ReferenceFacts.num_predicted`)."""

    facts: ReferenceFacts
    sequences: forward.Array  # u32 [N, S]
    ids: forward.Array  # u32 [N, p, K], as the next four in `Outcomes`
    log_probs: forward.Array  # f32 [N, p, K]
    log_tail: forward.Array  # f32 [N, p]
    drawn_ids: forward.Array  # u32 [N, p, m]
    drawn_log_probs: forward.Array  # f32 [N, p, m]
    next_log_probs: forward.Array  # f32 [N, p]: of the token that followed

    def tokens(self) -> forward.Tokens:
        """Returns the reference's text."""
        return forward.Tokens(self.facts.text, self.sequences.astype(np.int32), self.facts.text_sha256, ())

    def outcomes(self, number: int, rows: slice, device: torch.device) -> Outcomes:
        """Returns the outcomes of some predictions of a sequence."""
        rows_of = {name: getattr(self, name)[number, rows] for name in _OUTCOMES}
        rows_of |= {name: rows_of[name].astype(np.int64) for name in ("ids", "drawn_ids")}
        return Outcomes(**{name: torch.from_numpy(array).to(device) for name, array in rows_of.items()})


def make_reference(
    checkpoint: Checkpoint,
    tokens: forward.Tokens,
    folder: Path,
    progress: formats.Progress = formats.NO_PROGRESS,
    device: torch.device | None = None,
    replaces: bool = False,
) -> Reference:
    """Makes the reference of a checkpoint's predictions on a text in `folder`, or reads it if it is there already.

    A killed call continues after the last complete layer.
    Args:    replaces: whether a reference of another model or text is replaced, not refused.
    Raises:  ConversionError if the folder contains another reference, or cannot be written; CheckpointError for weights
             that are not finite; RunError for sequences longer than the model's positions.
    """
    forward.check_length(checkpoint.spec, tokens.sequences.shape[1])
    source = forward.source_digest(checkpoint)
    if (folder / REFERENCE_FILE).exists():
        present = read_reference(folder)
        if (present.facts.source, present.facts.text_sha256) == (source, tokens.sha256):
            return present
        if not replaces:
            raise formats.ConversionError(
                f"{folder}: this folder has a reference of another model or text; give another one, or remove it"
            )
    where = device or torch.device("cpu")
    with forward.work_store(folder / _WORK_FOLDER, {"source": source, "text": tokens.sha256}) as store:
        weights = forward.LayerwiseWeights(CheckpointWeights(checkpoint, where))
        source_pass = ModelPass(weights, tokens, store, "source", where, with_twin=True)
        source_pass.run("predictions of the source", progress)
        reference = _predicted(source_pass, tokens, _facts(tokens, source, checkpoint.spec), progress)
        write_tensor_sidecar(folder, REFERENCE_FILE, _stored(reference), source)
    return reference


def check_reference(reference: Reference, tokens: forward.Tokens, source: str, place: str) -> None:
    """Refuses a reference of another model or text by PlanError; `place` names it in messages."""
    if reference.facts.source != source:
        raise formats.PlanError(
            f"{place}: the reference is of another model; give one of the checkpoint that was packed"
        )
    if reference.facts.text_sha256 != tokens.sha256:
        raise formats.PlanError(
            f"{place}: the reference was made on other text ({reference.facts.text}); remove the options for text"
        )


@torch.inference_mode()
def noise_floor(source_pass: ModelPass) -> float:
    """Returns the mean KL in nats of a pass's twin from its first sequence."""
    twin, predictions = source_pass.num_sequences, source_pass.predictions
    kl = torch.cat([whole_divergence(predictions(0, rows), predictions(twin, rows)) for rows in source_pass.pieces()])
    return max(float(kl.mean()), 0.0)  # rounding may make a tiny sum negative


def next_log_probs(log_probs: Tensor, sequence: forward.Array, rows: slice) -> Tensor:
    """Returns the log-probabilities, float32 [n], of the tokens that follow `rows`, from those of all, [n, V]."""
    following = torch.from_numpy(sequence[rows.start + 1 : rows.stop + 1].astype(np.int64)).to(log_probs.device)
    return log_probs.gather(1, following[:, None])[:, 0]


@torch.inference_mode()
def _predicted(
    source_pass: ModelPass, tokens: forward.Tokens, facts: ReferenceFacts, progress: formats.Progress
) -> Reference:
    cost = source_pass.prediction_cost()
    progress.begin(cost.stage("predictions"))
    kept: dict[str, list[forward.Array]] = {name: [] for name in _KEPT}
    for number in range(facts.num_sequences):
        generator = torch.Generator().manual_seed(number)
        for rows in source_pass.pieces():
            log_probs = source_pass.predictions(number, rows)
            outcomes = kept_outcomes(log_probs, generator)
            following = next_log_probs(log_probs, source_pass.predicted[number], rows)
            for name, dtype in _KEPT.items():
                values: Tensor = following if name == "next_log_probs" else getattr(outcomes, name)
                kept[name].append(values.cpu().numpy().astype(_NUMPY[dtype]))
        progress.advance(cost.multiplications // facts.num_sequences, f"sequence {number}")
    predicted = (facts.num_sequences, facts.num_predicted)
    arrays = {name: np.concatenate(pieces).reshape(*predicted, *pieces[0].shape[1:]) for name, pieces in kept.items()}
    facts = replace(facts, noise_floor=noise_floor(source_pass))
    progress.end()
    return Reference(facts, tokens.sequences.astype("<u4"), **arrays)


def _facts(tokens: forward.Tokens, source: str, spec: formats.ModelSpec) -> ReferenceFacts:
    (N, S), (K, m), V = tokens.sequences.shape, num_kept(spec.vocab_size), spec.vocab_size
    start_token = None if spec.encoder is None else spec.encoder.start_token
    return ReferenceFacts(FORMAT, VERSION, source, tokens.name, tokens.sha256, N, S, V, K, m, 0.0, start_token)


def _stored(reference: Reference) -> Iterator[tuple[str, str, forward.Array]]:
    yield "facts", "U8", np.frombuffer(formats.canonical(formats.dump(reference.facts)), "<u1")
    yield "sequences", "U32", reference.sequences
    for name, dtype in _KEPT.items():
        yield name, dtype, getattr(reference, name)


def read_reference(path: Path) -> Reference:
    """Reads and checks a reference, a file or a folder with it; PackError if it is missing, damaged or foreign."""
    file = path / REFERENCE_FILE if path.is_dir() else path
    place = file.name
    with TensorSidecar(file.parent, place) as sidecar:
        entry = sidecar.entries.get("facts")
        if entry is None or entry.num_bytes > _MAX_FACTS_BYTES:
            raise formats.PackError(
                f"{place}: the file is no reference of moe-pack eval --keep-reference; it has no facts"
            )
        values = formats.parse(sidecar.read("facts").tobytes(), f"{place}: facts", formats.PackError)
        if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
            raise formats.PackError(f"{place}: expected format {FORMAT!r}, version {VERSION}; make the reference again")
        facts = formats.load(ReferenceFacts, values, f"{place}: facts", formats.PackError)
        if sidecar.root != facts.source:
            raise formats.PackError(f"{place}: root is not the source in its facts; make the reference again")
        _check_facts(facts, place)
        arrays = {name: sidecar.read(name) for name in sidecar.entries if name != "facts"}
    _check_arrays(arrays, facts, place)
    return Reference(facts, **arrays)


def _check_facts(facts: ReferenceFacts, place: str) -> None:
    if facts.num_predicted < 1:
        raise formats.PackError(f"{place}: facts: found impossible counts; make the reference again")
    if (facts.num_outcomes, facts.num_drawn) != num_kept(facts.vocab_size):
        raise formats.PackError(
            f"{place}: facts: found {facts.num_outcomes} outcomes and {facts.num_drawn} drawn, expected "
            "{} and {}; make the reference again".format(*num_kept(facts.vocab_size))
        )


def _check_arrays(arrays: dict[str, forward.Array], facts: ReferenceFacts, place: str) -> None:
    predicted = (facts.num_sequences, facts.num_predicted)
    last_id, has_tail = facts.vocab_size - 1, facts.num_outcomes < facts.vocab_size
    wanted = {
        "sequences": ArrayRule("U32", (facts.num_sequences, facts.sequence_length), most=last_id),
        "ids": ArrayRule("U32", (*predicted, facts.num_outcomes), most=last_id),
        "log_probs": ArrayRule("F32", (*predicted, facts.num_outcomes), most=_ROUNDING),
        "log_tail": ArrayRule("F32", predicted, None if has_tail else -math.inf, _ROUNDING),
        "drawn_ids": ArrayRule("U32", (*predicted, facts.num_drawn), most=last_id),
        "drawn_log_probs": ArrayRule("F32", (*predicted, facts.num_drawn), most=_ROUNDING),
        "next_log_probs": ArrayRule("F32", predicted, most=_ROUNDING),
    }
    check_arrays(arrays, wanted, place)
    if sha256(arrays["sequences"].astype("<i4").tobytes()).hexdigest() != facts.text_sha256:
        raise formats.PackError(f"{place}: the tokens do not match the digest in its facts; make the reference again")
