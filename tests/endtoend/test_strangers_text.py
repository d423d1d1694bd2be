"""Text of strangers' checkpoints: conversion asks first for all that the runtime demands, and the runtime reads it."""

import json
import queue
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.cases import case
from support.commands import moe_run as run
from support.models import DEMO_MODEL, TinyMixtral
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from moe_pack.convert.cli.main import main as moe_pack_command
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Text
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.sampling import SamplingOptions
from moe_pack.runtime.serve.requests import EndEvent, Event, Request, TokenEvent
from moe_pack.runtime.serve.scheduler import BatchScheduler

SPACE = "\u2581"
START, END = "<|im_start|>", "<|im_end|>"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
RECURSIVE = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


def convert(source: Path, output: Path) -> Result:
    arguments = ["convert", str(source), "-o", str(output), "--quantizer", "nearest"]
    return CliRunner().invoke(moe_pack_command, arguments, prog_name="moe-pack")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the demo model's tokenizer, and a few rows more than tokens; read only."""
    folder = TinyMixtral(vocab_size=4100, config={"eos_token_id": 1}).write(tmp_path_factory.mktemp("text") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


def byte_fallback_model(folder: Path) -> Path:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [SPACE, f"{SPACE}Hello", f"{SPACE}wor", "ld", f"{SPACE}a", "b", "c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    TinyMixtral(vocab_size=len(words), config={"bos_token_id": 1, "eos_token_id": 2}).write(folder)
    made.save(str(folder / "tokenizer.json"))
    return folder


def served(folder: Path, prompt: str, seeds: range, max_tokens: int) -> list[tuple[list[int], str, str]]:
    """Tokens, text and reason of the answers that a server's scheduler gives."""
    with Pack(folder) as opened, Engine(opened, EngineOptions(), 100) as engine:
        assert isinstance(engine.decoder, Decoder)
        text, answers = Text(opened), []
        with closing(BatchScheduler(engine.decoder, text)) as scheduler:
            for seed in seeds:
                events: queue.Queue[Event] = queue.Queue()
                sampling = SamplingOptions(temperature=1.0, seed=seed)
                ids = tuple(text.encode(prompt))
                scheduler.submit(Request(ids, sampling, max_tokens, text.end_ids), events.put)
                tokens, pieces = list[int](), list[str]()
                while isinstance(event := events.get(), TokenEvent):
                    tokens.append(event.token)
                    pieces.append(event.text)
                assert isinstance(event, EndEvent)
                answers.append((tokens, "".join([*pieces, event.text]), event.reason))
    return answers


def test_bytes_that_make_no_character_are_text_in_commands_and_servers(tmp_path: Path) -> None:
    source = byte_fallback_model(tmp_path / "source")
    assert convert(source, tmp_path / "packed").exit_code == 0
    prompt = "Hello wor"
    shown = run(
        tmp_path / "packed", "--device", "cpu", "-p", prompt, "--temperature", 1, "--top-p", 1, "-n", 60, "--seed", 1
    )
    assert shown.exit_code == 0 and shown.stderr == ""
    assert "\N{REPLACEMENT CHARACTER}" in shown.stdout
    reference = Tokenizer.from_file(str(source / "tokenizer.json"))
    for tokens, text, reason in served(tmp_path / "packed", prompt, range(8), 60):
        with case(tokens):
            assert reason in ("length", "stop") and len(tokens) > 1
            ids = reference.encode(prompt).ids
            whole = reference.decode(ids + tokens)
            # The prompt ends with byte tokens too, which the answer may make a part of no character.
            shared = next(n for n in range(len(prompt), -1, -1) if whole.startswith(prompt[:n]))
            assert reference.decode(ids) == prompt and text == whole[shared:]


def test_chat_tokens_next_to_tokenizer_json_are_read_and_end_answers(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    listed = {str(4096 + number): {"content": mark, **flags} for number, mark in enumerate([START, END])}
    values = json.loads((source / "tokenizer_config.json").read_text())
    values |= {"eos_token": END, "added_tokens_decoder": listed, "chat_template": {"default": CHATML}}
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    converted = convert(source, tmp_path / "packed")
    assert converted.exit_code == 0 and "note" not in converted.stderr
    with Pack(tmp_path / "packed") as opened:
        text = Text(opened)
    assert text.encode(f"{START}user\nhi{END}") == [0, 4096, 414, 270, 200, 73, 74, 4097]
    assert text.answer_end_ids == {1, 4097}
    assert run(tmp_path / "packed", "--chat", "-p", "hi", "-n", 2).exit_code == 0


def changed(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | values))

    return change


def written(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def slow_split(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, values["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(values))


def without_unknown(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def cut(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:1000])


def sparse(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(200 << 30)


def fewer_rows(folder: Path) -> None:
    TinyMixtral(vocab_size=1000).write(folder)


def end_beyond_rows(folder: Path) -> None:
    TinyMixtral(vocab_size=4096).write(folder)
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    values["added_tokens"].append(values["added_tokens"][0] | {"id": 4096, "content": "<end>"})
    (folder / "tokenizer.json").write_text(json.dumps(values))
    changed("tokenizer_config.json", eos_token="<end>")(folder)


def renamed(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "tokenizer.model alone": (renamed, "has tokenizer.model, but no tokenizer.json, which moe-run needs; create it"),
    "config alone": (lambda folder: (folder / "tokenizer.json").unlink(), "has tokenizer_config.json, but no token"),
    "cut": (cut, "tokenizer.json: the tokenizers library cannot use it (EOF"),
    "empty": (written("tokenizer.json", ""), "tokenizer.json: is empty; the download failed"),
    "no object": (written("tokenizer.json", "[]"), "tokenizer.json: the tokenizers library cannot use it ("),
    "words without a row": (fewer_rows, "tokenizer.json: token 'Ġknew' and 3095 more have no row in the model, which"),
    "sparse": (sparse, "tokenizer.json: 214748364800 bytes, at most 67108864"),
    "slow": (slow_split, "tokenizer.json: the tokenizers library cannot use it (Onig: Regex search error: retry-limit"),
    "no unknown": (without_unknown, "cannot use it (WordLevel error: Missing [UNK] token from the vocabulary)"),
    "config cut": (written("tokenizer_config.json", "{"), "tokenizer_config.json: not valid JSON"),
    "config empty": (written("tokenizer_config.json", ""), "tokenizer_config.json: is empty"),
    "generation empty": (written("generation_config.json", ""), "generation_config.json: is empty"),
    "end unknown": (changed("generation_config.json", eos_token_id="<none>"), "eos_token_id is '<none>', expected a"),
    "end of another kind": (changed("generation_config.json", eos_token_id={"a": 1}), "eos_token_id is {'a': 1}, "),
    "end without a row": (changed("generation_config.json", eos_token_id=[1, 4100]), "eos_token_id 4100 is no token"),
    "end without a place": (
        changed(
            "tokenizer_config.json",
            added_tokens_decoder={str(4096 + number): {"content": f"<{number}>"} for number in range(4)},
            eos_token="<a>",
        ),
        "eos_token '<a>' is no token of this model, which has 4100 rows",
    ),
    "end beyond the rows": (end_beyond_rows, "eos_token '<end>' is no token of this model, which has 4096 rows"),
    "another number": (
        changed("tokenizer_config.json", added_tokens_decoder={"4099": {"content": END, "special": True}}),
        "tokenizer_config.json: token '<|im_end|>' has number 4099, but the next free number of tokenizer.json is 4096",
    ),
    "template of another kind": (changed("tokenizer_config.json", chat_template=5), "chat_template is 5, expected"),
    "template by number": (changed("tokenizer_config.json", chat_template={"default": 5}), "chat_template is {'def"),
    "template with an error": (written("chat_template.jinja", "{% if %}"), "chat template has an error (Expected an"),
    "template too deep": (written("chat_template.jinja", "{{" + "(" * 5000 + "}}"), "the model's chat template has an"),
}  # fmt: skip


def test_a_text_that_the_runtime_would_refuse_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    for number, (name, (change, expected)) in enumerate(REFUSED.items()):
        source, output = tmp_path / str(number), tmp_path / f"{number}-packed"
        shutil.copytree(model, source)
        change(source)
        result = convert(source, output)
        with case(name, result.stderr):
            assert result.exit_code == 1 and not output.exists()
            assert expected in result.stderr and result.stderr.count("\n") == 1


NOTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "recursive template": (
        written("chat_template.jinja", RECURSIVE),
        "note: the model's chat template failed (maximum recursion depth exceeded",
    ),
    "template that refuses": (
        written("chat_template.jinja", "{{ raise_exception('system first') }}"),
        "note: the model's chat template failed (system first)",
    ),
    "more tokens than rows": (
        changed("tokenizer_config.json", extra_special_tokens=[f"<{number}>" for number in range(6)]),
        "note: the tokenizer has 2 tokens for which the model has no row, such as '<4>'",
    ),
}


def test_what_a_pack_will_not_do_is_said_before_it_is_made(model: Path, tmp_path: Path) -> None:
    for number, (name, (change, expected)) in enumerate(NOTED.items()):
        source = tmp_path / str(number)
        shutil.copytree(model, source)
        change(source)
        result = convert(source, tmp_path / f"{number}-packed")
        with case(name, result.stderr):
            assert result.exit_code == 0
            assert result.stderr.splitlines()[0].startswith(expected)
        if "template" in name:
            chat = run(tmp_path / f"{number}-packed", "--chat", "-p", "hi", "-n", 2)
            with case(name, chat.stderr):
                assert chat.exit_code == 1 and chat.stdout == ""
                assert chat.stderr.startswith("moe-run: the model's chat template failed (")
                assert chat.stderr.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_gets_a_note_and_an_end_may_be_a_text(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert "note" not in convert(source, tmp_path / "by-text").stderr
    assert run(tmp_path / "by-text", "-p", "hi", "-n", 2).exit_code == 0
    for path in source.glob("tokenizer*"):
        path.unlink()
    result = convert(source, tmp_path / "none")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"note: {source}: has no tokenizer, so the pack cannot read text, and moe-run can ")
