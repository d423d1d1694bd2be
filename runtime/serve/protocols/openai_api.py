"""OpenAI's protocol: chat completions, text completions, models.

A request may name the model as it likes, unless the server has aliases (see `Service.check_model`). `constraints` reads
the fields of other servers' dialects, and unknown ones. Sources: OpenAI's API reference; llama.cpp's server for
`timings`, `grammar` and the sampling options that OpenAI does not have; vLLM for `chat_template_kwargs` and
`continue_final_message`.
"""

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from moe_pack.runtime.serve.protocols import answers, completions, constraints, fields, formed
from moe_pack.runtime.serve.requests import Request, RequestError
from moe_pack.runtime.serve.service import Service

MAX_ANSWERS = 8
MAX_PROMPTS = 32  # and answers to all of them
MAX_TOP_LOGPROBS = 20

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
    """Additions to a stream."""

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
    """The message and the kind of an error."""

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
    200: {"model": Completion, "content": answers.EVENT_STREAM},
    **OPENAI_ERRORS,
}

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(problem: answers.Problem) -> dict[str, Any]:
    """Returns a problem in OpenAI's shape."""
    usual = "invalid_request_error" if problem.status < 500 else "server_error"
    kind = _ERROR_TYPES.get(problem.status, usual)
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


@router.get("/v1/models", response_model=ModelList, responses=OPENAI_ERRORS)
async def list_models(http: HttpRequest) -> Response:
    """Lists the served model, and again under each of its aliases."""
    service = answers.service_of(http)
    names = service.listed_names
    models = [model_object(service, name) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]}
    return JSONResponse({"object": "list", "data": models, "has_more": False, **ends})


@router.get("/v1/models/{model_id:path}", response_model=ModelObject, responses=OPENAI_ERRORS)
async def retrieve_model(http: HttpRequest, model_id: str) -> Response:
    """Describes the served model."""
    service = answers.service_of(http)
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
    return await answers.respond(http, _answered(answers.service_of(http), body))


async def _answered(service: Service, body: ChatRequest) -> Response:
    prepared = await answers.prepare_chat(service, chat_question(service, body))
    completions.check_scored(prepared.requests)
    writer = completions.ChatWriter(service, body.logprobs is True, body.prompt_logprobs)
    return await _response(body, writer, prepared, len(prepared.requests))


async def _response(
    body: "ChatRequest | CompletionRequest",
    writer: completions.ChatWriter | completions.TextWriter,
    prepared: answers.Prepared,
    answers_each: int,
) -> Response:
    if not body.stream:
        return await completions.written(writer, prepared, answers_each)
    with_usage = body.stream_options is not None and body.stream_options.include_usage is True
    events = completions.streamed(writer, prepared, with_usage, answers_each)
    return await answers.stream(events, lambda problem: answers.event_of(openai_error(problem)))


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def create_completion(http: HttpRequest, body: CompletionRequest) -> Response:
    """Continues texts."""
    return await answers.respond(http, _completed(answers.service_of(http), body))


async def _completed(service: Service, body: CompletionRequest) -> Response:
    prepared, echoes = await prepare_completion(service, body)
    writer = completions.TextWriter(
        service, prepared.requests, echoes, body.logprobs, body.echo is True, body.prompt_logprobs
    )
    return await _response(body, writer, prepared, body.n or 1)


def chat_question(service: Service, body: ChatRequest) -> answers.ChatQuestion:
    """Returns the question of a request. Raises: RequestError if this server cannot do it; ModelNotFoundError."""
    service.check_model(body.model)
    warnings = [*constraints.warnings_of(body)]
    if body.reasoning is not None and body.reasoning.max_tokens is not None:
        warnings.append("reasoning.max_tokens changes nothing here; max_tokens bounds thoughts and answer together")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    check_prompt_logprobs(body)
    choice = _tool_choice(body.tool_choice)
    stricts = [tool.function.strict for tool in body.tools or () if tool.function is not None]
    tools, unknown = _offered_tools(body)
    return answers.ChatQuestion(
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
        warnings=(*warnings, *unknown, *constraints.strict_warning(stricts, choice.kind == "required")),
        prompt_logprobs=body.prompt_logprobs,
    )


def check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    """Refuses log-probabilities of a prompt in a stream: vLLM's form has no place for them. Raises: RequestError."""
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs needs stream: false; remove one of the two", "prompt_logprobs")


def _continues(body: ChatRequest) -> bool:
    """Whether the answer continues the last message. Raises: RequestError if it is not the assistant's."""
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


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Returns the template's variables: those of the request, which take precedence, and those of other fields."""
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
    """Returns the template's variables for an effort of reasoning; `none` turns reasoning off."""
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def template_call(call_id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Returns a tool call as templates read it; most of them need the arguments as an object, not as JSON text."""
    if isinstance(arguments, str):
        # A text that is no object stays: a template then writes it as the model once did.
        with suppress(ValueError, RecursionError):
            found = fields.plain_json(json.loads(arguments or "{}"))
            arguments = found if isinstance(found, dict) else arguments
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    """Returns a message as templates read it; few templates know developers, who become the system."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
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


def _offered_tools(body: ChatRequest) -> tuple[list[answers.OfferedTool], list[str]]:
    """Returns the functions that the model may call, and warnings about other tools. Raises: RequestError."""
    offered: list[answers.OfferedTool] = []
    unknown: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            unknown.append(unknown_tool(f"tools[{i}]", tool.type))
        elif tool.function is None:
            raise RequestError(f"tools[{i}]: has type function and no function; add it", f"tools[{i}]")
        else:
            own, param = tool.function, f"tools[{i}].function.parameters"
            offered.append(answers.OfferedTool.of(own.name, own.description, own.parameters, param))
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
    """Returns the warning about a tool that a client does not run itself, as a search of the web."""
    return f"{place}: type {kind[:40]!a} is not supported, so the model does not know of this tool"


def some_tools(offered: list[answers.OfferedTool], unknown: list[str]) -> tuple[list[answers.OfferedTool], list[str]]:
    """Returns the tools that the model knows, and warnings about the others. Raises: RequestError if none is left."""
    if unknown and not offered:
        place, _, what = unknown[0].partition(": ")
        raise RequestError(f"{place}: {what.partition(',')[0]}; use functions that the client runs", place)
    return offered, unknown


def _tool_choice(
    choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedChoice | None,
) -> answers.ToolChoice:
    if isinstance(choice, NamedTool):
        return answers.ToolChoice("required", choice.function.name)
    if isinstance(choice, AllowedChoice):
        return answers.ToolChoice(choice.allowed_tools.mode)
    return answers.ToolChoice("required") if choice == "any" else answers.ToolChoice(choice or "auto")


async def prepare_completion(service: Service, body: CompletionRequest) -> tuple[answers.Prepared, list[str]]:
    """Returns the requests that continue texts, and the text before each answer. Raises: RequestError."""
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
            end_ids=found.ends(service.end_ids),
            stop=found.stop,
            top_logprobs=body.logprobs,
            prompt_logprobs=max(scored, default=None),
        )
        requests += answers.several(request, grammars[len(requests) :][:num_answers], found.rules)
        echoes += [text if body.echo else ""] * num_answers
    completions.check_scored(requests)
    return answers.Prepared(tuple(requests), tuple(formed.PlainParser() for _ in requests), warnings=warnings), echoes


def _usual_length(body: CompletionRequest) -> int | None:
    """Returns `max_tokens`; None if the request has its length in another field."""
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
