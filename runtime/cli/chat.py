"""A conversation on a terminal: `moe-run packed/`.

`Conversation` has the messages, makes the answers and does the commands; it knows no terminal. `_Terminal` reads the
user's entries and shows the text of answers on standard output, everything else on standard error.

Every turn renders the whole conversation by the model's chat template; the decoder keeps the beginning that it has
computed. Reasoning goes to the template as a field of its own, so that the template decides whether it stays.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import click

from moe_pack import runtime
from moe_pack.formats import RunError
from moe_pack.runtime.generate import Clock, rate_text
from moe_pack.runtime.serve import parsers
from moe_pack.runtime.serve.styles import style_of

if TYPE_CHECKING:
    from moe_pack.runtime.drafts import Drafts
    from moe_pack.runtime.model import Decoder
    from moe_pack.runtime.templates import ChatPrompt

_PROMPT, _NEXT_LINE = "> ", ". "
# A model may write them, and on a terminal they could move the cursor, change colours or answer in the user's place.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NUM_SEEDS = 2**63  # as --seed takes
_PRESSES_TO_LEAVE = 3  # of Ctrl-C during one answer: a pass over a prompt from a slow disk may take minutes
_QUOTES = '"""'
_QUOTED = re.compile(rf"(/\w+\s+)?{_QUOTES}(.*)", re.DOTALL)
# What a terminal sends before and after a pasted text, while it is asked to.
_PASTE, _END_OF_PASTE = "\x1b[200~", "\x1b[201~"
_ASK_FOR_PASTE, _ASK_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"
_COMMANDS = {
    "/clear": "begins a new conversation; the system message stays",
    "/regenerate": "makes the last answer again, with another seed",
    "/system TEXT": "sets the system message and begins a new conversation; without TEXT there is none",
    "/save FILE": "writes the messages to a JSON file",
    "/help": "shows this list",
    "/exit": "ends the conversation, as Ctrl-D does",
}

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the answers."""

    sampling: runtime.SamplingOptions  # with the first answer's seed, to which each answer adds 1; None draws seeds
    max_tokens: int | None = None  # of an answer; None: the rest of the context
    stats: bool = False  # a line after each answer


class Screen(Protocol):
    """Shows a conversation."""

    def show(self, words: str, is_reasoning: bool) -> None:
        """Shows more of an answer, or of the reasoning before it."""
        ...

    def end_answer(self) -> None:
        """Ends the last line of an answer."""
        ...

    def say(self, line: str) -> None:
        """Shows a line that is no part of an answer."""
        ...


class Conversation:
    """The messages of a conversation, which the user's entries change.

    Args:    text: of a pack that has a chat template.   decoder: with the context of the conversation.
             drafts: of the decoder's engine; None: each token runs alone.
    """

    def __init__(
        self, text: runtime.Text, decoder: Decoder, options: ChatOptions, screen: Screen, drafts: Drafts | None = None
    ) -> None:
        assert text.chat_template is not None, "packs without a chat template are refused before"
        self._template: runtime.ChatTemplate = text.chat_template
        self._style = style_of(self._template.source())
        self._text, self._decoder, self._options, self._screen = text, decoder, options, screen
        self._drafts = drafts
        self._system: str | None = None
        self._turns: list[Message] = []
        self._num_answers = 0
        self._saved: set[Path] = set()
        self._is_stopped = False

    @property
    def messages(self) -> list[Message]:
        """The messages so far; an answer may have `reasoning_content`."""
        return [*self._system_messages(self._system), *self._turns]

    def stop(self) -> None:
        """Ends the current answer after its next token; its text stays. A signal may call it."""
        self._is_stopped = True

    def enter(self, entry: str) -> bool:
        """Answers a message, or does a command; returns whether the conversation goes on.

        Raises:  RunError, PackError if the engine fails; a template that refuses the conversation is only reported.
        """
        try:
            if entry.startswith("/"):
                return self._command(entry)
            if entry.strip():
                words = entry.lstrip() if entry.lstrip().startswith("/") else entry
                self._answer([*self._turns, {"role": "user", "content": words}])
            return True
        finally:
            self._is_stopped = False

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _command(self, entry: str) -> bool:
        name, *others = entry.split(maxsplit=1)
        words = "".join(others).strip()
        if words and name in _COMMANDS:
            self._screen.say(f"{name} takes no text; to send this as a message, begin it with a space")
            return True
        match name:
            case "/exit":
                return False
            case "/clear":
                self._turns = []
                self._screen.say("the conversation is empty")
            case "/regenerate" if self._turns:
                self._answer(self._turns[:-1])
            case "/regenerate":
                self._screen.say("there is no answer yet; type a message first")
            case "/system":
                self._set_system(words or None)
            case "/save":
                self._save(words)
            case "/help":
                for usage, meaning in _COMMANDS.items():
                    self._screen.say(f"{usage:14} {meaning}")
                self._screen.say(f"{_QUOTES} begins and ends a message of several lines; so does a paste.")
                self._screen.say("A \\ at the end of a line continues it in the next. Ctrl-C ends an answer.")
            case _:
                self._screen.say(f"there is no command {name}; /help lists them, and a message may begin with a space")
        return True

    def _set_system(self, words: str | None) -> None:
        """Sets the system message, unless the template refuses it."""
        example = [*self._system_messages(words), {"role": "user", "content": "Hello"}]
        try:
            self._template.render(example, add_generation_prompt=True)
        except RunError as fault:
            self._screen.say(f"{fault}; the system message stays as it was")
            return
        self._system, self._turns = words, []
        what = "there is no system message" if words is None else "the system message is set"
        self._screen.say(f"{what}, and the conversation is empty")

    @staticmethod
    def _system_messages(words: str | None) -> list[Message]:
        return [] if words is None else [{"role": "system", "content": words}]

    def _save(self, name: str) -> None:
        """Writes the messages to a new file, or over a file of this conversation."""
        if not name:
            self._screen.say("/save needs the name of a file; type /save chat.json")
            return
        try:
            path = Path(name).expanduser()
            if path.exists() and path.resolve() not in self._saved:
                self._screen.say(f"{path} is there already; give another name")
                return
            _write(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n")
        except (OSError, ValueError, RuntimeError) as fault:  # also names that no file can have, as a home of nobody
            reason = fault.strerror if isinstance(fault, OSError) else fault
            self._screen.say(f"{name} cannot be written ({reason}); give another name")
            return
        self._saved.add(path.resolve())
        self._screen.say(f"{len(self.messages)} messages are in {path}")

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, turns: list[Message]) -> None:
        """Makes an answer to turns; both become the conversation, unless there is no answer."""
        try:
            prompt = self._prompt([*self._system_messages(self._system), *turns])
        except RunError as fault:
            self._screen.say(f"{fault}; the conversation stays as it was")
            return
        context = self._decoder.cache.context_tokens
        if len(prompt.ids) >= context:
            self._screen.say(
                f"the conversation would have {len(prompt.ids)} tokens, and its context is {context}; {self._remedy()}"
            )
            return
        answer = self._made(prompt)
        if answer is None:
            self._screen.say("the answer was ended before it began; the conversation stays as it was")
            return
        self._turns = [*turns, answer]

    def _prompt(self, messages: list[Message]) -> ChatPrompt:
        """Returns a conversation as text and tokens, ready for an answer.

        Raises:  RunError if the template has an error or refuses the conversation, or there is no token.
        """
        from moe_pack.runtime.templates import prompt_of

        prompt = prompt_of(self._text, lambda adds: self._template.render(messages, add_generation_prompt=adds))
        if not prompt.ids:
            raise RunError("the tokenizer finds no token in the conversation")
        return prompt

    def _made(self, prompt: ChatPrompt) -> Message | None:
        """Makes and shows an answer; returns it, or None if it was stopped at once."""
        from moe_pack.runtime import Sampler
        from moe_pack.runtime.generate import generate
        from moe_pack.runtime.serve.service import PROMPT_END_CHARACTERS

        clock, ids, first = Clock(), list(prompt.ids), self._options.sampling.seed
        seed = secrets.randbits(32) if first is None else (first + self._num_answers) % _NUM_SEEDS
        self._num_answers += 1
        sampler = Sampler(replace(self._options.sampling, seed=seed), ids)
        parser = parsers.parser_for(self._style, prompt.text[-PROMPT_END_CHARACTERS:])
        stream = self._text.stream(ids, self._style.keeps_special)
        answer: Message = {"role": "assistant", "content": ""}
        left = list(self._decoder.keep_beginning(ids))  # a copy: `_read` takes tokens from it
        cached = len(ids) - len(left)
        rest = self._decoder.cache.context_tokens - len(ids) + 1  # the last token needs no place in the context
        most = rest if self._options.max_tokens is None else min(self._options.max_tokens, rest)
        is_ended = True
        try:
            if not self._read(left, prompt):
                return None
            for token in generate(self._decoder, left, sampler, most, self._text.answer_end_ids, self._drafts):
                clock.tick()
                self._take(answer, parser.push(stream.push(token)))
                if self._is_stopped or clock.num_tokens == most:
                    is_ended = False
                    break
            self._take(answer, [*parser.push(stream.finish()), *parser.finish()])
        finally:
            self._screen.end_answer()
        if not is_ended and not self._is_stopped:
            if most == self._options.max_tokens:
                self._screen.say(f"the answer ends after {most} tokens, as --max-tokens says")
            else:
                self._screen.say(
                    f"the context of {self._decoder.cache.context_tokens} tokens is full; {self._remedy()}"
                )
        if self._options.stats:
            rate = rate_text(clock.num_tokens - 1, clock.decode_s)
            self._screen.say(
                f"answer {clock.num_tokens} tokens, {rate}; prompt {len(ids)} tokens, {cached} cached, "
                f"{clock.prefill_s:.1f} s; seed {seed}"
            )
        if answer["content"] or "reasoning_content" in answer:
            return answer
        if self._is_stopped:
            return None
        self._screen.say("the model's answer is empty")
        return answer

    def _read(self, left: list[int], prompt: ChatPrompt) -> bool:
        """Runs all passes over a prompt but the last, whose tokens stay in `left`; returns False after Ctrl-C.

        A cache that cannot be cut back to any position gets a checkpoint for the next turn, or another answer.
        """
        decoder, place = self._decoder, len(prompt.ids) - len(left)
        checkpoint = 0 if decoder.cache.is_cut_anywhere else prompt.stable_tokens or 0
        while not self._is_stopped:
            number = decoder.chunk_tokens
            if place < checkpoint < len(prompt.ids):
                number = min(number, checkpoint - place)
            if number >= len(left):
                return True
            decoder.next_logits(left[:number])
            del left[:number]
            place += number
            if place == checkpoint:
                decoder.sequences[0].save_checkpoint()
        return False

    def _take(self, answer: Message, deltas: list[parsers.Delta]) -> None:
        """Adds deltas to an answer and shows them."""
        for delta in deltas:
            if isinstance(delta, parsers.ContentDelta):
                answer["content"] += delta.text
                self._screen.show(delta.text, is_reasoning=False)
            elif isinstance(delta, parsers.ReasoningDelta):
                answer["reasoning_content"] = answer.get("reasoning_content", "") + delta.text
                self._screen.show(delta.text, is_reasoning=True)

    def _remedy(self) -> str:
        """Returns the advice for a full context."""
        most = self._decoder.spec.max_position_embeddings
        if most <= self._decoder.cache.context_tokens:
            return "/clear begins a new conversation"
        return f"/clear begins a new conversation, and moe-run takes a --context of up to {most} tokens"


def _write(path: Path, words: str) -> None:
    """Writes a file under another name, and gives it its own when it is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(words)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


