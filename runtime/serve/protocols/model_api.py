"""Endpoints about the model: its tokens, its properties, its memory, its version, its name in lists.

The endpoints are those of llama.cpp's server (`/tokenize`, `/detokenize`, `/props`), of vLLM (the first two with other
fields, `/tokenizer_info`, `/version`), and those by which clients of Ollama find models (`/api/...`); `/budget` is our
own. Other endpoints of these servers answer that they are not supported, with advice. Sources: tools/server/README.md
of llama.cpp; entrypoints/serve/tokenize of vLLM; docs/api.md of Ollama.
"""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from moe_pack.formats.base.commands import read_size
from moe_pack.formats.base.version import VERSION
from moe_pack.runtime.serve.memory import EngineMemory, MemoryState
from moe_pack.runtime.serve.protocols import answers, openai_api
from moe_pack.runtime.serve.protocols.completions import FINGERPRINT
from moe_pack.runtime.serve.protocols.fields import JsonObject, Many, RequestBody, Token
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.service import Service

NOT_SUPPORTED = 501  # as llama.cpp's server answers for what it was not started with

_USE_OPENAI = "use /v1/chat/completions or /v1/completions"
_NO_EMBEDDINGS = "this server makes no embeddings; use a server with an embedding model"
_NO_RERANKING = "this server ranks no documents; use a server with a reranking model"
_NO_NATIVE = f"this server does not take llama.cpp's own requests; {_USE_OPENAI}"
_NO_OLLAMA = (
    "this server does not take Ollama's requests; use OpenAI's at /v1 (in Open WebUI: add an OpenAI connection)"
)
_ABSENT = {
    path: advice
    for advice, paths in {
        _NO_EMBEDDINGS: "/v1/embeddings /embeddings /embedding /api/embed /api/embeddings",
        _NO_RERANKING: "/v1/rerank /v2/rerank /v1/reranking /rerank /reranking",
        _NO_NATIVE: "/completion /infill",
        _NO_OLLAMA: "/api/chat /api/generate",
    }.items()
    for path in paths.split()
}
_NO_SLOTS = "this server does not show what each slot does; use /metrics for counts"

router = APIRouter()


class TokenizeRequest(RequestBody):
    """A text whose tokens are asked for: `content` in llama.cpp's words, `prompt` or `messages` in vLLM's."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Many[openai_api.ChatMessage] | None = None
    tools: Many[openai_api.Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    """The tokens of a text; `max_model_len` is the context of a request.

    `tokens`: numbers, or objects of `id` and `piece` if the request has `with_pieces`.   `token_strs`: their texts, if
    the request has `return_token_strs`.
    """

    count: int
    max_model_len: int
    tokens: list[int | dict[str, Any]]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Tokens whose text is asked for."""

    model: str | None = None
    tokens: Many[Token]


class DetokenizeAnswer(BaseModel):
    """The text of tokens, by llama.cpp's name and by vLLM's."""

    content: str
    prompt: str


class PropsAnswer(BaseModel):
    """The properties of a server for llama.cpp's clients; `model_path` is a name, since paths are private."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


@router.post("/tokenize", response_model=TokenizeAnswer, responses=openai_api.OPENAI_ERRORS)
async def tokenize(http: HttpRequest, body: TokenizeRequest) -> Response:
    """Returns the tokens of a text, or of a conversation."""
    service = answers.service_of(http)
    ids = await _tokens(service, body)
    tokens: list[Any] = list(ids)
    if body.with_pieces:
        tokens = [{"id": token, "piece": _piece(service.token_bytes(token))} for token in ids]
    answer = {"count": len(ids), "max_model_len": service.context_tokens, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [service.token_bytes(token).decode("utf-8", "replace") for token in ids]
    return JSONResponse(answer)


async def _tokens(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    """Returns the tokens of a request's text. Raises: RequestError if it has no text, or several."""
    service.check_model(body.model)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"found {' and '.join(given) or 'no text'}; send one of content, prompt and messages",
            (given or ["content"])[0],
        )
    if body.parse_special is False:
        raise RequestError(
            "parse_special false is not supported: special tokens in a text are always read as tokens", "parse_special"
        )
    if body.messages is not None:
        return await _conversation_tokens(service, body)
    # llama.cpp adds nothing unless it is asked to, vLLM adds unless it is asked not to.
    text, adds = body.content, body.add_special is True
    if text is None:
        text, adds = body.prompt or "", body.add_special_tokens is not False
    (ids,) = await service.completion_prompts([text], special_tokens=adds)
    return ids


