"""``trioleg chat``: a conversation in the terminal with a server of the OpenAI chat API.

Rules of this file: synchronous code, httpx2, nothing of the server or the engine.

stdout has the answers and nothing else. Ctrl-C during an answer closes its connection, and a server that
sees its client leave aborts the request in the engine. Ctrl-C at the prompt leaves, as the end of the
input does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import httpx2
from httpx2 import EventSource

from .chat_server import chat_server, open_client
from .errors import InvalidRequestError, TriolegError
from .sampling_params import SamplingParams

__all__ = ["Conversation", "run"]

# A model's text must not steer the terminal: of the control characters only these pass.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
for _allowed in "\n\t":
    del _CONTROLS[ord(_allowed)]


def run(
    model: str | None,
    url: str | None,
    *,
    default_model: str,
    name: str | None = None,
    system: str | None = None,
    sampling: Mapping[str, Any],
) -> bool:
    """The whole command. Raises ``TriolegError``.

    Returns False only if questions were piped in and the last answer did not come whole. Which server:
    see ``chat_server``. ``name`` chooses among its models; the first, if it is None. A Ctrl-C before
    the talk begins leaves as ``KeyboardInterrupt``, with nothing left running.
    """
    # For its checks alone: nobody should wait for a server to start, only to have a number refused.
    SamplingParams(**sampling)
    with chat_server(model, url, default_model) as server:
        if name is not None and name not in server.models:
            raise InvalidRequestError(
                f"--model is {name!r}; allowed at {server.url}: {', '.join(server.models)}"
            )
        with open_client(server.url) as client:
            first = [{"role": "system", "content": system}] if system is not None else []
            model = name or server.models[0]
            return _talk(Conversation(client, model, sampling, first, server.ended))


def _talk(conversation: Conversation) -> bool:
    """Question and answer until the input ends, or Ctrl-C at the prompt."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        import readline  # noqa: F401  (it gives input() editing and a history)

        click.echo(
            f"{conversation.model} at {conversation.client.base_url}. "
            "Ctrl-C stops an answer; here it leaves.",
            err=True,
        )
    went_well = True
    try:
        while (question := _read("> " if by_hand else "")) is not None:
            if question.strip():
                went_well = conversation.ask(question)
    except KeyboardInterrupt:
        went_well = True
    if by_hand:
        click.echo(err=True)
    return went_well or by_hand


def _read(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


class _Failed(Exception):
    """The answer did not come whole; the message says what the server said of it."""


class _Lost(_Failed):
    """The connection failed; the server itself may have ended."""


@dataclass
class Conversation:
    """What was said so far, and the server that says the rest.

    ``sampling`` goes into each request as it is ("temperature", "max_tokens", …). ``ended`` is asked when
    a connection fails: True if the server will not come back.
    """

    client: httpx2.Client
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    ended: Callable[[], bool] = lambda: False

    def ask(self, question: str) -> bool:
        """Streams the answer to stdout; what goes wrong is said on stderr, and the talk goes on.

        A turn that brought no text is taken back, so that the next request does not hold two
        questions in a row; a stopped answer stays as far as it came. True if it came whole. Raises
        ``TriolegError`` if the server has ended for good.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        trouble: _Failed | None = None
        try:
            self._stream(pieces)
        except _Failed as error:
            trouble = error
        if pieces or not trouble:
            click.echo()
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()
        if isinstance(trouble, _Lost) and self.ended():
            raise TriolegError("the server that was started for this talk has ended") from trouble
        if trouble:
            click.secho(trouble, err=True, fg="red")
        return trouble is None

    def _stream(self, pieces: list[str]) -> None:
        """Writes and collects the answer. Raises ``_Failed`` if it did not end as it should."""
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.sampling}
        try:
            with self.client.sse("/v1/chat/completions", method="POST", json=body) as events:
                for piece in _texts(events):
                    pieces.append(piece)
                    click.echo(piece.translate(_CONTROLS), nl=False)
        except KeyboardInterrupt:
            raise _Failed("(stopped)") from None
        except httpx2.ConnectError as error:
            # It was there when the talk began, or there would be none.
            raise _Lost(f"the server is gone ({error}); Ctrl-D leaves") from error
        except httpx2.HTTPError as error:
            raise _Lost(f"the answer was cut off: {error or type(error).__name__}") from error


def _texts(events: EventSource) -> Iterator[str]:
    """The answer's text as it comes. Raises ``_Failed`` for a refusal, an error event, or no end."""
    if not events.response.is_success:
        events.response.read()
        reason = _error_message(events.response.text)
        raise _Failed(reason or f"the server answers with status {events.response.status_code}")
    for event in events:
        if event.data == "[DONE]":
            return
        if message := _error_message(event.data):
            raise _Failed(message)
        if text := _delta(event.data):
            yield text
    raise _Lost("the answer was cut off: the connection ended before it did")


def _error_message(text: str) -> str | None:
    """The message of an OpenAI error object, in a body or an event; None if it is something else."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _delta(text: str) -> str:
    """The new text of a chunk, which may have none (the role, the end, the usage)."""
    try:
        choices = json.loads(text)["choices"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Failed(f"the server sent an event that is no chunk of a chat: {text[:80]}") from None
