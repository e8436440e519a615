"""Hypercorn stops reading when anything follows a request, so the app never hears of its client's leaving."""

import trio
from harness import GET, serving, verdict


async def main():
    running, seen = trio.Event(), {}

    async def app(scope, receive, send):
        if scope["type"] == "http":
            running.set()
            with trio.move_on_after(1.5):
                while (await receive())["type"] != "http.disconnect":
                    pass
                seen[scope["path"]] = True

    async def hears_of_leaving(connect, more):
        nonlocal running
        running = trio.Event()
        seen.clear()
        async with await connect() as client:
            await client.send_all(GET % b"" + more)
            await running.wait()
        await trio.sleep(1)
        return bool(seen)

    async with serving(app) as connect:
        plain = await hears_of_leaving(connect, b"")
        stray = await hears_of_leaving(connect, b"\r\n")
    saw = f"1 s after the client closed, the app had been told: {plain}; with a stray CRLF behind it: {stray}"
    return saw, plain and not stray


verdict(main)
