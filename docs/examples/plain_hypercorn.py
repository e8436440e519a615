"""The app for a plain Hypercorn, which starts the engine in its lifespan.

hypercorn -k trio docs/examples/plain_hypercorn.py:app
python docs/examples/plain_hypercorn.py    # the same in this process: one question, and the end
"""

from functools import partial

import httpx2
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from trioleg import LLMConfig
from trioleg.server.asgi import asgi_app

app = asgi_app("smollm2-135m", LLMConfig(restart_engine=True))


async def main() -> None:
    # Hypercorn's own 60 s and 5 s are too short for a large model, and for clients' pools.
    settings = {"bind": ["127.0.0.1:0"], "startup_timeout": 600, "keep_alive_timeout": 75}
    config = Config.from_mapping(settings)
    shutdown = trio.Event()

    async with trio.open_nursery() as nursery:
        run = partial(serve, app, config, shutdown_trigger=shutdown.wait)
        (url,) = await nursery.start(run)
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            question = {"role": "user", "content": "What is the capital of France?"}
            body = {"messages": [question], "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body, timeout=60)
            print(answer.json()["choices"][0]["message"]["content"])
        shutdown.set()


if __name__ == "__main__":
    trio.run(main)