async def _conversation_tokens(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise RequestError(
            "add_generation_prompt false is not supported: prompts end where the answer begins", "add_generation_prompt"
        )
    fields = ("messages", "tools", "chat_template_kwargs", "continue_final_message")
    question = openai_api.chat_question(
        service, openai_api.ChatRequest.model_validate({name: getattr(body, name) for name in fields})
    )
    tools = [tool.definition for tool in question.tools]
    prompt = await service.chat_prompt(question.messages, tools, question.template_kwargs, question.continues)
    return tuple(prompt.ids)


def _piece(raw: bytes) -> str | list[int]:
    """Returns the text of a token, or its bytes if they are no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


@router.post("/detokenize", response_model=DetokenizeAnswer, responses=openai_api.OPENAI_ERRORS)
async def detokenize(http: HttpRequest, body: DetokenizeRequest) -> Response:
    """Returns the text of tokens."""
    service = answers.service_of(http)
    service.check_model(body.model)
    if any(token >= service.vocab_size for token in body.tokens):
        found = f"tokens: has token {max(body.tokens)}, and the model has {service.vocab_size} tokens"
        raise RequestError(found, "tokens")
    text = b"".join(map(service.token_bytes, body.tokens)).decode("utf-8", "replace")
    return JSONResponse({"content": text, "prompt": text})


@router.get("/props", response_model=PropsAnswer, responses=openai_api.OPENAI_ERRORS)
async def props(http: HttpRequest) -> Response:
    """Says what llama.cpp's clients ask of a server."""
    service = answers.service_of(http)
    sampling, memory = service.default_sampling, service.scheduler.memory
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_predict": -1,
        "max_tokens": -1,
    }
    answer = {
        "default_generation_settings": {"n_ctx": service.context_tokens, "params": params},
        "total_slots": service.scheduler.counts().num_slots,
        "model_alias": service.model_id,
        "model_path": service.facts.folder_name,
        "chat_template": service.facts.chat_template,
        "bos_token": service.facts.bos_token,
        "eos_token": service.facts.eos_token,
        "modalities": {"vision": False, "audio": False},
        "build_info": FINGERPRINT,
        "is_sleeping": memory is not None and memory.state().is_released,
    }
    return JSONResponse(answer)


class BudgetRequest(RequestBody):
    """The memory that the engine is to have: bytes or a size such as 11G, 0 or `release`, or `take`."""

    budget: Annotated[int, Field(ge=0, lt=2**63)] | str


class BudgetAnswer(BaseModel):
    """The memory of the engine after its last change, in bytes, as of `MemoryState`."""

    budget: int
    used: int
    released: bool
    seconds: float


@router.get("/budget", response_model=BudgetAnswer, responses=openai_api.OPENAI_ERRORS)
async def budget(http: HttpRequest) -> Response:
    """Says how much of GPUs' memory the engine has."""
    return _budget_answer(_memory_of(answers.service_of(http)).state())


@router.post("/budget", response_model=BudgetAnswer, responses=openai_api.OPENAI_ERRORS)
async def change_budget(http: HttpRequest, body: BudgetRequest) -> Response:
    """Gives the engine's memory back, takes it again, or changes it, once no request runs; needs a key."""
    service = answers.service_of(http)
    _memory_of(service)
    if not http.app.state.has_keys:
        needs = "POST /budget needs a key, and this server has none; start it with --api-key KEY"
        return JSONResponse(openai_api.openai_error(answers.Problem(403, needs, code="needs_key")), 403)
    done = service.scheduler.change_memory(_budget_bytes(body.budget))
    return _budget_answer(await asyncio.shield(asyncio.wrap_future(done)))


