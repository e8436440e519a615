"""``trioleg bench``: a module for each command; ``group`` has what they share."""

from __future__ import annotations

from . import churn, endings, engine, hops, leg, load, stalled  # noqa: F401 - each adds its command
from .group import bench

__all__ = ["bench"]
