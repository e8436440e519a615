"""The engine-core wire's bodies, from structs to bytes and back.

Rules of this file: pure (msgspec, ``messages``, ``errors`` and the versions beside it); no socket, no clock. What
comes from the other side is untrusted: whatever its bytes are, a decoder here returns a struct or raises
``WireError`` with what is wrong. Extension types 1 and 2 (pickle and cloudpickle) run code when they are read, so
they are refused unread; type 3 is the raw bytes of an array.

The front end encodes requests and decodes outputs; the engine does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import WireError
from ..messages import (
    ENGINE_CORE_DEAD,
    WIRE_VERSION,
    ArrayData,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReadyResponse,
)
from .versions import check_version, describe_version, outputs_type

__all__ = [
    "OutputEncoder",
    "UndecodableRequest",
    "UtilityCall",
    "decode_abort",
    "decode_as",
    "decode_outputs",
    "decode_ready",
    "decode_request",
    "decode_utility",
    "encode",
    "encode_abort",
    "encode_request",
    "encode_utility",
    "is_engine_dead",
    "make_output_decoder",
]

Frame = bytes | memoryview
T = TypeVar("T")

_RAW_ARRAY = 3
# Smaller arrays travel inside the body (vLLM's VLLM_MSGPACK_ZERO_COPY_THRESHOLD); that includes every
# scalar, which vLLM's reader expects there.
_OWN_FRAME_BYTES = 256
# Where EngineCoreRequest keeps its client_index on the wire.
_CLIENT_INDEX = EngineCoreRequest.__struct_fields__.index("client_index")

# RecursionError is what msgspec raises for a body of absurd depth.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError)


class UndecodableRequest(WireError):
    """An ADD that is not a request. ``request_id`` is None where not even that could be read."""

    def __init__(self, message: str, *, request_id: str | None, client_index: int) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.client_index = client_index


class UtilityCall(msgspec.Struct, array_like=True):
    """UTILITY: one method of the engine by name; the answer goes to ``client_index``."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


def _read_extension(code: int, data: memoryview) -> bytes:
    if code != _RAW_ARRAY:
        raise WireError(
            f"a value of extension type {code} is refused; allowed: {_RAW_ARRAY} (raw array bytes)"
        )
    return bytes(data)


_encoder = msgspec.msgpack.Encoder()
_request = msgspec.msgpack.Decoder(EngineCoreRequest, ext_hook=_read_extension)
_utility = msgspec.msgpack.Decoder(UtilityCall, ext_hook=_read_extension)
_ids = msgspec.msgpack.Decoder(list[str], ext_hook=_read_extension)
_anything = msgspec.msgpack.Decoder(ext_hook=lambda _code, _data: None)


def encode(message: Any) -> bytes:
    """Any struct or plain value as MessagePack."""
    return _encoder.encode(message)


def encode_request(request: EngineCoreRequest) -> bytes:
    """The body of ADD."""
    return _encoder.encode(request)


def encode_abort(request_ids: Sequence[str]) -> bytes:
    """The body of ABORT; an empty list is a probe that changes nothing."""
    return _encoder.encode(list(request_ids))


def encode_utility(client_index: int, call_id: int, method: str, args: Sequence[Any]) -> bytes:
    """The body of UTILITY. ``call_id`` is at least 0: negative ones are the engine's own."""
    return _encoder.encode(UtilityCall(client_index, call_id, method, list(args)))


def _decode(decoder: msgspec.msgpack.Decoder[T], body: Frame, what: str) -> T:
    try:
        return decoder.decode(body)
    except _DECODE_ERRORS as error:
        raise WireError(f"{what} of {len(body)} bytes cannot be decoded: {error}") from error


def decode_as(kind: type[T], body: Frame, what: str) -> T:
    """One body as a struct of type ``kind``; ``what`` names it in the ``WireError``."""
    return _decode(msgspec.msgpack.Decoder(kind, ext_hook=_read_extension), body, what)


def is_engine_dead(frames: Sequence[Frame]) -> bool:
    """True for the death sentinel, an engine's last message on each output leg."""
    return len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD


