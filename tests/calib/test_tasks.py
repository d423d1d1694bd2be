"""Multiple choice: what the likeliest choices are by transformers, how shares are counted, and lines that are wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case
from support.models import DEMO_MODEL, PackMaker
from support.profiles import Recorder, StoppedError

from moe_pack.calib.evaluate import TaskTokens, read_tasks, task_score
from moe_pack.calib.evaluate.tasks import Choice, score
from moe_pack.calib.forward import Tokens
from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

BEGINNING = 0  # the demo tokenizer puts it before every text
TASKS: list[dict[str, Any]] = [
    {"prompt": "He walked slowly to the", "choices": [" door", " window and looked out of it", " zebra"]},
    {"prompt": "She said that she ", "choices": ["would never", "elephant", "was"]},
    {"prompt": "", "choices": ["The", " xylophone"]},
    {"prompt": "It was a dark night, and", "choices": [" the wind", " I", " of of of", " he was going to the house"]},
    {"prompt": "“Yes,” said the old man", "choices": [", “I know", " said said", "."]},
]


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(FolderFiles(DEMO_MODEL))


def written(folder: Path, tasks: list[dict[str, Any]]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def by_transformers(text: Text) -> tuple[list[int], list[int]]:
    """The likeliest choice of each task, by sum and by sum over bytes; every choice run by itself, no padding."""
    from transformers import MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it bare
    model = MixtralForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, local_files_only=True)
    likeliest: tuple[list[int], list[int]] = ([], [])
    for task in TASKS:
        sums = []
        for choice in task["choices"]:
            ids = text.encode(task["prompt"] + choice)
            start = len(text.encode(task["prompt"].rstrip()))
            with torch.inference_mode():
                log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=1)
            sums.append(sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids))))
        normalized = [s / len(c.encode()) for s, c in zip(sums, task["choices"], strict=True)]
        likeliest[0].append(sums.index(max(sums)))
        likeliest[1].append(normalized.index(max(normalized)))
    return likeliest


@pytest.mark.parametrize("normalized", [False, True])
def test_the_likeliest_choices_are_those_that_transformers_finds(normalized: bool, text: Text, tmp_path: Path) -> None:
    likeliest = by_transformers(text)
    assert likeliest[0] != likeliest[1]  # the two ways differ on these tasks
    path = written(tmp_path, [t | {"answer": a} for t, a in zip(TASKS, likeliest[normalized], strict=True)])
    checkpoint = Checkpoint(DEMO_MODEL)
    found = task_score(checkpoint, read_tasks(path, text, 2048), tmp_path / "work", Recorder())
    checkpoint.close()
    right, other = found.accuracy.value, found.normalized_accuracy.value
    assert (other if normalized else right) == 1.0
    assert (right if normalized else other) == sum(a == b for a, b in zip(*likeliest, strict=True)) / len(TASKS)


def test_a_pack_is_stopped_and_goes_on_to_the_same_score(text: Text, demo_pack: PackMaker, tmp_path: Path) -> None:
    tasks = read_tasks(written(tmp_path, [t | {"answer": 0} for t in TASKS]), text, 2048)
    with Pack(demo_pack("up", 4)) as opened:
        whole = task_score(opened, tasks, tmp_path / "work", Recorder())
        with pytest.raises(StoppedError):
            task_score(opened, tasks, tmp_path / "work", Recorder(stop_at=20))
        rest = Recorder()
        assert task_score(opened, tasks, tmp_path / "work", rest) == whole
    assert whole.num_tasks == len(TASKS) and "layer 0" not in rest.events
    assert not (tmp_path / "work").exists()


def test_the_blanks_that_end_a_prompt_are_the_choices(text: Text, tmp_path: Path) -> None:
    lines = [{"prompt": p, "choices": ["door", "way"], "answer": 0} for p in ("to the ", "to the")]
    lines[1]["choices"] = [" door", " way"]
    first, second = (read_tasks(written(tmp_path, [line]), text, 2048) for line in lines)
    assert (first.tokens.sequences == second.tokens.sequences).all()
    assert [c.start for c in first.choices] == [len(text.encode("to the"))] * 2
    assert first.tokens.sequences[0, 0] == BEGINNING


def scored(values: list[float], num_bytes: list[int]) -> tuple[float, float]:
    """One task of these choices whose answer is the second."""
    choices = tuple(Choice(0, 1, 2, number) for number in num_bytes)
    found = score(TaskTokens((1,), choices, Tokens("", None, "", ())), values)  # type: ignore[arg-type]  # no tokens are looked at
    return found.accuracy.value, found.normalized_accuracy.value


def test_a_long_choice_may_be_likelier_over_its_bytes() -> None:
    assert scored([-4.0, -6.0], [2, 6]) == (0.0, 1.0)


def test_of_equally_likely_choices_the_first_counts() -> None:
    assert scored([-4.0, -4.0], [1, 1]) == (0.0, 0.0)


def test_the_half_width_is_wilsons() -> None:
    choices = tuple(Choice(task, 1, 2, 1) for task in range(10) for _ in range(2))
    tasks = TaskTokens((0,) * 10, choices, Tokens("", None, "", ()))  # type: ignore[arg-type]  # no tokens are looked at
    found = score(tasks, [0.0, -1.0] * 7 + [-1.0, 0.0] * 3)
    # Of 7 in 10 it is 0.3968 to 0.8922 by the tables.
    assert found.accuracy.value == 0.7
    assert found.accuracy.half_width == pytest.approx((0.8922 - 0.3968) / 2, abs=1e-4)
    assert math.isclose(found.accuracy.value, found.normalized_accuracy.value)


GOOD = '{"prompt": "a", "choices": [" b", " c"], "answer": 1}'


def test_a_line_that_is_wrong_is_named(text: Text, tmp_path: Path) -> None:
    for line, message in [
        ("{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", "found [], expected an object"),
        ('{"prompt": "a", "choices": [" b", " c"]}', "key 'answer' is missing"),
        ('{"prompt": "a", "choices": [" b", " c"], "answer": 1, "id": 3}', "unknown key 'id'"),
        ('{"prompt": "a", "choices": [" b", 2], "answer": 1}', "choices[1]: found 2, expected str"),
        ('{"prompt": "a", "choices": [" b", " c"], "answer": "b"}', "answer: found 'b', expected int"),
        (
            '{"prompt": "a", "choices": [" b"], "answer": 0}',
            "found 1 choices and answer 0, expected two or more choices and the number of one of them, from 0",
        ),
        (
            '{"prompt": "a", "choices": [" b", " c"], "answer": 2}',
            "found 2 choices and answer 2, expected two or more choices and the number of one of them, from 0",
        ),
        (
            '{"prompt": "a", "choices": [" b", ""], "answer": 0}',
            "choices: the tokenizer makes no token of '' after the prompt",
        ),
        (
            '{"prompt": "a", "choices": [" b", "\\ud800"], "answer": 0}',
            "found half a character (a lone surrogate), expected text",
        ),
        (
            json.dumps({"prompt": "a" + " a" * 300, "choices": [" b", " c"], "answer": 0}),
            "prompt and choice have 303 tokens, this model takes at most 128",
        ),
    ]:
        with case(line, message):
            path = tmp_path / "tasks.jsonl"
            path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
            with pytest.raises(RunError) as refusal:
                read_tasks(path, text, 128)
            assert str(refusal.value) == f"--tasks {path}: line 3: {message}"


def test_blank_lines_are_passed_over(text: Text, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"\n{GOOD}\n  \n{GOOD}")
    assert read_tasks(path, text, 128).answers == (1, 1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "found no task; give one JSON object a line"),
        (None, "the file cannot be read (No such file or directory)"),
    ],
)
def test_a_file_without_tasks_is_refused(raw: bytes | None, message: str, text: Text, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(RunError) as refusal:
        read_tasks(path, text, 128)
    assert str(refusal.value) == f"--tasks {path}: {message}"
