"""A checkpoint folder's own tokenizer: found, read, and refused with what to do."""

import json
import shutil
from pathlib import Path

import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL, TinyMixtral, pack

from moe_pack.formats import CheckpointError, Pack, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model's small files, to change."""
    for name in FILES:
        shutil.copy(DEMO_MODEL / name, tmp_path / name)
    return tmp_path


def test_a_checkpoint_and_its_pack_read_text_alike(tmp_path: Path) -> None:
    source = TinyMixtral(config={"eos_token_id": [1, 3]}).write(tmp_path / "source")
    shutil.copy(DEMO_MODEL / "tokenizer.json", source)
    pack(source, tmp_path / "packed")
    of_folder = Text(FolderFiles(source))
    with Pack(tmp_path / "packed") as opened:
        of_pack = Text(opened)
    book = BOOK.read_text("utf-8")[:5000]
    assert of_folder.encode(book) == of_pack.encode(book)
    assert of_folder.end_ids == of_pack.end_ids == {1, 3}
    assert of_folder.vocab_size == of_pack.vocab_size == 96


def test_a_folder_s_files_are_found_and_read_whole(folder: Path) -> None:
    held = FolderFiles(folder)
    assert held.has("config.json")
    assert not held.has("chat_template.jinja")
    assert held.read_file("config.json").tobytes() == (folder / "config.json").read_bytes()
    (folder / "empty.txt").touch()
    assert held.read_file("empty.txt").tobytes() == b""


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/nowhere: no such folder$"):
        FolderFiles(tmp_path / "nowhere")


def test_a_file_may_have_64_mib(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(64 * MIB)
    assert FolderFiles(folder).read_file("tokenizer.json").nbytes == 64 * MIB
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(64 * MIB + 1)
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: 67108865 bytes, at most 67108864$"):
        Text(FolderFiles(folder))


def test_a_checkpoint_without_tokenizer_is_told_how_to_get_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RunError) as caught:
        Text(FolderFiles(folder))
    assert str(caught.value) == (
        f"{folder}: has no tokenizer.json, so it cannot read text; download it, or create it with transformers: "
        "AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
    )


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", '{"version": "1.0"}', r"^tokenizer\.json: the tokenizers library cannot read it \("),
        ("tokenizer.json", "", r"^tokenizer\.json: is empty; the download failed, or the file is damaged$"),
        ("tokenizer_config.json", "{", r"^tokenizer_config\.json: not valid JSON"),
        (
            "generation_config.json",
            '{"eos_token_id": "no token"}',
            r"^generation_config\.json: eos_token_id is 'no token', expected a",
        ),
        ("generation_config.json", '{"eos_token_id": [1.5]}', r"^generation_config\.json: eos_token_id is \[1\.5\]"),
        ("generation_config.json", "", r"^generation_config\.json: is empty; the download failed"),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            r"^tokenizer_config\.json: chat_template is 5, expected a text",
        ),
        ("tokenizer_config.json", '{"eos_token": 5}', r"^tokenizer_config\.json: eos_token is 5, expected a text or"),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_the_checkpoint_s_fault(
    name: str, content: str, fault: str, folder: Path
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=fault):
        Text(FolderFiles(folder))


def test_a_folder_in_a_file_s_place_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is not a regular file$"):
        Text(FolderFiles(folder))


def test_a_multimodal_config_says_the_vocabulary_and_the_end_where_its_text_model_is(folder: Path) -> None:
    own = {"vocab_size": 77, "eos_token_id": [5, 6]}
    cases = (
        {"model_type": "qwen3_vl_moe", "text_config": own},
        {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": own}},
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    for config in cases:
        with case(config):
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(config))
            text = Text(FolderFiles(folder))
            assert text.vocab_size == 77 and text.end_ids == {5, 6}


@pytest.mark.parametrize("config", [None, {}, {"vocab_size": "4096"}, {"vocab_size": True}, {"vocab_size": 0}, []])
def test_a_config_that_does_not_say_the_vocabulary_is_refused_when_it_is_asked(config: object, folder: Path) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    text = Text(FolderFiles(folder))
    with pytest.raises(RunError, match=r"^config\.json: vocab_size is .*, expected a whole number from 1$"):
        text.vocab_size  # noqa: B018  # asking is what fails


def test_a_length_that_the_tokenizer_s_maker_chose_cuts_and_pads_nothing(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    values["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    words = "It was a dark night, and nobody was there to see it."
    assert Text(FolderFiles(folder)).encode(words) == Text(FolderFiles(DEMO_MODEL)).encode(words)
