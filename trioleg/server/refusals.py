"""Requests that no app gets to see: which those are, and what is said of them.

Some could not be read by h11; what it disliked is passed on. The others are read, but offer what is not taken here,
or are known to do harm. Rules of this file: no I/O; a message says what was wrong, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

import h11

__all__ = ["RequestRefused", "check_request", "unreadable"]

# h11 quotes what it was sent, at whatever length.
_LONGEST_QUOTE = 200


class RequestRefused(Exception):
    """A request that is answered with ``status`` and this message, and ends its connection."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_request(
    request: h11.Request, max_head_bytes: int, server_names: Sequence[str] = ()
) -> None:
    """Raises ``RequestRefused`` unless an app may have it. No ``server_names``: any ``Host`` will do."""
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode("ascii")
        raise RequestRefused(
            HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
            f"HTTP/{version} is not spoken here; allowed: HTTP/1.1 and HTTP/1.0",
        )
    if request.method == b"CONNECT":
        raise RequestRefused(
            HTTPStatus.NOT_IMPLEMENTED,
            "CONNECT is not offered, for this is no proxy; allowed: the methods of the API",
        )
    if _head_size(request) > max_head_bytes:
        raise _too_long(max_head_bytes)
    if complaint := _complaint_about(request):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, complaint)
    host = next((value for name, value in request.headers if name == b"host"), b"").decode(
        "latin-1"
    )
    if server_names and host not in server_names:
        raise RequestRefused(
            HTTPStatus.NOT_FOUND,
            f"the request's Host is {host!r:.200}; allowed: {', '.join(server_names)}",
        )


def unreadable(status: HTTPStatus, complaint: str, max_head_bytes: int) -> RequestRefused:
    """What h11 could not read. ``complaint``: in its own words."""
    if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return _too_long(max_head_bytes)
    said = complaint[:_LONGEST_QUOTE]
    return RequestRefused(
        status, f"the request cannot be read: {said}; allowed: what RFC 9112 says"
    )


def _too_long(max_head_bytes: int) -> RequestRefused:
    return RequestRefused(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the head of the request, or of a chunk, is too long; allowed: {max_head_bytes} bytes",
    )


def _complaint_about(request: h11.Request) -> str:
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        # Two lengths are how a request is smuggled past a proxy that believes the other one.
        return "the request has both Content-Length and Transfer-Encoding; allowed: one of them"
    if not _has_path(request.target):
        return "the request's target has no path; allowed: a path that begins with /, or a URL with one"
    if any(name == b"upgrade" and _is_websocket(value) for name, value in request.headers):
        return "WebSockets are not offered; allowed: plain requests, with stream true for events"
    return ""


def _head_size(request: h11.Request) -> int:
    """Its bytes as they are usually written. h11 bounds only what is incomplete when it looks."""
    lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    return lines + len(b"%b %b HTTP/1.1\r\n\r\n" % (request.method, request.target))


def _has_path(target: bytes) -> bool:
    """Whether Quart can take it apart: what does not begin with / it reads as a URL, unquoted."""
    path = unquote(target.partition(b"?")[0].decode("ascii"))
    try:
        return path.startswith("/") or bool(urlsplit(path).path)
    except ValueError:
        return False


def _is_websocket(upgrade: bytes) -> bool:
    """As Hypercorn reads it: spaces beyond ASCII are stripped, too."""
    return upgrade.decode("latin-1").strip().lower() == "websocket"
