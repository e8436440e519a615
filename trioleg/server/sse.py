"""Server-Sent Events: from a ``RequestOutput`` to the bytes of its ``data:`` lines.

Pure. One ``ChatCompletionFramer`` per stream. A stream is: a chunk with the role, then one chunk per
output (its text may be empty: a token whose text is held back still says that it came), the last of
them with ``finish_reason``, then usage if asked for, then ``[DONE]``. Only an output without text,
without a token and with nothing sent before it makes no chunk (a prompt that is being worked on).

What is the same in every chunk of a stream is encoded once. U+2028, U+2029 and U+0085 are escaped:
they are line ends for clients that split with ``str.splitlines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..outputs import CompletionOutput, RequestOutput
from .protocol import completion_id, error_body, usage_of

__all__ = ["DONE", "ChatCompletionFramer", "data_line", "error_event"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data_line(payload: bytes) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + _escaped(payload) + b"\n\n"


def error_event(error: Mapping[str, Any]) -> bytes:
    """The event that tells a client, in mid-stream, what went wrong: openai's clients raise it."""
    return data_line(error_body(error))


def _escaped(payload: bytes) -> bytes:
    # Only inside JSON strings can these characters stand, so replacing their bytes is safe; and a
    # UTF-8 lead byte never occurs in the middle of another character.
    if b"\xe2\x80" in payload or b"\xc2\x85" in payload:
        payload = payload.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        payload = payload.replace(b"\xc2\x85", b"\\u0085")
    return payload


class ChatCompletionFramer:
    """The frames of one streamed chat completion. ``created``: seconds since the epoch."""

    def __init__(self, request_id: str, *, created: int, model: str, include_usage: bool) -> None:
        head = {
            "id": completion_id(request_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + _escaped(_encode(head)[:-1]) + b',"choices":'
        self._include_usage = include_usage
        # With include_usage, every chunk but the last one says that it has none.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._num_tokens: dict[int, int] = {}
        self._prompt_tokens = 0
        self._cached_tokens: int | None = None

    def frames(self, output: RequestOutput) -> bytes:
        """The frames of one output, in one piece; empty if the output has nothing to say."""
        self._prompt_tokens = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached_tokens = output.num_cached_tokens
        return b"".join(self._frames_of(one) for one in output.outputs)

    def abort_frames(self) -> bytes:
        """The finish chunks of a request that somebody aborted."""
        indexes = list(self._num_tokens) or [0]
        return b"".join(self._chunk(i, {}, "abort", None) for i in indexes)

    def last_frames(self) -> bytes:
        """What follows the finish chunks: usage, if asked for, and ``[DONE]``."""
        if not self._include_usage:
            return DONE
        usage = usage_of(self._prompt_tokens, sum(self._num_tokens.values()), self._cached_tokens)
        return self._head + b'[],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def _frames_of(self, one: CompletionOutput) -> bytes:
        index = one.index
        first = index not in self._num_tokens
        if first and not one.text and not one.token_ids and one.finish_reason is None:
            return b""
        role = (
            self._chunk(index, {"role": "assistant", "content": ""}, None, None) if first else b""
        )
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(one.token_ids)
        delta = {"content": one.text}
        return role + self._chunk(index, delta, one.finish_reason, one.stop_reason)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._head + _escaped(_encode([choice])) + self._tail