class Entry:
    """An entry of the user, put together from lines.

    It is a line; or lines that end with a \\, or stand between three quotes, perhaps after a command; or a pasted text
    with line breaks in one line, or in several lines between the terminal's marks.
    """

    def __init__(self) -> None:
        self._pasted: list[str] = []  # of a paste whose end has not come
        self._lines: list[str] = []
        self._before: str | None = None  # between quotes: the command before them, or nothing

    @property
    def is_begun(self) -> bool:
        """Whether the entry has begun and is not complete."""
        return bool(self._pasted or self._lines) or self._before is not None

    def add(self, line: str) -> str | None:
        """Adds a line; returns the whole entry when it is complete."""
        text = "\n".join([*self._pasted, line])
        if text.rfind(_PASTE) > text.rfind(_END_OF_PASTE):
            self._pasted.append(line)
            return None
        self._pasted.clear()
        text = text.replace(_PASTE, "").replace(_END_OF_PASTE, "")
        if self._before is not None:
            return self._quoted(text)
        if not self._lines and (quoted := _QUOTED.fullmatch(text)):
            rest = quoted[2].rstrip()
            if rest.find(_QUOTES) in (-1, len(rest) - len(_QUOTES)):  # else it is a text that begins so, as code does
                self._before = quoted[1] or ""
                return self._quoted(quoted[2]) if rest else None
        is_pasted = "\n" in text
        if text.endswith("\\") and not is_pasted:
            self._lines.append(text[:-1])
            return None
        return "\n".join([*self._lines, text.rstrip("\n") if is_pasted else text])

    def _quoted(self, text: str) -> str | None:
        """Adds text between quotes, which may end there."""
        words = text.rstrip()
        if not words.endswith(_QUOTES):
            self._lines.append(text)
            return None
        words = "\n".join([*self._lines, words.removesuffix(_QUOTES)]).removesuffix("\n")
        is_message = not self._before and words.lstrip().startswith("/")
        return f" {words}" if is_message else f"{self._before}{words}"  # with a space it is no command


