"""The GGUF metadata of a tokenizer: the inverse of `tokenizer.py`.

The rules of `tokenizer.SPLITS` that split one text as the tokenizer does are its rules. The metadata is read back, and
must give the tokens of the original. Source: llama.cpp, src/llama-vocab.cpp.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any

from tokenizers import Tokenizer

from moe_pack import formats
from moe_pack.formats.families import text_files
from moe_pack.formats.gguf import tokenizer
from moe_pack.formats.gguf.header import Metadata

Values = dict[str, Any]

# Any two different rules of SPLITS split this text in different places.
CHECK_TEXT = (
    "It's 1984: the clocks weren't striking THIRTEEN; don't ASK'LL why. DON'T! 3.14159 + 1000000 = ?\n\n\tTabs  and   "
    "spaces \n  \r\n \n\n"
    "Grüße, señor: naïve façade — “quotes” … 东京の天气は晴れです、今日は2026年。カタカナ 한국어 문장. Привет, мир! "
    "مرحبا بالعالم हिन्दी भाषा ไทย ١٢٣٤ 🙂🚀 👩‍💻 snake_case camelCase HTTPServer x->y(); a/b//\n/c\n"
    "def f(x):\n    return x**2 # comment\n\n\n    if (a != b && c[0] == 'q') { return \"12345678\"; }  \n"
    "$5,000.00 50% <tag> #hash @user 'twas 'Sam's a b c e.g. i.e. 中文mixed英文text ABCdef ǅ ʰx ① Ⅷ 12ab34 ...!!!\n"
    "  中 国  a  1 \n.\n"
)
_AROUND = "a"  # a text around which tokens may stand
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")
_BYTE_TOKENS = [f"<0x{number:02X}>" for number in range(256)]
_NFC = {"type": "NFC"}
_TO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": tokenizer.SPACE}
_PREFIX = {"type": "Prepend", "prepend": tokenizer.SPACE}


def vocabulary_fields(files: Mapping[str, bytes], vocab_size: int) -> Values:
    """Returns the metadata of a tokenizer by full key, in Python's types: `tokenizer.ggml.model` and so on.

    The tokens that end an answer are those of generation_config.json, or of config.json, and `eos_token` of
    tokenizer_config.json; GGUF names three. llama.cpp does not normalize: texts that are not in NFC may get others.
    Args:    files: a pack's files by name.   vocab_size: the rows of the model's embedding. Numbers without a token get
             one that no text has.
    Raises:  RunError if there is no tokenizer.json, or if GGUF cannot say what it does.
    """
    source = _Source(files)
    tokens, kinds = source.tokens(vocab_size)
    names = source.names()
    common: Values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    for name, number in names.items():
        common[f"tokenizer.ggml.{name}_token_id"] = number
    common["tokenizer.ggml.add_bos_token"] = source.first is not None
    common["tokenizer.ggml.add_eos_token"] = source.last is not None
    common |= source.templates()
    difference = ""
    for specific in _of_spaces(source, tokens) if source.has_spaces else _of_bytes(source):
        fields = common | specific
        difference = _difference(source, fields)
        if not difference:
            return fields
    raise formats.RunError(f"tokenizer.json: GGUF cannot say what this tokenizer does: {difference}")


def vocabulary_notes(files: Mapping[str, bytes]) -> list[str]:
    """Returns a sentence for each thing that a tokenizer does unlike its metadata. Raises as `vocabulary_fields`."""
    source = _Source(files)
    notes = []
    if source.changed:
        notes.append(
            f"added tokens such as {source.changed[0]!r} ({len(source.changed)} in all) take the spaces around them, "
            "or are not found inside words; GGUF cannot say that"
        )
    if source.is_metaspace:
        notes.append(
            "the tokenizer puts a space before a text that begins with none; llama.cpp puts one before every text, and "
            "after each special token"
        )
    left_out = source.ends()[len(_ENDS) :]
    if not source.ends():
        number = 2 if source.has_spaces else 11
        notes.append(f"no file names a token that ends a text (eos_token); llama.cpp takes token {number} for it")
    if left_out:
        texts = ", ".join(repr(source.tokenizer.id_to_token(number)) for number in left_out)
        notes.append(f"GGUF can name {len(_ENDS)} tokens that end an answer; it does not name {texts}")
    return notes


class _Source:
    """A tokenizer's files, and the tokenizer in the `tokenizers` library as far as GGUF can say it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise formats.RunError(
                "the pack has no tokenizer.json, which a GGUF file needs; convert a checkpoint that has one"
            )
        self._files = files
        # With the tokens of the files next to tokenizer.json, as the runtime has them. The library checks it whole.
        self._special = text_files.SpecialTokens.of(self._json, formats.RunError)
        rows = text_files.text_config(self._json("config.json")).get("vocab_size")
        known_rows = rows if type(rows) is int else None
        original, _ = text_files.read_tokenizer(files["tokenizer.json"], self._special, known_rows, formats.RunError)
        self.values = self._json("tokenizer.json")
        self.values["added_tokens"] = json.loads(original.to_str())["added_tokens"]
        self.model: Values = self.values["model"]
        self._check_model()
        # Files before 2024 write a merge as one text.
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in self.model["merges"])
        self.merges: list[tuple[str, str]] = [(left, right) for left, right in pairs]
        self.has_prefix = False  # whether a text gets a space in front
        self.is_metaspace = False  # whether it gets none if it begins with one
        # Whether spaces are written as SentencePiece writes them, else bytes in GPT-2's alphabet.
        self.has_spaces = "ByteLevel" not in _types(self.values.get("pre_tokenizer"))
        if self.has_spaces:
            self._set_spaces()
        elif any(step != _NFC for step in _steps(self.values.get("normalizer"))):
            said = _said(self.values["normalizer"])
            raise formats.RunError(
                f"tokenizer.json: has the normalizer {said}, which GGUF cannot say; only NFC may be there"
            )
        self.changed = self._free_added_tokens()  # added tokens whose places in a text GGUF cannot say
        self.tokenizer = _tokenizer(self.values) if self.has_spaces or self.changed else original
        self._config = self._json("tokenizer_config.json")
        self.begins_by_config = False
        self.first, self.last = self._around()  # the tokens that are put around a text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return [self.first, *ids] if self.begins_by_config and self.first is not None else ids

    def tokens(self, vocab_size: int) -> tuple[list[str], list[int]]:
        added = self.tokenizer.get_added_tokens_decoder()
        vocabulary: dict[str, int] = self.model["vocab"] | {token.content: number for number, token in added.items()}
        texts = {number: text for text, number in vocabulary.items()}
        if len(texts) < len(vocabulary):
            raise formats.RunError("tokenizer.json: two tokens have the same number")
        largest = max(texts, default=0)
        if largest >= vocab_size:
            raise formats.RunError(
                f"tokenizer.json: token {texts[largest]!r} has number {largest}, but vocab_size is {vocab_size}"
            )
        is_byte = set(_BYTE_TOKENS) if self.has_spaces else set()
        unknown = self.model.get("unk_token") if self.has_spaces else None
        kinds: list[int] = []
        for number in range(vocab_size):
            text = texts.get(number)
            if text is None:
                texts[number] = f"[PAD{number}]"
                while texts[number] in vocabulary:
                    texts[number] = f"[{texts[number]}]"
                kinds.append(tokenizer.TokenKind.UNUSED)
            elif number in added:
                usual = tokenizer.TokenKind.CONTROL if added[number].special else tokenizer.TokenKind.USER_DEFINED
                kinds.append(tokenizer.TokenKind.UNKNOWN if text == unknown else usual)
            else:
                kinds.append(tokenizer.TokenKind.BYTE if text in is_byte else tokenizer.TokenKind.USUAL)
        return [texts[number] for number in range(vocab_size)], [int(kind) for kind in kinds]

    def names(self) -> dict[str, int]:
        named: dict[str, int | None] = {name: self._token(f"{theirs}_token") for theirs, name in _NAMED.items()}
        if named["unknown"] is None and self.model.get("unk_token"):
            named["unknown"] = self.tokenizer.token_to_id(self.model["unk_token"])
        if self.first is not None:
            named["bos"] = self.first
        named |= dict.fromkeys(_ENDS) | dict(zip(_ENDS, self.ends(), strict=False))
        return {name: number for name, number in named.items() if number is not None}

    def ends(self) -> list[int]:
        """Returns the tokens that end an answer: first the end of a text, then `eos_token`."""
        configs = [(name, self._json(name)) for name in ("generation_config.json", "config.json")]
        found = text_files.end_tokens(
            (*configs, ("config.json", text_files.text_config(configs[1][1]))), self.tokenizer, formats.RunError
        )
        numbers = dict.fromkeys((self.last, self._token("eos_token"), *found))
        known = (number for number in numbers if number is not None and 0 <= number < 2**32)
        return [number for number in known if self.tokenizer.id_to_token(number) is not None]

    def templates(self) -> Values:
        """Returns the chat template: `chat_template.jinja`, else one or several by name of tokenizer_config.json."""
        texts = text_files.chat_templates(self._config, formats.RunError)
        if text_files.TEMPLATE_FILE in self._files:
            texts = {"default": self._files[text_files.TEMPLATE_FILE].decode("utf-8", "replace")}
        if "default" not in texts:
            return {}
        fields: Values = {"tokenizer.chat_template": texts.pop("default")}
        if texts:
            fields["tokenizer.chat_templates"] = list(texts)
        return fields | {f"tokenizer.chat_template.{name}": text for name, text in texts.items()}

    def _json(self, name: str) -> Values:
        values = (
            formats.parse(self._files[name], name, formats.RunError, is_foreign=True) if name in self._files else {}
        )
        return values if isinstance(values, dict) else {}

    def _check_model(self) -> None:
        kind = self.model.get("type", "BPE" if "merges" in self.model else "unknown")  # old files have no type
        if kind != "BPE":
            raise formats.RunError(f"tokenizer.json: is a {kind} tokenizer; only BPE tokenizers can be written to GGUF")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if self.model.get(key):
                raise formats.RunError(f"tokenizer.json: {key} is {self.model[key]!r}, which GGUF cannot say")

    def _set_spaces(self) -> None:
        """Replaces the steps that write spaces by the way that GGUF knows."""
        steps, before = _steps(self.values.get("normalizer")), _steps(self.values.get("pre_tokenizer"))
        self.has_prefix = _PREFIX in steps
        known = all(step in (_PREFIX, _TO_SPACES) for step in steps) and len(steps) <= 2
        if [step.get("type") for step in before] == ["Metaspace"] and not steps:
            rule = before[0]
            scheme = rule.get("prepend_scheme", "always" if rule.get("add_prefix_space", True) else "never")
            self.is_metaspace = self.has_prefix = scheme != "never"
            known = rule.get("replacement") == tokenizer.SPACE and rule.get("split") is False
        else:  # a split at spaces cuts nothing, because none are left
            kinds = [(step.get("type"), step.get("pattern"), bool(step.get("invert"))) for step in before]
            known = known and _TO_SPACES in steps and all(kind == ("Split", {"String": " "}, False) for kind in kinds)
        if not known:
            raise formats.RunError(
                f"tokenizer.json: has the normalizer {_said(self.values.get('normalizer'))} and the pre-tokenizer "
                f"{_said(self.values.get('pre_tokenizer'))}, which GGUF cannot say; it can say ByteLevel, and "
                "SentencePiece's spaces (Replace with or without Prepend, or Metaspace with split false)"
            )
        missing = [token for token in _BYTE_TOKENS if token not in self.model.get("vocab", ())]
        if missing or not self.model.get("byte_fallback"):  # llama.cpp writes unknown letters as bytes
            what = f"has no token {missing[0]}" if missing else "has byte_fallback false"
            raise formats.RunError(f"tokenizer.json: {what}; llama.cpp needs a token for each byte")
        normalizers = [_PREFIX, _TO_SPACES] if self.has_prefix else [_TO_SPACES]
        self.values |= {"normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": None}

    def _free_added_tokens(self) -> list[str]:
        """Lets added tokens be found anywhere and take no spaces, as GGUF has them; returns the changed ones."""
        changed = []
        usual = {"single_word": False, "lstrip": False, "rstrip": False}
        if self.has_spaces:  # else what is normalized is NFC
            usual["normalized"] = False
        for token in self.values.get("added_tokens", ()):
            if any(token.get(key, False) != value for key, value in usual.items()):
                changed.append(str(token.get("content")))
                token |= usual
        return changed

    def _around(self) -> tuple[int | None, int | None]:
        inner = self.tokenizer.encode(_AROUND, add_special_tokens=False).ids
        ids = self.tokenizer.encode(_AROUND).ids
        for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
            if ids[first : len(ids) - last] == inner and len(ids) == len(inner) + first + last:
                begin = self._token("bos_token") if self._config.get("add_bos_token") is True else None
                self.begins_by_config = begin is not None and not first
                return ids[0] if first else begin, ids[-1] if last else None
        raise formats.RunError(
            "tokenizer.json: puts several tokens before or after a text; GGUF can name one on each side"
        )

    def _token(self, name: str) -> int | None:
        """Returns the token that a config names, or None."""
        text = self._special.named.get(name)
        number: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return number


