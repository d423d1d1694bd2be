"""Our own JSON: what parses, what is refused and in which words."""

from dataclasses import dataclass
from typing import Literal

import pytest
from support.cases import case

from moe_pack.formats import CheckpointError, PackError, canonical, dump, load, parse
from moe_pack.formats.base.json_files import added


def refusal(raw: bytes) -> str:
    with pytest.raises(PackError) as refused:
        parse(raw, "a.json", PackError)
    message = str(refused.value)
    assert "\n" not in message
    return message


def load_refusal(record: type, values: object) -> str:
    with pytest.raises(PackError) as refused:
        load(record, values, "a.json", PackError)
    return str(refused.value)


def test_damaged_json_is_refused_in_one_line() -> None:
    cases = [
        (b'{"a": NaN}', "a.json: found NaN, which is not a JSON number"),
        (b'{"a": Infinity}', "a.json: found Infinity, which is not a JSON number"),
        (b'{"a": -Infinity}', "a.json: found -Infinity, which is not a JSON number"),
        (b'{"a": 1, "b": 2, "a": 1}', "a.json: key 'a' appears twice"),
        (b'[{"x": {"b": 2, "b": 3}}]', "a.json: key 'b' appears twice"),
        (b'{"a": 1', "a.json: not valid JSON (Expecting ',' delimiter: line 1 column 8 (char 7))"),
        (b'{"a": 1} x', "a.json: not valid JSON (Extra data: line 1 column 10 (char 9))"),
        (b'{"a": 1,}', r"a.json: not valid JSON (Expecting property name enclosed in double quotes: "
         "line 1 column 9 (char 8))"),
        (b"{'a': 1}", r"a.json: not valid JSON (Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1))"),
        (b"", "a.json: not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'"\xff"', "a.json: not valid JSON ('utf-8' codec can't decode byte 0xff in position 1: invalid start byte)"),
    ]  # fmt: skip
    for raw, message in cases:
        with case(raw, message):
            assert refusal(raw) == message


def test_the_nearest_legal_json_is_read() -> None:
    cases = [
        (b'{"a": -1.5e3}', {"a": -1500.0}),
        (b'{"a": 1, "b": 1}', {"a": 1, "b": 1}),
        (b'[{"x": {"b": 2}, "y": {"b": 3}}]', [{"x": {"b": 2}, "y": {"b": 3}}]),
        (b' {"a": 1} \n', {"a": 1}),
        ('"é"'.encode(), "é"),
        (b"[" * 200 + b"]" * 200, None),
    ]
    for raw, value in cases:
        with case(raw, value):
            found = parse(raw, "a.json", PackError)
            assert value is None or found == value


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])
def test_deep_nesting_is_refused_and_does_not_end_the_process(raw: bytes) -> None:
    assert refusal(raw).startswith("a.json: not valid JSON (maximum recursion depth exceeded")


def test_a_number_of_ten_thousand_digits_is_refused() -> None:
    for num_digits in (10_000, 3_000_000):  # of the latter, conversion alone would take minutes
        assert refusal(b"1" * num_digits).startswith("a.json: not valid JSON (Exceeds the limit")


def test_a_duplicate_among_many_keys_costs_no_more_than_reading_them() -> None:
    # Comparing each key with all others would take many minutes.
    raw = b"{" + b",".join(b'"k%d":0' % number for number in (*range(300_000), 299_999)) + b"}"
    assert refusal(raw) == "a.json: key 'k299999' appears twice"


def test_text_that_is_no_unicode_is_refused() -> None:
    for half in (r"\ud83d", r"\uDE00", r"\udE00\ud83d", r"x\ud83dx"):
        for raw in (f'["{half}"]', f'{{"{half}": 1}}'):
            with case(raw):
                assert "half a character" in refusal(raw.encode())
    assert parse(rb'["\ud83d\ude00 \\ud83d \u0000"]', "a.json", PackError) == ["\U0001f600 \\ud83d \0"]


def test_long_keys_and_values_are_cut_in_messages() -> None:
    long = "x" * 100_000
    assert load_refusal(Tree, GOOD | {long: 1}) == f"a.json: unknown key '{'x' * 56}..."
    assert refusal(f'{{"{long}": 1, "{long}": 1}}'.encode()) == f"a.json: key '{'x' * 56}... appears twice"


