"""Our own JSON files as frozen dataclasses, and the SHA-256 at the end of such a file (docs/pack.md).

Unknown keys, missing keys and values of another type are refused. `families/family.py` reads foreign files.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections import Counter
from typing import Any, TypeVar, cast

from moe_pack.formats.base import errors

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """The numbers that a field of our files may have, in its type: `Annotated[int, Within(0)]`."""

    least: float
    most: float = math.inf


Count = typing.Annotated[int, Within(0)]
Positive = typing.Annotated[int, Within(1)]
Amount = typing.Annotated[float, Within(0)]
Share = typing.Annotated[float, Within(0, 1)]
ADDED = {"added": True}  # metadata of a field that a later version added
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def added(default: T) -> T:
    """Declares a dataclass field that a later version added. Its key is written only if the value is not `default`.

    Older files stay readable and are written with the same bytes; older readers refuse the new key.
    """
    return dataclasses.field(default=default, metadata=ADDED)


def parse(raw: bytes, place: str, error: type[errors.MoePackError], *, is_foreign: bool = False) -> Any:
    """Returns the JSON value in `raw`. Refuses duplicate keys, NaN, infinities, deep nesting and lone surrogates.

    Args:    place: the file's name, for messages.   error: the class of errors.   is_foreign: reads `Infinity`, which
             Python's library writes, as transformers 5 writes it.
    Raises:  `error` if `raw` is not UTF-8 JSON.
    """

    def refuse_constant(text: str) -> Any:
        if is_foreign and text == "Infinity":
            return {"__float__": text}
        raise error(f"{place}: found {text}, which is not a JSON number")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{place}: number {text[:40]} is too large")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
            raise error(f"{place}: key {errors.shortened(twice)} appears twice")
        return values

    try:
        values = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite
        )
        if _SURROGATE.search(raw) is not None:  # an escaped one: a half is neither a file's name nor printable
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        return values
    except UnicodeEncodeError as fault:
        raise error(f"{place}: found half a character (a lone surrogate), expected text") from fault
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as fault:
        reason = str(fault).splitlines()[0][:120] if str(fault) else type(fault).__name__
        raise error(f"{place}: not valid JSON ({reason})") from fault


def load(kind: type[T], value: Any, place: str, error: type[errors.MoePackError]) -> T:
    """Returns the dataclass `kind` with the values of the parsed JSON `value`.

    A field may be str, int (of 64 bits), bool, float, Literal, a dataclass, `tuple[X, ...]`, a number `Within` a range,
    any of these `| None`, or a union of dataclasses that differ in a Literal `kind`. Keys of `added` fields may be
    missing.
    Raises:  `error` naming the key, if one is unknown, missing, of another type or out of its range.
    """
    return cast(T, _load(kind, value, place, error))


def dump(record: Any) -> Any:
    """Returns a dataclass as JSON dicts, lists and scalars, which `load` reads back."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        pairs = ((field, getattr(record, field.name)) for field in dataclasses.fields(record))
        return {
            field.name: dump(value) for field, value in pairs if "added" not in field.metadata or value != field.default
        }
    return [dump(value) for value in record] if isinstance(record, (tuple, list)) else record


def canonical(value: Any) -> bytes:
    """Returns the canonical JSON of `value` for digests and files: sorted keys, indented by one space."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def _load(kind: Any, value: Any, place: str, error: type[errors.MoePackError]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _load_union(arguments, value, place, error)
    if origin is typing.Annotated:
        return _load_within(arguments[0], arguments[1], value, place, error)
    if origin is typing.Literal:
        if type(value) is not str or value not in arguments:
            raise error(f"{place}: found {errors.shortened(value)}, expected one of {', '.join(arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{place}: found {errors.shortened(value)}, expected a list")
        return tuple(_load(arguments[0], item, f"{place}[{i}]", error) for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _load_record(kind, value, place, error)
    if kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is not kind:
        raise error(f"{place}: found {errors.shortened(value)}, expected {kind.__name__}")
    if kind is int and not _LEAST_INT <= value <= _MOST_INT:
        raise error(f"{place}: found {errors.shortened(value)}, expected a number of 64 bits")
    return value


def _load_within(kind: Any, range_: Within, value: Any, place: str, error: type[errors.MoePackError]) -> Any:
    number = _load(kind, value, place, error)
    if not range_.least <= number <= range_.most:
        expected = f"at least {range_.least:g}" + (f" and at most {range_.most:g}" if range_.most < math.inf else "")
        raise error(f"{place}: found {errors.shortened(number)}, expected {expected}")
    return number


def _load_union(members: tuple[Any, ...], value: Any, place: str, error: type[errors.MoePackError]) -> Any:
    if value is None and type(None) in members:
        return None
    known = [member for member in members if member is not type(None)]
    if len(known) == 1:
        return _load(known[0], value, place, error)
    if not isinstance(value, dict):
        raise error(f"{place}: found {errors.shortened(value)}, expected an object")
    if "kind" not in value:
        raise error(f"{place}: key 'kind' is missing")
    by_kind = {typing.get_args(_hint(member, "kind"))[0]: member for member in known}
    member = by_kind.get(value["kind"]) if isinstance(value["kind"], str) else None
    if member is None:
        raise error(f"{place}: kind: found {errors.shortened(value['kind'])}, expected one of {', '.join(by_kind)}")
    return _load_record(member, value, place, error)


def _load_record(kind: Any, value: Any, place: str, error: type[errors.MoePackError]) -> Any:
    if not isinstance(value, dict):
        raise error(f"{place}: found {errors.shortened(value)}, expected an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise error(f"{place}: unknown key {errors.shortened(key)}")
    for key, field in fields.items():
        if key not in value and "added" not in field.metadata:
            raise error(f"{place}: key {key!r} is missing")
    given = [key for key in fields if key in value]
    return kind(**{key: _load(_hint(kind, key), value[key], f"{place}: {key}", error) for key in given})


@functools.cache
def _hint(kind: Any, name: str) -> Any:
    """Returns the type of a field. A type written as text is looked up here, which may import its module."""
    written = next(field.type for field in dataclasses.fields(kind) if field.name == name)
    alone = type(kind.__name__, (), {"__annotations__": {name: written}, "__module__": kind.__module__})
    return typing.get_type_hints(alone, include_extras=True)[name]


_ZERO_DIGEST = "0" * 64


def _tail(digest: str) -> bytes:
    return f',\n "sha256": "{digest}"\n}}\n'.encode("ascii")


def sealed(values: dict[str, Any]) -> bytes:
    """Returns canonical JSON of an object with `sha256` as its last key: the file's digest with zeros in its place."""
    body = canonical(values)
    assert body.endswith(b"\n}\n"), "canonical JSON of an object that has keys"
    body = body.removesuffix(b"\n}\n")
    return body + _tail(hashlib.sha256(body + _tail(_ZERO_DIGEST)).hexdigest())


def check_seal(raw: bytes, place: str) -> None:
    """Checks that a file ends with its own SHA-256. Raises PackError if the digest is missing or wrong."""
    length = len(_tail(_ZERO_DIGEST))
    match = re.fullmatch(r',\n "sha256": "([0-9a-f]{64})"\n}\n', raw[-length:].decode("ascii", "replace"))
    if match is None:
        raise errors.PackError(f"{place}: does not end with its own digest; the file is cut or damaged")
    if hashlib.sha256(raw[:-length] + _tail(_ZERO_DIGEST)).hexdigest() != match[1]:
        raise errors.PackError(f"{place}: SHA-256 does not match its bytes; the file is damaged")