def _of_bytes(source: _Source) -> Iterator[Values]:
    """Yields the fields of byte-level pair encoding (`gpt2`)."""
    pieces = _pieces(source.values["pre_tokenizer"])
    rules = {
        rules
        for rules in dict.fromkeys(map(tuple, tokenizer.SPLITS.values()))
        if _pieces(tokenizer.splitter(rules)) == pieces
    }
    names = [name for name, its in tokenizer.SPLITS.items() if tuple(its) in rules]
    if not names:
        raise formats.RunError(
            "tokenizer.json: splits texts by rules that have no name in GGUF; those of these names are known: "
            + ", ".join(sorted(tokenizer.SPLITS))
        )
    whole, begins = bool(source.model.get("ignore_merges")), source.first is not None
    names.sort(key=lambda name: ((name in tokenizer.WHOLE_WORDS) != whole, (name in tokenizer.BEGIN) != begins))
    merges = source.merges
    if not merges:
        raise formats.RunError("tokenizer.json: has no merges; llama.cpp loads no vocabulary without them")
    if any(" " in token for token in chain.from_iterable(merges)):
        raise formats.RunError("tokenizer.json: a token of its merges has a space, which GGUF cannot write")
    yield {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[0],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }


def _of_spaces(source: _Source, tokens: list[str]) -> Iterator[Values]:
    """Yields the fields of SentencePiece's spaces: scores (`llama`), and merges as Gemma 4 has them.

    A score ranks a token, whatever its parts: merges say more where those of a token do not follow each other.
    llama.cpp reads Gemma's without a space in front, always with a first token, and line by line.
    """
    merges = source.merges
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scored = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks.get(token, len(merges))) for token in tokens],
        "tokenizer.ggml.add_space_prefix": source.has_prefix,
    }
    merged = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_space_prefix": False,
    }
    lines = (left + right for left, right in merges if "\n" in left + right)
    is_gemma = bool(merges) and not source.has_prefix and source.first is not None
    if not is_gemma or any(line.strip("\n") for line in lines):
        yield scored
    elif len([merge for merge, _ in groupby(merges, key="".join)]) == len(ranks):
        yield from (scored, merged)
    else:
        yield from (merged, scored)


