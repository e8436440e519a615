"""What goes wrong, as a response and in the log.

Rules of this file: an error of ours (``protocol`` knows them) is an answer, and its request's ending is logged
where it ends; anything else is a bug: the client is told that there is one, and the log has its traceback, once.
Nothing is lost to a cancel that comes at the same time, and of a group of errors one is answered.
"""

from __future__ import annotations

import logging
import math

import msgspec
from quart import Response
from werkzeug.exceptions import HTTPException

from ..errors import (
    DeadlineExceeded,
    EngineDeadError,
    EngineUnavailableError,
    OverloadedError,
    RequestAborted,
)
from ..runtime.health import Health
from ..runtime.unwrap import errors_in, winner_of
from .protocol import error_body, error_of, is_expected

__all__ = ["error_response", "json_response", "one_error", "set_retry_after"]

_log = logging.getLogger("trioleg.server")


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status=status, content_type="application/json")


def error_response(error: Exception, health: Health, partial: bytes | None = None) -> Response:
    """An error as a response. ``health``: the LLM's, which says whether another engine comes after a dead
    one; ``partial``: the JSON of what had been generated before it."""
    status, fields = error_of(error)
    if partial is not None:
        fields["partial"] = msgspec.Raw(partial)
    response = json_response(error_body(fields), status)
    if isinstance(error, EngineUnavailableError | OverloadedError):
        set_retry_after(response, error.retry_after)
    elif isinstance(error, EngineDeadError):
        set_retry_after(response, health.retry_after)
    elif not _may_be_repeated(error):
        response.headers["X-Should-Retry"] = "false"
    return response


def _may_be_repeated(error: Exception) -> bool:
    """openai's clients repeat what failed with 408, 409, 429 or 5xx, unless they are told not to. Whose time is
    over does not want the same wait again, and who aborts a request by its id does not want it back."""
    if isinstance(error, RequestAborted):
        return error.engine is not None
    return not isinstance(error, DeadlineExceeded)


def set_retry_after(response: Response, seconds: float | None) -> None:
    """The header takes whole seconds, and 0 would ask for a busy loop. None: nobody knows."""
    if seconds is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))


def one_error(error: BaseException, where: str) -> Exception:
    """The one error to answer, of what left the handler of ``where`` (method and path).

    Which one of a group: by the rule of ``runtime/unwrap.py``. A bug, and a group of several errors, is logged
    here, in one entry. Raises the group if there is nothing but cancels in it, and whatever is no ``Exception``.
    """
    errors = errors_in(error)
    if not errors:
        raise error
    winner = winner_of(errors)
    if not isinstance(winner, Exception):
        raise winner
    if len(errors) > 1:
        _log.error("%s failed in %d ways at once", where, len(errors), exc_info=error)
    elif not is_expected(winner) and not isinstance(winner, HTTPException):
        _log.error("%s failed", where, exc_info=winner)
    return winner
