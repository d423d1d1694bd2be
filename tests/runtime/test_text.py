"""Tokenizers: texts to tokens and back, added tokens, and text that comes in pieces."""

import json
import random
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL, PackMaker, TinyMixtral, pack
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe_pack.formats import CheckpointError, Pack, PackError, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.gguf.vocabulary import vocabulary_fields
from moe_pack.runtime import Text
from moe_pack.runtime.text import within


@pytest.fixture
def text(demo_pack: PackMaker) -> Text:
    with Pack(demo_pack("up", 4)) as opened:
        return Text(opened)


def text_of_pack(folder: Path, config: dict[str, Any] | None = None, **files: str) -> Text:
    """The text of a pack made of small random weights, the demo's tokenizer, and other files by stem."""
    source = TinyMixtral(config=config or {}).write(folder / "source")
    (source / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    for stem, content in files.items():
        (source / f"{stem}.json").write_text(content)
    pack(source, folder / "packed")
    with Pack(folder / "packed") as opened:
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


def test_the_end_of_text_may_be_many_one_or_none(new_folder: Callable[[], Path]) -> None:
    for generation, config, expected in [
        ('{"eos_token_id": [3, 5]}', {}, {3, 5}),
        ('{"eos_token_id": ["</s>", 5]}', {}, {1, 5}),
        ('{"eos_token_id": "<s>"}', {}, {0}),
        ('{"eos_token_id": null}', {"eos_token_id": 4}, {4}),
        (None, {"eos_token_id": 4}, {4}),
        (None, {}, set()),
    ]:
        with case(generation, config, expected):
            files = {} if generation is None else {"generation_config": generation}
            assert text_of_pack(new_folder(), dict(config), **files).end_ids == expected


def test_an_end_of_text_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"^generation_config.json: eos_token_id"):
        text_of_pack(tmp_path, generation_config='{"eos_token_id": "no token"}')


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
    with pytest.raises(PackError, match=r"^tokenizer.json: the tokenizers library"):
        text_of_pack(tmp_path, tokenizer='{"version": "1.0"}')


def test_a_text_begins_as_the_tokenizer_s_config_says(new_folder: Callable[[], Path]) -> None:
    """Some tokenizers say in their config alone that texts have a beginning; it is put there once."""
    for (tokenizer_config, begins), template in product(
        [
            ({"add_bos_token": True, "bos_token": "<s>"}, True),
            ({"add_bos_token": True, "bos_token": {"content": "<s>", "special": True}}, True),
            ({"add_bos_token": False, "bos_token": "<s>"}, False),
            ({"bos_token": "<s>"}, False),
            ({"add_bos_token": True, "bos_token": None}, False),
            ({}, False),
        ],
        [True, False],
    ):
        with case(tokenizer_config, begins, template):
            tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text("utf-8"))
            if not template:
                tokenizer["post_processor"] = None
            files = {"tokenizer": json.dumps(tokenizer), "tokenizer_config": json.dumps(tokenizer_config)}
            text = text_of_pack(new_folder(), **files)
            plain = text.encode("It was", special_tokens=False)
            assert 0 not in plain
            assert text.encode("It was") == ([0, *plain] if begins or template else plain)


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


SPACE = "\u2581"
WORDS = [f"{SPACE}Hello", f"{SPACE}wor", "ld", SPACE, f"{SPACE}a", "b", "\ufffd", "é", "!", "'s", "."]
SPECIAL = ["<s>", "</s>", "<|call|>"]
SEED = 20240


def byte_level() -> Tokenizer:
    made = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made.add_tokens([AddedToken("<|call|>", special=True)])
    return made


def byte_fallback(*steps: decoders.Decoder) -> Tokenizer:
    """As Llama 2, Mixtral and Gemma have it."""
    words = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made


def metaspace() -> Tokenizer:
    words = [*SPECIAL, *WORDS]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0, False))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made


