"""``trioleg trace``: one request, hop by hop and token by token.

The whole leg is the real one: an engine process, the sockets, the link, the mailbox, the framer, our HTTP
connection, and a client that reads. Only the app in the middle is smaller than the server's: it serves this
one request, so that a model without a chat template can be shown, too.

``TraceRecorder`` is told what happens (``runtime/tracer.py``) and puts it down, a ``TokenRow`` for each
token and a ``FrameRow`` for each frame; ``trace_table.py`` shows it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio
from hypercorn import Config

from .config import LLMConfig, ServerConfig
from .errors import TriolegError
from .messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from .output.request_state import ChoiceState
from .outputs import RequestOutput
from .runtime.llm import LLM
from .runtime.opening import open_llm
from .runtime.tracer import FindChoice
from .runtime.unwrap import unwrapped
from .sampling_params import RequestOutputKind, SamplingParams
from .server.connection import serve_connections
from .server.protocol import ChatCompletionRequest
from .server.serve import bind_sockets
from .server.stream import SSE_HEADERS, serve_stream
from .token_pieces import TokenPieces

__all__ = ["FrameRow", "TokenRow", "Trace", "TraceRecorder", "trace_request"]

# Of the scripted engine: far enough apart that each token goes its whole way before the next one.
_STEP_INTERVAL_S = 0.01


@dataclass(slots=True)
class TokenRow:
    """One token. Times are seconds of the monotonic clock; ``frame`` is the number of the one that
    carried it, ``content`` that frame's text if this is the last token in it."""

    place: int
    token_id: int
    piece: str
    step: int
    engine: float
    read: float
    processed: float
    framed: float | None = None
    written: float | None = None
    frame: int | None = None
    content: str | None = None
    held_back: str = ""


@dataclass(slots=True)
class FrameRow:
    """One event of the stream. ``kind``: role, tokens, usage, error or done."""

    number: int
    kind: str
    num_tokens: int
    content: str | None
    finish_reason: str | None
    framed: float
    written: float | None = None


