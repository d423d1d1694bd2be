"""Tokenizers as GGUF metadata: read back they give the tokens of the tokenizers library, or are refused.

By hand, llama.cpp itself gave the same tokens: docs/gguf.md.
"""

import json
import unicodedata
from itertools import combinations
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.cases import case, line_of
from support.models import DEMO_MODEL
from tokenizers import Tokenizer, models, trainers
from transformers.convert_slow_tokenizer import generate_merges

from moe_pack.formats import RunError
from moe_pack.formats.gguf.header import read_headers
from moe_pack.formats.gguf.tokenizer import SPLITS, splitter, tokenizer_files
from moe_pack.formats.gguf.vocabulary import CHECK_TEXT, vocabulary_fields, vocabulary_notes

Values = dict[str, Any]

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# None of these texts is in the product's own check.
PAGE = (
    "Call me Ishmael.  Some years ago, never mind how long precisely, having   little money\r\n\r\n\t- one: 1,024 KiB\n"
    "for (int i = 0; i < 100; ++i) { total += x[i] * 0.5f; }\n\n\n  Ελληνικά, עברית, 日本語のテキスト, 한글, Việt 🎉👍"
)
TEXTS = (PAGE, f"  {PAGE}", *PAGE.splitlines(keepends=True), "", " ", "\n\n", "a  b")


def demo() -> Values:
    """The demo model's tokenizer: byte-level pair encoding with GPT-2's rule."""
    values: Values = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    return values


def added(number: int, content: str, **flags: bool) -> Values:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **usual, "special": True, **flags}


