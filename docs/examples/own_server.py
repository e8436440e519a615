"""The whole server as one task of your own program, which here is its only client too.

trioleg pull smollm2-135m
python docs/examples/own_server.py
"""

from functools import partial

import httpx2
import trio

import trioleg


async def main() -> None:
    config = trioleg.ServerConfig(port=0)  # a free one
    shutdown = trio.Event()

    async with trioleg.open_llm("smollm2-135m") as llm, trio.open_nursery() as nursery:
        bound = await nursery.start(partial(trioleg.serve, llm, config, shutdown=shutdown))
        print("serving", llm.model, "with up to", llm.max_model_len, "tokens")

        async with httpx2.AsyncClient(base_url=bound.url, trust_env=False) as client:
            question = {"role": "user", "content": "What is the capital of France?"}
            body = {"messages": [question], "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body, timeout=60)
            print(answer.json()["choices"][0]["message"]["content"])

        # Refuses new requests, lets running ones go on for ServerConfig.drain_timeout, ends the rest with their
        # last frames, closes connections, returns.
        shutdown.set()


trio.run(main)
