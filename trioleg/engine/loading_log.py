"""What a person who waits for a model reads: now and then a line, how far its loading is.

Rules of this file: no torch, no trio. A line a second at most, and none for a model that is there sooner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["LoadingLog"]

logger = logging.getLogger(__name__)

_EVERY_S = 1.0


class LoadingLog:
    """``load_weights``'s ``report``. ``model``: its name in the lines; ``clock``: seconds, monotonic."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._began = self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == total and self._said > self._began:
            logger.info("loaded %s in %.0f s", self._model, now - self._began)
        elif now - self._said >= _EVERY_S:
            self._said = now
            logger.info(
                "loading %s: %d %% of %.1f GB", self._model, 100 * done // total, total / 1e9
            )
