"""The instructor package, in its modes for OpenAI's and Anthropic's interfaces."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import anthropic
import instructor
import openai
from checking import ADDRESS, KEY, MAX_TOKENS, MODEL, check, expect, main
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel

INSTRUCTOR = "instructor"
USER: list[Any] = [{"role": "user", "content": "How is Rome?"}]
OPENAI_MODES = (
    "TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "JSON_O1", "RESPONSES_TOOLS", "MD_JSON",
)  # fmt: skip
ANTHROPIC_MODES = ("ANTHROPIC_TOOLS", "ANTHROPIC_JSON", "ANTHROPIC_REASONING_TOOLS")


BY_WORDS = ("JSON", "JSON_O1", "MD_JSON", "ANTHROPIC_JSON", "PARALLEL_TOOLS")


class City(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


class Clock(BaseModel):
    """Says the time."""

    zone: Literal["UTC", "CET"]


@contextmanager
def _nonsense_in(mode: str) -> Iterator[None]:
    """Allows an answer that is no `City` in modes that ask by words alone, since the model may be a random one."""
    try:
        yield
    except IncompleteOutputException:
        if mode not in BY_WORDS:
            raise
    except InstructorRetryException as fault:
        if mode not in BY_WORDS or "Error code" in str(fault):
            raise


def _try_openai(mode: str) -> None:
    raw = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    client: Any = instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))
    with _nonsense_in(mode):
        found = client.chat.completions.create(
            model=MODEL, messages=USER, response_model=City, max_tokens=MAX_TOKENS, max_retries=0
        )
        expect(isinstance(found, City), found)


def _try_anthropic(mode: str) -> None:
    raw = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
    client: Any = instructor.from_anthropic(raw, mode=getattr(instructor.Mode, mode))
    with _nonsense_in(mode):
        found = client.messages.create(
            model=MODEL, messages=USER, response_model=City, max_tokens=MAX_TOKENS, max_retries=0
        )
        expect(isinstance(found, City), found)


for name in OPENAI_MODES:
    check(INSTRUCTOR, f"openai {name}")(partial(_try_openai, name))
for name in ANTHROPIC_MODES:
    check(INSTRUCTOR, f"anthropic {name}")(partial(_try_anthropic, name))


@check(INSTRUCTOR, "openai PARALLEL_TOOLS")
def parallel() -> None:
    raw = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    client: Any = instructor.from_openai(raw, mode=instructor.Mode.PARALLEL_TOOLS)
    with _nonsense_in("PARALLEL_TOOLS"):
        found = client.chat.completions.create(
            model=MODEL, messages=USER, response_model=Iterable[City | Clock], max_tokens=MAX_TOKENS, max_retries=0
        )
        expect(all(isinstance(one, City | Clock) for one in found), found)


@check(INSTRUCTOR, "openai TOOLS, streamed in parts")
def in_parts() -> None:
    raw = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    client: Any = instructor.from_openai(raw)
    parts = list(
        client.chat.completions.create_partial(model=MODEL, messages=USER, response_model=City, max_tokens=MAX_TOKENS)
    )
    expect(parts[-1].city in ("Rome", "Oslo"), parts)


if __name__ == "__main__":
    main()
