"""The langchain-openai and langchain-anthropic packages: chat, tools, structured answers in their methods."""

from contextlib import suppress
from typing import Any, Literal

from checking import ADDRESS, KEY, MAX_TOKENS, MODEL, check, expect, expect_city, main
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel

OPENAI, ANTHROPIC = "langchain-openai", "langchain-anthropic"


class City(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


@tool  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Says the weather."""
    return f"sunny in {city}"


def openai_chat(max_tokens: int = MAX_TOKENS, **more: Any) -> Any:
    """Returns a chat model of OpenAI's interface."""
    return ChatOpenAI(
        base_url=f"{ADDRESS}/v1", api_key=KEY, model=MODEL, max_retries=0, max_completion_tokens=max_tokens, **more
    )


def anthropic_chat(max_tokens: int = MAX_TOKENS) -> Any:
    """Returns a chat model of Anthropic's interface."""
    return ChatAnthropic(
        base_url=ADDRESS, api_key=KEY, model_name=MODEL, max_retries=0, max_tokens_to_sample=max_tokens
    )


def _try_chat(model: Any) -> None:
    asked = [SystemMessage("Be brief."), HumanMessage("How is Rome?")]
    found = model.invoke(asked)
    expect(found.text and found.usage_metadata["output_tokens"] > 0, found)
    chunks = list(model.stream(asked))
    expect(len(chunks) > 1 and sum(chunks[1:], start=chunks[0]).text, chunks)


def _try_tools(model: Any, short: Any, choice: str) -> None:
    asked: list[Any] = [HumanMessage("How is Rome?")]
    answer = model.bind_tools([weather], tool_choice=choice).invoke(asked)
    (call,) = answer.tool_calls
    expect(call["args"]["city"] in ("Rome", "Oslo"), answer)
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"], status="error")
    expect(short.bind_tools([weather]).invoke([*asked, answer, result]).response_metadata, answer)
    streamed = list(model.bind_tools([weather], tool_choice=choice).stream(asked))
    expect(sum(streamed[1:], start=streamed[0]).tool_calls[0]["args"]["city"], streamed)


def _try_structured(model: Any, **method: Any) -> None:
    found = model.with_structured_output(City, **method).invoke("Is Rome warm?")
    expect(isinstance(found, City), found)


@check(OPENAI, "chat, streamed")
def chat() -> None:
    _try_chat(openai_chat(8))


@check(OPENAI, "chat by responses, streamed")
def chat_by_responses() -> None:
    _try_chat(openai_chat(8, use_responses_api=True))


@check(OPENAI, "completions")
def completions() -> None:
    model: Any = OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, model=MODEL, max_tokens=8, max_retries=0)
    expect(isinstance(model.invoke("Once"), str), "")


@check(OPENAI, "tools, a forced call and its result, streamed")
def tools() -> None:
    _try_tools(openai_chat(), openai_chat(8), "weather")
    _try_tools(openai_chat(use_responses_api=True), openai_chat(8, use_responses_api=True), "required")


@check(OPENAI, "with_structured_output json_schema")
def structured() -> None:
    _try_structured(openai_chat(), method="json_schema")
    _try_structured(openai_chat(), method="json_schema", strict=False)
    _try_structured(openai_chat(use_responses_api=True), method="json_schema")


@check(OPENAI, "with_structured_output function_calling")
def structured_by_tool() -> None:
    _try_structured(openai_chat(), method="function_calling")
    _try_structured(openai_chat(), method="function_calling", strict=True)


@check(OPENAI, "with_structured_output json_mode")
def structured_by_mode() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    expect_city(openai_chat().bind(response_format=schema).invoke("Rome").text)
    with suppress(LengthFinishReasonError):  # any object is right, also one that is very long
        found = openai_chat().with_structured_output(City, method="json_mode", include_raw=True).invoke("Rome, as JSON")
        expect(found["raw"].text.lstrip()[:1] == "{", found)


@check(ANTHROPIC, "chat, streamed")
def anthropic_messages() -> None:
    _try_chat(anthropic_chat(8))


@check(ANTHROPIC, "tools, a forced call and its result, streamed")
def anthropic_tools() -> None:
    _try_tools(anthropic_chat(), anthropic_chat(8), "weather")


@check(ANTHROPIC, "with_structured_output, both methods")
def anthropic_structured() -> None:
    _try_structured(anthropic_chat(), method="function_calling")
    _try_structured(anthropic_chat(), method="json_schema")


if __name__ == "__main__":
    main()
