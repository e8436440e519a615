"""How an engine that is one thread and no framework joins a front end: plain sockets, plain waits.

Rules of this file: for programs that only play an engine (``leg_engine.py``, ``compare/puppet_engine.py``). What a real
one does is ``ipc/joining.py``: it hears of a head that goes away while it loads, and has keys.
"""

from __future__ import annotations

import zmq

from ..ipc.codec import decode_as, encode
from ..messages import (
    WIRE_VERSION,
    EngineHandshakeInit,
    EngineReadyResponse,
    engine_identity,
)

__all__ = ["MAX_MODEL_LEN", "Socket", "join", "shake_hands"]

# Over any length that is measured.
MAX_MODEL_LEN = 2**17
_MAX_NUM_SEQS = 8192
_LINGER_MS = 1000
# An engine that is up waits for its front end, and not the other way round.
_RECONNECT_MS = 5

Socket = zmq.SyncSocket


def join(input_address: str, output_address: str) -> tuple[Socket, Socket]:
    """Straight to a front end's two legs: where requests come from, and where outputs go."""
    requests = _connect(zmq.DEALER, input_address, engine_identity(0))
    requests.send(encode(_READY))
    return requests, _connect(zmq.PUSH, output_address)


def shake_hands(address: str, *, is_local: bool = False) -> tuple[Socket, Socket]:
    """As ``join``, with the legs that the head at ``address`` names. ``is_local``: as vLLM's head expects of an engine
    that it has started itself; ours takes either."""
    handshake = _connect(zmq.DEALER, address, engine_identity(0))
    said = {"local": is_local, "headless": not is_local}
    handshake.send(encode({"status": "HELLO", **said}))
    addresses = decode_as(EngineHandshakeInit, handshake.recv(), "INIT").addresses
    legs = join(addresses.inputs[0], addresses.outputs[0])
    handshake.send(encode({"status": "READY", **said}))
    return legs


def _connect(kind: int, address: str, identity: bytes | None = None) -> Socket:
    sock: Socket = zmq.Context.instance().socket(kind)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    for limit in (zmq.SNDHWM, zmq.RCVHWM):
        sock.setsockopt(limit, 0)
    if identity is not None:
        sock.setsockopt(zmq.IDENTITY, identity)
    sock.connect(address)
    return sock


_READY = EngineReadyResponse(
    max_model_len=MAX_MODEL_LEN,
    num_gpu_blocks=_MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
    max_num_seqs=_MAX_NUM_SEQS,
    max_num_batched_tokens=_MAX_NUM_SEQS,
    supports_lora=False,
    vllm_version=WIRE_VERSION,
    instance_id="bench",
    validates_requests=True,
)
