r"""The tokenizer of a GGUF file in the files of Hugging Face: `tokenizer.json`, its config, the chat template.

A GGUF file has the vocabulary and the merges, but only names the rules that split a text (`tokenizer.ggml.pre`). The
rules stand here as in the models' own `tokenizer.json`. GGUF does not say whether a special token takes the spaces
around it. Source: llama.cpp, src/llama-vocab.cpp, whose comments quote the published rules.

- `gpt2`: byte-level pair encoding. Tokens and merges are text in GPT-2's alphabet of bytes.
- `llama`: SentencePiece's pair encoding. The merges follow from scores.
- `gemma4`: pair encoding with merges, in SentencePiece's alphabet.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf.header import Metadata

Values = dict[str, Any]

_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # of most rules: ends of lines, then other spaces
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN35 = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, clitics: str) -> str:
    """Returns the rule for words that end at a capital letter."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}[{upper}]*[{lower}]+{clitics}|{first}[{upper}]+[{lower}]*{clitics}"


_GPT4O = rf"{_cased(_UPPER, _LOWER, _CLITICS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_TEKKEN = rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = (
    r"[\p{Han}]+|"
    + _cased(_UPPER + _NOT_HAN, _LOWER + _NOT_HAN, _CLITICS + "?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
)
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_V3_WORDS = rf"{_ASCII_MARKS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}"
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _V3_WORDS)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}",
)
_EXAONE = (
    rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff"
    "\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BY_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, counted from the end
_STARCODER = (r"\p{N}", _GPT2)

# Regular expressions that split a text one after the other, by `tokenizer.ggml.pre`. The usual name of rules is first.
SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mellum", "exaone4", "mpt", "jais"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "mellum2"), _STARCODER),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("cohere2moe", "tiny_aya"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), (_BAILING,)),
    "exaone-moe": (_EXAONE,),
    "afmoe": (_BY_THREES, _AFMOE_SCRIPTS, _V3_WORDS),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
}
BEGIN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")  # texts begin with a token
WHOLE_WORDS = (*BEGIN, "glm4", "glm5")  # a word that is a token is not merged from its parts

_BYTE_LEVEL: Values = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's


class TokenKind(IntEnum):
    """Kinds of tokens, `tokenizer.ggml.token_type`. All other kinds are usual text."""

    USUAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(metadata: Metadata) -> dict[str, Values | str]:
    """Returns the tokenizer's files by name: JSON values, or text; none for a GGUF file without a tokenizer.

    Raises:  CheckpointError for a tokenizer of an unknown kind, or with unknown rules.
    """
    if metadata.get("tokenizer.ggml.tokens") is None:
        return {}
    tokens = _Tokens(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma}.get(kind)
    if make is None:
        raise CheckpointError(
            f"{metadata.place}: tokenizer.ggml.model is {kind!r}; supported: gpt2, llama, gemma4. Use the model's "
            "safetensors checkpoint"
        )
    return {"tokenizer.json": make(metadata, tokens), **_configs(metadata, tokens)}


class _Tokens:
    def __init__(self, metadata: Metadata) -> None:
        self.texts: list[str] = metadata.values("tokenizer.ggml.tokens")
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds: list[int] = kinds if isinstance(kinds, list) else [1] * len(self.texts)
        if len(self.kinds) != len(self.texts) or not all(isinstance(text, str) for text in self.texts):
            raise CheckpointError(f"{metadata.place}: tokenizer.ggml.tokens and token_type do not fit each other")
        self.named: dict[str, int] = {}  # those with a meaning
        for name, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
            number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if isinstance(number, int) and 0 <= number < len(self.texts):
                self.named[name] = number

    def added(self) -> list[Values]:
        """Returns the tokens that are found in a text before it is split."""
        usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": number, "content": text, **usual, "special": kind != TokenKind.USER_DEFINED}
            for number, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        ]

    def vocabulary(self) -> dict[str, int]:
        pairs = enumerate(zip(self.texts, self.kinds, strict=True))
        return {text: number for number, (text, kind) in pairs if kind != TokenKind.UNUSED}

    def template(self, begins: bool, ends: bool) -> Values | None:
        """Returns the post-processor that puts tokens around a text, or None."""
        first, last = (
            [self.texts[self.named[name]]] if is_used and name in self.named else []
            for name, is_used in (("bos", begins), ("eos", ends))
        )
        if not first and not last:
            return None
        before, after = ([{"SpecialToken": {"id": text, "type_id": 0}} for text in texts] for texts in (first, last))
        single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
        known = {text: {"id": text, "ids": [self.texts.index(text)], "tokens": [text]} for text in (*first, *last)}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def _tokenizer(tokens: _Tokens, model: Values, **parts: Any) -> Values:
    usual = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens.added()}
    return usual | {"normalizer": None} | parts | {"model": model}


def _model(merges: list[Any], vocabulary: Mapping[str, int], **others: Any) -> Values:
    nones = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    values = {"type": "BPE", **nones, **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)}
    return values | others | {"vocab": vocabulary, "merges": merges}


