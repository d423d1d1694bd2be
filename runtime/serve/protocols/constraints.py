"""Fields that constrain an answer, in the dialects of several servers: taken, refused by name, or warned about.

A request may spell a constraint as OpenAI, Anthropic, llama.cpp, vLLM, SGLang or Ollama do, in each of the protocols.
Every field that decides *the possible answers* is taken or refused. A field of taste alone (how the next token is
drawn) that is not taken gets a warning in the answer, and so does an unknown one, which may be a constraint. Fields
that change nothing of an answer are ignored. Sources: the API references of OpenAI, Anthropic and Ollama; the
documentation of the servers of llama.cpp, vLLM and SGLang.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moe_pack.runtime.serve import grammars
from moe_pack.runtime.serve.protocols import fields
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.service import GrammarSource, Service

MAX_WORDS = 256
ANY_OBJECT = {"type": "object"}

_LOG = logging.getLogger("moe_pack.serve")
_logged: set[str] = set()  # names of TASTE alone: the log has no text of a client

_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {}, "none", "off", "disabled", "auto")

# Fields that would change the possible answers, by the advice with which each is refused.
REFUSED: dict[str, str] = {
    name: advice
    for advice, names in {
        "send the functions as tools": "functions",
        "send tool_choice": "function_call",
        "this server writes text alone": "audio",
        "this server cannot search the web": "web_search_options search_parameters enable_search",
        "this server has no plugins": "plugins",
        "this server calls no MCP servers; give their tools as tools": "mcp_servers",
        "this server has no containers": "container",
        "this server stores no conversations; send the whole conversation as input": "conversation",
        "this server stores no prompts; send the text itself": "prompt",
        "send it as a system message": "system system_prompt",
        "put them into the messages": "documents",
        "this server has no guardrails": "guardrails",
        "send the text as a system message": "safe_prompt",
        "this server has no mode for translation": "translation_options",
        "this server stores no answers": "deferred",
        "this server continues texts; it does not fill in": "suffix input_extra input_prefix input_suffix",
        "this server draws one token after the other": "use_beam_search num_beams",
        "this server has no contrastive search": "penalty_alpha",
        "this server has no guidance by a negative prompt": "guidance_scale cfg_scale negative_prompt",
        "use a grammar, or tools": "structural_tag",
        "white space is bounded here; use a grammar for another form": "guided_whitespace_pattern",
        "this server runs no code of a request; use logit_bias or bad_words": (
            "logits_processors logits_processor custom_logit_processor"
        ),
        "this server runs no code of a request": "custom_params vllm_xargs",
        "the pack's own chat template writes the prompt; use chat_template_kwargs, or /v1/completions": (
            "chat_template template"
        ),
        "use /v1/completions": "raw",
        "this server reads text alone": "images image_data multimodal_data mm_processor_kwargs",
        "shorten the prompt": "truncate truncate_prompt_tokens prompt_truncate_len",
        "this server has no adapters": "lora lora_path lora_request adapter_id",
        "use a grammar": "n_indent force_words_ids begin_suppress_tokens",
        "use max_tokens, or end the connection": "t_max_predict_ms",
        "end the connection": "t_max_prompt_ms",
        "the pack's chat template decides where thoughts begin; use chat_template_kwargs": "thinking_forced_open",
        "a grammar rules the whole answer; use tools": "grammar_triggers grammar_lazy",
        "use stop, or regex": "stop_regex",
        "send it as regex": "regex_pattern",
        "send it as grammar": "grammar_string",
        "send it as grammar, in GBNF": "ebnf_grammar",
        "send response_format": "json_mode",
        "send them as bad_words": "banned_strings",
        "send them as logit_bias of false: [[token, false]]": "banned_tokens custom_token_bans suppress_tokens",
        "send them as allowed_token_ids": "allowed_tokens",
        "send ignore_eos": "ban_eos_token",
        "send texts as stop, and tokens as stop_token_ids": "stop_conditions",
        "start the server with --context": "max_context_length",
        "send words as bad_words": "bad_words_ids",
        "put the token into the prompt": "forced_bos_token_id",
        "use max_tokens": "forced_eos_token_id",
        "use repetition_penalty": "no_repeat_ngram_size",
        "end the prompt before the token": "token_healing",
        "drafts never change an answer here; remove it": "speculative_sampling",
    }.items()
    for name in names.split()
}
# Fields of which some values change nothing, and the others would change what may be answered.
REFUSED_UNLESS: dict[str, tuple[tuple[object, ...], str]] = {
    "modalities": ((None, [], ["text"]), "this server writes text alone"),
    "skip_special_tokens": ((None, True), "answers have no special tokens here"),
    "spaces_between_special_tokens": ((None, True, False), "answers have no special tokens here"),
    "include_stop_str_in_output": ((None, False), "a stop text is no part of the answer here"),
    "no_stop_trim": ((None, False), "a stop text is no part of the answer here"),
    "add_special_tokens": ((None, True, False), "use /v1/completions with tokens"),
    "parse_tool_calls": ((None, True), "send no tools, or tool_choice none"),
    "echo": ((None, False), "use /v1/completions"),
    "n": ((None, 1), "ask several times"),
    "best_of": ((None, 0, 1), "this server draws each answer once"),
    "length_penalty": ((None, 1, 0), "this server draws one token after the other"),
    "disable_tool_validation": ((None, False, True), "tools are validated here"),
    "truncation": ((None, "disabled", "auto"), "shorten the prompt"),
    "context_length_exceeded_behavior": ((None, "error"), "shorten the prompt"),
    "num_return_sequences": ((None, 1), "send n"),
    "prompt_mode": ((None, ""), "use chat_template_kwargs"),
}
# Fields of taste that this server does not have, with the values that change nothing.
TASTE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        """
        dry_multiplier xtc_probability mirostat dynatemp_range adaptive_target top_a epsilon_cutoff eta_cutoff
        smoothing_factor n_probs min_keep encoder_repetition_penalty verbosity post_sampling_probs
        return_tokens_as_token_ids return_token_ids return_tokens return_hidden_states return_progress response_fields
        context_management repetition_detection watermark citation_options include_domains exclude_domains
        max_tool_calls logprobs top_logprobs skew samplers sampler_order
        """.split(),  # noqa: SIM905  # a table of words
        _NOTHING,
    ),
    "top_n_sigma": (*_NOTHING, -1),
    "typical_p": (*_NOTHING, 1),
    "typical": (*_NOTHING, 1),
    "tfs_z": (*_NOTHING, 1),
    "tfs": (*_NOTHING, 1),
    "repeat_last_n": (*_NOTHING, -1),
    "penalty_range": (*_NOTHING, -1),
    "penalize_nl": (*_NOTHING, True),
    "temperature_last": (*_NOTHING, True),
    # 0 asks for no thoughts.
    "thinking_token_budget": (None, -1),
    "thinking_budget_tokens": (None, -1),
    "thinking_budget": (None, -1),
    "reasoning_budget": (None, -1),
    "reasoning_format": (*_NOTHING, "deepseek", "parsed"),
    "include_reasoning": (None, True),
    "separate_reasoning": (None, True),
}
# Fields that change nothing of an answer: who asks, what is kept, how it is computed.
_HARMLESS = frozenset(
    """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options
    prediction moderation
    cache_control inference_geo workspace_id speed betas fallbacks diagnostics user_profile_id
    client_metadata include stream_options
    cache_prompt id_slot slot_id n_keep n_discard n_cache_reuse timings_per_token preserved_tokens backend_sampling
    speculative dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold mirostat_tau
    mirostat_eta dynatemp_exponent dynatemp_low dynatemp_high adaptive_decay
    priority request_id cache_salt kv_transfer_params rid bootstrap_host bootstrap_port bootstrap_room
    data_parallel_rank stream_reasoning session_params media_io_kwargs guided_decoding_backend
    min_temp max_temp temp_exponent smoothing_curve
    keep_alive num_ctx num_keep num_batch num_gpu main_gpu num_thread numa use_mmap use_mlock low_vram f16_kv vocab_only
    ttl draft_model tool_stream provider models route transforms usage
    custom_llm_provider api_key api_base api_version timeout drop_params
    """.split()  # noqa: SIM905  # a table of words
)


class SchemaFormat(fields.Body):
    """A JSON schema with a name."""

    name: str = "answer"
    schema_: fields.JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(fields.Body):
    """The form of the answer; llama.cpp takes the schema of a json_object too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: fields.JsonObject | None = Field(None, alias="schema")


