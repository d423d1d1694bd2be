"""A helper process that runs foreign code: chat templates, the first try of a tokenizer or of a grammar.

They can take any time and memory: `{{ 'a' * 10**10 }}` is a template. The process has a limit for each. Its end ends
nothing else, and the next question starts another one. `Helper` is the side of the program. Started as a script, this
file is the process itself. It imports nothing of ours and so starts in a fraction of a second.

A limit judges one question alone. Time is that of the CPU, whatever else the machine does. A process that has answered
other questions may have kept some of its memory; if memory ends in it, a new process gets the question.

A question is JSON with its seconds and its length in front; an answer has a mark for a fault, a length and a text.
Templates run in jinja2's sandbox with the names that transformers gives (`apply_chat_template`).
"""

import faulthandler
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

SECONDS = 10.0  # for a template; usual ones take some milliseconds
TOKENIZER_SECONDS = 120.0  # to read a tokenizer and try it; one of 33 MB takes some seconds
MEMORY_BYTES = 2 << 30  # of the process, where the system can limit it
_MOST_TEXT_BYTES = 64 << 20  # of an answer
_MEMORY, _QUESTION, _ANSWER = struct.Struct("<Q"), struct.Struct("<dQ"), struct.Struct("<?Q")
_TEMPLATES_KEPT = 16
_GRAMMAR_NICENESS = 10
_STACK_BYTES = 256 << 20  # address space, besides the limit: llguidance follows references by recursion
_BUSY_SECONDS = 60.0  # that a question may take besides its own, where the machine has other work
# Codes of a process whose question took too much time, of the signal or of `faulthandler`, or did not get to compute.
_TOO_LONG: tuple[int, ...] = (-signal.SIGPROF, 1) if sys.platform != "win32" else (1,)
_TOO_BUSY: tuple[int, ...] = (-signal.SIGALRM,) if sys.platform != "win32" else ()


class HelperError(Exception):
    """The helper's code has a fault, or took too much; the text says which."""


class HelperBusyError(HelperError):
    """The helper could not do its work because the machine is busy."""


