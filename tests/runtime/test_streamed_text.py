"""Tokens that come one by one: the pieces of text joined are the text of all tokens, whatever the tokens are."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import case
from support.models import DEMO_MODEL
from tokenizers import AddedToken, Tokenizer, decoders, models

from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

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
