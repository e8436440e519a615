"""Constraints as plain values: one at a time, every shape checked, and llguidance's word on the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from trioleg import SamplingParams, StructuredOutputsParams
from trioleg.errors import InvalidRequestError
from trioleg.grammar_gate import GrammarGate
from trioleg.runtime.grammars import GrammarChecker

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
GOOD: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"\d{3}-\p{L}+"},
    "choice": {"choice": ["yes", "nö", "😀", '"\\\n', "yes", ""]},
    "grammar": {"grammar": 'start: "a" rest\nrest: /[0-9]+/'},
    "gbnf": {"grammar": 'root ::= "a" rest\nrest ::= [0-9]+'},
    "json_object": {"json_object": True},
}


def refusal(make: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    return caught.value


@pytest.mark.parametrize("fields", GOOD.values(), ids=GOOD)
def test_good_ones_pass_and_an_engine_reads_back_what_was_sent(fields: dict[str, Any]) -> None:
    params = StructuredOutputsParams(**fields)
    params.check()
    wire = params.for_engine()
    read = StructuredOutputsParams.from_engine(wire)
    # Choices and grammars travel as Lark.
    assert read == params or read.kind == "grammar"
    assert read.to_grammar() == params.to_grammar()
    assert StructuredOutputsParams.from_mapping(params.to_mapping()) == params
    hash(SamplingParams(structured_outputs=params))


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"json": SCHEMA}, {"json": json.dumps(SCHEMA)}),
        ({"json": '{"type":"null"}'}, {"json": '{"type":"null"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ("a", "b")}, {"grammar": 'start: OPTION\nOPTION: "a" | "b"'}),
        ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"grammar": "\n \n\nstart: B\n\n\t\n\nB: /b/\n"}, {"grammar": "start: B\nB: /b/\n"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": '%llguidance {}\nstart: "a"\n'}),
        ({"json_object": True}, {"json_object": True}),
        (
            {"json_object": True, "disable_any_whitespace": True},
            {"json": '{"type": "object", "x-guidance": {"whitespace_flexible": false}}'},
        ),
        (
            {"json": {"x-guidance": {"coerce_one_of": True}}, "disable_any_whitespace": True},
            {"json": '{"x-guidance": {"coerce_one_of": true, "whitespace_flexible": false}}'},
        ),
    ],
)
def test_what_is_sent_for_each_kind(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    engine = params.for_engine(max_tokens=5, eos_token_id=2)
    assert engine.structured_outputs == {**sent, "_backend": "guidance"}


def test_nothing_is_sent_for_none() -> None:
    assert SamplingParams().for_engine(max_tokens=5, eos_token_id=2).structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs is empty; allowed: exactly one of json, regex, choice"),
        ({"json_object": False}, "structured_outputs is empty; allowed"),
        ({"json": {}, "regex": ""}, "structured_outputs is json and regex; allowed: exactly one"),
        ({"regex": 5}, "structured_outputs.regex is 5; allowed: a string"),
        ({"grammar": ["start: /a/"]}, "structured_outputs.grammar is ['start: /a/']; allowed: a s"),
        ({"regex": "a\ud800"}, "structured_outputs.regex is a\ud800; allowed: Unicode"),
        ({"regex": "a" * 131_073}, "structured_outputs.regex is 131073 characters long; allowed: "),
        ({"choice": []}, "structured_outputs.choice is []; allowed: a list of at least one string"),
        ({"choice": "yes"}, "structured_outputs.choice is yes; allowed: a list"),
        ({"choice": ["a", 5]}, "structured_outputs.choice is ['a', 5]; allowed: a list"),
        ({"choice": ["a" * 70_000] * 2}, "structured_outputs.choice is 140000 characters long"),
        ({"choice": ["\udfff"]}, "structured_outputs.choice is \udfff; allowed: Unicode"),
        ({"json": 0}, "structured_outputs.json is 0; allowed: a JSON Schema"),
        ({"json": "[]"}, "structured_outputs.json is []; allowed: a JSON Schema"),
        ({"json": "{"}, "structured_outputs.json is {; allowed: a JSON Schema"),
        ({"json": "[" * 100_000}, "structured_outputs.json is nested too deeply; allowed: a JSON"),
        ({"json": {"enum": [float("nan")]}}, "structured_outputs.json is {'enum': [nan]}"),
        ({"json": {"enum": [object]}}, "structured_outputs.json is {'enum': [<class"),
        ({"json": {"x-guidance": 1}}, "structured_outputs.json is {'x-guidance': 1}; allowed"),
        ({"json_object": 1}, "structured_outputs.json_object is 1; allowed: true or false"),
        (
            {"json_object": True, "disable_any_whitespace": 1},
            "structured_outputs.disable_any_white",
        ),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whites"),
    ],
)
def test_wrong_shapes_are_refused_where_they_are_made(fields: dict[str, Any], message: str) -> None:
    error = refusal(lambda: StructuredOutputsParams(**fields))
    assert str(error).startswith(message)
    assert error.parameter == str(error).partition(" is ")[0]


def test_sampling_params_take_nothing_else() -> None:
    error = refusal(lambda: SamplingParams(structured_outputs={"regex": "a"}))
    assert error.parameter == "structured_outputs"
    assert "allowed: StructuredOutputsParams or None" in str(error)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"grammar": 'start: "a" b'}, 'unknown name: "b"'),
    ({"grammar": ""}, ""),
    ({"grammar": 'root ::= "a'}, ""),
    ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
    ({"json": {"type": "object", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
    ({"json": {"type": "string", "format": "nonsense"}}, "Unknown format: nonsense"),
    ({"json": {"minimum": 5, "maximum": 4, "type": "integer"}}, "Unsatisfiable schema"),
    ({"json": {"$ref": "http://example.com/x"}}, "http://example.com/x"),
    ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
    ({"json": {"x-guidance": {"nonsense": 1}}}, "unknown field `nonsense`"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD)
def test_what_llguidance_refuses_is_refused_with_its_reason(
    fields: dict[str, Any], reason: str
) -> None:
    (kind,) = fields
    error = refusal(StructuredOutputsParams(**fields).check)
    assert error.parameter == f"structured_outputs.{kind}"
    start = f"structured_outputs.{kind} is "
    assert str(error).startswith(start)
    assert "; allowed: what llguidance can enforce, and it says: " in str(error)
    assert reason in str(error)
    assert str(error).strip()[-1] != ":"


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    assert "recursion limit" in str(refusal(StructuredOutputsParams(json=schema).check))


def test_an_object_without_an_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    assert "allowed: a JSON Schema" in str(refusal(lambda: StructuredOutputsParams(json=schema)))
    for _ in range(100_000):
        schema = {"items": schema}
    error = refusal(lambda: StructuredOutputsParams(json=schema))
    assert str(error).startswith("structured_outputs.json is nested too deeply")


def test_a_refusal_is_short_however_long_the_text() -> None:
    error = refusal(StructuredOutputsParams(regex="a" * 100_000 + "(").check)
    assert len(str(error)) < 1000


def test_errors_know_the_constraint_by_the_callers_name() -> None:
    params = StructuredOutputsParams(json={"type": "nonsense"}, where="response_format.x")
    error = refusal(params.check)
    assert error.parameter == "response_format.x"
    assert params == StructuredOutputsParams(json={"type": "nonsense"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "structured_outputs is []; allowed: an object"),
        ({"jsn": {}}, "structured_outputs.jsn is {}; allowed: only json, regex"),
        ({"regex": "a", "_backend": "x"}, "structured_outputs._backend is x; allowed: only json"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag is {}; allowed: null"),
        (
            {"json": {}, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties is True; allowed: false",
        ),
    ],
)
def test_unknown_fields_are_refused_by_name(fields: Any, message: str) -> None:
    error = refusal(lambda: StructuredOutputsParams.from_mapping(fields))
    assert str(error).startswith(message)


def test_an_engine_takes_what_vllms_head_sends() -> None:
    """All fields, most of them null, and the name of a library that it need not have."""
    sent = {
        "json": None,
        "regex": None,
        "choice": None,
        "grammar": 'root ::= "a" | "b"',
        "json_object": None,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "structural_tag": None,
        "_backend": "xgrammar",
        "_backend_was_auto": True,
    }
    params = StructuredOutputsParams.from_engine(sent)
    assert params == StructuredOutputsParams(grammar='root ::= "a" | "b"')
    params.check()
    assert "allowed: a map" in str(refusal(lambda: StructuredOutputsParams.from_engine("a")))


def test_a_huge_enum_passes() -> None:
    options = [f"option {i}" for i in range(7000)]
    StructuredOutputsParams(choice=options).check()
    StructuredOutputsParams(json={"enum": options}).check()


async def test_what_only_the_models_vocabulary_shows_is_the_heads_where_the_engine_does_not_look(
    smollm2: Path,
) -> None:
    unknown = StructuredOutputsParams(grammar="start: <|nope|>")
    nothing = StructuredOutputsParams(regex=r"[^\s\S]")
    good = StructuredOutputsParams(grammar="start: <|im_end|>")
    with closing(GrammarChecker(smollm2, 49152)) as checker, trio.fail_after(120):
        await checker.check(good, engine_tries=False)
        for bad in (unknown, nothing):
            await checker.check(bad)
            with pytest.raises(InvalidRequestError, match="llguidance can enforce"):
                await checker.check(bad, engine_tries=False)


async def test_a_check_in_a_thread_leaves_the_loop_alone_and_can_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(GrammarChecker()) as checker:
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await checker.check(StructuredOutputsParams(regex="("))
        await checker.check(StructuredOutputsParams(regex="a"))

        entered, release = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        def slow(*_: object) -> None:
            token.run_sync_soon(entered.set)
            assert release.wait(30)

        monkeypatch.setattr(GrammarGate, "check", slow)
        try:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(checker.check, StructuredOutputsParams(grammar="start: /a/"))
                    await entered.wait()
                    nursery.cancel_scope.cancel()
        finally:
            release.set()


def test_a_front_end_that_asks_for_no_form_never_loads_llguidance() -> None:
    code = (
        "import sys; import trioleg.runtime.llm, trioleg.server.app; "
        "trioleg.SamplingParams(structured_outputs=trioleg.StructuredOutputsParams(regex='a')); "
        "assert 'llguidance' not in sys.modules; "
        "trioleg.StructuredOutputsParams(regex='a').check(); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
