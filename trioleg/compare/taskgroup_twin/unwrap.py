"""``reraise``: an error of a group, as it was before the group wrapped it."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["reraise"]


def reraise(error: BaseException) -> NoReturn:
    """For the ``except`` block of the group, to which Python would chain it: its own context is kept."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