class _Terminal:
    """The terminal, with a line editor where Python has one, and dimmed reasoning where it shows colours."""

    def __init__(self) -> None:
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._is_dimmed = sys.stderr.isatty() and not is_plain
        self._is_shared = sys.stdout.isatty()
        # `input` has a line editor if it writes to the terminal too; without one the marks of a paste are asked for.
        self._asks_for_paste = os.environ.get("TERM") != "dumb" and not (_open_editor() and self._is_shared)
        self._is_reasoning: bool | None = None  # what the last line has; None if it is no part of an answer
        self._last = ""

    def read(self) -> str | None:
        """Returns the user's entry; None at the end of the conversation."""
        entry = Entry()
        is_last_warning = False
        while True:
            try:
                line = self._line(_NEXT_LINE if entry.is_begun else _PROMPT)
            except EOFError:
                click.echo(err=True)
                return None
            except KeyboardInterrupt as fault:
                if type(fault) is not KeyboardInterrupt:  # SIGTERM ends the command
                    raise
                click.echo(err=True)
                is_empty = not entry.is_begun and not _typed()
                if is_empty and is_last_warning:
                    return None
                if is_empty:
                    self.say("Ctrl-C once more, or Ctrl-D, ends the conversation.")
                entry, is_last_warning = Entry(), is_empty
                continue
            except UnicodeDecodeError:
                self.say("this line is not UTF-8 text; type it again")
                continue
            if (whole := entry.add(line)) is not None:
                return whole
            is_last_warning = False

    def _line(self, prompt: str) -> str:
        if self._asks_for_paste:
            click.echo(_ASK_FOR_PASTE, nl=False, err=True)
        if not self._is_shared:  # `input` would write the prompt among the answers
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        try:
            # Where the locale is no UTF-8, bytes of other characters come as halves of surrogates.
            return input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        finally:
            if self._asks_for_paste:
                click.echo(_ASK_NO_MORE, nl=False, err=True)

    def show(self, words: str, is_reasoning: bool) -> None:
        if self._is_reasoning is not is_reasoning:
            self._begin(is_reasoning)
        if sys.stderr.isatty() if is_reasoning else self._is_shared:
            words = _CONTROL.sub("", words)
        self._last = words or self._last
        styled = click.style(words, dim=True) if words and is_reasoning and self._is_dimmed else words
        click.echo(styled, nl=False, err=is_reasoning)

    def _begin(self, is_reasoning: bool) -> None:
        """Begins reasoning, or the text after it, behind an empty line; a word marks reasoning that is not dimmed."""
        if self._is_reasoning is not None:
            self.end_answer()
            click.echo(err=True)
        if is_reasoning and not self._is_dimmed:
            click.echo("[reasoning]", err=True)
        self._is_reasoning = is_reasoning

    def end_answer(self) -> None:
        if self._is_reasoning is not None and not self._last.endswith("\n"):
            click.echo(err=self._is_reasoning)
        self._is_reasoning = None

    def say(self, line: str) -> None:
        click.echo(line, err=True)


