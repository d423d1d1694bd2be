"""The litellm package: its routes to OpenAI's and Anthropic's interfaces."""

import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network for prices otherwise

import litellm
from checking import ADDRESS, KEY, MAX_TOKENS, MODEL, TOOL_SCHEMA, check, expect, expect_city, main
from pydantic import BaseModel

LITELLM = "litellm"
USER: list[Any] = [{"role": "user", "content": "How is Rome?"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": TOOL_SCHEMA}}
ROUTES: dict[str, dict[str, Any]] = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{ADDRESS}/v1", "api_key": KEY, "num_retries": 0},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": ADDRESS, "api_key": KEY, "num_retries": 0},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{ADDRESS}/v1", "api_key": KEY, "num_retries": 0},
}


class City(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


def _try(route: dict[str, Any]) -> None:
    found: Any = litellm.completion(messages=USER, max_tokens=8, **route)
    expect(found.choices[0].message.content and found.usage.completion_tokens, found)
    chunks: Any = list(litellm.completion(messages=USER, max_tokens=8, stream=True, **route))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks)


def _try_tools(route: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    ask: dict[str, Any] = {"messages": USER, "tools": [TOOL], "tool_choice": choice, "max_tokens": MAX_TOKENS, **route}
    message: Any = litellm.completion(**ask).choices[0].message
    call = message.tool_calls[0]
    arguments = call.function.arguments
    expect("city" in arguments, arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after: Any = litellm.completion(
        **{**ask, "messages": [*USER, message, result], "tool_choice": "auto", "max_tokens": 8}
    )
    expect(after.choices[0].finish_reason, after)
    rebuilt: Any = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
    expect(rebuilt.choices[0].message.tool_calls[0].function.arguments, rebuilt)


def _try_format(route: dict[str, Any]) -> None:
    found: Any = litellm.completion(messages=USER, max_tokens=MAX_TOKENS, response_format=City, **route)
    expect_city(found.choices[0].message.content)


def _note(name: str) -> None:
    route = ROUTES[name]
    check(LITELLM, f"{name}: chat, streamed")(lambda: _try(route))
    check(LITELLM, f"{name}: tools")(lambda: _try_tools(route))
    check(LITELLM, f"{name}: response_format of a pydantic model")(lambda: _try_format(route))


for each in ROUTES:
    _note(each)


@check(LITELLM, "text_completion, responses")
def others() -> None:
    route = {**ROUTES["openai"], "model": f"text-completion-openai/{MODEL}"}
    found: Any = litellm.text_completion(prompt="Once", max_tokens=8, **route)
    expect(found.choices[0].text, found)
    answer: Any = litellm.responses(input="How is Rome?", max_output_tokens=8, **ROUTES["openai"])
    expect(answer.output, answer)


if __name__ == "__main__":
    main()
