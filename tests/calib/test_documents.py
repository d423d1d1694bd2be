"""Each kind of source of `--data`, the cuts of long documents, and the messages about unfit ones."""

import json
import os
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.cases import case

from moe_pack.calib.forward import text as documents
from moe_pack.calib.forward.text import PIECE_CHARS, Piece, open_documents, prose_parts
from moe_pack.formats import RunError
from moe_pack.runtime import ChatTemplate

TWO = [{"text": "One.", "n": 1}, {"text": "Two.", "n": 2}]
KINDS = ".txt, .jsonl, .json, .parquet or a folder"
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "<s>",
    "</s>",
)
NO_FIELD = "has no field 'text' or 'messages' or 'conversations'"
NAME_IT = "name the field of the text or the messages with --field"
NEITHER = f"expected text or a list of messages; {NAME_IT}"
NO_MESSAGE = "expected 'role' and 'content' (or 'from' and 'value') as text; change or remove this conversation"
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
CHAT_TEXT = "<s><system>Be kind.</s><user>Hi</s>"


@pytest.fixture(autouse=True)
def no_hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached, and a cache of the test's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def pieces(data: object, field: str | None = None, template: ChatTemplate | None = None) -> list[Piece]:
    documents = open_documents(str(data), field, template)
    (part,) = documents.parts
    assert documents.turns == (0,)
    return list(part)


def texts(data: object, field: str | None = None) -> list[str]:
    """Every document of a source whose documents are short."""
    found = pieces(data, field)
    assert all(piece.begins for piece in found)
    return [piece.text for piece in found]


def conversations(data: object, field: str | None = None) -> list[str]:
    """Every document of a source whose documents are short conversations, as `TEMPLATE` writes them."""
    found = pieces(data, field, TEMPLATE)
    assert all(piece.begins and piece.is_chat for piece in found)
    return [piece.text for piece in found]


def said(data: object, field: str | None = None, template: ChatTemplate | None = TEMPLATE) -> str:
    with pytest.raises(RunError) as caught:
        pieces(data, field, template)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def table(path: Path, columns: dict[str, list[object]]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def test_a_text_file_is_one_document_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Été.\r\n\n\nZwei 🦊".encode())
    assert pieces(tmp_path / "a.txt") == [Piece("Été.\r\n\n\nZwei 🦊", True)]
    (tmp_path / "a.txt").write_text("\ufeffA\ufeff", "utf-8")
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "A"}\n', "utf-8")
    assert texts(tmp_path / "a.txt") == ["A\ufeff"]
    assert texts(tmp_path / "a.jsonl") == ["A"]


def test_each_line_of_a_json_file_and_each_row_of_a_parquet_file_is_a_document(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".json"):
        path = tmp_path / f"a{suffix}"
        path.write_text('{"text": "One.", "score": NaN}\n\n   \r\n{"n": [1], "text": "Tw\\u00f6."}')
        assert texts(path) == ["One.", "Twö."]
    words = [f"Number {n}." for n in range(1000)]
    assert texts(table(tmp_path / "a.parquet", {"n": list(range(1000)), "text": [*words]})) == words


def test_the_field_may_have_another_name(tmp_path: Path) -> None:
    assert texts(lines(tmp_path / "a.jsonl", {"text": 1, "body": "A"}), "body") == ["A"]
    assert texts(table(tmp_path / "a.parquet", {"text": [1], "body": ["A"]}), "body") == ["A"]


def test_documents_of_white_space_alone_are_left_out(tmp_path: Path) -> None:
    for blank in ("", " \n\t \n"):
        assert texts(lines(tmp_path / "a.jsonl", *({"text": text} for text in (blank, "A ", blank)))) == ["A "]
        (tmp_path / "a.txt").write_text(blank)
        assert pieces(tmp_path / "a.txt") == []


def test_a_long_document_comes_in_pieces_that_end_where_lines_do(tmp_path: Path) -> None:
    text = "".join(f"Line {n} ends é in a number: {n}\n" for n in range(30_000))
    (tmp_path / "a.txt").write_text(text, "utf-8")
    for path in (tmp_path / "a.txt", lines(tmp_path / "a.jsonl", {"text": text}, {"text": "Next."})):
        found = pieces(path)
        long = found[: -1 if path.suffix == ".jsonl" else None]
        assert "".join(piece.text for piece in long) == text
        assert [piece.begins for piece in long] == [True] + [False] * (len(long) - 1)
        assert all(piece.text.endswith("\n") for piece in long)
        assert all(PIECE_CHARS - 100 < len(piece.text) <= PIECE_CHARS for piece in long[:-1])
    assert found[-1] == Piece("Next.", True)