def _open_editor() -> bool:
    """Gives `input` a line editor that takes a pasted text as one; returns whether Python has one."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" not in (readline.__doc__ or ""):  # which does not know it
        readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _typed() -> str:
    """Returns the text of the line that Ctrl-C has ended; nothing without a line editor."""
    with suppress(ImportError):
        import readline

        return readline.get_line_buffer()
    return ""


def converse(
    name: str, text: runtime.Text, decoder: Decoder, options: ChatOptions, drafts: Drafts | None = None
) -> None:
    """Holds a conversation on the terminal until the user ends it.

    Args:    name: of the model.   text: of a pack that has a chat template.   drafts: as in `Conversation`.
    Raises:  RunError, PackError if the engine fails; KeyboardInterrupt for SIGTERM, or many Ctrl-C in one answer.
    """
    terminal = _Terminal()
    conversation = Conversation(text, decoder, options, terminal, drafts)
    terminal.say(f"{name}: a conversation of up to {decoder.cache.context_tokens:,} tokens. /help lists the commands.")
    terminal.say(f"Ctrl-C ends an answer, Ctrl-D or /exit the conversation. {_QUOTES} begins and ends several lines.")
    goes_on = True
    while goes_on and (entry := terminal.read()) is not None:
        with _ctrl_c_stops(conversation):
            goes_on = conversation.enter(entry)


@contextmanager
def _ctrl_c_stops(conversation: Conversation) -> Iterator[None]:
    """Lets Ctrl-C stop an answer between two tokens; the third one interrupts at once."""
    num_presses = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal num_presses
        num_presses += 1
        conversation.stop()
        if num_presses >= _PRESSES_TO_LEAVE:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
