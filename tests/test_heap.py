"""``settle_heap``: what is there is not looked at again, and full collections are rare."""

from __future__ import annotations

import gc

from trioleg.heap import settle_heap


def test_what_was_loaded_is_not_looked_at_again() -> None:
    thresholds = gc.get_threshold()
    looked_at = len(gc.get_objects())
    try:
        settle_heap()
        assert gc.get_freeze_count() > looked_at / 2
        assert len(gc.get_objects()) < looked_at / 10
        assert gc.get_threshold() == (*thresholds[:2], 100)
        # What comes later is.
        later: list[object] = []
        later.append(later)
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
