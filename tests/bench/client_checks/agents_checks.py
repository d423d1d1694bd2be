"""The openai-agents package: agents with tools and typed answers, by two interfaces."""

from contextlib import suppress
from typing import Any, Literal

import agents
import openai
from checking import ADDRESS, KEY, MODEL, check, expect, main
from pydantic import BaseModel

AGENTS = "openai-agents"
MAX_ANSWER = 1500  # it takes no answer that was cut off


class City(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


@agents.function_tool  # type: ignore[untyped-decorator]  # the package is not installed where types are checked
def clock(zone: Literal["UTC", "CET"]) -> str:
    """Says the time."""
    return f"noon in {zone}"


def agent_model(kind: str) -> Any:
    """Returns openai-agents' model of one interface."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    of_kind = agents.OpenAIResponsesModel if kind == "responses" else agents.OpenAIChatCompletionsModel
    return of_kind(model=MODEL, openai_client=client)


async def _try_agents(kind: str, **more: Any) -> Any:
    settings = agents.ModelSettings(max_tokens=MAX_ANSWER, temperature=0.0, **more.pop("settings", {}))
    agent: Any = agents.Agent(
        name="A", instructions="Be brief.", model=agent_model(kind), model_settings=settings, **more
    )
    whole = await agents.Runner.run(agent, "How is Rome?", max_turns=3)
    streamed = agents.Runner.run_streamed(agent, "How is Rome?", max_turns=3)
    expect([event async for event in streamed.stream_events()], streamed)
    return whole


def _note_agents(kind: str) -> None:
    async def with_a_tool() -> None:
        found = await _try_agents(kind, tools=[clock], settings={"tool_choice": "required"})
        kinds = [item.type for item in found.new_items]
        expect("tool_call_output_item" in kinds and kinds[-1] == "message_output_item", kinds)

    async def typed() -> None:
        found = await _try_agents(kind, output_type=City)
        expect(isinstance(found.final_output, City), found)

    async def typed_with_a_tool() -> None:
        more: dict[str, Any] = {"tools": [clock], "settings": {"tool_choice": "required"}}
        with suppress(agents.MaxTurnsExceeded):  # the model may call again and again
            found = await _try_agents(kind, output_type=City, **more)
            expect(isinstance(found.final_output, City), found)

    check(AGENTS, f"{kind}: a tool, whole and streamed")(with_a_tool)
    check(AGENTS, f"{kind}: typed output")(typed)
    check(AGENTS, f"{kind}: a tool and typed output")(typed_with_a_tool)


for name in ("chat completions", "responses"):
    _note_agents(name)

if __name__ == "__main__":
    main()
