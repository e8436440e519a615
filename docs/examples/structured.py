"""An answer that is JSON of a given shape, whatever the model would rather say.

    python docs/examples/structured.py

The same over HTTP, with any OpenAI client: response_format={"type": "json_schema", "json_schema":
{"name": "city", "schema": SCHEMA}}; or, for the other kinds, extra_body={"structured_outputs": {"choice":
["yes", "no"]}}.
"""

from __future__ import annotations

import json

import trio

import trioleg
from trioleg import SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "capital"],
    "additionalProperties": False,
}


async def main() -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    async with trioleg.open_llm("smollm2-135m") as llm:

        async def ask(**constraint: object) -> str:
            params = SamplingParams(
                temperature=0, structured_outputs=StructuredOutputsParams(**constraint)
            )
            return (await llm.generate(question, params)).outputs[0].text

        print(sorted(json.loads(await ask(json=SCHEMA))))
        print(await ask(choice=["Paris", "Rome"]))
        try:
            await ask(regex="(")
        except trioleg.InvalidRequestError as error:
            print("refused:", error.parameter)


trio.run(main)