def _budget_bytes(budget: int | str) -> int | None:
    """Returns the bytes that a request asks for: 0 to give memory back, None to take it as before."""
    if isinstance(budget, int) or budget in ("take", "release", "0"):
        return None if budget == "take" else 0 if budget == "release" else int(budget)
    try:
        return read_size(budget)
    except ValueError:
        found = f"budget: found {budget[:200]!r}, expected bytes, a size such as 11G, release or take"
        raise RequestError(found, "budget") from None


def _budget_answer(state: MemoryState) -> Response:
    answer = {"budget": state.budget_bytes, "used": state.used_bytes, "released": state.is_released}
    return JSONResponse({**answer, "seconds": round(state.seconds, 3)})


def _memory_of(service: Service) -> EngineMemory:
    """Returns the memory of the engine. Raises: HTTPException if it runs on the CPU."""
    memory = service.scheduler.memory
    if memory is None:
        raise HTTPException(409, "the model runs on the CPU, whose memory is not given back while the server runs")
    return memory


@router.get("/tokenizer_info", response_model=dict[str, str], responses=openai_api.OPENAI_ERRORS)
async def tokenizer_info(http: HttpRequest) -> Response:
    """Returns what vLLM's clients ask of a tokenizer; what the pack's files do not have is left out."""
    facts = answers.service_of(http).facts
    found = {"chat_template": facts.chat_template, "bos_token": facts.bos_token, "eos_token": facts.eos_token}
    return JSONResponse({"tokenizer_class": "moe-pack", **{name: text for name, text in found.items() if text}})


@router.get("/version", response_model=dict[str, str])
@router.get("/api/version", response_model=dict[str, str])
async def version() -> Response:
    """Says the server's version, as vLLM and Ollama do."""
    return JSONResponse({"version": VERSION})


@router.get("/api/tags", response_model=dict[str, Any], responses=openai_api.OPENAI_ERRORS)
async def list_tags(http: HttpRequest) -> Response:
    """Lists the served model under each of its names, as Ollama does."""
    service = answers.service_of(http)
    made_at = datetime.fromtimestamp(service.created, UTC).isoformat()
    common = {"modified_at": made_at, "size": 0, "digest": "", "details": _details()}
    return JSONResponse({"models": [{"name": name, "model": name, **common} for name in service.listed_names]})


class ShowRequest(RequestBody):
    """The model that a client of Ollama asks about."""

    model: str | None = None
    name: str | None = None


@router.post("/api/show", response_model=dict[str, Any], responses=openai_api.OPENAI_ERRORS)
async def show(http: HttpRequest, body: ShowRequest) -> Response:
    """Describes the served model, as Ollama does."""
    service = answers.service_of(http)
    service.check_model(body.model or body.name)
    facts = {"general.architecture": "moe", "general.basename": service.model_id}
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": service.facts.chat_template,
            "details": _details(),
            "model_info": {**facts, "moe.context_length": service.context_tokens},
            "capabilities": ["completion", "tools"] if service.takes_chats else ["completion"],
        }
    )


def _details() -> dict[str, Any]:
    """Returns Ollama's facts about a model's file, of which none applies to packs; clients read the keys."""
    texts = dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), "")
    return {**texts, "format": "moe-pack", "families": []}


async def absent(http: HttpRequest) -> Response:
    """Says that this server has nothing for an endpoint, and what to use."""
    path = http.url.path
    problem = answers.Problem(NOT_SUPPORTED, f"{path}: {_ABSENT.get(path, _NO_SLOTS)}", code="not_supported")
    content: dict[str, Any] = openai_api.openai_error(problem)
    if path.startswith("/api/"):
        content = {"error": problem.message}  # Ollama's clients read a text
    return JSONResponse(content, NOT_SUPPORTED)


for _path in _ABSENT:
    router.add_api_route(_path, absent, methods=["POST"], include_in_schema=False)
router.add_api_route("/slots", absent, methods=["GET"], include_in_schema=False)
