"""``IncomingRequest``: what a request brings beside its body, and its body within its time.

A request's time runs from its headers, so reading a slow body counts. Until the body is there, with the
timeouts that it may name, the header's bound and the server's own defaults hold.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from ..errors import DeadlineExceeded, InvalidRequestError
from ..runtime.arrival import PoolingOptions, RequestOptions
from ..runtime.deadlines import until
from ..timeouts import Timeouts
from .embeddings import EmbeddingRequest
from .protocol import ChatCompletionRequest

__all__ = ["FromHeaders", "IncomingRequest", "pooling_options", "request_options"]

TIMEOUT_HEADER = "X-Request-Timeout"

# No sign, no exponent, no infinity: what people write. A billion seconds are 30 years.
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
# A client's id for its request is a few dozen characters; a longer one is neither echoed nor logged.
_MAX_REQUEST_ID = 256
# A refused request's body that is waited for: what comes in one or two packets, right behind its head.
_SMALL_BODY = 2**16
_SMALL_BODY_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class FromHeaders:
    """``at``: when the headers came, on Trio's clock. ``total``: the header's bound, in seconds.
    ``external_req_id``: the client's own name for the request."""

    at: float
    total: float | None = None
    external_req_id: str | None = None


class IncomingRequest(TrioRequest):
    """A request that knows when its headers came: it is made at that moment."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.arrived_at = trio.current_time()
        self.body_is_wanted = trio.Event()

    @property
    def waits_to_be_asked(self) -> bool:
        """The client sends its body only when it is wanted."""
        return self.headers.get("Expect", "").strip().lower() == "100-continue"

    @property
    def external_req_id(self) -> str | None:
        """``X-Request-Id``, if it can be shown to people. Never a key of ours."""
        request_id = self.headers.get("X-Request-Id")
        if not request_id or len(request_id) > _MAX_REQUEST_ID or not request_id.isprintable():
            return None
        return request_id

    def arrival(self) -> FromHeaders:
        """Raises ``InvalidRequestError`` naming ``X-Request-Timeout``."""
        return FromHeaders(self.arrived_at, self._total(), self.external_req_id)

    def _total(self) -> float | None:
        values = self.headers.getlist(TIMEOUT_HEADER)
        if not values:
            return None
        text = ", ".join(values)
        if not _SECONDS.fullmatch(text) or not float(text):
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} is {text!r:.60}; allowed: seconds above 0 and below 1000000000, "
                "in digits, as 30 or 2.5",
                parameter=TIMEOUT_HEADER,
            )
        return float(text)

    async def body_within(self, arrival: FromHeaders, defaults: Timeouts) -> bytes:
        """The whole body. Raises ``DeadlineExceeded`` if it takes too long, and Quart's refusals."""
        timeouts = Timeouts(total=arrival.total).or_else(defaults)
        deadline, overdue = until(timeouts, arrival.at)
        with trio.move_on_at(deadline):
            return await self._body()
        raise DeadlineExceeded(overdue)

    async def drop_small_body(self) -> None:
        """For a refusal that does not need the body: a small one is on its way, and if it is taken, the connection
        can be used again. A long one is not waited for."""
        is_small = 0 < (self.content_length or 0) <= _SMALL_BODY
        if is_small and not self.waits_to_be_asked:
            with trio.move_on_after(_SMALL_BODY_TIMEOUT), suppress(HTTPException):
                await self._body()

    async def _body(self) -> bytes:
        limit = self.max_content_length
        if limit is not None and (self.content_length or 0) > limit:
            raise RequestEntityTooLarge
        self.body_is_wanted.set()
        return await self.get_data(cache=False, as_text=False, parse_form_data=False)


def request_options(
    chat: ChatCompletionRequest, arrival: FromHeaders | None = None
) -> RequestOptions:
    """What ``LLM.open_stream`` is told beside prompt and parameters. ``arrival`` None: it comes now."""
    return {**pooling_options(chat, arrival), "lora_request": chat.lora_request}


def pooling_options(
    asked: ChatCompletionRequest | EmbeddingRequest, arrival: FromHeaders | None = None
) -> PoolingOptions:
    """As ``request_options``, for ``LLM.embed``."""
    options = PoolingOptions(
        priority=asked.priority, cache_salt=asked.cache_salt, timeouts=asked.timeouts
    )
    if arrival is not None:
        totals = [one for one in (asked.timeouts.total, arrival.total) if one is not None]
        options["timeouts"] = Timeouts(
            first_token=asked.timeouts.first_token, total=min(totals, default=None)
        )
        options["arrived_at"] = arrival.at
        options["external_req_id"] = arrival.external_req_id
    return options