def word_piece() -> Tokenizer:
    words = [*SPECIAL, "[UNK]", "do", "not", "##ing", "##s", "'", ".", "!", "n't", "a", "é", "##ü", "##\ufffd"]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, without the first space": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
    "metaspace": metaspace,
    "word pieces": word_piece,
}


def text_of(made: Tokenizer, folder: Path) -> Text:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": made.get_vocab_size() + 50}))
    return Text(FolderFiles(folder))


def random_ids(rng: random.Random, made: Tokenizer) -> list[int]:
    """Tokens of all kinds, of bytes most, and numbers beyond the vocabulary, as models with padded rows have them."""
    size, found = made.get_vocab_size(), list[int]()
    characters = made.encode("🦊é東\u0301", add_special_tokens=False).ids
    ranges = [range(size), range(8), range(size - 12, size + 50), [-1, 2**32]]
    for _ in range(rng.randrange(12)):
        start = rng.randrange(len(characters))
        found += characters[start : start + rng.randrange(8)]  # whole characters, and pieces of them
        found += [rng.choice(rng.choice(ranges)) for _ in range(rng.randrange(3))]
    return found


def decoded(made: Tokenizer, ids: list[int], skips: bool) -> str:
    text: str = made.decode([number for number in ids if 0 <= number < 2**32], skip_special_tokens=skips)
    return text


def check_pieces(text: Text, made: Tokenizer, prompt: list[int], answer: list[int], keeps: bool) -> None:
    stream = text.stream(prompt, keeps_special=keeps)
    pieces = [stream.push(token) for token in answer]
    written = [token for token in answer if not (keeps and token in text.answer_end_ids)]
    before = decoded(made, prompt, skips=not keeps)
    whole = decoded(made, prompt + written, skips=not keeps)
    # The first tokens of an answer may complete a character that the prompt has begun.
    shared = next((i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new), len(before))
    assert "".join(pieces) + stream.finish() == whole[shared:]


def test_the_pieces_make_the_whole_text_with_every_kind_of_decoder(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for name, make in KINDS.items():
        made = make()
        text = text_of(made, tmp_path / name)
        for number in range(250):
            prompt = random_ids(rng, made) if number % 4 else []
            answer = random_ids(rng, made)
            with case(name, prompt, answer):
                check_pieces(text, made, prompt, answer, keeps=bool(number % 2))


def test_text_comes_as_soon_as_nothing_after_it_can_change_it(tmp_path: Path) -> None:
    made = byte_fallback(decoders.Strip(" ", 1, 0))
    text = text_of(made, tmp_path / "model")

    def number(word: str) -> int:
        found: int | None = made.token_to_id(word)
        assert found is not None, word
        return found

    stream = text.stream([number("<s>")])
    words = [f"{SPACE}Hello", f"{SPACE}wor", "ld", "<0xC3>", "<0xA9>", "b", "<0xC3>", f"{SPACE}a", "<0xFF>"]
    pieces = [stream.push(number(word)) for word in words]
    assert pieces == ["Hello", " wor", "ld", "", "", "éb", "", "\ufffd a", ""]
    assert stream.finish() == "\ufffd"


def test_a_number_without_a_token_writes_nothing(tmp_path: Path) -> None:
    made = byte_level()
    text = text_of(made, tmp_path / "model")
    ids = text.encode("It was", special_tokens=False)
    stream = text.stream([])
    pieces = [stream.push(token) for token in (ids[0], made.get_vocab_size() + 3, *ids[1:])]
    assert pieces[1] == "" and "".join(pieces) + stream.finish() == "It was"


@pytest.mark.slow
def test_the_pieces_make_the_whole_text_with_every_kind_of_decoder_at_length(tmp_path: Path) -> None:
    rng = random.Random()
    seed = rng.randrange(2**32)
    rng.seed(seed)
    for name, make in KINDS.items():
        made = make()
        text = text_of(made, tmp_path / name)
        for number in range(5_000):
            prompt, answer = random_ids(rng, made), random_ids(rng, made)
            with case(name, f"seed {seed}", prompt, answer):
                check_pieces(text, made, prompt, answer, keeps=bool(number % 2))
