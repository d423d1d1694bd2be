"""JSON schemas as clients send them: closed objects, references within other schemas, alternatives, formats."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.cases import case
from support.followed import TEXT, follow

from moe_pack.runtime.serve.grammars import GrammarCompiler
from moe_pack.runtime.serve.requests import RequestError
from moe_pack.runtime.serve.schemas import closed, of_calls

INTEGER = {"type": "integer"}
A, B = ({"type": "object", "properties": {name: INTEGER}} for name in "ab")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TEXT, {1})


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    friend: "Cat | None" = None


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    names: list[str] = []


def test_objects_have_what_their_schema_names(compiler: GrammarCompiler) -> None:
    """Without `closed` a model adds keys until it is cut off."""
    nested = {"type": "object", "properties": {"x": {"type": "array", "items": A}}, "$defs": {"unused": A}}
    owner = Owner.model_json_schema()
    for schema, valid, invalid in (
        (A, ['{"a":1}', "{}"], ['{"a":1,"z":1}', '{"z":1}']),
        ({"properties": {"a": INTEGER}}, ['{"a":1}', "3"], ['{"a":1,"z":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"z":1}'], []),
        ({**A, "additionalProperties": INTEGER}, ['{"a":1,"z":1}'], ['{"a":1,"z":"s"}']),
        ({"type": "object"}, ['{"z":1}', "{}"], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"z":1}']),
        ({**A, "unevaluatedProperties": False}, ['{"a":1}'], ['{"z":1}']),
        ({**A, "required": ["a", "other"]}, ['{"a":1,"other":2}'], ['{"a":1}']),
        (nested, ['{"x":[{"a":1}]}'], ['{"x":[{"a":1,"z":1}]}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"z":1}']),
        # Closing one of these would forbid what the other names.
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], []),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, ['{"a":1,"b":2}'], []),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, ['{"a":1}'], ['{"a":1,"z":1}']),
        ({**A, "anyOf": [{"required": ["a"]}, B]}, ['{"a":1}'], []),
        (owner, ['{"pet":{"kind":"dog","friend":{"kind":"cat","lives":1}}}'], ['{"pet":{"lives":1}}']),
        (owner, ['{"pet":{"kind":"cat"},"names":["x"]}'], ['{"pet":{"kind":"cat"},"z":1}']),
    ):
        for text, expected in [*((text, True) for text in valid), *((text, False) for text in invalid)]:
            with case(schema, text):
                assert follow(compiler.json_schema(schema, "field"), text) == expected


def test_what_only_looks_like_a_schema_stays_as_it_is() -> None:
    value = {"properties": {"a": {"format": "int32"}}, "oneOf": [{"type": "null"}, {"type": "object"}]}
    for key in ("const", "default"):
        assert closed({key: value})[key] == value
    assert closed({"enum": [value], "examples": [value]}) == {"enum": [value], "examples": [value]}
    named = {"type": "object", "properties": {"properties": INTEGER, "format": {"type": "string"}, "$ref": INTEGER}}
    assert closed(named) == {**named, "additionalProperties": False}
    for odd in ({"properties": 5}, {"properties": {"a": True}}, {"allOf": 3, "$ref": 7}, {"$ref": "#/no/where"}):
        with case(odd):
            before = json.dumps(odd)
            closed(odd)
            assert json.dumps(odd) == before, "what the caller gave is changed"


def test_alternatives_that_exclude_each_other(compiler: GrammarCompiler) -> None:
    kinds = [{**A, "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in ("x", "y")]
    for schemas, is_taken in (
        ([{"type": "null"}, INTEGER], True),
        ([{"type": "string"}, INTEGER, {"type": "array", "items": INTEGER}], True),
        ([{"const": "a"}, {"enum": ["b", "c"]}, {"type": "null"}], True),
        (kinds, True),
        ([{"type": "number"}, INTEGER], False),
        ([{"const": "a"}, {"type": "string"}], False),
        ([{"const": "a"}, {"enum": ["b", "a"]}], False),
        ([A, B], False),
        ([{**A, "properties": {"kind": {"const": "x"}}}, A], False),
    ):
        with case(schemas):
            if is_taken:
                compiler.json_schema({"oneOf": schemas}, "field")
                continue
            with pytest.raises(RequestError, match="two of its schemas; use anyOf"):
                compiler.json_schema({"oneOf": schemas}, "field")


def test_formats_that_are_notes_are_left_out(compiler: GrammarCompiler) -> None:
    for kind, name, text in (("integer", "int32", "1"), ("string", "password", '"x"'), ("number", "double", "0.5")):
        assert follow(compiler.json_schema({"type": kind, "format": name}, "field"), text)
    assert not follow(compiler.json_schema({"type": "string", "format": "date"}, "field"), '"x"')


def test_schemas_of_several_tools_keep_their_references(compiler: GrammarCompiler) -> None:
    def refers(kind: str) -> dict[str, Any]:
        points = {"type": "object", "properties": {"x": {"type": kind}}}
        return {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "$defs": {"P": points}}

    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    both = {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}
    tools = [("a", refers("boolean")), ("b", refers("integer")), ("c", tree), ("d", {"type": "object"}), ("f", both)]
    source = of_calls(tools)
    for text, expected in (
        ('{"name":"a","arguments":{"p":{"x":true}}}', True),
        ('{"name":"b","arguments":{"p":{"x":3}}}', True),
        ('{"name":"a","arguments":{"p":{"x":3}}}', False),
        ('{"name":"a","arguments":{"p":{"x":true,"z":1}}}', False),
        ('{"name":"c","arguments":{"next":{"next":{}}}}', True),
        ('{"name":"c","arguments":{"next":{"z":{}}}}', False),
        ('{"name":"d","arguments":{"z":1}}', True),
        ('{"name":"e","arguments":{}}', False),
        ('{"name":"f","arguments":{"a":1,"b":2}}', True),
        ('{"p":{"x":true}}', False),
    ):
        with case(text):
            assert follow(compiler.json_schema(source, "field"), text) == expected
    other = of_calls(tools, refers("boolean"))
    for text, expected in (
        ('{"p":{"x":true}}', True),
        ('{"p":{"x":3}}', False),
        ('{"name":"b","arguments":{"p":{"x":3}}}', True),
    ):
        with case("or another form", text):
            assert follow(compiler.json_schema(other, "field"), text) == expected