@pytest.fixture(scope="module")
def pieces() -> Values:
    """A small tokenizer with SentencePiece's spaces, of which transformers made the merges from scores."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    often = "an ana nana anana banana bandana na nan anan"  # whose tokens several merges can make
    lines = [SPACE + line.replace(" ", SPACE) for line in (*PAGE.splitlines(), *[often] * 5)] * 3
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    values: Values = json.loads(trained.to_str())
    vocabulary = values["model"]["vocab"]
    scores = {text: -float(number) for text, number in sorted(vocabulary.items(), key=lambda pair: int(pair[1]))}
    values["model"]["merges"] = generate_merges(vocabulary, scores, skip_tokens=special)
    values["added_tokens"] = [added(number, text) for number, text in enumerate(special[:3])]
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    steps = [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    return values | {"normalizer": {"type": "Sequence", "normalizers": steps}}


def as_files(values: Values, **others: Any) -> dict[str, bytes]:
    configs = {f"{name}.json": json.dumps(value).encode() for name, value in others.items()}
    return {"tokenizer.json": json.dumps(values).encode(), **configs}


def size(values: Values) -> int:
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(values))
    return int(tokenizer.get_vocab_size())


def read_back(path: Path, fields: Values) -> dict[str, Any]:
    kinds = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
    lists = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.INT32, float: gguf.GGUFValueType.FLOAT32}
    writer = gguf.GGUFWriter(path / "vocabulary.gguf", "llama")
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, lists[type(value[0])])
        else:
            writer.add_key_value(name, value, kinds[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tokenizer_files(read_headers([path / "vocabulary.gguf"])[0])


def assert_same_tokens(path: Path, values: Values, fields: Values, texts: tuple[str, ...] = TEXTS) -> None:
    original = Tokenizer.from_str(json.dumps(values))
    found = Tokenizer.from_str(json.dumps(read_back(path, fields)["tokenizer.json"]))
    special = "x".join(token["content"] for token in values["added_tokens"])
    for text in (*texts, special, f"<s>{PAGE}</s>\n"):
        assert found.encode(text).ids == original.encode(text).ids, text
        without = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == without, text


def refusal(files: dict[str, bytes], vocab_size: int = 5000) -> str:
    return line_of(RunError, lambda: vocabulary_fields(files, vocab_size))


# --- the rules that split a text


def test_any_two_rules_split_the_check_text_in_different_places() -> None:
    assert unicodedata.is_normalized("NFC", CHECK_TEXT)
    first = {tuple(rules): name for name, rules in reversed(SPLITS.items())}
    words = {}
    for rules, name in first.items():
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        tokenizer = Tokenizer.from_str(json.dumps({"pre_tokenizer": splitter(rules), "model": empty}))
        words[name] = tokenizer.pre_tokenizer.pre_tokenize_str(CHECK_TEXT)
    assert len(words) > 15
    same = [set(pair) for pair in combinations(words, 2) if words[pair[0]] == words[pair[1]]]
    # These two are the same rule in other letters: \s* takes the ends of lines that [\r\n]+ would take.
    assert same == [{"qwen2", "bailingmoe"}]


@pytest.mark.slow
def test_a_rule_is_found_by_what_it_does() -> None:
    for name, rules in SPLITS.items():
        with case(name):
            fields = vocabulary_fields(as_files(demo() | {"pre_tokenizer": splitter(rules)}), 4096)
            found = fields["tokenizer.ggml.pre"]
            assert SPLITS[found] == rules or ("bailing" in name and found == "qwen2")
    digits = {"type": "Digits", "individual_digits": True}
    gpt2 = demo()["pre_tokenizer"]
    assert gpt2["type"] == "ByteLevel" and gpt2["use_regex"]
    cases = ((gpt2, "gpt-2"), ({"type": "Sequence", "pretokenizers": [digits, gpt2]}, "starcoder"))
    for pre_tokenizer, expected in cases:
        with case(expected):
            fields = vocabulary_fields(as_files(demo() | {"pre_tokenizer": pre_tokenizer}), 4096)
            assert fields["tokenizer.ggml.pre"] == expected


def test_of_names_with_the_same_rule_one_begins_and_merges_as_the_tokenizer() -> None:
    for merges_all, begins, expected in (
        (False, True, "llama-bpe"),
        (False, False, "glm4"),
        (True, False, "dbrx"),
        (True, True, "dbrx"),
    ):
        with case(expected):
            values = demo() | {"pre_tokenizer": splitter(SPLITS["llama-bpe"])}
            values["model"]["ignore_merges"] = not merges_all
            if not begins:
                values["post_processor"] = None
            fields = vocabulary_fields(as_files(values), 4096)
            assert fields["tokenizer.ggml.pre"] == expected
            assert fields["tokenizer.ggml.add_bos_token"] is begins


# --- what is written


def test_a_byte_level_tokenizer_reads_back(tmp_path: Path) -> None:
    values = demo()
    values["added_tokens"] += [added(4096, "<think>", special=False), added(4099, "<|end|>")]
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<|end|>", "unk_token": "</s>"}
    for normalizer in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        with case(normalizer):
            values["normalizer"] = normalizer
            files = as_files(values, tokenizer_config=config, generation_config={"eos_token_id": [4097, 1]})
            fields = vocabulary_fields(files, 4101)
            assert_same_tokens(tmp_path, values, fields)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    # The library numbers added tokens itself, and does not leave a number out.
    assert tokens[4096:] == ["<think>", "<|end|>", "[PAD4098]", "[PAD4099]", "[PAD4100]"]
    assert kinds[:3] == [3, 3, 1] and kinds[4096:] == [4, 3, 5, 5, 5]
    assert {type(kind) for kind in kinds} == {int}
    rest = {name: value for name, value in fields.items() if not isinstance(value, list)}
    assert rest == {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 4097, "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.padding_token_id": 4097, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }  # fmt: skip


def test_old_files_with_merges_as_texts_and_without_a_type_are_the_same() -> None:
    values = demo()
    expected = vocabulary_fields(as_files(values), 4096)
    values["model"]["merges"] = [" ".join(merge) for merge in values["model"]["merges"]]
    del values["model"]["type"]
    assert vocabulary_fields(as_files(values), 4096) == expected


def test_a_sentencepiece_tokenizer_reads_back(tmp_path: Path, pieces: Values) -> None:
    fields = vocabulary_fields(as_files(pieces), 421)
    assert_same_tokens(tmp_path, pieces, fields)
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is True
    assert fields["tokenizer.ggml.unknown_token_id"] == 0
    kinds, scores = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.scores"]
    assert kinds == [2, 3, 3, *[6] * 256, *[1] * 161, 5]
    made = ["".join(merge) for merge in pieces["model"]["merges"]]
    numbers = pieces["model"]["vocab"]
    order = [scores[numbers[text]] for text in dict.fromkeys(made)]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)
    assert max(score for text, score in zip(numbers, scores, strict=False) if text not in made) < min(order)


def test_without_a_space_in_front_merges_say_what_scores_cannot(tmp_path: Path, pieces: Values) -> None:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    plain = pieces | {"normalizer": pieces["normalizer"]["normalizers"][1], "pre_tokenizer": split}
    fields = vocabulary_fields(as_files(plain), 420)
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is False
    assert_same_tokens(tmp_path, plain, fields)
    # A way to make a token comes last: the score is that of the first way.
    merges = plain["model"]["merges"]
    last = next(merge for merge in merges if sum("".join(merge) == "".join(each) for each in merges) > 1)
    late = plain | {"model": plain["model"] | {"merges": [*(each for each in merges if each != last), last]}}
    fields = vocabulary_fields(as_files(late), 420)
    assert fields["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.scores" not in fields
    assert_same_tokens(tmp_path, late, fields)
    # llama.cpp begins every text of Gemma 4 with a token, and reads it line by line.
    bare = late | {"post_processor": None}
    assert vocabulary_fields(as_files(bare), 420)["tokenizer.ggml.model"] == "llama"


def test_tokens_around_a_text(tmp_path: Path) -> None:
    values = demo()
    ends = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    template = values["post_processor"]
    template["single"].append(ends)
    template["special_tokens"]["</s>"] = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    fields = vocabulary_fields(as_files(values), 4096)
    assert fields["tokenizer.ggml.add_bos_token"] and fields["tokenizer.ggml.add_eos_token"]
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert_same_tokens(tmp_path, values, fields)

    values["post_processor"] = None
    fields = vocabulary_fields(as_files(values, tokenizer_config={"bos_token": "<s>"}), 4096)
    assert not fields["tokenizer.ggml.add_bos_token"] and not fields["tokenizer.ggml.add_eos_token"]
    assert_same_tokens(tmp_path, values, fields)
    # DeepSeek's tokenizers name it in the config alone.
    config = {"bos_token": "<s>", "add_bos_token": True}
    fields = vocabulary_fields(as_files(values, tokenizer_config=config), 4096)
    assert fields["tokenizer.ggml.add_bos_token"]
    found = Tokenizer.from_str(json.dumps(read_back(tmp_path, fields)["tokenizer.json"]))
    assert found.encode(PAGE).ids == [0, *Tokenizer.from_str(json.dumps(values)).encode(PAGE).ids]

    template["single"].insert(0, ends)
    values["post_processor"] = template
    message = "tokenizer.json: puts several tokens before or after a text; GGUF can name one on each side"
    assert refusal(as_files(values)) == message


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"generation_config": {"eos_token_id": 5}}, [5]),
        ({"generation_config": {"eos_token_id": [7, 5]}, "tokenizer_config": {"eos_token": "</s>"}}, [1, 7, 5]),
        ({"generation_config": {"eos_token_id": [7, 1]}, "tokenizer_config": {"eos_token": "</s>"}}, [1, 7]),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, [9]),
        ({"config": {"model_type": "qwen3_5_moe", "text_config": {"eos_token_id": 9}}}, [9]),
        ({"special_tokens_map": {"eos_token": "</s>"}}, [1]),
        ({"generation_config": {"eos_token_id": [4095, 5000, -1]}}, [4095]),
    ]
    for configs, expected in cases:
        with case(configs):
            fields = vocabulary_fields(as_files(demo(), **configs), 4096)
            names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
            assert [fields[name] for name in names if name in fields] == expected
            written = read_back(tmp_path, fields)["generation_config.json"]["eos_token_id"]
            assert written == (expected[0] if len(expected) == 1 else expected)
            assert vocabulary_notes(as_files(demo(), **configs)) == []
    fields = vocabulary_fields(as_files(demo(), generation_config={"eos_token_id": "</s>"}), 4096)
    assert fields["tokenizer.ggml.eos_token_id"] == 1
    assert refusal(as_files(demo(), generation_config={"eos_token_id": "no token"})) == (
        "generation_config.json: eos_token_id is 'no token', expected a token of the tokenizer, by number or by text, "
        "or a list of them"
    )


def test_chat_templates(tmp_path: Path) -> None:
    both = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    cases: list[tuple[dict[str, bytes], dict[str, Any]]] = [
        (as_files(demo()), {}),
        (as_files(demo(), tokenizer_config={"chat_template": "one"}), {"chat_template": "one"}),
        (as_files(demo(), tokenizer_config={"chat_template": both[:1]}), {}),
        (
            as_files(demo(), tokenizer_config={"chat_template": both}),
            {"chat_template": "usual", "chat_templates": ["tool_use"], "chat_template.tool_use": "tools"},
        ),
        (
            as_files(demo(), tokenizer_config={"chat_template": both}) | {"chat_template.jinja": b"file"},
            {"chat_template": "file"},
        ),
    ]
    for files, expected in cases:
        with case(expected):
            fields = vocabulary_fields(files, 4096)
            found = {name: value for name, value in fields.items() if "chat_template" in name}
            assert found == {f"tokenizer.{name}": value for name, value in expected.items()}
    files = read_back(tmp_path, vocabulary_fields(cases[3][0], 4096))
    named = {entry["name"]: entry["template"] for entry in files["tokenizer_config.json"]["chat_template"]}
    assert named == {"default": "usual", "tool_use": "tools"}


def test_what_gguf_cannot_say_is_noted(tmp_path: Path, pieces: Values) -> None:
    ends = {"generation_config": {"eos_token_id": [1, 2]}}
    assert vocabulary_notes(as_files(pieces, **ends)) == []
    assert vocabulary_notes(as_files(pieces)) == [
        "no file names a token that ends a text (eos_token); llama.cpp takes token 2 for it"
    ]
    texts = {number: text for text, number in pieces["model"]["vocab"].items()}
    assert vocabulary_notes(as_files(pieces, generation_config={"eos_token_id": [2, 300, 301, 302, 303]})) == [
        f"GGUF can name 3 tokens that end an answer; it does not name {texts[302]!r}, {texts[303]!r}"
    ]
    strips = pieces | {"added_tokens": [*pieces["added_tokens"][:2], added(2, "</s>", rstrip=True)]}
    assert vocabulary_notes(as_files(strips, **ends)) == [
        "added tokens such as '</s>' (1 in all) take the spaces around them, or are not found inside words; "
        "GGUF cannot say that"
    ]
    assert_same_tokens(tmp_path, pieces, vocabulary_fields(as_files(strips), 420))
    normalized = pieces | {"added_tokens": [*pieces["added_tokens"][:2], added(2, "</s>", normalized=True)]}
    assert len(vocabulary_notes(as_files(normalized, **ends))) == 1
    assert_same_tokens(tmp_path, pieces, vocabulary_fields(as_files(normalized), 420))
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    first = pieces | {"normalizer": None, "pre_tokenizer": metaspace}
    assert vocabulary_notes(as_files(first, **ends)) == [
        "the tokenizer puts a space before a text that begins with none; llama.cpp puts one before every text, and "
        "after each special token"
    ]
    assert_same_tokens(tmp_path, pieces, vocabulary_fields(as_files(first), 420))
    never = first | {"pre_tokenizer": metaspace | {"prepend_scheme": "never"}}
    assert vocabulary_notes(as_files(never, **ends)) == []
    assert_same_tokens(tmp_path, never, vocabulary_fields(as_files(never), 420))


# --- what is refused


@pytest.mark.slow
def test_a_tokenizer_that_gguf_cannot_say_is_refused(pieces: Values) -> None:
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
    words = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {"[UNK]": 0}}
    words["max_input_chars_per_word"] = 100
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True}
    prefixed = demo()["pre_tokenizer"] | {"add_prefix_space": True}
    no_bytes = pieces["model"] | {"byte_fallback": False}
    cases: list[tuple[Values, str]] = [
        (demo() | {"model": unigram, "added_tokens": []}, "is a Unigram tokenizer; only BPE tokenizers can be written"),
        (demo() | {"model": words, "added_tokens": []}, "is a WordPiece tokenizer; only BPE tokenizers can be written"),
        (demo() | {"normalizer": {"type": "Lowercase"}}, "has the normalizer Lowercase, which GGUF cannot say; "),
        (demo() | {"pre_tokenizer": splitter([r"\p{L}+"])},
         "splits texts by rules that have no name in GGUF; those of "),
        (demo() | {"pre_tokenizer": prefixed},
         "splits texts by rules that have no name in GGUF; those of these names "),
        (demo() | {"pre_tokenizer": None},
         "has the normalizer none and the pre-tokenizer none, which GGUF cannot say; "),
        (demo() | {"model": demo()["model"] | {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix is '</w>', which "),
        (demo() | {"model": demo()["model"] | {"merges": []}}, "has no merges; llama.cpp loads no vocabulary without "),
        (pieces | {"normalizer": None, "pre_tokenizer": spaces},
         "has the normalizer none and the pre-tokenizer Metaspace, which GGUF cannot say; "),
        (pieces | {"model": no_bytes}, "has byte_fallback false; llama.cpp needs a token for each byte"),
    ]  # fmt: skip
    for values, message in cases:
        with case(message):
            assert refusal(as_files(values)).startswith(f"tokenizer.json: {message}")
    assert refusal({}) == "the pack has no tokenizer.json, which a GGUF file needs; convert a checkpoint that has one"
    assert refusal({"tokenizer.json": b"{}"}).startswith("tokenizer.json: the tokenizers library cannot read it (")
    last = "".join(demo()["model"]["merges"][-1])
    assert refusal(as_files(demo()), 4095) == f"tokenizer.json: token {last!r} has number 4095, but vocab_size is 4095"
    vocabulary_fields(as_files(demo()), 4096)


def test_a_tokenizer_that_merges_otherwise_is_refused(pieces: Values) -> None:
    """No name of GPT-2's rule takes whole words that are tokens: that shows where merges do not make a token."""
    model = demo()["model"]
    made = "".join(model["merges"][-1])
    short = model | {"merges": model["merges"][:-1]}
    vocabulary_fields(as_files(demo() | {"model": model | {"ignore_merges": True}}), 4096)
    vocabulary_fields(as_files(demo() | {"model": short}), 4096)
    assert refusal(as_files(demo() | {"model": short | {"ignore_merges": True}})) == (
        f"tokenizer.json: GGUF cannot say what this tokenizer does: the word {made!r} would have other tokens"
    )
    begin = {"type": "Split", "pattern": {"Regex": r"\A[^I]."}, "behavior": "Isolated", "invert": False}
    first = demo() | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [begin, demo()["pre_tokenizer"]]}}
    assert refusal(as_files(first)).startswith("tokenizer.json: GGUF cannot say what this tokenizer does: \"  It's")
    few = pieces["model"] | {"merges": pieces["model"]["merges"][::2]}
    assert refusal(as_files(pieces | {"model": few})).startswith(
        "tokenizer.json: GGUF cannot say what this tokenizer does: "
    )
