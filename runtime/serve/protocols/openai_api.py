"""OpenAI's protocol: chat completions, text completions, models.

A request may name the model as it likes, unless the server has aliases (see `Service.check_model`). What becomes of
fields of other servers' dialects, and of unknown ones, `constraints` says. Sources: OpenAI's API reference; llama.cpp's
server for `timings`, `grammar` and the sampling options that OpenAI does not have; vLLM for `chat_template_kwargs` and
`continue_final_message`.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from sse_starlette import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.protocols import completions, constraints, fields
from moe_pack.runtime.serve.protocols.answers import (
    EVENT_STREAM,
    Answer,
    ChatQuestion,
    OfferedTool,
    Prepared,
    Problem,
    ToolChoice,
    Usage,
    event_of,
    prepare_chat,
    respond,
    service_of,
    several,
    steps,
    stream,
    whole_answers,
)
from moe_pack.runtime.serve.protocols.formed import PlainParser
from moe_pack.runtime.serve.requests import Request, RequestError
from moe_pack.runtime.serve.service import Service

MAX_ANSWERS = 8
MAX_PROMPTS = 32  # and answers to all of them
MAX_TOP_LOGPROBS = 20
DONE = ServerSentEvent("[DONE]", sep="\n")

router = APIRouter()


class ContentPart(fields.Body):
    """A part of a message's content; text alone is taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(fields.Body):
    """The function that a tool call names. `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(fields.Body):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(fields.Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | fields.Many[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: fields.Many[ToolCall] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = Field(None, description="continue this last message, as some services take it")
    partial: bool | None = Field(None, description="the same, as Kimi and Qwen take it")


class FunctionTool(fields.Body):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: fields.JsonObject | None = None
    strict: bool | None = None


class Tool(fields.Body):
    """A tool; functions alone are taken."""

    type: str
    function: FunctionTool | None = None


class NamedFunction(fields.Body):
    """The name of a function."""

    name: str


class NamedTool(fields.Body):
    """A tool that the answer has to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(fields.Body):
    """Some of the tools, of which the answer may call one, or has to."""

    mode: Literal["auto", "required"]
    tools: fields.Many[fields.JsonObject]


class AllowedChoice(fields.Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Thinking(fields.Body):
    """Whether the model thinks, as some services write it."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class Reasoning(fields.Body):
    """How much the model thinks, as OpenRouter writes it."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class StreamOptions(fields.Body):
    """What a stream has besides the answer."""

    include_usage: bool | None = None


class ChatRequest(constraints.AnswerFields):
    """A request for answers in a conversation."""

    model: str | None = None
    messages: fields.Many[ChatMessage] = Field(min_length=1)
    tools: fields.Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    stop_sequences: fields.Many[str] | None = Field(None, description="Anthropic's name of stop")
    max_tokens: fields.TokenCount | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="of the prompt, as vLLM's")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: fields.JsonObject | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = Field(None, description="as Qwen's services take it")
    think: bool | str | None = Field(None, description="whether, or how much, the model thinks, as Ollama takes it")
    continue_final_message: bool | None = Field(None, description="continue the last message, an assistant's")
    add_generation_prompt: bool | None = Field(None, description="false only where the last message is continued")


class CompletionRequest(constraints.AnswerFields):
    """A request to continue texts."""

    model: str | None = None
    prompt: str | fields.Many[str] | fields.Many[fields.Token] | fields.Many[fields.Many[fields.Token]]
    echo: bool | None = None
    best_of: int | None = None
    max_tokens: fields.TokenCount | None = Field(16, description="16, as OpenAI's, unless the request says it")
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="of the prompt, as vLLM's")
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ErrorFields(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorFields


class ModelObject(BaseModel):
    """The served model: OpenAI's fields, then Anthropic's; `max_model_len` is the context, by vLLM's name.

    `chat`: whether the model has a chat template.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    chat: bool
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class ModelList(BaseModel):
    """The served model, under each of its names."""

    object: Literal["list"]
    data: list[ModelObject]
    has_more: bool
    first_id: str
    last_id: str


class Completion(BaseModel):
    """Answers with what they took. `prompt_logprobs`: of the prompt that a chat's choices share."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    timings: dict[str, float]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorAnswer, "description": "An error"}}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"model": Completion, "content": EVENT_STREAM},
    **OPENAI_ERRORS,
}

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(problem: Problem) -> dict[str, Any]:
    """Returns a problem in OpenAI's shape."""
    usual = "invalid_request_error" if problem.status < 500 else "server_error"
    kind = _ERROR_TYPES.get(problem.status, usual)
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def failed_event(problem: Problem) -> ServerSentEvent:
    """Returns the event of a stream that says what went wrong."""
    return event_of(openai_error(problem))


