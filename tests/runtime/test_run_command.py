"""`moe-run` as a person meets it: text, exit codes, errors of one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import case
from support.commands import moe_run as run
from support.models import BOOK, DEMO_MODEL, PackMaker, TinyMixtral, pack
from support.waiting import HANG_S
from tokenizers import Tokenizer


@pytest.fixture
def demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


def test_the_continuation_alone_goes_to_standard_output(demo: Path) -> None:
    result = run(demo, "--prompt", "It was a dark night", "--seed", 3, "--max-tokens", 20, "--stats")
    quiet = run(demo, "--prompt", "It was a dark night", "--seed", 3, "--max-tokens", 20)
    assert result.exit_code == quiet.exit_code == 0
    assert result.stdout == quiet.stdout
    assert quiet.stderr == "device: cpu (no GPU found)\n"
    assert re.fullmatch(r".*\S.*\n", result.stdout, re.DOTALL)
    assert not result.stdout.startswith("It was a dark night")
    for fact in ("tokens/s", "seed             3", "computed by", "key-value cache"):
        assert fact in result.stderr


def test_a_seed_repeats_a_draw_and_greedy_needs_none(demo: Path) -> None:
    def text(*options: object) -> str:
        return run(demo, "--prompt", "She was", "--max-tokens", 24, *options).stdout

    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0) == text("--temperature", 0, "--seed", 9)
    assert text("--top-p", 1e-9) == text("--temperature", 0)
    assert text("--top-k", 1) == text("--min-p", 1) == text("--temperature", 0)


def test_a_prompt_can_come_from_a_file_or_standard_input(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("She was")
    options = ["--temperature", 0, "--max-tokens", 8]
    expected = run(demo, "--prompt", "She was", *options).stdout
    assert run(demo, "--prompt-file", tmp_path / "prompt.txt", *options).stdout == expected
    assert run(demo, "--prompt-file", "-", *options, text="She was").stdout == expected
    assert run(demo, *options, text="She was\n").stdout == expected  # as echo writes it


def test_a_chat_is_the_templates_prompt_and_ends_at_the_tokenizers_end(tmp_path: Path) -> None:
    source = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096).write(tmp_path / "source")
    raw = (DEMO_MODEL / "tokenizer.json").read_bytes()
    (source / "tokenizer.json").write_bytes(raw)
    (source / "chat_template.jinja").write_text("{{ bos_token }}It was {{ messages[0].content }}.</s>\n")
    options = ["--temperature", 0, "--max-tokens", 12]

    def written(eos_token: str, *prompt: object) -> str:
        tokenizer_config = json.dumps({"bos_token": "<s>", "eos_token": eos_token})
        (source / "tokenizer_config.json").write_text(tokenizer_config)
        shutil.rmtree(tmp_path / "packed", ignore_errors=True)
        pack(source, tmp_path / "packed")
        result = run(tmp_path / "packed", *prompt, *options)
        assert result.exit_code == 0, result.output
        return result.stdout

    whole = written("</s>", "--prompt", "a dark night", "--chat")
    assert whole == written("</s>", "--prompt", "It was a dark night.</s>")  # which the tokenizer begins with <s>
    tokenizer = Tokenizer.from_str(raw.decode())
    fourth = tokenizer.encode(whole.rstrip("\n"), add_special_tokens=False).tokens[3]
    ended = written(fourth, "--prompt", "a dark night", "--chat").rstrip("\n")
    assert whole.startswith(ended) and 0 < len(ended) < len(whole) - 1
    # A text goes on, as the model's files say; the token is a special one now, which is not written.
    without = whole.replace(tokenizer.decoder.decode([fourth]), "", 1)
    assert written(fourth, "--prompt", "It was a dark night.</s>") == without != whole


def test_generation_ends_where_the_context_is_full(demo: Path) -> None:
    words = BOOK.read_text("utf-8")[:20_000]
    result = run(demo, "--prompt", words[:6000], "--max-tokens", 3000, "--temperature", 0, "--stats")
    prompt, made = (int(re.search(rf"{name} +(\d+) tokens", result.stderr)[1]) for name in ("prompt", "generated"))  # type: ignore[index]
    assert result.exit_code == 0
    assert prompt + made <= 2048 + 1


def test_a_prompt_longer_than_the_context_is_refused(demo: Path) -> None:
    result = run(demo, "--prompt", BOOK.read_text("utf-8")[:20_000])
    assert result.exit_code == 1
    assert re.fullmatch(
        r"moe-run: --prompt has \d+ tokens, and this model's context is 2048; shorten it to at most 2047\n",
        result.stderr,
    )


ERRORS = {
    "empty prompt": (["--prompt", ""], 1, "moe-run: --prompt is empty; give at least one character\n"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], 1,
                    "moe-run: --temperature: found -1.0, expected a number"),
    "top-p": (["--prompt", "x", "--top-p", "0"], 1,
              "moe-run: --top-p: found 0.0, expected more than 0 and at most 1\n"),
    "top-k": (["--prompt", "x", "--top-k", "-1"], 1, "moe-run: --top-k: found -1, expected a whole number from 0 up\n"),
    "min-p": (["--prompt", "x", "--min-p", "2"], 1, "moe-run: --min-p: found 2.0, expected a number from 0 to 1\n"),
    "chat": (["--prompt", "x", "--chat"], 1, "moe-run: --chat needs a chat template, and this pack has none"),
    "no prompt": ([], 2, "standard input is empty; give the text to continue with --prompt or --prompt-file"),
    "no message": (["--chat"], 2, "standard input is empty; give the text to continue"),
    "two prompts": (["--prompt", "x", "--prompt-file", "-"], 2, "--prompt and --prompt-file are both the text to"),
    "no tokens": (["--prompt", "x", "--max-tokens", "0"], 2, "--max-tokens"),
    "unknown option": (["--prompt", "x", "--pages", "1"], 2, "No such option"),
}  # fmt: skip


def test_wrong_input_ends_in_a_line_that_says_what_to_do(demo: Path) -> None:
    for name in ERRORS:
        with case(name):
            options, exit_code, line = ERRORS[name]
            result = run(demo, *options)
            assert result.exit_code == exit_code
            assert result.stdout == ""
            assert line in result.stderr
            assert "Traceback" not in result.stderr


def test_a_folder_that_is_no_pack_is_refused(tmp_path: Path) -> None:
    missing, empty = run(tmp_path / "none", "--prompt", "x"), run(tmp_path, "--prompt", "x")
    assert missing.stderr == f"moe-run: {tmp_path}/none: no such folder\n"
    assert empty.stderr == (
        f"moe-run: {tmp_path}: found no manifest.json; this is not a pack, or its conversion has not finished\n"
    )


def test_weights_that_overflow_give_an_error_and_no_text(tmp_path: Path) -> None:
    source = TinyMixtral(vocab_size=4096).write(
        tmp_path / "source", lambda tensors: tensors["model.norm.weight"].fill_(3e38)
    )
    (source / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    pack(source, tmp_path / "packed")
    result = run(tmp_path / "packed", "--prompt", "x")
    assert result.exit_code == 1
    assert "logits are NaN or infinite" in result.stderr
    assert result.stdout == ""


def test_help_and_version_read_well() -> None:
    shown = " ".join(run("--help").stdout.split())
    for word in ("--prompt", "--temperature", "else 0.8]", "Examples:", "moe-pack convert"):
        assert word in shown
    assert re.fullmatch(r"moe-run \d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.slow
def test_a_request_to_terminate_ends_it_cleanly(demo: Path) -> None:
    """An interruption, in the middle of a read, is in test_streaming_faults.py."""
    command = [sys.executable, "-m", "moe_pack.runtime.cli", str(demo), "--prompt", "It was", "-n", "2000", "--stats"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, OMP_NUM_THREADS="1")
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # it is writing
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 143
    assert (first + rest).endswith(b"\n")
    assert errors.decode().endswith(": interrupted\n")
    assert b"Traceback" not in errors
    assert b"generated" in errors


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(demo: Path) -> None:
    command = [sys.executable, "-m", "moe_pack.runtime.cli", str(demo), "--prompt", "It was", "-n", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=HANG_S) == 1
    assert b"Traceback" not in errors
    process.stderr.close()