def test_a_line_longer_than_a_piece_is_cut_before_a_blank_or_anywhere(tmp_path: Path) -> None:
    for text, sizes in [
        ("x" * PIECE_CHARS, [PIECE_CHARS]),
        ("y\n" + "x" * (PIECE_CHARS - 2), [PIECE_CHARS]),
        ("x" * (PIECE_CHARS + 1), [PIECE_CHARS, 1]),
        ("x" * (PIECE_CHARS - 1) + "\n" + "y", [PIECE_CHARS, 1]),
        ("x" * PIECE_CHARS + "\n", [PIECE_CHARS, 1]),
        ("x" * (PIECE_CHARS - 3) + " yyyy", [PIECE_CHARS - 3, 5]),
        (" " + "x" * PIECE_CHARS, [PIECE_CHARS, 1]),
        ("é🦊" * PIECE_CHARS, [PIECE_CHARS, PIECE_CHARS]),
    ]:
        with case(text, sizes):
            (tmp_path / "a.txt").write_text(text, "utf-8")
            for path in (tmp_path / "a.txt", lines(tmp_path / "a.jsonl", {"text": text})):
                found = pieces(path)
                assert [len(piece.text) for piece in found] == sizes
                assert "".join(piece.text for piece in found) == text


def sample_file(name: str) -> str:
    return files("moe_pack.calib.forward").joinpath("sample", name).read_text("utf-8")


def test_prose_of_the_sample_has_eight_parts_of_whole_chapters_in_order() -> None:
    prose = sample_file("prose.txt")
    parts = [list(part) for part in open_documents(None, None, None).parts[:8]]
    chapters = [piece for part in parts for piece in part]
    assert all(piece.begins and not piece.is_chat for piece in chapters)
    assert "\n\n".join(piece.text for piece in chapters) == prose
    sizes = [sum(len(piece.text) for piece in part) for part in parts]
    longest = max(len(piece.text) for piece in chapters)
    assert max(abs(size - len(prose) / 8) for size in sizes) < longest, "parts are as equal as chapters allow"
    assert all(len(part[0].text) < 1000 < len(part[1].text) for part in parts), "each begins with a short article"


def test_prose_in_which_a_chapter_fills_parts_leaves_some_empty() -> None:
    text = "a\n\n" + "b" * 40 + "\n\nc\n\n"  # 48 characters, six a part: a and b in the first, c (place 45) in the last
    parts = [[piece.text for piece in part] for part in prose_parts(text)]
    assert parts == [["a", "b" * 40], [], [], [], [], [], [], ["c"]]


def test_a_round_of_the_sample_has_each_kind_by_its_share() -> None:
    documents = open_documents(None, None, None)
    assert len(documents.parts) == 11
    turns = documents.turns
    assert [turns.count(part) for part in range(11)] == [1] * 8 + [5, 4, 3]  # of 20: 40% prose, 25%, 20%, 15%
    kinds = ["prose" if part < 8 else part for part in turns]
    for start in range(20):
        with case(start):
            five = {kinds[(start + i) % 20] for i in range(5)}
            assert len(five) >= 3 and "prose" in five, "five successive sequences are of three kinds"


def test_conversations_of_the_sample_are_written_by_the_models_template() -> None:
    rows = [json.loads(line)["messages"] for line in sample_file("chat.jsonl").splitlines()]
    written = list(open_documents(None, None, TEMPLATE).parts[8])
    assert [piece.text for piece in written] == [TEMPLATE.render(row, add_generation_prompt=False) for row in rows]
    assert all(piece.is_chat for piece in written)
    plain = list(open_documents(None, None, None).parts[8])
    assert not any(piece.is_chat for piece in plain) and len(plain) == len(rows)
    assert plain[0].text.startswith(
        "User: What is the difference between weather and climate?\n\nAssistant: Weather is"
    )


def test_a_conversation_of_the_sample_that_a_template_refuses_is_plain_text() -> None:
    refusing = ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{{ messages | tojson }}"
    )
    rows = [json.loads(line)["messages"] for line in sample_file("chat.jsonl").splitlines()]
    written = list(open_documents(None, None, refusing).parts[8])
    assert [not piece.is_chat for piece in written] == [row[0]["role"] == "system" for row in rows]
    assert sum(piece.is_chat for piece in written) > 30
    assert next(piece for piece in written if not piece.is_chat).text.startswith("System: You are ")