@dataclass(slots=True)
class Trace:
    """A whole request. ``started``: when it was sent, by the clock of the rows."""

    model: str
    engine: str
    prompt_token_ids: list[int]
    started: float
    tokens: list[TokenRow] = field(default_factory=list)
    frames: list[FrameRow] = field(default_factory=list)

    def to_json(self) -> bytes:
        """All of it, as one JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


class TraceRecorder:
    """A ``Tracer`` for one request with one choice."""

    def __init__(self, trace: Trace, pieces: TokenPieces, params: SamplingParams) -> None:
        self._trace = trace
        self._pieces = pieces
        self._params = params
        self._steps = 0
        # Tokens that no frame has carried yet, and frames whose write has not returned.
        self._unframed: list[TokenRow] = []
        self._unwritten: list[FrameRow] = []

    def on_message(self, message: EngineCoreOutputs, received: float, find: FindChoice) -> None:
        processed = time.monotonic()
        self._steps += 1
        stats = message.scheduler_stats
        step = self._steps if stats is None or not stats.step_counter else stats.step_counter
        for output in message.outputs:
            for token_id in output.new_token_ids:
                row = TokenRow(
                    place=len(self._trace.tokens),
                    token_id=token_id,
                    piece=self._pieces.text_of(token_id),
                    step=step,
                    engine=message.timestamp,
                    read=received,
                    processed=processed,
                )
                self._trace.tokens.append(row)
                self._unframed.append(row)
            choice = find(output.request_id)
            if output.new_token_ids:
                held_back = self._held_back(choice, output)
                self._trace.tokens[-1].held_back = held_back

    def _held_back(self, choice: object, output: EngineCoreOutput) -> str:
        if not isinstance(choice, ChoiceState):
            is_hidden = output.finish_reason is FinishReason.STOP
            return "stop token: not part of the text" if is_hidden else ""
        reasons = []
        if choice.pending:
            data = self._pieces.joined_bytes(
                choice.pending, skip_special_tokens=self._params.skip_special_tokens
            )
            reasons.append(f"bytes {data.hex(' ')}: no character yet" if data else "no text yet")
        if choice.held_back:
            reasons.append(f"{choice.held_back!r} may begin a stop string")
        if choice.num_unsent_tokens:
            reasons.append(
                f"interval: {choice.num_unsent_tokens} of {self._params.stream_interval}"
            )
        return "; ".join(reasons)

    def on_frames(self, output: RequestOutput | None, frames: bytes) -> None:
        framed = time.monotonic()
        num_tokens = 0
        if output is not None:
            self._trace.prompt_token_ids = output.prompt_token_ids
            num_tokens = sum(len(one.token_ids) for one in output.outputs)
        for event in frames.split(b"\n\n"):
            if event.startswith(b"data: "):
                row = _frame_row(len(self._trace.frames), event[6:], framed)
                if row.kind == "tokens" and output is not None:
                    row.num_tokens, num_tokens = num_tokens, 0
                    self._assign(row, output.outputs[0].stop_reason)
                self._trace.frames.append(row)
                self._unwritten.append(row)

    def _assign(self, frame: FrameRow, stop_reason: int | str | None) -> None:
        carried, self._unframed = (
            self._unframed[: frame.num_tokens],
            self._unframed[frame.num_tokens :],
        )
        for row in carried:
            row.framed, row.frame = frame.framed, frame.number
        if carried:
            carried[-1].content = frame.content
            if isinstance(stop_reason, str):
                carried[-1].held_back = f"completes the stop string {stop_reason!r}"

    def on_written(self) -> None:
        written = time.monotonic()
        numbers = {frame.number for frame in self._unwritten}
        for frame in self._unwritten:
            frame.written = written
        self._unwritten = []
        for row in reversed(self._trace.tokens):
            if row.frame is not None and row.frame not in numbers:
                break
            if row.frame in numbers:
                row.written = written


def _frame_row(number: int, payload: bytes, framed: float) -> FrameRow:
    if payload == b"[DONE]":
        return FrameRow(number, "done", 0, None, None, framed)
    event = json.loads(payload)
    if "error" in event:
        return FrameRow(number, "error", 0, event["error"]["message"], None, framed)
    if not event["choices"]:
        return FrameRow(number, "usage", 0, json.dumps(event["usage"]), None, framed)
    (choice,) = event["choices"]
    kind = "role" if "role" in choice["delta"] else "tokens"
    content = choice["delta"].get("content")
    return FrameRow(number, kind, 0, content, choice["finish_reason"], framed)


async def trace_request(
    model: str,
    prompt: str | None,
    params: SamplingParams,
    config: LLMConfig,
    *,
    token_ids: list[int] | None = None,
) -> Trace:
    """Serve one request and return its trace.

    ``token_ids``: the engine is the scripted one and says these, one a step; else it is the model's own,
    and ``prompt`` the user's message (or, of a model without a chat template, the text to go on
    with). Raises as ``open_llm`` does, and ``TriolegError`` for a request that is refused.
    """
    with tempfile.TemporaryDirectory(prefix="trioleg-trace-") as folder:
        script = None if token_ids is None else _write_script(Path(folder), token_ids)
        async with open_llm(model, config, script=script) as llm:
            trace = Trace(
                model, "torch" if script is None else "scripted", [], started=time.monotonic()
            )
            llm.tracer = TraceRecorder(trace, llm.tokenizer.pieces, params)
            request = ChatCompletionRequest(
                model=None,
                messages=_prompt(llm, prompt),
                params=params.with_output_kind(RequestOutputKind.DELTA),
                stream=True,
                include_usage=True,
                continuous_usage=False,
                return_token_ids=False,
            )
            async with _serving(llm, request) as port:
                trace.started = time.monotonic()
                await _read_answer(port)
    return trace


def _prompt(llm: LLM, prompt: str | None) -> Any:
    if prompt is None:
        # The scripted engine does not look at it; any token will do.
        return [llm.tokenizer.eos_token_id or 0]
    if llm.tokenizer.chat_template is None:
        return prompt
    return [{"role": "user", "content": prompt}]


def _write_script(folder: Path, token_ids: list[int]) -> Path:
    script = {
        "steps": [[token_id] for token_id in token_ids],
        "step_interval_s": _STEP_INTERVAL_S,
        "first_token_delay_s": _STEP_INTERVAL_S,
        "finish": "length",
        "max_model_len": len(token_ids) + 16,
    }
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    return path


# ---------------------------------------------------------------------------- server and client


@asynccontextmanager
async def _serving(llm: LLM, request: ChatCompletionRequest) -> AsyncIterator[int]:
    """A server of this one request on a port of its own, which is what the block gets."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await _answer(llm, request, send)
            return
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})

    (sock,) = await bind_sockets(ServerConfig(port=0))
    sock.listen(1)
    closing = trio.Event()
    with unwrapped() as body:
        async with trio.open_nursery() as nursery:
            listener = trio.SocketListener(sock)
            await nursery.start(
                lambda task_status: serve_connections(
                    app, Config(), [listener], shutdown=closing, task_status=task_status
                )
            )
            try:
                yield sock.getsockname()[1]
            except BaseException as error:
                body.error = error
                raise
            finally:
                closing.set()


async def _answer(llm: LLM, request: ChatCompletionRequest, send: Any) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]

    async def start(status: int = 200) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})

    try:
        await serve_stream(llm, request, llm.model, start, send)
    except TriolegError as error:
        await start(400)
        await send({"type": "http.response.body", "body": str(error).encode()})


async def _read_answer(port: int) -> None:
    """Read as a client does. Raises ``TriolegError`` for an answer that is no stream."""
    answer = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        async for data in stream:
            answer += data
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise TriolegError(body.decode("utf-8", "replace") or "the server gave no answer")
