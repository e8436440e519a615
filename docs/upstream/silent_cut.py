"""quart-trio cuts a stream at ``RESPONSE_TIMEOUT`` (60 s) without a log line."""

import logging

import trio
from harness import GET, end_of, serving, verdict
from quart_trio import QuartTrio


async def main():
    app = QuartTrio(__name__)
    app.config["RESPONSE_TIMEOUT"] = 0.5
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger().addHandler(handler)

    @app.get("/")
    async def count():
        async def numbers():
            for number in range(20):
                yield b"%d " % number
                await trio.sleep(0.1)

        return numbers()

    async with serving(app) as connect:
        async with await connect() as client:
            await client.send_all(GET % b"")
            got, is_closed = await end_of(client, 2.5)
    pieces = got.partition(b"\r\n\r\n")[2].count(b" ")
    is_whole = got.endswith(b"0\r\n\r\n")
    saw = f"{pieces} pieces of 20; end of the body: {is_whole}, closed: {is_closed}, log lines: {len(logged)}"
    return saw, not is_whole and not logged


verdict(main)