def test_the_samples_conversations_are_questions_and_answers() -> None:
    """Most templates demand an optional system message, then user and assistant in turn; and no empty message."""
    for line in sample_file("chat.jsonl").splitlines():
        messages = json.loads(line)["messages"]
        with case(messages[0]["content"]):
            turns = messages[messages[0]["role"] == "system" :]
            assert [message["role"] for message in turns] == ["user", "assistant"] * (len(turns) // 2)
            assert turns and all(message["content"].strip() == message["content"] != "" for message in messages)


def test_code_and_languages_of_the_sample_are_documents_between_form_feeds() -> None:
    documents = open_documents(None, None, TEMPLATE)
    for part, name, least in ((9, "code.txt", 25), (10, "languages.txt", 60)):
        with case(name):
            texts = [piece.text for piece in documents.parts[part]]
            assert "\n\f\n".join(texts) == sample_file(name) and len(texts) >= least
            assert not any("\f" in text for text in texts)
    scripts = "".join(piece.text for piece in documents.parts[10])
    for letter in "ßçñãжわ한的ابहไאłğπ":
        assert letter in scripts, letter


def test_messages_are_written_by_the_models_template(tmp_path: Path) -> None:
    shared = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "A"}]
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT}, {"id": 1, "conversations": shared}, {"messages": []})
    assert conversations(path) == [CHAT_TEXT, f"{CHAT_TEXT}<assistant>A</s>"]
    assert conversations(lines(tmp_path / "b.jsonl", {"chat": CHAT, "messages": 1}), "chat") == [CHAT_TEXT]
    assert conversations(table(tmp_path / "a.parquet", {"id": [1, 2], "messages": [CHAT, CHAT[1:]]})) == [
        CHAT_TEXT,
        "<s><user>Hi</s>",
    ]


def test_text_comes_before_messages_and_a_file_may_have_both(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT, "text": "One."}, {"messages": CHAT})
    assert pieces(path, None, TEMPLATE) == [Piece("One.", True), Piece(CHAT_TEXT, True, is_chat=True)]
    both = table(tmp_path / "a.parquet", {"messages": [CHAT], "text": ["One."]})
    assert texts(both) == ["One."]
    assert conversations(both, "messages") == [CHAT_TEXT]


def test_keys_without_a_value_are_not_there_for_the_template(tmp_path: Path) -> None:
    """A table has every key in every message; templates ask whether one is there."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %};"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = table(tmp_path / "a.parquet", {"messages": [[{"role": "user", "content": "Hi", "tool_calls": None}, call]]})
    (found,) = pieces(path, None, template)
    assert found.text == 'Hi;[{"name": "f"}];'


def test_a_long_conversation_comes_in_pieces(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * PIECE_CHARS}, *CHAT[1:]]
    found = pieces(lines(tmp_path / "a.jsonl", {"messages": long}), None, TEMPLATE)
    assert "".join(piece.text for piece in found) == f"<s><user>{'x' * PIECE_CHARS}</s><user>Hi</s>"
    assert [(piece.begins, piece.is_chat) for piece in found] == [(True, True), (False, True)]


def test_the_date_in_a_template_is_always_the_same(tmp_path: Path) -> None:
    """The same text gives the same tokens on another day, with which a profile goes on."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    (found,) = pieces(lines(tmp_path / "a.jsonl", {"messages": CHAT}), None, template)
    assert found.text == "01 Jan 2026 Be kind."


def test_conversations_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "One."}, {"messages": CHAT})
    assert said(path, None, None) == (
        f"{path}: line 2: field 'messages' has conversations, and the model has no chat template; add "
        "chat_template.jinja to the model's folder, or give plain text"
    )
    refusing = ChatTemplate("{{ raise_exception('no system messages') }}")
    assert said(path, None, refusing) == (
        f"{path}: line 2: field 'messages': the model's chat template failed (no system messages); "
        "change or remove this conversation"
    )


def test_a_source_that_is_not_there_is_refused() -> None:
    assert said("nowhere.txt") == "--data nowhere.txt: no such file"
    assert said("/nowhere/at all") == (
        "--data /nowhere/at all: no such file or folder, nor a data set's name (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT)"
    )
    assert said("a:b:c:d").startswith("--data a:b:c:d: no such file or folder, nor a data set's name")


