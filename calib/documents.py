"""The documents that `--data` names, in pieces of bounded size: our sample, a file, a saved data set, one of the hub.

Nothing here knows tokens. A source is read as far as its pieces are taken; what lies beyond is not checked.
The packages datasets and pyarrow (the extra `convert`) are imported here, when they are needed, and nowhere else.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from moe_pack.formats import RunError

DEFAULT_FIELD = "text"
NUM_SAMPLE_PARTS = 8
PIECE_CHARS = 1 << 18  # a third of a second of a tokenizer's time: little is lost where a few thousand tokens will do
MAX_LINE_BYTES = 64 << 20

_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_INSTALL = "pip install 'moe-pack[convert]'"


@dataclass(frozen=True, slots=True)
class Piece:
    """A document or, where it has more than `PIECE_CHARS` characters, a stretch of it that ends where a line does.

    `begins`: whether a document begins with it.
    """

    text: str
    begins: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """What a source holds.

    `name`: what is read, for people.   `place`: what messages call it.
    `parts`: the documents' pieces in order. The sample has several parts, tuples; any other source has one, which can
    be gone through once.
    """

    name: str
    place: str
    parts: tuple[Iterable[Piece], ...]


def open_documents(data: str | None, field: str | None) -> Documents:
    """The documents of `data`; those of white space alone are left out.

    Args:    data: None for the sample; a .txt (one document), .jsonl or .json (an object a line) or .parquet file; a
             folder that datasets' save_to_disk wrote, or any other it can load; else a data set's name on the hub,
             read as a stream. Folder and name may go on `:CONFIG:SPLIT`, either left empty; `train` is the default.
             field: where an object or row has its text, `DEFAULT_FIELD` if None; must be None for what has no fields.
    Raises:  RunError, here or while pieces are taken, if there is no such source, it cannot be read, or that field
             holds something else than text.
    """
    if data is None:
        _refuse_field(field, "the sample")
        sample = files("moe_pack.calib").joinpath("sample.txt").read_text("utf-8")
        return Documents("the sample: chapters of public-domain novels", "the sample", sample_parts(sample))
    path, place = Path(data), f"--data {data}"
    if path.is_dir() or not (path.exists() or path.suffix in _FILE_READERS):
        texts = _data_set_texts(_data_set(data, place), field or DEFAULT_FIELD)
        return Documents(data, place, (_all_pieces(texts),))
    return Documents(data, place, (_file_reader(path, place)(path, field),))


def sample_parts(sample: str) -> tuple[tuple[Piece, ...], ...]:
    """A text's chapters, each a document, in contiguous parts of about the same length.

    Meaning: chapters lie between empty lines; each belongs to the eighth of the text in which it begins, so that the
             heads of the parts show every stretch of the text.
    """
    parts: list[list[Piece]] = [[] for _ in range(NUM_SAMPLE_PARTS)]
    offset = 0
    for chapter in sample.split("\n\n"):
        if chapter:
            parts[offset * NUM_SAMPLE_PARTS // len(sample)].extend(_pieces(_blocks(chapter)))
        offset += len(chapter) + 2
    return tuple(tuple(part) for part in parts if part)


def _refuse_field(field: str | None, place: str) -> None:
    if field is not None:
        raise RunError(f"--field {field}: {place} is plain text without fields; leave --field out")


def _pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document, which comes in blocks of any size; none if it is white space alone."""
    held, begins = "", True
    for block in blocks:
        held += block
        while len(held) > PIECE_CHARS:
            end = _piece_end(held)
            yield Piece(held[:end], begins)
            held, begins = held[end:], False
    if held.strip() or (held and not begins):
        yield Piece(held, begins)


def _piece_end(text: str) -> int:
    """Behind the last line end that a piece can hold, else before its last blank (words' tokens begin with theirs)."""
    line_end = text.rfind("\n", 0, PIECE_CHARS) + 1
    return line_end or max(text.rfind(" ", 0, PIECE_CHARS), 0) or PIECE_CHARS


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def _all_pieces(texts: Iterable[str]) -> Iterator[Piece]:
    for text in texts:
        yield from _pieces(_blocks(text))


