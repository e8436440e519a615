"""Hypercorn shields its writes: a client that stops reading outlives ``graceful_timeout`` and every cancel."""

import trio
from harness import GET, serving, verdict

BLOCK = bytes(2**20)


async def main():
    shutdown, is_cut = trio.Event(), trio.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                with trio.move_on_after(0.5):
                    while True:
                        await send({"type": "http.response.body", "body": BLOCK, "more_body": True})
            finally:
                is_cut.set()

    started = trio.current_time()
    async with serving(app, shutdown, graceful_timeout=0.5) as connect:
        client = await connect()
        await client.send_all(GET % b"")
        shutdown.set()
        await trio.sleep(2.5)
        stuck = not is_cut.is_set()
        await client.aclose()  # only this ends it
        await is_cut.wait()
    saw = f"0.5 s for the write, 0.5 s of grace: after 2.5 s it still waited: {stuck}"
    return f"{saw}; all ended after {trio.current_time() - started:.1f} s", stuck


verdict(main)
