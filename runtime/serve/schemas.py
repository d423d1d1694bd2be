"""JSON schemas as clients send them, in the form that an answer can be made to follow.

Clients make schemas from their classes (pydantic, zod), and mean by them what OpenAI's strict mode means: an object has
the properties that are named, and no others. JSON Schema itself leaves an object open, and a model then invents keys
until the answer is cut off. So `closed` writes what clients leave out:

- `additionalProperties: false`, where an object names its properties and says nothing about others
- `anyOf` for `oneOf`, where no value can match two of its schemas, so that both mean the same
- no `format` that is an annotation alone, as `int32` or `password`: JSON Schema checks none of them

Schemas that are combined (`allOf`, or `properties` next to `anyOf`) stay open: each of them would forbid the other's
properties. Sources: JSON Schema 2020-12, sections 6.5, 7.2.1 and 10; OpenAI's guide to structured outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

# Keywords with one schema, a list of them, and an object of them. What they hold is a schema, nothing else is: the
# values of `const`, `enum`, `default` and `examples` may look like one.
_ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "not", "dependentSchemas")
# Formats that llguidance checks; others are annotations.
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905  # a table of words
)


def closed(schema: Mapping[str, Any]) -> Schema:
    """Returns a schema whose objects have no properties but those that it names; see this module's text.

    Args:    schema: nested at most so deep that Python can recur.
    """
    return _Closing(dict(schema)).result()


def of_calls(tools: Sequence[tuple[str, Mapping[str, Any]]], other: Mapping[str, Any] | None = None) -> Schema:
    """Returns the schema of a call of one of several tools: an object of `name` and `arguments`.

    Args:    tools: names, and the schemas of arguments. Each is a resource of its own, so that its references
             (`#/$defs/…`) still lead to its own parts.   other: what may come in place of a call.
    """
    calls: list[Schema] = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$id": f"urn:tool:{index}", **schema}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (name, schema) in enumerate(tools)
    ]
    return {"anyOf": calls if other is None else [{"$id": "urn:answer", **other}, *calls]}


def _parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields the schemas right inside a schema, with the keyword that holds each."""
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((key, each) for each in schema[key] if isinstance(each, dict))
    for key in _OBJECTS:
        if isinstance(schema.get(key), dict):
            yield from ((key, each) for each in schema[key].values() if isinstance(each, dict))


class _Closing:
    """Closes one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._combined: set[int] = set()  # identities of schemas that describe a value together with another one
        self._required: dict[int, str] = {}  # by identity: a property that tells alternatives apart
        self._exclusive: set[int] = set()  # identities of schemas whose `oneOf` means what `anyOf` does
        self._look(root)

    def result(self) -> Schema:
        """Returns the closed schema."""
        return self._closed(self._root)

    def _look(self, schema: Schema) -> None:
        combining = [key for key in _COMBINING if key in schema]
        if combining and (len(combining) > 1 or "properties" in schema or len(schema.get("allOf") or ()) > 1):
            self._mark(schema)
        alternatives = schema.get("oneOf")
        if isinstance(alternatives, list) and "anyOf" not in schema:
            self._compare(schema, [self._resolved(each) for each in alternatives])
        for _, part in _parts(schema):
            if "$id" not in part:
                self._look(part)

    def _mark(self, schema: Schema) -> None:
        """Marks a schema, and those that stand for it, as combined with others."""
        if id(schema) in self._combined:
            return
        self._combined.add(id(schema))
        for key, part in _parts(schema):
            if key in ("allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas"):
                self._mark(part)
        target = _target(self._root, schema.get("$ref"))
        if target is not None:
            self._mark(target)

    def _resolved(self, schema: object) -> object:
        """Returns what a schema that is a reference alone leads to."""
        target = _target(self._root, schema.get("$ref")) if isinstance(schema, dict) else None
        return schema if target is None else target

    def _compare(self, schema: Schema, alternatives: list[object]) -> None:
        """Notes whether no value can match two of the alternatives of a schema."""
        if _differ_by_type(alternatives):
            self._exclusive.add(id(schema))
            return
        objects = [each for each in alternatives if isinstance(each, dict) and isinstance(each.get("properties"), dict)]
        if not objects or len(objects) < len(alternatives):
            return
        for name in objects[0]["properties"]:
            constants = [_constants(each["properties"].get(name)) for each in objects]
            if not all(constants) or sum(map(len, constants)) > len(set.union(*constants)):
                continue
            # pydantic does not require a discriminator that has a default.
            self._required |= {id(each): name for each in objects}
            self._exclusive.add(id(schema))
            return

    def _closed(self, schema: Schema) -> Schema:
        if "$id" in schema and schema is not self._root:
            return closed(schema)  # references in it lead to its own parts
        made = dict(schema)
        for key in _ONE:
            if isinstance(made.get(key), dict):
                made[key] = self._closed(made[key])
        for key in _LISTS:
            if isinstance(made.get(key), list):
                made[key] = [self._closed(each) if isinstance(each, dict) else each for each in made[key]]
        for key in _OBJECTS:
            if isinstance(made.get(key), dict):
                parts = made[key].items()
                made[key] = {name: self._closed(each) if isinstance(each, dict) else each for name, each in parts}
        name, required = self._required.get(id(schema)), made.get("required") or []
        if name is not None and isinstance(required, list) and name not in required:
            made["required"] = [*required, name]
        if id(schema) not in self._combined and _may_close(made):
            made.pop("unevaluatedProperties", None)
            made["additionalProperties"] = False
        if id(schema) in self._exclusive:
            made["anyOf"] = made.pop("oneOf")
        if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
            del made["format"]
        return made


def _target(root: Schema, reference: object) -> Schema | None:
    """Returns what a reference within a schema leads to; None if that is no schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found if isinstance(found, dict) else None


def _may_close(schema: Schema) -> bool:
    """Whether a schema names its properties, says nothing of others, and needs no others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or "additionalProperties" in schema or schema.get("unevaluatedProperties"):
        return False
    required, least = schema.get("required"), schema.get("minProperties")
    if isinstance(required, list) and not all(isinstance(name, str) and name in properties for name in required):
        return False
    return not (isinstance(least, int) and least > len(properties))


def _differ_by_type(schemas: Sequence[object]) -> bool:
    """Whether some schemas allow values of different plain types, or different constants."""
    types: list[str] = []
    constants: list[str] = []
    for schema in schemas:
        if not isinstance(schema, dict) or not schema.keys().isdisjoint(_COMBINING):
            return False
        found, kind = _constants(schema), schema.get("type")
        constants += found
        if not found and not isinstance(kind, str):
            return False
        types += [] if found else ["number" if kind == "integer" else str(kind)]  # an integer is a number too
    every = [*types, *constants, *(["string"] if constants else [])]
    return len(every) == len(set(every))


def _constants(schema: object) -> set[str]:
    """Returns the texts that a schema allows, quoted; none if it allows something else."""
    if not isinstance(schema, dict):
        return set()
    found = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {repr(each) for each in found} if all(isinstance(each, str) for each in found) else set()
