"""What is to go wrong in a leg of ours, by name: bugs that we do not have, put in before its loop starts.

A fault is a name of the shared core, or of the leg, that is replaced by one that fails once, with ``RuntimeError`` and
what it is called. Requests and streams are counted by their order of arrival, messages are those with outputs.

    process-one   the second request, while its third token is made into text
    process-step  a step as a whole, outside of the loop over its outputs, at the fifth message
    frame         the second stream, while its third output is made into its ``data:`` line
    reader        the task that reads the socket, when it has received the fifth message
    abort         every ABORT, while it is encoded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from ...ipc.codec import decode_outputs, is_engine_dead
from ...output import request_state
from ...output.detokenizer import make_detokenizer
from ...output.processor import OutputProcessor
from ...server.sse import ChatCompletionFramer

__all__ = ["FAULTS", "PutInReader", "put_in"]

_VICTIM, _TOKEN, _OUTPUT, _MESSAGE = 2, 3, 3, 5

Frames: TypeAlias = Sequence[bytes | memoryview]
# Has the reading task call the function with each message that it has received.
PutInReader: TypeAlias = Callable[[Callable[[Frames], None]], None]


def put_in(name: str, reader: PutInReader, aborters: Sequence[ModuleType]) -> None:
    """Replace what fails, for the rest of the process. ``aborters``: the modules that have ``encode_abort``.

    Raises ``ValueError`` for a name that is none of ``FAULTS``.
    """
    if name not in FAULTS:
        raise ValueError(f"fault is {name!r}; allowed: {', '.join(FAULTS)}")
    fault = _Fault(name)
    if name == "reader":
        reader(fault.at_message)
    elif name == "abort":
        for module in aborters:
            vars(module)["encode_abort"] = fault.fail
    else:
        _OF_THE_CORE[name](fault)


class _Fault:
    """One fault, and whether it has struck."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_struck = False
        self._num_messages = 0

    def fail(self, *_arguments: object) -> NoReturn:
        raise RuntimeError(f"the scenario's fault: {self._name}")

    def strike(self, *, now: bool) -> None:
        """Once, if it is time."""
        if now and not self._has_struck:
            self._has_struck = True
            self.fail()

    def at_message(self, frames: Frames) -> None:
        if not is_engine_dead(frames) and decode_outputs(frames).outputs:
            self.note_message()

    def note_message(self) -> None:
        self._num_messages += 1
        self.strike(now=self._num_messages == _MESSAGE)


def _process_one(fault: _Fault) -> None:
    made, make = 0, make_detokenizer

    def make_failing(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        detokenizer = make(*arguments)
        return _Failing(detokenizer, fault) if made == _VICTIM else detokenizer

    vars(request_state)["make_detokenizer"] = make_failing


class _Failing:
    """A detokenizer that fails."""

    def __init__(self, inner: Any, fault: _Fault) -> None:
        self._inner = inner
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        self._fault.strike(now=self._inner.num_output_tokens + len(token_ids) >= _TOKEN)
        stop: str | None = self._inner.update(token_ids, stop_terminated)
        return stop


def _process_step(fault: _Fault) -> None:
    process = OutputProcessor.process

    def process_failing(self: OutputProcessor, outputs: Any, **more: Any) -> Any:
        outputs = list(outputs)
        if outputs:
            # A slice is a message, but for batches larger than any that a fault is played with.
            fault.note_message()
        return process(self, outputs, **more)

    _replace(OutputProcessor, "process", process_failing)


def _frame(fault: _Fault) -> None:
    opened, victim, num_outputs = 0, None, 0
    make, frames = ChatCompletionFramer.__init__, ChatCompletionFramer.frames

    def make_noting(self: ChatCompletionFramer, *arguments: Any, **more: Any) -> None:
        nonlocal opened, victim
        opened += 1
        victim = self if opened == _VICTIM else victim
        make(self, *arguments, **more)

    def frames_failing(self: ChatCompletionFramer, output: Any) -> bytes:
        nonlocal num_outputs
        num_outputs += self is victim
        fault.strike(now=num_outputs == _OUTPUT)
        return frames(self, output)

    _replace(ChatCompletionFramer, "__init__", make_noting)
    _replace(ChatCompletionFramer, "frames", frames_failing)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


_OF_THE_CORE: dict[str, Callable[[_Fault], None]] = {
    "process-one": _process_one,
    "process-step": _process_step,
    "frame": _frame,
}
FAULTS = (*_OF_THE_CORE, "reader", "abort")