def _begins(metadata: Metadata, usual: bool) -> tuple[bool, bool]:
    """Returns whether texts begin, and whether they end with a token."""
    flags = (("bos", usual), ("eos", False))
    begins, ends = (metadata.flag(f"tokenizer.ggml.add_{name}_token", default) for name, default in flags)
    return begins, ends


def _pairs(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Returns the merges, each a text of two pieces that may have spaces, as pairs."""
    pairs = []
    for merge in metadata.values("tokenizer.ggml.merges") if metadata.has("tokenizer.ggml.merges") else ():
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary:
            places = [place for place, letter in enumerate(merge) if letter == " "]
            known = ((merge[:place], merge[place + 1 :]) for place in places)
            left, right = next((both for both in known if all(each in vocabulary for each in both)), ("", ""))
        if left and left + right in vocabulary:
            pairs.append([left, right])
    return pairs


def splitter(rules: Sequence[str]) -> Values:
    """Returns the `pre_tokenizer` that splits a text by rules and writes its bytes in GPT-2's alphabet."""
    splits = [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False} for rule in rules]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]}


def _byte_level(metadata: Metadata, tokens: _Tokens) -> Values:
    pre = metadata.text("tokenizer.ggml.pre", "")
    if pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        what = f"is {pre!r}" if pre else "is missing; llama.cpp writes it since 2024"
        raise CheckpointError(
            f"{metadata.place}: tokenizer.ggml.pre {what}; supported: {known}. Use a newer file, or the model's "
            "safetensors checkpoint"
        )
    vocabulary = tokens.vocabulary()
    return _tokenizer(
        tokens,
        _model(_pairs(metadata, vocabulary), vocabulary, ignore_merges=pre in WHOLE_WORDS),
        pre_tokenizer=splitter(SPLITS[pre]),
        post_processor=tokens.template(*_begins(metadata, pre in BEGIN)) or _BYTE_LEVEL,
        decoder={**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
    )


def _sentencepiece(metadata: Metadata, tokens: _Tokens) -> Values:
    # Source: transformers, convert_slow_tokenizer.py.
    scores = metadata.values("tokenizer.ggml.scores")
    if len(scores) != len(tokens.texts):
        raise CheckpointError(
            f"{metadata.place}: tokenizer.ggml.scores has {len(scores)} values, expected {len(tokens.texts)}"
        )
    steps: list[Values] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    if has_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    return _tokenizer(
        tokens,
        _model(
            _merges_of_scores(tokens, scores),
            tokens.vocabulary(),
            unk_token=tokens.texts[tokens.named["unk"]] if "unk" in tokens.named else None,
            fuse_unk=True,
            byte_fallback=TokenKind.BYTE in tokens.kinds,
        ),
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        post_processor=tokens.template(*_begins(metadata, True)),
        decoder=_piece_decoder(strips=has_prefix),
    )


def _piece_decoder(strips: bool) -> Values:
    decoders: list[Values] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def _merges_of_scores(tokens: _Tokens, scores: Sequence[float]) -> list[list[str]]:
    """Returns SentencePiece's merges: of two tokens whose joined text is a token, ranked by its score."""
    numbers = tokens.vocabulary()
    found = list[tuple[float, list[str]]]()
    for text, score, kind in zip(tokens.texts, scores, tokens.kinds, strict=True):
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE, TokenKind.UNUSED):
            continue
        halves = ((text[:place], text[place:]) for place in range(1, len(text)))
        known = [both for both in halves if both[0] in numbers and both[1] in numbers]
        known.sort(key=lambda both: (numbers[both[0]], numbers[both[1]]))
        found += [(score, list(both)) for both in known]
    found.sort(key=lambda each: -each[0])  # stable: tokens of equal score stay in their order
    return [both for _, both in found]


def _gemma(metadata: Metadata, tokens: _Tokens) -> Values:
    vocabulary = tokens.vocabulary()
    return _tokenizer(
        tokens,
        _model(
            _pairs(metadata, vocabulary),
            vocabulary,
            unk_token=tokens.texts[tokens.named["unk"]] if "unk" in tokens.named else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        post_processor=tokens.template(*_begins(metadata, True)),
        decoder=_piece_decoder(strips=False),
    )


def _configs(metadata: Metadata, tokens: _Tokens) -> dict[str, Values | str]:
    """Returns the tokenizer's config, the tokens that end an answer, and the chat template."""
    config: Values = {f"{name}_token": tokens.texts[number] for name, number in tokens.named.items()}
    config["clean_up_tokenization_spaces"] = False
    files: dict[str, Values | str] = {"tokenizer_config.json": config}
    names = metadata.get("tokenizer.chat_templates")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(names, list) and isinstance(template, str):
        named = {"default": template} | {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in named.items() if isinstance(text, str)
        ]
    elif isinstance(template, str):
        files["chat_template.jinja"] = template
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [number for number in dict.fromkeys(ends) if isinstance(number, int)]
    if known:
        begin = {"bos_token_id": tokens.named["bos"]} if "bos" in tokens.named else {}
        files["generation_config.json"] = begin | {"eos_token_id": known[0] if len(known) == 1 else known}
    return files
