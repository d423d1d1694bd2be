"""The anthropic package for Python: messages, streams, tools, structured answers, counts."""

from typing import Any, Literal

import anthropic
from checking import ADDRESS, CITY_SCHEMA, KEY, MAX_TOKENS, MODEL, TOOL_SCHEMA, check, expect, expect_city, main
from pydantic import BaseModel

ANTHROPIC = "anthropic"
client: Any = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
USER: dict[str, Any] = {"role": "user", "content": "How is Rome?"}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}  # the newest versions know them no more
TOOL: dict[str, Any] = {"name": "weather", "description": "Says the weather.", "input_schema": TOOL_SCHEMA}


class City(BaseModel):
    """A city. Nothing here says that other keys are forbidden."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


@check(ANTHROPIC, "messages")
def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=[USER], system="Be brief.", extra_body=SAMPLING)
    expect(answer.content[0].text and answer.usage.output_tokens > 0, answer)


@check(ANTHROPIC, "messages, streamed")
def messages_streamed() -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=[USER]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(final.content[0].text == text and final.usage.output_tokens > 0, final)
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=8, messages=[USER], stream=True)]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)


@check(ANTHROPIC, "tools, a forced call and its result")
def tools() -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(
        model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], tools=[TOOL], tool_choice=choice
    )
    call = answer.content[-1]
    expect(call.input["city"] in ("Rome", "Oslo") and answer.stop_reason == "tool_use", answer)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such city", "is_error": True}
    turns = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    expect(answer.stop_reason in ("end_turn", "max_tokens"), answer)


@check(ANTHROPIC, "tools, streamed")
def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_message().content[-1]
    expect("input_json" in kinds and call.input["city"] in ("Rome", "Oslo"), call)


@check(ANTHROPIC, "the tool runner (beta)")
def tool_runner() -> None:
    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Says the weather.

        Args:    city: where.
        """
        return f"sunny in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        messages=[USER],
        tools=[weather],
        tool_choice={"type": "any"},
        max_iterations=2,
    )
    answers = list(runner)
    expect(len(answers) == 2 and answers[0].stop_reason == "tool_use", answers)


@check(ANTHROPIC, "messages.parse")
def parse() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], output_format=City)
    expect(isinstance(answer.parsed_output, City), answer)


@check(ANTHROPIC, "output_config.format, streamed too")
def output_format() -> None:
    config = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}, "effort": "low"}
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], output_config=config)
    expect_city(answer.content[-1].text)
    with client.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], output_format=City) as stream:
        list(stream)
        expect(isinstance(stream.get_final_message().parsed_output, City), stream)


@check(ANTHROPIC, "beta: parse, thinking, context management")
def beta() -> None:
    answer = client.beta.messages.create(
        model=MODEL,
        max_tokens=1100,
        messages=[USER, {"role": "assistant", "content": "Rome is"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        betas=["context-management-2025-06-27"],
        stop_sequences=["a", "e", "i", "o"],
    )
    expect(answer.stop_reason in ("stop_sequence", "end_turn", "max_tokens"), answer)
    parsed = client.beta.messages.parse(model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], output_format=City)
    expect(isinstance(parsed.parsed_output, City), parsed)


@check(ANTHROPIC, "count_tokens, models")
def counts() -> None:
    found = client.messages.count_tokens(model=MODEL, messages=[USER], tools=[TOOL])
    expect(found.input_tokens > 4, found)
    (model,) = list(client.models.list())
    expect(client.models.retrieve(model.id).id == model.id, model)


if __name__ == "__main__":
    main()
