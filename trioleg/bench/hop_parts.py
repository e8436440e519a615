"""Each hop of the leg taken alone: what one costs, on the objects that engine and server use.

Everything that a change of the product's insides could touch is in this file. As in the whole, a step comes, and then
a time in which nothing does: a hop that is run in a tight loop has its code and data in the caches, and looks half
as dear as it is. In a step each hop does all of its tokens before the next one has its turn, and between two of them
the clock of this thread is read; what that takes is measured, and taken off.

    encode      OutputEncoder.encode_into, a message a step
    send        OutputSender, from hand_on in another thread to ZeroMQ's hands: encode is taken off
    receive     ZmqSocket.recv_multipart, parked before each message, so with the event loop's turns that this takes
    decode      make_output_decoder, a message a step
    detokenize  IncrementalDetokenizer.update and take, a token
    process     OutputProcessor.process into a sink that only keeps: detokenize is taken off
    put         Mailbox.put, while the stream's task waits: its outlet is asked, and sees that the connection is free
    frame       ChatCompletionFramer.frames
    write       Burst, and DirectBody.write of real connections: Http1, ClientConnection, the kernel

A stream whose client does not keep up, or whose server has no direct way, goes another way, which is measured aside:

    merge       Mailbox.put and take, a token, with nobody parked
    wake        RequestStream.receive, parked, until it has what put brought: merge, and the turns of an event loop in
                which nobody is woken, are taken off

What belongs to no hop is only in the whole: ``serve_stream``'s own lines, the link's counting, and what it costs that
two threads share an interpreter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio
import zmq

from ..config import LLMConfig
from ..engine.output_sender import OutputSender
from ..ipc.codec import OutputEncoder, encode, make_output_decoder
from ..ipc.sockets import ZmqSocket, close_sockets, make_context, make_socket
from ..messages import WIRE_VERSION, EngineCoreOutputs
from ..output.detokenizer import make_detokenizer
from ..output.processor import OutputProcessor
from ..output.request_state import OutputSink
from ..output.submission import Submission, make_submission
from ..outputs import PoolingRequestOutput, RequestOutput
from ..runtime.burst import Burst
from ..runtime.mailbox import Mailbox
from ..runtime.request_stream import RequestStream
from ..sampling_params import RequestOutputKind, SamplingParams
from ..server.http1 import DirectBody
from ..server.sse import ChatCompletionFramer
from ..tokenizer import Tokenizer
from .hop_engine import step_message
from .hop_leg import Steps, cpu_of_steps

__all__ = ["ASIDE", "HOPS", "Work", "measure_hops"]

HOPS = (
    "encode",
    "send",
    "receive",
    "decode",
    "detokenize",
    "process",
    "put",
    "frame",
    "write",
)
# On no token's way while its client keeps up.
ASIDE = ("merge", "wake")

Outlet: TypeAlias = Callable[[RequestOutput], bool]

_PARAMS = SamplingParams(max_tokens=2**20, output_kind=RequestOutputKind.DELTA)
_MAX_MODEL_LEN = 2**21
# Empty laps, from which is learned what a lap costs by itself.
_CALIBRATIONS = 200
_MAX_BYTES = LLMConfig().mailbox_max_bytes


class Work:
    """What goes down the leg: ``token_ids``, a list a step, an id a stream; every stream says the text from another
    place on. ``steps``: how they follow each other where time matters."""

    def __init__(self, tokenizer: Tokenizer, text_ids: Sequence[int], batch: int, steps: Steps):
        self.tokenizer = tokenizer
        self.prompt_token_ids = list(text_ids[:8])
        self.batch = batch
        self.steps = steps
        self.token_ids = [
            [text_ids[(step + 7 * stream) % len(text_ids)] for stream in range(batch)]
            for step in range(steps.count)
        ]
        self.request_ids = [f"0123456789ab-{stream}" for stream in range(batch)]

    @property
    def num_tokens(self) -> int:
        return self.batch * self.steps.count

    def messages(self) -> list[EngineCoreOutputs]:
        return [step_message(self.request_ids, one) for one in self.token_ids]

    def submissions(self, sinks: Sequence[OutputSink]) -> list[Submission]:
        """Requests as the front end makes them, one for each stream."""
        pairs = zip(self.request_ids, sinks, strict=True)
        return [
            make_submission(
                request_id,
                self.prompt_token_ids,
                _PARAMS,
                self.tokenizer,
                max_model_len=_MAX_MODEL_LEN,
                max_logprobs=0,
                sink=sink,
            )
            for request_id, sink in pairs
        ]


async def measure_hops(work: Work, bodies: Sequence[DirectBody]) -> dict[str, float]:
    """Microseconds a token of each hop. ``bodies``: of open streams, as many as a step has tokens."""
    took = await _measure_apart(work, bodies)
    took["send"] = await _send(work) - took["encode"]
    took["receive"] = await _receive(work)
    took["process"] -= took["detokenize"]
    took["wake"] -= took["merge"] + took["idle turns"]
    return {hop: took[hop] / 1000 / work.num_tokens for hop in (*HOPS, *ASIDE)}


class _Laps:
    """Processor time of this thread, from one lap to the next."""

    def __init__(self) -> None:
        self._took: Counter[str] = Counter()
        self._count: Counter[str] = Counter()
        self._last = 0
        self.start()
        for _ in range(_CALIBRATIONS):
            self.end("nothing")

    def start(self) -> None:
        self._last = time.thread_time_ns()

    def end(self, name: str) -> None:
        now = time.thread_time_ns()
        self._took[name] += now - self._last
        self._count[name] += 1
        self._last = time.thread_time_ns()

    def results(self) -> dict[str, float]:
        """Nanoseconds, less what it takes to end a lap."""
        own = self._took["nothing"] / _CALIBRATIONS
        return {name: took - self._count[name] * own for name, took in self._took.items()}


async def _measure_apart(work: Work, bodies: Sequence[DirectBody]) -> dict[str, float]:
    """The hops that need no other thread."""
    laps = _Laps()
    parts = _Parts(work, bodies, laps)
    async with trio.open_nursery() as nursery:
        for stream, outlet in parts.streams:
            nursery.start_soon(_read, stream, outlet)
        await _two_turns()
        for message, interval in zip(work.messages(), work.steps.intervals(), strict=True):
            await parts.step(message)
            await trio.sleep(interval)
        nursery.cancel_scope.cancel(reason="all has been read")
    return laps.results()


async def _read(stream: RequestStream, outlet: Outlet | None) -> None:
    with stream.serving(outlet):
        while True:
            await stream.receive()


class _Parts:
    """The objects of every hop, of as many streams as a step has tokens."""

    def __init__(self, work: Work, bodies: Sequence[DirectBody], laps: _Laps) -> None:
        ids = work.request_ids
        self._laps = laps
        self._encoder, self._buffer = OutputEncoder(), bytearray()
        self._decode = make_output_decoder(WIRE_VERSION)
        self._sinks = [_Kept() for _ in ids]
        self._processor = OutputProcessor()
        for submission in work.submissions(self._sinks):
            self._processor.add_request(submission.state)
        self._detokenizers = [
            make_detokenizer("fast", work.tokenizer, work.prompt_token_ids, _PARAMS) for _ in ids
        ]
        self._offered, self._unread, self._awaited = (_mailboxes(len(ids)) for _ in range(3))
        # With their outlets; those who wait without one are woken.
        self.streams: list[tuple[RequestStream, Outlet | None]] = [
            *zip(_streams(work, self._offered), map(_outlet, bodies), strict=True),
            *((stream, None) for stream in _streams(work, self._awaited)),
        ]
        self._framers = [_framer(work, one) for one in ids]
        self._bodies = bodies
        self._burst = Burst()

    async def step(self, message: EngineCoreOutputs) -> None:
        """Every hop of one step, each of which is a lap."""
        laps = self._laps
        laps.start()
        self._encoder.encode_into(message, self._buffer)
        laps.end("encode")
        body = bytes(self._buffer)
        laps.start()
        decoded = self._decode([body])
        laps.end("decode")
        self._processor.process(decoded.outputs, timestamp=decoded.timestamp, now=decoded.timestamp)
        laps.end("process")
        self._detokenize([one.new_token_ids for one in message.outputs])
        laps.end("detokenize")
        outputs = [sink.take() for sink in self._sinks]
        laps.start()
        _put(self._offered, outputs)
        laps.end("put")
        frames = [framer.frames(one) for framer, one in zip(self._framers, outputs, strict=True)]
        laps.end("frame")
        self._write(frames)
        laps.end("write")
        _put(self._unread, outputs)
        for mailbox in self._unread:
            mailbox.take()
        laps.end("merge")
        _put(self._awaited, outputs)
        await _two_turns()
        laps.end("wake")
        await _two_turns()
        laps.end("idle turns")

    def _write(self, frames: Sequence[bytes]) -> None:
        self._burst.open()
        for body, piece in zip(self._bodies, frames, strict=True):
            self._burst.add(body.write, piece)
        self._burst.flush()

    def _detokenize(self, token_ids: Sequence[list[int]]) -> None:
        for detokenizer, one in zip(self._detokenizers, token_ids, strict=True):
            detokenizer.update(one, False)
            detokenizer.take(everything=False)


class _Kept:
    """A sink that keeps what it gets until it is taken."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput) -> bool:
        assert isinstance(output, RequestOutput), "nobody asked for an embedding"
        self._output = output
        return True

    def take(self) -> RequestOutput:
        assert self._output is not None, "every step has an output of every stream"
        return self._output


