"""The log of a server: a line for each request, as text or as JSON.

A line never has a key, or a text of a prompt or an answer, or anything else that a client can choose (paths, names, the
messages that quote them). A client's own number of its request is written if it is short and plain. Characters that
would begin another line, or move a terminal's cursor, are written as escapes.
"""

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from moe_pack.runtime.serve import requests

LogFormat = Literal["text", "json"]

LOG = logging.getLogger("moe_pack.serve")

_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELD = re.compile(r"[a-z][a-z_]{0,40}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
# Messages with these codes have numbers and the server's own names alone.
_PLAIN_CODES = frozenset(
    """
    queue_full not_ready context_length_exceeded body_too_large body_too_slow unsupported_encoding
    unsupported_media_type not_utf8 invalid_api_key wrong_host foreign_origin
    """.split()  # noqa: SIM905  # a table of words
)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts about a request until its line is written."""

    request_id: str  # also a header of the answer
    began: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0  # of each prompt once
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token: float | None = None
    finish: str | None = None
    code: str | None = None  # why it was refused, as the two below
    message: str | None = None
    param: str | None = None

    @classmethod
    def of(cls, asked_id: str) -> "RequestRecord":
        """Returns the record of a request, with the client's number of it if that is short and plain."""
        return cls(asked_id if _PLAIN_ID.fullmatch(asked_id) else uuid.uuid4().hex)

    def note_event(self, event: requests.Event, is_first_of_prompt: bool) -> None:
        """Counts an event of the scheduler."""
        if not isinstance(event, requests.EndEvent):
            self.generated_tokens += 1
            if self.first_token is None:
                self.first_token = time.perf_counter()
            return
        self.finish = event.reason
        if is_first_of_prompt:
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens

    def refuse(self, status: int, message: str, param: str | None, code: str | None) -> None:
        """Notes why the request was refused; without the message if it may quote the client."""
        self.code = code or ("server_error" if status >= 500 else "invalid_request")
        self.message = message if code in _PLAIN_CODES else None
        found = _FIELD.match(param or "")
        self.param = found[0] if found else None

    def write(self, method: str, route: str, status: int) -> None:
        """Writes the request's line.

        Args:    route: as the server knows it; `other` for other paths.   status: 0 if the client left before it.
        """
        now = time.perf_counter()
        fields: dict[str, Any] = {
            "id": self.request_id,
            "method": method if method in _METHODS else "other",
            "route": route,
            "status": status or 499,
        }
        if self.generated_tokens or self.finish is not None:
            fields |= {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "generated": self.generated_tokens}
            fields["finish"] = self.finish or "left"
        if self.first_token is not None:
            fields["first_s"] = round(self.first_token - self.began, 3)
            fields["tokens_per_s"] = round(self.generated_tokens / max(now - self.first_token, 1e-6), 1)
        fields["total_s"] = round(now - self.began, 3)
        refused = {"code": self.code, "param": self.param, "message": self.message}
        fields |= {name: value for name, value in refused.items() if value is not None}
        level = logging.WARNING if status >= 500 and status != 503 else logging.INFO
        LOG.log(level, "request", extra={"fields": fields})


RECORD: ContextVar[RequestRecord | None] = ContextVar("moe_serve_record", default=None)  # of the request at hand


class _Lines(logging.Formatter):
    """Writes a record as one line; a traceback follows in lines that begin with spaces."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if self._is_json:
            written = {"time": at, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            return json.dumps({**written, "trace": trace} if trace else written)
        said = [record.getMessage(), *(f"{name}={value}" for name, value in fields.items() if name != "message")]
        if "message" in fields:
            said.append(fields["message"])
        line = f"moe-serve: {at} {' '.join(said)}" if fields else f"moe-serve: {record.getMessage()}"
        return "\n  ".join(map(printable, [line, *trace.splitlines()]))


def printable(text: str) -> str:
    """Returns a text with escapes in place of line breaks and control characters."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def write_log(stream: TextIO, log_format: LogFormat, quiet: bool) -> None:
    """Lets everything be written to a stream: with `quiet`, warnings and errors alone."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines(log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs what clients send; the app logs its own
