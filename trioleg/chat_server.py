"""The server that ``trioleg chat`` talks with: one that runs already, or one of its own.

Rules of this file: synchronous, httpx2 and the standard library. A server that is started here runs under
the guardian (``ipc/guardian.py``), in a session of its own: Ctrl-C in the terminal is for the chat alone,
and a chat that is killed leaves nothing behind.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import httpx2

from .errors import EngineStartError, InvalidRequestError, TriolegError

__all__ = ["DEFAULT_URL", "Server", "chat_server", "find_models", "open_client", "own_server"]

DEFAULT_URL = "http://127.0.0.1:8000"

# A server answers a connection at once or is not there; a read has no bound, since a queue or a long
# prompt is a silence too, and Ctrl-C ends it.
_TIMEOUT = httpx2.Timeout(5.0, read=None)
_LOOK_TIMEOUT = 2.0

_GUARDIAN = Path(__file__).with_name("ipc") / "guardian.py"
# What our own server may take to end: its streams are cut by then, and its engine has 5 s.
_STOP_S = 10.0
# Its last words are in the pipe when it is gone; only a process that left its group could hold that open.
_LAST_WORDS_S = 1.0
# A server that died closes its connections first; its guardian, which tidies up, ends a moment later.
_END_SEEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has answered. ``ended``: True if it is ours and its process is over.

    Ask ``ended`` only when the server has failed: with one of our own that lives it takes a second.
    """

    url: str
    models: list[str]
    ended: Callable[[], bool] = lambda: False


@contextmanager
def chat_server(model: str | None, url: str | None, default_model: str) -> Iterator[Server]:
    """A server that has a model, for as long as the block runs.

    ``url`` None: the server at ``DEFAULT_URL``, if it has ``model`` (or any, if that is None); else one
    that is started with ``model`` or ``default_model``. Raises ``TriolegError``.
    """
    if url is not None:
        yield _server_at(_base_url(url))
    elif server := _default_server(model):
        yield server
    else:
        with own_server(model or default_model) as own:
            yield own


def _server_at(url: str) -> Server:
    names = find_models(url)
    if not names:
        raise TriolegError(f"the server at {url} serves no model")
    return Server(url, names)


def _default_server(model: str | None) -> Server | None:
    """None if nothing that has ``model`` answers there: whatever else has the port is no trouble."""
    try:
        server = _server_at(DEFAULT_URL)
    except TriolegError:
        return None
    return server if model is None or model in server.models else None


def _base_url(url: str) -> str:
    """``url`` without the ``/v1`` that a base_url of OpenAI's client ends in: our paths begin with it."""
    try:
        parts = httpx2.URL(url)
        good = parts.scheme in {"http", "https"} and parts.host and not parts.query
    except httpx2.InvalidURL:
        good = False
    if not good:
        raise InvalidRequestError(
            f"--url is {url!r}, which is no URL of a server; allowed: http or https, a host, "
            "perhaps a port and a path, such as http://127.0.0.1:8000/v1",
            parameter="--url",
        )
    return url.rstrip("/").removesuffix("/v1")


def open_client(url: str) -> httpx2.Client:
    """A client for the server at ``url``; the caller closes it. A proxy is only for other machines."""
    here = httpx2.URL(url).host in {"127.0.0.1", "localhost", "::1"}
    return httpx2.Client(base_url=url, timeout=_TIMEOUT, trust_env=not here)


def find_models(url: str) -> list[str]:
    """The names of the models that the server at ``url`` has.

    Raises ``TriolegError`` if none can be reached there, or if it is no server of the OpenAI API.
    """
    try:
        with open_client(url) as client:
            answer = client.get("/v1/models", timeout=_LOOK_TIMEOUT)
    except (httpx2.ProtocolError, httpx2.DecodingError) as error:
        raise _no_api(url, str(error)) from error
    except httpx2.TransportError as error:
        reason = error or type(error).__name__
        raise TriolegError(f"the server at {url} cannot be reached: {reason}") from error
    if not answer.is_success:
        raise _no_api(url, f"GET /v1/models has status {answer.status_code}")
    try:
        return [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_api(url, "GET /v1/models brings no list of models") from error


def _no_api(url: str, reason: str) -> TriolegError:
    return TriolegError(f"what is at {url} answers, but not as the OpenAI API does: {reason}")


@contextmanager
def own_server(model: str) -> Iterator[Server]:
    """Starts ``trioleg serve`` on a free port, and waits until it is ready. Leaving the block ends it.

    Raises ``EngineStartError`` if it ends before it is ready; its own words are on stderr then.
    """
    click.echo(f"starting a server with {model} for this talk", err=True)
    serve = [sys.executable, "-m", "trioleg", "serve", model, "--port=0", "--log-level=warning"]
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARDIAN, f"--stop-timeout={_STOP_S}", "--", *serve],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=[guardian.stderr, found], daemon=True)
    listener.start()
    with guardian:
        try:
            url = found.get()
            if url is None:
                raise EngineStartError("the server ended before it was ready; why stands above")
            yield Server(url, find_models(url), functools.partial(_has_ended, guardian))
        finally:
            _end(guardian)
            listener.join(_LAST_WORDS_S)


def _listen(output: IO[str], found: queue.SimpleQueue[str | None]) -> None:
    """Finds the URL of the ready line, or None at the end; the rest goes on to our stderr."""
    from .serving import READY_LINE

    ready = None
    for line in output:
        if ready is None and (ready := READY_LINE.match(line)):
            found.put(ready["url"])
        elif not line.startswith("curl "):
            click.echo(line, err=True, nl=False)
    found.put(None)


def _has_ended(guardian: subprocess.Popen[str]) -> bool:
    try:
        guardian.wait(_END_SEEN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(guardian: subprocess.Popen[str]) -> None:
    """Through the guardian; if that was killed, the group whose number it gave first."""
    guardian.terminate()
    guardian.wait()
    assert guardian.stdout is not None
    reports = guardian.stdout.read().split()
    if "ended" not in reports and "started" in reports:
        with suppress(ProcessLookupError):
            os.killpg(int(reports[reports.index("started") + 1]), signal.SIGKILL)
