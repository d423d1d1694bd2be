"""Multiple-choice tasks, judged by log-likelihood: a model's answer is the choice that is likeliest after the prompt.

A file has one JSON object a line: `{"prompt": "...", "choices": ["...", "..."], "answer": 0}`. The choice's tokens are
those after the prompt's own; blanks at the end of a prompt belong to the choice, as in EleutherAI's
lm-evaluation-harness.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.evaluate import reference
from moe_pack.calib.evaluate.model_pass import ModelPass
from moe_pack.calib.sensitivity import Cost
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime import Text
from moe_pack.runtime.model import TORCH, CheckpointWeights, Operations, StreamedPackWeights
from moe_pack.runtime.quality import Estimate

_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A line of a file of tasks."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # counts the choices from 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The place of a choice's tokens in its sequence: from `start` up to `stop`."""

    task_idx: int
    start: int
    stop: int
    num_bytes: int  # of its UTF-8


@dataclass(frozen=True, slots=True)
class TaskTokens:
    """All choices of a file of tasks: each is a sequence of `tokens`, padded at its end to the longest one."""

    answers: tuple[int, ...]
    choices: tuple[Choice, ...]
    tokens: forward.Tokens


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The share of correct answers, with the half-widths of Wilson's 95% intervals."""

    num_tasks: int
    accuracy: Estimate  # by the choices' log-likelihood
    normalized_accuracy: Estimate  # by log-likelihood for each byte


def read_tasks(path: Path, text: Text, max_tokens: int) -> TaskTokens:
    """Reads tasks of at most `max_tokens` of prompt and choice; RunError for the first wrong line or without tasks."""
    place = f"--tasks {path}"
    choices: list[tuple[Choice, list[int]]] = []
    answers: list[int] = []
    for number, raw in _lines(path, place):
        line = f"{place}: line {number}"
        task = formats.load(Task, formats.parse(raw, line, formats.RunError), line, formats.RunError)
        if len(task.choices) < 2 or not 0 <= task.answer < len(task.choices):
            raise formats.RunError(
                f"{line}: found {len(task.choices)} choices and answer {task.answer}, expected two or more choices and "
                "the number of one of them, from 0"
            )
        choices += [_encoded(task, choice, len(answers), text, line) for choice in task.choices]
        answers.append(task.answer)
        longest = max(len(ids) for _, ids in choices[-len(task.choices) :])
        if longest > max_tokens:
            raise formats.RunError(
                f"{line}: prompt and choice have {longest:,} tokens, this model takes at most {max_tokens:,}"
            )
    if not answers:
        raise formats.RunError(f"{place}: found no task; give one JSON object a line")
    sequences = np.zeros((len(choices), max(len(ids) for _, ids in choices)), np.int32)
    for row, (_, ids) in zip(sequences, choices, strict=True):
        row[: len(ids)] = ids
    digest = sha256(sequences.astype("<i4").tobytes()).hexdigest()
    return TaskTokens(
        tuple(answers), tuple(choice for choice, _ in choices), forward.Tokens(str(path), sequences, digest, ())
    )


def check_continues(spec: formats.ModelSpec) -> None:
    """Refuses models with an encoder by RunError: they do not continue a prompt."""
    if spec.encoder is not None:
        raise formats.RunError(
            "--tasks: a model with an encoder does not continue a prompt, so that its choices cannot be judged; "
            "remove --tasks"
        )


def task_score(
    model: formats.Pack | Checkpoint,
    tasks: TaskTokens,
    folder: Path,
    progress: formats.Progress = formats.NO_PROGRESS,
    device: torch.device | None = None,
    operations: Operations = TORCH,
) -> TaskScore:
    """Measures how many tasks a model answers correctly; a killed call continues. `folder` is removed at the end."""
    check_continues(model.spec)
    where = device or torch.device("cpu")
    if isinstance(model, formats.Pack):
        root, name = model.manifest.root, "pack"
        weights = forward.LayerwiseWeights(StreamedPackWeights(model, where, operations))
    else:
        root, name = forward.source_digest(model), "source"
        weights = forward.LayerwiseWeights(CheckpointWeights(model, where))
    with forward.work_store(folder, {"model": root, "tasks": tasks.tokens.sha256}) as store:
        model_pass = ModelPass(weights, tasks.tokens, store, "tasks", where)
        model_pass.run(f"tasks by the {name}", progress)
        return score(tasks, _log_likelihoods(model_pass, tasks, progress))


def score(tasks: TaskTokens, log_likelihoods: list[float]) -> TaskScore:
    """Scores the log-likelihoods of all choices; of equally likely choices the first is the answer."""
    normalized = [value / choice.num_bytes for value, choice in zip(log_likelihoods, tasks.choices, strict=True)]
    number = len(tasks.answers)
    shares = []
    for values in (log_likelihoods, normalized):
        by_task: list[list[float]] = [[] for _ in tasks.answers]
        for choice, value in zip(tasks.choices, values, strict=True):
            by_task[choice.task_idx].append(value)
        num_right = sum(row.index(max(row)) == answer for row, answer in zip(by_task, tasks.answers, strict=True))
        shares.append(reference.share(num_right, number))
    return TaskScore(number, *shares)


@torch.inference_mode()
def _log_likelihoods(model_pass: ModelPass, tasks: TaskTokens, progress: formats.Progress) -> list[float]:
    progress.begin(Cost(len(tasks.choices)).stage("choices"))
    sums = [0.0] * len(tasks.choices)
    for number, choice in enumerate(tasks.choices):
        for rows in model_pass.pieces(choice.start - 1, choice.stop - 1):
            log_probs, ids = model_pass.predictions(number, rows), tasks.tokens.sequences[number]
            sums[number] += float(reference.next_log_probs(log_probs, ids, rows).double().sum())
        progress.advance(1, f"choice {number}")
    progress.end()
    return sums


def _lines(path: Path, place: str) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                if len(raw) == _MAX_LINE_BYTES:
                    raise formats.RunError(f"{place}: line {number} is longer than {_MAX_LINE_BYTES:,} bytes")
                if raw.strip():
                    yield number, raw.strip()
    except OSError as fault:
        raise formats.RunError(f"{place}: the file cannot be read ({fault.strerror})") from fault


def _encoded(task: Task, choice: str, task_idx: int, text: Text, place: str) -> tuple[Choice, list[int]]:
    prompt, whole = task.prompt.rstrip(), task.prompt + choice
    num_bytes = len(whole.encode()) - len(task.prompt.encode())
    ids, everything = text.encode(whole, special_tokens=False), text.encode(whole)
    # Special tokens that the tokenizer puts before a text stand before the prompt; those after a text are left out.
    before = next((i for i in range(len(everything)) if everything[i : i + len(ids)] == ids), 0)
    start = before + len(text.encode(prompt, special_tokens=False))
    ids = [*everything[:before], *ids]
    if start < 1:
        raise formats.RunError(
            f"{place}: prompt: the tokenizer makes no token of {task.prompt!r}; give a longer prompt"
        )
    if start >= len(ids) or not choice:
        raise formats.RunError(f"{place}: choices: the tokenizer makes no token of {choice[:60]!r} after the prompt")
    return Choice(task_idx, start, len(ids), num_bytes), ids
