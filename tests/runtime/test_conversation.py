"""`moe-run` without a prompt: a conversation, on a real pseudo-terminal and without one."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import pytest
import torch
from click.testing import CliRunner
from support.cases import case
from support.models import TinyMixtral, pack
from support.waiting import HANG_S, wait_until, wait_until_asleep

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions, Text
from moe_pack.runtime.cli.chat import ChatOptions, Conversation, Entry
from moe_pack.runtime.cli.main import main
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.offload import Sequences

POSITIONS = 4096
# A system message that says "think" begins the reasoning; history has it where the system message says "keep".
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content == "refused" %}{{ raise_exception("this is refused") }}{% endif -%}
[{{ message.role }}]
{%- if message.reasoning_content and "keep" in messages[0].content %}<think>{{ message.reasoning_content }}</think>
{%- endif %} {{ message.content }}</s>
{% endfor -%}
{%- if add_generation_prompt %}[assistant]
{%- if "think" in messages[0].content %}<think>{% endif %} {% endif -%}"""
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_pack(tmp_path_factory.mktemp("chat"))


def chat_pack(folder: Path, template: str = TEMPLATE, **config: object) -> Path:
    """A tiny pack of random weights that can chat."""
    values = {"max_position_embeddings": POSITIONS, **config}
    source = TinyMixtral(vocab_size=4096, config=values).write_with_tokenizer(folder / "source")
    (source / "chat_template.jinja").write_text(template)
    pack(source, folder / "packed")
    return folder / "packed"


@dataclass
class Screen:
    """Remembers what is shown. `at_words`: what happens when words of an answer come."""

    content: str = ""
    reasoning: str = ""
    lines: list[str] = field(default_factory=list)
    num_answers: int = 0
    at_words: object = None

    def show(self, words: str, is_reasoning: bool) -> None:
        if is_reasoning:
            self.reasoning += words
        else:
            self.content += words
        if callable(self.at_words):
            self.at_words()

    def end_answer(self) -> None:
        self.num_answers += 1

    def say(self, line: str) -> None:
        self.lines.append(line)


@contextmanager
def opened(
    folder: Path, options: ChatOptions, context: int = 512, checkpoints: int = 0
) -> Iterator[tuple[Conversation, Screen]]:
    """A conversation with a real engine."""
    with Pack(folder) as files:
        text = Text(files)
        with Engine(files, EngineOptions(), context, sequences=Sequences(1, checkpoints)) as engine:
            assert isinstance(engine.decoder, Decoder)
            screen = Screen()
            yield Conversation(text, engine.decoder, options, screen), screen


