"""The internals of Hypercorn that the connection rests on: when one moves, this says which.

``hypercorn==0.18.*`` is pinned. On an upgrade: read the named place in the new version, compare it
with ``http1.py``, ``client_connection.py`` and ``connection.py``, then change the pin and this table.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypercorn import app_wrappers, events, utils
from hypercorn.protocol import events as stream_events
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext

# What we call or override, and the parameters it has.
CALLS: dict[Any, str] = {
    H11Protocol.__init__: "self app config context task_group connection_state ssl client server send",
    H11Protocol.handle: "self event",
    H11Protocol.stream_send: "self event",
    H11Protocol._check_protocol: "self event",
    H11Protocol._close_stream: "self",
    H11Protocol._handle_events: "self",
    H11Protocol._send_error_response: "self status_code",
    HTTPStream.app_send: "self message",
    Lifespan.__init__: "self app config state",
    Lifespan.handle_lifespan: "self task_status",
    Lifespan.wait_for_shutdown: "self",
    Lifespan.wait_for_startup: "self",
    WorkerContext.__init__: "self max_requests",
    app_wrappers.ASGIWrapper.__call__: "self scope receive send sync_spawn call_soon",
    events.RawData: "data address",
    stream_events.Body: "stream_id data",
    stream_events.Response: "stream_id headers status_code",
    stream_events.StreamClosed: "stream_id",
    utils.parse_socket_addr: "family address",
    utils.suppress_body: "method status_code",
    utils.wrap_app: "app wsgi_max_body_size mode",
}

# What the code of Hypercorn must go on doing, since we count on it: a fragment of its source.
HABITS = [
    (H11Protocol._handle_events, "await self._check_protocol(event)"),
    (H11Protocol._handle_events, "await self._create_stream(event)"),
    (H11Protocol._handle_events, "await self._send_error_response(error.error_status_hint)"),
    (H11Protocol._handle_events, "await self.send(Closed())"),
    (H11Protocol._create_stream, "self.stream = HTTPStream("),
    (H11Protocol._close_stream, "await self.stream.handle(StreamClosed("),
    (H11Protocol.stream_send, "keep_alive_max_requests"),
    (HTTPStream.handle, "await self.task_group.spawn_app("),
    (HTTPStream.handle, '{"type": "http.disconnect"}'),
    (HTTPStream._send_closed, "await self.send(StreamClosed("),
    (HTTPStream.app_send, "await self._send_closed()"),
    (HTTPStream.app_send, "not suppress_body("),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_hypercorn_still_has_what_we_call(call: Any) -> None:
    found = " ".join(inspect.signature(call).parameters)
    assert found == CALLS[call], f"Hypercorn's {call.__qualname__} has moved: see {__doc__}"


@pytest.mark.parametrize(("where", "fragment"), HABITS)
def test_hypercorn_still_does_what_we_count_on(where: Any, fragment: str) -> None:
    assert fragment in inspect.getsource(where), (
        f"Hypercorn's {where.__qualname__} no longer says {fragment!r}: see {__doc__}"
    )


def test_a_response_begins_in_the_state_that_we_think() -> None:
    assert [state.name for state in ASGIHTTPState] == ["REQUEST", "RESPONSE", "TRAILERS", "CLOSED"]