def _difference(source: _Source, fields: Values) -> str:
    """Returns the text that has other tokens when the metadata is read back; empty if there is none."""
    try:
        files = tokenizer.tokenizer_files(Metadata("tokenizer.json", fields, {}))
    except formats.CheckpointError as fault:
        raise formats.RunError(str(fault)) from fault
    values: Any = files["tokenizer.json"]
    found = _tokenizer(values)
    texts = [CHECK_TEXT, *CHECK_TEXT.splitlines(keepends=True), f"  {CHECK_TEXT}", "", " ", "\n\n\n"]
    added = [token.content for token in source.tokenizer.get_added_tokens_decoder().values()]
    texts += ["a".join(added), " b ".join(["", *added, ""])]
    for text in texts:
        if found.encode(text).ids != source.ids(text):
            return f"{text[:40]!r} would have other tokens"
    model = source.model
    merges, read_back = source.merges, [(left, right) for left, right in values["model"]["merges"]]
    same_merges = merges == read_back or _grouped(merges) == _grouped(read_back)
    if same_merges and bool(model.get("ignore_merges")) == values["model"]["ignore_merges"]:
        return ""
    known = set(added)  # which are found before words are merged
    # The two merge differently. The texts of tokens show it, alone or a few together, if any text does.
    pieces = [text for text in model["vocab"] if text not in known]
    runs = ["".join(pieces[place : place + 8]) for place in range(0, len(pieces), 3)] if source.has_spaces else []
    for text in chain(pieces, runs):
        before, after = ([token.id for token in each.model.tokenize(text)] for each in (source.tokenizer, found))
        if before != after:
            return f"the word {text[:40]!r} would have other tokens"
    return ""


def _grouped(merges: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns the merges by token. Those of a token are sorted: scores do not order them."""
    return [sorted(group) for _, group in groupby(merges, key="".join)]


def _pieces(pre_tokenizer: Values) -> list[str]:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    splits = _tokenizer({"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "model": empty})
    return [piece for piece, _ in splits.pre_tokenizer.pre_tokenize_str(CHECK_TEXT)]


def _tokenizer(values: Values) -> Tokenizer:
    try:
        made = Tokenizer.from_str(json.dumps(values))
    except Exception as fault:  # tokenizers raises nothing narrower
        raise formats.RunError(f"tokenizer.json: the tokenizers library cannot read it ({fault})") from fault
    made.no_truncation()
    made.no_padding()
    return made


def _steps(part: Any) -> list[Values]:
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for each in inner for step in _steps(each)]


def _types(part: Any) -> list[str]:
    return [str(step.get("type")) for step in _steps(part)]


def _said(part: Any) -> str:
    return " + ".join(_types(part)) or "none"
