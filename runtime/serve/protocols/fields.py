"""The fields that requests of several protocols share, and their limits.

A field of a wrong type is refused. Unknown fields of a whole request are kept in `model_extra`, where `constraints`
reads them; those of objects inside it are ignored. Sources: OpenAI's and Anthropic's API references; llama.cpp's server
for `top_k`, `min_p`, `repeat_penalty` and the lists of `logit_bias`; Ollama's for `options`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.serve.requests import RequestError

MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1024
MAX_JSON_DEPTH = 64
MAX_BIASES = 1024
MAX_SEED = 2**63
_OPTIONS = {"num_predict": "n_predict"}  # of Ollama, in llama.cpp's words
LEAST_TOP_P = 1e-9  # for 0, which OpenAI allows: the likeliest token alone


def plain_json(value: Any) -> Any:
    """Returns a JSON value that can be written as UTF-8 and by recursion.

    Raises:  ValueError if it is nested too deeply, or has half a surrogate pair or a number that JSON does not have.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        if not level:
            return value
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below += [*entry.keys(), *entry.values()]
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, float) and not math.isfinite(entry):
                raise ValueError("numbers have to be finite")
            elif isinstance(entry, str) and not is_unicode(entry):
                raise ValueError("a text has half a surrogate pair, which is no character")
        level = below
    raise ValueError(f"JSON may be nested {MAX_JSON_DEPTH} levels deep at most")


def is_unicode(text: str) -> bool:
    """Whether a text has a UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def biases(value: Any) -> Any:
    """Returns a `logit_bias` as an object: llama.cpp takes a list of pairs too.

    Raises:  ValueError if it has very many tokens.
    """
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        value = {str(token): bias for token, bias in value}
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"found {len(value)} tokens, at most {MAX_BIASES}")
    return value


def with_options(value: Any) -> Any:
    """Returns a request with Ollama's `options` among its own fields, which take precedence."""
    if not isinstance(value, dict) or not isinstance(value.get("options"), dict):
        return value
    own = {name: each for name, each in value.items() if name != "options"}
    return {**{_OPTIONS.get(name, name): each for name, each in value["options"].items()}, **own}


T = TypeVar("T")
# A list ends at its first wrong item: a list of 4 million of them took 46 s to refuse, in which nobody was served.
Many = Annotated[list[T], Field(fail_fast=True)]
JsonObject = dict[str, Any]
Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]
Biases = Annotated[dict[str, Bias], BeforeValidator(biases)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=-1, lt=2**31)]


class Body(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="ignore", strict=True)


class RequestBody(Body):
    """A whole request."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_json(cls, value: Any) -> Any:
        """Refuses JSON that cannot be written again, before a template or a tokenizer meets it."""
        return with_options(plain_json(value))


class SamplingFields(RequestBody):
    """How a request asks for tokens to be chosen."""

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="-1 and 0: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    repeat_penalty: float | None = Field(None, gt=0, le=100, description="llama.cpp's name of repetition_penalty")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="false: the token never comes, as llama.cpp takes it")
    do_sample: bool | None = Field(None, description="false: temperature 0")
    seed: int | None = Field(None, ge=-MAX_SEED, lt=MAX_SEED, description="-1: every request differs")

    def over(self, default: SamplingOptions, vocab_size: int) -> SamplingOptions:
        """Returns the options, with defaults for fields that the request does not have.

        Raises:  RequestError if `logit_bias` names a token that the model does not have.
        """
        temperature = 0.0 if self.do_sample is False else self.temperature
        penalty = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        asked: dict[str, Any] = {
            "temperature": temperature,
            "top_p": None if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed is None or self.seed == -1 else self.seed % MAX_SEED,
            "logit_bias": tuple(pair for pair in self._biases(vocab_size) if pair[1] is not False) or None,
        }
        return replace(default, **{name: value for name, value in asked.items() if value is not None})

    def banned(self, vocab_size: int) -> frozenset[int]:
        """Returns the tokens whose bias is false: they may never come. Raises: RequestError as `over`."""
        return frozenset(token for token, bias in self._biases(vocab_size) if bias is False)

    def _biases(self, vocab_size: int) -> list[tuple[int, float]]:
        keys = list(self.logit_bias or ())
        wrong = [key for key in keys if not (key.isascii() and key.isdigit() and len(key) <= 10)]
        wrong = wrong or [key for key in keys if int(key) >= vocab_size]
        if wrong:
            raise RequestError(
                f"logit_bias: {wrong[0][:40]!r} is no token of this model; use numbers from 0 to {vocab_size - 1}",
                "logit_bias",
            )
        return [(int(key), bias) for key, bias in (self.logit_bias or {}).items()]


def stop_texts(texts: Sequence[str], param: str = "stop") -> tuple[str, ...]:
    """Returns the texts that end an answer, without empty ones.

    Raises:  RequestError if there are too many, or one is too long.
    """
    if len(texts) > MAX_STOP_TEXTS:
        raise RequestError(f"{param}: found {len(texts)} texts, at most {MAX_STOP_TEXTS}", param)
    if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(f"{param}: a text has more than {MAX_STOP_CHARACTERS} characters", param)
    return tuple(text for text in texts if text)


def asked_tokens(count: int | None, param: str) -> int | None:
    """Returns the number of tokens that a request asks for; None for -1: the rest of the context.

    Raises:  RequestError if it is 0.
    """
    if count == 0:
        raise RequestError(f"{param}: found 0, expected at least 1", param)
    return None if count == -1 else count