def test_a_file_of_another_kind_is_refused_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    for name, found in (("a.csv", ".csv"), ("README", "no suffix")):
        (tmp_path / name).write_text("text\nA\n")
        path = tmp_path / name
        assert said(path) == f"--data {path}: found {found}, expected {KINDS}; convert or rename it"
    os.mkfifo(tmp_path / "a.txt")
    assert said(tmp_path / "a.txt") == f"--data {tmp_path / 'a.txt'}: is not a regular file, expected {KINDS}"


def test_a_field_of_what_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    assert said(tmp_path / "a.txt", "body") == (
        f"--field body: {tmp_path / 'a.txt'} is plain text without fields; remove --field"
    )
    with pytest.raises(RunError, match=r"^--field text: the sample is plain text without fields; remove --field$"):
        open_documents(None, "text", None)


def test_a_text_file_that_is_not_utf_8_is_refused_at_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for raw, found in [
        (b"ab\xe9cd", "0xe9 at byte 2"),
        ("é".encode("utf-16"), "0xff at byte 0"),
        ("ab🦊".encode()[:-1], "0xf0 at byte 2"),
        (b"x" * (PIECE_CHARS - 1) + "é".encode() + b"\xff", "0xff at byte 262,145"),
        (b"x" * (PIECE_CHARS - 1) + b"\xc3\xff", "0xc3 at byte 262,143"),
    ]:
        with case(raw, found):
            path.write_bytes(raw)
            assert said(path) == f"{path}: found {found}, expected UTF-8 text; convert the file with iconv"


def test_a_json_line_that_is_unfit_is_refused_by_its_number(tmp_path: Path) -> None:
    path, half = tmp_path / "a.jsonl", r"expected whole characters; remove it"
    for line, fault in [
        (b'{"text": "\xe9"}', "found 0xe9 at byte 10, expected UTF-8 text; convert the file with iconv"),
        (b'{"text": "A"', "not valid JSON (Expecting ',' delimiter, column 13); expected one object on each line"),
        (b"[", "not valid JSON (Expecting value, column 2); expected one object on each line"),
        (b'["A"]', "found ['A'], expected one object on each line"),
        (b'{"body": "A", "n": 1}', f"{NO_FIELD}, found 'body', 'n'; {NAME_IT}"),
        (b"{}", f"{NO_FIELD}, found none; {NAME_IT}"),
        (b'{"text": null}', f"field 'text' is None, {NEITHER}"),
        (b'{"text": ["A sentence of more than a line", 12345]}',
            f"field 'text' is ['A sentence of more than a line', 1234…, {NEITHER}"),
        (b'{"messages": {"role": "user"}}', f"field 'messages' is {{'role': 'user'}}, {NEITHER}"),
        (b'{"messages": [{"role": "user", "content": "Hi"}, {"content": "A"}]}',
            f"field 'messages': message 2 is {{'content': 'A'}}, {NO_MESSAGE}"),
        (b'{"conversations": [{"from": 3, "value": "A"}]}',
            f"field 'conversations': message 1 is {{'from': 3, 'value': 'A'}}, {NO_MESSAGE}"),
        (b'{"messages": [{"role": "user", "content": null}]}',
            f"field 'messages': message 1 is {{'role': 'user', 'content': None}}, {NO_MESSAGE}"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            rf"field 'messages' contains '\ud83d' at character 9, {half}"),
        (b'{"text": "A \\ud83d B"}', rf"field 'text' contains '\ud83d' at character 2, {half}"),
    ]:  # fmt: skip
        with case(line, fault):
            path.write_bytes(b'{"text": "Fit."}\n\n' + line + b"\n")
            assert said(path) == f"{path}: line 3: {fault}"


def test_a_line_has_whole_surrogate_pairs_and_a_certain_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "A \\ud83e\\udd8a"}')
    assert texts(path) == ["A 🦊"]
    path.write_text('{"text": "12345"}\n')  # 18 bytes
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 18)
    assert texts(path) == ["12345"]
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 17)
    assert said(path) == f"{path}: line 1: longer than 17 bytes; split the document into several lines"