class StructuredOutputs(fields.Body):
    """The form of the answer, as vLLM writes it."""

    json_: fields.JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: fields.Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | fields.JsonObject | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class AnswerFields(fields.SamplingFields):
    """The fields that constrain an answer, in all dialects; each protocol adds its own."""

    stop: str | fields.Many[str] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(None, description="GBNF, as llama.cpp takes it")
    ebnf: str | None = Field(None, description="SGLang's name of grammar")
    json_schema: fields.JsonObject | str | None = Field(None, description="a JSON schema, as llama.cpp takes it")
    regex: str | None = Field(None, description="a regular expression, as SGLang takes it")
    format: Literal["json", ""] | fields.JsonObject | None = Field(
        None, description="json or a schema, as Ollama takes it"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="as vLLM takes it")
    guided_json: fields.JsonObject | str | None = Field(
        None, description="as vLLM took it; also guided_regex and so on"
    )
    guided_regex: str | None = None
    guided_choice: fields.Many[str] | None = None
    guided_grammar: str | None = None
    stop_token_ids: fields.Many[fields.Token] | None = Field(
        None, description="tokens that end the answer", max_length=1024
    )
    min_tokens: fields.TokenCount | None = Field(None, description="so many tokens come before the end")
    min_new_tokens: fields.TokenCount | None = Field(None, description="SGLang's name of min_tokens")
    allowed_token_ids: fields.Many[fields.Token] | None = Field(None, description="the only tokens that may come")
    bad_words: fields.Many[str] | None = Field(None, description="words that may not come", max_length=MAX_WORDS)
    max_completion_tokens: fields.TokenCount | None = None
    max_output_tokens: fields.TokenCount | None = None
    n_predict: fields.TokenCount | None = Field(None, description="llama.cpp's name of max_tokens")
    max_new_tokens: fields.TokenCount | None = Field(None, description="SGLang's name of max_tokens")


