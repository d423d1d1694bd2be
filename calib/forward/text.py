"""Calibration text: the documents that `--data` names, as sequences of tokens.

`open_documents` reads our sample, a file, a saved data set or one on the hub in pieces of bounded size, only as far as
they are used. datasets and pyarrow (the extra `convert`) are imported here, when they are needed, and nowhere else.
"""

import codecs
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moe_pack import runtime
from moe_pack.formats import RunError

DEFAULT_FIELDS = ("text", "messages", "conversations")  # the first that a source has
NUM_PROSE_PARTS = 8
PIECE_CHARS = 1 << 18  # a third of a second of a tokenizer's time: little is wasted if a few thousand tokens are enough
MAX_LINE_BYTES = 64 << 20

_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_INSTALL = "run pip install 'moe-pack[convert]'"
# One round of the sample's parts: 8 sequences of prose (its parts 0 to 7), 5 of conversations (8), 4 of code (9), 3 of
# other languages (10). A few successive sequences have several kinds.
_SAMPLE_TURNS = (0, 8, 9, 10, 1, 8, 2, 9, 3, 8, 10, 4, 9, 5, 8, 6, 9, 10, 8, 7)
_NAME_IT = "name the field of the text or the messages with --field"
_SHARED_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
# For templates that write the date: the same text gives the same tokens every day.
_DATE = datetime(2026, 1, 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """A document or, if it has more than `PIECE_CHARS` characters, a part of it that ends at a line's end if it can."""

    text: str
    begins: bool  # whether it is the beginning of a document
    is_chat: bool = False  # whether a chat template wrote it, which writes the special tokens too


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a source."""

    name: str  # for people
    place: str  # for messages
    # The documents' pieces in order: several tuples of the sample, or one part that can be iterated once
    parts: tuple[Iterable[Piece], ...]
    turns: tuple[int, ...] = (0,)  # the parts that give the sequences of a round, in order


def open_documents(data: str | None, field: str | None, template: runtime.ChatTemplate | None) -> Documents:
    """Opens the documents of `data`, without those of white space alone.

    Args:    data: None for the sample; a .txt (one document), .jsonl or .json (an object a line) or .parquet file; a
             folder that save_to_disk of datasets wrote, or another one it can load; else the name of a data set on the
             hub, read as a stream. `:CONFIG:SPLIT` may follow folder and name, either empty; `train` is the default.
             field: of an object or row, with the text or the messages; None: the first of `DEFAULT_FIELDS`, or plain
             text.
    Raises:  RunError, here or while pieces are read, if there is no such source, it cannot be read, the field contains
             neither text nor messages, or conversations have no template or fail in it.
    """
    if data is None:
        _refuse_field(field, "the sample")
        return Documents(
            "the sample: prose, chat, code and languages", "the sample", _sample_parts(template), _SAMPLE_TURNS
        )
    path, place = Path(data), f"--data {data}"
    column = _Column(field, template)
    if path.is_dir() or not (path.exists() or path.suffix in _FILE_READERS):
        documents = _data_set_documents(place, *_data_set(data, place), column)
        return Documents(data, place, (_all_pieces(documents),))
    return Documents(data, place, (_file_reader(path, place)(path, column),))


def _sample_parts(template: runtime.ChatTemplate | None) -> tuple[tuple[Piece, ...], ...]:
    folder = files("moe_pack.calib.forward").joinpath("sample")
    prose, chat, code, languages = (
        folder.joinpath(name).read_text("utf-8") for name in ("prose.txt", "chat.jsonl", "code.txt", "languages.txt")
    )
    conversations = [json.loads(line)["messages"] for line in chat.splitlines()]
    return (
        *prose_parts(prose),
        tuple(_all_pieces(_sample_conversation(messages, template) for messages in conversations)),
        *(tuple(_all_pieces(map(_Document, text.split("\n\f\n")))) for text in (code, languages)),
    )


def prose_parts(prose: str) -> tuple[tuple[Piece, ...], ...]:
    """Returns a text's chapters, between empty lines, by the eighth of the text in which they begin."""
    parts: list[list[Piece]] = [[] for _ in range(NUM_PROSE_PARTS)]
    offset = 0
    for chapter in prose.split("\n\n"):
        if chapter:
            parts[offset * NUM_PROSE_PARTS // len(prose)].extend(_pieces(_blocks(chapter)))
        offset += len(chapter) + 2
    return tuple(tuple(part) for part in parts)


def _sample_conversation(messages: list[dict[str, object]], template: runtime.ChatTemplate | None) -> "_Document":
    """Returns a conversation of the sample as the model's template writes it, else with the roles' names."""
    if template is not None:
        try:
            return _Document(template.render(messages, add_generation_prompt=False, now=_DATE), is_chat=True)
        except RunError:
            pass
    return _Document("\n\n".join(f"{str(message['role']).capitalize()}: {message['content']}" for message in messages))


def _refuse_field(field: str | None, place: str) -> None:
    if field is not None:
        raise RunError(f"--field {field}: {place} is plain text without fields; remove --field")


@dataclass(frozen=True, slots=True)
class _Document:
    text: str
    is_chat: bool = False


def _pieces(blocks: Iterable[str], is_chat: bool = False) -> Iterator[Piece]:
    """Yields the pieces of a document in blocks of any size; none if it is white space alone."""
    text, begins = "", True
    for block in blocks:
        text += block
        while len(text) > PIECE_CHARS:
            end = _piece_end(text)
            yield Piece(text[:end], begins, is_chat)
            text, begins = text[end:], False
    if text.strip() or (text and not begins):
        yield Piece(text, begins, is_chat)


def _piece_end(text: str) -> int:
    """Returns the end of a piece: after its last line, else before its last blank, with which a word's token begins."""
    line_end = text.rfind("\n", 0, PIECE_CHARS) + 1
    return line_end or max(text.rfind(" ", 0, PIECE_CHARS), 0) or PIECE_CHARS


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def _all_pieces(documents: Iterable[_Document]) -> Iterator[Piece]:
    for document in documents:
        yield from _pieces(_blocks(document.text), document.is_chat)


@dataclass(frozen=True, slots=True)
class _Column:
    field: str | None  # its name, None for the first of `DEFAULT_FIELDS` that is there
    template: runtime.ChatTemplate | None  # for conversations

    def name(self, names: Iterable[str], place: str) -> str:
        names = list(names)
        wanted = DEFAULT_FIELDS if self.field is None else (self.field,)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            listed = ", ".join(map(repr, names[:10])) + (", …" if len(names) > 10 else "")
            raise RunError(
                f"{place}: has no field {' or '.join(map(repr, wanted))}, found {listed or 'none'}; {_NAME_IT}"
            )
        return found

    def document_of(self, row: dict[str, object], place: str) -> _Document:
        name = self.name(row, place)
        return self.document(row[name], name, place)

    def document(self, value: object, name: str, place: str) -> _Document:
        place = f"{place}: field {name!r}"
        if isinstance(value, str):
            return _Document(_checked(value, place))
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise RunError(f"{place} is {_short(value)}, expected text or a list of messages; {_NAME_IT}")
        messages = [_message(entry, number, place) for number, entry in enumerate(value, 1)]
        if not messages:
            return _Document("")
        if self.template is None:
            raise RunError(
                f"{place} has conversations, and the model has no chat template; add chat_template.jinja to the "
                "model's folder, or give plain text"
            )
        try:
            text = self.template.render(messages, add_generation_prompt=False, now=_DATE)
        except RunError as fault:
            raise RunError(f"{place}: {fault}; change or remove this conversation") from fault
        return _Document(_checked(text, place), is_chat=True)


def _message(entry: dict[str, object], number: int, place: str) -> dict[str, object]:
    """Returns a message as templates read it, without empty keys; ShareGPT's has `from` and `value`."""
    found = {key: value for key, value in entry.items() if value is not None}
    if "role" not in found and "from" in found:
        role = found.pop("from")
        found = {"role": _SHARED_ROLES.get(role, role) if isinstance(role, str) else role} | found
        found["content"] = found.pop("value", None)
    if "tool_calls" in found:
        found.setdefault("content", "")
    if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str):
        raise RunError(
            f"{place}: message {number} is {_short(entry)}, expected 'role' and 'content' (or 'from' and 'value') "
            "as text; change or remove this conversation"
        )
    return found


def _file_reader(path: Path, place: str) -> "_FileReader":
    expected = f"{', '.join(_FILE_READERS)} or a folder"
    if not path.exists():
        raise RunError(f"{place}: no such file")
    if not path.is_file():
        raise RunError(f"{place}: is not a regular file, expected {expected}")
    if path.suffix not in _FILE_READERS:
        raise RunError(f"{place}: found {path.suffix or 'no suffix'}, expected {expected}; convert or rename it")
    return _FILE_READERS[path.suffix]


def _plain_pieces(path: Path, column: _Column) -> Iterator[Piece]:
    _refuse_field(column.field, str(path))
    return _pieces(_decoded(path))


_FileReader = Callable[[Path, _Column], Iterator[Piece]]
_FILE_READERS: dict[str, _FileReader] = {
    ".txt": _plain_pieces,
    ".jsonl": lambda path, column: _all_pieces(_json_documents(path, column)),
    ".json": lambda path, column: _all_pieces(_json_documents(path, column)),
    ".parquet": lambda path, column: _all_pieces(_parquet_documents(path, column)),
}


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as fault:
        raise RunError(f"{path}: cannot be read ({fault.strerror})") from fault


def _decoded(path: Path) -> Iterator[str]:
    """Yields a file's text in blocks, without a byte order mark."""
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
    byte = f"0x{fault.object[fault.start]:02x} at byte {start + fault.start:,}"
    return f"found {byte}, expected UTF-8 text; convert the file with iconv"


def _json_documents(path: Path, column: _Column) -> Iterator[_Document]:
    with _opened(path) as file:
        for number in count(1):
            line, place = file.readline(MAX_LINE_BYTES + 1), f"{path}: line {number:,}"
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise RunError(f"{place}: longer than {MAX_LINE_BYTES:,} bytes; split the document into several lines")
            if line.strip():
                yield column.document_of(_json_object(line.rstrip(), place), place)


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


def _parquet_documents(path: Path, column: _Column) -> Iterator[_Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as fault:
        raise RunError(f"--data {path}: Parquet files need the package pyarrow; {_INSTALL}") from fault
    # Without buffer size and pre_buffer, the column of a row group is read whole.
    with (
        _one_line(f"{path}: pyarrow cannot read it", (OSError, ArrowException)),
        ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file,
    ):
        name = column.name(file.schema_arrow.names, str(path))
        values = (v for batch in file.iter_batches(_BATCH_ROWS, columns=[name]) for v in batch.column(0).to_pylist())
        for number, value in enumerate(values, 1):
            yield column.document(value, name, f"{path}: row {number:,}")


def _data_set(data: str, place: str) -> tuple[str, str | None, str | None]:
    """Returns a data set's name or folder, and its configuration and split if they are given."""
    if Path(data).is_dir():
        return data, None, None
    name, config, split, *more = *data.split(":"), "", ""
    if any(more) or not (Path(name).is_dir() or _NAME.fullmatch(name)):
        raise RunError(f"{place}: no such file or folder, nor a data set's name (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT)")
    return name, config or None, split or None


def _data_set_documents(
    source: str, name: str, config: str | None, split: str | None, column: _Column
) -> Iterator[_Document]:
    place = f"{source}:" if Path(name).is_dir() else f"{source}: no such file or folder;"
    try:
        import datasets
        from pyarrow import ArrowException
    except ModuleNotFoundError as fault:
        raise RunError(f"{place} data sets need the package datasets; {_INSTALL}") from fault
    # datasets raises the first three itself, and the next two for a state.json that another program wrote.
    broken = (OSError, ValueError, RuntimeError, LookupError, TypeError)
    faults = (*broken, datasets.exceptions.DatasetsError, ArrowException)
    with _one_line(f"{place} reading it as a data set failed", faults):
        if any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            rows = _load_saved(datasets.load_from_disk(name), name, config, split, source)  # by save_to_disk
        else:
            rows = datasets.load_dataset(name, config, split=split or "train", streaming=True)
        if rows.column_names is not None:
            # Others may be costly to decode: pictures, sound.
            rows = rows.select_columns([column.name(rows.column_names, source)])
        for number, row in enumerate(rows, 1):
            yield column.document_of(row, f"{source}: row {number:,}")


def _load_saved(saved: Any, name: str, config: str | None, split: str | None, place: str) -> Any:
    splits = list(saved) if isinstance(saved, dict) else []
    split = split or ("train" if splits else None)
    if config is not None:
        raise RunError(f"{place}: a saved data set has no configurations; write {name}::SPLIT")
    if split is not None and split not in splits:
        raise RunError(
            f"{place}: has no split {split!r}, found {', '.join(map(repr, splits)) or 'no splits'}; "
            f"write {name}{'::SPLIT' if splits else ''}"
        )
    return saved if split is None else saved[split]


@contextmanager
def _one_line(place: str, faults: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except faults as fault:
        raise RunError(f"{place} ({_first_line(fault)})") from fault


def _checked(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as fault:  # JSON can write half a surrogate pair; no tokenizer takes it
        half = f"{text[fault.start]!a} at character {fault.start:,}"
        raise RunError(f"{place} contains {half}, expected whole characters; remove it") from fault
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0][:200] if lines else type(fault).__name__


MIN_TOKENS = 256  # fewer tokens measure nothing: an average one of 64 experts would see a handful
HELD_OUT_SHARE = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sequences of a text's tokens."""

    name: str  # of the source, for people
    sequences: NDArray[np.int32]  # [N, S]
    sha256: str  # hex digest of the sequences as little-endian int32
    notes: tuple[str, ...]  # warnings for the user


def read_tokens(
    source: str | None, field: str | None, text: runtime.Text, num_tokens: int, sequence_length: int
) -> Tokens:
    """Returns at least `num_tokens` tokens of a source in whole sequences, or all whole sequences if it has fewer.

    Meaning: documents one after the other, each with the tokenizer's special tokens (a conversation with its
             template's), cut every S tokens; the first ceil(num_tokens / S) sequences. The sample's parts give
             sequences in turn; if they have too few, the sample is read in order. Documents are tokenised in pieces
             (`PIECE_CHARS`): where two pieces meet, a token or two may differ, and tokens that end a text come after
             the first piece.
    Args:    source: --data, None for the sample.   field: --field, None for the default.
    Raises:  RunError if the source cannot be read; if all of it is less than a sequence or `MIN_TOKENS`; if the
             tokenizer gives tokens that the model does not have.
    """
    assert num_tokens > 0 and sequence_length > 0, f"{num_tokens} tokens in sequences of {sequence_length}"
    documents = open_documents(source, field, text.chat_template)
    wanted = -(-num_tokens // sequence_length)
    cut = _CutText.of(documents, text, wanted, sequence_length)
    if len(cut.sequences) < wanted and len(documents.parts) > 1:
        whole = replace(documents, parts=(chain(*documents.parts),), turns=(0,))
        cut = _CutText.of(whole, text, wanted, sequence_length)
    return _tokens(documents.name, documents, cut, num_tokens, sequence_length)


def unseen_tokens(text: runtime.Text, num_tokens: int, sequence_length: int) -> Tokens:
    """Returns tokens from the ends of the sample's parts, last sequences first, which short profiles do not read."""
    documents = open_documents(None, None, text.chat_template)
    wanted = -(-num_tokens // sequence_length)
    parts = [
        _CutText.of(replace(documents, parts=(part,), turns=(0,)), text, None, sequence_length)
        for part in documents.parts
    ]
    reversed_parts = [iter(part.sequences[::-1]) for part in parts]
    cut = _CutText(
        list(islice(_in_turn([reversed_parts[turn] for turn in documents.turns]), wanted)),
        sum(part.num_tokens for part in parts),
    )
    return _tokens(f"the end of {documents.name}", documents, cut, num_tokens, sequence_length)


def num_held_out(num_sequences: int) -> int:
    """Returns how many sequences, from the end, are held out for checks: a fifth, at least one if there are two."""
    return max(num_sequences // HELD_OUT_SHARE, 1) if num_sequences > 1 else 0


def _tokens(name: str, documents: Documents, cut: "_CutText", num_tokens: int, sequence_length: int) -> Tokens:
    is_short = len(cut.sequences) < -(-num_tokens // sequence_length)
    notes = (_shortage(documents, cut, num_tokens, sequence_length),) if is_short else ()
    sequences = np.stack(cut.sequences)  # [N, S]
    return Tokens(name, sequences, hashlib.sha256(sequences.astype("<i4").tobytes()).hexdigest(), notes)


@dataclass(frozen=True, slots=True)
class _CutText:
    """Sequences cut from a text, int32 [S] each, and the number of all tokens that were read to make them."""

    sequences: list[NDArray[np.int32]]
    num_tokens: int

    @classmethod
    def of(cls, documents: Documents, text: runtime.Text, wanted: int | None, sequence_length: int) -> "_CutText":
        cutters = [_Cutter(_token_ids(part, text), sequence_length) for part in documents.parts]
        sequences = list(islice(_in_turn([cutters[turn] for turn in documents.turns]), wanted))
        num_tokens = len(sequences) * sequence_length + sum(len(cutter.left) for cutter in cutters)
        return cls(sequences, num_tokens)


class _Cutter:
    """Cuts a stream of tokens into sequences; `left` are the remaining tokens."""

    def __init__(self, ids: Iterator[NDArray[np.int32]], sequence_length: int) -> None:
        self.left = np.empty(0, np.int32)
        self._ids = ids
        self._sequence_length = sequence_length

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return self

    def __next__(self) -> NDArray[np.int32]:
        while len(self.left) < self._sequence_length:
            self.left = np.concatenate([self.left, next(self._ids)])
        sequence, self.left = np.split(self.left, [self._sequence_length])
        return sequence


def _in_turn(parts: Iterable[Iterator[NDArray[np.int32]]]) -> Iterator[NDArray[np.int32]]:
    """Yields a sequence of each part in turn until all have ended; a part may have several turns."""
    turns = deque(parts)
    while turns:
        part = turns.popleft()
        sequence = next(part, None)
        if sequence is not None:
            yield sequence
            turns.append(part)


def _token_ids(pieces: Iterable[Piece], text: runtime.Text) -> Iterator[NDArray[np.int32]]:
    vocab_size = text.vocab_size
    for piece in pieces:
        ids = np.array(text.encode(piece.text, special_tokens=piece.begins and not piece.is_chat), np.int64)
        if ids.size and ids.max() >= vocab_size:
            raise RunError(
                f"tokenizer.json: gives token {ids.max():,}, expected less than config.json's vocab_size "
                f"{vocab_size:,}; use the tokenizer of this model"
            )
        yield ids.astype(np.int32)


def _shortage(documents: Documents, cut: _CutText, num_tokens: int, sequence_length: int) -> str:
    """Returns the note that a source has fewer tokens than asked for; refuses too few to measure anything."""
    place, least = documents.place, max(sequence_length, MIN_TOKENS)
    if not cut.num_tokens:
        raise RunError(f"{place}: found no text; give a source with text")
    if cut.num_tokens < least:
        raise RunError(
            f"{place}: found {cut.num_tokens:,} tokens, expected at least {least:,} "
            f"(a sequence has {sequence_length:,}); give more text"
        )
    num_used = len(cut.sequences) * sequence_length
    return (
        f"{place}: found {cut.num_tokens:,} tokens, --tokens asks for {num_tokens:,}; "
        f"the {num_used:,} tokens of its whole sequences are used"
    )
