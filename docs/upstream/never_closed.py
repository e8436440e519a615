"""Under quart-trio Hypercorn closes no connection: ``Connection: close`` is not kept, idle ones stay for ever."""

from harness import GET, end_of, serving, verdict
from quart_trio import QuartTrio


async def plain(scope, receive, send):
    if scope["type"] == "http":
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def main():
    quart = QuartTrio(__name__)

    @quart.get("/")
    async def ok():
        return "ok"

    closed = {}
    for name, app in {"a bare app": plain, "quart-trio": quart}.items():
        for what in (b"Connection: close\r\n", b""):
            async with serving(app, keep_alive_timeout=0.3) as connect:
                async with await connect() as client:
                    await client.send_all(GET % what)
                    _, closed[name, what] = await end_of(client, 1.2)
    words = [
        f"{name}, {(what or b'idle').decode().strip()}: {is_}"
        for (name, what), is_ in closed.items()
    ]
    saw = "closed after 1.2 s (keep_alive_timeout 0.3 s)? " + "; ".join(words)
    return saw, [*closed.values()] == [True, True, False, False]


verdict(main)
