"""A model inside your own Trio program.

trioleg pull smollm2-135m
python docs/examples/embed.py
"""

import trio

import trioleg


async def main() -> None:
    greedy = trioleg.SamplingParams(temperature=0, max_tokens=32)
    question = [{"role": "user", "content": "What is the capital of France?"}]

    # The engine is a process of its own. It is ready when the block begins, and gone when it ends.
    async with trioleg.open_llm("smollm2-135m") as llm:
        # A request lives as long as its block: whatever leaves it (here, the end of the answer; an
        # error; a cancel; a plain `break`) also ends the request in the engine.
        async with llm.open_stream(question, greedy) as stream:
            async for output in stream:
                print(output.outputs[0].text, end="", flush=True)
        print()

        # Or the whole answer at once. Chat messages, a text, or token ids: any of them is a prompt.
        answer = await llm.generate("Once upon a time", greedy)
        print(len(answer.outputs[0].token_ids), "tokens,", answer.outputs[0].finish_reason)

        # Trio's own tools are all that a timeout takes.
        endless = trioleg.SamplingParams(temperature=0, ignore_eos=True)
        with trio.move_on_after(1) as scope:
            await llm.generate("And then", endless)
        print("cut short:", scope.cancelled_caught)


trio.run(main)