@router.get("/v1/models", response_model=ModelList, responses=OPENAI_ERRORS)
async def list_models(http: HttpRequest) -> Response:
    """Lists the served model, and again under each of its aliases."""
    service = service_of(http)
    names = service.listed_names
    models = [model_object(service, name) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]}
    return JSONResponse({"object": "list", "data": models, "has_more": False, **ends})


@router.get("/v1/models/{model_id:path}", response_model=ModelObject, responses=OPENAI_ERRORS)
async def retrieve_model(http: HttpRequest, model_id: str) -> Response:
    """Describes the served model."""
    service = service_of(http)
    if not model_id:
        raise HTTPException(404)
    service.check_model(model_id)
    return JSONResponse(model_object(service, model_id if model_id in service.listed_names else service.model_id))


def model_object(service: Service, name: str) -> dict[str, Any]:
    """Returns what `/v1/models` says about the served model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moe-pack",
        "max_model_len": service.context_tokens,
        "chat": service.takes_chats,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
    }


@router.post("/v1/chat/completions", response_model=Completion, responses=STREAMED)
async def create_chat_completion(http: HttpRequest, body: ChatRequest) -> Response:
    """Answers a conversation."""
    return await respond(http, _answered(service_of(http), body))


async def _answered(service: Service, body: ChatRequest) -> Response:
    prepared = await prepare_chat(service, chat_question(service, body))
    completions.check_scored(prepared.requests)
    writer = completions.ChatWriter(service, body.logprobs is True, body.prompt_logprobs)
    if body.stream:
        options = body.stream_options or StreamOptions()
        return await stream(streamed(writer, prepared, options.include_usage is True), failed_event)
    return await written(writer, prepared, len(prepared.requests))


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def create_completion(http: HttpRequest, body: CompletionRequest) -> Response:
    """Continues texts."""
    return await respond(http, _completed(service_of(http), body))


async def _completed(service: Service, body: CompletionRequest) -> Response:
    prepared, echoes = await prepare_completion(service, body)
    writer = completions.TextWriter(
        service, prepared.requests, echoes, body.logprobs, body.echo is True, body.prompt_logprobs
    )
    if body.stream:
        options = body.stream_options or StreamOptions()
        return await stream(streamed(writer, prepared, options.include_usage is True, body.n or 1), failed_event)
    return await written(writer, prepared, body.n or 1)


def chat_question(service: Service, body: ChatRequest) -> ChatQuestion:
    """Returns the question of a request.

    Raises:  RequestError if it asks for what this server cannot do; ModelNotFoundError.
    """
    service.check_model(body.model)
    warnings = constraints.warnings_of(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    check_prompt_logprobs(body)
    choice = _tool_choice(body.tool_choice)
    stricts = [tool.function.strict for tool in body.tools or () if tool.function is not None]
    tools, unknown = _offered_tools(body)
    return ChatQuestion(
        messages=[_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        sampling=body.over(service.default_sampling, service.vocab_size),
        limits=constraints.limits(service, body, body.max_tokens, body.stop_sequences or ()),
        tools=tools,
        choice=choice,
        several_calls=body.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(body),
        continues=_continues(body),
        grammar=constraints.grammar_source(body),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_answers=body.n or 1,
        warnings=(
            *warnings,
            *_budget_warning(body),
            *unknown,
            *constraints.strict_warning(stricts, choice.kind == "required"),
        ),
        prompt_logprobs=body.prompt_logprobs,
    )


def check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    """Refuses log-probabilities of a prompt in a stream, in which vLLM's form has no place.

    Raises:  RequestError.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs needs stream: false; remove one of the two", "prompt_logprobs")


