"""The pydantic-ai-slim package: agents with tools and typed answers, by three interfaces."""

from typing import Any, Literal

import anthropic
from checking import ADDRESS, KEY, MAX_TOKENS, MODEL, check, expect, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PYDANTIC = "pydantic-ai-slim"


class City(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Says the weather."""
    return f"sunny in {city}"


def model_of(kind: str) -> Any:
    """Returns pydantic-ai's model of one interface."""
    if kind == "anthropic":
        client = anthropic.AsyncAnthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
        profile = ModelProfile(supports_json_schema_output=True)  # it knows Anthropic's models by name alone
        return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client), profile=profile)
    provider = OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key=KEY)
    return (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(MODEL, provider=provider)


async def _try_agent(kind: str) -> None:
    settings: Any = {"max_tokens": 8}
    agent: Any = Agent(model_of(kind), instructions="Be brief.", tools=[weather], model_settings=settings)
    found = await agent.run("How is Rome?")
    expect(found.output and found.usage.output_tokens, found)
    async with agent.run_stream("How is Rome?") as stream:
        expect([piece async for piece in stream.stream_text(delta=True)], stream)


async def _try_output(kind: str, output: Any) -> None:
    settings: Any = {"max_tokens": MAX_TOKENS}
    agent: Any = Agent(model_of(kind), output_type=output, model_settings=settings, retries=0)
    found = await agent.run("Is Rome warm?")
    expect(isinstance(found.output, City), found)


def _note(kind: str) -> None:
    async def chat() -> None:
        await _try_agent(kind)

    async def by_tool() -> None:
        await _try_output(kind, ToolOutput(City))

    async def native() -> None:
        await _try_output(kind, NativeOutput(City))

    check(PYDANTIC, f"{kind}: chat, streamed, with a tool")(chat)
    check(PYDANTIC, f"{kind}: output by a tool")(by_tool)
    check(PYDANTIC, f"{kind}: output by a format")(native)


for name in ("chat completions", "responses", "anthropic"):
    _note(name)

if __name__ == "__main__":
    main()
