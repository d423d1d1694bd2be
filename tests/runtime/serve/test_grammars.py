"""Grammars: whatever is drawn follows them, every answer ends, and what is wrong or hostile is refused by name."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from support.cases import case, random_seed
from support.followed import PADDED, TEXT, follow
from support.models import DEMO_MODEL
from support.waiting import HANG_S

from moe_pack.formats import RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Sampler, SamplingOptions, Text
from moe_pack.runtime.helper import Helper, HelperBusyError, HelperError
from moe_pack.runtime.serve.grammars import GrammarCompiler, TokenGrammar
from moe_pack.runtime.serve.requests import QueueFullError, RequestError

END = 1
MAX_TOKENS = 2000
LARK = "%llguidance {}\n"  # begins a grammar in Lark's format
LIMITS: dict[str, object] = {"max_lexer_states": 50_000, "initial_lexer_fuel": 500_000}  # as the server's
PIECES = [TEXT.stream([5]).push(token) for token in range(TEXT.vocab_size)]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", 'b "quoted"', 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {},
    {"type": "boolean"},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 7.5},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
    {"const": {"a": [1, "é\u2028"]}},
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2},
    {"anyOf": [{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, {"type": "null"}]},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                    "value": {"type": "number"},
                },
                "required": ["left", "value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "string", "format": "date"},
    {"title": "Any", "description": "of three", "type": "integer", "default": 1, "examples": [2], "enum": [1, 2, 3]},
]

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws  # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TEXT, {END})


def closing(tokens: int) -> torch.Tensor:
    """Returns additions to logits that make texts end: tokens that close something, more for a longer answer."""
    closes = torch.tensor(
        [bool(re.fullmatch(r"[\"\]}]+", piece)) for piece in PIECES] + [False] * (PADDED - len(PIECES))
    )
    return torch.where(closes, max(0, tokens - 60) / 4.0, 0.0)


def drawn(grammar: TokenGrammar, seed: int) -> str:
    """An answer of random logits that follows a grammar, up to its end token."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(SamplingOptions(temperature=1, top_p=1, seed=seed), grammar=grammar)
    tokens: list[int] = []
    closes = closing(60)
    for step in range(MAX_TOKENS):
        if step % 20 == 0:
            closes = closing(step)
        token = sampler.choose(4 * torch.randn(PADDED, generator=generator) + closes)
        if token == END:
            assert grammar.is_complete
            return text_of(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {text_of(tokens)[:300]}")


def text_of(tokens: list[int]) -> str:
    stream = TEXT.stream([])
    return "".join(stream.push(token) for token in tokens) + stream.finish()


def finite(number: str) -> float:
    """A number of JSON, which may have any exponent: 1e999 is valid, and the validator takes infinity for null."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


@pytest.mark.slow
def test_whatever_is_drawn_is_json_that_the_schema_describes(compiler: GrammarCompiler) -> None:
    first = random_seed()
    for schema in SCHEMAS:
        validator = jsonschema_rs.validator_for(schema)
        for seed in range(first, first + 4):
            with case(schema, seed):
                text = drawn(compiler.json_schema(schema, "field"), seed)
                validator.validate(json.loads(text, parse_float=finite))


def test_json_mode_gives_an_object(compiler: GrammarCompiler) -> None:
    for seed in range(3):
        assert isinstance(json.loads(drawn(compiler.json_schema({"type": "object"}, "field"), seed)), dict)
    assert follow(compiler.json_schema({"type": "object"}, "field"), '{\n  "a": [1, 2, {"b": null}],\n  "c": "é€"\n}')
    assert not follow(compiler.json_schema({"type": "object"}, "field"), "[1]")


def test_whitespace_has_an_end(compiler: GrammarCompiler) -> None:
    for space in ("", " ", "\n\n" + 20 * " ", "\n\t"):
        with case(space):
            assert follow(compiler.json_schema({"type": "object"}, "field"), "{" + space + "}")
    for space in ("  ", "\n\n\n", "\n" + 21 * " ", "\t", "\n \n"):
        with case(space):
            assert not follow(compiler.json_schema({"type": "object"}, "field"), "{" + space + "}")


def test_one_of_some_texts(compiler: GrammarCompiler) -> None:
    texts = ["yes", "no (really)", "a|b", 'é\n"x"']
    for text in texts:
        with case(text):
            assert follow(compiler.choice(texts, "field"), text)
    for text in ("ye", "yes!", "a", "b", "no xreallyx"):
        with case(text):
            assert not follow(compiler.choice(texts, "field"), text)
    with pytest.raises(RequestError, match="guided_choice: has no texts"):
        compiler.choice([], "guided_choice")


def test_whatever_is_drawn_matches_the_regular_expression(compiler: GrammarCompiler) -> None:
    for pattern in (
        r"[0-9]{3}-[a-f]+",
        r"(yes|no|maybe)",
        r"\p{Lu}[a-zé€]{0,9}!?",
        r"a*",
        r"(0|[1-9][0-9]*)(\.[0-9]{2})? (EUR|USD)",
    ):
        for seed in range(5):
            with case(pattern, seed):
                text = drawn(compiler.regex(pattern, "field"), seed)
                assert re.fullmatch(pattern.replace(r"\p{Lu}", r"[^\W\d_a-z]"), text), text


def test_gbnf_and_lark_are_followed(compiler: GrammarCompiler) -> None:
    for seed in range(4):
        with case(seed):
            assert isinstance(json.loads(drawn(compiler.gbnf(JSON_GBNF, "field"), seed)), dict)
            moves = drawn(
                compiler.gbnf('root ::= ([1-9] "." " "? move "\\n"){2,3}\nmove ::= [KQ]? [a-h] [1-8]', "field"), seed
            )
            assert re.fullmatch(r"([1-9]\. ?[KQ]?[a-h][1-8]\n){2,3}", moves)
            named = drawn(
                compiler.gbnf(LARK + 'start: "<" NAME ">" (" " NAME){0,5}\nNAME: /[a-z]{1,4}/', "field"), seed
            )
            assert re.fullmatch(r"<[a-z]{1,4}>( [a-z]{1,4}){0,5}", named)
    for text, answer in [
        ('root ::= "\\u0041\\u00e9\\x42" [\\u4e00-\\u9fff]', "AéB中"),
        ('root ::= "\\"" [\\u0022\\u005d] "\\\\u0041"', '""\\u0041'),
        ('%llguidance {}\nstart: "lark"', "lark"),
    ]:
        with case(text):
            assert follow(compiler.gbnf(text, "field"), answer)


def test_the_end_may_come_where_the_answer_is_whole_and_nothing_else_where_it_cannot_go_on(
    compiler: GrammarCompiler,
) -> None:
    grammar = compiler.regex("ab?", "field")
    allowed = [math.isfinite(x) for x in grammar.allow(torch.zeros(PADDED)).tolist()]
    assert {PIECES[token] for token in range(len(PIECES)) if allowed[token]} == {"a", "ab"}
    assert not grammar.is_complete
    grammar.accept(PIECES.index("a"))
    assert grammar.is_complete
    (left,) = (
        {token for token, x in enumerate(g.tolist()) if math.isfinite(x)} for g in [grammar.allow(torch.zeros(PADDED))]
    )
    assert left == {PIECES.index("b"), END}
    grammar.accept(PIECES.index("b"))
    for _ in range(3):  # a client may ask to go on after the end
        logits = grammar.allow(torch.ones(PADDED))
        assert [token for token, x in enumerate(logits.tolist()) if x == 1] == [END]
        assert grammar.is_complete
        grammar.accept(END)


def test_any_end_token_ends_and_logits_may_be_as_many_as_the_model_has() -> None:
    grammar = GrammarCompiler(TEXT, {END, 0}).regex("a?", "field")
    for num_logits in (TEXT.vocab_size, TEXT.vocab_size - 100, PADDED):
        logits = torch.randn(num_logits)
        before, found = logits.clone(), grammar.allow(logits)
        assert torch.equal(logits, before) and found.dtype == torch.float32 and len(found) == num_logits
        assert {token for token, x in enumerate(found.tolist()) if x > -math.inf} == {0, END, PIECES.index("a")}
        assert found[0] == logits[0]
    grammar.accept(0)
    assert grammar.is_complete


def test_each_answer_has_its_own_place(compiler: GrammarCompiler) -> None:
    first, second = compiler.regex("ab?", "field"), compiler.regex("ab?", "field")
    first.accept(PIECES.index("a"))
    assert math.isfinite(float(second.allow(torch.zeros(PADDED))[PIECES.index("a")]))


def test_a_token_that_may_not_come_is_refused(compiler: GrammarCompiler) -> None:
    for token in (PIECES.index("b"), END, PADDED + 5):
        with case(token), pytest.raises(RunError, match="grammar"):
            compiler.regex("a", "field").accept(token)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_what_is_wrong_is_refused_with_the_name_of_its_field(compiler: GrammarCompiler) -> None:
    wrong: list[tuple[Callable[..., TokenGrammar], Any, str]] = [
        (compiler.json_schema, {"type": "strin"}, "Invalid type: strin"),
        (compiler.json_schema, {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (compiler.json_schema, {"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
        (compiler.json_schema, {"$ref": "#/$defs/missing"}, "does not exist"),
        (compiler.json_schema, {"$ref": "https://example.com/schema"}, "Default retriever does not fetch"),
        (compiler.json_schema, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "cannot be used"),
        (compiler.json_schema, {"const": math.nan}, "cannot be used"),
        (compiler.json_schema, {"const": "\ud800"}, "cannot be used"),
        (compiler.json_schema, {"const": object()}, "is no JSON"),
        (compiler.json_schema, nested(200), "recursion limit"),
        (compiler.json_schema, nested(100_000), "nested too deeply"),
        (compiler.json_schema, {"title": "x" * (256 << 10)}, "shorten it to at most 262144"),
        (compiler.regex, "a(", "unclosed group"),
        (compiler.regex, "(" * 1000 + "a" + ")" * 1000, "cannot be used"),
        (compiler.regex, "a" * 70_000, "70000 bytes; shorten it to at most 65536"),
        (compiler.regex, "\ud800", "half a surrogate pair"),
        (compiler.gbnf, LARK + "start: missing", "unknown name"),
        (compiler.gbnf, LARK, "no start"),
        (compiler.gbnf, LARK + "start: a\na: a", "cannot be used"),
        (compiler.gbnf, LARK + "\n" * 1000, "1001 lines; shorten it to at most 1000"),
        (compiler.gbnf, "root ::= missing", "not found"),
        (compiler.gbnf, "rule ::= [a", "cannot be used"),
        (compiler.gbnf, 'other ::= "a"', "root"),
        (compiler.gbnf, "root ::= " + "(" * 20_000, "cannot be used"),
        (compiler.gbnf, 'root ::= "\\ud800"', "cannot be used"),
        (compiler.gbnf, "x" * 70_000, "70000 bytes"),
    ]
    for make, value, said in wrong:
        with case(make.__name__, value):
            with pytest.raises(RequestError) as caught:
                make(value, "text.format")
            message = str(caught.value)
            assert caught.value.param == "text.format" and message.startswith("text.format: ")
            assert said in message and "\n" not in message and len(message) < 400


def tried_in_turn(helper: Helper, times: int, hostile: Callable[[int], tuple[str, str] | None]) -> None:
    """Tries grammars, wrong ones and hostile ones in one helper: every harmless one passes."""
    for number in range(times):
        attack = hostile(number)
        if attack is not None:
            with case(number, attack[1][:100]), suppress(HelperError):
                helper.try_grammar(*attack, LIMITS)
        with case(number):
            with pytest.raises(HelperError, match="unknown name"):
                helper.try_grammar("lark", "start: missing", LIMITS)
            helper.try_grammar("regex", f"[a-z]{{{number + 1}}}", LIMITS)
            helper.try_grammar("gbnf", f'root ::= "{number}" root | "a"', LIMITS)


def test_what_was_tried_before_is_not_blamed_on_a_grammar() -> None:
    patterns = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}
    slow = ("grammar", json.dumps({"grammars": [{"json_schema": patterns}]}))
    large = ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000)
    helper = Helper(0.5, 1 << 30)
    try:
        tried_in_turn(helper, 100, lambda number: {30: slow, 60: large, 61: slow}.get(number))
        with pytest.raises(HelperError, match=r"longer than 0\.5 seconds"):
            helper.try_grammar(*slow, LIMITS)
    finally:
        helper.close()


@pytest.mark.slow
def test_hostile_grammars_are_not_blamed_on_others() -> None:
    patterns = ("((a{1000}){1000}){1000}", "(a|b)*a(a|b){30}", r"(\p{L}{500}){300}", "(.{900}b?){50}")
    grammar = '{"grammars": [{"json_schema": %s}]}'
    schemas = [{"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(n)]} for n in (5, 10, 20, 60)]
    attacks = [("regex", each) for each in patterns]
    attacks += [("grammar", grammar % json.dumps(each)) for each in schemas]
    attacks += [("grammar", grammar % json.dumps({"enum": [str(i * 7919) for i in range(18_000)]}))]
    helper = Helper(3.0, 1 << 30)
    try:
        tried_in_turn(helper, 60, lambda number: attacks[number % len(attacks)])
    finally:
        helper.close()


def test_a_busy_machine_is_no_error_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> str:
        raise HelperBusyError("it has not ended")

    monkeypatch.setattr(Helper, "try_grammar", busy)
    with pytest.raises(QueueFullError, match="try again"):
        GrammarCompiler(TEXT, {END}).regex("a", "field")


def test_schemas_at_their_limits_pass(compiler: GrammarCompiler) -> None:
    schema = {"title": "x" * ((256 << 10) - 30), "type": "null"}
    assert len(json.dumps(schema)) <= 256 << 10
    assert follow(compiler.json_schema(schema, "field"), "null")
    assert follow(compiler.gbnf(LARK + "\n" * 998 + 'start: "a"', "field"), "a")


HOSTILE = """
import json, sys, torch
from pathlib import Path
from moe_pack.formats import RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.serve.grammars import GrammarCompiler

compiler = GrammarCompiler(Text(FolderFiles(Path(sys.argv[1]))), {1})
LARK = "%llguidance {}\\n"

def chain(link, number):
    return {**{f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(number)}, f"a{number}": {"type": "null"}}

def rules(rule, number, last):
    return "".join(rule.format(i, i + 1) for i in range(number)) + last.format(number)

for make, value in [
    (compiler.json_schema, {"$defs": chain(lambda ref: ref, 3500), "$ref": "#/$defs/a0"}),
    (compiler.json_schema, {"$defs": chain(lambda ref: {"properties": {"x": ref}}, 1700), "$ref": "#/$defs/a0"}),
    (compiler.json_schema, {"$defs": chain(lambda ref: {"anyOf": [{"allOf": [ref]}]}, 1500), "$ref": "#/$defs/a0"}),
    (compiler.gbnf, LARK + "start: A0\\n" + rules('A{}: A{} "x"\\n', 500, 'A{}: "y"')),
    (compiler.gbnf, "root ::= a0\\n" + rules('a{} ::= (a{} "x")? "z"\\n', 400, 'a{} ::= "y"')),
    (compiler.gbnf, LARK + "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    (compiler.gbnf, LARK + 'start: (("a"{1000}){1000}){1000}'),
    (compiler.regex, "((a{1000}){1000}){1000}"),
    (compiler.regex, "(a|b)*a(a|b){30}"),
]:
    try:
        grammar = make(value, "field")
        for _ in range(30):
            logits = grammar.allow(torch.rand(4096))
            grammar.accept(int(logits.argmax()))
        print("followed")
    except RunError as fault:
        print("refused", str(fault)[:100])
print("alive")
"""


@pytest.mark.slow
def test_hostile_grammars_neither_end_the_process_nor_hold_it_up() -> None:
    """In a process of its own, because what goes wrong here ends it."""
    command = [sys.executable, "-c", HOSTILE, str(DEMO_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.endswith("alive\n")


def test_a_model_whose_answers_cannot_follow_grammars_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"field: .* names no token that ends an answer"):
        GrammarCompiler(TEXT, ()).json_schema({"type": "object"}, "field")
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    compiler = GrammarCompiler(Text(FolderFiles(tmp_path)), {1})
    with pytest.raises(RequestError, match=r"field: .* llguidance cannot read this model's tokenizer"):
        compiler.regex("a", "field")


def test_a_tokenizer_with_more_tokens_than_the_model_has_logits_works(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 4000}')
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    grammar = GrammarCompiler(Text(FolderFiles(tmp_path)), {END}).regex("a", "field")
    assert len(grammar.allow(torch.zeros(4000))) == 4000


def test_without_the_extra_a_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RunError, match=re.escape("pip install 'moe-pack[serve]'")):
        GrammarCompiler(TEXT, {END})
