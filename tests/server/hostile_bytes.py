"""Bytes that no decent client sends. ``hostile(number)`` depends on nothing else, so that a failure can be repeated."""

from __future__ import annotations

import json
import random

from connection_harness import get, post

CHAT_PATH = "/v1/chat/completions"


def chat(**fields: object) -> bytes:
    """A whole chat request for a few tokens."""
    asked = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 3, **fields}
    return post(json.dumps(asked).encode(), "Content-Type: application/json", path=CHAT_PATH)


def chunked(*parts: bytes, head: str = "Transfer-Encoding: chunked") -> bytes:
    lines = [f"POST {CHAT_PATH} HTTP/1.1", "Host: test", head, "", ""]
    return "\r\n".join(lines).encode() + b"".join(parts)


SEEDS = [
    get("/"),
    get("/", "Connection: close"),
    get("/", version="1.0"),
    get("/", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Protocol: a, b"),
    get("/", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    get("/a") + get("/b"),
    post(b'{"stream": true}', "Content-Type: application/json"),
    post(b"hi", "Expect: 100-continue"),
    chunked(b"2\r\nhi\r\n0\r\nX: y\r\n\r\n"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"HEAD / HTTP/1.1\r\nHost: t\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
]
TOKENS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"\xff", b" ", b"\t", b":", b",", b"0\r\n\r\n", b"?", b"%",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n",
    b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"Expect: 100-continue\r\n",
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"GET / HTTP/1.1\r\n\r\n", b"ffffffffff\r\n",
]  # fmt: skip


def mutated(chance: random.Random, seeds: list[bytes] = SEEDS) -> bytes:
    """A seed after one to four edits: a token put in, bytes cut out, replaced, or said twice."""
    data = chance.choice(seeds)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randint(0, 8))
        put = chance.choice([b"", chance.randbytes(1), chance.choice(TOKENS), data[at:end] * 2])
        data = data[:at] + put + data[end:]
    return data


def _websocket(header: bytes, behind: bytes = b"", to: bytes = b"websocket") -> bytes:
    head = get("/", "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==", "Sec-WebSocket-Version: 13", "@: @")
    return head.replace(b"@: @", b"Upgrade: " + to + b"\r\n" + header) + behind


_UPGRADE = b"Connection: Upgrade"
_FRAME = b"\x81\x85\0\0\0\0hello"
_LONGEST_HEAD = get("/health", "Cookie: " + "x" * (2**16 - len(get("/health", "Cookie: "))))

# What has broken servers, whole: what a mutation makes of an ordinary request seldom gets there.
NASTY = [
    # WebSockets
    _websocket(_UPGRADE),
    _websocket(_UPGRADE, _FRAME),
    _websocket(_UPGRADE, to=b"\xa0websocket"),
    _websocket(b"Connection: Upgrade, \xff", _FRAME),
    *(
        _websocket(_UPGRADE + b"\r\nSec-WebSocket-" + name + b": \xff", behind)
        for name in (b"Protocol", b"Extensions")
        for behind in (b"", _FRAME)
    ),
    # One request that may be read as two
    chunked(b"0\r\n\r\n", get("/health"), head="Content-Length: 5\r\nTransfer-Encoding: chunked"),
    chunked(b"0\r\n\r\n", head="Transfer-Encoding: identity, chunked"),
    chunked(b"2;a=b;c\r\nhi\r\n0;last\r\n\r\n"),
    chunked(b"2\nhi\n0\n\n"),
    chunked(b"-2\r\nhi\r\n0\r\n\r\n"),
    chunked(b"2;" + b"x" * 70_000 + b"\r\nhi\r\n0\r\n\r\n"),
    get("/health", "X: a\r\n b\r\n\tc"),
    get("/health", " X: begins with a space"),
    get("/health").replace(b"\r\n", b"\n"),
    post(b"", "Content-Length: 3", path=CHAT_PATH),
    *(
        get("/health", f"Content-Length: {n}")
        for n in ("-1", "+1", "1e3", "0x10", "1,1", 2**63, 10**400)
    ),
    # Odd heads
    get("/\0health"),
    get("/health", "X: \0"),
    get("/health", "X\0: 1"),
    get("http://test/health"),
    get("http://[/health"),
    get("http://%5b/health"),
    get("//[/health"),
    get("test:443"),
    get("*").replace(b"GET", b"OPTIONS"),
    get("/health").replace(b"Host: test", b"Host: [::1"),
    get("/health", *(f"X-{n}: {n}" for n in range(500))),
    get("/%ff%00%2e%2e/../..//"),
    _LONGEST_HEAD,
    _LONGEST_HEAD.replace(b"Cookie: ", b"Cookie: x"),
    get("/health")[:-2],
    # Other protocols
    bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    b"SSH-2.0-OpenSSH_9.2p1\r\n",
    # The API itself
    chat(),
    chat(stream=True),
    chat(stream=True, n=2) + chat() + get("/health"),
    chat(stream=True) + b"\r\n" + _websocket(_UPGRADE, _FRAME),
    chat(messages="\ud800"),
    get("/v1/requests/%ff").replace(b"GET", b"DELETE"),
    post(b"[" * 100_000, "Content-Type: application/json", path=CHAT_PATH),
    post(b"\xff\xfe\0", "Content-Type: application/json; charset=utf-16", path=CHAT_PATH),
]  # fmt: skip


def hostile(number: int) -> bytes:
    """The input of that number: nasty as it is or mutated, several in a row, or noise."""
    chance = random.Random(number)
    if number < len(NASTY):
        return NASTY[number]
    kind = chance.random()
    if kind < 0.1:
        return chance.randbytes(chance.randrange(2000))
    if kind < 0.3:
        return b"".join(chance.choice([*NASTY, *SEEDS]) for _ in range(chance.randint(2, 5)))
    return mutated(chance, chance.choice([NASTY, SEEDS]))