def run(*arguments: object) -> str:
    """The answer of `moe-run` to one message."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="moe-run")
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def cached_tokens(screen: Screen) -> list[int]:
    return [int(found[1]) for line in screen.lines if (found := re.search(r"(\d+) cached", line))]


def from_the_beginning(folder: Path, messages: list[dict[str, str]]) -> str:
    """The greedy answer of an engine that has computed nothing yet."""
    with Pack(folder) as files, Engine(files, EngineOptions(), 512) as engine:
        text = Text(files)
        ids = text.encode(text.chat_template.render(messages, add_generation_prompt=True), special_tokens=False)
        stream = text.stream(ids, keeps_special=True)  # as the marks of reasoning need it
        tokens = generate(engine.decoder, ids, Sampler(GREEDY), 80, text.answer_end_ids)
        return "".join(map(stream.push, tokens)) + stream.finish()


def test_each_answer_has_the_seed_after_the_one_before(packed: Path) -> None:
    options = ChatOptions(SamplingOptions(seed=5), max_tokens=12)
    found = []
    for _ in range(2):
        with opened(packed, options) as (conversation, screen):
            for entry in ("Good evening", "/regenerate", "And then?"):
                assert conversation.enter(entry)
            found.append(conversation.messages)
            assert screen.num_answers == 3
    assert found[0] == found[1], "a conversation can be repeated"
    assert [message["role"] for message in found[0]] == ["user", "assistant"] * 2
    one = [packed, "--chat", "--prompt", "Good evening", "--max-tokens", 12, "--seed"]
    assert screen.content.startswith(run(*one, 5))
    assert found[0][1]["content"] == run(*one, 6)


def test_without_a_seed_every_answer_draws_a_new_one(packed: Path) -> None:
    with opened(packed, ChatOptions(SamplingOptions(), max_tokens=8, stats=True)) as (conversation, screen):
        for entry in ("Good evening", "/regenerate"):
            conversation.enter(entry)
    seeds = re.findall(r"seed (\d+)", "\n".join(screen.lines))
    assert len(seeds) == len(set(seeds)) == 2


def test_a_turn_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """Also with caches that cannot be cut back, and a template that begins an answer as no history has it."""
    template = TEMPLATE.replace("[assistant]\n", "[assistant and more]\n")
    for name, window in (("whole", None), ("window", 64)):
        with case(name):
            folder = chat_pack(tmp_path / name, template, sliding_window=window)
            options = ChatOptions(GREEDY, max_tokens=80, stats=True)
            entries = ["It was a dark night, and the wind blew around the house as it had for days.", "Why?"]
            with opened(folder, options, checkpoints=1) as (conversation, screen):
                for entry in entries:
                    conversation.enter(entry)
                assert cached_tokens(screen)[0] == 0 < 16 <= cached_tokens(screen)[1]
                messages = conversation.messages
                conversation.enter("/regenerate")
                assert cached_tokens(screen)[2] > cached_tokens(screen)[1]
                assert conversation.messages == messages, "greedy, from other cached tokens"
            assert messages[-1]["content"] == from_the_beginning(folder, messages[:-1])


def test_an_answer_ends_at_max_tokens_or_with_the_context(packed: Path) -> None:
    with opened(packed, ChatOptions(GREEDY, max_tokens=4)) as (conversation, screen):
        conversation.enter("Good evening")
        assert screen.lines == ["the answer ends after 4 tokens, as --max-tokens says"]
    with opened(packed, ChatOptions(GREEDY), context=64) as (conversation, screen):
        conversation.enter("Good evening")
        before = conversation.messages
        conversation.enter("And then?")
        assert conversation.messages == before and len(before) == 2
        full, refused = screen.lines
        remedy = f"/clear begins a new conversation, and moe-run takes a --context of up to {POSITIONS} tokens"
        assert full == f"the context of 64 tokens is full; {remedy}"
        assert re.fullmatch(r"the conversation would have \d+ tokens, and its context is 64; (.*)", refused)
        assert refused.endswith(remedy)
        conversation.enter("/clear")
        conversation.enter("Good evening")
        assert conversation.messages == before


# ---- a model that says what a test wants --------------------------------------------------------------------------


class ScriptedDecoder:
    """A decoder whose answers are given; an answer ends with the token that ends a text."""

    chunk_tokens = 16

    def __init__(self, text: Text, answers: list[str]) -> None:
        self._text, self._answers = text, iter(answers)
        self._left: list[int] = []
        self.prompts: list[list[int]] = []
        self.num_passes = 0
        self.cache = SimpleNamespace(context_tokens=512, num_tokens=0, is_cut_anywhere=True)
        self.spec = SimpleNamespace(max_position_embeddings=512)
        self.at_pass = lambda: None

    def keep_beginning(self, ids: list[int]) -> list[int]:
        self.prompts.append(list(ids))
        self.cache.num_tokens = 0
        return ids

    def begin(self, ids: list[int]) -> torch.Tensor:
        (end,) = self._text.answer_end_ids
        self._left = [*self._text.encode(next(self._answers), special_tokens=False), end]
        return self.next_logits(ids)

    def next_logits(self, ids: list[int]) -> torch.Tensor:
        self.num_passes += 1
        self.at_pass()
        self.cache.num_tokens += len(ids)
        logits = torch.zeros(4096)
        if self._left:
            logits[self._left.pop(0)] = 1
        return logits


@dataclass
class Scripted:
    """A conversation with a scripted decoder."""

    text: Text
    decoder: ScriptedDecoder
    screen: Screen
    conversation: Conversation

    def prompt(self) -> str:
        """The last prompt that the decoder got."""
        stream = self.text.stream([], keeps_special=True)
        return "".join(map(stream.push, self.decoder.prompts[-1])) + stream.finish()


@pytest.fixture
def text(packed: Path) -> Iterator[Text]:
    with Pack(packed) as files:
        yield Text(files)


def scripted(text: Text, *answers: str, stats: bool = False) -> Scripted:
    decoder, screen = ScriptedDecoder(text, list(answers)), Screen()
    conversation = Conversation(text, cast("Decoder", decoder), ChatOptions(GREEDY, stats=stats), screen)
    return Scripted(text, decoder, screen, conversation)


def test_reasoning_is_shown_and_goes_back_only_to_a_template_that_reads_it(text: Text) -> None:
    for system, is_kept in (("think", False), ("think and keep", True)):
        with case(system):
            one = scripted(text, "It is late.</think>\n\nGood night.", "Yes.</think>Indeed.")
            one.conversation.enter(f"/system {system}")
            one.conversation.enter("Good evening")
            assert one.screen.reasoning == "It is late." and one.screen.content == "Good night."
            one.conversation.enter("Really?")
            assert ("It is late." in one.prompt()) == is_kept
            assert "Good night." in one.prompt()
            answers = [message for message in one.conversation.messages if message["role"] == "assistant"]
            assert answers == [
                {"role": "assistant", "content": "Good night.", "reasoning_content": "It is late."},
                {"role": "assistant", "content": "Indeed.", "reasoning_content": "Yes."},
            ]


def test_a_stopped_answer_keeps_what_was_said(text: Text) -> None:
    one = scripted(text, "It was a dark night, and the wind blew.", "It was late.")
    one.screen.at_words = one.conversation.stop
    one.conversation.enter("Tell me a story")
    one.screen.at_words = None
    said = one.conversation.messages[1]["content"]
    assert said == one.screen.content and "It was a dark night".startswith(said.strip()) and said.strip()
    one.conversation.enter("Go on")
    assert one.conversation.messages[3]["content"] == "It was late."
    assert one.screen.lines == []


def test_an_answer_that_is_stopped_before_it_begins_changes_nothing(text: Text) -> None:
    one = scripted(text, "Good evening.", "Yes.")
    long = "Tell me a story, as long as you can, of a dark night and of the wind around the house"
    one.conversation.enter(long)
    before = one.conversation.messages
    for entry in (long, "/regenerate"):
        with case(entry):
            passes = one.decoder.num_passes
            one.decoder.at_pass = one.conversation.stop
            one.conversation.enter(entry)
            assert one.decoder.num_passes == passes + 1, "it stops between two passes over the prompt"
            assert one.conversation.messages == before
    assert set(one.screen.lines) == {"the answer was ended before it began; the conversation stays as it was"}
    one.decoder.at_pass = lambda: None
    one.conversation.enter("Really?")
    assert one.conversation.messages[-1]["content"] == "Yes."


def test_statistics_count_the_tokens_of_a_prompt_of_several_passes(text: Text) -> None:
    one = scripted(text, "Yes.", stats=True)
    one.conversation.enter("It was a dark night, and the wind blew around the house as it had for days. " * 2)
    number = len(one.decoder.prompts[-1])
    assert number > 2 * one.decoder.chunk_tokens
    (line,) = one.screen.lines
    made = len(text.encode("Yes.", special_tokens=False))
    assert re.fullmatch(rf"answer {made} tokens, .*; prompt {number} tokens, 0 cached, \d+\.\d s; seed \d+", line)


def test_an_empty_answer_is_said(text: Text) -> None:
    one = scripted(text, "", "Yes.")
    one.conversation.enter("Hello")
    assert one.screen.lines == ["the model's answer is empty"]
    one.conversation.enter("/regenerate")
    assert one.conversation.messages[-1]["content"] == "Yes."


def test_commands(text: Text) -> None:
    one = scripted(text, "Good evening.", "Yes.", "No.")
    conversation, lines = one.conversation, one.screen.lines
    cases = {
        "/regenerate": "there is no answer yet; type a message first",
        "/none": "there is no command /none; /help lists them, and a message may begin with a space",
        "/clear everything": "/clear takes no text; to send this as a message, begin it with a space",
        "/system refused": "the model's chat template failed (this is refused); the system message stays as it was",
        "/system Be kind.\nAlways.": "the system message is set, and the conversation is empty",
        "/save": "/save needs the name of a file; type /save chat.json",
        "refused": "the model's chat template failed (this is refused); the conversation stays as it was",
        "/clear": "the conversation is empty",
    }
    for entry, line in cases.items():
        with case(entry):
            assert conversation.enter(entry)
            assert lines.pop() == line and lines == []
    assert conversation.messages == [{"role": "system", "content": "Be kind.\nAlways."}]
    assert conversation.enter("   ") and len(one.decoder.prompts) == 0
    conversation.enter(" /etc/hosts is what?\nSay it.")
    assert "[user] /etc/hosts is what?\nSay it.\n[assistant]" in one.prompt()
    conversation.enter("/clear")
    assert conversation.messages == [{"role": "system", "content": "Be kind.\nAlways."}]
    conversation.enter("/system")
    assert conversation.messages == []
    conversation.enter("/help")
    assert [line for line in lines if line.startswith("/save FILE")]
    assert not conversation.enter("/exit")


def test_a_saved_conversation_is_json_and_no_other_file_is_written_over(text: Text, tmp_path: Path) -> None:
    one = scripted(text, "Schönen Abend.", "Yes.")
    path, other = tmp_path / "my chat.json", tmp_path / "other.json"
    other.write_text("mine")
    for entry in ("/system Be kind.", "Hello", f"/save {path}", "Really?", f"/save {path}"):
        one.conversation.enter(entry)
    assert json.loads(path.read_text("utf-8")) == {"messages": one.conversation.messages}
    assert len(one.conversation.messages) == 5 and "Schön" in path.read_text("utf-8")
    for name in (other, tmp_path, tmp_path / "none" / "chat.json", "/", "~nobody-at-all/chat.json", "\0"):
        with case(name):
            one.conversation.enter(f"/save {name}")
            assert one.screen.lines.pop().endswith("; give another name")
    assert other.read_text() == "mine" and sorted(tmp_path.iterdir()) == [path, other]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_what_is_no_conversation_is_refused(packed: Path) -> None:
    cases = (
        (["--context", "64", "--prompt", "x"], "--context needs a conversation; remove it"),
        (["--context", "64", "--chat", "--prompt", "x"], "--context needs a conversation; remove it"),
        (["--context", "64", "--bench"], "--context needs a conversation; remove it"),
    )
    for options, line in cases:
        with case(options):
            result = CliRunner().invoke(main, [str(packed), *options], prog_name="moe-run")
            assert result.exit_code == 2 and result.stdout == ""
            assert line in result.stderr


class Person:
    """Somebody at a terminal who types and waits until something is there."""

    def __init__(self, folder: Path, *options: str, stdout: IO[bytes] | None = None, **environment: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "moe_pack.runtime.cli", str(folder), *options]
        names = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            env={**names, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = ""
        self._raw = b""

    def __enter__(self) -> "Person":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def types(self, words: str) -> None:
        os.write(self._master, words.encode())

    def sees_it_wait(self) -> None:
        """Waits as people do: a signal has no effect in the moment between an echo and the wait for the next key."""
        wait_until_asleep(self.process.pid)

    def sees(self, pattern: str) -> str:
        """Waits until the pattern is there; returns everything up to its end, and begins after it."""
        until = time.monotonic() + HANG_S
        while True:
            shown = re.sub(r"\x1b\[\?\d+[hl]|\r", "", self._raw.decode("utf-8", "replace"))
            if found := re.search(pattern, shown, re.DOTALL):
                self._raw = shown[found.end() :].encode()
                return shown[: found.end()]
            left = until - time.monotonic()
            assert left > 0, f"no {pattern!r} in {shown[-500:]!r}"
            if select.select([self._master], [], [], left)[0]:
                try:
                    self._raw += os.read(self._master, 65536)
                except OSError:  # the process has closed its end
                    pytest.fail(f"it ended without {pattern!r}: {shown!r}")

    def exit_code(self) -> int:
        """Waits until the process has ended, and reads what it still writes: else it would wait."""

        def has_ended() -> bool:
            with suppress(OSError):  # the process has closed its end
                if select.select([self._master], [], [], 0)[0]:
                    self._raw += os.read(self._master, 65536)
            return self.process.poll() is not None

        wait_until(has_ended)
        return self.process.wait()


def test_a_conversation_on_a_terminal(packed: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with Person(packed, "--seed", "3", "--stats", "--context", "4000") as person:
        header = person.sees(r"\n> ")
        assert header.startswith("loading packed\n")
        assert "packed: a conversation of up to 4,000 tokens. /help lists the commands." in header
        person.types('/system """Be kind.\n')
        person.sees(r"\n\. ")
        person.types('Always."""\n')
        person.sees(r"the system message is set, .*\n> ")
        person.types("\x1b[200~Tell me\ra stories\r\x1b[201~\x7f\x7f\x7f\x7fy\n")  # a paste, which is mended: "a story"
        person.sees(r"y\n.*\S.*\S")
        person.types("\x03")  # Ctrl-C
        person.sees(r"answer \d+ tokens, .*0 cached, .*seed 3\n> ")
        person.types("/regenerate\n")
        person.sees(r"/regenerate\n.*\S.*\S")
        person.types("\x03")
        person.sees(r"seed 4\n> ")
        person.types(f"/save {saved}\n")
        person.sees(r"3 messages are in .*\n> ")
        person.types("/system think\n")
        person.sees(r"the system message is set, .*\n> ")
        person.types("Hello\n")
        person.sees(r"Hello\n\x1b\[2m.+\x1b\[0m")  # dimmed, as reasoning
        person.types("\x03")
        person.sees(r"seed 5\n> ")
        person.types("half a line")
        person.sees(r"half a line")
        person.sees_it_wait()
        person.types("\x03")
        person.sees(r"^(\^C)?\n> ")
        person.sees_it_wait()
        person.types("\x03")
        person.sees(r"Ctrl-C once more, or Ctrl-D, ends the conversation\.\n> ")
        person.sees_it_wait()
        person.types("\x03")
        person.sees(r"computed by .*\n")
        assert person.exit_code() == 0
    messages = json.loads(saved.read_text("utf-8"))["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be kind.\nAlways."
    assert messages[1]["content"] == "Tell me\na story" and messages[2]["content"].strip()


@pytest.mark.slow
def test_a_terminal_without_colours_and_the_end_by_ctrl_d(packed: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    control = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
    with Person(packed, "--max-tokens", "1000", "--seed", "1", NO_COLOR="1") as person:
        person.sees(r"\n> ")
        person.types("/system think\n")
        person.sees(r"\n> ")
        person.types("Hello\n")
        shown = person.sees(r"\[reasoning\]\n.*\nthe answer ends after 1000 tokens, as --max-tokens says\n> ")
        person.types(f"/save {saved}\n")
        person.sees(r"3 messages are in .*\n> ")
        person.types("\x04")  # Ctrl-D
        assert person.exit_code() == 0
    *_, answer = json.loads(saved.read_text("utf-8"))["messages"]
    assert control.search(answer["reasoning_content"]), "random weights say anything"
    assert not control.search(shown), "a terminal does not get it"


@pytest.mark.slow
def test_a_signal_ends_a_conversation_as_it_ends_every_command(packed: Path) -> None:
    with Person(packed) as person:
        person.sees(r"\n> ")
        person.sees_it_wait()
        person.process.send_signal(signal.SIGTERM)
        person.sees(r"interrupted\n")
        assert person.exit_code() == 143


@pytest.mark.slow
def test_a_pack_without_a_chat_template_holds_no_conversation(tmp_path: Path) -> None:
    source = TinyMixtral(vocab_size=4096).write_with_tokenizer(tmp_path / "source")
    pack(source, tmp_path / "packed")
    with Person(tmp_path / "packed") as person:
        person.sees(r"this pack has no chat template; give the text to continue with --prompt\n")
        assert person.exit_code() == 1


QUOTES = '"""'
PASTE, END = "\x1b[200~", "\x1b[201~"  # what a terminal sends before and after a pasted text
ENTRIES = {
    "a line": (["Hello"], "Hello"),
    "an empty line": ([""], ""),
    "continued lines": (["Tell me\\", "a\\", "story"], "Tell me\na\nstory"),
    "quotes in one line": ([f"{QUOTES}Hello{QUOTES}  "], "Hello"),
    "nothing between quotes": ([QUOTES, QUOTES], ""),
    "quotes around lines": ([f"{QUOTES}Tell me", "", "  a story\\", QUOTES], "Tell me\n\n  a story\\"),
    "quotes at the ends of lines": ([QUOTES, "Tell me", f"a story{QUOTES}"], "Tell me\na story"),
    "a path between quotes": ([QUOTES, "/etc/hosts", QUOTES], " /etc/hosts"),  # no command
    "a command with quotes": ([f"/system {QUOTES}Be kind.", f"Always.{QUOTES}"], "/system Be kind.\nAlways."),
    "a pasted text": (["def f():\n    return 1\n"], "def f():\n    return 1"),  # as a line editor returns it
    "a pasted text after words": (["Explain: a\nb"], "Explain: a\nb"),
    "a pasted text with a \\ at its end": (["a\nb\\"], "a\nb\\"),
    "a pasted file that begins with quotes": (
        [f"{QUOTES}Doc.{QUOTES}\nimport os\n"],
        f"{QUOTES}Doc.{QUOTES}\nimport os",
    ),
    "a paste between quotes": ([QUOTES, "a\nb", QUOTES], "a\nb"),
    "a marked paste": ([f"{PASTE}def f():", "    return 1", END], "def f():\n    return 1"),
    "a marked paste after words": ([f"Explain: {PASTE}a", "", f"b{END} please"], "Explain: a\n\nb please"),
    "two marked pastes": ([f"{PASTE}a", f"b{END} and {PASTE}c", f"d{END}"], "a\nb and c\nd"),
    "a marked paste of one line": ([f"{PASTE}Hello{END}"], "Hello"),
    "a marked paste between quotes": ([QUOTES, f"{PASTE}a", f"b{END}", QUOTES], "a\nb"),
}


def test_lines_become_entries() -> None:
    for name, (lines, expected) in ENTRIES.items():
        with case(name):
            entry = Entry()
            assert not entry.is_begun
            *first, last = lines
            for line in first:
                assert entry.add(line) is None and entry.is_begun
            assert entry.add(last) == expected


@pytest.mark.slow
def test_a_paste_is_one_message_where_there_is_no_line_editor(packed: Path, tmp_path: Path) -> None:
    """Answers go to a file: the terminal is asked to mark a paste."""
    saved, answers = tmp_path / "chat.json", tmp_path / "answers.txt"
    with answers.open("wb") as file, Person(packed, "--max-tokens", "2", stdout=file) as person:
        person.sees(r"\n> ")
        person.types(f"{PASTE}Tell me\na story{END}\n")
        person.sees("the answer ends after 2 tokens.*> ")
        person.types(f"/save {saved}\n")
        person.sees(r"2 messages are in .*\n> ")
        person.types("/exit\n")
        assert person.exit_code() == 0
    assert json.loads(saved.read_text("utf-8"))["messages"][0]["content"] == "Tell me\na story"
