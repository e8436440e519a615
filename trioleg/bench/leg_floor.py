"""A program: the least that this language, these sockets and this decoder cost. It serves, and does nothing else.

    python -m trioleg.bench.leg_floor TOKENIZER --port PORT --input ADDRESS --output ADDRESS

One loop over what the engine says: decode the batch, step each request's decoder, frame its text, send. No runtime,
no tasks, no cancelling, no limits, no errors but the process's own: a client that does not read stops everybody, and
what a client asks for is not looked at. It is no server to use, but what a server's cost is measured against.

An engine connects straight to the two addresses that are bound here.
"""

from __future__ import annotations

import argparse
import itertools
import selectors
import socket
import time
from typing import Any

import msgspec
import tokenizers
import zmq
from tokenizers.decoders import DecodeStream

from ..heap import settle_heap
from ..ipc.codec import decode_outputs, encode
from ..messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineSamplingParams,
    engine_identity,
)

__all__ = ["MODEL", "main"]

# In every frame, so it is the same for all who are measured.
MODEL = "bench"

_BACKLOG = 2048
_PIECE_BYTES = 2**16
_HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_UNHEALTHY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_ROLE = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_LAST = b'},"logprobs":null,"finish_reason":"length"}]}\n\n'
_DONE = b"data: [DONE]\n\n"
# What a chat template makes of so few words is about as long.
_PROMPT = list(range(1, 31))


class _Live:
    """A request: where its frames go, its decoder, a frame up to the text, and what goes out before the first."""

    __slots__ = ("client", "decoder", "first", "opening")

    def __init__(self, client: socket.socket, opening: bytes) -> None:
        self.client = client
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.opening = opening
        self.first = _HEAD + _chunk(opening + _ROLE)


class _Floor:
    def __init__(self, tokenizer: str, listener: socket.socket, legs: tuple[Any, Any]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
        self._listener = listener
        self._requests, self._outputs = legs
        self._is_ready = False
        self._ids = itertools.count()
        self._live: dict[str, _Live] = {}
        self._encode = msgspec.json.Encoder().encode
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        watched = (
            (self._listener, self._accept),
            (self._outputs.fileno(), self._take_outputs),
            (self._requests.fileno(), self._hear_engine),
        )
        for source, callback in watched:
            self._selector.register(source, selectors.EVENT_READ, callback)
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)
            # Its descriptor tells only once that something came, and a send may have eaten that.
            self._hear_engine()

    def _hear_engine(self, _source: object = None) -> None:
        while int(self._requests.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._requests.recv_multipart()
            self._is_ready = True

    # ------------------------------------------------------------------ clients

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, self._read)

    def _read(self, client: socket.socket) -> None:
        data = client.recv(_PIECE_BYTES)
        if not data:
            self._selector.unregister(client)
            client.close()
        elif data.startswith(b"GET"):
            client.sendall(_HEALTHY if self._is_ready else _UNHEALTHY)
        else:
            _head, _, body = data.partition(b"\r\n\r\n")
            self._ask(client, msgspec.json.decode(body))

    def _ask(self, client: socket.socket, body: dict[str, Any]) -> None:
        request_id = f"chatcmpl-{next(self._ids):032x}"
        params = EngineSamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)
        request = EngineCoreRequest(
            request_id, _PROMPT, None, params, None, time.time(), None, None, None
        )
        created = int(time.time())
        opening = (
            f'data: {{"id":"{request_id}","object":"chat.completion.chunk","created":{created},'
            f'"model":"{MODEL}","choices":[{{"index":0,"delta":'
        ).encode()
        self._live[request_id] = _Live(client, opening)
        add = EngineCoreRequestType.ADD.value
        self._requests.send_multipart([engine_identity(0), add, encode(request)])

    # ------------------------------------------------------------------ tokens

    def _take_outputs(self, _source: object) -> None:
        while int(self._outputs.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            for output in decode_outputs([self._outputs.recv()]).outputs:
                self._say(output)

    def _say(self, output: EngineCoreOutput) -> None:
        live = self._live[output.request_id]
        step, tokenizer = live.decoder.step, self._tokenizer
        text = "".join([step(tokenizer, one) or "" for one in output.new_token_ids])
        frame = live.opening + b'{"content":' + self._encode(text)
        if output.finish_reason is not None:
            data = _chunk(frame + _LAST) + _chunk(_DONE) + _chunk(b"")
            del self._live[output.request_id]
        else:
            data = _chunk(frame + _END)
        if live.first:
            data, live.first = live.first + data, b""
        live.client.sendall(data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _bind(kind: int, address: str) -> Any:
    sock: Any = zmq.Context.instance().socket(kind)
    for limit in (zmq.SNDHWM, zmq.RCVHWM):
        sock.setsockopt(limit, 0)
    sock.bind(address)
    return sock


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Streams what an engine says, and nothing else.")
    parser.add_argument("tokenizer", help="a tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    legs = _bind(zmq.ROUTER, options.input), _bind(zmq.PULL, options.output)
    with socket.create_server(("127.0.0.1", options.port), backlog=_BACKLOG) as listener:
        floor = _Floor(options.tokenizer, listener, legs)
        # Where the server's memory lies is no part of what it does.
        settle_heap()
        floor.run()


if __name__ == "__main__":
    main()
