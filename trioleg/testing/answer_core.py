"""``AnswerCore``: the scripted engine with an answer for each request.

Rules of this file: synchronous, as the engine is. A request's next step waits until its reader waits: then each step
is a delta of its own, where a real engine's would merge whenever the reader is behind for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.scripted import Script, ScriptedCore
from ..engine.scripted_request import ScriptedRequest
from ..messages import EngineCoreRequest
from .records import Records

__all__ = ["AnswerCore"]

# How long a request rests whose reader is behind.
_LOOK_AGAIN_S = 0.001


class AnswerCore(ScriptedCore):
    """``script`` says how large the engine is."""

    def __init__(self, records: Records, script: Script, **more: Any) -> None:
        super().__init__(script, **more)
        self._records = records

    def script_for(self, request: EngineCoreRequest) -> Script:
        return self._records.answer_for(request.request_id).script(self.ready.max_model_len)

    def is_due(self, request: ScriptedRequest, now: float) -> bool:
        if not super().is_due(request, now):
            return False
        if self._records.reader_waits(request.request_id):
            return True
        request.ready_at = now + _LOOK_AGAIN_S
        return False

    def wait_s(self) -> float | None:
        now = self._clock()
        for request in self._running.values():
            self.is_due(request, now)
        return super().wait_s()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        for request_id in request_ids:
            self._records.told_to_stop(request_id)
