"""JSON files that end with the SHA-256 of themselves: the manifest and the sidecars. Specified in docs/format.md."""

import hashlib
import re
from typing import Any

from moe_pack.formats import strict_json
from moe_pack.formats.errors import PackError

_ZERO_DIGEST = "0" * 64


def _tail(digest: str) -> bytes:
    return f',\n "sha256": "{digest}"\n}}\n'.encode("ascii")


def sealed(values: dict[str, Any]) -> bytes:
    """Canonical JSON of an object, with one more and last key `sha256`: the file's digest, taken with it as zeros."""
    body = strict_json.canonical(values)
    assert body.endswith(b"\n}\n"), "canonical JSON of an object that has keys"
    body = body.removesuffix(b"\n}\n")
    return body + _tail(hashlib.sha256(body + _tail(_ZERO_DIGEST)).hexdigest())


def check_seal(raw: bytes, place: str) -> None:
    """Checks that a file ends with the digest of itself.

    Args:    place: the file's name, for messages.
    Raises:  PackError if it does not.
    """
    length = len(_tail(_ZERO_DIGEST))
    found = re.fullmatch(r',\n "sha256": "([0-9a-f]{64})"\n}\n', raw[-length:].decode("ascii", "replace"))
    if found is None:
        raise PackError(f"{place}: does not end with its own digest; the file is cut or damaged")
    if hashlib.sha256(raw[:-length] + _tail(_ZERO_DIGEST)).hexdigest() != found[1]:
        raise PackError(f"{place}: SHA-256 does not match its bytes; the file is damaged")
