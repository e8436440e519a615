"""One WebSocket handshake, on any path, ends the whole server."""

import trio
from harness import end_of, serving, verdict

HEAD = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
REQUESTS = {
    "the byte ff in Connection": HEAD.replace(b": Upgrade", b": Upgrade, \xff") + b"\r\n",
    "the byte ff in Sec-WebSocket-Protocol": HEAD + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
    "the byte ff in Sec-WebSocket-Extensions": HEAD + b"Sec-WebSocket-Extensions: \xff\r\n\r\n",
}


async def app(scope, receive, send):
    await trio.sleep_forever()


async def ends_the_server(request):
    try:
        async with serving(app) as connect:
            async with await connect() as client:
                await client.send_all(request)
                await end_of(client, 0.5)
    except BaseExceptionGroup as group:
        error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return type(error).__name__
    return None


async def main():
    errors = {name: await ends_the_server(request) for name, request in REQUESTS.items()}
    return "; ".join(f"{name}: {error}" for name, error in errors.items()), any(errors.values())


verdict(main)