def _mailboxes(count: int) -> list[Mailbox]:
    return [Mailbox(aggregate=True, max_bytes=_MAX_BYTES) for _ in range(count)]


def _streams(work: Work, mailboxes: Sequence[Mailbox]) -> list[RequestStream]:
    pairs = zip(work.submissions(mailboxes), mailboxes, strict=True)
    return [RequestStream(submission, box, on_end=lambda *_: None) for submission, box in pairs]


def _outlet(body: DirectBody) -> Outlet:
    """Takes an output where ``serve_stream``'s would, and does nothing with it."""
    return lambda _: body.is_free


def _framer(work: Work, request_id: str) -> ChatCompletionFramer:
    return ChatCompletionFramer(
        request_id,
        created=int(time.time()),
        model="smollm2-135m",
        prompt_token_ids=work.prompt_token_ids,
    )


def _put(mailboxes: Sequence[Mailbox], outputs: Sequence[RequestOutput]) -> None:
    for mailbox, output in zip(mailboxes, outputs, strict=True):
        mailbox.put(output)


async def _two_turns() -> None:
    """Whoever was woken has run and is parked again: they may come behind us in the first turn."""
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def _legs() -> AsyncIterator[tuple[ZmqSocket, ZmqSocket]]:
    """A PUSH and the PULL that it is connected to, as engine and front end have them."""
    context = make_context()
    pull = ZmqSocket(make_socket(context, zmq.PULL))
    push = ZmqSocket(make_socket(context, zmq.PUSH))
    try:
        pull.raw.bind("tcp://127.0.0.1:*")
        push.raw.connect(bytes(pull.raw.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
        push.send_multipart([b"connected"])
        await pull.recv_multipart()
        yield push, pull
    finally:
        await close_sockets(context, [push, pull], linger=0.0)  # noqa: ASYNC102 - it shields itself


async def _send(work: Work) -> int:
    """With encoding, since the sender does both."""
    messages = work.messages()
    async with _legs() as (push, _), trio.open_nursery() as nursery:
        sender = OutputSender([push], on_client_behind=lambda _: None)
        nursery.start_soon(sender.run)
        cpu = await cpu_of_steps(lambda number: sender.hand_on(0, messages[number]), work.steps)
        sender.finish()
    return cpu.front_end


async def _receive(work: Work) -> int:
    bodies = [encode(message) for message in work.messages()]

    async def read() -> None:
        while True:
            await pull.recv_multipart()

    async with _legs() as (push, pull), trio.open_nursery() as nursery:
        nursery.start_soon(read)
        cpu = await cpu_of_steps(lambda number: push.raw.send(bodies[number]), work.steps)
        nursery.cancel_scope.cancel(reason="all has been read")
    return cpu.front_end