def warnings_of(body: AnswerFields) -> tuple[str, ...]:
    """Returns a warning for each field of a request that is not taken, and may matter.

    Raises:  RequestError if one would change the possible answers.
    """
    return tuple(warning for name, value in (body.model_extra or {}).items() if (warning := _warning(name, value)))


def strict_warning(stricts: Iterable[bool | None], is_forced: bool) -> list[str]:
    """Returns the warning about tools that are `strict`, if there is one and no call is forced."""
    if is_forced or not any(stricts):
        return []
    return ["strict: a call follows its tool's schema for certain only where tool_choice demands a call"]


def _warning(name: str, value: object) -> str | None:
    """Returns the warning about a field that no protocol takes; None if it changes nothing. Raises: RequestError."""
    if name in REFUSED:
        if value in _NOTHING:
            return None
        raise RequestError(f"{name} is not supported: {REFUSED[name]}", name)
    if name in REFUSED_UNLESS:
        neutral, advice = REFUSED_UNLESS[name]
        if value in neutral:
            return None
        raise RequestError(f"{name}: this value is not supported: {advice}", name)
    if name in TASTE:
        if value in TASTE[name]:
            return None
        if name not in _logged:
            _logged.add(name)
            _LOG.warning("requests have %s, which changes nothing here", name)
        return f"{name} changes nothing here"
    if name in _HARMLESS or value is None:
        return None
    return f"{name[:40]!a} is not known here and changes nothing"


# ---- the form of the answer -----------------------------------------------------------------------------------------


def grammar_source(body: AnswerFields, form: GrammarSource | None = None) -> GrammarSource | None:
    """Returns the form that an answer has to follow; None if it is free.

    Args:    form: of the protocol's own field.
    Raises:  RequestError if two fields ask for a form, or one of them is wrong.
    """
    found = [] if form is None else [form]
    found += [source for source in _sources(body) if source is not None]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} exclude each other; remove one", second)
    return found[0] if found else None


def schema_source(schema: fields.JsonObject | str, param: str) -> GrammarSource:
    """Returns the form of a JSON schema, which may be JSON text.

    Raises:  RequestError if the text is no object of JSON.
    """
    if isinstance(schema, str):
        try:
            schema = fields.plain_json(json.loads(schema))
        except (ValueError, RecursionError) as fault:
            raise RequestError(f"{param}: is no JSON; give a JSON schema", param) from fault
        if not isinstance(schema, dict):
            raise RequestError(f"{param}: is no JSON object; give a JSON schema", param)
    return GrammarSource("json_schema", schema, param)


def _sources(body: AnswerFields) -> Iterator[GrammarSource | None]:
    yield _response_format(body.response_format)
    yield from _structured(body.structured_outputs)
    for name in ("grammar", "ebnf", "guided_grammar"):
        text = getattr(body, name)
        yield None if text is None or not text.strip() else GrammarSource("gbnf", text, name)
    for name in ("regex", "guided_regex"):
        pattern = getattr(body, name)
        yield None if pattern is None else GrammarSource("regex", pattern, name)
    for name in ("json_schema", "guided_json"):
        schema = getattr(body, name)
        yield None if schema is None else schema_source(schema, name)
    if body.guided_choice is not None:
        yield GrammarSource("choice", body.guided_choice, "guided_choice")
    if body.format == "json":
        yield GrammarSource("json_schema", ANY_OBJECT, "format")
    elif isinstance(body.format, dict):
        yield schema_source(body.format, "format")


