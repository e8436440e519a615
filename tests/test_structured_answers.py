"""Structured outputs without a server: the real model at temperature 1, each kind judged by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trioleg import LLMConfig, SamplingParams, StructuredOutputsParams
from trioleg.config import EngineConfig
from trioleg.errors import InvalidRequestError
from trioleg.offline import open_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "rating": {"enum": ["★", "★★", "★★★"]},
        "years": {"type": "array", "items": {"type": "integer", "maximum": 2100}, "maxItems": 2},
    },
    "required": ["city", "rating"],
    "additionalProperties": False,
}
MOVES = 'start: move (" " move){2}\nmove: PIECE? /[a-h][1-8]/\nPIECE: "K" | "Q" | "♞"'


def is_city(text: str) -> bool:
    value = json.loads(text)
    assert {"city", "rating"} <= set(value) <= {"city", "rating", "years"}
    assert 2 <= len(value["city"]) <= 12
    assert value["rating"] in ("★", "★★", "★★★")
    years = value.get("years", [])
    return len(years) <= 2 and all(type(one) is int and one <= 2100 for one in years)


KINDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json": SCHEMA}, is_city),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": r"\d{4}-\d\d-\d\dT(am|pm)"}, re.compile(r"\d{4}-\d\d-\d\dT(am|pm)").fullmatch),
    ({"choice": ["Wien", "Zürich", "東京"]}, ["Wien", "Zürich", "東京"].__contains__),
    ({"grammar": MOVES}, re.compile("[KQ♞]?[a-h][1-8]( [KQ♞]?[a-h][1-8]){2}").fullmatch),
]


def test_every_kind_with_the_real_model(smollm2: Path) -> None:
    """Beside stop strings, logprobs and several choices; a bad one is its own result's error."""
    asked = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(**constraint),
            max_tokens=48,
            temperature=1.0,
            seed=1,
            n=3,
            logprobs=1,
            stop=["♜"],
        )
        for constraint, _ in KINDS
    ]
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    config = LLMConfig(engine=EngineConfig(dtype="float32", max_model_len=256))
    with open_engine(smollm2, config) as engine:
        prompts = ["A place worth a visit, and when:"] * (len(asked) + 1)
        *good, refused = engine.generate(prompts, [*asked, bad])
    finished = set()
    for kind, output in enumerate(good):
        judge = KINDS[kind][1]
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                assert judge(choice.text), (kind, choice.text)
                finished.add(kind)
            assert len(choice.logprobs or ()) == len(choice.token_ids)
    assert finished >= {0, 2, 3, 4}
    assert isinstance(refused.error, InvalidRequestError)
    assert refused.error.parameter == "structured_outputs.regex"
