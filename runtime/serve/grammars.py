"""Grammars that an answer has to follow: JSON schemas, regular expressions, and the formats Lark and GBNF.

Rules about single tokens, as vLLM's `allowed_token_ids`, `min_tokens` and `bad_words`, act alone or upon another
grammar. For the other grammars llguidance computes which tokens may come next, from the bytes of the model's own
tokens. The end tokens may come where the answer is whole.

A grammar comes from a client and may be hostile. These limits bound its cost:

- the length of its text, and for Lark and GBNF the number of lines: the time to compile some grammars grows with the
  third power of their rules (1000 rules: 2 seconds)
- llguidance's own limits, for each token and for all; a grammar that passes one ends with an error
- a helper process compiles it first, for tokens that are single bytes, with limits of CPU time and memory: a schema of
  3 kB (60 patterns in `allOf`) takes llguidance six minutes in spite of its limits, and a thread cannot be ended
- one grammar is compiled at a time, in a thread with a large stack: llguidance follows references by recursion, and
  a chain of 400 references ends the process on a stack of 8 MiB
- whitespace between the parts of JSON is a space, or one or two line breaks and an indentation of at most 20, because
  some models write it without an end

Sources: llguidance's documentation; llama.cpp's grammars/README.md for GBNF, and for grammars in Lark's format, which
begin with `%llguidance`; its converter from JSON schemas for the whitespace.
"""

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime import Text, helper
from moe_pack.runtime.sampling import Grammar
from moe_pack.runtime.serve import requests, schemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

_MAX_SCHEMA_BYTES = 256 << 10
_MAX_TEXT_BYTES = 64 << 10  # of a regular expression, Lark or GBNF
_MAX_LINES = 1000
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,  # some 2 kB each
    "initial_lexer_fuel": 500_000,  # of 1,000,000, a regular expression took 170 MB
    "verbose_errors": False,
}
_TRY_SECONDS = 10.0
_TRY_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 256 << 20  # address space; a schema of 256 KiB that is one chain of references uses some 50 MB of it
_MAX_FAULT_CHARS = 200
_WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


# ---- rules about single tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of one answer."""

    allowed: frozenset[int] | None = None  # the only tokens that may come; None: all
    banned: frozenset[int] = frozenset()  # tokens that may not come
    min_tokens: int = 0  # so many tokens come before one that ends the answer
    bad: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that may not come


class RuledGrammar:
    """A `Grammar` of one answer that follows rules, and another grammar if there is one.

    Args:    end_ids: the tokens that end the answer.
    """

    def __init__(self, rules: TokenRules, end_ids: Iterable[int], grammar: Grammar | None = None) -> None:
        self._rules, self._grammar = rules, grammar
        self._ends = _places(end_ids)
        self._banned = _places(rules.banned)
        self._allowed = None if rules.allowed is None else _places(rules.allowed)
        self._count = 0
        self._fault: str | None = None
        self._before = deque[int](maxlen=max((len(each) for each in rules.bad), default=1) - 1 or 1)

    @property
    def fault(self) -> str | None:
        """Why the answer cannot go on; None while it can."""
        return self._fault or getattr(self._grammar, "fault", None)

    def allow(self, logits: Tensor) -> Tensor:
        """Returns new logits float32 [vocabulary] with minus infinity for every token that may not come.

        Raises:  RunError if none may.
        """
        changed = logits.clone() if self._grammar is None else self._grammar.allow(logits).clone()
        if self._allowed is not None:
            kept = torch.full_like(changed, -torch.inf)
            kept[self._allowed] = changed[self._allowed]
            changed = kept
        changed[self._banned] = -torch.inf
        if self._count < self._rules.min_tokens:
            changed[self._ends] = -torch.inf
        before = tuple(self._before)
        for *beginning, last in self._rules.bad:
            if not beginning or before[-len(beginning) :] == tuple(beginning):
                changed[last] = -torch.inf
        if changed.max() == -torch.inf:
            self._fault = "the fields that rule tokens, as min_tokens and bad_words, leave none to choose; relax one"
            raise RunError(self._fault)
        return changed

    def accept(self, token: int) -> None:
        """Goes on by a token of the answer."""
        self._count += 1
        self._before.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)


def ruled(rules: TokenRules, end_ids: Iterable[int], grammar: Grammar | None) -> Grammar | None:
    """Returns a grammar that follows rules too; the grammar itself where there are none."""
    return grammar if rules == TokenRules() else RuledGrammar(rules, end_ids, grammar)