def _file_reader(path: Path, place: str) -> "_FileReader":
    expected = f"{', '.join(_FILE_READERS)} or a folder"
    if not path.exists():
        raise RunError(f"{place}: no such file")
    if not path.is_file():
        raise RunError(f"{place}: is no regular file, expected {expected}")
    if path.suffix not in _FILE_READERS:
        raise RunError(f"{place}: found {path.suffix or 'no suffix'}, expected {expected}; convert or rename it")
    return _FILE_READERS[path.suffix]


def _plain_pieces(path: Path, field: str | None) -> Iterator[Piece]:
    _refuse_field(field, str(path))
    return _pieces(_decoded(path))


def _json_pieces(path: Path, field: str | None) -> Iterator[Piece]:
    return _all_pieces(_json_texts(path, field or DEFAULT_FIELD))


def _parquet_pieces(path: Path, field: str | None) -> Iterator[Piece]:
    return _all_pieces(_parquet_texts(path, field or DEFAULT_FIELD))


_FileReader = Callable[[Path, str | None], Iterator[Piece]]
_FILE_READERS: dict[str, _FileReader] = {
    ".txt": _plain_pieces,
    ".jsonl": _json_pieces,
    ".json": _json_pieces,
    ".parquet": _parquet_pieces,
}


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as fault:
        raise RunError(f"{path}: cannot be read ({fault.strerror})") from fault


def _decoded(path: Path) -> Iterator[str]:
    """A file's text in blocks, without a byte order mark."""
    decoder, num_read = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(path) as file:
        while True:
            raw = file.read(PIECE_CHARS)
            start = num_read - len(decoder.getstate()[0])  # a character's first bytes wait for its last
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as fault:
                raise RunError(f"{path}: {_wrong_byte(fault, start)}") from fault
            yield text if num_read else text.removeprefix("\ufeff")
            if not raw:
                return
            num_read += len(raw)


def _wrong_byte(fault: UnicodeDecodeError, start: int = 0) -> str:
    found = f"0x{fault.object[fault.start]:02x} at byte {start + fault.start:,}"
    return f"found {found}, expected UTF-8 text; convert the file with iconv"


def _json_texts(path: Path, field: str) -> Iterator[str]:
    with _opened(path) as file:
        for number in count(1):
            line, place = file.readline(MAX_LINE_BYTES + 1), f"{path}: line {number:,}"
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise RunError(f"{place}: more than {MAX_LINE_BYTES:,} bytes; break the document into several lines")
            if line.strip():
                yield _text_of(_json_object(line.rstrip(), place), field, place)


def _json_object(line: bytes, place: str) -> dict[str, object]:
    try:
        value: object = json.loads(line.decode("utf-8-sig"))  # Windows programs begin files with a byte order mark
    except UnicodeDecodeError as fault:
        raise RunError(f"{place}: {_wrong_byte(fault)}") from fault
    except (ValueError, RecursionError) as fault:
        why = f"{fault.msg}, column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else _first_line(fault)
        raise RunError(f"{place}: not valid JSON ({why}); expected one object on each line") from fault
    if not isinstance(value, dict):
        raise RunError(f"{place}: found {_short(value)}, expected one object on each line")
    return value


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as fault:
        raise RunError(f"--data {path}: takes the package pyarrow to read; {_INSTALL}") from fault
    # Without buffer size and pre_buffer, the column of a row group is read whole.
    with (
        _named(f"{path}: pyarrow cannot read it", (OSError, ArrowException)),
        ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file,
    ):
        _check_field(field, file.schema_arrow.names, str(path))
        values = (v for batch in file.iter_batches(_BATCH_ROWS, columns=[field]) for v in batch.column(0).to_pylist())
        for number, value in enumerate(values, 1):
            yield _checked(value, field, f"{path}: row {number:,}")