def test_a_number_too_large_for_a_float_is_no_infinity() -> None:
    for raw in (b'{"a": 1e999}', b'{"a": -1e999}'):
        assert refusal(raw).startswith("a.json: ")


def test_the_error_raised_is_the_one_asked_for() -> None:
    with pytest.raises(CheckpointError):
        parse(b"nonsense", "config.json", CheckpointError)


@dataclass(frozen=True, slots=True)
class Leaf:
    size: int
    kind: Literal["long", "round"]


@dataclass(frozen=True, slots=True)
class Tree:
    name: str
    height: float
    evergreen: bool
    leaves: tuple[Leaf, ...]
    age: int | None


GOOD = {"name": "oak", "height": 3.5, "evergreen": False, "leaves": [{"size": 1, "kind": "long"}], "age": None}
OAK = Tree("oak", 3.5, False, (Leaf(1, "long"),), None)


def test_a_record_is_read_from_its_keys_and_written_as_they_were() -> None:
    assert load(Tree, GOOD, "a.json", PackError) == OAK
    assert load(Tree, parse(canonical(dump(OAK)), "a.json", PackError), "a.json", PackError) == OAK


def test_a_key_unknown_or_of_another_type_is_refused_by_name() -> None:
    cases = [
        ({"colour": "green"}, "a.json: unknown key 'colour'"),
        ({"name": 3}, "a.json: name: found 3, expected str"),
        ({"name": None}, "a.json: name: found None, expected str"),
        ({"height": "3.5"}, "a.json: height: found '3.5', expected float"),
        ({"height": True}, "a.json: height: found True, expected float"),
        ({"height": 10**400}, f"a.json: height: found 1{'0' * 56}..., expected float"),
        ({"evergreen": 0}, "a.json: evergreen: found 0, expected bool"),
        ({"age": 1.0}, "a.json: age: found 1.0, expected int"),
        ({"age": True}, "a.json: age: found True, expected int"),
        ({"leaves": {}}, "a.json: leaves: found {}, expected a list"),
        ({"leaves": ["oak"]}, "a.json: leaves[0]: found 'oak', expected an object"),
        ({"leaves": [{"size": 1}]}, "a.json: leaves[0]: key 'kind' is missing"),
        ({"leaves": [{"size": 1, "kind": "long", "x": 1}]}, "a.json: leaves[0]: unknown key 'x'"),
        ({"leaves": [{"size": 1, "kind": "flat"}]},
         "a.json: leaves[0]: kind: found 'flat', expected one of long, round"),
        ({"leaves": [{"size": 1, "kind": []}]}, "a.json: leaves[0]: kind: found [], expected one of long, round"),
        ({"name": ["x" * 100]}, f"a.json: name: found ['{'x' * 55}..., expected str"),
    ]  # fmt: skip
    for change, message in cases:
        with case(change, message):
            assert load_refusal(Tree, GOOD | change) == message


def test_a_missing_key_is_refused_by_name() -> None:
    for key in sorted(GOOD):
        with case(key):
            values = {name: value for name, value in GOOD.items() if name != key}
            assert load_refusal(Tree, values) == f"a.json: key '{key}' is missing"


def test_a_record_is_only_read_from_an_object() -> None:
    for value in [None, [], "oak", 3]:
        with case(value):
            assert load_refusal(Tree, value) == f"a.json: found {value!r}, expected an object"


def test_the_nearest_legal_record_is_read() -> None:
    cases = [{"height": 3}, {"age": 120}, {"leaves": []}, {"name": ""}, {"evergreen": True}]
    for change in cases:
        with case(change):
            assert isinstance(load(Tree, GOOD | change, "a.json", PackError), Tree)


@dataclass(frozen=True, slots=True)
class Needle:
    kind: Literal["needle"]
    length: float


@dataclass(frozen=True, slots=True)
class Blade:
    kind: Literal["blade"]
    width: int
    edges: tuple[Literal["smooth", "serrate"], ...]


@dataclass(frozen=True, slots=True)
class Twig:
    leaf: Needle | Blade
    spare: Needle | Blade | None