def decode_ready(body: Frame) -> EngineReadyResponse:
    """An engine's ready response; warns of a version that is not known, but newer.

    Raises ``WireError``, and ``EngineStartError`` for a version that is too old.
    """
    version = decode_as(_ReadyVersion, body, "the engine's ready response").vllm_version
    check_version(version)
    what = f"the engine's ready response ({describe_version(version)})"
    ready = decode_as(EngineReadyResponse, body, what)
    if ready.max_model_len < _LEAST_MODEL_LEN:
        raise WireError(
            f"{what} says max_model_len {ready.max_model_len}; allowed: {_LEAST_MODEL_LEN} and more"
        )
    return ready


# A prompt has a token.
_LEAST_MODEL_LEN = 1


class _ReadyVersion(msgspec.Struct):
    """What is looked at first, since all else depends on it."""

    vllm_version: str = ""


def make_output_decoder(vllm_version: str) -> Callable[[Sequence[Frame]], EngineCoreOutputs]:
    """``decode_outputs`` for the messages of an engine of that version.

    Made once for each engine; by message, no version is looked at any more.
    """
    decoder = msgspec.msgpack.Decoder(outputs_type(vllm_version), ext_hook=_read_extension)
    what = f"a message of the output leg ({describe_version(vllm_version)})"

    def decode(frames: Sequence[Frame]) -> EngineCoreOutputs:
        if not frames:
            raise WireError("a message of the output leg has no frames; it needs at least a body")
        return _decode(decoder, frames[0], what)

    return decode


_decode_own = make_output_decoder(WIRE_VERSION)


def decode_outputs(frames: Sequence[Frame]) -> EngineCoreOutputs:
    """One message of our own engines' output leg: the body, and perhaps frames with arrays behind it.

    An array that travels in a frame of its own stays what the body says of it: ``[dtype, shape,
    index]``, where index counts the message's frames from the body, 0. Test for ``is_engine_dead``
    first. Raises ``WireError``.
    """
    return _decode_own(frames)


def decode_request(body: Frame) -> EngineCoreRequest:
    """The body of ADD. Raises ``UndecodableRequest``, with the id and the client if they are there.

    The caller can then answer that one request, where a plain error would leave its client waiting.
    """
    try:
        return _decode(_request, body, "an ADD")
    except WireError as error:
        request_id, client_index = _read_return_address(body)
        raise UndecodableRequest(
            str(error), request_id=request_id, client_index=client_index
        ) from error


def _read_return_address(body: Frame) -> tuple[str | None, int]:
    try:
        fields = _decode(_anything, body, "an ADD")
    except WireError:
        return None, 0
    if not (isinstance(fields, list) and fields and isinstance(fields[0], str)):
        return None, 0
    client_index = fields[_CLIENT_INDEX] if len(fields) > _CLIENT_INDEX else 0
    return fields[0], client_index if isinstance(client_index, int) else 0


def decode_abort(body: Frame) -> list[str]:
    """The body of ABORT. Raises ``WireError``."""
    return _decode(_ids, body, "an ABORT")


def decode_utility(body: Frame) -> UtilityCall:
    """The body of UTILITY. Raises ``WireError``."""
    return _decode(_utility, body, "a UTILITY call")


class OutputEncoder:
    """Encodes a step's outputs into buffers that the caller owns and uses again.

    An array (``ArrayData``) of 256 bytes or more is not copied: its memory becomes a frame of its own.
    """

    def __init__(self) -> None:
        self._frames: list[Frame | bytearray] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode_into(self, outputs: EngineCoreOutputs, buffer: bytearray) -> list[Frame | bytearray]:
        """The message's frames; the first *is* ``buffer``, resized to the body, the others are arrays.

        Raises ``BufferError`` if somebody (ZeroMQ, say) still holds the buffer's memory.
        """
        frames: list[Frame | bytearray] = [buffer]
        self._frames = frames
        try:
            self._encoder.encode_into(outputs, buffer)
        finally:
            self._frames = []
        return frames

    def _encode_array(self, value: Any) -> msgspec.msgpack.Ext | int:
        """An array's bytes, or the number of the frame that has them."""
        if not isinstance(value, ArrayData):
            raise NotImplementedError(f"{type(value).__name__} has no form on this wire")
        if memoryview(value.buffer).nbytes < _OWN_FRAME_BYTES:
            return msgspec.msgpack.Ext(_RAW_ARRAY, value.buffer)
        self._frames.append(value.buffer)
        return len(self._frames) - 1