@dataclass(frozen=True, slots=True)
class _DataSet:
    """A data set's name or folder, its configuration and split where they are given, and what messages call it."""

    name: str
    config: str | None
    split: str | None
    place: str


def _data_set(data: str, place: str) -> _DataSet:
    if Path(data).is_dir():
        return _DataSet(data, None, None, place)
    name, config, split, *more = *data.split(":"), "", ""
    if any(more) or not (Path(name).is_dir() or _NAME.fullmatch(name)):
        raise RunError(f"{place}: no such file or folder, nor a data set's name (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT)")
    return _DataSet(name, config or None, split or None, place)


def _data_set_texts(data_set: _DataSet, field: str) -> Iterator[str]:
    place = data_set.place if Path(data_set.name).is_dir() else f"{data_set.place}: no such file or folder"
    try:
        import datasets
        from pyarrow import ArrowException
    except ModuleNotFoundError as fault:
        raise RunError(f"{place}; to read data sets, {_INSTALL}") from fault
    # The first three are how datasets fails, the next two how it meets a state.json that is something else's.
    broken = (OSError, ValueError, RuntimeError, LookupError, TypeError)
    faults = (*broken, datasets.exceptions.DatasetsError, ArrowException)
    with _named(f"{place}; reading it as a data set failed", faults):
        rows = _saved(datasets, data_set) if _is_saved(data_set) else _streamed(datasets, data_set)
        if rows.column_names is not None:
            _check_field(field, rows.column_names, data_set.place)
            rows = rows.select_columns([field])  # others may be costly to decode: pictures, sound
        for number, row in enumerate(rows, 1):
            yield _text_of(row, field, f"{data_set.place}: row {number:,}")


def _is_saved(data_set: _DataSet) -> bool:
    """Whether save_to_disk wrote it."""
    return any((Path(data_set.name) / marker).exists() for marker in ("state.json", "dataset_dict.json"))


def _saved(datasets: Any, data_set: _DataSet) -> Any:
    found = datasets.load_from_disk(data_set.name)
    splits = list(found) if isinstance(found, datasets.DatasetDict) else []
    split = data_set.split or ("train" if splits else None)
    if data_set.config is not None:
        raise RunError(f"{data_set.place}: a saved data set has no configurations; write {data_set.name}::SPLIT")
    if split is not None and split not in splits:
        raise RunError(
            f"{data_set.place}: has no split {split!r}, found {', '.join(map(repr, splits)) or 'no splits'}; "
            f"write {data_set.name}{'::SPLIT' if splits else ''}"
        )
    return found if split is None else found[split]


def _streamed(datasets: Any, data_set: _DataSet) -> Any:
    return datasets.load_dataset(data_set.name, data_set.config, split=data_set.split or "train", streaming=True)


@contextmanager
def _named(place: str, faults: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turns the faults of a package into one clear line."""
    try:
        yield
    except faults as fault:
        raise RunError(f"{place} ({_first_line(fault)})") from fault


def _check_field(field: str, names: Iterable[str], place: str) -> None:
    names = list(names)
    if field not in names:
        listed = ", ".join(map(repr, names[:10])) + (", …" if len(names) > 10 else "")
        raise RunError(f"{place}: has no field {field!r}, found {listed or 'none'}; name the text's with --field")


def _text_of(row: dict[str, object], field: str, place: str) -> str:
    _check_field(field, row, place)
    return _checked(row[field], field, place)


def _checked(value: object, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise RunError(f"{place}: field {field!r} is {_short(value)}, expected text; name the text's with --field")
    try:
        value.encode()
    except UnicodeEncodeError as fault:  # JSON can write half a surrogate pair; no tokenizer takes it
        found = f"{value[fault.start]!a} at character {fault.start:,}"
        raise RunError(f"{place}: field {field!r} holds {found}, expected whole characters; remove it") from fault
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0][:200] if lines else type(fault).__name__