class Helper:
    """A process that answers one question at a time, started by the first question. Any thread may ask.

    Args:    seconds: the most CPU time of a template or a grammar.   memory_bytes: the most memory of the process.
    """

    def __init__(self, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def render(self, template: str, names: Mapping[str, object], now: datetime | None = None) -> str:
        """Returns the text of a template.

        Args:    names: its variables, values of JSON.   now: the time for templates that write the date; None for this
                 machine's.
        Raises:  HelperError if the template has an error, refuses its variables or takes too much.
        """
        written = None if now is None else now.isoformat()
        return self._ask("render", self._seconds, template=template, names=names, now=written)

    def compile(self, template: str) -> None:
        """Raises HelperError if a template has an error or takes too much."""
        self._ask("compile", self._seconds, template=template)

    def try_tokenizer(self, tokenizer: str, texts: Sequence[str]) -> None:
        """Turns texts into tokens and back; raises HelperError if the library fails or takes too much."""
        self._ask("try_tokenizer", TOKENIZER_SECONDS, tokenizer=tokenizer, texts=texts)

    def try_grammar(self, kind: str, source: str, limits: Mapping[str, object]) -> str:
        """Compiles a grammar for tokens that are single bytes, up to its first token; returns it for llguidance.

        Args:    kind: `regex`, `lark` or `gbnf`, or `grammar` for one that llguidance's converters wrote.   limits: of
                 llguidance's parser.
        Raises:  HelperError if the grammar has an error or takes too much.
        """
        return self._ask("try_grammar", self._seconds, kind=kind, source=source, limits=limits)

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        with self._lock:
            self._end()

    def _ask(self, action: str, seconds: float, **arguments: object) -> str:
        try:
            question = json.dumps([action, arguments]).encode()
        except (TypeError, ValueError, RecursionError) as fault:
            raise HelperError(f"the conversation cannot be written as JSON: {fault}") from fault
        with self._lock:
            try:
                is_fault, answer = self._answer(question, seconds)
            except BaseException:  # also Ctrl-C: an answer that comes later would be taken for another question's
                self._end()
                raise
        if is_fault:
            raise HelperError(answer)
        return answer

    def _answer(self, question: bytes, seconds: float) -> tuple[bool, str]:
        """Returns whether the answer is a fault, and the answer. Raises HelperError if there is none."""
        is_new = self._process is None or self._process.poll() is not None
        found = self._exchange(question, seconds)
        if isinstance(found, int) and not is_new and found not in (*_TOO_LONG, *_TOO_BUSY):
            found = self._exchange(question, seconds)  # in a new process
        if not isinstance(found, int):
            return found
        if found in _TOO_LONG:
            raise HelperError(f"it takes longer than {seconds:g} seconds")
        if found in _TOO_BUSY:
            raise HelperBusyError(f"it has not ended after {seconds + _BUSY_SECONDS:g} seconds; the machine is busy")
        raise HelperError(f"it ended its process with code {found}, perhaps for lack of memory")

    def _exchange(self, question: bytes, seconds: float) -> tuple[bool, str] | int:
        """Returns whether the answer is a fault, and the answer; the code of a process that ended without one."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with suppress(BrokenPipeError):  # then there is no answer either
            process.stdin.write(_QUESTION.pack(seconds, len(question)) + question)
            process.stdin.flush()
        head = process.stdout.read(_ANSWER.size)
        if len(head) == _ANSWER.size:
            is_fault, length = _ANSWER.unpack(head)
            if length <= _MOST_TEXT_BYTES:
                answer = process.stdout.read(length)
                if len(answer) == length:
                    return is_fault, answer.decode("utf-8", "surrogatepass")
        return process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        try:
            process = subprocess.Popen(
                # -P: modules next to this file are not the standard library's.
                [sys.executable, "-P", str(Path(__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as fault:
            raise HelperBusyError(f"the helper process cannot start: {fault}") from fault
        self._process, self._close = process, weakref.finalize(self, _kill, process)
        assert process.stdin is not None, "a pipe"
        process.stdin.write(_MEMORY.pack(self._memory_bytes))  # stays in a buffer
        return process

    def _end(self) -> None:
        self._close()
        self._process = None


HELPER = Helper()  # for everything; it starts with the first question


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written is lost
                pipe.close()


# ---- the process ----------------------------------------------------------------------------------------------------


def serve(questions: IO[bytes], answers: IO[bytes], nowhere: IO[str]) -> None:
    """Answers questions until there are no more. One that takes too long ends the process (`_limit_time`)."""
    num_answered = 0
    while len(head := questions.read(_QUESTION.size)) == _QUESTION.size:
        seconds, length = _QUESTION.unpack(head)
        question = questions.read(length)
        _limit_time(seconds, nowhere)
        try:
            action, arguments = json.loads(question)
            answer = _ACTIONS[action](**arguments).encode("utf-8", "surrogatepass")
            is_fault = len(answer) > _MOST_TEXT_BYTES
            if is_fault:
                answer = f"it writes more than {_MOST_TEXT_BYTES >> 20} MiB".encode()
        except MemoryError:
            if num_answered:
                return  # what others left may be at fault; a new process gets the question
            is_fault, answer = True, b"it needs too much memory"
        except BaseException as fault:  # a panic of the tokenizers library is no Exception
            text = " ".join(str(fault)[:2000].split()) or type(fault).__name__
            is_fault, answer = True, text[:500].encode("utf-8", "surrogatepass")
        _limit_time(None, nowhere)
        num_answered += 1
        answers.write(_ANSWER.pack(is_fault, len(answer)) + answer)
        answers.flush()


def _render(template: str, names: dict[str, object], now: str | None) -> str:
    compiled = _compiled(template)
    compiled.environment.globals["strftime_now"] = (
        datetime.now() if now is None else datetime.fromisoformat(now)
    ).strftime
    text: str = compiled.render(names)
    return text


def _compile(template: str) -> str:
    _compiled(template)
    return ""


def _try_tokenizer(tokenizer: str, texts: list[str]) -> str:
    from tokenizers import Tokenizer

    tried = Tokenizer.from_str(tokenizer)
    for text in texts:
        tried.decode(tried.encode(text).ids)
    return ""


def _try_grammar(kind: str, source: str, limits: dict[str, Any]) -> str:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance.gbnf_to_lark import gbnf_to_lark

    with suppress(AttributeError, OSError):  # it computes for seconds, and answers come first
        os.setpriority(os.PRIO_PROCESS, 0, _GRAMMAR_NICENESS)
    grammar = source
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind != "grammar":
        grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(source) if kind == "gbnf" else source)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars fail, or take long, at their first token
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return grammar


_ACTIONS: dict[str, Callable[..., str]] = {
    "render": _render,
    "compile": _compile,
    "try_tokenizer": _try_tokenizer,
    "try_grammar": _try_grammar,
}


@lru_cache(_TEMPLATES_KEPT)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(1)
def _environment() -> Any:
    """Returns jinja2's sandbox as transformers prepares it for templates."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks the answers for training and changes no text."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # jinja2's own escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def _limit_memory(num_bytes: int) -> None:
    """Limits the memory of this process, where the system can do that."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + _STACK_BYTES, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float | None, nowhere: IO[str]) -> None:
    """Ends this process after some seconds of CPU time, or after more of any time; None: never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds or 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0 if seconds is None else seconds + _BUSY_SECONDS)
    elif seconds is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's
    with Path(os.devnull).open("w") as nowhere, open(0, "rb") as questions, open(1, "wb") as answers:

        def work() -> None:
            _limit_memory(*_MEMORY.unpack(questions.read(_MEMORY.size)))
            serve(questions, answers, nowhere)

        # One thread with a large stack for all questions: the stack of a thread that has ended may stay for a while.
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


if __name__ == "__main__":
    _main()
