"""Server-Sent Events: from a ``RequestOutput`` to the bytes of its ``data:`` lines.

Pure. One ``ChatCompletionFramer`` per stream. A stream is, for each choice (their chunks may be
mixed): a chunk with the role, then one chunk per output (its text may be empty: a token whose text is
held back still says that it came, with its logprobs), the last of them with ``finish_reason``; then
usage if asked for, then ``[DONE]``. Only an output without text, without a token and with nothing
sent before it for its choice makes no chunk (a prompt that is being worked on).

What is the same in every chunk is encoded once: of a plain chunk only its text is encoded. U+2028,
U+2029 and U+0085 are escaped: they are line ends for clients that split with ``str.splitlines``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..outputs import CompletionOutput, RequestOutput
from .ids import completion_id
from .logprobs import choice_logprobs
from .protocol import error_body, usage_of

__all__ = ["DONE", "KEEP_ALIVE", "ChatCompletionFramer", "data_line", "error_event"]

DONE = b"data: [DONE]\n\n"
# A comment: no client sees it, but every proxy sees that the stream lives.
KEEP_ALIVE = b": keep-alive\n\n"

_ROLE = b'{"role":"assistant","content":""}'
_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'

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


@dataclass(slots=True)
class _Choice:
    """``content``: its chunks' bytes up to the text, which is all that most chunks differ in. ``num_tokens``: framed
    so far."""

    content: bytes
    num_tokens: int = 0
    finished: bool = False


class ChatCompletionFramer:
    """The frames of one streamed chat completion, of ``n`` choices.

    ``created``: seconds since the epoch. ``top_logprobs``: see ``choice_logprobs``. ``include_usage``: one more
    chunk at the end, which counts the prompt once and all choices' tokens; ``continuous_usage``: in every other
    chunk, the prompt and the tokens of *its* choice so far (vLLM's rule). ``return_token_ids``: the prompt's in the
    first chunk of all, the output's in each.
    """

    __slots__ = (
        "_cached_tokens",
        "_choices",
        "_continuous_usage",
        "_head",
        "_include_usage",
        "_n",
        "_plain_end",
        "_prompt_token_ids",
        "_return_token_ids",
        "_tail",
        "_top_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        prompt_token_ids: Sequence[int],
        n: int = 1,
        top_logprobs: int | None = 0,
        include_usage: bool = False,
        continuous_usage: bool = False,
        return_token_ids: bool = False,
    ) -> None:
        head = {
            "id": completion_id(request_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + _escaped(_encode(head)[:-1]) + b',"choices":'
        self._prompt_token_ids = prompt_token_ids
        self._n = n
        self._top_logprobs = top_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._return_token_ids = return_token_ids
        # With include_usage, every chunk but the last one says that it has none.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_end = b"}" + _UNFINISHED + self._tail
        self._choices: dict[int, _Choice] = {}
        self._cached_tokens: int | None = None

    def frames(self, output: RequestOutput) -> bytes:
        """The frames of one output, in one piece; empty if the output has nothing to say."""
        if output.num_cached_tokens is not None:
            self._cached_tokens = output.num_cached_tokens
        outputs = output.outputs
        if len(outputs) == 1:
            return self._frames_of(outputs[0])
        return b"".join([self._frames_of(one) for one in outputs])

    def abort_frames(self) -> bytes:
        """The finish chunks of a request that somebody aborted, for the choices without one."""
        return b"".join(
            self._frames_of(CompletionOutput(index, "", [], "abort"))
            for index in range(self._n)
            if index not in self._choices or not self._choices[index].finished
        )

    def last_frames(self) -> bytes:
        """What follows the finish chunks: usage, if asked for, and ``[DONE]``."""
        if not self._include_usage:
            return DONE
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        return self._head + b"[]" + self._usage(num_tokens) + DONE

    def _frames_of(self, one: CompletionOutput) -> bytes:
        choice = self._choices.get(one.index)
        role = b""
        if choice is None:
            if not one.text and not one.token_ids and one.finish_reason is None:
                return b""
            opening = self._head + b'[{"index":%d,"delta":' % one.index
            choice = _Choice(opening + b'{"content":')
            role = self._role_chunk(opening, choice)
            self._choices[one.index] = choice
        choice.num_tokens += len(one.token_ids)
        text = _encode(one.text)
        if not one.text.isascii():
            text = _escaped(text)
        if one.finish_reason is None and not one.logprobs and not self._return_token_ids:
            if not (role or self._continuous_usage):
                return choice.content + text + self._plain_end
            rest = _UNFINISHED
        else:
            choice.finished = one.finish_reason is not None
            rest = self._rest(one)
        return role + choice.content + text + b"}" + rest + self._tail_of(choice)

    def _role_chunk(self, opening: bytes, choice: _Choice) -> bytes:
        prompt = b""
        if self._return_token_ids and not self._choices:
            prompt = b',"prompt_token_ids":' + _encode(self._prompt_token_ids)
        return opening + _ROLE + _UNFINISHED + prompt + self._tail_of(choice)

    def _rest(self, one: CompletionOutput) -> bytes:
        """A chunk's choice behind the delta."""
        fields: dict[str, Any] = {
            "logprobs": choice_logprobs(one.logprobs, self._top_logprobs),
            "finish_reason": one.finish_reason,
        }
        if one.finish_reason is not None:
            fields["stop_reason"] = one.stop_reason
        if self._return_token_ids:
            fields["token_ids"] = one.token_ids
        return b"," + _escaped(_encode(fields)[1:]) + b"]"

    def _tail_of(self, choice: _Choice) -> bytes:
        return self._usage(choice.num_tokens) if self._continuous_usage else self._tail

    def _usage(self, num_tokens: int) -> bytes:
        usage = usage_of(len(self._prompt_token_ids), num_tokens, self._cached_tokens)
        return b',"usage":' + _encode(usage) + b"}\n\n"
