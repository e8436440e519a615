"""``create_app``: the ASGI app alone, for whoever brings a server of their own.

It is a quart-trio app with one part replaced: the connection class. Quart would iterate an async
generator for a stream; ours calls ``serve`` of the response instead, in the request's own nursery, so
that a disconnect cancels a plain loop. Every error leaves as JSON in OpenAI's form, and what quart-trio would
forget of a group of errors (all but the first that has a handler, and all of them beside a cancel) is logged
(``failures.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import trio
from quart import Response, current_app, request
from quart.utils import encode_headers
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.datastructures import Headers
from werkzeug.exceptions import (
    HTTPException,
    MethodNotAllowed,
    NotFound,
    RequestEntityTooLarge,
    RequestTimeout,
)

from ..config import ServerConfig
from ..runtime.llm import LLM
from .authentication import OPEN_PATHS, REFUSAL, is_authorized
from .controls import Controls
from .failures import error_response, json_response, one_error
from .http1 import DIRECT_BODY
from .incoming import IncomingRequest
from .model_names import check_adapter_names
from .protocol import error_body
from .routes import EventStreamResponse, Routes, ServeEvents

__all__ = ["create_app"]


def create_app(llm: LLM, config: ServerConfig | None = None) -> QuartTrio:
    """The OpenAI-compatible app on ``llm``, which has to outlive it (``open_llm`` wraps the server)."""
    config = config or ServerConfig()
    name = config.served_model_name or llm.model
    check_adapter_names(llm.adapters.by_name, name)
    routes = Routes(
        llm,
        name,
        keep_alive_interval=config.sse_keep_alive_interval,
    )
    app = _App(llm)
    # A bigger body is a 413, answered while it still comes in.
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    app.config["BODY_TIMEOUT"] = config.body_timeout
    # Quart's own bounds know nothing of streams: it would cut one after a minute, without a word.
    app.config["RESPONSE_TIMEOUT"] = None
    is_on = config.enable_engine_controls
    controls = Controls(llm, name, is_on=is_on)
    for method, path, handler in (*routes.table(), *controls.table()):
        app.add_url_rule(path, handler.__name__, handler, methods=[method])
    app.register_error_handler(Exception, app.error_response)
    app.register_error_handler(HTTPException, _http_error)
    if config.api_keys:
        app.before_request(partial(_refuse_strangers, config.api_keys))
    app.after_request(_echo_request_id)
    return app


class _App(QuartTrio):
    def __init__(self, llm: LLM) -> None:
        super().__init__("trioleg", static_folder=None)
        self.asgi_http_class = _HTTPConnection
        self.request_class = IncomingRequest
        self._llm = llm

    # As Quart's, without a frame of their own for as long as a stream runs.

    def __call__(self, scope: Any, receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        return self.asgi_app(scope, receive, send)

    def asgi_app(self, scope: Any, receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        if scope["type"] == "http":
            return self.asgi_http_class(self, scope)(receive, send)
        return super().asgi_app(scope, receive, send)

    # Async, though it awaits nothing, because Quart runs a plain function in a thread.
    async def error_response(self, error: Exception) -> Response:  # noqa: ASYNC124
        return error_response(error, self._llm.health())

    async def handle_user_exception(self, error: Exception | BaseExceptionGroup[Any]) -> Any:
        """Whatever left a handler comes here first, and before any checkpoint."""
        one = one_error(error, f"{request.method} {request.path}")
        return await super().handle_user_exception(one)


class _HTTPConnection(TrioASGIHTTPConnection):
    """One request, which a disconnect cancels. While its stream runs, the request itself is kept by nobody, and under
    our own server there is no task but the one that writes: streams are many."""

    async def __call__(self, receive: Any, send: Any) -> None:
        async with trio.open_nursery() as nursery:
            await self._answer(await self._response(nursery, receive, send), send)
            nursery.cancel_scope.cancel(reason="the response is complete")

    def _answer(self, response: Any, send: Any) -> Awaitable[None]:
        if isinstance(response, EventStreamResponse):
            return self._serve_events(response.serve, response.headers, send)
        return self._send_response(send, response)

    async def _response(self, nursery: trio.Nursery, receive: Any, send: Any) -> Any:
        request = self._create_request_from_scope(send)
        nursery.start_soon(self.handle_messages, nursery, request, receive)
        return await self.app.handle_request(request)

    async def handle_messages(  # type: ignore[override]  # quart-trio's own signature
        self, nursery: trio.Nursery, request: Any, receive: Any
    ) -> None:
        # To receive is to ask for the body. Whoever waits for that hears nothing else meanwhile.
        if request.waits_to_be_asked:
            await request.body_is_wanted.wait()
        cancel_at_disconnect = self._extension.get("cancel_at_disconnect")
        if cancel_at_disconnect is None:
            await super().handle_messages(nursery, request, receive)
            return
        cancel_at_disconnect(nursery.cancel_scope)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            request.body.append(message.get("body", b""))
            more = message.get("more_body", False)
        request.body.set_complete()

    @property
    def _extension(self) -> dict[str, Any]:
        """Of our own server (``DIRECT_BODY``); empty under another one."""
        extension: dict[str, Any] = (self.scope.get("extensions") or {}).get(DIRECT_BODY, {})
        return extension

    async def _serve_events(self, serve: ServeEvents, headers: Headers, send: Any) -> None:
        head: Headers | None = headers
        del headers

        async def start() -> None:
            nonlocal head
            assert head is not None, "a response has one head"
            encoded = [_encoded_header(*one) for one in head]
            head = None
            await send({"type": "http.response.start", "status": 200, "headers": encoded})

        try:
            events = serve(start, send, self._extension.get("body"))
            del serve  # which has the request
            try:
                await events
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - one is raised
                where = f"{self.scope['method']} {self.scope['path']}"
                raise one_error(error, where)  # noqa: B904 - it is one of those that were caught
        except Exception as error:  # noqa: BLE001 - it has been logged, and is to be answered
            if head is None:
                return  # without the end of the body: it must not look complete
            answer = await cast(_App, self.app).error_response(error)
            if "X-Request-Id" in head:
                answer.headers["X-Request-Id"] = head["X-Request-Id"]
            await self._send_response(send, answer)


# Streams are many, and their heads are nearly the same.
@lru_cache(maxsize=256)
def _encoded_header(name: str, value: str) -> tuple[bytes, bytes]:
    ((encoded_name, encoded_value),) = encode_headers(Headers([(name, value)]))
    return encoded_name, encoded_value


# These are async, though they await nothing, because Quart runs a plain function in a thread.


async def _http_error(error: HTTPException) -> Response:  # noqa: ASYNC124
    """What Quart refuses by itself: unknown paths and methods, bodies that are too large, our bugs."""
    status = error.code or 500
    type_ = "invalid_request_error" if status < 500 else "server_error"
    message = error.description or error.name
    if isinstance(error, NotFound | MethodNotAllowed):
        # Quart leaves a blank of a path that does not begin with the root path.
        path = request.path.strip() or request.scope["path"]
        message = f"{request.method} {path} is not served; allowed: {_served(request.root_path)}"
    elif isinstance(error, RequestEntityTooLarge):
        limit = current_app.config["MAX_CONTENT_LENGTH"]
        message = f"the request's body is too long; allowed: {limit} bytes"
    elif isinstance(error, RequestTimeout):
        limit = current_app.config["BODY_TIMEOUT"]
        message = f"the request's body is not complete; allowed: {limit:g} s for all of it"
    fields = {"message": message, "type": type_, "param": None, "code": None}
    response = json_response(error_body(fields), status)
    for name, value in error.get_headers():
        if name.lower() not in ("content-type", "content-length"):
            response.headers[name] = value
    return response


def _served(root_path: str) -> str:
    rules = current_app.url_map.iter_rules()
    methods = {rule.rule: sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}) for rule in rules}
    served = ((method, path) for path, all_ in methods.items() for method in all_)
    return ", ".join(f"{method} {root_path}{path}" for method, path in served)


async def _refuse_strangers(keys: Sequence[str]) -> Response | None:  # noqa: ASYNC124
    """By the route that was found, not by how the path is written."""
    is_open = request.url_rule is not None and request.url_rule.rule in OPEN_PATHS
    if is_open or is_authorized(request.headers.get("Authorization"), keys):
        return None
    response = json_response(error_body(REFUSAL), 401)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _echo_request_id(response: Response) -> Response:  # noqa: ASYNC124
    """The client finds its own id again; it is never a key of ours."""
    request_id = cast(IncomingRequest, request).external_req_id
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
    return response
