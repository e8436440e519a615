"""``asgi_app``: the app with its engine, for an ASGI server that somebody else runs.

    hypercorn -k trio 'trioleg.server.asgi:asgi_app("smollm2-135m")'

The engine lives as long as the server's ASGI lifespan: it starts with ``lifespan.startup``, which is answered
when it is ready, and leaves with ``lifespan.shutdown``. So nothing is started when the app is made, and each worker
of a server has an engine of its own. What such a server does worse than ``trioleg serve``, and which of its settings
to change, is in docs/plain-hypercorn.md.

Rules of this file: whatever goes wrong, the server gets one sentence to show (``lifespan.startup.failed``), and the
client an answer in OpenAI's form. Until Trio is known to run, nothing here needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio
from quart_trio import QuartTrio

from .. import model_store
from ..config import LLMConfig, ServerConfig
from ..errors import EngineUnavailableError, ServerShutdown, TriolegError
from ..runtime.llm import LLM
from ..runtime.opening import open_llm
from .app import create_app
from .protocol import error_body, error_of

__all__ = ["asgi_app"]

_log = logging.getLogger("trioleg.server")

Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Any, Receive, Send], Awaitable[None]]

_NOT_TRIO = (
    "trioleg needs Trio, and this server runs its apps on asyncio; start it as: hypercorn -k trio"
)
_NO_LIFESPAN = (
    "the engine is started in the ASGI lifespan, of which this server has sent nothing; it has to be "
    "switched on"
)
# What a client may do about it: the engine is loading, and nobody knows for how long.
_RETRY_AFTER_S = 1.0


def asgi_app(
    model: str | Path = model_store.DEFAULT_MODEL,
    llm_config: LLMConfig | None = None,
    config: ServerConfig | None = None,
    *,
    attach: str | None = None,
    script: Path | None = None,
) -> ASGIApp:
    """An ASGI app that opens its LLM in the lifespan; the arguments are those of ``open_llm``.

    Of ``config`` the app's part holds: ``served_model_name``, ``max_body_bytes``, ``sse_keep_alive_interval``.
    Addresses and timeouts are the server's.

    Raises nothing. A model that cannot be had, an engine that does not start, or a server that does not run Trio
    is told to the server as ``lifespan.startup.failed``; an engine that died meanwhile as
    ``lifespan.shutdown.failed``. Requests outside of the lifespan are answered with a 503.
    """
    return _LifespanApp(partial(open_llm, model, llm_config, attach=attach, script=script), config)


class _LifespanApp:
    """``_app`` is there while the engine is; ``_refusal`` is what clients are told otherwise."""

    def __init__(
        self,
        open_: Callable[[], AbstractAsyncContextManager[LLM]],
        config: ServerConfig | None,
    ) -> None:
        self._open = open_
        self._config = config
        self._app: QuartTrio | None = None
        self._refusal: TriolegError = _unavailable(_NO_LIFESPAN)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            # quart-trio's types are of Hypercorn, whose apps we are called as.
            await self._app(scope, receive, send)
        elif kind == "http":
            in_trio = trio.lowlevel.in_trio_run()
            await _refuse(self._refusal if in_trio else _unavailable(_NOT_TRIO), send)
        else:
            await send({"type": "websocket.close"})

    async def _live(self, receive: Receive, send: Send) -> None:
        """The lifespan. What the server is told last is sent outside of every handler: Hypercorn raises it, and
        would show the error again that it came from."""
        await receive()  # lifespan.startup
        if not trio.lowlevel.in_trio_run():
            await send({"type": "lifespan.startup.failed", "message": _NOT_TRIO})
            return
        self._refusal = _unavailable("the engine is loading")
        is_started, failure = await self._run(receive, send)
        stage = "shutdown" if is_started else "startup"
        if failure is None:
            await send({"type": f"lifespan.{stage}.complete"})
        else:
            await send({"type": f"lifespan.{stage}.failed", "message": failure})

    async def _run(self, receive: Receive, send: Send) -> tuple[bool, str | None]:
        """Whether the engine was ready, and what went wrong, if anything did."""
        is_started = False
        try:
            async with self._open() as llm:
                self._app = create_app(llm, self._config)
                await send({"type": "lifespan.startup.complete"})
                is_started = True
                await receive()  # lifespan.shutdown
                self._end()
        except TriolegError as error:
            return is_started, str(error)
        except Exception as error:  # noqa: BLE001 - a server takes it for "has no lifespan", and goes on
            _log.error("the app failed in its lifespan", exc_info=error)
            return is_started, f"{type(error).__name__}: {error}"
        finally:
            self._end()
        return is_started, None

    def _end(self) -> None:
        self._app = None
        self._refusal = ServerShutdown("the server is shutting down")


def _unavailable(message: str) -> EngineUnavailableError:
    return EngineUnavailableError(message, retry_after=_RETRY_AFTER_S)


async def _refuse(error: TriolegError, send: Send) -> None:
    status, fields = error_of(error)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": error_body(fields), "more_body": False})
