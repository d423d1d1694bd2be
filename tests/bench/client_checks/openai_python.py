"""The openai package for Python: chat completions, completions, responses, models."""

import json
from typing import Any, Literal

import openai
from checking import ADDRESS, CITY_SCHEMA, KEY, MAX_TOKENS, MODEL, TOOL_SCHEMA, check, expect, expect_city, main
from pydantic import BaseModel

OPENAI = "openai"
client: Any = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
USER: dict[str, Any] = {"role": "user", "content": "How is Rome?"}
FUNCTION = {"name": "weather", "description": "Says the weather.", "parameters": TOOL_SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL: dict[str, Any] = {"type": "function", **FUNCTION, "strict": True}


class City(BaseModel):
    """A city. Nothing here says that other keys are forbidden."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


@check(OPENAI, "chat")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=8)
    expect(answer.choices[0].message.content and answer.usage.total_tokens > 8, answer)


@check(OPENAI, "chat, streamed, with usage")
def chat_streamed() -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=[USER], max_completion_tokens=8, stream=True, stream_options=options
        )
    )
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1])


@check(OPENAI, "chat, log-probabilities, n, seed, stop, bias")
def chat_options() -> None:
    options = {"n": 2, "seed": 1, "stop": ["zzz"], "logit_bias": {"5": -100}, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=4, user="me", service_tier="auto", store=False, **options
    )
    expect(len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2, answer)


@check(OPENAI, "tools, a forced call and its result")
def chat_tools() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=[TOOL], tool_choice=choice, max_tokens=MAX_TOKENS
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    expect(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = client.chat.completions.create(model=MODEL, messages=[USER, message, result], tools=[TOOL], max_tokens=8)
    expect(answer.choices[0].finish_reason in ("stop", "length"), answer)


@check(OPENAI, "tools, required, streamed by the helper")
def chat_tools_streamed() -> None:
    tools = [{**TOOL, "function": {**FUNCTION, "strict": True}}]
    with client.chat.completions.stream(
        model=MODEL, messages=[USER], tools=tools, tool_choice="required", max_tokens=MAX_TOKENS
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    expect("tool_calls.function.arguments.done" in kinds, kinds)
    expect(call.function.parsed_arguments["city"] in ("Rome", "Oslo"), call)


@check(OPENAI, "chat.completions.parse")
def chat_parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=[USER], response_format=City, max_tokens=MAX_TOKENS)
    expect(isinstance(answer.choices[0].message.parsed, City), answer)


@check(OPENAI, "response_format json_object and json_schema")
def chat_formats() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=[USER], response_format=schema, max_tokens=MAX_TOKENS)
    expect_city(answer.choices[0].message.content)
    answer = client.chat.completions.create(
        model=MODEL, messages=[USER], response_format={"type": "json_object"}, max_tokens=MAX_TOKENS
    )
    expect(answer.choices[0].message.content.lstrip()[:1] == "{", answer)


@check(OPENAI, "completions, streamed, echo, logprobs")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4, logprobs=2, n=1)
    expect(len(answer.choices) == 2 and answer.choices[0].logprobs.tokens, answer)
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="One", max_tokens=4, stream=True, echo=True)
    ]
    expect("".join(pieces).startswith("One"), pieces)
    scored = client.completions.create(model=MODEL, prompt="One two three", max_tokens=1, logprobs=1, echo=True)
    found = scored.choices[0].logprobs
    expect(found.token_logprobs[0] is None and len(found.tokens) == len(found.text_offset), found)


@check(OPENAI, "responses, streamed")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="How is Rome?", max_output_tokens=8)
    expect(answer.output_text and answer.usage.output_tokens > 0, answer)
    with client.responses.stream(
        model=MODEL, instructions="Be brief.", input=[USER], max_output_tokens=100, store=False
    ) as stream:
        kinds = [event.type for event in stream]
    expect(kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds)


@check(OPENAI, "responses, a forced call and its result")
def responses_tools() -> None:
    items: list[Any] = [USER]
    answer = client.responses.create(
        model=MODEL, input=items, tools=[RESPONSE_TOOL], tool_choice="required", max_output_tokens=MAX_TOKENS
    )
    call = answer.output[-1]
    expect(json.loads(call.arguments)["city"] in ("Rome", "Oslo"), call)
    items += answer.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    answer = client.responses.create(model=MODEL, input=items, tools=[RESPONSE_TOOL], max_output_tokens=8)
    expect(answer.status in ("completed", "incomplete"), answer)


@check(OPENAI, "responses.parse, and as a stream")
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="Rome?", text_format=City, max_output_tokens=MAX_TOKENS)
    expect(isinstance(answer.output_parsed, City), answer)
    with client.responses.stream(model=MODEL, input="Rome?", text_format=City, max_output_tokens=MAX_TOKENS) as stream:
        list(stream)
        expect(isinstance(stream.get_final_response().output_parsed, City), stream)


@check(OPENAI, "models")
def models() -> None:
    (found,) = {model.id for model in client.models.list()}
    expect(client.models.retrieve(found).id == found, found)


@check(OPENAI, "what is refused comes as its exceptions")
def refused() -> None:
    try:
        client.embeddings.create(model=MODEL, input="Rome")
    except openai.APIStatusError as fault:
        expect("embedding" in fault.message, fault.message)
    else:
        expect(False, "embeddings")
    try:
        client.chat.completions.create(model=MODEL, messages=[])
    except openai.BadRequestError as fault:
        expect("messages" in fault.message, fault.message)


if __name__ == "__main__":
    main()
