"""Where `--data` leads: each kind of source, how long documents are cut, and what is said of each that is unfit."""

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
from cases import case
from pyarrow import parquet

from moe_pack.calib.forward import text as documents
from moe_pack.calib.forward.text import PIECE_CHARS, Piece, open_documents, sample_parts
from moe_pack.formats import RunError

TWO = [{"text": "One.", "n": 1}, {"text": "Two.", "n": 2}]
KINDS = ".txt, .jsonl, .json, .parquet or a folder"


@pytest.fixture(autouse=True)
def no_hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached, and a cache of the test's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def pieces(data: object, field: str | None = None) -> list[Piece]:
    """Every piece of a source that has one part."""
    (part,) = open_documents(str(data), field).parts
    return list(part)


def texts(data: object, field: str | None = None) -> list[str]:
    """Every document of a source whose documents are short."""
    found = pieces(data, field)
    assert all(piece.begins for piece in found)
    return [piece.text for piece in found]


def said(data: object, field: str | None = None) -> str:
    """The one line that says what is wrong with a source."""
    with pytest.raises(RunError) as caught:
        pieces(data, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def table(path: Path, columns: dict[str, list[object]]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Été.\r\n\n\nZwei 🦊".encode())
    assert pieces(tmp_path / "a.txt") == [Piece("Été.\r\n\n\nZwei 🦊", True)]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffA\ufeff", "utf-8")
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "A"}\n', "utf-8")
    assert texts(tmp_path / "a.txt") == ["A\ufeff"]
    assert texts(tmp_path / "a.jsonl") == ["A"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_each_line_of_a_json_file_is_a_document(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text('{"text": "One.", "score": NaN}\n\n   \r\n{"n": [1], "text": "Tw\\u00f6."}')
    assert texts(path) == ["One.", "Twö."]


def test_each_row_of_a_parquet_file_is_a_document(tmp_path: Path) -> None:
    words = [f"Number {n}." for n in range(1000)]
    assert texts(table(tmp_path / "a.parquet", {"n": list(range(1000)), "text": [*words]})) == words


def test_the_field_may_have_another_name(tmp_path: Path) -> None:
    assert texts(lines(tmp_path / "a.jsonl", {"text": 1, "body": "A"}), "body") == ["A"]
    assert texts(table(tmp_path / "a.parquet", {"text": [1], "body": ["A"]}), "body") == ["A"]


@pytest.mark.parametrize("blank", ["", " \n\t \n"])
def test_documents_of_white_space_alone_are_left_out(blank: str, tmp_path: Path) -> None:
    rows = [{"text": blank}, {"text": "A "}, {"text": blank}]
    assert texts(lines(tmp_path / "a.jsonl", *rows)) == ["A "]
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
    for number, (text, sizes) in enumerate(
        [
            ("x" * PIECE_CHARS, [PIECE_CHARS]),
            ("y\n" + "x" * (PIECE_CHARS - 2), [PIECE_CHARS]),
            ("x" * (PIECE_CHARS + 1), [PIECE_CHARS, 1]),
            ("x" * (PIECE_CHARS - 1) + "\n" + "y", [PIECE_CHARS, 1]),
            ("x" * PIECE_CHARS + "\n", [PIECE_CHARS, 1]),
            ("x" * (PIECE_CHARS - 3) + " yyyy", [PIECE_CHARS - 3, 5]),
            (" " + "x" * PIECE_CHARS, [PIECE_CHARS, 1]),
            ("é🦊" * PIECE_CHARS, [PIECE_CHARS, PIECE_CHARS]),
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(text, sizes):
            (case_folder / "a.txt").write_text(text, "utf-8")
            for path in (case_folder / "a.txt", lines(case_folder / "a.jsonl", {"text": text})):
                found = pieces(path)
                assert [len(piece.text) for piece in found] == sizes
                assert "".join(piece.text for piece in found) == text


def test_the_sample_has_eight_parts_of_whole_chapters_in_order() -> None:
    sample = files("moe_pack.calib.forward").joinpath("sample.txt").read_text("utf-8")
    parts = open_documents(None, None).parts
    chapters = [piece for part in parts for piece in part]
    assert all(piece.begins for piece in chapters)
    assert "\n\n".join(piece.text for piece in chapters) == sample
    sizes = [sum(len(piece.text) for piece in part) for part in parts]
    assert len(sizes) == 8
    longest = max(len(piece.text) for piece in chapters)
    assert max(abs(size - 700_000 / 8) for size in sizes) < longest, "parts are as equal as chapters allow"


def test_a_sample_in_which_a_chapter_fills_parts_has_fewer() -> None:
    text = "a\n\n" + "b" * 40 + "\n\nc\n\n"  # 48 characters, six a part: a and b in the first, c (place 45) in the last
    assert [[piece.text for piece in part] for part in sample_parts(text)] == [["a", "b" * 40], ["c"]]


def test_a_source_that_is_not_there_is_refused() -> None:
    assert said("nowhere.txt") == "--data nowhere.txt: no such file"
    assert said("/nowhere/at all") == (
        "--data /nowhere/at all: no such file or folder, nor a data set's name (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT)"
    )
    assert said("a:b:c:d").startswith("--data a:b:c:d: no such file or folder, nor a data set's name")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name, found in (("a.csv", ".csv"), ("README", "no suffix")):
        (tmp_path / name).write_text("text\nA\n")
        path = tmp_path / name
        assert said(path) == f"--data {path}: found {found}, expected {KINDS}; convert or rename it"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    assert said(tmp_path / "a.txt") == f"--data {tmp_path / 'a.txt'}: is not a regular file, expected {KINDS}"


def test_a_field_of_what_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    assert said(tmp_path / "a.txt", "body") == (
        f"--field body: {tmp_path / 'a.txt'} is plain text without fields; remove --field"
    )
    with pytest.raises(RunError, match=r"^--field text: the sample is plain text without fields; remove --field$"):
        open_documents(None, "text")


def test_a_text_file_that_is_not_utf_8_is_refused_at_the_byte(tmp_path: Path) -> None:
    for number, (raw, found) in enumerate(
        [
            (b"ab\xe9cd", "0xe9 at byte 2"),
            ("é".encode("utf-16"), "0xff at byte 0"),
            ("ab🦊".encode()[:-1], "0xf0 at byte 2"),
            (b"x" * (PIECE_CHARS - 1) + "é".encode() + b"\xff", "0xff at byte 262,145"),
            (b"x" * (PIECE_CHARS - 1) + b"\xc3\xff", "0xc3 at byte 262,143"),
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(raw, found):
            (case_folder / "a.txt").write_bytes(raw)
            assert said(case_folder / "a.txt") == (
                f"{case_folder / 'a.txt'}: found {found}, expected UTF-8 text; convert the file with iconv"
            )


def test_a_json_line_that_is_unfit_is_refused_by_its_number(tmp_path: Path) -> None:
    for number, (line, fault) in enumerate(
        [
            (b'{"text": "\xe9"}', "found 0xe9 at byte 10, expected UTF-8 text; convert the file with iconv"),
            (
                b'{"text": "A"',
                "not valid JSON (Expecting ',' delimiter, column 13); expected one object on each line",
            ),
            (
                b"[",
                "not valid JSON (Expecting value, column 2); expected one object on each line",
            ),
            (b'["A"]', "found ['A'], expected one object on each line"),
            (b'{"body": "A", "n": 1}', "has no field 'text', found 'body', 'n'; name the text field with --field"),
            (b"{}", "has no field 'text', found none; name the text field with --field"),
            (b'{"text": null}', "field 'text' is None, expected text; name the text field with --field"),
            (
                b'{"text": ["A sentence of more than a line", 12345]}',
                "field 'text' is ['A sentence of more than a line', 1234…, expected text; "
                "name the text field with --field",
            ),
            (
                b'{"text": "A \\ud83d B"}',
                r"field 'text' contains '\ud83d' at character 2, expected whole characters; remove it",
            ),
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(line, fault):
            path = case_folder / "a.jsonl"
            path.write_bytes(b'{"text": "Fit."}\n\n' + line + b"\n")
            assert said(path) == f"{path}: line 3: {fault}"


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "A \\ud83e\\udd8a"}')
    assert texts(path) == ["A 🦊"]


def test_a_line_may_have_a_certain_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "12345"}\n')  # 18 bytes
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 18)
    assert texts(path) == ["12345"]
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 17)
    assert said(path) == f"{path}: line 1: longer than 17 bytes; split the document into several lines"


def test_a_parquet_file_that_is_unfit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert (
        said(table(path, {"body": ["A"]}))
        == f"{path}: has no field 'text', found 'body'; name the text field with --field"
    )
    many = table(path, {f"column{n:02}": ["A"] for n in range(11)})
    assert said(many).endswith("'column08', 'column09', …; name the text field with --field")
    assert said(table(path, {"text": ["A", None]})) == (
        f"{path}: row 2: field 'text' is None, expected text; name the text field with --field"
    )
    path.write_bytes(b"no parquet at all")
    assert said(path).startswith(f"{path}: pyarrow cannot read it (Parquet magic bytes not found in footer")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"text": [np.random.default_rng(0).bytes(50).hex() for _ in range(50)]})
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
    assert said(folder, "body") == f"{place}: has no field 'body', found 'text', 'n'; name the text field with --field"
    assert said(folder, "n") == f"{place}: row 1: field 'n' is 1, expected text; name the text field with --field"
    assert re.fullmatch(
        rf"{place}::dev: reading it as a data set failed \(Bad split: dev. Available splits: .*\)",
        said(f"{folder}::dev"),
    )
    assert said(f"{folder}:other").startswith(
        f"{place}:other: reading it as a data set failed (BuilderConfig 'other' not found."
    )


def test_a_folder_that_holds_no_data_is_refused(tmp_path: Path) -> None:
    assert said(tmp_path) == (
        f"--data {tmp_path}: reading it as a data set failed "
        f"(The directory at {tmp_path} doesn't contain any data files)"
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
    assert said(folder, "n") == f"{place}: row 1: field 'n' is 1, expected text; name the text field with --field"
    assert said(folder, "body") == f"{place}: has no field 'body', found 'text', 'n'; name the text field with --field"
    assert said(f"{folder}::train") == f"{place}::train: has no split 'train', found no splits; write {folder}"
    assert said(f"{folder}:default") == (
        f"{place}:default: a saved data set has no configurations; write {folder}::SPLIT"
    )


def test_a_saved_data_set_of_several_splits_is_read(saved: Any, tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "saved"
    other = saved.select([1])
    datasets.DatasetDict({"test": other, "train": saved}).save_to_disk(folder)
    assert texts(folder) == ["One.", "Two."]
    assert texts(f"{folder}::test") == ["Two."]
    datasets.DatasetDict({"test": other, "dev": saved}).save_to_disk(tmp_path / "no-train")
    folder = tmp_path / "no-train"
    assert said(folder) == (f"--data {folder}: has no split 'train', found 'test', 'dev'; write {folder}::SPLIT")


@pytest.mark.parametrize("state", ["{}", "[]", "{"])
def test_a_state_of_something_else_is_refused(state: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(state)
    (tmp_path / "dataset_info.json").write_text("{}")
    assert said(tmp_path).startswith(f"--data {tmp_path}: reading it as a data set failed (")


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