def _places(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.int64)


def sequences_of(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words, each as it begins a text and as it follows a space."""
    made = {tuple(encode(before + word.lstrip())) for word in words for before in ("", " ")}
    return tuple(sorted(each for each in made if each))


# ---- llguidance -----------------------------------------------------------------------------------------------------


class TokenGrammar:
    """A `Grammar` of one answer, at the place that the answer has reached."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self.fault: str | None = None  # set when the grammar turns out to be too large to be followed further

    def copy(self) -> "TokenGrammar":
        """Returns another grammar at this place."""
        return TokenGrammar(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def allow(self, logits: Tensor) -> Tensor:
        """Returns new logits float32 [vocabulary] on the CPU with minus infinity for every token that may not come.

        Raises:  RunError if the grammar passes a limit here.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._refuse_faults()
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        # 1 - 1/1 is 0, and 1 - 1/0 is minus infinity. `torch.where` and logarithms take ten times as long.
        mask = torch.from_numpy(allowed).to(torch.float32).reciprocal_().neg_().add_(1)
        return mask.add_(logits.cpu())

    def accept(self, token: int) -> None:
        """Goes on by a token of the answer. Raises: RunError if it may not come here."""
        if not self._matcher.consume_token(token):
            self._refuse_faults()
            raise RunError(f"token {token} does not follow the grammar")

    def _refuse_faults(self) -> None:
        if self._matcher.is_error():
            self.fault = (
                "the grammar is too large or too ambiguous to be followed further "
                f"({_fault_text(self._matcher.get_error())}); make it simpler"
            )
            raise RunError(self.fault)


class GrammarCompiler:
    """Makes grammars for a model's tokens. Any thread may call the methods, which wait for one another.

    The tokenizer takes a second or two to read.
    Args:    text: the model's tokenizer.   end_ids: the tokens that end an answer.
    Raises:  RunError if llguidance is not installed, or the model's config.json does not say the vocabulary's size.
    """

    def __init__(self, text: Text, end_ids: Collection[int]) -> None:
        library = _llguidance()
        self._matcher: type[LLMatcher] = library.LLMatcher
        self._limits: LLParserLimits = library.LLParserLimits(**_LIMITS)
        self._helper = helper.Helper(_TRY_SECONDS, _TRY_MEMORY_BYTES)  # its own: no template waits for a grammar
        self._one_at_a_time = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._refusal = ""
        if not end_ids:
            self._refusal = "this model names no token that ends an answer"
            return
        try:
            self._tokenizer = _read_tokenizer(library, text, sorted(end_ids))
        except ValueError as fault:  # a server still answers requests without a grammar
            self._refusal = f"llguidance cannot read this model's tokenizer: {_fault_text(str(fault))}"

    def json_schema(self, schema: Mapping[str, object], param: str) -> TokenGrammar:
        """Returns a grammar of the JSON texts that a schema describes; their objects have its order of properties.

        Objects have the named properties alone, unless the schema allows others (`schemas.closed`).
        Args:    param: the field of the request that has it, here and in the other methods.
        Raises:  RequestError if the schema is wrong, too large, or uses a keyword that cannot be guaranteed.
        """
        try:
            text = json.dumps(schemas.closed(schema))
        except (TypeError, ValueError, RecursionError) as fault:
            raise requests.RequestError(
                f"{param}: the JSON schema is no JSON, or its parts are nested too deeply; change it", param
            ) from fault
        _refuse_size(text, "JSON schema", _MAX_SCHEMA_BYTES, param)
        try:
            grammar = self._matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as fault:
            raise _wrong("JSON schema", str(fault), param) from fault
        return self._compiled("grammar", grammar, "JSON schema", param)

    def regex(self, pattern: str, param: str) -> TokenGrammar:
        """Returns a grammar of the texts that a regular expression, in the syntax of Rust's regex, matches whole.

        Raises:  RequestError if the expression is wrong or too large.
        """
        _refuse_size(pattern, "regular expression", _MAX_TEXT_BYTES, param)
        return self._compiled("regex", pattern, "regular expression", param)

    def choice(self, texts: Sequence[str], param: str) -> TokenGrammar:
        """Returns a grammar of some texts, of which the answer is one.

        Raises:  RequestError if there are none, or they are too long.
        """
        if not texts:
            raise requests.RequestError(f"{param}: has no texts to choose from; add some", param)
        return self.regex("|".join(map(re.escape, texts)), param)

    def gbnf(self, text: str, param: str) -> TokenGrammar:
        """Returns a grammar in GBNF, the format of llama.cpp, or in Lark's if it begins with `%llguidance`.

        `.` stands for any character but a newline, unlike in llama.cpp.
        Raises:  RequestError if it is wrong or too large.
        """
        _refuse_size(text, "grammar", _MAX_TEXT_BYTES, param, _MAX_LINES)
        if text.lstrip().startswith("%llguidance"):
            return self._compiled("lark", text, "grammar", param)
        return self._compiled("gbnf", _without_unicode_escapes(text), "grammar", param)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token in a text; none if llguidance cannot read the tokenizer."""
        return b"" if self._tokenizer is None else bytes(self._tokenizer.decode_bytes([token]))

    def _compiled(self, form: str, source: str, kind: str, param: str) -> TokenGrammar:
        """Returns a grammar at its beginning.

        Args:    form: as `Helper.try_grammar` names it.   kind: the grammar in messages.
        Raises:  RequestError if llguidance refuses it, or it takes too much; QueueFullError if the machine is busy.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise requests.RequestError(f"{param}: no answer can follow a {kind} here, because {self._refusal}", param)

        def work() -> "LLMatcher":
            matcher = self._matcher(tokenizer, grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some grammars fail, or take long, at their first token
            return matcher

        try:
            with self._one_at_a_time:
                grammar = self._helper.try_grammar(form, source, _LIMITS)
                matcher = _with_large_stack(work)
        except helper.HelperBusyError as fault:
            raise requests.QueueFullError(
                f"{param}: the {kind} could not be compiled in time ({fault}); try again"
            ) from fault
        except (ValueError, helper.HelperError) as fault:
            raise _wrong(kind, str(fault), param) from fault
        if matcher.is_error():
            raise _wrong(kind, matcher.get_error(), param)
        return TokenGrammar(matcher)


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as fault:
        raise RunError("grammars and JSON schemas need llguidance; pip install 'moe-pack[serve]'") from fault
    return llguidance


def _read_tokenizer(library: ModuleType, text: Text, end_ids: list[int]) -> "LLTokenizer":
    """Reads a tokenizer. Raises ValueError if llguidance does not know its kind."""
    kind: type[LLTokenizer] = library.LLTokenizer
    raw = text.tokenizer_json()
    try:
        return kind(raw, n_vocab=text.vocab_size, eos_token=end_ids)
    except ValueError:  # it may have more tokens than the model has logits
        return kind(raw, eos_token=end_ids)


def _with_large_stack(work: Callable[[], T]) -> T:
    """Returns or raises what a function does in a thread with a large stack."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as fault:  # the caller, who waits, raises it again
            future.set_exception(fault)

    before = threading.stack_size(_STACK_BYTES)  # of threads that start from now on
    try:
        threading.Thread(target=run, name="grammar compiler", daemon=True).start()
    finally:
        threading.stack_size(before)
    return future.result()


def _refuse_size(text: str, kind: str, max_bytes: int, param: str, max_lines: int | None = None) -> None:
    """Refuses a text that is too long, or no Unicode. Raises: RequestError."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as fault:
        raise requests.RequestError(f"{param}: the {kind} has half a surrogate pair; remove it", param) from fault
    if num_bytes > max_bytes:
        raise requests.RequestError(
            f"{param}: the {kind} has {num_bytes} bytes; shorten it to at most {max_bytes}", param
        )
    num_lines = len(text.splitlines())
    if max_lines is not None and num_lines > max_lines:
        raise requests.RequestError(
            f"{param}: the {kind} has {num_lines} lines; shorten it to at most {max_lines}", param
        )


def _wrong(kind: str, fault: str, param: str) -> requests.RequestError:
    return requests.RequestError(f"{param}: the {kind} cannot be used ({_fault_text(fault)}); change it", param)


def _fault_text(fault: str) -> str:
    """Returns llguidance's message in one line, without a copy of the client's text."""
    if "coerce_one_of" in fault:
        return "oneOf: a value may match two of its schemas; use anyOf"
    text = " ".join(fault.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_FAULT_CHARS else f"{text[:_MAX_FAULT_CHARS]}..."


def _without_unicode_escapes(gbnf: str) -> str:
    """Returns GBNF with characters in place of `\\u` and `\\U`; llguidance's converter loses their first zeros."""

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        code = int(digits, 16)
        if code < 0x80:
            return f"\\x{code:02x}"
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]

    return _ESCAPE.sub(character, gbnf)
