"""The app on a scripted engine, in this process: requests go in by ASGI, bytes come out.

No socket and no thread, so the autojump clock works.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from quart_trio import QuartTrio
from tiny_tokenizers import byte_fallback_tokenizer

from trioleg.chat_template import ChatTemplate
from trioleg.config import LLMConfig, ServerConfig
from trioleg.messages import EngineCoreRequest
from trioleg.runtime.llm import LLM
from trioleg.server.app import create_app
from trioleg.server.http1 import DIRECT_BODY
from trioleg.server.stream import DirectBody
from trioleg.testing import Script, ScriptedTransport, open_scripted_llm
from trioleg.tokenizer import Tokenizer

__all__ = [
    "MESSAGES",
    "Answer",
    "DirectWay",
    "ScriptedApp",
    "call",
    "chat_tokenizer",
    "open_app",
    "open_chat_llm",
]

MESSAGES = [{"role": "user", "content": "a b"}]
_TEMPLATE = "<s>{% for one in messages %}{{ one.content }}{% endfor %}"


@dataclass
class Answer:
    """What a client has got so far: ``parts`` are (time, bytes). ``reads`` unset: the client takes one
    more part and then nothing; ``leave`` set: it hangs up. ``pause``: seconds that it takes over
    each part; ``body_after``: that it takes over its body. ``direct``: the server's short way to it."""

    status: int | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False
    reads: trio.Event | None = None
    leave: trio.Event = field(default_factory=trio.Event)
    pause: float = 0.0
    body_after: float = 0.0
    direct: DirectBody | None = None

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class DirectWay:
    """A short way to the client of ``answer``, that is free where ``chance`` has it so. ``num_parts`` went it."""

    def __init__(self, answer: Answer, chance: Callable[[], bool] = lambda: True) -> None:
        self.num_parts = 0
        self._answer = answer
        self._chance = chance

    @property
    def is_free(self) -> bool:
        return self._chance()

    def write(self, data: bytes) -> None:
        assert self._answer.status is not None
        assert not self._answer.is_whole
        self._answer.parts.append((trio.current_time(), data))
        self.num_parts += 1


@dataclass
class ScriptedApp:
    """``transport`` has the engine's side."""

    app: QuartTrio
    llm: LLM
    transport: ScriptedTransport

    async def ask(
        self, answer: Answer | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        """POST /v1/chat/completions; returns when the app has let go of the request."""
        body = json.dumps({"messages": MESSAGES, **fields}).encode()
        path = "/v1/chat/completions"
        return await call(self.app, "POST", path, body, answer=answer, headers=headers)

    def vary_choices(self) -> None:
        """From now on each of a request's choices begins one step further on in the script."""
        core, add_request = self.transport.core, self.transport.core.add_request

        def add(request: EngineCoreRequest) -> None:
            add_request(request)
            index = int(*request.request_id.split("-")[2:])
            list(itertools.islice(core._waiting[-1].steps, index))

        core.add_request = add


async def call(
    app: QuartTrio,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    answer: Answer | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Any request; returns when the app has let go of it."""
    answer = answer or Answer()
    body_is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal body_is_sent
        if body_is_sent:
            await answer.leave.wait()
            return {"type": "http.disconnect"}
        await trio.sleep(answer.body_after)
        body_is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = dict(message["headers"])
            return
        assert answer.status is not None
        assert not answer.is_whole
        answer.parts.append((trio.current_time(), message.get("body", b"")))
        await trio.sleep(answer.pause)
        if answer.reads is not None:
            await answer.reads.wait()
        answer.is_whole = not message.get("more_body", False)

    more = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    path, _, query = path.partition("?")
    scope = {
        **_SCOPE,
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "raw_path": path.encode(),
        "headers": [*_SCOPE["headers"], *more],
        "extensions": {} if answer.direct is None else {DIRECT_BODY: {"body": answer.direct}},
    }
    await app(scope, receive, send)
    return answer


_SCOPE: Any = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "scheme": "http",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


def open_chat_llm(
    script: Script, config: LLMConfig | None = None
) -> AbstractAsyncContextManager[tuple[LLM, ScriptedTransport]]:
    """A scripted engine whose tokenizer has a chat template."""
    return open_scripted_llm(script, chat_tokenizer(), config)


def chat_tokenizer() -> Tokenizer:
    template = ChatTemplate(_TEMPLATE, {}, origin="this test")
    return replace(byte_fallback_tokenizer(), chat_template=template)


@asynccontextmanager
async def open_app(
    script: Script, config: ServerConfig | None = None, llm_config: LLMConfig | None = None
) -> AsyncIterator[ScriptedApp]:
    async with open_chat_llm(script, llm_config) as (llm, transport):
        yield ScriptedApp(create_app(llm, config), llm, transport)
