"""What is to go wrong within vLLM, at the places that correspond to ours: ``inside/faults.py`` names them.

Each replaces one function of vLLM by one that calls it, and raises at its moment.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["FAULTS", "put_in"]

# As ``inside/faults.py`` has it.
_SECOND_REQUEST, _THIRD_OUTPUT, _FIFTH_MESSAGE = 2, 3, 5


def put_in(name: str) -> None:
    """Of ``FAULTS``; before vLLM's loop runs."""

    def fail() -> NoReturn:
        raise RuntimeError(f"the scenario's fault: {name}")

    FAULTS[name](fail)


def _process_one(fail: Callable[[], NoReturn]) -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    make = IncrementalDetokenizer.from_new_request
    arrivals = itertools.count(1)

    def from_new_request(tokenizer: Any, request: Any) -> Any:
        detokenizer = make(tokenizer, request)
        if next(arrivals) == _SECOND_REQUEST:
            _fail_at_third_token(detokenizer, fail)
        return detokenizer

    IncrementalDetokenizer.from_new_request = staticmethod(from_new_request)


def _fail_at_third_token(detokenizer: Any, fail: Callable[[], NoReturn]) -> None:
    update = detokenizer.update

    def failing(new_token_ids: list[int], stop_terminated: bool) -> Any:
        before = detokenizer.num_output_tokens()
        if before < _THIRD_OUTPUT <= before + len(new_token_ids):
            fail()
        return update(new_token_ids, stop_terminated)

    detokenizer.update = failing


def _process_step(fail: Callable[[], NoReturn]) -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    process = OutputProcessor.process_outputs
    messages = itertools.count(1)

    def process_outputs(self: Any, outputs: list[Any], *rest: Any, **more: Any) -> Any:
        if next(messages) == _FIFTH_MESSAGE:
            fail()
        return process(self, outputs, *rest, **more)

    OutputProcessor.process_outputs = process_outputs


def _frame(fail: Callable[[], NoReturn]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

    dump = ChatCompletionStreamResponse.model_dump_json
    num_chunks: Counter[str] = Counter()

    def model_dump_json(self: Any, *rest: Any, **more: Any) -> Any:
        # The first of a stream says only whose turn it is.
        if self.choices and self.choices[0].delta.role is None:
            num_chunks[self.id] += 1
            is_second = list(num_chunks).index(self.id) + 1 == _SECOND_REQUEST
            if is_second and num_chunks[self.id] == _THIRD_OUTPUT:
                fail()
        return dump(self, *rest, **more)

    ChatCompletionStreamResponse.model_dump_json = model_dump_json


def _reader(fail: Callable[[], NoReturn]) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder

    decode = MsgpackDecoder.decode
    messages = itertools.count(1)

    def decode_message(self: Any, frames: Any) -> Any:
        message = decode(self, frames)
        if getattr(message, "outputs", None) and next(messages) == _FIFTH_MESSAGE:
            fail()
        return message

    MsgpackDecoder.decode = decode_message


def _abort(fail: Callable[[], NoReturn]) -> None:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import AsyncMPClient

    send = AsyncMPClient._send_input

    def send_input(self: Any, request_type: Any, *rest: Any) -> Any:
        if request_type == EngineCoreRequestType.ABORT:
            fail()
        return send(self, request_type, *rest)

    AsyncMPClient._send_input = send_input


FAULTS: dict[str, Callable[[Callable[[], NoReturn]], None]] = {
    "process-one": _process_one,
    "process-step": _process_step,
    "frame": _frame,
    "reader": _reader,
    "abort": _abort,
}
