"""quart-trio drops an error that comes together with a cancel: there is no log line."""

import logging

import trio
from harness import GET, serving, verdict
from quart_trio import QuartTrio


async def main():
    app = QuartTrio(__name__)
    logged, running, raised = [], trio.Event(), trio.Event()
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger(app.logger.name).addHandler(handler)
    logging.getLogger().addHandler(handler)

    @app.get("/")
    async def leave():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            running.set()
            try:
                await trio.sleep_forever()
            finally:  # the client has left, and the cleanup fails
                raised.set()
                raise RuntimeError("the cleanup failed")

    async with serving(app) as connect:
        async with await connect() as client:
            await client.send_all(GET % b"")
            await running.wait()
        await raised.wait()
        await trio.sleep(0.5)
    return f"log entries about the error: {len(logged)}", not logged


verdict(main)