def _continues(body: ChatRequest) -> bool:
    """Whether the answer continues the last message.

    Raises:  RequestError if that is not the assistant's, or if nothing begins an answer.
    """
    last, param = body.messages[-1], "continue_final_message"
    if not body.continue_final_message:
        name = "prefix" if last.prefix else "partial" if last.partial else None
        if name is None and body.add_generation_prompt is False:
            param = "add_generation_prompt"
            raise RequestError(f"{param}: false needs continue_final_message; add it, or remove {param}", param)
        if name is None:
            return False
        param = f"messages[{len(body.messages) - 1}].{name}"
    if last.role != "assistant":
        raise RequestError(f"{param} needs a last message of the assistant", param)
    return True


def _budget_warning(body: ChatRequest) -> list[str]:
    if body.reasoning is None or body.reasoning.max_tokens is None:
        return []
    return ["reasoning.max_tokens changes nothing here; max_tokens bounds thoughts and answer together"]


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Returns the variables of the template: those that the request names, over what other fields say of thinking."""
    kwargs: dict[str, Any] = {}
    if body.reasoning is not None:
        effort = "none" if body.reasoning.enabled is False else body.reasoning.effort
        kwargs |= {} if effort is None else effort_kwargs(effort)
    if body.reasoning_effort is not None:
        kwargs |= effort_kwargs(body.reasoning_effort)
    if isinstance(body.think, str):
        kwargs |= effort_kwargs(body.think)
    elif body.think is not None:
        kwargs["enable_thinking"] = body.think
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        kwargs["enable_thinking"] = body.thinking.type == "enabled"
    if body.enable_thinking is not None:
        kwargs["enable_thinking"] = body.enable_thinking
    return {**kwargs, **(body.chat_template_kwargs or {})}


def effort_kwargs(effort: str) -> dict[str, Any]:
    """Returns the variables of templates for an effort of reasoning; `none` turns reasoning off."""
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def template_call(call_id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Returns a tool call as templates read it: most of them want the arguments as an object, not as JSON text."""
    if isinstance(arguments, str):
        # What is no object stays as it is: a template then writes what the model once wrote.
        with suppress(ValueError, RecursionError):
            found = fields.plain_json(json.loads(arguments or "{}"))
            arguments = found if isinstance(found, dict) else arguments
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    """Returns a message as templates read it. Few templates know developers; to them they are the system."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    return made


def _part_text(part: ContentPart, place: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"{place}: has type {part.type} and no {part.type}; add it", place)
    raise RequestError(f"{place}: type {part.type[:40]!r} is not supported; this server reads text alone", place)


def _offered_tools(body: ChatRequest) -> tuple[list[OfferedTool], list[str]]:
    """Returns the functions that the model may call, and what to say about tools of other types.

    Raises:  RequestError if a function is missing, or `tool_choice` names one that is not there.
    """
    offered: list[OfferedTool] = []
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            unknown.append(unknown_tool(f"tools[{i}]", tool.type))
        elif tool.function is None:
            raise RequestError(f"tools[{i}]: has type function and no function; add it", f"tools[{i}]")
        else:
            offered.append(OfferedTool(function_tool(tool.function), f"tools[{i}].function.parameters"))
    if isinstance(body.tool_choice, AllowedChoice):
        wanted = [each.get("function") or each for each in body.tool_choice.allowed_tools.tools]
        names = [each.get("name") if isinstance(each, dict) else None for each in wanted]
        known, allowed = {tool.name for tool in offered}, set(map(str, names))
        missing = next((name for name in names if name is not None and str(name) not in known), None)
        if missing is not None:
            param = "tool_choice"
            raise RequestError(f"tool_choice allows {ascii(missing)[:80]}, which is not in tools; add it", param)
        offered = [tool for tool in offered if tool.name in allowed]
    return some_tools(offered, unknown)


def unknown_tool(place: str, kind: str) -> str:
    """Returns what to say about a tool that a client does not run itself, as a search of the web."""
    return f"{place}: type {kind[:40]!a} is not supported, so the model does not know of this tool"


def some_tools(offered: list[OfferedTool], unknown: list[str]) -> tuple[list[OfferedTool], list[str]]:
    """Returns the tools that the model knows of, and what to say about the others.

    Raises:  RequestError if none is left.
    """
    if unknown and not offered:
        place, _, what = unknown[0].partition(": ")
        raise RequestError(f"{place}: {what.partition(',')[0]}; use functions that the client runs", place)
    return offered, unknown


def function_tool(function: FunctionTool) -> dict[str, Any]:
    """Returns a function as templates read tools."""
    made: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        made["description"] = function.description
    made["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": made}


def _tool_choice(choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedChoice | None) -> ToolChoice:
    if isinstance(choice, NamedTool):
        return ToolChoice("required", choice.function.name)
    if isinstance(choice, AllowedChoice):
        return ToolChoice(choice.allowed_tools.mode)
    return ToolChoice("required") if choice == "any" else ToolChoice(choice or "auto")


async def prepare_completion(service: Service, body: CompletionRequest) -> tuple[Prepared, list[str]]:
    """Returns the requests that continue texts, and for each the text to put before the answer.

    Raises:  RequestError if the request cannot be answered; ModelNotFoundError.
    """
    service.check_model(body.model)
    warnings = constraints.warnings_of(body)
    num_answers = body.n or 1
    if body.best_of is not None and body.best_of != num_answers:
        raise RequestError("best_of is not supported; remove it", "best_of")
    check_prompt_logprobs(body)
    is_prompt_alone = body.echo is True and body.max_tokens == 0
    echoed = body.logprobs if body.echo else None
    scored = [number for number in (body.prompt_logprobs, echoed) if number is not None]
    sampling = body.over(service.default_sampling, service.vocab_size)
    found = constraints.limits(service, body, None if is_prompt_alone else _usual_length(body))
    prompts = await _prompts(service, body.prompt, num_answers)
    grammars = await service.grammars(constraints.grammar_source(body), len(prompts) * num_answers)
    requests: list[Request] = []
    echoes: list[str] = []
    for text, ids in prompts:
        request = Request(
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=service.max_tokens(len(ids), 0 if is_prompt_alone else found.max_tokens),
            end_ids=found.ends(service.end_ids(chat=False)),
            stop=found.stop,
            top_logprobs=body.logprobs,
            prompt_logprobs=max(scored, default=None),
        )
        requests += several(request, grammars[len(requests) :][:num_answers], found.rules)
        echoes += [text if body.echo else ""] * num_answers
    completions.check_scored(requests)
    return Prepared(tuple(requests), tuple(PlainParser() for _ in requests), warnings=warnings), echoes


def _usual_length(body: CompletionRequest) -> int | None:
    """Returns `max_tokens`, whose usual value gives way to another field that says a length."""
    others = (body.max_completion_tokens, body.max_output_tokens, body.n_predict, body.max_new_tokens)
    is_usual = "max_tokens" not in body.model_fields_set
    return None if is_usual and any(count is not None for count in others) else body.max_tokens


async def _prompts(
    service: Service, prompt: str | list[str] | list[int] | list[list[int]], num_answers: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns each prompt as text and as tokens."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]  # type: ignore[assignment]  # one prompt: its items are of one type
    if not 0 < len(prompt) <= MAX_PROMPTS:
        raise RequestError(f"prompt: found {len(prompt)} prompts, expected 1 to {MAX_PROMPTS}", "prompt")
    if len(prompt) * num_answers > MAX_PROMPTS:
        raise RequestError(f"n: {len(prompt)} prompts with {num_answers} answers each, at most {MAX_PROMPTS}", "n")
    texts = [one for one in prompt if isinstance(one, str)]
    if texts:
        return list(zip(texts, await service.completion_prompts(texts), strict=True))
    made = []
    for one in prompt:
        ids: tuple[int, ...] = tuple(one)  # type: ignore[arg-type]  # not a token: those were made one prompt
        service.max_tokens(len(ids), None)  # before the texts of very many tokens are read
        if any(token >= service.vocab_size for token in ids):
            raise RequestError(f"prompt: has token {max(ids)}, and the model has {service.vocab_size} tokens", "prompt")
        made.append((b"".join(map(service.token_bytes, ids)).decode("utf-8", "replace"), ids))
    return made


async def written(
    writer: completions.ChatWriter | completions.TextWriter, prepared: Prepared, answers_each: int
) -> Response:
    """Returns the response with whole answers, `answers_each` of which share a prompt."""
    answers = await whole_answers(writer.service, prepared)

    def response() -> Response:
        choices = [writer.choice(index, answer) for index, answer in enumerate(answers)]
        head = {"object": writer.object_name, **writer.frame, "choices": choices, **writer.about_prompt(answers)}
        took = {"usage": usage(answers, answers_each), "timings": timings(answers, answers_each)}
        return JSONResponse({**head, **took, **warned(prepared)})

    # The log-probabilities of long prompts take seconds to write, in which others are served.
    return response() if answers[0].prompt_logprobs is None else await run_in_threadpool(response)


async def streamed(
    writer: completions.ChatWriter | completions.TextWriter,
    prepared: Prepared,
    with_usage: bool,
    answers_each: int | None = None,
) -> AsyncGenerator[ServerSentEvent, None]:
    """Yields the chunks of a stream; the last one has `timings`, `warnings`, and `usage` where the request asks."""

    def chunk(choices: list[dict[str, Any]], **more: object) -> ServerSentEvent:
        nothing = {"usage": None} if with_usage else {}
        return event_of({"object": writer.chunk_name, **writer.frame, "choices": choices, **nothing, **more})

    def first(index: int, answer: Answer) -> ServerSentEvent:
        return chunk([writer.first(index, answer)])

    answers = [Answer() for _ in prepared.requests]
    waiting: list[list[TokenLogprob]] = [[] for _ in answers]  # of tokens whose text has not come yet
    each = answers_each or len(answers)
    with writer.service.generate(prepared.requests) as run:
        for index, answer in enumerate(answers):
            if not writer.begins_with_prompt:
                yield first(index, answer)
        async for step in steps(run, prepared):
            index, answer = step.index, answers[step.index]
            if step.logprob is not None:
                waiting[index].append(step.logprob)
            for change in answer.take(step):
                if change.text or (change.change == "open" and change.block.kind == "call"):
                    yield chunk([writer.added(index, change, answer, waiting[index])])
                    waiting[index] = []
            if step.prompt_logprobs is not None and writer.begins_with_prompt:
                yield await run_in_threadpool(first, index, answer)  # it may take long to write, as in `written`
            if step.end is not None:
                is_last = not with_usage and all(one.end is not None for one in answers)
                more = {"timings": timings(answers, each), **warned(prepared)} if is_last else {}
                yield chunk([writer.last(index, answer, waiting[index])], **more)
    if with_usage:
        yield chunk([], usage=usage(answers, each), timings=timings(answers, each), **warned(prepared))
    yield DONE


def warned(prepared: Prepared) -> dict[str, list[str]]:
    """Returns the field that says what of a request was not taken; none where all was."""
    return {"warnings": list(prepared.warnings)} if prepared.warnings else {}


def usage(answers: Sequence[Answer], answers_each: int) -> dict[str, Any]:
    """Returns the tokens that answers took, in OpenAI's words."""
    found = Usage.of(answers, answers_each)
    return {
        "prompt_tokens": found.prompt,
        "completion_tokens": found.completion,
        "total_tokens": found.prompt + found.completion,
        "prompt_tokens_details": {"cached_tokens": found.cached},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning},
    }


def timings(answers: Sequence[Answer], answers_each: int) -> dict[str, float]:
    """Returns the times that answers took, in llama.cpp's words; of several at once, the longest times."""
    found = Usage.of(answers, answers_each)
    prefill_s = max(answer.ended.timings.prefill_s for answer in answers)
    decode_s = max(answer.ended.timings.decode_s for answer in answers)
    computed = found.prompt - found.cached
    return {
        "cache_n": found.cached,
        "prompt_n": computed,
        "prompt_ms": 1000 * prefill_s,
        "prompt_per_second": computed / prefill_s if prefill_s else 0.0,
        "predicted_n": found.completion,
        "predicted_ms": 1000 * decode_s,
        "predicted_per_second": found.completion / decode_s if decode_s else 0.0,
    }
