"""Two commands: `llm` with its extra-openai-models.yaml, and lm-eval's models of local servers on a tiny task."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import ADDRESS, CITY_SCHEMA, MODEL, check, expect, expect_city, main

LLM, LM_EVAL = "llm", "lm_eval"
BIN = Path(sys.executable).parent
LLM_MODELS = f"""\
- model_id: served
  model_name: {MODEL}
  api_base: "{ADDRESS}/v1"
  supports_schema: true
  supports_tools: true
- model_id: served-text
  model_name: {MODEL}
  api_base: "{ADDRESS}/v1"
  completion: true
"""
FUNCTIONS = """
def weather(city: str) -> str:
    "Says the weather."
    return "sunny"
"""
TASK = """\
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
SAYING_TASK = """\
task: tiny_sayings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
QUESTIONS = [
    {"question": "Rome is in", "choices": [" Italy", " Norway"], "answer": 0},
    {"question": "Oslo is in", "choices": [" Italy", " Norway"], "answer": 1},
]


def run(folder: str, *command: object) -> str:
    """Returns what a command of the environment writes.

    Raises:  RuntimeError with the end of its messages if it fails.
    """
    own = {"LLM_USER_PATH": folder, "HF_HOME": f"{folder}/hf", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    arguments = [str(BIN / str(command[0])), *map(str, command[1:])]
    found = subprocess.run(
        arguments, capture_output=True, text=True, env={**os.environ, **own}, timeout=500, cwd=folder
    )
    if found.returncode:
        raise RuntimeError((found.stderr or found.stdout)[-250:])
    return found.stdout


def _llm(*arguments: object) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(LLM_MODELS)
        return run(folder, "llm", *arguments)


@check(LLM, "prompt, streamed and whole")
def prompt() -> None:
    expect(_llm("-m", "served", "-o", "max_tokens", 8, "Say hi").strip(), "")
    expect(_llm("-m", "served", "--no-stream", "-s", "Be brief.", "-o", "max_tokens", 8, "Say hi").strip(), "")


@check(LLM, "completion model")
def completion() -> None:
    expect(_llm("-m", "served-text", "-o", "max_tokens", 8, "Once").strip(), "")


@check(LLM, "--schema")
def schema() -> None:
    expect_city(_llm("-m", "served", "-o", "max_tokens", 200, "--schema", json.dumps(CITY_SCHEMA), "Rome"))


@check(LLM, "--functions (a tool)")
def tools() -> None:
    expect(_llm("-m", "served", "-o", "max_tokens", 8, "--functions", FUNCTIONS, "How is Rome?").strip(), "")


def _evaluate(model: str, path: str, task: str, *more: str, tokenizer: str = "None") -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "questions.json"
        lines.write_text("\n".join(map(json.dumps, QUESTIONS)))
        (Path(folder) / "task.yaml").write_text(task.format(data=lines))
        name = task.splitlines()[0].split(": ")[1]
        settings = {
            "model": MODEL,
            "base_url": f"{ADDRESS}/v1/{path}",
            "tokenizer_backend": tokenizer,
            "tokenized_requests": tokenizer == "remote",
            "num_concurrent": 1,
            "max_retries": 1,
        }
        arguments = ",".join(f"{key}={value}" for key, value in settings.items())
        out = run(
            folder, "lm_eval", "--model", model, "--model_args", arguments, "--tasks", name,
            "--include_path", folder, "--output_path", f"{folder}/out", *more,
        )  # fmt: skip
        expect(name in out, out[-200:])


@check(LM_EVAL, "local-completions, multiple choice (echo, logprobs)")
def choices() -> None:
    _evaluate("local-completions", "completions", TASK, tokenizer="remote")


@check(LM_EVAL, "local-completions, generate_until")
def sayings() -> None:
    _evaluate("local-completions", "completions", SAYING_TASK)


@check(LM_EVAL, "local-chat-completions, generate_until")
def chat_sayings() -> None:
    _evaluate("local-chat-completions", "chat/completions", SAYING_TASK, "--apply_chat_template")


if __name__ == "__main__":
    main()
