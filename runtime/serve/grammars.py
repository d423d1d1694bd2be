"""Grammars that an answer has to follow: JSON, JSON schemas, regular expressions, and the formats Lark and GBNF.

llguidance says which tokens may come next. It reads a model's own tokenizer, so it knows the bytes of every token. The
end tokens may come where the answer so far is whole; where nothing else may follow, they alone may come.

A grammar comes from a client, and it may be hostile. What bounds its cost:

- the length of its text, and the number of its lines for Lark and GBNF: the time to compile some grammars grows with
  the third power of their rules (1000 rules: 2 seconds)
- llguidance's own limits, for each token and for all; a grammar that passes one ends with an error
- a helper process compiles it first, for tokens that are single bytes, with limits of CPU time and memory: a schema of
  3 kB (60 patterns in `allOf`) takes llguidance six minutes in spite of its limits, and nothing can end a thread
- one grammar is compiled at a time, in a thread with a large stack: llguidance follows references by recursion, and
  a chain of 400 references ends the process on a stack of 8 MiB
- whitespace between the parts of JSON: a space, or one or two line breaks and an indentation of at most 20, because
  some models write it without an end

Sources: llguidance's documentation for the grammars, its limits and its converter from GBNF; llama.cpp's
grammars/README.md for GBNF, and for a grammar in Lark's format, which begins with `%llguidance`; its converter from
JSON schemas for the whitespace.
"""

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime import Text, helper
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


class TokenGrammar:
    """A `Grammar` of one answer, at the place that the answer has reached.

    `fault`: why it cannot be followed further, which is the grammar's own fault; None while it can.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self.fault: str | None = None

    def copy(self) -> "TokenGrammar":
        """Returns another grammar at this place."""
        return TokenGrammar(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Whether the answer so far is whole, so that it may end here."""
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
        """Goes on by a token of the answer.

        Raises:  RunError if it may not come here.
        """
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
    """Makes grammars for a model's tokens; all methods may be called from any thread, and wait for one another.

    To read the tokenizer takes a second or two.

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

    def json_object(self, param: str = "response_format") -> TokenGrammar:
        """Returns a grammar of any JSON object.

        Args:    param: the field of the request that asks for it, here and in the other methods.
        """
        return self.json_schema({"type": "object"}, param)

    def json_schema(self, schema: Mapping[str, object], param: str = "response_format") -> TokenGrammar:
        """Returns a grammar of the JSON texts that a schema describes; their objects have its order of properties.

        Objects have no other properties than those that the schema names, unless it says otherwise (`schemas.closed`).
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

    def regex(self, pattern: str, param: str = "regex") -> TokenGrammar:
        """Returns a grammar of the texts that a regular expression matches whole; its syntax is that of Rust's regex.

        Raises:  RequestError if the expression is wrong or too large.
        """
        _refuse_size(pattern, "regular expression", _MAX_TEXT_BYTES, param)
        return self._compiled("regex", pattern, "regular expression", param)

    def choice(self, texts: Sequence[str], param: str = "guided_choice") -> TokenGrammar:
        """Returns a grammar of some texts, of which the answer is one.

        Raises:  RequestError if there are none, or they are too long.
        """
        if not texts:
            raise requests.RequestError(f"{param}: has no texts to choose from; add some", param)
        return self.regex("|".join(map(re.escape, texts)), param)

    def lark(self, text: str, param: str = "grammar") -> TokenGrammar:
        """Returns a grammar in llguidance's variant of Lark's format.

        Raises:  RequestError if it is wrong or too large.
        """
        _refuse_size(text, "grammar", _MAX_TEXT_BYTES, param, _MAX_LINES)
        return self._compiled("lark", text, "grammar", param)

    def gbnf(self, text: str, param: str = "grammar") -> TokenGrammar:
        """Returns a grammar in GBNF, the format of llama.cpp, or in Lark's if it begins with `%llguidance`.

        `.` stands for any character but a newline, unlike in llama.cpp.
        Raises:  RequestError if it is wrong or too large.
        """
        if text.lstrip().startswith("%llguidance"):
            return self.lark(text, param)
        _refuse_size(text, "grammar", _MAX_TEXT_BYTES, param, _MAX_LINES)
        return self._compiled("gbnf", _without_unicode_escapes(text), "grammar", param)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token in a text; none where llguidance cannot read the tokenizer."""
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
    """Reads a tokenizer, with a token for each of the model's logits, or more.

    Raises:  ValueError if llguidance does not know its kind.
    """
    kind: type[LLTokenizer] = library.LLTokenizer
    raw = text.tokenizer_json()
    try:
        return kind(raw, n_vocab=text.vocab_size, eos_token=end_ids)
    except ValueError:  # it may have more tokens than the model has logits
        return kind(raw, eos_token=end_ids)


def _with_large_stack(work: Callable[[], T]) -> T:
    """Runs a function in a thread with a large stack, and returns or raises what it does."""
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
    """Refuses a text that is too long, or no Unicode.

    Raises:  RequestError.
    """
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
    """Returns GBNF with characters in place of `\\u` and `\\U`, of which the converter loses zeros at the beginning."""

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        code = int(digits, 16)
        if code < 0x80:
            return f"\\x{code:02x}"
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]

    return _ESCAPE.sub(character, gbnf)
