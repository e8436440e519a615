"""When a request came, under which name, and with what it may carry beside prompt and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ..lora import LoRARequest
from ..timeouts import Timeouts

__all__ = ["Arrival", "PoolingOptions", "RequestOptions"]


class PoolingOptions(TypedDict, total=False):
    """What a request to a pooling model may carry beside its prompt and its parameters: see ``LLM.open_stream``."""

    priority: int
    cache_salt: str | None
    timeouts: Timeouts | None
    arrived_at: float | None
    external_req_id: str | None


class RequestOptions(PoolingOptions, total=False):
    """What any other may carry."""

    lora_request: LoRARequest | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """``at`` is on Trio's clock, ``by_clock`` the same moment on the LLM's own."""

    at: float
    by_clock: float
    timeouts: Timeouts
    external_req_id: str | None
