"""response_format and structured_outputs: what they mean, what is refused, and that nothing is sent then."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from scripted_app import open_app
from test_streaming_protocol import play

from trioleg import SamplingParams, StructuredOutputsParams
from trioleg.errors import InvalidRequestError
from trioleg.server.structured_outputs import read_structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, **fields},
        }
    }


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (json_schema(), {"json": SCHEMA}),
        (json_schema(strict=False, description="what it is"), {"json": SCHEMA}),
        (json_schema(strict=None, description=None), {"json": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            {"regex": "a"},
        ),
    ],
)
def test_what_the_parameters_mean(fields: dict[str, Any], params: dict[str, Any] | None) -> None:
    expected = None if params is None else StructuredOutputsParams(**params)
    assert read_structured_outputs(fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, 'response_format is "json"; allowed: an object whose type'),
        ({"response_format": {"type": "xml"}}, 'response_format is {"type":"xml"}; allowed'),
        ({"response_format": {}}, "response_format is {}; allowed: an object whose type"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema is {}; allowed: only type",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is null; allowed: an object with name and schema",
        ),
        (json_schema(name=None), "response_format.json_schema.name is null; allowed: a string"),
        (json_schema(schema=None), "response_format.json_schema.schema is null; allowed: a JSON"),
        (json_schema(schema="{}"), 'response_format.json_schema.schema is "{}"; allowed: a JSON'),
        (json_schema(strict="yes"), 'response_format.json_schema.strict is "yes"; allowed: true,'),
        (json_schema(description=1), "response_format.json_schema.description is 1; allowed: a s"),
        (json_schema(extra=1), "response_format.json_schema.extra is 1; allowed: only name"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            'structured_outputs is {"regex":"a"}; allowed: null, since response_format asks',
        ),
        ({"structured_outputs": []}, "structured_outputs is []; allowed: an object"),
        ({"structured_outputs": {}}, "structured_outputs is empty; allowed: exactly one"),
        ({"structured_outputs": {"jsn": 1}}, "structured_outputs.jsn is 1; allowed: only json"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs is regex and choice; allowed: exactly one",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_structured_outputs(fields)
    assert str(caught.value).startswith(message)
    assert caught.value.parameter == message.partition(" is ")[0]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one string"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
    (
        json_schema(schema={"type": "object", "uniqueItems": True}),
        "response_format.json_schema.schema",
        "Unimplemented keys",
    ),
]


async def test_a_bad_one_is_a_400_before_anything_is_sent() -> None:
    with trio.fail_after(60):
        async with open_app(play("a", "b")) as app:
            for stream in (False, True):
                for fields, parameter, reason in BAD:
                    answer = await app.ask(stream=stream, **fields)
                    assert answer.status == 400
                    assert answer.error["param"] == parameter
                    assert reason in answer.error["message"]
            assert app.transport.core.wait_s() is None
            assert (await app.ask(stream=True)).body.endswith(b"data: [DONE]\n\n")


async def test_what_the_engine_is_sent() -> None:
    """The scripted engine has no logits to mask, and says so by name."""
    with trio.fail_after(60):
        async with open_app(play("a", "b")) as app:
            sent = []
            add_request = app.transport.core.add_request

            def add(request: Any) -> None:
                sent.append(request.sampling_params.structured_outputs)
                add_request(request)

            app.transport.core.add_request = add
            answer = await app.ask(structured_outputs={"choice": ["a", "b"]}, n=2)
            lark = 'start: OPTION\nOPTION: "a" | "b"'
            assert sent[0] == {"grammar": lark, "_backend": "guidance"}
            assert answer.status == 400
            assert answer.error["param"] == "structured_outputs.choice"
            assert "structured_outputs" in answer.error["message"]


async def test_programs_are_refused_as_the_api_is() -> None:
    async with open_app(play("a")) as app:
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        with trio.fail_after(60), pytest.raises(InvalidRequestError, match="unclosed group"):
            await app.llm.generate([1], bad)