def _response_format(wanted: ResponseFormat | None) -> GrammarSource | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        if wanted.schema_ is None:
            return GrammarSource("json_schema", ANY_OBJECT, "response_format")
        return GrammarSource("json_schema", wanted.schema_, "response_format.schema")
    if wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        return GrammarSource("json_schema", wanted.json_schema.schema_, "response_format.json_schema.schema")
    if wanted.schema_ is not None:
        return GrammarSource("json_schema", wanted.schema_, "response_format.schema")
    raise RequestError("response_format has type json_schema and no json_schema.schema; add it", "response_format")


def _structured(wanted: StructuredOutputs | None) -> Iterator[GrammarSource]:
    if wanted is None:
        return
    if wanted.structural_tag is not None:
        advice = REFUSED["structural_tag"]
        raise RequestError(f"structured_outputs.structural_tag is not supported: {advice}", "structured_outputs")
    if wanted.whitespace_pattern is not None or wanted.disable_any_whitespace:
        name = "whitespace_pattern" if wanted.whitespace_pattern is not None else "disable_any_whitespace"
        advice = REFUSED["guided_whitespace_pattern"]
        raise RequestError(f"structured_outputs.{name} is not supported: {advice}", "structured_outputs")
    if wanted.json_ is not None:
        yield schema_source(wanted.json_, "structured_outputs.json")
    if wanted.regex is not None:
        yield GrammarSource("regex", wanted.regex, "structured_outputs.regex")
    if wanted.choice is not None:
        yield GrammarSource("choice", wanted.choice, "structured_outputs.choice")
    if wanted.grammar is not None:
        yield GrammarSource("gbnf", wanted.grammar, "structured_outputs.grammar")
    if wanted.json_object:
        yield GrammarSource("json_schema", ANY_OBJECT, "structured_outputs.json_object")


# ---- length, end and tokens -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The length and the ends of an answer, and the rules about its tokens."""

    max_tokens: int | None  # None: the rest of the context
    stop: tuple[str, ...]  # texts that end it
    end_ids: frozenset[int]  # tokens that end it, as the model's own ones do
    ignores_ends: bool  # the model's own ones do not end it
    rules: grammars.TokenRules

    def ends(self, own: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end the answer of a model with its `own` end tokens."""
        return self.end_ids if self.ignores_ends else self.end_ids | own


def limits(service: Service, body: AnswerFields, max_tokens: int | None, stops: Sequence[str] = ()) -> AnswerLimits:
    """Returns the limits of an answer; the least of several lengths counts.

    Args:    stops: the texts of the protocol's own field.
    Raises:  RequestError if a length is 0, or tokens are named that the model does not have.
    """
    lengths = {"max_tokens": max_tokens}
    for name in ("max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens"):
        lengths[name] = getattr(body, name)
    most = [count for name, asked in lengths.items() if (count := fields.asked_tokens(asked, name)) is not None]
    least = {"min_tokens": body.min_tokens, "min_new_tokens": body.min_new_tokens}
    counts = [count for count in least.values() if count is not None and count > 0]
    texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return AnswerLimits(
        max_tokens=min(most, default=None),
        stop=fields.stop_texts([*stops, *texts]),
        end_ids=_tokens(service, body.stop_token_ids, "stop_token_ids") or frozenset(),
        ignores_ends=body.ignore_eos is True,
        rules=grammars.TokenRules(
            allowed=_tokens(service, body.allowed_token_ids, "allowed_token_ids"),
            banned=body.banned(service.vocab_size),
            min_tokens=max(counts, default=0),
            bad=_bad_words(service, body.bad_words or ()),
        ),
    )


def _tokens(service: Service, tokens: Sequence[int] | None, param: str) -> frozenset[int] | None:
    wrong = next((token for token in tokens or () if token >= service.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{param}: the model has {service.vocab_size} tokens, and none is {wrong}", param)
    return None if tokens is None else frozenset(tokens)


def _bad_words(service: Service, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    if any(not word.strip() or len(word) > 256 for word in words):
        raise RequestError("bad_words: a word is empty, or has more than 256 characters; change it", "bad_words")
    return grammars.sequences_of(words, service.text_ids) if words else ()