def test_a_parquet_file_that_is_unfit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert said(table(path, {"body": ["A"]})) == f"{path}: {NO_FIELD}, found 'body'; {NAME_IT}"
    many = table(path, {f"column{n:02}": ["A"] for n in range(11)})
    assert said(many).endswith(f"'column08', 'column09', …; {NAME_IT}")
    assert said(table(path, {"text": ["A", None]})) == (f"{path}: row 2: field 'text' is None, {NEITHER}")
    path.write_bytes(b"no parquet at all")
    assert said(path).startswith(f"{path}: pyarrow cannot read it (Parquet magic bytes not found in footer")
    table(path, {"text": [np.random.default_rng(0).bytes(50).hex() for _ in range(50)]})
    raw = bytearray(path.read_bytes())
    raw[4:300] = bytes(296)
    path.write_bytes(raw)
    assert said(path).startswith(f"{path}: pyarrow cannot read it (")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_folder_of_files_is_read_by_datasets(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    if kind == "jsonl":
        lines(folder / "train.jsonl", *TWO)
        lines(folder / "test.jsonl", {"text": "Three.", "n": 3})
    else:
        table(folder / "train.parquet", {"text": ["One.", "Two."], "n": [1, 2]})
        table(folder / "test.parquet", {"text": ["Three."], "n": [3]})
    assert texts(folder) == ["One.", "Two."]
    assert texts(f"{folder}::test") == ["Three."]
    assert texts(f"{folder}:default:test") == ["Three."]
    place = f"--data {folder}"
    assert said(folder, "body") == f"{place}: has no field 'body', found 'text', 'n'; {NAME_IT}"
    assert said(folder, "n") == f"{place}: row 1: field 'n' is 1, {NEITHER}"
    assert re.fullmatch(
        rf"{place}::dev: reading it as a data set failed \(Bad split: dev. Available splits: .*\)",
        said(f"{folder}::dev"),
    )
    assert said(f"{folder}:other").startswith(
        f"{place}:other: reading it as a data set failed (BuilderConfig 'other' not found."
    )


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(TWO)


def test_a_saved_data_set_is_read(saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved.save_to_disk(folder)
    assert texts(folder) == texts(f"{folder}:") == ["One.", "Two."]
    place = f"--data {folder}"
    assert said(folder, "n") == f"{place}: row 1: field 'n' is 1, {NEITHER}"
    assert said(folder, "body") == f"{place}: has no field 'body', found 'text', 'n'; {NAME_IT}"
    assert said(f"{folder}::train") == f"{place}::train: has no split 'train', found no splits; write {folder}"
    assert said(f"{folder}:default") == (
        f"{place}:default: a saved data set has no configurations; write {folder}::SPLIT"
    )


def test_a_saved_data_set_of_conversations_or_several_splits_is_read(saved: Any, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"messages": CHAT, "source": "a"}]).save_to_disk(tmp_path / "chat")
    assert conversations(tmp_path / "chat") == [CHAT_TEXT]
    folder = tmp_path / "saved"
    other = saved.select([1])
    datasets.DatasetDict({"test": other, "train": saved}).save_to_disk(folder)
    assert texts(folder) == ["One.", "Two."]
    assert texts(f"{folder}::test") == ["Two."]
    datasets.DatasetDict({"test": other, "dev": saved}).save_to_disk(tmp_path / "no-train")
    folder = tmp_path / "no-train"
    assert said(folder) == (f"--data {folder}: has no split 'train', found 'test', 'dev'; write {folder}::SPLIT")


def test_folders_without_data_and_a_state_of_something_else_are_refused(tmp_path: Path) -> None:
    failed = f"--data {tmp_path}: reading it as a data set failed ("
    assert said(tmp_path) == f"{failed}The directory at {tmp_path} doesn't contain any data files)"
    (tmp_path / "dataset_info.json").write_text("{}")
    for state in ("{}", "[]", "{"):
        (tmp_path / "state.json").write_text(state)
        assert said(tmp_path).startswith(failed), state


@pytest.mark.parametrize("name", ["someone/some-text", "some-text", "some-text:config:test"])
def test_without_network_one_line_says_so(name: str) -> None:
    assert said(name) == (
        f"--data {name}: no such file or folder; reading it as a data set failed "
        f"(Couldn't reach {name.partition(':')[0]!r} on the Hub (OfflineModeIsEnabled))"
    )


def test_without_the_packages_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "a.parquet", {"text": ["A"]})
    for package in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    install = "run pip install 'moe-pack[convert]'"
    assert (
        said("some-text") == f"--data some-text: no such file or folder; data sets need the package datasets; {install}"
    )
    assert said(tmp_path) == f"--data {tmp_path}: data sets need the package datasets; {install}"
    assert said(path) == f"--data {path}: Parquet files need the package pyarrow; {install}"
    assert texts(lines(tmp_path / "a.jsonl", *TWO)) == ["One.", "Two."]
