"""What can end a request beside its own last token, and how a program hears of it.

python docs/examples/endings.py
"""

from __future__ import annotations

import trio

import trioleg
from trioleg import SamplingParams, Timeouts

QUESTION = [{"role": "user", "content": "Tell me a long story."}]


async def main() -> None:
    # An engine that dies is followed by another one; ``health`` tells what is going on meanwhile.
    config = trioleg.LLMConfig(restart_engine=True)
    async with trioleg.open_llm("smollm2-135m", config) as llm:
        print("state:", llm.health().state)
        await a_deadline(llm)
        await an_abort(llm)
        await trouble(llm)


async def a_deadline(llm: trioleg.LLM) -> None:
    try:
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        await llm.generate(QUESTION, params, timeouts=Timeouts(first_token=30, total=1))
    except trioleg.DeadlineExceeded as error:
        words = error.partial.outputs[0].text.split() if error.partial else []
        print(f"deadline: {error}; {'some' if words else 'no'} words had come")


async def an_abort(llm: trioleg.LLM) -> None:
    """By its id, from anywhere in the program: an operator's task, say."""
    async with llm.open_stream(
        QUESTION, SamplingParams(max_tokens=2000, ignore_eos=True)
    ) as stream:
        await stream.receive()
        print("aborted:", llm.abort(stream.request_id))
        try:
            async for _output in stream:
                pass
        except trioleg.RequestAborted as error:
            print("reader:", error)


async def trouble(llm: trioleg.LLM) -> None:
    """How a caller tells "ask again" from "give up"."""
    while True:
        try:
            answer = await llm.generate(QUESTION, SamplingParams(max_tokens=5))
        except trioleg.EngineUnavailableError as error:
            await trio.sleep(error.retry_after)
        except trioleg.EngineDeadError:
            # In the middle of the answer; ``wait_ready`` raises it again if no other engine comes.
            await llm.wait_ready()
        else:
            print("tokens:", len(answer.outputs[0].token_ids))
            return


if __name__ == "__main__":
    trio.run(main)
