"""Multiple choice by log-likelihood: the choice that a model finds likeliest after the prompt is its answer.

One JSON object a line: `{"prompt": "...", "choices": ["...", "..."], "answer": 0}`. The tokens of a choice are those of
prompt and choice together that come after the prompt's own; blanks that end a prompt count as the choice's, because
that is how words are cut into tokens. The same rule as EleutherAI's lm-evaluation-harness.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from moe_pack.calib.evaluate.model_pass import ModelPass
from moe_pack.calib.evaluate.reference import Estimate, next_log_probs, share
from moe_pack.calib.forward import LayerwiseWeights, ProfileStore, Tokens, source_digest
from moe_pack.calib.sensitivity import Cost
from moe_pack.formats import NO_PROGRESS, ModelSpec, Pack, Progress, RunError, canonical, load, parse
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime import Text
from moe_pack.runtime.model import TORCH, CheckpointWeights, Operations, StreamedPackWeights

_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A line of a file of tasks; `answer` counts the choices from 0."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice's tokens: from `start`, after the prompt's, up to `stop` of its sequence. `num_bytes`: of UTF-8."""

    task_idx: int
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TaskTokens:
    """All choices of a file of tasks, a sequence of `tokens` each, filled up to the longest behind their ends."""

    answers: tuple[int, ...]
    choices: tuple[Choice, ...]
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The share of tasks answered rightly, with the half-widths of 95% intervals (Wilson's).

    `accuracy`: by the choices' log-likelihood.   `normalized_accuracy`: by log-likelihood over bytes.
    """

    num_tasks: int
    accuracy: Estimate
    normalized_accuracy: Estimate


def read_tasks(path: Path, text: Text, max_tokens: int) -> TaskTokens:
    """The tasks of a file.

    Args:    max_tokens: of prompt and choice together: the model's positions.
    Raises:  RunError naming the first line that is wrong, or if there is none.
    """
    place = f"--tasks {path}"
    held: list[tuple[Choice, list[int]]] = []
    answers: list[int] = []
    for number, raw in _lines(path, place):
        line = f"{place}: line {number}"
        task = load(Task, parse(raw, line, RunError), line, RunError)
        if len(task.choices) < 2 or not 0 <= task.answer < len(task.choices):
            raise RunError(
                f"{line}: found {len(task.choices)} choices and answer {task.answer}, expected two or more choices and "
                "the number of one of them, from 0"
            )
        held += [_encoded(task, choice, len(answers), text, line) for choice in task.choices]
        answers.append(task.answer)
        longest = max(len(ids) for _, ids in held[-len(task.choices) :])
        if longest > max_tokens:
            raise RunError(f"{line}: prompt and choice are {longest:,} tokens, the model has {max_tokens:,} positions")
    if not answers:
        raise RunError(f"{place}: found no task; give one JSON object a line")
    sequences = np.zeros((len(held), max(len(ids) for _, ids in held)), np.int32)
    for row, (_, ids) in zip(sequences, held, strict=True):
        row[: len(ids)] = ids
    digest = sha256(sequences.astype("<i4").tobytes()).hexdigest()
    return TaskTokens(tuple(answers), tuple(choice for choice, _ in held), Tokens(str(path), sequences, digest, ()))


def check_continues(spec: ModelSpec) -> None:
    """Refuses models that do not continue a prompt.

    Raises:  RunError.
    """
    if spec.encoder is not None:
        raise RunError(
            "--tasks: choices are judged as continuations of a prompt, which a model with an encoder does not make; "
            "leave it out"
        )


def task_score(
    model: Pack | Checkpoint,
    tasks: TaskTokens,
    folder: Path,
    progress: Progress = NO_PROGRESS,
    device: torch.device | None = None,
    operations: Operations = TORCH,
) -> TaskScore:
    """How many tasks a model answers rightly. Layer by layer in bounded memory; killed, it goes on in `folder`.

    Args:    folder: to work in; it is removed at the end.   operations: for a pack, on the CPU.
    Raises:  ConversionError if the folder is in use or cannot be written; RunError for a model with an encoder.
    """
    check_continues(model.spec)
    where = device or torch.device("cpu")
    packed = isinstance(model, Pack)
    facts = {"model": model.manifest.root if isinstance(model, Pack) else source_digest(model)}
    identity = sha256(canonical({**facts, "tasks": tasks.tokens.sha256})).hexdigest()
    store = ProfileStore(folder, identity, replaces_other=True)
    try:
        weights = (
            StreamedPackWeights(model, where, operations)
            if isinstance(model, Pack)
            else CheckpointWeights(model, where)
        )
        model_pass = ModelPass(LayerwiseWeights(weights), tasks.tokens, store, "tasks", where)
        model_pass.run(f"tasks by the {'pack' if packed else 'source'}", progress)
        sums = _log_likelihoods(model_pass, tasks, progress)
    finally:
        store.close()
    shutil.rmtree(folder)
    return score(tasks, sums)


def score(tasks: TaskTokens, log_likelihoods: list[float]) -> TaskScore:
    """How many tasks are answered rightly by these log-likelihoods, one a choice; of equal ones the first counts."""
    normalized = [value / choice.num_bytes for value, choice in zip(log_likelihoods, tasks.choices, strict=True)]
    number = len(tasks.answers)
    return TaskScore(number, *(share(_num_right(tasks, values), number) for values in (log_likelihoods, normalized)))


def _num_right(tasks: TaskTokens, values: list[float]) -> int:
    by_task: list[list[float]] = [[] for _ in tasks.answers]
    for choice, value in zip(tasks.choices, values, strict=True):
        by_task[choice.task_idx].append(value)
    return sum(held.index(max(held)) == answer for held, answer in zip(by_task, tasks.answers, strict=True))


@torch.inference_mode()
def _log_likelihoods(model_pass: ModelPass, tasks: TaskTokens, progress: Progress) -> list[float]:
    progress.begin((Cost(len(tasks.choices))).stage("choices"))
    sums = []
    for number, choice in enumerate(tasks.choices):
        total = 0.0
        for rows in model_pass.pieces(choice.start - 1, choice.stop - 1):
            found = next_log_probs(model_pass.predictions(number, rows), tasks.tokens.sequences[number], rows)
            total += float(found.double().sum())
        sums.append(total)
        progress.advance(1, f"choice {number}")
    progress.end()
    return sums


def _lines(path: Path, place: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                if len(raw) == _MAX_LINE_BYTES:
                    raise RunError(f"{place}: line {number}: is longer than {_MAX_LINE_BYTES:,} bytes")
                if raw.strip():
                    yield number, raw.strip()
    except OSError as fault:
        raise RunError(f"{place}: cannot be read ({fault.strerror})") from fault


def _encoded(task: Task, choice: str, task_idx: int, text: Text, place: str) -> tuple[Choice, list[int]]:
    prompt, whole = task.prompt.rstrip(), task.prompt + choice
    try:
        num_bytes = len(whole.encode()) - len(task.prompt.encode())
    except UnicodeEncodeError as fault:
        raise RunError(f"{place}: found half a character (a lone surrogate), expected text") from fault
    ids, everything = text.encode(whole, special_tokens=False), text.encode(whole)
    # What the tokenizer puts before a text goes before the prompt; what it may put behind one is left out.
    before = next((i for i in range(len(everything)) if everything[i : i + len(ids)] == ids), 0)
    start = before + len(text.encode(prompt, special_tokens=False))
    ids = [*everything[:before], *ids]
    if start < 1:
        raise RunError(f"{place}: prompt: the tokenizer makes no token of {task.prompt!r}; give some text")
    if start >= len(ids) or not choice:
        raise RunError(f"{place}: choices: the tokenizer makes no token of {choice[:60]!r} after the prompt")
    return Choice(task_idx, start, len(ids), num_bytes), ids
