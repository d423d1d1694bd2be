"""Documents to sequences of tokens: what is taken, in which order, what is held out, what is too little."""

import hashlib
import json
import struct
from collections import deque
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL

from moe_pack.calib.forward import Tokens, num_held_out, read_tokens, unseen_tokens
from moe_pack.calib.forward import text as documents
from moe_pack.calib.forward.text import open_documents
from moe_pack.formats import RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

BEGINNING = 0  # the demo tokenizer puts it before every text


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(FolderFiles(DEMO_MODEL))


def flat(tokens: Tokens) -> list[int]:
    found: list[int] = tokens.sequences.flatten().tolist()
    return found


def written(folder: Path, *texts: str) -> str:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def of_two_tokens(folder: Path, num_documents: int) -> str:
    """Documents of two tokens each, a beginning and a letter."""
    return written(folder, *["a"] * num_documents)


def test_documents_are_joined_each_from_its_beginning_and_cut(text: Text, tmp_path: Path) -> None:
    book = BOOK.read_text("utf-8")
    parts = [book[start : start + 700] for start in range(0, 7000, 700)]
    joined = [token for part in parts for token in text.encode(part)]
    assert joined.count(BEGINNING) == 10
    tokens = read_tokens(written(tmp_path, *parts), None, text, 1000, 300)
    assert tokens.sequences.shape == (4, 300)
    assert tokens.sequences.dtype == np.int32
    assert flat(tokens) == joined[:1200]
    assert tokens.notes == ()
    assert tokens.name == str(tmp_path / "documents.jsonl")


def test_a_text_file_is_tokenised_as_one_text(text: Text) -> None:
    tokens = read_tokens(str(BOOK), None, text, 5000, 250)
    assert flat(tokens) == text.encode(BOOK.read_text("utf-8")[:100_000])[:5000]


def test_the_smallest_sizes_work(text: Text, tmp_path: Path) -> None:
    for num_tokens, length, shape in [(1, 1, (1, 1)), (3, 1, (3, 1)), (1, 7, (1, 7)), (8, 7, (2, 7))]:
        with case(num_tokens, length, shape):
            tokens = read_tokens(of_two_tokens(tmp_path, 10), None, text, num_tokens, length)
            letter = text.encode("a")[1]
            assert tokens.sequences.shape == shape
            assert flat(tokens) == ([BEGINNING, letter] * 10)[: shape[0] * shape[1]]
            assert tokens.notes == ()


def test_the_digest_is_of_little_endian_bytes(text: Text, tmp_path: Path) -> None:
    tokens = read_tokens(of_two_tokens(tmp_path, 10), None, text, 3, 3)
    letter = text.encode("a")[1]
    assert tokens.sha256 == hashlib.sha256(struct.pack("<3i", 0, letter, 0)).hexdigest()


def test_a_long_document_is_read_no_further_than_it_is_needed(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 8000)
    path = tmp_path / "long.txt"
    path.write_bytes(b"a b c d\n" * 3000 + b"\xff")
    assert len(read_tokens(str(path), None, text, 1000, 100).sequences) == 10
    with pytest.raises(RunError, match=r"long\.txt: found 0xff at byte 24,000, expected UTF-8"):
        read_tokens(str(path), None, text, 10**7, 100)


def test_a_document_of_several_pieces_has_one_beginning(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 8000)
    whole = "It was a dark night\n" * 1000
    (tmp_path / "long.txt").write_text(whole)
    expected = text.encode(whole)
    tokens = read_tokens(str(tmp_path / "long.txt"), None, text, len(expected) - len(expected) % 64, 64)
    assert flat(tokens) == expected[: len(expected) - len(expected) % 64]
    assert flat(tokens).count(BEGINNING) == 1


SAMPLE_NAME = "the sample: prose, chat, code and languages"
# The parts in a round of 20 sequences: 0 to 7 are prose, 8 conversations, 9 code, 10 other languages.
TURNS = [0, 8, 9, 10, 1, 8, 2, 9, 3, 8, 10, 4, 9, 5, 8, 6, 9, 10, 8, 7]
BEGINNINGS = {
    0: "Glass\n", 1: "City to Reopen", 2: "Installing the Shelf\n", 3: "Abstract\n", 4: "Dear Ruth,\n",
    5: "How a Vaccine Works\n", 6: "Terms of Use", 7: "Quarterly Report",
    8: "User: What is the difference between weather", 9: "// Package cache", 10: "Der Herbst im Gebirge",
}  # fmt: skip


@pytest.fixture(scope="module")
def parts(text: Text) -> list[list[int]]:
    """The tokens of each part of the sample."""
    found = open_documents(None, None, None).parts
    return [list(chain(*(text.encode(piece.text) for piece in part))) for part in found]


def rows(part: list[int], length: int) -> list[list[int]]:
    """The whole sequences of a part's tokens."""
    return [part[start : start + length] for start in range(0, len(part) - length + 1, length)]


def test_sequences_of_the_sample_come_from_its_parts_in_turn(text: Text, parts: list[list[int]]) -> None:
    tokens = read_tokens(None, None, text, 40 * 100, 100)
    left = [iter(rows(part, 100)) for part in parts]
    assert tokens.sequences.tolist() == [next(left[turn]) for turn in TURNS * 2]
    for turn, beginning in BEGINNINGS.items():
        with case(beginning):
            head = tokens.sequences[TURNS.index(turn)].tolist()
            stream = text.stream(head[:1])
            assert "".join(stream.push(token) for token in head[1:]).startswith(beginning)
    assert (tokens.name, tokens.notes) == (SAMPLE_NAME, ())


