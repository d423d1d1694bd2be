"""Tokens that tokenizer.json lacks and the files next to it name: as transformers has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral, pack
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe_pack.formats import CheckpointError, Pack
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.gguf.vocabulary import vocabulary_fields
from moe_pack.runtime import Text

NUM_TOKENS = 4096  # of the demo model's tokenizer.json
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
START, END = "<|im_start|>", "<|im_end|>"
TEXT = f"It was <tool> {START}user\nhi {END} and <think>so</think> it <s>ends</s> <pad><unk> word"


def token(text: str, special: bool = True, **flags: bool) -> dict[str, object]:
    return {"content": text, "special": special, **FLAGS, **flags}


def typed(text: str, **flags: bool) -> dict[str, object]:
    """As tokenizer_config.json writes a token with flags."""
    return {"__type": "AddedToken", **token(text, **flags)}


LISTED = {"added_tokens_decoder": {"4096": token(START), "4097": token(END)}}
BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}

# What the files say: tokenizer_config.json, special_tokens_map.json, added_tokens.json.
CASES: list[tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]] = [
    (BASE, None, None),
    (BASE | LISTED | {"eos_token": END}, None, None),
    (BASE | {"eos_token": END}, None, None),
    (BASE | {"eos_token": typed(END), "pad_token": "<pad>", "unk_token": "<unk>"}, None, None),
    (BASE | {"extra_special_tokens": [START, END]}, None, None),
    (BASE | {"additional_special_tokens": [START, "<tool>"]}, None, None),
    (BASE | {"additional_special_tokens": [START], "extra_special_tokens": [END]}, None, None),
    (BASE | {"extra_special_tokens": {"tool_token": "<tool>", "think_token": "<think>"}}, None, None),
    (BASE | {"tool_token": "<tool>", "pad_token": None}, None, None),
    (BASE | {"pad_token": "</s>", "sep_token": "word"}, None, None),
    # A list in the config: then the other files do not count.
    (BASE | LISTED, {"eos_token": "<other>"}, {"<other>": 4098}),
    (BASE | {"added_tokens_decoder": {}}, {"eos_token": "<other>"}, {"<other>": 4096}),
    (BASE, {"eos_token": END, "additional_special_tokens": [START]}, None),
    (BASE, {"eos_token": token(END), "pad_token": {"content": "<pad>", "rstrip": True}}, None),
    (BASE, None, {"<tool>": 4096, "<think>": 4097, "</think>": 4098}),
    (BASE, {"eos_token": END}, {START: 4096, END: 4097}),
    (BASE | {"extra_special_tokens": [START]}, {"extra_special_tokens": [END, START]}, None),
    (BASE | {"extra_special_tokens": [START]}, {"additional_special_tokens": [END]}, None),
    # Flags: spaces around, words only, and a plain token of the vocabulary that becomes a special one.
    (BASE | {"added_tokens_decoder": {"4096": token("<tool>", lstrip=True, rstrip=True)}}, None, None),
    (BASE | {"added_tokens_decoder": {"4096": token("<tool>", special=False, single_word=True)}}, None, None),
    (BASE | {"added_tokens_decoder": {"4097": token(END, special=False), "4096": token(START)}}, None, None),
    (BASE | {"added_tokens_decoder": {"1": token("</s>", special=False)}, "eos_token": "</s>"}, None, None),
]


def folder_of(
    folder: Path, config: dict[str, Any], mapped: dict[str, Any] | None = None, added: dict[str, Any] | None = None
) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "vocab_size": 4104, "eos_token_id": 1}))
    if mapped is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    return folder


def test_tokens_of_all_files_are_those_of_transformers(tmp_path: Path) -> None:
    for number, (config, mapped, added) in enumerate(CASES):
        folder = folder_of(tmp_path / str(number), config, mapped, added)
        with case(config, mapped, added):
            reference = AutoTokenizer.from_pretrained(folder)
            assert isinstance(reference, PreTrainedTokenizerFast)
            text = Text(FolderFiles(folder))
            ids = text.encode(TEXT)
            assert ids == reference(TEXT).input_ids
            assert text.answer_end_ids == {1, reference.eos_token_id}
            for keeps in (True, False):
                stream = text.stream([], keeps_special=keeps)
                written = [token for token in ids if not (keeps and token in text.answer_end_ids)]
                expected = reference.decode(written, skip_special_tokens=not keeps, clean_up_tokenization_spaces=False)
                assert "".join(map(stream.push, ids)) + stream.finish() == expected


def test_grammars_and_gguf_files_have_the_same_tokens(tmp_path: Path) -> None:
    config, vocab_size = BASE | LISTED | {"eos_token": END}, 4104
    folder = folder_of(tmp_path / "model", config)
    text = Text(FolderFiles(folder))
    written = {entry["content"]: entry["id"] for entry in json.loads(text.tokenizer_json())["added_tokens"]}
    assert written[START] == 4096 and written[END] == 4097
    fields = vocabulary_fields({path.name: path.read_bytes() for path in folder.iterdir()}, vocab_size)
    assert fields["tokenizer.ggml.tokens"][4096:4098] == [START, END]
    assert fields["tokenizer.ggml.token_type"][4096:4099] == [3, 3, 5]  # control, control, unused
    assert fields["tokenizer.ggml.eos_token_id"] == 4097


def test_a_pack_has_the_tokens_of_its_checkpoint(tmp_path: Path) -> None:
    source = TinyMixtral(vocab_size=4100, config={"eos_token_id": 1}).write(tmp_path / "source")
    for path in folder_of(tmp_path / "files", BASE, {"eos_token": END}, {START: 4096, END: 4097}).iterdir():
        if path.name != "config.json":
            (source / path.name).write_bytes(path.read_bytes())
    pack(source, tmp_path / "packed")
    with Pack(tmp_path / "packed") as opened:
        text = Text(opened)
    assert text.encode(f"{START}user\nhi{END}") == [0, 4096, 414, 270, 200, 73, 74, 4097]
    assert text.answer_end_ids == {1, 4097}


def test_a_token_without_a_row_is_none(tmp_path: Path) -> None:
    """A model whose vocabulary ends before it would fail on the token; its text is read as letters."""
    listed = {str(NUM_TOKENS + number): token(f"<extra{number}>") for number in range(9)}
    folder = folder_of(tmp_path / "model", BASE | {"added_tokens_decoder": listed, "pad_token": "<pad>"})
    text = Text(FolderFiles(folder))  # 4104 rows: 8 more than tokens
    assert text.rowless == ("<extra8>", "<pad>")
    assert text.encode("<extra7>", special_tokens=False) == [4103]
    assert max(text.encode("<extra8><pad>")) < NUM_TOKENS


def test_a_token_that_would_get_another_number_is_refused(tmp_path: Path) -> None:
    for number, entry in enumerate([{"4098": token(END)}, {"4097": token(END), "4099": token(START)}]):
        folder = folder_of(tmp_path / str(number), BASE | {"added_tokens_decoder": entry})
        with (
            case(entry),
            pytest.raises(CheckpointError, match=r"^tokenizer_config\.json: token '<\|im_end\|>' has numb"),
        ):
            Text(FolderFiles(folder))


def test_entries_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"added_tokens_decoder": [START]}, r"added_tokens_decoder is \["),
        ({"added_tokens_decoder": {"4096": START}}, r"token 4096 is '<\|im_start\|>'"),
        ({"added_tokens_decoder": {"-1": token(START)}}, "a token has the number '-1'"),
        ({"added_tokens_decoder": {"4096": token(START) | {"content": None}}}, "token 4096 is"),
        ({"added_tokens_decoder": {"4096": token(START) | {"lstrip": 1}}}, "token 4096: "),
        ({"extra_special_tokens": START}, "extra_special_tokens is"),
        ({"extra_special_tokens": [5]}, "extra_special_tokens is 5"),
        ({"extra_special_tokens": {"tool_token": 5}}, "tool_token is 5"),
        ({"eos_token": [END]}, "eos_token is"),
    ]
    for number, (config, expected) in enumerate(wrong):
        folder = folder_of(tmp_path / str(number), BASE | config)
        with case(config), pytest.raises(CheckpointError, match=rf"^tokenizer_config\.json: {expected}"):
            Text(FolderFiles(folder))