NEEDLE = {"kind": "needle", "length": 2}
BLADE = {"kind": "blade", "width": 3, "edges": ["smooth"]}


def test_an_object_of_several_kinds_is_read_as_the_one_it_says_it_is() -> None:
    needle, blade = Needle("needle", 2.0), Blade("blade", 3, ("smooth",))
    for leaf, spare, twig in ((NEEDLE, None, Twig(needle, None)), (BLADE, NEEDLE, Twig(blade, needle))):
        found = load(Twig, {"leaf": leaf, "spare": spare}, "a.json", PackError)
        assert found == twig
        assert load(Twig, parse(canonical(dump(found)), "a.json", PackError), "a.json", PackError) == twig


def test_an_object_that_is_none_of_its_kinds_is_refused() -> None:
    cases = [
        ({"kind": "scale", "length": 2}, "leaf: kind: found 'scale', expected one of needle, blade"),
        ({"kind": None, "length": 2}, "leaf: kind: found None, expected one of needle, blade"),
        ({"kind": ["needle"], "length": 2}, "leaf: kind: found ['needle'], expected one of needle, blade"),
        ({"length": 2}, "leaf: key 'kind' is missing"),
        ({}, "leaf: key 'kind' is missing"),
        (None, "leaf: found None, expected an object"),
        ("needle", "leaf: found 'needle', expected an object"),
        ([NEEDLE], "leaf: found [{'kind': 'needle', 'length': 2}], expected an object"),
        (True, "leaf: found True, expected an object"),
        (BLADE | {"kind": "needle"}, "leaf: unknown key 'width'"),
        ({"kind": "needle"}, "leaf: key 'length' is missing"),
        (NEEDLE | {"length": "2"}, "leaf: length: found '2', expected float"),
        (BLADE | {"edges": ["smooth", "torn"]}, "leaf: edges[1]: found 'torn', expected one of smooth, serrate"),
    ]
    for leaf, message in cases:
        with case(leaf, message):
            assert load_refusal(Twig, {"leaf": leaf, "spare": None}) == f"a.json: {message}"


def test_only_null_stands_for_an_object_that_may_be_missing() -> None:
    for spare in [[], "", 0, False]:
        with case(spare):
            message = f"a.json: spare: found {spare!r}, expected an object"
            assert load_refusal(Twig, {"leaf": NEEDLE, "spare": spare}) == message


def test_canonical_bytes_do_not_depend_on_the_order_of_keys() -> None:
    assert canonical({"b": 1, "a": "é"}) == canonical({"a": "é", "b": 1}) == b'{\n "a": "\\u00e9",\n "b": 1\n}\n'


@dataclass(frozen=True, slots=True)
class Grown:
    """A record that got two keys after its first files were written."""

    name: str
    layers: tuple[int, ...] | None = added(None)
    is_new: bool = added(False)


def test_a_key_that_came_later_is_written_only_where_it_says_something() -> None:
    assert dump(Grown("a")) == {"name": "a"}
    assert dump([Grown("a", (1,), True)]) == [{"name": "a", "layers": [1], "is_new": True}]


def test_a_record_with_keys_that_came_later_is_read_as_it_was_written() -> None:
    cases = [Grown("a"), Grown("a", ()), Grown("a", (2, 3)), Grown("a", None, True)]
    for record in cases:
        with case(record):
            assert load(Grown, parse(canonical(dump(record)), "a.json", PackError), "a.json", PackError) == record


def test_a_key_that_came_later_is_held_to_its_type() -> None:
    assert load_refusal(Grown, {"layers": None}) == "a.json: key 'name' is missing"
    assert load_refusal(Grown, {"name": "a", "layers": 1}) == "a.json: layers: found 1, expected a list"
    assert load_refusal(Grown, {"name": "a", "new": True}).startswith("a.json: unknown key 'new'")


def test_an_infinity_in_a_foreign_file_is_what_transformers_writes_now() -> None:
    found = parse(b'{"time_step_limit": [0.0, Infinity]}', "config.json", PackError, is_foreign=True)
    assert found == {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    for other in (b"[NaN]", b"[-Infinity]"):
        with pytest.raises(PackError, match="which is not a JSON number"):
            parse(other, "config.json", PackError, is_foreign=True)
