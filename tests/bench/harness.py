"""Whether lm-evaluation-harness, which asks moe-serve over HTTP, says of a pack what moe-pack eval says.

    python -m venv build/lm-eval && build/lm-eval/bin/pip install "lm-eval[api]" transformers
    python tests/bench/harness.py PACK TASKS.jsonl --lm-eval build/lm-eval/bin/lm_eval

It starts the server on 127.0.0.1 and lets lm-eval answer the multiple-choice tasks of a file (as for `moe-pack eval
--tasks`) with its model `local-completions`, once with prompts as text and once as tokens. The verdict is that every
choice has the log-likelihood that a plain forward pass of the pack gives it, that the same choices are likeliest, and
that both accuracies are those of `moe-pack eval`. Where the tokenizer puts a token before each text, prompts go as
tokens alone, with `add_bos_token=True`: of a text, lm-eval counts a token too few, or sends that token twice.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from benchlib import figure, finish, json_option, table
from support.server_process import ServerProcess

from moe_pack.calib.evaluate import read_tasks, task_score
from moe_pack.calib.evaluate.tasks import TaskTokens
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Text
from moe_pack.runtime.model import Decoder

TOLERANCE = 1e-3  # of a choice's log-likelihood: prompts run in other passes
_NAME = "moe_pack_choices"
_TASK = {
    "task": _NAME,
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "train",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("pack", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("tasks", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--lm-eval", "command", default="lm_eval", show_default=True, help="lm-evaluation-harness's command.")
@json_option
def main(pack: Path, tasks: Path, command: str, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with Pack(pack) as opened:
            read = read_tasks(tasks, Text(opened), opened.spec.max_position_embeddings)
            expected = log_likelihoods(opened, read)
            has_first_token = Text(opened).encode("a") != Text(opened).encode("a", special_tokens=False)
            score = task_score(opened, read, folder / "work")
        accuracies = {"acc": score.accuracy.value, "acc_norm": score.normalized_accuracy.value}
        rows.append({"by": "moe-pack eval", **accuracies, "difference": None})
        context = min(max(choice.stop for choice in read.choices) + 8, opened.spec.max_position_embeddings)
        with ServerProcess(pack, folder / "log", "--context", context) as server:
            for by in ("tokens",) if has_first_token else ("text", "tokens"):
                found, results = asked(command, server, pack, tasks, by == "tokens", has_first_token, folder / by)
                worst = max(abs(own - other) for own, other in zip(expected, found, strict=True))
                rows.append({"by": f"lm-eval, prompts as {by}", **results, "difference": worst})
                if worst > TOLERANCE:
                    faults.append(f"{by}: a log-likelihood differs by {worst:.2g}, at most {TOLERANCE}")
                if likeliest(read, found) != likeliest(read, expected):
                    faults.append(f"{by}: other choices are likeliest")
                if any(abs(results[name] - value) > 1e-9 for name, value in accuracies.items()):
                    faults.append(f"{by}: accuracies {results}, moe-pack eval says {accuracies}")
    cells = [
        (row["by"], *(figure(row[name], ".3f") for name in accuracies), figure(row["difference"], ".1e"))
        for row in rows
    ]
    text = table(("measured by", "accuracy", "for each byte", "largest difference of a log-likelihood"), cells)
    finish({"tasks": len(read.answers), "choices": len(expected), "rows": rows}, text, as_json, faults)


def log_likelihoods(pack: Pack, tasks: TaskTokens) -> list[float]:
    """Returns the log-likelihood of each choice by one forward pass over prompt and choice."""
    longest = max(choice.stop for choice in tasks.choices)
    found = []
    with Engine(pack, EngineOptions(read="map"), longest) as engine:
        decoder = engine.decoder
        assert isinstance(decoder, Decoder), "a model without an encoder"
        for choice, row in zip(tasks.choices, tasks.tokens.sequences, strict=True):
            decoder.reset()
            ids = row[: choice.stop].tolist()
            log_probs = torch.log_softmax(decoder.logits(ids).double(), 1)
            found.append(sum(float(log_probs[at - 1, ids[at]]) for at in range(choice.start, choice.stop)))
    return found


def likeliest(tasks: TaskTokens, values: list[float]) -> list[int]:
    """Returns the place of each task's likeliest choice among all choices."""
    best: dict[int, int] = {}
    for place, choice in enumerate(tasks.choices):
        if choice.task_idx not in best or values[place] > values[best[choice.task_idx]]:
            best[choice.task_idx] = place
    return list(best.values())


def asked(
    command: str, server: ServerProcess, pack: Path, tasks: Path, by_tokens: bool, has_first_token: bool, folder: Path
) -> tuple[list[float], dict[str, float]]:
    """Runs lm-eval against a server; returns the log-likelihood of each choice, and the accuracies."""
    (folder / "task").mkdir(parents=True)
    written = {**_TASK, "dataset_kwargs": {"data_files": str(tasks.resolve())}}
    (folder / "task" / "choices.yaml").write_text(json.dumps(written))  # JSON is YAML
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (pack / name).exists():
            shutil.copy(pack / name, tokenizer)
    model = {
        "model": pack.resolve().name,
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": 1,
        "tokenized_requests": by_tokens,
        "tokenizer": tokenizer,
        "add_bos_token": has_first_token,
    }
    options = [
        "--model",
        "local-completions",
        "--model_args",
        ",".join(f"{name}={value}" for name, value in model.items()),
    ]
    options += ["--include_path", str(folder / "task"), "--tasks", _NAME, "--log_samples"]
    options += ["--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    subprocess.run(
        [command, *options], check=True, stdout=subprocess.DEVNULL, cwd=folder, env={**os.environ, **offline}
    )
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    (results,) = (folder / "out").rglob("results_*.json")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    found = [float(value) for line in lines for value, _ in line["filtered_resps"]]
    measured = json.loads(results.read_text())["results"][_NAME]
    return found, {name: measured[f"{name},none"] for name in ("acc", "acc_norm")}


if __name__ == "__main__":
    main()