def test_a_part_of_the_sample_that_runs_out_leaves_its_turn_to_others(text: Text, parts: list[list[int]]) -> None:
    """The sixth part of prose has no sequence of 5,000 tokens, others one or two, code four or more."""
    length = 5000
    left = [rows(part, length) for part in parts]
    assert [len(part) for part in left[:8]].count(0) >= 1 and len(left[9]) > len(left[10]) > 1
    expected = []
    turns = deque(TURNS)
    while turns:
        turn = turns.popleft()
        if left[turn]:
            expected.append(left[turn].pop(0))
            turns.append(turn)
    tokens = read_tokens(None, None, text, len(expected) * length, length)
    assert tokens.sequences.tolist() == expected and tokens.notes == ()


def test_the_sample_is_read_in_order_where_its_parts_are_too_short(text: Text, parts: list[list[int]]) -> None:
    joined = list(chain(*parts))
    tokens = read_tokens(None, None, text, 10**9, 50_000)
    assert tokens.sequences.tolist() == [joined[start : start + 50_000] for start in (0, 50_000)]
    assert tokens.notes == (
        f"the sample: found {len(joined):,} tokens, --tokens asks for 1,000,000,000; "
        "the 100,000 tokens of its whole sequences are used",
    )


def test_unseen_text_is_the_end_of_each_part_in_turn(text: Text, parts: list[list[int]]) -> None:
    tokens = unseen_tokens(text, 20 * 100, 100)
    left = [iter(rows(part, 100)[::-1]) for part in parts]
    assert tokens.sequences.tolist() == [next(left[turn]) for turn in TURNS]
    assert (tokens.name, tokens.notes) == (f"the end of {SAMPLE_NAME}", ())
    whole = unseen_tokens(text, 10**9, 512)
    assert sorted(whole.sequences.tolist()) == sorted(row for part in parts for row in rows(part, 512))
    assert len(whole.notes) == 1


def test_conversations_have_the_special_tokens_of_the_template_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    text = Text(FolderFiles(folder))
    row = {"messages": [{"role": "user", "content": "A question"}, {"role": "assistant", "content": "An answer"}]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(100)))
    (end,) = text.end_ids
    turns = [text.encode(words, special_tokens=False) for words in ("A question", "An answer")]
    expected = [*turns[0], end, *turns[1], end] * 100
    found = flat(read_tokens(str(path), None, text, len(expected), len(expected)))
    assert found == expected and BEGINNING not in found


def test_less_text_than_was_asked_for_is_used_and_noted(text: Text, tmp_path: Path) -> None:
    source = of_two_tokens(tmp_path, 602)
    tokens = read_tokens(source, None, text, 16_384, 500)
    assert tokens.sequences.shape == (2, 500)
    assert tokens.notes == (
        f"--data {source}: found 1,204 tokens, --tokens asks for 16,384; "
        "the 1,000 tokens of its whole sequences are used",
    )
    assert read_tokens(source, None, text, 1000, 500).notes == ()


def test_less_than_256_tokens_are_refused(text: Text, tmp_path: Path) -> None:
    source = of_two_tokens(tmp_path, 127)
    with pytest.raises(RunError) as caught:
        read_tokens(source, None, text, 16_384, 100)
    assert str(caught.value) == (
        f"--data {source}: found 254 tokens, expected at least 256 (a sequence has 100); give more text"
    )
    assert len(read_tokens(of_two_tokens(tmp_path, 128), None, text, 16_384, 100).sequences) == 2


def test_less_than_a_sequence_is_refused(text: Text, tmp_path: Path) -> None:
    source = of_two_tokens(tmp_path, 2047)
    with pytest.raises(RunError) as caught:
        read_tokens(source, None, text, 1, 4096)
    assert str(caught.value) == (
        f"--data {source}: found 4,094 tokens, expected at least 4,096 (a sequence has 4,096); give more text"
    )
    assert len(read_tokens(of_two_tokens(tmp_path, 2048), None, text, 16_384, 4096).sequences) == 1


@pytest.mark.parametrize("blank", ["", " \n\n\t"])
def test_a_source_without_text_is_refused(blank: str, text: Text, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(blank)
    with pytest.raises(RunError, match=rf"^--data {tmp_path}/a\.txt: found no text; give a source with text$"):
        read_tokens(str(tmp_path / "a.txt"), None, text, 256, 256)


def test_a_token_that_the_model_has_no_row_for_is_refused(text: Text, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    source = of_two_tokens(tmp_path, 10)
    letter = text.encode("a")[1]
    (folder / "config.json").write_text(json.dumps({"vocab_size": letter}))
    with pytest.raises(RunError) as caught:
        read_tokens(source, None, Text(FolderFiles(folder)), 8, 4)
    assert str(caught.value) == (
        f"tokenizer.json: gives token {letter:,}, expected less than config.json's vocab_size {letter:,}; "
        "use the tokenizer of this model"
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": letter + 1}))
    assert len(read_tokens(source, None, Text(FolderFiles(folder)), 8, 4).sequences) == 2


def test_a_fifth_is_held_out_and_at_least_one_of_two() -> None:
    for num_sequences, held_out in [(0, 0), (1, 0), (2, 1), (3, 1), (5, 1), (9, 1), (10, 2), (14, 2), (64, 12)]:
        with case(num_sequences, held_out):
            assert num_held_out(num_sequences) == held_out
