"""The scripted engine's LoRA adapters: as vLLM's engine treats them, with token ids for weights.

Rules of this file: pure. Those that were used least recently make room for others, and are read from their paths
again when a request brings them back. What cannot be read then ends the engine, as it ends vLLM's: the front end
must not let it come to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..lora import LoRARequest
from .script import Script

__all__ = ["ScriptedLoras"]


class ScriptedLoras:
    """``script`` says what is to be found under which path."""

    def __init__(self, script: Script) -> None:
        self._by_path = dict(script.loras)
        self._most = script.max_loras
        # By id, the least recently used first.
        self._held: dict[int, list[int]] = {}
        self._pinned: set[int] = set()
        self.utilities: dict[str, Callable[..., Any]] = {
            "add_lora": self.add_lora,
            "remove_lora": self.remove_lora,
            "list_loras": self.list_loras,
            "pin_lora": self.pin_lora,
        }

    def token_ids_for(self, wire: Any) -> list[int] | None:
        """What a request with this lora_request is answered with; None: it has none. Raises
        ``InvalidRequestError`` if that cannot be read."""
        if wire is None:
            return None
        self.add_lora(wire)
        return self._held[msgspec.convert(wire, LoRARequest).lora_int_id]

    def add_lora(self, wire: Any) -> bool:
        self._refuse_without()
        request = msgspec.convert(wire, LoRARequest)
        number = request.lora_int_id
        held = self._held.get(number)
        if held is None or request.load_inplace:
            held = self._read(request)
        self._held.pop(number, None)
        free = [other for other in self._held if other not in self._pinned]
        if len(self._held) >= self._most and free:
            del self._held[free[0]]
        self._held[number] = held
        return True

    def remove_lora(self, number: int) -> bool:
        self._refuse_without()
        self._pinned.discard(number)
        return self._held.pop(number, None) is not None

    def list_loras(self) -> list[int]:
        self._refuse_without()
        return list(self._held)

    def pin_lora(self, number: int) -> bool:
        self._refuse_without()
        if number in self._held:
            self._pinned.add(number)
        return number in self._pinned

    def _read(self, request: LoRARequest) -> list[int]:
        path = request.lora_path
        if path not in self._by_path:
            raise InvalidRequestError(
                f"Loading lora {request.lora_name} failed: No adapter found for {path}"
            )
        if not self._by_path[path]:
            raise InvalidRequestError("LoRA rank 64 is greater than max_lora_rank 16.")
        return self._by_path[path]

    def _refuse_without(self) -> None:
        if not self._by_path:
            raise InvalidRequestError(
                "LoRA is not enabled. Use --enable-lora to enable LoRA.", parameter="lora_request"
            )
