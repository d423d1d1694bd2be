"""Tokens to text as they come, and what ends a text."""

import json
import threading
from itertools import product
from pathlib import Path

import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL, PackMaker, TinyMixtral, pack

from moe_pack.formats import Pack, PackError, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.text import within


@pytest.fixture
def text(demo_pack: PackMaker) -> Text:
    with Pack(demo_pack("up", 4)) as opened:
        return Text(opened)


def streamed(text: Text, prompt: list[int], ids: list[int]) -> str:
    stream = text.stream(prompt)
    return "".join([*(stream.push(token) for token in ids), stream.finish()])


def test_streamed_pieces_make_the_text_that_follows_the_prompt(text: Text) -> None:
    whole = BOOK.read_text("utf-8")[:3000]
    ids = text.encode(whole)
    for cut in (1, 5, 40):
        prompt = text.encode(whole, special_tokens=False)[:0] + ids[:cut]
        follows = streamed(text, prompt, ids[cut:])
        assert whole.endswith(follows)
        assert len(whole) - len(follows) < 5 * cut + 5


def test_a_character_of_many_bytes_waits_until_it_is_whole(text: Text) -> None:
    ids = text.encode("A 🦊 ran", special_tokens=False)
    stream = text.stream(ids[:1])
    pieces = [stream.push(token) for token in ids[1:]]
    assert "".join(pieces) + stream.finish() == " 🦊 ran"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_never_becomes_whole_is_marked_at_the_end(text: Text) -> None:
    ids = text.encode("A 🦊", special_tokens=False)
    assert streamed(text, ids[:1], ids[1:-1]).endswith("\N{REPLACEMENT CHARACTER}")


def test_special_tokens_are_not_written(text: Text) -> None:
    ids = text.encode("It was")
    assert ids[0] == 0
    assert streamed(text, ids, [0, *ids[1:]]) == streamed(text, ids, ids[1:])


def test_the_end_of_text_comes_from_the_generation_config(text: Text) -> None:
    assert text.end_ids == {1}


def test_the_end_of_text_may_be_many_one_or_none(tmp_path: Path) -> None:
    for number, (generation, config, expected) in enumerate(
        [
            ('{"eos_token_id": [3, 5]}', {}, {3, 5}),
            ('{"eos_token_id": ["</s>", 5]}', {}, {1, 5}),
            ('{"eos_token_id": "<s>"}', {}, {0}),
            ('{"eos_token_id": null}', {"eos_token_id": 4}, {4}),
            (None, {"eos_token_id": 4}, {4}),
            (None, {}, set()),
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(generation, config, expected):
            source = TinyMixtral(config=dict(config)).write(case_folder / "source")
            (source / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
            if generation:
                (source / "generation_config.json").write_text(generation)
            pack(source, case_folder / "packed")
            with Pack(case_folder / "packed") as opened:
                assert Text(opened).end_ids == expected


def test_an_end_of_text_that_is_no_token_is_refused(tmp_path: Path) -> None:
    source = TinyMixtral().write(tmp_path / "source")
    (source / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (source / "generation_config.json").write_text('{"eos_token_id": "no token"}')
    pack(source, tmp_path / "packed")
    with Pack(tmp_path / "packed") as opened, pytest.raises(PackError, match=r"^generation_config.json: eos_token_id"):
        Text(opened)


def tokenizer_with(folder: Path, **changes: object) -> Text:
    folder.mkdir()
    values = json.loads((DEMO_MODEL / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    return Text(FolderFiles(folder))


def test_whatever_the_tokenizers_library_raises_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A panic of it is no Exception."""
    regex = {"pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    strip = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    for number, (changes, words_read) in enumerate(
        [
            ({"pre_tokenizer": {"type": "Split", **regex}}, "a" * 40 + "b"),
            ({"model": words, "added_tokens": [], "post_processor": None}, "no such word"),
            ({}, "half a pair: \ud800"),
        ]
    ):
        text = tokenizer_with(tmp_path / str(number), **changes)
        with case(changes), pytest.raises(RunError, match=r"^tokenizer\.json: the tokenizers library fails .+ \(.+\)$"):
            text.encode(words_read)
    text = tokenizer_with(tmp_path / "strip", decoder=strip)
    ids = text.encode("a", special_tokens=False)
    with pytest.raises(RunError, match=r"^tokenizer\.json: the tokenizers library fails .+ \(index out of bounds"):
        text.stream([]).push(ids[0])
    capfd.readouterr()  # what the library itself says of a panic


def test_a_text_that_takes_the_tokenizer_very_long_is_given_up() -> None:
    ended = threading.Event()
    with pytest.raises(RunError, match=r"^tokenizer\.json: the tokenizers library takes longer than 0 seconds"):
        within(0.0, ended.wait)
    ended.set()
    assert within(1000.0, lambda: "words") == "words"


def test_a_pack_without_tokenizer_is_refused(tiny_pack: Path) -> None:
    with Pack(tiny_pack) as opened, pytest.raises(RunError, match=r"has no tokenizer\.json"):
        Text(opened)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    source = TinyMixtral().write(tmp_path / "source")
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    pack(source, tmp_path / "packed")
    with (
        Pack(tmp_path / "packed") as opened,
        pytest.raises(PackError, match=r"^tokenizer.json: the tokenizers library"),
    ):
        Text(opened)


def test_a_text_begins_as_the_tokenizer_s_config_says(tmp_path: Path) -> None:
    """Some tokenizers say in their config alone that texts have a beginning; it is put there once."""
    for number, ((tokenizer_config, begins), template) in enumerate(
        product(
            [
                ({"add_bos_token": True, "bos_token": "<s>"}, True),
                ({"add_bos_token": True, "bos_token": {"content": "<s>", "special": True}}, True),
                ({"add_bos_token": False, "bos_token": "<s>"}, False),
                ({"bos_token": "<s>"}, False),
                ({"add_bos_token": True, "bos_token": None}, False),
                ({}, False),
            ],
            [True, False],
        )
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(tokenizer_config, begins, template):
            source = TinyMixtral().write(case_folder / "source")
            tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text("utf-8"))
            if not template:
                tokenizer["post_processor"] = None
            (source / "tokenizer.json").write_text(json.dumps(tokenizer))
            (source / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
            pack(source, case_folder / "packed")
            with Pack(case_folder / "packed") as opened:
                text = Text(opened)
            plain = text.encode("It was", special_tokens=False)
            assert 0 not in plain
            assert text.encode("It was") == ([0, *plain] if begins or template else plain)
